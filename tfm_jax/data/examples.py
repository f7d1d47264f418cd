"""From text to examples: ids in one array, and what a model reads and predicts of each.

An example is a pure function of (seed, epoch, its index), so it is the same whoever makes it, when and beside which
others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from tfm_jax.config import Corruption, Data, require
from tfm_jax.data.corruption import corrupt_spans, generator, mask_tokens, span_lengths, split_prefix
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer

_LINES_AT_ONCE = 10_000

Ids = Int32[np.ndarray, " _"]
Lengths = Int[np.ndarray, "n sides"]


@dataclass(frozen=True)
class Ragged:
    """Sequences of ids end to end: number i is ids[ends[i - 1] : ends[i]], the first begins at 0."""

    ids: Ids
    ends: Int[np.ndarray, " n"]

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, i: int) -> Ids:
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        return np.diff(self.ends, prepend=0)

    @classmethod
    def of(cls, sequences: list[Ids]) -> "Ragged":
        ends = np.array([len(sequence) for sequence in sequences], np.int64).cumsum()
        return cls(np.concatenate([np.zeros(0, np.int32), *sequences]), ends)


class Example(NamedTuple):
    """One example before it is padded: ids that the encoder reads (None for one side), ids that the model reads, ids
    that it is to predict, where (None: everywhere), and for two texts in one which is which (else None)."""

    source: Ids | None
    tokens: Ids
    targets: Ids
    predicted: Bool[np.ndarray, " _"] | None = None
    token_types: Ids | None = None


@dataclass(frozen=True)
class Special:
    """Ids that tasks put in, of the tokenizer that made the others."""

    pad: int
    bos: int
    eos: int
    mask: int | None
    sentinels: tuple[int, ...]
    all: frozenset[int]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Special":
        return cls(
            tokenizer.pad_id,
            tokenizer.bos_id,
            tokenizer.eos_id,
            tokenizer.mask_id,
            tokenizer.sentinel_ids,
            tokenizer.special_ids,
            tokenizer.vocab_size,
        )


class _Task:
    """What is made of an example's ids. `texts` holds its texts, each with end-of-text, or pieces of a text without."""

    def __init__(self, special: Special, corruption: Corruption):
        self.special, self.corruption = special, corruption

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        """The length of each side of each example; an upper bound where it is drawn (`Prefix`)."""
        return np.stack([text.lengths for text in texts], axis=1)

    def num_tokens(self, texts: tuple[Ragged, ...]) -> Int[np.ndarray, " n"]:
        """How many tokens each example has on all sides together."""
        return self.lengths(texts).sum(axis=1)

    def longest_piece(self, max_length: int) -> int:
        """The longest piece of a text of which no side is longer than max_length."""
        return max_length

    def _bare(self, text: Ragged) -> Int[np.ndarray, " n"]:
        """Lengths without end-of-text."""
        return text.lengths - (text.ids[text.ends - 1] == self.special.eos)

    def _cut(self, ids: Ids) -> Ids:
        return ids[:-1] if ids[-1] == self.special.eos else ids


class Pairs(_Task):
    """Translation: the encoder reads the first text, the second is predicted."""

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        source, target = texts
        return Example(source, _shifted(before, target), target)


class NextToken(_Task):
    """A language model: every token is predicted from those before it."""

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        return Example(None, _shifted(before, texts[0]), texts[0])


class Labelled(_Task):
    """Texts to be classified, one or two in a sequence behind the start token; nothing is predicted of them."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        return 1 + super().lengths(texts).sum(axis=1, keepdims=True)

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        tokens = np.concatenate([np.array([before], np.int32), *texts])
        types = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
        types = np.concatenate([np.zeros(1, np.int32), types])
        return Example(None, tokens, np.full_like(tokens, self.special.pad), np.zeros(len(tokens), bool), types)


class Masked(_Task):
    """Masked language model: start token, text; the tokens chosen are predicted where they stand (`mask_tokens`)."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        return 1 + super().lengths(texts)

    def longest_piece(self, max_length: int) -> int:
        return max_length - 1

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        settings, special = self.corruption, self.special
        tokens = np.concatenate([np.array([special.bos], np.int32), texts[0]])
        inputs, chosen = mask_tokens(
            tokens,
            rng,
            rate=settings.rate,
            masked=settings.masked,
            random=settings.random,
            mask_id=special.mask,
            special_ids=special.all,
            vocab_size=special.vocab_size,
        )
        return Example(None, inputs, np.where(chosen, tokens, np.int32(special.pad)), chosen)


