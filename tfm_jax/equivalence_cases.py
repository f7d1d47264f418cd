"""What `equivalence` compares: masks and biases, each beside its NumPy twin, and the cases that combine them.

A new mask or bias is one row of `MASKS` or `BIASES`.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tfm_jax import oracle
from tfm_jax.ops.biases import ALiBi, DenseBias, ScoreFunction, ShawBias, T5Bias, alibi_slopes
from tfm_jax.ops.masks import AttentionMask

HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1), "one": (1, 1)}
"""(N, K); "one" also has a batch of one."""
LONG = "523 x 541"
LENGTHS = {"T=S": (38, 38), "T<S": (38, 46), "T>S": (46, 38), LONG: (523, 541)}
"""(T, S). Even, and heads of multiples of 8: with odd ones the fused kernels would refuse more."""
D_V = {"= d_k": 16, "!= d_k": 24}
D_K = 16
WINDOW = (5, 3)


@dataclass(frozen=True)
class Case:
    """What one comparison is about: values of `FACTORS`, or other keys of `HEADS` and `LENGTHS`."""

    mask: str = "none"
    bias: str = "none"
    dropout: float = 0.0
    dtype: str = "float32"
    heads: str = "MHA"
    lengths: str = "T=S"
    d_v: str = "= d_k"
    dead_row: bool = False
    """A query sees nothing."""
    nan: bool = False
    """Keys and values that no query sees are NaN, and so are queries that see nothing."""


class Facts:
    """The NumPy arrays of a case from which a mask and its twin, or a bias and its twin, are both made."""

    def __init__(self, case: Case):
        self.case, self.dtype = case, jnp.dtype(case.dtype)
        (self.N, self.K), (self.T, self.S) = HEADS[case.heads], LENGTHS[case.lengths]
        self.B, self.H, self.E = 1 if self.N == 1 else 2, D_K, D_V[case.d_v]
        self.indices = tuple(np.tile(np.arange(n, dtype=np.int32), (self.B, 1)) for n in (self.T, self.S))
        # the last query stands at the last key, as with a cache; queries that are more than the keys share places
        queries = self.indices[0] + self.S - self.T if self.T <= self.S else self.indices[0] * self.S // self.T
        self.positions = queries, self.indices[1].copy()
        self.padding = tuple(np.ones_like(x) for x in self.indices)
        self.padding[1][-1, -(self.S // 4) :] = 0
        parts = 2 + np.arange(self.B, dtype=np.int32)[:, None]
        self.segments = tuple(1 + x * parts // x.shape[1] for x in self.indices)
        self.prefix_lengths = np.arange(self.B, dtype=np.int32) * (self.S // 4)
        self.dead_query, self.hidden_key = (0, 3) if case.dead_row else None, (-1, 5) if case.nan else None
        # what says so is in all facts, whichever a mask looks at
        for axis, (slot, position) in enumerate([(self.dead_query, -1000), (self.hidden_key, -1)]):
            if slot is not None:
                self.positions[axis][slot] = position
                self.padding[axis][slot] = self.segments[axis][slot] = 0

    @property
    def given(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The positions that a mask is given: none where the indices say the same."""
        same = all(np.array_equal(*two) for two in zip(self.positions, self.indices, strict=True))
        return (None, None) if same else self.positions

    @property
    def dense(self) -> np.ndarray:
        """A bias `B N T S` with -inf in some places, and all over a dead query's row and a hidden key's column."""
        array = self.draw("dense", self.B, self.N, self.T, self.S)
        array[:, :, 2::5, 3::7] = -np.inf
        if self.dead_query is not None:
            array[self.dead_query[0], :, self.dead_query[1]] = -np.inf
        if self.hidden_key is not None:
            array[self.hidden_key[0], :, :, self.hidden_key[1]] = -np.inf
        return array

    def draw(self, name: str, *shape: int) -> np.ndarray:
        """Normal numbers that depend on name and shape alone, rounded to the dtype of the case."""
        return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(self.dtype)


class MaskRow(NamedTuple):
    """A mask: the library's, the oracle's, and where queries and keys stand by it."""

    library: Callable[[Facts], AttentionMask | None]
    twin: Callable[[Facts], np.ndarray | None]
    positions: Callable[[Facts], tuple[np.ndarray, np.ndarray]] = lambda f: f.positions


class BiasRow(NamedTuple):
    """A bias: the library's, and the oracle's for (facts, query positions, key positions)."""

    library: Callable[[Facts], Any]
    twin: Callable[..., Any]


def _user_mask(query, key, query_segment, key_segment, head):
    return (query >= 0) & ((key - query + head + key_segment) % 3 != 1)


def _user_bias(score, query, key, head, gain):
    near = (1 + head).astype(jnp.float32) / (1 + jnp.abs(key - query)).astype(jnp.float32)
    return score + gain.astype(jnp.float32) * jnp.tanh(score) * near


def _user_twin(score, query, key, head, gain):
    return score + gain * np.tanh(score) * (1 + head) / (1 + abs(key - query))


def _user_derivatives(score, query, key, head, gain):
    """Of the twin, by the score and by the gain."""
    near = (1 + head) / (1 + abs(key - query))
    return 1.0 + gain * near / np.cosh(score) ** 2, [np.tanh(score) * near]


