"""Constraints against slow Python versions of the rules of transformers' logits processors, row by row."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.decode.constraints import Constraints, History, constrained

V, R, P, T = 11, 5, 7, 6
EOS = (3, 8)


def penalised(row, history, penalty):
    return [
        score if token not in history else score * penalty if score < 0 else score / penalty
        for token, score in enumerate(row)
    ]


def no_ngram_twice(row, history, n):
    grams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
    context = tuple(history[len(history) - n + 1 :]) if n > 1 else ()
    if len(history) < n - 1:
        return row
    return [-math.inf if (*context, token) in grams else score for token, score in enumerate(row)]


def without(row, tokens):
    return [-math.inf if token in tokens else score for token, score in enumerate(row)]


def only(row, token):
    return [0.0 if t == token else -math.inf for t in range(len(row))]


def plain(row, history, settings, step):
    """The scores of one row as a list, by the processors in the order of transformers."""
    row = [float(score) for score in row]
    row = penalised(row, history, settings.repetition_penalty)
    if settings.no_repeat_ngram:
        row = no_ngram_twice(row, history, settings.no_repeat_ngram)
    row = without(row, settings.banned)
    if settings.allowed is not None:
        row = without(row, set(range(V)) - set(settings.allowed))
    if step < settings.min_new_tokens:
        row = without(row, EOS)
    if step < len(settings.forced_first):
        row = only(row, settings.forced_first[step])
    elif step == T - 1 and settings.forced_last is not None:
        row = only(row, settings.forced_last)
    return row


@functools.partial(jax.jit, static_argnames="settings")
def device(scores, prompt, lengths, written, step, *, settings):
    history = History(prompt, lengths).extended(written, step)
    return constrained(scores, *history, constraints=settings, step=step, max_new_tokens=T, eos_ids=EOS)


def texts(seed):
    """Prompts of 1 to 7 tokens, what was written after them, and scores; few distinct tokens, so that they repeat."""
    rng = np.random.default_rng(seed)
    prompt, written = rng.integers(0, 4, (R, P)), rng.integers(0, 4, (R, T))
    lengths = np.array([1, P, *rng.integers(1, P + 1, R - 2)])
    scores = np.where(rng.random((R, V)) < 0.1, -np.inf, 2 * rng.standard_normal((R, V)))
    return scores.astype(np.float32), prompt.astype(np.int32), lengths.astype(np.int32), written.astype(np.int32)


def checked(seed, step, settings):
    scores, prompt, lengths, written = texts(seed)
    expected = [plain(scores[r], [*prompt[r, : lengths[r]], *written[r, :step]], settings, step) for r in range(R)]
    arrays = [jnp.asarray(x) for x in (scores, prompt, lengths, written)]
    found = np.asarray(device(*arrays, jnp.int32(step), settings=settings))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # B35: neither what stands in padding nor what is not yet written, nor another row
    prompt[np.arange(P)[None] >= lengths[:, None]] = 9
    written[:, step:] = 9
    again = device(*[jnp.asarray(x) for x in (scores, prompt, lengths, written)], jnp.int32(step), settings=settings)
    np.testing.assert_array_equal(again, found)


CASES = {
    "nothing": Constraints(),
    "repetition": Constraints(repetition_penalty=1.5),
    "reward": Constraints(repetition_penalty=0.7),
    "ngram 1": Constraints(no_repeat_ngram=1),
    "ngram 2": Constraints(no_repeat_ngram=2),
    "ngram 3": Constraints(no_repeat_ngram=3),
    "longer than any text": Constraints(no_repeat_ngram=14),
    "minimum": Constraints(min_new_tokens=3),
    "first and last": Constraints(forced_first=(5, 2), forced_last=8, min_new_tokens=6),
    "first is all": Constraints(forced_first=(0, 1, 2, 3, 4, 5), forced_last=8),
    "banned": Constraints(banned=(0, 7)),
    "allowed": Constraints(allowed=(1, 2, 8)),
    "all": Constraints(1.3, 2, 4, (2, 2), 3, (7,), (0, 1, 2, 3, 8)),
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
@given(seed=st.integers(0, 2**32 - 1), step=st.integers(0, T - 1))
def test_scores_are_those_of_the_slow_rule(settings, seed, step):
    """B35: for prompts of different lengths."""
    checked(seed, step, settings)


def test_golden_penalty():
    """B35: 2 / 1.5 and -2 * 1.5: never up; other tokens, padding and other rows are left alone."""
    scores = jnp.asarray([[2.0, -2.0, 2.0, -2.0, 0.0]] * 2)
    history, lengths = jnp.asarray([[0, 1, 2], [2, 2, 2]], jnp.int32), jnp.asarray([2, 0], jnp.int32)
    settings = {"step": jnp.int32(0), "max_new_tokens": 1, "eos_ids": (4,)}
    found = constrained(scores, history, lengths, constraints=Constraints(repetition_penalty=1.5), **settings)
    np.testing.assert_allclose(found, [[2 / 1.5, -3, 2, -2, 0], [2, -2, 2, -2, 0]], rtol=1e-6)


def test_a_history_of_nothing_is_what_is_written():
    written = jnp.asarray([[3, 4, 5], [6, 7, 8]], jnp.int32)
    history = History.none(2).extended(written, jnp.int32(2))
    np.testing.assert_array_equal(history.lengths, [2, 2])
    np.testing.assert_array_equal(history.tokens[:, :2], written[:, :2])


@pytest.mark.parametrize("step", [0, 2])
def test_a_function_of_ones_own_sees_the_history_and_comes_before_what_is_forced(step):
    def doubled(scores, history, lengths):
        last = jnp.take_along_axis(history, lengths[:, None] - 1, axis=1)
        return jnp.where(jnp.arange(V, dtype=jnp.int32)[None] == last, scores * 2, scores)

    scores, prompt, lengths, written = texts(0)
    settings = Constraints(function=doubled, forced_first=(4,))
    found = device(*[jnp.asarray(x) for x in (scores, prompt, lengths, written)], jnp.int32(step), settings=settings)
    if step == 0:
        expected = [only(row, 4) for row in scores]
    else:
        expected = scores.copy()
        expected[np.arange(R), written[:, step - 1]] *= 2
    np.testing.assert_array_equal(found, expected)


def test_low_precision_scores_keep_their_dtype():
    """A penalty or a mask does not turn bfloat16 into float32 (strict promotion would refuse)."""
    scores, prompt, lengths, written = (jnp.asarray(x) for x in texts(1))
    low = scores.astype(jnp.bfloat16)
    found = device(low, prompt, lengths, written, jnp.int32(0), settings=CASES["all"])
    assert found.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "change, message",
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": -1.5}, "repetition_penalty is -1.5"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1"),
        ({"min_new_tokens": -2}, "min_new_tokens is -2"),
        ({"banned": (3, -1)}, r"banned is \(3, -1\)"),
        ({"forced_first": (-1,)}, r"forced_first is \(-1,\)"),
        ({"forced_last": -1}, "forced_last"),
        ({"allowed": ()}, "allowed is empty"),
        ({"forced_first": (2, 5), "banned": (5,)}, r"\[5\] are forced and forbidden"),
        ({"forced_last": 1, "allowed": (2,)}, r"\[1\] are forced and forbidden"),
    ],
)
def test_values_without_meaning_are_refused(change, message):
    """B35, I34."""
    with pytest.raises(ValueError, match=message):
        Constraints(**change)


@pytest.mark.parametrize(
    "settings, message",
    [
        (Constraints(banned=(2, V)), r"tokens \[11\], the vocabulary has 11"),
        (Constraints(allowed=(2, 20)), r"tokens \[20\]"),
        (Constraints(forced_first=(13,)), r"tokens \[13\]"),
        (Constraints(forced_last=12), r"tokens \[12\]"),
        (Constraints(min_new_tokens=T + 1), "min_new_tokens asks for 7 tokens, max_new_tokens is 6"),
        (Constraints(forced_first=(1,) * 7), "forced_first asks for 7 tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(settings, message):
    """B17."""
    with pytest.raises(ValueError, match=message):
        settings.check(V, T)


def test_equal_constraints_are_one_key():
    """B55: a static argument that compiles once; the defaults change nothing."""
    assert hash(Constraints(banned=(1, 2))) == hash(Constraints(banned=(1, 2)))
    assert not Constraints().change_something and Constraints(forced_last=0).change_something
