"""Configurations as JSON, strictly: what is unknown, missing or of another type is refused by name."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar

from tfm_jax.config.checks import require


def to_dict(config: Any) -> dict:
    """Nested dict of plain values; a model's config carries its `family` so that it can be found again."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    plain = lambda v: to_dict(v) if dataclasses.is_dataclass(v) else list(v) if isinstance(v, tuple) else v  # noqa: E731
    values = {name: plain(value) for name, value in values.items()}
    family = getattr(config, "family", None)
    return values if family is None else {"family": family} | values


def to_json(config: Any) -> str:
    """The configuration as indented JSON; `from_dict(cls, json.loads(...))` gives an equal one."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"


def from_dict(cls: type, values: dict, where: str = "config") -> Any:
    """Build the dataclass `cls` from a dict, strictly: unknown and missing fields and wrong types raise `ValueError`.

    Fields that are not dataclasses must already have the type of their annotation (int is accepted for float).
    """
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    require(not unknown, f"{where}: unknown fields {unknown}; known are {sorted(fields)}")
    required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    missing = sorted(required - set(values))
    require(not missing, f"{where}: missing fields {missing}")
    return cls(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(type(value) is dict, f"{where} is {value!r}: an object with its fields is expected")
        return from_dict(hint, value, where)
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        require(value in options, f"{where} is {value!r}: one of {list(options)} is expected")
        return value
    if isinstance(hint, TypeVar):
        return value
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} is {value!r}: a list is expected")
        return tuple(_convert(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    allowed = options if origin in (typing.Union, types.UnionType) else (hint,)
    if type(value) is str and value in [name for option in allowed for name in typing.get_args(option)]:
        return value
    if float in allowed and type(value) is int:
        return float(value)
    require(type(value) in allowed, f"{where} is {value!r} ({type(value).__name__}): {hint} is expected")
    return value


def differences(ours: dict, theirs: dict, where: str = "") -> list[str]:
    """The fields in which two nested dicts differ, each as `name: ours, theirs`."""
    lines = []
    for key in sorted(ours.keys() | theirs.keys()):
        one, other, name = ours.get(key), theirs.get(key), f"{where}{key}"
        if isinstance(one, dict) and isinstance(other, dict):
            lines += differences(one, other, f"{name}.")
        elif one != other:
            lines.append(f"{name}: {one!r}, {other!r}")
    return lines
