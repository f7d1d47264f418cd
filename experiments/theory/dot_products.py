"""The variance of a dot product is its length.

Vaswani et al. (2017), section 3.2.1: where the entries of q and k are independent, of mean 0 and variance 1,

    q . k = sum_i q_i k_i   has mean 0 and   Var(q . k) = d_k,

as every product q_i k_i has variance 1; so Var(q . k / sqrt(d_k)) = 1 whatever d_k. Entries of mean m add to it: each
product then has E(q_i^2) E(k_i^2) - (E(q_i) E(k_i))^2 = (1 + m^2)^2 - m^4 = 1 + 2 m^2.

Measured for d_k from 4 to 1,024 on random queries and keys. What the softmax is given is read off its result, the
library's `attention_weights`: log A_ts - log A_tu = score_ts - score_tu, whose variance is twice that of a score. A
fresh layer is another matter: the library counts query, key and value as one Xavier matrix of three times the fan out,
which halves the variance of queries and of keys, so its scaled scores have variance 1/4, again for any d_k.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.theory import Row, near
from experiments.theory.figure import drawn
from tfm_jax.nn import MultiHeadAttention, plain
from tfm_jax.ops import attention_weights
from tfm_jax.ops.multi_head import head_weights, keys_values

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH = 16
"""Queries, and keys, that meet."""
NUMBERS, BATCHES = 2**21, 2048
"""At most so many in all queries of a size: every variance is then known to about one percent."""


def vectors(d_k: int, mean: float = 0.0) -> jax.Array:
    """Queries and keys with entries of variance 1: 2 B T 1 H."""
    shape = (2, min(NUMBERS // (LENGTH * d_k), BATCHES), LENGTH, 1, d_k)
    return mean + jax.random.normal(jax.random.key(d_k), shape)


def raw_variance(d_k: int, mean: float = 0.0) -> float:
    """Of the products as they are."""
    query, key = vectors(d_k, mean)
    return float(jnp.einsum("BTNH,BSNH->BNTS", query, key).var())


def seen_variance(weights: jax.Array) -> float:
    """Of the scores that a softmax B N T S was given, from its result."""
    logits = jnp.log(weights)
    return float((logits[..., 1::2] - logits[..., ::2]).var() / 2.0)


def scaled_variance(d_k: int) -> float:
    """Of the scores as `attention_weights` makes them."""
    return seen_variance(attention_weights(*vectors(d_k)))


def fresh_variance(d_k: int, tokens: int = 512) -> float:
    """Of the scores in a new layer of one head, for input of variance 1."""
    params = plain(MultiHeadAttention(d_k, 1, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (1, tokens, d_k))
    return seen_variance(head_weights(params, x, keys_values(params, x, x), mask=None))


def measure(figures: Path) -> list[Row]:
    """Four rows and the variances over d_k."""
    raw, scaled = ([of(size) for size in SIZES] for of in (raw_variance, scaled_variance))
    sizes, worst = np.array(SIZES), lambda values: max(values, key=lambda value: abs(value - 1.0))
    with drawn(figures / "dot_products.png") as (axes,):
        axes.loglog(sizes, sizes, color="0.6", label="$d_k$")
        axes.loglog(sizes, raw, "o", label="$q \\cdot k$")
        axes.axhline(1.0, color="0.6", linestyle="--", label="1")
        axes.loglog(sizes, scaled, "s", label="$q \\cdot k\\,/\\sqrt{d_k}$")
        axes.set_xlabel("head size $d_k$")
        axes.set_ylabel("variance of a score")
        axes.legend()
    tried = f"d_k = {SIZES[0]} ... {SIZES[-1]}: the worst of {len(SIZES)}"
    return [
        near("Var(q . k) / d_k = 1", 1.0, worst(raw / sizes), share=0.03, note=tried),
        near("Var(q . k / sqrt(d_k)) = 1 in the softmax", 1.0, worst(scaled), share=0.03, note=tried),
        near(
            "Var(q . k) / d_k = 1 + 2 m^2 for entries of mean m",
            3.0,
            raw_variance(64, 1.0) / 64,
            share=0.03,
            note="m = 1, d_k = 64: d_k alone is for entries of mean 0",
        ),
        near(
            "Var(score) = 1/4 in a fresh layer, scaled",
            0.25,
            float(np.mean([fresh_variance(size) for size in (64, 256)])),
            share=0.1,
            note="one head, d_k = 64 and 256, input of variance 1: projections halve the variance of queries and keys",
        ),
    ]
