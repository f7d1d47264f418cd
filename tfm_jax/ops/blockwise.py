"""Exact attention in memory linear in the length: online softmax over blocks (Milakov and Gimelshein 2018), with a
gradient that makes each tile of scores again instead of keeping it (Dao et al. 2022, FlashAttention).

Masks, biases and dropout are those of the reference, made tile by tile; a tile in which nothing is visible is skipped.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tfm_jax.ops.biases import Biases, Tile
from tfm_jax.ops.masks import AttentionMask, Block, cut, pad
from tfm_jax.ops.scores import Request, both, seen_keys, tile_logits, tile_values, tile_visible


@dataclass(frozen=True)
class Blockwise:
    """The implementation `blockwise`; tiles have at most block x block scores for each row and head."""

    block: int = 512

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"block is {self.block}: at least 1 is needed")

    def refusal(self, request: Request) -> str | None:
        """None: every request is honoured."""
        return None

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""
        rows, columns = (_division(length, self.block).length for length in request.shape[2:])
        return f"builds scores in tiles of {rows} x {columns}, never an array with an entry for every query and key"

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a checked request."""
        B, N, T, S = request.shape
        if S == 0:
            return jnp.zeros((B, T, N, request.value.shape[3]), request.value.dtype)
        rows, columns = _division(T, self.block), _division(S, self.block)
        more_rows, more_columns = rows.padded - T, columns.padded - S
        query, key, value = request.heads_first
        query, key, value = pad(query, 2, more_rows), pad(key, 2, more_columns), pad(value, 2, more_columns)
        mask = None if request.mask is None else request.mask.padded(more_rows, more_columns)
        biases = tuple(bias.padded(more_rows, more_columns) for bias in request.biases)
        plan = _Plan(rows, columns, request.shape, request.dropout_rate)
        output = _attend(plan, query, key, value, (mask, request.dropout_key, request.place), biases)
        return output[:, :, :T].swapaxes(1, 2).astype(request.value.dtype)


@dataclass(frozen=True)
class _Division:
    """An axis cut into `count` blocks of equal length, the last of which may reach beyond the end."""

    count: int
    length: int

    @property
    def padded(self) -> int:
        return self.count * self.length

    def block(self, index: Any, origin: Any = 0) -> Block:
        return Block(index * self.length, self.length, origin)


