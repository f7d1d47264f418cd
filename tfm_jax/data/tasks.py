"""What a model reads and predicts of an example's ids: pairs, the next token, or what a corruption hides.

An example is a pure function of (seed, epoch, its index), so it is the same whoever makes it, when and beside which
others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from tfm_jax.config import Corruption, require
from tfm_jax.data.corruption import corrupt_spans, mask_tokens, span_lengths, split_prefix
from tfm_jax.data.tokenizer import Tokenizer

Ids = Int32[np.ndarray, " _"]
Lengths = Int[np.ndarray, "n sides"]
Draw = Callable[[int], np.random.Generator]


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


class Task:
    """What is made of an example's ids. `texts` holds its texts, each with end-of-text, or pieces of a text without."""

    def __init__(self, special: Special, corruption: Corruption):
        self.special, self.corruption = special, corruption

    def of(self, texts: tuple[Ragged, ...]) -> "Task":
        """The task for these texts; `ValueError` unless the vocabulary has what they need."""
        return self

    def units(self, texts: tuple[Ragged, ...]) -> tuple[Ragged, Lengths] | None:
        """Indices of examples that stand in a row together, and the lengths of each such unit; None: each alone."""
        return None

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        """The length of each side of each example; the most there can be where it is drawn (`Prefix`)."""
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


class Pairs(Task):
    """Translation: the encoder reads the first text, the second is predicted."""

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        source, target = texts
        return Example(source, _shifted(before, target), target)


class NextToken(Task):
    """A language model: every token is predicted from those before it."""

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        return Example(None, _shifted(before, texts[0]), texts[0])


class Labelled(Task):
    """Texts to be classified, one or two in a sequence behind the start token; nothing is predicted of them."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        return 1 + super().lengths(texts).sum(axis=1, keepdims=True)

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        tokens = np.concatenate([np.array([before], np.int32), *texts])
        types = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
        types = np.concatenate([np.zeros(1, np.int32), types])
        return Example(None, tokens, np.full_like(tokens, self.special.pad), np.zeros(len(tokens), bool), types)


class Masked(Task):
    """Masked language model: start token, text; the tokens chosen are predicted where they stand (`mask_tokens`)."""

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        return 1 + super().lengths(texts)

    def longest_piece(self, max_length: int) -> int:
        return max_length - 1

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        settings, special = self.corruption, self.special
        tokens = np.concatenate([np.array([special.bos], np.int32), texts[0]])
        inputs, chosen = mask_tokens(
            tokens,
            draw(index),
            rate=settings.rate,
            masked=settings.masked,
            random=settings.random,
            mask_id=special.mask,
            special_ids=special.all,
            vocab_size=special.vocab_size,
        )
        return Example(None, inputs, np.where(chosen, tokens, np.int32(special.pad)), chosen)


class Spans(Task):
    """Span corruption: the encoder reads the text with runs hidden behind sentinels, the runs are predicted."""

    def of(self, texts: tuple[Ragged, ...]) -> "Spans":
        # a longer text never has fewer spans
        length, sentinels = int(self._bare(texts[0]).max()), len(self.special.sentinels)
        spans = span_lengths(length, rate=self.corruption.rate, mean_span=self.corruption.mean_span).spans
        require(
            spans <= sentinels,
            f"a text of {length} tokens needs {spans} sentinels, the vocabulary has {sentinels}: raise "
            "data.corruption.sentinels, or lower data.max_length",
        )
        return self

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        bare, place = np.unique(self._bare(texts[0]), return_inverse=True)
        table = np.array([self._sides(length) for length in bare.tolist()], np.int64).reshape(-1, 2)
        return table[place]

    def longest_piece(self, max_length: int) -> int:
        length = 1
        while max(self._sides(length + 1)) <= max_length:
            length += 1
        return length

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        settings, special = self.corruption, self.special
        source, targets = corrupt_spans(
            self._cut(texts[0]),
            draw(index),
            rate=settings.rate,
            mean_span=settings.mean_span,
            sentinels=special.sentinels,
            eos_id=special.eos,
        )
        return Example(source, _shifted(special.bos, targets), targets)

    def _sides(self, length: int) -> tuple[int, int]:
        found = span_lengths(length, rate=self.corruption.rate, mean_span=self.corruption.mean_span)
        return found.inputs, found.targets


class Prefix(Task):
    """Prefix language model: the encoder reads a text up to a place drawn anew each epoch, the rest is predicted.

    Either side may be long, so alone a text would leave half of its row empty. Texts of about the same length stand in
    a row by twos, and one has its prefix as long as the other's rest: together they always fill the row.
    """

    def of(self, texts: tuple[Ragged, ...]) -> "Prefix":
        task = Prefix(self.special, self.corruption)
        bare = task._lengths = self._bare(texts[0])
        by_length = np.argsort(bare, kind="stable")
        by_length = by_length[bare[by_length] >= 2]  # a shorter one has no place to cut
        task._twos = by_length[: len(by_length) // 2 * 2].reshape(-1, 2)
        task._drawn_by = np.arange(len(bare))
        task._drawn_by[task._twos[:, 1]] = task._twos[:, 0]
        return task

    def units(self, texts: tuple[Ragged, ...]) -> tuple[Ragged, Lengths]:
        alone = np.setdiff1d(np.arange(len(self._lengths)), self._twos)
        ids = np.concatenate([self._twos.reshape(-1), alone]).astype(np.int32)
        ends = np.concatenate([np.full(len(self._twos), 2), np.full(len(alone), 1)]).cumsum()
        # of two, the sources make up the longer text, the targets the shorter one, each with two ends
        shorter, longer = self._lengths[self._twos].T
        return Ragged(ids, ends), np.concatenate([np.stack([longer, shorter], axis=1) + 2, self.lengths(texts)[alone]])

    def lengths(self, texts: tuple[Ragged, ...]) -> Lengths:
        return np.repeat(self.num_tokens(texts)[:, None], 2, axis=1)

    def num_tokens(self, texts: tuple[Ragged, ...]) -> Int[np.ndarray, " n"]:
        return self._bare(texts[0]) + 2

    def longest_piece(self, max_length: int) -> int:
        return max_length - 2

    def make(self, index: int, texts: tuple[Ids, ...], before: int | np.int32, draw: Draw) -> Example:
        ids, end, first = self._cut(texts[0]), np.array([self.special.eos], np.int32), self._drawn_by[index]
        cut = split_prefix(int(self._lengths[first]), draw(int(first)))
        cut = cut if first == index else len(ids) - cut
        targets = np.concatenate([ids[cut:], end])
        return Example(np.concatenate([ids[:cut], end]), _shifted(self.special.bos, targets), targets)


def _shifted(before: int | np.int32, targets: Ids) -> Ids:
    tokens = np.empty_like(targets)
    tokens[:1], tokens[1:] = before, targets[:-1]
    return tokens
