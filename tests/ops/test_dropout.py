"""Dropout as a function of key and element: rate, independence, expectation, and the same on any number of devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfm_jax.ops import dropout
from tfm_jax.ops.dropout import keep_mask

keep = jax.jit(keep_mask, static_argnums=(1, 2))
drop = jax.jit(dropout, static_argnames="rate")
# A hash is weakest where index differences are powers of two, so these sizes are.
SHAPE = (4, 512, 512)
SIZE = 4 * 512 * 512


def deviation(one, other):
    """The correlation of two masks in standard deviations of what chance gives."""
    p, q = one.mean(), other.mean()
    return ((one & other).mean() - p * q) * (one.size / (p * (1 - p) * q * (1 - q))) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate):
    """Three standard deviations on a million draws."""
    kept = np.asarray(keep(jax.random.key(7), SHAPE, rate))
    assert abs(kept.mean() - (1 - rate)) < 3 * (rate * (1 - rate) / kept.size) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_independent_along_every_axis(rate):
    """27 comparisons in all, so 4 standard deviations instead of 3."""
    kept = np.asarray(keep(jax.random.key(11), SHAPE, rate))
    for axis, lag in itertools.product(range(3), (1, 2, 3, 16, 256)):
        if lag < SHAPE[axis]:
            first, last = (np.take(kept, r, axis) for r in (range(SHAPE[axis] - lag), range(lag, SHAPE[axis])))
            assert abs(deviation(first, last)) < 4, (axis, lag)
    for axes in ((0, 1), (0, 2), (1, 2)):  # the share of each line varies as much as chance makes it
        counts = kept.sum(axis=axes)
        draws = SIZE // counts.size
        spread = counts.var() / (draws * rate * (1 - rate))
        assert abs(spread - 1) < 4 * (2 / counts.size) ** 0.5, axes


def consecutive_seeds(count):
    return [jax.random.key(seed) for seed in range(count)]


def folded(count):
    return [jax.random.fold_in(jax.random.key(3), step) for step in range(count)]


def split(count):
    return list(jax.random.split(jax.random.key(3), count))


@pytest.mark.parametrize("keys", [consecutive_seeds, folded, split])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_keys_are_independent(keys, rate):
    """45 pairs, so 4 standard deviations instead of 3."""
    masks = [np.asarray(keep(key, (512, 512), rate)) for key in keys(10)]
    deviations = [deviation(one, other) for one, other in itertools.combinations(masks, 2)]
    assert max(map(abs, deviations)) < 4
    assert np.std(deviations) < 1.5


def test_the_expectation_is_the_input():
    """I13: over positions and over keys, within three standard deviations."""
    x, rate, draws = jnp.asarray([0.5, -1.0, 2.0, 3.0, -5.0, 7.0, 11.0]), 0.3, 100_003
    allowed = 3 * np.abs(x) * (rate / (1 - rate) / draws) ** 0.5
    rows = drop(jnp.broadcast_to(x, (draws, 7)), rate=rate, key=jax.random.key(5))
    assert (np.abs(np.asarray(rows, np.float64).mean(0) - x) < allowed).all()
    keys = jax.random.split(jax.random.key(6), draws)
    over_keys = jax.jit(jax.vmap(lambda key: dropout(x, rate=rate, key=key)))(keys)
    assert (np.abs(np.asarray(over_keys, np.float64).mean(0) - x) < allowed).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_an_element_is_dropped_or_scaled(dtype):
    x = jnp.full((31, 37), 3.0, dtype)
    y = drop(x, rate=0.25, key=jax.random.key(0))
    assert y.dtype == dtype
    assert set(np.unique(np.asarray(y, np.float32))) == {0.0, 4.0}
    gradient = jax.grad(lambda x: drop(x, rate=0.25, key=jax.random.key(0)).sum().astype(jnp.float32))(x)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), np.asarray(y, np.float32) / 3, rtol=1e-2)


def test_dropout_is_off_without_a_key_or_a_rate():
    """B20, I13"""
    x = jnp.arange(7, dtype=jnp.float32)
    assert dropout(x, rate=0.5, key=None) is x
    assert dropout(x, rate=0.0, key=jax.random.key(0)) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate):
    for key in (None, jax.random.key(0)):
        with pytest.raises(ValueError, match=f"dropout rate is {rate}"):
            dropout(jnp.ones(3), rate=rate, key=key)


def test_a_rate_next_to_one_is_a_rate():
    assert not keep_mask(jax.random.key(0), (3,), 1.0 - 2.0**-40).any()


def test_a_key_decides_and_nothing_else():
    """B56 too: not the run, not jit, not the x64 flag."""
    x = jnp.ones((31, 37))
    y = drop(x, rate=0.5, key=jax.random.key(1))
    np.testing.assert_array_equal(drop(x, rate=0.5, key=jax.random.key(1)), y)
    np.testing.assert_array_equal(dropout(x, rate=0.5, key=jax.random.key(1)), y)
    assert (drop(x, rate=0.5, key=jax.random.key(2)) != y).any()
    with jax.enable_x64(True):
        flagged = drop(x, rate=0.5, key=jax.random.key(1))
    assert flagged.dtype == jnp.float32
    np.testing.assert_array_equal(flagged, y)


@pytest.mark.parametrize(
    "spec", [PartitionSpec("a", "b"), PartitionSpec(("b", "a")), PartitionSpec(None, "a")], ids=str
)
def test_a_sharded_array_drops_the_same_elements(spec):
    """B22"""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, key = jnp.arange(1, 24 * 44 + 1, dtype=jnp.float32).reshape(24, 44), jax.random.key(4)
    sharding = NamedSharding(mesh, spec)
    sharded = jax.jit(functools.partial(dropout, rate=0.3), out_shardings=sharding)(
        jax.device_put(x, sharding), key=key
    )
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_array_equal(sharded, drop(x, rate=0.3, key=key))


@pytest.mark.parametrize("shape", [(13,), (3, 5), (2, 3, 5, 7)], ids=str)
def test_a_tile_is_the_slice_of_the_whole(shape):
    """Every start that fits, as plain numbers and traced: a choice belongs to an element, not to a cut."""
    seed, rate = jax.random.key(5), 0.4
    whole = np.asarray(keep(seed, shape, rate))
    lengths = tuple(max(1, length - 2) for length in shape)
    at = jax.jit(lambda starts: keep_mask(seed, shape, rate, tile=tuple(zip(starts, lengths, strict=True))))
    for starts in itertools.product(*(range(length - part + 1) for length, part in zip(shape, lengths, strict=True))):
        part = whole[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]
        np.testing.assert_array_equal(at(tuple(jnp.int32(start) for start in starts)), part)
    np.testing.assert_array_equal(keep_mask(seed, shape, rate, tile=tuple(zip(starts, lengths, strict=True))), part)
    np.testing.assert_array_equal(keep_mask(seed, shape, rate, tile=tuple((0, length) for length in shape)), whole)


def test_tiles_of_many_starts_at_once():
    """Under vmap and in a scan, where blockwise asks for them."""
    seed, shape, rate = jax.random.key(6), (3, 12, 20), 0.4
    whole = np.asarray(keep(seed, shape, rate))
    tile = lambda row, column: keep_mask(seed, shape, rate, tile=((0, 3), (row * 4, 4), (column * 5, 5)))  # noqa: E731
    rows, columns = jnp.arange(3, dtype=jnp.int32), jnp.arange(4, dtype=jnp.int32)
    tiles = jax.jit(jax.vmap(jax.vmap(tile, (None, 0)), (0, None)))(rows, columns)
    scanned = jax.lax.scan(lambda _, row: (None, jax.lax.map(lambda column: tile(row, column), columns)), None, rows)[1]
    blocks = whole.reshape(3, 3, 4, 4, 5).transpose(1, 3, 0, 2, 4)
    np.testing.assert_array_equal(tiles, blocks)
    np.testing.assert_array_equal(scanned, blocks)


def test_a_tile_far_out_is_that_of_its_flat_index():
    """Indices are 32 bits, with or without the x64 flag, and nothing whole is made: 8 heads of 30,011 tokens."""
    seed, shape, rate = jax.random.key(8), (2, 8, 30_011, 30_011), 0.4
    start = (1, 5, 29_990, 17_003)
    tile = tuple(zip(start, (1, 2, 3, 5), strict=True))
    found = keep_mask(seed, shape, rate, tile=tile)
    for offsets in np.ndindex(1, 2, 3):
        first = np.ravel_multi_index((*np.add(start[:3], offsets), start[3]), shape) % 2**32
        along = keep_mask(seed, (2**32,), rate, tile=((jnp.uint32(first), 5),))
        np.testing.assert_array_equal(found[offsets], along)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(keep_mask(seed, shape, rate, tile=tile), found)
