"""Parameters and the simple layers: embedding, layer norm, feed-forward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from tfm_jax.ops import blocks
from tfm_jax.sharding import constrain

Initializer = Callable[..., Array]
ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
xavier_uniform = jax.nn.initializers.xavier_uniform


def param(shape: tuple[int, ...], *, axes: tuple[str | None, ...], init: Initializer, rngs: nnx.Rngs) -> nnx.Param:
    """A float32 parameter that carries the logical names of its axes, which `sharding` maps to devices."""
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def plain(module: nnx.Module) -> dict:
    """The parameters of a module as a nested dict of arrays, as the functions of `ops` take them."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


class Embedding(nnx.Module):
    """A table of V vectors of width D; `attend` uses it as an output layer too.

    std: the standard deviation of its initial values; None: D ** -0.5.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        axis: str | None = "vocab",
        std: float | None = None,
        rngs: nnx.Rngs,
    ):
        init = jax.nn.initializers.normal(d_model**-0.5 if std is None else std)
        self.axis, self.table = axis, param((vocab_size, d_model), axes=(axis, "embed"), init=init, rngs=rngs)

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The rows of the table; an id outside 0 .. V - 1 gives NaN (the data pipeline refuses it before)."""
        # rows looked up in a table cut along D would have to be sent to where their batch is
        table = constrain(self.table[...], self.axis, None)
        ids = jnp.where(ids < 0, table.shape[0], ids)  # take would count negative ids from the end
        return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits x E^T of the output layer that shares this table (Press and Wolf 2017), in float32."""
        return blocks.vocabulary_logits(x, self.table[...])


class LayerNorm(nnx.Module):
    """`ops.layer_norm` with its scale and bias."""

    def __init__(self, d_model: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = param((d_model,), axes=(None,), init=ones, rngs=rngs)
        self.bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return blocks.layer_norm(plain(self), x, eps=self.eps)


class RMSNorm(nnx.Module):
    """`ops.rms_norm` with its scale."""

    def __init__(self, d_model: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = param((d_model,), axes=(None,), init=ones, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return blocks.rms_norm(plain(self), x, eps=self.eps)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


class FeedForward(nnx.Module):
    """`ops.feed_forward` with its matrices (D F, F D, and D F for a gate) and, with `bias`, their biases."""

    def __init__(self, d_model: int, d_ff: int, *, activation: str = "relu", bias: bool = True, rngs: nnx.Rngs):
        self.activation = activation
        inward = ("up", "gate") if activation in blocks.GATES else ("up",)
        for name in inward:
            setattr(self, name, param((d_model, d_ff), axes=("embed", "mlp"), init=xavier_uniform(), rngs=rngs))
            if bias:
                setattr(self, f"{name}_bias", param((d_ff,), axes=("mlp",), init=zeros, rngs=rngs))
        self.down = param((d_ff, d_model), axes=("mlp", "embed"), init=xavier_uniform(), rngs=rngs)
        if bias:
            self.down_bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_rate: float = 0.0, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        return blocks.feed_forward(plain(self), x, activation=self.activation, dropout_rate=dropout_rate, key=key)
