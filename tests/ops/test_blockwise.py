"""`blockwise` tile by tile: against the oracle under random combinations, and what no tile may change or keep."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfm_jax import oracle
from tfm_jax.ops import (
    ALiBi,
    AttentionBias,
    AttentionMask,
    Blockwise,
    DenseBias,
    ScoreFunction,
    ShawBias,
    SoftCap,
    T5Bias,
    alibi,
    dot_product_attention,
)
from tfm_jax.ops.dropout import keep_mask
from tfm_jax.ops.masks import Block

# tiny sizes: compilation is all the time there is, and this takes two thirds of it
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)
LIMIT = 5e-6  # of the largest entry: what the table of equivalence allows float32


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def query_key_value(B, T, S, N, K, H, E):
    return normal(1, B, T, N, H), normal(2, B, S, K, H), normal(3, B, S, K, E)


def output_and_gradients(qkv, bias, cotangent, **arguments):
    """By query, key, value and bias, of the sum of the output times the cotangent."""

    def loss(qkv, bias):
        output = dot_product_attention(*qkv, bias=bias, **arguments)
        return (output * cotangent).sum(), output

    gradients, output = jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)(qkv, bias)
    return output, gradients


def assert_near(found, expected, name="", limit=LIMIT):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, name
    scale = max(np.abs(expected).max(), 1.0)
    if scale == 1.0 and np.abs(expected).max() < 1e-12:
        # the exact gradient is 0 (all queries see one key, or all keys share a bias): a sum of many terms that cancel
        scale = 20.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * scale, err_msg=name)


# Random combinations


def every_third(query_position, key_position, query_segment, key_segment, head):
    return (key_position + head) % 3 != 0


def tempered(score, query_position, key_position, head, warmth, pull):
    steps = abs(query_position - key_position) * (head + 1)
    return score * warmth - pull * steps.astype(score.dtype)


def tempered_derivatives(score, query_position, key_position, head, warmth, pull):
    return warmth, [score, -abs(query_position - key_position) * (head + 1)]


def hides_fifths(score, query_position, key_position, head):
    where = jnp if isinstance(score, jax.Array) else np
    return where.where((query_position + key_position) % 5 == 0, -np.inf, score)


BIASES = ("alibi", "t5", "causal t5", "shaw", "shaw keys", "shaw values", "dense", "hiding dense", "cap")
BIASES += ("function", "hides")


def bias_and_twin(kind, rng, positions, B, T, S, N, H, E):
    """A bias with random parameters, and what the oracle calls it."""
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    match kind:
        case "alibi":
            slopes = jnp.abs(array(N)) * 0.3
            return ALiBi(slopes), oracle.ALiBi(slopes, *positions)
        case "t5" | "causal t5":
            table, bidirectional = array(8, N), kind == "t5"
            twin = oracle.T5Bias(table, *positions, bidirectional=bidirectional, max_distance=9)
            return T5Bias(table, bidirectional=bidirectional, max_distance=9), twin
        case "shaw" | "shaw keys" | "shaw values":
            reach = int(rng.integers(1, 5))
            tables = (array(2 * reach + 1, H), array(2 * reach + 1, E))
            tables = {"shaw": tables, "shaw keys": (tables[0], None), "shaw values": (None, tables[1])}[kind]
            return ShawBias(*tables), oracle.ShawBias(*tables, *positions)
        case "dense" | "hiding dense":
            dense = array(*(int(rng.choice([1, n])) for n in (B, N, T, S)))
            if kind == "hiding dense":
                dense = jnp.where(jnp.asarray(rng.random(dense.shape) < 0.3), -jnp.inf, dense)
            return DenseBias(dense), oracle.DenseBias(dense)
        case "cap":
            return SoftCap(2.5), oracle.SoftCap(2.5)
        case "function":
            params = 1.0 + 0.3 * array(1, N, 1, 1), jnp.full((1, 1, 1, 1), 0.05)
            twin = oracle.ScoreFunction(tempered, tempered_derivatives, *positions, params=params)
            return ScoreFunction(tempered, params), twin
        case "hides":
            twin = oracle.ScoreFunction(hides_fifths, lambda *arguments: (1.0, []), *positions)
            return ScoreFunction(hides_fifths), twin


def random_mask(facts, rng, B, T, S, N):
    """The facts of the chosen kinds, positions out of order, repeated and missing, and rows that see nothing."""
    integers = lambda low, high, *shape: jnp.asarray(rng.integers(low, high, shape), jnp.int32)  # noqa: E731
    mask = AttentionMask()
    if "positions" in facts:
        mask = AttentionMask(integers(0, S + 3, B, T), integers(-1, S + 2, B, S))
    chosen = {"causal": "causal" in facts or "prefix" in facts}
    if "prefix" in facts:
        chosen["prefix_lengths"] = integers(0, S + 1, B)
    if "window" in facts:
        chosen["window"] = (int(rng.integers(0, 4)), None if rng.random() < 0.3 else int(rng.integers(0, 3)))
    if "window" in facts and "globals" in facts:
        chosen["query_global"] = jnp.asarray(rng.random((B, T)) < 0.2)
        chosen["key_global"] = jnp.asarray(rng.random((1, S)) < 0.2)
    if "segments" in facts:
        chosen |= {"query_segment_ids": integers(0, 3, B, T), "key_segment_ids": integers(0, 3, B, S)}
    if "function" in facts:
        chosen["function"] = every_third
    positions = {"query_positions": mask.query_positions, "key_positions": mask.key_positions}
    mask = AttentionMask(**positions, **chosen)
    if "dense" in facts:
        mask = mask & jnp.asarray(rng.random([int(rng.choice([1, n])) for n in (B, N, T, S)]) < 0.7)
    return mask & AttentionMask(causal=True) if "another" in facts else mask


FACTS = ("positions", "causal", "prefix", "window", "globals", "segments", "function", "dense", "another")
PRIMES = (1, 2, 3, 5, 7, 11, 13)


@st.composite
def cases(draw):
    return {
        "B": draw(st.sampled_from((1, 2, 3))),
        "T": draw(st.sampled_from(PRIMES)),
        "S": draw(st.sampled_from(PRIMES)),
        "K": draw(st.sampled_from((1, 2, 3))),
        "G": draw(st.sampled_from((1, 2, 3))),
        "H": draw(st.sampled_from((1, 2, 5))),
        "E": draw(st.sampled_from((1, 3, 7))),
        "block": draw(st.sampled_from((2, 3, 4, 5))),
        "facts": draw(st.sets(st.sampled_from(FACTS), max_size=5)),
        "kinds": draw(st.lists(st.sampled_from(BIASES), max_size=3, unique=True)),
        "scale": draw(st.sampled_from((None, 0.4))),
        "dropout_rate": draw(st.sampled_from((0.0, 0.3))),
        "seed": draw(st.integers(0, 2**16)),
    }


@functools.partial(jit, static_argnames=("block", "dropout_rate", "scale"))
def by_both(qkv, bias, cotangent, mask, dropout_key, *, block, dropout_rate, scale):
    return [
        output_and_gradients(
            qkv,
            bias,
            cotangent,
            mask=mask,
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            implementation=implementation,
        )
        for implementation in ("reference", Blockwise(block=block))
    ]


# no shrinking: each step would compile for seconds
@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))
@given(cases())
def test_any_combination_is_the_oracles(case):
    """Output and every gradient, in the reference and in tiles, skipped and ragged ones included; B01, B40."""
    check(**case)


EVERYTHING = {"K": 2, "G": 2, "H": 5, "E": 3, "block": 3, "scale": None, "dropout_rate": 0.3, "seed": 1, "B": 2}


@pytest.mark.parametrize(
    "facts, kinds",
    [
        ({"positions", "prefix", "window", "globals", "segments"}, ["t5", "shaw", "function"]),
        ({"causal", "dense", "function", "another"}, ["hiding dense", "cap", "alibi"]),
        ({"positions", "window"}, ["hides", "cap", "shaw values"]),
    ],
)
def test_many_facts_at_once_are_the_oracles(facts, kinds):
    check(**EVERYTHING, T=7, S=11, facts=facts, kinds=kinds)


def check(B, T, S, K, G, H, E, block, facts, kinds, scale, dropout_rate, seed):
    rng, N = np.random.default_rng(seed), K * G
    mask = random_mask(facts, rng, B, T, S, N)
    array = mask.array(T, S, N)
    positions = mask.positions(Block(0, T), Block(0, S))
    pairs = [bias_and_twin(kind, rng, positions, B, T, S, N, H, E) for kind in kinds]
    qkv = query_key_value(B, T, S, N, K, H, E)
    cotangent = normal(seed, B, T, N, E)
    dropout_key = jax.random.key(seed)
    keep = keep_mask(dropout_key, (B, N, T, S), dropout_rate) if dropout_rate else None
    arguments = {"mask": array, "bias": tuple(twin for _, twin in pairs), "scale": scale}
    arguments |= {"dropout_rate": dropout_rate, "keep": keep}
    output = oracle.dot_product_attention(*qkv, **arguments)
    gradients = oracle.attention_gradients(*qkv, cotangent, **arguments)
    ours = tuple(bias for bias, _ in pairs)
    static = {"block": block, "dropout_rate": dropout_rate, "scale": scale}
    for name, (found, (by_qkv, by_bias)) in zip(
        ("reference", "blockwise"), by_both(qkv, ours, cotangent, mask, dropout_key, **static), strict=True
    ):
        assert_near(found, output, f"{name} output")
        for argument, gradient in zip(("query", "key", "value"), by_qkv, strict=True):
            assert_near(gradient, getattr(gradients, argument), f"{name} {argument}")
        for kind, one, of_fields in zip(kinds, by_bias, gradients.bias, strict=True):
            for field, gradient in of_fields.items():
                at = f"{name} {kind} {field}"
                jax.tree.map(functools.partial(assert_near, name=at), getattr(one, field), gradient)


# What nobody sees


def keys_of_a_parity(query_position, key_position, query_segment, key_segment, head):
    """Odd heads never see odd keys."""
    return (key_position % 2 == 0) | (head % 2 == 0)


B, T, S, N, K = 2, 5, 11, 4, 2
SEGMENTS = {
    "query_segment_ids": jnp.asarray([[1, 1, 2, 2, 0], [0, 3, 3, 1, 1]], jnp.int32),
    "key_segment_ids": jnp.asarray([[1, 0, 2, 2, 2, 2, 4, 4, 0, 0, 0], [5, 5, 3, 3, 3, 1, 1, 1, 1, 1, 0]], jnp.int32),
}
CACHE = {
    "query_positions": jnp.asarray([[2, 3, 4, 5, -1], [0, 1, 2, 3, 4]], jnp.int32),
    "key_positions": jnp.asarray([[0, 1, 2, 3, 4, 5, *[-1] * 5], [4, 3, 2, 1, 0, -1, 7, 7, 8, 9, 9]], jnp.int32),
}
PER_HEAD = jnp.ones((B, N, T, S), bool).at[:, 1, 2].set(False).at[0, 2:, :, 4].set(False).at[1, :, :, 7].set(False)
HIDING = {
    "causal by index": (AttentionMask(causal=True), None),
    "causal in a cache": (AttentionMask(**CACHE, causal=True), None),
    "positions alone": (AttentionMask(**CACHE), None),
    "window": (AttentionMask(window=(1, 1)), None),
    "segments": (AttentionMask(**SEGMENTS), None),
    "prefix": (AttentionMask(causal=True, prefix_lengths=jnp.asarray([7, 0], jnp.int32)), None),
    "function": (AttentionMask(function=keys_of_a_parity, causal=True), None),
    "dense": (AttentionMask(dense=PER_HEAD), None),
    "dense bias": (AttentionMask(), DenseBias(jnp.where(PER_HEAD, 0.5, -jnp.inf))),
    "segments and biases": (
        AttentionMask(**SEGMENTS),
        (T5Bias(normal(7, 8, N)), ShawBias(normal(8, 5, 3), normal(9, 5, 7))),
    ),
}


@functools.partial(jit, static_argnames="implementation")
def hidden_case(qkv, mask, bias, cotangent, implementation):
    return output_and_gradients(qkv, bias, cotangent, mask=mask, implementation=implementation)


@pytest.mark.parametrize("implementation", ["reference", Blockwise(block=3)], ids=["reference", "blockwise"])
@pytest.mark.parametrize("name", HIDING)
def test_what_stands_in_a_slot_that_nobody_sees_never_matters(name, implementation):
    """B01: NaN and infinity there give the output and gradients of zeros, bit for bit: in dead queries, unseen keys, of
    one head too, and where there are more keys than causal queries, which rows that fill up a tile must not see."""
    mask, bias = HIDING[name]
    array = mask.array(T, S, N)
    visible = np.ones((B, N, T, S), bool) if array is None else np.broadcast_to(array, (B, N, T, S))
    if name == "dense bias":
        visible = np.asarray(PER_HEAD)
    seen = visible.any(axis=2).reshape(B, K, N // K, S).any(axis=2).swapaxes(1, 2)[..., None]
    alive = visible.any(axis=3).swapaxes(1, 2)[..., None]
    assert not seen.all() or not alive.all()
    query, key, value = query_key_value(B, T, S, N, K, 3, 7)
    cotangent = normal(4, B, T, N, 7)
    results = [
        hidden_case(
            (jnp.where(alive, query, junk), jnp.where(seen, key, junk), jnp.where(seen, value, junk)),
            mask,
            bias,
            cotangent,
            implementation=implementation,
        )
        for junk in (0.0, np.nan, np.inf)
    ]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results[0]))
    for soiled in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, soiled, results[0])
    output, (gradients, _) = results[0]
    assert not np.asarray(output)[~alive[..., 0]].any()
    for gradient, kept in zip(gradients, (alive, seen, seen), strict=True):
        assert not np.asarray(gradient)[~kept[..., 0]].any()


# Dropout


@functools.partial(jit, static_argnames="implementation")
def dropped_weights(query, key, mask, dropout_key, implementation):
    """With the identity as values the output is the weights after dropout: B N T S."""
    S = key.shape[1]
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None], (*key.shape[:3], S))
    output = dot_product_attention(
        query, key, value, mask=mask, dropout_rate=0.4, dropout_key=dropout_key, implementation=implementation
    )
    return output.swapaxes(1, 2)


@pytest.mark.parametrize("block", [3, 4, 16])
def test_the_same_elements_are_dropped(block):
    """Those of `keep_mask` over the whole array, whatever the tiles: none moves with the cut."""
    query, key, _ = query_key_value(B, T, S, N, K, 3, 7)
    seed = jax.random.key(5)
    kept = np.asarray(keep_mask(seed, (B, N, T, S), 0.4))
    reference = np.asarray(dropped_weights(query, key, None, seed, "reference"))
    blockwise = np.asarray(dropped_weights(query, key, None, seed, Blockwise(block=block)))
    np.testing.assert_array_equal(blockwise != 0, kept)
    np.testing.assert_array_equal(reference != 0, kept)
    assert_near(blockwise, reference)
    visible = np.tril(np.ones((T, S), bool))
    causal = np.asarray(dropped_weights(query, key, AttentionMask(causal=True), seed, Blockwise(block=block)))
    np.testing.assert_array_equal(causal != 0, kept & visible)


def test_the_same_elements_are_dropped_under_vmap():
    """Each row with its own key drops what a batch of one drops."""
    query, key, _ = query_key_value(B, T, S, N, K, 3, 7)
    keys = jax.random.split(jax.random.key(2), B)
    for implementation in ("reference", Blockwise(block=3)):
        row = lambda q, k, seed, chosen=implementation: dropped_weights(q[None], k[None], None, seed, chosen)[0]  # noqa: E731
        rows = jax.vmap(row)(query, key, keys)
        for b in range(B):
            np.testing.assert_array_equal(np.asarray(rows[b]) != 0, keep_mask(keys[b], (1, N, T, S), 0.4)[0])
    assert (np.asarray(rows[0] != 0) != np.asarray(rows[1] != 0)).any()


# Transformations


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyGain(AttentionBias):
    """score * (gain of the key + level of the kind of the query): a user's arrays over keys and over queries."""

    gain: Any  # B S
    kinds: Any  # 1 T, integers
    levels: Any  # kinds N

    axes: ClassVar = {"gain": (None, 1), "kinds": (1, None)}

    def logits(self, logits, tile):
        levels_BTN = self.levels[self.kinds]
        return logits * (self.gain[:, None, None] + jnp.moveaxis(levels_BTN, 2, 1)[..., None])


