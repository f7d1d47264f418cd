"""Batches on their way to the devices: the ones of the stream, shared over the mesh, by one process and by two."""

import itertools
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.data import tiny
from tests.train import fed_process
from tfm_jax.config import Mesh
from tfm_jax.data.batches import Batches
from tfm_jax.sharding import make_mesh
from tfm_jax.train.feed import Fed, feed, put

ROOT = Path(__file__).parents[2]


def count(batch):
    return sum(np.count_nonzero(batch[name]) for name in ("segment_ids", "source_segment_ids") if name in batch)


@pytest.mark.parametrize("kind", ["pairs packed", "mask buckets", "prefix blocks", "values"])
def test_feed_gives_the_batches_of_the_stream(kind):
    """B48: from any step, with the tokens of both sides counted, every row on one device of the mesh."""
    batches, mesh = tiny.kinds()[kind], make_mesh(Mesh(data=2, fsdp=2))
    for start, stop in [(0, 5), (3, 7), (4, 5), (4, 4)]:
        found = list(feed(batches, start, stop, mesh=mesh))
        assert [fed.step for fed in found] == list(range(start, stop))
        for fed in found:
            assert isinstance(fed, Fed) and isinstance(fed.tokens, int)
            tiny.assert_equal(jax.device_get(fed.batch), batches[fed.step])
            assert fed.tokens == count(batches[fed.step])
            assert all(x.sharding.spec == PartitionSpec(("data", "fsdp")) for x in fed.batch.values())


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 4, "model": 2}], ids=str)
def test_put_shares_the_rows_and_changes_nothing(axes):
    batch, mesh = tiny.kinds()["classes"][0], make_mesh(Mesh(**axes))
    sharers = axes.get("data", 1) * axes.get("fsdp", 1)
    placed = put(batch, mesh)
    tiny.assert_equal(jax.device_get(placed), batch)
    for name, x in placed.items():
        rows, rest = divmod(len(batch[name]), sharers)
        assert rest == 0 and {len(shard.data) for shard in x.addressable_shards} == {rows}
        assert len({shard.index[0].start for shard in x.addressable_shards}) == sharers
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, batch[name][shard.index])


def test_feeding_ends():
    """An endless feed is closed by its reader and leaves no thread; one for evaluation ends with its epoch."""
    mesh, before = make_mesh(Mesh(data=2)), set(threading.enumerate())
    settings = {"tokens_per_batch": 64, "num_buckets": 2, "rows_multiple": 2}
    examples = tiny.pairs([(3, 5), (7, 2)] * 29)
    endless = feed(Batches(examples, **settings), 10**9, mesh=mesh)
    assert [fed.step for fed in itertools.islice(endless, 3)] == [10**9, 10**9 + 1, 10**9 + 2]
    endless.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive(), thread
    once = Batches(examples, **settings, shuffle=False)
    assert [fed.step for fed in feed(once, 0, mesh=mesh)] == list(range(once.steps_per_epoch))
    assert sum(fed.tokens for fed in feed(once, 0, mesh=mesh)) == examples.num_tokens.sum()


def test_feeding_by_processes():
    """The same batches from one worker process, whose memory is given back while the arrays on the devices live on."""
    batches, mesh = tiny.kinds()["spans packed"], make_mesh(Mesh(data=4))
    found = list(feed(batches, 1, 7, mesh=mesh, workers=1))
    assert [fed.step for fed in found] == list(range(1, 7))
    for fed in found:
        tiny.assert_equal(jax.device_get(fed.batch), batches[fed.step])


@pytest.fixture(scope="module")
def two_processes():
    """What each of two processes over one mesh says of its batches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", fed_process.__name__, address]
    running = [
        subprocess.Popen([*command, f"{i}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    return [json.loads(output.splitlines()[-1]) for output, _ in said]  # Gloo, too, has something to say


def digest(x):
    return int(((x.astype(np.uint32) + 1) ** 2 * np.arange(1, x.size + 1, dtype=np.uint32).reshape(x.shape)).sum())


@pytest.mark.parametrize("axes", fed_process.MESHES)
def test_two_processes_feed_the_batches_of_one(two_processes, axes):
    """I15, I32: each process makes the rows of its devices; over the mesh of both they are the batches of one."""
    kinds, steps = tiny.kinds(), range(*fed_process.STEPS)
    for found in two_processes:
        assert [tuple(part[1:3]) for part in found if part[0] == axes] == [*itertools.product(fed_process.KINDS, steps)]
        for _, kind, step, digests, _ in (part for part in found if part[0] == axes):
            assert digests == {name: digest(x) % 2**32 for name, x in kinds[kind][step].items()}, (kind, step)


def test_two_processes_count_the_tokens_of_all(two_processes):
    """The tokens of a batch are those of all its rows."""
    kinds = tiny.kinds()
    for found in two_processes:
        assert [part[-1] for part in found] == [count(kinds[kind][step]) for _, kind, step, *_ in found]
