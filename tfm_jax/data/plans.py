"""Which examples share a batch: buckets of similar length, or rows that several examples fill.

A plan is made once from the lengths. An epoch draws which examples of equal length take which place, so every epoch has
as many batches of each shape and as much padding as every other, and nothing of it depends on who asks.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from tfm_jax.data.tasks import Ragged

# Shapes are chosen exactly among this many lengths a side; time and memory of the search grow with its fourth power.
_CANDIDATE_LENGTHS = 40

Permute = Callable[[Int[np.ndarray, " _"]], Int[np.ndarray, " _"]]


class Shape(NamedTuple):
    """Rows of a batch, and the padded length of each of its sides: (source, target) or one."""

    rows: int
    lengths: tuple[int, ...]

    @property
    def cells(self) -> int:
        return self.rows * sum(self.lengths)


class Members(NamedTuple):
    """What a batch holds: `examples` row after row, of which each row has the next `counts[row]`."""

    shape: Shape
    examples: Int[np.ndarray, " _"]
    counts: Int[np.ndarray, " _"]

    def rows(self, start: int, stop: int) -> "Members":
        """The rows from `start` to before `stop`; rows beyond those that hold examples are empty."""
        ends = np.concatenate([[0], self.counts.cumsum()])
        first, last = (min(row, len(self.counts)) for row in (start, stop))
        counts = np.zeros(stop - start, np.int64)
        counts[: last - first] = self.counts[first:last]
        return Members(Shape(stop - start, self.shape.lengths), self.examples[ends[first] : ends[last]], counts)

    def of_units(self, units: Ragged) -> "Members":
        """The examples that these units of examples are made of."""
        sizes, row = units.lengths[self.examples], np.repeat(np.arange(len(self.counts)), self.counts)
        counts = np.zeros_like(self.counts)
        np.add.at(counts, row, sizes)
        return Members(self.shape, np.concatenate([units[i] for i in self.examples.tolist()]), counts)


class BucketPlan:
    """One example (or unit of examples) a row; similar lengths share a batch, in at most `num_buckets` shapes.

    The shapes are those that pad least. Rows times the longer length is at most `budget` (tokens), rows a multiple of
    `multiple` and at most `most`, lengths multiples of `length_multiple`. Raises `ValueError` if no row of the longest
    examples fits.
    """

    def __init__(
        self,
        lengths: Int[np.ndarray, "n sides"],
        *,
        budget: int,
        num_buckets: int,
        multiple: int,
        length_multiple: int = 1,
        most: int | None = None,
    ):
        lengths = -(-lengths // length_multiple) * length_multiple
        kinds, kind_of, counts = np.unique(lengths, axis=0, return_inverse=True, return_counts=True)
        enough = -(-len(lengths) // multiple) * multiple
        enough = enough if most is None else min(enough, most)
        rows_of = lambda longest: min(rows_within(budget, longest, multiple), enough)  # noqa: E731
        plans = [_Buckets(kinds, counts, sizes, rows_of) for sizes in _size_sets(kinds, counts, num_buckets)]
        # More shapes pad less inside batches but leave more tails: for little data, fewer shapes are better.
        self._best = min(plans, key=lambda plan: plan.cells)
        bucket_of = self._best.bucket_of[kind_of.reshape(-1)]
        self._members = [np.flatnonzero(bucket_of == bucket) for bucket in range(len(self._best.shapes))]
        self.shapes = [shape for shape, number in zip(self._best.shapes, self._best.batches, strict=True) if number]
        self.num_batches, self.cells = sum(self._best.batches), self._best.cells

    def order(self, permute: Permute) -> list[Members]:
        """The batches of an epoch."""
        batches, arriving = [], np.zeros(0, np.int64)
        for own, shape, carried in zip(self._members, self._best.shapes, self._best.carried, strict=True):
            members = permute(np.concatenate([arriving, own]))
            stay = len(members) - carried
            arriving = members[stay:]
            for start in range(0, stay, shape.rows):
                taken = members[start : min(start + shape.rows, stay)]
                batches.append(Members(shape, taken, np.ones(len(taken), np.int64)))
        return [batches[i] for i in permute(np.arange(len(batches)))]


class PackPlan:
    """Several examples a row, told apart by their segments.

    A row has `row_length` tokens on the side that has more of them, and on the other as many fewer as its examples
    have. Rows are filled from the longest example down, each into the fullest row that has room on every side (best
    fit decreasing, from the lengths alone as Krell et al. 2021). Raises `ValueError` if no row fits the budget, and if
    an example is longer than a row.
    """

    def __init__(
        self,
        lengths: Int[np.ndarray, "n sides"],
        *,
        budget: int,
        row_length: int,
        multiple: int,
        length_multiple: int = 1,
        most: int | None = None,
    ):
        if (longest := int(lengths.max())) > row_length:
            raise ValueError(
                f"row_length is {row_length}, the longest example has {longest} tokens: raise it to at least that"
            )
        totals = lengths.sum(axis=0)
        sides = np.maximum(-(-row_length * totals // totals.max()), lengths.max(axis=0))
        sides = -(-sides // length_multiple) * length_multiple
        row_of, number = _best_fit(lengths, sides)
        enough = -(-number // multiple) * multiple
        rows = min(rows_within(budget, int(sides.max()), multiple), enough if most is None else min(enough, most))
        shape = Shape(rows, tuple(sides.tolist()))
        self._lengths, self._places = lengths, np.argsort(row_of, kind="stable")
        self._row_ends = np.bincount(row_of, minlength=number).cumsum()
        self.shapes, self.num_batches = [shape], -(-number // rows)
        self.cells = self.num_batches * shape.cells

    def order(self, permute: Permute) -> list[Members]:
        """The batches of an epoch: examples of the same lengths change places, rows change batches."""
        # an example's place is that of one with the same lengths: both sorted by length, ties by chance
        by_length = lambda ids: ids[np.lexsort(self._lengths[ids].T)]  # noqa: E731
        taken = np.empty(len(self._places), np.int64)
        taken[by_length(np.arange(len(taken)))] = by_length(permute(np.arange(len(taken))))
        rows = np.split(taken[self._places], self._row_ends[:-1])
        (shape,), order = self.shapes, permute(np.arange(len(rows)))
        batches = [order[start : start + shape.rows] for start in range(0, len(order), shape.rows)]
        return [
            Members(shape, np.concatenate([rows[row] for row in batch]), np.array([len(rows[row]) for row in batch]))
            for batch in batches
        ]


def rows_within(budget: int, longest: int, multiple: int) -> int:
    """Rows of `longest` tokens in the budget, a multiple of `multiple`; `ValueError` if there are none."""
    rows = budget // longest // multiple * multiple
    if rows == 0:
        raise ValueError(
            f"tokens_per_batch is {budget}: {multiple} rows (rows_multiple) of the longest length, {longest}, "
            f"need {multiple * longest}; raise it to at least that or lower max_length or rows_multiple"
        )
    return rows


def _best_fit(
    lengths: Int[np.ndarray, "n sides"], sides: Int[np.ndarray, " sides"]
) -> tuple[Int[np.ndarray, " n"], int]:
    """The row of each example, and the number of rows."""
    # by what a row has left on the last side and on the first (0 where there is one side): a stack of such rows, and
    # the bits of those first sides and last sides that have any
    stacks: dict[tuple[int, int], list[int]] = {}
    firsts, lasts = 0, dict.fromkeys(range(int(sides[0]) + 1), 0)
    row_of, number = np.empty(len(lengths), np.int64), 0
    for example in np.lexsort((lengths.sum(axis=1), lengths.max(axis=1)))[::-1].tolist():
        first, *other = lengths[example].tolist()
        last = other[0] if other else 0
        left = _least(firsts, first)
        while left is not None and (least := _least(lasts[left], last)) is None:
            left = _least(firsts, left + 1)
        if left is None:
            left, least, row, number = int(sides[0]), int(sides[-1]) if other else 0, number, number + 1
        else:
            stack = stacks[left, least]
            row = stack.pop()
            if not stack:
                lasts[left] ^= 1 << least
                firsts ^= 0 if lasts[left] else 1 << left
        row_of[example] = row
        left, least = left - first, least - last
        stacks.setdefault((left, least), []).append(row)
        firsts, lasts[left] = firsts | 1 << left, lasts[left] | 1 << least
    return row_of, number


def _least(bits: int, low: int) -> int | None:
    """The lowest bit that is set from `low` up."""
    bits >>= low
    return low + (bits & -bits).bit_length() - 1 if bits else None


class _Buckets:
    """What the numbers of examples by length decide: buckets, each larger on all sides than the one before, their rows
    and their batches.

    Leftovers of a bucket, less than a batch, join the next one if padding them further costs less than the empty rows
    beside them. How many do is the same in every epoch.
    """

    def __init__(
        self,
        kinds: Int[np.ndarray, "P sides"],
        counts: Int[np.ndarray, " P"],
        sizes: list[tuple[int, ...]],
        rows_of: Callable[[int], int],
    ):
        self.shapes = [Shape(rows_of(max(size)), size) for size in sizes]
        self.bucket_of = (kinds[:, None] > np.array(sizes)).any(axis=2).sum(axis=1)
        self.batches, self.carried, self.cells, arriving = [], [], 0, 0
        for bucket, (rows, size) in enumerate(self.shapes):
            waiting = arriving + int(counts[self.bucket_of == bucket].sum())
            left = waiting % rows
            further = sum(sizes[bucket + 1]) - sum(size) if bucket + 1 < len(sizes) else np.inf
            arriving = left if left * further < (rows - left) * sum(size) else 0
            self.carried.append(arriving)
            self.batches.append(-(-(waiting - arriving) // rows))
            self.cells += self.batches[-1] * self.shapes[bucket].cells


def _size_sets(
    kinds: Int[np.ndarray, "P sides"], counts: Int[np.ndarray, " P"], most: int
) -> Iterator[list[tuple[int, ...]]]:
    """For k = 1 to `most`: the chain of at most k nested sizes that holds all kinds of lengths and pads least.

    Lengths of translations go together, so a chain of nested (source, target) sizes pads less than a grid: on captions,
    12 sizes pad 9 % in a chain and 14 % with target lengths cut first and source lengths inside.
    """
    candidates = [_candidates(side, counts) for side in kinds.T]
    inside = np.zeros([len(lengths) for lengths in candidates], np.int64)
    np.add.at(inside, tuple(np.searchsorted(c, side) for c, side in zip(candidates, kinds.T, strict=True)), counts)
    for axis in range(inside.ndim):
        inside = inside.cumsum(axis=axis)
    size = np.stack(np.meshgrid(*candidates, indexing="ij"), axis=-1).reshape(-1, len(candidates))
    fits = (size[:, None] <= size).all(axis=2)
    for chain in _chains(inside.reshape(-1), size.sum(axis=1), fits, most):
        yield [tuple(size[node].tolist()) for node in chain]


def _candidates(side: Int[np.ndarray, " P"], counts: Int[np.ndarray, " P"]) -> Int[np.ndarray, " C"]:
    """The lengths that a size may have: all that occur, or if those are many, the ones that pad this side least."""
    lengths, position = np.unique(side, return_inverse=True)
    if len(lengths) <= _CANDIDATE_LENGTHS:
        return lengths
    inside = np.zeros_like(lengths)
    np.add.at(inside, position, counts)
    *_, best = _chains(inside.cumsum(), lengths, lengths[:, None] <= lengths, _CANDIDATE_LENGTHS)
    return lengths[best]


def _chains(
    inside: Int[np.ndarray, " A"], width: Int[np.ndarray, " A"], fits: Bool[np.ndarray, "A A"], most: int
) -> Iterator[list[int]]:
    """For k = 1 to `most`: the nodes of the cheapest chain of at most k nodes that ends at the last node.

    `inside[b]` examples fit node b and take `width[b]` each unless they fit the node before it; `fits[a, b]`: node a
    may come before b. Dynamic programming over the last node of the chain.
    """
    step = np.where(fits, (inside - inside[:, None]) * width, np.inf)
    best, before = (inside * width).astype(np.float64), []
    for _ in range(most):
        chain = [len(width) - 1]
        for last in reversed(before):
            chain.append(int(last[chain[-1]]))
        yield sorted(set(chain))
        options = best[:, None] + step
        before.append(options.argmin(axis=0))
        best = options.min(axis=0)
