"""Filters by value, and draws against the distribution they are drawn from."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.decode.sampling import GREEDY, Sampling, draw, filtered

P = np.array([0.5, 0.3, 0.15, 0.05])
V = 7

keep = jax.jit(filtered, static_argnums=1)
take = jax.jit(draw, static_argnums=2)


def kept(logits, sampling):
    return np.isfinite(np.asarray(keep(jnp.asarray(logits), sampling)))


def keys_of(count, seed=0):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.arange(count, dtype=jnp.int32))


@pytest.mark.parametrize("top_p, count", [(0.0, 1), (0.5, 1), (0.6, 2), (0.85, 3), (1.0, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_golden_nucleus(top_p, count, order):
    """B35: the token that crosses the threshold stays, wherever it stands."""
    logits = np.log(P)[None, order].astype(np.float32)
    np.testing.assert_array_equal(kept(logits, Sampling(top_p=top_p))[0], np.array(order) < count)


@pytest.mark.parametrize("sampling", [Sampling(top_p=1e-3), Sampling(top_p=0.0), Sampling(min_p=1.0)], ids=str)
def test_at_least_one_token_stays(sampling):
    """B35: with bfloat16 logits, and with large ones."""
    logits = 30 * np.random.default_rng(0).standard_normal((5, 101)).astype(np.float32)
    found = kept(jnp.asarray(logits, jnp.bfloat16), sampling)
    assert (found.sum(axis=1) >= 1).all() and found[np.arange(5), logits.argmax(axis=1)].all()
    assert keep(jnp.asarray(logits, jnp.bfloat16), sampling).dtype == jnp.float32


def test_low_precision_logits_are_filtered_in_float32():
    """In bfloat16 the running sum of a thousand small probabilities would stand still."""
    logits = jnp.zeros((1, 1000), jnp.bfloat16)
    assert abs(int(kept(logits, Sampling(top_p=0.5)).sum()) - 500) <= 1


def test_among_equals_the_lower_token_is_in_the_nucleus_and_all_are_in_the_top_k():
    """As in transformers: top-k compares with the k-th largest."""
    logits = np.array([[1.0, 2.0, 1.0, 1.0, 0.0]], np.float32)
    np.testing.assert_array_equal(kept(logits, Sampling(top_k=2))[0], [True, True, True, True, False])
    share = float(np.exp(2) / (np.exp(2) + 3 * np.exp(1) + 1))
    np.testing.assert_array_equal(kept(logits, Sampling(top_p=share + 0.01))[0], [True, True, False, False, False])


@pytest.mark.parametrize("top_k", [1, 3, V, V + 5])
def test_top_k(top_k):
    logits = np.random.default_rng(0).standard_normal((5, V)).astype(np.float32)
    expected = np.argsort(np.argsort(-logits, axis=1), axis=1) < top_k
    np.testing.assert_array_equal(kept(logits, Sampling(top_k=top_k)), expected)


def test_min_p_is_a_share_of_the_likeliest():
    logits = np.log(P)[None].astype(np.float32)
    for min_p, count in ((0.09, 4), (0.11, 3), (0.29, 3), (0.31, 2), (0.61, 1)):
        assert kept(logits, Sampling(min_p=min_p)).sum() == count


def slow(logits, sampling):
    """Probabilities of one row by the rules one after another, in float64."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    alive = np.ones(len(logits), bool)
    if sampling.top_k is not None:
        alive = logits >= np.sort(logits)[::-1][: sampling.top_k][-1]
    probabilities = lambda: np.where(alive, np.exp(logits), 0) / np.exp(logits)[alive].sum()  # noqa: E731
    total, nucleus = 0.0, []
    for token in np.argsort(-probabilities(), kind="stable"):
        if not nucleus or total < sampling.top_p:
            nucleus.append(token)
        total += probabilities()[token]
    alive &= np.isin(np.arange(len(logits)), nucleus)
    alive &= probabilities() >= sampling.min_p * probabilities().max()
    return probabilities()


