"""Parameters on their way: to their shards and back, rounded or not, in little memory, and whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tfm_jax import config, hf
from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import Prompts, generate
from tfm_jax.hf import files
from tfm_jax.hf.placement import place
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig, llama
from tfm_jax.models.t5 import t5
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.sharding import make_mesh, parameter_shardings
from tfm_jax.train.losses import cross_entropy

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
ROOT = Path(__file__).parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MESH = config.Mesh(data=2, fsdp=2, model=2)


def random_params(model, seed=3, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32).astype(dtype), model.shapes)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


def shardings_of(model, mesh=MESH):
    return parameter_shardings(model.axes, make_mesh(mesh), model.shapes)


def tiny():
    """Sizes that two devices divide, so that every axis of the mesh divides something."""
    return build(llama(46, num_layers=3, d_model=12, d_ff=22, num_heads=6, num_kv_heads=2, max_length=19))


def tiny_gpt2():
    return build(GPTConfig(46, num_layers=3, d_model=12, d_ff=22, num_heads=6, max_length=19))


@pytest.fixture
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SPECS = [(), (None, "fsdp", "model"), ("fsdp", "model"), (None, ("data", "model")), (None, None, ("fsdp", "data"))]


@pytest.mark.parametrize("spec", [*SPECS, ("model", None, "data"), (("model", "data", "fsdp"),), None], ids=str)
@pytest.mark.parametrize("stacked", [True, False])
def test_every_shard_holds_its_part(spec, stacked):
    """B60: against jax's own cutting; the first axis too, of which a shard then needs only some layers."""
    whole = np.random.default_rng(0).standard_normal((8, 4, 4)).astype(np.float32)
    pieces = enumerate(whole) if stacked else [(None, whole)]
    sharding = None if spec is None else NamedSharding(make_mesh(MESH), PartitionSpec(*spec))
    placed, expected = place(pieces, jax.ShapeDtypeStruct(whole.shape, jnp.float32), sharding), whole
    expected = jax.device_put(whole, sharding)
    assert placed.sharding == expected.sharding and placed.committed == expected.committed
    for own, other in zip(placed.addressable_shards, expected.addressable_shards, strict=True):
        assert own.device == other.device and own.index == other.index
        np.testing.assert_array_equal(own.data, other.data)


def test_copies_on_several_devices_survive_a_donation():
    """On CPU the copies share memory, where an update in place of one would be seen by the others."""
    whole = np.arange(48, dtype=np.float32).reshape(6, 8)
    sharding = NamedSharding(make_mesh(MESH), PartitionSpec())
    first = place([(None, whole)], jax.ShapeDtypeStruct(whole.shape, jnp.float32), sharding)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for shard in add(add(first)).addressable_shards:
        np.testing.assert_array_equal(shard.data, whole + 2)