def test_arrays_of_a_bias_over_queries_and_keys_have_gradients():
    """They are cut to the tile and their gradients put back; an array of integers has none."""
    qkv, cotangent = query_key_value(B, T, S, N, K, 3, 7), normal(4, B, T, N, 7)
    kinds = jnp.asarray([[0, 2, 1, 1, 0]], jnp.int32)
    bias = (KeyGain(normal(5, B, S), kinds, normal(6, 3, N)), alibi(N))
    mask = AttentionMask(causal=True, window=(2, 0))
    reference, blockwise = (
        hidden_case(qkv, mask, bias, cotangent, implementation) for implementation in ("reference", Blockwise(block=3))
    )
    assert_near(blockwise[0], reference[0])
    jax.tree.map(assert_near, blockwise[1][0], reference[1][0])
    for field in ("gain", "levels"):
        found, expected = (getattr(gradients[1][0], field) for _, gradients in (blockwise, reference))
        assert np.abs(expected).max() > 0.01
        assert_near(found, expected, field)


def test_vmap_is_the_batch():
    """Over rows with their masks and arrays, gradients included, and over an ensemble of tables."""
    qkv, cotangent = query_key_value(B, T, S, N, K, 3, 7), normal(4, B, T, N, 7)
    mask = AttentionMask(**CACHE, **SEGMENTS, causal=True)
    dense, tables = normal(5, B, 1, T, S), normal(6, 3, 8, N)
    implementation = Blockwise(block=3)
    bias = lambda dense, table: (DenseBias(dense), T5Bias(table))  # noqa: E731
    run = functools.partial(output_and_gradients, implementation=implementation)
    expected = jit(run)(qkv, bias(dense, tables[0]), cotangent, mask=mask)

    def row(qkv, dense, cotangent, mask):
        one = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731
        return run(one(qkv), bias(dense[None], tables[0]), cotangent[None], mask=one(mask))

    output, (by_qkv, by_bias) = jit(jax.vmap(row))(qkv, dense, cotangent, mask)
    assert_near(output[:, 0], expected[0])
    jax.tree.map(lambda found, other: assert_near(found[:, 0], other), by_qkv, expected[1][0])
    assert_near(by_bias[0].array[:, 0], expected[1][1][0].array)
    assert_near(by_bias[1].table.sum(axis=0), expected[1][1][1].table)

    members = jit(jax.vmap(lambda table: run(qkv, bias(dense, table), cotangent, mask=mask)))(tables)
    jax.tree.map(lambda found, other: assert_near(found[0], other), members, expected)


