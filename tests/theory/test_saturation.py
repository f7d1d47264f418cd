"""The numbers that the claim `saturation` predicts with, where they are known in closed form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theory.saturation import largest_two, random_vectors, softmax_of


def test_gap_of_two_normal_variables():
    """|N(0, 2)|: density 1 / sqrt(pi) at 0, median 0.6745 sqrt(2)."""
    density, median = largest_two(2)
    assert density == pytest.approx(1.0 / math.sqrt(math.pi), rel=1e-3)
    assert median == pytest.approx(0.67449 * math.sqrt(2.0), rel=1e-3)


def test_gap_of_many_as_drawn():
    draws = np.sort(np.random.default_rng(0).standard_normal((20_000, 64)), axis=1)
    assert largest_two(64)[1] == pytest.approx(np.median(draws[:, -1] - draws[:, -2]), rel=0.05)


def test_norm_of_the_jacobian_is_that_of_jax():
    query, key, value, gradient = (x[:1, :3] for x in random_vectors(4))
    found = softmax_of((query, key, value, gradient), None)
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key)[0, 0] / 2.0
    jacobians = jax.vmap(jax.jacobian(jax.nn.softmax))(scores)
    np.testing.assert_allclose(found["jacobian"][0], jnp.sqrt(jnp.square(jacobians).sum(axis=(1, 2))), rtol=1e-4)
    weights = jax.nn.softmax(scores, axis=-1)
    np.testing.assert_allclose(found["entropy"][0], -(weights * jnp.log(weights)).sum(axis=-1), rtol=1e-4)
