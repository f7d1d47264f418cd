"""The cache by values, and decoding with it against the block without it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.ops import AttentionMask, BlockSettings, KeyValue, KVCache, decoder_block, encoder_block
from tfm_jax.ops.cache import Stored
from tfm_jax.ops.multi_head import keys_values

L, B, S, C, K, H, E = 2, 3, 5, 7, 1, 2, 4


def counted(*shape):
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


def stored(columns, shift):
    """Layer by layer other numbers, keys positive and values negative."""
    keys, values = counted(L, B, K, H, columns) + shift, -counted(L, B, K, columns, E) - shift
    return tuple(Stored(key, value) for key, value in zip(keys, values, strict=True))


def cache(*, cross=True):
    positions = jnp.asarray([[0, 1, -1, -1, -1], [-1, 0, -1, -1, -1], [4, 5, -1, -1, -1]], jnp.int32)
    if not cross:
        return KVCache(stored(S, 0.0), positions, jnp.int32(2))
    ids = jnp.asarray([[1] * C, [1] * 3 + [0] * 4, [0] * C], jnp.int32)
    return KVCache(stored(S, 0.0), positions, jnp.int32(2), stored(C, 0.5), ids)


def test_stored_and_projected_are_two_orders_of_the_same_numbers():
    projected = KeyValue(counted(B, S, K, H), counted(B, S, K, E))
    kept = Stored.of(projected)
    assert kept.key.shape == (B, K, H, S) and kept.value.shape == (B, K, S, E)
    np.testing.assert_array_equal(kept.key[2, 0, 1, 3], projected.key[2, 3, 0, 1])
    np.testing.assert_array_equal(kept.value[2, 0, 3], projected.value[2, 3, 0])
    jax.tree.map(np.testing.assert_array_equal, kept.projected, projected)


def test_write_puts_columns_where_they_belong():
    """In the dtype of the cache, and nowhere else."""
    old = Stored(counted(B, K, H, S).astype(jnp.bfloat16), counted(B, K, S, E))
    new = KeyValue(-counted(B, 2, K, H), -counted(B, 2, K, E))
    written = jax.jit(Stored.write)(old, new, jnp.int32(3))
    assert written.key.dtype == jnp.bfloat16 and written.value.dtype == jnp.float32
    before, after = (jax.tree.map(lambda x: np.asarray(x, np.float32), x.projected) for x in (old, written))
    for was, now, put in zip(before, after, new, strict=True):
        np.testing.assert_array_equal(now[:, :3], was[:, :3])
        np.testing.assert_array_equal(now[:, 3:], put)


@pytest.mark.parametrize("columns", [0, 11])
def test_an_empty_cache_has_columns_that_nobody_sees(columns):
    """Its shapes are those of the layers, whatever their number of columns."""
    shapes = tuple(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), layer) for layer in stored(3, 0))
    new = KVCache.empty(shapes, columns, cross=stored(C, 0.5))
    assert new.columns == columns and new.length == 0 and len(new.layers) == len(new.cross) == L
    for layer in new.layers:
        assert layer.key.shape == (B, K, H, columns) and layer.value.shape == (B, K, columns, E)
        assert layer.key.dtype == layer.value.dtype == jnp.bfloat16
    assert new.positions.dtype == jnp.int32 and (new.positions == -1).all()


def test_append_gives_new_columns_their_positions():
    old = cache()
    new = old.append(jnp.asarray([[2, 3], [1, -1], [6, 7]], jnp.int32))
    np.testing.assert_array_equal(new.positions, [[0, 1, 2, 3, -1], [-1, 0, 1, -1, -1], [4, 5, 6, 7, -1]])
    assert new.length == 4 and new.length.dtype == new.positions.dtype == jnp.int32
    assert old.length == 2 and old.positions[0, 2] == -1
    again = new.append(jnp.asarray([[4], [2], [-1]], jnp.int32))
    np.testing.assert_array_equal(again.positions, [[0, 1, 2, 3, 4], [-1, 0, 1, -1, 2], [4, 5, 6, 7, -1]])
    assert again.length == 5
    jax.tree.map(np.testing.assert_array_equal, (old.layers, old.cross), (again.layers, again.cross))


@pytest.mark.parametrize("more", [0, 3])
def test_grown_keeps_everything_and_adds_columns_that_nobody_sees(more):
    old = cache()
    new = jax.jit(KVCache.grown, static_argnums=1)(old, S + more)
    assert new.columns == S + more and new.length == old.length
    for now, was in zip(new.layers, old.layers, strict=True):
        assert now.key.shape == (B, K, H, S + more) and now.value.shape == (B, K, S + more, E)
        np.testing.assert_array_equal(now.key[..., :S], was.key)
        np.testing.assert_array_equal(now.value[:, :, :S], was.value)
    np.testing.assert_array_equal(new.positions, np.pad(old.positions, ((0, 0), (0, more)), constant_values=-1))
    jax.tree.map(np.testing.assert_array_equal, (new.cross, new.cross_segment_ids), (old.cross, old.cross_segment_ids))


def test_a_cache_does_not_shrink():
    with pytest.raises(ValueError, match="the cache has 5 columns: it cannot grow to 4"):
        cache().grown(S - 1)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [2, 2, 0, 0, 1], [1]])
@pytest.mark.parametrize("cross", [True, False], ids=["cross", "alone"])
def test_take_rows_moves_everything_of_a_row(rows, cross):
    old = cache(cross=cross)
    new = jax.jit(KVCache.take_rows)(old, jnp.asarray(rows, jnp.int32))
    own = lambda x: (x.layers, x.positions, x.cross, x.cross_segment_ids)  # noqa: E731
    jax.tree.map(lambda got, source: np.testing.assert_array_equal(got, np.asarray(source)[rows]), own(new), own(old))
    assert new.length == old.length
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(old)]


def block_params(D, F, N):
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


@pytest.mark.parametrize("crossed", [True, False], ids=["decoder", "alone"])
def test_decoding_in_pieces_is_the_block_at_once(crossed):
    """I07, B03: with an encoder and without; empty columns hold large numbers, and nothing but positions hides them."""
    T, D, N = 5, 11, 3
    params, settings = block_params(D, 13, N), BlockSettings(norm="pre")
    rng = np.random.default_rng(1)
    x, encoded = (jnp.asarray(rng.standard_normal((2, length, D)), jnp.float32) for length in (T, C))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (2, T))

    def block(x, mask, **cached):
        if not crossed:
            return encoder_block(params, x, mask=mask, settings=settings, **cached)
        cross = keys_values(params["cross_attention"], encoded, encoded)
        return decoder_block(params, x, cross, mask=mask, cross_mask=None, settings=settings, **cached)

    full, nothing = jax.jit(block)(x, AttentionMask(positions, positions, causal=True))
    assert nothing is None

    @jax.jit
    def step(state, x, positions):
        start, state = state.length, state.append(positions)
        mask = AttentionMask(positions, state.positions, causal=True)
        y, layer = block(x, mask, cache=state.layers[0], start=start)
        return y, replace(state, layers=(layer,))

    for lengths in ([2, 1, 2], [1, 1, 1, 1, 1]):
        empty = Stored(jnp.full((2, N, H, T), 1e4), jnp.full((2, N, T, E), -1e4))
        state, outputs = KVCache((empty,), jnp.full((2, T), -1, jnp.int32), jnp.int32(0)), []
        for columns in np.split(np.arange(T), np.cumsum(lengths)[:-1]):
            y, state = step(state, x[:, columns], positions[:, columns])
            outputs.append(y)
        np.testing.assert_allclose(np.concatenate(outputs, axis=1), full, rtol=1e-5, atol=1e-6)
        assert state.length == T and all((np.abs(leaf) < 1e3).all() for leaf in jax.tree.leaves(state.layers))
