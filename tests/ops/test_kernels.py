"""The fused kernels: what they honour equals the reference, what they do not is refused by name.

cuDNN is lowered for CUDA without a GPU, and its translation of masks runs through XLA instead; the TPU kernel runs in
Pallas's interpreter, and is compiled for a TPU without one.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.ops import AttentionMask, dot_product_attention, explain_implementation, kernels
from tfm_jax.ops.biases import DenseBias, ScoreFunction, SoftCap, T5Bias, alibi, as_biases
from tfm_jax.ops.kernels import CuDNN, Splash
from tfm_jax.ops.scores import Place, Request

ROOT = Path(__file__).parents[2]
SPLASH = Splash(interpret=True, block=128)
# heads: the query's, the key's; head sizes d_k, d_v
GROUPED, H, E = (6, 3), 11, 13


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs(T, S, *, heads=GROUPED, sizes=(H, E), batch=2, dtype=jnp.float32):
    (N, K), (d_k, d_v) = heads, sizes
    shapes = ((batch, T, N, d_k), (batch, S, K, d_k), (batch, S, K, d_v))
    return tuple(normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))


def segment_ids(seed, length, *, batch=2, segments=3):
    """Packed segments 1, 2, .. of random lengths, then padding."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, length), (batch, segments), replace=True), axis=1)
    ids = (np.arange(length)[None, None] >= ends[..., None]).sum(axis=1) + 1
    return jnp.asarray(np.where(ids > segments, 0, ids), jnp.int32)


