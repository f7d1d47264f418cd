"""What changes the scores beside the product of query and key, in plain NumPy, float64, with gradients written by hand.

The classes have the names, fields and contracts of those in `ops.biases`; besides, each carries the positions that it
needs: integers B T and B S, where either B may be 1. `oracle` applies them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


class AttentionBias:
    """A transformation of the scores, a term of the output, and the gradients of both. This one changes nothing."""

    def scores(self, scores: np.ndarray, query: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """The scores B N T S that come out. Those that come in are 0 where not visible; query B T N H is scaled."""
        return scores

    def scores_gradients(
        self, scores: np.ndarray, query: np.ndarray, visible: np.ndarray, gradient: np.ndarray
    ) -> tuple[Any, Any, dict[str, Any]]:
        """By the scores that came in, the query, the fields. `gradient`, by what came out, is 0 where not visible."""
        return gradient, 0.0, {}

    def values(self, weights: np.ndarray, visible: np.ndarray) -> Any:
        """What is added to the output B T N E by the weights after dropout."""
        return 0.0

    def values_gradients(
        self, weights: np.ndarray, visible: np.ndarray, gradient: np.ndarray
    ) -> tuple[Any, dict[str, Any]]:
        """By the weights and by the fields; `gradient` is by the output."""
        return 0.0, {}


@dataclass(frozen=True)
class DenseBias(AttentionBias):
    """score + array, which broadcasts to B N T S; -inf hides."""

    array: ArrayLike

    def scores(self, scores, query, visible):
        array = wide(self.array)
        return np.where(array == -np.inf, -np.inf, scores + array)

    def scores_gradients(self, scores, query, visible, gradient):
        return gradient, 0.0, {"array": _sum_to(np.shape(self.array), gradient)}


@dataclass(frozen=True)
class ALiBi(AttentionBias):
    """score - slope_n |key position - query position| (Press et al. 2022); slopes N."""

    slopes: ArrayLike
    query_positions: ArrayLike
    key_positions: ArrayLike

    def scores(self, scores, query, visible):
        return scores - wide(self.slopes)[:, None, None] * np.abs(_distances(self))[:, None]

    def scores_gradients(self, scores, query, visible, gradient):
        return gradient, 0.0, {"slopes": -(gradient * np.abs(_distances(self))[:, None]).sum(axis=(0, 2, 3))}


def alibi_slopes(num_heads: int) -> list[float]:
    """A geometric sequence from 2^(-8/N) with this ratio where N is a power of two; else that of the power below, then
    every other one of the power above (Press et al. 2022, section 3 and their code)."""
    power = 2 ** math.floor(math.log2(num_heads))
    start = 2.0 ** (-8.0 / power)
    slopes = [start ** (i + 1) for i in range(power)]
    return slopes if power == num_heads else slopes + alibi_slopes(2 * power)[0::2][: num_heads - power]


@dataclass(frozen=True)
class T5Bias(AttentionBias):
    """score + table[bucket(key position - query position), n] (Raffel et al. 2020, section 2.1); table buckets N."""

    table: ArrayLike
    query_positions: ArrayLike
    key_positions: ArrayLike
    bidirectional: bool = True
    max_distance: int = 128

    def scores(self, scores, query, visible):
        return scores + np.moveaxis(wide(self.table)[self._buckets()], 3, 1)

    def scores_gradients(self, scores, query, visible, gradient):
        chosen = self._buckets()[:, None]
        by_bucket = [np.where(chosen == i, gradient, 0.0).sum(axis=(0, 2, 3)) for i in range(len(self.table))]
        return gradient, 0.0, {"table": np.stack(by_bucket)}

    def _buckets(self):
        distances, where = np.unique(_distances(self), return_inverse=True)
        settings = (self.bidirectional, len(self.table), self.max_distance)
        return np.array([relative_position_bucket(int(d), *settings) for d in distances])[where]


def relative_position_bucket(distance: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """The bucket of key position - query position, as T5's code has it, the logarithms in float64."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    # a quotient that is a whole number may come out just below it
    return first + min(exact + math.floor(growth + 1e-9), num_buckets - 1)


@dataclass(frozen=True)
class ShawBias(AttentionBias):
    """Shaw et al. (2018): q (k + a_r) * scale (eq. 4) and sum_s w (v + b_r) (eq. 3), r the distance clipped to [-k, k].

    key_table is a, 2k+1 H, value_table b, 2k+1 E, the rows from -k to k; None: there is no such term.
    """

    key_table: ArrayLike | None
    value_table: ArrayLike | None
    query_positions: ArrayLike
    key_positions: ArrayLike

    def scores(self, scores, query, visible):
        if self.key_table is None:
            return scores
        return scores + products(wide(self.key_table), query, self._at(self.key_table), visible)

    def scores_gradients(self, scores, query, visible, gradient):
        if self.key_table is None:
            return gradient, 0.0, {}
        table, at = wide(self.key_table), self._at(self.key_table)
        by_table = outer_sums(gradient, query, table.shape, at, visible)
        return gradient, weighted_sums(gradient, table, at, visible), {"key_table": by_table}

    def values(self, weights, visible):
        if self.value_table is None:
            return 0.0
        return weighted_sums(weights, wide(self.value_table), self._at(self.value_table), visible)

    def values_gradients(self, weights, visible, gradient):
        if self.value_table is None:
            return 0.0, {}
        table, at = wide(self.value_table), self._at(self.value_table)
        by_table = outer_sums(weights, gradient, table.shape, at, visible)
        return products(table, gradient, at, visible), {"value_table": by_table}

    def _at(self, table):
        """Where in the table the vectors of a query stand."""
        reach, distances = len(table) // 2, _distances(self)
        rows = np.clip(distances, -reach, reach) + reach
        return lambda b, n, t, seen: (rows[b if len(rows) > 1 else 0, t, seen],)