@pytest.mark.parametrize("model", [tiny(), tiny_gpt2()], ids=["llama", "gpt2"])
def test_shards_go_out_and_come_in_as_whole_arrays_do(model, tmp_path):
    """B60: the same file whether arrays lie on one device, on eight, or in NumPy; bit-equal back, sharded or not."""
    params, shardings = random_params(model), shardings_of(model)
    placed = jax.device_put(params, shardings)
    for name, tree in {"numpy": params, "one": jax.device_put(params), "eight": placed}.items():
        hf.save(tmp_path / name, model, tree)
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("numpy", "one", "eight")]
    assert written[0] == written[1] == written[2]
    same, loaded = hf.load_model(tmp_path / "eight", shardings=shardings)
    assert same == model
    assert_same(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    assert {shard.data.size for shard in loaded["embedding"]["table"].addressable_shards} == {46 * 12 // 4}
    # and none of them keeps what was gathered of it
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(placed))


@pytest.mark.usefixtures("quick_compilation")
def test_a_sharded_model_computes_what_one_device_computes(tmp_path):
    """B60: logits and gradient of the loaded tree over data, fsdp and model."""
    model = tiny()
    hf.save(tmp_path, model, model.init(jax.random.key(5)))
    tokens = jax.random.randint(jax.random.key(7), (4, 17), 0, 46, jnp.int32)

    def loss(params):
        logits = model.apply(params, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:], jnp.ones((4, 16), jnp.float32))[0], logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (expected, logits), gradient = step(hf.load_model(tmp_path)[1])
    _, params = hf.load_model(tmp_path, shardings=shardings_of(model))
    with jax.set_mesh(make_mesh(MESH)):
        (found, sharded_logits), sharded_gradient = step(params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(sharded_logits, logits, rtol=0, atol=1e-5)
    norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(gradient)))
    for own, other in zip(jax.tree.leaves(sharded_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-6 * norm)


def changed(tmp_path, change):
    """A directory of the tiny llama with its tensors changed, and what was there before."""
    model = tiny()
    hf.save(tmp_path / "whole", model, random_params(model))
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    target = tmp_path / "changed"
    target.mkdir()
    (target / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    save_file(
        {name: np.ascontiguousarray(change(name, x)) for name, x in tensors.items()}, target / "model.safetensors"
    )
    return target, hf.load_model(tmp_path / "whole")[1]


def nearest_bfloat16(x):
    """To the nearest, ties to even, by the bits."""
    word = np.asarray(x).view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16).view(BFLOAT16)


def test_wider_floats_are_rounded_to_the_dtype_that_is_asked_for(tmp_path):
    """B60: float64 and float32, to the nearest; narrower ones are the same numbers."""
    third = 1 + 2**-25  # what float64 has and float32 has not
    directory, params = changed(tmp_path, lambda name, x: x.astype(np.float64) * third)
    _, loaded = hf.load_model(directory)
    assert_same(loaded, jax.tree.map(lambda x: (np.asarray(x, np.float64) * third).astype(np.float32), params))
    _, halves = hf.load_model(tmp_path / "whole", dtype="bfloat16")
    assert_same(halves, jax.tree.map(nearest_bfloat16, params))
    hf.save(tmp_path / "half", tiny(), params, dtype="bfloat16")
    hf.save(tmp_path / "halves", tiny(), halves)
    for name in ("half", "halves"):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        assert_same(hf.load_model(tmp_path / name, dtype=None)[1], halves)
        assert_same(hf.load_model(tmp_path / name)[1], jax.tree.map(lambda x: x.astype(jnp.float32), halves))
    hf.save(tmp_path / "wide", tiny(), halves, dtype="float32")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert_same(hf.load_model(tmp_path / "wide", dtype=None)[1], jax.tree.map(lambda x: x.astype(jnp.float32), halves))


def test_each_array_may_keep_the_dtype_of_its_tensors(tmp_path):
    """B60: norms are float32 where all else is bfloat16; one array has one dtype."""

    def mixed(name, x):
        return x if "norm" in name else x.astype(BFLOAT16)

    directory, params = changed(tmp_path, mixed)
    _, loaded = hf.load_model(directory, dtype=None)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(loaded)}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {np.dtype(np.float32)}
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {BFLOAT16}
    assert_same(loaded["decoder"]["norm"], params["decoder"]["norm"])
    hf.save(tmp_path / "again", tiny(), loaded)
    # theirs convert all to it when they load, so the wider
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"
    assert_same(hf.load_model(tmp_path / "again", dtype=None)[1], loaded)


