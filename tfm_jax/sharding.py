"""Where arrays live: the processes and their mesh, one rules table for parameters and one for activations."""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tfm_jax import config

PARAMETER_AXES = {"embed": "fsdp", "mlp": "model", "heads": "model", "kv_heads": "model", "vocab": "model"}
ACTIVATION_AXES = {"batch": ("data", "fsdp"), "length": "sequence", "heads": "model", "mlp": "model", "vocab": "model"}


def join_processes() -> None:
    """Make one run of several processes, each started with the same command, where the environment asks for it.

    JAX_COORDINATOR_ADDRESS (host:port of process 0) with JAX_NUM_PROCESSES and JAX_PROCESS_ID joins processes that were
    started by hand; JAX_COORDINATOR_PORT (any free port) those of a TPU pod, of Slurm or of Open MPI, where jax finds
    the rest itself. Without any of these, and where `jax.distributed.initialize` was called before, nothing happens.
    Raises `RuntimeError` where jax has used a device already.
    """
    asked = {"JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"} & os.environ.keys()
    if asked and not jax.distributed.is_initialized():
        # jax reads address and port from the environment, but not these
        given = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        numbers = {name: int(os.environ[variable]) for name, variable in given.items() if variable in os.environ}
        jax.distributed.initialize(**numbers)


def is_first_process() -> bool:
    """Whether this process writes and speaks for all. To a process that is alone it says so without using a device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def on_host(tree: Any) -> Any:
    """The arrays of a tree in NumPy, whole in every process, whichever devices hold them; every process must ask."""
    whole = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated  # noqa: E731
    gathered = lambda x: x if whole(x) else multihost_utils.process_allgather(x, tiled=True)  # noqa: E731
    return jax.device_get(jax.tree.map(gathered, tree))


def make_mesh(mesh: config.Mesh, *, devices: Sequence | None = None) -> jax.sharding.Mesh:
    """The device mesh with axes data, fsdp, sequence, model over the first of these devices (None: all there are).

    Raises `ValueError` when there are fewer devices than the axes need, and when a process would have none of them.
    """
    sizes, devices = mesh.axes, jax.devices() if devices is None else devices
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise ValueError(f"the mesh {mesh} needs {needed} devices, there are {len(devices)} ({devices[0].platform})")
    idle = {device.process_index for device in devices} - {device.process_index for device in devices[:needed]}
    if idle:
        raise ValueError(
            f"the mesh {mesh} has {needed} of {len(devices)} devices, none of process {min(idle)}: lay it over the "
            "devices of all processes, or start fewer"
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=devices[:needed], axis_types=(AxisType.Auto,) * len(sizes)
    )


def abstract_mesh(mesh: config.Mesh) -> AbstractMesh:
    """The mesh of `make_mesh` without its devices, of which there need be none: for layouts, not for arrays."""
    sizes = mesh.axes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


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


def tokens_are_shared() -> bool:
    """Whether the mesh in use divides the tokens of a batch, by rows or by length, over several devices."""
    shape = jax.sharding.get_abstract_mesh().shape
    return any(shape.get(axis, 1) > 1 for axis in (*ACTIVATION_AXES["batch"], ACTIVATION_AXES["length"]))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Ask the partitioner to lay x out by the logical names of its dimensions; the identity outside a mesh.

    A dimension that the mesh does not divide, as the one column of a decoding step, stays whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = partition_spec(axes, ACTIVATION_AXES)
    return _laid_out(x, PartitionSpec(*map(functools.partial(_dividing, mesh), spec, x.shape)))


# outside jit, an array of a single device has to be told through jit
_laid_out = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _dividing(mesh, names, size):
    """The mesh axes of a dimension, those of them that the mesh has; None where they do not divide its size."""
    names = (names,) if isinstance(names, str) else names or ()
    names = tuple(name for name in names if name in mesh.shape)
    return names if names and size % math.prod(mesh.shape[name] for name in names) == 0 else None
