"""Batches on their way to the devices."""

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import jax

from tfm_jax.data.batches import Batch, Batches, stream
from tfm_jax.sharding import batch_sharding


class Fed(NamedTuple):
    """A batch whose rows lie on the devices that share them; `tokens` it holds, those of the other side included."""

    step: int
    batch: dict[str, jax.Array]
    tokens: int


def feed(
    batches: Batches, start: int, stop: int | None = None, *, mesh: jax.sharding.Mesh, workers: int = 0
) -> Iterator[Fed]:
    """The batches of the steps from `start` to before `stop` (None: as long as there are any).

    Every process makes its own rows, by threads or by `workers` processes, and sends them to its devices one step
    ahead of the step that is computed. Closing the generator ends what it has started.
    """
    host, hosts = _share(mesh)
    made, waiting = stream(batches, start, stop, workers=workers, host=host, hosts=hosts), deque()
    with contextlib.closing(made):
        for step, batch in made:
            waiting.append(Fed(step, put(batch, mesh), batches.num_tokens(step)))
            if len(waiting) > 1:
                yield waiting.popleft()
        yield from waiting


def put(batch: Batch, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """The rows of a batch that this process's devices hold, as arrays of all rows, shared over the mesh."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def _share(mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """(host, hosts): which of how many equal parts of every batch the devices of this process hold."""
    sharding = batch_sharding(mesh)
    shards = math.prod(mesh.shape[axis] for axis in sharding.spec[0])
    owners = sharding.addressable_devices_indices_map((shards,))
    own = sorted({index[0].indices(shards)[0] for index in owners.values()})
    first, count = min(own, default=0), max(len(own), 1)
    if own != list(range(first, first + count)) or first % count or shards % count:
        raise ValueError(
            f"process {jax.process_index()} holds the parts {own} of the {shards} that share a batch: lay the mesh out "
            "such that every process has as many parts, one after another"
        )
    return first // count, shards // count