def test_three_arrays_of_several_dtypes_that_are_one_tensor_there(tmp_path):
    """GPT-2's query, key and value, in the dtype that holds them all."""
    model, params = tiny_gpt2(), random_params(tiny_gpt2())
    own = params["decoder"]["layers"]["attention"]
    own["query"], own["key"] = own["query"].astype(BFLOAT16), own["key"].astype(np.float16)
    hf.save(tmp_path, model, params)
    own["query"], own["key"] = own["query"].astype(np.float32), own["key"].astype(np.float32)
    assert_same(hf.load_model(tmp_path, dtype=None)[1], params)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda name, x: x.astype(BFLOAT16) if "layers.1" in name else x,
            r"decoder.layers.attention\S* is one array, but its tensors are bfloat16 and float32: give dtype='float32'",
        ),
        (lambda name, x: x.astype(np.float64), "is float64 in the files, .* jax_enable_x64 .*: give dtype='float32'"),
    ],
)
def test_an_array_without_one_dtype_that_jax_has_is_refused(change, message, tmp_path):
    directory, _ = changed(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        hf.load_model(directory, dtype=None)
    hf.load_model(directory)


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_quantised_tensor_is_refused_before_any_is_read(dtype, tmp_path, monkeypatch):
    name = "model.norm.weight"
    directory, _ = changed(tmp_path, lambda own, x: x.astype(np.int8) if own == name else x)
    monkeypatch.setattr(files.Tensors, "__getitem__", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match=f"{name}.* is I8: .*quantised"):
        hf.load_model(directory, dtype=dtype)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_model_of_bfloat16_parameters_computes(kind):
    """B60: float32 logits near those of the same numbers in float32; the loss within a hundredth of itself.

    Each product rounds to 8 bits, an error of up to 2^-9 of the value; two blocks on either side are about forty
    roundings one after another, which by chance add up as their root: 2^-9 sqrt(40) = 1.2 %, and the norms and
    unscaled scores of T5 enlarge it; four times as much is allowed.
    """
    with np.load(FIXTURES / kind / "expected.npz") as arrays:
        kept = dict(arrays)
    model, params = hf.load_model(FIXTURES / kind, dtype="bfloat16")
    same = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens, mask = (jnp.asarray(kept[f"{name}_right"], jnp.int32) for name in ("tokens", "mask"))
    inputs = (tokens,), {"segment_ids": mask}
    if model.config.kind == "encoder-decoder":
        own, mask = (jnp.asarray(kept[f"decoder_{name}"], jnp.int32) for name in ("tokens", "mask"))
        inputs = (tokens, own), {"source_segment_ids": inputs[1]["segment_ids"], "segment_ids": mask}
    # as users have it: the bias of an output layer is added to float32 logits
    with jax.numpy_dtype_promotion("standard"):
        apply = jax.jit(lambda params: model.apply(params, *inputs[0], **inputs[1]))
        found, expected = apply(params), apply(same)
    assert found.dtype == jnp.float32
    there = np.asarray(mask) > 0
    error = np.sqrt(np.mean((found - expected)[there] ** 2) / np.var(expected[there]))
    assert 0 < error < 0.05
    targets = jnp.asarray(kept["targets"], jnp.int32)
    losses = [cross_entropy(logits, targets, mask.astype(jnp.float32))[0] for logits in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=0.01)


def test_a_model_of_bfloat16_parameters_writes(tmp_path):
    """B60: the cache is bfloat16 too, and the tokens are the likeliest ones of the whole sequence."""
    model = tiny_gpt2()
    hf.save(tmp_path, model, model.init(jax.random.key(2)), dtype="bfloat16")
    _, params = hf.load_model(tmp_path, dtype=None)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.init_cache(params, 2, 5).layers)} == {BFLOAT16}
    tokens = jax.random.randint(jax.random.key(3), (3, 5), 0, 46, jnp.int32)
    limits = {"max_new_tokens": 4, "length_penalty": 0.0, "early_stopping": True}
    settings = BeamSettings(beams=1, **limits, eos_ids=(45,), pad_id=0)
    found = generate(params, Prompts(tokens, jnp.ones_like(tokens)), model=model, settings=settings).tokens[:, 0]
    logits = np.asarray(model.apply(params, jnp.concatenate([tokens, found], axis=1)))[:, 4:-1]
    chosen = np.take_along_axis(logits, np.asarray(found)[..., None], -1)[..., 0]
    ended = np.cumsum(np.asarray(found) == 45, axis=1) - (np.asarray(found) == 45) > 0
    # cached and whole products round apart by a few of 2^-8 of the largest logit
    assert ((logits.max(-1) - chosen) <= 2**-6 * np.abs(logits).max())[~ended].all()
    assert chosen[~ended].mean() > logits.mean() + logits.std()