def poisoned(qkv, mask, bias=None):
    """NaN in queries that see nothing and in keys and values that none sees; also where these are."""
    query, key, value = qkv
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    visible = np.ones((B, N, T, S), bool)
    if mask is not None:
        visible &= np.asarray(mask.array(T, S, N))
    for array in jax.tree.leaves(bias):
        visible &= ~np.isneginf(np.asarray(array))
    dead = ~visible.any(axis=3).swapaxes(1, 2)
    unseen = ~visible.reshape(B, K, N // K, T, S).any(axis=(2, 3)).swapaxes(1, 2)
    nan = lambda x, where: jnp.where(where[..., None], jnp.nan, x)  # noqa: E731
    return (nan(query, dead), nan(key, unseen), nan(value, unseen)), (dead, unseen, unseen)


def output_and_gradients(attend, qkv, *others):
    """Of query, key, value and floating arrays among the others, under jit."""

    @jax.jit
    def both(qkv, *others):
        def loss(qkv, *others):
            output = attend(*qkv, *others)
            return jnp.sin(output.astype(jnp.float32)).sum(), output

        floating = tuple(i + 1 for i, x in enumerate(others) if x is not None and not isinstance(x, AttentionMask))
        gradients, output = jax.grad(loss, argnums=(0, *floating), has_aux=True)(qkv, *others)
        return [output, *jax.tree.leaves(gradients)]

    return [np.asarray(x, np.float64) for x in both(qkv, *others)]


def reference(query, key, value, mask, bias):
    return dot_product_attention(query, key, value, mask=mask, bias=bias, implementation="reference")


def assert_close(got, wanted, limit=5e-6):
    """Each array within the limit relative to its largest entry (the README's table has the same limits)."""
    for mine, its in zip(got, wanted, strict=True):
        assert np.isfinite(mine).all()
        assert np.abs(mine - its).max() <= limit * max(np.abs(its).max(), 1.0)


def self_segments(seed, length, **rules):
    ids = segment_ids(seed, length)
    return AttentionMask(query_segment_ids=ids, key_segment_ids=ids, **rules)


def cross_segments(T, S, **rules):
    """A query segment (4) that no key has; the keys' last segment (3) is one that the first row's queries lack."""
    query = segment_ids(3, T).at[0].set(jnp.where(segment_ids(3, T)[0] == 3, 4, segment_ids(3, T)[0]))
    return AttentionMask(query_segment_ids=query, key_segment_ids=segment_ids(4, S), **rules)


# ----------------------------------------------------------------------------------------------------------- TPU kernel

# T, S, mask, bias, heads: none of the lengths is a multiple of the blocks of 128
HONOURED = {
    "nothing": (131, 257, None, None, (2, 2)),
    "causal": (131, 131, AttentionMask(causal=True), None, GROUPED),
    "causal, more queries than keys": (263, 131, AttentionMask(causal=True), None, (3, 1)),
    "window": (257, 257, AttentionMask(window=(37, 11)), None, (2, 1)),
    "window that leaves the last queries, a whole block among them, nothing": (
        397,
        131,
        AttentionMask(window=(5, 0), causal=True),
        None,
        (2, 1),
    ),
    "window that shows the last keys to none": (131, 397, AttentionMask(window=(None, 7)), None, (2, 1)),
    "segments": (131, 257, cross_segments(131, 257), None, GROUPED),
    "packed and causal with a window": (257, 257, self_segments(5, 257, causal=True, window=(41, None)), None, (2, 1)),
    "segments and causal over other lengths": (257, 131, cross_segments(257, 131, causal=True), None, (2, 1)),
    "soft cap": (131, 131, AttentionMask(causal=True), SoftCap(1.5), (2, 1)),
}


# the interpreter takes seconds to compile: the hardest cases run always
ALWAYS = {
    "window that leaves the last queries, a whole block among them, nothing",
    "segments",
    "packed and causal with a window",
    "soft cap",
}


@pytest.mark.parametrize("case", [x if x in ALWAYS else pytest.param(x, marks=pytest.mark.slow) for x in HONOURED])
def test_the_tpu_kernel_is_the_reference(case):
    """B01: dead queries give zeros and no gradient, what hidden slots hold never matters. B03: causal where T != S."""
    T, S, mask, bias, heads = HONOURED[case]
    qkv, hidden = poisoned(inputs(T, S, heads=heads), mask)
    run = functools.partial(dot_product_attention, implementation=SPLASH)
    got = output_and_gradients(lambda *qkv: run(*qkv, mask=mask, bias=bias), qkv)
    assert_close(got, output_and_gradients(lambda *qkv: reference(*qkv, mask, bias), qkv))
    assert not got[0][hidden[0]].any()
    for gradient, where in zip(got[1:], hidden, strict=True):
        assert not gradient[where].any()


@pytest.mark.slow
def test_segments_that_come_as_two_arguments_of_jit_are_the_same():
    """Inside jit nothing says that both sides have the same ids: partners are then found from the mask itself."""
    mask = self_segments(6, 131, causal=True)
    qkv, _ = poisoned(inputs(131, 131, heads=(2, 1)), mask)
    run = lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask, implementation=SPLASH)  # noqa: E731
    assert_close(
        output_and_gradients(run, qkv, mask),
        output_and_gradients(lambda *args: reference(*args, None), qkv, mask),
    )


def one_segment(T, S, **rules):
    ids = jnp.ones((2, 1), jnp.int32)
    return AttentionMask(query_segment_ids=ids, key_segment_ids=ids, **rules)


def last_segment(T, S, **rules):
    query = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) >= T - 3, (2, T)).astype(jnp.int32)
    return AttentionMask(query_segment_ids=query, key_segment_ids=jnp.ones((2, S), jnp.int32), **rules)


@pytest.mark.parametrize("window", [None, (2, None), (3, 1), (None, 2)])
@pytest.mark.parametrize("T, S", [(7, 7), (10, 7), (9, 7), (7, 10), (1031, 11)])
@pytest.mark.parametrize(
    "segments", [lambda T, S, **rules: AttentionMask(**rules), cross_segments, one_segment, last_segment]
)
def test_who_sees_nothing_and_what_is_never_seen_is_known_without_an_array(T, S, window, segments):
    """B01: exactly as the whole array of the mask says; in several tiles, too (T = 1,031)."""
    whole = Place(0, 0, 0, (2, 1, T, S))
    for causal in (False, True):
        mask = segments(T, S, window=window, causal=causal)
        array = np.ones((2, 1, T, S), bool) if not mask.facts else np.asarray(mask.array(T, S))
        for known, axis in zip(kernels._partners(mask, 2, T, S, whole), (3, 2), strict=True):
            assert (array.any(axis=axis)[:, 0] == (True if known is None else np.asarray(known))).all()


