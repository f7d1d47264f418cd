"""Biases by their published values and by the oracle's equations, and what they refuse."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import (
    ALiBi,
    AttentionMask,
    Blockwise,
    DenseBias,
    ScoreFunction,
    ShawBias,
    SoftCap,
    T5Bias,
    additive_mask,
    alibi,
    alibi_slopes,
    attention_weights,
    dot_product_attention,
    relative_position_bucket,
)
from tfm_jax.ops.biases import as_biases

B, T, S, K, N, H, E = 2, 5, 7, 1, 3, 11, 13
BLOCKWISE = Blockwise(block=3)
LIMIT = 5e-6  # of the largest entry: what the table of equivalence allows float32


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QKV = normal(1, B, T, N, H), normal(2, B, S, K, H), normal(3, B, S, K, E)
POSITIONS = (
    jnp.asarray([[0, 2, 3, 4, 9], [5, 4, 3, 2, 0]], jnp.int32),
    jnp.asarray([[0, 1, 2, 5, 8, 20, 3], [0, 1, 2, 3, 4, 5, 6]], jnp.int32),
)
MASK = AttentionMask(*POSITIONS)


# tiny sizes: compilation is all the time there is, and this takes two thirds of it
@functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)
def attend(bias):
    """Output and gradients by query, key, value and bias, of the reference and of blockwise."""

    def loss(qkv, bias, implementation):
        output = dot_product_attention(*qkv, mask=MASK, bias=bias, implementation=implementation)
        return (output * jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)).sum(), output

    def both(implementation):
        (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(QKV, bias, implementation)
        return output, gradients

    return [both("reference"), both(BLOCKWISE)]


def assert_near(found, expected, limit=LIMIT, name=""):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, name
    # a bias that all keys share has a gradient of exactly 0, which sums of entries near 1 miss by their rounding
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * max(np.abs(expected).max(), 1.0), err_msg=name)


def assert_is_the_oracles(bias, twin):
    """Output and all gradients in both implementations; those of the bias by the names of its fields."""
    expected = oracle.dot_product_attention(*QKV, mask=None, bias=twin)
    by_output = np.cos(np.arange(expected.size)).reshape(expected.shape)
    gradients = oracle.attention_gradients(*QKV, by_output, mask=None, bias=twin)
    for output, (by_qkv, by_bias) in attend(bias):
        assert_near(output, expected)
        for name, gradient in zip(("query", "key", "value"), by_qkv, strict=True):
            assert_near(gradient, getattr(gradients, name), name=name)
        for one, fields in zip(as_biases(by_bias), gradients.bias, strict=True):
            for name, field in fields.items():
                jax.tree.map(lambda *x, name=name: assert_near(*x, name=name), getattr(one, name), field)


# T5


DISTANCES = np.arange(-1200, 1201)


def test_buckets_are_the_published_ones():
    """B15: 32 buckets, distances up to 128."""
    after = {0: 0, 1: 17, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 23: 27, 32: 28, 46: 29, 64: 30, 91: 31, 128: 31}
    after[1000] = 31
    distances = jnp.asarray(list(after), jnp.int32)
    np.testing.assert_array_equal(relative_position_bucket(distances, bidirectional=True), list(after.values()))
    before = [max(bucket - 16, 0) for bucket in after.values()]
    np.testing.assert_array_equal(relative_position_bucket(-distances, bidirectional=True), before)
    causal = {0: 0, 15: 15, 16: 16, 22: 18, 31: 21, 45: 23, 64: 26, 90: 29, 127: 31, 1000: 31}
    distances = jnp.asarray(list(causal), jnp.int32)
    np.testing.assert_array_equal(relative_position_bucket(-distances, bidirectional=False), list(causal.values()))
    assert not relative_position_bucket(distances, bidirectional=False).any()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    "num_buckets, max_distance",
    [(32, 128), (4, 2), (4, 3), (5, 7), (8, 128), (31, 1000), (32, 20), (32, 512), (64, 64), (17, 10)],
)
def test_buckets_are_the_oracles(bidirectional, num_buckets, max_distance):
    """B15: every distance up to 1,200 and beyond the largest; each bucket that can be reached is."""
    settings = {"bidirectional": bidirectional, "num_buckets": num_buckets, "max_distance": max_distance}
    if max_distance <= num_buckets // (4 if bidirectional else 2):
        with pytest.raises(ValueError, match=f"max_distance is {max_distance}"):
            relative_position_bucket(jnp.zeros(1, jnp.int32), **settings)
        return
    found = np.asarray(relative_position_bucket(jnp.asarray(DISTANCES, jnp.int32), **settings))
    np.testing.assert_array_equal(found, [oracle.relative_position_bucket(int(d), **settings) for d in DISTANCES])
    assert found.max() < num_buckets and (np.diff(found[DISTANCES <= 0]) <= 0).all()


def test_buckets_by_a_float32_logarithm_are_the_same():
    """B15: T5's own code takes the logarithm in float32; it rounds as the exact bounds for all distances below 300."""
    distances = np.arange(1, 300)
    growth = np.log(distances.astype(np.float32) / np.float32(8)) / np.float32(np.log(128 / 8)) * np.float32(8)
    published = np.where(distances < 8, distances, np.minimum(8 + np.maximum(growth, 0).astype(int), 15))
    found = relative_position_bucket(-jnp.asarray(distances, jnp.int32), bidirectional=True)
    np.testing.assert_array_equal(found, published)


