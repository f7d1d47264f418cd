"""What people see of a run: metrics.jsonl, the progress bar, plots.

Of several processes the first one (`is_first_process`) writes and shows all of it; the others call the same
functions, since what is drawn may have to be computed by all of them.
"""

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import Model
from tfm_jax.sharding import is_first_process, on_host


class Metrics:
    """metrics.jsonl: one JSON object a line, each with its `step`."""

    def __init__(self, path: Path, *, after_step: int):
        """Open for appending; lines of steps beyond `after_step`, which a killed run left, are removed."""
        if not is_first_process():
            self._file = open(os.devnull, "a")
            return
        kept = [line for line in read_metrics(path) if line["step"] <= after_step] if path.exists() else []
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append a line; it is on its way to the disk when this returns."""
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; an unfinished last line, which a kill may leave, does not count."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


class ProgressBar:
    """A bar on stderr with step, loss, learning rate, rate and time left; where stderr is a file, only the notes."""

    def __init__(self):
        self.console = _console()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        left = TextColumn("{task.fields[left]}")
        self._progress = _progress(*columns, left, console=self.console)
        self._task = self._progress.add_task("compiling", total=1.0, left="")

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def update(self, share: float, description: str, *, seconds_left: float) -> None:
        """Show the share of the run that is done, in [0, 1], and what is going on."""
        minutes, seconds = divmod(round(seconds_left), 60)
        left = f"{minutes}:{seconds:02} left"
        self._progress.update(self._task, completed=share, description=description, left=left)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False)


class LineCounter:
    """A bar on stderr that counts lines; nothing where stderr is a file."""

    def __init__(self, what: str, total: int):
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = _progress(*columns, console=_console())
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def update(self, done: int) -> None:
        """So many lines are done."""
        self._progress.update(self._task, completed=done)


def _console() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=not is_first_process())


def _progress(*columns: ProgressColumn, console: Console) -> Progress:
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


def show(text: str) -> None:
    """Print to stdout, in the first process."""
    if is_first_process():
        print(text)


def write_whole(path: Path, text: str) -> None:
    """Write a text file such that a crash leaves the old content or the new, never a part; by the first process."""
    if not is_first_process():
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def plot_curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy of training and validation, and the learning rate, against updates, as a PNG."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    titles = {"loss": "loss (nats per target token)", "accuracy": "token accuracy", "learning_rate": "learning rate"}
    for axis, (name, label) in zip(axes, titles.items(), strict=True):
        for key, style in ((name, "-"), (f"validation_{name}", "o-")):
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                size = 3 if len(points) < 60 else 0
                axis.plot(*zip(*points, strict=True), style, markersize=size, label=key.replace("_", " "))
        axis.set(xlabel="updates", ylabel=label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    _save(figure, path, dpi=120)


def plot_data(
    path: Path, lengths: dict[str, np.ndarray], *, sides: Sequence[str], shapes: Sequence[tuple[str, int, int]]
) -> None:
    """Lengths of examples (`n sides` for each split) by side, and what the batches of each shape hold, as a PNG.

    `shapes` are (name, cells with tokens, cells with padding).
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(sides) + 1, figsize=(4.4 * (len(sides) + 1), 3.6), layout="constrained")
    every = np.concatenate([*lengths.values()])
    width = -(-(int(np.ptp(every)) + 1) // 50)
    bins = np.arange(every.min(), every.max() + width + 1, width) - 0.5
    for number, (axis, side) in enumerate(zip(axes, sides, strict=False)):
        for split, values in lengths.items():
            shares = np.full(len(values), 100.0 / len(values))
            axis.hist(values[:, number], bins, weights=shares, histtype="step", label=f"{split} ({len(values):,})")
        axis.set(xlabel=f"length of the {side} (tokens)", ylabel="examples (%)")
        axis.legend()
    names, tokens, padding = zip(*shapes, strict=True)
    places = range(len(names))
    axes[-1].barh(places, tokens, label="tokens")
    axes[-1].barh(places, padding, left=tokens, label="padding")
    axes[-1].set_yticks(places, names)
    axes[-1].invert_yaxis()
    axes[-1].set(xlabel="cells of an epoch", ylabel="rows x lengths")
    axes[-1].locator_params(axis="x", nbins=4)
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1].legend()
    _save(figure, path, dpi=120)


