"""What a model sees of its data, as numbers and strings: lengths by split, shapes and padding, rows as text."""

import contextlib
import itertools
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from tfm_jax.config import Data
from tfm_jax.data.batches import Batch, Batches, stream
from tfm_jax.data.corruption import restore_spans
from tfm_jax.data.examples import Examples, encode
from tfm_jax.data.plans import Shape
from tfm_jax.data.sources import Split, Text
from tfm_jax.data.tasks import Lengths, Ragged
from tfm_jax.data.tokenizer import Tokenizer

_WIDTH = 108
_BARS = 60  # characters that the bars of all sides share


@dataclass(frozen=True)
class SplitLook:
    """A split in numbers."""

    origin: str
    """Its files, or what made it, and the line where it begins if that is not the first."""
    read: int
    """Examples before any was left out, cut, or joined to a stream."""
    dropped: int
    cut: int
    """`dropped` were left out as too long, `cut` are pieces of texts that were (both as in `Examples`)."""
    lengths: Lengths
    """Of each side of each example, as it is batched; an upper bound where an epoch draws it."""
    num_tokens: int
    """Of all examples on all sides, exact."""
    unknown: tuple[float, ...] | None
    """Share of unknown tokens in each text of an example; None: the vocabulary has no such token."""


class ShapeUse(NamedTuple):
    """How many batches of a shape an epoch has, and how many tokens they hold."""

    shape: Shape
    batches: int
    tokens: int

    @property
    def name(self) -> str:
        """Rows x length, or both lengths."""
        return f"{self.shape.rows} x {', '.join(map(str, self.shape.lengths))}"

    @property
    def padding(self) -> int:
        """Cells without a token."""
        return self.batches * self.shape.cells - self.tokens


def side_names(sides: int) -> tuple[str, ...]:
    """What the sides of an example are called."""
    return ("source", "target") if sides == 2 else ("text",)


def look_at(text: Text, examples: Examples, tokenizer: Tokenizer) -> SplitLook:
    """Look at a text and the examples that were made of it."""
    files = ", ".join(dict.fromkeys(text.names))
    return SplitLook(
        origin=files if text.lines[0] == 1 else f"{files}, from line {text.lines[0]:,}",
        read=len(text),
        dropped=examples.dropped,
        cut=examples.cut,
        lengths=examples.lengths,
        num_tokens=int(examples.num_tokens.sum()),
        unknown=None
        if tokenizer.unk_id is None
        else tuple(_share(side, tokenizer.unk_id, tokenizer.eos_id) for side in examples.texts),
    )


def _share(side: Ragged, unknown: int, end: int) -> float:
    """Of the tokens that are no end of a text, those that are unknown."""
    return float((side.ids == unknown).sum() / max((side.ids != end).sum(), 1))


def look_at_splits(
    data: Data, texts: dict[Split, Text], tokenizer: Tokenizer, training: Examples, *, vocab_size: int
) -> dict[str, SplitLook]:
    """Each text once, under the names of all splits that it serves ("validation and test").

    Raises `ValueError` as `encode`; but a test text is never batched, so what is too long in it is left out.
    """
    looks = {}
    for text in {id(text): text for text in texts.values()}.values():
        splits = [split for split, other in texts.items() if other is text]
        lenient = replace(data, too_long="drop") if splits == ["test"] and data.too_long == "error" else data
        examples = training if "train" in splits else encode(text, tokenizer, lenient, vocab_size=vocab_size)
        looks[" and ".join(splits)] = look_at(text, examples, tokenizer)
    return looks


