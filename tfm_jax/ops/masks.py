"""Who may attend to whom: masks as arrays (True = attend), in the textbooks' additive form, and as data."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mask(query_positions: Int[Array, "B T"], key_positions: Int[Array, "C S"]) -> Bool[Array, "_ 1 T S"]:
    """A query sees keys at its own position and before; a key at a negative position (an empty slot) is never seen.

    The rule speaks of positions, not of array columns, so it serves training, padding on either side and cached
    decoding alike. Either batch size may be 1.
    """
    query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
    return (key <= query) & (key >= 0)


def padding_mask(query_segment_ids: Int[Array, "B T"], key_segment_ids: Int[Array, "C S"]) -> Bool[Array, "_ 1 T S"]:
    """A query sees the keys of its own segment; segment 0 is padding, which neither sees nor is seen."""
    query, key = query_segment_ids[:, None, :, None], key_segment_ids[:, None, None, :]
    return (query == key) & (key > 0)


def additive_mask(mask: Bool[Array, "..."]) -> Float[Array, "..."]:
    """The matrix M of the textbook's softmax(Q K^T / sqrt(d_k) + M): 0 where a query may attend, else -inf; float32.

    Attention takes such a matrix as its `bias`.
    """
    return jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32)


class Block(NamedTuple):
    """A run of the query axis or of the key axis: where it starts (may be traced) and how long it is (static)."""

    start: Any
    length: int
    origin: Any = 0
    """The index of the axis' first entry, where the axis is one device's part of a longer one."""


# The axes that an array has over queries and over keys; an axis of length 1 stands for all. Axis 0 is the batch, axis 1
# of `dense` the heads.
ARRAY_AXES = {
    "query_positions": (1, None),
    "key_positions": (None, 1),
    "query_segment_ids": (1, None),
    "key_segment_ids": (None, 1),
    "query_global": (1, None),
    "key_global": (None, 1),
    "dense": (2, 3),
    "prefix_lengths": (None, None),
}
_OF_POSITIONS = frozenset({"causal", "window", "function"})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """The facts that decide who sees whom, from which any tile of the array is made where it is needed.

    All facts given hold together; `a & b` is the conjunction of two masks (or of a mask and a boolean array).
    """

    query_positions: Any = None
    """`B T` integers (`1 T` where all rows agree). Left out on both sides: the array index counts."""
    key_positions: Any = None
    """`B S`. A key at a negative position (an empty cache slot) is invisible whatever else is given."""
    query_segment_ids: Any = None
    """`B T`; with key_segment_ids, a query sees the keys of its own segment. Segment 0 is padding: sees nothing."""
    key_segment_ids: Any = None
    """`B S`; segment 0 is never seen."""
    prefix_lengths: Any = None
    """`B`: keys at positions below it are seen by every query, although the mask is causal (prefix-LM)."""
    query_global: Any = None
    """`B T` booleans: queries that see beyond the window (global tokens of Longformer and BigBird)."""
    key_global: Any = None
    """`B S` booleans: keys seen from beyond the window."""
    dense: Any = None
    """A boolean array that broadcasts to `B N T S`, True where a query may attend."""
    also: tuple["AttentionMask", ...] = ()
    """Masks that hold too and whose facts do not fit into the fields of this one."""
    causal: bool = field(default=False, metadata={"static": True})
    """A query sees keys at its own position and before."""
    window: tuple[int | None, int | None] | None = field(default=None, metadata={"static": True})
    """(left, right): a query sees keys from position query - left to query + right; None on a side: no bound."""
    function: Callable[..., Any] | None = field(default=None, metadata={"static": True})
    """function(query_position, key_position, query_segment_id, key_segment_id, head) -> boolean, of arrays that
    broadcast to `B N T S`, traced into each tile. A function defined once: a new lambda at each call compiles anew."""

    def __and__(self, other: "AttentionMask | Bool[Array, '#B #N #T #S']") -> "AttentionMask":
        other = as_mask(other)
        if not self._merges_with(other):
            return replace(self, also=(*self.also, other))
        return replace(self, **{name: getattr(other, name) for name in other._given})

    def array(self, num_queries: int, num_keys: int, num_heads: int = 1) -> Bool[Array, "_ _ T S"] | None:
        """The whole boolean array; axes over batch and heads are 1 where no fact differs along them.

        None where everything is visible. Raises `ValueError` for facts that do not go together or do not fit.
        """
        self.check(num_queries, num_keys)
        tile = self.tile(Block(0, num_queries), Block(0, num_keys), num_heads)
        return None if tile is None else jnp.broadcast_to(tile, (*tile.shape[:2], num_queries, num_keys))

    def tile(
        self, rows: Block, columns: Block, num_heads: int, first_head: Any = 0
    ) -> Bool[Array, "#B #N #t #s"] | None:
        """The part of the array at these rows and columns; None where everything is visible.

        first_head: the number of the first of these heads, where a device has some of them alone.
        """
        query_positions, key_positions = self.positions(rows, columns)
        query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
        part = {name: _cut_all(getattr(self, name), axes, rows, columns) for name, axes in ARRAY_AXES.items()}
        query_segment, key_segment = _over_queries(part["query_segment_ids"]), _over_keys(part["key_segment_ids"])
        facts = []
        if self.key_positions is not None:
            facts.append(key >= 0)
        if self.causal:
            before = key <= query
            prefix = self.prefix_lengths
            facts.append(before if prefix is None else before | (key < prefix[:, None, None, None]))
        if self.window is not None:
            near = _near(query, key, self.window)
            exceptions = (_over_queries(part["query_global"]), _over_keys(part["key_global"]))
            facts.append(functools.reduce(operator.or_, (x for x in exceptions if x is not None), near))
        if query_segment is not None:
            facts.append((query_segment == key_segment) & (key_segment > 0))
        if self.function is not None:
            one, heads = jnp.ones((1, 1, 1, 1), jnp.int32), first_head + jnp.arange(num_heads, dtype=jnp.int32)
            segments = (one, one) if query_segment is None else (query_segment, key_segment)
            facts.append(self.function(query, key, *segments, heads[None, :, None, None]))
        if self.dense is not None:
            facts.append(part["dense"])
        facts += [mask for other in self.also if (mask := other.tile(rows, columns, num_heads)) is not None]
        return functools.reduce(operator.and_, facts) if facts else None

    def positions(self, rows: Block, columns: Block) -> tuple[Int[Array, "#B t"], Int[Array, "#B s"]]:
        """Positions of the queries and keys of a tile."""
        return _positions(self.query_positions, rows), _positions(self.key_positions, columns)

    def positions_for_biases(self, rows: Block, columns: Block) -> tuple[Int[Array, "#B t"], Int[Array, "#B s"]]:
        """Positions of a tile as biases see them: those of the first mask of a conjunction that is given any."""
        first = next((mask for mask in (self, *self.also) if mask.key_positions is not None), self)
        return first.positions(rows, columns)

    def padded(self, more_queries: int, more_keys: int) -> "AttentionMask":
        """The mask of longer axes; what it says of the new rows and columns means nothing."""
        longer = {
            name: pad_all(getattr(self, name), axes, more_queries, more_keys) for name, axes in ARRAY_AXES.items()
        }
        return replace(self, **longer, also=tuple(mask.padded(more_queries, more_keys) for mask in self.also))

    @property
    def facts(self) -> frozenset[str]:
        """The names of the fields that are given, those of `also` included: what is not known must be refused."""
        return self._given.union(*(mask.facts for mask in self.also))

    def check(self, num_queries: int, num_keys: int, *, batch: int | None = None, num_heads: int | None = None) -> None:
        """Raise `ValueError` for half a fact, and for arrays that do not fit so many queries and keys, rows and heads.

        None: any number.
        """
        # not when built: transformations rebuild the mask around what are not arrays
        for name in ("positions", "segment_ids"):
            sides = [f"{side}_{name}" for side in ("query", "key")]
            if len(self._given.intersection(sides)) == 1:
                raise ValueError(f"{name} are given for one side: {sides[0]} and {sides[1]} go together")
        if self.prefix_lengths is not None and not self.causal:
            raise ValueError("prefix_lengths are exceptions to causality: give causal=True")
        if self._given & {"query_global", "key_global"} and self.window is None:
            raise ValueError("query_global and key_global are exceptions to a window: give window=(left, right)")
        if self.window is not None and any(side is not None and side < 0 for side in self.window):
            raise ValueError(f"window is {self.window}: (left, right) is expected, each at least 0 or None (no bound)")
        there_are = f"there are {num_queries} queries and {num_keys} keys" + (f" in {batch} rows" if batch else "")
        for name, (query_axis, key_axis) in ARRAY_AXES.items():
            array = getattr(self, name)
            if array is None:
                continue
            if array.ndim != (rank := {"dense": 4, "prefix_lengths": 1}.get(name, 2)):
                raise ValueError(f"{name} has shape {array.shape}: {rank} axes are expected")
            heads = (1, num_heads) if name == "dense" else (None, None)
            for axis, length in ((0, batch), heads, (query_axis, num_queries), (key_axis, num_keys)):
                if axis is not None and length is not None and array.shape[axis] not in (1, length):
                    raise ValueError(
                        f"{name} has shape {array.shape}, {there_are}: axis {axis} must have length {length}"
                    )
        if self.dense is not None and self.dense.dtype != jnp.bool_:
            raise ValueError(
                f"mask has dtype {self.dense.dtype}: a boolean array is expected, True where a query may attend; "
                "an additive mask (0 and -inf) is a bias"
            )
        for mask in self.also:
            mask.check(num_queries, num_keys, batch=batch, num_heads=num_heads)

    @property
    def _given(self):
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        absent = lambda x: x is None or x is False or (isinstance(x, tuple) and not x)  # noqa: E731
        return frozenset(name for name, x in values.items() if not absent(x))

    def _merges_with(self, other):
        """Whether the fields of both, put into one mask, mean what they mean in two."""
        positions = {"query_positions", "key_positions"}
        same_positions = all(getattr(self, name) is getattr(other, name) for name in positions)
        for one, two in ((self, other), (other, self)):
            if one._given & positions and two._given & _OF_POSITIONS and not same_positions:
                return False
            if one.function is not None and two.query_segment_ids is not None:
                return False
        overlap = self._given & other._given
        return overlap <= (positions if same_positions else frozenset())


def as_mask(mask: "AttentionMask | Bool[Array, '#B #N #T #S']") -> AttentionMask:
    """The mask as data: a boolean array becomes `AttentionMask(dense=array)`."""
    return mask if isinstance(mask, AttentionMask) else AttentionMask(dense=mask)


def cut(x: Array, axis: int, block: Block) -> Array:
    """The block of one axis; an axis of length 1 stands for all and stays."""
    if x.shape[axis] in (1, block.length):
        return x
    return jax.lax.dynamic_slice_in_dim(x, block.start, block.length, axis)


def pad(x: Array, axis: int, more: int) -> Array:
    """Zeros at the end of an axis; an axis of length 1 stands for all and stays."""
    if more == 0 or x.shape[axis] == 1:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


def pad_all(x: Array | None, axes: tuple[int | None, int | None], more_queries: int, more_keys: int) -> Array | None:
    """`pad` along the axes over queries and over keys, where there are such."""
    for axis, more in zip(axes, (more_queries, more_keys), strict=True):
        x = x if x is None or axis is None else pad(x, axis, more)
    return x


def _cut_all(x, axes, rows, columns):
    for axis, block in zip(axes, (rows, columns), strict=True):
        x = x if x is None or axis is None else cut(x, axis, block)
    return x


def _positions(given, block):
    if given is None:
        return (block.origin + block.start + jnp.arange(block.length, dtype=jnp.int32))[None]
    return cut(given, 1, block)


def _near(query, key, window):
    left, right = window
    near = jnp.ones((1, 1, 1, 1), bool)
    if left is not None:
        near = near & (key >= query - left)
    return near if right is None else near & (key <= query + right)


def _over_queries(x):
    return None if x is None else x[:, None, :, None]


def _over_keys(x):
    return None if x is None else x[:, None, None, :]
