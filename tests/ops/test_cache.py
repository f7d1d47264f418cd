"""The cache by values, and decoding with it against the block without it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.ops import AttentionMask, BlockSettings, KeyValue, KVCache, decoder_block
from tfm_jax.ops.cache import write
from tfm_jax.ops.multi_head import keys_values

L, B, S, C, K, H, E = 2, 3, 5, 7, 1, 2, 4


def counted(*shape):
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


def cache(*, cross=True):
    positions = jnp.asarray([[0, 1, -1, -1, -1], [-1, 0, -1, -1, -1], [4, 5, -1, -1, -1]], jnp.int32)
    own = KeyValue(counted(L, B, S, K, H), -counted(L, B, S, K, E))
    if not cross:
        return KVCache(own, positions, jnp.int32(2))
    ids = jnp.asarray([[1] * C, [1] * 3 + [0] * 4, [0] * C], jnp.int32)
    return KVCache(own, positions, jnp.int32(2), KeyValue(counted(L, B, C, K, H) + 0.5, counted(L, B, C, K, E)), ids)


def test_append_gives_new_columns_their_positions():
    old = cache()
    new = old.append(jnp.asarray([[2, 3], [1, -1], [6, 7]], jnp.int32))
    np.testing.assert_array_equal(new.positions, [[0, 1, 2, 3, -1], [-1, 0, 1, -1, -1], [4, 5, 6, 7, -1]])
    assert new.length == 4 and new.length.dtype == new.positions.dtype == jnp.int32
    assert old.length == 2 and old.positions[0, 2] == -1
    again = new.append(jnp.asarray([[4], [2], [-1]], jnp.int32))
    np.testing.assert_array_equal(again.positions, [[0, 1, 2, 3, 4], [-1, 0, 1, -1, 2], [4, 5, 6, 7, -1]])
    assert again.length == 5
    jax.tree.map(np.testing.assert_array_equal, (old.keys_values, old.cross), (again.keys_values, again.cross))


def test_write_puts_columns_where_they_belong():
    old = KeyValue(counted(B, S, K, H), counted(B, S, K, E))
    new = KeyValue(-jnp.ones((B, 2, K, H)), -jnp.ones((B, 2, K, E)))
    written = jax.jit(write)(old, new, jnp.int32(3))
    for before, after in zip(old, written, strict=True):
        np.testing.assert_array_equal(after[:, :3], before[:, :3])
        np.testing.assert_array_equal(after[:, 3:], -np.ones_like(after[:, 3:]))


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [2, 2, 0, 0, 1], [1]])
def test_take_rows_moves_everything_of_a_row(rows):
    old = cache()
    new = jax.jit(KVCache.take_rows)(old, jnp.asarray(rows, jnp.int32))
    for got, source in zip((*new.keys_values, *new.cross), (*old.keys_values, *old.cross), strict=True):
        np.testing.assert_array_equal(got, np.asarray(source)[:, rows])
    np.testing.assert_array_equal(new.positions, np.asarray(old.positions)[rows])
    np.testing.assert_array_equal(new.cross_segment_ids, np.asarray(old.cross_segment_ids)[rows])
    assert new.length == old.length
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(old)]


def test_swap_beams_leaves_the_encoders_part():
    old, rows = cache(), [2, 0, 0]
    new = old.swap_beams(jnp.asarray(rows, jnp.int32))
    for got, source in zip(new.keys_values, old.keys_values, strict=True):
        np.testing.assert_array_equal(got, np.asarray(source)[:, rows])
    np.testing.assert_array_equal(new.positions, np.asarray(old.positions)[rows])
    assert new.cross is old.cross and new.cross_segment_ids is old.cross_segment_ids


def test_a_cache_without_cross_attention():
    old, rows = cache(cross=False), jnp.asarray([1, 2, 0], jnp.int32)
    assert len(jax.tree.leaves(old)) == 4
    for new in (old.take_rows(rows), old.swap_beams(rows)):
        assert new.cross is None and new.cross_segment_ids is None
        np.testing.assert_array_equal(new.positions, np.asarray(old.positions)[np.asarray(rows)])


def decoder_params(D, F, N):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.5, jnp.float32)  # noqa: E731
    attention = lambda: {  # noqa: E731
        "query": normal(D, N, H),
        "key": normal(D, N, H),
        "value": normal(D, N, E),
        "output": normal(N, E, D),
    }
    norms = {f"{name}_norm": {"scale": normal(D), "bias": normal(D)} for name in ("attention", "cross_attention")}
    return norms | {
        "feed_forward_norm": {"scale": normal(D), "bias": normal(D)},
        "attention": attention(),
        "cross_attention": attention(),
        "feed_forward": {"up": normal(D, F), "down": normal(F, D)},
    }


def test_decoding_in_pieces_is_the_block_at_once():
    """I07, B03: empty columns hold NaN, so nothing but the positions hides them."""
    T, D, N = 5, 11, 3
    params, settings = decoder_params(D, 13, N), BlockSettings(norm="pre")
    rng = np.random.default_rng(1)
    x, encoded = (jnp.asarray(rng.standard_normal((2, length, D)), jnp.float32) for length in (T, C))
    cross = keys_values(params["cross_attention"], encoded, encoded)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))
    full, _ = jax.jit(decoder_block, static_argnames="settings")(
        params, x, cross, mask=AttentionMask(positions, positions, causal=True), cross_mask=None, settings=settings
    )

    @jax.jit
    def step(state, x, positions):
        start, state = state.length, state.append(positions)
        mask = AttentionMask(positions, state.positions, causal=True)
        y, own = decoder_block(
            params, x, cross, mask=mask, cross_mask=None, settings=settings, cache=state.keys_values, start=start
        )
        return y, replace(state, keys_values=own)

    for lengths in ([2, 1, 2], [1, 1, 1, 1, 1]):
        empty = KeyValue(jnp.full((2, T, N, H), jnp.nan), jnp.full((2, T, N, E), jnp.nan))
        state, outputs = KVCache(empty, jnp.full((2, T), -1, jnp.int32), jnp.int32(0)), []
        for columns in np.split(np.arange(T), np.cumsum(lengths)[:-1]):
            y, state = step(state, x[:, columns], positions[:, columns])
            outputs.append(y)
        np.testing.assert_allclose(np.concatenate(outputs, axis=1), full, rtol=1e-5, atol=1e-6)
        assert state.length == T and all(np.isfinite(leaf).all() for leaf in state.keys_values)
