"""Scaled dot-product attention against the float64 oracle: what holds in both exact implementations under every mask
and dtype, and the one door through which they are reached."""

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import (
    AttentionBias,
    AttentionMask,
    Blockwise,
    SoftCap,
    additive_mask,
    alibi,
    attention_weights,
    causal_mask,
    dot_product_attention,
    explain_implementation,
    padding_mask,
)

B, T, S, K, G, H, E = 2, 5, 7, 3, 2, 11, 13
N = K * G
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
BLOCKWISE = Blockwise(block=3)  # 2 x 3 tiles here, the last of each row and column ragged
in_both = pytest.mark.parametrize("implementation", ["reference", BLOCKWISE], ids=["reference", "blockwise"])
# tiny sizes: compilation is all the time there is, and this takes two thirds of it
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)
attend = jit(dot_product_attention, static_argnames=("dropout_rate", "implementation"))
weigh = jit(attention_weights)


@functools.partial(jit, static_argnames="implementation")
def output_and_gradients(qkv, mask, bias, implementation="reference"):
    """The output, and the gradients of the sum of its squares."""

    def loss(*qkv):
        output = dot_product_attention(*qkv, mask=mask, bias=bias, implementation=implementation)
        return jnp.square(output.astype(jnp.float32)).sum(), output

    gradients, output = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return output, gradients


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def query_key_value(*, heads=N, groups=K, length=T, dtype=jnp.float32):
    query, key = normal(1, B, length, heads, H, dtype=dtype), normal(2, B, S, groups, H, dtype=dtype)
    return query, key, normal(3, B, S, groups, E, dtype=dtype)


@contextlib.contextmanager
def unchecked():
    """Calls as a user without jaxtyping's hook makes them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


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

    @jit
    def all_three(mask, bias):
        arguments = {"mask": mask, "bias": bias, "scale": settings.get("scale")}
        outputs = [
            dot_product_attention(query, key, value, **arguments, implementation=i) for i in ("reference", BLOCKWISE)
        ]
        return outputs, attention_weights(query, key, **arguments)

    outputs, weights = all_three(settings.get("mask"), settings.get("bias"))
    expected = oracle.dot_product_attention(query, key, value, **settings)
    for output in outputs:
        assert output.shape == (B, T, N, E)
        np.testing.assert_allclose(output, expected, **FLOAT32)
    np.testing.assert_allclose(weights, oracle.attention_weights(query, key, **settings), **FLOAT32)


@in_both
@pytest.mark.parametrize("heads, groups", [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_grouped_heads_are_repeated_keys_and_values(heads, groups, implementation):
    query, key, value = query_key_value(heads=heads, groups=groups)
    repeated = (jnp.repeat(x, heads // groups, axis=2) for x in (key, value))
    found = attend(query, key, value, implementation=implementation)
    np.testing.assert_allclose(found, attend(query, *repeated), **FLOAT32)


@in_both
def test_heads_in_a_row_share_a_key_head(implementation):
    """By values: value head k holds k everywhere, and key head k points query head n at slot n alone."""
    value = jnp.broadcast_to(jnp.arange(K, dtype=jnp.float32)[None, None, :, None], (1, N, K, E))
    query = jnp.ones((1, 1, N, 1))
    key = jnp.where(jnp.arange(N)[:, None] // G == jnp.arange(K)[None], 0.0, 30.0)[None, :, :, None]
    output = attend(query, key, value, implementation=implementation)
    np.testing.assert_array_equal(output[0, 0, :, 0], [0, 0, 1, 1, 2, 2])
    slots = jnp.broadcast_to(jnp.arange(N, dtype=jnp.float32)[None, :, None, None], (1, N, K, E))
    mean = attend(query, -key, slots, implementation=implementation)[0, 0, :, 0]
    np.testing.assert_allclose(mean, [0.5, 0.5, 2.5, 2.5, 4.5, 4.5], rtol=1e-6)


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


@in_both
def test_the_diagonal_mask_returns_the_values(implementation):
    """B08: True means attend."""
    query, key, value = (normal(seed, 2, 5, 3, 7) for seed in range(3))
    output = attend(query, key, value, mask=jnp.eye(5, dtype=bool)[None, None], implementation=implementation)
    np.testing.assert_array_equal(output, value)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("checked", [True, False], ids=["jaxtyping", "alone"])
def test_a_mask_that_is_not_boolean_is_refused(dtype, checked):
    """B08, with the annotations checked and as a user without jaxtyping's hook sees it."""
    query, key, value = (normal(seed, 2, 3, 5, 7) for seed in range(3))
    with contextlib.nullcontext() if checked else unchecked():
        error = jaxtyping.TypeCheckError if checked else ValueError
        with pytest.raises(error, match="mask"):
            dot_product_attention(query, key, value, mask=jnp.eye(3, dtype=dtype)[None, None])
        with pytest.raises(error, match="mask"):
            attention_weights(query, key, mask=jnp.eye(3, dtype=dtype)[None, None])


