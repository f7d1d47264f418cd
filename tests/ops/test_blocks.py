"""The parts of a block and whole blocks against the float64 oracle, and the symmetries they must have."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle, oracle_blocks
from tfm_jax.ops import (
    AttentionMask,
    BlockSettings,
    decoder_block,
    encoder_block,
    feed_forward,
    layer_norm,
    multi_head_attention,
)
from tfm_jax.ops.blocks import decoder_block_weights, encoder_block_weights, rms_norm
from tfm_jax.ops.multi_head import keys_values

B, T, S, D, N, H, E, F = 2, 5, 7, 11, 3, 2, 4, 13
FLOAT32 = {"rtol": 1e-5, "atol": 2e-6}
SETTINGS = {norm: BlockSettings(norm=norm, norm_eps=1e-3, activation="gelu") for norm in ("post", "pre")}


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def attention_params(rng, *, widths=(D, D, D), bias=True):
    shapes = {"query": (N, H), "key": (N, H), "value": (N, E)}
    params = {name: normal(rng, D, *shape) / 3 for (name, shape), D in zip(shapes.items(), widths, strict=True)}
    params["output"] = normal(rng, N, E, D) / 3
    if bias:
        params |= {f"{name}_bias": normal(rng, *shape) for name, shape in shapes.items()}
        params["output_bias"] = normal(rng, D)
    return params


def norm_params(rng):
    return {"scale": normal(rng, D), "bias": normal(rng, D)}


def feed_forward_params(rng, *, bias=True):
    params = {"up": normal(rng, D, F) / 3, "down": normal(rng, F, D) / 3}
    return params | ({"up_bias": normal(rng, F), "down_bias": normal(rng, D)} if bias else {})


def block_params(*names):
    rng = np.random.default_rng(0)
    params = {name: attention_params(rng) for name in names} | {"feed_forward": feed_forward_params(rng)}
    return params | {f"{name}_norm": norm_params(rng) for name in tuple(params)}


def inputs():
    """x, the encoder's output, and the masks of both attentions; the last row ends with padding."""
    rng = np.random.default_rng(1)
    segments = jnp.asarray([[1] * T, [1, 1, 1, 0, 0]], jnp.int32)
    source_segments = jnp.asarray([[1] * S, [1, 1, 1, 1, 0, 0, 0]], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    mask = AttentionMask(positions, positions, segments, segments, causal=True)
    cross_mask = AttentionMask(query_segment_ids=segments, key_segment_ids=source_segments)
    return normal(rng, B, T, D), normal(rng, B, S, D), mask, cross_mask


@functools.partial(jax.jit, static_argnames="settings")
def encode(params, x, mask, settings, key=None):
    return encoder_block(params, x, mask=mask, settings=settings, key=key)[0]


@functools.partial(jax.jit, static_argnames="settings")
def decode(params, x, encoded, mask, cross_mask, settings, key=None):
    cross = keys_values(params["cross_attention"], encoded, encoded)
    return decoder_block(params, x, cross, mask=mask, cross_mask=cross_mask, settings=settings, key=key)[0]


def alone(row):
    """A batch of one row."""
    return jax.tree.map(lambda x: x[None], row)


def shown(settings):
    return {name: getattr(settings, name) for name in ("norm", "norm_eps", "activation")}


@pytest.mark.parametrize("eps, first", [(1e-5, 0.1491), (1e-6, 0.3333), (1e-12, 0.4472)])
def test_layer_norm_is_the_oracles(eps, first):
    """B58: a variance small enough for eps to matter."""
    x = jnp.asarray([[[1e-3, -1e-3, 2e-3, 0.0]]])
    output = layer_norm({"scale": jnp.ones(4), "bias": jnp.zeros(4)}, x, eps=eps)
    np.testing.assert_allclose(output[0, 0, 0], first, atol=5e-5)
    rng = np.random.default_rng(0)
    params, x = norm_params(rng), normal(rng, B, T, D) * 3 + 1
    np.testing.assert_allclose(layer_norm(params, x, eps=eps), oracle_blocks.layer_norm(params, x, eps=eps), **FLOAT32)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, FLOAT32), (jnp.bfloat16, {"rtol": 1e-2, "atol": 1e-2})])
