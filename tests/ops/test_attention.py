"""Scaled dot-product attention against the float64 oracle, and what must hold under every mask and dtype."""

import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import (
    AttentionMask,
    additive_mask,
    attention_weights,
    causal_mask,
    dot_product_attention,
    multi_head_attention,
    padding_mask,
)

B, T, S, K, G, H, E = 2, 5, 7, 3, 2, 11, 13
N = K * G
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
attend = jax.jit(dot_product_attention, static_argnames="dropout_rate")
weigh = jax.jit(attention_weights)


@jax.jit
def output_and_gradients(qkv, mask, bias):
    """The output, and the gradients of the sum of its squares."""

    def loss(*qkv):
        output = dot_product_attention(*qkv, mask=mask, bias=bias)
        return jnp.square(output.astype(jnp.float32)).sum(), output

    gradients, output = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return output, gradients


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def query_key_value(*, heads=N, groups=K, length=T, dtype=jnp.float32):
    query, key = normal(1, B, length, heads, H, dtype=dtype), normal(2, B, S, groups, H, dtype=dtype)
    return query, key, normal(3, B, S, groups, E, dtype=dtype)


def random_mask(seed, *shape):
    """Half of it True; where there is a batch axis, the first query of the last row sees nothing."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[-1, :, 0] = mask[-1, :, 0] & (shape[0] == 1)
    return jnp.asarray(mask)


def random_bias(seed, *shape, hidden=0.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.where(rng.random(shape) < hidden, -np.inf, rng.standard_normal(shape)), jnp.float32)


RESTRICTIONS = {
    "nothing": {},
    "mask": {"mask": random_mask(4, B, 1, T, S)},
    "one mask for the batch": {"mask": random_mask(5, 1, 1, T, S)},
    "one mask for the queries": {"mask": random_mask(6, B, 1, 1, S)},
    "a mask per head": {"mask": random_mask(7, B, N, T, S)},
    "bias": {"bias": random_bias(8, B, N, T, S)},
    "bias per head": {"bias": random_bias(9, 1, N, T, S)},
    "bias with -inf": {"bias": random_bias(10, B, 1, T, S, hidden=0.5)},
    "mask and bias with -inf": {"mask": random_mask(11, B, 1, T, S), "bias": random_bias(12, 1, N, T, S, hidden=0.3)},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("restriction", RESTRICTIONS)
def test_attention_is_the_oracles(restriction):
    """T != S, d_v != d_k and grouped heads in every case."""
    query, key, value = query_key_value()
    settings = RESTRICTIONS[restriction]
    both = lambda **arrays: (  # noqa: E731
        dot_product_attention(query, key, value, **arrays, scale=settings.get("scale")),
        attention_weights(query, key, **arrays, scale=settings.get("scale")),
    )
    output, weights = jax.jit(both)(mask=settings.get("mask"), bias=settings.get("bias"))
    assert output.shape == (B, T, N, E)
    np.testing.assert_allclose(output, oracle.dot_product_attention(query, key, value, **settings), **FLOAT32)
    np.testing.assert_allclose(weights, oracle.attention_weights(query, key, **settings), **FLOAT32)


@pytest.mark.parametrize("heads, groups", [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_grouped_heads_are_repeated_keys_and_values(heads, groups):
    query, key, value = query_key_value(heads=heads, groups=groups)
    repeated = (jnp.repeat(x, heads // groups, axis=2) for x in (key, value))
    np.testing.assert_allclose(attend(query, key, value), attend(query, *repeated), **FLOAT32)


def test_heads_that_do_not_divide_are_refused():
    """B18"""
    query, key, value = query_key_value(heads=5, groups=3)
    with pytest.raises(ValueError, match="query has 5 heads, key has 3"):
        dot_product_attention(query, key, value)
    with pytest.raises(ValueError, match="5 is not a multiple of 3"):
        attention_weights(query, key)


def test_rows_of_the_weights_sum_to_one_or_to_zero():
    query, key, _ = query_key_value()
    for seed in range(20):
        mask = np.random.default_rng(seed).random((B, N, T, S)) < seed / 19
        weights = np.asarray(weigh(query * 9, key, mask=jnp.asarray(mask)))
        np.testing.assert_allclose(weights.sum(-1), mask.any(-1), atol=1e-6)
        assert (weights >= 0).all() and not weights[~mask].any()


def test_the_diagonal_mask_returns_the_values():
    """B08: True means attend."""
    query, key, value = (normal(seed, 2, 3, 5, 7) for seed in range(3))
    output = attend(query, key, value, mask=jnp.eye(3, dtype=bool)[None, None])
    np.testing.assert_array_equal(output, value)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("checked", [True, False], ids=["jaxtyping", "alone"])
def test_a_mask_that_is_not_boolean_is_refused(dtype, checked):
    """B08, with the annotations checked and as a user without jaxtyping's hook sees it."""
    query, key, value = (normal(seed, 2, 3, 5, 7) for seed in range(3))
    jaxtyping.config.update("jaxtyping_disable", not checked)
    try:
        error = jaxtyping.TypeCheckError if checked else ValueError
        with pytest.raises(error, match="mask"):
            dot_product_attention(query, key, value, mask=jnp.eye(3, dtype=dtype)[None, None])
        with pytest.raises(error, match="mask"):
            attention_weights(query, key, mask=jnp.eye(3, dtype=dtype)[None, None])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_the_additive_form_is_the_boolean_form():
    query, key, value = query_key_value()
    mask = jnp.asarray(np.asarray(random_mask(4, 1, 1, T, S)) | np.eye(T, S, dtype=bool))
    boolean, additive = attend(query, key, value, mask=mask), attend(query, key, value, bias=additive_mask(mask))
    np.testing.assert_array_equal(boolean, additive)
    repeated = np.repeat(key, G, axis=2)
    logits = np.einsum("BTNH,BSNH->BNTS", query, repeated) / H**0.5
    textbook = jax.nn.softmax(logits + np.asarray(additive_mask(mask)), axis=-1)
    np.testing.assert_allclose(weigh(query, key, mask=mask), textbook, **FLOAT32)