@pytest.mark.parametrize("bidirectional, least", [(True, 4), (False, 2)])
def test_too_few_buckets_are_refused(bidirectional, least):
    distances = jnp.asarray(DISTANCES, jnp.int32)
    with pytest.raises(ValueError, match=f"num_buckets is {least - 1}: at least {least} are needed"):
        relative_position_bucket(distances, bidirectional=bidirectional, num_buckets=least - 1)
    relative_position_bucket(distances, bidirectional=bidirectional, num_buckets=least)


@pytest.mark.parametrize("bidirectional, buckets, max_distance", [(True, 8, 11), (False, 5, 6)])
def test_t5(bidirectional, buckets, max_distance):
    table = normal(4, buckets, N)
    bias = T5Bias(table, bidirectional=bidirectional, max_distance=max_distance)
    twin = oracle.T5Bias(table, *POSITIONS, bidirectional=bidirectional, max_distance=max_distance)
    assert_is_the_oracles(bias, twin)


# ALiBi


@pytest.mark.parametrize("num_heads", range(1, 21))
def test_slopes_of_any_head_count(num_heads):
    slopes = alibi_slopes(num_heads)
    assert len(slopes) == num_heads == len(set(slopes)) and all(0 < slope < 1 for slope in slopes)
    np.testing.assert_allclose(slopes, oracle.alibi_slopes(num_heads), rtol=1e-12)
    np.testing.assert_array_equal(alibi(num_heads).slopes, np.asarray(slopes, np.float32))


def test_slopes_are_the_published_ones():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    np.testing.assert_allclose(alibi_slopes(16)[:3], [0.7071067811865476, 0.5, 0.35355339059327384], rtol=1e-12)
    assert alibi_slopes(12)[:8] == alibi_slopes(8) and alibi_slopes(12)[8:] == alibi_slopes(16)[:8:2]
    with pytest.raises(ValueError, match="num_heads is 0"):
        alibi_slopes(0)


def test_alibi():
    """Slopes that are parameters have a gradient; those of the paper come from `alibi`."""
    slopes = jnp.asarray([0.5, 0.11, -0.2], jnp.float32)
    assert_is_the_oracles(ALiBi(slopes), oracle.ALiBi(slopes, *POSITIONS))
    published = attend(alibi(N))[0][0]
    assert_near(published, oracle.dot_product_attention(*QKV, bias=oracle.ALiBi(alibi_slopes(N), *POSITIONS)))


# Shaw


@pytest.mark.parametrize("reach, tables", [(2, "key_table"), (2, "value_table"), (1, "both"), (7, "both")])
def test_shaw(reach, tables):
    """The score depends on the query, the values add to the output; distances beyond the reach share its last row."""
    key_table = normal(5, 2 * reach + 1, H) if tables != "value_table" else None
    value_table = normal(6, 2 * reach + 1, E) if tables != "key_table" else None
    twin = oracle.ShawBias(key_table, value_table, *POSITIONS)
    assert_is_the_oracles(ShawBias(key_table, value_table), twin)


def test_shaw_without_tables_changes_nothing():
    assert_is_the_oracles(ShawBias(), oracle.ShawBias(None, None, *POSITIONS))


# Functions of the score, dense arrays, order


def tempered(score, query_position, key_position, head, warmth, pull):
    """Every head its own temperature, keys far away damped."""
    steps = abs(query_position - key_position) * (head + 1)
    return score * warmth - pull * steps.astype(score.dtype)


def tempered_derivatives(score, query_position, key_position, head, warmth, pull):
    return warmth, [score, -abs(query_position - key_position) * (head + 1)]


