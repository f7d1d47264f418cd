"""Generation with a model: prefill, then one token a step through the cache, on the device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tfm_jax.decode.beam import BeamSettings, Hypotheses, beam_search
from tfm_jax.models import Model
from tfm_jax.ops.cache import KVCache


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def generate(
    params: dict,
    source_tokens: Int[Array, "B S"],
    source_segment_ids: Int[Array, "B S"],
    first_tokens: Int[Array, "B"],
    *,
    model: Model,
    settings: BeamSettings,
) -> Hypotheses:
    """The best `settings.beams` outputs of an encoder-decoder for each source, by beam search (greedy with one beam).

    Source segment ids are 1 on tokens and 0 on padding; decoding starts from `first_tokens`, which are not part of the
    output. A row's result does not depend on the other rows or on its padding. Raises `ValueError` if max_new_tokens
    exceeds what the model accepts.
    """
    if settings.max_new_tokens > model.config.max_length:
        raise ValueError(
            f"max_new_tokens is {settings.max_new_tokens}, the model accepts {model.config.max_length} tokens"
        )
    encoded = model.encode(params, source_tokens, source_segment_ids=source_segment_ids)
    spread = lambda x: jnp.repeat(x, settings.beams, axis=0)  # noqa: E731
    cache = model.init_cache(
        params,
        first_tokens.shape[0] * settings.beams,
        settings.max_new_tokens,
        encoded=spread(encoded),
        encoded_segment_ids=spread(source_segment_ids),
    )

    def step(tokens, cache, position):
        positions = jnp.broadcast_to(position, tokens[:, None].shape)
        logits, cache = model.decode_step(params, tokens[:, None], cache, positions=positions)
        return logits[:, 0], cache

    if settings.beams == 1:
        return greedy_search(step, cache, first_tokens, settings=settings)
    return beam_search(step, cache, first_tokens, take_rows=KVCache.swap_beams, settings=settings)


class _Greedy(NamedTuple):
    position: Array
    previous: Int[Array, "B"]
    tokens: Int[Array, "B T"]
    log_probs: Array
    ended: Bool[Array, "B"]
    state: object


def greedy_search(step, state, first_tokens: Int[Array, "B"], *, settings: BeamSettings) -> Hypotheses:
    """The likeliest token at each step, the lowest among equals, until eos or max_new_tokens: `Hypotheses` with W = 1.

    `step` and `state` are those of `beam_search`; finished rows emit only padding.
    """
    B, T = first_tokens.shape[0], settings.max_new_tokens

    def advance(search):
        logits, state = step(search.previous, search.state, search.position)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        token = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        gained = jnp.where(search.ended, 0.0, jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0])
        token = jnp.where(search.ended, settings.pad_id, token)
        return _Greedy(
            position=search.position + 1,
            previous=token,
            tokens=search.tokens.at[:, search.position].set(token),
            log_probs=search.log_probs + gained,
            ended=search.ended | (token == settings.eos_id),
            state=state,
        )

    start = _Greedy(
        position=jnp.int32(0),
        previous=first_tokens.astype(jnp.int32),
        tokens=jnp.full((B, T), settings.pad_id, jnp.int32),
        log_probs=jnp.zeros(B, jnp.float32),
        ended=jnp.zeros(B, bool),
        state=state,
    )
    final = jax.lax.while_loop(lambda s: (s.position < T) & ~s.ended.all(), advance, start)
    ends_at = jnp.argmax(final.tokens == settings.eos_id, axis=1).astype(jnp.int32) + 1
    lengths = jnp.where(final.ended, ends_at, T)
    scores = final.log_probs / lengths.astype(jnp.float32) ** settings.length_penalty
    whole = Hypotheses(final.tokens, scores, final.log_probs, lengths, final.ended)
    return jax.tree.map(lambda x: x[:, None], whole)
