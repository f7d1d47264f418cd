"""One request for attention, and the scores and values of one tile of it, which every exact implementation shares."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tfm_jax.ops.biases import Biases, Tile
from tfm_jax.ops.dropout import keep_mask
from tfm_jax.ops.masks import AttentionMask, Block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Where the scores of a request stand among those of the request of which it is a device's part."""

    first_row: Any
    """Of the batch."""
    first_head: Any
    first_query: Any
    shape: tuple[int, int, int, int] = field(metadata={"static": True})
    """(B, N, T, S) of the whole."""

    def drop(self, weights: Float[Array, "B N T S"], rate: float, key: Any, rows: Block, columns: Block) -> Array:
        """The weights of a tile after dropout, the choices those of the whole array."""
        if key is None or rate == 0.0:
            return weights
        B, N, _, _ = weights.shape
        queries = (self.first_query + rows.start, rows.length)
        tile = ((self.first_row, B), (self.first_head, N), queries, (columns.start, columns.length))
        keep = keep_mask(key, self.shape, rate, tile=tile)
        return jnp.where(keep, weights / (1.0 - rate), 0.0)


@dataclass(frozen=True)
class Request:
    """The arguments of `dot_product_attention`, checked and in one form."""

    query: Any
    """`B T N H`"""
    key: Any
    """`B S K H`"""
    value: Any
    """`B S K E`"""
    mask: AttentionMask | None
    biases: Biases
    scale: Any
    dropout_rate: float
    dropout_key: Any
    """None where nothing is dropped."""
    part_of: Place | None = None
    """None: it is the whole."""

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self.part_of or Place(0, 0, 0, self.shape)

    @property
    def blocks(self) -> tuple[Block, Block]:
        """All its queries and all its keys."""
        _, _, T, S = self.shape
        return Block(0, T, self.place.first_query), Block(0, S)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, N, T, S) of the scores."""
        (B, T, N, _), S = self.query.shape, self.key.shape[1]
        return B, N, T, S

    @property
    def heads_first(self) -> tuple[Array, Array, Array]:
        """Query times scale `B N T H`, key `B K S H` and value `B K S E`: the order of a product per head."""
        scaled = self.query * jnp.asarray(self.scale, self.query.dtype)
        return tuple(x.swapaxes(1, 2) for x in (scaled, self.key, self.value))


def tile_visible(
    mask: AttentionMask | None, biases: Biases, tile: Tile, rows: Block, columns: Block, num_heads: int
) -> Bool[Array, "#B #N #T #S"] | None:
    """Which keys of a tile each query may see by mask and biases (cut to the tile); None: all."""
    visible = None if mask is None else mask.tile(rows, columns, num_heads, tile.first_head)
    for bias in biases:
        finite = bias.visible(tile)
        visible = both(visible, finite)
    return visible


def tile_logits(query: Float[Array, "B N T H"], key: Float[Array, "B K S H"], biases: Biases, tile: Tile) -> Array:
    """Scores `B N T S` of a tile in float32, biases (cut to the tile) applied; N / K heads share a key head."""
    (B, N, T, H), (_, K, S, _) = query.shape, key.shape
    grouped = query.reshape(B, K, N // K, T, H)
    logits = jnp.einsum("BKGTH,BKSH->BKGTS", grouped, key, preferred_element_type=jnp.float32).reshape(B, N, T, S)
    return with_biases(logits, biases, tile)


def with_biases(logits: Float[Array, "B N T S"], biases: Biases, tile: Tile) -> Float[Array, "B N T S"]:
    """The biases applied in order; what one hides (-inf), the next ones do not show again."""
    hidden = None
    for i, bias in enumerate(biases):
        logits = bias.logits(logits, tile)
        if i + 1 < len(biases):
            minus_infinity = jnp.isneginf(jax.lax.stop_gradient(logits))
            hidden = minus_infinity if hidden is None else hidden | minus_infinity
            logits = jnp.where(hidden, 0.0, logits)
    return logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)


def tile_values(weights: Float[Array, "B N T S"], value: Float[Array, "B K S E"], biases: Biases, tile: Tile) -> Array:
    """What a tile of weights adds to the output: `B N T E` in float32, linear in the weights."""
    (B, N, T, S), (_, K, _, E) = weights.shape, value.shape
    grouped = weights.astype(value.dtype).reshape(B, K, N // K, T, S)
    output = jnp.einsum("BKGTS,BKSE->BKGTE", grouped, value, preferred_element_type=jnp.float32).reshape(B, N, T, E)
    for bias in biases:
        more = bias.value(weights, tile)
        output = output if more is None else output + more
    return output


def seen_keys(visible: Bool[Array, "#B #N #T S"], num_key_heads: int) -> Bool[Array, "#B #K S 1"]:
    """Keys that some query of their head group sees. 0 * NaN is NaN: products are clean only if the others are zero."""
    seen_BNS = visible.any(axis=2)
    if seen_BNS.shape[1] != 1:
        seen_BNS = seen_BNS.reshape(seen_BNS.shape[0], num_key_heads, -1, seen_BNS.shape[2]).any(axis=2)
    return seen_BNS[..., None]


def both(mask: Array | None, other: Array | None) -> Array | None:
    """The conjunction of two masks, either of which may be None (all visible)."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other