class Spans(_Task):
    """Span corruption: the encoder reads the text with runs hidden behind sentinels, the runs are predicted."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        bare, place = np.unique(self._bare(texts[0]), return_inverse=True)
        table = np.array([self._sides(length) for length in bare.tolist()], np.int64).reshape(-1, 2)
        return table[place]

    def longest_piece(self, max_length: int) -> int:
        length = 1
        while max(self._sides(length + 1)) <= max_length:
            length += 1
        return length

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        settings, special = self.corruption, self.special
        source, targets = corrupt_spans(
            self._cut(texts[0]),
            rng,
            rate=settings.rate,
            mean_span=settings.mean_span,
            sentinels=special.sentinels,
            eos_id=special.eos,
        )
        return Example(source, _shifted(special.bos, targets), targets)

    def _sides(self, length: int) -> tuple[int, int]:
        found = span_lengths(length, rate=self.corruption.rate, mean_span=self.corruption.mean_span)
        if found.spans > len(self.special.sentinels):
            raise ValueError(
                f"a text of {length} tokens needs {found.spans} sentinels, the vocabulary has "
                f"{len(self.special.sentinels)}: raise data.corruption.sentinels, or lower data.max_length"
            )
        return found.inputs, found.targets


class Prefix(_Task):
    """Prefix language model: the encoder reads a text up to a place drawn anew each epoch, the rest is predicted."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        bare = self._bare(texts[0])
        # either side may get all tokens but one, and has an end
        return np.stack([np.where(bare < 2, bare + 1, bare), np.maximum(bare, 1)], axis=1)

    def num_tokens(self, texts: tuple[Ragged, ...]) -> Int[np.ndarray, " n"]:
        return self._bare(texts[0]) + 2

    def make(self, texts: tuple[Ids, ...], before: int, rng: np.random.Generator | None) -> Example:
        ids, end = self._cut(texts[0]), np.array([self.special.eos], np.int32)
        cut = split_prefix(len(ids), rng)
        targets = np.concatenate([ids[cut:], end])
        return Example(np.concatenate([ids[:cut], end]), _shifted(self.special.bos, targets), targets)


def _shifted(before: int, targets: Ids) -> Ids:
    tokens = np.empty_like(targets)
    tokens[:1], tokens[1:] = before, targets[:-1]
    return tokens


_TASKS = {"none": NextToken, "mask": Masked, "spans": Spans, "prefix": Prefix}


@dataclass(frozen=True)
class Examples:
    """The examples of a split: `dropped` were left out as too long, `cut` are pieces of texts that were too long."""

    task: _Task
    texts: tuple[Ragged, ...]
    """Each example's texts with end-of-text, or a piece of a text."""
    before: Ids
    """What stands before an example's first token: the start token, or for a piece the token before it."""
    labels: np.ndarray | None = None
    """The class (int32) or value (float32) of each, where there is one."""
    dropped: int = 0
    cut: int = 0

    def __len__(self):
        return len(self.before)

    @property
    def lengths(self) -> Lengths:
        """Of each side of each example, as it is batched; an upper bound where an epoch draws it."""
        return self.task.lengths(self.texts)

    @property
    def num_tokens(self) -> Int[np.ndarray, " n"]:
        """Tokens of each example on all sides, the same in every epoch."""
        return self.task.num_tokens(self.texts)

    def make(self, index: int, *, seed: int, epoch: int) -> Example:
        """One example in one epoch."""
        drawn = isinstance(self.task, Masked | Spans | Prefix)
        texts = tuple(text[index] for text in self.texts)
        return self.task.make(texts, int(self.before[index]), generator(seed, epoch, index) if drawn else None)


