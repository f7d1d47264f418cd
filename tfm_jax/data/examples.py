"""From text to examples: ids in one array, and what is too long left out or cut."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from tfm_jax.config import Data, require
from tfm_jax.data.corruption import generator
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import (
    Example,
    Ids,
    Labelled,
    Lengths,
    Masked,
    NextToken,
    Pairs,
    Prefix,
    Ragged,
    Spans,
    Special,
    Task,
)
from tfm_jax.data.tokenizer import Tokenizer

_LINES_AT_ONCE = 10_000
_TASKS = {"none": NextToken, "mask": Masked, "spans": Spans, "prefix": Prefix}


@dataclass(frozen=True)
class Examples:
    """The examples of a split: `dropped` were left out as too long, `cut` are pieces of texts that were too long."""

    task: Task
    texts: tuple[Ragged, ...]
    """Each example's texts with end-of-text, or a piece of a text."""
    before: Ids
    """What stands before an example's first token: the start token, or for a piece the token before it."""
    labels: np.ndarray | None = None
    """The class (int32) or value (float32) of each, where there is one."""
    dropped: int = 0
    cut: int = 0

    def __post_init__(self):
        # not before: what is dropped or cut needs nothing
        object.__setattr__(self, "task", self.task.of(self.texts))

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

    @property
    def units(self) -> tuple[Ragged, Lengths] | None:
        """Indices of examples that stand in a row together, and the lengths of each such unit; None: each alone."""
        return self.task.units(self.texts)

    def make(self, index: int, *, seed: int, epoch: int) -> Example:
        """One example in one epoch."""
        texts = tuple([text[index] for text in self.texts])
        return self.task.make(index, texts, self.before[index], functools.partial(generator, seed, epoch))


def encode(text: Text, tokenizer: Tokenizer, data: Data, *, vocab_size: int) -> Examples:
    """Encode a split, each text with end-of-text, and cut it as the configuration says.

    A side longer than data.max_length raises with its line under too_long = error, leaves the example out and counts it
    under drop, and is cut into pieces under split. Raises `ValueError` naming file:line for an id outside
    [0, vocab_size), for a tokenizer that lacks what the corruption needs, and if no example is left.
    """
    require(len(text) > 0, f"{', '.join(text.names)}: there is no text in it")
    task = _task(tokenizer, data, text)
    require(
        data.corruption.name not in ("mask", "spans") or tokenizer.vocab_size <= vocab_size,
        f"corruption puts in the tokenizer's {tokenizer.vocab_size} ids, model.vocab_size is {vocab_size}: raise it",
    )
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
            + f", end-of-text included, which takes a row of {longest[i]}, and max_length is {data.max_length} "
            f"({dropped} such in all): raise data.max_length, shorten the lines, or set data.too_long to drop (or to "
            "split, for a text)"
        )
    require(len(kept) > 0, f"no example left of {', '.join(text.names)}: {dropped} of {len(text)} too long")
    if dropped:
        texts = tuple(Ragged.of([side[i] for i in kept.tolist()]) for side in texts)
    return Examples(task, texts, before[kept], None if text.labels is None else text.labels[kept], dropped)


def _task(tokenizer: Tokenizer, data: Data, text: Text) -> Task:
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


def _split(task: Task, text: Ragged, long: Bool[np.ndarray, " n"], max_length: int) -> Examples:
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
