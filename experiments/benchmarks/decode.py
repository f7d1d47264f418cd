"""How fast is beam search, beside CTranslate2 on the same weights?

64 sources of 20 tokens, exactly 24 new tokens each, vocabulary 8,000, float32, random weights. Compared: time, and what
is written. Expected on two CPU cores at beam 4: at least the speed of CTranslate2 on base (6 + 6 layers, 512 wide)
and about as fast on tiny (4 + 4 layers, 128 wide).

In about a minute on two CPU cores, two with peers (accelerators: not measured):

    pip install ctranslate2
    python experiments/benchmarks/decode.py --json runs/decode.json --peers

Programs run by turns, so that whatever else the machine does meets them alike; a ratio is the median of the rounds'
ratios. The floor is the time that the matrix products of the search take at the rate of one large product, measured in
the same run.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import Prompts, generate
from tfm_jax.models import Model, build
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.ops import sinusoidal_table

PAD, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    json: str
    """Where the result goes."""
    sizes: tuple[Literal["tiny", "base"], ...]
    beams: tuple[int, ...]
    peers: bool
    """Measure CTranslate2 too, by turns with ours."""
    vocab_size: int
    sentences: int
    source_length: int
    new_tokens: int
    rounds: int
    matrix_size: int


CONFIG = Benchmark(
    json="runs/decode.json",
    sizes=("tiny", "base"),
    beams=(1, 4),
    peers=False,
    vocab_size=8_000,
    sentences=64,
    source_length=20,
    new_tokens=24,
    rounds=5,
    matrix_size=2_048,
)
SIZES = {
    "tiny": {"d_model": 128, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 4, "num_decoder_layers": 4},
    "base": {"d_model": 512, "num_heads": 8, "d_ff": 2_048, "num_encoder_layers": 6, "num_decoder_layers": 6},
}


def random_model(size: str, config: Benchmark) -> tuple[Model, dict]:
    """A model of this size that never ends a sentence: the embedding of EOS is far from everything."""
    model = build(TransformerConfig(config.vocab_size, **SIZES[size], max_length=128, dropout=Dropout(0.0, 0.0)))
    params = model.init(jax.random.key(0))
    # the last norm gives every vector a 1 in its first element, which EOS alone answers to, with -1e4
    norm = params["decoder"]["layers"]["feed_forward_norm"]
    norm["scale"], norm["bias"] = norm["scale"].at[-1, 0].set(0.0), norm["bias"].at[-1, 0].set(1.0)
    table = params["embedding"]["table"]
    params["embedding"]["table"] = table.at[:, 0].set(0.0).at[EOS, 0].set(-1e4)
    return model, params


def ours(model: Model, params: dict, sources: np.ndarray, beams: int, config: Benchmark) -> tuple[Callable, dict]:
    """A function that searches and gives the best tokens, and the cost of compiling it."""
    start = np.full((len(sources), 1), BOS, np.int32)
    prompts = jax.device_put(Prompts(start, np.ones_like(start), sources, np.ones_like(sources)))
    settings = BeamSettings(beams, config.new_tokens, 1.0, True, (EOS,), PAD)
    began = time.perf_counter()
    compiled = generate.lower(params, prompts, model=model, settings=settings).compile()
    cost = {"compile_seconds": time.perf_counter() - began}
    cost["temporary_mib"] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: np.asarray(jax.device_get(compiled(params, prompts).tokens[:, 0])), cost


def ctranslate2_peer(model: Model, params: dict, sources: np.ndarray, beams: int, config: Benchmark) -> Callable:
    """The same search by CTranslate2 with the same weights, on all cores."""
    import ctranslate2

    words = ["<pad>", "<s>", "</s>", *(f"t{i}" for i in range(3, config.vocab_size))]
    with tempfile.TemporaryDirectory() as directory:
        save_ctranslate2(model, params, words, Path(directory) / "model")
        translator = ctranslate2.Translator(
            str(Path(directory) / "model"), device="cpu", intra_threads=os.cpu_count(), compute_type="float32"
        )
    lines = [[words[token] for token in source] for source in sources]
    number = {word: i for i, word in enumerate(words)}
    options = {"max_decoding_length": config.new_tokens, "min_decoding_length": config.new_tokens}

    def search():
        found = translator.translate_batch(
            lines, beam_size=beams, length_penalty=1.0, max_batch_size=len(lines), **options
        )
        return np.array([[number[word] for word in result.hypotheses[0]] for result in found])

    return search


def save_ctranslate2(model: Model, params: dict, words: list[str], directory: Path) -> None:
    """Write the parameters in CTranslate2's format."""
    from ctranslate2.specs import TransformerSpec

    config, host = model.config, jax.tree.map(np.asarray, params)
    depth = (config.num_encoder_layers, config.num_decoder_layers)
    spec = TransformerSpec.from_config(depth, config.num_heads, pre_norm=False)

    def linear(target, *pairs):
        matrices = [weight.reshape(-1, bias.size) for weight, bias in pairs]
        target.weight = np.ascontiguousarray(np.concatenate(matrices, axis=1).T)
        target.bias = np.concatenate([bias.reshape(-1) for _, bias in pairs])

    def norm(target, layer):
        target.gamma, target.beta = layer["scale"], layer["bias"]

    def attention(target, layer, *groups):
        for part, names in zip(target.linear, (*groups, ("output",)), strict=True):
            linear(part, *((layer[name], layer[f"{name}_bias"]) for name in names))

    for side, stack in ((spec.encoder, host["encoder"]), (spec.decoder, host["decoder"])):
        embeddings = side.embeddings[0] if side is spec.encoder else side.embeddings
        embeddings.weight = host["embedding"]["table"]
        side.position_encodings.encodings = np.asarray(sinusoidal_table(config.max_length, config.d_model))
        for i, target in enumerate(side.layer):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], stack["layers"])
            attention(target.self_attention, layer["attention"], ("query", "key", "value"))
            norm(target.self_attention.layer_norm, layer["attention_norm"])
            if side is spec.decoder:
                attention(target.attention, layer["cross_attention"], ("query",), ("key", "value"))
                norm(target.attention.layer_norm, layer["cross_attention_norm"])
            linear(target.ffn.linear_0, (layer["feed_forward"]["up"], layer["feed_forward"]["up_bias"]))
            linear(target.ffn.linear_1, (layer["feed_forward"]["down"], layer["feed_forward"]["down_bias"]))
            norm(target.ffn.layer_norm, layer["feed_forward_norm"])
    spec.encoder.embeddings[0].multiply_by_sqrt_depth = True
    spec.decoder.embeddings.multiply_by_sqrt_depth = True
    spec.decoder.projection.weight = host["embedding"]["table"]
    spec.decoder.projection.bias = np.zeros(len(words), np.float32)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.validate()
    spec.optimize(quantization="float32")
    directory.mkdir()
    spec.save(str(directory))


