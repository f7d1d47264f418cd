"""How much of a batch is padding, how fast are batches made, and does training wait for them?

Multi30k (English to German) in buckets of 4,096 tokens and packed; WikiText-2 packed, in buckets and in blocks of 512
tokens, with each corruption. Expected: at most 10 % padding in at most 16 shapes and at most 3 % packed, at least
500,000 tokens a second from one process, and a train loop that waits for input less than 2 % of its time.

In about six minutes on two CPU cores, of which half is for learning the vocabularies (accelerators: not measured):

    python experiments/benchmarks/data.py --dir DIR --json runs/data.json

DIR holds multi30k/tok/NAME.lc.norm.tok.LANG.gz and wikitext2/wiki.train.tokens.xz. The floor is the time that copying
the arrays of the same batches takes, measured in the same run.
"""

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import grain
import jax
import numpy as np
import tyro
from rich.console import Console

from tfm_jax.config import Corruption, Data, Optimizer, Run, Train
from tfm_jax.data.batches import Batch, Batches, make_batches, make_tokenizer, stream
from tfm_jax.data.sources import Text, read_split
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.train.loop import fit
from tfm_jax.train.report import read_metrics


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    dir: str
    """Folder of the data sets."""
    json: str
    """Where the result goes."""
    pairs: Run[TransformerConfig]
    """The small Transformer of Wu et al. (2021) on Multi30k, whose train loop is looked at."""
    text: Data
    text_vocab: int
    """Entries of the vocabulary of WikiText-2."""
    workers: tuple[int, ...]
    """Numbers of worker processes; 0 is threads."""
    batches: int
    """Batches that are timed in a round."""
    rounds: int
    steps: int
    """Updates of the train loop that are looked at, after as many that are not."""
    shapes: int
    """Shapes of batches in the train loop: each is compiled."""


CONFIG = Benchmark(
    dir="",
    json="runs/data.json",
    pairs=Run(
        run_dir="",
        model=TransformerConfig(
            vocab_size=9_712,
            max_length=256,
            d_model=128,
            d_ff=256,
            num_heads=4,
            num_encoder_layers=4,
            num_decoder_layers=4,
            dropout=Dropout(embedding=0.3, residual=0.3, attention=0.0, feed_forward=0.0),
        ),
        data=Data(
            train_source="tok/train.lc.norm.tok.en.gz",
            train_target="tok/train.lc.norm.tok.de.gz",
            validation_source="tok/val.lc.norm.tok.en.gz",
            validation_target="tok/val.lc.norm.tok.de.gz",
            tokenizer="word_bpe",
            merges=10_000,
            max_length=256,
            tokens_per_batch=4_096,
            num_buckets=16,
        ),
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=600, eps=1e-8, clip_norm=25.0),
        train=Train(steps=1),
    ),
    text=Data(
        train_source="wiki.train.tokens.xz",
        tokenizer="bpe",
        max_length=512,
        too_long="split",
        batching="packed",
        tokens_per_batch=8_192,
        num_buckets=16,
    ),
    text_vocab=8_000,
    workers=(0, 2),
    batches=200,
    rounds=5,
    steps=100,
    shapes=4,
)
LIMITS = {"buckets": 0.10, "packed": 0.03, "shapes": 16, "rate": 500_000.0, "wait": 0.02}


def cases(config: Benchmark) -> list[tuple[str, Data]]:
    """What is batched how: (data set, its configuration)."""
    pairs = replace(config.pairs.data, dir=str(Path(config.dir) / "multi30k"))
    text = replace(config.text, dir=str(Path(config.dir) / "wikitext2"))
    corrupted = [replace(text, corruption=Corruption(name=name)) for name in ("none", "mask", "spans", "prefix")]
    packed = [("multi30k", replace(pairs, batching="packed")), *(("wikitext2", each) for each in corrupted)]
    return [
        ("multi30k", pairs),
        *packed,
        ("wikitext2", replace(text, batching="buckets")),
        *(("wikitext2", replace(each, batching="blocks")) for each in corrupted[:3]),
    ]


def tokens_of(batch: Batch) -> int:
    """Tokens of a batch, without padding."""
    return sum(int((values > 0).sum()) for name, values in batch.items() if name.endswith("segment_ids"))


def timed(batches: Batches, config: Benchmark, workers: int) -> tuple[float, list[float]]:
    """Tokens a second of the stream, the median of the rounds and all of them; the first batches are not counted."""
    rates = []
    for index in range(config.rounds):
        start = index * config.batches
        made = stream(batches, start, start + config.batches + 8, workers=workers)
        for _ in range(8):
            next(made)
        began, tokens = time.perf_counter(), sum(tokens_of(batch) for _, batch in made)
        rates.append(tokens / (time.perf_counter() - began))
    return median(rates), rates


def copy_rate(batches: Batches, count: int) -> float:
    """Tokens a second at which the finished arrays of batches are copied: no loader is faster."""
    made = [batches[step] for step in range(count)]
    began = time.perf_counter()
    for batch in made:
        for values in batch.values():
            np.copy(values)
    return sum(map(tokens_of, made)) / (time.perf_counter() - began)


