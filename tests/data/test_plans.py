"""Plans of batches from lengths alone: few shapes within the budget, all examples once, rows that waste little."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.data import plans
from tfm_jax.data.plans import BucketPlan, Members, PackPlan, Shape

ONE = st.lists(st.tuples(st.integers(1, 13)), min_size=1, max_size=37)
TWO = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 13)), min_size=1, max_size=37)


def shuffled(seed):
    return np.random.default_rng(seed).permutation


def rows_of(plan, lengths, permute=np.asarray):
    """The lengths of the examples in each row of an epoch; empty rows are left out."""
    rows = []
    for batch in plan.order(permute):
        ends = np.cumsum(batch.counts)
        rows += [tuple(tuple(lengths[i]) for i in part) for part in np.split(batch.examples, ends[:-1])]
    return rows


def captions(number, seed=0):
    """Lengths as those of captions and their translations: log-normal, the sides correlated."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(2.65, 0.3, number))
    target = source * np.exp(rng.normal(0, 0.17, number))
    return np.maximum(2, np.stack([source, target], axis=1).astype(np.int64))


@given(
    lengths=st.one_of(ONE, TWO),
    budget=st.integers(39, 101),
    buckets=st.integers(1, 5),
    row_length=st.one_of(st.none(), st.integers(13, 17)),
    multiples=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    most=st.sampled_from([None, None, 2, 4]),
    seed=st.integers(0, 7),
)
def test_every_epoch_has_all_examples_in_the_same_shapes_within_the_budget(
    lengths, budget, buckets, row_length, multiples, most, seed
):
    """B53: by index, each example once an epoch; rows fit, are as many as devices need, and are as many every epoch."""
    multiple, step = multiples
    lengths, settings = (
        np.array(lengths),
        {"budget": budget, "multiple": multiple, "length_multiple": step, "most": most},
    )
    if row_length is None:
        plan = BucketPlan(lengths, num_buckets=buckets, **settings)
    else:
        plan = PackPlan(lengths, row_length=row_length, **settings)
    assert 1 <= len(plan.shapes) <= (buckets if row_length is None else 1)
    for rows, longest in plan.shapes:
        assert rows % multiple == 0 and rows * max(longest) <= budget and not np.any(np.mod(longest, step))
        assert most is None or rows <= most
        assert rows - multiple < len(lengths), "rows beyond all examples serve nothing"
    epochs = [plan.order(permute) for permute in (np.asarray, shuffled(seed), shuffled(seed + 1))]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(np.concatenate([batch.examples for batch in epoch])), range(len(lengths)))
        assert len(epoch) == plan.num_batches
        assert sum(batch.shape.rows * sum(batch.shape.lengths) for batch in epoch) == plan.cells
        assert Counter(batch.shape for batch in epoch) == Counter(batch.shape for batch in epochs[0])
        assert {batch.shape for batch in epoch} == set(plan.shapes)
        for batch in epoch:
            assert 1 <= len(batch.counts) <= batch.shape.rows and (batch.counts >= 1).all()
            assert len(batch.examples) == batch.counts.sum()
            for row in np.split(batch.examples, np.cumsum(batch.counts)[:-1]):
                assert (lengths[row].sum(axis=0) <= batch.shape.lengths).all()
                assert row_length is not None or len(row) == 1
    # whatever the order, the rows of an epoch hold the same lengths
    contents = [Counter(tuple(sorted(row)) for row in rows_of(plan, lengths, p)) for p in (np.asarray, shuffled(seed))]
    assert contents[0] == contents[1]