def _division(length: int, block: int) -> _Division:
    count = max(1, -(-length // block))
    return _Division(count, -(-length // count))


@dataclass(frozen=True)
class _Plan:
    """The static side of a call: how rows and columns are cut, of scores of which shape, and the rate of dropout."""

    rows: _Division
    columns: _Division
    shape: tuple[int, int, int, int]
    dropout_rate: float

    def part(self, unlearned, biases, query, rows: Block, columns: Block) -> "_Part":
        """What masks and biases say of the tile of these queries."""
        mask, dropout_key, place = unlearned
        biases = tuple(bias.block(rows, columns) for bias in biases)
        tile = Tile(query, *(mask or AttentionMask()).positions_for_biases(rows, columns), place.first_head)
        visible = tile_visible(mask, biases, tile, rows, columns, self.shape[1])
        skippable = visible is not None and self.rows.count * self.columns.count > 1
        if visible is not None and self.rows.padded != self.shape[2]:
            # a row beyond the end sees nothing, or the keys it happened to see would count as seen
            real = rows.start + jnp.arange(rows.length, dtype=jnp.int32) < self.shape[2]
            visible = visible & real[None, None, :, None]
        if self.columns.padded != self.shape[3]:
            within = columns.start + jnp.arange(columns.length, dtype=jnp.int32) < self.shape[3]
            visible = both(visible, within[None, None, None])
        drop = lambda weights: place.drop(weights, self.dropout_rate, dropout_key, rows, columns)  # noqa: E731
        return _Part(biases, tile, visible, skippable, drop)


@dataclass(frozen=True)
class _Part:
    """One tile: its biases, its positions, which keys its queries may see (None: all), and dropout of its weights."""

    biases: Biases
    tile: Tile
    visible: Any
    skippable: bool
    drop: Callable[[Array], Array]

    def visit(self, visit: Callable[..., Any], skip: Callable[..., Any], *operands: Any) -> Any:
        """visit(*operands), or skip(*operands) where nothing is visible."""
        return jax.lax.cond(self.visible.any(), visit, skip, *operands) if self.skippable else visit(*operands)

    def only_seen(self, *keys_or_values: Array) -> tuple[Array, ...]:
        """Keys or values `B K s _`, zero in the slots that no query of the tile sees."""
        if self.visible is None:
            return keys_or_values
        return tuple(jnp.where(seen_keys(self.visible, x.shape[1]), x, 0) for x in keys_or_values)

    def logits(self, query, key, biases):
        """Scores of the tile, -inf where not visible."""
        logits = tile_logits(query, key, biases, replace(self.tile, query=query))
        return logits if self.visible is None else jnp.where(self.visible, logits, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, query, key, value, unlearned, biases):
    """Query `B N T H` with the scale, key `B K S H`, value `B K S E`, padded to whole blocks: `B N T E`, float32."""
    return _forward(plan, query, key, value, unlearned, biases)[0]


def _forward(plan, query, key, value, unlearned, biases):
    place = unlearned[2]

    def rows_of_output(_, i):
        rows = plan.rows.block(i, place.first_query)
        query_tile = cut(query, 2, rows)

        def add_columns(carry, j):
            columns = plan.columns.block(j)
            part = plan.part(unlearned, biases, query_tile, rows, columns)

            def visit(top, total, output):
                key_tile, value_tile = part.only_seen(cut(key, 2, columns), cut(value, 2, columns))
                logits = part.logits(query_tile, key_tile, part.biases)
                new_top = jnp.maximum(top, logits.max(axis=-1))
                finite_top = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
                weights = jnp.exp(logits - finite_top[..., None])
                shrink = jnp.exp(top - finite_top)
                total = total * shrink + weights.sum(axis=-1)
                more = tile_values(part.drop(weights), value_tile, part.biases, part.tile)
                return new_top, total, output * shrink[..., None] + more

            return part.visit(visit, lambda *carry: carry, *carry), None

        row_shape, E = query_tile.shape[:3], value.shape[3]
        start = (
            jnp.full(row_shape, -jnp.inf, jnp.float32),
            jnp.zeros(row_shape, jnp.float32),
            jnp.zeros((*row_shape, E), jnp.float32),
        )
        (top, total, output), _ = _fold(add_columns, start, plan.columns.count)
        dead = total == 0.0
        # exp(x - inf) is 0, so the backward pass needs no other care for a row that sees nothing
        return None, (output / jnp.where(dead, 1.0, total)[..., None], jnp.where(dead, jnp.inf, top + jnp.log(total)))

    _, (output, log_total) = _fold(rows_of_output, None, plan.rows.count)
    output, log_total = _joined(output), _joined(log_total)
    return output, (query, key, value, unlearned, biases, output, log_total)


def _backward(plan, residuals, gradient):
    query, key, value, unlearned, biases, output, log_total = residuals
    place = unlearned[2]
    # what a dead query holds, NaN included, reaches no gradient
    query = jnp.where(jnp.isposinf(log_total)[..., None], 0, query)
    expected = (gradient * output).sum(axis=-1)

    def columns_of_gradients(carry, j):
        columns = plan.columns.block(j)
        key_block, value_block = cut(key, 2, columns), cut(value, 2, columns)

        def add_rows(carry, i):
            rows = plan.rows.block(i, place.first_query)
            query_tile, *by_row = (cut(x, 2, rows) for x in (query, gradient, log_total, expected))
            part = plan.part(unlearned, biases, query_tile, rows, columns)

            def visit():
                key_tile, value_tile = part.only_seen(key_block, value_block)
                return _tile_gradients(part, query_tile, key_tile, value_tile, *by_row)

            skip = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(visit))  # noqa: E731
            by_query, by_key, by_value, by_biases = part.visit(visit, skip)
            total_query, total_key, total_value, total_biases = carry
            total_query = _add_at(total_query, by_query, rows)
            total_biases = tuple(
                total.updated(_sum(total.block(rows, columns), more), rows, columns)
                for total, more in zip(total_biases, by_biases, strict=True)
            )
            return (total_query, total_key + by_key, total_value + by_value, total_biases), None

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (key_block, value_block)]
        (by_query, by_key, by_value, by_biases), _ = _fold(add_rows, (carry[0], *zeros, carry[1]), plan.rows.count)
        return (by_query, by_biases), (by_key, by_value)

    start = (jnp.zeros(query.shape, jnp.float32), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), biases))
    (by_query, by_biases), by_keys = _fold(columns_of_gradients, start, plan.columns.count)
    by_key, by_value = (_joined(x) for x in by_keys)
    learned = lambda x, g: g.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None  # noqa: E731
    arrays = (x.astype(like.dtype) for x, like in ((by_query, query), (by_key, key), (by_value, value)))
    return *arrays, None, jax.tree.map(learned, biases, by_biases)


_attend.defvjp(_forward, _backward)


def _tile_gradients(part, query, key, value, gradient, log_total, expected):
    """float32 gradients by query, key, value and biases of one tile, whose weights are made again."""

    def outputs(weights, query, value, biases):
        return tile_values(part.drop(weights), value, biases, replace(part.tile, query=query))

    logits, logits_vjp = jax.vjp(part.logits, query, key, part.biases)
    weights = jnp.exp(logits - log_total[..., None])
    _, outputs_vjp = jax.vjp(outputs, weights, query, value, part.biases)
    by_weights, query_of_outputs, by_value, biases_of_outputs = outputs_vjp(gradient)
    # sum_s w_s dL/dw_s is dL/do . o, since the output is linear in the weights
    by_query, by_key, by_biases = logits_vjp(weights * (by_weights - expected[..., None]))
    return _sum(by_query, query_of_outputs), _wide(by_key), _wide(by_value), _sum(by_biases, biases_of_outputs)


def _fold(step, carry, count):
    """`jax.lax.scan` over 0 .. count - 1; a single step is no loop."""
    if count == 1:
        carry, outputs = step(carry, 0)
        return carry, jax.tree.map(lambda x: x[None], outputs)
    return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))


def _joined(blocks):
    """count B N t ... to B N (count t) ..."""
    moved = jnp.moveaxis(blocks, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])


def _add_at(total, more, rows):
    if total.shape[2] == rows.length:
        return total + more
    return jax.lax.dynamic_update_slice_in_dim(total, cut(total, 2, rows) + more, rows.start, 2)


def _sum(one, other):
    """The sum of two trees in float32; what has no gradient counts as zero."""
    return jax.tree.map(lambda x, y: _wide(x) + _wide(y), one, other)


def _wide(x):
    return jnp.zeros(x.shape, jnp.float32) if x.dtype == jax.dtypes.float0 else x.astype(jnp.float32)
