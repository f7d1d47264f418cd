"""Layouts without devices: against the shards of real ones, published counts, and nothing allocated."""

import inspect
import json
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import config, hf, models
from tfm_jax.__main__ import plan as command
from tfm_jax.models import bert, build, gpt, preset, t5, transformer
from tfm_jax.models.architecture import Architecture
from tfm_jax.plan import Row, cache_bytes, find_model, parameter_layout, unit
from tfm_jax.sharding import batch_sharding, make_mesh, parameter_shardings

MESH = config.Mesh(data=2, fsdp=2, model=2)
POD = config.Mesh(fsdp=8, model=8)
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
TINY = {
    "llama": gpt.llama(46, num_layers=3, d_model=12, d_ff=22, num_heads=6, num_kv_heads=2, max_length=19),
    "gpt2": gpt.GPTConfig(46, num_layers=3, d_model=12, d_ff=22, num_heads=6, max_length=18),
    "t5": t5.t5(46, num_layers=2, d_model=12, d_ff=22, num_heads=2, d_k=5),
    "bert": bert.BERTConfig(46, num_layers=2, d_model=12, d_ff=22, num_heads=6, max_length=18),
}


def zeros(model):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model.shapes)


@pytest.fixture(params=["preset", "config.json"])
def llama2_7b(request, tmp_path):
    if request.param == "preset":
        return "llama2_7b"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    return tmp_path


def test_a_model_of_seven_billion_is_laid_out_without_any_of_it(llama2_7b):
    """B60: 25 GiB over 64 devices, in less than 2 s and 20 MB."""
    tracemalloc.start()
    start, live = time.perf_counter(), len(jax.live_arrays())
    layout = parameter_layout(find_model(llama2_7b), POD)
    text = layout.table()
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2 and peak < 20_000_000 and len(jax.live_arrays()) == live
    assert layout.parameters == 6_738_415_616 and layout.total_bytes == 4 * 6_738_415_616
    # the two norms of each layer and the last one are on every device
    whole = {row.name: row for row in layout.rows if row.name.endswith("scale")}
    norms = 4 * (2 * 32 + 1) * 4096
    assert sum(row.device_bytes for row in whole.values()) == norms
    assert layout.device_bytes - norms == (layout.total_bytes - norms) / 64
    others = [row for row in layout.rows if row.name not in whole]
    assert all(64 * row.device_bytes == 4 * row.size for row in others) and len(others) == 9
    assert layout.rows[0] == Row(
        "decoder.layers.attention.key", (32, 4096, 32, 128), "float32", (None, "fsdp", "model", None), 2**25
    )
    assert "6,738,415,616 parameters, 25.10 GiB; 402.64 MiB on each of 64 devices" in text
    assert text.endswith("(data 1 x fsdp 8 x sequence 1 x model 8)")
    assert "32 x 4096 x 32 x 128  float32  -, fsdp, model, -       32.00 MiB" in text.splitlines()[1]
    half = parameter_layout(find_model(llama2_7b), POD, dtype="bfloat16")
    assert 2 * half.device_bytes == layout.device_bytes and 2 * half.total_bytes == layout.total_bytes


@pytest.mark.parametrize("family", TINY)
def test_devices_hold_what_the_layout_says(family):
    model = build(TINY[family])
    rows = iter(parameter_layout(model, MESH).rows)
    placed = jax.device_put(zeros(model), parameter_shardings(model.axes, make_mesh(MESH), model.shapes))
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
        row = next(rows)
        assert row.name == jax.tree_util.keystr(path, simple=True, separator=".") and row.shape == leaf.shape
        assert {shard.data.nbytes for shard in leaf.addressable_shards} == {row.device_bytes}
        assert row.partition == (*leaf.sharding.spec, *(None,) * (leaf.ndim - len(leaf.sharding.spec)))
    assert next(rows, None) is None


