"""How fast is a train step, what memory does it take, and how far is it from the cost of its matrix products?

A step is `tfm_jax.train.step.train_step` as a run calls it, with dropout, clipping and AdamW, on a batch of random ids.
`tiny` (4 + 4 layers, 128 wide, 128 x 32 + 32 tokens) and `base` (6 + 6, 512 wide, 16 x 64 + 64) are encoder-decoders;
`gpt_small` (4, 128 wide, 12 x 64) and `gpt_large` (6, 384 wide, 64 x 256) write characters; `bert_tiny` fills in 15 %
of 128 x 64 tokens; `t5_tiny` is as `tiny`, with T5's switches. Expected on two CPU cores: torch's speed or more.
Measured: 0.91 (`gpt_small`), 1.01 (`gpt_large`), 1.60 (`base`) and 1.99 (`tiny`) of it.

In about 3 minutes on two CPU cores, 5 with peers (accelerators, in bfloat16: not measured):

    pip install torch
    python experiments/benchmarks/train_step.py --json runs/train_step.json --peers

On several devices, for sizes that divide: `--mesh.data 4 --mesh.model 2` (a CPU pretends to have eight with
XLA_FLAGS=--xla_force_host_platform_device_count=8).

Torch has a process of its own (`train_step_torch.py`) with as many threads. Programs run by turns, of as many steps as
take a moment; times are medians over the turns, spreads distances of quartiles, `ratio` (ours over torch in speed) the
median of the turns' ratios. The first step traces and compiles. `peak_memory`, bytes on a device, is the compiler's sum
of arguments, results and temporary arrays, what is donated counted once; `allocator_peak`, where a device counts, is
since the process began. `matmul_fraction` is the time of the step's products at the rate of one large product of the
same dtype, measured beside it on all devices of the mesh at once, over the step's time. They are the dot_generals of
the traced forward pass, attention as the equation has it, masked scores included, times three, without what remat adds.
"""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import tyro
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from tfm_jax.config import Mesh, Optimizer, Precision
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.ops import AttentionMask, T5Bias, explain_implementation
from tfm_jax.sharding import abstract_mesh, make_mesh, parameter_shardings, replicated
from tfm_jax.train.feed import put
from tfm_jax.train.objectives import LanguageModel, TextToText
from tfm_jax.train.step import init_state, train_step

