"""The sinusoidal encoding: its published values and the properties that made its authors choose it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import sinusoidal_positions, sinusoidal_table


def encode(*positions, d_model):
    return np.asarray(sinusoidal_positions(jnp.asarray([positions], jnp.int32), d_model)[0])


def test_golden_values():
    """B11: columns 2i and 2i + 1 share an exponent; an odd width ends with a sine."""
    np.testing.assert_allclose(encode(1, d_model=5)[0], [0.841471, 0.540302, 0.025116, 0.999685, 0.000631], atol=1e-6)
    np.testing.assert_array_equal(encode(0, d_model=5)[0], [0, 1, 0, 1, 0])


@pytest.mark.parametrize("d_model", [1, 2, 5, 29, 127])
def test_every_width_is_the_oracles(d_model):
    """B11"""
    table = sinusoidal_table(53, d_model)
    assert table.shape == (53, d_model) and table.dtype == jnp.float32
    # an angle of 52 has an error of half a unit in its last place, 2e-6, and so has what its rate was rounded to
    np.testing.assert_allclose(table, oracle.sinusoidal_table(53, d_model), atol=8e-6)


def test_positions_are_rows_of_the_table():
    positions = jnp.asarray([[0, 3, 3, 51], [7, 2, 0, 1], [52, 9, 8, 6]], jnp.int32)
    encoded = jax.jit(sinusoidal_positions, static_argnums=1)(positions, 11)
    np.testing.assert_allclose(encoded, np.asarray(sinusoidal_table(53, 11))[np.asarray(positions)], atol=1e-6)
    np.testing.assert_allclose(encoded, oracle.sinusoidal_positions(positions, 11), atol=8e-6)


@pytest.mark.parametrize("d_model", [0, -2])
def test_no_width_is_refused(d_model):
    with pytest.raises(ValueError, match=f"d_model is {d_model}"):
        sinusoidal_table(3, d_model)


@pytest.mark.parametrize("x64", [False, True])
def test_the_table_is_float32_whatever_the_flag(x64):
    """B14, B56"""
    with jax.enable_x64(x64):
        for dtype in (jnp.int32, jnp.int64) if x64 else (jnp.int32, jnp.int16):
            assert sinusoidal_positions(jnp.asarray([[0, 257]], dtype), 7).dtype == jnp.float32


def test_neighbours_differ_where_bfloat16_cannot_count():
    """B14: bfloat16 has no 257 and float16 no 2049."""
    for position in (256, 2048, 4094, 32766):
        one, next_one = encode(position, position + 1, d_model=8)
        assert np.abs(one - next_one).max() > 0.1
        expected = oracle.sinusoidal_positions([[position, position + 1]], 8)[0]
        # half a unit in the last place of the angle, and of its rate
        np.testing.assert_allclose([one, next_one], expected, atol=position * 2.0**-23)


@pytest.mark.parametrize("offset", [1, 3, 17])
def test_an_offset_is_a_rotation_that_does_not_depend_on_the_position(offset):
    """PE(pos + k) is PE(pos) with pair i rotated by the angle k / 10000 ** (2i / d_model)."""
    d_model = 14
    for position in (0, 5, 50):
        here, there = encode(position, position + offset, d_model=d_model).astype(np.float64)
        for i in range(d_model // 2):
            angle = offset / 10000 ** (2 * i / d_model)
            rotation = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
            np.testing.assert_allclose(there[2 * i : 2 * i + 2], rotation @ here[2 * i : 2 * i + 2], atol=1.5e-5)


def test_a_product_depends_on_the_distance_alone():
    """B11"""
    for position in (0, 5, 50):
        one, other = encode(position, position + 3, d_model=8).astype(np.float64)
        np.testing.assert_allclose(one @ other, 1.964889526, atol=1e-5)
        np.testing.assert_allclose(one @ one, 4, atol=1e-6)
