"""What changes the scores beside the product of query and key: biases as data, made tile by tile.

Every bias is a frozen dataclass registered as a pytree: its arrays are parameters with exact gradients in every
implementation. A new one derives from `AttentionBias`, defines `logits`, and works in `reference` and `blockwise`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tfm_jax.ops.masks import Block, cut, pad_all
from tfm_jax.ops.positions import relative_position_bucket


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tile:
    """What a bias may look at: the queries of a tile, times the scale, and where its queries and keys stand."""

    query: Any
    """`B N T H`, multiplied by the scale."""
    query_positions: Any
    """`B T` integers, or `1 T` where all rows agree."""
    key_positions: Any
    """`B S`, or `1 S`."""
    first_head: Any = 0
    """The number of the first head, where a device has some of them alone."""

    @property
    def distances(self) -> Int[Array, "#B T S"]:
        """Key position minus query position."""
        return self.key_positions[:, None, :] - self.query_positions[:, :, None]


class AttentionBias:
    """A transformation of the scores, and where wanted a term of the output that depends on positions."""

    axes: ClassVar[dict[str, tuple[int | None, int | None]]] = {}
    """For each array that runs over queries or keys: the number of its axis over queries and over keys."""
    outer_axes: ClassVar[dict[str, tuple[int | None, int | None]]]
    """For each array that runs over batch or heads: the number of its axis over the batch and over heads. It is what
    lets devices share the work by `Shared`; each class says it for itself, as a derived one may mean more."""

    def logits(self, logits: Float[Array, "B N T S"], tile: Tile) -> Float[Array, "B N T S"]:
        """The scores of a tile, float32, with this bias applied; -inf says what a False in the mask says."""
        return logits

    def visible(self, tile: Tile) -> Bool[Array, "#B #N #T #S"] | None:
        """Where it hides keys whatever the score, so that what stands there, NaN included, never matters."""
        return None

    def value(self, weights: Float[Array, "B N T S"], tile: Tile) -> Float[Array, "B N T E"] | None:
        """What is added to the output: linear in the weights of the tile. None: nothing."""
        return None

    def block(self, rows: Block, columns: Block) -> "AttentionBias":
        """The bias with its arrays over queries and keys cut to a tile."""
        blocks = (rows, columns)
        cuts = {}
        for name, axes in self.axes.items():
            x = getattr(self, name)
            for axis, block in zip(axes, blocks, strict=True):
                x = x if axis is None else cut(x, axis, block)
            cuts[name] = x
        return replace(self, **cuts) if cuts else self

    def updated(self, part: "AttentionBias", rows: Block, columns: Block) -> "AttentionBias":
        """The bias with what `block` cut out replaced by `part`."""
        arrays = ((name, axes, getattr(self, name), getattr(part, name)) for name, axes in self.axes.items())
        return replace(part, **{name: _put(whole, new, axes, rows, columns) for name, axes, whole, new in arrays})

    def padded(self, more_queries: int, more_keys: int) -> "AttentionBias":
        """The bias of longer axes."""
        longer = {n: pad_all(getattr(self, n), axes, more_queries, more_keys) for n, axes in self.axes.items()}
        return replace(self, **longer) if longer else self

    def divisible(self, shape: tuple[int, int, int, int]) -> bool:
        """Whether a device can compute a part of the scores, of shape (B, N, T, S), from its part of the arrays."""
        return "outer_axes" in vars(type(self))

    def check(self, shape: tuple[int, int, int, int], sizes: tuple[int, int | None]) -> None:
        """Raise `ValueError` where the bias does not fit scores of shape (B, N, T, S) and heads of sizes (H, E).

        E is None where there are no values, only weights.
        """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBias(AttentionBias):
    """An array added to the scores, with gradient; -inf hides a key, which is the textbook's additive mask."""

    array: Any
    """Broadcasts to `B N T S`."""

    axes: ClassVar = {"array": (2, 3)}
    outer_axes: ClassVar = {"array": (0, 1)}

    def logits(self, logits, tile):
        # -inf stays out of the sum: its gradient would be NaN
        return logits + jnp.where(jnp.isneginf(self.array), 0, self.array).astype(jnp.float32)

    def visible(self, tile):
        return ~jnp.isneginf(self.array)

    def check(self, shape, sizes):
        own = self.array.shape
        if len(own) != 4 or any(n not in (1, wanted) for n, wanted in zip(own, shape, strict=True)):
            raise ValueError(f"bias has shape {own}: one that broadcasts to {shape} is expected")
        if not jnp.issubdtype(self.array.dtype, jnp.floating):
            raise ValueError(f"bias has dtype {self.array.dtype}: a float array is expected; a boolean one is a mask")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ALiBi(AttentionBias):
    """score - slope_n * |key position - query position| (Press et al. 2022); `alibi(num_heads)` has their slopes."""

    slopes: Any
    """`N`, float32."""

    outer_axes: ClassVar = {"slopes": (None, 0)}

    def logits(self, logits, tile):
        distance_BTS = jnp.abs(tile.distances).astype(jnp.float32)
        return logits - self.slopes[None, :, None, None] * distance_BTS[:, None]

    def check(self, shape, sizes):
        _check_heads("slopes", self.slopes.shape, 0, shape[1])


