"""What may be written: penalties, forced and forbidden tokens, as a function of what is written already.

Formulas and their order are those of the logits processors of Hugging Face transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfm_jax.config import require


@dataclass(frozen=True)
class Constraints:
    """The static switches; the defaults change nothing. Raises `ValueError` when built with values without meaning."""

    repetition_penalty: float = 1.0
    """Scores of tokens that occurred already, in the prompt too: divided by it where positive, else multiplied (Keskar
    et al. 2019, CTRL). In sampling and greedy search scores are logits, in beam search log-probs. Positive."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens occurs twice, the prompt included (Paulus et al. 2017); 0: anything may."""
    min_new_tokens: int = 0
    """No end before so many new tokens, the end not counted."""
    forced_first: tuple[int, ...] = ()
    """The first new tokens."""
    forced_last: int | None = None
    """The token at max_new_tokens where nothing ended before, for instance the end of text. None: whatever comes."""
    banned: tuple[int, ...] = ()
    """Tokens that never occur."""
    allowed: tuple[int, ...] | None = None
    """The only tokens that may occur. None: all."""
    function: Callable[..., Any] | None = None
    """function(scores R V, history R C, lengths R) -> scores, traced; what is written stands at the start of a row of
    history. A function defined once: a new lambda at each call compiles anew."""

    def __post_init__(self):
        penalty, first = self.repetition_penalty, self.forced_first
        require(0.0 < penalty < float("inf"), f"repetition_penalty is {penalty}: a positive finite number is needed")
        for name in ("no_repeat_ngram", "min_new_tokens"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: at least 0 is needed")
        last = () if self.forced_last is None else (self.forced_last,)
        listed = {"forced_first": first, "banned": self.banned, "allowed": self.allowed or (), "forced_last": last}
        for name, tokens in listed.items():
            require(all(token >= 0 for token in tokens), f"{name} is {tokens}: token ids are at least 0")
        require(self.allowed != (), "allowed is empty: nothing could be written; None allows all tokens")
        forbidden = [token for token in (*first, *last) if token in self.banned or not self._may(token)]
        require(not forbidden, f"tokens {forbidden} are forced and forbidden at once")

    def _may(self, token):
        return self.allowed is None or token in self.allowed

    def check(self, vocab_size: int, max_new_tokens: int) -> None:
        """Raise `ValueError` for tokens outside the vocabulary and lengths that cannot be."""
        last = () if self.forced_last is None else (self.forced_last,)
        beyond = [t for t in (*self.forced_first, *last, *self.banned, *(self.allowed or ())) if t >= vocab_size]
        require(not beyond, f"constraints name the tokens {beyond}, the vocabulary has {vocab_size}")
        for name, length in (("min_new_tokens", self.min_new_tokens), ("forced_first", len(self.forced_first))):
            require(length <= max_new_tokens, f"{name} asks for {length} tokens, max_new_tokens is {max_new_tokens}")

    @property
    def change_something(self) -> bool:
        """Whether scores may come out otherwise than they went in."""
        return self != Constraints()


class History(NamedTuple):
    """What each of R rows has read and written, from column 0 to its length; what stands after means nothing."""

    tokens: Int[Array, "R C"]
    lengths: Int[Array, "R"]

    @classmethod
    def none(cls, rows: int) -> "History":
        """Nothing read yet."""
        return cls(jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32))

    def extended(self, written: Int[Array, "R T"], count: Int[Array, ""]) -> "History":
        """With the first `count` columns of what was written after it."""
        C, T = self.tokens.shape[1], written.shape[1]
        column = jnp.arange(C + T, dtype=jnp.int32)[None]
        both = jnp.concatenate([self.tokens, written], axis=1)
        # column c holds what was read before the length, and from there on what was written
        source = jnp.where(column < self.lengths[:, None], column, column - self.lengths[:, None] + C)
        tokens = jnp.take_along_axis(both, jnp.minimum(source, C + T - 1), axis=1)
        return History(tokens, self.lengths + count)


def constrained(
    scores: Float[Array, "R V"],
    history: Int[Array, "R C"],
    lengths: Int[Array, "R"],
    *,
    constraints: Constraints,
    step: Int[Array, ""],
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
) -> Float[Array, "R V"]:
    """The scores of the next token under the constraints, -inf where it is forbidden.

    history: what each row has read and written, prompt included, from column 0 to its length; step: new tokens so far.
    """
    V, settings = scores.shape[1], constraints
    written = jnp.arange(history.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    if settings.repetition_penalty != 1.0:
        seen = _marked(jnp.where(written, history, V), V)
        penalty = settings.repetition_penalty
        scores = jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if settings.no_repeat_ngram:
        scores = jnp.where(_completes_ngram(history, lengths, settings.no_repeat_ngram, V), -jnp.inf, scores)
    if settings.banned:
        scores = scores.at[:, jnp.asarray(settings.banned)].set(-jnp.inf)
    if settings.allowed is not None:
        allowed = jnp.zeros(V, bool).at[jnp.asarray(settings.allowed)].set(True)
        scores = jnp.where(allowed[None], scores, -jnp.inf)
    if settings.min_new_tokens:
        ends = jnp.zeros(V, bool).at[jnp.asarray(eos_ids)].set(True)
        scores = jnp.where(ends[None] & (step < settings.min_new_tokens), -jnp.inf, scores)
    if settings.function is not None:
        scores = settings.function(scores, history, lengths)
    forced = [*enumerate(settings.forced_first)]
    if settings.forced_last is not None and max_new_tokens > len(forced):
        forced.append((max_new_tokens - 1, settings.forced_last))
    for at, token in forced:
        only = jnp.where(jnp.arange(V, dtype=jnp.int32) == token, 0.0, -jnp.inf).astype(scores.dtype)
        scores = jnp.where(step == at, only[None], scores)
    return scores


def _marked(tokens, V):
    """R n token ids (V: none) -> R V, True at those that occur."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((tokens.shape[0], V), bool).at[rows, tokens].set(True, mode="drop")


def _completes_ngram(history, lengths, n, V):
    """R V: tokens that would complete a sequence of n tokens that a row has already."""
    R, C = history.shape
    if n > C:
        return jnp.zeros((R, V), bool)
    starts = jnp.arange(C - n + 1, dtype=jnp.int32)
    last = lengths[:, None] - (n - 1) + jnp.arange(n - 1, dtype=jnp.int32)[None]
    context = jnp.take_along_axis(history, jnp.maximum(last, 0), axis=1)
    same = starts[None] + (n - 1) < lengths[:, None]
    for i in range(n - 1):
        same = same & (history[:, i : i + C - n + 1] == context[:, i, None])
    return _marked(jnp.where(same, history[:, n - 1 :], V), V)
