"""Positional encodings as functions of positions."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoidal_positions(positions: Int[Array, "B T"], d_model: int) -> Float[Array, "B T {d_model}"]:
    """Sine and cosine encoding of Vaswani et al. (2017), section 3.5, interleaved as in the paper.

        PE(pos, 2i)     = sin(pos / 10000 ** (2i / d_model))
        PE(pos, 2i + 1) = cos(pos / 10000 ** (2i / d_model))

    Any width is allowed; an odd one ends with a sine. Always float32: bfloat16 cannot tell position 257 from 256.
    """
    if d_model < 1:
        raise ValueError(f"d_model is {d_model}: at least 1 is needed")
    pairs = jnp.arange((d_model + 1) // 2, dtype=jnp.float32)
    rates = jnp.exp(pairs * jnp.float32(-2.0 * math.log(10000.0) / d_model))
    angles = positions[..., None].astype(jnp.float32) * rates[None, None]
    table = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return table.reshape(*positions.shape, -1)[..., :d_model]


def sinusoidal_table(length: int, d_model: int) -> Float[Array, "{length} {d_model}"]:
    """Rows 0 .. length - 1 of `sinusoidal_positions`."""
    return sinusoidal_positions(jnp.arange(length, dtype=jnp.int32)[None], d_model)[0]
