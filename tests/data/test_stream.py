"""Batches as they are read: the same whatever the workers, the hosts and the step it began at; and an orderly end."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.data import tiny
from tests.data.tiny import assert_equal
from tfm_jax.data.batches import Batches, stream

ROOT = Path(__file__).parents[2]
STEPS = 13  # two epochs of every kind, and more
HOSTS = (1, 2, 4)


def together(parts):
    """The rows of all hosts in order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(scope="module")
def everything():
    """All kinds as one, whose every step has a batch of each, so that a few processes serve them all."""

    # A class of a function is sent to the processes as it is: they need not import this file.
    class Everything(Batches):
        end = None

        def __init__(self, kinds):
            self.kinds = kinds

        def part(self, step, host, hosts):
            return {name: batches.part(step, host, hosts) for name, batches in self.kinds.items()}

        def __getstate__(self):
            return self.__dict__

    return Everything(tiny.kinds())


@pytest.fixture(scope="module")
def expected(everything):
    """The global batches, asked one by one."""
    assert all(2 * batches.steps_per_epoch < STEPS for batches in everything.kinds.values())
    return [{name: batches[step] for name, batches in everything.kinds.items()} for step in range(STEPS)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_share_the_batches_from_any_step_on(everything, expected, hosts):
    """B48, I32: each kind of batch by threads: all hosts' rows are the global batch, whichever step a stream begins at.

    So a run that stops continues with what would have come, on another number of hosts too.
    """
    for start in range(STEPS):
        stop = STEPS if start in (0, 5) else min(start + 2, STEPS)
        streams = [list(stream(everything, start, stop, host=host, hosts=hosts)) for host in range(hosts)]
        for step, parts in zip(range(start, stop), zip(*streams, strict=True), strict=True):
            assert {found for found, _ in parts} == {step}
            for kind, batch in expected[step].items():
                own = [part[kind] for _, part in parts]
                assert len({len(part["tokens"]) for part in own}) == 1
                assert_equal(together(own), batch)


def test_processes_make_what_threads_make(everything, expected):
    """B48, I32: two processes, stopped in mid-epoch and continued by one, each host for itself and all of them as one.

    Every kind of batch, as a process would make it for each host of 1, 2 and 4.
    """

    class AllHosts(type(everything)):
        def part(self, step, host, hosts):
            part = super().part
            shares = {number: [part(step, each, number) for each in range(number)] for number in HOSTS}
            # as one array: a process may not have open the shared memory of a thousand
            return part(step, host, hosts) | {"shares": {"of": np.frombuffer(pickle.dumps(shares), np.uint8)}}

    batches = AllHosts(everything.kinds)

    def continued():
        with contextlib.closing(stream(batches, 0, STEPS, workers=2)) as first:
            yield from ((0, 1, *each) for each in itertools.islice(first, 5))
        yield from ((1, 2, *each) for each in stream(batches, 5, STEPS, workers=1, host=1, hosts=2))

    for wanted, (host, hosts, step, parts) in zip(range(STEPS), continued(), strict=True):
        assert step == wanted
        shares = pickle.loads(parts.pop("shares")["of"].tobytes())
        for number in HOSTS:
            for kind, batch in expected[step].items():
                assert_equal(together([part[kind] for part in shares[number]]), batch)
        assert_equal(parts, shares[hosts][host])


def test_a_closed_stream_leaves_no_process():
    before = set(multiprocessing.active_children())
    endless = stream(Batches(tiny.pairs([(3, 5)] * 7), tokens_per_batch=23), 10**9, workers=1)
    assert [step for step, _ in itertools.islice(endless, 3)] == [10**9, 10**9 + 1, 10**9 + 2]
    started = set(multiprocessing.active_children()) - before
    assert started
    endless.close()
    for process in started:
        process.join(timeout=10)
        assert not process.is_alive()


PARENT = """
import os, time
import numpy as np
from tfm_jax.data.batches import stream

class Pids:
    end = None
    def part(self, step, host, hosts):
        return {"pid": np.array(os.getpid())}

for step, batch in stream(Pids(), 0, workers=1):
    print(int(batch["pid"]), flush=True)
    time.sleep(60 if step == 3 else 0)
"""


def test_a_killed_parent_leaves_no_process():
    """The pipe of what the parent prints is closed when all who may write to it are gone."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert worker != parent.pid
        parent.kill()
        try:
            parent.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            pytest.fail("the worker outlives its parent")


@pytest.mark.parametrize("start", [0, 1, 29, 31])
def test_stream_resumes_from_its_step(start):
    """B48: whatever step a stream starts from, it gives the batches that an uninterrupted one gives."""
    lengths = [(n % 13 + 1, n * n % 11 + 1) for n in range(199)]
    batches = Batches(tiny.pairs(lengths), tokens_per_batch=97, num_buckets=3, seed=0)
    stop = 2 * batches.steps_per_epoch + 3
    assert stop > 33
    streamed = list(stream(batches, start, stop))
    assert [step for step, _ in streamed] == list(range(start, stop))
    for step, batch in streamed:
        assert_equal(batch, batches[step])


def test_stream_ends():
    """An endless stream is closed by its reader and leaves no thread; one for evaluation ends with its epoch."""
    examples, settings = tiny.pairs([(3, 5), (7, 2)] * 29), dict(tokens_per_batch=97, num_buckets=2, seed=0)
    before = set(threading.enumerate())
    endless = stream(Batches(examples, **settings), 10**9)
    assert [step for step, _ in itertools.islice(endless, 3)] == [10**9, 10**9 + 1, 10**9 + 2]
    endless.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()
    once = Batches(examples, **settings, shuffle=False)
    assert len(list(stream(once, 0))) == len(list(stream(once, 0, 10**6))) == once.steps_per_epoch == len(list(once))
    assert list(stream(once, once.steps_per_epoch)) == list(stream(once, 3, 2)) == []


def test_what_goes_wrong_is_heard_of():
    """An error in the making of a batch reaches the reader as it is."""
    batches = Batches(tiny.pairs([(3, 3)]), tokens_per_batch=97, num_buckets=2, seed=0)
    with pytest.raises(IndexError, match="step -1 is outside the endless steps"):
        next(stream(batches, -1))
    with pytest.raises(ValueError, match="3 hosts cannot share 1 rows"):
        next(stream(batches, 0, host=0, hosts=3))
