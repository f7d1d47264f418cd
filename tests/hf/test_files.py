"""Directories of safetensors: bit-equal both ways, read lazily, written whole or not at all, errors by name (B60)."""

import functools
import json
import os
import resource
import tempfile
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tfm_jax.hf import files
from tfm_jax.hf.files import Deferred, appearing, open_tensors, save_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.float64)]


def bits(rng, shape, dtype):
    """An array of random bits: NaNs with any payload, infinities, subnormals and both zeros among them."""
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def same(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def write_raw(path, tensors, size=None):
    """A file by the published layout: length of the header, header, zeros. tensors: name -> (code, shape, bytes)."""
    header, end = {}, 0
    for name, (code, shape, length) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, path.stat().st_size + (end if size is None else size))
    return path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(error, folder):
    with pytest.raises(error) as raised:
        open_tensors(folder)
    return str(raised.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_is_bit_equal_and_the_library_reads_it(tmp_path, dtype):
    rng = np.random.default_rng(7)
    tensors = {"b.weight": bits(rng, (3, 5), dtype), "a": bits(rng, (), dtype), "none": bits(rng, (0, 7), dtype)}
    save_tensors(tmp_path / "new" / "model", tensors.items())
    file = tmp_path / "new" / "model" / "model.safetensors"
    assert os.listdir(file.parent) == ["model.safetensors"]
    theirs = load_file(file)
    with open_tensors(file.parent) as ours, safe_open(file, framework="numpy") as handle:
        assert handle.metadata() == {"format": "pt"}
        assert ours.shapes == {name: array.shape for name, array in tensors.items()}
        assert set(ours.dtypes.values()) == {dtype.name} and set(ours.files.values()) == {file}
        for name, array in tensors.items():
            assert same(ours[name], array) and same(theirs[name], array)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=7).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=3).map(tuple)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1), st.integers(1, 211))
