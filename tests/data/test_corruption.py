"""Corruption: shares and distributions against their closed forms at three sigma, lengths and vectors that T5's own
tests state, texts rebuilt from both sides, random numbers of (seed, epoch, example) alone."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.data.corruption import (
    SpanLengths,
    corrupt_spans,
    generator,
    hide_spans,
    mask_tokens,
    noise_mask,
    restore_spans,
    span_lengths,
    spans_to_sentinels,
    split_prefix,
    uncorrupted_length,
)

VOCAB, MASK, EOS, SPECIALS = 97, 5, 2, frozenset([0, 1, 2, 3, 5])
ORDINARY = sorted(set(range(VOCAB)) - SPECIALS)
SENTINELS = list(range(996, 896, -1))


def ids(*values: int) -> np.ndarray:
    """Read-only: a function that wrote into its argument would fail."""
    array = np.array(values, np.int32)
    array.flags.writeable = False
    return array


def within_three_sigma(count: float, number: int, share: float):
    return abs(count - number * share) <= 3 * math.sqrt(number * share * (1 - share))


def uniform(draws, values) -> bool:
    """Chi-square of the draws, within three sigma of its mean; every draw is one of the values."""
    counts, expected = Counter(draws), len(draws) / len(values)
    assert set(counts) <= set(values)
    chi_square = sum((counts[value] - expected) ** 2 for value in values) / expected
    return abs(chi_square - (len(values) - 1)) <= 3 * math.sqrt(2 * (len(values) - 1))


def runs_of(hidden) -> list[str]:
    return re.findall("1+", "".join("01"[int(h)] for h in hidden))


def mask(tokens, rng, **changed):
    settings = dict(rate=0.15, masked=0.8, random=0.1, mask_id=MASK, special_ids=SPECIALS, vocab_size=VOCAB)
    return mask_tokens(tokens, rng, **settings | changed)


def corrupt(tokens, rng, rate=0.15, mean_span=3.0, sentinels=SENTINELS):
    return corrupt_spans(tokens, rng, rate=rate, mean_span=mean_span, sentinels=sentinels, eos_id=EOS)


# --- the random numbers of an example


def test_an_examples_random_numbers_depend_on_seed_epoch_and_index_alone():
    """I32: the same for the same three, in whatever order and whether or not others are drawn; others for others."""
    text = ids(*range(100, 153))

    def results(order):
        made = {}
        for triple in order:
            rng = generator(*triple)
            made[triple] = *mask(ids(*ORDINARY), rng), *corrupt(text, rng), split_prefix(10**6, rng)
        return made

    triples = list(itertools.product(range(3), repeat=3))
    forward, backward = results(triples), results(reversed(triples[::2]))
    for triple, made in backward.items():
        assert all(np.array_equal(a, b) for a, b in zip(made, forward[triple], strict=True))
    for place in range(5):
        assert len({np.asarray(made[place]).tobytes() for made in forward.values()}) == len(triples)


def test_an_examples_stream_is_not_the_one_that_orders_the_data():
    """NumPy pads entropy with zeros, so a list that ends with example 0 would be the shuffle's own seed."""
    assert np.random.default_rng([3, 1, 0]).random() == np.random.default_rng([3, 1]).random()
    others = {np.random.default_rng(entropy).random() for entropy in ([3, 1], [3, 1, 0], [3, 0], [3], 3, [3, 1, 1])}
    assert not others & {generator(3, epoch, index).random() for epoch in range(3) for index in range(3)}


@pytest.mark.parametrize("along", range(3), ids=["seed", "epoch", "index"])
def test_neighbouring_examples_draw_independently(along):
    number = 4001
    triples = np.full((number, 3), 7)
    triples[:, along] = np.arange(number)
    draws = np.array([generator(*triple).random() for triple in triples.tolist()]) - 0.5
    assert abs(draws.mean()) <= 3 * math.sqrt(1 / 12 / number)
    assert abs((draws[1:] * draws[:-1]).mean()) <= 3 / 12 / math.sqrt(number - 1)


# --- masking


