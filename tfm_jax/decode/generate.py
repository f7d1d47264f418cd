"""Generation with a model, with an encoder or without: prefill in one pass, then one token a step through the cache.

Everything runs on the device. `generate` is the whole of it; `begin` and `continued` are its two halves for callers who
want tokens as they come.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfm_jax.config import require
from tfm_jax.decode.beam import PENALTIES, BeamSettings, Hypotheses, beam_search, is_eos, require_eos, scores_of
from tfm_jax.decode.constraints import Constraints, History, constrained
from tfm_jax.decode.sampling import GREEDY, Sampling, draw
from tfm_jax.decode.top import best_of_rows
from tfm_jax.models import Model
from tfm_jax.ops.cache import KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """What each row has read before it writes. Padding may stand on either side, and makes no difference."""

    tokens: Any
    """`B P`, at least one token a row; for an encoder-decoder the start of text, and a prefix to continue."""
    segment_ids: Any
    """`B P`: 1 on tokens, 0 on padding."""
    source_tokens: Any = None
    """`B S`, what the encoder reads; None for a model without an encoder."""
    source_segment_ids: Any = None
    requests: Any = None
    """`B`: a number for each row, on which its random draws depend; None: 0, 1, ...."""


@dataclass(frozen=True)
class SampleSettings:
    """The static switches of sampling and greedy search."""

    max_new_tokens: int
    """T, the longest output, the end included. Unit: tokens."""
    eos_ids: tuple[int, ...]
    """The tokens that end an output."""
    pad_id: int
    """What stands after the end."""
    sampling: Sampling = GREEDY
    constraints: Constraints = Constraints()
    length_penalty: float = 0.0
    """Of the score that comes with an output, as in `BeamSettings`; it decides nothing."""
    normalization: str = "fairseq"

    def __post_init__(self):
        require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}: at least 1 is needed")
        require_eos(self.eos_ids)
        require(self.normalization in PENALTIES, f"normalization is {self.normalization!r}: one of {[*PENALTIES]}")


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def generate(params: dict, prompts: Prompts, *, model: Model, settings: BeamSettings | SampleSettings) -> Hypotheses:
    """The best `settings.beams` outputs of each row by beam search, or the one that is drawn (greedy: the likeliest).

    The prompt is not part of the output, and log p is that of the output given the prompt. A row's result depends on
    the other rows and on padding no more than rounding does. Raises `ValueError` where prompt and max_new_tokens exceed
    what the model accepts.
    """
    check(prompts, model, settings)
    if isinstance(settings, BeamSettings) and settings.beams > 1:
        return _beam_generate(params, prompts, model, settings)
    if isinstance(settings, BeamSettings):
        shared = ("max_new_tokens", "eos_ids", "pad_id", "constraints")
        sampling = SampleSettings(**{name: getattr(settings, name) for name in shared})
    else:
        sampling = settings
    writing = begin(params, prompts, model=model, settings=sampling)
    writing = _continued(params, writing, jnp.int32(sampling.max_new_tokens), model, sampling)
    return finished(writing, settings)


def check(prompts: Prompts, model: Model, settings: BeamSettings | SampleSettings) -> None:
    """Raise `ValueError` for what the model cannot hold and for constraints that do not fit it."""
    longest, P, T = model.config.max_length, prompts.tokens.shape[1], settings.max_new_tokens
    require(
        P + T - 1 <= longest,
        f"prompts of {P} tokens and max_new_tokens {T} need {P + T - 1} positions, the model accepts {longest}",
    )
    settings.constraints.check(model.config.vocab_size, T)
    require(max(settings.eos_ids) < model.config.vocab_size, f"eos_ids {settings.eos_ids} are not in the vocabulary")


class Writing(NamedTuple):
    """Outputs of B rows under way."""

    step: Int[Array, ""]
    """Tokens written so far."""
    previous: Int[Array, "B"]
    """What the model reads next."""
    tokens: Int[Array, "B T"]
    log_probs: Float[Array, "B"]
    """Sum of log p of the tokens by the model alone, before constraints, temperature and filters."""
    ended: Bool[Array, "B"]
    prompt: History
    requests: Int[Array, "B"]
    cache: KVCache


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def begin(params: dict, prompts: Prompts, *, model: Model, settings: SampleSettings) -> Writing:
    """Read the prompts: nothing is written yet. Raises as `generate` does."""
    check(prompts, model, settings)
    B, T = prompts.tokens.shape[0], settings.max_new_tokens
    history, cache = _prefill(params, prompts, model, T)
    requests = jnp.arange(B, dtype=jnp.int32) if prompts.requests is None else prompts.requests
    return Writing(
        step=jnp.int32(0),
        previous=_last(history),
        tokens=jnp.full((B, T), settings.pad_id, jnp.int32),
        log_probs=jnp.zeros(B, jnp.float32),
        ended=jnp.zeros(B, bool),
        prompt=history,
        requests=requests,
        cache=cache,
    )


@functools.partial(jax.jit, static_argnames=("model", "settings"), donate_argnames="writing")
def continued(
    params: dict, writing: Writing, steps: Int[Array, ""], *, model: Model, settings: SampleSettings
) -> Writing:
    """Up to `steps` more tokens for every row that has not ended."""
    return _continued(params, writing, writing.step + steps, model, settings)


def _continued(params, writing, until, model, settings):
    seed, T, decode_step = jax.random.key(settings.sampling.seed), settings.max_new_tokens, model.stepper(params)
    until = jnp.minimum(until, T)

    def advance(now):
        positions = (now.prompt.lengths - 1 + now.step)[:, None]
        logits, cache = decode_step(now.previous[:, None], now.cache, positions=positions)
        logits = logits[:, 0].astype(jnp.float32)
        scores = logits
        if settings.constraints.change_something:
            scores = constrained(
                logits,
                *now.prompt.extended(now.tokens, now.step),
                constraints=settings.constraints,
                step=now.step,
                max_new_tokens=T,
                eos_ids=settings.eos_ids,
            )
        keys = jax.vmap(lambda request: jax.random.fold_in(jax.random.fold_in(seed, request), now.step))(now.requests)
        token = draw(scores, keys, settings.sampling)
        # NaN where nothing may follow: an index into a row of -inf would look like a choice
        possible = scores.max(axis=-1) > -jnp.inf
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - best_of_rows(logits, 1)[2]
        token = jnp.where(now.ended, settings.pad_id, token)
        return now._replace(
            step=now.step + 1,
            previous=token,
            tokens=now.tokens.at[:, now.step].set(token),
            log_probs=now.log_probs + jnp.where(now.ended, 0.0, jnp.where(possible, chosen, jnp.nan)),
            ended=now.ended | is_eos(token, settings.eos_ids),
            cache=cache,
        )

    return jax.lax.while_loop(lambda now: (now.step < until) & ~now.ended.all(), advance, writing)


def finished(writing: Writing, settings: BeamSettings | SampleSettings) -> Hypotheses:
    """What is written, as `Hypotheses` with one for each row."""
    ends = is_eos(writing.tokens, settings.eos_ids)
    lengths = jnp.where(writing.ended, jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, writing.step)
    scores = scores_of(writing.log_probs, lengths, settings)
    whole = Hypotheses(writing.tokens, scores, writing.log_probs, lengths, writing.ended)
    return jax.tree.map(lambda x: x[:, None], whole)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Tree:
    """The cache of B rows whose W hypotheses are branches: they share the columns of what they have in common, and
    nothing is copied when one continues another."""

    cache: KVCache
    visible: Any
    """`B W S`: the columns of each hypothesis' past."""

    def grown(self, columns: int) -> "_Tree":
        more = columns - self.cache.columns
        return _Tree(self.cache.grown(columns), jnp.pad(self.visible, [(0, 0), (0, 0), (0, more)]))

    def continuing(self, rows: Int[Array, "R"]) -> "_Tree":
        """Hypothesis w of a row continues the one that stands at rows[b W + w]."""
        B, W, _ = self.visible.shape
        parents = rows.reshape(B, W) % W
        return replace(self, visible=jnp.take_along_axis(self.visible, parents[..., None], axis=1))


