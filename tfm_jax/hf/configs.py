"""Their config.json and our configurations, both ways, with the fields and the defaults of transformers 5."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_jax.config import differences, from_dict, require, to_dict
from tfm_jax.hf.conversions import NEVER, WHERE_NULL, Values, read_head, write_head
from tfm_jax.hf.formats import FORMATS, Format
from tfm_jax.models import BERTConfig, GPTConfig, TransformerConfig

Config = BERTConfig | GPTConfig | TransformerConfig


def read_values(directory: str | os.PathLike[str], name: str = "config.json") -> dict[str, Any]:
    """A file such as config.json as a dict; raises `FileNotFoundError` or `ValueError` naming the file."""
    path = Path(directory) / name
    if not path.exists():
        raise FileNotFoundError(f"{directory} holds no model: {path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object: a configuration is expected")
    return values


def architecture_of(values: Mapping[str, Any]) -> str:
    """The model_type of a config.json; raises `ValueError` for one that is not among the ten known."""
    model_type = values.get("model_type")
    known = isinstance(model_type, str) and model_type in FORMATS
    require(known, f"model_type is {model_type!r}: one of {sorted(FORMATS)} is expected")
    return model_type


def read_config(values: Mapping[str, Any], *, own_head: bool = True, head: str | None = None) -> Config:
    """The configuration that a config.json describes, of the family that its model_type belongs to.

    head: of BERT and of decoders, instead of the one of the class that config.json names.

    own_head: False where the files hold no lm_head.weight. Only T5's and mT5's need it: transformers 5 writes of both
    that embedding and output layer are tied, and then goes by the tensors it finds.

    Raises `ValueError` for a model type, a class in `architectures` or a setting that is not supported, by name.
    """
    model_type = architecture_of(values)
    form = FORMATS[model_type]
    values = form.defaults | _renamed(form, values)
    for name, only in (NEVER | form.only).items():
        value = values.get(name, only)
        right = value == only or not (value or only)
        require(right, f"{name} is {value!r}: of model_type {model_type!r} only {only!r} is supported")
    name = (values.get("architectures") or list(form.architectures))[0]
    known = list(form.architectures)
    require(name in known, f"architectures is {name!r}: of model_type {model_type!r} {known} are supported")
    for field in values.keys() & WHERE_NULL:
        values[field] = WHERE_NULL[field](values) if values[field] is None else values[field]
    for field, default in form.defaults.items():
        right = not isinstance(default, int | float) or isinstance(values[field], int | float | None)
        require(right, f"{field} is {values[field]!r}: a number like {default!r} is expected")
    ours = form.switches | _same(form, values) | form.read(model_type, values) | form.architectures[name]
    require(head is None or "head" in ours, f"head is {head!r}, but models of type {model_type!r} have one head")
    if "head" in ours:
        ours |= read_head(model_type, values, head or ours["head"])
    if "d_kv" in form.fields and not own_head:
        ours["tied_embeddings"] = "all"
    rates = {name: ours.pop(f"dropout.{name}") for name in ("embedding", "residual", "attention", "feed_forward")}
    return from_dict(form.family, ours | {"dropout": rates}, "model")


def write_config(
    config: Config, model_type: str, special: Mapping[str, int] | None = None, *, dtype: str = "float32"
) -> Values:
    """The config.json of a configuration, as transformers 5 reads it; `read_config` gives the same model back.

    special: ids of pad, bos and eos; bos begins what a decoder with an encoder writes. What is left out is null there,
    for their defaults are the ids of another vocabulary. dtype: of the tensors.

    Raises `ValueError` where models of this type cannot be so, with our names of the fields.
    """
    form = FORMATS[architecture_of({"model_type": model_type})]
    family = form.family.family
    require(config.family == family, f"model.family is {config.family!r}: model_type {model_type!r} is of {family!r}")
    ours = _settled(config)
    # the same class does both, and what an embedding is made of is the model without a head
    stands = {"head": {"regression": "sequence", "embedding": "pooled"}.get(ours.get("head"), ours.get("head"))}
    fitting = [name for name, own in form.architectures.items() if own.items() <= (ours | stands).items()]
    values = {"architectures": fitting[:1], "model_type": model_type, "dtype": dtype}
    values["is_encoder_decoder"] = config.kind == "encoder-decoder"
    flat = ours | {f"dropout.{name}": rate for name, rate in ours["dropout"].items()}
    values |= {theirs: flat[name] for theirs, (name, *_) in form.fields.items()}
    values |= form.write(model_type, ours) | (write_head(ours) if ours.get("labels") else {})
    back = read_config(values, own_head=ours.get("tied_embeddings") != "all", head=ours.get("head"))
    changed = "; ".join(f"model.{line}" for line in differences(ours, _settled(back)))
    require(not changed, f"models of type {model_type!r} have other values than this one: {changed}")
    return values | _special_ids(config, model_type, special or {})


def _renamed(form: Format, values: Mapping[str, Any]) -> Values:
    renamed: Values = {}
    for name, value in values.items():
        first = form.aliases.get(name, name)
        clash = renamed.get(first, value) != value
        require(not clash, f"{name} is {value!r}, but {first}, which is the same, {renamed.get(first)!r}")
        renamed[first] = value
    return renamed


def _same(form: Format, values: Values) -> Values:
    """Our fields that have the value of one of theirs, or of several, which then must agree."""
    ours: Values = {}
    for theirs, (*names, _) in form.fields.items():
        for name in names:
            value, other = ours.setdefault(name, values[theirs]), values[theirs]
            require(value == other, f"{theirs} is {other!r}, but {value!r} elsewhere: one value is supported")
    return ours


def _settled(config: Config) -> Values:
    """The configuration as a dict: what a null stands for in its place, and without what changes no number."""
    d_k, d_v = config.head_sizes
    settled = to_dict(config) | {"num_kv_heads": config.kv_heads, "d_k": d_k, "d_v": d_v}
    settled["attention_output_bias"] = config.attention_output_bias or not config.attention_bias
    del settled["implementation"]
    return settled


def _special_ids(config: Config, model_type: str, special: Mapping[str, int]) -> Values:
    roles, size = ("pad", "bos", "eos"), config.vocab_size
    for role, value in special.items():
        fits = role in roles and 0 <= value < size
        require(fits, f"special has {role!r}: {value}; ids from 0 to {size - 1} of {', '.join(roles)} are expected")
    ids = {f"{role}_token_id": special.get(role) for role in roles}
    if model_type == "roberta":
        pad = special.get("pad", 1)
        # their positions count from pad_token_id + 1, and the table has so many rows more
        require(pad == 1, f"special has 'pad': {pad}, but 'roberta' has its positions counted from a pad id of 1")
        ids["pad_token_id"] = pad
    if config.kind == "encoder-decoder":
        ids |= {"decoder_start_token_id": special["bos"]} if "bos" in special else {}
        ids["forced_eos_token_id"] = None
    return ids
