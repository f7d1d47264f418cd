"""Attention from the papers' equations in plain NumPy, float64, with its gradients written by hand: what every faster
path is compared with. The biases stand in `oracle_biases`, what is made of attention in `oracle_blocks`.

Nothing here is fast or shared with the code under test. Functions, masks and biases have the names, parameters and axes
of those in `ops`, and the same contract; what they are given becomes float64. A query and a key that it may not see are
skipped, not multiplied by zero, so that nothing hidden can matter, NaN included.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tfm_jax.oracle_biases import (  # noqa: F401  (biases are asked of this module: oracle.ALiBi)
    ALiBi,
    AttentionBias,
    DenseBias,
    ScoreFunction,
    ShawBias,
    SoftCap,
    T5Bias,
    alibi_slopes,
    as_biases,
    outer_sums,
    products,
    relative_position_bucket,
    rows_that_see,
    weighted_sums,
    wide,
)


def attention_weights(
    query: ArrayLike, key: ArrayLike, *, mask: ArrayLike | None = None, bias: Any = None, scale: float | None = None
) -> np.ndarray:
    """softmax(Q K^T * scale + bias) of Vaswani et al. (2017), eq. 1: query B T N H, key B S K H, result B N T S.

    mask (boolean, True = attend) broadcasts to B N T S. bias: a float array that does, an `AttentionBias`, or a tuple
    or list of these, applied in order; a score of -inf hides the key. scale: None is 1 / sqrt(H). A query that sees
    nothing has weights 0. Raises `ValueError` for a mask that is not boolean, and for a bias that is.
    """
    return _scores(query, key, mask, bias, scale).weights


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: Any = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    keep: ArrayLike | None = None,
) -> np.ndarray:
    """The sum of the values B S K E by `attention_weights`: B T N E.

    keep: booleans B N T S, the choices of dropout; weights that are kept are divided by 1 - dropout_rate. None: all are
    kept as they are.
    """
    past, value = _scores(query, key, mask, bias, scale), wide(value)
    weights = _dropout(past.weights, dropout_rate, keep)
    output = weighted_sums(weights, value, _key_heads(weights, value), past.visible)
    return output + sum(one.values(weights, past.visible) for one in past.biases)


class Gradients(NamedTuple):
    """Of a scalar loss, by each argument of attention and in its shape."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: tuple[dict[str, Any], ...]
    """For each bias in order: the name of a field -> its gradient; of `ScoreFunction.params`, a tuple of gradients."""


def attention_gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gradient: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: Any = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    keep: ArrayLike | None = None,
) -> Gradients:
    """The gradients of a loss whose gradient by the output of `dot_product_attention` is `gradient`, B T N E."""
    past = _scores(query, key, mask, bias, scale)
    key, value, gradient = wide(key), wide(value), wide(gradient)
    visible, weights = past.visible, _dropout(past.weights, dropout_rate, keep)

    at = _key_heads(weights, value)
    by_value = outer_sums(weights, gradient, value.shape, at, visible)
    by_weights = products(value, gradient, at, visible)
    by_bias = []
    for one in past.biases:
        more_by_weights, by_fields = one.values_gradients(weights, visible, gradient)
        by_weights += more_by_weights
        by_bias.append(by_fields)

    by_weights = _dropout(by_weights, dropout_rate, keep)
    # the Jacobian of a softmax p is diag(p) - p p^T
    by_scores = past.weights * (by_weights - (past.weights * by_weights).sum(axis=3, keepdims=True))

    by_query = np.zeros(past.query.shape)
    for i in reversed(range(len(past.biases))):
        backward = past.biases[i].scores_gradients
        by_scores, more_by_query, by_fields = backward(past.inputs[i], past.query, visible, by_scores)
        by_scores = np.where(visible, by_scores, 0.0)
        by_query += more_by_query
        by_bias[i] |= by_fields
    by_query += weighted_sums(by_scores, key, at, visible)
    by_key = outer_sums(by_scores, past.query, key.shape, at, visible)
    return Gradients(by_query * past.scale, by_key, by_value, tuple(by_bias))


class _Scores(NamedTuple):
    """The forward pass up to the weights, and what the backward pass needs of it."""

    query: np.ndarray  # B T N H, times the scale
    scale: float
    biases: tuple[AttentionBias, ...]
    inputs: list[np.ndarray]  # the scores B N T S that each bias was given
    visible: np.ndarray  # B N T S
    weights: np.ndarray  # B N T S, 0 where not visible