def _beam_generate(params, prompts, model, settings):
    B, W, T = prompts.tokens.shape[0], settings.beams, settings.max_new_tokens
    history, cache = _prefill(params, prompts, model, 0)
    decode_step = model.stepper(params)
    read = cache.columns
    own_columns = jnp.broadcast_to(jnp.eye(W, dtype=bool)[None], (B, W, W))

    def step(tokens, tree, position):
        visible = jax.lax.dynamic_update_slice(
            tree.visible, own_columns, (jnp.int32(0), jnp.int32(0), tree.cache.length)
        )
        positions = jnp.broadcast_to((history.lengths - 1 + position)[:, None], (B, W))
        logits, cache = decode_step(tokens.reshape(B, W), tree.cache, positions=positions, visible=visible)
        return logits.reshape(B * W, -1), _Tree(cache, visible)

    stages = [(end, functools.partial(_Tree.grown, columns=read + W * end)) for end in _stages(T)]
    return beam_search(
        step,
        _Tree(cache, jnp.ones((B, W, read), bool)),
        _last(history),
        take_rows=_Tree.continuing,
        settings=settings,
        history=history,
        stages=stages,
    )


def _stages(T):
    """Where the cache grows: a step reads all its columns, so it has no more than about twice as many as are used.

    Each stage is one more copy of the step to compile.
    """
    ends, end = [], 16
    while end < T:
        ends.append(end)
        end = 3 * end
    return [*ends, T]


def _prefill(params, prompts, model, room):
    """What the rows have read, and a cache that holds all of it but the last token, with room for more columns."""
    real = prompts.segment_ids > 0
    # what stands in padding, an id that no vocabulary has included, must not reach the products
    tokens = jnp.where(real, prompts.tokens, 0)
    B, P = prompts.tokens.shape
    # to the left, wherever the padding stood
    order = jnp.argsort(~real, axis=1, stable=True)
    history = History(jnp.take_along_axis(tokens, order, axis=1), real.sum(axis=1, dtype=jnp.int32))
    inputs = {}
    if prompts.source_tokens is not None:
        segment_ids = prompts.source_segment_ids
        source = jnp.where(segment_ids > 0, prompts.source_tokens, 0)
        encoded = model.encode(params, source, source_segment_ids=segment_ids)
        inputs = {"encoded": encoded, "encoded_segment_ids": segment_ids}
    cache = model.init_cache(params, B, P - 1 + room, **inputs)
    if P > 1:
        column = jnp.arange(P - 1, dtype=jnp.int32)[None]
        positions = jnp.where(column < history.lengths[:, None] - 1, column, -1)
        _, cache = model.decode_step(params, history.tokens[:, :-1], cache, positions=positions)
    return history, cache


def _last(history):
    """What the model reads first; an id that no table has, and so NaN, for a row that has read nothing."""
    last = jnp.take_along_axis(history.tokens, jnp.maximum(history.lengths[:, None] - 1, 0), axis=1)[:, 0]
    return jnp.where(history.lengths > 0, last, -1)