Steps = Callable[[int], float]  # makes so many steps, gives the seconds they took


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    json: str
    """Where the result goes."""
    sizes: tuple[Literal["tiny", "base", "gpt_small", "gpt_large", "bert_tiny", "t5_tiny"], ...]
    peers: bool
    """Measure torch too, by turns with ours, where it has the model: on one device, with all that it keeps."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """Of activations and products; parameters stay float32. auto: float32 on a CPU, bfloat16 on an accelerator."""
    mesh: Mesh
    """Devices by axis; each must divide what it shares."""
    micro_batches: int
    """Parts of a batch whose gradients are made one after another."""
    remat: Literal["none", "dots", "full"]
    """What is computed again instead of being kept."""
    unroll: int
    """Layers that the loop over layers runs in one turn."""
    implementation: Literal["auto", "reference", "blockwise", "cudnn", "splash"]
    """Of attention."""
    rounds: int
    turn_seconds: float
    """A turn has at least one step, and more until about so long has passed."""
    matrix_size: int | Literal["auto"]
    """Of the large product; auto: 2,048 on a CPU, 8,192 on an accelerator."""


CONFIG = Benchmark(
    json="runs/train_step.json",
    sizes=("tiny", "base", "gpt_small", "gpt_large", "bert_tiny", "t5_tiny"),
    peers=False,
    dtype="auto",
    mesh=Mesh(data=1, fsdp=1, model=1, sequence=1),
    micro_batches=1,
    remat="dots",
    unroll=1,
    implementation="auto",
    rounds=7,
    turn_seconds=1.0,
    matrix_size="auto",
)


@dataclass(frozen=True)
class Size:
    """A model and the shape of its batch; of `length` there are two in an encoder-decoder."""

    model: Any
    rows: int
    length: int
    label_smoothing: float = 0.0
    targets: float = 1.0
    """Share of tokens that are predicted."""

    @property
    def tokens(self) -> int:
        """Of a batch, on all sides."""
        return self.rows * self.length * (2 if self.model.kind == "encoder-decoder" else 1)


TENTH = Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.1)  # wherever torch.nn.Transformer has it
NARROW = {"d_model": 128, "num_heads": 4}
FOUR = {"num_encoder_layers": 4, "num_decoder_layers": 4}
BASE = {"d_model": 512, "num_heads": 8, "d_ff": 2_048, "num_encoder_layers": 6, "num_decoder_layers": 6}
LARGE = {"d_model": 384, "num_heads": 6, "d_ff": 1_536, "num_layers": 6, "max_length": 256}
GPT = {"activation": "gelu", "attention_bias": False, "feed_forward_bias": False}
T5 = {"norm": "pre", "norm_kind": "rmsnorm", "norm_eps": 1e-6, "activation": "geglu_tanh", "positions": "t5"}
T5 |= {"attention_scale": "none", "attention_bias": False, "feed_forward_bias": False, "embedding_scale": False}
T5 |= {"logits_scale": True, "dropout": Dropout(0.1, 0.1)}
SIZES = {
    "tiny": Size(TransformerConfig(8_000, **NARROW, **FOUR, d_ff=256, dropout=TENTH), 128, 32, 0.1),
    "base": Size(TransformerConfig(8_000, **BASE, dropout=TENTH), 16, 64, 0.1),
    "gpt_small": Size(
        GPTConfig(65, **NARROW, d_ff=512, num_layers=4, max_length=64, **GPT, dropout=Dropout(0.0, 0.0)), 12, 64
    ),
    "gpt_large": Size(GPTConfig(65, **LARGE, **GPT, dropout=Dropout(0.2, 0.2, 0.2)), 64, 256),
    "bert_tiny": Size(BERTConfig(8_000, **NARROW, d_ff=512, num_layers=4, max_length=64), 128, 64, targets=0.15),
    "t5_tiny": Size(TransformerConfig(8_000, **NARROW, **FOUR, d_ff=320, **T5), 128, 32, 0.1),
}
PEERS = ("tiny", "base", "gpt_small", "gpt_large")
OPTIMIZER = Optimizer("adamw", "constant", 1e-4, 0, eps=1e-8, weight_decay=0.1, no_decay=(), clip_norm=1.0)


def chosen(config: Benchmark) -> Benchmark:
    """The configuration with what "auto" stands for; raises `ValueError` for a mesh that does not divide a size."""
    mesh, devices = config.mesh, math.prod(asdict(config.mesh).values())
    if config.peers and devices > 1:
        raise ValueError(f"the mesh has {devices} devices, torch runs on one: leave out --peers or the mesh")
    for name in config.sizes:
        size, model, parts = SIZES[name], build(SIZES[name].model), mesh.batch_shards * config.micro_batches
        if size.rows % parts or size.length % mesh.sequence:
            raise ValueError(
                f"{name} has {size.rows} rows of {size.length} tokens: mesh.data x mesh.fsdp x micro_batches, {parts}, "
                f"must divide the rows and mesh.sequence, {mesh.sequence}, the tokens; change them or --sizes"
            )
        try:
            parameter_shardings(model.axes, abstract_mesh(mesh), model.shapes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}, or --sizes") from None
    dtype, matrix_size = ("float32", 2_048) if jax.default_backend() == "cpu" else ("bfloat16", 8_192)
    dtype = dtype if config.dtype == "auto" else config.dtype
    return replace(config, dtype=dtype, matrix_size=matrix_size if config.matrix_size == "auto" else config.matrix_size)


def batch_of(size: Size) -> dict[str, np.ndarray]:
    """Random ids, with the arrays that a run's batches have."""
    rng, shape = np.random.default_rng(0), (size.rows, size.length)
    ids = lambda: rng.integers(3, size.model.vocab_size, shape, dtype=np.int32)  # noqa: E731
    weights = (rng.random(shape) < size.targets).astype(np.float32)
    batch = {"tokens": ids(), "segment_ids": np.ones(shape, np.int32), "targets": ids(), "weights": weights}
    source = {"source_tokens": ids(), "source_segment_ids": np.ones(shape, np.int32)}
    return batch | (source if size.model.kind == "encoder-decoder" else {})


