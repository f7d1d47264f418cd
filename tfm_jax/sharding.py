"""Where arrays live: the mesh, one rules table for parameters and one for activations."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tfm_jax import config

PARAMETER_AXES = {"embed": "fsdp", "mlp": "model", "heads": "model", "kv_heads": "model", "vocab": "model"}
ACTIVATION_AXES = {"batch": ("data", "fsdp"), "heads": "model", "mlp": "model", "vocab": "model"}


def make_mesh(mesh: config.Mesh) -> jax.sharding.Mesh:
    """The device mesh with axes data, fsdp, model over the first devices there are.

    Raises `ValueError` when there are fewer devices than the axes need.
    """
    sizes, devices = _sizes(mesh), jax.devices()
    needed = math.prod(sizes.values())
    if needed > len(devices):
        axes = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"the mesh {axes} needs {needed} devices, there are {len(devices)} ({devices[0].platform})")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=devices[:needed], axis_types=(AxisType.Auto,) * len(sizes)
    )


def abstract_mesh(mesh: config.Mesh) -> AbstractMesh:
    """The mesh of `make_mesh` without its devices, of which there need be none: for layouts, not for arrays."""
    sizes = _sizes(mesh)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _sizes(mesh: config.Mesh) -> dict[str, int]:
    return {"data": mesh.data, "fsdp": mesh.fsdp, "model": mesh.model}


def partition_spec(axes: tuple[str | None, ...], rules: Mapping[str, Any]) -> PartitionSpec:
    """The mesh axes of an array whose dimensions have the logical names `axes`; each is used once, by the first."""
    used: set[str] = set()
    names = []
    for axis in axes:
        name = rules.get(axis) if axis is not None else None
        parts = {name} if isinstance(name, str) else set(name or ())
        names.append(None if parts & used else name)
        used |= parts
    return PartitionSpec(*names)


def parameter_shardings(axes: Any, mesh: jax.sharding.Mesh | AbstractMesh, shapes: Any) -> Any:
    """A tree of shardings for a tree of logical axis names (`model.axes`) and of shapes.

    Raises `ValueError` naming the parameter whose size the mesh does not divide.
    """
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731

    def sharding(path, names, shape):
        spec = partition_spec(names, PARAMETER_AXES)
        for size, axis, name in zip(shape.shape, spec, names, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')}: its axis {name} of "
                    f"size {size} does not divide over mesh axis {axis} of {mesh.shape[axis]} devices; change one"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, axes, shapes, is_leaf=is_axes)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of arrays whose first axis is the batch."""
    return NamedSharding(mesh, PartitionSpec(ACTIVATION_AXES["batch"]))


def batch_is_shared() -> bool:
    """Whether the mesh in use divides the rows of a batch over several devices."""
    shape = jax.sharding.get_abstract_mesh().shape
    return any(shape.get(axis, 1) > 1 for axis in ACTIVATION_AXES["batch"])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Ask the partitioner to lay x out by the logical names of its dimensions; the identity outside a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, ACTIVATION_AXES))