def alibi(num_heads: int) -> ALiBi:
    """ALiBi with the published slopes, which are no parameters: no gradient reaches them."""
    return ALiBi(jnp.asarray(alibi_slopes(num_heads), jnp.float32))


def alibi_slopes(num_heads: int) -> list[float]:
    """2 ** (-8 n / N) for n = 1 .. N (Press et al. 2022, section 3); for other counts than powers of two, as published,
    the slopes of the power of two below and then every second one of the power above."""
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}: at least 1 is needed")
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = lambda count: [2.0 ** (-8.0 * n / count) for n in range(1, count + 1)]  # noqa: E731
    return slopes(below) + slopes(2 * below)[::2][: num_heads - below]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class T5Bias(AttentionBias):
    """score + table[bucket(key position - query position), n] (Raffel et al. 2020, section 2.1)."""

    table: Any
    """Learned, `buckets N`."""
    bidirectional: bool = field(default=True, metadata={"static": True})
    """Half of the buckets for keys after the query; a causal decoder has none for them."""
    max_distance: int = field(default=128, metadata={"static": True})
    """All distances from here on share the last bucket."""

    outer_axes: ClassVar = {"table": (None, 1)}

    def logits(self, logits, tile):
        num_buckets = self.table.shape[0]
        bucket_BTS = relative_position_bucket(
            tile.distances, bidirectional=self.bidirectional, num_buckets=num_buckets, max_distance=self.max_distance
        )
        return logits + lookup(self.table.astype(jnp.float32), bucket_BTS)

    def check(self, shape, sizes):
        _check_heads("table", self.table.shape, 1, shape[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShawBias(AttentionBias):
    """Relative positions of Shaw et al. (2018): scores q (k + a_r)^T * scale (eq. 4), output sum_s w (v + b_r) (eq. 3).

    r is key position - query position, clipped to [-k, k]; tables have 2 k + 1 rows, that of distance 0 in the middle.
    """

    key_table: Any = None
    """a: learned, `2k+1 H`. None: positions do not change the scores."""
    value_table: Any = None
    """b: learned, `2k+1 E`. None: positions do not change the values."""

    outer_axes: ClassVar = {}

    def logits(self, logits, tile):
        if self.key_table is None:
            return logits
        table = self.key_table.astype(jnp.float32)
        products_BNTR = jnp.einsum("BNTH,RH->BNTR", tile.query.astype(jnp.float32), table, precision="highest")
        chosen_BTSR = _one_hot(self._rows(tile, table), len(table))
        return logits + _per_row("BNTR,{}TSR->BNTS", products_BNTR, chosen_BTSR)

    def value(self, weights, tile):
        if self.value_table is None:
            return None
        table = self.value_table.astype(jnp.float32)
        chosen_BTSR = _one_hot(self._rows(tile, table), len(table))
        weight_BNTR = _per_row("BNTS,{}TSR->BNTR", weights, chosen_BTSR)
        return jnp.einsum("BNTR,RE->BNTE", weight_BNTR, table, precision="highest")

    def check(self, shape, sizes):
        for name, size in zip(("key_table", "value_table"), sizes, strict=True):
            table = getattr(self, name)
            if table is not None and (
                table.ndim != 2 or table.shape[0] % 2 == 0 or table.shape[1] != (size or table.shape[1])
            ):
                raise ValueError(
                    f"{name} has shape {table.shape}: 2 k + 1 rows for the distances -k to k, each of size {size}, "
                    "are expected"
                )

    def _rows(self, tile, table):
        reach = table.shape[0] // 2
        return jnp.clip(tile.distances, -reach, reach) + reach


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoftCap(AttentionBias):
    """cap * tanh(score / cap), which keeps scores within (-cap, cap) (Gemma 2, section 2)."""

    cap: float = field(metadata={"static": True})

    outer_axes: ClassVar = {}

    def logits(self, logits, tile):
        return self.cap * jnp.tanh(logits / self.cap)

    def check(self, shape, sizes):
        if not self.cap > 0.0:
            raise ValueError(f"cap is {self.cap}: it must be positive")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScoreFunction(AttentionBias):
    """Any function of the score, of where query and key stand, and of the head."""

    function: Callable[..., Any] = field(metadata={"static": True})
    """function(score, query_position, key_position, head, *params) -> score, of arrays that broadcast to `B N T S`,
    traced into each tile; -inf hides the pair (but what stands in a slot never matters only where a mask hides it). A
    function defined once: a new lambda at each call compiles anew."""
    params: tuple[Any, ...] = ()
    """Arrays that the function needs; they have gradients, which arrays that it captures would not have. Those that it
    indexes by head let `Shared` divide the heads, those that broadcast along heads do not."""

    outer_axes: ClassVar = {}

    def logits(self, logits, tile):
        query, key = tile.query_positions[:, None, :, None], tile.key_positions[:, None, None, :]
        heads = (tile.first_head + jnp.arange(logits.shape[1], dtype=jnp.int32))[None, :, None, None]
        return self.function(logits, query, key, heads, *self.params)

    def divisible(self, shape):
        tile = Tile(None, *(jax.ShapeDtypeStruct((1, length), jnp.int32) for length in shape[2:]))
        try:
            scores = jax.eval_shape(type(self).logits, self, jax.ShapeDtypeStruct(shape, jnp.float32), tile)
        except (TypeError, ValueError):
            return False
        return super().divisible(shape) and scores.shape == shape


Biases = tuple[AttentionBias, ...]


def as_biases(bias: Any) -> Biases:
    """No bias, one, an array (`DenseBias`) or a sequence of them, as the tuple that is applied in order."""
    if bias is None:
        return ()
    if isinstance(bias, AttentionBias):
        return (bias,)
    if isinstance(bias, tuple | list):
        return tuple(one for part in bias for one in as_biases(part))
    return (DenseBias(bias),)


@jax.custom_jvp
def lookup(table: Float[Array, "R N"], index: Int[Array, "#B T S"]) -> Float[Array, "#B N T S"]:
    """table[index], heads first."""
    return jnp.moveaxis(jnp.take(table.T, index, axis=1), 0, 1)


@lookup.defjvp
def _lookup_jvp(primals, tangents):
    # a product with ones and zeros: the gradient that a gather has by itself is a slow scatter
    (table, index), (change, _) = primals, tangents
    by_table = jnp.einsum("BTSR,RN->BNTS", _one_hot(index, table.shape[0]), change, precision="highest")
    return lookup(table, index), by_table


def _put(whole, part, axes, rows, columns):
    """The array with the part that `cut` takes from it replaced."""
    start = [0] * whole.ndim
    for axis, block in zip(axes, (rows, columns), strict=True):
        if axis is not None and whole.shape[axis] not in (1, block.length):
            start[axis] = block.start
    return jax.lax.dynamic_update_slice(whole, part, [jnp.asarray(i, jnp.int32) for i in start])


def _one_hot(index, count):
    return jax.nn.one_hot(index, count, dtype=jnp.float32)


def _per_row(contraction, x, chosen_BTSR):
    """The contraction with one choice for all rows of the batch, or with each row's own."""
    if chosen_BTSR.shape[0] == 1:
        return jnp.einsum(contraction.format(""), x, chosen_BTSR[0], precision="highest")
    return jnp.einsum(contraction.format("B"), x, chosen_BTSR, precision="highest")


def _check_heads(name, shape, axis, num_heads):
    if len(shape) != axis + 1 or shape[axis] != num_heads:
        raise ValueError(f"{name} has shape {shape}: axis {axis}, its last, must be the {num_heads} heads of the query")