MASKS = {
    "none": MaskRow(
        lambda f: None,
        lambda f: None,
        lambda f: f.indices,
    ),
    "causal": MaskRow(
        lambda f: AttentionMask(*f.given, causal=True),
        lambda f: oracle.causal_mask(*f.positions),
    ),
    "padding": MaskRow(
        lambda f: AttentionMask(None, None, *f.padding),
        lambda f: oracle.padding_mask(*f.padding),
        lambda f: f.indices,
    ),
    "causal+padding": MaskRow(
        lambda f: AttentionMask(*f.given, *f.padding, causal=True),
        lambda f: oracle.causal_mask(*f.positions) & oracle.padding_mask(*f.padding),
    ),
    "segments": MaskRow(
        lambda f: AttentionMask(None, None, *f.segments),
        lambda f: oracle.padding_mask(*f.segments),
        lambda f: f.indices,
    ),
    "window": MaskRow(
        lambda f: AttentionMask(*f.given, window=WINDOW),
        lambda f: oracle.window_mask(*f.positions, WINDOW),
    ),
    "prefix": MaskRow(
        lambda f: AttentionMask(*f.given, prefix_lengths=f.prefix_lengths, causal=True),
        lambda f: oracle.prefix_mask(*f.positions, f.prefix_lengths),
    ),
    "user": MaskRow(
        lambda f: AttentionMask(*f.given, *f.segments, function=_user_mask),
        lambda f: oracle.function_mask(_user_mask, *f.positions, *f.segments, f.N),
    ),
}

# Learned tables are in the dtype of the case, slopes in float32, as the library asks for them. T5's table has the
# published size: with few buckets nearly all pairs share one, whose gradient is then little but rounding.
BIASES = {
    "none": BiasRow(
        lambda f: None,
        lambda f, *positions: None,
    ),
    "alibi": BiasRow(
        lambda f: ALiBi(np.asarray(alibi_slopes(f.N), np.float32)),
        lambda f, *positions: oracle.ALiBi(oracle.alibi_slopes(f.N), *positions),
    ),
    "t5": BiasRow(
        lambda f: T5Bias(f.draw("table", 32, f.N), bidirectional="causal" not in f.case.mask),
        lambda f, *positions: oracle.T5Bias(f.draw("table", 32, f.N), *positions, "causal" not in f.case.mask),
    ),
    "shaw": BiasRow(
        lambda f: ShawBias(f.draw("keys", 11, f.H), f.draw("values", 11, f.E)),
        lambda f, *positions: oracle.ShawBias(f.draw("keys", 11, f.H), f.draw("values", 11, f.E), *positions),
    ),
    "dense": BiasRow(
        lambda f: DenseBias(f.dense),
        lambda f, *positions: oracle.DenseBias(f.dense),
    ),
    "user": BiasRow(
        lambda f: ScoreFunction(_user_bias, (f.draw("gain", 1, f.N, 1, 1),)),
        lambda f, *positions: oracle.ScoreFunction(
            _user_twin, _user_derivatives, *positions, (f.draw("gain", 1, f.N, 1, 1),)
        ),
    ),
}

FACTORS = {
    "mask": tuple(MASKS),
    "bias": tuple(BIASES),
    "dropout": (0.0, 0.1),
    "dtype": ("float32", "bfloat16"),
    "heads": ("MHA", "GQA", "MQA"),
    "lengths": ("T=S", "T<S", "T>S"),
    "d_v": tuple(D_V),
    "dead_row": (False, True),
    "nan": (False, True),
}
"""The fields of `Case` and the values that the pairwise cases combine."""


# What cuDNN may be asked for; among all the values its pairs would meet in hardly any case that it takes.
FUSED_FACTORS = FACTORS | {"bias": ("none", "dense"), "dropout": (0.0,), "dtype": ("bfloat16",), "d_v": ("= d_k",)}


def cases(*, full: bool = True, dtype: str = "float32", fused: bool = False) -> list[Case]:
    """Cases in which every pair of values of two of `FACTORS` occurs.

    full: before them the product of all masks and biases in `dtype`, and a few long ones. fused: after them as many
    pairs of `FUSED_FACTORS`, for where a fused kernel can run.
    """
    product = [Case(mask, bias, dtype=dtype) for mask in MASKS for bias in BIASES]
    # longer than one tile of `blockwise` as users have it
    long = [Case("causal+padding", x, dtype=dtype, heads="one", lengths=LONG) for x in ("none", "alibi", "t5")]
    arrays = [covering_array(x, possible) for x in ([FACTORS, FUSED_FACTORS] if fused else [FACTORS])]
    pairwise = [Case(**row) for array in arrays for row in array]
    return list(dict.fromkeys([*product, *long, *pairwise] if full else pairwise))


def possible(values: dict[str, Any]) -> bool:
    """Whether a case may have these values together: without a mask only the -inf of a dense bias hides anything."""
    hides = values.get("dead_row") or values.get("nan")
    return not (hides and values.get("mask") == "none" and values.get("bias", "dense") != "dense")


def covering_array(
    factors: dict[str, tuple[Any, ...]], possible: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Few rows in which every possible pair of values of two factors occurs; the same ones at every call.

    Greedy: a row starts with the first pair that is missing, and each further factor takes the value that adds most
    missing pairs, of several the one that was used least.
    """
    missing = {
        pair
        for one, two in itertools.combinations(factors, 2)
        for pair in itertools.product([(one, x) for x in factors[one]], [(two, x) for x in factors[two]])
        if possible(dict(pair))
    }
    order = {value: i for i, value in enumerate((name, x) for name in factors for x in factors[name])}
    rows, used = [], Counter()

    def pairs(row):
        return set(itertools.combinations([(name, row[name]) for name in factors if name in row], 2))

    while missing:
        row = dict(min(missing, key=lambda pair: [order[x] for x in pair]))
        for name in [name for name in factors if name not in row]:
            options = [row | {name: x} for x in factors[name] if possible(row | {name: x})]
            row = max(options, key=lambda option, name=name: (len(pairs(option) & missing), -used[name, option[name]]))
        rows.append(row)
        used.update(row.items())
        missing -= pairs(row)
    return rows
