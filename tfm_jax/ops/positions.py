"""Positional encodings as functions of positions."""

import math
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Rotary:
    """The switches of rotary position embedding (Su et al. 2021, RoFormer)."""

    pairing: Literal["interleaved", "half"] = "half"
    """Which elements turn together: 2i and 2i + 1 (the paper, GPT-J) or i and i + R/2 (GPT-NeoX, Llama)."""
    base: float = 10_000.0
    """Pair i turns by base ** (-2i / R) radians per position."""
    fraction: float = 1.0
    """Share of a head that turns, R / H, from its first element on; the rest stays as it is (GPT-J, GPT-NeoX)."""
    scaling: Literal["none", "linear", "ntk", "llama3"] = "none"
    """For contexts longer than trained: all rates divided (linear: Chen et al. 2023), the base raised such that only
    the slow pairs slow down (ntk), or the pairs that turn less than once divided (llama3: Llama 3.1)."""
    factor: float = 1.0
    """How many times longer the context is; 1 changes nothing."""
    original_length: int = 8192
    """llama3: the length of training. Unit: tokens."""
    low_frequency_factor: float = 1.0
    """llama3: pairs that turn fewer times than this within the original length are divided by factor."""
    high_frequency_factor: float = 4.0
    """llama3: pairs that turn more times than this stay; between the two, a linear blend."""

    def __post_init__(self):
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"rope.fraction is {self.fraction}: it lies in (0, 1]")
        if not (1.0 < self.base < math.inf and 1.0 <= self.factor < math.inf):
            raise ValueError(f"rope.base is {self.base}, rope.factor {self.factor}: finite, above 1 and at least 1")
        if (self.factor != 1.0) == (self.scaling == "none"):
            raise ValueError(f"rope.scaling is {self.scaling!r} with factor {self.factor}: give both or neither")
        own = {
            name: getattr(self, name) for name in ("original_length", "low_frequency_factor", "high_frequency_factor")
        }
        if self.scaling != "llama3" and tuple(own.values()) != (8192, 1.0, 4.0):
            raise ValueError(f"rope.scaling is {self.scaling!r}, but of {own} some are set: they are for llama3")
        if not 0.0 < self.low_frequency_factor < self.high_frequency_factor or self.original_length < 1:
            raise ValueError(
                f"rope: low_frequency_factor {self.low_frequency_factor}, high_frequency_factor "
                f"{self.high_frequency_factor}, original_length {self.original_length}: 0 < low < high, length >= 1"
            )

    def rotated(self, head_size: int) -> int:
        """R, how many elements of a head turn; raises `ValueError` where that is odd."""
        rotated = math.floor(head_size * self.fraction + 1e-6)  # 44 * (30 / 44) is not quite 30
        if rotated % 2 or rotated == 0:
            raise ValueError(
                f"rope turns pairs of elements, but the fraction {self.fraction} of a head of size {head_size} is "
                f"{rotated}: an even number is needed"
            )
        return rotated

    def rates(self, head_size: int) -> tuple[float, ...]:
        """Radians per position of each of the R/2 pairs."""
        rotated, base = self.rotated(head_size), self.base
        if self.scaling == "ntk" and rotated > 2:
            base = base * self.factor ** (rotated / (rotated - 2))
        rates = [base ** (-2.0 * i / rotated) for i in range(rotated // 2)]
        match self.scaling:
            case "none" | "ntk":
                return tuple(rates)
            case "linear":
                return tuple(rate / self.factor for rate in rates)
            case "llama3":
                return tuple(self._blend(rate) for rate in rates)
            case other:
                raise ValueError(f"rope.scaling is {other!r}: none, linear, ntk or llama3 is expected")

    def _blend(self, rate):
        turns = self.original_length * rate / (2.0 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        return keep * rate + (1.0 - keep) * rate / self.factor


def rotary_embedding(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], settings: Rotary
) -> Float[Array, "B T N H"]:
    """Queries or keys with each pair of elements turned by position * rate, so that products of two depend on the
    difference of their positions alone (Su et al. 2021, eq. 34).

    Angles, sines and cosines are float32: bfloat16 cannot tell position 257 from 256. Raises `ValueError` where an odd
    number of elements would turn.
    """
    H = x.shape[-1]
    R = settings.rotated(H)
    rates = jnp.asarray(settings.rates(H), jnp.float32)
    angles = positions[:, :, None, None].astype(jnp.float32) * rates[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turning, rest = x[..., :R].astype(jnp.float32), x[..., R:]
    match settings.pairing:
        case "interleaved":
            first, second = turning[..., 0::2], turning[..., 1::2]
        case "half":
            first, second = turning[..., : R // 2], turning[..., R // 2 :]
        case other:
            raise ValueError(f"rope.pairing is {other!r}: interleaved or half is expected")
    turned = (first * cos - second * sin, first * sin + second * cos)
    if settings.pairing == "interleaved":
        turned = jnp.stack(turned, axis=-1).reshape(turning.shape)
    else:
        turned = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def relative_position_bucket(
    distances: Int[Array, "..."], *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Int[Array, "..."]:
    """The bucket of T5 (Raffel et al. 2020, section 2.1) for each distance key position - query position.

    Half of the buckets are exact distances, the others grow logarithmically up to max_distance, beyond which all share
    the last one. Bidirectional: the upper half of the buckets is for keys after the query. Causal: those have bucket 0.
    """
    if num_buckets < (4 if bidirectional else 2):
        raise ValueError(f"num_buckets is {num_buckets}: at least {4 if bidirectional else 2} are needed")
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    if max_distance <= exact:
        raise ValueError(f"max_distance is {max_distance}, but {exact} buckets are single distances: it must be larger")
    before = jnp.where(distances > 0, side, 0).astype(jnp.int32) if bidirectional else jnp.int32(0)
    distance = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    # a logarithm that falls on a whole number would round either way: the bounds are found on the host, exactly
    bounds = [_first_distance(bucket, exact, side, max_distance) for bucket in range(exact + 1, side)]
    beyond = sum((distance >= bound).astype(jnp.int32) for bound in bounds)
    return before + jnp.where(distance < exact, distance, exact + beyond).astype(jnp.int32)


def _first_distance(bucket, exact, side, max_distance):
    """The smallest distance of a logarithmic bucket: exact * (max_distance / exact) ** (j / (side - exact)), up."""
    return math.ceil(exact * (max_distance / exact) ** ((bucket - exact) / (side - exact)) - 1e-9)