def test_masking_has_berts_shares_and_spares_special_tokens():
    """B37: 15 % of 200,000 tokens and more, of those 80/10/10, at three sigma; a random token may be the same one."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 220_009, dtype=np.int32)
    tokens.flags.writeable = False
    inputs, chosen = mask(tokens, generator(0, 0, 0))
    special = np.isin(tokens, list(SPECIALS))
    eligible, number = int((~special).sum()), int(chosen.sum())
    assert inputs.dtype == np.int32 and chosen.dtype == bool and eligible >= 200_000
    assert not (chosen & special).any() and np.array_equal(inputs[~chosen], tokens[~chosen])
    assert within_three_sigma(number, eligible, 0.15)

    masked, stayed = inputs[chosen] == MASK, inputs[chosen] == tokens[chosen]
    assert within_three_sigma(masked.sum(), number, 0.8)
    assert within_three_sigma(stayed.sum(), number, 0.1 + 0.1 / len(ORDINARY))
    assert within_three_sigma((~masked & ~stayed).sum(), number, 0.1 - 0.1 / len(ORDINARY))
    assert not np.isin(inputs[chosen][~masked], list(SPECIALS)).any()


def test_random_tokens_are_uniform_over_what_is_not_special():
    """B37: the token itself as likely as any other."""
    tokens = np.random.default_rng(1).choice(np.array(ORDINARY, np.int32), 50_021)
    inputs, chosen = mask(tokens, generator(1, 0, 0), rate=0.6, masked=0.0, random=1.0)
    assert uniform(inputs[chosen].tolist(), ORDINARY)
    assert within_three_sigma((inputs == tokens)[chosen].sum(), int(chosen.sum()), 1 / len(ORDINARY))


def test_a_token_is_chosen_whatever_its_neighbours_are():
    """B37: pairs of chosen neighbours are as many as independent choices make."""
    number, rate = 200_003, 0.15
    _, chosen = mask(np.full(number, 11, np.int32), generator(2, 0, 0))
    for distance in (1, 2, 3):
        both = (chosen[distance:] & chosen[:-distance]).sum()
        variance = rate**2 + 2 * rate**3 - 3 * rate**4  # of overlapping pairs, a pair
        assert abs(both - (number - distance) * rate**2) <= 3 * math.sqrt(number * variance)


@pytest.mark.parametrize("masked, random, expected", [(1.0, 0.0, {MASK}), (0.0, 0.0, {11}), (0.5, 0.0, {MASK, 11})])
def test_shares_of_nothing_and_everything(masked, random, expected):
    inputs, chosen = mask(np.full(503, 11, np.int32), generator(0, 0, 0), masked=masked, random=random)
    assert set(inputs[chosen].tolist()) == expected and chosen.any() and not chosen.all()


@pytest.mark.parametrize("tokens", [ids(), ids(0), ids(1, 3, 5, 2, 0, 0, 0)])
def test_of_special_tokens_nothing_is_chosen(tokens):
    """B27, B37: nothing to predict, and no error."""
    inputs, chosen = mask(tokens, generator(0, 0, 0), rate=0.999)
    assert not chosen.any() and np.array_equal(inputs, tokens) and inputs.dtype == np.int32


def test_a_vocabulary_of_special_tokens_alone_has_no_random_one():
    special = dict(special_ids=frozenset(range(7)), vocab_size=7)
    with pytest.raises(ValueError, match=r"all of the 7 ids are special.*data\.corruption\.random to 0"):
        mask(ids(1, 2), generator(0, 0, 0), **special)
    _, chosen = mask(ids(1, 2), generator(0, 0, 0), random=0.0, **special)
    assert not chosen.any()


@pytest.mark.parametrize(
    "tokens, changed, wrong", [((7, 97), {}, 97), ((7, -1), {}, -1), ((7,), {"mask_id": 101}, 101),
                               ((7,), {"special_ids": frozenset([0, -100])}, -100)]
)  # fmt: skip
def test_an_id_outside_the_vocabulary_is_refused(tokens, changed, wrong):
    with pytest.raises(ValueError, match=rf"{wrong}.*outside the vocabulary, 0 to 96"):
        mask(ids(*tokens), generator(0, 0, 0), **changed)


# --- spans: how many and how long


@pytest.mark.parametrize(
    "length, rate, mean_span, expected",
    [
        (512, 0.15, 3.0, (77, 26, 462, 104)),
        (20, 0.15, 3.0, (3, 1, 19, 5)),
        (512, 0.5, 3.0, (256, 85, 342, 342)),
        (0, 0.15, 3.0, (0, 0, 1, 1)),
        (1, 0.15, 3.0, (0, 0, 2, 1)),
        (2, 0.15, 3.0, (1, 1, 3, 3)),
        (3, 0.15, 3.0, (1, 1, 4, 3)),
        (5, 0.15, 3.0, (1, 1, 6, 3)),
        (32, 0.25, 2.0, (8, 4, 29, 13)),
        (10, 0.25, 2.0, (2, 1, 10, 4)),  # 2.5 tokens
        (20, 0.25, 2.0, (5, 2, 18, 8)),  # 2.5 runs
        (10, 0.9, 1.0, (9, 1, 3, 11)),  # one kept token has room for one run
    ],
)
def test_lengths_of_span_corruption(length, rate, mean_span, expected):
    """B38: noise, spans, inputs and targets, end-of-text included, half to even; also those of the arrays."""
    assert span_lengths(length, rate=rate, mean_span=mean_span) == SpanLengths(*expected)
    for index in range(17):
        sides = corrupt(ids(*range(100, 100 + length)), generator(0, 0, index), rate, mean_span)
        assert [len(side) for side in sides] == list(expected[2:])
        assert all(side.dtype == np.int32 and side[-1] == EOS for side in sides)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="length is -1"):
        span_lengths(-1, rate=0.15, mean_span=3.0)


@pytest.mark.parametrize(
    "inputs_length, rate, mean_span, tokens, targets",
    [(64, 0.2, 2.0, 70, 22), (64, 0.2, 1.0, 63, 27), (512, 0.15, 3.0, 568, 114)],
)
def test_the_longest_text_for_an_input_as_t5s_helper_has_it(inputs_length, rate, mean_span, tokens, targets):
    """B38: the first two of T5's own test of random_spans_helper, the third the lengths of its pre-training."""
    length = uncorrupted_length(inputs_length, rate=rate, mean_span=mean_span)
    assert (length, span_lengths(length, rate=rate, mean_span=mean_span).targets) == (tokens, targets)


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("mean_span", [1.0, 2.5, 3.0, 100.0])
def test_the_longest_text_found_by_trying_all(rate, mean_span):
    inputs = [span_lengths(length, rate=rate, mean_span=mean_span).inputs for length in range(4000)]
    for inputs_length in (1, 2, 3, 5, 19, 37):
        first_too_long = next(length for length, number in enumerate(inputs) if number > inputs_length)
        assert uncorrupted_length(inputs_length, rate=rate, mean_span=mean_span) == first_too_long - 1
        assert all(number > inputs_length for number in inputs[first_too_long:])