def test_the_additive_form_is_the_boolean_form():
    query, key, value = query_key_value()
    mask = jnp.asarray(np.asarray(random_mask(4, 1, 1, T, S)) | np.eye(T, S, dtype=bool))
    for implementation in ("reference", BLOCKWISE):
        boolean = attend(query, key, value, mask=mask, implementation=implementation)
        additive = attend(query, key, value, bias=additive_mask(mask), implementation=implementation)
        np.testing.assert_array_equal(boolean, additive)
    repeated = np.repeat(key, G, axis=2)
    logits = np.einsum("BTNH,BSNH->BNTS", query, repeated) / H**0.5
    textbook = jax.nn.softmax(logits + np.asarray(additive_mask(mask)), axis=-1)
    np.testing.assert_allclose(weigh(query, key, mask=mask), textbook, **FLOAT32)


@in_both
def test_no_query_sees_a_later_key(implementation):
    """B10: the Jacobian is zero above the diagonal, exactly, and nowhere else."""
    x = normal(0, 1, T, 2, 3)
    alone = lambda x: dot_product_attention(x, x, x, mask=AttentionMask(causal=True), implementation=implementation)  # noqa: E731
    jacobian = jit(jax.jacrev(alone))(x)
    reached = np.abs(jacobian).max(axis=(0, 2, 3, 4, 6, 7))
    np.testing.assert_array_equal(reached > 0, np.tril(np.ones((T, T), bool)))


# What fails in half precision are fully masked rows and sums of mask constants, so every combination is tried.
POSITIONS = jnp.asarray([[0, 1, 2], [-1, 0, 1]], jnp.int32)
MASKS = {
    "causal": causal_mask(POSITIONS, POSITIONS),
    "padding": padding_mask(*(jnp.asarray(ids, jnp.int32) for ids in ([[1, 1, 1], [0, 1, 1]], [[1, 1, 0], [0, 1, 1]]))),
    "user": jnp.asarray([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)[None, None],
}


@in_both
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["float16", "bfloat16", "float32"])
def test_every_dtype_is_finite_under_every_mask(dtype, implementation):
    """B05, I11; the scores go beyond the range of float16 (65504)."""
    query, key, value = (normal(seed, 2, 3, 5, 7, dtype=dtype) for seed in range(3))
    query, key = query * 300, key * 300
    implementation = implementation if implementation == "reference" else Blockwise(block=2)
    for chosen in range(8):
        masks = [mask for bit, mask in enumerate(MASKS.values()) if chosen >> bit & 1]
        mask = functools.reduce(jnp.logical_and, masks, jnp.ones((2, 1, 3, 3), bool))
        output, gradients = output_and_gradients((query, key, value), mask, None, implementation)
        assert output.dtype == dtype and all(g.dtype == dtype for g in gradients)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (output, *gradients))
        dead = ~np.broadcast_to(np.asarray(mask).any(-1), (2, 1, 3))[:, 0]
        assert not np.asarray(output, np.float32)[dead].any()
        assert not np.asarray(gradients[0], np.float32)[dead].any()


