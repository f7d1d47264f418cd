"""Modules: how many parameters they own, with what axes and initial values, and that they compute what `ops` computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax import ops
from tfm_jax.nn import (
    Decoder,
    DecoderBlock,
    Embedding,
    Encoder,
    EncoderBlock,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    plain,
)
from tfm_jax.nn.blocks import BlockSizes
from tfm_jax.ops import AttentionMask, BlockSettings
from tfm_jax.ops.blocks import keys_values

D, N, F, V, L = 6, 3, 7, 5, 2
B, T, S = 2, 3, 5
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
SIZES = BlockSizes(d_model=D, d_ff=F, num_heads=N, d_k=4, d_v=1)


def rngs(seed=0):
    return nnx.Rngs(seed)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def count(make):
    """How many numbers a module owns, without making them."""
    return sum(leaf.size for leaf in jax.tree.leaves(plain(nnx.eval_shape(make))))


def attention_size(sizes):
    """Weights and biases of the four projections."""
    D, N, H, E = sizes.d_model, sizes.num_heads, sizes.d_k, sizes.d_v
    return 2 * (D * N * H + N * H) + (D * N * E + N * E) + (N * E * D + D)


@pytest.mark.parametrize("d_model, num_heads", [(6, 3), (14, 7), (512, 8)])
def test_attention_has_four_square_matrices(d_model, num_heads):
    weights = 4 * d_model**2
    assert count(lambda: MultiHeadAttention(d_model, num_heads, bias=False, rngs=rngs())) == weights
    assert count(lambda: MultiHeadAttention(d_model, num_heads, rngs=rngs())) == weights + 4 * d_model


def test_counts_are_their_closed_forms():
    assert count(lambda: MultiHeadAttention(D, N, d_k=4, d_v=1, rngs=rngs())) == attention_size(SIZES)
    assert count(lambda: FeedForward(D, F, rngs=rngs())) == 2 * D * F + D + F
    assert count(lambda: LayerNorm(D, eps=1e-5, rngs=rngs())) == 2 * D
    assert count(lambda: Embedding(V, D, rngs=rngs())) == V * D
    for norm, last in (("post", 0), ("pre", 2 * D)):
        settings = BlockSettings(norm=norm)
        encoder = attention_size(SIZES) + 2 * D * F + D + F + 2 * (2 * D)
        decoder = encoder + attention_size(SIZES) + 2 * D
        assert count(lambda settings=settings: EncoderBlock(SIZES, settings, rngs=rngs())) == encoder
        assert count(lambda settings=settings: DecoderBlock(SIZES, settings, rngs=rngs())) == decoder
        assert count(lambda settings=settings: Encoder(SIZES, settings, L, rngs=rngs())) == L * encoder + last
        assert count(lambda settings=settings: Decoder(SIZES, settings, L, rngs=rngs())) == L * decoder + last


def test_a_width_that_heads_do_not_divide():
    """B18: refused with both numbers; a head size given is taken."""
    with pytest.raises(ValueError, match=r"d_model is 10, num_heads 3.*give d_k"):
        MultiHeadAttention(10, 3, rngs=rngs())
    with pytest.raises(ValueError, match="10 is not a multiple of 3"):
        Encoder(BlockSizes(d_model=10, d_ff=F, num_heads=3), BlockSettings(), L, rngs=rngs())
    attention = MultiHeadAttention(10, 3, d_k=4, rngs=rngs())
    shapes = {name: leaf.shape for name, leaf in plain(attention).items() if not name.endswith("bias")}
    assert shapes == {"query": (10, 3, 4), "key": (10, 3, 4), "value": (10, 3, 4), "output": (3, 4, 10)}
    assert attention(normal(0, B, T, 10)).shape == (B, T, 10)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_ids_out_of_range_give_nan(jitted):
    """B17: neither the last row, nor a count from the end, nor row 0."""
    embedding = Embedding(V, D, rngs=rngs())
    call = jax.jit(lambda ids: embedding(ids)) if jitted else embedding
    found = np.asarray(call(jnp.asarray([[4, 5, 100, -1, -6, 0, 2**31 - 1, -(2**31)]], jnp.int32)))[0]
    table = np.asarray(embedding.table[...])
    np.testing.assert_array_equal(found[[0, 5]], table[[4, 0]])
    assert np.isnan(found[[1, 2, 3, 4, 6, 7]]).all()
    single = Embedding(1, D, rngs=rngs())(jnp.asarray([[0, 1, -1]], jnp.int32))[0]
    np.testing.assert_array_equal(np.isnan(single).all(axis=1), [False, True, True])


def test_an_embedding_is_an_output_layer_too():
    embedding, x = Embedding(V, D, rngs=rngs()), normal(0, B, T, D)
    logits = embedding.attend(x)
    table = np.asarray(embedding.table[...], np.float64)
    np.testing.assert_allclose(logits, np.asarray(x, np.float64) @ table.T, **FLOAT32)
    assert jax.eval_shape(embedding.attend, x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_modules_are_the_functions_on_their_parameters():
    """Parameters are moved off their initial values, so that a bias that is zero cannot hide."""
    x, other, value = normal(1, B, T, D), normal(2, B, S, D), normal(3, B, S, D)
    mask = jnp.asarray(np.random.default_rng(4).random((B, 1, T, S)) < 0.7)
    attention = moved(MultiHeadAttention(D, N, d_k=4, d_v=1, rngs=rngs()))
    params = plain(attention)
    for args in ((x, x, x), (x, other, other), (x, other, value)):
        given = args[: 1 + (args[1] is other) + (args[2] is value)]
        used = mask if args[1] is other else None
        expected = ops.multi_head_attention(params, *args, mask=used)
        np.testing.assert_array_equal(attention(*given, mask=used), expected)
    feed_forward = moved(FeedForward(D, F, activation="silu", rngs=rngs()))
    np.testing.assert_array_equal(feed_forward(x), ops.feed_forward(plain(feed_forward), x, activation="silu"))
    norm = moved(LayerNorm(D, eps=0.1, rngs=rngs()))
    np.testing.assert_array_equal(norm(x), ops.layer_norm(plain(norm), x, eps=0.1))


def test_dropout_of_attention_is_on_with_a_key():
    attention, x, key = MultiHeadAttention(D, N, rngs=rngs()), normal(1, B, T, D), jax.random.key(0)
    expected = ops.multi_head_attention(plain(attention), x, x, x, dropout_rate=0.5, dropout_key=key)
    np.testing.assert_array_equal(attention(x, dropout_rate=0.5, dropout_key=key), expected)
    np.testing.assert_array_equal(attention(x, dropout_rate=0.5), attention(x))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_is_its_blocks_one_after_another(norm):
    settings = BlockSettings(norm=norm, activation="gelu", norm_eps=0.1)
    encoder, x = moved(Encoder(SIZES, settings, L, rngs=rngs())), normal(1, B, T, D)
    ids = jnp.asarray([[1, 1, 0], [1, 1, 1]], jnp.int32)
    mask = AttentionMask(query_segment_ids=ids, key_segment_ids=ids)
    block, params = EncoderBlock(SIZES, settings, rngs=rngs()), plain(encoder)
    states, weights = [x], []
    for layer in range(L):
        nnx.update(block, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
        h = states[-1] if norm == "post" else ops.layer_norm(plain(block.attention_norm), states[-1], eps=0.1)
        heads = keys_values(plain(block.attention), h, h)
        query = jnp.einsum("BTD,DNH->BTNH", h, block.attention.query[...]) + block.attention.query_bias[...][None, None]
        weights.append(ops.attention_weights(query, heads.key, mask=mask))
        states.append(block(states[-1], mask=mask))
    if norm == "pre":
        states[-1] = ops.layer_norm(params["norm"], states[-1], eps=0.1)
    np.testing.assert_allclose(encoder(x, mask=mask), states[-1], **FLOAT32)
    np.testing.assert_allclose(encoder.hidden_states(x, mask=mask), jnp.stack(states), **FLOAT32)
    for layer in range(L):
        np.testing.assert_allclose(encoder.attention_weights(x, layer, mask=mask), weights[layer], **FLOAT32)
    for layer in (-1, L):
        with pytest.raises(ValueError, match=f"layer is {layer}: the stack has layers 0 to {L - 1}"):
            encoder.attention_weights(x, layer, mask=mask)


def test_a_decoder_is_its_blocks_one_after_another():
    settings = BlockSettings(norm="pre", norm_eps=0.1)
    decoder, x, encoded = moved(Decoder(SIZES, settings, L, rngs=rngs())), normal(1, B, T, D), normal(2, B, S, D)
    positions = jnp.asarray([[0, 1, 2]], jnp.int32)
    mask = AttentionMask(positions, positions, causal=True)
    cross_mask = jnp.ones((B, 1, 1, S), bool).at[1, :, :, 3:].set(False)
    masks = {"mask": mask, "cross_mask": cross_mask}
    block, params = DecoderBlock(SIZES, settings, rngs=rngs()), plain(decoder)
    states, cross = [x], decoder.cross_keys_values(encoded)
    for layer in range(L):
        nnx.update(block, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
        states.append(block(states[-1], encoded, **masks))
        projected = keys_values(plain(block.cross_attention), encoded, encoded)
        np.testing.assert_allclose(cross.key[layer], projected.key, **FLOAT32)
        np.testing.assert_allclose(cross.value[layer], projected.value, **FLOAT32)
    states[-1] = ops.layer_norm(params["norm"], states[-1], eps=0.1)
    np.testing.assert_allclose(decoder(x, encoded, **masks), states[-1], **FLOAT32)
    np.testing.assert_allclose(decoder.hidden_states(x, encoded, **masks), jnp.stack(states), **FLOAT32)
    own, other = decoder.attention_weights(x, encoded, 1, **masks)
    assert own.shape == (B, N, T, T) and other.shape == (B, N, T, S)
    np.testing.assert_array_equal(np.asarray(own) > 0, np.broadcast_to(np.tril(np.ones((T, T), bool)), own.shape))
    assert not other[1, ..., 3:].any()


def moved(module):
    """The module with every parameter away from its initial value."""
    leaves, tree = jax.tree.flatten(plain(module))
    leaves = [leaf + normal(seed, *leaf.shape) / 3 for seed, leaf in enumerate(leaves)]
    nnx.update(module, jax.tree.unflatten(tree, leaves))
    return module


def test_layers_of_a_stack_start_differently():
    params = plain(Decoder(SIZES, BlockSettings(), 3, rngs=rngs()))["layers"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.shape[0] == 3 and leaf.dtype == jnp.float32
        if leaf.ndim > 2 or "up'" in str(path) or "down'" in str(path):  # weights; norms and biases are constants
            assert len({row.tobytes() for row in np.asarray(leaf)}) == 3, path
    matrices = [np.asarray(params[name]["query"]).tobytes() for name in ("attention", "cross_attention")]
    assert matrices[0] != matrices[1]


def test_initial_values_have_the_scale_of_one_layer():
    """Xavier's bounds by fan in and out; the layer axis counts for neither, and query, key, value have half the variance."""
    D, N, H, F = 29, 5, 7, 53
    layers = plain(Encoder(BlockSizes(D, F, N, d_k=H), BlockSettings(), 11, rngs=rngs()))["layers"]
    fans = {"query": 0.5, "key": 0.5, "value": 0.5, "output": 1.0}
    limits = {name: (6 * share / (D + N * H)) ** 0.5 for name, share in fans.items()}
    arrays = [(layers["attention"][name], limit) for name, limit in limits.items()]
    arrays += [(layers["feed_forward"][name], (6 / (D + F)) ** 0.5) for name in ("up", "down")]
    for array, limit in arrays:
        assert 0.98 * limit < np.abs(array).max() <= limit
        np.testing.assert_allclose(np.std(array), limit / 3**0.5, rtol=0.03)
    constants = {name: leaf for name, leaf in layers["attention"].items() if name.endswith("bias")}
    assert len(constants) == 4 and not any(leaf.any() for leaf in constants.values())
    assert (layers["attention_norm"]["scale"] == 1).all() and not layers["attention_norm"]["bias"].any()
    table = Embedding(1009, 31, rngs=rngs()).table[...]
    np.testing.assert_allclose(np.std(table), 31**-0.5, rtol=0.03)