def test_no_query_sees_a_later_key():
    """B10: the Jacobian is zero above the diagonal, exactly, and nowhere else."""
    x = normal(0, 1, T, 2, 3)
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    mask = AttentionMask(positions, positions, causal=True)
    jacobian = jax.jit(jax.jacrev(lambda x: dot_product_attention(x, x, x, mask=mask)))(x)
    reached = np.abs(jacobian).max(axis=(0, 2, 3, 4, 6, 7))
    np.testing.assert_array_equal(reached > 0, np.tril(np.ones((T, T), bool)))


# What fails in half precision are fully masked rows and sums of mask constants, so every combination is tried.
POSITIONS = jnp.asarray([[0, 1, 2], [-1, 0, 1]], jnp.int32)
MASKS = {
    "causal": causal_mask(POSITIONS, POSITIONS),
    "padding": padding_mask(*(jnp.asarray(ids, jnp.int32) for ids in ([[1, 1, 1], [0, 1, 1]], [[1, 1, 0], [0, 1, 1]]))),
    "user": jnp.asarray([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)[None, None],
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["float16", "bfloat16", "float32"])
def test_every_dtype_is_finite_under_every_mask(dtype):
    """B05, I11; the scores go beyond the range of float16 (65504)."""
    query, key, value = (normal(seed, 2, 3, 5, 7, dtype=dtype) for seed in range(3))
    query, key = query * 300, key * 300
    for chosen in range(8):
        masks = [mask for bit, mask in enumerate(MASKS.values()) if chosen >> bit & 1]
        mask = functools.reduce(jnp.logical_and, masks, jnp.ones((2, 1, 3, 3), bool))
        output, gradients = output_and_gradients((query, key, value), mask, None)
        assert output.dtype == dtype and all(g.dtype == dtype for g in gradients)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (output, *gradients))
        dead = ~np.broadcast_to(np.asarray(mask).any(-1), (2, 1, 3))[:, 0]
        assert not np.asarray(output, np.float32)[dead].any()
        assert not np.asarray(gradients[0], np.float32)[dead].any()


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float16, 2e-3), (jnp.bfloat16, 2e-2)], ids=["float16", "bfloat16"])
def test_half_precision_is_near_the_oracle(dtype, tolerance):
    """B09: logits, softmax and sums of products are float32, so only inputs, weights and the result are rounded."""
    query, key, value = query_key_value(dtype=dtype)
    mask = random_mask(4, B, 1, T, S)
    output = attend(query, key, value, mask=mask)
    assert output.dtype == dtype
    expected = oracle.dot_product_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=tolerance, atol=tolerance)
    assert jax.eval_shape(attention_weights, query, key, mask=mask).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_exponential_is_float32(dtype, masked):
    """B09"""
    query, key, value = query_key_value(dtype=dtype)
    mask = random_mask(4, B, 1, T, S) if masked else None
    jaxpr = str(jax.make_jaxpr(lambda *qkv: dot_product_attention(*qkv, mask=mask))(query, key, value))
    assert set(re.findall(r":(\w+)\[[\d,]*\] = exp ", jaxpr)) == {"f32"}
    assert set(re.findall(r":(\w+)\[[\d,]*\] = dot_general", jaxpr)) == {"f32"}