def encode(text: Text, tokenizer: Tokenizer, data: Data, *, vocab_size: int) -> Examples:
    """Encode a split, each text with end-of-text, and cut it as the configuration says.

    A side longer than data.max_length raises with its line under too_long = error, leaves the example out and counts it
    under drop, and is cut into pieces under split. Raises `ValueError` naming file:line for an id outside
    [0, vocab_size), for a tokenizer that lacks what the corruption needs, and if no example is left.
    """
    require(len(text) > 0, f"{', '.join(text.names)}: there is no text in it")
    task = _task(tokenizer, data, text)
    texts = tuple(Ragged.of(list(_encoded(text, c, tokenizer, vocab_size))) for c in range(len(text.columns)))
    before = np.full(len(text), tokenizer.bos_id, np.int32)
    if data.batching == "blocks":
        (stream,), size = texts, task.longest_piece(data.max_length)
        blocks = Ragged(stream.ids, np.append(np.arange(size, len(stream.ids), size), len(stream.ids)))
        before = np.append(before[:1], stream.ids[blocks.ends[:-1] - 1])
        return Examples(task, (blocks,), before)
    longest = task.lengths(texts).max(axis=1)
    if data.too_long == "split":
        return _split(task, texts[0], longest > data.max_length, data.max_length)
    kept = np.flatnonzero(longest <= data.max_length)
    dropped = len(text) - len(kept)
    if dropped and data.too_long == "error":
        i = int(np.flatnonzero(longest > data.max_length)[0])
        raise ValueError(
            " and ".join(f"{text.where(i, c)} has {len(side[i])} tokens" for c, side in enumerate(texts))
            + f", end-of-text included, max_length is {data.max_length} ({dropped} such examples in all): "
            "raise data.max_length, shorten the lines, or set data.too_long to drop (or to split, for a text)"
        )
    require(len(kept) > 0, f"no example left of {', '.join(text.names)}: {dropped} of {len(text)} too long")
    if dropped:
        texts = tuple(Ragged.of([side[i] for i in kept.tolist()]) for side in texts)
    return Examples(task, texts, before[kept], None if text.labels is None else text.labels[kept], dropped)


def _task(tokenizer: Tokenizer, data: Data, text: Text) -> _Task:
    special, name = Special.of(tokenizer), data.corruption.name
    if text.labels is not None:
        return Labelled(special, data.corruption)
    if len(text.columns) == 2:
        require(
            name == "none" and data.batching != "blocks" and data.too_long != "split",
            f"{' and '.join(text.names)} are pairs: corruption {name!r}, batching {data.batching!r} and too_long "
            f"{data.too_long!r} do not all fit them: none, buckets or packed, and error or drop do",
        )
        return Pairs(special, data.corruption)
    require(
        name != "mask" or special.mask is not None,
        "the tokenizer has no mask token, which data.corruption.name = mask needs: learn one, or name it when loading",
    )
    return _TASKS[name](special, data.corruption)


def _encoded(text: Text, column: int, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Ids]:
    lines, end = text.columns[column], tokenizer.eos_id
    for start in range(0, len(lines), _LINES_AT_ONCE):
        for i, ids in enumerate(tokenizer.encode(lines[start : start + _LINES_AT_ONCE]), start):
            sequence = np.array([*ids, end], np.int32)
            if sequence.min() < 0 or sequence.max() >= vocab_size:
                wrong = next(token for token in sequence.tolist() if not 0 <= token < vocab_size)
                raise ValueError(
                    f"{text.where(i, column)}: token id {wrong} is outside the model's vocabulary, 0 to "
                    f"{vocab_size - 1}: the tokenizer has {tokenizer.vocab_size} entries, model.vocab_size must be at "
                    "least that"
                )
            yield sequence


def _split(task: _Task, text: Ragged, long: Bool[np.ndarray, " n"], max_length: int) -> Examples:
    """Long texts cut into pieces that fit; a piece that begins inside a text is read after the token before it."""
    size, starts = task.longest_piece(max_length), np.append(0, text.ends[:-1])
    ends = [
        np.append(np.arange(start + size, end, size), end) if cut else np.array([end])
        for start, end, cut in zip(starts.tolist(), text.ends.tolist(), long.tolist(), strict=True)
    ]
    pieces = Ragged(text.ids, np.concatenate(ends))
    begins = np.append(0, pieces.ends[:-1])
    before = np.where(np.isin(begins, starts), np.int32(task.special.bos), text.ids[begins - 1])
    return Examples(task, (pieces,), before, cut=sum(len(each) for each in ends if len(each) > 1))
