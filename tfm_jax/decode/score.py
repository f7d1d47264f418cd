"""The likelihood of given text: of targets under an encoder-decoder, perplexity under a decoder-only model."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.text import buckets, padded, require_encoder, require_no_encoder
from tfm_jax.models import Model
from tfm_jax.ops.blocks import vocabulary_logits

Row = dict[str, list[int]]


class Score(NamedTuple):
    """log p of a text, its end included: natural logarithm, and how many tokens it is the sum of."""

    log_prob: float
    tokens: int


class Perplexity(NamedTuple):
    """How well texts are predicted, their ends included."""

    nats_per_token: float
    tokens: int
    per_token: float
    """exp of the nats per token."""
    per_word: float | None
    """exp of the nats per word, which does not depend on the tokenizer; None where words were not counted."""


@functools.partial(jax.jit, static_argnames="model")
def log_likelihood(model: Model, params: dict, batch: dict[str, Any]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """By row, the sum of weights x log p(target), in nats, and the sum of weights, both float32.

    `batch` is what the objectives of training take: tokens, targets, weights (`B T`), where given segment_ids and
    positions, for an encoder-decoder source_tokens and what belongs to them. One forward pass over whole sequences; the
    logits, of one row at a time, are float32. What has no weight counts for nothing; a target outside the vocabulary
    that has one gives NaN.
    """
    sources = [batch["source_tokens"]] if "source_tokens" in batch else []
    names = ("source_segment_ids", "segment_ids", "source_positions", "positions")
    inputs = {name: batch[name] for name in names if name in batch}
    x = model.features(params, *sources, batch["tokens"], **inputs)
    table, bias = model.output_layer(params)

    def row(case):
        x_TD, targets, weights = case
        logits = vocabulary_logits(x_TD[None], table)[0]
        logits = logits if bias is None else logits + bias.astype(jnp.float32)[None]
        index = jnp.where(targets < 0, table.shape[0], targets)[:, None]
        target_logit = jnp.take_along_axis(logits, index, axis=1, mode="fill", fill_value=jnp.nan)[:, 0]
        log_p = target_logit - jax.nn.logsumexp(logits, axis=-1)
        return jnp.where(weights > 0, log_p * weights, 0.0).sum()

    weights = batch["weights"].astype(jnp.float32)
    return jax.lax.map(row, (x, batch["targets"], weights)), weights.sum(axis=1)


def score_targets(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    sources: list[str],
    targets: list[str],
    *,
    tokens_per_batch: int = 4096,
) -> list[Score]:
    """log p of each target given its source, under an encoder-decoder.

    The score that `translate` gives the same tokens is log_prob / penalty(tokens) ** length_penalty. Tokens are those
    that the tokenizer makes of the text, with what its template puts around a text, where it has one; a model may have
    written it with others. `tokens_per_batch`: budget of a batch, rows x padded length of the longer side. Raises
    `ValueError` for a model without an encoder, for counts that differ and, by its number, for a text longer than the
    model, and `FloatingPointError` when the model gives NaN.
    """
    require_encoder(model)
    require(len(sources) == len(targets), f"{len(sources)} sources, {len(targets)} targets: one for each is needed")
    read, written = tokenizer.encode_sources(sources), tokenizer.encode_sources(targets)
    written = [ids if ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id] for ids in written]
    longest = model.config.max_length
    for name, side in (("sources", read), ("targets", written)):
        for i, ids in enumerate(side):
            require(
                len(ids) <= longest,
                f"{name} {i}: the text has {len(ids)} tokens with its end, the model accepts {longest}: split it",
            )
    rows = [
        {"source_tokens": source} | _predicted((tokenizer.bos_id,), target)
        for source, target in zip(read, written, strict=True)
    ]
    return _scores(model, params, tokenizer, rows, tokens_per_batch)


def perplexity(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    texts: list[str],
    *,
    words: int | None = None,
    stride: int | None = None,
    tokens_per_batch: int = 4096,
) -> Perplexity:
    """How well a decoder-only model predicts texts, each from its start to its end, which counts as a token.

    The start is bos, or what the tokenizer's template puts before a text, where it has one that puts something.

    words: how many words all texts have, for the perplexity per word. stride: texts longer than the model's L tokens
    are read in windows of L that begin every so many tokens; what two windows share counts in the first alone, so that
    after the first L each token is predicted from at least L - stride others. Without a stride they are refused, by
    their number, before any work. `tokens_per_batch`: budget of a batch, rows x padded length. Raises `ValueError` also
    for a model with an encoder and for no text, and `FloatingPointError` when the model gives NaN.
    """
    require_no_encoder(model)
    require(bool(texts), "there are no texts: the perplexity of nothing is not defined")
    require(words is None or words >= 1, f"words is {words}: at least 1, or None")
    longest = model.config.max_length
    require(
        stride is None or 1 <= stride <= longest,
        f"stride is {stride}: from 1 to {longest}, the model's length, or None",
    )
    before = () if tokenizer.template is None else tokenizer.template[0]
    rows = []
    for i, ids in enumerate(tokenizer.encode(texts)):
        row = _predicted(before or (tokenizer.bos_id,), [*ids, tokenizer.eos_id])
        size = len(row["targets"])
        require(
            size <= longest or stride is not None,
            f"texts {i}: the text has {size} tokens with its end, the model accepts {longest}: split it, or "
            f"give a stride, for instance {(longest + 1) // 2}",
        )
        rows += _windows(row, longest, stride or longest)
    scores = _scores(model, params, tokenizer, rows, tokens_per_batch)
    nats, tokens = -sum(score.log_prob for score in scores), sum(score.tokens for score in scores)
    return Perplexity(nats / tokens, tokens, _exp(nats / tokens), None if words is None else _exp(nats / words))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _predicted(start: tuple[int, ...], ids: list[int]) -> Row:
    """Each id from the start and those before it."""
    weights = [0] * (len(start) - 1) + [1] * len(ids)
    return {"tokens": [*start, *ids[:-1]], "targets": [*start[1:], *ids], "weights": weights}


def _windows(row: Row, longest: int, stride: int) -> Iterator[Row]:
    """Pieces of at most `longest` tokens; each target has its weight in the first piece that holds it."""
    length, end = len(row["targets"]), 0
    for start in range(0, max(1, length - longest + stride), stride):
        piece = {name: values[start : start + longest] for name, values in row.items()}
        yield piece | {"weights": [w * (start + at >= end) for at, w in enumerate(piece["weights"])]}
        end = start + longest


def _scores(model: Model, params: dict, tokenizer: Tokenizer, rows: list[Row], tokens_per_batch: int) -> list[Score]:
    """In batches of few shapes."""
    scores: list[Any] = [None] * len(rows)
    sizes = {i: max(len(part) for part in row.values()) for i, row in enumerate(rows)}
    for which, length in buckets(sizes, longest=model.config.max_length, budget=tokens_per_batch):
        batch = {}
        for name in rows[0]:
            values, segment_ids = padded([rows[i][name] for i in which], length, tokenizer.pad_id)
            batch[name] = values
            if name.endswith("tokens"):
                batch[name.replace("tokens", "segment_ids")] = segment_ids
        batch["weights"] = np.where(batch["segment_ids"] > 0, batch["weights"], 0).astype(np.float32)
        log_probs, counts = jax.device_get(log_likelihood(model, params, batch))
        if np.isnan(log_probs).any():
            raise FloatingPointError("log p is NaN: the parameters are not finite, load another checkpoint")
        for i, log_prob, count in zip(which, log_probs, counts, strict=False):
            scores[i] = Score(float(log_prob), int(count))
    return scores