def test_any_names_and_shapes_come_back_from_shards_of_the_size_asked_for(what, shard_bytes):
    rng = np.random.default_rng(11)
    tensors = {name: bits(rng, shape, dtype) for name, (shape, dtype) in what.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(folder, tensors.items(), shard_bytes=shard_bytes)
        with open_tensors(folder) as opened:
            assert {*opened} == {*tensors} and len(opened) == len(tensors)
            assert all(same(opened[name], array) and name in opened for name, array in tensors.items())
        shards = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        assert [name for shard in shards for name in tensors if name in shard] == [*tensors]
        sizes = [sum(array.nbytes for array in shard.values()) for shard in shards]
        assert all(shards)
        assert all(size <= shard_bytes or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
        index = Path(folder) / "model.safetensors.index.json"
        assert index.exists() == (len(shards) > 1)
        if len(shards) > 1:
            assert json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"] == sum(sizes)


def test_shards_have_the_names_that_transformers_expects(tmp_path):
    tensors = {name: np.full(7, i, np.float32) for i, name in enumerate("cab")}
    save_tensors(tmp_path, tensors.items(), shard_bytes=60)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert sorted(os.listdir(tmp_path)) == [one, two, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 84}, "weight_map": {"a": one, "b": two, "c": one}}


@pytest.mark.parametrize("array", [np.arange(15.0).reshape(3, 5).T, np.arange(7, dtype=">f4"), np.arange(13.0)[::-2]])
def test_the_values_are_saved_not_the_memory(tmp_path, array):
    save_tensors(tmp_path, [("x", array)])
    np.testing.assert_array_equal(open_tensors(tmp_path)["x"], array)


def test_float32_is_rounded_to_the_nearest_even_bfloat16_and_comes_back_exactly(tmp_path):
    array = np.random.default_rng(3).normal(size=(11, 13)).astype(np.float32)
    array[0, :3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]  # two ties
    save_tensors(tmp_path / "half", [("x", array)], dtype="bfloat16")
    save_tensors(tmp_path / "full", open_tensors(tmp_path / "half").items(), dtype="float32")
    word = array.view(np.uint32)
    rounded = ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    half, full = open_tensors(tmp_path / "half")["x"], open_tensors(tmp_path / "full")["x"]
    assert half.dtype == BFLOAT16 and (half.view(np.uint16) == rounded).all()
    assert full.dtype == np.float32 and (full.view(np.uint32) == rounded.astype(np.uint32) << 16).all()


def test_what_is_not_asked_for_is_not_read(tmp_path):
    """A tensor of a tebibyte, which no machine could read, is a hole in the file."""
    write_raw(tmp_path / "model.safetensors", {"huge": ("BF16", [2**20, 2**19], 2**40), "small": ("F32", [3], 12)})
    with open_tensors(tmp_path) as tensors:
        assert tensors.shapes == {"small": (3,), "huge": (2**20, 2**19)}
        assert tensors.dtypes == {"small": "float32", "huge": "bfloat16"}
        assert "huge" in tensors and list(tensors) == ["huge", "small"] and "huge" not in repr(tensors)
        assert (tensors["small"] == np.zeros(3)).all()


def test_nothing_is_kept_and_no_file_is_mapped(tmp_path):
    save_tensors(tmp_path, [("x", np.ones(7, np.float32))])
    tensors = open_tensors(tmp_path)
    first = tensors["x"]
    first[0] = 2.0  # the reader's own
    gone = weakref.ref(tensors["x"])
    assert gone() is None and tensors["x"][0] == 1.0
    if Path("/proc/self/maps").exists():  # mapped pages would count as memory of the process
        assert "model.safetensors" not in Path("/proc/self/maps").read_text()


def test_saving_holds_a_shard_and_one_tensor(tmp_path):
    taken, alive = [], []

    def items():
        for i in range(17):
            array = np.full(25, i, np.float32)
            taken.append(weakref.ref(array))
            alive.append(sum(ref() is not None for ref in taken))
            yield f"x{i}", array

    save_tensors(tmp_path, items(), shard_bytes=300)
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    assert max(alive) == 4  # three make a shard


def test_deferred_arrays_are_made_one_at_a_time(tmp_path):
    """In the order in which they are written, however many make a shard."""
    taken, alive = [], []

    def make(i):
        alive.append(sum(ref() is not None for ref in taken))
        array = np.full((5, 5), i, np.float32)
        taken.append(weakref.ref(array))
        return array.T

    items = [(f"x{i}", Deferred((5, 5), np.dtype(np.float32), functools.partial(make, i))) for i in range(17)]
    save_tensors(tmp_path, items, shard_bytes=300)
    assert len(list(tmp_path.glob("*.safetensors"))) == 6 and alive == [0] * 17
    with open_tensors(tmp_path) as tensors:
        assert all((tensors[f"x{i}"] == np.full((5, 5), i)).all() for i in range(17))


def test_a_deferred_array_of_another_shape_is_refused(tmp_path):
    item = ("x", Deferred((5,), np.dtype(np.float32), lambda: np.ones(4, np.float32)))
    with pytest.raises(ValueError, match=r"'x' is \(4,\): \(5,\) was told before"):
        save_tensors(tmp_path, [("y", np.ones(3, np.float32)), item])
    assert os.listdir(tmp_path) == []


def test_every_tensor_begins_where_its_size_divides(tmp_path):
    """As the library's own files, so that a reader may map them."""
    arrays = {"a": np.ones(3, np.float16), "b": np.ones(5), "c": np.ones(7, BFLOAT16), "d": np.ones((), np.float32)}
    save_tensors(tmp_path, arrays.items())
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for name, array in arrays.items():
        start, end = header[name]["data_offsets"]
        assert start % array.itemsize == 0 and data[8 + length + start : 8 + length + end] == array.tobytes()


def test_files_appear_together_and_a_model_last(tmp_path, monkeypatch):
    replace, order = os.replace, []
    monkeypatch.setattr(
        files.os, "replace", lambda source, target: (order.append(target.name), replace(source, target))
    )
    with appearing(tmp_path / "new", "*.json") as folder:
        for name in ("model.safetensors.index.json", "z.json", "model-00001-of-00001.safetensors", "a.txt"):
            (folder / name).write_text(name)
        assert [file.name.startswith(".partial-") for file in (tmp_path / "new").iterdir()] == [True]
    assert order == ["a.txt", "z.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path / "new")) == sorted(order)
    with pytest.raises(
        FileExistsError, match="already holds model-00001-of-00001.safetensors, model.safetensors.index"
    ):
        with appearing(tmp_path / "new"):
            pytest.fail("the block was entered")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "z.json").touch()
    with pytest.raises(FileExistsError, match="already holds z.json"):
        with appearing(tmp_path / "other", "*.json"):
            pytest.fail("the block was entered")
    with pytest.raises(FileExistsError, match="already holds z.json"):
        with appearing(tmp_path / "other") as folder:
            (folder / "a.txt").touch()
            (folder / "z.json").touch()
    assert os.listdir(tmp_path / "other") == ["z.json"]


def test_the_files_are_as_readable_as_any_other(tmp_path):
    (tmp_path / "other.txt").touch()
    save_tensors(tmp_path, [(name, np.ones(3, np.float32)) for name in "ab"], shard_bytes=1)
    assert {file.stat().st_mode for file in tmp_path.iterdir()} == {(tmp_path / "other.txt").stat().st_mode}


def test_the_only_file_will_do_and_the_usual_name_wins(tmp_path):
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "weights.safetensors")
    assert list(open_tensors(tmp_path)) == ["x"]
    save_file({"y": np.zeros(2, np.float32)}, tmp_path / "more.safetensors")
    message = refusal(ValueError, tmp_path)
    assert "more.safetensors, weights.safetensors" in message and "index" in message
    save_tensors(tmp_path, [("z", np.zeros(2, np.float32))])
    assert list(open_tensors(tmp_path)) == ["z"]


