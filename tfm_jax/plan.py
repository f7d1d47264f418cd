"""What a model takes on devices that need not be there: how its parameters lie over a mesh, and its cache."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from tfm_jax import config, hf
from tfm_jax.config import require
from tfm_jax.models import Model, build, preset
from tfm_jax.sharding import ACTIVATION_AXES, abstract_mesh, parameter_shardings, partition_spec
from tfm_jax.train.run import is_hf, read_config


class Row(NamedTuple):
    """A parameter: its name, its whole shape, the mesh axis that divides each of its axes (None: none does), and what
    each device holds of it. Unit: bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    partition: tuple[str | None, ...]
    device_bytes: int

    @property
    def size(self) -> int:
        """Count of numbers in all of it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A model's parameters over a mesh; every device holds as much as any other."""

    mesh: config.Mesh
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Count of numbers in all parameters."""
        return sum(row.size for row in self.rows)

    @property
    def total_bytes(self) -> int:
        """Of the whole model, once."""
        return sum(row.size * jnp.dtype(row.dtype).itemsize for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Of what each device holds."""
        return sum(row.device_bytes for row in self.rows)

    def table(self) -> str:
        """A line a parameter, and the sums."""
        head = ("parameter", "shape", "dtype", "axes of the mesh", "a device holds")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join([*map(str.ljust, line[:-1], widths), line[-1].rjust(widths[-1])]) for line in lines]
        sums = f"{self.parameters:,} parameters, {unit(self.total_bytes)}; {unit(self.device_bytes)} on each of "
        sums += f"{math.prod(self.mesh.axes.values())} devices ({self.mesh})"
        return "\n".join([*text, "", sums])


def parameter_layout(model: Model, mesh: config.Mesh, *, dtype: Literal["float32", "bfloat16"] = "float32") -> Layout:
    """How the parameters of a model would lie over a mesh; no parameter is made, and no device of it need be there.

    dtype: of the parameters. Raises `ValueError` naming a parameter that the mesh does not divide.
    """
    shardings = parameter_shardings(model.axes, abstract_mesh(mesh), model.shapes)
    leaves = zip(jax.tree_util.tree_leaves_with_path(model.shapes), jax.tree.leaves(shardings), strict=True)
    return Layout(mesh, tuple(_row(path, leaf.shape, dtype, sharding) for (path, leaf), sharding in leaves))


def cache_bytes(
    model: Model, mesh: config.Mesh, *, batch: int, length: int, dtype: Literal["float32", "bfloat16"] = "float32"
) -> int:
    """What each device holds of the cache that `batch` rows fill up to `length` columns. Unit: bytes.

    A cache is of the parameters' dtype, and lies as activations do: rows over data and fsdp, heads over model. An
    encoder-decoder keeps the keys and values of a source, taken as equally long, beside its own. Raises `ValueError`
    for a model that keeps none and where the mesh does not divide the rows.
    """
    kind, shards = model.config.kind, mesh.batch_shards
    require(kind != "encoder", "a model of kind 'encoder' keeps no cache: leave batch and length out")
    fits = min(batch, length) >= 1 and batch % shards == 0
    require(fits, f"batch, length are {batch}, {length}: 1 or more is expected, and rows that {shards} devices share")
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), model.shapes)
    read = {
        "encoded": jax.ShapeDtypeStruct((batch, length, model.config.d_model), jnp.dtype(dtype)),
        "encoded_segment_ids": jax.ShapeDtypeStruct((batch, length), jnp.int32),
    }
    source = read if kind == "encoder-decoder" else {}
    cache = jax.eval_shape(lambda own, read: model.init_cache(own, batch, length, **read), params, source)
    held = 0
    for leaf in jax.tree.leaves(cache):
        # keys and values; else B S or a number
        names = ("batch", "heads") if leaf.ndim == 4 else ("batch",)[: leaf.ndim]
        spec = partition_spec(names, ACTIVATION_AXES)
        shape = NamedSharding(abstract_mesh(mesh), spec).shard_shape(leaf.shape)
        held += math.prod(shape) * leaf.dtype.itemsize
    return held


def find_model(source: str | os.PathLike[str]) -> Model:
    """The model of a run directory, of a Hugging Face directory, of which config.json is enough, or of a preset.

    Raises `ValueError` where it is none of these, and as `hf.read_model` and `train.run.read_config` do.
    """
    if not Path(source).is_dir():
        try:
            return build(preset(str(source)))
        except ValueError as error:
            raise ValueError(f"{source} is no directory, and {error}") from error
    return hf.read_model(source) if is_hf(source) else build(read_config(source).model)


def _row(path: Any, shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Row:
    held = math.prod(sharding.shard_shape(shape)) * jnp.dtype(dtype).itemsize
    partition = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    return Row(jax.tree_util.keystr(path, simple=True, separator="."), shape, dtype, partition, held)


def _cells(row: Row) -> tuple[str, ...]:
    shape, axes = " x ".join(map(str, row.shape)), ", ".join(axis or "-" for axis in row.partition)
    return row.name, shape, row.dtype, axes, unit(row.device_bytes)


def unit(size: int) -> str:
    """A number of bytes in the largest unit that it fills."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
