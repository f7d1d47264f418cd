"""Unscaled dot products saturate the softmax.

Vaswani et al. (2017), section 3.2.1: products of length d_k have standard deviation s = sqrt(d_k) and push the softmax
"into regions where it has extremely small gradients"; divided by sqrt(d_k), s = 1. For n independent normal scores:

    s = 1:   entropy = log n - 1/2 nats, the mean of log n + s^2 / 2 - s^2 for n >> e;
    s >> 1:  only the largest scores count, s g apart. With f = n (n-1) int phi^2 Phi^(n-2), the density at 0 of the gap
             g of the largest two, the mean of |J| = 2 p (1 - p) is f / s, where J = diag(p) - p p^T is the Jacobian of
             the softmax (Frobenius norm) and p = 1 / (1 + e^(-s g)). The largest of many scores are near a Poisson
             process (Derrida 1981, the random energy model), which makes the mean entropy psi(1) - psi(1 - f / s).

The typical query is another matter than the mean one: the median of |J| is 2 e^(-s m), m the median of g. It vanishes
exponentially, while a few queries near a tie keep the mean up. And what reaches Q is scale * J (V gradient) K, about
|J| when scaled and sqrt(d_k) |J| when not: for a usual head of 64 the unscaled gradient is the LARGER one. The
textbook's claim begins where 2 sqrt(d_k) e^(-m sqrt(d_k)) < sqrt(e / n), the scaled value: between d_k = 256 and 512 at
n = 64. How models train is in `scale_training`.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jax.scipy.stats import norm

from experiments.theory import Row, at_least, at_most, near
from experiments.theory.figure import drawn
from experiments.theory.scale_training import trainings
from tfm_jax.ops import attention_weights, dot_product_attention

SIZES, LARGEST, USUAL = (4, 16, 64, 256, 512, 1024), 1024, 64
KEYS, QUERIES, BATCHES = 64, 256, 32


@functools.partial(jax.jit, static_argnames="scale")
def softmax_of(vectors: tuple, scale: float | None) -> dict[str, jax.Array]:
    """Of each query (B T), or key (B S): entropy, |J|_F, and the norm of the gradient of a random linear loss."""
    query, key, value, gradient = vectors
    p = attention_weights(query, key, scale=scale)[:, 0]
    powers = [(p**n).sum(axis=-1) for n in (2, 3)]
    loss = lambda query, key: (dot_product_attention(query, key, value, scale=scale) * gradient).sum()  # noqa: E731
    by_query, by_key = jax.grad(loss, argnums=(0, 1))(query, key)
    return {
        "entropy": -jax.scipy.special.xlogy(p, p).sum(axis=-1),
        "jacobian": jnp.sqrt(jnp.maximum(powers[0] - 2.0 * powers[1] + powers[0] ** 2, 0.0)),
        "query": jnp.linalg.norm(by_query[:, :, 0], axis=-1),
        "key": jnp.linalg.norm(by_key[:, :, 0], axis=-1),
    }


def random_vectors(d_k: int) -> tuple:
    """Query, key and value of variance 1, and a gradient of norm 1 for each query."""
    keys = jax.random.split(jax.random.key(d_k), 4)
    lengths = {"query": QUERIES, "key": KEYS, "value": KEYS, "gradient": QUERIES}
    sizes = (d_k, d_k, 64, 64)
    drawn_at = zip(keys, lengths.values(), sizes, strict=True)
    query, key, value, gradient = (jax.random.normal(k, (BATCHES, length, 1, size)) for k, length, size in drawn_at)
    return query, key, value, gradient / jnp.linalg.norm(gradient, axis=-1, keepdims=True)


def largest_two(n: int) -> tuple[float, float]:
    """Of n normal variables: the density of the gap between the largest two at 0, and its median."""
    x = jnp.linspace(-9.0, 9.0, 4001)
    step, pdf, cdf = x[1] - x[0], norm.pdf(x), norm.cdf
    gaps = jnp.linspace(0.0, 2.0, 201)
    beyond = n * (pdf * cdf(x - gaps[:, None]) ** (n - 1)).sum(axis=1) * step
    return float(n * (n - 1) * (pdf**2 * cdf(x) ** (n - 2)).sum() * step), float(np.interp(-0.5, -beyond, gaps))


def largest_entropy(m: np.ndarray | float) -> np.ndarray:
    """Of the weights exp(score) where scores are the largest of many, m their density in units of the score."""
    return np.asarray(digamma(1.0) - digamma(1.0 - m))


def measure(figures: Path) -> list[Row]:
    """Rows of the softmax and of training, and their pictures."""
    return [*softmaxes(figures), *trainings(figures)]


def softmaxes(figures: Path) -> list[Row]:
    """Six rows, and what becomes of the softmax over d_k."""
    found = {
        (size, scale): jax.device_get(softmax_of(random_vectors(size), scale))
        for size in SIZES
        for scale in (None, 1.0)
    }
    f, m = largest_two(KEYS)
    draw_softmax(figures / "saturation.png", found, (f, m))
    scaled, unscaled = ([found[size, scale] for size in SIZES] for scale in (None, 1.0))
    entropies = np.array([one["entropy"].mean() for one in scaled[1:]])
    even, one_hot = np.log(KEYS) - 0.5, unscaled[-1]
    gradients = {
        size: np.median(found[size, 1.0]["query"]) / np.median(found[size, None]["query"]) for size in (USUAL, LARGEST)
    }
    keys = f"{KEYS} keys"
    unscaled_at = f"{keys}, d_k = {LARGEST:,}, unscaled"
    return [
        near(
            "scaled: entropy is log n - 1/2",
            even,
            entropies[np.abs(entropies - even).argmax()],
            share=0.03,
            note=f"{keys}, d_k = {SIZES[1]} ... {LARGEST:,}: the worst of them. Unit: nats",
        ),
        near(
            "unscaled: entropy is psi(1) - psi(1 - f / sqrt(d_k)), about (pi^2 / 6) f / sqrt(d_k)",
            largest_entropy(f / LARGEST**0.5),
            one_hot["entropy"].mean(),
            share=0.1,
            note=f"{unscaled_at}; f = {f:.3f}. Unit: nats",
        ),
        near(
            "unscaled: the mean |J| is f / sqrt(d_k)",
            f / LARGEST**0.5,
            one_hot["jacobian"].mean(),
            share=0.1,
            note=unscaled_at,
        ),
        near(
            "unscaled: log10 of the median |J| is log10(2) - m sqrt(d_k) log10(e)",
            np.log10(2.0) - m * LARGEST**0.5 * np.log10(np.e),
            np.log10(np.median(one_hot["jacobian"])),
            share=0.05,
            note=f"{unscaled_at}; m = {m:.3f}: the typical query has no gradient",
        ),
        at_most(
            "unscaled, the median gradient reaching Q is smaller",
            1.0,
            gradients[LARGEST],
            note=f"{keys}, d_k = {LARGEST:,}: unscaled / scaled",
        ),
        at_least(
            "but not for a usual head: there it is larger",
            1.0,
            gradients[USUAL],
            note=f"{keys}, d_k = {USUAL}: the softmax has less of it, the missing 1 / sqrt(d_k) gives more back",
        ),
    ]


def draw_softmax(path: Path, found: dict, largest: tuple[float, float]) -> None:
    """Entropy, Jacobian and the gradient reaching Q and K, over d_k."""
    (f, m), sizes, names = largest, np.array(SIZES), {None: "scaled", 1.0: "unscaled"}
    with drawn(path, 3, width=4.0) as (entropy, jacobian, gradient):
        for color, (scale, name) in zip(("C0", "C1"), names.items(), strict=True):
            of = lambda what, take, scale=scale: [take(found[size, scale][what]) for size in SIZES]  # noqa: E731
            entropy.loglog(sizes, of("entropy", np.mean), "o", color=color, label=f"{name}, mean")
            jacobian.loglog(sizes, of("jacobian", np.mean), "o", color=color, label=f"{name}, mean")
            jacobian.loglog(sizes, of("jacobian", np.median), "v", color=color, label=f"{name}, median")
            gradient.loglog(sizes, of("query", np.mean), "o-", color=color, label=f"Q, {name}, mean")
            gradient.loglog(sizes, of("query", np.median), "v-", color=color, label=f"Q, {name}, median")
            gradient.loglog(sizes, of("key", np.median), "x:", color=color, label=f"K, {name}, median")
        entropy.axhline(np.log(KEYS) - 0.5, color="C0", label="$\\log n - 1/2$")
        entropy.loglog(
            sizes[2:], largest_entropy(f / sizes[2:] ** 0.5), color="C1", label="$\\psi(1) - \\psi(1 - f/\\sqrt{d_k})$"
        )
        jacobian.axhline((np.e / KEYS) ** 0.5, color="C0", label="$\\sqrt{e/n}$")
        jacobian.loglog(sizes[2:], f / sizes[2:] ** 0.5, color="C1", label="$f/\\sqrt{d_k}$")
        jacobian.loglog(sizes[2:], 2 * np.exp(-m * sizes[2:] ** 0.5), "--", color="C1", label="$2 e^{-m\\sqrt{d_k}}$")
        entropy.set_yticks([0.1, 0.3, 1.0, 3.0], ["0.1", "0.3", "1", "3"])
        entropy.minorticks_off()
        entropy.set_ylabel(f"entropy of the weights on {KEYS} keys / nats")
        jacobian.set_ylabel("norm of the softmax's Jacobian")
        gradient.set_ylabel("norm of the gradient of one vector")
        for axes in (entropy, jacobian, gradient):
            axes.set_xlabel("head size $d_k$")
            axes.legend(fontsize=7)