def test_a_directory_without_safetensors_says_how_to_get_them(tmp_path):
    assert str(tmp_path / "none") in refusal(FileNotFoundError, tmp_path / "none")
    assert "no safetensors" in refusal(FileNotFoundError, tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    (tmp_path / "pytorch_model.bin").touch()
    message = refusal(FileNotFoundError, tmp_path)
    assert "pytorch_model.bin" in message and "save_pretrained" in message and "torch" in message
    (tmp_path / "flax_model.msgpack").touch()
    assert "from_flax=True" in refusal(FileNotFoundError, tmp_path)
    assert "is a file" in refusal(ValueError, tmp_path / "pytorch_model.bin")


def sharded(folder):
    save_tensors(folder, [(name, np.ones(3, np.float32)) for name in "abc"], shard_bytes=12)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index["weight_map"], [folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_b60_an_index_that_does_not_fit_its_shards_names_each_tensor(tmp_path):
    where, shards = sharded(tmp_path)
    write_index(tmp_path, where | {"d": shards[0].name})
    assert "'d' of model-00001-of-00003.safetensors not in its shard" in refusal(ValueError, tmp_path)
    write_index(tmp_path, where | {"a": where["b"], "b": where["a"]})
    assert "'a' of model-00002" in (message := refusal(ValueError, tmp_path)) and "'b' of model-00001" in message
    write_raw(shards[1], {"b": ("F32", [3], 12), "e": ("F32", [3], 12)})
    write_index(tmp_path, where)
    assert "'e' of model-00002-of-00003.safetensors not named" in refusal(ValueError, tmp_path)
    write_raw(shards[1], {"b": ("F32", [3], 12), "a": ("F32", [3], 12)})
    message = refusal(ValueError, tmp_path)
    assert "'a'" in message and str(shards[0]) in message and str(shards[1]) in message
    os.remove(shards[1])
    message = refusal(FileNotFoundError, tmp_path)
    assert shards[1].name in message and shards[0].name not in message


def test_b60_a_part_of_a_model_is_not_taken_for_the_whole(tmp_path):
    _, shards = sharded(tmp_path)
    os.remove(tmp_path / "model.safetensors.index.json")
    os.remove(shards[1])
    os.remove(shards[2])
    assert "index.json" in refusal(ValueError, tmp_path)


def test_an_index_and_a_whole_file_beside_it_must_agree(tmp_path):
    where, _ = sharded(tmp_path)
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert "two models" in refusal(ValueError, tmp_path)
    write_index(tmp_path, {"x": "model.safetensors"})
    assert list(open_tensors(tmp_path)) == ["x"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}', "\ud800"]
    + ['{"weight_map": {"x": "../model.safetensors"}}', '{"weight_map": {"x": "model.safetensors"'],
)
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "index.json is no index of shards" in refusal(ValueError, tmp_path)


WHOLE = {"x": ("F32", [2, 3], 24), "y": ("F16", [5], 10)}


@pytest.mark.parametrize("kept", [0, 7, 20, -1])
def test_a_cut_file_is_named(tmp_path, kept):
    path = write_raw(tmp_path / "model.safetensors", WHOLE)
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(ValueError, tmp_path)
    assert str(path) in message and "fetch it again" in message


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"<html><title>404 not found</title></html>"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"[2, 3]", b"[2, 4]")),
        lambda path: path.write_bytes(path.read_bytes().replace(b"F16", b"F17")),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"x"', b'"\xff"')),
        lambda path: write_raw(path, WHOLE, size=33),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = write_raw(tmp_path / "model.safetensors", WHOLE)
    damage(path)
    assert str(path) in refusal(ValueError, tmp_path)


