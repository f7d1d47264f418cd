"""Several processes train one run over one mesh, and what they leave is what one process leaves."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.train import pod_process
from tests.train.killed_run import TRAIN, VALIDATION, tiny_run
from tfm_jax import sharding
from tfm_jax.config import Mesh
from tfm_jax.train.checkpoint import Checkpoints
from tfm_jax.train.evaluate import conclude
from tfm_jax.train.loop import CHECKPOINTS, fit
from tfm_jax.train.report import read_metrics
from tfm_jax.train.run import load

ROOT = Path(__file__).parents[2]
TIMES = {"seconds", "tokens_per_second", "input_wait"}
SECONDS = 500


def run_in(directory, **options):
    return tiny_run(directory, mesh=Mesh(**pod_process.MESH), **pod_process.TRAIN | options)


def fitted_in(directory):
    return fit(run_in(directory), train=TRAIN, validation=VALIDATION)


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    """Where two processes trained, what each of them found, and what it said before it ended."""
    directory = tmp_path_factory.mktemp("pod")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-m", pod_process.__name__, str(directory)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment | {"JAX_PROCESS_ID": f"{i}"}, **pipes) for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:  # jax lets no gentler signal end a process
            process.kill()
    # the error that the script ends with, and no other
    assert [process.returncode for process in running] == [1, 1], said
    found = [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out, _ in said]
    return SimpleNamespace(directory=directory, found=found, out=[out for out, _ in said], err=[err for _, err in said])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that one process makes over as many devices, uninterrupted, and what it comes to."""
    fitted = fitted_in(tmp_path_factory.mktemp("alone") / "run")
    return fitted, *conclude(fitted, VALIDATION)


def measured(directory):
    lines = read_metrics(Path(directory) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_close(ours, theirs):
    """To a millionth of the norm."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    ours, theirs = (np.concatenate([np.ravel(x) for x in side]) for side in zip(*pairs, strict=True))
    assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs) > 0


def assert_same_run(directory, alone):
    ours, theirs = measured(directory), measured(alone.directory)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert_close(load(directory)[1], alone.params)


@pytest.mark.slow
def test_two_processes_train_the_run_of_one(pod, alone):
    """I32: stopped and continued by two, uninterrupted by one; a line for each measurement and a file of each kind."""
    assert {*pod.found[0]["shards"].values()} == {4}
    assert_same_run(pod.directory / "run", alone[0])
    names = {path.name for path in (pod.directory / "run").iterdir()}
    assert names == {path.name for path in alone[0].directory.iterdir()} | {"result.json"}
    config, theirs = (
        json.loads((where / "config.json").read_text()) for where in (pod.directory / "run", alone[0].directory)
    )
    assert config == theirs | {"run_dir": str(pod.directory / "run")}


@pytest.mark.slow
def test_two_processes_come_to_the_scores_of_one(pod, alone):
    """Each has decoded the whole text, and knows the whole summary; the first one has written and shown it."""
    (one, other), (fitted, scores, hypotheses) = pod.found, alone
    assert one["hypotheses"] == other["hypotheses"] == hypotheses
    assert one["scores"] == other["scores"] == scores
    assert one["summary"] == other["summary"]
    times = {"train_seconds", "tokens_per_second"}
    untimed = {name: value for name, value in fitted.summary.items() if name not in times}
    assert {name: one["summary"][name] for name in untimed} == pytest.approx(untimed, rel=1e-6)
    assert json.loads((pod.directory / "run" / "result.json").read_text()) == one["summary"] | one["scores"]
    assert ["reference" in out for out in pod.out] == [True, False]
    assert ["validation loss" in err for err in pod.err] == [True, False]


@pytest.mark.slow
def test_one_process_continues_what_two_have_begun(pod, alone, tmp_path):
    """B46: on the checkpoint that two processes wrote."""
    shutil.copytree(pod.directory / "stopped", tmp_path / "run")
    with Checkpoints(tmp_path / "run" / CHECKPOINTS, keep_last=9) as checkpoints:
        assert checkpoints.steps == [2]
    fitted_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", alone[0])


@pytest.mark.slow
def test_the_clock_of_the_first_process_decides(pod):
    """Its own clock would have ended the second process before the limit of updates, and left the first one waiting."""
    for found in pod.found:
        assert found["timed"]["steps"] == 4 and found["timed"] == pod.found[0]["timed"]
        assert found["timed"]["train_seconds"] < 600


@pytest.mark.slow
def test_what_one_process_cannot_read_is_damaged_for_all(pod):
    """Both go on from the checkpoint before, and come to the same end again."""
    for found in pod.found:
        assert found["repaired"]["validation_loss"] == found["timed"]["validation_loss"]
    names = {path.name for path in (pod.directory / "timed" / CHECKPOINTS).iterdir()}
    assert names == {"2", "4", "4.damaged"}
    assert ["4.damaged" in err for err in pod.err] == [True, False]


@pytest.mark.slow
def test_a_refusal_ends_every_process(pod):
    """Another configuration than the directory's, and than the other process has."""
    for i, found in enumerate(pod.found):
        assert f"process {i} of 2 was started with another configuration" in found["other"]
        assert not (pod.directory / f"process{i}").exists()
        assert "another configuration (field: asked for, there):\n  train.label_smoothing: 0.2, 0.1" in pod.err[i]


ADDRESS, PORT = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"


@pytest.mark.parametrize(
    "environment, calls",
    [
        ({}, []),
        ({"JAX_PROCESS_ID": "1", "SLURM_JOB_ID": "7"}, []),
        ({PORT: "8476"}, [{}]),
        ({ADDRESS: "a:1", "JAX_NUM_PROCESSES": "12", "JAX_PROCESS_ID": "0"}, [{"num_processes": 12, "process_id": 0}]),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_processes_join_where_the_environment_asks_for_it(monkeypatch, environment, calls, joined):
    """And not a second time."""
    for name in (ADDRESS, PORT, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: made.append(settings))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    sharding.join_processes()
    assert made == ([] if joined else calls)


def test_a_mesh_that_leaves_a_process_out_is_refused():
    """By the process; the devices of the others would wait for it."""
    devices = [SimpleNamespace(process_index=i // 2, platform="cpu") for i in range(6)]
    with pytest.raises(ValueError, match=r"model 2 has 2 of 6 devices, none of process 1"):
        sharding.make_mesh(Mesh(model=2), devices=devices)
    with pytest.raises(ValueError, match="needs 7 devices, there are 6"):
        sharding.make_mesh(Mesh(model=7), devices=devices)