def test_a_dead_row_is_zero_and_gives_no_gradient():
    """B01: through masks, AttentionMask and bias alike."""
    qkv = query_key_value()
    dead = jnp.ones((B, 1, T, S), bool).at[1, :, 3].set(False)
    segments = AttentionMask(
        query_segment_ids=jnp.ones((B, T), jnp.int32).at[1, 3].set(0), key_segment_ids=jnp.ones((B, S), jnp.int32)
    )
    expected = output_and_gradients(qkv, dead, None)
    for mask, bias in ((dead, None), (segments, None), (None, additive_mask(dead))):
        output, gradients = output_and_gradients(qkv, mask, bias)
        assert not output[1, 3].any() and np.asarray(output).any(axis=(2, 3)).sum() == B * T - 1
        assert not gradients[0][1, 3].any() and all(np.isfinite(g).all() for g in gradients)
        jax.tree.map(np.testing.assert_array_equal, (output, gradients), expected)


def test_a_dead_row_does_not_reach_the_shared_projections():
    """B01: key padding and a band leave query (1, 3) nothing; its loss weight is 0."""
    D = 4
    names = {"query": (D, 1, 4), "key": (D, 1, 4), "value": (D, 1, 4), "output": (1, 4, D)}
    names |= {"query_bias": (1, 4), "key_bias": (1, 4), "value_bias": (1, 4), "output_bias": (D,)}
    params = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(names.items())}
    x, weights = normal(20, 2, 4, D), jnp.ones((2, 4)).at[1, 3].set(0.0)
    rows, columns = np.indices((4, 4))
    band = (rows - columns >= 0) & (rows - columns <= 1)
    mask = jnp.asarray(band[None, None] & np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], bool)[:, None, None])
    assert not mask[1, 0, 3].any() and mask.any(-1).sum() == 7

    @jax.jit
    def gradients(mask):
        def loss(params, x):
            output = multi_head_attention(params, x, x, x, mask=mask)
            return (jnp.square(output).sum(-1) * weights).sum(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    dead, output = gradients(mask)
    alive, other = gradients(mask.at[1, 0, 3, 0].set(True))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(dead))
    jax.tree.map(np.testing.assert_array_equal, dead, alive)
    np.testing.assert_array_equal(output[1, 3], params["output_bias"])
    np.testing.assert_array_equal(output.at[1, 3].set(0), other.at[1, 3].set(0))


