"""Examples to batches: everything once an epoch, in few shapes, in an order that the step alone decides."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import tiny
from tests.data.tiny import BOS, EOS, MASK, PAD, SENTINELS, VOCAB_SIZE, assert_equal, epoch_of, segments, text_in
from tfm_jax.config import Corruption, Data
from tfm_jax.data.batches import Batches, make_batches, make_tokenizer
from tfm_jax.data.examples import Examples
from tfm_jax.data.plans import Members, Shape
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import Labelled, Masked, NextToken, Pairs, Prefix, Ragged, Spans, Special
from tfm_jax.data.tokenizer import Tokenizer

KINDS = tiny.kinds()
SIDES = {"source_tokens", "source_segment_ids", "source_positions"}
LENGTHS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 13)), min_size=1, max_size=37)


def held(batches, epoch):
    """The texts in each batch of an epoch, as the segments of its rows hold them."""
    hidden = batches.examples.task.corruption.name
    return [[text_in(segment, hidden) for segment in segments(batch)] for batch in epoch_of(batches, epoch)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_example_once(kind):
    """B42, B48: counted by index, and by what stands in the batches; orders of epochs and seeds differ."""
    batches, epochs = KINDS[kind], []
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        index = [batches.members(step).examples.tolist() for step in steps]
        assert sorted(itertools.chain(*index)) == list(range(len(batches.examples)))
        assert Counter(itertools.chain(*held(batches, epoch))) == tiny.texts_of(batches.examples)
        epochs.append(index)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert {frozenset(part) for part in epochs[0]} != {frozenset(part) for part in epochs[1]}, "batches are new ones"
    other = tiny.kinds(seed=1)[kind]
    assert [other.members(step).examples.tolist() for step in range(other.steps_per_epoch)] != epochs[0]


def test_evaluation_gives_every_example_once_in_a_fixed_order():
    """B53: one epoch, after which there is nothing, in an order that depends on no seed."""
    other_seed = tiny.kinds(evaluation=True, seed=5)
    for kind, batches in tiny.kinds(evaluation=True).items():
        again = other_seed[kind]
        steps = batches.steps_per_epoch
        index = [batches.members(step).examples.tolist() for step in range(steps)]
        assert sorted(itertools.chain(*index)) == list(range(len(batches.examples))), kind
        assert index == [again.members(step).examples.tolist() for step in range(steps)]
        assert batches.end == len(list(batches)) == steps
        assert Counter(itertools.chain(*held(batches, 0))) == tiny.texts_of(batches.examples)
        if batches.examples.task.corruption.name == "none":
            for batch, same in zip(batches, again, strict=True):
                assert_equal(batch, same)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_batch_is(kind):
    """B36, B38, B40, I28: names, dtypes and shapes; segments 1, 2, ... without gaps; targets shifted once in each."""
    batches = KINDS[kind]
    hidden = batches.examples.task.corruption.name
    packed = "packed" in kind or "split" in kind or hidden == "prefix"  # texts cut in two share a row
    shapes, cells, live = set(), 0, 0
    for step, batch in enumerate(epoch_of(batches, 1), batches.steps_per_epoch):
        before = live
        sides = {"tokens", "segment_ids"} | ({"positions"} if packed else set())
        assert batch.keys() == (
            sides
            | {"targets", "weights"}
            | ({f"source_{name}" for name in sides} if hidden in ("spans", "prefix") or "pairs" in kind else set())
            | ({"labels", "label_weights", "token_types"} if kind in ("classes", "values") else set())
        )
        floats = {"weights", "label_weights"} | ({"labels"} if kind == "values" else set())
        assert {name: array.dtype for name, array in batch.items()} == {
            name: np.float32 if name in floats else np.int32 for name in batch
        }
        rows = len(batch["tokens"])
        lengths = tuple(batch[name].shape[1] for name in ("source_tokens", "tokens") if name in batch)
        for name, array in batch.items():
            length = lengths[0 if name in SIDES else -1]
            assert array.shape == ((rows,) if name in ("labels", "label_weights") else (rows, length)), name
        shapes.add((rows, lengths))
        assert rows * max(lengths) <= 107 and rows % 4 == 0
        cells += rows * sum(lengths)

        for side in ("", "source_")[: len(lengths)]:
            segment_ids = batch[f"{side}segment_ids"]
            live += np.count_nonzero(segment_ids)
            padding = segment_ids == 0
            for row in segment_ids:
                runs = [int(key) for key, _ in itertools.groupby(row)]
                found = [key for key in runs if key]
                assert found == list(range(1, 1 + len(found))) and runs in (found, [*found, 0])
                assert packed or len(found) <= 1
            for name in ("tokens", "positions", *(() if side else ("targets", "weights", "token_types"))):
                values = batch.get(f"{side}{name}", np.zeros(segment_ids.shape))
                assert not values[padding].any(), f"{side}{name} under padding"
        assert batches.num_tokens(step) == live - before
        if len(lengths) == 2:  # an example has a part of its row on both sides
            for key in range(1, 1 + batch["segment_ids"].max()):
                in_row = [(batch[f"{side}segment_ids"] == key).any(axis=1) for side in ("source_", "")]
                np.testing.assert_array_equal(*in_row)

        for segment in segments(batch):
            tokens, targets, weights = (segment[name] for name in ("tokens", "targets", "weights"))
            if kind in ("classes", "values"):
                assert not targets.any() and not weights.any() and tokens[0] == BOS
                assert segment["label_weights"] == 1
            elif hidden == "mask":
                assert not targets[weights == 0].any() and set(weights) <= {0, 1} and tokens[0] == BOS
                assert not np.isin(targets[weights > 0], [PAD, BOS, EOS, MASK, *SENTINELS]).any()
            else:
                assert (weights == 1).all()
                np.testing.assert_array_equal(tokens[1:], targets[:-1])
                assert (tokens[0] == BOS) or kind in ("none split", "none blocks")
            for name in {"positions", "source_positions"} & segment.keys():
                np.testing.assert_array_equal(segment[name], range(len(segment[name])))
        if "labels" in batch:
            assert batch["label_weights"].sum() == len(segments(batch))
            assert not batch["labels"][batch["label_weights"] == 0].any()
    assert shapes == set(batches.shapes) and len(shapes) <= (1 if "packed" in kind or "split" in kind else 3)
    assert batches.padding_share == pytest.approx(1 - live / cells)


@given(
    lengths=LENGTHS,
    budget=st.integers(39, 101),
    buckets=st.integers(1, 5),
    row_length=st.one_of(st.none(), st.integers(13, 17)),
    multiple=st.sampled_from([1, 2]),
    shuffle=st.booleans(),
)
def test_invariants(lengths, budget, buckets, row_length, multiple, shuffle):
    """I25, B36, B40, B42, B53: each pair once an epoch, together, shifted once, in few shapes within the budget."""
    examples = tiny.pairs(lengths)
    batches = Batches(
        examples,
        tokens_per_batch=budget,
        num_buckets=buckets,
        row_length=row_length,
        rows_multiple=multiple,
        seed=3,
        shuffle=shuffle,
    )
    cells = live = 0
    for epoch in range(2 if shuffle else 1):
        assert Counter(itertools.chain(*held(batches, epoch))) == tiny.texts_of(examples)
        for batch in epoch_of(batches, epoch):
            shape = len(batch["tokens"]), (batch["source_tokens"].shape[1], batch["tokens"].shape[1])
            assert shape in batches.shapes and shape[0] * max(shape[1]) <= budget and shape[0] % multiple == 0
            weights = batch["segment_ids"] > 0
            np.testing.assert_array_equal(batch["weights"], weights)
            starts = np.diff(batch["segment_ids"], prepend=0, axis=1) > 0
            assert (batch["tokens"][starts] == BOS).all() and (batch["tokens"] == BOS).sum() == starts.sum()
            assert (batch["targets"] == EOS).sum() == starts.sum() and not (batch["tokens"] == EOS).any()
            cells += shape[0] * sum(shape[1])
            live += weights.sum() + (batch["source_segment_ids"] > 0).sum()
    assert len(batches.shapes) <= (buckets if row_length is None else 1)
    assert batches.padding_share == pytest.approx(1 - live / cells)


def test_shift_right():
    """B36: one start token, the end only as a target, what lies under padding neither in inputs nor weighed."""
    target = Ragged.of([np.array(ids, np.int32) for ids in ([7, 8, EOS], [EOS])])
    source = Ragged.of([np.array([5, EOS], np.int32)] * 2)
    examples = Examples(Pairs(tiny.SPECIAL, Corruption()), (source, target), np.full(2, BOS, np.int32))
    batch = Batches(examples, tokens_per_batch=8, num_buckets=1, seed=0, shuffle=False)[0]
    np.testing.assert_array_equal(batch["targets"], [[7, 8, 2], [2, 0, 0]])
    np.testing.assert_array_equal(batch["tokens"], [[1, 7, 8], [1, 0, 0]])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 1], [1, 0, 0]])


def test_packed_documents_share_no_target():
    """B40: the last token of a document is predicted to be its end, its first from the start; padding is segment 0."""
    texts = Ragged.of([np.array([*ids, EOS], np.int32) for ids in ([11, 12, 13], [14, 15, 16, 17, 18])])
    examples = Examples(NextToken(tiny.SPECIAL, Corruption()), (texts,), np.full(2, BOS, np.int32))
    batch = Batches(examples, tokens_per_batch=13, row_length=13, seed=0, shuffle=False)[0]
    expected = {
        "tokens": [1, 11, 12, 13, 1, 14, 15, 16, 17, 18, 0, 0, 0],
        "targets": [11, 12, 13, 2, 14, 15, 16, 17, 18, 2, 0, 0, 0],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 0, 0],
        "weights": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    }
    assert {name: values.tolist() for name, values in batch.items()} == {n: [v] for n, v in expected.items()}


# Inputs and targets of seqio's test of EncDecFeatureConverter with packing, in rows of 8 and 7 tokens (google/seqio,
# preprocessors_test.py, commit 1637b089), and the rows that it makes. Padding and the start token are both 0.
SEQIO = [
    ([8, 7, 1], [4, 1]),
    ([2, 3, 4, 1], [5, 6, 1]),
    ([9, 2, 13, 4, 6], [14, 3, 9, 17]),
    ([31, 2], [1, 21, 6, 2]),
    ([111, 21, 131, 41, 26], [114, 56, 12]),
]
SEQIO_ROWS = {
    "source_tokens": [[8, 7, 1, 2, 3, 4, 1, 0], [9, 2, 13, 4, 6, 0, 0, 0], [31, 2, 111, 21, 131, 41, 26, 0]],
    "source_segment_ids": [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 2, 2, 0]],
    "source_positions": [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 0, 1, 2, 3, 4, 0]],
    "targets": [[4, 1, 5, 6, 1, 0, 0], [14, 3, 9, 17, 0, 0, 0], [1, 21, 6, 2, 114, 56, 12]],
    "tokens": [[0, 4, 0, 5, 6, 0, 0], [0, 14, 3, 9, 0, 0, 0], [0, 1, 21, 6, 0, 114, 56]],
    "weights": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
    "segment_ids": [[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2, 2]],
    "positions": [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2]],
}


def seqio(budget):
    special = Special(0, 0, 1, None, (), frozenset({0, 1}), 132)
    sides = tuple(Ragged.of([np.array(ids, np.int32) for ids in side]) for side in zip(*SEQIO, strict=True))
    examples = Examples(Pairs(special, Corruption()), sides, np.zeros(5, np.int32))
    return Batches(examples, tokens_per_batch=budget, row_length=8, seed=0, shuffle=False)


def test_rows_are_filled_as_seqio_fills_them():
    """B40: the same examples to a row give the same row, on both sides."""
    batches = seqio(24)
    assert batches.shapes == [(3, (8, 7))], "the sides are as seqio was told"
    batch = batches._filled(Members(Shape(3, (8, 7)), np.arange(5), np.array([2, 1, 2])), 0)
    assert {name: values.tolist() for name, values in batch.items()} == SEQIO_ROWS


def test_rows_of_our_own_choice_hold_what_seqio_packs():
    """The same pairs, in as few rows; which share one is decided by their lengths, not by their order."""
    (batch,) = seqio(24)
    assert sorted(text_in(s, "none") for s in segments(batch)) == sorted((tuple(s), tuple(t)) for s, t in SEQIO)
    assert (batch["segment_ids"].max(axis=1) > 0).sum() == 3


@pytest.mark.parametrize(
    ("task", "row_length"),
    [(Labelled, None), *itertools.product([Pairs, NextToken, Masked, Spans, Prefix], [None, 29])],
)
def test_special_ids_that_coincide_do_no_harm(task, row_length):
    """Padding, start and end as one id give the batches of three: the same segments, positions and weights."""
    hide = Corruption(rate=0.4, mean_span=1.5, masked=0.5, random=0.0)
    ordinary = [[], [5], [5, 6, 7, 8, 9], [11, 12, 13], list(range(20, 39))]

    def made(pad, bos, eos):
        special = Special(pad, bos, eos, MASK, SENTINELS, frozenset({pad, bos, eos, MASK, *SENTINELS}), VOCAB_SIZE)
        texts = (Ragged.of([np.array([*ids, eos], np.int32) for ids in ordinary]),) * (2 if task is Pairs else 1)
        labels = np.arange(5, dtype=np.int32) if task is Labelled else None
        examples = Examples(task(special, hide), texts, np.full(5, bos, np.int32), labels)
        return Batches(examples, tokens_per_batch=97, num_buckets=2, row_length=row_length, rows_multiple=2)

    distinct, same, high = made(PAD, BOS, EOS), made(0, 0, 0), made(89, 89, 89)
    assert distinct.padding_share == same.padding_share == high.padding_share
    for step in range(2 * distinct.steps_per_epoch):
        batch, one, other = distinct[step], same[step], high[step]
        ids = {"source_tokens", "tokens", "targets"} & batch.keys()
        assert_equal({n: x for n, x in batch.items() if n not in ids}, {n: x for n, x in one.items() if n not in ids})
        assert_equal({n: x for n, x in batch.items() if n not in ids}, {n: x for n, x in other.items() if n not in ids})
        for name in ids:
            special = np.isin(batch[name], [PAD, BOS, EOS])
            np.testing.assert_array_equal(np.where(special, 0, batch[name]), one[name])
            np.testing.assert_array_equal(np.where(special, 89, batch[name]), other[name])


def test_a_row_without_examples_is_all_padding():
    """B53: whatever the padding is, in a batch, in a host's part without any example, and on both sides."""
    special = Special(7, 1, 2, None, (), frozenset({7, 1, 2}), 23)
    sides = (Ragged.of([np.array([5, 5, 2], np.int32)] * 3), Ragged.of([np.array([6, 2], np.int32)] * 3))
    examples = Examples(Pairs(special, Corruption()), sides, np.ones(3, np.int32))
    for row_length in (None, 3):
        batches = Batches(examples, tokens_per_batch=24, row_length=row_length, rows_multiple=8)
        parts = [batches.part(0, host, 2) for host in range(2)]
        assert_equal(batches[0], {n: np.concatenate([part[n] for part in parts]) for n in batches[0]})
        for batch, empty in ((batches[0], slice(3, 8)), (parts[0], slice(3, 4)), (parts[1], slice(0, 4))):
            for name, values in batch.items():
                is_ids = name in ("source_tokens", "tokens", "targets")
                assert (values[empty] == (7 if is_ids else 0)).all() and len(values[empty]), name
    with pytest.raises(ValueError, match=r"3 hosts cannot share 8 rows: data\.rows_multiple must allow it"):
        batches.part(0, 0, 3)


