"""What a model makes of some examples, as text that people can judge: filled masks, reconstructed spans."""

import functools

import jax
import numpy as np

from tfm_jax import config
from tfm_jax.data.batches import Batch
from tfm_jax.data.corruption import restore_spans
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.generate import Prompts, generate
from tfm_jax.decode.text import search_settings
from tfm_jax.models import Model
from tfm_jax.sharding import on_host


@functools.partial(jax.jit, static_argnames="model")
def _likeliest(params, tokens, segment_ids, *, model):
    return model.apply(params, tokens, segment_ids=segment_ids).argmax(axis=-1)


def filled_masks(model: Model, params: dict, tokenizer: Tokenizer, batch: Batch, *, rows: int = 5) -> list[str]:
    """Rows of a batch with hidden tokens as text, each chosen place as [likeliest token | what stood there].

    A place that is right has the token alone.
    """
    found = on_host(_likeliest(params, batch["tokens"][:rows], batch["segment_ids"][:rows], model=model))
    lines = []
    for row, predicted in enumerate(found):
        live = batch["segment_ids"][row] == 1
        if not live.any():  # a row that only fills the batch
            continue
        chosen, kept = batch["weights"][row][live] > 0, batch["tokens"][row][live]
        own, right, texts = (
            [piece.strip() for piece in tokenizer.pieces(ids.tolist())]
            for ids in (predicted[live], batch["targets"][row][live], kept)
        )
        for i in np.flatnonzero(chosen):
            texts[i] = f"[{own[i]}]" if own[i] == right[i] else f"[{own[i]} | {right[i]}]"
        lines.append(" ".join(texts))
    return lines


def restored_spans(
    model: Model, params: dict, tokenizer: Tokenizer, batch: Batch, *, decode: config.Decode, rows: int = 5
) -> list[tuple[str, str]]:
    """(what the encoder reads, what the model writes for it), of rows of a batch with spans behind sentinels.

    The second is the text with the runs that the model wrote, or what it wrote if its sentinels are not those read.
    """
    rows = min(rows, int((batch["source_segment_ids"][:, 0] > 0).sum()))  # the others only fill the batch
    begun = np.full((rows, 1), tokenizer.bos_id, np.int32)
    sides = (batch["source_tokens"][:rows], batch["source_segment_ids"][:rows])
    prompts = Prompts(begun, np.ones_like(begun), sides[0], (sides[1] == 1).astype(np.int32))
    settings = search_settings(tokenizer, decode)
    found = on_host(generate(params, prompts, model=model, settings=settings))
    pairs = []
    for row in range(rows):
        source = sides[0][row][sides[1][row] == 1]
        written = found.tokens[row, 0, : found.lengths[row, 0]]
        try:
            text = restore_spans(source, written, tokenizer.sentinel_ids, eos_id=tokenizer.eos_id)
        except ValueError:
            text = written
        pairs.append(tuple(_text(ids, tokenizer) for ids in (source, text)))
    return pairs


def _text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([ids.tolist()])[0]