def row(name: str, data: Data, batches: Batches, workers: int, config: Benchmark) -> dict[str, Any]:
    """What one way of making batches costs and wastes."""
    rate, rates = timed(batches, config, workers)
    return {
        "data": name,
        "batching": data.batching,
        "corruption": data.corruption.name,
        "workers": workers,
        "examples": len(batches.examples),
        "shapes": len(batches.shapes),
        "padding_share": batches.padding_share,
        "tokens_per_second": rate,
        "slowest": min(rates),
        "floor_tokens_per_second": copy_rate(batches, min(config.batches, batches.steps_per_epoch)),
    }


def waiting(config: Benchmark, text: Text) -> dict[str, Any]:
    """The share of its time that the train loop of the small Multi30k model waits for input, after compiling."""
    data = replace(config.pairs.data, num_buckets=config.shapes)
    with tempfile.TemporaryDirectory() as directory:
        limits = Train(steps=2 * config.steps, log_every=config.steps, checkpoint_every=2 * config.steps)
        run = replace(config.pairs, data=data, train=limits, run_dir=directory)
        fit(run, train=text, validation=text.split(100)[0])
        # the first lines hold the compilation of every shape, beside which no wait would show
        last = [line for line in read_metrics(Path(directory) / "metrics.jsonl") if "input_wait" in line][-1]
    return {"input_wait": last["input_wait"], "tokens_per_second": last["tokens_per_second"], "steps": config.steps}


def measure(config: Benchmark, console: Console) -> dict[str, Any]:
    """All rows, and the wait of the train loop."""
    began, load, texts, tokenizers, rows = time.time(), os.getloadavg()[0], {}, {}, []
    for name, data in cases(config):
        vocab = config.pairs.model.vocab_size if name == "multi30k" else config.text_vocab
        if name not in texts:
            console.print(f"{name}: reading and learning its vocabulary")
            texts[name] = read_split(data, "train")
            # one vocabulary with everything that any corruption needs
            tokenizers[name] = _tokenizer(data, texts[name], vocab)
        batches = make_batches(data, texts[name], tokenizers[name], vocab_size=vocab)
        for workers in config.workers if data.corruption.name in ("none", "spans") else (0,):
            rows.append(row(name, data, batches, workers, config))
            console.print(_line(rows[-1]))
    loop = waiting(config, texts["multi30k"])
    device = {"platform": platform.machine(), "cores": os.cpu_count(), "load_before": load}
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    return {
        "benchmark": "data",
        # places on one machine mean nothing on another
        "configuration": {name: value for name, value in asdict(config).items() if name not in ("dir", "json")},
        "device": device | {"load_after": os.getloadavg()[0]},
        "versions": versions | {"grain": grain.__version__},
        "seconds": time.time() - began,
        "rows": rows,
        "train_loop": loop,
    }


def _tokenizer(data: Data, text: Text, vocab_size: int) -> Tokenizer:
    if len(text.columns) == 2:
        return make_tokenizer(data, text, vocab_size=vocab_size)
    return Tokenizer.train(text.source, kind=data.tokenizer, vocab_size=vocab_size, mask=True, sentinels=100)


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the module's docstring expects: name, measured, limit, holds."""
    found = []

    def claim(name, value, limit, *, most=True):
        found.append({"claim": name, "measured": value, "limit": limit, "holds": (value <= limit) is most})

    plain = [row for row in result["rows"] if row["corruption"] == "none" and row["workers"] == 0]
    one = {(row["data"], row["batching"]): row for row in plain}
    buckets = one["multi30k", "buckets"]
    claim("padding of Multi30k in buckets", buckets["padding_share"], LIMITS["buckets"])
    claim("shapes of Multi30k in buckets", buckets["shapes"], LIMITS["shapes"])
    claim("padding of WikiText-2 packed", one["wikitext2", "packed"]["padding_share"], LIMITS["packed"])
    slowest = min(row["tokens_per_second"] for row in result["rows"] if row["workers"] == 0)
    claim("tokens/s of the slowest way from one process", slowest, LIMITS["rate"], most=False)
    claim("share of the train loop's time spent waiting", result["train_loop"]["input_wait"], LIMITS["wait"])
    return found


def markdown(result: dict[str, Any]) -> str:
    """The claims and a table."""
    device = result["device"]
    lines = [f"cpu, {device['cores']} cores.", ""]
    for each in claims(result):
        holds = "" if each["holds"] else " (not met)"
        lines.append(f"- {each['claim']}: {each['measured']:,.4g}, limit {each['limit']:,.4g}{holds}")
    names = ("data", "batching", "corruption", "workers", "shapes", "padding", "tokens/s", "slowest round", "floor")
    lines += ["", "| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    return "\n".join([*lines, *(_line(row) for row in result["rows"]), ""])


def _line(row: dict[str, Any]) -> str:
    rates = (f"{row[name]:,.0f}" for name in ("tokens_per_second", "slowest", "floor_tokens_per_second"))
    first = (row["data"], row["batching"], row["corruption"], str(row["workers"]), str(row["shapes"]))
    return "| " + " | ".join((*first, f"{row['padding_share']:.2%}", *rates)) + " |"


def main(config: Benchmark) -> None:
    """Measure, write the JSON, print the table."""
    if not config.dir:
        raise SystemExit("give the folder that holds multi30k/tok and wikitext2: --dir DIR")
    path = Path(config.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    result = measure(config, console)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, default=CONFIG, description=__doc__))