def _scores(query, key, mask, bias, scale):
    query, key, biases = wide(query), wide(key), as_biases(bias)
    (B, T, N, H), S = query.shape, key.shape[1]
    mask = np.asarray(True if mask is None else mask)
    if mask.dtype != bool:
        raise ValueError(f"mask has dtype {mask.dtype}: a boolean array is expected, True where a query may attend")
    scale = 1.0 / math.sqrt(H) if scale is None else scale
    query, visible = query * scale, np.broadcast_to(mask, (B, N, T, S))
    scores, inputs = products(key, query, _key_heads(visible, key), visible), []
    for one in biases:
        inputs.append(scores)
        scores = one.scores(scores, query, visible)
        visible = visible & (scores != -np.inf)
        scores = np.where(visible, scores, 0.0)
    weights = np.zeros((B, N, T, S))
    for b, n, t, seen in rows_that_see(visible):
        powers = np.exp(scores[b, n, t, seen] - scores[b, n, t, seen].max())
        weights[b, n, t, seen] = powers / powers.sum()
    return _Scores(query, scale, biases, inputs, visible, weights)


def _dropout(weights, rate, keep):
    """Linear and diagonal, so it is its own backward pass."""
    return weights if keep is None else np.where(keep, weights / (1.0 - rate), 0.0)


def causal_mask(query_positions: ArrayLike, key_positions: ArrayLike) -> np.ndarray:
    """Positions B T and B S (either B may be 1) to B 1 T S: True where 0 <= key position <= query position."""
    return _pairs(lambda query, key: 0 <= key <= query, [query_positions], [key_positions])


def padding_mask(query_segment_ids: ArrayLike, key_segment_ids: ArrayLike) -> np.ndarray:
    """Segment ids B T and B S (either B may be 1) to B 1 T S: True within a segment, never for padding (0)."""
    return _pairs(lambda query, key: query == key > 0, [query_segment_ids], [key_segment_ids])


def window_mask(
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    window: tuple[int | None, int | None],
    *,
    query_global: ArrayLike | None = None,
    key_global: ArrayLike | None = None,
) -> np.ndarray:
    """Keys from position query - left to query + right, window = (left, right), None on a side: no bound; B 1 T S.

    Global queries B T and global keys B S (booleans) are exceptions. A key at a negative position is never seen.
    """
    left, right = (math.inf if side is None else side for side in window)
    query_global, key_global = ([[False]] if x is None else x for x in (query_global, key_global))

    def sees(query, query_is_global, key, key_is_global):
        return key >= 0 and (query_is_global or key_is_global or query - left <= key <= query + right)

    return _pairs(sees, [query_positions, query_global], [key_positions, key_global])


def prefix_mask(query_positions: ArrayLike, key_positions: ArrayLike, prefix_lengths: ArrayLike) -> np.ndarray:
    """Causal, and keys at positions below the prefix length (B) are seen by all (prefix-LM): B 1 T S."""
    prefixes = np.asarray(prefix_lengths)[:, None]
    return _pairs(
        lambda query, prefix, key: 0 <= key and (key <= query or key < prefix),
        [query_positions, prefixes],
        [key_positions],
    )


def function_mask(
    function: Callable[..., Any],
    query_positions: ArrayLike,
    key_positions: ArrayLike,
    query_segment_ids: ArrayLike | None,
    key_segment_ids: ArrayLike | None,
    num_heads: int,
) -> np.ndarray:
    """function(query_position, key_position, query_segment_id, key_segment_id, head) of one pair at a time: B N T S.

    As in `AttentionMask`, a key at a negative position is never seen, and the segment ids hold too; where they are
    None, the function gets ones.
    """
    segments = [[[1]] if x is None else x for x in (query_segment_ids, key_segment_ids)]

    def sees(query, query_segment, key, key_segment, head):
        # NumPy's scalars, for ~ of Python's True is -2
        arguments = (np.int64(x) for x in (query, key, query_segment, key_segment, head))
        return bool(function(*arguments)) and key >= 0 and query_segment == key_segment > 0

    return _pairs(sees, [query_positions, segments[0]], [key_positions, segments[1]], np.arange(num_heads))


def _pairs(sees, of_queries, of_keys, *heads):
    """sees(*facts of a query, *facts of a key, *head) of every pair: arrays B T, B S and N to B N T S."""
    of_queries = [np.asarray(x)[:, None, :, None] for x in of_queries]
    of_keys = [np.asarray(x)[:, None, None, :] for x in of_keys]
    return np.vectorize(sees, otypes=[bool])(*of_queries, *of_keys, *(x[None, :, None, None] for x in heads))


def _key_heads(pairs, vectors):
    """Where in keys or values B S K _ those of a query stand: N / K query heads in a row share one head."""
    group = pairs.shape[1] // vectors.shape[2]
    return lambda b, n, t, seen: (b, seen, n // group)
