"""Examples to batches: few static shapes that pad little, in an order that depends on (seed, epoch) alone.

A batch is a pure function of its step, so a run that stops resumes from the step number and nothing else, on any number
of hosts and workers: each host makes its rows of the batch that all share.
"""

import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np
from absl import flags

from tfm_jax.config import Data, require
from tfm_jax.data.examples import Examples, encode
from tfm_jax.data.plans import BucketPlan, Members, PackPlan
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import Example
from tfm_jax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


class Batches:
    """Batches by step: `batches[step]` is a dict of arrays, `B T` for the target and `B S` for the source.

    tokens, targets, segment_ids (B T) are int32, weights (B T) float32; two-sided examples add source_tokens and
    source_segment_ids (B S), labelled ones labels (B) and token_types (B T). Weights are 1 where a target is to be
    predicted and else 0. Segment ids are 0 on padding and else 1, or where rows hold several examples (with
    `row_length`, and texts cut in two) 1, 2, ... for each of them; then positions and source_positions are there as
    well and count from 0 in each. Rows beyond the examples of a batch are all padding.

    Every example occurs once an epoch. With `shuffle` epochs follow each other without end, in orders drawn from
    (seed, epoch); without, there is one epoch in a fixed order, after which `batches[step]` raises `IndexError`.

    Without `row_length` rows of similar length share a batch (`BucketPlan`); with it rows of so many tokens are filled
    with examples (`PackPlan`). Rows times the longer length is at most `tokens_per_batch`; rows is a multiple of
    `rows_multiple`, which the number of devices that share a batch must divide, and lengths are multiples of
    `lengths_multiple`. Raises `ValueError` if no row fits.

    `shapes`: those in use. `padding_share`: the share of an epoch's cells, all sides, that hold padding.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        tokens_per_batch: int,
        num_buckets: int = 1,
        row_length: int | None = None,
        rows_multiple: int = 1,
        max_rows: int | None = None,
        lengths_multiple: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        require(len(examples) > 0, "there are no examples to make batches of: give at least one")
        require(examples.labels is None or row_length is None, "a label is that of a row: leave row_length out")
        self.examples, self._seed, self._shuffle = examples, seed, shuffle
        settings = {
            "budget": tokens_per_batch,
            "multiple": rows_multiple,
            "length_multiple": lengths_multiple,
            "most": max_rows,
        }
        self._units, lengths = examples.units or (None, examples.lengths)
        if row_length is None:
            self._plan = BucketPlan(lengths, num_buckets=num_buckets, **settings)
        else:
            self._plan = PackPlan(lengths, row_length=row_length, **settings)
        self._packed, self._orders = row_length is not None or self._units is not None, {}
        self.shapes = self._plan.shapes
        self.steps_per_epoch = self._plan.num_batches
        self._num_tokens = examples.num_tokens
        self.padding_share = 1.0 - int(self._num_tokens.sum()) / self._plan.cells

    @property
    def end(self) -> int | None:
        """The number of steps there are: those of one epoch without shuffling, None (endless) with it."""
        return None if self._shuffle else self.steps_per_epoch

    def __getitem__(self, step: int) -> Batch:
        return self.part(step, 0, 1)

    def part(self, step: int, host: int, hosts: int) -> Batch:
        """The rows of a batch that belong to one of `hosts` hosts, counted from 0; all of them in order are the batch.

        Raises `IndexError` beyond the end and `ValueError` where hosts do not divide the rows.
        """
        members = self.members(step)
        rows, rest = divmod(members.shape.rows, hosts)
        require(rest == 0, f"{hosts} hosts cannot share {members.shape.rows} rows: data.rows_multiple must allow it")
        return self._filled(members.rows(host * rows, (host + 1) * rows), step // self.steps_per_epoch)

    def members(self, step: int) -> Members:
        """Which examples a batch holds, row by row."""
        if step < 0 or (self.end is not None and step >= self.end):
            raise IndexError(f"step {step} is outside the {self.end or 'endless'} steps from 0 up")
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._orders.get(epoch)
        if order is None:
            permute = np.random.default_rng([self._seed, epoch]).permutation if self._shuffle else np.asarray
            order = self._plan.order(permute)
            if self._units is not None:
                order = [members.of_units(self._units) for members in order]
            # readers run ahead over the end of an epoch by a few steps: two are in use at most
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return order[index]

    def num_tokens(self, step: int) -> int:
        """Tokens of a batch on all sides, without padding."""
        return int(self._num_tokens[self.members(step).examples].sum())

    def __getstate__(self):
        return self.__dict__ | {"_orders": {}}

    def _filled(self, members: Members, epoch: int) -> Batch:
        made = [self.examples.make(i, seed=self._seed, epoch=epoch) for i in members.examples.tolist()]
        *source_length, length = members.shape.lengths
        row = np.repeat(np.arange(members.shape.rows), members.counts)
        number = np.arange(len(row)) - (members.counts.cumsum() - members.counts)[row]
        batch = {}
        if source_length:
            cells = _Cells([example.source for example in made], row, number, (members.shape.rows, *source_length))
            batch = {f"source_{name}": values for name, values in self._side(cells, "source", made).items()}
        cells = _Cells([example.tokens for example in made], row, number, (members.shape.rows, length))
        batch |= self._side(cells, "tokens", made)
        batch["targets"] = cells.filled([example.targets for example in made], self.examples.task.special.pad)
        weights = [np.ones(len(e.targets), bool) if e.predicted is None else e.predicted for e in made]
        batch["weights"] = cells.filled(weights, 0).astype(np.float32)
        if self.examples.labels is not None:
            labels = np.zeros(members.shape.rows, self.examples.labels.dtype)
            labels[row] = self.examples.labels[members.examples]
            live = np.arange(members.shape.rows) < len(row)
            types = cells.filled([example.token_types for example in made], 0)
            batch |= {"labels": labels, "label_weights": live.astype(np.float32), "token_types": types}
        return batch

    def _side(self, cells: "_Cells", name: str, made: list[Example]) -> Batch:
        tokens = cells.filled([getattr(example, name) for example in made], self.examples.task.special.pad)
        batch = {"tokens": tokens, "segment_ids": cells.segment_ids}
        return batch | {"positions": cells.positions} if self._packed else batch


class _Cells:
    """Where sequences stand in an array of rows: each in its row, after those with a lower number there."""

    def __init__(self, sequences: list[np.ndarray], row: np.ndarray, number: np.ndarray, shape: tuple[int, int]):
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        ends = lengths.cumsum()
        begins = ends - lengths
        first = begins[np.arange(len(row)) - number] if len(row) else begins
        within = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
        self._place = np.repeat(row * shape[1] + begins - first, lengths) + within
        self._shape, self._within, self._segments = shape, within, np.repeat(number + 1, lengths)

    def filled(self, sequences: list[np.ndarray], padding: int) -> np.ndarray:
        """The sequences in their places as int32, `padding` elsewhere."""
        values = np.full(self._shape, padding, np.int32)
        values.reshape(-1)[self._place] = np.concatenate(sequences) if sequences else []
        return values

    @property
    def segment_ids(self) -> np.ndarray:
        return self.filled([self._segments], 0)

    @property
    def positions(self) -> np.ndarray:
        return self.filled([self._within], 0)


def make_tokenizer(data: Data, text: Text, *, vocab_size: int) -> Tokenizer:
    """The vocabulary that the configuration names: one that exists, or one learned from all columns of the text.

    Raises `ValueError` where it has more than `vocab_size` entries.
    """
    name = data.corruption.name
    special = {"mask": name == "mask", "sentinels": data.corruption.sentinels if name == "spans" else 0}
    lines, path = itertools.chain(*text.columns), Path(data.dir) / data.tokenizer_file
    if not data.tokenizer_file:
        kind = data.tokenizer
        return Tokenizer.train(lines, kind=kind, vocab_size=vocab_size, merges=data.merges, **special)
    if data.tokenizer == "word_bpe":
        return Tokenizer.from_codes(path, lines, vocab_size=vocab_size, **special)
    tokenizer = Tokenizer.load(path)
    require(
        tokenizer.vocab_size <= vocab_size,
        f"{path} has {tokenizer.vocab_size} entries, model.vocab_size is {vocab_size}: raise it to at least that",
    )
    return tokenizer


def make_batches(data: Data, text: Text, tokenizer: Tokenizer, *, vocab_size: int, evaluation: bool = False) -> Batches:
    """The batches of a split as the configuration says; for evaluation one epoch in a fixed order.

    Raises `ValueError` as `encode` and `Batches` do.
    """
    return Batches(
        encode(text, tokenizer, data, vocab_size=vocab_size),
        tokens_per_batch=data.tokens_per_batch,
        # a validation shape costs a compilation too and is used once a round: fewer shapes there
        num_buckets=min(data.num_buckets, 4) if evaluation else data.num_buckets,
        row_length=data.max_length if data.batching == "packed" else None,
        rows_multiple=data.rows_multiple,
        max_rows=data.max_rows,
        lengths_multiple=data.lengths_multiple,
        seed=data.seed,
        shuffle=not evaluation,
    )


def stream(
    batches: Batches, start: int, stop: int | None = None, *, workers: int = 0, host: int = 0, hosts: int = 1
) -> Iterator[tuple[int, Batch]]:
    """(step, this host's rows) for the steps from `start` to before `stop` (None: as long as there are any).

    They are made ahead by two threads, or by `workers` processes; a script that asks for processes must be importable
    (`if __name__ == "__main__":`). `start` is the only state: a stream begun there continues an earlier one, whatever
    the numbers of workers and hosts of either. Closing the generator ends threads and processes. An array that a
    process made holds an open file until it is freed, so let go of batches that are done with.
    """
    ends = [end for end in (stop, batches.end, 2**62) if end is not None]
    steps = grain.MapDataset.range(start, max(start, min(ends)))
    steps = steps.map(lambda step: (step, batches.part(step, host, hosts)))
    # Grain's own defaults (16 threads, 500 batches ahead) are half as fast, worker processes six times slower.
    ahead = steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads its settings from there when it starts processes
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        ahead = ahead.mp_prefetch(options, worker_init_fn=functools.partial(_ends_with, os.getpid()))
    iterator = iter(ahead)
    try:
        yield from iterator
    finally:
        iterator.close()


def _ends_with(parent: int, worker: int, workers: int) -> None:
    """A worker whose parent was killed would wait for ever."""

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