def test_a_pointer_of_git_lfs_is_known(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 437951328\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in refusal(ValueError, tmp_path)


def test_a_file_cut_while_open_is_named(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", WHOLE)
    tensors = open_tensors(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert sum(name in str(read_error(tensors, name)) for name in WHOLE) == 1  # the last one alone


def read_error(tensors, name):
    try:
        tensors[name]
    except ValueError as error:
        return f"{error}" if str(tensors.files[name]) in str(error) and repr(name) in str(error) else "no file"


@pytest.mark.parametrize(("code", "length"), [("I64", 40), ("BOOL", 5), ("U8", 5), ("F8_E4M3", 5), ("F8_E5M2", 5)])
def test_what_is_no_float_of_ours_may_lie_there_and_is_refused_when_read(tmp_path, code, length):
    """Old checkpoints hold masks and positions, which a reader leaves out by name."""
    path = write_raw(tmp_path / "model.safetensors", {"ids": (code, [5], length), "w": ("F32", [1], 4)})
    with open_tensors(tmp_path) as tensors:
        assert tensors.dtypes == {"ids": code, "w": "float32"} and tensors["w"].shape == (1,)
        with pytest.raises(ValueError, match=f"'ids' in {path} is {code}: .*float32.*bfloat16"):
            tensors["ids"]


def test_a_name_that_is_not_there_and_a_closed_file(tmp_path):
    save_tensors(tmp_path, [("x", np.ones(3, np.float32))])
    descriptors = Path("/proc/self/fd")
    with open_tensors(tmp_path) as tensors:
        kept = tensors["x"]
        assert not descriptors.exists() or held(descriptors, tensors.files["x"])
        assert "y" not in tensors and tensors.get("y") is None
        with pytest.raises(KeyError, match="'y'"):
            tensors["y"]
    with pytest.raises(ValueError, match="closed"):
        tensors["x"]
    assert kept.sum() == 3.0 and tensors.shapes == {"x": (3,)}
    assert not descriptors.exists() or not held(descriptors, tensors.files["x"])


def held(descriptors, file):
    return any(each.resolve() == file.resolve() for each in descriptors.iterdir())


X = ("x", np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no tensors"),
        ([X, X], "'x' came twice"),
        ([X, ("n", np.ones(3, np.int32))], "'n' is int32"),
        ([X, ("q", np.ones(3, ml_dtypes.float8_e4m3fn))], "'q' is float8_e4m3fn"),
        ([X, ("__metadata__", X[1])], "__metadata__"),
    ],
)
def test_items_that_are_no_model_are_refused_and_leave_nothing(tmp_path, items, message):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        save_tensors(tmp_path, items, shard_bytes=1)
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_shard_of_no_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        save_tensors(tmp_path, [X], shard_bytes=0)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_nothing_is_overwritten(tmp_path, name):
    (tmp_path / name).write_text("old")
    taken = []
    with pytest.raises(FileExistsError, match=name):
        save_tensors(tmp_path, (taken.append(x) or x for x in [X]))
    assert not taken and os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "old"


def test_what_came_while_saving_is_not_overwritten(tmp_path):
    def items():
        yield X
        (tmp_path / "model.safetensors").write_text("of another process")

    with pytest.raises(FileExistsError):
        save_tensors(tmp_path, items())
    assert (tmp_path / "model.safetensors").read_text() == "of another process"


def test_a_full_disk_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            save_tensors(tmp_path, [X, ("y", np.ones(2000, np.float32))], shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_save_stopped_between_its_moves_is_no_model(tmp_path, monkeypatch, moved):
    replace, calls = os.replace, iter(range(4))
    names = "abc"

    def stop(source, target):
        if next(calls) == moved:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_tensors(tmp_path, [(name, X[1]) for name in names], shard_bytes=1)
    assert len(os.listdir(tmp_path)) == moved
    refusal((FileNotFoundError, ValueError), tmp_path)