def test_inputs_without_room_for_their_end_are_refused():
    with pytest.raises(ValueError, match="inputs_length is 0: at least 1"):
        uncorrupted_length(0, rate=0.15, mean_span=3.0)


# --- spans: where


@pytest.mark.parametrize("mean_span", [1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.9])
def test_every_length_has_exactly_its_noise_in_exactly_its_runs(rate, mean_span):
    """B38: from 0 to 200 tokens; the first never hidden, the last in some texts and not in others."""
    last = []
    for length in range(201):
        hidden = noise_mask(length, generator(0, 0, length), rate=rate, mean_span=mean_span)
        lengths = span_lengths(length, rate=rate, mean_span=mean_span)
        assert hidden.shape == (length,) and hidden.sum() == lengths.noise
        assert len(runs_of(hidden)) == lengths.spans and not hidden[:1].any()
        last += hidden[-1:].tolist()
    assert any(last) and not all(last)


def test_all_masks_of_a_short_text_are_equally_likely():
    """B38: those with the first token kept, 4 of 11 hidden, in 2 runs, found among all 2,048."""
    every = [bits for bits in itertools.product((False, True), repeat=11)
             if not bits[0] and sum(bits) == 4 and len(runs_of(bits)) == 2]  # fmt: skip
    rng = generator(0, 0, 1)
    drawn = [tuple(noise_mask(11, rng, rate=0.4, mean_span=2.0).tolist()) for _ in range(100 * len(every))]
    assert len(every) == 63 and uniform(drawn, every)


