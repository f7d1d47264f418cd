"""How much memory and time does exact attention in blocks take, beside the equation as it stands?

Forward and backward pass together: the value of a scalar and its gradients by query, key, value and learned tables.
Expected on two CPU cores in float32, 8 heads of 64, batch 1, `blockwise` beside `reference`:

    temporary memory   doubles with T up to 32,768; at T = 16,384 at most 1/100 of the reference's
    time               at T >= 2,048 at most 0.75 without a mask and 0.5 with a causal one; at T = 512 at most 1.1

In about 4 minutes on two CPU cores (accelerators: not measured; there also `--dtype bfloat16 --matrix-size 8192`):

    python experiments/benchmarks/attention.py --json runs/attention.json

Programs that are compared run by turns, so that whatever else the machine does meets them alike. The time of a case is
the median over these rounds, its spread the distance of the quartiles, its ratio the median of the rounds' ratios. The
floor is the time that the six matrix products of a case (two forward, four backward, over the visible scores alone)
take at the rate of one large product, measured in the same run; the share of it is that of the fastest round.
"""

import functools
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

from tfm_jax.ops.attention import Reference, dot_product_attention, explain_implementation
from tfm_jax.ops.biases import ShawBias, T5Bias, alibi
from tfm_jax.ops.blockwise import Blockwise
from tfm_jax.ops.masks import AttentionMask
from tfm_jax.ops.scores import Request


@dataclass(frozen=True)
class Benchmark:
    """What is measured. Lengths are those of queries and keys alike; a pair is (batch, length)."""

    json: str
    """Where the result goes; the plot stands beside it, as .png."""
    dtype: Literal["float32", "bfloat16"]
    """Of query, key and value."""
    precision: Literal["default", "highest"]
    """Of float32 products: "default" is the platform's own, which accelerators round to fewer bits."""
    num_heads: int
    head_size: int
    memory_lengths: tuple[int, ...]
    reference_memory_limit: int
    """The longest length for which the reference is compiled."""
    speed: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    """Block lengths of `blockwise` besides its default, where they are not longer than the sequence."""
    mechanisms: tuple[int, int]
    short_batches: tuple[int, ...]
    short_lengths: tuple[int, ...]
    rounds: int
    seconds: float
    """After so many seconds a case has no more rounds, three apart."""
    matrix_size: int


CONFIG = Benchmark(
    json="runs/attention.json",
    dtype="float32",
    precision="default",
    num_heads=8,
    head_size=64,
    memory_lengths=(1_024, 2_048, 4_096, 8_192, 16_384, 32_768),
    reference_memory_limit=16_384,
    speed=((1, 512), (1, 2_048), (1, 4_096), (8, 1_024)),
    blocks=(128, 256, 1_024),
    mechanisms=(1, 2_048),
    short_batches=(1, 8),
    short_lengths=(64, 128, 256, 512),
    rounds=7,
    seconds=10.0,
    matrix_size=2_048,
)
MECHANISMS = ("none", "causal", "padding", "segments", "window", "dropout", "alibi", "t5", "shaw")
FUSED = {"gpu": ("cudnn",), "tpu": ("splash",)}


@dataclass(frozen=True)
class JaxNN(Reference):
    """`jax.nn.dot_product_attention` in XLA, which is asked for nothing but a causal mask."""

    def run(self, request: Request) -> jax.Array:
        """Attention of a request."""
        arrays, causal = (request.query, request.key, request.value), request.mask is not None
        return jax.nn.dot_product_attention(*arrays, scale=request.scale, is_causal=causal, implementation="xla")


@dataclass(frozen=True)
class Case:
    """One program to measure."""

    batch: int
    length: int
    mechanism: str
    implementation: str
    """A name that `dot_product_attention` knows, "jax.nn", or "blockwise" and the length of its blocks."""


