"""Arrays on their way between the host and the devices, so that the host never holds a model twice."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tfm_jax.hf.files import Deferred
from tfm_jax.hf.names import Entry, Layout, write, written_shape

_ALIGNMENT = 64
"""Unit: bytes. Memory that begins at a multiple of it is what jax on CPU takes as it is; other memory it copies."""


def place(
    pieces: Iterable[tuple[int | None, np.ndarray]], array: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """An array of this shape and dtype in its shards: each of them is filled alone, by the pieces that it holds a part
    of, and only those of this process are.

    pieces: (layer, values), one for each index of the first axis, or one of layer None for all; taken one by one.
    sharding: None for the default device.
    """
    shape, dtype = array.shape, array.dtype
    where = {None: (slice(None),) * len(shape)}
    where = where if sharding is None else sharding.addressable_devices_indices_map(shape)
    # copies on several devices are one buffer here
    spans = {device: _spans(index, shape) for device, index in where.items()}
    buffers = {span: _aligned([stop - start for start, stop in span], dtype) for span in spans.values()}
    for layer, values in pieces:
        for span, buffer in buffers.items():
            if layer is None:
                buffer[...] = values[_slices(span)]
            elif span[0][0] <= layer < span[0][1]:
                buffer[layer - span[0][0]] = values[_slices(span[1:])]
    if sharding is None:
        return jax.block_until_ready(jax.device_put(buffers[spans[None]]))
    kind = sharding.memory_kind
    on = {device: jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in spans}
    shards = [jax.device_put(buffers[span], on[device]) for device, span in spans.items()]
    # else the buffers of many arrays would wait for their transfer at once
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def tensors_of(names: Layout, params: dict) -> Iterator[tuple[str, Deferred]]:
    """Name and values of each tensor of theirs; a tensor is made when it is written, from its layer alone."""
    tensors = defaultdict(list)
    for entry in names.entries:
        tensors[names.prefix * (not entry.head) + entry.name].append(entry)
    for name, entries in tensors.items():
        leaves = [_leaf(params, entry) for entry in entries]
        shape = leaves[0].shape if entries[0].layer is None else leaves[0].shape[1:]
        yield (
            name,
            Deferred(written_shape(entries[0], shape), widest(leaves), functools.partial(_made, entries, leaves)),
        )


def widest(leaves: Iterable[Any]) -> np.dtype:
    """The dtype that holds all of these floats; NumPy has none for bfloat16 and float16."""
    dtypes = {str(leaf.dtype): leaf.dtype for leaf in leaves}
    (dtype,) = dtypes.values() if len(dtypes) == 1 else ("float64" if "float64" in dtypes else "float32",)
    return np.dtype(dtype)


def _made(entries: list[Entry], leaves: list[Any]) -> np.ndarray:
    parts = [write(entry, _gathered(leaf, entry.layer)) for entry, leaf in zip(entries, leaves, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate([part.astype(widest(parts)) for part in parts], axis=-1)


def _leaf(params: dict, entry: Entry) -> Any:
    for key in entry.path:
        params = params[key]
    return params


def _gathered(leaf: Any, layer: int | None) -> np.ndarray:
    """A leaf, or a layer of it, on the host. Not np.asarray(leaf), which leaves its copy with the leaf for good."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf) if layer is None else np.asarray(leaf[layer])
    whole = np.empty(leaf.shape if layer is None else leaf.shape[1:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        if layer is None:
            data = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
            whole[shard.index] = np.asarray(data)
            continue
        (start, stop), *_ = _spans(shard.index, leaf.shape)
        if start <= layer < stop:
            data = jax.lax.dynamic_index_in_dim(shard.data, layer - start, keepdims=False)
            whole[shard.index[1:]] = np.asarray(data)
    return whole


def _spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) in each axis."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _slices(spans: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in spans)


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