def test_order_depends_on_seed_and_epoch():
    """B48: the same seed gives the same batches, asked in any order; an epoch has as many of each shape."""
    again = tiny.kinds()
    for kind, batches in KINDS.items():
        for step in reversed(range(2 * batches.steps_per_epoch + 1)):
            assert_equal(again[kind][step], batches[step])
        shapes = [Counter(batch["tokens"].shape for batch in epoch_of(batches, epoch)) for epoch in range(3)]
        assert shapes[0] == shapes[1] == shapes[2]
    batches = Batches(tiny.pairs([(n % 13 + 1, n % 7 + 1) for n in range(211)]), tokens_per_batch=59, num_buckets=5)
    shapes = [[batch["tokens"].shape for batch in epoch_of(batches, epoch)] for epoch in range(2)]
    assert shapes[0] != shapes[1], "shapes come mixed"


def test_what_is_hidden_is_drawn_anew_each_epoch():
    """I32: by (seed, epoch, example) alone: another batching hides the same of the same text."""

    def drawn(batches, epoch):
        found = {}
        for step, batch in enumerate(epoch_of(batches, epoch), epoch * batches.steps_per_epoch):
            for index, part in zip(batches.members(step).examples.tolist(), segments(batch), strict=True):
                sides = {"source_tokens", "tokens", "targets", "weights"} & part.keys()
                found[index] = {name: part[name].tolist() for name in sides}
        return found

    other_seed = tiny.kinds(seed=1)
    for hidden in ("mask", "spans", "prefix"):
        buckets, packed = (KINDS[f"{hidden} {batching}"] for batching in ("buckets", "packed"))
        first, second = (drawn(buckets, epoch) for epoch in range(2))
        assert (first, second) == (drawn(packed, 0), drawn(packed, 1))
        assert first != second and first != drawn(other_seed[f"{hidden} buckets"], 0) != second


