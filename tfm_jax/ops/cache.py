"""Keys and values kept between decoding steps."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class KeyValue(NamedTuple):
    """Projected keys `B S K H` and values `B S K E` of one layer."""

    key: Any
    value: Any


class Stored(NamedTuple):
    """Keys `B K H S` and values `B K S E` of one layer, as products of few queries read them fastest."""

    key: Any
    value: Any

    @classmethod
    def of(cls, projected: KeyValue) -> "Stored":
        """The same numbers in the order of the cache."""
        return cls(projected.key.transpose(0, 2, 3, 1), projected.value.swapaxes(1, 2))

    @property
    def projected(self) -> KeyValue:
        """The same numbers in the order of attention."""
        return KeyValue(self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2))

    def write(self, new: KeyValue, start: Int[Array, ""]) -> "Stored":
        """Put T new columns at column `start`. The caller makes sure that they fit."""
        zero, new = jnp.zeros((), jnp.int32), Stored.of(new)
        return Stored(
            jax.lax.dynamic_update_slice(self.key, new.key.astype(self.key.dtype), (zero, zero, zero, start)),
            jax.lax.dynamic_update_slice(self.value, new.value.astype(self.value.dtype), (zero, zero, start, zero)),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a decoder needs of the past: its own keys and values, and those of the encoder for cross-attention.

    `layers`: one `Stored` a layer, column by column as tokens came. `positions`: `B S`, the position each column holds,
    -1 for an empty column or padding, invisible to every query. `length`: columns used so far. `cross`: one `Stored` a
    layer, projected once; `cross_segment_ids`: `B S'`, 0 for padding; None in a decoder without cross-attention.
    """

    layers: tuple[Stored, ...]
    positions: Any
    length: Any
    cross: tuple[Stored, ...] | None = None
    cross_segment_ids: Any = None

    @classmethod
    def empty(cls, shapes: tuple[Stored, ...], columns: int, **cross: Any) -> "KVCache":
        """No columns used yet. shapes: for each layer arrays or shapes of any number of columns."""
        layers = tuple(
            Stored(
                jnp.zeros((*layer.key.shape[:3], columns), layer.key.dtype),
                jnp.zeros((*layer.value.shape[:2], columns, layer.value.shape[3]), layer.value.dtype),
            )
            for layer in shapes
        )
        rows = shapes[0].key.shape[0]
        return cls(layers, jnp.full((rows, columns), -1, jnp.int32), jnp.zeros((), jnp.int32), **cross)

    @property
    def columns(self) -> int:
        """How many columns there are room for."""
        return self.positions.shape[1]

    def append(self, positions: Int[Array, "B T"]) -> "KVCache":
        """Give T new columns their positions; the layers write their keys and values at the old `length`."""
        start = (jnp.zeros((), jnp.int32), self.length)
        return replace(
            self,
            positions=jax.lax.dynamic_update_slice(self.positions, positions, start),
            length=self.length + jnp.int32(positions.shape[1]),
        )

    def grown(self, columns: int) -> "KVCache":
        """The cache with room for so many columns in all."""
        more = columns - self.columns
        if more < 0:
            raise ValueError(f"the cache has {self.columns} columns: it cannot grow to {columns}")
        at_end = lambda x, axis, value=0: jnp.pad(  # noqa: E731
            x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value
        )
        layers = tuple(Stored(at_end(layer.key, 3), at_end(layer.value, 2)) for layer in self.layers)
        return replace(self, layers=layers, positions=at_end(self.positions, 1, -1))

    def take_rows(self, rows: Int[Array, "R"]) -> "KVCache":
        """The cache of other rows, in the order of `rows` (which may repeat)."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0) if x.ndim else x, self)
