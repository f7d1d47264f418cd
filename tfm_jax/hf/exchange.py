"""Models in and out of Hugging Face directories: every tensor once, by name, without torch."""

import fnmatch
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.hf.configs import architecture_of, read_config, read_values, write_config
from tfm_jax.hf.files import Tensors, appearing, open_tensors, save_tensors
from tfm_jax.hf.names import Entry, Layout, layout, read, written_shape
from tfm_jax.hf.placement import place, tensors_of, widest
from tfm_jax.hf.tokens import load_tokenizer, save_tokenizer
from tfm_jax.models import Model, build

_DTYPES = ("float32", "bfloat16", None)
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}


def load(
    directory: str | os.PathLike[str],
    *,
    shardings: Any = None,
    unused: tuple[str, ...] = (),
    dtype: Literal["float32", "bfloat16"] | None = "float32",
    head: str | None = None,
) -> tuple[Model, dict, Tokenizer]:
    """Model, parameters and tokenizer of a Hugging Face directory: config.json, safetensors, tokenizer.json.

    As `load_model`, and the tokenizer as `load_tokenizer`: it reads and writes text as AutoTokenizer does.
    """
    tokenizer = load_tokenizer(Path(directory), read_values(directory))
    model, params = load_model(directory, shardings=shardings, unused=unused, dtype=dtype, head=head)
    return model, params, tokenizer


def load_model(
    directory: str | os.PathLike[str],
    *,
    shardings: Any = None,
    unused: tuple[str, ...] = (),
    dtype: Literal["float32", "bfloat16"] | None = "float32",
    head: str | None = None,
) -> tuple[Model, dict]:
    """Model and parameters of a Hugging Face directory; every tensor of its files is used once.

    shardings: a tree like the parameters', of `jax.sharding.Sharding`s (None: the default device). Each array goes to
    its devices as soon as it is read, so that the host holds one and a single tensor of the files beside it; on CPU,
    where the host is the device, the model and a single tensor. unused: patterns of names in the files that may be
    left out (`*.pooler.*`). dtype: of the parameters; float64, and float32 for bfloat16, are rounded to the nearest.
    None: as the files have them, each array for itself. head: what stands on a BERT or a decoder, as in its
    configuration, instead of what config.json names.

    Raises `ValueError` for a model type or a setting that is not known, and in one message for all tensors that are
    missing, left over, there under two names or of another shape, by their names; for two tensors that are tied and
    differ; and for what is no float. `FileNotFoundError` where there is no such directory. All of that comes before a
    parameter is read.
    """
    require(dtype in _DTYPES, f"dtype is {dtype!r}: one of {_DTYPES} is expected")
    values = read_values(directory)
    with open_tensors(directory) as tensors:
        known, twice = _known(tensors, unused)
        model = build(read_config(values, own_head="lm_head.weight" in known, head=head))
        names = layout(architecture_of(values), model.config)
        found, problems = _matched(names, known, tensors.shapes, model.shapes, unused)
        _refuse(problems | {"there under two names": twice}, directory)
        leaves = defaultdict(list)
        for entry in names.entries:
            leaves[entry.path].append(entry)
        dtypes = {path: _dtype(path, [found[entry] for entry in own], tensors, dtype) for path, own in leaves.items()}
        _check_copies(names, known, tensors, found)

        def leaf(path, shape, sharding=None):
            path = tuple(key.key for key in path)
            one = shape.shape if leaves[path][0].layer is None else shape.shape[1:]
            pieces = ((entry.layer, read(entry, tensors[found[entry]], one)) for entry in leaves[path])
            return place(pieces, jax.ShapeDtypeStruct(shape.shape, dtypes[path]), sharding)

        trees = (model.shapes,) if shardings is None else (model.shapes, shardings)
        return model, jax.tree_util.tree_map_with_path(leaf, *trees)