@pytest.mark.parametrize("junk", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("heads", [1, N], ids=["mask for all heads", "mask per head"])
def test_what_no_query_sees_never_matters(heads, junk):
    """Slots that are hidden from all queries and queries that see nothing may hold anything, in both passes."""
    clean = query_key_value()
    mask = jnp.ones((B, heads, T, S), bool).at[0, :, :, 2].set(False).at[1, :, :, 6].set(False).at[1, :, 4].set(False)
    query, key, value = clean
    soiled = (
        query.at[1, 4].set(junk),
        key.at[0, 2].set(junk).at[1, 6].set(junk),
        value.at[0, 2].set(junk).at[1, 6].set(junk),
    )

    for restriction in ((mask, None), (None, additive_mask(mask))):
        expected, found = (output_and_gradients(qkv, *restriction) for qkv in (clean, soiled))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def central_differences(function, x, step=1e-6):
    x = np.asarray(x, np.float64)
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_finite_differences_of_the_oracle(masked, x64):
    """I33: the logits are float32 by contract, so the differences are taken of the float64 oracle instead."""
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        arrays = {
            "query": normal(1, 1, 2, 2, 5, dtype=dtype),
            "key": normal(2, 1, 3, 1, 5, dtype=dtype),
            "value": normal(3, 1, 3, 1, 2, dtype=dtype),
            "bias": normal(4, 1, 2, 2, 3, dtype=dtype),
        }
        mask = None
        if masked:
            arrays["bias"] = arrays["bias"].at[0, 0, 1, 0].set(-jnp.inf)
            mask = jnp.asarray([[[1, 1, 0], [0, 1, 1]], [[1, 0, 1], [0, 0, 0]]], bool)[None]
        cotangent = normal(5, 1, 2, 2, 2, dtype=dtype)
        found = jax.jit(jax.grad(lambda x: (dot_product_attention(**x, mask=mask) * cotangent).sum()))(arrays)
    for name, gradient in found.items():
        expected = central_differences(
            lambda x, name=name: (
                oracle.dot_product_attention(**(arrays | {name: x}), mask=mask) * np.asarray(cotangent)
            ).sum(),
            arrays[name],
        )
        assert gradient.dtype == dtype
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-6, err_msg=name)


def test_the_x64_flag_changes_nothing():
    """B56"""
    query, key, value = query_key_value()
    mask = random_mask(4, B, 1, T, S)
    expected = attend(query, key, value, mask=mask)
    with jax.enable_x64(True):
        output = attend(query, key, value, mask=mask)
    assert output.dtype == jnp.float32
    np.testing.assert_array_equal(output, expected)


def test_jit_is_eager_and_vmap_over_rows_is_the_batch():
    """I01, I02"""
    query, key, value = query_key_value()
    mask = random_mask(4, B, 1, T, S)
    batch = attend(query, key, value, mask=mask)
    np.testing.assert_allclose(dot_product_attention(query, key, value, mask=mask), batch, **FLOAT32)
    row = lambda *rows: dot_product_attention(*(x[None] for x in rows[:3]), mask=rows[3][None])[0]  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.vmap(row))(query, key, value, mask), batch, **FLOAT32)


def test_dropout_acts_on_the_weights():
    """With the identity as values the output is the weights, each kept and scaled or dropped; without a key, B20."""
    T, S, rate = 31, 37, 0.25
    query, key = normal(1, 1, T, 2, 3), normal(2, 1, S, 2, 3)
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None], (1, S, 2, S))
    weights = attention_weights(query, key)
    dropped = attend(query, key, value, dropout_rate=rate, dropout_key=jax.random.key(3)).swapaxes(1, 2)
    kept = np.asarray(dropped != 0)
    np.testing.assert_allclose(dropped, np.where(kept, weights / (1 - rate), 0), rtol=1e-6)
    assert abs(kept.mean() - (1 - rate)) < 3 * (rate * (1 - rate) / kept.size) ** 0.5
    np.testing.assert_array_equal(attend(query, key, value, dropout_rate=rate), attend(query, key, value))
    zero_rate = attend(query, key, value, dropout_rate=0.0, dropout_key=jax.random.key(3))
    np.testing.assert_array_equal(zero_rate, attend(query, key, value))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_dropout_rate_outside_its_range_is_refused(rate):
    query, key, value = query_key_value()
    with pytest.raises(ValueError, match="rate"):
        dot_product_attention(query, key, value, dropout_rate=rate, dropout_key=jax.random.key(0))
