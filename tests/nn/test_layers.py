"""Modules: the number, axes and initial values of their parameters, and that they compute what `ops` computes."""

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
from tfm_jax.nn.blocks import BlockSizes, stacked
from tfm_jax.ops import AttentionMask, BlockSettings
from tfm_jax.ops.blocks import encoder_block_weights
from tfm_jax.ops.multi_head import keys_values

D, N, F, V, L = 6, 3, 7, 5, 2
B, T, S = 2, 3, 5
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
SIZES = BlockSizes(d_model=D, d_ff=F, num_heads=N, d_k=4, d_v=1)


def rngs(seed=0):
    return nnx.Rngs(seed)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def filled(make):
    """The module with random numbers for every parameter, so that a bias that starts as zero cannot hide."""
    skeleton = nnx.eval_shape(make)
    leaves, tree = jax.tree.flatten(plain(skeleton))
    leaves = [normal(seed, *leaf.shape) / 2 for seed, leaf in enumerate(leaves)]
    return nnx.merge(nnx.graphdef(skeleton), jax.tree.unflatten(tree, leaves))


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
    attention = filled(lambda: MultiHeadAttention(10, 3, d_k=4, rngs=rngs()))
    shapes = {name: leaf.shape for name, leaf in plain(attention).items() if not name.endswith("bias")}
    assert shapes == {"query": (10, 3, 4), "key": (10, 3, 4), "value": (10, 3, 4), "output": (3, 4, 10)}
    assert jax.eval_shape(lambda x: attention(x), normal(0, B, T, 10)).shape == (B, T, 10)


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
    x, other, value = normal(1, B, T, D), normal(2, B, S, D), normal(3, B, S, D)
    mask = jnp.asarray(np.random.default_rng(4).random((B, 1, T, S)) < 0.7)
    attention = filled(lambda: MultiHeadAttention(D, N, d_k=4, d_v=1, rngs=rngs()))
    run, attend = jax.jit(lambda *args, **kw: attention(*args, **kw)), jax.jit(ops.multi_head_attention)
    for given, meant, used in (
        ((x,), (x, x, x), None),
        ((x, other), (x, other, other), mask),
        ((x, other, value), (x, other, value), mask),
    ):
        np.testing.assert_allclose(run(*given, mask=used), attend(plain(attention), *meant, mask=used), **FLOAT32)
    feed_forward = filled(lambda: FeedForward(D, F, activation="silu", rngs=rngs()))
    np.testing.assert_array_equal(feed_forward(x), ops.feed_forward(plain(feed_forward), x, activation="silu"))
    norm = filled(lambda: LayerNorm(D, eps=0.1, rngs=rngs()))
    np.testing.assert_array_equal(norm(x), ops.layer_norm(plain(norm), x, eps=0.1))


def test_dropout_of_attention_is_on_with_a_key():
    """B20"""
    attention, x, key = filled(lambda: MultiHeadAttention(D, N, rngs=rngs())), normal(1, B, T, D), jax.random.key(0)
    run = jax.jit(lambda rate, key: attention(x, dropout_rate=rate, dropout_key=key), static_argnums=0)
    expected = ops.multi_head_attention(plain(attention), x, x, x, dropout_rate=0.5, dropout_key=key)
    np.testing.assert_allclose(run(0.5, key), expected, **FLOAT32)
    np.testing.assert_array_equal(run(0.5, None), run(0.0, None))
    assert (run(0.5, key) != run(0.0, None)).any()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_is_its_blocks_one_after_another(norm):
    settings = BlockSettings(norm=norm, activation="gelu", norm_eps=0.1)
    encoder, x = filled(lambda: Encoder(SIZES, settings, L, rngs=rngs())), normal(1, B, T, D)
    ids = jnp.asarray([[1, 1, 0], [1, 1, 1]], jnp.int32)
    mask = AttentionMask(query_segment_ids=ids, key_segment_ids=ids)
    graph, params = nnx.graphdef(nnx.eval_shape(lambda: EncoderBlock(SIZES, settings, rngs=rngs()))), plain(encoder)

    @jax.jit
    def blocks(x):
        """The state after every block, and the weights in it."""
        states, weights = [x], []
        for layer in range(L):
            block = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
            weights.append(encoder_block_weights(plain(block), states[-1], mask=mask, settings=settings))
            states.append(block(states[-1], mask=mask))
        if norm == "pre":
            states[-1] = ops.layer_norm(params["norm"], states[-1], eps=0.1)
        return jnp.stack(states), weights

    @jax.jit
    def stack(x):
        return (
            encoder(x, mask=mask),
            encoder.hidden_states(x, mask=mask),
            encoder.attention_weights(x, 1, mask=mask),
        )

    (states, weights), (output, found, shown) = blocks(x), stack(x)
    np.testing.assert_allclose(output, states[-1], **FLOAT32)
    np.testing.assert_allclose(found, states, **FLOAT32)
    np.testing.assert_allclose(shown, weights[1], **FLOAT32)
    for layer in (-1, L):
        with pytest.raises(ValueError, match=f"layer is {layer}: the stack has layers 0 to {L - 1}"):
            encoder.attention_weights(x, layer, mask=mask)