def hides_multiples(score, query_position, key_position, head):
    return jnp.where((query_position + key_position) % 3 == 0, -jnp.inf, 2.0 * score)


def hides_low(score, query_position, key_position, head):
    return jnp.where(score < -0.3, -jnp.inf, score)


def hides_zero(score, query_position, key_position, head):
    return jnp.where(score > 0.0, score, -jnp.inf)


def test_a_soft_cap():
    assert_is_the_oracles(SoftCap(1.5), oracle.SoftCap(1.5))


def test_a_function_with_parameters():
    params = jnp.asarray([1.3, 0.7, -0.5], jnp.float32)[None, :, None, None], jnp.full((1, 1, 1, 1), 0.1)
    twin = oracle.ScoreFunction(tempered, tempered_derivatives, *POSITIONS, params=params)
    assert_is_the_oracles(ScoreFunction(tempered, params), twin)


@pytest.mark.parametrize(
    "function, in_numpy, derivative",
    [
        (hides_multiples, lambda score, query, key, _: np.where((query + key) % 3 == 0, -np.inf, 2.0 * score), 2.0),
        (hides_low, lambda score, *_: np.where(score < -0.3, -np.inf, score), 1.0),
        (hides_zero, lambda score, *_: np.where(score > 0.0, score, -np.inf), 1.0),
    ],
)
def test_a_function_that_hides(function, in_numpy, derivative):
    """-inf says what a False says: by positions, or by the score itself, of which no single value stands for others."""
    twin = oracle.ScoreFunction(in_numpy, lambda *arguments: (derivative, []), *POSITIONS)
    assert_is_the_oracles(ScoreFunction(function), twin)


def test_what_one_hides_the_next_does_not_show():
    """cap * tanh(-inf / cap) is -cap, and a negative multiple of -inf is inf: what is hidden stays so."""
    in_numpy = lambda score, query, key, _: np.where((query + key) % 3 == 0, -np.inf, 2.0 * score)  # noqa: E731
    hides = oracle.ScoreFunction(in_numpy, lambda *arguments: (2.0, []), *POSITIONS)
    assert_is_the_oracles((ScoreFunction(hides_multiples), SoftCap(1.5)), (hides, oracle.SoftCap(1.5)))
    params = jnp.full((1, N, 1, 1), -1.5), jnp.full((1, 1, 1, 1), 0.1)
    turned = oracle.ScoreFunction(tempered, tempered_derivatives, *POSITIONS, params=params)
    assert_is_the_oracles((ScoreFunction(hides_multiples), ScoreFunction(tempered, params)), (hides, turned))


@pytest.mark.parametrize("shape", [(B, N, T, S), (1, N, 1, S), (B, 1, T, 1), (1, 1, 1, 1)], ids=str)
def test_a_dense_array_with_and_without_minus_infinity(shape):
    """Its gradient has its shape, zero where it hides; a query from which it hides all keys is dead."""
    rng = np.random.default_rng(7)
    array = rng.standard_normal(shape)
    assert_is_the_oracles(DenseBias(jnp.asarray(array, jnp.float32)), oracle.DenseBias(array.astype(np.float32)))
    if shape[3] == 1:
        array[:, :, -1:] = -np.inf
    else:
        array = np.where(rng.random(shape) < 0.4, -np.inf, array)
        array[0, 0, 0] = -np.inf
    array = jnp.asarray(array, jnp.float32)
    assert_is_the_oracles(DenseBias(array), oracle.DenseBias(array))
    for _, (_, by_bias) in attend(DenseBias(array)):
        assert not np.asarray(by_bias.array)[np.isneginf(array)].any()


def test_a_tuple_applies_in_order():
    """A cap on the sum is not the sum with a cap; each has its gradient."""
    table, dense = normal(8, 8, N) * 2, normal(9, 1, N, T, S) * 2
    hidden = dense.at[:, :, :, 2].set(-jnp.inf)
    ours = {"t5": T5Bias(table), "cap": SoftCap(0.7), "dense": DenseBias(hidden)}
    twins = {
        "t5": oracle.T5Bias(table, *POSITIONS),
        "cap": oracle.SoftCap(0.7),
        "dense": oracle.DenseBias(hidden),
    }
    outputs = []
    for order in (("t5", "cap", "dense"), ("cap", "dense", "t5")):
        assert_is_the_oracles(tuple(ours[name] for name in order), tuple(twins[name] for name in order))
        outputs.append(np.asarray(attend(tuple(ours[name] for name in order))[0][0]))
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01


