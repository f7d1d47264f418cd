"""Losses as (sum, weight), added over devices and batches and divided once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfm_jax.sharding import constrain, tokens_are_shared

Sums = dict[str, tuple[Array, Array]]


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    possible: Bool[Array, "B #T V"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of weighted cross entropies in nats, and the sum of weights, both float32.

    The target distribution is (1 - label_smoothing) on the target and label_smoothing spread evenly over all V entries
    (Szegedy et al. 2016; torch's rule), so its terms add up to one. z_loss times log(sum of exp of the logits) ** 2 is
    added for each target, which keeps logits from drifting (Chowdhery et al. 2022, PaLM; theirs is 1e-4). Whatever
    stands where the weight is 0 counts for nothing. A target outside 0 .. V - 1 with a weight gives NaN. Training goes
    through `linear_cross_entropy`.

    possible: the entries there are, where not all are: the others have no probability and no share of label_smoothing,
    whatever their logits, and a target among them has an infinite loss.
    """
    # whatever a token without weight has for logits, NaN included, must not reach the gradient
    logits = jnp.where((weights > 0)[..., None], logits.astype(jnp.float32), 0.0)
    if possible is not None:
        logits = jnp.where(possible, logits, -jnp.inf)
    log_total_BT = jax.nn.logsumexp(logits, axis=-1)
    loss_BT = log_total_BT - (1.0 - label_smoothing) * target_logit(logits, targets)
    if label_smoothing:
        loss_BT = loss_BT - label_smoothing * logits.mean(axis=-1, where=possible)
    if z_loss:
        loss_BT = loss_BT + z_loss * jnp.square(log_total_BT)
    return jnp.where(weights > 0, loss_BT * weights, 0.0).sum(), weights.sum()


def target_logit(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The logit of each target; NaN for a target that is not an index of the vocabulary."""
    index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
    return jnp.take_along_axis(logits, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def accuracy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted count of targets that have the largest logit, a tie included, and the sum of weights."""
    # max and a comparison: argmax is many times slower on a CPU
    right_BT = target_logit(logits, targets) >= logits.max(axis=-1)
    return jnp.where(right_BT, weights, 0.0).sum(), weights.sum()


def linear_cross_entropy(
    x: Float[Array, "B T D"],
    output_layer: tuple[Float[Array, "V D"], Float[Array, "V"] | None],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Sums:
    """`cross_entropy` and `accuracy` of the logits x E^T + b, without an array of all the logits.

    The rows go through the output layer a few hundred at a time, and the gradients for x, E and b are made in the same
    pass, while the logits are in the cache; on a CPU that takes half the time, everywhere a fraction of the memory
    (Wijmans et al. 2025, cut cross-entropy, is the idea taken further).
    """
    table, bias = output_layer
    bias = jnp.zeros(table.shape[0], table.dtype) if bias is None else bias
    loss, right = _linear_loss(x, table, bias, targets, weights, (label_smoothing, z_loss))
    return {"loss": (loss, weights.sum()), "accuracy": (right, weights.sum())}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear_loss(x, table, bias, targets, weights, rates):
    """Sum of weighted losses, sum of weights of right predictions."""
    sums = functools.partial(_chunk_sums, table, bias, rates)
    add = lambda total, chunk: (jax.tree.map(jnp.add, total, sums(*chunk)[0]), None)  # noqa: E731
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)), _chunks(x, targets, weights))[0]


def _linear_loss_forward(x, table, bias, targets, weights, rates):
    def add(total, chunk):
        (loss, right), gradient_BTV = _chunk_sums(table, bias, rates, *chunk)
        x_BTD, gradient_BTV = chunk[0], gradient_BTV.astype(x.dtype)
        # D V, transposed at the end: see vocabulary_logits
        table_DV = jnp.einsum("BTD,BTV->DV", x_BTD, gradient_BTV, preferred_element_type=jnp.float32)
        bias_V = gradient_BTV.astype(jnp.float32).sum(axis=(0, 1))
        return jax.tree.map(jnp.add, total, (loss, right, table_DV, bias_V)), jnp.einsum(
            "BTV,VD->BTD", gradient_BTV, table
        )

    V, D = table.shape
    zero = tuple(jnp.zeros(shape, jnp.float32) for shape in ((), (), (D, V), (V,)))
    (loss, right, table_DV, bias_V), x_CBTD = jax.lax.scan(add, zero, _chunks(x, targets, weights))
    x_gradient = jnp.moveaxis(x_CBTD, 0, 1).reshape(x.shape[0], -1, D)[:, : x.shape[1]]
    return (loss, right), (x_gradient, table_DV.T.astype(table.dtype), bias_V.astype(bias.dtype))


def _linear_loss_backward(rates, gradients, sums_gradient):
    scaled = jax.tree.map(lambda gradient: gradient * sums_gradient[0].astype(gradient.dtype), gradients)
    return *scaled, None, None


_linear_loss.defvjp(_linear_loss_forward, _linear_loss_backward)


def _chunks(x, targets, weights, *, rows: int = 512):
    """x, targets and weights cut along T into pieces of about `rows` tokens each, on a new first axis.

    Rows whose tokens several devices share stay whole: a sum of gradients over devices for each piece would cost
    more than is saved.
    """
    B, T = targets.shape
    length = T if tokens_are_shared() else min(T, max(1, rows // B))
    count = -(-T // length)

    def cut(array):
        padded = jnp.pad(array, [(0, 0), (0, count * length - T)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, count, length, *array.shape[2:]), 1, 0)

    # a token without weight may hold anything, NaN included
    return cut(jnp.where((weights > 0)[..., None], x, 0)), cut(targets), cut(weights)


def _chunk_sums(table, bias, rates, x, targets, weights):
    """((loss, right), gradient of the loss by the logits B T V in float32) of one piece."""
    label_smoothing, z_loss = rates
    logits = jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)
    logits = constrain(logits + bias.astype(jnp.float32)[None, None], "batch", "length", "vocab")
    largest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    target_logit_BT = target_logit(logits, targets)
    log_total = jnp.log(total) + largest
    loss = log_total[..., 0] - (1.0 - label_smoothing) * target_logit_BT
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(axis=-1)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    wanted = jnp.where(is_target, 1.0 - label_smoothing, 0.0) + label_smoothing / logits.shape[-1]
    share = 1.0 / total
    if z_loss:
        loss, share = loss + z_loss * jnp.square(log_total[..., 0]), share * (1.0 + 2.0 * z_loss * log_total)
    gradient = (exponentials * share - wanted) * weights[..., None]
    right = jnp.where(target_logit_BT >= largest[..., 0], weights, 0.0).sum()
    return (jnp.where(weights > 0, loss * weights, 0.0).sum(), right), gradient