@in_both
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float16, 2e-3), (jnp.bfloat16, 2e-2)], ids=["float16", "bfloat16"])
def test_half_precision_is_near_the_oracle(dtype, tolerance, implementation):
    """B09: logits, softmax and sums of products are float32, so only inputs, weights and the result are rounded."""
    query, key, value = query_key_value(dtype=dtype)
    mask = random_mask(4, B, 1, T, S)
    output = attend(query, key, value, mask=mask, implementation=implementation)
    assert output.dtype == dtype
    expected = oracle.dot_product_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=tolerance, atol=tolerance)
    assert jax.eval_shape(attention_weights, query, key, mask=mask).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("masked", [False, True])
@in_both
def test_the_exponential_is_float32(dtype, masked, implementation):
    """B09"""
    query, key, value = query_key_value(dtype=dtype)
    mask = random_mask(4, B, 1, T, S) if masked else None
    alone = lambda *qkv: dot_product_attention(*qkv, mask=mask, implementation=implementation)  # noqa: E731
    jaxpr = str(jax.make_jaxpr(alone)(query, key, value))
    assert set(re.findall(r":(\w+)\[[\d,]*\] = exp ", jaxpr)) == {"f32"}
    assert set(re.findall(r":(\w+)\[[\d,]*\] = dot_general", jaxpr)) == {"f32"}


@in_both
def test_a_dead_row_is_zero_and_gives_no_gradient(implementation):
    """B01: through masks, AttentionMask and bias alike."""
    qkv = query_key_value()
    dead = jnp.ones((B, 1, T, S), bool).at[1, :, 3].set(False)
    segments = AttentionMask(
        query_segment_ids=jnp.ones((B, T), jnp.int32).at[1, 3].set(0), key_segment_ids=jnp.ones((B, S), jnp.int32)
    )
    expected = output_and_gradients(qkv, dead, None, implementation)
    for mask, bias in ((dead, None), (segments, None), (None, additive_mask(dead))):
        output, gradients = output_and_gradients(qkv, mask, bias, implementation)
        assert not output[1, 3].any() and np.asarray(output).any(axis=(2, 3)).sum() == B * T - 1
        assert not gradients[0][1, 3].any() and all(np.isfinite(g).all() for g in gradients)
        jax.tree.map(np.testing.assert_array_equal, (output, gradients), expected)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", Blockwise(block=2)], ids=str)
def test_a_dead_row_does_not_reach_the_shared_projections(implementation):
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

    @jit
    def gradients(mask):
        def loss(params, x):
            heads = {
                name: jnp.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"][None, None]
                for name in ("query", "key", "value")
            }
            output = dot_product_attention(**heads, mask=mask, implementation=implementation)
            output = jnp.einsum("BTNE,NED->BTD", output, params["output"]) + params["output_bias"][None, None]
            return (jnp.square(output).sum(-1) * weights).sum(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    dead, output = gradients(mask)
    alive, other = gradients(mask.at[1, 0, 3, 0].set(True))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(dead))
    jax.tree.map(np.testing.assert_array_equal, dead, alive)
    np.testing.assert_array_equal(output[1, 3], params["output_bias"])
    np.testing.assert_array_equal(output.at[1, 3].set(0), other.at[1, 3].set(0))


@in_both
@pytest.mark.parametrize("junk", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("heads", [1, N], ids=["mask for all heads", "mask per head"])
def test_what_no_query_sees_never_matters(heads, junk, implementation):
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
        expected, found = (output_and_gradients(qkv, *restriction, implementation) for qkv in (clean, soiled))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        jax.tree.map(np.testing.assert_array_equal, expected, found)


@in_both
def test_packed_rows_are_rows_apart(implementation):
    """B40: two sentences in a row, positions counted anew, then padding: outputs and gradients are those of each alone,
    and what one holds does not move the other."""
    lengths, length = (3, 5), 11
    segments = np.repeat([1, 2, 0], [*lengths, length - sum(lengths)])[None]
    positions = np.concatenate([np.arange(n) for n in (*lengths, length - sum(lengths))])[None]
    segments, positions = jnp.asarray(segments, jnp.int32), jnp.asarray(positions, jnp.int32)
    mask = AttentionMask(positions, positions, segments, segments, causal=True)
    qkv = normal(1, 1, length, N, H), normal(2, 1, length, K, H), normal(3, 1, length, K, E)
    output, gradients = output_and_gradients(qkv, mask, alibi(N), implementation)
    for start, stop in ((0, 3), (3, 8)):
        part = lambda x, rows=slice(start, stop): x[:, rows]  # noqa: E731
        alone = output_and_gradients(jax.tree.map(part, qkv), AttentionMask(causal=True), alibi(N), "reference")
        # the gradient of a query that sees one key is the difference of two equal numbers
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-6)
        jax.tree.map(near, jax.tree.map(part, (output, gradients)), alone)
    other, _ = output_and_gradients(
        jax.tree.map(lambda x: x.at[:, :3].multiply(-9.0), qkv), mask, alibi(N), implementation
    )
    np.testing.assert_array_equal(other[:, 3:], output[:, 3:])
    assert (np.asarray(other[:, :3]) != np.asarray(output[:, :3])).any() and not output[:, 8:].any()


