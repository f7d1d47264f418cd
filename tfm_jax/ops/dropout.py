"""Dropout (Srivastava et al. 2014) whose choices depend on the key and the element's index alone."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key


def keep_mask(key: Key[Array, ""], shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
    """True with probability 1 - rate, independently for each element of `shape`.

    The choice is a hash of (key, row-major index): any block of the array can be made alone and is the same on any
    number of devices. A 32-bit finaliser (MurmurHash3) costs about a tenth of threefry's bits on a CPU; beyond 2**32
    elements the choices repeat. Raises `ValueError` for a rate outside [0, 1).
    """
    _check(rate)
    # the key's own data will not do: that of key(0) and key(1) differs in one bit, and so would their choices
    words = jax.random.bits(key, (2,), jnp.uint32)
    strides = [math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape))]
    index = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    bits = (index * jnp.uint32(0x9E3779B1)) ^ words[0]
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B) + words[1]
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def dropout(x: Float[Array, "..."], *, rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Set elements to zero with probability `rate` and scale the others by 1 / (1 - rate).

    Without a key (evaluation) or with rate 0, `x` itself. The rate lies in [0, 1).
    """
    _check(rate)
    if key is None or rate == 0.0:
        return x
    return jnp.where(keep_mask(key, x.shape, rate), x / (1.0 - rate), 0.0).astype(x.dtype)


def _check(rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate is {rate}: it lies in [0, 1)")