def test_a_process_that_dies_while_saving_leaves_no_model(tmp_path, monkeypatch):
    """B60: whatever file it died at; the tensors come last, when all else is whole."""
    model, params = tiny(), random_params(tiny())
    replace, order = os.replace, []

    def stopping(source, target):
        order.extend([Path(target).name] if Path(target).parent == directory else [])
        if len(order) > stop:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", stopping)
    directory, stop = tmp_path / "whole", 100
    hf.save(directory, model, params, shard_bytes=5000)
    finished = order.copy()
    assert finished[0] == "config.json" and finished[-1] == "model.safetensors.index.json" and len(finished) > 4
    assert sorted(os.listdir(directory)) == sorted(finished)
    for stop in range(len(finished)):
        directory = tmp_path / str(stop)
        order.clear()
        with pytest.raises(KeyboardInterrupt):
            hf.save(directory, model, params, shard_bytes=5000)
        assert sorted(os.listdir(directory)) == sorted(finished[:stop])
        with pytest.raises((FileNotFoundError, ValueError), match="safetensors|config.json"):
            hf.load_model(directory)


def test_what_fails_while_tensors_are_made_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tfm_jax.hf.placement._gathered", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.save(tmp_path, tiny(), random_params(tiny()))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "generation_config.json"]
)
def test_a_directory_that_holds_a_model_is_not_written_to(name, tmp_path):
    (tmp_path / name).write_text("old")
    with pytest.raises(FileExistsError, match=f"already holds {name}"):
        hf.save(tmp_path, tiny(), random_params(tiny()))
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "old"


def test_parameters_of_another_model_are_refused_by_name(tmp_path):
    model, params = tiny(), random_params(tiny())
    params["decoder"]["extra"] = np.ones(3, np.float32)
    params["head"] = params["head"].T
    del params["embedding"]
    with pytest.raises(ValueError) as raised:
        hf.save(tmp_path / "new", model, params)
    assert str(raised.value).splitlines()[1:] == [
        "  decoder.extra: (3,), expected nothing",
        "  embedding.table: nothing, expected (46, 12)",
        "  head: (12, 46), expected (46, 12)",
    ]
    assert not (tmp_path / "new").exists()


def test_parameters_that_are_no_floats_are_refused_by_name(tmp_path):
    params = random_params(tiny())
    params["head"] = params["head"].astype(np.int32)
    with pytest.raises(ValueError, match="parameter head is int32: float32, bfloat16"):
        hf.save(tmp_path / "new", tiny(), params)
    assert not (tmp_path / "new").exists()


def test_names_are_those_of_the_files(tmp_path):
    """B60: in errors and in patterns, prefix and old endings included; of two names one may be left out."""
    hf.save(tmp_path / "whole", tiny(), random_params(tiny()))
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    other = {"module.model.norm.gamma": np.zeros(12, np.float32), "module.v_head.gamma": np.zeros(3, np.float32)}
    target = tmp_path / "other"
    target.mkdir()
    (target / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    short = "module.lm_head.weight"
    renamed = {f"module.{name}": x for name, x in tensors.items()} | {short: np.zeros((12, 46), np.float32)}
    save_file(renamed | other, target / "model.safetensors")
    with pytest.raises(ValueError) as raised:
        hf.load_model(target)
    assert str(raised.value).splitlines()[1:] == [
        "  not used: module.v_head.gamma",
        f"  of another shape: {short}: (12, 46), expected (46, 12)",
        "  there under two names: module.model.norm.gamma and module.model.norm.weight",
    ]
    save_file(renamed | other | {short: tensors["lm_head.weight"]}, target / "model.safetensors")
    for pattern in ("*.gamma", "module.*.gamma"):
        assert_same(hf.load_model(target, unused=(pattern,))[1], hf.load_model(tmp_path / "whole")[1])
    _, params = hf.load_model(target, unused=("module.v_head*", "module.model.norm.weight"))
    np.testing.assert_array_equal(params["decoder"]["norm"]["scale"], np.zeros(12))


def test_why_no_type_can_express_a_model_is_a_line_a_type(tmp_path):
    model = build(TransformerConfig(31, d_model=8, num_heads=2, d_ff=12, positions="alibi"))
    with pytest.raises(ValueError) as raised:
        hf.save(tmp_path / "new", model, random_params(model))
    first, *reasons = str(raised.value).splitlines()
    assert first == "no model type of Hugging Face can express this model:"
    assert [reason.split(":")[0].strip() for reason in reasons] == ["t5", "mt5", "bart", "marian"]
    assert all("positions" in reason and len(reason) < 2000 for reason in reasons)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "t5-v1.1", "mt5", "bart", "marian", "bert"])
