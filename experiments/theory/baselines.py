"""What attention is compared with: recurrence and convolution from flax.nnx, over sequences B T D."""

import jax
import jax.numpy as jnp
from flax import nnx


class LSTM(nnx.Module):
    """A long short-term memory that reads one token after the other (Hochreiter and Schmidhuber 1997)."""

    def __init__(self, d_model: int, *, unroll: int = 1, rngs: nnx.Rngs):
        self.cell = nnx.OptimizedLSTMCell(d_model, d_model, rngs=rngs)
        self.unroll = unroll

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output after each token."""
        structure, params = nnx.split(self.cell)
        step = lambda carry, x_BD: nnx.merge(structure, params)(carry, x_BD)  # noqa: E731
        empty = jnp.zeros_like(x[:, 0])
        return jax.lax.scan(step, (empty, empty), x.swapaxes(0, 1), unroll=self.unroll)[1].swapaxes(0, 1)


class Convolutions(nnx.Module):
    """Causal convolutions over `kernel` tokens each, every one added to what it reads (Bai et al. 2018).

    Layer i skips `dilations[i] - 1` tokens between those that it reads: 1 everywhere is a contiguous stack, powers of
    `kernel` are a dilated one (van den Oord et al. 2016).
    """

    def __init__(self, d_model: int, kernel: int, dilations: tuple[int, ...], *, rngs: nnx.Rngs):
        sizes = (d_model, d_model, (kernel,))
        convolution = lambda dilation: nnx.Conv(*sizes, kernel_dilation=dilation, padding="CAUSAL", rngs=rngs)  # noqa: E731
        self.convolutions = nnx.List([convolution(dilation) for dilation in dilations])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of the last layer."""
        for layer in self.convolutions:
            x = x + jax.nn.gelu(layer(x))
        return x
