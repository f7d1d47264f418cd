"""From text to examples: what is read and predicted, pieces that are the text again, and what is refused by name."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.tiny import BOS, EOS, MASK, PAD, SENTINELS, VOCAB_SIZE, Numbers, text, text_in
from tfm_jax.config import Corruption, Data
from tfm_jax.data.corruption import span_lengths
from tfm_jax.data.examples import encode
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import Labelled, Masked, NextToken, Pairs, Prefix, Ragged, Spans, Special

PAIRS = Text((["5", "5 6 7", "", "6"], ["6", "8", "9 9", "5 5 5 5"]), ("a.en", "b.de"))
LINES = Text((["5 6 7", "8", "", "9 10 11 12 13 14 15", "5"],), ("c.txt",), lines=[1, 3, 4, 7, 8])


def encoded(own=PAIRS, *, tokenizer=None, vocab_size=VOCAB_SIZE, hide="none", **settings):
    settings = {"max_length": 5, "rows_multiple": 1, "corruption": Corruption(hide, rate=0.4, mean_span=1.5)} | settings
    return encode(own, tokenizer or Numbers(), Data(**settings), vocab_size=vocab_size)


def lists(sequences):
    return [sequences[i].tolist() for i in range(len(sequences))]


def made(examples, *, epoch=0):
    """All examples of an epoch: dicts of lists, as a segment of a batch holds them."""
    names = {"source": "source_tokens", "tokens": "tokens", "targets": "targets"}
    found = []
    for i in range(len(examples)):
        example = examples.make(i, seed=0, epoch=epoch)
        arrays = {new: getattr(example, old) for old, new in names.items() if getattr(example, old) is not None}
        predicted = np.ones(len(example.targets), bool) if example.predicted is None else example.predicted
        found.append(arrays | {"weights": predicted.astype(np.float32)})
    return found


def test_pairs():
    """B36, B42: an empty line is an example of the end alone; targets are shifted once, behind one start token."""
    examples = encoded()
    assert lists(examples.texts[0]) == [[5, EOS], [5, 6, 7, EOS], [EOS], [6, EOS]]
    assert lists(examples.texts[1]) == [[6, EOS], [8, EOS], [9, 9, EOS], [5, 5, 5, 5, EOS]]
    np.testing.assert_array_equal(examples.lengths, [[2, 2], [4, 2], [1, 3], [2, 5]])
    assert examples.num_tokens.tolist() == [4, 6, 4, 7]
    assert (len(examples), examples.dropped, examples.cut) == (4, 0, 0)
    example = examples.make(3, seed=0, epoch=0)
    assert example.source.tolist() == [6, EOS] and example.targets.tolist() == [5, 5, 5, 5, EOS]
    assert example.tokens.tolist() == [BOS, 5, 5, 5, 5] and example.predicted is None


def test_a_text_of_one_side():
    examples = encoded(LINES, max_length=8)
    assert lists(examples.texts[0])[1:3] == [[8, EOS], [EOS]]
    example = examples.make(0, seed=0, epoch=0)
    assert (example.source, example.predicted, example.token_types) == (None, None, None)
    assert example.tokens.tolist() == [BOS, 5, 6, 7] and example.targets.tolist() == [5, 6, 7, EOS]


def test_labelled_texts():
    """One or two texts behind the start token, told apart by types; nothing is predicted, labels stay with them."""
    two = Text(PAIRS.columns, PAIRS.names, np.array([3, 1, 4, 1], np.int32))
    examples = encoded(two, max_length=8)
    example = examples.make(1, seed=0, epoch=0)
    assert example.tokens.tolist() == [BOS, 5, 6, 7, EOS, 8, EOS]
    assert example.token_types.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert not example.predicted.any() and example.source is None
    np.testing.assert_array_equal(examples.lengths, [[5], [7], [5], [8]])
    assert examples.labels.tolist() == [3, 1, 4, 1]
    short = encoded(two, max_length=5, too_long="drop")
    assert (short.labels.tolist(), short.dropped, len(short)) == ([3, 4], 2, 2)
    values = encoded(Text((["7"],), ("a",), np.array([0.5], np.float32)))
    assert values.labels.dtype == np.float32 and values.make(0, seed=0, epoch=0).token_types.tolist() == [0, 0, 0]


def test_too_long_is_an_error_with_the_line():
    """B42: lengths, the limit, how many there are and what to do are in it."""
    with pytest.raises(ValueError, match=r"a\.en:2 has 4 tokens and b\.de:2 has 2 tokens.*max_length is 3 \(2 such"):
        encoded(max_length=3)
    with pytest.raises(ValueError, match=r"a\.en:4 has 2 tokens and b\.de:4 has 5 tokens.*max_length is 4 \(1 such"):
        encoded(max_length=4)
    with pytest.raises(ValueError, match=r"c\.txt:7 has 8 tokens.*max_length is 7 \(1 such.*too_long to drop .*split"):
        encoded(LINES, max_length=7)


def test_what_a_task_adds_is_in_the_error():
    """A start token, and two texts in one sequence, count too: the length that is too long is named."""
    with pytest.raises(ValueError, match=r"a:1 .*\b6\b.*max_length is 5"):
        encoded(Text((["5 6 7 8"],), ("a",)), hide="mask")
    with pytest.raises(ValueError, match=r"a:1 .*\b7\b.*max_length is 5"):
        encoded(Text((["5 6"], ["7 8"]), ("a", "b"), np.zeros(1, np.int32)))


def test_too_long_takes_its_pair_with_it_and_is_counted():
    """B42"""
    examples = encoded(max_length=3, too_long="drop")
    assert lists(examples.texts[0]) == [[5, EOS], [EOS]] and lists(examples.texts[1]) == [[6, EOS], [9, 9, EOS]]
    assert (examples.dropped, len(examples), len(examples.before)) == (2, 2, 2)
    with pytest.raises(ValueError, match=r"no example left of d: 3 of 3 too long"):
        encoded(Text((["5 5", "6 6 6", "7 7"],), ("d",)), max_length=2, too_long="drop")


@pytest.mark.parametrize("hide", ["none", "mask", "spans", "prefix"])
@pytest.mark.parametrize("too_long", ["error", "drop", "split"])
@pytest.mark.parametrize("length", [2, 3, 5, 7, 11])
def test_a_text_that_just_fits_is_left_whole_and_one_longer_is_not(hide, too_long, length):
    """The longest text of which no side is over the limit is found by making examples of all lengths."""
    own = [" ".join(map(str, range(10, 10 + n))) for n in range(4 * length)]
    if hide == "prefix" and length < 4:
        with pytest.raises(ValueError, match=rf"data.max_length is {length}: .*prefix"):
            encoded(Text((own,), ("a",)), hide=hide, max_length=length)
        return
    whole = made(encoded(Text((own,), ("a",)), hide=hide, max_length=97))
    room = [max(len(x) for x in example.values()) for example in whole]
    # a row holds the parts of two texts that are cut in two: as many tokens as the longer has, and two ends
    room = [n + 2 for n in range(4 * length)] if hide == "prefix" else room
    longest = max(n for n, needed in enumerate(room) if needed <= length)
    assert sorted(room) == room
    fitting = encoded(Text(([own[longest]],), ("a",)), hide=hide, max_length=length, too_long=too_long)
    assert (len(fitting), fitting.dropped, fitting.cut) == (1, 0, 0)
    mixed = Text(([own[longest + 1], own[longest]],), ("a",))
    if too_long == "error":
        with pytest.raises(ValueError, match=rf"a:1 has {longest + 2} tokens"):
            encoded(mixed, hide=hide, max_length=length, too_long=too_long)
    else:
        examples = encoded(mixed, hide=hide, max_length=length, too_long=too_long)
        assert (examples.dropped, examples.cut) == ((1, 0) if too_long == "drop" else (0, len(examples) - 1))
        assert max(len(x) for example in made(examples) for x in example.values()) <= length


@pytest.mark.parametrize("hide", ["none", "mask", "spans", "prefix"])
@given(lengths=st.lists(st.integers(0, 23), min_size=1, max_size=7), max_length=st.sampled_from([3, 5, 7]))
def test_pieces_of_a_text_are_the_text(hide, lengths, max_length):
    """Pieces fit, and joined they are the texts with their ends; a piece is read after the token before it."""
    max_length += hide == "prefix"  # which refuses 3
    own = [list(range(10, 10 + n)) for n in lengths]
    examples = encoded(
        Text(([" ".join(map(str, ids)) for ids in own],), ("a",)), hide=hide, max_length=max_length, too_long="split"
    )
    pieces = lists(examples.texts[0])
    assert sum(pieces, []) == sum(([*ids, EOS] for ids in own), [])
    parts = [[]]  # of each text
    for piece in pieces:
        parts[-1].append(piece)
        if piece[-1] == EOS:
            parts.append([])
    assert examples.cut == sum(len(each) for each in parts if len(each) > 1) and examples.dropped == 0
    found, previous = made(examples), EOS
    for i, (piece, example) in enumerate(zip(pieces, found, strict=True)):
        assert max(len(array) for array in example.values()) <= max_length
        first = BOS if previous == EOS or hide != "none" else previous
        assert (examples.before[i] == first) or hide != "none"
        assert example["tokens"][0] == first
        again = [*text_in(example, hide)[0]]
        assert again == (piece[:-1] if piece[-1] == EOS and hide in ("spans", "prefix") else piece)
        previous = piece[-1]


@given(lengths=st.lists(st.integers(0, 23), min_size=1, max_size=7), max_length=st.sampled_from([2, 5, 7]))
def test_blocks_are_the_stream(lengths, max_length):
    """Joined, blocks are all texts with their ends; every token is predicted once, from the token before it."""
    own = [list(range(10, 10 + n)) for n in lengths]
    lines = Text(([" ".join(map(str, ids)) for ids in own],), ("a",))
    examples = encoded(lines, max_length=max_length, batching="blocks")
    stream = sum(([*ids, EOS] for ids in own), [])
    found = made(examples)
    assert np.concatenate([example["targets"] for example in found]).tolist() == stream
    assert np.concatenate([example["tokens"] for example in found]).tolist() == [BOS, *stream[:-1]]
    assert all(example["weights"].all() for example in found)
    assert {len(example["targets"]) for example in found[:-1]} <= {max_length}
    assert (examples.cut, examples.dropped, examples.num_tokens.sum()) == (0, 0, len(stream))


@pytest.mark.parametrize("hide", ["mask", "spans", "prefix"])
def test_blocks_of_a_stream_are_corrupted(hide):
    """Each block fits, holds several documents with their ends, and is whole again from what is read and predicted."""
    lines = text(23, longest=7)
    examples = encoded(lines, hide=hide, max_length=13, batching="blocks")
    blocks = lists(examples.texts[0])
    assert sum(blocks, []) == sum(([*ids, EOS] for ids in Numbers().encode(lines.source)), [])
    assert any(EOS in block[:-1] for block in blocks)
    for block, example in zip(blocks, made(examples), strict=True):
        assert max(len(array) for array in example.values()) <= 13
        again = [*text_in(example, hide)[0]]
        assert again == (block[:-1] if block[-1] == EOS and hide != "mask" else block)


@pytest.mark.parametrize(
    ("own", "vocab_size", "message"),
    [
        (PAIRS, 9, r"b\.de:3: token id 9 is outside the model's vocabulary, 0 to 8"),
        (PAIRS, 3, r"a\.en:1: token id 5 .* 97 entries, model\.vocab_size must be at least that"),
        (LINES, 15, r"c\.txt:7: token id 15 is outside the model's vocabulary, 0 to 14"),
        (Text((["5", "4 5 100 -1"], ["5", "5"]), ("a", "b")), 97, "a:2: token id 100 is outside"),
        (Text((["5"], ["-1 5"]), ("a", "b")), 97, "b:1: token id -1 is outside"),
        (Text(([""],), ("a",)), 2, "a:1: token id 2 is outside"),
    ],
)
@pytest.mark.parametrize("too_long", ["error", "drop"])
def test_ids_outside_the_vocabulary(own, vocab_size, message, too_long):
    """B17, B42: ids that the model has no row for are refused on the host, with their line."""
    with pytest.raises(ValueError, match=message):
        encoded(own, vocab_size=vocab_size, max_length=8, too_long=too_long)


@pytest.mark.parametrize("hide", ["mask", "spans"])
def test_ids_that_a_corruption_puts_in_are_inside_the_vocabulary(hide):
    """B17: mask, sentinels and random tokens are as much a part of a batch as those of the text."""
    with pytest.raises(ValueError, match=r"97 .*vocab_size"):
        encoded(Text((["5 6 7 8"],), ("a",)), hide=hide, vocab_size=74, max_length=7)


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="a, b: there is no text in it"):
        encoded(Text(([], []), ("a", "b")))


def test_what_the_tokenizer_lacks_is_refused():
    """Sentinels that run out are refused with the numbers, before any batch."""

    class Bare(Numbers):
        mask_id = None
        sentinel_ids = SENTINELS[:2]

    with pytest.raises(ValueError, match="no mask token, which data.corruption.name = mask needs"):
        encoded(LINES, tokenizer=Bare(), hide="mask", max_length=9)
    found = span_lengths(7, rate=0.4, mean_span=1.0)
    assert found.spans == 3
    with pytest.raises(ValueError, match=r"a text of 7 tokens needs 3 sentinels, the vocabulary has 2: raise data"):
        encoded(LINES, tokenizer=Bare(), max_length=9, corruption=Corruption("spans", rate=0.4, mean_span=1.0))


@pytest.mark.parametrize("too_long", ["drop", "split"])
def test_a_text_that_is_dropped_or_cut_needs_no_sentinels(too_long):
    """Sentinels are counted for what is left: the pieces, or the texts that are not dropped."""

    class Few(Numbers):
        sentinel_ids = SENTINELS[:2]

    hide = Corruption("spans", rate=0.4, mean_span=1.0)
    examples = encoded(LINES, tokenizer=Few(), max_length=6, corruption=hide, too_long=too_long)
    assert (examples.dropped, len(examples)) == ((1, 4) if too_long == "drop" else (0, 6))


@pytest.mark.parametrize("settings", [{"hide": "mask"}, {"hide": "spans"}, {"hide": "prefix"}])
@pytest.mark.parametrize("more", [{}, {"batching": "packed"}])
def test_pairs_are_not_corrupted(settings, more):
    with pytest.raises(ValueError, match=rf"a\.en and b\.de are pairs: corruption '{settings['hide']}'"):
        encoded(**settings, **more)


def test_pairs_are_not_cut():
    with pytest.raises(ValueError, match=r"a\.en and b\.de are pairs: .* batching 'blocks'"):
        encoded(batching="blocks")
    with pytest.raises(ValueError, match=r"a\.en and b\.de are pairs: .* too_long 'split'"):
        encoded(too_long="split")


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 13, 20])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_sides_have_the_computed_lengths(length, epoch):
    """B38: what is made of any length, odd or short, is as long as was computed, in each epoch."""
    own = Text(([" ".join(["5"] * length)],), ("a",))
    for hide in ("none", "mask", "spans", "prefix"):
        examples = encoded(own, hide=hide, max_length=23)
        example = examples.make(0, seed=0, epoch=epoch)
        sides = [len(side) for side in (example.source, example.tokens) if side is not None]
        assert len(example.tokens) == len(example.targets)
        if hide == "prefix":
            assert (np.array(sides) <= examples.lengths[0]).all() and sum(sides) == length + 2
        else:
            assert sides == examples.lengths[0].tolist()
        assert [sum(sides)] == examples.num_tokens.tolist()
    found = span_lengths(length, rate=0.4, mean_span=1.5)
    assert encoded(own, hide="spans", max_length=23).lengths.tolist() == [[found.inputs, found.targets]]


def test_all_special_masks_nothing():
    """B27: of a text of special tokens alone nothing is to be predicted."""
    examples = encoded(Text((["", "3 2 1 4"],), ("a",)), hide="mask", max_length=7)
    for epoch in range(13):
        for i, tokens in enumerate([[BOS, EOS], [BOS, 3, 2, 1, 4, EOS]]):
            example = examples.make(i, seed=0, epoch=epoch)
            assert not example.predicted.any() and example.tokens.tolist() == tokens
            assert example.targets.tolist() == [PAD] * len(tokens)


def test_masked_tokens_are_predicted_where_they_stand():
    """B37: what the weights mark is the text's own token, the rest is unchanged; each epoch and example draws anew."""
    examples = encoded(Text(([" ".join(map(str, range(10, 57)))] * 2,), ("a",)), hide="mask", max_length=53)
    own = [BOS, *range(10, 57), EOS]
    chosen = []
    for index, epoch in [(0, 0), (0, 1), (1, 0)]:
        example = examples.make(index, seed=0, epoch=epoch)
        np.testing.assert_array_equal(np.where(example.predicted, example.targets, example.tokens), own)
        assert not example.targets[~example.predicted].any() and MASK in example.tokens
        chosen.append(tuple(example.predicted.tolist()))
    assert len(set(chosen)) == 3
    again = examples.make(0, seed=0, epoch=1)
    assert tuple(again.predicted.tolist()) == chosen[1]
    assert tuple(examples.make(0, seed=1, epoch=1).predicted.tolist()) != chosen[1]