@pytest.mark.parametrize("window", [None, (2, None), (3, 1), (None, 2)])
@pytest.mark.parametrize("segments", [lambda T, S, **rules: AttentionMask(**rules), cross_segments])
def test_partners_of_a_part_of_the_queries_are_those_of_the_whole(segments, window):
    """B01: a part's own queries that see nothing; of keys, at least those are cleared that no query at all sees."""
    T, S, part = 12, 7, 4
    for causal in (False, True):
        mask = segments(T, S, window=window, causal=causal)
        array = np.ones((2, 1, T, S), bool) if not mask.facts else np.asarray(mask.array(T, S))
        for first in range(0, T, part):
            own = array[:, 0, first : first + part]
            given = mask.query_segment_ids
            cut = mask if given is None else replace(mask, query_segment_ids=given[:, first : first + part])
            place = Place(0, 0, jnp.asarray(first, jnp.int32), (2, 1, T, S))
            live, seen = (x if x is None else np.asarray(x) for x in kernels._partners(cut, 2, part, S, place))
            assert (own.any(axis=2) == (True if live is None else live)).all()
            seen = np.ones((2, S), bool) if seen is None else np.broadcast_to(seen, (2, S))
            assert (seen >= own.any(axis=1)).all() and (seen <= array.any(axis=(1, 2))).all()


@pytest.mark.slow
def test_the_tpu_kernel_in_bfloat16():
    """Against the float32 reference on the same numbers."""
    mask = self_segments(7, 131, causal=True)
    qkv = inputs(131, 131, heads=(2, 1), dtype=jnp.bfloat16)
    wide = tuple(x.astype(jnp.float32) for x in qkv)
    got = output_and_gradients(lambda *qkv: dot_product_attention(*qkv, mask=mask, implementation=SPLASH), qkv)
    assert_close(got, output_and_gradients(lambda *qkv: reference(*qkv, mask, None), wide), limit=2e-2)
    output = jax.eval_shape(lambda *qkv: dot_product_attention(*qkv, mask=mask, implementation=SPLASH), *qkv)
    assert output.dtype == jnp.bfloat16


@pytest.mark.parametrize("block", [0, 100, 192])
def test_a_block_is_a_multiple_of_128(block):
    with pytest.raises(ValueError, match=f"block is {block}: a multiple of 128"):
        Splash(block=block)


