"""Dropout (Srivastava et al. 2014) whose choices depend on the key and the element's index alone."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key


def keep_mask(
    key: Key[Array, ""], shape: tuple[int, ...], rate: float, *, tile: tuple[tuple[Any, int], ...] | None = None
) -> Bool[Array, "..."]:
    """True with probability 1 - rate, independently for each element of `shape`.

    The choice is a hash of (key, row-major index): it is the same on any number of devices, and `tile` asks for a part
    alone: (start, length) for each axis, the start an integer or a traced int32. A 32-bit finaliser (MurmurHash3) costs
    about a tenth of threefry's bits on a CPU; beyond 2**32 elements the choices repeat. Raises `ValueError` for a rate
    outside [0, 1).
    """
    _check(rate)
    tile = tuple((0, length) for length in shape) if tile is None else tile
    lengths = tuple(length for _, length in tile)
    # the key's own data will not do: that of key(0) and key(1) differs in one bit, and so would their choices
    words = jax.random.bits(key, (2,), jnp.uint32)
    index = jnp.zeros(lengths, jnp.uint32)
    for axis, (start, _) in enumerate(tile):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        along = jax.lax.broadcasted_iota(jnp.uint32, lengths, axis) + jnp.asarray(start).astype(jnp.uint32)
        index = index + along * stride
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