def test_config_json_alone_says_which_model_it_is(kind, tmp_path):
    """B60: of these, it ties or unties as the tensors do."""
    (tmp_path / "config.json").write_text((FIXTURES / kind / "config.json").read_text())
    assert hf.read_model(tmp_path) == hf.read_model(FIXTURES / kind) == hf.load_model(FIXTURES / kind)[0]
    with pytest.raises(FileNotFoundError, match="safetensors"):
        hf.load_model(tmp_path)


def test_the_tensors_say_whether_a_t5_has_an_output_layer(tmp_path):
    model = build(t5(31, num_layers=1, d_model=8, d_ff=12, num_heads=2))
    hf.save(tmp_path, model, random_params(model))
    values = hf.read_values(tmp_path) | {"scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert hf.read_model(tmp_path).config.tied_embeddings == "all"
    (tmp_path / "model.safetensors").unlink()
    assert hf.read_model(tmp_path).config.tied_embeddings == "source_target"


MEASURED = """
import json, re, sys
import jax
from tfm_jax import config, hf
from tfm_jax.models import build
from tfm_jax.sharding import make_mesh, parameter_shardings

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def peak(action):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins again at what is used now
    before = memory("VmRSS")
    result = action()
    return memory("VmHWM") - before, result

def shardings(directory):
    model = hf.read_model(directory)
    mesh = make_mesh(config.Mesh(fsdp=len(jax.devices())))
    return parameter_shardings(model.axes, mesh, model.shapes) if len(jax.devices()) > 1 else None

small, large, target = sys.argv[1:]
hf.save(target + "/small", *hf.load_model(small, shardings=shardings(small)))  # what is only needed once
own = shardings(large)
loading, (model, params) = peak(lambda: hf.load_model(large, shardings=own))
hf.save(target + "/first", model, params)  # compiles how layers are taken out
saving, _ = peak(lambda: hf.save(target + "/large", model, params))
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(json.dumps({"loading": loading, "saving": saving, "model": sum(sizes), "leaf": max(sizes)}))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two models of one shape, of 0.3 and of 71 MB."""
    folder = tmp_path_factory.mktemp("memory")
    for name, width in (("small", 16), ("large", 256)):
        sizes = {"num_layers": 12, "d_model": width, "d_ff": 6 * width, "num_heads": 8, "num_kv_heads": 8}
        model = build(llama(1024, **sizes, max_length=8))
        hf.save(folder / name, model, random_params(model))
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak since a moment")
@pytest.mark.parametrize("devices", [1, 8])
def test_the_host_holds_a_model_once_and_one_tensor(devices, directories, tmp_path):
    """The peak of loading is the model and a tensor, of saving a few tensors, however many devices share it.

    A leaf, all layers of a matrix, is 19 MB and a tensor at most 1.6; 8 MB are left for what the allocator of XLA
    keeps, pages that were only now touched, and the tree of names. Once more a leaf would be seen, and so would the
    model that np.asarray of every leaf leaves behind.
    """
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    arguments = [str(directories / "small"), str(directories / "large"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, tensor, slack = json.loads(done.stdout), 4 * 256 * 6 * 256, 8_000_000
    assert found["leaf"] == 12 * tensor > 2 * slack
    assert found["model"] < found["loading"] + slack  # it is counted at all
    assert found["loading"] < found["model"] + tensor + slack, found
    assert found["saving"] < 3 * tensor + slack, found