def histogram(lengths: Lengths, *, rows: int = 10) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, "rows sides"]]:
    """(first length of each row, examples in it by side) for at most so many rows of equally many lengths."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // rows)
    starts = np.arange(low, high + 1, width)
    return starts, np.stack([np.bincount((side - low) // width, minlength=len(starts)) for side in lengths.T], axis=1)


def shape_uses(batches: Batches) -> list[ShapeUse]:
    """Each shape in the first epoch; others have as many batches of it, with tokens that differ a little."""
    examples, held = batches.examples, {shape: [] for shape in batches.shapes}
    for step in range(batches.steps_per_epoch):
        members = batches.members(step)
        held[members.shape].append(members.examples)
    uses = []
    for shape, found in held.items():
        indices = np.concatenate(found).tolist()
        texts = tuple(Ragged.of([side[i] for i in indices]) for side in examples.texts)
        uses.append(ShapeUse(shape, len(found), int(examples.task.num_tokens(texts).sum())))
    return uses


def measure_rate(batches: Batches, *, workers: int = 0, seconds: float = 2.0) -> float:
    """Tokens a second, those of all sides, that `stream` delivers after its first batch.

    Measured over so many seconds, or over an epoch if that is shorter; a few batches wait already when it begins.
    """
    tokens = 0
    with contextlib.closing(stream(batches, 0, batches.steps_per_epoch + 1, workers=workers)) as made:
        next(made)
        began = time.monotonic()
        for _, batch in made:
            tokens += sum(np.count_nonzero(segments) for segments in _segments(batch))
            if time.monotonic() - began >= seconds:
                break
        return tokens / max(time.monotonic() - began, 1e-9)


def _segments(batch: Batch) -> list[np.ndarray]:
    return [batch[name] for name in ("source_segment_ids", "segment_ids") if name in batch]


def describe(data: Data, looks: dict[str, SplitLook], batches: Batches, rate: float) -> str:
    """The splits, the training batches and the loader's rate (tokens a second), for people."""
    splits = [_describe_split(name, look, data.max_length) for name, look in looks.items()]
    return "\n\n".join([*splits, _describe_batches(data, batches, rate)])


def _describe_split(name: str, look: SplitLook, max_length: int) -> str:
    facts = [
        f"{len(look.lengths):,} examples made of {look.read:,} read, {look.num_tokens:,} tokens",
        f"longer than {max_length:,} tokens: {look.dropped:,} left out, others cut into {look.cut:,} pieces",
        f"unknown tokens: {_describe_unknown(look.unknown)}",
    ]
    if look.num_tokens < look.lengths.sum():
        facts.append(
            "each epoch draws where a text is cut in two: the lengths of the sides are upper bounds, two share a row"
        )
    table = [f"{'':8}{'tokens':>13}{'mean':>10}{'median':>10}{'95%':>10}{'longest':>10}"]
    for side, lengths in zip(side_names(look.lengths.shape[1]), look.lengths.T, strict=True):
        middle, most = np.quantile(lengths, [0.5, 0.95])
        table.append(
            f"{side:8}{lengths.sum():13,}{lengths.mean():10,.1f}{middle:10,.1f}{most:10,.1f}{lengths.max():10,}"
        )
    body = textwrap.indent("\n".join([*facts, "", *table, "", *_bars(look.lengths)]), "  ")
    return f"{name}: {look.origin}\n{body}"


def _describe_unknown(shares: tuple[float, ...] | None) -> str:
    if shares is None:
        return "0, the vocabulary has none"
    if len(shares) == 1:
        return f"{shares[0]:.2%}"
    return f"{shares[0]:.2%} of the first text, {shares[1]:.2%} of the second"


def _bars(lengths: Lengths) -> list[str]:
    starts, counts = histogram(lengths)
    lasts = [*(starts[1:] - 1), lengths.max()]
    size, names = _BARS // counts.shape[1], side_names(counts.shape[1])
    lines = [f"{'length':14}" + "  ".join(f"{name:{size + 10}}" for name in names).rstrip()]
    for first, last, row in zip(starts, lasts, counts, strict=True):
        if row.any():
            bars = "  ".join(f"{_bar(count / counts.max(), size):{size}}{count:10,}" for count in row.tolist())
            lines.append(f"{f'{first:,}' if first == last else f'{first:,} - {last:,}':14}{bars}")
    return lines


