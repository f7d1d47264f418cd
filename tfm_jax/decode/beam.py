"""Exact, batched beam search as one `lax.while_loop` over a step function; knows nothing of models."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tfm_jax.config import require

State = Any
Step = Callable[[Array, State, Array], tuple[Array, State]]
TakeRows = Callable[[State, Array], State]


@dataclass(frozen=True)
class BeamSettings:
    """The static switches of a search. Raises `ValueError` when built with values that have no meaning."""

    beams: int
    """W, hypotheses kept at each step; 1 is greedy search."""
    max_new_tokens: int
    """T, the longest output, eos included. Unit: tokens."""
    length_penalty: float
    """alpha of score = log p / length ** alpha, either sign; 0 compares plain log p."""
    early_stopping: bool
    """True: a row is done once W hypotheses have ended. False: once no live one can beat them."""
    eos_id: int
    """The token that ends a hypothesis."""
    pad_id: int
    """What stands after it. It is written, never fed to the model."""

    def __post_init__(self):
        for name, low in {"beams": 1, "max_new_tokens": 1, "eos_id": 0, "pad_id": 0}.items():
            value = getattr(self, name)
            require(type(value) is int and value >= low, f"{name} is {value!r}: an int of at least {low} is expected")
        alpha = self.length_penalty
        require(
            type(alpha) in (int, float) and math.isfinite(alpha), f"length_penalty is {alpha!r}: give a finite number"
        )
        # float32 ends at 1e38; 1e30 leaves room for log p itself.
        require(
            abs(alpha) * math.log10(self.max_new_tokens) <= 30,
            f"length_penalty is {alpha}: {self.max_new_tokens} ** {alpha} leaves float32, give one nearer to 0",
        )
        require(type(self.early_stopping) is bool, f"early_stopping is {self.early_stopping!r}: give True or False")


class Hypotheses(NamedTuple):
    """The W best of each of B rows, best first.

    Where a row has fewer hypotheses than beams the last entries are empty: scores and log_probs -inf, length 0, all
    pad.
    """

    tokens: Int[Array, "B W T"]
    """int32: eos included where it ended, pad after it; T = max_new_tokens."""
    scores: Float[Array, "B W"]
    """float32, descending: log_probs / lengths ** length_penalty."""
    log_probs: Float[Array, "B W"]
    """float32, natural logarithm, summed over the tokens, eos included."""
    lengths: Int[Array, "B W"]
    """int32, eos included. Unit: tokens."""
    ended: Bool[Array, "B W"]
    """False where it was cut at max_new_tokens (and in empty entries)."""


class _Search(NamedTuple):
    """What the loop carries. Live is what has log_probs > -inf; a row without it is done and its pool stays."""

    position: Array  # int32 scalar: tokens chosen so far
    previous: Array  # B*W int32: what step is fed next
    tokens: Array  # B W T int32
    log_probs: Array  # B W float32, descending
    pool: Hypotheses  # the best that ended
    poisoned: Array  # B bool: a live hypothesis met NaN or +inf
    state: State


def beam_search(
    step: Step,
    state: State,
    first_tokens: Int[Array, " B"],
    *,
    take_rows: TakeRows,
    settings: BeamSettings,
) -> Hypotheses:
    """Search for the sequences of highest log p / length ** alpha (Wu et al. 2016, eq. 14 with lp = length ** alpha).

    `step(tokens, state, position) -> (logits, state)` reads the last token of every hypothesis (B*W int32, at first
    `first_tokens`, repeated) and gives the next one's logits (B*W V, any float); position is an int32 scalar, 0 at the
    first call. `state` is a pytree with B*W rows, beam w of row b in row b*W + w, and `take_rows(state, rows) -> state`
    gathers its rows (rows: B*W int32). With one beam there is nothing to gather and it is not called.

    Each step takes the 2W likeliest extensions of the live hypotheses. Those that end in eos and rank among the first W
    enter the pool, which keeps the W best scores; the best W that do not end stay live. One beam takes one extension,
    so it is greedy search. What is live at max_new_tokens enters the pool too, with `ended` False. Among equals the
    better beam comes first, then the lower token. What has probability zero is no hypothesis.

    A row is done, and nothing in it changes any more, once nothing is live in it or the pool is full and, without
    early_stopping, its worst score is at least what any live hypothesis can still reach. As log p only falls, with the
    log p of the best live one that is log p / max_new_tokens ** alpha for alpha > 0, and log p / (its length + 1) **
    alpha for alpha <= 0. Then the result is that of a search which never stops early. (The optimal stopping of Huang
    et al. 2017, for the W best and this score.)

    Log-softmax and scores are float32 whatever the logits. A row in which a live hypothesis meets logits that are NaN
    or +inf comes back with NaN scores and log_probs over pad, length 0. Raises `ValueError` for first_tokens that are
    not B, logits that are not B*W V and an eos_id outside the vocabulary.
    """
    require(first_tokens.ndim == 1, f"first_tokens has shape {first_tokens.shape}: one token a row (B) is expected")
    B, W, T = first_tokens.shape[0], settings.beams, settings.max_new_tokens
    nothing = jnp.full((B, W), -jnp.inf, jnp.float32)
    blank = jnp.full((B, W, T), settings.pad_id, jnp.int32)
    empty = Hypotheses(blank, nothing, nothing, jnp.zeros((B, W), jnp.int32), jnp.zeros((B, W), bool))
    start = _Search(
        position=jnp.int32(0),
        previous=jnp.repeat(first_tokens.astype(jnp.int32), W),
        tokens=blank,
        log_probs=nothing.at[:, 0].set(0.0),  # W equal live hypotheses would give every extension W times
        pool=empty,
        poisoned=jnp.zeros(B, bool),
        state=state,
    )
    advance = functools.partial(_advance, step=step, take_rows=take_rows, settings=settings)
    final = lax.while_loop(lambda s: (s.position < T) & (s.log_probs > -jnp.inf).any(), advance, start)
    # Rows that are done have nothing live left: what is live now was cut.
    best = _keep_best(final.pool, _hypotheses(final.tokens, final.log_probs, T, settings, ended=False))
    lost = empty._replace(scores=nothing * jnp.nan, log_probs=nothing * jnp.nan)
    return jax.tree.map(lambda x, y: jnp.where(_align(final.poisoned, x), x, y), lost, best)


def _advance(search: _Search, *, step: Step, take_rows: TakeRows, settings: BeamSettings) -> _Search:
    """One token more for every row that is not done."""
    (B, W), position = search.log_probs.shape, search.position
    logits, state = step(search.previous, search.state, position)
    _check_logits(logits, B * W, settings.eos_id)
    log_probs, parents, tokens, broken = _best_extensions(logits, search.log_probs)
    ends = tokens == settings.eos_id

    def extended(parents_BW, tokens_BW):
        return _take(search.tokens, parents_BW).at[:, :, position].set(tokens_BW)

    ending = jnp.where(ends, log_probs, -jnp.inf)[:, :W]
    sequences = extended(parents[:, :W], tokens[:, :W])
    pool = _keep_best(search.pool, _hypotheses(sequences, ending, position + 1, settings, ended=True))

    log_probs, ranks = lax.top_k(jnp.where(ends, -jnp.inf, log_probs), W)
    parents, tokens = _take(parents, ranks), _take(tokens, ranks)
    done = _is_done(log_probs[:, 0], pool.scores[:, -1], position + 1, settings)
    rows = jnp.arange(B, dtype=jnp.int32)[:, None] * W + parents
    return _Search(
        position=position + 1,
        previous=tokens.reshape(B * W),
        tokens=extended(parents, tokens),
        log_probs=jnp.where(done[:, None], -jnp.inf, log_probs),
        pool=pool,
        poisoned=search.poisoned | broken,
        state=state if W == 1 else take_rows(state, rows.reshape(B * W)),
    )


def _check_logits(logits: Array, rows: int, eos_id: int) -> None:
    fits = logits.ndim == 2 and logits.shape[0] == rows
    require(fits, f"step gave logits of shape {logits.shape}: ({rows}, V) is expected, a row for each beam")
    V = logits.shape[1]
    require(eos_id < V, f"eos_id is {eos_id} but step gives logits for {V} tokens: no hypothesis could end")


def _best_extensions(logits: Array, live_log_probs: Array) -> tuple[Array, Array, Array, Array]:
    """B*W V, B W -> log_probs, parents (beams), tokens of the min(2W, W V) best extensions of each row; broken (B).

    First the best of each beam by its logits, then the best of those. It saves writing B W V sums, and tokens that
    float32 sums can no longer tell apart keep the order of their logits, as they must for one beam to be greedy.
    """
    B, W = live_log_probs.shape
    V = logits.shape[1]
    K = 1 if W == 1 else min(2 * W, W * V)
    k = min(K, V)
    logits_BWV = logits.astype(jnp.float32).reshape(B, W, V)
    normalizers = jax.nn.logsumexp(logits_BWV, axis=-1)
    live = live_log_probs > -jnp.inf
    broken = (live & ~(normalizers < jnp.inf)).any(axis=1)
    best_BWk, tokens_BWk = lax.top_k(logits_BWV, k)
    # -inf - -inf, a dead end, would be NaN, and the rank of NaN is anyone's guess.
    possible_BWk = (live & ~broken[:, None])[..., None] & (best_BWk > -jnp.inf)
    sums_BWk = live_log_probs[..., None] + (best_BWk - normalizers[..., None])
    log_probs, chosen = lax.top_k(jnp.where(possible_BWk, sums_BWk, -jnp.inf).reshape(B, W * k), K)
    return log_probs, chosen // k, _take(tokens_BWk.reshape(B, W * k), chosen), broken


def _is_done(best_live: Array, worst_score: Array, length: Array, settings: BeamSettings) -> Array:
    """B log p of what has this length, B worst scores of the pool (-inf: it is not full) -> B."""
    if settings.early_stopping:
        return worst_score > -jnp.inf
    T = settings.max_new_tokens
    return worst_score >= _scores(best_live, T if settings.length_penalty > 0 else jnp.minimum(length + 1, T), settings)


def _scores(log_probs: Array, length: Array | int, settings: BeamSettings) -> Array:
    # Factors rounded once from float64: XLA may or may not turn a division into this product, and the last bit with it.
    factors = np.arange(1, settings.max_new_tokens + 1, dtype=np.float64) ** -settings.length_penalty
    return log_probs * jnp.asarray(factors, jnp.float32)[length - 1]


def _hypotheses(
    tokens: Array, log_probs: Array, length: Array | int, settings: BeamSettings, *, ended: bool
) -> Hypotheses:
    """All of one length. tokens: B W T, log_probs: B W."""
    shape = log_probs.shape
    scores = _scores(log_probs, length, settings)
    return Hypotheses(tokens, scores, log_probs, jnp.full(shape, length, jnp.int32), jnp.full(shape, ended))


def _keep_best(pool: Hypotheses, entering: Hypotheses) -> Hypotheses:
    """The W best of both. Among equals the pool's come first, so -inf never replaces one of its empty entries."""
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), pool, entering)
    _, order = lax.top_k(both.scores, pool.scores.shape[1])
    return jax.tree.map(lambda x: _take(x, order), both)


def _take(x: Array, index: Array) -> Array:
    """Entries of axis 1, chosen per row. x: B n ..., index: B k -> B k ..."""
    return jnp.take_along_axis(x, _align(index, x), axis=1)


def _align(x: Array, like: Array) -> Array:
    """Axes of size 1 at the end, up to the rank of `like`."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))
