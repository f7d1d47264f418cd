"""One of two processes that are hosts of a pod: as an experiment does, each trains the tiny run and concludes it.

    JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python -m tests.train.pod_process DIR

In DIR/run a run is stopped before its third update, copied to DIR/stopped, continued and concluded; DIR/timed is a run
whose end the clock could decide, and which goes on after a part of its newest checkpoint was damaged. A line of JSON on
stdout says what this process found. Then it begins the run with another configuration, which ends it.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

DEVICES = 2
MESH = {"fsdp": 2, "model": 2}
TRAIN = {"steps": 4, "checkpoint_every": 2, "final": "average"}


class Stopped(Exception):
    """Instead of a power cut."""


def said(error: type[Exception], act, *arguments, **options) -> str:
    """What an error says that must come."""
    try:
        act(*arguments, **options)
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__} came")


def main(directory: Path) -> None:
    # jax makes no devices before fit() does
    from tests.train.killed_run import TRAIN as train
    from tests.train.killed_run import VALIDATION as validation
    from tests.train.killed_run import tiny_run
    from tfm_jax.config import Mesh
    from tfm_jax.train import loop
    from tfm_jax.train.evaluate import conclude
    from tfm_jax.train.run import write_result

    def run(name, **options):
        return tiny_run(directory / name, mesh=Mesh(**MESH), **TRAIN | options)

    def fit(run):
        return loop.fit(run, train=train, validation=validation)

    train_step, clock = loop.train_step, loop.time

    def stop(state, *inputs, **options):
        if int(state.step) == 2:
            raise Stopped
        return train_step(state, *inputs, **options)

    loop.train_step = stop
    said(Stopped, fit, run("run"))
    loop.train_step = train_step

    import jax
    from jax.experimental import multihost_utils

    assert (len(jax.devices()), len(jax.local_devices())) == (2 * DEVICES, DEVICES)
    first = jax.process_index() == 0
    if first:
        shutil.copytree(directory / "run", directory / "stopped")
    multihost_utils.sync_global_devices("copied")

    fitted = fit(run("run"))
    scores, hypotheses = conclude(fitted, validation)
    write_result(fitted.directory, fitted.summary | scores)
    shards = {name: len(x.sharding.device_set) for name, x in fitted.params["embedding"].items()}
    found = {"shards": shards, "summary": fitted.summary, "scores": scores, "hypotheses": hypotheses}

    # the second process' clock runs so fast that alone it would stop at once
    now = iter(range(0, 10**9, 1_000))
    loop.time = clock if first else SimpleNamespace(monotonic=lambda: float(next(now)))
    timed = fit(run("timed", max_minutes=10.0))
    loop.time = clock
    found["timed"] = timed.summary

    # of the newest checkpoint, the part that the second process reads alone
    if first:
        for path in (timed.directory / loop.CHECKPOINTS / "4" / "params" / "ocdbt.process_1" / "d").iterdir():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    multihost_utils.sync_global_devices("damaged")
    found["repaired"] = fit(timed.run).summary

    other = run(f"process{jax.process_index()}")
    found["other"] = said(ValueError, fit, other)
    print(json.dumps(found), flush=True)
    fit(run("run", label_smoothing=0.2))


if __name__ == "__main__":
    # the last count given is the one that holds
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MPLBACKEND"] = "Agg"
    main(Path(sys.argv[1]))
