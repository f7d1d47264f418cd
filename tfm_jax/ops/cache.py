"""Keys and values kept between decoding steps."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class KeyValue(NamedTuple):
    """Projected keys `B S K H` and values `B S K E` of one layer, or of all layers with an axis L in front."""

    key: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a decoder needs of the past: its own keys and values, and those of the encoder for cross-attention.

    `keys_values`: `L B S ...`, column by column as tokens came. `positions`: `B S`, the position each column holds, -1
    for an empty column or padding, invisible to every query. `length`: columns used so far. `cross`: `L B S' ...`,
    projected once; `cross_segment_ids`: `B S'`, 0 for padding; None in a decoder without cross-attention.
    """

    keys_values: KeyValue
    positions: Any
    length: Any
    cross: KeyValue | None = None
    cross_segment_ids: Any = None

    def append(self, positions: Int[Array, "B T"]) -> "KVCache":
        """Give T new columns their positions; the layers write their keys and values at the old `length`."""
        start = (jnp.zeros((), jnp.int32), self.length)
        return replace(
            self,
            positions=jax.lax.dynamic_update_slice(self.positions, positions, start),
            length=self.length + jnp.int32(positions.shape[1]),
        )

    def take_rows(self, rows: Int[Array, "R"]) -> "KVCache":
        """The cache of other rows, in the order of `rows` (which may repeat)."""
        own = self.swap_beams(rows)
        return replace(
            own,
            cross=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.cross),
            cross_segment_ids=jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self.cross_segment_ids),
        )

    def swap_beams(self, rows: Int[Array, "R"]) -> "KVCache":
        """As `take_rows` where a row is only replaced by one of the same sentence, whose cross-attention is equal."""
        return replace(
            self,
            keys_values=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.keys_values),
            positions=jnp.take(self.positions, rows, axis=0),
        )


def write(cache: KeyValue, new: KeyValue, start: Int[Array, ""]) -> KeyValue:
    """Put T new columns of one layer at column `start`. The caller makes sure that they fit."""
    zero = jnp.zeros((), jnp.int32)
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice(old, x, (zero, start, zero, zero)), cache, new)