def central_differences(function, x, step=1e-6):
    x = np.asarray(x, np.float64)
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


@in_both
@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_finite_differences_of_the_oracle(masked, x64, implementation):
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
        alone = functools.partial(dot_product_attention, mask=mask, implementation=implementation)
        found = jit(jax.grad(lambda x: (alone(**x) * cotangent).sum()))(arrays)
    for name, gradient in found.items():
        expected = central_differences(
            lambda x, name=name: (
                oracle.dot_product_attention(**(arrays | {name: x}), mask=mask) * np.asarray(cotangent)
            ).sum(),
            arrays[name],
        )
        assert gradient.dtype == dtype
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-6, err_msg=name)


@in_both
def test_the_x64_flag_changes_nothing(implementation):
    """B56"""
    qkv, mask = query_key_value(), random_mask(4, B, 1, T, S)
    expected = output_and_gradients(qkv, mask, None, implementation)
    with jax.enable_x64(True):
        found = output_and_gradients(qkv, mask, None, implementation)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_array_equal(one, other)


@in_both
def test_jit_is_eager_and_vmap_over_rows_is_the_batch(implementation):
    """I01, I02"""
    query, key, value = query_key_value()
    mask = random_mask(4, B, 1, T, S)
    alone = functools.partial(dot_product_attention, implementation=implementation)
    batch = attend(query, key, value, mask=mask, implementation=implementation)
    np.testing.assert_allclose(alone(query, key, value, mask=mask), batch, **FLOAT32)
    row = lambda *rows: alone(*(x[None] for x in rows[:3]), mask=rows[3][None])[0]  # noqa: E731
    np.testing.assert_allclose(jit(jax.vmap(row))(query, key, value, mask), batch, **FLOAT32)


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


@functools.partial(jit, static_argnames="implementation")
def attend_by_position(query_positions, key_positions, implementation):
    """The causal mean of the numbers 0, 1, ..., S - 1."""
    T, S = query_positions.shape[1], key_positions.shape[1]
    value = jnp.arange(S, dtype=jnp.float32)[None, :, None, None]
    mask = AttentionMask(query_positions, key_positions, causal=True)
    query, key = jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1))
    return dot_product_attention(query, key, value, mask=mask, implementation=implementation)[0, :, 0, 0]


@in_both
@pytest.mark.parametrize("T, S", [(1, 8), (2, 5), (5, 2), (4, 4)])
def test_causal_is_a_rule_of_positions(T, S, implementation):
    """B03: queries that follow a cache (the last T positions) and queries that start with the keys (the first T)."""
    keys = np.arange(S, dtype=np.int32)[None]
    for first in (S - T, 0):
        queries = np.arange(first, first + T, dtype=np.int32)[None]
        expected = np.zeros(T)
        for t, position in enumerate(queries[0]):
            visible = [s for s in range(S) if s <= position]
            expected[t] = np.mean(visible) if visible else 0.0
        found = attend_by_position(jnp.asarray(queries), jnp.asarray(keys), implementation)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@in_both
