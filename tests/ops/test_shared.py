"""Attention shared by eight devices: the numbers of one, and no traffic but keys, values and shared gradients."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tfm_jax.ops import (
    ALiBi,
    AttentionBias,
    AttentionMask,
    Blockwise,
    CuDNN,
    DenseBias,
    ScoreFunction,
    Shared,
    ShawBias,
    SoftCap,
    Splash,
    T5Bias,
    dot_product_attention,
    explain_implementation,
)
from tfm_jax.ops.scores import Request

# tiny sizes: compilation is all the time there is
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)
B, T, S, N, H, E = 4, 20, 12, 8, 3, 5
AXES = ("data", "fsdp", "sequence", "model")
MESHES = {
    "data 2, sequence 2, model 2": (2, 1, 2, 2),
    "sequence 4": (1, 1, 4, 1),
    "model 4": (1, 1, 1, 4),
    "fsdp 2, sequence 4": (1, 2, 4, 1),
}
TILES = Blockwise(block=3)  # several, the last of them with rows and columns beyond the end
LIMIT = 1e-6  # of the norm of all gradients


def mesh_of(sizes, names=AXES):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def integers(seed, low, high, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def booleans(seed, share, *shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


def thirds(query_position, key_position, query_segment, key_segment, head):
    return (query_position + 2 * key_position + head) % 3 != 0


def tempered(score, query_position, key_position, head, warmth, pull):
    """A learned number for each head, found by its number."""
    return score * warmth[head] - pull * abs(query_position - key_position).astype(score.dtype)


def tempered_alike(score, query_position, key_position, head, warmth):
    """A learned number for each head, laid along the heads."""
    return score * warmth


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Undeclared(AttentionBias):
    """A reader's own, which works everywhere without a word about devices."""

    rate: Any

    def logits(self, logits, tile):
        return logits - self.rate[None, :, None, None] * jnp.abs(tile.distances)[:, None].astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Declared(Undeclared):
    outer_axes: ClassVar = {"rate": (None, 0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Derived(Declared):
    """May mean more than the class above, whose word does not count for it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Further(ScoreFunction):
    """As `Derived`."""


@dataclass(frozen=True)
class Case:
    mask: AttentionMask | None = None
    bias: Any = ()
    key_heads: int = 4
    dropout: float = 0.0


SEGMENTS = {"query_segment_ids": integers(1, 0, 3, B, T), "key_segment_ids": integers(2, 0, 3, B, S)}
SEGMENTS["query_segment_ids"] = SEGMENTS["query_segment_ids"].at[0, :7].set(4).at[1].set(0)
HIDING = jnp.where(booleans(3, 0.3, B, 1, T, S), -jnp.inf, normal(4, B, 1, T, S)).at[2, 0, 5:9].set(-jnp.inf)
FUNCTION = ScoreFunction(tempered, (1.0 + 0.3 * normal(5, N), jnp.asarray(0.05)))
CASES = {
    "causal by index": Case(AttentionMask(causal=True), T5Bias(normal(6, 8, N), max_distance=9)),
    "segments, padding, rows that see nothing": Case(AttentionMask(**SEGMENTS), ALiBi(jnp.abs(normal(7, N)))),
    "positions": Case(
        AttentionMask(integers(8, 0, S, B, T), integers(9, -1, S, B, S), causal=True),
        ShawBias(normal(10, 7, H), normal(11, 7, E)),
    ),
    "prefix": Case(
        AttentionMask(causal=True, prefix_lengths=integers(12, 0, S, B)), DenseBias(normal(13, 1, N, T, S)), 4, 0.3
    ),
    "window with globals": Case(
        AttentionMask(window=(2, 1), query_global=booleans(14, 0.2, B, T), key_global=booleans(15, 0.2, 1, S)),
        DenseBias(HIDING),
    ),
    "dense": Case(AttentionMask(dense=booleans(16, 0.4, B, N, T, S)), FUNCTION),
    "function of the head, and segments and causal": Case(
        AttentionMask(function=thirds, causal=True) & AttentionMask(**SEGMENTS),
        (T5Bias(normal(17, 8, N)), SoftCap(3.0), FUNCTION, Declared(jnp.abs(normal(18, N))), DenseBias(HIDING)),
    ),
    "key heads that devices share": Case(AttentionMask(window=(9, 4)), (), 2, 0.2),
    "one key head, nothing else": Case(None, (), 1),
}


def inputs(case):
    """Query, key and value, with NaN where the mask shows nothing."""
    qkv = normal(20, B, T, N, H), normal(21, B, S, case.key_heads, H), normal(22, B, S, case.key_heads, E)
    visible = np.ones((B, N, T, S), bool)
    if case.mask is not None:
        visible &= np.asarray(case.mask.array(T, S, N))
    dead = ~visible.any(axis=3).swapaxes(1, 2)
    unseen = ~visible.reshape(B, case.key_heads, -1, T, S).any(axis=(2, 3)).swapaxes(1, 2)
    return tuple(jnp.where(w[..., None], jnp.nan, x) for x, w in zip(qkv, (dead, unseen, unseen), strict=True))


def attend(case, implementation, qkv, mask, bias, key=None):
    options = {"dropout_rate": case.dropout, "dropout_key": key, "implementation": implementation}
    return dot_product_attention(*qkv, mask=mask, bias=bias, **options)


def output_and_gradients(case, implementation, qkv, mask, bias, key=None):
    """By query, key, value and what biases learn."""

    def loss(qkv, bias):
        output = attend(case, implementation, qkv, mask, bias, key)
        return jnp.sin(output + 0.3).sum(), output

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(qkv, bias)


def everything(implementation, cases):
    """Output and gradients of all cases in one program."""
    given = {name: (inputs(case), case.mask, case.bias, jax.random.key(23)) for name, case in cases.items()}

    @jit
    def run(given):
        return {name: output_and_gradients(cases[name], implementation, *arrays) for name, arrays in given.items()}

    return run(given)


@functools.cache
def of_one_device():
    return everything("reference", CASES)


def assert_same(found, expected, limit=LIMIT):
    """All within the limit of the norm of the gradients; the outputs of that of the outputs."""
    for mine, its in zip(found, expected, strict=True):
        assert jax.tree.structure(mine) == jax.tree.structure(its)
        norm = math.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(its)))
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
            difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
            assert np.isfinite(difference).all()
            assert np.linalg.norm(difference) <= limit * norm


@pytest.mark.parametrize("inner", ["reference", TILES], ids=["reference", "blockwise"])
@pytest.mark.parametrize("mesh", [pytest.param(x, marks=pytest.mark.slow) if x == "sequence 4" else x for x in MESHES])
def test_eight_devices_give_what_one_gives(mesh, inner):
    """B22, B01, I11: output, gradients and dropped elements; hidden NaN and rows that see nothing stay harmless."""
    with jax.set_mesh(mesh_of(MESHES[mesh])):
        found = everything(Shared(inner), CASES)
    for name, expected in of_one_device().items():
        assert_same(found[name], expected)


def test_dropout_is_that_of_one_device_and_not_none():
    """B22: or the comparison above would say nothing."""
    name = "prefix"
    without = everything("reference", {name: Case(CASES[name].mask, CASES[name].bias)})[name]
    with pytest.raises(AssertionError):
        assert_same(of_one_device()[name], without, limit=0.01)


def divided(implementation, qkv, **arguments):
    """Whether the program is made for each device by itself."""
    attend = lambda *qkv: dot_product_attention(*qkv, **arguments, implementation=implementation)  # noqa: E731
    return "shard_map" in str(jax.make_jaxpr(attend)(*qkv))


PLAIN = (normal(20, B, T, N, H), normal(21, B, S, 4, H), normal(22, B, S, 4, E))


def test_what_no_axis_divides_is_the_inner_implementation_as_it_is():
    assert not divided(Shared(), PLAIN)
    for sizes, names in (((1, 1, 1, 1), AXES), ((8,), ("experts",)), ((3,), ("data",))):
        with jax.set_mesh(mesh_of(sizes, names)):
            assert not divided(Shared(), PLAIN)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        assert not divided(Shared(), PLAIN)
    with jax.set_mesh(mesh_of((2, 4), ("data", "else"))):
        assert divided(Shared(), PLAIN) and not divided(Shared(batch=None), PLAIN)
        assert divided(Shared(batch=(), length="else"), PLAIN)


def test_axes_that_do_not_divide_are_left_out():
    """B22: a batch of 6 over 2 of 2 x 4, 7 queries, and 6 heads of 3 key heads, which no 2 devices share."""
    qkv = normal(24, 6, 7, 6, H), normal(25, 6, 5, 3, H), normal(26, 6, 5, 3, E)
    bias = (ALiBi(jnp.abs(normal(27, 6))), DenseBias(normal(28, 6, 1, 1, 5)))
    case, mask = Case(dropout=0.3), AttentionMask(causal=True)
    run = lambda implementation: jit(functools.partial(output_and_gradients, case, implementation))  # noqa: E731
    expected = run("reference")(qkv, mask, bias, jax.random.key(0))
    for sizes in ((2, 4, 1, 1), (2, 1, 2, 2)):
        with jax.set_mesh(mesh_of(sizes)):
            assert divided(Shared(), qkv)
            assert_same(run(Shared("blockwise"))(qkv, mask, bias, jax.random.key(0)), expected)


def test_an_axis_divides_one_thing():
    with pytest.raises(ValueError, match="each divides one of batch, heads and length"):
        Shared(heads=("model", "data"))


# ---------------------------------------------------------------------------------------------------------- collectives


def collectives(function, *arguments):
    """(kind, elements of each array) of each collective of the compiled program, all of which are outside loops."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
    instruction = re.compile(rf" = (.*?) ({kinds})(?:-start)?\(")
    found = [instruction.search(line) for line in text.splitlines()]
    at_top = [instruction.search(line) for line in text.partition("\nENTRY ")[2].splitlines()]
    assert len([x for x in found if x]) == len([x for x in at_top if x])
    elements = lambda shapes: [  # noqa: E731
        math.prod(map(int, filter(None, sizes.split(",")))) for sizes in re.findall(r"\w\d+\[([\d,]*)\]", shapes)
    ]
    return [(x[2], elements(x[1])) for x in at_top if x]


def placed(mesh, length=None):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    return tuple(put(x, ("data", "fsdp"), length, "model") for x in PLAIN)


@pytest.mark.parametrize("inner", ["reference", TILES], ids=["reference", "blockwise"])
def test_over_batch_and_heads_nothing_is_sent_but_gradients_of_what_devices_share(inner):
    mesh = mesh_of((2, 1, 1, 4))
    mask = AttentionMask(causal=True, **SEGMENTS)
    table, slopes = normal(6, 11, N), ALiBi(jnp.abs(normal(7, N)))
    with jax.set_mesh(mesh):
        run = functools.partial(output_and_gradients, Case(), Shared(inner))
        nothing = collectives(lambda qkv: run(qkv, mask, ()), placed(mesh))
        # the slopes are no parameters, so nobody asks for their gradient
        case = functools.partial(attend, Case(), Shared(inner))
        loss = lambda qkv, table: case(qkv, mask, (slopes, T5Bias(table))).sum()  # noqa: E731
        shared = collectives(jax.grad(loss, argnums=(0, 1)), placed(mesh), table)
    assert nothing == []
    # the table arrives whole and leaves divided by heads, as it is used
    assert shared == [("all-reduce", [11 * N // 4])]


@pytest.mark.parametrize("inner", ["reference", TILES], ids=["reference", "blockwise"])
def test_over_the_length_keys_and_values_are_gathered_once_and_no_query(inner):
    mesh, rows, K = mesh_of((2, 1, 4, 1)), B // 2, PLAIN[1].shape[2]
    with jax.set_mesh(mesh):
        run = functools.partial(output_and_gradients, Case(), Shared(inner))
        found = collectives(lambda qkv: run(qkv, AttentionMask(causal=True), ()), placed(mesh, "sequence"))
    sent = {"all-gather": [], "all-reduce": [], "reduce-scatter": []}
    for kind, elements in found:
        sent[kind] += elements
    keys_and_values = sorted([rows * S * K * H, rows * S * K * E])
    assert sorted(sent["all-gather"]) == keys_and_values
    assert sorted(sent["all-reduce"] + [4 * elements for elements in sent["reduce-scatter"]]) == keys_and_values


def test_over_the_length_a_device_projects_its_own_tokens_alone():
    """Keys and values are gathered, not what they are made of, to project all of it on every device."""
    mesh, D, K = mesh_of((2, 1, 4, 1)), 23, 4
    x = jax.device_put(normal(30, B, T, D), NamedSharding(mesh, PartitionSpec("data", "sequence")))
    weights = normal(31, D, N, H), normal(32, D, K, H), normal(33, D, K, E)

    def loss(weights, x):
        qkv = [jnp.einsum("BTD,DNH->BTNH", x, weight) for weight in weights]
        return jnp.sin(attend(Case(), Shared("reference"), qkv, AttentionMask(causal=True), ())).sum()

    with jax.set_mesh(mesh):
        found = collectives(jax.grad(loss), weights, x)
    gathered = [n for kind, elements in found if kind == "all-gather" for n in elements]
    assert sorted(gathered) == sorted([B // 2 * T * K * H, B // 2 * T * K * E])


# ------------------------------------------------------------------------------------------------------ transformations


def test_in_a_scan_under_checkpoint_with_grad_outside():
    """B22: as a stack of layers runs it, the gradient of a bias that all layers share included."""
    case, layers = Case(dropout=0.1), 3
    x, weights = normal(31, B, T, N, H), normal(32, layers, 3, N, H, N, H) / 4
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    mask = AttentionMask(positions, positions, causal=True)

    def loss(implementation, weights, table, x, mask, key):
        @jax.checkpoint
        def layer(x, given):
            weights, key = given
            qkv = [jnp.einsum("BTNH,NHMG->BTMG", x, weight) for weight in weights]
            return x + attend(case, implementation, qkv, mask, T5Bias(table), key), None

        return jnp.square(jax.lax.scan(layer, x, (weights, jax.random.split(key, layers)))[0]).sum()

    gradients = lambda one: jit(jax.grad(functools.partial(loss, one), argnums=(0, 1, 2)))  # noqa: E731
    arguments = weights, normal(33, 8, N), x, mask, jax.random.key(1)
    expected = gradients("reference")(*arguments)
    with jax.set_mesh(mesh_of(MESHES["data 2, sequence 2, model 2"])):
        assert_same([gradients(Shared(TILES))(*arguments)], [expected], limit=2e-6)


def test_without_jit():
    expected = dot_product_attention(*PLAIN, implementation="reference")
    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        found = dot_product_attention(*PLAIN, implementation=Shared())
    assert found.sharding.spec[1:3] == ("sequence", "model")
    assert_same([found], [expected])


# -------------------------------------------------------------------------------------------------- biases of one's own


def test_a_bias_is_divided_where_its_class_says_how():
    """What does not say is left to XLA, whatever its arrays run over, and right."""
    rate = jnp.abs(normal(34, N))
    along = (rate[None, :, None, None],)
    told = {
        "declared": (Declared(rate), True),
        "undeclared": (Undeclared(rate), False),
        "derived from a declared one": (Derived(rate), False),
        "found by the number of the head": (ScoreFunction(tempered, (rate, jnp.asarray(0.1))), True),
        "laid along the heads": (ScoreFunction(tempered_alike, along), False),
        "derived from a function": (Further(tempered, (rate, jnp.asarray(0.1))), False),
        "two, of which one does not say": ((Declared(rate), Undeclared(rate)), False),
    }
    biases = {name: bias for name, (bias, _) in told.items()}
    run = lambda implementation: jit(  # noqa: E731
        lambda biases: {k: output_and_gradients(Case(), implementation, PLAIN, None, b) for k, b in biases.items()}
    )
    expected = run("reference")(biases)
    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        assert {name: divided(Shared(), PLAIN, bias=bias) for name, bias in biases.items()} == {
            name: whether for name, (_, whether) in told.items()
        }
        found = run(Shared())(biases)
    for name in told:
        assert_same(found[name], expected[name])
    with jax.set_mesh(mesh_of((2, 1, 2, 1))):  # all heads are here
        assert divided(Shared(), PLAIN, bias=ScoreFunction(tempered_alike, along))


def test_a_mask_of_a_derived_class_is_left_to_xla():
    class Novel(AttentionMask):
        pass

    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        assert divided(Shared(), PLAIN, mask=AttentionMask(causal=True))
        assert not divided(Shared(), PLAIN, mask=Novel(causal=True))
        assert not divided(Shared(), PLAIN, mask=AttentionMask(causal=True) & Novel(window=(1, 1), causal=True))


# -------------------------------------------------------------------------------------------------- choice and refusals


@dataclass(frozen=True)
class Narrow:
    """Does at most so many queries of four heads."""

    most: int

    def refusal(self, request):
        B, N, T, _ = request.shape
        shapes = (len(request.query), request.query.shape[1:3], len(jax.tree.leaves(request.mask)[0]))
        return None if T <= self.most and shapes == (B, (T, N), B) else f"it has {T} queries of {N} heads"

    def scores(self, request):
        return f"scores {request.shape}"

    def run(self, request):
        return jnp.zeros((*request.query.shape[:3], request.value.shape[3]))


def test_the_inner_implementation_is_asked_about_the_part_of_one_device():
    mask = AttentionMask(dense=jnp.ones((B, 1, T, S), bool))
    with pytest.raises(ValueError, match="Narrow cannot do this: it has 20 queries of 8 heads"):
        dot_product_attention(*PLAIN, mask=mask, implementation=Shared(Narrow(10)))
    structs = jax.eval_shape(lambda: PLAIN)
    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        explained = explain_implementation(*structs, mask=mask, implementation=Shared(Narrow(10)))
        assert explained.scores == "on each of 8 devices Narrow scores (2, 4, 10, 12)"
        assert dot_product_attention(*PLAIN, mask=mask, implementation=Shared(Narrow(10))).shape == (B, T, N, E)
        with pytest.raises(ValueError, match="Narrow cannot do this: it has 10 queries of 4 heads"):
            dot_product_attention(*PLAIN, mask=mask, implementation=Shared(Narrow(9)))
        with pytest.raises(ValueError, match="Splash cannot do this: bias ALiBi.*'reference' and 'blockwise' can"):
            dot_product_attention(*PLAIN, bias=ALiBi(jnp.ones(N)), implementation=Shared("splash"))
        with pytest.raises(ValueError, match="implementation is 'flash': 'auto' or one of"):
            dot_product_attention(*PLAIN, implementation=Shared("flash"))


def test_one_array_of_segments_stays_one():
    """By which the kernel for TPU knows that every slot sees itself."""
    seen = []

    class Looks(Narrow):
        def run(self, request):
            seen.append(request.mask.query_segment_ids is request.mask.key_segment_ids)
            return super().run(request)

    same, other = (jnp.ones((B, S), jnp.int32) for _ in range(2))
    query = PLAIN[0][:, :S]
    with jax.set_mesh(mesh_of((2, 1, 1, 2))):
        for ids in (same, other):
            mask = AttentionMask(query_segment_ids=same, key_segment_ids=ids)
            dot_product_attention(query, *PLAIN[1:], mask=mask, implementation=Shared(Looks(S)))
    assert seen == [True, False]


@pytest.mark.parametrize("platform, dtype, fused", [("tpu", "float32", "Splash"), ("cpu", "float32", "Blockwise")])
def test_auto_takes_the_kernel_of_the_platform_under_a_mesh(platform, dtype, fused, monkeypatch):
    """By itself the kernel for TPU is passed over where a mesh has several devices."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    structs = [jax.ShapeDtypeStruct((4, 4096, 4, 64), dtype)] * 3
    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        mask = AttentionMask(causal=True)
        assert explain_implementation(*structs, mask=mask).implementation == "blockwise"
        explained = explain_implementation(*structs, mask=mask, implementation=Shared())
    assert explained.scores.startswith(f"on each of 8 devices {fused} builds scores in tiles of 512 x 512")


# -------------------------------------------------------------------------------------------------------------- kernels


def test_the_tpu_kernel_on_parts_of_the_queries_is_the_reference():
    """B01, B22: a device's rows know where they stand, and which of them see nothing. In Pallas's interpreter."""
    T, S = 140, 135
    qkv = normal(40, 2, T, 2, H), normal(41, 2, S, 2, H), normal(42, 2, S, 2, E)
    ids = {"query_segment_ids": integers(43, 0, 3, 2, T), "key_segment_ids": integers(44, 0, 3, 2, S)}
    masks = {
        "packed and causal with a window": AttentionMask(causal=True, window=(61, None), **ids),
        "window": AttentionMask(window=(None, 9)),
    }
    run = lambda one: jit(  # noqa: E731
        lambda masks: {name: output_and_gradients(Case(), one, qkv, mask, ()) for name, mask in masks.items()}
    )
    expected = run("reference")(masks)
    with jax.set_mesh(mesh_of((2, 1, 2, 2))):
        found = run(Shared(Splash(interpret=True, block=128)))(masks)
    for name in masks:
        assert_same(found[name], expected[name], limit=5e-6)


def test_the_translation_for_cudnn_knows_where_the_queries_of_a_device_stand(monkeypatch):
    """B22: a causal mask by index is one array of a device's rows, be there as many of them as keys, or not."""
    original, seen = jax.nn.dot_product_attention, []

    def through_xla(*arrays, implementation, **named):
        seen.append((arrays[4] is not None, named["is_causal"]))
        return original(*arrays, implementation="xla", **named)

    monkeypatch.setattr(jax.nn, "dot_product_attention", through_xla)
    qkv = normal(45, B, 12, N, H), normal(46, B, 6, 4, H), normal(47, B, 6, 4, H)
    mask = AttentionMask(causal=True)
    expected = output_and_gradients(Case(), "reference", qkv, mask, ())
    # float32, which cuDNN would refuse
    shared = lambda qkv: Shared(CuDNN()).run(Request(*qkv, mask, (), H**-0.5, 0.0, None))  # noqa: E731
    loss = lambda qkv: jnp.sin(shared(qkv) + 0.3).sum()  # noqa: E731
    for sizes in ((2, 1, 2, 2), (2, 1, 1, 2)):
        with jax.set_mesh(mesh_of(sizes)):
            assert_same(jit(lambda qkv: (shared(qkv), jax.grad(loss)(qkv)))(qkv), (expected[1], expected[0][0]))
        assert set(seen) == {(True, False)}
        seen.clear()
    square = qkv[0][:, :6], *qkv[1:]
    with jax.set_mesh(mesh_of((2, 1, 1, 2))):
        jax.eval_shape(shared, square)
    assert seen == [(False, True)]
