"""What stands on a stack and is no output layer: the masked head, the pooler, and a layer with a number a label."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from tfm_jax.config import require
from tfm_jax.nn.layers import NORMS, param, xavier_uniform, zeros
from tfm_jax.ops import dropout
from tfm_jax.ops.blocks import ACTIVATIONS, GATES

LABELLED = ("sequence", "token", "regression")
SPAN = ("start", "end")


def require_labels(head: str, labels: tuple[str, ...]) -> None:
    """Raise `ValueError` unless there are labels where the head needs them, no name twice, and none elsewhere."""
    needed = head in LABELLED
    what = "the name of each label is needed" if needed else f"only heads {', '.join(LABELLED)} have labels"
    require(bool(labels) == needed, f"model.head is {head!r}, model.labels {labels}: {what}")
    single = head == "sequence" and len(labels) == 1
    require(not single, f"model.labels is {labels}: a sequence's label is one of two or more, a number is 'regression'")
    require(len(set(labels)) == len(labels), f"model.labels is {labels}: a name twice")


class MaskedHead(nnx.Module):
    """norm(activation(x W + b)): what the output layer, the embedding's table, reads (BERT's own code)."""

    def __init__(
        self, d_model: int, *, activation: str, norm_kind: str, norm_eps: float, bias_size: int, rngs: nnx.Rngs
    ):
        """bias_size: entries of the output layer's bias, which is kept here; 0: none."""
        # of a gated network, the activation of its gate: one matrix has nothing to gate
        self.activation = ACTIVATIONS[GATES.get(activation, activation)]
        self.dense = param((d_model, d_model), axes=("embed", None), init=xavier_uniform(), rngs=rngs)
        self.dense_bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)
        self.norm = NORMS[norm_kind](d_model, eps=norm_eps, rngs=rngs)
        if bias_size:
            self.bias = param((bias_size,), axes=("vocab",), init=zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(self.activation(x @ self.dense[...] + self.dense_bias[...][None, None]))


class Pooler(nnx.Module):
    """tanh(x_0 W + b) of the first token (Devlin et al. 2019)."""

    def __init__(self, d_model: int, *, rngs: nnx.Rngs):
        self.dense = param((d_model, d_model), axes=("embed", None), init=xavier_uniform(), rngs=rngs)
        self.dense_bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        return jnp.tanh(x[:, 0] @ self.dense[...] + self.dense_bias[...][None])


class LabelHead(nnx.Module):
    """Dropout, then x W + b: a number for each label."""

    def __init__(self, d_model: int, num_labels: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.dense = param((d_model, num_labels), axes=("embed", None), init=xavier_uniform(), rngs=rngs)
        if bias:
            self.dense_bias = param((num_labels,), axes=(None,), init=zeros, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*B D"], *, dropout_rate: float, key: Key[Array, ""] | None
    ) -> Float[Array, "*B labels"]:
        """float32, as logits are."""
        x = dropout(x, rate=dropout_rate, key=key)
        numbers = jnp.einsum("...D,DC->...C", x, self.dense[...], preferred_element_type=jnp.float32)
        if not hasattr(self, "dense_bias"):
            return numbers
        bias = self.dense_bias[...].astype(jnp.float32)
        return numbers + bias.reshape((1,) * (numbers.ndim - 1) + bias.shape)


def last_token(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B D"]:
    """Of each row the last token that is no padding (segment 0), the only one that a causal stack lets see the row."""
    if segment_ids is None:
        return x[:, -1]
    index = jnp.where(segment_ids > 0, jnp.arange(x.shape[1])[None], 0).max(axis=1)
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def mean_pooled(x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B D"]:
    """The mean of each row's tokens in float32, padding (segment 0) left out (Reimers and Gurevych 2019).

    A row of padding alone gives zeros.
    """
    if segment_ids is None:
        return x.astype(jnp.float32).mean(axis=1)
    live = (segment_ids > 0)[..., None]
    total = jnp.where(live, x.astype(jnp.float32), 0.0).sum(axis=1)
    return total / jnp.maximum(live.sum(axis=1).astype(jnp.float32), 1.0)


def unit_length(x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """x / |x| in each row, zeros where the row is zeros: dot products of rows are cosines."""
    square = jnp.square(x).sum(axis=-1, keepdims=True)
    # a root of zero would have no gradient
    return x * jax.lax.rsqrt(jnp.where(square > 0, square, 1.0))