def test_the_two_corners_of_a_causal_mask(implementation):
    """B03: the published numbers; T > S gives zero rows where a query comes before every key."""
    positions = lambda *numbers: jnp.asarray([numbers], jnp.int32)  # noqa: E731
    mean = functools.partial(attend_by_position, implementation=implementation)
    np.testing.assert_allclose(mean(positions(0, 1), positions(0, 1, 2, 3, 4)), [0, 0.5])
    np.testing.assert_allclose(mean(positions(3, 4), positions(0, 1, 2, 3, 4)), [1.5, 2.0])
    np.testing.assert_allclose(mean(positions(0, 1, 2, 3, 4), positions(3, 4)), [0, 0, 0, 0, 0.5])


# The door


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recency(AttentionBias):
    """score - rate_n * log(1 + distance), of learned rates: what a user adds, whole."""

    rates: Any  # N

    def logits(self, logits, tile):
        distance_BTS = jnp.abs(tile.distances).astype(jnp.float32)
        return logits - self.rates[None, :, None, None] * jnp.log1p(distance_BTS)[:, None]


def test_a_bias_of_the_users_runs_in_both_and_has_its_gradient():
    """The contract of the README: ten lines, exact gradients, refused by name where a kernel cannot do it."""
    qkv, positions = query_key_value(), jnp.asarray([[0, 1, 1, 2, 5, 6, 9], [-1, -1, 0, 1, 2, 3, 4]], jnp.int32)
    mask = AttentionMask(positions[:, 2:], positions, causal=True)
    bias = Recency(jnp.linspace(-1.0, 2.0, N))
    cotangent = normal(5, B, T, N, E)

    @functools.partial(jit, static_argnums=1)
    def gradients(bias, implementation):
        alone = lambda *qkv, bias: dot_product_attention(*qkv, mask=mask, bias=bias, implementation=implementation)  # noqa: E731
        loss = lambda bias, qkv: (alone(*qkv, bias=bias) * cotangent).sum()  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(bias, qkv)

    reference, blockwise = gradients(bias, "reference"), gradients(bias, BLOCKWISE)
    assert isinstance(blockwise[1][0], Recency) and np.abs(reference[1][0].rates).min() > 0.01
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-6), blockwise, reference)
    moved = np.asarray([gradients(Recency(bias.rates.at[1].add(step)), "reference")[0] for step in (-0.01, 0.01)])
    np.testing.assert_allclose((moved[1] - moved[0]) / 0.02, reference[1][0].rates[1], rtol=1e-2)
    for fused in ("cudnn", "splash"):
        with pytest.raises(ValueError, match="Recency"):
            dot_product_attention(*qkv, bias=bias, implementation=fused)
        assert "Recency" in explain_implementation(*qkv, bias=bias).refused[fused]


@dataclass(frozen=True)
class OnlyPlain:
    """An implementation of the user's that knows no bias."""

    def refusal(self, request):
        return f"it has no {type(request.biases[0]).__name__}" if request.biases else None

    def scores(self, request):
        return "builds nothing"

    def run(self, request):
        return jnp.zeros((*request.query.shape[:3], request.value.shape[3]))


def test_an_implementation_of_the_users():
    """An instance is as good as a name; what it refuses is refused with its reason, and nothing runs in its place."""
    qkv = query_key_value()
    assert not dot_product_attention(*qkv, implementation=OnlyPlain()).any()
    with pytest.raises(ValueError, match="OnlyPlain cannot do this: it has no SoftCap"):
        dot_product_attention(*qkv, bias=SoftCap(2.0), implementation=OnlyPlain())


def test_an_unknown_implementation_is_refused():
    qkv = query_key_value()
    for call in (dot_product_attention, explain_implementation):
        with pytest.raises(ValueError, match="implementation is 'flash': .*blockwise.*cudnn.*reference.*splash"):
            call(*qkv, implementation="flash")


def shapes(length, *, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for heads in (8, 2, 2)]