def test_every_axis_has_a_name():
    """A stacked parameter knows its axes without the layer axis, which comes first."""
    axes = {"embed", "mlp", "heads", "kv_heads", "vocab", None}
    modules = {
        0: (lambda: MultiHeadAttention(D, N, rngs=rngs())),
        1: (lambda: Decoder(SIZES, BlockSettings(norm="pre"), L, rngs=rngs()).layers),
    }
    for extra, make in modules.items():
        leaves = jax.tree.leaves(
            nnx.state(nnx.eval_shape(make), nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        assert leaves
        for leaf in leaves:
            assert len(leaf.axes) == leaf.ndim - extra and set(leaf.axes) <= axes
    attention = nnx.eval_shape(modules[0])
    assert attention.query.axes == ("embed", "heads", None) and attention.query_bias.axes == ("heads", None)
    assert attention.key.axes == attention.value.axes == ("embed", "kv_heads", None)
    assert attention.output.axes == ("heads", None, "embed") and attention.output_bias.axes == (None,)
    feed_forward = nnx.eval_shape(lambda: FeedForward(D, F, rngs=rngs()))
    assert feed_forward.up.axes == ("embed", "mlp") and feed_forward.down.axes == ("mlp", "embed")
    assert nnx.eval_shape(lambda: Embedding(V, D, rngs=rngs())).table.axes == ("vocab", "embed")
