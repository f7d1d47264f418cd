"""The switch `positions` of a model: its modules, and what of a configuration goes together.

A configuration is any dataclass with the fields positions, rope, shaw_distance, t5_buckets, t5_max_distance,
implementation, num_heads, kv_heads, d_v, max_length and dropout.attention, as the families' are.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tfm_jax.config import require
from tfm_jax.nn.layers import Embedding, param
from tfm_jax.ops import (
    ALiBi,
    AttentionBias,
    AttentionMask,
    Rotary,
    ShawBias,
    T5Bias,
    alibi,
    explain_implementation,
    relative_position_bucket,
    sinusoidal_positions,
)

OWNERS = {"rope": "rope", "shaw_distance": "shaw", "t5_buckets": "t5", "t5_max_distance": "t5"}


class T5PositionBias(nnx.Module):
    """The table of `ops.T5Bias`, which all layers of a stack share."""

    def __init__(self, num_heads: int, *, num_buckets: int, max_distance: int, bidirectional: bool, rngs: nnx.Rngs):
        self.max_distance, self.bidirectional = max_distance, bidirectional
        # scores of a fresh model have standard deviation near 1/3 under Xavier: the bias starts well below
        init = jax.nn.initializers.normal(0.02)
        self.table = param((num_buckets, num_heads), axes=(None, "heads"), init=init, rngs=rngs)

    def __call__(self) -> T5Bias:
        return T5Bias(self.table[...], bidirectional=self.bidirectional, max_distance=self.max_distance)


class ALiBiPositionBias(nnx.Module):
    """`ops.alibi`: the published slopes, no parameters."""

    def __init__(self, num_heads: int):
        self.num_heads = num_heads

    def __call__(self) -> ALiBi:
        return alibi(self.num_heads)


def with_positions(
    x: Float[Array, "B T D"], positions: Int[Array, "#B T"], kind: str, table: Embedding | None
) -> Float[Array, "B T D"]:
    """x plus the vectors of its positions, where such tell them: sinusoidal (in halves: sines first) or of `table`."""
    match kind:
        case "sinusoidal":
            return x + sinusoidal_positions(positions, x.shape[-1]).astype(x.dtype)
        case "sinusoidal_halves":
            vectors = sinusoidal_positions(positions, x.shape[-1])
            return x + jnp.concatenate([vectors[..., 0::2], vectors[..., 1::2]], axis=-1).astype(x.dtype)
        case "learned":
            return x + table(jnp.where(positions < 0, 0, positions))
        case _:
            return x


def or_counted(positions: Int[Array, "#B T"] | None, tokens: Int[Array, "B T"]) -> Int[Array, "#B T"]:
    """The positions, or where there are none 0, 1, ... in one row, which holds for all."""
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if positions is None else positions


def require_length(tokens: Int[Array, "B T"], max_length: int) -> None:
    """Raise `ValueError` for more tokens than the model accepts."""
    require(
        tokens.shape[1] <= max_length,
        f"the input has {tokens.shape[1]} tokens, the model accepts {max_length}: "
        "shorten it or build the model with a larger max_length",
    )


def position_bias(config: Any, *, bidirectional: bool, rngs: nnx.Rngs) -> Callable[[], AttentionBias] | None:
    """The module that makes the bias which all layers of a stack share; None where positions are not told by one."""
    match config.positions:
        case "alibi":
            return ALiBiPositionBias(config.num_heads)
        case "t5":
            sizes = {"num_buckets": config.t5_buckets, "max_distance": config.t5_max_distance}
            return T5PositionBias(config.num_heads, **sizes, bidirectional=bidirectional, rngs=rngs)
        case _:
            return None


def require_positions(config: Any, d_k: int) -> None:
    """Raise `ValueError` for settings of another kind of positions than the chosen one, and for impossible ones."""
    defaults = {f.name: f.default for f in fields(config)} | {"rope": Rotary()}
    for name, kind in OWNERS.items():
        require(
            config.positions == kind or getattr(config, name) == defaults[name],
            f"model.{name} is {getattr(config, name)}, but model.positions is {config.positions!r}, not {kind!r}",
        )
    match config.positions:
        case "rope":
            config.rope.rotated(d_k)
        case "shaw":
            require(config.shaw_distance >= 1, f"model.shaw_distance is {config.shaw_distance}: at least 1 is needed")
        case "t5":
            sizes = {"num_buckets": config.t5_buckets, "max_distance": config.t5_max_distance}
            for bidirectional in (True, False):
                bucket = functools.partial(relative_position_bucket, bidirectional=bidirectional, **sizes)
                try:
                    jax.eval_shape(bucket, jax.ShapeDtypeStruct((), jnp.int32))
                except ValueError as error:
                    raise ValueError(f"model.t5_buckets, model.t5_max_distance: {error}") from None


def require_implementation(config: Any, d_k: int) -> None:
    """Raise `ValueError` where the named implementation of attention cannot train this model, with its reason."""
    if config.implementation == "auto":
        return
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    # a kernel that wants lengths of a certain kind says so of the batches, not of the longest one there may be
    heads, d_v = (1, -(-config.max_length // 128) * 128, config.num_heads), config.d_v or d_k
    segments = jax.ShapeDtypeStruct(heads[:2], jnp.int32)
    biases = {
        "alibi": ALiBi(floats(config.num_heads)),
        "t5": T5Bias(floats(config.t5_buckets, config.num_heads)),
        "shaw": ShawBias(*(floats(2 * config.shaw_distance + 1, size) for size in (d_k, d_v))),
    }
    refused = explain_implementation(
        floats(*heads, d_k),
        floats(*heads[:2], config.kv_heads, d_k),
        floats(*heads[:2], config.kv_heads, d_v),
        mask=AttentionMask(query_segment_ids=segments, key_segment_ids=segments, causal=True),
        bias=biases.get(config.positions),
        dropout_rate=config.dropout.attention,
        dropout_key=segments,
    ).refused
    reason = refused.get(config.implementation)
    require(reason is None, f"model.implementation {config.implementation!r} cannot train this model: {reason}")