def test_a_decoder_is_its_blocks_one_after_another():
    settings = BlockSettings(norm="pre", norm_eps=0.1)
    decoder = filled(lambda: Decoder(SIZES, settings, L, rngs=rngs()))
    x, encoded, positions = normal(1, B, T, D), normal(2, B, S, D), jnp.asarray([[0, 1, 2]], jnp.int32)
    cross_mask = AttentionMask(
        query_segment_ids=jnp.ones((B, T), jnp.int32), key_segment_ids=jnp.ones((B, S), jnp.int32).at[1, 3:].set(0)
    )
    masks = {"mask": AttentionMask(positions, positions, causal=True), "cross_mask": cross_mask}
    graph, params = nnx.graphdef(nnx.eval_shape(lambda: DecoderBlock(SIZES, settings, rngs=rngs()))), plain(decoder)

    @jax.jit
    def blocks(x, encoded):
        """The state after every block, and the encoder's output projected for each."""
        states, cross = [x], []
        for layer in range(L):
            block = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
            cross.append(keys_values(plain(block.cross_attention), encoded, encoded))
            states.append(block(states[-1], encoded, **masks))
        return jnp.stack([*states[:-1], ops.layer_norm(params["norm"], states[-1], eps=0.1)]), cross

    @jax.jit
    def stack(x, encoded):
        weights = decoder.attention_weights(x, encoded, 1, **masks)
        states = decoder.hidden_states(x, encoded, **masks)
        return decoder(x, encoded, **masks), states, decoder.cross_keys_values(encoded), weights

    states, cross = blocks(x, encoded)
    output, found, projected, (own, other) = stack(x, encoded)
    np.testing.assert_allclose(output, states[-1], **FLOAT32)
    np.testing.assert_allclose(found, states, **FLOAT32)
    for one, stored in zip(cross, projected, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **FLOAT32), stored.projected, one)
    assert own.shape == (B, N, T, T) and other.shape == (B, N, T, S)
    np.testing.assert_array_equal(np.asarray(own) > 0, np.broadcast_to(np.tril(np.ones((T, T), bool)), own.shape))
    assert not np.asarray(other)[1, ..., 3:].any() and (np.asarray(other)[0] > 0).all()


def test_layers_start_differently_and_with_the_scale_of_one_layer():
    """Xavier's bounds by fan in and out of one layer; query, key and value have half of that variance."""
    D, N, H, L = 29, 5, 7, 11
    attention = plain(stacked(lambda rngs: MultiHeadAttention(D, N, d_k=H, rngs=rngs), L, rngs=rngs()))
    for name, share in {"query": 0.5, "key": 0.5, "value": 0.5, "output": 1.0}.items():
        array = np.asarray(attention[name])
        assert array.shape[0] == L and array.dtype == np.float32
        assert len({layer.tobytes() for layer in array}) == L, name
        assert_xavier(array, 6 * share / (D + N * H))
        assert attention[f"{name}_bias"].shape[0] == L and not np.asarray(attention[f"{name}_bias"]).any()
    assert len({np.asarray(attention[name]).tobytes() for name in ("query", "key", "value")}) == 3


def test_initial_values():
    feed_forward = plain(FeedForward(61, 67, rngs=rngs()))
    for name in ("up", "down"):
        assert_xavier(np.asarray(feed_forward[name]), 6 / (61 + 67))
        assert not np.asarray(feed_forward[f"{name}_bias"]).any()
    norm = plain(LayerNorm(D, eps=1e-5, rngs=rngs()))
    assert (np.asarray(norm["scale"]) == 1).all() and not np.asarray(norm["bias"]).any()
    table = Embedding(1009, 31, rngs=rngs()).table[...]
    np.testing.assert_allclose(np.std(table), 31**-0.5, rtol=0.03)


def assert_xavier(array, square):
    """Uniform between plus and minus the root of `square`."""
    limit = square**0.5
    assert 0.98 * limit < np.abs(array).max() <= limit
    np.testing.assert_allclose(np.std(array), limit / 3**0.5, rtol=0.03)


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


def test_queries_of_scores_that_nothing_divides_begin_smaller():
    """By sqrt(d_k), as T5's do, so that both kinds of scores begin alike; keys and values are the same."""
    scaled, unscaled = (plain(MultiHeadAttention(24, 2, d_k=16, scaled=kind, rngs=rngs())) for kind in (True, False))
    np.testing.assert_allclose(unscaled["query"] * 4.0, scaled["query"], **FLOAT32)
    for name in ("key", "value", "output"):
        np.testing.assert_array_equal(unscaled[name], scaled[name])