def test_a_mesh_that_does_not_divide_a_parameter_is_refused():
    with pytest.raises(
        ValueError, match=r"attention\.key: its axis kv_heads of size 12 .*mesh axis model of 8 devices"
    ):
        parameter_layout(build(preset("gpt2_small")), config.Mesh(model=8))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_devices_hold_what_is_said_of_the_cache(family):
    """Where the partitioner lets the cache lie after decoding under a mesh."""
    model, mesh = build(TINY[family]), make_mesh(MESH)
    params = jax.device_put(zeros(model), parameter_shardings(model.axes, mesh, model.shapes))
    tokens = jax.device_put(np.ones((8, 3), np.int32), batch_sharding(mesh))

    @jax.jit
    def decoded(params, tokens):
        source = {}
        if family == "t5":
            read = jnp.ones((8, 7), jnp.int32)
            source = {"encoded": model.encode(params, read), "encoded_segment_ids": read}
        cache = model.init_cache(params, 8, 7, **source)
        positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (8, 3))
        return model.decode_step(params, tokens, cache, positions=positions)

    with jax.set_mesh(mesh):
        _, cache = decoded(params, tokens)
    layers = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim == 4]
    held = {device: 0 for device in mesh.devices.flat}
    for leaf in layers:
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    (bytes_of_layers,) = set(held.values())
    # besides: positions, how many columns are used, and which tokens of the source are padding
    rest = 4 * (2 * 7) * (2 if family == "t5" else 1) + 4
    assert cache_bytes(model, MESH, batch=8, length=7) == bytes_of_layers + rest


def test_the_cache_of_a_published_model():
    """Two numbers for each column, layer, head of keys and width of a head: half a MiB a token in bfloat16."""
    model = build(preset("llama2_7b"))
    columns = 8 * 4096
    numbers = 2 * 32 * 32 * 128 * columns
    found = cache_bytes(model, POD, batch=8, length=4096, dtype="bfloat16")
    # and a position a column, 4 bytes
    assert found == 2 * numbers / 64 + 4 * columns / 8 + 4


@pytest.mark.parametrize(
    "family, batch, length, message",
    [("bert", 2, 3, "kind 'encoder' keeps no cache"), ("llama", 6, 3, "6, 3: .* 4 devices"), ("llama", 4, 0, "4, 0")],
)
def test_a_cache_that_there_is_not_is_refused(family, batch, length, message):
    with pytest.raises(ValueError, match=message):
        cache_bytes(build(TINY[family]), MESH, batch=batch, length=length)


def test_a_run_and_a_model_of_hugging_face_are_found(tmp_path):
    small = {"data": config.Data(max_length=17), "decode": config.Decode(max_new_tokens=17)}
    run = config.Run(TINY["gpt2"], config.Train(steps=1), str(tmp_path / "run"), **small)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config.to_json(run))
    assert find_model(tmp_path / "run") == build(TINY["gpt2"])
    other = build(TINY["llama"])
    hf.save(tmp_path / "theirs", other, zeros(other))
    assert find_model(tmp_path / "theirs") == other
    with pytest.raises(ValueError, match="nowhere is no directory, and there is no preset .*'llama2_7b'"):
        find_model("nowhere")


def test_every_published_size_is_a_preset():
    """Each function of a family's file that gives a configuration and needs no argument."""

    def is_one(function):
        how = inspect.signature(function)
        named = [each for each in how.parameters.values() if each.kind is not each.VAR_KEYWORD]
        return issubclass(how.return_annotation, Architecture) and all(each.default is not each.empty for each in named)

    own = [
        function
        for family in (bert, gpt, t5, transformer)
        for name, function in inspect.getmembers(family, inspect.isfunction)
        if function.__module__ == family.__name__ and isinstance(inspect.signature(function).return_annotation, type)
    ]
    found = {function.__name__ for function in own if is_one(function)} - {"t5_v1_1"}
    assert found == {each.__name__ for each in models._PRESETS} and len(found) > 15
    assert preset("t5_small") == t5.t5_small()
    with pytest.raises(ValueError, match="no preset 'llama4': one of .*'llama2_7b'"):
        preset("llama4")


def test_the_command_prints_the_table(capsys):
    command("gpt2_small", config.Mesh(fsdp=2), batch=4, length=1024)
    table, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert table == parameter_layout(build(preset("gpt2_small")), config.Mesh(fsdp=2)).table()
    assert last == "the cache of 4 rows of 1,024 tokens: 144.01 MiB on each device"
    with pytest.raises(ValueError, match="batch, length are 4, None"):
        command("gpt2_small", batch=4)


@pytest.mark.parametrize("size, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB")])
def test_units(size, text):
    assert unit(size) == text