def test_rms_norm_is_the_oracles(dtype, tolerance):
    """B09, B58: in float32 whatever the input, with an eps that matters for small vectors."""
    rng = np.random.default_rng(0)
    scale, x = (
        normal(rng, D).astype(dtype),
        (normal(rng, B, T, D) * jnp.asarray([1e-3, 300.0])[:, None, None]).astype(dtype),
    )
    output = rms_norm({"scale": scale}, x, eps=1e-6)
    assert output.dtype == dtype
    expected = oracle_blocks.rms_norm({"scale": scale}, x, eps=1e-6)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, **tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["geglu", "geglu_tanh", "swiglu"])
def test_gated_feed_forward_is_the_oracles(activation, bias):
    rng = np.random.default_rng(0)
    params = feed_forward_params(rng, bias=bias) | {"gate": normal(rng, D, F) / 3}
    params |= {"gate_bias": normal(rng, F)} if bias else {}
    x = normal(rng, B, T, D)
    expected = oracle_blocks.feed_forward(params, x, activation=activation)
    np.testing.assert_allclose(feed_forward(params, x, activation=activation), expected, **FLOAT32)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_blocks_of_other_families_are_the_oracles(norm):
    """Fewer heads of keys and values, RMSNorm, a gate, scores as they are, no biases: encoder and decoder block."""
    rng = np.random.default_rng(0)
    own = attention_params(rng, bias=False)
    own |= {name: normal(rng, D, 1, size) / 3 for name, size in (("key", H), ("value", E))}
    params = {name: own for name in ("attention", "cross_attention")}
    params["feed_forward"] = feed_forward_params(rng, bias=False) | {"gate": normal(rng, D, F) / 3}
    params |= {f"{name}_norm": {"scale": normal(rng, D)} for name in tuple(params)}
    settings = BlockSettings(norm=norm, norm_kind="rmsnorm", norm_eps=1e-3, activation="swiglu", attention_scale="none")
    x, encoded, mask, cross_mask = inputs()
    masks = {"mask": mask.array(T, T, N), "cross_mask": cross_mask.array(T, S, N)}
    expected = oracle_blocks.decoder_block(params, x, encoded, **masks, **shown(settings), scale=1.0)
    np.testing.assert_allclose(decode(params, x, encoded, mask, cross_mask, settings), expected, **FLOAT32)
    expected = oracle_blocks.encoder_block(params, x, mask=masks["mask"], **shown(settings), scale=1.0)
    np.testing.assert_allclose(encode(params, x, mask, settings), expected, **FLOAT32)