def test_a_mesh_that_is_in_the_way_is_refused():
    """A Pallas kernel is not divided by XLA, and this one does not say how its outputs vary; without both, it runs."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    qkv, spec, refusals = inputs(3, 5, heads=(2, 1)), jax.sharding.PartitionSpec("data"), []

    def inside(query, key, value):
        refusals.append(Splash().refusal(Request(query, key, value, None, (), 0.3, 0.0, None)))
        return query

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="mesh data 2, over which XLA does not divide.*jax.shard_map"):
            dot_product_attention(*qkv, implementation="splash")
        for check in (True, False):
            divided = jax.shard_map(inside, in_specs=(spec, spec, spec), out_specs=spec, check_vma=check)
            jax.jit(divided).lower(*qkv)
    assert "check_vma=True" in refusals[0] and refusals[1] is None


COMPILE_FOR_TPU = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tfm_jax import config
from tfm_jax.models import build
from tfm_jax.models.gpt import Dropout, GPTConfig
from tfm_jax.ops import AttentionMask, dot_product_attention
from tfm_jax.sharding import batch_sharding
from tfm_jax.train.objectives import LanguageModel
from tfm_jax.train.step import abstract_state, train_step

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(devices[0]))

def report(program):
    memory = program.memory_analysis().temp_size_in_bytes
    return {"kernels": program.as_text().count("tpu_custom_call"), "bytes": memory}

def compiled(T, sizes, dtype, segments=False, **rules):
    def loss(query, key, value, ids):
        mask = AttentionMask(query_segment_ids=ids, key_segment_ids=ids, **rules)
        output = dot_product_attention(query, key, value, mask=mask, implementation="splash")
        return jnp.square(output.astype(jnp.float32)).sum()

    d_k, d_v = sizes
    qkv = struct(dtype, 1, T, 8, d_k), struct(dtype, 1, T, 4, d_k), struct(dtype, 1, T, 4, d_v)
    ids = struct(jnp.int32, 1, T) if segments else None
    return report(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*qkv, ids).compile())

def divided(T):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    batch = jax.sharding.PartitionSpec("data")
    attend = lambda *qkv: dot_product_attention(*qkv, mask=AttentionMask(causal=True), implementation="splash")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False)
    qkv = [jax.ShapeDtypeStruct((8, T, 4, 64), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, batch))] * 3
    loss = lambda *qkv: attend(*qkv).astype(jnp.float32).sum()
    return report(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*qkv).compile())

def trained(T, **sizes):
    sizes = config.Mesh(**sizes).axes
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    model = build(GPTConfig(256, num_layers=2, d_model=256, num_heads=4, max_length=T, implementation="splash",
                            dropout=Dropout(0.1, 0.1), remat="full"))
    batch = jax.ShapeDtypeStruct((8, T), jnp.int32, sharding=batch_sharding(mesh))
    batch = dict.fromkeys(("tokens", "targets", "segment_ids"), batch) | {"weights": batch.update(dtype=jnp.float32)}
    settings = {"optimizer": config.Optimizer(), "precision": config.Precision(compute="bfloat16")}
    with jax.set_mesh(mesh):
        state = abstract_state(model, settings["optimizer"], mesh, precision=settings["precision"])
        return report(train_step.lower(state, batch, objective=LanguageModel(model), **settings).compile())

print(json.dumps({
    "a train step": trained(512, fsdp=2, sequence=2, model=2),
    "eight devices": divided(1024),
    "odd sizes": compiled(131, (11, 13), jnp.float32),
    "causal": compiled(16384, (64, 64), jnp.bfloat16, causal=True),
    "packed": compiled(16384, (64, 64), jnp.bfloat16, causal=True, segments=True),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPU, is not installed")
def test_the_tpu_kernel_compiles_for_a_tpu_without_one():
    """Forward and both backward kernels, also in a train step over eight chips, in bfloat16, with remat.

    At T = 16,384 in less than 1/50 of one array of scores.
    """
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMPILE_FOR_TPU]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    programs = json.loads(done.stdout.splitlines()[-1])
    for program in programs.values():
        assert program["kernels"] >= 3
        assert program["bytes"] < 8 * 16384**2 * 4 / 50


# ---------------------------------------------------------------------------------------------------------------- cuDNN


@pytest.fixture
def cuda_detected(monkeypatch):
    """What JAX asks of the machine before it lowers to cuDNN, answered as an H100 would."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    for name, answer in (("check_cudnn_version", lambda: 91100), ("check_compute_capability", lambda _: True)):
        if not hasattr(module, name):
            pytest.skip(f"this version of JAX has no {name} to answer for")
        monkeypatch.setattr(module, name, answer)


def lowered_for_cuda(implementation, T, S, *, heads=(2, 2), mask=None, bias=None):
    qkv = inputs(T, S, heads=heads, sizes=(16, 16), dtype=jnp.bfloat16)

    def gradients(qkv, mask, bias):
        run = functools.partial(dot_product_attention, mask=mask, implementation=implementation)
        return jax.value_and_grad(lambda qkv, bias: run(*qkv, bias=bias).sum(), argnums=0)(qkv, bias)

    return jax.jit(gradients).trace(qkv, mask, bias).lower(lowering_platforms=("cuda",)).as_text()