def test_sequences_are_flattened():
    cap, dense = SoftCap(2.0), normal(1, 1, 1, T, S)
    biases = as_biases([cap, (dense, [alibi(N)])])
    assert [type(one) for one in biases] == [SoftCap, DenseBias, ALiBi] and biases[1].array is dense
    assert as_biases(None) == as_biases(()) == ()


@pytest.mark.parametrize(
    "bias, message",
    [
        (ALiBi(jnp.ones(N + 1)), f"slopes has shape (4,): axis 0, its last, must be the {N} heads"),
        (ALiBi(jnp.ones((1, N))), "slopes has shape (1, 3)"),
        (T5Bias(jnp.ones((8, N + 2))), "table has shape (8, 5): axis 1"),
        (T5Bias(jnp.ones(N)), "table has shape (3,)"),
        (T5Bias(jnp.ones((3, N))), "num_buckets is 3: at least 4 are needed"),
        (T5Bias(jnp.ones((64, N)), max_distance=10), "max_distance is 10, but 16 buckets are single distances"),
        (ShawBias(jnp.ones((4, H))), "key_table has shape (4, 11): 2 k + 1 rows"),
        (ShawBias(None, jnp.ones((2, E))), "value_table has shape (2, 13)"),
        (ShawBias(jnp.ones((3, H + 1))), "key_table has shape (3, 12)"),
        (ShawBias(None, jnp.ones((3, E + 1))), "value_table has shape (3, 14)"),
        (SoftCap(0.0), "cap is 0.0: it must be positive"),
        (SoftCap(-1.0), "cap is -1.0"),
        (SoftCap(float("nan")), "cap is nan"),
        (DenseBias(jnp.ones((1, 1, S, T))), "bias has shape (1, 1, 7, 5)"),
        (DenseBias(jnp.ones((1, 2, T, S))), "bias has shape (1, 2, 5, 7)"),
        (DenseBias(jnp.ones((T, S))), "bias has shape (5, 7)"),
        (DenseBias(jnp.ones((1, 1, T, S), bool)), "bias has dtype bool"),
        ((SoftCap(1.0), ALiBi(jnp.ones(N + 1))), "slopes"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias, message):
    """By every implementation and by the weights, with what came and what was expected."""
    for implementation in ("reference", "blockwise", "auto"):
        with pytest.raises(ValueError, match=re.escape(message)):
            dot_product_attention(*QKV, bias=bias, implementation=implementation)
    if "value_table" not in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            attention_weights(*QKV[:2], bias=bias)


def test_the_weights_have_the_biases():
    table, array = normal(8, 8, N), normal(9, B, 1, T, S)
    bias = (T5Bias(table), SoftCap(1.5), DenseBias(array))
    twin = (oracle.T5Bias(table, *POSITIONS), oracle.SoftCap(1.5), oracle.DenseBias(array))
    weights = attention_weights(*QKV[:2], mask=MASK, bias=bias)
    assert_near(weights, oracle.attention_weights(*QKV[:2], bias=twin))


def test_without_positions_the_index_counts():
    index = tuple(jnp.arange(length, dtype=jnp.int32)[None] for length in (T, S))
    for implementation in ("reference", BLOCKWISE):
        output = dot_product_attention(*QKV, bias=alibi(N), implementation=implementation)
        assert_near(output, oracle.dot_product_attention(*QKV, bias=oracle.ALiBi(alibi_slopes(N), *index)))


@pytest.mark.parametrize(
    "bias", [alibi(N), T5Bias(normal(4, 8, N)), ShawBias(normal(5, 5, H))], ids=lambda x: type(x).__name__
)
def test_moved_positions_change_nothing(bias):
    """I10: what counts is the distance."""
    moved = AttentionMask(*(x + 1_000_003 for x in POSITIONS))
    weights = (attention_weights(*QKV[:2], mask=mask, bias=bias) for mask in (MASK, moved))
    np.testing.assert_array_equal(*weights)


def test_additive_masks_add_up():
    """B05: two textbook masks: -inf + -inf is no NaN, and hides what either hides."""
    one, other = (jnp.asarray(np.random.default_rng(seed).random((B, 1, T, S)) < 0.6) for seed in (1, 2))
    (output, gradients), blockwise = attend((additive_mask(one), additive_mask(other)))
    expected = oracle.dot_product_attention(*QKV, mask=one & other)
    for found in (output, blockwise[0]):
        assert_near(found, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, blockwise[1])))
