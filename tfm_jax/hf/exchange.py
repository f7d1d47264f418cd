"""Models in and out of Hugging Face directories: every tensor once, by name, without torch."""

import fnmatch
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.hf.configs import architecture_of, read_config, write_config
from tfm_jax.hf.files import open_tensors, save_tensors
from tfm_jax.hf.names import Entry, Layout, layout, read, write, written_shape
from tfm_jax.models import Model, build

_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}


def load(
    directory: str | os.PathLike[str], *, shardings: Any = None, unused: tuple[str, ...] = ()
) -> tuple[Model, dict, Tokenizer]:
    """Model, parameters (float32) and tokenizer of a Hugging Face directory: config.json, safetensors, tokenizer.json.

    As `load_model`, and as `Tokenizer.load` for the tokenizer, whose start token is the one that config.json gives the
    decoder (decoder_start_token_id), where it gives one.
    """
    model, params = load_model(directory, shardings=shardings, unused=unused)
    tokenizer, start = Tokenizer.load(directory), read_values(directory).get("decoder_start_token_id")
    if start is None or start == tokenizer.bos_id:
        return model, params, tokenizer
    (token,) = tokenizer.pieces([start])
    return model, params, Tokenizer.load(directory, specials={"bos": token})


def load_model(
    directory: str | os.PathLike[str], *, shardings: Any = None, unused: tuple[str, ...] = ()
) -> tuple[Model, dict]:
    """Model and parameters (float32) of a Hugging Face directory; every tensor of its files is used once.

    shardings: a tree like the parameters', where each goes as soon as it is read, so that the host never holds much
    more than one (None: the default device). unused: patterns of names that may be left out (`pooler.*`).

    Raises `ValueError` for a model type or a setting that is not known, and in one message for all tensors that are
    missing, left over or of another shape, by their names; `FileNotFoundError` where there is no such directory.
    """
    values = read_values(directory)
    with open_tensors(directory) as tensors:
        known = {_canonical(name): name for name in tensors}
        model = build(read_config(values, own_head="lm_head.weight" in known))
        names = layout(architecture_of(values), model.config)
        found = _matched(names, known, tensors.shapes, model.shapes, unused, str(directory))
        _check_copies(names, known, tensors, found)
        leaves = defaultdict(list)
        for entry in names.entries:
            leaves[entry.path].append(entry)

        def leaf(path, shape, sharding=None):
            own = leaves[tuple(key.key for key in path)]
            array = np.empty(shape.shape, np.float32)
            for entry in own:
                part = array if entry.layer is None else array[entry.layer]
                part[...] = read(entry, tensors[found[entry]], part.shape).astype(np.float32)
            return jax.device_put(array, sharding)

        trees = (model.shapes,) if shardings is None else (model.shapes, shardings)
        return model, jax.tree_util.tree_map_with_path(leaf, *trees)


def save(
    directory: str | os.PathLike[str],
    model: Model,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    model_type: str | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face directory that transformers reads: config.json, safetensors, and the tokenizer's files.

    model_type: bert, roberta, gpt2, llama, mistral, qwen2, t5, mt5, bart or marian; None: the first that can express
    the model. Tensors keep the parameters' dtype; tied ones are written once. Raises `ValueError` with the reasons
    where no type can, and as `save_tensors` where the directory is not free.
    """
    directory = Path(directory)
    dtype = str(jax.tree.leaves(params)[0].dtype)
    model_type, values = _expressed(model, tokenizer, model_type, dtype)
    names = layout(model_type, model.config)
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory, _tensors(names, params), shard_bytes=shard_bytes, dtype=None)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(directory / "tokenizer.json")


def read_values(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json as a dict; raises `FileNotFoundError` or `ValueError` naming the file."""
    path = Path(directory) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{directory} holds no model: {path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object: the configuration of a model is expected")
    return values


def _canonical(name: str) -> str:
    name = name.removeprefix("module.")
    for old, new in _OLD_ENDINGS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _there(names: Layout, name: str, known: Mapping[str, str], *, head: bool = False) -> str | None:
    """The canonical name under which the files hold a tensor of the layout."""
    candidates = (name,) if head else (names.prefix + name, name)
    return next((candidate for candidate in candidates if candidate in known), None)


def _matched(names, known, their_shapes, shapes, unused, where) -> dict[Entry, str]:
    """The name in the files of each entry; one error for all that is missing, left over or misshapen."""
    found, missing, misshapen, used = {}, [], [], set()
    for entry in names.entries:
        name = _there(names, entry.name, known, head=entry.head)
        if name is None:
            missing.append(names.prefix * (not entry.head) + entry.name)
            continue
        shape = _own_shape(entry, shapes)
        expected, got = written_shape(entry, shape), tuple(their_shapes[known[name]])
        if got != expected:
            misshapen.append(f"{name}: {got}, expected {expected}")
        found[entry] = known[name]
        used.add(name)
    allowed = {name for copy in names.copies if (name := _there(names, copy, known))}
    allowed |= {name for name in known if name.endswith(names.ignored)} if names.ignored else set()
    allowed |= {name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in unused)}
    extra = sorted(set(known) - used - allowed)
    problems = {"missing": sorted(set(missing)), "not used": extra, "of another shape": misshapen}
    if any(problems.values()):
        lines = [f"  {what}: {', '.join(each)}" for what, each in problems.items() if each]
        raise ValueError("\n".join([f"the tensors in {where} are not those of its config.json:", *lines]))
    return found


def _own_shape(entry: Entry, shapes: dict) -> tuple[int, ...]:
    for key in entry.path:
        shapes = shapes[key]
    return shapes.shape if entry.layer is None else shapes.shape[1:]


def _check_copies(names, known, tensors, found) -> None:
    """What they write twice because it is tied must be the same twice."""
    originals = {entry.name: name for entry, name in found.items()}
    for copy, original in names.copies.items():
        name = _there(names, copy, known)
        if name is not None and not np.array_equal(tensors[known[name]], tensors[originals[original]]):
            tied = f"{name} differs from {originals[original]}, to which config.json ties it"
            raise ValueError(f"{tied}: say there that they are not tied, or mend the file")


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
    "transformer": ("t5", "bart", "marian"),
}


def _tensors(names: Layout, params: dict) -> Iterator[tuple[str, np.ndarray]]:
    thirds: dict[str, list] = defaultdict(list)
    for entry in names.entries:
        leaf = params
        for key in entry.path:
            leaf = leaf[key]
        array = write(entry, np.asarray(leaf if entry.layer is None else leaf[entry.layer]))
        name = names.prefix * (not entry.head) + entry.name
        if entry.how == "third":
            thirds[name].append(array)
            if len(thirds[name]) < 3:
                continue
            array = np.concatenate(thirds.pop(name), axis=-1)
        yield name, np.ascontiguousarray(array)