@pytest.mark.parametrize("step", [-1, 10**6])
def test_steps_that_do_not_exist(step):
    once = Batches(tiny.pairs([(3, 5)] * 53), tokens_per_batch=97, num_buckets=2, seed=0, shuffle=False)
    with pytest.raises(IndexError, match=f"step {step} is outside the {once.steps_per_epoch} steps"):
        once[step]


def test_there_is_no_step_before_the_first():
    with pytest.raises(IndexError, match="step -1 is outside the endless steps"):
        Batches(tiny.pairs([(3, 3)]), tokens_per_batch=97, num_buckets=2, seed=0)[-1]


@pytest.mark.parametrize(("rows", "multiple"), [(1, 1), (3, 1), (4, 1), (4, 4), (10, 1), (64, 4)])
@pytest.mark.parametrize("row_length", [None, 7])
def test_ten_examples_count_as_ten(rows, multiple, row_length):
    """B53: sums over an evaluation are over 10 examples, whatever the batch; the rest are rows that weigh nothing."""
    examples = tiny.pairs([(5, 7)] * 10)
    batches = Batches(
        examples,
        tokens_per_batch=7 * rows,
        num_buckets=3,
        row_length=row_length,
        rows_multiple=multiple,
        shuffle=False,
    )
    held_rows = min(rows, -(-10 // multiple) * multiple)
    assert batches.shapes == [(held_rows, (5, 7))] and batches.steps_per_epoch == -(-10 // held_rows)
    assert sum(float(batch["weights"].sum()) for batch in batches) == 70.0
    assert sum(int((batch["weights"].sum(axis=1) > 0).sum()) for batch in batches) == 10
    assert sum(int(batch["targets"].sum()) for batch in batches) == int(examples.texts[1].ids.sum())


@pytest.mark.parametrize("row_length", [None, 13])
def test_what_cannot_be_batched_is_refused(row_length):
    """B53: rows that cannot be divided over the shards are refused with the numbers; so is no example at all."""
    settings = {"num_buckets": 2, "row_length": row_length, "rows_multiple": 4}
    longest = 13 if row_length else 11
    message = rf"tokens_per_batch is 43: 4 rows .* the longest length, {longest}, need {4 * longest}"
    with pytest.raises(ValueError, match=message):
        Batches(tiny.pairs([(5, 7), (11, 3)]), tokens_per_batch=43, **settings)
    none = Examples(Pairs(tiny.SPECIAL, Corruption()), (Ragged.of([]),) * 2, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="there are no examples"):
        Batches(none, tokens_per_batch=43, **settings)


def test_a_row_shorter_than_an_example_is_refused():
    """A row has the length that was asked for, or is refused."""
    with pytest.raises(ValueError, match="row"):
        Batches(tiny.pairs([(5, 7), (11, 3)]), tokens_per_batch=97, row_length=10)


def test_evaluation_has_fewer_shapes():
    data = Data(max_length=13, tokens_per_batch=59, num_buckets=7, rows_multiple=1)
    own = tiny.text(997)
    make = lambda **more: make_batches(data, own, tiny.Numbers(), vocab_size=VOCAB_SIZE, **more)  # noqa: E731
    assert 4 < len(make().shapes) <= 7 and len(make(evaluation=True).shapes) <= 4


@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_text_to_batches_and_back(batching):
    """B42: what a batch holds decodes to the lines."""
    lines = ["the cat sat", "", " two  spaces ", "</s> is text", "the last"]
    own = Text((lines, lines[::-1]), ("a", "b"))
    data = Data(tokenizer="bpe", max_length=61, tokens_per_batch=127, num_buckets=2, rows_multiple=1, batching=batching)
    tokenizer = make_tokenizer(data, own, vocab_size=271)
    assert isinstance(tokenizer, Tokenizer)
    batches = make_batches(data, own, tokenizer, vocab_size=271, evaluation=True)
    found = itertools.chain(*held(batches, 0))
    decoded = zip(*(tokenizer.decode([list(ids) for ids in side]) for side in zip(*found, strict=True)), strict=True)
    assert Counter(decoded) == Counter(zip(lines, lines[::-1], strict=True))