@dataclass(frozen=True)
class SoftCap(AttentionBias):
    """cap * tanh(score / cap) (Gemma 2, section 2)."""

    cap: float

    def scores(self, scores, query, visible):
        return self.cap * np.tanh(scores / self.cap)

    def scores_gradients(self, scores, query, visible, gradient):
        return gradient * (1.0 - np.tanh(scores / self.cap) ** 2), 0.0, {}


@dataclass(frozen=True)
class ScoreFunction(AttentionBias):
    """function(score, query_position, key_position, head, *params) -> score, of arrays that broadcast to B N T S.

    derivatives, of the same arguments: (by the score, [by each of the params]), of each pair. Params are numbers or
    arrays that broadcast to B N T S.
    """

    function: Callable[..., Any]
    derivatives: Callable[..., Any]
    query_positions: ArrayLike
    key_positions: ArrayLike
    params: tuple[Any, ...] = ()

    def scores(self, scores, query, visible):
        return self.function(*self._arguments(scores))

    def scores_gradients(self, scores, query, visible, gradient):
        by_score, by_params = self.derivatives(*self._arguments(scores))
        by_params = [np.where(visible, gradient * by_param, 0.0) for by_param in by_params]
        by_params = tuple(_sum_to(np.shape(x), by_x) for x, by_x in zip(self.params, by_params, strict=True))
        return gradient * by_score, 0.0, {"params": by_params}

    def _arguments(self, scores):
        query, key = np.asarray(self.query_positions), np.asarray(self.key_positions)
        heads = np.arange(scores.shape[1])[None, :, None, None]
        return scores, query[:, None, :, None], key[:, None, None, :], heads, *(wide(x) for x in self.params)


def as_biases(bias):
    """None, a bias, an array or a sequence of these, as a tuple of biases."""
    if bias is None or isinstance(bias, AttentionBias):
        return () if bias is None else (bias,)
    if isinstance(bias, tuple | list):
        return tuple(one for part in bias for one in as_biases(part))
    if np.asarray(bias).dtype == bool:
        raise ValueError("bias is boolean: a float array is expected; a boolean one is a mask")
    return (DenseBias(bias),)


# A number p for each pair, a vector x for each query, and vectors v for the pairs, which are keys, values or rows of a
# table: `at(b, n, t, seen)` says where those of a query stand. Scores are p = v . x, outputs x = sum_s p v, and the
# gradients of both are these two again and, by the vectors, sums of p x. Pairs that are not visible are never touched.


def products(vectors, x, at, visible):
    """p = v . x, B N T S."""
    p = np.zeros(visible.shape)
    for b, n, t, seen in rows_that_see(visible):
        p[b, n, t, seen] = vectors[at(b, n, t, seen)] @ x[b, t, n]
    return p


def weighted_sums(p, vectors, at, visible):
    """x = sum_s p v, B T N _."""
    B, N, T, _ = visible.shape
    x = np.zeros((B, T, N, vectors.shape[-1]))
    for b, n, t, seen in rows_that_see(visible):
        x[b, t, n] = p[b, n, t, seen] @ vectors[at(b, n, t, seen)]
    return x


def outer_sums(p, x, shape, at, visible):
    """The sum of p x over the pairs of each vector, in the shape of the vectors."""
    total = np.zeros(shape)
    for b, n, t, seen in rows_that_see(visible):
        np.add.at(total, at(b, n, t, seen), np.outer(p[b, n, t, seen], x[b, t, n]))
    return total


def rows_that_see(visible):
    """(b, n, t, indices of the keys that this query sees) of every query that sees any."""
    for b, n, t in np.ndindex(visible.shape[:3]):
        seen = np.flatnonzero(visible[b, n, t])
        if len(seen):
            yield b, n, t, seen


def wide(x):
    return np.asarray(x, np.float64)


def _distances(bias):
    """Key position - query position, B T S."""
    return np.asarray(bias.key_positions)[:, None, :] - np.asarray(bias.query_positions)[:, :, None]


def _sum_to(shape, gradient):
    """The gradient B N T S of an array that was broadcast from this shape."""
    repeated = tuple(axis for axis in range(4) if ((1,) * (4 - len(shape)) + shape)[axis] == 1)
    return gradient.sum(axis=repeated).reshape(shape)