FUSED = {
    "nothing": ({}, "Softmax", "NO_MASK", 0),
    "causal": ({"mask": AttentionMask(causal=True)}, "Softmax", "CAUSAL", 0),
    "causal window": ({"mask": AttentionMask(causal=True, window=(5, None))}, "Softmax", "CAUSAL", 6),
    "window": ({"mask": AttentionMask(window=(5, 5))}, "ScaleBiasSoftmax", "NO_MASK", 0),
    "padding": ({"mask": self_segments(8, 24)}, "ScaleBiasSoftmax", "NO_MASK", 0),
    "bias": ({"bias": normal(9, 1, 4, 24, 24)}, "ScaleBiasSoftmax", "NO_MASK", 0),
    "causal bias": (
        {"mask": AttentionMask(causal=True), "bias": normal(9, 1, 4, 24, 24)},
        "ScaleBiasSoftmax",
        "CAUSAL",
        0,
    ),
    "grouped heads": ({"heads": (4, 2)}, "Softmax", "NO_MASK", 0),
}


@pytest.mark.parametrize("case", FUSED)
def test_cudnn_lowers_to_the_fused_call(case, cuda_detected):
    arguments, call, mask_type, window = FUSED[case]
    text = lowered_for_cuda("cudnn", 24, 24, **{"heads": (4, 4)} | arguments)
    assert f"@__cudnn$fmha{call}(" in text and f"@__cudnn$fmha{call}Backward(" in text
    config = text.replace("\\22", '"')
    assert f'"mask_type": "{mask_type}"' in config and f'"sliding_window_length": {window}' in config


def test_the_reference_lowers_to_no_fused_call(cuda_detected):
    assert "__cudnn" not in lowered_for_cuda("reference", 24, 24, mask=AttentionMask(causal=True))


def hidden_bias(seed, *shape):
    """-inf in half of it, and for all keys of the last query."""
    rng = np.random.default_rng(seed)
    bias = np.where(rng.random(shape) < 0.5, -np.inf, rng.standard_normal(shape))
    bias[..., -1, :] = -np.inf
    return jnp.asarray(bias, jnp.float32)


def alternating(query_position, key_position, query_segment, key_segment, head):
    return (query_position + key_position + head) % 3 == 0


TRANSLATED = {
    "nothing": (7, 5, None, None),
    "causal": (7, 7, AttentionMask(causal=True), None),
    "causal, more keys than queries": (5, 7, AttentionMask(causal=True), None),
    "causal window": (7, 7, AttentionMask(causal=True, window=(2, 3)), None),
    "window with dead queries": (11, 5, AttentionMask(window=(2, 1)), None),
    "segments with dead queries": (7, 11, cross_segments(7, 11), None),
    "packed and causal": (11, 11, self_segments(10, 11, causal=True), None),
    "prefix": (7, 7, AttentionMask(causal=True, prefix_lengths=jnp.array([2, 5], jnp.int32)), None),
    "function of the head": (7, 5, AttentionMask(function=alternating), None),
    "a dense array and another mask": (
        7,
        7,
        AttentionMask(dense=hidden_bias(11, 2, 1, 7, 7) == 0) & AttentionMask(),
        None,
    ),
    "bias": (7, 5, None, normal(12, 1, 6, 7, 5)),
    "bias that hides": (7, 7, None, hidden_bias(13, 2, 1, 7, 7)),
    "two biases": (7, 5, None, (normal(12, 1, 6, 7, 5), hidden_bias(16, 2, 1, 1, 5))),
    "bias of keys alone": (7, 5, None, hidden_bias(14, 2, 1, 2, 5)[:, :, :1]),
    "causal and bias that hides": (7, 7, AttentionMask(causal=True), hidden_bias(15, 1, 6, 7, 7)),
}


