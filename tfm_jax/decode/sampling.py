"""From logits to tokens: greedy and random choices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from tfm_jax.config import require
from tfm_jax.decode.top import best_of_rows


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; the filters apply in the order given here, each to what the one before left."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy search: the likeliest token, the lowest among equals."""
    top_k: int | None = None
    """Only the k likeliest tokens and those as likely as the k-th (Fan et al. 2018). None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability, the one that crosses it included (Holtzman et al.
    2020, nucleus sampling); always at least one."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest (Nguyen et al. 2024)."""
    seed: int = 0
    """A draw depends on seed, request and step alone."""

    def __post_init__(self):
        require(0.0 <= self.temperature < float("inf"), f"temperature is {self.temperature}: a finite number >= 0")
        require(self.top_k is None or self.top_k >= 1, f"top_k is {self.top_k}: at least 1, or None for all tokens")
        require(0.0 <= self.top_p <= 1.0, f"top_p is {self.top_p}: it lies in [0, 1]")
        require(0.0 <= self.min_p <= 1.0, f"min_p is {self.min_p}: it lies in [0, 1]")
        require(0 <= self.seed < 2**32, f"seed is {self.seed}: a number from 0 to 2**32 - 1 is expected")


GREEDY = Sampling(temperature=0.0)


def filtered(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Logits over the temperature in float32, -inf for tokens that top_k, top_p or min_p rule out.

    For temperature 0, where nothing is drawn, the logits themselves.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0.0:
        return logits
    logits = logits / sampling.temperature
    V = logits.shape[1]
    if sampling.top_k is not None and sampling.top_k < V:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        logits = jnp.where(_in_nucleus(logits, sampling.top_p), logits, -jnp.inf)
    if sampling.min_p > 0.0:
        probabilities = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(probabilities < sampling.min_p * probabilities.max(axis=-1, keepdims=True), -jnp.inf, logits)
    return logits


def draw(logits: Float[Array, "B V"], keys: Key[Array, "B"], sampling: Sampling) -> Int[Array, "B"]:
    """A token for each row, from the distribution of its filtered logits and its own key."""
    logits = filtered(logits, sampling)
    if sampling.temperature == 0.0:
        return best_of_rows(logits, 1)[1][:, 0]  # argmax takes many times as long
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _in_nucleus(logits, top_p):
    """The likeliest tokens, until the sum of those before one reaches top_p; among equals the lower token first."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep = (before < top_p).at[:, 0].set(True)
    rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(keep)
