"""From strings to strings: lines in, as many translations out, in order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from tfm_jax import config
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import generate
from tfm_jax.models import Model


@dataclass(frozen=True)
class Translation:
    """One hypothesis: its text, score (see `BeamSettings.length_penalty`), ids with the end, and whether it ended."""

    text: str
    score: float
    ids: tuple[int, ...]
    ended: bool


BLANK = Translation("", 0.0, (), True)
TOO_LONG = Translation("", float("-inf"), (), False)


def translate(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    lines: list[str],
    *,
    decode: config.Decode,
    too_long: Literal["error", "drop"] = "error",
    name: str = "input",
    first_line: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[Translation]]:
    """The n-best translations of each line, best first; blank lines stay blank.

    Lines of similar length share a batch, in few shapes, so a file of any lengths compiles a handful of programs. The
    result of a line does not depend on the others. A line that is too long for the model is refused, by its number,
    before any work, or with too_long "drop" comes back as `TOO_LONG`; `name` is what errors call the input, whose first
    line has the number `first_line`. `progress` is told how many lines are done. Raises `FloatingPointError` when the
    model gives NaN.
    """
    # white space is not translated, so its length does not matter
    encoded = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode([line.strip() and line for line in lines])]
    longest = model.config.max_length
    for i, ids in enumerate(encoded):
        if len(ids) > longest and too_long == "error":
            raise ValueError(
                f"{name}:{first_line + i}: the line has {len(ids)} tokens with its end, the model accepts {longest}: "
                "split it into sentences"
            )
    results = [[BLANK] if len(ids) <= longest else [TOO_LONG] for ids in encoded]
    waiting = [i for i, line in enumerate(lines) if line.strip() and len(encoded[i]) <= longest]
    done = len(lines) - len(waiting)
    for first_try in (True, False):
        cut = []
        for rows, length in _batches(encoded, waiting, longest, decode):
            settings = _settings(tokenizer, decode, length=length if first_try else None)
            found = _search(model, params, tokenizer, [encoded[i] for i in rows], length, settings)
            for i, hypotheses in zip(rows, found, strict=True):
                # hypotheses that all ended had no use for more room; the others get all there is
                if settings.max_new_tokens < decode.max_new_tokens and not all(h.ended for h in hypotheses):
                    cut.append(i)
                else:
                    results[i], done = hypotheses, done + 1
            progress(done)
        waiting = cut
    return results


def one_line(text: str) -> str:
    """The text as a line of a file: a line feed that a model wrote must not shift what follows."""
    return text.replace("\n", " ")


def _settings(tokenizer: Tokenizer, decode: config.Decode, *, length: int | None) -> BeamSettings:
    """The search's settings, with room for twice the source and a little where a first try makes sense.

    The cache has a column for each token there may be, and most outputs are much shorter than the limit.
    Without early stopping the limit itself decides when a row is done, so it is given whole.
    """
    limit = decode.max_new_tokens
    if length is not None and decode.early_stopping:
        limit = min(limit, 2 * length + 8)
    return BeamSettings(
        beams=decode.beams,
        max_new_tokens=limit,
        length_penalty=decode.length_penalty,
        early_stopping=decode.early_stopping,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
    )


def _batches(
    encoded: list[list[int]], rows: list[int], longest: int, decode: config.Decode
) -> Iterator[tuple[list[int], int]]:
    """Rows of similar length with the length they are padded to, longest first (memory runs out early or never)."""
    buckets: dict[int, list[int]] = {}
    for i in rows:
        length = 8
        while length < len(encoded[i]):
            length += max(4, length // 2 // 4 * 4)  # 8, 12, 16, 24, 36, 52, ...
        buckets.setdefault(min(length, longest), []).append(i)
    for length in sorted(buckets, reverse=True):
        # a power of two, so that a last batch, which is filled up to one, adds few shapes
        count = 1 << max(0, (decode.tokens_per_batch // (decode.beams * length)).bit_length() - 1)
        for start in range(0, len(buckets[length]), count):
            yield buckets[length][start : start + count], length


def _search(model, params, tokenizer, sources, length, settings) -> list[list[Translation]]:
    # filled up with a row that is there: an empty one would not know when to end
    B = 1 << (len(sources) - 1).bit_length()
    rows = [*sources, *[sources[0]] * (B - len(sources))]
    tokens = np.full((B, length), tokenizer.pad_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    segment_ids = (np.arange(length, dtype=np.int32)[None] < lengths[:, None]).astype(np.int32)
    first = np.full(B, tokenizer.bos_id, np.int32)
    found = jax.device_get(generate(params, tokens, segment_ids, first, model=model, settings=settings))
    if np.isnan(found.scores).any():
        raise FloatingPointError("the model's logits are NaN: its parameters are not finite, load another checkpoint")
    ids = [
        [tuple(found.tokens[b, w, : found.lengths[b, w]].tolist()) for w in range(settings.beams)]
        for b in range(len(sources))
    ]
    texts = tokenizer.decode([list(hypothesis) for row in ids for hypothesis in row])
    return [
        [
            Translation(texts[b * settings.beams + w], float(found.scores[b, w]), ids[b][w], bool(found.ended[b, w]))
            for w in range(settings.beams)
            if found.lengths[b, w] > 0
        ]
        for b in range(len(sources))
    ]