@given(counts=st.lists(st.integers(1, 4), max_size=7), spare=st.integers(0, 5), hosts=st.sampled_from([1, 2, 4]))
def test_parts_of_a_batch_are_its_rows_in_order(counts, spare, hosts):
    """Whatever the number of parts, together they are the batch: rows with examples first, then empty ones."""
    rows = (len(counts) + spare + hosts) // hosts * hosts
    counts = np.array(counts, np.int64)
    examples = np.arange(3, 3 + counts.sum())
    batch = Members(Shape(rows, (5, 7)), examples, counts)
    parts = [batch.rows(start, start + rows // hosts) for start in range(0, rows, rows // hosts)]
    assert all(part.shape == (rows // hosts, (5, 7)) and len(part.counts) == rows // hosts for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.examples for part in parts]), examples)
    together = np.concatenate([part.counts for part in parts])
    np.testing.assert_array_equal(together, np.pad(counts, (0, rows - len(counts))))
    assert all(part.counts.sum() == len(part.examples) for part in parts)


def best_fit_decreasing(lengths, sides):
    """The rows by looking at each open row for each example."""
    order = sorted(range(len(lengths)), key=lambda i: (max(lengths[i]), sum(lengths[i]), i), reverse=True)
    left, rows = [], []
    for own in (tuple(lengths[i]) for i in order):
        fits = [row for row, rest in enumerate(left) if all(a <= b for a, b in zip(own, rest, strict=True))]
        if not fits:
            left.append(tuple(sides))
            rows.append([])
            fits = [len(rows) - 1]
        row = min(fits, key=left.__getitem__)
        left[row] = tuple(b - a for a, b in zip(own, left[row], strict=True))
        rows[row].append(own)
    return Counter(tuple(sorted(row)) for row in rows)


@given(lengths=st.one_of(ONE, TWO), row_length=st.integers(13, 29))
def test_packing_is_best_fit_decreasing(lengths, row_length):
    """Rows are those of the definition; one side has `row_length`, the other as many fewer as it has tokens fewer."""
    plan = PackPlan(np.array(lengths), budget=10**4, row_length=row_length, multiple=1)
    (shape,), totals = plan.shapes, np.sum(lengths, axis=0).tolist()
    share = [-(-row_length * Fraction(total, max(totals)) // 1) for total in totals]
    assert shape.lengths == tuple(np.maximum(share, np.max(lengths, axis=0)).tolist())
    found = rows_of(plan, np.array(lengths))
    assert Counter(tuple(sorted(row)) for row in found) == best_fit_decreasing(lengths, shape.lengths)


def fewest_rows(lengths, row_length):
    """By trying every way to part the examples."""
    partings = [[]]
    for length in lengths:
        partings = [p[:i] + [p[i] + length] + p[i + 1 :] for p in partings for i in range(len(p))] + [
            [*p, length] for p in partings
        ]
    return min(len(parting) for parting in partings if max(parting) <= row_length)


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6), row_length=st.integers(7, 13))
def test_a_few_examples_are_packed_in_the_fewest_rows(lengths, row_length):
    """Against every way to part them. Best fit decreasing is exact up to 5 examples, and then at most one row more."""
    plan = PackPlan(np.array(lengths)[:, None], budget=10**4, row_length=row_length, multiple=1)
    needed = fewest_rows(lengths, row_length)
    assert needed <= len(rows_of(plan, np.array(lengths)[:, None])) <= needed + (len(lengths) > 5)


@given(
    cuts=st.lists(st.lists(st.integers(1, 30), max_size=5, unique=True), min_size=1, max_size=11),
    seed=st.integers(0, 7),
)
def test_full_rows_cut_up_are_packed_in_at_most_eleven_ninths_of_them(cuts, seed):
    """The fewest rows are known here, as these were cut from full ones; the bound is Johnson's (1973)."""
    pieces = [np.diff([0, *sorted(row), 31]) for row in cuts]
    lengths = shuffled(seed)(np.concatenate(pieces))[:, None]
    plan = PackPlan(lengths, budget=10**4, row_length=31, multiple=1)
    assert len(cuts) <= len(rows_of(plan, lengths)) <= -(-11 * len(cuts) // 9) + 1


def test_texts_are_packed_without_waste():
    """Lengths as those of paragraphs in rows of 512: almost nothing but the last batch's empty rows is lost."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(4.3, 0.9, 4001)), 2, 512).astype(np.int64)[:, None]
    plan = PackPlan(lengths, budget=4096, row_length=512, multiple=1)
    assert 1 - lengths.sum() / plan.cells < 0.02


def test_pairs_are_packed_with_sides_as_long_as_their_tokens_need():
    lengths = captions(4001) * [3, 2]
    plan = PackPlan(lengths, budget=4096, row_length=256, multiple=1)
    (shape,) = plan.shapes
    assert shape.lengths[0] == 256 and shape.lengths[1] == pytest.approx(256 * 2 / 3, rel=0.05)
    assert 1 - lengths.sum() / plan.cells < 0.08


def test_epochs_give_equal_lengths_new_company():
    """B48: examples of the same lengths change rows, rows change batches; the lengths of the rows stay."""
    lengths = np.array([[3]] * 11 + [[5]] * 7 + [[2]] * 5)
    plan = PackPlan(lengths, budget=34, row_length=17, multiple=1)
    together = [
        {tuple(sorted(row)) for b in plan.order(shuffled(s)) for row in np.split(b.examples, np.cumsum(b.counts)[:-1])}
        for s in range(3)
    ]
    assert not together[0] <= together[1] and not together[1] <= together[2]


def test_padding_of_captions_is_little():
    """More shapes pad less, and twelve pad at most a tenth, ragged tails included."""
    lengths = captions(20011)
    shares = [
        1 - lengths.sum() / BucketPlan(lengths, budget=2048, num_buckets=k, multiple=1).cells for k in (1, 4, 8, 16)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5 and shares[2] < 0.16 and shares[3] < 0.12


def test_tails_of_little_data_are_few():
    """More shapes than the data fills would leave mostly empty rows: fewer are used."""
    lengths = captions(97)
    plan = BucketPlan(lengths, budget=1024, num_buckets=16, multiple=1)
    assert plan.num_batches <= 4 and 1 - lengths.sum() / plan.cells < 0.45


def test_what_a_bucket_cannot_fill_joins_the_next():
    """Six of 4 and three of 5 tokens in 20: five and then four a batch, where each bucket for itself needs three."""
    plan = BucketPlan(np.array([[4]] * 6 + [[5]] * 3), budget=20, num_buckets=2, multiple=1)
    assert (plan.shapes, plan.num_batches, plan.cells) == ([(5, (4,)), (4, (5,))], 2, 40)
    joined = {b.examples.min() for seed in range(7) for b in plan.order(shuffled(seed)) if b.shape.rows == 4}
    assert len(joined) > 1, "which one is drawn anew"


@given(lengths=st.one_of(ONE, TWO))
def test_sizes_are_the_best_chain(lengths):
    """Dynamic programming against every chain of up to 3 nested sizes."""
    kinds, counts = np.unique(lengths, axis=0, return_counts=True)
    corner = tuple(kinds.max(axis=0).tolist())

    def cost(sizes):
        fitting = ((n, [sum(s) for s in sizes if (kind <= s).all()]) for kind, n in zip(kinds, counts, strict=True))
        return sum(n * min(widths) for n, widths in fitting)

    nodes = list(itertools.product(*(np.unique(side).tolist() for side in kinds.T)))
    for most, sizes in enumerate(plans._size_sets(kinds, counts, 3), start=1):
        assert len(sizes) <= most and sizes[-1] == corner
        assert all((np.array(one) <= other).all() for one, other in itertools.pairwise(sizes))
        if most < 3 or kinds.shape[1] == 1:
            best = min(cost([*inner, corner]) for inner in itertools.combinations_with_replacement(nodes, most - 1))
            assert cost(sizes) == best


def test_many_lengths(monkeypatch):
    """With more lengths than candidates, the longest is always one, and little is lost."""
    lengths = captions(2003)
    settings = {"budget": 512, "num_buckets": 5, "multiple": 1}
    cells = BucketPlan(lengths, **settings).cells
    monkeypatch.setattr(plans, "_CANDIDATE_LENGTHS", 13)
    fewer = BucketPlan(lengths, **settings)
    assert fewer.cells < 1.03 * cells
    assert sorted(itertools.chain(*(batch.examples for batch in fewer.order(shuffled(0))))) == list(range(2003))


@pytest.mark.parametrize(
    ("make", "settings"), [(BucketPlan, {"num_buckets": 2}), (PackPlan, {"row_length": 11})], ids=["buckets", "packed"]
)
def test_a_budget_without_a_row_is_refused_with_the_numbers(make, settings):
    """B53: rows that cannot be divided over the devices are refused."""
    with pytest.raises(ValueError, match=r"tokens_per_batch is 43: 4 rows .* the longest length, 11, need 44"):
        make(np.array([[5, 7], [11, 3]]), budget=43, multiple=4, **settings)
    assert make(np.array([[5, 7], [11, 3]]), budget=44, multiple=4, **settings).shapes[0].rows == 4
