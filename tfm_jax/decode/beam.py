"""Exact, batched beam search as one `lax.while_loop` over a step function; knows nothing of models."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tfm_jax.config import require
from tfm_jax.decode.constraints import Constraints, History, constrained
from tfm_jax.decode.top import best_of_rows

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
    """alpha of score = log p / penalty(length) ** alpha, either sign; 0 compares plain log p. Lengths count eos."""
    early_stopping: bool | Literal["heuristic"]
    """True: a row is done once W hypotheses have ended before the last step. False: once no live one can beat them.
    heuristic: once W have ended and no live one would beat them if it ended here, as transformers has it for False."""
    eos_ids: tuple[int, ...]
    """The tokens that end a hypothesis."""
    pad_id: int
    """What stands after the end. It is written, never fed to the model."""
    normalization: Literal["fairseq", "transformers", "gnmt", "t2t"] = "fairseq"
    """The penalty: length (fairseq, and transformers since its version 4.50), or (5 + length) / 6 (Wu et al. 2016, eq.
    14 without the coverage term, and tensor2tensor)."""
    constraints: Constraints = Constraints()
    """What may be written. Their scores are log-probs, and what they leave is not normalised again."""

    def __post_init__(self):
        for name, low in {"beams": 1, "max_new_tokens": 1, "pad_id": 0}.items():
            value = getattr(self, name)
            require(type(value) is int and value >= low, f"{name} is {value!r}: an int of at least {low} is expected")
        require_eos(self.eos_ids)
        require(self.normalization in PENALTIES, f"normalization is {self.normalization!r}: one of {[*PENALTIES]}")
        alpha = self.length_penalty
        require(
            type(alpha) in (int, float) and math.isfinite(alpha), f"length_penalty is {alpha!r}: give a finite number"
        )
        # float32 ends at 1e38; 1e30 leaves room for log p itself.
        require(
            abs(alpha) * math.log10(self.max_new_tokens) <= 30,
            f"length_penalty is {alpha}: {self.max_new_tokens} ** {alpha} leaves float32, give one nearer to 0",
        )
        stop = self.early_stopping
        require(
            type(stop) is bool or stop == "heuristic", f"early_stopping is {stop!r}: give True, False or 'heuristic'"
        )


PENALTIES = {
    "fairseq": lambda length: length,
    "transformers": lambda length: length,
    "gnmt": lambda length: (5.0 + length) / 6.0,
    "t2t": lambda length: (5.0 + length) / 6.0,
}


def require_eos(eos_ids: Any) -> None:
    """Raise `ValueError` unless there is at least one token id, each an int that is not negative."""
    valid = type(eos_ids) is tuple and all(type(token) is int and token >= 0 for token in eos_ids)
    require(valid and len(eos_ids) > 0, f"eos_ids is {eos_ids!r}: a tuple of at least one token id is expected")


def is_eos(tokens: Int[Array, "..."], eos_ids: tuple[int, ...]) -> Bool[Array, "..."]:
    """Where a token ends its hypothesis."""
    return functools.reduce(jnp.logical_or, [tokens == eos_id for eos_id in eos_ids])


class Hypotheses(NamedTuple):
    """The W best of each of B rows, best first.

    Where a row has fewer hypotheses than beams the last entries are empty: scores and log_probs -inf, length 0, all
    pad.
    """

    tokens: Int[Array, "B W T"]
    """int32: eos included where it ended, pad after it; T = max_new_tokens."""
    scores: Float[Array, "B W"]
    """float32, descending: log_probs / penalty(lengths) ** length_penalty."""
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
    history: History | None = None,
    stages: Sequence[tuple[int, Callable[[State], State]]] = (),
) -> Hypotheses:
    """Search for the sequences of highest log p / penalty(length) ** alpha (Wu et al. 2016, eq. 14).

    `step(tokens, state, position) -> (logits, state)` reads the last token of every hypothesis (B*W int32, at first
    `first_tokens`, repeated) and gives the next one's logits (B*W V, any float); position is an int32 scalar, 0 at the
    first call. `state` is a pytree with B*W rows, beam w of row b in row b*W + w, and `take_rows(state, rows) -> state`
    gathers its rows (rows: B*W int32). With one beam there is nothing to gather and it is not called.

    `stages`: pairs (position, prepare), ascending: `prepare(state) -> state` is called before the steps up to that
    position and may change the state's shapes, as a cache that grows. `history`: what each of the B rows has read
    before, for constraints that look at it.

    Each step takes the 2W likeliest extensions of the live hypotheses (more where several tokens are ends, so that W
    stay live). Those that end in eos and rank among the first W
    enter the pool, which keeps the W best scores; the best W that do not end stay live. One beam takes one extension,
    so it is greedy search. What is live at max_new_tokens enters the pool too, with `ended` False. Among equals the
    better beam comes first, then the lower token. What has probability zero is no hypothesis.

    A row is done, and nothing in it changes any more, once nothing is live in it or the pool is full and, without
    early_stopping, its worst score is at least what any live hypothesis can still reach. As log p only falls and every
    penalty grows with the length, with the log p of the best live one that is its score at max_new_tokens for alpha > 0
    and at its length + 1 for alpha <= 0. Then the result is that of a search which never stops early. (The optimal
    stopping of Huang et al. 2017, for the W best and this score.)

    Log-softmax and scores are float32 whatever the logits. A row in which a live hypothesis meets logits that are NaN
    or +inf comes back with NaN scores and log_probs over pad, length 0. Raises `ValueError` for first_tokens that are
    not B, logits that are not B*W V and eos_ids outside the vocabulary.
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
    advance = functools.partial(_advance, step=step, take_rows=take_rows, settings=settings, history=history)
    final = start
    for end, prepare in [*stages, (T, lambda state: state)]:
        final = final._replace(state=prepare(final.state))
        going = lambda s, end=end: (s.position < end) & (s.log_probs > -jnp.inf).any()  # noqa: E731
        final = lax.while_loop(going, advance, final)
    # Rows that are done have nothing live left: what is live now was cut.
    best = _keep_best(final.pool, _hypotheses(final.tokens, final.log_probs, T, settings, ended=False))
    lost = empty._replace(scores=nothing * jnp.nan, log_probs=nothing * jnp.nan)
    return jax.tree.map(lambda x, y: jnp.where(_align(final.poisoned, x), x, y), lost, best)


