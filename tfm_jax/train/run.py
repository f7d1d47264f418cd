"""The run directory: what a run leaves, and all that is needed to resume, evaluate or decode it.

config.json      the configuration          checkpoints/   training states, newest and best
metrics.jsonl    one line a measurement     parameters/    the parameters the run ended with
result.json      the scores, one number a key
tokenizer.json   the vocabulary             *.png          plots

Several processes of one run share the directory in one file system: all of them read it, the first one writes it, and
of a checkpoint each writes what its devices hold.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tfm_jax import config, hf
from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import Model, build, family
from tfm_jax.sharding import is_first_process, make_mesh, parameter_shardings
from tfm_jax.train.checkpoint import Checkpoints, load_params
from tfm_jax.train.report import write_whole
from tfm_jax.train.step import abstract_params

PARAMETERS, CHECKPOINTS, TOKENIZER = "parameters", "checkpoints", "tokenizer.json"


@dataclass(frozen=True)
class Fitted:
    """A run that has ended, as `fit` gives it back; the same is in its directory."""

    run: config.Run
    model: Model
    params: dict
    tokenizer: Tokenizer
    summary: dict[str, Any]
    """steps, epochs, train_seconds, tokens_per_second, parameters, validation_loss (the best), dropped_examples,
    padding_share."""

    @property
    def directory(self) -> Path:
        return Path(self.run.run_dir)


def check_run(run: config.Run) -> None:
    """Raise `ValueError` unless the run directory is new or empty, or holds a run of this configuration to continue.

    The message names the fields in which the configuration there differs; only the place (run_dir), the devices (mesh)
    and the processes that make batches (data.workers) may. Between the processes of one run nothing may.
    """
    own = np.uint32(zlib.crc32(config.to_json(run).encode()))
    others = multihost_utils.process_allgather(own)
    require(
        bool((others == own).all()),
        f"process {jax.process_index()} of {jax.process_count()} was started with another configuration than some "
        "other: give all of them the same command",
    )
    directory, path = Path(run.run_dir), Path(run.run_dir) / "config.json"
    if path.exists():
        # read as a configuration: a field that is younger than the run has there the value it has by default
        ours, theirs = (_outcome(config.to_dict(each)) for each in (run, read_config(directory)))
        if lines := config.differences(ours, theirs):
            raise ValueError(
                f"{directory} holds a run with another configuration (field: asked for, there):\n  "
                + "\n  ".join(lines)
                + "\nchoose another --run-dir, or give the values of that run to continue it"
            )
    # a kill while config.json was being written leaves its first part
    elif directory.exists() and any(entry.name != "config.json.partial" for entry in directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no run (no config.json): choose another --run-dir")


def open_run(run: config.Run, tokenizer: Tokenizer) -> Path:
    """Make the run directory with its configuration and vocabulary, or continue the one that is there (`check_run`)."""
    check_run(run)
    directory = Path(run.run_dir)
    # none of the processes may still be looking when the first one writes, nor go on before all is there
    multihost_utils.sync_global_devices(f"{directory} may be opened")
    if is_first_process():
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "config.json").exists():
            write_whole(directory / "config.json", config.to_json(run))
        if not (directory / TOKENIZER).exists():
            tokenizer.save(directory / TOKENIZER)
    multihost_utils.sync_global_devices(f"{directory} is open")
    return directory


def read_config(directory: str | os.PathLike[str]) -> config.Run:
    """The configuration of a run directory; raises `ValueError` when there is none or when a field is unknown."""
    path = Path(directory) / "config.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run, nor a model of Hugging Face: {path} does not exist")
    values = _read_values(path)
    if isinstance(values.get("data"), dict) and isinstance(values.get("mesh"), dict):
        # a run from before there was this field had as many rows as its devices divide, not today's default
        shards = values["mesh"].get("data", 1) * values["mesh"].get("fsdp", 1)
        values["data"].setdefault("rows_multiple", shards)
    return _built(values)


def read_config_file(path: str | os.PathLike[str]) -> config.Run:
    """The configuration in a file as a run's config.json, which may have been written by hand.

    Raises `FileNotFoundError`, and `ValueError` for what is not JSON and for a field that is unknown or missing.
    """
    return _built(_read_values(path))


def _read_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    given = values.get("model") if isinstance(values, dict) else None
    if not isinstance(given, dict) or "family" not in given:
        missing = "the field model.family is missing (and model_type, as of Hugging Face)"
        raise ValueError(f"{path} does not name the family of its model: {missing}")
    return values


def _built(values: dict[str, Any]) -> config.Run:
    model = dict(values["model"])
    values["model"] = config.from_dict(family(model.pop("family"))[1], model, "config.model")
    return config.from_dict(config.Run, values)


def load(directory: str | os.PathLike[str], *, mesh: jax.sharding.Mesh | None = None) -> tuple[Model, dict, Tokenizer]:
    """Model, parameters and tokenizer of a run or of a Hugging Face directory, by its path alone.

    mesh: where the parameters go, in shards (`sharding.make_mesh`); use them under `jax.set_mesh(mesh)`. None: one
    device, of this process.

    The parameters of a run are those it ended with, or of the newest checkpoint while it has not ended. Raises
    `ValueError` where there is no run or nothing saved yet, and for the other kind as `hf.load` does.
    """
    if is_hf(directory):
        model = None if mesh is None else hf.read_model(directory)
        shardings = None if mesh is None else parameter_shardings(model.axes, mesh, model.shapes)
        return hf.load(directory, shardings=shardings)
    directory, run = Path(directory), read_config(directory)
    model = build(run.model)
    mesh = make_mesh(config.Mesh(), devices=jax.local_devices()[:1]) if mesh is None else mesh
    abstract = abstract_params(model, mesh, dtype=run.precision.params)
    if not (directory / TOKENIZER).exists():
        raise ValueError(f"{directory} has no {TOKENIZER} yet: let the run begin training")
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if (directory / PARAMETERS).exists():
        return model, load_params(directory / PARAMETERS, abstract), tokenizer
    with Checkpoints(directory / CHECKPOINTS, keep_last=run.train.keep_last) as checkpoints:
        if not checkpoints.steps:
            raise ValueError(f"{directory} has no checkpoint yet: let the run reach its first one")
        return model, checkpoints.restore_params(checkpoints.steps[-1], abstract), tokenizer


def is_hf(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a model of Hugging Face: its config.json names a model_type."""
    path = Path(directory) / "config.json"
    return path.exists() and "model_type" in hf.read_values(directory)


def decode_settings(directory: str | os.PathLike[str]) -> config.Decode:
    """How a run decodes as its configuration says; a Hugging Face directory as `hf.read_generation` reads it."""
    return hf.read_generation(directory) if is_hf(directory) else read_config(directory).decode


def write_result(directory: str | os.PathLike[str], result: dict[str, Any]) -> Path:
    """Write result.json: flat, one number (or text) a key."""
    path = Path(directory) / "result.json"
    write_whole(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return path


def _outcome(values: dict) -> dict:
    """What decides the outcome of a run: neither its place nor who shares the work, nor what is computed twice."""
    without = lambda part, *names: {name: value for name, value in part.items() if name not in names}  # noqa: E731
    data, model = without(values["data"], "workers"), without(values["model"], "remat", "unroll")
    return without(values, "run_dir", "mesh") | {"data": data, "model": model}
