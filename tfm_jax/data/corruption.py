"""What is hidden of a text, to be predicted: BERT's masking, T5's spans behind sentinels, the rest behind a prefix.

Functions of the ids of one example and a random generator. With that of `generator(seed, epoch, index)` the result
depends on these three alone, whatever the workers, the hosts or the order of the batches.
"""

import bisect
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt64


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of example `index` in an epoch; each triple of integers from 0 up has a stream of its own.

    A thread has one generator, which each call sets to the beginning of a stream: use it up before the next call.
    """
    # Philox counts (Salmon et al. 2011): a stream is a place of its counter, and going there takes a tenth of the time
    # that a new generator with a seed takes, which would be most of the time of a short text.
    try:
        rng, state = _OF_THREAD.generator
    except AttributeError:
        rng = np.random.Generator(np.random.Philox())
        _OF_THREAD.generator = rng, rng.bit_generator.state
        rng, state = _OF_THREAD.generator
    state["state"]["key"][:], state["state"]["counter"][:] = _key(seed), (0, 0, epoch, index)
    state["buffer_pos"], state["has_uint32"] = 4, 0
    rng.bit_generator.state = state
    return rng


_OF_THREAD = threading.local()


@functools.lru_cache(maxsize=16)
def _key(seed: int) -> UInt64[np.ndarray, "2"]:
    return np.random.SeedSequence(seed).generate_state(2, np.uint64)


def mask_tokens(
    tokens: Int32[np.ndarray, " T"],
    rng: np.random.Generator,
    *,
    rate: float,
    masked: float,
    random: float,
    mask_id: int,
    special_ids: frozenset[int],
    vocab_size: int,
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """(inputs, chosen) of masked language modelling, both " T" (Devlin et al. 2019, section 3.1).

    Each token that is not special is chosen with probability `rate`, independently of the others. Of the chosen, the
    share `masked` becomes `mask_id`, the share `random` an id drawn uniformly from all that are not special (it may be
    the token's own), and the rest stays. To be predicted are `tokens[chosen]`; of special tokens alone, nothing.

    Raises `ValueError` for an id outside [0, vocab_size), and if `random` > 0 and all ids are special.
    """
    ordinary, ordinary_ids = _ordinary(mask_id, special_ids, vocab_size)
    if random > 0 and not len(ordinary_ids):
        raise ValueError(
            f"all of the {vocab_size} ids are special: there is no random token to put in a chosen one's place; "
            "give a larger vocabulary or set data.corruption.random to 0"
        )
    if len(tokens) and not (0 <= tokens.min() and tokens.max() < vocab_size):
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"token id {wrong} is outside the vocabulary, 0 to {vocab_size - 1}: encode the text with it")
    # One draw decides both: below `rate` a token is chosen, and where below `rate` says what becomes of it.
    draw = rng.random(len(tokens))
    chosen = (draw < rate) & ordinary[tokens]
    inputs = np.where(chosen & (draw < rate * masked), np.int32(mask_id), tokens)
    replaced = np.flatnonzero(chosen & (draw >= rate * masked) & (draw < rate * (masked + random)))
    if len(replaced):
        inputs[replaced] = ordinary_ids[rng.integers(len(ordinary_ids), size=len(replaced), dtype=np.int64)]
    return inputs, chosen


@functools.lru_cache(maxsize=8)
def _ordinary(
    mask_id: int, special_ids: frozenset[int], vocab_size: int
) -> tuple[Bool[np.ndarray, " V"], Int32[np.ndarray, " ordinary"]]:
    """Whether an id is not special, and the ids that are not. Read-only; kept, as every example asks."""
    wrong = [i for i in sorted({mask_id, *special_ids}) if not 0 <= i < vocab_size]
    if wrong:
        raise ValueError(f"the mask or special ids {wrong} are outside the vocabulary, 0 to {vocab_size - 1}")
    ordinary = np.ones(vocab_size, bool)
    ordinary[list(special_ids)] = False
    ids = np.flatnonzero(ordinary).astype(np.int32)
    ordinary.flags.writeable = ids.flags.writeable = False
    return ordinary, ids


class SpanLengths(NamedTuple):
    """Of a text under span corruption, in tokens: how many are hidden, in how many runs, and how long both sides are,
    end-of-text included."""

    noise: int
    spans: int
    inputs: int
    targets: int


@functools.lru_cache(maxsize=4096)
def span_lengths(length: int, *, rate: float, mean_span: float) -> SpanLengths:
    """What `corrupt_spans` makes of a text of `length` tokens (Raffel et al. 2020, section 3.1.4).

    The share `rate` is hidden in runs of `mean_span` tokens on average, both numbers rounded half to even, as T5 does.
    From 2 tokens on, at least one is hidden and one kept, and every run has a kept token before it; a text of 0 or 1
    stays whole. Raises `ValueError` for a negative length.
    """
    if length < 0:
        raise ValueError(f"length is {length}: a number of tokens from 0 up is expected")
    noise = spans = 0
    if length >= 2:
        noise = min(max(round(length * rate), 1), length - 1)
        spans = min(max(round(noise / mean_span), 1), noise, length - noise)
    return SpanLengths(noise, spans, inputs=length - noise + spans + 1, targets=noise + spans + 1)


def uncorrupted_length(inputs_length: int, *, rate: float, mean_span: float) -> int:
    """Length of the longest text whose inputs have at most `inputs_length` tokens, end-of-text included.

    Every shorter text fits as well. As `random_spans_helper` of T5, but without its rule that at rate 0.5 takes one
    token off if the targets were longer than the inputs. Raises `ValueError` if not even an empty text fits.
    """
    if inputs_length < 1:
        raise ValueError(f"inputs_length is {inputs_length}: at least 1 token, for end-of-text, is needed")
    # Bisection is right as inputs never get shorter with length: noise grows by at most 1 a token, and spans grow with
    # noise and with what is kept. As noise <= length * rate + 1, inputs >= length * (1 - rate) bounds it.
    lengths = range(int(inputs_length / (1 - rate)) + 1)
    fits = bisect.bisect_right(
        lengths, inputs_length, key=lambda n: span_lengths(n, rate=rate, mean_span=mean_span).inputs
    )
    return lengths[fits - 1]


def noise_mask(length: int, rng: np.random.Generator, *, rate: float, mean_span: float) -> Bool[np.ndarray, " T"]:
    """Which of `length` tokens are hidden: `noise` of them in `spans` runs, the numbers of `span_lengths`.

    Uniform over all such masks that keep the first token. The last one may be kept or hidden: T5's own masks always
    hide it, and so never show the end of a text.
    """
    noise, spans, *_ = span_lengths(length, rate=rate, mean_span=mean_span)
    if not spans:
        return np.zeros(length, bool)
    # Run i begins after kept_before[i] kept and hidden_before[i] hidden tokens. Distinct cuts through a row of tokens
    # give every composition into positive parts equally often; the last kept part alone may be empty.
    kept_before = _cuts(length - noise, spans, rng)
    hidden_before = _cuts(noise - 1, spans - 1, rng)
    edges = np.zeros(length + 1, np.int8)
    edges[kept_before + np.concatenate([[0], hidden_before])] = 1
    edges[kept_before + np.concatenate([hidden_before, [noise]])] = -1
    return edges[:length].cumsum(dtype=np.int8).astype(bool)


def _cuts(places: int, cuts: int, rng: np.random.Generator) -> Int[np.ndarray, " cuts"]:
    """So many different numbers of 1 to `places`, in order; all sets of them are equally likely."""
    if not cuts:
        return np.zeros(0, np.int64)
    # Half the time of rng.choice(..., replace=False) on a sentence, the same on 512 tokens.
    return 1 + np.sort(rng.permutation(places)[:cuts])


def spans_to_sentinels(
    tokens: Int32[np.ndarray, " T"], hidden: Bool[np.ndarray, " T"], sentinels: Sequence[int] | Int[np.ndarray, " _"]
) -> Int32[np.ndarray, " _"]:
    """The tokens with each run of hidden ones replaced by the next sentinel (noise_span_to_unique_sentinel of T5).

    Raises `ValueError` if there are more runs than sentinels.
    """
    starts = _starts(hidden)
    marked = tokens.copy()
    marked[starts] = _first(sentinels, int(starts.sum()))
    return marked[~hidden | starts]


def hide_spans(
    tokens: Int32[np.ndarray, " T"], hidden: Bool[np.ndarray, " T"], sentinels: Sequence[int] | Int[np.ndarray, " _"]
) -> tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]]:
    """(inputs, targets) of a text and any choice of hidden tokens, without end-of-text.

    The inputs are those of `spans_to_sentinels`, the targets each run behind its sentinel. Raises as that does.
    """
    starts = _starts(hidden)
    runs = int(starts.sum())
    # The first token of each run comes twice, its sentinel takes the place of the first.
    targets = np.repeat(tokens, np.add(hidden, starts, dtype=np.int64))
    targets[np.flatnonzero(starts[hidden]) + np.arange(runs)] = _first(sentinels, runs)
    return spans_to_sentinels(tokens, hidden, sentinels), targets


def corrupt_spans(
    tokens: Int32[np.ndarray, " T"],
    rng: np.random.Generator,
    *,
    rate: float,
    mean_span: float,
    sentinels: Sequence[int] | Int[np.ndarray, " _"],
    eos_id: int,
) -> tuple[Int32[np.ndarray, " _"], Int32[np.ndarray, " _"]]:
    """(inputs, targets) of span corruption (Raffel et al. 2020, section 3.1.4): random runs behind sentinels.

    `tokens` is a text without end-of-text and without sentinels; both results end with `eos_id` and have the lengths of
    `span_lengths`. Raises `ValueError` if there are more runs than sentinels.
    """
    hidden = noise_mask(len(tokens), rng, rate=rate, mean_span=mean_span)
    end = np.array([eos_id], np.int32)
    inputs, targets = (np.concatenate([side, end]) for side in hide_spans(tokens, hidden, sentinels))
    return inputs, targets


def restore_spans(
    inputs: Int32[np.ndarray, " S"],
    targets: Int32[np.ndarray, " T"],
    sentinels: Sequence[int] | Int[np.ndarray, " _"],
    *,
    eos_id: int,
) -> Int32[np.ndarray, " _"]:
    """The text, without end-of-text, that `corrupt_spans` made these of.

    Raises `ValueError` unless both end with `eos_id` and hold the same first sentinels in order, the targets from their
    beginning.
    """
    ends = [side[-1:].tolist() for side in (inputs, targets)]
    if ends != [[eos_id], [eos_id]]:
        raise ValueError(f"inputs, targets end with {ends}: end-of-text, {eos_id}, is expected; take padding off first")
    known, inputs, targets = np.asarray(sentinels), inputs[:-1], targets[:-1]
    holes, heads = (np.flatnonzero(np.isin(side, known)) for side in (inputs, targets))
    found = [inputs[holes].tolist(), targets[heads].tolist()]
    if not found[0] == found[1] == known[: len(holes)].tolist():
        raise ValueError(
            f"inputs have the sentinels {found[0]}, targets {found[1]}: the same ones, in the order "
            f"{known[: max(map(len, found))].tolist()}, are expected; take both from one text"
        )
    (text, *kept), (before, *runs) = np.split(inputs, holes), np.split(targets, heads)
    if len(before):
        raise ValueError(f"targets begin with {before.tolist()}, not with a sentinel: no place in the inputs is theirs")
    return np.concatenate([text, *(piece[1:] for pair in zip(runs, kept, strict=True) for piece in pair)])


def split_prefix(length: int, rng: np.random.Generator) -> int:
    """How many tokens of a text of `length` are its prefix: uniform in 1 to length - 1, the rest is to be predicted.

    A text of fewer than 2 is all prefix: after it only its end is to be predicted.
    """
    return int(rng.integers(1, length, dtype=np.int64)) if length >= 2 else length


def _starts(hidden: Bool[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
    """Where runs of hidden tokens begin."""
    starts = hidden.copy()
    starts[1:] &= ~hidden[:-1]
    return starts


def _first(sentinels: Sequence[int] | Int[np.ndarray, " _"], runs: int) -> Sequence[int] | Int[np.ndarray, " _"]:
    if runs > len(sentinels):
        raise ValueError(
            f"{runs} runs of tokens are hidden, but there are {len(sentinels)} sentinels: raise "
            "data.corruption.sentinels, give shorter texts, or hide fewer or longer runs"
        )
    return sentinels[:runs]
