"""Pairs to batches: everything once an epoch, in few shapes, in an order that the step alone decides."""

import itertools
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.data import batches as batches_module
from tfm_jax.data.batches import Batches, Examples, encode_pairs, stream
from tfm_jax.data.sources import ParallelText
from tfm_jax.data.tokenizer import Tokenizer

BOS, EOS = 1, 2
SIDES = {"source_tokens", "source_segment_ids"}
KEYS = SIDES | {"tokens", "targets", "weights", "segment_ids"}


def examples_of(lengths):
    """Pairs of the given (source, target) lengths, the end included; the ids of each pair tell it from the others."""
    source, target = [], []
    for number, (s, t) in enumerate(lengths):
        for side, length in ((source, s), (target, t)):
            side.append(np.array([*[10 + number] * (length - 1), EOS], np.int32))
    return Examples(source, target, 0)


def captions(number, seed=0):
    """Lengths as those of captions and their translations: log-normal, the sides correlated."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(2.65, 0.3, number))
    target = source * np.exp(rng.normal(0, 0.17, number))
    return [(max(2, int(s)), max(2, int(t))) for s, t in zip(source, target, strict=True)]


def pairs_in(batch):
    """The (source, target) sequences of a batch, as tuples, empty rows left out."""
    rows = range(len(batch["tokens"]))
    found = []
    for row in rows:
        live_source, live = batch["source_segment_ids"][row] == 1, batch["segment_ids"][row] == 1
        if live.any() or live_source.any():
            found.append((tuple(batch["source_tokens"][row, live_source]), tuple(batch["targets"][row, live])))
    return found


def epoch_of(batches, epoch=0):
    steps = batches.steps_per_epoch
    return [batches[step] for step in range(epoch * steps, (epoch + 1) * steps)]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


LENGTHS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 13)), min_size=1, max_size=37)


@given(
    lengths=LENGTHS,
    tokens=st.integers(39, 101),
    buckets=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 3]),
    shuffle=st.booleans(),
)
def test_invariants(lengths, tokens, buckets, multiple, shuffle):
    """I25, B36, B42, B53: each example once an epoch, shifted once, in few shapes within the budget."""
    examples = examples_of(lengths)
    batches = Batches(
        examples, tokens_per_batch=tokens, num_buckets=buckets, seed=3, rows_multiple=multiple, shuffle=shuffle
    )
    expected = Counter((tuple(s), tuple(t)) for s, t in zip(examples.source, examples.target, strict=True))
    shapes, cells = set(), 0
    for epoch in range(2 if shuffle else 1):
        seen = Counter()
        for batch in epoch_of(batches, epoch):
            assert batch.keys() == KEYS
            assert {key: array.dtype for key, array in batch.items()} == {
                key: np.float32 if key == "weights" else np.int32 for key in KEYS
            }
            rows, source_length, target_length = *batch["source_tokens"].shape, batch["tokens"].shape[1]
            for key, array in batch.items():
                assert array.shape == (rows, source_length if key in SIDES else target_length)
            shapes.add((rows, source_length, target_length))
            assert rows * max(source_length, target_length) <= tokens and rows % multiple == 0
            seen.update(pairs_in(batch))
            cells += rows * (source_length + target_length)

            live = batch["segment_ids"] == 1
            np.testing.assert_array_equal(batch["weights"], live)
            assert set(np.unique(batch["segment_ids"])) <= {0, 1}
            assert not batch["targets"][~live].any() and not batch["tokens"][~live].any()
            assert not batch["source_tokens"][batch["source_segment_ids"] == 0].any()
            assert (batch["tokens"][live[:, 0], 0] == BOS).all() and (batch["tokens"] == BOS).sum() == live[:, 0].sum()
            np.testing.assert_array_equal(batch["tokens"][:, 1:][live[:, 1:]], batch["targets"][:, :-1][live[:, 1:]])
            assert not (batch["tokens"] == EOS).any() and (batch["targets"] == EOS).sum() == live[:, 0].sum()
        assert seen == expected
    assert shapes == set(batches.shapes) and len(batches.shapes) <= buckets
    epochs = 2 if shuffle else 1
    assert batches.padding_share == pytest.approx(1 - epochs * np.sum(lengths) / cells)


def test_shift_right():
    """B36: one start token, the end only as a target, what lies under padding neither in inputs nor weighed."""
    examples = Examples([np.array([5, EOS], np.int32)] * 2, [np.array(t, np.int32) for t in ([7, 8, EOS], [EOS])], 0)
    batch = Batches(examples, tokens_per_batch=8, num_buckets=1, seed=0, shuffle=False)[0]
    np.testing.assert_array_equal(batch["targets"], [[7, 8, 2], [2, 0, 0]])
    np.testing.assert_array_equal(batch["tokens"], [[1, 7, 8], [1, 0, 0]])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 1], [1, 0, 0]])


def test_order_depends_on_seed_and_epoch():
    """B48: epochs differ, seeds differ, the same seed gives the same batches; an epoch has as many of each shape."""
    make = lambda seed: Batches(examples_of(captions(307)), tokens_per_batch=211, num_buckets=5, seed=seed)  # noqa: E731
    batches, again, other = make(5), make(5), make(6)
    epochs = [[pairs_in(batch) for batch in epoch_of(batches, epoch)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert sorted(map(sorted, epochs[0])) != sorted(map(sorted, epochs[1])), (
        "batches are new ones, not only their order"
    )
    assert [pairs_in(batch) for batch in epoch_of(other)] != epochs[0]
    for step in reversed(range(2 * batches.steps_per_epoch)):  # in any order of asking
        assert_equal(again[step], batches[step])
    shapes = [Counter(batch["tokens"].shape for batch in epoch_of(batches, epoch)) for epoch in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({batch["tokens"].shape for batch in epoch_of(batches)[:7]}) > 1, "shapes come mixed"


@pytest.mark.parametrize("start", [0, 1, 29, 31])
def test_stream_resumes_from_its_step(start):
    """B48: whatever step a stream starts from, it gives the batches that an uninterrupted one gives."""
    batches = Batches(examples_of(captions(199)), tokens_per_batch=211, num_buckets=3, seed=0)
    stop = 2 * batches.steps_per_epoch + 3
    streamed = list(stream(batches, start, stop))
    assert [step for step, _ in streamed] == list(range(start, stop))
    for step, batch in streamed:
        assert_equal(batch, batches[step])


def test_stream_ends():
    """An endless stream is closed by its reader and leaves no thread; one for evaluation ends with its epoch."""
    examples, settings = examples_of(captions(53)), dict(tokens_per_batch=97, num_buckets=2, seed=0)
    before = set(threading.enumerate())
    endless = stream(Batches(examples, **settings), 10**9)
    assert [step for step, _ in itertools.islice(endless, 3)] == [10**9, 10**9 + 1, 10**9 + 2]
    endless.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()
    once = Batches(examples, **settings, shuffle=False)
    assert len(list(stream(once, 0))) == len(list(stream(once, 0, 10**6))) == once.steps_per_epoch == len(list(once))
    assert list(stream(once, once.steps_per_epoch)) == list(stream(once, 3, 2)) == []


@pytest.mark.parametrize("step", [-1, 10**6])
def test_steps_that_do_not_exist(step):
    once = Batches(examples_of(captions(53)), tokens_per_batch=97, num_buckets=2, seed=0, shuffle=False)
    with pytest.raises(IndexError, match=f"step {step} is outside the {once.steps_per_epoch} steps"):
        once[step]
    with pytest.raises(IndexError, match="step -1 is outside the endless steps"):
        next(stream(Batches(examples_of([(3, 3)]), tokens_per_batch=97, num_buckets=2, seed=0), -1))


@pytest.mark.parametrize(("rows", "multiple"), [(1, 1), (3, 1), (4, 1), (4, 4), (10, 1), (64, 4)])
def test_ten_examples_count_as_ten(rows, multiple):
    """B53: sums over an evaluation are over 10 examples, whatever the batch; the rest are rows that weigh nothing."""
    examples = examples_of([(5, 7)] * 10)
    batches = Batches(examples, tokens_per_batch=7 * rows, num_buckets=3, seed=0, rows_multiple=multiple, shuffle=False)
    held = min(rows, -(-10 // multiple) * multiple)
    assert batches.shapes == [(held, 5, 7)] and batches.steps_per_epoch == -(-10 // held)
    assert sum(float(batch["weights"].sum()) for batch in batches) == 70.0
    assert sum(int((batch["weights"].sum(axis=1) > 0).sum()) for batch in batches) == 10
    assert sum(int(batch["targets"].astype(np.int64).sum()) for batch in batches) == sum(map(sum, examples.target))
    for batch in batches:
        empty = batch["segment_ids"].sum(axis=1) == 0
        assert not any(batch[key][empty].any() for key in KEYS)


def test_budget_too_small():
    """B53: rows that cannot be divided over the shards are refused with the numbers."""
    with pytest.raises(ValueError, match=r"tokens_per_batch is 43: 4 rows .* the longest length, 11, need 44"):
        Batches(examples_of([(5, 7), (11, 3)]), tokens_per_batch=43, num_buckets=2, seed=0, rows_multiple=4)
    with pytest.raises(ValueError, match="there are no examples"):
        Batches(Examples([], [], 0), tokens_per_batch=43, num_buckets=2, seed=0)


def test_padding_is_little():
    shares = [
        Batches(examples_of(captions(20011)), tokens_per_batch=2048, num_buckets=k, seed=0).padding_share
        for k in (1, 4, 8, 16)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5 and shares[2] < 0.16 and shares[3] < 0.12


def test_tails_of_little_data_are_few():
    """More shapes than the data fills would leave mostly empty rows: fewer are used."""
    batches = Batches(examples_of(captions(97)), tokens_per_batch=1024, num_buckets=16, seed=0)
    assert batches.steps_per_epoch <= 4 and batches.padding_share < 0.45


@given(lengths=LENGTHS)
def test_sizes_are_the_best_chain(lengths):
    """Dynamic programming against every chain of up to 3 nested sizes."""
    pairs, counts = np.unique(lengths, axis=0, return_counts=True)
    corner = tuple(pairs.max(axis=0).tolist())

    def cost(sizes):
        return sum(n * min(sum(size) for size in sizes if (pair <= size).all()) for pair, n in zip(pairs, counts))  # noqa: B905

    nodes = list(itertools.product(np.unique(pairs[:, 0]).tolist(), np.unique(pairs[:, 1]).tolist()))
    for most, sizes in enumerate(batches_module._size_sets(pairs, counts, 3), start=1):
        assert len(sizes) <= most and sizes[-1] == corner
        assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(sizes))
        if most < 3:
            best = min(cost([*inner, corner]) for inner in itertools.combinations_with_replacement(nodes, most - 1))
            assert cost(sizes) == best


def test_many_lengths(monkeypatch):
    """With more lengths than candidates, the longest is always one, and little is lost."""
    examples = examples_of(captions(2003))
    share = Batches(examples, tokens_per_batch=512, num_buckets=5, seed=0).padding_share
    monkeypatch.setattr(batches_module, "_CANDIDATE_LENGTHS", 13)
    fewer = Batches(examples, tokens_per_batch=512, num_buckets=5, seed=0)
    assert fewer.padding_share < share + 0.02
    assert len([pair for batch in epoch_of(fewer) for pair in pairs_in(batch)]) == 2003


class Spelled(Tokenizer):
    """A tokenizer whose lines are written as ids."""

    def __init__(self):
        super().__init__(Tokenizer.train(["a"], kind="word_bpe", vocab_size=11)._tokenizer)

    def encode(self, lines):
        return [[int(word) for word in line.split()] for line in lines]


TEXT = ParallelText(["5", "5 6 7", "", "6"], ["6", "8", "9 9", "4 4 4 4"], "a.en", "b.de")


def encoded(text=TEXT, **changes):
    return encode_pairs(text, Spelled(), **{"max_length": 5, "too_long": "error", "vocab_size": 10} | changes)


def test_pairs_are_encoded():
    """B42: an empty line is an example of the end alone."""
    examples = encoded()
    assert [x.tolist() for x in examples.source] == [[5, 2], [5, 6, 7, 2], [2], [6, 2]]
    assert [x.tolist() for x in examples.target] == [[6, 2], [8, 2], [9, 9, 2], [4, 4, 4, 4, 2]]
    assert {x.dtype for x in examples.source + examples.target} == {np.dtype(np.int32)}
    assert (examples.dropped, examples.pad_id, examples.bos_id) == (0, 0, 1)


def test_too_long_pairs():
    """B42: a long side is an error with its line, or takes its pair with it and is counted."""
    message = r"a\.en:2 has 4 tokens, b\.de:2 has 2, max_length is 3.*2 such pairs in all.*too_long to drop"
    with pytest.raises(ValueError, match=message):
        encoded(max_length=3)
    examples = encoded(max_length=3, too_long="drop")
    assert [x.tolist() for x in examples.source] == [[5, 2], [2]]
    assert [x.tolist() for x in examples.target] == [[6, 2], [9, 9, 2]]
    assert examples.dropped == 2
    with pytest.raises(ValueError, match=r"a\.en:4 has 2 tokens, b\.de:4 has 5, max_length is 4"):
        encoded(max_length=4)
    with pytest.raises(ValueError, match=r"no pair left of a\.en, b\.de: 4 of 4 too long"):
        encoded(max_length=1, too_long="drop")
    with pytest.raises(ValueError, match="no pair left"):
        encoded(ParallelText([], [], "a", "b"))


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        (TEXT, 9, r"b\.de:3: token id 9 is outside the model's vocabulary, 0 to 8"),
        (TEXT, 2, r"a\.en:1: token id 5 .* vocab(.*) must be at least that"),
        (ParallelText(["5", "4 5 100 -1"], ["5", "5"], "a", "b"), 10, "a:2: token id 100 is outside"),
        (ParallelText(["5"], ["-1 5"], "a", "b"), 10, "b:1: token id -1 is outside"),
        (ParallelText([""], [""], "a", "b"), 2, "a:1: token id 2 is outside"),
    ],
)
def test_ids_outside_the_vocabulary(text, vocab_size, message):
    """B17: ids that the model has no row for are refused on the host, with their line."""
    with pytest.raises(ValueError, match=message):
        encoded(text, vocab_size=vocab_size)


def test_text_to_batches_and_back():
    """B42: what a batch holds decodes to the lines."""
    lines = ["the cat sat", "", " two  spaces ", "</s> is text", "the last"]
    text = ParallelText(lines, lines[::-1], "a", "b")
    tokenizer = Tokenizer.train(lines, kind="bpe", vocab_size=271)
    examples = encode_pairs(text, tokenizer, max_length=61, too_long="error", vocab_size=tokenizer.vocab_size)
    batches = Batches(examples, tokens_per_batch=127, num_buckets=2, seed=0, shuffle=False)
    found = [(s, t) for batch in batches for s, t in pairs_in(batch)]
    decoded = zip(
        *(tokenizer.decode([[int(i) for i in ids] for ids in side]) for side in zip(*found, strict=True)), strict=True
    )
    assert Counter(decoded) == Counter(zip(lines, lines[::-1], strict=True))