@pytest.mark.parametrize("case", TRANSLATED)
def test_the_translation_for_cudnn_is_the_reference(case, monkeypatch):
    """B01, B08: the arguments that cuDNN would get, given to XLA in float32; gradients of the bias included."""
    T, S, mask, bias = TRANSLATED[case]
    original = jax.nn.dot_product_attention

    def through_xla(query, key, value, bias, mask, *, implementation, **named):
        output = original(query, key, value, bias, mask, implementation="xla", **named)
        return (
            output if bias is None else output + 0.0 * bias.sum()
        )  # NaN unless the bias is finite, as cuDNN's must be

    monkeypatch.setattr(jax.nn, "dot_product_attention", through_xla)

    def translated(query, key, value, bias):
        return CuDNN().run(Request(query, key, value, mask, as_biases(bias), H**-0.5, 0.0, None))

    qkv, hidden = poisoned(inputs(T, S, sizes=(H, H)), mask, bias)
    got = output_and_gradients(translated, qkv, bias)
    assert_close(got, output_and_gradients(lambda *args: reference(*args[:3], mask, args[3]), qkv, bias))
    assert not got[0][hidden[0]].any()
    for gradient, where in zip(got[1:4], hidden, strict=True):
        assert not gradient[where].any()


@pytest.mark.parametrize("capability, wanted", [("7.5", "7.5"), ("gfx942", "gfx942"), ("8.0", None), ("10.3", None)])
def test_a_gpu_without_cudnns_attention_is_named(capability, wanted, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    reason = CuDNN().refusal(Request(*structs(64), None, (), 0.125, 0.0, None))
    assert reason is None if wanted is None else f"GPU of compute capability {wanted}" in reason


# ------------------------------------------------------------------------------------------------------ choice, refusal


def structs(T, S=None, *, heads=(4, 4), sizes=(64, 64), dtypes=("bfloat16",) * 3):
    S, (N, K), (d_k, d_v) = S or T, heads, sizes
    shapes = ((2, T, N, d_k), (2, S, K, d_k), (2, S, K, d_v))
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def any_score(score, query_position, key_position, head):
    return score


IDS, FLOAT32 = jnp.ones((2, 2048), jnp.int32), ("float32",) * 3
DROPOUT = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
NO_BIAS_OF_SPLASH = "the TPU kernel has a soft cap alone"
REFUSED = {
    "cudnn": [
        (structs(64), {"bias": alibi(4)}, "bias ALiBi"),
        (structs(64), {"bias": (jnp.zeros((1, 1, 64, 64)), SoftCap(2.0))}, "bias SoftCap"),
        (structs(64), DROPOUT, "dropout at rate 0.1"),
        (structs(64, dtypes=FLOAT32), {}, "dtype float32: the kernel takes float16 and bfloat16"),
        (structs(64, dtypes=("bfloat16", "bfloat16", "float32")), {}, "query bfloat16, key bfloat16, value float32"),
        (structs(64, dtypes=("float16",) * 3), {"bias": jnp.zeros((1, 1, 64, 64))}, "bias with dtype float16"),
        (structs(64, sizes=(12, 12)), {}, "head size 12: cuDNN takes multiples of 8 up to 128"),
        (structs(64, sizes=(256, 256)), {}, "head size 256"),
        (structs(64, sizes=(64, 32)), {}, "d_v 32 with d_k 64"),
        (structs(63), {"mask": AttentionMask(window=(2, 2))}, "63 queries and 63 keys with an array"),
    ],
    "splash": [
        (structs(64), {"bias": alibi(4)}, f"bias ALiBi: {NO_BIAS_OF_SPLASH}"),
        (structs(64), {"bias": T5Bias(jnp.zeros((32, 4)))}, f"bias T5Bias: {NO_BIAS_OF_SPLASH}"),
        (structs(64), {"bias": ScoreFunction(any_score)}, f"bias ScoreFunction: {NO_BIAS_OF_SPLASH}"),
        (structs(64), {"bias": DenseBias(jnp.zeros((1, 1, 64, 64)))}, f"bias DenseBias: {NO_BIAS_OF_SPLASH}"),
        (structs(64), {"bias": (SoftCap(2.0), SoftCap(3.0))}, "bias SoftCap, 2 times"),
        (structs(64), DROPOUT, "dropout at rate 0.1"),
        (structs(64, dtypes=("float16",) * 3), {}, "dtype float16: the kernel takes float32 and bfloat16"),
        (structs(64), {"mask": jnp.ones((1, 1, 64, 64), bool)}, "mask field dense"),
        (structs(64), {"mask": AttentionMask(function=alternating)}, "mask field function"),
        (
            structs(2048),
            {"mask": AttentionMask(query_positions=IDS, key_positions=IDS, causal=True)},
            "mask field key_positions, query_positions",
        ),
        (
            structs(64),
            {"mask": AttentionMask(causal=True, prefix_lengths=jnp.array([1, 2], jnp.int32))},
            "mask field prefix_lengths",
        ),
        (
            structs(2048),
            {"mask": AttentionMask(window=(2, 2), query_global=IDS > 1, key_global=IDS > 1)},
            "mask field key_global, query_global",
        ),
        (structs(64), {"mask": AttentionMask(window=(9, 0)) & AttentionMask(window=(None, 5))}, "mask field also"),
    ],
}


@pytest.mark.parametrize(
    "name, qkv, named, reason", [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_what_a_kernel_cannot_do_is_refused_by_name(name, qkv, named, reason):
    assert reason in explain_implementation(*qkv, **named).refused[name]
    with pytest.raises(ValueError, match="cannot do this.*'reference' and 'blockwise' can"):
        jax.eval_shape(lambda *qkv: dot_product_attention(*qkv, implementation=name, **named), *qkv)


def test_a_mask_field_that_the_kernel_does_not_know_is_refused():
    class Novel(AttentionMask):
        facts = frozenset({"causal", "novel"})

    assert "mask field novel" in Splash().refusal(Request(*structs(64), Novel(), (), 0.125, 0.0, None))


def test_a_bias_derived_from_one_that_is_honoured_is_refused():
    class Sharper(SoftCap):
        pass

    for kernel in (CuDNN(), Splash()):
        assert "bias Sharper" in kernel.refusal(Request(*structs(64), None, (Sharper(2.0),), 0.125, 0.0, None))


CHOICES = [
    ("gpu", structs(2048), {}, "cudnn", "never an array"),
    ("gpu", structs(64), {}, "cudnn", "never an array"),
    ("gpu", structs(2048), {"mask": AttentionMask(causal=True)}, "cudnn", "never an array"),
    ("gpu", structs(2048), {"mask": AttentionMask(causal=True, window=(512, None))}, "cudnn", "never an array"),
    ("gpu", structs(2048, 1024), {"mask": AttentionMask(causal=True)}, "blockwise", "never an array"),
    ("gpu", structs(2048), {"mask": AttentionMask(query_segment_ids=IDS, key_segment_ids=IDS)}, "blockwise", ""),
    ("gpu", structs(64), {"bias": jnp.zeros((1, 1, 64, 64))}, "reference", "builds scores of shape (2, 4, 64, 64)"),
    ("gpu", structs(2048, dtypes=FLOAT32), {}, "blockwise", "never an array"),
    ("tpu", structs(2048), {}, "splash", "tiles of 512 x 512, never an array"),
    ("tpu", structs(2048, dtypes=FLOAT32), {"mask": AttentionMask(causal=True)}, "splash", "never an array"),
    ("tpu", structs(2048), {"mask": AttentionMask(query_segment_ids=IDS, key_segment_ids=IDS)}, "splash", ""),
    ("tpu", structs(2048), {"bias": SoftCap(50.0)}, "splash", ""),
    ("tpu", structs(2048), {"bias": alibi(4)}, "blockwise", ""),
    ("tpu", structs(500), {}, "reference", ""),
    ("tpu", structs(512), {}, "blockwise", ""),
    ("tpu", structs(1, 2048), {}, "reference", ""),
    ("cpu", structs(2048), {}, "blockwise", ""),
]


@pytest.mark.parametrize("platform, qkv, named, chosen, scores", CHOICES)
def test_auto_takes_the_fused_kernel_where_it_serves_best(platform, qkv, named, chosen, scores):
    explanation = explain_implementation(*qkv, platform=platform, **named)
    assert explanation.implementation == chosen and scores in explanation.scores


def test_cudnn_says_when_it_builds_an_array():
    explanation = explain_implementation(*structs(64), mask=AttentionMask(window=(2, 2)), implementation="cudnn")
    assert "as an array with an entry for every query and key: 64 x 64" in explanation.scores
