"""What does depth cost: does compiling take longer with more layers, and what does computing again save (remat)?

A train step of a GPT, 256 wide, 8 rows of 256 tokens. Layers of a stack are one body of a loop, so the time to trace
and compile should not grow with their number: at most 1.3 times for 24 layers what it is for 4. Of 12 layers, `full`
keeps only each layer's input for the gradient: at most a quarter of the temporary memory for at most 1.35 times the
FLOPs. About two minutes on two CPU cores (accelerators: not measured).

    python experiments/benchmarks/depth.py --json runs/depth.json

FLOPs are XLA's own count of a program without the loop, since it counts a loop's body once. Compile times are medians
of rounds by turns, each in an empty cache.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from tfm_jax import config as configs
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout
from tfm_jax.sharding import make_mesh
from tfm_jax.train.objectives import LanguageModel
from tfm_jax.train.step import abstract_state, init_state, train_step

OPTIMIZER = configs.Optimizer(schedule="constant", warmup_steps=0)


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    json: str
    """Where the result goes."""
    layers: tuple[int, ...]
    """Depths that are compiled by turns."""
    unroll: tuple[int, ...]
    """Layers in one turn of the loop, for the deepest model."""
    remat_layers: int
    """Layers of the model whose memory, FLOPs and time are measured."""
    d_model: int
    vocab_size: int
    rows: int
    length: int
    rounds: int


CONFIG = Benchmark(
    json="runs/depth.json",
    layers=(4, 24),
    unroll=(1, 4),
    remat_layers=12,
    d_model=256,
    vocab_size=1_024,
    rows=8,
    length=256,
    rounds=3,
)


def model_config(config: Benchmark, layers: int) -> GPTConfig:
    """A GPT of so many layers."""
    return GPTConfig(
        config.vocab_size,
        max_length=config.length,
        num_layers=layers,
        d_model=config.d_model,
        d_ff=4 * config.d_model,
        num_heads=4,
        dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1),
    )


def batch_of(config: Benchmark) -> dict[str, jax.Array]:
    """Random tokens, each of which is to be predicted from those before it."""
    shape = (config.rows, config.length)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, config.vocab_size, jnp.int32)
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "weights": jnp.ones(shape, jnp.float32)}


def compiled(model_config: GPTConfig, batch: dict[str, jax.Array]) -> tuple[Any, float, float]:
    """The train step, and the seconds that tracing and compiling took."""
    jax.clear_caches()
    model = build(model_config)
    state = abstract_state(model, OPTIMIZER, make_mesh(configs.Mesh()))
    lowered, tracing = seconds(
        lambda: train_step.lower(state, batch, optimizer=OPTIMIZER, objective=LanguageModel(model))
    )
    program, compiling = seconds(lowered.compile)
    return program, tracing, compiling


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of the work and the time it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def compile_rows(config: Benchmark) -> list[dict[str, Any]]:
    """For each depth, and for the deepest model each way to unroll it, the time to trace and to compile."""
    kinds = [(layers, 1) for layers in config.layers]
    kinds += [(max(config.layers), unroll) for unroll in config.unroll if unroll > 1]
    times: dict[tuple[int, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(config.rounds):
        for layers, unroll in kinds:
            _, *taken = compiled(replace(model_config(config, layers), unroll=unroll), batch_of(config))
            times[layers, unroll].append(tuple(taken))
    rows = []
    for (layers, unroll), taken in times.items():
        ratios = [sum(own) / sum(first) for own, first in zip(taken, times[kinds[0]], strict=True)]
        tracing, compiling = (median(column) for column in zip(*taken, strict=True))
        row = {"layers": layers, "unroll": unroll, "trace_seconds": tracing, "compile_seconds": compiling}
        rows.append(row | {"times": taken, "ratio": median(ratios)})
    return rows


def remat_rows(config: Benchmark) -> list[dict[str, Any]]:
    """By remat: temporary memory and time of a step, and XLA's FLOPs of the same step without its loop."""
    rows, programs, batch = [], {}, batch_of(config)
    for remat in ("none", "dots", "full"):
        kind = replace(model_config(config, config.remat_layers), remat=remat)
        unrolled = compiled(replace(kind, unroll=config.remat_layers), batch)[0]
        program = compiled(kind, batch)[0]
        where = {"optimizer": OPTIMIZER, "mesh": make_mesh(configs.Mesh())}
        programs[remat] = program, init_state(jax.random.key(0), model=build(kind), **where)
        memory = program.memory_analysis().temp_size_in_bytes
        flops = unrolled.cost_analysis()["flops"]
        rows.append({"remat": remat, "temporary_bytes": memory, "flops": flops, "times": []})
    for _ in range(config.rounds + 1):
        for row in rows:
            program, state = programs[row["remat"]]
            began = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, batch))
            row["times"].append(time.perf_counter() - began)
            programs[row["remat"]] = program, state
    for row in rows:
        row["times"] = row["times"][1:]  # the first touches memory for the first time
        row["seconds"] = median(row["times"])
        for name in ("temporary_bytes", "flops", "seconds"):
            row[f"{name}_ratio"] = row[name] / rows[0][name]
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    lines = ["| layers | unroll | trace, s | compile, s | both, to the first row |", "| --- | --- | --- | --- | --- |"]
    for row in result["compile"]:
        times = f"{row['trace_seconds']:.2f} | {row['compile_seconds']:.2f} | {row['ratio']:.2f}"
        lines.append(f"| {row['layers']} | {row['unroll']} | {times} |")
    lines += ["", "| remat | temporary MiB | to none | FLOPs to none | seconds | to none |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for row in result["remat"]:
        shares = f"{row['temporary_bytes_ratio']:.3f} | {row['flops_ratio']:.3f}"
        took = f"{row['seconds']:.2f} | {row['seconds_ratio']:.2f}"
        lines.append(f"| {row['remat']} | {row['temporary_bytes'] / 2**20:,.1f} | {shares} | {took} |")
    return "\n".join(lines)


def main(config: Benchmark) -> None:
    """Measure, print the tables, write the result."""
    console, device = Console(stderr=True), jax.devices()[0]
    with console.status("compiling"):
        compiling = compile_rows(config)
    with console.status("computing again"):
        again = remat_rows(config)
    result = {
        "benchmark": "depth",
        "device": {"platform": device.platform, "kind": device.device_kind, "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "configuration": asdict(config),
        "compile": compiling,
        "remat": again,
    }
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{markdown(result)}\n\n{path}")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, default=CONFIG, description=__doc__))
