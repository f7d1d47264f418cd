"""Losses as (sum, weight), added over devices and batches and divided once, and the objectives of the families."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from tfm_jax.models import Model

Sums = dict[str, tuple[Array, Array]]


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of weighted cross entropies in nats, and the sum of weights, both float32.

    The target distribution is (1 - label_smoothing) on the target and label_smoothing spread evenly over all V entries
    (Szegedy et al. 2016; torch's rule), so its terms add up to one. Whatever stands where the weight is 0 counts for
    nothing. A target outside 0 .. V - 1 with a weight gives NaN.
    """
    logits = logits.astype(jnp.float32)
    V, active = logits.shape[-1], weights > 0
    valid = (targets >= 0) & (targets < V)
    # a comparison, not a gather: its gradient fuses into that of the softmax instead of a scatter into B T V
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    target_logit = jnp.where(is_target, logits, 0.0).sum(axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - (1.0 - label_smoothing) * target_logit
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(axis=-1)
    loss = jnp.where(active, jnp.where(valid, loss, jnp.nan), 0.0)
    return (loss * weights).sum(), weights.sum()


def accuracy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted count of targets that have the largest logit, and the sum of weights. A tie with another entry is right."""
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    # max and a comparison: argmax is many times slower on a CPU
    right = jnp.where(is_target, logits, -jnp.inf).max(axis=-1) >= logits.max(axis=-1)
    return jnp.where(right, weights, 0.0).sum(), weights.sum()


@dataclass(frozen=True)
class TextToText:
    """Teacher forcing for encoder-decoders: the decoder reads the shifted target, the loss is on what comes next."""

    model: Model
    label_smoothing: float = 0.0

    def __call__(self, params: dict, batch: dict[str, Any], key: Key[Array, ""] | None) -> Sums:
        """By metric, (sum, weight): `loss` is what training minimises, `accuracy` counts target tokens."""
        logits = self.model.apply(
            params,
            batch["source_tokens"],
            batch["tokens"],
            source_segment_ids=batch["source_segment_ids"],
            segment_ids=batch["segment_ids"],
            key=key,
        )
        targets, weights = batch["targets"], batch["weights"]
        loss = cross_entropy(logits, targets, weights, label_smoothing=self.label_smoothing)
        return {"loss": loss, "accuracy": accuracy(jax.lax.stop_gradient(logits), targets, weights)}