def test_devices_share_rows_and_heads():
    """A batch over four devices and heads over two give what one device gives, dropout included."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    B, T, S, N, K = 4, 5, 7, 4, 2
    qkv, cotangent = query_key_value(B, T, S, N, K, 3, 7), normal(4, B, T, N, 7)
    segments = jnp.asarray(np.random.default_rng(1).integers(0, 3, (B, S)), jnp.int32)
    mask = AttentionMask(query_segment_ids=segments[:, :T], key_segment_ids=segments)
    bias = T5Bias(normal(6, 8, N))

    @jit
    def run(qkv, bias, cotangent, mask, dropout_key):
        return output_and_gradients(
            qkv,
            bias,
            cotangent,
            mask=mask,
            dropout_rate=0.3,
            dropout_key=dropout_key,
            implementation=Blockwise(block=3),
        )

    expected = run(qkv, bias, cotangent, mask, jax.random.key(3))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    heads = lambda x: put(x, "data", None, "model")  # noqa: E731
    shared = run(
        jax.tree.map(heads, qkv),
        T5Bias(put(bias.table, None, "model")),
        heads(cotangent),
        jax.tree.map(lambda x: put(x, "data"), mask),
        jax.random.key(3),
    )
    assert len(shared[0].sharding.device_set) == 8 and not shared[0].sharding.is_fully_replicated
    jax.tree.map(assert_near, shared, expected)


def test_layers_that_are_scanned_and_made_again():
    """`jax.checkpoint` in `jax.lax.scan`, as a stack of blocks uses it, has the gradients of the reference."""
    x, projections = normal(1, B, T, N, 3), normal(2, 3, 3, 3) * 0.5

    @functools.partial(jit, static_argnames="implementation")
    def gradient(projections, x, implementation):
        alone = functools.partial(dot_product_attention, mask=AttentionMask(causal=True), implementation=implementation)
        layer = jax.checkpoint(lambda x, p: x + alone(jnp.einsum("BTNH,HE->BTNE", x, p), x, x))
        stack = lambda projections, x: jax.lax.scan(lambda x, p: (layer(x, p), None), x, projections)[0]  # noqa: E731
        return jax.grad(lambda *arguments: jnp.square(stack(*arguments)).sum(), (0, 1))(projections, x)

    found, expected = (gradient(projections, x, i) for i in (Blockwise(block=2), "reference"))
    jax.tree.map(functools.partial(assert_near, limit=2e-5), found, expected)  # three layers on top of each other


def test_only_the_reference_has_a_forward_mode_derivative():
    """The gradient of blockwise is a rule for reverse mode, which JAX does not turn around; it says so."""
    qkv = query_key_value(1, T, S, N, K, 3, 7)
    tangents = tuple(jnp.ones_like(x) for x in qkv)
    reference = functools.partial(dot_product_attention, implementation="reference")
    blockwise = functools.partial(dot_product_attention, implementation="blockwise")
    step = 1e-3
    moved = [reference(*(x + sign * step for x in qkv)) for sign in (-1, 1)]
    _, derivative = jax.jvp(reference, qkv, tangents)
    np.testing.assert_allclose(derivative, (moved[1] - moved[0]) / (2 * step), atol=1e-3)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(blockwise, qkv, tangents)


def test_a_length_of_one_and_blocks_beyond_the_length():
    """A single tile is the reference, in both directions."""
    for T, S in ((1, 1), (1, 11), (5, 1)):
        qkv, cotangent = query_key_value(B, T, S, N, K, 3, 7), normal(4, B, T, N, 7)
        reference, blockwise = (hidden_case(qkv, None, None, cotangent, i) for i in ("reference", "blockwise"))
        jax.tree.map(assert_near, blockwise, reference)


def test_no_keys_at_all():
    """An empty cache is visible to nobody: zeros, as the reference gives."""
    query, key, value = query_key_value(B, T, 0, N, K, 3, 7)
    for implementation in ("reference", "blockwise"):
        output = dot_product_attention(query, key, value, implementation=implementation)
        assert output.shape == (B, T, N, 7) and not output.any()


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_without_a_length_is_refused(block):
    with pytest.raises(ValueError, match=f"block is {block}"):
        Blockwise(block=block)


# Memory

T_LONG = 256
ONES, NONE_OF_ALL = jnp.ones((1, T_LONG), jnp.int32), jnp.zeros((1, T_LONG), bool)
PREFIX = AttentionMask(causal=True, prefix_lengths=jnp.asarray([5], jnp.int32))
TILED = {
    "none": (None, None),
    "causal": (AttentionMask(causal=True), None),
    "positions": (AttentionMask(ONES, ONES, causal=True), None),
    "prefix": (PREFIX, None),
    "window": (AttentionMask(window=(3, 3), query_global=NONE_OF_ALL, key_global=NONE_OF_ALL), None),
    "segments": (AttentionMask(query_segment_ids=ONES, key_segment_ids=ONES), None),
    "function": (AttentionMask(function=every_third), None),
    "nested": (AttentionMask(causal=True) & PREFIX, None),
    "padding": (AttentionMask(dense=NONE_OF_ALL[:, None, None]), None),
    "alibi": (None, alibi(2)),
    "t5": (None, T5Bias(jnp.zeros((8, 2)))),
    "shaw": (AttentionMask(causal=True), ShawBias(jnp.zeros((5, 3)), jnp.zeros((5, 7)))),
    "cap": (None, SoftCap(2.0)),
    "function of the score": (None, ScoreFunction(tempered, (jnp.ones((1, 2, 1, 1)), jnp.ones((1, 1, 1, 1))))),
    "dense per key": (None, DenseBias(jnp.zeros((1, 2, 1, T_LONG)))),
}


def sizes(jaxpr):
    """The elements of everything that a jaxpr makes, bodies of loops, branches and rules included."""
    kinds = jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds)):
            if isinstance(inner, kinds):
                yield from sizes(getattr(inner, "jaxpr", inner))


def largest(implementation, mask, bias):
    """The most elements of an array in the forward and backward pass of 2 heads, dropout included."""
    qkv, cotangent = query_key_value(1, T_LONG, T_LONG, 2, 2, 3, 7), jnp.ones((1, T_LONG, 2, 7))
    arguments = {"mask": mask, "dropout_rate": 0.1, "dropout_key": jax.random.key(0), "implementation": implementation}
    return max(sizes(jax.make_jaxpr(functools.partial(output_and_gradients, **arguments))(qkv, bias, cotangent).jaxpr))


@pytest.mark.parametrize("kind", TILED)
def test_no_array_has_an_entry_for_every_query_and_key(kind):
    """B57: neither forward nor backward, by far; the walk finds those of the reference."""
    assert largest(Blockwise(block=16), *TILED[kind]) < T_LONG * T_LONG / 4
    assert largest("reference", *TILED[kind]) >= 2 * T_LONG * T_LONG


def test_memory_grows_with_the_length_not_with_its_square():
    """B57: what forward and backward need beside arguments and results, without and with a mask."""

    def temporary(T, implementation, mask=None):
        arrays = [jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (4, 2, 2, 4)]
        run = functools.partial(output_and_gradients, mask=mask, implementation=implementation)
        compiled = jax.jit(lambda *x: run(x[:3], None, x[3])).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    block = Blockwise(block=128)
    for mask in (None, AttentionMask(causal=True)):
        assert temporary(1024, block, mask) < 2.6 * temporary(512, block, mask)
    assert temporary(1024, block) < temporary(1024, "reference") / 5