def test_the_choice_on_a_cpu_is_by_length():
    """Nothing is computed: shapes are enough, for arrays that no memory holds too."""
    short = explain_implementation(*shapes(128), platform="cpu")
    long = explain_implementation(*shapes(1_000_003), mask=AttentionMask(causal=True), platform="cpu")
    assert short.implementation == "reference" and "128 x 128" in short.reason and "(2, 8, 128, 128)" in short.scores
    assert long.implementation == "blockwise" and "1000003 x 1000003" in long.reason and "tiles" in long.scores
    assert {"reference", "blockwise"}.isdisjoint(short.refused) and all(long.refused.values())
    assert str(long).startswith(f"blockwise: {long.reason}\n{long.scores}")
    assert explain_implementation(*shapes(128)).implementation == "reference"  # the tests run on a CPU
    named = explain_implementation(*shapes(128), implementation="blockwise")
    assert (named.implementation, named.reason) == ("blockwise", "asked for by name")
    refused = explain_implementation(*shapes(128), bias=Recency(jnp.ones(8)), implementation="splash")
    assert refused.reason == f"refused, {refused.refused['splash']}"


def test_the_choice_is_what_runs():
    """The jaxpr of "auto" is that of the implementation that the explanation names."""
    for length, name in ((16, "reference"), (1024, "blockwise")):
        assert explain_implementation(*shapes(length)).implementation == name
        auto, named = (
            str(jax.make_jaxpr(functools.partial(dot_product_attention, implementation=chosen))(*shapes(length)))
            for chosen in ("auto", name)
        )
        assert re.sub(r"0x\w+", "", auto) == re.sub(r"0x\w+", "", named)


@pytest.mark.parametrize("call", [dot_product_attention, explain_implementation])
@pytest.mark.parametrize(
    "query, key, value, message",
    [
        ((2, 5, 3), (2, 7, 3), (2, 7, 3), "B T N H, B S K H, B S K E are expected"),
        ((2, 5, 3, 11), (2, 7, 3, 11), (2, 5, 3, 13), r"value \(2, 5, 3, 13\)"),
        ((2, 5, 3, 11), (2, 7, 3, 11), (2, 7, 1, 13), r"key \(2, 7, 3, 11\)"),
        ((2, 5, 3, 11), (2, 7, 3, 13), (2, 7, 3, 13), r"query \(2, 5, 3, 11\)"),
        ((2, 5, 3, 11), (1, 7, 3, 11), (1, 7, 3, 13), r"query \(2, 5, 3, 11\)"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(call, query, key, value, message):
    """By our own message, where no annotation is checked before."""
    with unchecked(), pytest.raises(ValueError, match=message):
        call(*(jnp.zeros(shape) for shape in (query, key, value)))


@pytest.mark.parametrize("call", [dot_product_attention, explain_implementation])
def test_facts_of_a_mask_that_do_not_fit_are_refused(call):
    """Those of `AttentionMask.check`, before anything is compiled."""
    qkv = query_key_value()
    with pytest.raises(ValueError, match="segment_ids are given for one side"):
        call(*qkv, mask=AttentionMask(query_segment_ids=jnp.ones((B, T), jnp.int32)))
    with pytest.raises(ValueError, match="key_segment_ids has shape .* must have length 7"):
        call(
            *qkv,
            mask=AttentionMask(
                query_segment_ids=jnp.ones((B, T), jnp.int32), key_segment_ids=jnp.ones((B, T), jnp.int32)
            ),
        )
    for batch in (B + 1, 3 * B):
        positions = jnp.zeros((batch, T), jnp.int32), jnp.zeros((batch, S), jnp.int32)
        with unchecked(), pytest.raises(ValueError, match=f"query_positions has shape .{batch}, 5"):
            call(*qkv, mask=AttentionMask(*positions, causal=True))
        with unchecked(), pytest.raises(ValueError, match=f"shape .{batch}, 1, 5, 7"):
            call(*qkv, mask=AttentionMask(dense=jnp.ones((batch, 1, T, S), bool)))
    with unchecked(), pytest.raises(ValueError, match="shape .2, 4, 5, 7"):
        call(*qkv, mask=AttentionMask(dense=jnp.ones((B, 4, T, S), bool)))


@in_both
def test_a_mask_without_facts_and_an_empty_tuple_change_nothing(implementation):
    qkv = query_key_value()
    plain = attend(*qkv, implementation=implementation)
    np.testing.assert_array_equal(attend(*qkv, mask=AttentionMask(), bias=(), implementation=implementation), plain)