def _bar(share: float, size: int) -> str:
    """A bar of eighths of a character; what is not nothing is seen."""
    eighths = max(round(share * size * 8), int(share > 0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _describe_batches(data: Data, batches: Batches, rate: float) -> str:
    names, number = side_names(len(batches.shapes[0].lengths)), len(batches.shapes)
    by = f"{data.workers} worker processes" if data.workers else "threads"
    lines = [
        f"training batches: {data.batching}, {number} {'shapes' if number > 1 else 'shape'}, "
        f"{batches.steps_per_epoch:,} updates an epoch, {batches.padding_share:.1%} padding",
        f"  the loader ({by}) delivers {rate:,.0f} tokens/s",
        "",
        "  " + "".join(f"{title:>10}" for title in ("rows", *names, "batches", "tokens", "padding")),
    ]
    for use in shape_uses(batches):
        numbers = (use.shape.rows, *use.shape.lengths, use.batches, use.tokens)
        share = use.padding / (use.padding + use.tokens)
        lines.append("  " + "".join(f"{number:10,}" for number in numbers) + f"{share:10.1%}")
    return "\n".join(lines)


def show_batches(batches: Batches, tokenizer: Tokenizer, *, count: int, rows: int) -> str:
    """The first rows of the first batches (`show_row`)."""
    blocks = []
    for step in range(count):
        batch, shape = batches[step], batches.members(step).shape
        lengths = " and ".join(f"{length:,}" for length in shape.lengths)
        blocks.append(f"batch {step}: {shape.rows:,} rows of {lengths} cells")
        blocks += [show_row(batch, row, tokenizer) for row in range(min(rows, shape.rows))]
    return "\n\n".join(blocks)


def show_row(batch: Batch, row: int, tokenizer: Tokenizer) -> str:
    """A row as text, its padding counted; of a packed row each segment behind its number.

    Special tokens stand by their names. Where tokens are masked, pieces stand one by one and the chosen ones as [what
    the model reads → what it is to predict]. Spans come with the text that both sides restore.
    """
    cells = np.concatenate([segments[row] for segments in _segments(batch)])
    lines = [f"row {row}: {np.count_nonzero(cells == 0):,} of {cells.size:,} cells are padding"]
    for segment in np.unique(cells[cells > 0]).tolist():
        own = {name: _own(batch, name, row, segment) for name in batch}
        number = f"{segment} " if "positions" in batch else ""
        for name, text in _shown(own, tokenizer):
            start = f"  {number + name:11} "
            lines += _wrapped(start, _printable(text))
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    # no line ends inside a mark; a no-break space of the text itself is escaped by now
    kept = text.replace(" → ", "\xa0→\xa0")
    indents = {"initial_indent": start, "subsequent_indent": " " * len(start)}
    return [line.replace("\xa0", " ") for line in textwrap.wrap(kept, _WIDTH, break_on_hyphens=False, **indents)]


def _own(batch: Batch, name: str, row: int, segment: int) -> np.ndarray:
    """What belongs to one segment of a row."""
    values = np.asarray(batch[name][row])
    if not values.ndim:
        return values
    side = "source_" if name.startswith("source_") else ""
    return values[batch[f"{side}segment_ids"][row] == segment]


def _shown(own: Batch, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """(name, text) of each part of an example."""
    tokens, targets = own["tokens"], own["targets"]
    if "source_tokens" in own:
        source = own["source_tokens"]
        yield "source", _text(source, tokenizer)
        yield "target", _text(targets, tokenizer)
        if np.isin(source, tokenizer.sentinel_ids).any():
            restored = restore_spans(source, targets, tokenizer.sentinel_ids, eos_id=tokenizer.eos_id)
            yield "restored", _text(restored, tokenizer)
    elif "labels" in own:
        numbers = np.unique(own["token_types"]).tolist()
        for number in numbers:
            name = f"text {number + 1}" if len(numbers) > 1 else "text"
            yield name, _text(tokens[own["token_types"] == number], tokenizer)
        yield "label", str(own["labels"])
    elif own["weights"].all():
        if tokens[0] != tokenizer.bos_id:
            yield "after", "".join(tokenizer.pieces(tokens[:1].tolist()))
        yield "text", _text(targets, tokenizer)
    else:
        yield "masked", _marked(own, tokenizer)


def _text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    runs = [(special, [*run]) for special, run in itertools.groupby(ids.tolist(), tokenizer.special_ids.__contains__)]
    return " ".join(
        part for special, run in runs for part in (tokenizer.pieces(run) if special else tokenizer.decode([run]))
    )


def _marked(own: Batch, tokenizer: Tokenizer) -> str:
    # a piece that begins a word begins with a space
    read, wanted = (
        [piece.replace(" ", "␣") for piece in tokenizer.pieces(own[name].tolist())] for name in ("tokens", "targets")
    )
    chosen = own["weights"] > 0
    return " ".join(f"[{r} → {w}]" if c else r for r, w, c in zip(read, wanted, chosen.tolist(), strict=True))


def _printable(text: str) -> str:
    """Line ends and control characters, which would disturb a terminal, as they are written in Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