def test_two_texts_cut_in_two_fill_a_row():
    """The sources of both have as many tokens as the longer text, the targets as the shorter, whatever is drawn."""
    own = Text(([" ".join(["7"] * length) for length in (5, 1, 8, 9, 0, 6, 13)],), ("a",))
    examples = encoded(own, hide="prefix", max_length=17)
    units, lengths = examples.units
    assert [unit.tolist() for unit in units] == [[0, 5], [2, 3], [1], [4], [6]]
    assert lengths.tolist() == [[6 + 2, 5 + 2], [9 + 2, 8 + 2], [3, 3], [2, 2], [15, 15]]
    cuts = collections.defaultdict(set)
    for epoch in range(97):
        made = [examples.make(i, seed=0, epoch=epoch) for i in range(len(own))]
        for unit, row in list(zip(units, lengths.tolist(), strict=True))[:2]:
            assert [sum(len(side) for side in sides) for sides in zip(*[made[i][:2] for i in unit], strict=True)] == row
        for i, example in enumerate(made):
            cuts[i].add(len(example.source) - 1)
    assert cuts[0] == {1, 2, 3, 4} and cuts[2] == set(range(1, 8)) and cuts[6] == set(range(1, 13))
    assert cuts[5] == {2, 3, 4, 5} and cuts[3] == set(range(2, 9)) and cuts[1] == {1} and cuts[4] == {0}