def inputs(config: Benchmark, case: Case) -> tuple[Any, ...]:
    """Query, key, value, the learned bias, what the output is weighted by, and the arguments without a gradient."""
    T, N, H = case.length, config.num_heads, config.head_size
    keys = jax.random.split(jax.random.key(0), 7)
    arrays = [jax.random.normal(key, (case.batch, T, N, H), config.dtype) for key in keys[:4]]
    learned, given = None, {}
    match case.mechanism:
        case "causal":
            given["mask"] = AttentionMask(causal=True)
        case "window":  # of 256 keys at T = 2,048
            given["mask"] = AttentionMask(causal=True, window=(max(1, T // 8) - 1, 0))
        case "padding" | "segments":  # a quarter of the row; four of equal length
            quarter = jnp.arange(T, dtype=jnp.int32)[None] * 4 // T
            ids = 1 + quarter if case.mechanism == "segments" else (quarter < 3).astype(jnp.int32)
            given["mask"] = AttentionMask(query_segment_ids=ids, key_segment_ids=ids)
        case "dropout":
            given["dropout_key"] = keys[4]
        case "alibi":
            given["bias"] = alibi(N)
        case "t5":
            learned = T5Bias(jax.random.normal(keys[5], (32, N)))
        case "shaw":
            learned = ShawBias(*(jax.random.normal(key, (33, H)) for key in keys[5:]))
    return *arrays[:3], learned, arrays[3], given


def options(learned: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `dot_product_attention` that make the mechanism."""
    given = given if learned is None else given | {"bias": learned}
    return given | ({"dropout_rate": 0.1} if "dropout_key" in given else {})


def program(case: Case) -> Callable[..., Any]:
    """Forward and backward pass of a case, as a function of its inputs."""
    name, _, block = case.implementation.partition(" ")
    chosen = JaxNN() if name == "jax.nn" else Blockwise(block=int(block)) if block else name

    def loss(query, key, value, learned, weights, given):
        output = dot_product_attention(query, key, value, **options(learned, given), implementation=chosen)
        return jnp.vdot(output.astype(jnp.float32), weights.astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def memory(config: Benchmark, case: Case) -> list[dict[str, Any]]:
    """A row with the temporary memory of the compiled program, which is never run."""
    compiled = program(case).lower(*jax.eval_shape(lambda: inputs(config, case))).compile()
    return [asdict(case) | {"status": "measured", "bytes": compiled.memory_analysis().temp_size_in_bytes}]


def prepared(config: Benchmark, case: Case, rate: float) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """What is known before the case has run, and a call of it, compiled; None where the implementation refuses."""
    query, key, value, learned, weights, given = arrays = inputs(config, case)
    reason = explain_implementation(query, key, value, **options(learned, given)).refused.get(case.implementation)
    if reason is not None:
        return asdict(case) | {"status": f"refused: {reason}"}, None
    mask = given.get("mask", AttentionMask()).array(case.length, case.length)
    visible = case.length**2 if mask is None else int(mask.sum())
    floor = 12 * case.batch * config.num_heads * config.head_size * visible / rate
    start = time.perf_counter()
    compiled = program(case).lower(*arrays).compile()
    facts = {"status": "measured", "compile_seconds": time.perf_counter() - start, "floor_seconds": floor}
    return asdict(case) | facts, lambda: compiled(*arrays)


def clock(call: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one call, the mean of several; a device runs them one after the other (tried on a CPU, too)."""
    start = time.perf_counter()
    for _ in range(times):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / times


def calls_of(call: Callable[[], Any]) -> int:
    """How many calls make a time that a clock can tell, after a first one."""
    clock(call)
    return min(100, math.ceil(0.02 / clock(call)))


def race(config: Benchmark, cases: Iterable[Case], rate: float) -> list[dict[str, Any]]:
    """A row for each case, which run by turns; ratios are to the first of them."""
    rows, running = [], []
    for case in cases:
        row, call = prepared(config, case, rate)
        rows.append(row)
        if call is not None:
            row["calls"] = calls_of(call)
            running.append((row, call, []))
    end = time.perf_counter() + config.seconds
    for done in range(config.rounds if running else 0):
        if done >= 3 and time.perf_counter() > end:
            break
        shift = done % len(running)
        for row, call, times in running[shift:] + running[:shift]:
            times.append(clock(call, row["calls"]))
    for row, _, times in running:
        row |= summary(times, running[0][2]) | {"floor_share": row["floor_seconds"] / min(times)}
    return rows


def summary(times: list[float], first: list[float]) -> dict[str, Any]:
    """What the tables say of the seconds of each round; `first` are those of what it is compared with."""
    low, median, high = (float(x) for x in np.quantile(times, [0.25, 0.5, 0.75]))
    seconds = {"median_seconds": median, "fastest_seconds": min(times), "spread_seconds": high - low}
    return {"rounds": len(times)} | seconds | {"ratio": float(np.median(np.divide(times, first)))}


def matrix_rate(config: Benchmark) -> float:
    """Multiplications and additions a second in the product of two large matrices, at its fastest."""
    matrix = jax.random.normal(jax.random.key(0), (config.matrix_size, config.matrix_size), config.dtype)
    call = functools.partial(jax.jit(jnp.matmul), matrix, matrix)
    calls = calls_of(call)
    return 2.0 * config.matrix_size**3 / min(clock(call, calls) for _ in range(10))


def jobs(config: Benchmark, rate: float) -> Iterable[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """(table, what gives rows of it)."""
    for length, name in itertools.product(config.memory_lengths, ("blockwise", "reference")):
        if name != "reference" or length <= config.reference_memory_limit:
            yield "memory", functools.partial(memory, config, Case(1, length, "none", name))
    by_turns = lambda *cases: functools.partial(race, config, list(itertools.starmap(Case, cases)), rate)  # noqa: E731
    fused = FUSED.get(jax.default_backend(), ())
    for (batch, length), mask in itertools.product(config.speed, ("none", "causal")):
        names = ("reference", "jax.nn", *fused, "blockwise", *(f"blockwise {n}" for n in config.blocks if n <= length))
        yield "speed", by_turns(*((batch, length, mask, name) for name in names))
    for name in ("blockwise", *fused):
        yield "mechanisms", by_turns(*((*config.mechanisms, mechanism, name) for mechanism in MECHANISMS))
    for batch, length, mask in itertools.product(config.short_batches, config.short_lengths, ("none", "causal")):
        yield "short", by_turns(*((batch, length, mask, name) for name in ("reference", "blockwise", *fused)))


def measure(config: Benchmark) -> dict[str, Any]:
    """The rows of all tables."""
    rate, console = matrix_rate(config), Console(stderr=True)
    result = {"matrix_flops_per_second": rate, "memory": [], "speed": [], "mechanisms": [], "short": []}
    for table, job in track(list(jobs(config, rate)), console=console, disable=not console.is_terminal):
        result[table] += job()
        console.print(f"{table}, T = {result[table][-1]['length']:,}: done", highlight=False)
    return result | {"claims": claims(result)}


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is expected on a CPU, as far as it was measured."""
    size = {(row["length"], row["implementation"]): row["bytes"] for row in result["memory"]}
    found = []
    for length, name in size:
        if name == "blockwise" and (shorter := size.get((length // 2, name))):
            found.append((f"memory of blockwise, T = {length:,} / half as long", 2.2, size[length, name] / shorter))
    if size.keys() >= {(16_384, "reference"), (16_384, "blockwise")}:
        share = size[16_384, "blockwise"] / size[16_384, "reference"]
        found.append(("memory of blockwise / reference, T = 16,384", 0.01, share))
    for row in result["speed"]:
        limit = {"none": 0.75, "causal": 0.5}[row["mechanism"]] if row["length"] >= 2_048 else 1.1
        if row["implementation"] == "blockwise" and row["batch"] == 1 and row["length"] >= 512:
            where = f"T = {row['length']:,}, {row['mechanism']}"
            found.append((f"time of blockwise / reference, {where}", limit, row["ratio"]))
    return [{"claim": text, "limit": limit, "measured": value} for text, limit, value in found]


def markdown(result: dict[str, Any]) -> str:
    """The tables, as `experiments/results/README.md` shows them."""
    device, dtype, rate = result["device"], result["configuration"]["dtype"], result["matrix_flops_per_second"]
    time_and_ratio = lambda row: f"{row['median_seconds'] * 1e3:,.1f} ms, {row['ratio']:.2f}"  # noqa: E731
    tables = (
        ("memory", "Temporary memory, MiB", lambda row: f"{row['bytes'] / 2**20:,.1f}"),
        ("speed", "Median time, and its ratio to the reference's (`blockwise 128`: blocks of 128)", time_and_ratio),
        ("speed", "Share of the floor that the fastest round reached", lambda row: f"{row['floor_share']:.0%}"),
        ("speed", "Seconds to trace and compile", lambda row: f"{row['compile_seconds']:.1f}"),
        ("mechanisms", "Median time with each mechanism, and its ratio to that without any", time_and_ratio),
        ("short", "Short sequences: median time, and its ratio to the reference's", time_and_ratio),
    )
    parts = [f"{device['kind']}, {device['cores']} cores, {dtype}, {rate / 1e9:,.0f} GFLOP/s in a large product."]
    parts += ["\n".join(f"- {c['claim']}: {c['measured']:.3g}, limit {c['limit']:g}" for c in result["claims"])]
    parts += [f"{title}:\n\n{_grid(result[name], cell)}" for name, title, cell in tables]
    return "\n\n".join(filter(None, parts))


def _grid(rows, cell):
    """A Markdown table of `cell(row)`, one column for each implementation; what was refused says why."""
    lines = {}
    for row in rows:
        case = {"batch": f"{row['batch']}", "T": f"{row['length']:,}", "mechanism": row["mechanism"]}
        line = lines.setdefault(tuple(case.values()), case)
        line[row["implementation"]] = cell(row) if row["status"] == "measured" else row["status"]
    names = list(dict.fromkeys(itertools.chain(*lines.values())))
    cells = [names, ["---"] * len(names), *([line.get(name, "") for name in names] for line in lines.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def plot(result: dict[str, Any], path: Path) -> None:
    """Memory and time against T, as a PNG."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in dict.fromkeys(row["implementation"] for row in result["memory"]):
        points = [(row["length"], row["bytes"] / 2**20) for row in result["memory"] if row["implementation"] == name]
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    once = [row for row in result["speed"] if (row["batch"], row["status"]) == (1, "measured")]
    rows = [row for row in once if " " not in row["implementation"]]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for name, mask in dict.fromkeys((row["implementation"], row["mechanism"]) for row in rows):
        same = [row for row in rows if (row["implementation"], row["mechanism"]) == (name, mask)]
        points = [(row["length"], row["median_seconds"] * 1e3) for row in same]
        style = f"C{names.index(name)}o{'-' if mask == 'none' else '--'}"
        right.plot(*zip(*points, strict=True), style, label=f"{name}, mask {mask}")
    for axes, what in ((left, "temporary memory, MiB"), (right, "median time, ms")):
        axes.set(xlabel="T", xscale="log", yscale="log", ylabel=what, title="Forward and backward pass, batch 1")
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(config: Benchmark) -> None:
    """Measure, print the tables, write the result and the plot."""
    start, device = time.perf_counter(), jax.devices()[0]
    load = {"load_before": os.getloadavg()[0]}  # above the number of cores: others had a part of the machine
    with jax.default_matmul_precision(config.precision):
        measured = measure(config)
    facts = {"platform": device.platform, "kind": device.device_kind, "cores": os.cpu_count()}
    result = {
        "benchmark": "attention",
        "device": facts | load | {"load_after": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "configuration": asdict(config),
        "seconds": time.perf_counter() - start,
    } | measured
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result, path.with_suffix(".png"))
    print(f"{markdown(result)}\n\n{path}: {result['seconds']:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, default=CONFIG, description=__doc__))