def objective_of(size: Size, **switches: Any) -> TextToText | LanguageModel:
    """The loss of a size, its model with some switches changed."""
    objective = TextToText if size.model.kind == "encoder-decoder" else LanguageModel
    return objective(build(replace(size.model, **switches)), size.label_smoothing)


def ours(config: Benchmark, size: Size, mesh: jax.sharding.Mesh) -> tuple[Steps, Callable[[], int]]:
    """The steps, and a function that gives the bytes they take on each device, once one was made."""
    objective = objective_of(size, remat=config.remat, unroll=config.unroll, implementation=config.implementation)
    both, batch = {"optimizer": OPTIMIZER, "precision": Precision(compute=config.dtype)}, put(batch_of(size), mesh)
    state = jax.block_until_ready(init_state(jax.random.key(0), model=objective.model, mesh=mesh, **both))
    settings = both | {"objective": objective, "micro_batches": config.micro_batches}

    def steps(count):
        nonlocal state
        began = time.perf_counter()
        for _ in range(count):
            state, metrics = train_step(state, batch, **settings)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - began

    def memory():
        found = train_step.lower(state, batch, **settings).compile().memory_analysis()  # the first step compiled it
        sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
        return sum(sizes) - found.alias_size_in_bytes

    return steps, memory


@contextlib.contextmanager
def in_torch(config: Benchmark, size: Size) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """The steps of torch, and what its process says besides."""
    work = {"size": asdict(size), "kind": size.model.kind, "optimizer": asdict(OPTIMIZER), "dtype": config.dtype}
    work |= {"platform": jax.default_backend(), "threads": os.cpu_count()}
    command = [sys.executable, str(Path(__file__).with_name("train_step_torch.py")), json.dumps(work)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def answer():
            if not (line := process.stdout.readline()):
                raise RuntimeError("torch's process has ended, and says why above: install torch or leave out --peers")
            return json.loads(line)

        said = answer()

        def steps(count):
            print(count, file=process.stdin, flush=True)
            said.update(answer())
            return said["seconds"]

        yield steps, said


def implementation_of(config: Benchmark, size: Size) -> str:
    """What attention runs; several names where its places differ."""
    model, ids = size.model, np.ones((size.rows, size.length), np.int32)
    heads = jax.ShapeDtypeStruct((*ids.shape, model.num_heads, model.head_sizes[0]), config.dtype)
    given = {"dropout_rate": model.dropout.attention, "dropout_key": jax.random.key(0)}
    bias = T5Bias(jnp.zeros((model.t5_buckets, model.num_heads))) if model.positions == "t5" else None
    places = {"encoder": [(False, bias)], "decoder": [(True, bias)]}
    places["encoder-decoder"] = [*places["encoder"], *places["decoder"], (False, None)]
    names = []
    for causal, bias in places[model.kind]:
        mask = AttentionMask(query_segment_ids=ids, key_segment_ids=ids, causal=causal)
        given |= {"mask": mask, "bias": bias, "implementation": config.implementation}
        names.append(explain_implementation(heads, heads, heads, **given).implementation)
    return ", ".join(dict.fromkeys(names))


def products(size: Size) -> float:
    """Floating-point operations in the matrix products of a step, forward and backward."""
    objective, key = objective_of(size, implementation="reference"), jax.random.key(0)
    return 3.0 * _dot_generals(jax.make_jaxpr(objective)(objective.model.shapes, batch_of(size), key).jaxpr)


def _dot_generals(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * summed * equation.outvars[0].aval.size
        inner = sum(map(_dot_generals, jaxprs_in_params(equation.params)))
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def matrix_rate(config: Benchmark, mesh: jax.sharding.Mesh) -> float:
    """Floating-point operations per second of a large product on each device of the mesh at once, at its fastest."""
    n, normal = config.matrix_size, lambda *shape: jax.random.normal(jax.random.key(0), shape, config.dtype)
    shardings = (NamedSharding(mesh, PartitionSpec(mesh.axis_names)), replicated(mesh))
    x, y = jax.jit(lambda: (normal(mesh.size * n, n), normal(n, n)), out_shardings=shardings)()
    product = jax.jit(jnp.matmul)

    def calls(count):
        began = time.perf_counter()
        for _ in range(count):
            result = product(x, y)
        result.block_until_ready()
        return time.perf_counter() - began

    calls(1)
    count = min(100, math.ceil(0.05 / calls(1)))
    return 2.0 * mesh.size * n**3 * count / min(calls(count) for _ in range(5))


def measure(config: Benchmark, name: str, mesh: jax.sharding.Mesh) -> list[dict[str, Any]]:
    """A row for each program: ours, and torch's where it is asked for and has the model."""
    size, times = SIZES[name], {}
    with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        rate, implementation = matrix_rate(config, mesh), implementation_of(config, size)
        step, memory = ours(config, size, mesh)
        programs, said = {implementation: step}, {}
        if config.peers and name in PEERS:
            programs["torch"], said = stack.enter_context(in_torch(config, size))
        first = {program: steps(1) for program, steps in programs.items()}
        once = {program: min(steps(1), steps(1)) for program, steps in programs.items()}
        counts = {program: max(1, round(config.turn_seconds / seconds)) for program, seconds in once.items()}
        for _ in range(config.rounds):
            for program, steps in programs.items():
                times.setdefault(program, []).append(steps(counts[program]) / counts[program])
        peak = {implementation: memory(), "torch": said.get("peak_memory")}
    rows, floor = [], products(size) / rate
    for program, taken in times.items():
        low, seconds, high = (float(x) for x in np.quantile(taken, [0.25, 0.5, 0.75]))
        row = {"size": name, "implementation": program, "seconds": seconds, "spread_seconds": high - low}
        row |= {"tokens_per_second": size.tokens / seconds, "first_step_seconds": first[program]}
        row |= {"peak_memory": peak[program], "matmul_fraction": floor / seconds, "matrix_rate": rate}
        rows.append(row | {"steps": counts[program], "times": taken})
    if stats := mesh.devices.flat[0].memory_stats():
        rows[0]["allocator_peak"] = stats.get("peak_bytes_in_use")
    for row in rows[1:]:
        ratio = float(np.median(np.divide(row["times"], times[implementation])))
        row |= {"peer": row["implementation"], "version": said["version"], "ratio": ratio}
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    lines = [
        "| size | attention | step, ms | tokens/s | ours / theirs | of the matrix rate | first step, s | memory, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        ratio = f"{row['ratio']:.2f}" if "peer" in row else ""
        memory = "" if row["peak_memory"] is None else f"{row['peak_memory'] / 2**20:,.0f}"
        speed = (f"{row['seconds'] * 1e3:,.1f}", f"{row['tokens_per_second']:,.0f}", ratio)
        share, first = f"{row['matmul_fraction']:.0%}", f"{row['first_step_seconds']:.1f}"
        lines.append(f"| {' | '.join((row['size'], row['implementation'], *speed, share, first, memory))} |")
    return "\n".join(lines)


def main(config: Benchmark) -> None:
    """Measure, print the table, write the result."""
    start, load, config = time.perf_counter(), os.getloadavg()[0], chosen(config)
    device, mesh, rows = jax.devices()[0], make_mesh(config.mesh), []
    for name in config.sizes:
        with Console(stderr=True).status(name):
            rows += measure(config, name, mesh)
    facts = {"platform": device.platform, "kind": device.device_kind, "devices": mesh.size, "cores": os.cpu_count()}
    result = {
        "benchmark": "train_step",
        "device": facts | {"load_before": load, "load_after": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "configuration": asdict(config),
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{markdown(result)}\n\n{path}: {result['seconds']:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, default=CONFIG, description=__doc__))