def save(
    directory: str | os.PathLike[str],
    model: Model,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    model_type: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face directory that transformers reads: config.json, safetensors, and the tokenizer's files.

    The tokenizer is written as `save_tokenizer` says, so that AutoTokenizer puts around a text what the model was
    trained with, and generation_config.json names the special ids; `save_generation` adds how to write.

    model_type: bert, roberta, gpt2, llama, mistral, qwen2, t5, mt5, bart or marian; None: the first that can express
    the model. dtype: what all tensors are rounded to; None: each as the parameters are. Tied ones are written once.
    The host holds one tensor at a time; arrays may lie in shards. A process that dies leaves no directory that looks
    like a model, but perhaps a .partial-* folder in it.

    Raises before anything is written: `ValueError` with the reasons where no type can express the model, and where
    the parameters are not those of the model; `FileExistsError` where the directory holds a model or parts of one.
    """
    _require_params(model, params)
    # what they convert all tensors to when they load
    own = str(widest(jax.tree.leaves(params)))
    model_type, values = _expressed(model, tokenizer, model_type, dtype or own)
    tensors = tensors_of(layout(model_type, model.config), params)
    with appearing(directory, "*config.json", "tokenizer.json", "*.safetensors*") as folder:
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(folder, tokenizer, model.config)
        save_tensors(folder, tensors, shard_bytes=shard_bytes, dtype=dtype)


def read_model(directory: str | os.PathLike[str], *, head: str | None = None) -> Model:
    """The model that a config.json describes, without its parameters; the directory need hold no other file.

    Whether a T5 v1.1 or an mT5 has an output layer of its own only the tensors say; without them it has, as the
    published ones. Raises as `load_model` does.
    """
    values, own_head = read_values(directory), True
    if any(Path(directory).glob("*.safetensors*")):
        with open_tensors(directory) as tensors:
            own_head = "lm_head.weight" in map(_canonical, tensors)
    return build(read_config(values, own_head=own_head, head=head))


def _known(tensors: Tensors, unused: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Name without what only old files have -> name in the files, and what is there under two names that say the same.

    Of two such names one that may be left out gives way.
    """
    names = defaultdict(list)
    for name in tensors:
        names[_canonical(name)].append(name)
    kept = {first: [name for name in own if not _fits(name, unused)] or own for first, own in names.items()}
    twice = sorted(" and ".join(sorted(own)) for own in kept.values() if len(own) > 1)
    return {first: own[0] for first, own in kept.items()}, twice


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _canonical(name: str) -> str:
    name = name.removeprefix("module.")
    for old, new in _OLD_ENDINGS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _there(names: Layout, name: str, known: Mapping[str, str], *, head: bool = False) -> str | None:
    """The canonical name under which the files hold a tensor of the layout."""
    candidates = (name,) if head else (names.prefix + name, name)
    return next((candidate for candidate in candidates if candidate in known), None)


def _matched(names, known, their_shapes, shapes, unused) -> tuple[dict[Entry, str], dict[str, list[str]]]:
    """The name in the files of each entry, and all that is missing, left over or misshapen."""
    found, missing, misshapen, used = {}, [], set(), set()
    for entry in names.entries:
        name = _there(names, entry.name, known, head=entry.head)
        if name is None:
            missing.append(names.prefix * (not entry.head) + entry.name)
            continue
        shape = _own_shape(entry, shapes)
        expected, got = written_shape(entry, shape), tuple(their_shapes[known[name]])
        if got != expected:
            misshapen.add(f"{known[name]}: {got}, expected {expected}")
        found[entry] = known[name]
        used.add(name)
    allowed = {name for copy in names.copies if (name := _there(names, copy, known))}
    allowed |= {name for name in known if name.endswith(names.ignored)} if names.ignored else set()
    extra = sorted(known[name] for name in set(known) - used - allowed if not _fits(known[name], unused))
    return found, {"missing": sorted(set(missing)), "not used": extra, "of another shape": sorted(misshapen)}


def _refuse(problems: dict[str, list[str]], directory: str | os.PathLike[str]) -> None:
    """One error for all of them."""
    lines = [f"  {what}: {', '.join(each)}" for what, each in problems.items() if each]
    require(not lines, "\n".join([f"the tensors in {directory} are not those of its config.json:", *lines]))


def _own_shape(entry: Entry, shapes: dict) -> tuple[int, ...]:
    for key in entry.path:
        shapes = shapes[key]
    return shapes.shape if entry.layer is None else shapes.shape[1:]


def _dtype(path, names, tensors, dtype) -> np.dtype:
    """Of a parameter that is read from these tensors, all of which must be floats."""
    for name in names:
        tensors.require_float(name)
    if dtype is not None:
        return jnp.dtype(dtype)
    there, where = sorted({tensors.dtypes[name] for name in names}), f"parameter {'.'.join(path)}"
    say = "give dtype='float32' or 'bfloat16', to which all are rounded"
    require(len(there) == 1, f"{where} is one array, but its tensors are {' and '.join(there)}: {say}")
    narrow = jax.dtypes.canonicalize_dtype(there[0]) != jnp.dtype(there[0])
    require(not narrow, f"{where} is {there[0]} in the files, which jax has with jax_enable_x64 alone: {say}")
    return jnp.dtype(there[0])


def _check_copies(names, known, tensors, found) -> None:
    """What they write twice because it is tied must be the same twice."""
    originals = {entry.name: name for entry, name in found.items()}
    for copy, original in names.copies.items():
        name = _there(names, copy, known)
        if name is not None and not np.array_equal(tensors[known[name]], tensors[originals[original]]):
            tied = f"{name} differs from {originals[original]}, to which config.json ties it"
            raise ValueError(f"{tied}: say there that they are not tied, or mend the file")


def _require_params(model, params) -> None:
    own, given = (
        {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
        for found in map(jax.tree_util.tree_leaves_with_path, (model.shapes, params))
    )
    sizes = lambda leaves, name: leaves[name].shape if name in leaves else "nothing"  # noqa: E731
    wrong = [
        f"{name}: {sizes(given, name)}, expected {sizes(own, name)}"
        for name in sorted(own | given)
        if sizes(given, name) != sizes(own, name)
    ]
    require(not wrong, "these parameters are not those of the model:\n  " + "\n  ".join(wrong))
    for name, leaf in given.items():
        kinds = f"{', '.join(_FLOATS)} are expected"
        require(str(leaf.dtype) in _FLOATS, f"parameter {name} is {leaf.dtype}: {kinds}")
        whole = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        require(whole, f"parameter {name} lies partly on devices of other processes: gather it before, here it cannot")


def _expressed(model, tokenizer, model_type, dtype) -> tuple[str, dict[str, Any]]:
    special = {} if tokenizer is None else {"pad": tokenizer.pad_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    types = _TYPES[model.config.family] if model_type is None else (model_type,)
    reasons = []
    for each in types:
        try:
            return each, write_config(model.config, each, special, dtype=dtype)
        except ValueError as error:
            reasons.append(f"  {each}: {error}")
    raise ValueError("\n".join(["no model type of Hugging Face can express this model:", *reasons]))


_TYPES = {
    "bert": ("bert", "roberta"),
    "gpt": ("gpt2", "llama", "qwen2", "mistral"),
    "transformer": ("t5", "mt5", "bart", "marian"),
}