def test_runs_and_their_places_over_many_tokens():
    """B38: over 200,000 tokens, the closed forms of uniform compositions at three sigma; flat but for the ends."""
    length, number = 101, 2003
    noise, spans, *_ = span_lengths(length, rate=0.15, mean_span=3.0)
    rng = generator(0, 0, 3)
    masks = np.array([noise_mask(length, rng, rate=0.15, mean_span=3.0) for _ in range(number)])
    assert masks.size >= 200_000 and (noise, spans) == (15, 5)

    def mean_of_a_part(parts: list[int], total: int, of: int) -> bool:
        """`total` into `of` positive parts: the mean of one and its variance, all compositions equally likely."""
        mean, variance = total / of, (of - 1) * total * (total - of) / (of**2 * (of + 1))
        return abs(np.mean(parts) - mean) <= 3 * math.sqrt(variance / len(parts))

    runs = [[len(run) for run in runs_of(mask)] for mask in masks]
    for place in (0, 2, spans - 1):
        assert mean_of_a_part([lengths[place] for lengths in runs], noise, spans)
    assert mean_of_a_part(masks.argmax(axis=1).tolist(), length - noise + 1, spans + 1)
    assert mean_of_a_part((masks[:, ::-1].argmax(axis=1) + 1).tolist(), length - noise + 1, spans + 1)
    assert within_three_sigma(masks[:, -1].sum(), number, spans / (length - noise))

    middle = masks[:, 12:-12]
    share = middle.mean()
    assert (np.abs(middle.mean(axis=0) - share) <= 3 * math.sqrt(share * (1 - share) / number)).all()


# --- spans: both sides


T5_TOKENS, T5_HIDDEN = ids(10, 11, 12, 13, 14, 15), np.array([1, 1, 0, 0, 1, 0], bool)


@pytest.mark.parametrize(
    "hidden, sentinels, expected",
    [
        (T5_HIDDEN, range(999, 899, -1), [999, 12, 13, 998, 15]),  # noise_span_to_unique_sentinel
        (~T5_HIDDEN, range(999, 899, -1), [10, 11, 999, 14, 998]),
        (T5_HIDDEN, [999] * 2, [999, 12, 13, 999, 15]),  # noise_span_to_sentinel
        (~T5_HIDDEN, [999] * 2, [10, 11, 999, 14, 999]),  # nonnoise_span_to_sentinel
        (T5_HIDDEN, np.array([999, 998, 997]), [999, 12, 13, 998, 15]),
    ],
)
def test_runs_become_sentinels_as_t5_makes_them(hidden, sentinels, expected):
    """B38: vectors of the test-suite of T5 (preprocessors_test.py, vocabulary of 1000)."""
    assert spans_to_sentinels(T5_TOKENS, hidden, sentinels).tolist() == expected


def test_what_hide_spans_leaves_and_moves_is_what_t5_drops():
    """B38: drop_noise_tokens and drop_nonnoise_tokens are the two sides without their sentinels."""
    inputs, targets = hide_spans(T5_TOKENS, T5_HIDDEN, [999, 998])
    assert [i for i in inputs if i < 900] == [12, 13, 15] and [i for i in targets if i < 900] == [10, 11, 14]
    assert targets.tolist() == [999, 10, 11, 998, 14]


def test_t5s_example_of_denoising():
    """B38: test_denoise of T5, the mask that its seed draws given."""
    text = ids(3, 2, 20, 4, 3, 2, 8, 13, 2, 3, 2, 23, 7, 19, 22, 3, 2, 7, 2)
    hidden = np.zeros(19, bool)
    hidden[[8, 14, 15, 16, 17, 18]] = True
    inputs, targets = hide_spans(text, hidden, [25, 24])
    assert inputs.tolist() == [3, 2, 20, 4, 3, 2, 8, 13, 25, 3, 2, 23, 7, 19, 24]
    assert targets.tolist() == [25, 2, 24, 22, 3, 2, 7, 2]
    noise, spans, *_ = span_lengths(19, rate=0.3, mean_span=3.0)
    assert (noise, spans) == (6, 2) == (hidden.sum(), len(runs_of(hidden)))


