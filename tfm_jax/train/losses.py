"""Losses as (sum, weight), added over devices and batches and divided once, and the objectives of the families."""

import functools
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
    loss_BT = _token_loss(logits.astype(jnp.float32), targets, label_smoothing)
    return jnp.where(weights > 0, loss_BT * weights, 0.0).sum(), weights.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _token_loss(logits, targets, label_smoothing):
    return _token_loss_forward(logits, targets, label_smoothing)[0]


def _token_loss_forward(logits, targets, label_smoothing):
    normaliser_BT = jax.nn.logsumexp(logits, axis=-1)
    loss_BT = normaliser_BT - (1.0 - label_smoothing) * _target_logit(logits, targets)
    if label_smoothing:
        loss_BT = loss_BT - label_smoothing * logits.mean(axis=-1)
    return loss_BT, (logits, targets, normaliser_BT)


def _token_loss_backward(label_smoothing, residuals, gradient_BT):
    """softmax - target distribution in one pass over B T V, which automatic differentiation makes in five."""
    logits, targets, normaliser_BT = residuals
    probabilities = jnp.exp(logits - normaliser_BT[..., None])
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    target = jnp.where(is_target, 1.0 - label_smoothing, 0.0) + label_smoothing / logits.shape[-1]
    # a select, because a token without weight may have any logits, NaN included
    return jnp.where(gradient_BT[..., None] != 0, (probabilities - target) * gradient_BT[..., None], 0.0), None


_token_loss.defvjp(_token_loss_forward, _token_loss_backward)


def _target_logit(logits, targets):
    """The logit of each target; NaN for a target that is not an index of the vocabulary."""
    index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
    return jnp.take_along_axis(logits, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def accuracy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted count of targets that have the largest logit, a tie included, and the sum of weights."""
    # max and a comparison: argmax is many times slower on a CPU
    right_BT = _target_logit(logits, targets) >= logits.max(axis=-1)
    return jnp.where(right_BT, weights, 0.0).sum(), weights.sum()


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