FILTERS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5, top_p=0.83, min_p=0.13),
    Sampling(temperature=1.9, top_p=0.61),
    Sampling(temperature=1.3, top_k=4, min_p=0.4),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_filters_apply_one_after_another(sampling, seed):
    logits = 2 * np.random.default_rng(seed).standard_normal((3, V)).astype(np.float32)
    found = jax.nn.softmax(keep(jnp.asarray(logits), sampling), axis=-1)
    np.testing.assert_allclose(found, [slow(row, sampling) for row in logits], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_frequencies_are_those_of_the_distribution(sampling):
    """Chi-square: p > 1e-3 with a seed that stays the same; what is filtered out is never drawn."""
    rows, draws = np.random.default_rng(3).standard_normal((2, V)).astype(np.float32) * 1.5, 5000
    for row in rows:
        tokens = take(jnp.broadcast_to(jnp.asarray(row), (draws, V)), keys_of(draws), sampling)
        counts, expected = np.bincount(tokens, minlength=V), draws * slow(row, sampling)
        possible = expected > 0
        assert not counts[~possible].any()
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi_square_tail(statistic, possible.sum() - 1) > 1e-3


def chi_square_tail(statistic, degrees):
    """P(X > statistic), by the recursion over degrees of freedom."""
    if degrees == 0:
        return 1.0 if statistic < 1e-6 else 0.0
    half = statistic / 2
    tail = math.erfc(math.sqrt(half)) if degrees % 2 else math.exp(-half)
    for n in range(2 - degrees % 2, degrees - 1, 2):
        tail += math.exp(n / 2 * math.log(half) - half - math.lgamma(n / 2 + 1))
    return tail


def test_the_tail_of_chi_square():
    """Table values at 1 %."""
    for degrees, value in ((1, 6.635), (2, 9.210), (3, 11.345), (6, 16.812)):
        assert chi_square_tail(value, degrees) == pytest.approx(0.01, rel=1e-3)


def test_temperature_zero_is_the_likeliest_and_the_lowest_among_equals():
    logits = np.random.default_rng(0).integers(0, 3, (17, V)).astype(np.float32)
    cold = Sampling(temperature=0.0, top_k=3, top_p=0.4, min_p=0.2, seed=5)
    for sampling in (GREEDY, cold):
        np.testing.assert_array_equal(take(jnp.asarray(logits), keys_of(17), sampling), logits.argmax(axis=1))


def test_a_low_temperature_is_nearly_greedy():
    """Logits are divided by it: at 1e-3 the second is e ** -100 times as likely as the first."""
    logits = np.array([[0.0, 0.1, 0.0]], np.float32).repeat(101, axis=0)
    assert (np.asarray(take(jnp.asarray(logits), keys_of(101), Sampling(temperature=1e-3))) == 1).all()


@pytest.mark.parametrize("rows", [[0], [4, 1], [6, 2, 0, 5, 1, 4, 3]], ids=str)
def test_a_draw_depends_on_its_row_and_key_alone(rows):
    """B32: not on the batch nor on its place in it."""
    logits, keys, rows = (
        jnp.asarray(np.random.default_rng(0).standard_normal((7, V)), jnp.float32),
        keys_of(7),
        np.array(rows),
    )
    whole = np.asarray(take(logits, keys, FILTERS[1]))
    np.testing.assert_array_equal(take(logits[rows], keys[rows], FILTERS[1]), whole[rows])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 10**22}, "seed is 10000000000000000000000"),
    ],
)
def test_values_without_meaning_are_refused(change, message):
    """B35, I34."""
    with pytest.raises(ValueError, match=message):
        Sampling(**change)


def test_equal_settings_are_one_key():
    """B55."""
    assert hash(Sampling(top_p=0.5)) == hash(Sampling(top_p=0.5)) and Sampling(seed=1) != Sampling(seed=2)


def test_draws_trace_once():
    """B55: whatever the logits and keys."""
    traces = []

    @functools.partial(jax.jit, static_argnums=2)
    def counted(logits, keys, sampling):
        traces.append(1)
        return draw(logits, keys, sampling)

    for seed in range(3):
        logits = jnp.asarray(np.random.default_rng(seed).standard_normal((3, V)), jnp.float32)
        counted(logits, keys_of(3, seed), Sampling(top_p=0.9))
    assert len(traces) == 1