def interleaved(inputs: list[int], targets: list[int]) -> list[int]:
    """The text by reading: each sentinel of the inputs stands for what follows it in the targets."""
    heads = [place for place, token in enumerate(targets) if token in SENTINELS]
    runs = {targets[a]: targets[a + 1 : b] for a, b in itertools.pairwise([*heads, len(targets)])}
    return [token for i in inputs for token in runs.get(i, [i])]


def test_a_thousand_texts_are_rebuilt_from_their_two_sides():
    """B38: by restore_spans and by a loop; the sentinels in order, the first ones, on both sides."""
    rng = np.random.default_rng(5)
    for index in range(1000):
        rate, mean_span = [0.05, 0.15, 0.3, 0.5, 0.85][index % 5], [1.0, 2.0, 3.0][index % 3]
        text = rng.integers(3, 890, rng.integers(0, 150), dtype=np.int32)
        inputs, targets = corrupt(text, generator(1, 0, index), rate, mean_span)
        restored = restore_spans(inputs, targets, SENTINELS, eos_id=EOS)
        assert restored.dtype == np.int32 and restored.tolist() == text.tolist()
        assert interleaved(inputs[:-1].tolist(), targets[:-1].tolist()) == text.tolist()
        spans = span_lengths(len(text), rate=rate, mean_span=mean_span).spans
        for side in (inputs, targets):
            assert [i for i in side if i in SENTINELS] == SENTINELS[:spans]


@given(st.lists(st.booleans(), max_size=31))
def test_any_choice_of_hidden_tokens_is_rebuilt(bits):
    """B38: runs at the beginning and the end too, all hidden, none."""
    text, hidden = ids(*range(100, 100 + len(bits))), np.array(bits, bool)
    sides = [np.append(side, np.int32(EOS)) for side in hide_spans(text, hidden, np.array(SENTINELS))]
    assert len(sides[0]) == len(bits) - sum(bits) + len(runs_of(bits)) + 1
    assert restore_spans(*sides, np.array(SENTINELS), eos_id=EOS).tolist() == text.tolist()


def test_more_runs_than_sentinels_are_refused():
    """B38: exhaustion; exactly enough are enough."""
    text, hidden = ids(*range(100, 107)), np.array([0, 1, 0, 1, 0, 1, 1], bool)
    assert spans_to_sentinels(text, hidden, [9, 8, 7]).tolist() == [100, 9, 102, 8, 104, 7]
    for function in (spans_to_sentinels, hide_spans):
        with pytest.raises(ValueError, match=r"3 runs .*2 sentinels: raise data\.corruption\.sentinels"):
            function(text, hidden, [9, 8])
    with pytest.raises(ValueError, match="26 runs .*25 sentinels"):
        corrupt(ids(*range(100, 612)), generator(0, 0, 0), sentinels=SENTINELS[:25])


@pytest.mark.parametrize(
    "inputs, targets, message",
    [
        ([7, 996], [996, 8, EOS], r"end with \[\[996\], \[2\]\]"),
        ([], [EOS], r"end with \[\[\], \[2\]\]"),
        ([7, 996, EOS], [EOS], r"sentinels \[996\], targets \[\]"),
        ([7, EOS], [996, 8, EOS], r"sentinels \[\], targets \[996\]"),
        ([7, 995, EOS], [995, 8, EOS], r"in the order \[996\]"),
        ([7, 995, 9, 996, EOS], [995, 8, 996, 4, EOS], r"in the order \[996, 995\]"),
        ([7, 996, 9, 995, EOS], [995, 8, 996, 4, EOS], "take both from one text"),
        ([7, 996, EOS], [8, 996, 9, EOS], r"begin with \[8\]"),
        ([7, EOS], [8, EOS], r"begin with \[8\]"),
    ],
)
def test_two_sides_of_no_text_are_refused(inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        restore_spans(ids(*inputs), ids(*targets), SENTINELS, eos_id=EOS)


# --- prefix


def test_a_prefix_ends_anywhere_inside_a_text_with_equal_chance():
    rng = generator(0, 0, 4)
    assert uniform([split_prefix(23, rng) for _ in range(4001)], range(1, 23))
    assert [split_prefix(length, rng) for length in (0, 1, 2)] == [0, 1, 1]