def test_layer_norm_far_from_zero():
    """The mean is taken away before squares are: E[x^2] - E[x]^2 would be wrong by more than the variance."""
    x = jnp.asarray([[[4096.0, 4096.5, 4095.5, 4097.0]]])
    params = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    np.testing.assert_allclose(
        layer_norm(params, x, eps=1e-5), oracle_blocks.layer_norm(params, x, eps=1e-5), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_layer_norm_computes_in_float32(dtype):
    """B09: squares of 300 overflow float16."""
    rng = np.random.default_rng(0)
    params, x = jax.tree.map(lambda x: x.astype(dtype), (norm_params(rng), normal(rng, B, T, D) * 300))
    output = layer_norm(params, x, eps=1e-5)
    assert output.dtype == dtype
    expected = oracle_blocks.layer_norm(params, x, eps=1e-5)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_gradients_of_layer_norm_are_finite_differences_of_the_oracle(x64):
    """I33: layer norm is float32 by contract, so the differences are taken of the float64 oracle instead."""
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        dtype = jnp.float64 if x64 else jnp.float32
        params, x, cotangent = jax.tree.map(
            lambda x: x.astype(dtype), (norm_params(rng), normal(rng, 1, 2, D), normal(rng, 1, 2, D))
        )
        found = jax.jit(jax.grad(lambda p: (layer_norm(p, p["x"], eps=1e-2) * cotangent).sum()))({**params, "x": x})
    arrays = {name: np.asarray(value, np.float64) for name, value in {**params, "x": x}.items()}

    def loss(name, index, step):
        moved = arrays[name].copy()
        moved[index] += step
        p = arrays | {name: moved}
        return (oracle_blocks.layer_norm(p, p["x"], eps=1e-2) * np.asarray(cotangent)).sum()

    for name, array in arrays.items():
        differences = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            differences[index] = (loss(name, index, 1e-6) - loss(name, index, -1e-6)) / 2e-6
        assert found[name].dtype == dtype
        np.testing.assert_allclose(found[name], differences, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_feed_forward_is_the_oracles(activation):
    rng = np.random.default_rng(0)
    x = normal(rng, B, T, D)
    for bias in (True, False):
        params = feed_forward_params(rng, bias=bias)
        expected = oracle_blocks.feed_forward(params, x, activation=activation)
        np.testing.assert_allclose(feed_forward(params, x, activation=activation), expected, **FLOAT32)


def test_the_two_gelus_differ_as_published():
    """B58"""
    one = {"up": jnp.ones((1, 1)), "down": jnp.ones((1, 1))}
    for activation, expected in (("gelu", 0.841345), ("gelu_tanh", 0.841192)):
        np.testing.assert_allclose(feed_forward(one, jnp.ones((1, 1, 1)), activation=activation)[0, 0], expected, 1e-6)


@pytest.mark.parametrize("widths", [(D, D, D), (D, 19, 23), (17, 19, 23)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_is_the_oracles(widths, bias):
    """Query, key and value from three places, of three widths; d_v is not d_k."""
    rng = np.random.default_rng(0)
    params, mask = attention_params(rng, widths=widths, bias=bias), inputs()[3].array(T, S)
    query, key, value = (normal(rng, B, length, width) for length, width in zip((T, S, S), widths, strict=True))
    output = jax.jit(multi_head_attention)(params, query, key, value, mask=mask)
    assert output.shape == (B, T, D)
    np.testing.assert_allclose(
        output, oracle_blocks.multi_head_attention(params, query, key, value, mask=mask), **FLOAT32
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_encoder_block_is_the_oracles(norm):
    params, (x, _, mask, _), settings = block_params("attention"), inputs(), SETTINGS[norm]
    expected = oracle_blocks.encoder_block(params, x, mask=mask.array(T, T), **shown(settings))
    batch = encode(params, x, mask, settings)
    np.testing.assert_allclose(batch, expected, rtol=1e-5, atol=1e-5)
    eager, cache = encoder_block(params, x, mask=mask, settings=settings)
    np.testing.assert_allclose(eager, batch, **FLOAT32)  # I01
    assert cache is None


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decoder_block_is_the_oracles(norm):
    params, arrays, settings = block_params("attention", "cross_attention"), inputs(), SETTINGS[norm]
    x, encoded, mask, cross_mask = arrays
    masks = {"mask": mask.array(T, T), "cross_mask": cross_mask.array(T, S)}
    expected = oracle_blocks.decoder_block(params, x, encoded, **masks, **shown(settings))
    batch = decode(params, *arrays, settings)
    np.testing.assert_allclose(batch, expected, rtol=1e-5, atol=1e-5)


def test_vmap_over_rows_is_the_batch():
    """I02"""
    params, arrays, settings = block_params("attention", "cross_attention"), inputs(), SETTINGS["pre"]
    x, _, mask, _ = arrays
    row = jax.vmap(lambda *row: encode(params, *alone(row), settings)[0])
    np.testing.assert_allclose(jax.jit(row)(x, mask), encode(params, x, mask, settings), **FLOAT32)
    row = jax.vmap(lambda *row: decode(params, *alone(row), settings)[0])
    np.testing.assert_allclose(jax.jit(row)(*arrays), decode(params, *arrays, settings), **FLOAT32)


def test_blocks_take_masks_as_arrays_too():
    """One for T keys and one for S keys in the same call."""
    params, (x, encoded, mask, cross_mask) = block_params("attention", "cross_attention"), inputs()
    settings = SETTINGS["pre"]
    arrays = mask.array(T, T), cross_mask.array(T, S)
    np.testing.assert_allclose(encode(params, x, arrays[0], settings), encode(params, x, mask, settings), **FLOAT32)
    expected = decode(params, x, encoded, mask, cross_mask, settings)
    np.testing.assert_allclose(decode(params, x, encoded, *arrays, settings), expected, **FLOAT32)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_weights_of_blocks_are_the_oracles(norm):
    params, (x, encoded, mask, cross_mask), settings = (
        block_params("attention", "cross_attention"),
        inputs(),
        SETTINGS[norm],
    )

    def weights(name, query, key, mask):
        query, key = (
            np.einsum("BTD,DNH->BTNH", x, params[name][of]) + np.asarray(params[name][f"{of}_bias"])
            for of, x in (("query", query), ("key", key))
        )
        return oracle.attention_weights(query, key, mask=mask.array(query.shape[1], key.shape[1]))

    def entered(name, x):
        return (
            oracle_blocks.layer_norm(params[f"{name}_norm"], x, eps=settings.norm_eps)
            if norm == "pre"
            else np.asarray(x)
        )

    h = entered("attention", x)
    expected = weights("attention", h, h, mask)
    own = jax.jit(encoder_block_weights, static_argnames="settings")(params, x, mask=mask, settings=settings)
    np.testing.assert_allclose(own, expected, **FLOAT32)
    attended = oracle_blocks.multi_head_attention(params["attention"], h, h, h, mask=mask.array(T, T)) + np.asarray(x)
    if norm == "post":
        attended = oracle_blocks.layer_norm(params["attention_norm"], attended, eps=settings.norm_eps)
    cross = keys_values(params["cross_attention"], encoded, encoded)
    own, other = jax.jit(decoder_block_weights, static_argnames="settings")(
        params, x, cross, mask=mask, cross_mask=cross_mask, settings=settings
    )
    np.testing.assert_allclose(own, expected, **FLOAT32)
    h = entered("cross_attention", attended)
    np.testing.assert_allclose(other, weights("cross_attention", h, encoded, cross_mask), rtol=1e-5, atol=1e-5)


def test_an_unknown_norm_placement_is_refused():
    params, (x, _, mask, _), settings = block_params("attention"), inputs(), BlockSettings()
    object.__setattr__(settings, "norm", "sandwich")  # past the annotation, as a user without a type checker
    with pytest.raises(ValueError, match="'pre' or 'post', got 'sandwich'"):
        encoder_block(params, x, mask=mask, settings=settings)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_positions_the_encoder_knows_no_order(norm):
    """I09"""
    params, (x, *_) = block_params("attention"), inputs()
    order = np.asarray([3, 0, 4, 1, 2])
    permuted = encode(params, x[:, order], None, SETTINGS[norm])
    np.testing.assert_allclose(permuted, encode(params, x, None, SETTINGS[norm])[:, order], **FLOAT32)


def test_rows_of_a_batch_do_not_reach_each_other():
    """I05, B10: the Jacobian across the batch is zero, exactly; within a row it obeys the causal mask."""
    params, (x, *_) = block_params("attention"), inputs()
    x, positions = x[:, :3], jnp.asarray([[0, 1, 2]], jnp.int32)
    mask = AttentionMask(positions, positions, causal=True)
    settings = SETTINGS["pre"]
    jacobian = jax.jit(jax.jacrev(lambda x: encoder_block(params, x, mask=mask, settings=settings)[0]))(x)
    reached = np.abs(jacobian).max(axis=(2, 5)) > 0  # B T, B T
    expected = np.zeros((B, 3, B, 3), bool)
    for b in range(B):
        expected[b, :, b] = np.tril(np.ones((3, 3), bool))
    np.testing.assert_array_equal(reached, expected)


def test_gradients_are_finite_where_rows_are_dead():
    """I11, B01: padding queries see nothing at all."""
    params, arrays = block_params("attention", "cross_attention"), inputs()

    def loss(params, x, encoded):
        return jnp.square(decode(params, x, encoded, *arrays[2:], SETTINGS["post"])).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, *arrays[:2])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert not gradients[2][1, 4:].any()


@pytest.mark.parametrize("site", ["residual_dropout", "attention_dropout", "feed_forward_dropout"])
def test_every_site_of_dropout_needs_a_rate_and_a_key(site):
    """B20, I13"""
    params, arrays = block_params("attention", "cross_attention"), inputs()
    x, _, mask, _ = arrays
    off, on = SETTINGS["pre"], replace(SETTINGS["pre"], **{site: 0.5})
    one, other = jax.random.split(jax.random.key(0))
    encoder = lambda settings, key: encode(params, x, mask, settings, key)  # noqa: E731
    decoder = lambda settings, key: decode(params, *arrays, settings, key)  # noqa: E731
    for run in (encoder, decoder):
        program = lambda settings, key, run=run: str(jax.make_jaxpr(lambda: run(settings, key))())  # noqa: E731
        assert program(on, None) == program(off, None) != program(on, one)
    assert (decoder(on, one) != decoder(off, None)).any() and (decoder(on, one) != decoder(on, other)).any()
    np.testing.assert_array_equal(decoder(on, one), decoder(on, one))
