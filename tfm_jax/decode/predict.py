"""From strings to numbers: what a model with a head for rows gives for each line."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float

from tfm_jax.config import require
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.text import buckets, padded
from tfm_jax.models import Model
from tfm_jax.sharding import on_host

ROWS = ("sequence", "regression", "pooled", "embedding")


def predict(
    model: Model,
    params: dict,
    tokenizer: Tokenizer,
    lines: list[str],
    *,
    tokens_per_batch: int = 4096,
    where: Callable[[int], str] = lambda i: f"input:{i + 1}",
    progress: Callable[[int], None] = lambda done: None,
) -> Float[np.ndarray, "n C"]:
    """What the head gives for each line: logits of its labels, the numbers of a regression, or a vector of width D.

    A line stands between start and end, as in training, or in what the tokenizer's template puts around it. Lines of
    similar length share a batch, in few shapes; the result of a line does not depend on the others. `where(i)` is what
    errors call line i, counted from 0, and `progress` is told how many lines are done. Raises `ValueError`, before any
    work, for a model with another head and for a line that is too long for it, and `FloatingPointError` when the model
    gives NaN.
    """
    head = getattr(model.config, "head", None)
    require(head in ROWS, f"a {model.config.family!r} model with head {head!r} gives nothing for a line: {ROWS} do")
    before, after = ((tokenizer.bos_id,), (tokenizer.eos_id,)) if tokenizer.template is None else tokenizer.template
    rows = [[*before, *ids, *after] or [tokenizer.bos_id] for ids in tokenizer.encode(lines)]
    longest = model.config.max_length
    for i, ids in enumerate(rows):
        require(
            len(ids) <= longest,
            f"{where(i)}: the line has {len(ids)} tokens with start and end, the model accepts {longest}: shorten it",
        )
    found: list[np.ndarray | None] = [None] * len(lines)
    done = 0
    for members, length in buckets(dict(enumerate(map(len, rows))), longest=longest, budget=tokens_per_batch):
        tokens, segment_ids = padded([rows[i] for i in members], length, tokenizer.pad_id)
        numbers = on_host(_apply(params, tokens, segment_ids, model=model))
        if np.isnan(numbers).any():
            raise FloatingPointError("the model gives NaN: its parameters are not finite, load another checkpoint")
        for i, own in zip(members, numbers, strict=False):
            found[i] = own
        done += len(members)
        progress(done)
    width = len(model.config.labels) or model.config.d_model
    return np.stack(found) if found else np.zeros((0, width), np.float32)


@functools.partial(jax.jit, static_argnames="model")
def _apply(params, tokens, segment_ids, *, model):
    return model.apply(params, tokens, segment_ids=segment_ids)