def _advance(
    search: _Search, *, step: Step, take_rows: TakeRows, settings: BeamSettings, history: History | None
) -> _Search:
    """One token more for every row that is not done."""
    (B, W), position = search.log_probs.shape, search.position
    logits, state = step(search.previous, search.state, position)
    _check_logits(logits, B * W, settings.eos_ids)
    normalized = settings.constraints.change_something
    if normalized:
        logits = _constrained(logits, search, settings, history)
    # W must stay when all ends come first
    count = 1 if W == 1 else (1 + len(settings.eos_ids)) * W
    log_probs, parents, tokens, broken = _best_extensions(logits, search.log_probs, count, normalized=normalized)
    ends = is_eos(tokens, settings.eos_ids)

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


def _constrained(logits: Array, search: _Search, settings: BeamSettings, history: History | None) -> Array:
    """Log-probs B*W V under the constraints."""
    B, W, T = search.tokens.shape
    before = History.none(B) if history is None else history
    written = jax.tree.map(lambda x: jnp.repeat(x, W, axis=0), before).extended(
        search.tokens.reshape(B * W, T), search.position
    )
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return constrained(
        log_probs,
        *written,
        constraints=settings.constraints,
        step=search.position,
        max_new_tokens=T,
        eos_ids=settings.eos_ids,
    )


def _check_logits(logits: Array, rows: int, eos_ids: tuple[int, ...]) -> None:
    fits = logits.ndim == 2 and logits.shape[0] == rows
    require(fits, f"step gave logits of shape {logits.shape}: ({rows}, V) is expected, a row for each beam")
    V = logits.shape[1]
    require(max(eos_ids) < V, f"eos_ids is {eos_ids}, but step gives logits for {V} tokens: those could never end")


def _best_extensions(
    logits: Array, live_log_probs: Array, count: int, *, normalized: bool
) -> tuple[Array, Array, Array, Array]:
    """B*W V, B W -> log_probs, parents (beams), tokens of the min(count, W V) best extensions of each row; broken (B).

    First the best of each beam by its logits, then the best of those. It saves writing B W V sums, and tokens that
    float32 sums can no longer tell apart keep the order of their logits, as they must for one beam to be greedy.
    normalized: the logits are log-probs as they stand, and need not sum to one.
    """
    B, W = live_log_probs.shape
    V = logits.shape[1]
    K = min(count, W * V)
    k = min(K, V)
    logits = logits.astype(jnp.float32)
    best, tokens, normalizers = best_of_rows(logits, k)
    live = live_log_probs > -jnp.inf
    broken = (live & ~(normalizers.reshape(B, W) < jnp.inf)).any(axis=1)
    normalizers = jnp.zeros((B, W)) if normalized else normalizers.reshape(B, W)
    best_BWk = best.reshape(B, W, k)
    # -inf - -inf, a dead end, would be NaN, and the rank of NaN is anyone's guess.
    possible_BWk = (live & ~broken[:, None])[..., None] & (best_BWk > -jnp.inf)
    sums_BWk = live_log_probs[..., None] + (best_BWk - normalizers[..., None])
    log_probs, chosen = lax.top_k(jnp.where(possible_BWk, sums_BWk, -jnp.inf).reshape(B, W * k), K)
    return log_probs, chosen // k, _take(tokens.reshape(B, W * k), chosen), broken


def _is_done(best_live: Array, worst_score: Array, length: Array, settings: BeamSettings) -> Array:
    """B log p of what has this length, B worst scores of the pool (-inf: it is not full) -> B."""
    if settings.early_stopping is True:
        # at the last step what ends and what is cut are of one length, and the better ones stay
        return (worst_score > -jnp.inf) & (length < settings.max_new_tokens)
    if settings.early_stopping == "heuristic":
        return worst_score >= scores_of(best_live, length, settings)
    T = settings.max_new_tokens
    return worst_score >= scores_of(
        best_live, T if settings.length_penalty > 0 else jnp.minimum(length + 1, T), settings
    )


def scores_of(log_probs: Array, length: Array | int, settings: Any) -> Array:
    """log p over penalty(length) ** length_penalty, lengths from 1 to max_new_tokens."""
    # Factors rounded once from float64: XLA may or may not turn a division into this product, and the last bit with it.
    lengths = np.arange(1, settings.max_new_tokens + 1, dtype=np.float64)
    factors = PENALTIES[settings.normalization](lengths) ** -settings.length_penalty
    return log_probs * jnp.asarray(factors, jnp.float32)[length - 1]


def _hypotheses(
    tokens: Array, log_probs: Array, length: Array | int, settings: BeamSettings, *, ended: bool
) -> Hypotheses:
    """All of one length. tokens: B W T, log_probs: B W."""
    shape = log_probs.shape
    scores = scores_of(log_probs, length, settings)
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