@pytest.mark.parametrize("task", [Pairs, NextToken, Labelled, Masked, Spans, Prefix])
def test_special_ids_that_coincide_do_no_harm(task):
    """Padding, start and end may be one id: lengths, and what is predicted where, never come from ids."""
    hide = Corruption("mask", rate=0.4, mean_span=1.5, masked=0.5, random=0.0)
    ordinary = [[], [5], [5, 6, 7, 8, 9], [11, 12, 13], list(range(20, 43))]
    sides = 2 if task in (Pairs, Labelled) else 1

    def make(pad, bos, eos):
        special = Special(pad, bos, eos, MASK, SENTINELS, frozenset({pad, bos, eos, MASK, *SENTINELS}), VOCAB_SIZE)
        texts = (Ragged.of([np.array([*ids, eos], np.int32) for ids in ordinary]),) * sides
        one = task(special, hide).of(texts)
        found = [one.make(i, tuple(text[i] for text in texts), bos, np.random.default_rng) for i in range(5)]
        return one.lengths(texts).tolist(), one.num_tokens(texts).tolist(), found

    lengths, tokens, distinct = make(PAD, BOS, EOS)
    same_lengths, same_tokens, same = make(PAD, PAD, PAD)
    assert (lengths, tokens) == (same_lengths, same_tokens)
    for one, other in zip(distinct, same, strict=True):
        for name in ("source", "tokens", "targets"):
            ids, own = getattr(one, name), getattr(other, name)
            assert (ids is None) == (own is None)
            if ids is not None:
                np.testing.assert_array_equal(np.where(np.isin(ids, [BOS, EOS]), PAD, ids), own)
        for name in ("predicted", "token_types"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