def products(config: Benchmark, size: str, beams: int) -> float:
    """Floating-point operations in the matrix products of a whole search."""
    D, F, L = (SIZES[size][name] for name in ("d_model", "d_ff", "num_decoder_layers"))
    rows, S, T = config.sentences, config.source_length, config.new_tokens
    encoder = rows * S * L * (4 * D * D + 2 * D * F + 2 * S * D)
    cross = rows * S * L * 2 * D * D
    step = L * (6 * D * D + 2 * D * F + 2 * S * D) + config.vocab_size * D
    own_attention = L * 2 * D * beams * (T + 1) / 2  # a hypothesis reads the columns of all beams
    return 2.0 * (encoder + cross + rows * beams * T * (step + own_attention))


def matrix_rate(size: int) -> float:
    """Floating-point operations per second of one float32 product of square matrices, the best of five."""
    x = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    return 2.0 * size**3 / min(seconds(lambda: product(x, x).block_until_ready())[1] for _ in range(5))


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of the work and the time it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def measure(config: Benchmark, size: str, beams: int, rate: float) -> list[dict[str, Any]]:
    """A row for each program: ours, and CTranslate2's where it is asked for."""
    model, params = random_model(size, config)
    sources = np.random.default_rng(1).integers(3, config.vocab_size, (config.sentences, config.source_length))
    sources = sources.astype(np.int32)
    program, cost = ours(model, params, sources, beams, config)
    programs = {"tfm_jax": program}
    if config.peers:
        programs["ctranslate2"] = ctranslate2_peer(model, params, sources, beams, config)
    tokens = {name: work() for name, work in programs.items()}
    times = {name: [] for name in programs}
    for _ in range(config.rounds):
        for name, work in programs.items():
            times[name].append(seconds(work)[1])
    new = config.sentences * config.new_tokens
    rows = [
        {"size": size, "beams": beams, "program": name, "seconds": median(taken), "times": taken}
        | {"tokens_per_second": new / median(taken)}
        for name, taken in times.items()
    ]
    floor = products(config, size, beams) / rate
    rows[0] |= cost | {"floor_seconds": floor, "share_of_floor": floor / median(times["tfm_jax"])}
    for row in rows[1:]:
        ratios = [theirs / mine for mine, theirs in zip(times["tfm_jax"], times[row["program"]], strict=True)]
        same = (tokens["tfm_jax"] == tokens[row["program"]]).all(axis=1).mean()
        row |= {"peer": row["program"], "ratio": median(ratios), "same_outputs": float(same)}
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    lines = [
        "| size | beams | program | new tokens/s | ours / theirs | same outputs | share of the floor | compile, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        ratio, same = (f"{row['ratio']:.2f}", f"{row['same_outputs']:.0%}") if "peer" in row else ("", "")
        own = (f"{row['share_of_floor']:.0%}", f"{row['compile_seconds']:.1f}") if "peer" not in row else ("", "")
        cells = (row["size"], row["beams"], row["program"], f"{row['tokens_per_second']:,.0f}", ratio, same, *own)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(config: Benchmark) -> None:
    """Measure, print the table, write the result."""
    console, device = Console(stderr=True), jax.devices()[0]
    rate, rows = matrix_rate(config.matrix_size), []
    for size in config.sizes:
        for beams in config.beams:
            with console.status(f"{size}, {beams} beams"):
                rows += measure(config, size, beams, rate)
            console.print(f"{size}, {beams} beams: done")
    result = {
        "benchmark": "decode",
        "device": {"platform": device.platform, "kind": device.device_kind, "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "matrix_rate": rate,
        "configuration": asdict(config),
        "rows": rows,
    }
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{rate / 1e9:.0f} GFLOP/s in a large product\n\n{markdown(result)}\n\n{path}")


if __name__ == "__main__":
    main(tyro.cli(Benchmark, default=CONFIG, description=__doc__))
