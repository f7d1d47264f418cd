"""The largest entries of long rows in two stages, against `lax.top_k` over the whole row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tfm_jax.decode.top import BLOCK, best_of_rows

best = jax.jit(best_of_rows, static_argnums=1)


def log_sum_exp(x):
    x = np.asarray(x, np.float64)
    top = x.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isneginf(top), -np.inf, top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))[:, 0]


def assert_is_top_k(x, k):
    values, indices, sums = best(jnp.asarray(x), k)
    expected = jax.lax.top_k(jnp.asarray(x), k)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(sums, log_sum_exp(x), rtol=1e-6, atol=1e-6)
    assert values.dtype == sums.dtype == jnp.float32 and indices.dtype == jnp.int32


# k = 3 goes in two stages from 12 blocks on
LENGTHS = [3, 127, 4 * BLOCK * 3 - 1, 4 * BLOCK * 3, 4 * BLOCK * 3 + 1, 2003, 17 * BLOCK - 1]


@pytest.mark.parametrize("V", LENGTHS)
def test_distinct_numbers(V):
    x = np.random.default_rng(V).standard_normal((5, V)).astype(np.float32)
    # the best at the ends of the row, in one block and in the ragged last block
    x[1, [0, 1, 2]], x[2, [-1, -2, -3]], x[3, [0, V // 2, -1]] = 9, [9, 8, 7], [7, 8, 9]
    assert_is_top_k(x, 3)


@pytest.mark.parametrize("V", [2003, 16 * BLOCK])
def test_equal_numbers_come_in_the_order_of_their_index(V):
    """B32: ties inside a block, between blocks and with the ragged block, and a row that is all ties."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (7, V)).astype(np.float32)
    x[0] = 0.0
    x[1, [BLOCK - 1, BLOCK, V - 1]] = 5
    x[2, [V - 1, V - 2, 3 * BLOCK, 0]] = 5
    # a block that comes first by its largest entry, but not by its place
    x[3, [BLOCK + 3, 7 * BLOCK, 7 * BLOCK + 1, 9 * BLOCK]] = 5, 9, 5, 5
    assert_is_top_k(x, 3)


@pytest.mark.parametrize("V", [11, 2003])
def test_entries_of_minus_infinity(V):
    """B31: fewer possible tokens than asked for; then the lowest index first, as in `lax.top_k`; a row of nothing."""
    x = np.full((4, V), -np.inf, np.float32)
    x[1, V - 1] = 0.5
    x[2, [4, V // 2]] = 1e30, -1e30
    x[3, :] = -1e4
    values, indices, sums = best(jnp.asarray(x), 3)
    np.testing.assert_array_equal(values, jax.lax.top_k(jnp.asarray(x), 3)[0])
    np.testing.assert_allclose(sums, log_sum_exp(x), rtol=1e-6)
    possible = np.isfinite(values)
    np.testing.assert_array_equal(np.asarray(indices)[possible], np.asarray(jax.lax.top_k(x, 3)[1])[possible])
    assert ((0 <= np.asarray(indices)) & (np.asarray(indices) < V)).all()


@pytest.mark.parametrize("V", [11, 2003])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_says_so_and_leaves_the_others_alone(V, bad):
    x = np.random.default_rng(0).standard_normal((3, V)).astype(np.float32)
    values, indices, sums = best(jnp.asarray(x), 3)
    for place in (0, V // 2, V - 1):
        broken = x.copy()
        broken[1, place] = bad
        found = best(jnp.asarray(broken), 3)
        assert not found[2][1] < np.inf
        for now, was in zip(found, (values, indices, sums), strict=True):
            np.testing.assert_array_equal(now[np.array([0, 2])], was[np.array([0, 2])])


def test_large_numbers_do_not_overflow_the_sum():
    x = np.random.default_rng(0).standard_normal((3, 2003)).astype(np.float32) + np.float32([[1e4], [-1e4], [300]])
    np.testing.assert_allclose(best(jnp.asarray(x), 3)[2], log_sum_exp(x), rtol=1e-6)


def test_it_selects_from_blocks_and_not_from_the_row():
    """What it is for: no top_k or sort over an array as long as the row."""
    program = jax.make_jaxpr(functools.partial(best_of_rows, k=2))(jnp.zeros((3, 5003), jnp.float32))
    sizes = [
        max(var.aval.shape)
        for equation in equations(program)
        for var in equation.invars
        if equation.primitive.name in ORDERING
    ]
    assert sizes and max(sizes) < 5003 / 10


ORDERING = ("top_k", "sort")


def equations(program):
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
