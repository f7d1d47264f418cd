"""Directories of safetensors files, one tensor in memory at a time: model.safetensors, or shards and their index."""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

__all__ = ["Deferred", "Tensors", "appearing", "open_tensors", "save_tensors"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-\d{5,}-of-\d{5,}\.safetensors$")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _FLOATS.items()}
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_SAVE_AGAIN = (
    "load them with the class that config.json names under architectures, {how}, and call its "
    "save_pretrained(DIRECTORY), which writes safetensors"
)
_OTHER_FORMATS = {
    "pytorch_model*.bin": _SAVE_AGAIN.format(how="on a machine with torch and transformers"),
    "flax_model*.msgpack": _SAVE_AGAIN.format(how="with from_flax=True and a transformers older than 5"),
    "tf_model*.h5": _SAVE_AGAIN.format(how="with from_tf=True and a transformers older than 5"),
}


class Tensors(Mapping):  # not Mapping[str, np.ndarray], for which a type checker at run time reads a tensor
    """Name -> array of one or more safetensors files; `tensors[name]` reads this tensor, and nothing is kept.

    Names come in the order in which the tensors lie on the disk. Known without reading any of them, by name:
    files: the file that holds it. shapes: its shape. dtypes: float32, float16, bfloat16 or float64, for anything
    else the name that the format has for it, such as I64 or F8_E4M3. Such a tensor may be there, as masks and
    positions are in old checkpoints, but `tensors[name]` raises `ValueError` for it; so it does for a file that was
    cut since it was opened, and after `close()`, which the end of a `with` block calls. `KeyError` for another name.
    """

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def __init__(self, files: Iterable[Path]):
        """Raises `ValueError` for a file that is damaged, cut or no safetensors, and for a tensor in two files."""
        self.files, self.shapes, self.dtypes, self._handles = {}, {}, {}, {}
        with contextlib.ExitStack() as stack:
            for file in files:
                self._handles[file] = stack.enter_context(_handle(file))
                self._add(file)
            self._stack = stack.pop_all()

    def _add(self, file: Path) -> None:
        for name in self._handles[file].offset_keys():
            if name in self.files:
                raise ValueError(
                    f"tensor {name!r} is in {self.files[name]} and in {file}: one is expected; the files are of "
                    "different saves, fetch or save them again into an empty directory"
                )
            header = self._handles[file].get_slice(name)
            self.files[name], self.shapes[name] = file, tuple(header.get_shape())
            self.dtypes[name] = _FLOATS.get(header.get_dtype(), header.get_dtype())

    def __getitem__(self, name: str) -> np.ndarray:
        self.require_float(name)
        if not self._handles:
            raise ValueError(f"{self._where()} is closed: read tensor {name!r} before")
        try:
            return self._handles[self.files[name]].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(_unreadable(self.files[name], f"tensor {name!r}: {error}")) from error

    def require_float(self, name: str) -> None:
        """Raise what `tensors[name]` would raise for its dtype or for a name that is not there, without reading it."""
        if name not in self.files:
            raise KeyError(f"{name!r} is none of the {len(self)} tensors of {self._where()}")
        if self.dtypes[name] not in _CODES:
            raise ValueError(
                f"tensor {name!r} in {self.files[name]} is {self.dtypes[name]}: {', '.join(_CODES)} are expected; if "
                "the checkpoint is quantised, take the one that is not"
            )

    def __contains__(self, name: object) -> bool:  # that of Mapping would read the tensor
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:  # not the data
        return f"Tensors({len(self)} in {self._where()})"

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. What was read stays valid."""
        self._handles = {}
        self._stack.close()

    def _where(self) -> str:
        return ", ".join(sorted({str(file.parent) for file in self.files.values()})) or "no file"


def open_tensors(directory: str | os.PathLike[str]) -> Tensors:
    """Open the shards that model.safetensors.index.json names, else model.safetensors, else the only *.safetensors.

    Reads the headers alone. Raises `FileNotFoundError` without the directory, such a file in it, or a shard;
    `ValueError` for several candidates, a part of a sharded checkpoint without its index, an index that is none or
    names other tensors than the shards hold, a tensor in two shards, and a file that is damaged, cut or something else.
    """
    directory = Path(directory)
    if not directory.is_dir():
        if directory.exists():
            raise ValueError(f"{directory} is a file: the directory that holds it is expected")
        raise FileNotFoundError(f"{directory} does not exist: a directory with safetensors files is expected")
    index = directory / _INDEX
    if not index.is_file():
        return Tensors([_only_file(directory)])
    where = _weight_map(index)
    tensors = Tensors(sorted({directory / shard for shard in where.values()}))
    absent = [name for name, shard in where.items() if tensors.files.get(name) != directory / shard]
    unnamed = [name for name in tensors if name not in where]
    if not absent and not unnamed:
        return tensors
    tensors.close()
    wrong = [f"{_some([f'{name!r} of {where[name]}' for name in absent])} not in its shard"] if absent else []
    wrong += [f"{_some([f'{name!r} of {tensors.files[name].name}' for name in unnamed])} not named"] if unnamed else []
    raise ValueError(f"{index} and its shards are of different saves, fetch all of them again: {'; '.join(wrong)}")


class Deferred(NamedTuple):
    """An array that is made when it is written, so that many can be told of while none is there."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


def save_tensors(
    directory: str | os.PathLike[str],
    items: Iterable[tuple[str, np.ndarray | Deferred]],
    *,
    shard_bytes: int = 5 * 2**30,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Write model.safetensors, or shards of up to `shard_bytes` bytes of data and their index, as transformers does.

    items: name and floating-point array of each tensor, taken one by one: those of a shard and one more are held, of
    deferred ones a single array. A tensor larger than `shard_bytes` has a shard of its own. dtype: what all are
    rounded to; None keeps each one's.

    The directory is made if need be; other files in it stay. The new ones come under their names when all are
    written, the index last; before, `open_tensors` finds no model. Raises `FileExistsError`, before it takes an item,
    if the directory holds a model*.safetensors or an index; `ValueError` for no items, a name that comes twice or is
    __metadata__, and an array that is not float32, float16, bfloat16 or float64; `OSError` if writing fails.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}: 1 or more is expected")
    if dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype is {dtype!r}: None or one of {', '.join(_DTYPES)} is expected")
    with appearing(directory) as partial:
        shards, total = [], 0
        for shard in _shards(_checked(items, dtype), shard_bytes):
            total += sum(map(_size, shard.values()))
            shards.append((partial / f"{len(shards)}.partial", list(shard)))
            _write(shard, shards[-1][0])
            shard.clear()  # else it would live on while the next one fills
        if not shards:
            raise ValueError("no tensors came: at least one is expected; an iterator can be used only once")
        _name(shards, total)


@contextlib.contextmanager
def appearing(directory: str | os.PathLike[str], *refused: str) -> Iterator[Path]:
    """A folder to write files in, all of which come into `directory` when the block ends, and none if it raises.

    What makes a directory a model comes last: first the other files, then shards, then the index or the only file; so
    wherever a process dies, there is the whole model or none. Raises `FileExistsError` as `save_tensors` does, where a
    file of a name like `refused` is there, and where another would be replaced.
    """
    directory = Path(directory)
    _refuse_existing(directory, "model*.safetensors*", *refused)
    directory.mkdir(parents=True, exist_ok=True)
    # Inside the directory, because a neighbour may be on another disk, where nothing can be moved from.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as partial:
        yield Path(partial)
        names = sorted((file.name for file in Path(partial).iterdir()), key=_place)
        _refuse_existing(directory, "model*.safetensors*", *names)
        for name in names:  # else a machine that stops may keep names without bytes
            with (Path(partial) / name).open("r+b") as stream:
                os.fsync(stream.fileno())
        for name in names:
            os.replace(Path(partial) / name, directory / name)


def _handle(file: Path) -> safe_open:
    try:
        # pread: the pages of a memory map would count as ours, so that reading a model took its size twice.
        return safe_open(file, framework="numpy", backend="pread")
    except SafetensorError as error:
        raise ValueError(_unreadable(file, str(error))) from error


def _unreadable(file: Path, error: str) -> str:
    with file.open("rb") as stream:
        pointer = stream.read(64).startswith(b"version https://git-lfs")
    do = "it is only the pointer to it: run git lfs pull" if pointer else "it is damaged or a part: fetch it again"
    return f"{file} is no whole safetensors file ({error}); {do}"


def _only_file(directory: Path) -> Path:
    whole = directory / _WHOLE
    found = [whole] if whole.is_file() else sorted(file for file in directory.glob("*.safetensors") if file.is_file())
    if len(found) == 1 and not _PART.search(found[0].name):
        return found[0]
    if found:
        raise ValueError(
            f"{directory} holds {_some([file.name for file in found])}, but no {_INDEX}: one whole file is expected, "
            "or all shards and their index"
        )
    message = f"{directory} holds no safetensors file: {_WHOLE}, or shards and {_INDEX}, are expected"
    for pattern, how in _OTHER_FORMATS.items():
        if other := sorted(file.name for file in directory.glob(pattern)):
            message += f"; to convert {_some(other)}, {how}"
    raise FileNotFoundError(message)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> name of its shard, all of which are there."""
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = {Path(shard).name == shard for shard in where.values()} == {True}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards, fetch it again: {type(error).__name__} {error}") from error
    if not plain:
        raise ValueError(f"{index} is no index of shards, fetch it again: names of files beside it are expected")
    shards = sorted(set(where.values()))
    if missing := [shard for shard in shards if not (index.parent / shard).is_file()]:
        raise FileNotFoundError(f"{index} names {_some(missing)}, not there: fetch what is missing of {len(shards)}")
    if _WHOLE not in shards and (index.parent / _WHOLE).is_file():
        raise ValueError(f"{index} does not name the {_WHOLE} beside it: two models in one directory, remove one")
    return where


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _place(name: str) -> tuple[bool, bool, str]:
    return name in (_WHOLE, _INDEX), name.endswith(".safetensors"), name


def _refuse_existing(directory: Path, *patterns: str) -> None:
    if found := sorted({file.name for pattern in patterns for file in directory.glob(pattern)}):
        raise FileExistsError(
            f"{directory} already holds {_some(found)}: give another directory, or remove what is no longer needed"
        )


def _checked(items: Iterable[tuple[str, np.ndarray | Deferred]], dtype: str | None) -> Iterator[tuple[str, Deferred]]:
    seen = set()
    for name, array in items:
        if name in seen or name == "__metadata__":
            raise ValueError(f"tensor {name!r} came twice" if name in seen else f"no tensor can be called {name!r}")
        seen.add(name)
        if array.dtype.name not in _CODES:
            raise ValueError(f"tensor {name!r} is {array.dtype}: {', '.join(_CODES)} are expected")
        make = array.make if isinstance(array, Deferred) else functools.partial(np.asarray, array)
        # by its name, because it may be of the other byte order
        own = np.dtype(array.dtype.name) if array.dtype.name not in _DTYPES else _DTYPES[array.dtype.name]
        yield name, Deferred(tuple(array.shape), own if dtype is None else _DTYPES[dtype], make)


def _size(array: Deferred) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _shards(items: Iterable[tuple[str, Deferred]], shard_bytes: int) -> Iterator[dict[str, Deferred]]:
    shard, size = {}, 0
    for name, array in items:
        if shard and size + _size(array) > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += _size(array)
    if shard:
        yield shard


def _write(shard: dict[str, Deferred], file: Path) -> None:
    """A safetensors file by its published layout: the header's length, the header, and the values in C order.

    Not by the library's save_file, which wants all arrays at once and copies them.
    """
    # transformers 4 fails on a file without the format
    header, end = {"__metadata__": {"format": "pt"}}, 0
    # the widest first, as the library has them, so that every tensor begins at a multiple of its size
    names = sorted(shard, key=lambda name: -shard[name].dtype.itemsize)
    for name in names:
        start, end = end, end + _size(shard[name])
        what = {"dtype": _CODES[shard[name].dtype.name], "shape": shard[name].shape, "data_offsets": [start, end]}
        header[name] = what
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                array = np.asarray(shard[name].make()).astype(shard[name].dtype, order="C", copy=False)
                if array.shape != shard[name].shape:
                    raise ValueError(f"tensor {name!r} is {array.shape}: {shard[name].shape} was told before")
                stream.write(array.reshape(-1).view(np.uint8))
                del array  # before the next one is made
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error}") from error


def _name(shards: list[tuple[Path, list[str]]], total: int) -> None:
    """Give the files their names, which hold the number of shards, and write the index, if there are several."""
    if len(shards) == 1:
        shards[0][0].rename(shards[0][0].with_name(_WHOLE))
        return
    where = {}
    for number, (file, names) in enumerate(shards, 1):
        target = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file.rename(file.with_name(target))
        where |= dict.fromkeys(names, target)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    written = shards[0][0].with_name(_INDEX)
    written.write_text(json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