def plot_alignments(
    path: Path, model: Model, params: dict, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, layer: int
) -> None:
    """Cross-attention of one layer (mean over heads) for (source, output) pairs, tokens on the axes, as a PNG.

    Row: the token being written; column: the source token; dark is a large weight. Rows add up to one.
    """
    import matplotlib.pyplot as plt

    weights, source_ids, output_ids = _read_weights(model, params, tokenizer, pairs, layer)
    figure, axes = plt.subplots(1, len(pairs), figsize=(5.2 * len(pairs), 5), layout="constrained", squeeze=False)
    for axis, heads, source, output in zip(axes[0], weights["cross"], source_ids, output_ids, strict=True):
        image = _draw(axis, heads.mean(axis=0), _labels(tokenizer, output), _labels(tokenizer, source))
        axis.set(xlabel="source token (attended to)", ylabel="output token (being written)")
    figure.colorbar(image, ax=axes, label=f"cross-attention weight, layer {layer}, mean over heads", shrink=0.8)
    _save(figure, path, dpi=120)


def plot_heads(
    path: Path, model: Model, params: dict, tokenizer: Tokenizer, pair: tuple[str, str], *, layer: int
) -> None:
    """Every head of one layer for a (source, output) pair, tokens on the axes, as a PNG.

    One row of pictures for each place: encoder and decoder (self-attention) and cross. In a picture a row is the token
    that looks, a column the token looked at; the decoder looks from what is already written.
    """
    import matplotlib.pyplot as plt

    weights, (source_ids,), (output_ids,) = _read_weights(model, params, tokenizer, [pair], layer)
    source, output = _labels(tokenizer, source_ids), _labels(tokenizer, output_ids)
    read = _labels(tokenizer, [tokenizer.bos_id, *output_ids[:-1]])
    places = {"encoder": (source, source), "decoder": (read, read), "cross": (output, source)}
    count = len(weights["cross"][0])
    figure, axes = plt.subplots(
        len(places), count, figsize=(3.2 * count, 3.2 * len(places)), layout="constrained", squeeze=False
    )
    for row, (place, (looking, looked_at)) in zip(axes, places.items(), strict=True):
        for head, (axis, one) in enumerate(zip(row, weights[place][0], strict=True)):
            image = _draw(axis, one, looking, looked_at)
            axis.set_title(f"{place}, head {head}", fontsize=9)
            axis.tick_params(labelsize=7)
    figure.colorbar(image, ax=axes, label=f"attention weight, layer {layer}", shrink=0.6)
    _save(figure, path, dpi=100)


def _read_weights(model, params, tokenizer, pairs, layer):
    """The weights of a layer for (source, output) pairs, by place `B N T S`, and the ids on their axes."""
    source_ids, output_ids = (
        # what a model wrote may have more tokens when it is read again
        [[*ids, tokenizer.eos_id][: model.config.max_length] for ids in tokenizer.encode(list(texts))]
        for texts in zip(*pairs, strict=True)
    )
    columns, rows = _padded(source_ids, tokenizer.pad_id), _padded(output_ids, tokenizer.pad_id)
    shifted = jnp.concatenate([jnp.full((len(pairs), 1), tokenizer.bos_id, jnp.int32), rows[:, :-1]], axis=1)
    read = jax.jit(functools.partial(model.attention_weights, layer=layer))
    # by their lengths: a padding id may be that of the end
    lengths = jnp.array([len(ids) for ids in source_ids], jnp.int32)
    segment_ids = (jnp.arange(columns.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.int32)
    weights = read(params, columns, shifted, source_segment_ids=segment_ids)
    return on_host(weights), source_ids, output_ids


def _save(figure, path: Path, *, dpi: int) -> None:
    import matplotlib.pyplot as plt

    if is_first_process():
        figure.savefig(path, dpi=dpi)
    plt.close(figure)


def _draw(axis, weights, looking, looked_at):
    """A matrix of weights with tokens on its axes; what is beyond them is padding."""
    shown = weights[: len(looking), : len(looked_at)]
    image = axis.imshow(shown, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axis.set_xticks(range(len(looked_at)), looked_at, rotation=90)
    axis.set_yticks(range(len(looking)), looking)
    return image


def _padded(sequences: list[list[int]], pad_id: int) -> jax.Array:
    length = max(map(len, sequences))
    return jnp.array([ids + [pad_id] * (length - len(ids)) for ids in sequences], jnp.int32)


def _labels(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Pieces as matplotlib may show them: spaces and control characters visible, no mathematics."""
    pieces = [piece.replace(" ", "␣").removesuffix("</w>").replace("$", r"\$") for piece in tokenizer.pieces(ids)]
    return ["".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in piece) for piece in pieces]
