"""Scaled dot-product attention: the one door through which every model attends, and the implementations behind it."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from tfm_jax.ops.biases import AttentionBias, Tile, as_biases
from tfm_jax.ops.blockwise import Blockwise
from tfm_jax.ops.cache import Stored
from tfm_jax.ops.kernels import CuDNN, Splash
from tfm_jax.ops.masks import AttentionMask, Block, as_mask
from tfm_jax.ops.scores import Request, both, seen_keys, tile_logits, tile_values, tile_visible, with_biases

Mask = AttentionMask | Bool[Array, "#B #N #T #S"] | None
Bias = AttentionBias | Float[Array, "#B #N #T #S"] | tuple | list | None


@runtime_checkable
class Implementation(Protocol):
    """A way to compute attention. Those of one platform also have `drawback`, why "auto" does not take them."""

    def refusal(self, request: Request) -> str | None:
        """Why the request cannot be honoured, naming what is in the way; None when it can."""

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a request that is not refused."""


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K E"],
    *,
    mask: Mask = None,
    bias: Bias = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    implementation: str | Implementation = "auto",
) -> Float[Array, "B T N E"]:
    """softmax(Q K^T * scale + bias) V (Vaswani et al. 2017, eq. 1), the scale 1 / sqrt(d_k) unless given.

    `mask` is True where a query may attend; a bias of -inf says the same as a False. Several biases apply in order. N
    query heads share K key heads in groups of N / K. Logits and softmax are float32 whatever the inputs, the result has
    the dtype of `value`. A query that may attend to nothing gives zeros and zero gradients. What stands in a slot that
    no query may see never matters, NaN included. Dropout acts on the weights and only with a key, and drops the same
    elements in every implementation.

    implementation: a name in `IMPLEMENTATIONS`, an instance (`Blockwise(block=128)`), or "auto", which chooses by
    platform, shape and request as `explain_implementation` says. `blockwise` has a reverse-mode gradient only.

    Raises `ValueError` for shapes and heads that do not go together, a rate outside [0, 1), a mask that is not boolean,
    and where the named implementation cannot do what is asked: there is no silent fallback.
    """
    request = _request(query, key, value, mask, bias, scale, dropout_rate, dropout_key)
    chosen = chosen_implementation(request, implementation)
    reason = chosen.refusal(request)
    if reason is not None:
        raise ValueError(f"{type(chosen).__name__} cannot do this: {reason}; 'reference' and 'blockwise' can")
    with jax.named_scope("dot_product_attention"):
        return chosen.run(request)


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    mask: Mask = None,
    bias: Bias = None,
    scale: float | None = None,
) -> Float[Array, "B N T S"]:
    """The row-stochastic matrix A = softmax(Q K^T * scale + bias) in float32; a row that may see nothing is all zeros.

    Arguments and errors are those of `dot_product_attention`.
    """
    return _weights(_request(query, key, None, mask, bias, scale, 0.0, None))[0]


def cached_attention(
    query: Float[Array, "B T N H"],
    stored: Stored,
    *,
    mask: AttentionMask,
    bias: Bias = None,
    scale: float | None = None,
) -> Float[Array, "B T N E"]:
    """`dot_product_attention` of a few queries over a cache, read in the order in which it is stored.

    What stands in slots that no query sees must be finite, as in a cache it is: clearing it would cost more than the
    products.
    """
    (B, T, N, H), (_, K, _, S) = query.shape, stored.key.shape
    rows, columns, biases = Block(0, T), Block(0, S), as_biases(bias)
    mask.check(T, S)
    query = query.swapaxes(1, 2) * jnp.asarray(H**-0.5 if scale is None else scale, query.dtype)
    tile = Tile(query, *mask.positions_for_biases(rows, columns))
    visible = tile_visible(mask, biases, tile, rows, columns, N)
    grouped = query.reshape(B, K, N // K, T, H)
    logits = jnp.einsum("BKGTH,BKHS->BKGTS", grouped, stored.key, preferred_element_type=jnp.float32)
    logits = with_biases(logits.reshape(B, N, T, S), biases, tile)
    if visible is not None:
        logits = jnp.where(visible, logits, jnp.finfo(jnp.float32).min)
    output = tile_values(jax.nn.softmax(logits, axis=-1), stored.value, biases, tile)
    if visible is not None:
        output = jnp.where(visible.any(axis=3)[..., None], output, 0.0)
    return output.swapaxes(1, 2).astype(stored.value.dtype)


@dataclass(frozen=True)
class Explanation:
    """Which implementation a call runs, why, and why not the others."""

    implementation: str
    reason: str
    refused: dict[str, str]
    """By name, what each implementation that cannot do the request says."""
    scores: str
    """Whether an array with an entry for every query and key is built."""

    def __str__(self) -> str:
        lines = [f"{self.implementation}: {self.reason}", self.scores]
        return "\n".join(lines + [f"{name} cannot: {reason}" for name, reason in self.refused.items()])


def explain_implementation(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask = None,
    bias: Bias = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    implementation: str | Implementation = "auto",
    platform: str | None = None,
) -> Explanation:
    """What `dot_product_attention` does with these arguments, and why; nothing is computed.

    Arrays may be `jax.ShapeDtypeStruct`s. platform: "cpu", "gpu" or "tpu"; None: that of this process. Raises as
    `dot_product_attention` does, refusals apart, which are in the answer.
    """
    request = _request(query, key, value, mask, bias, scale, dropout_rate, dropout_key)
    refused = {name: reason for name, one in IMPLEMENTATIONS.items() if (reason := one.refusal(request)) is not None}
    if implementation == "auto":
        implementation, reason = _auto(request, platform or jax.default_backend())
    else:
        refusal = chosen_implementation(request, implementation).refusal(request)
        reason = "asked for by name" if refusal is None else f"refused, {refusal}"
    chosen = chosen_implementation(request, implementation)
    name = implementation if isinstance(implementation, str) else type(implementation).__name__
    return Explanation(name, reason, refused, chosen.scores(request))


@dataclass(frozen=True)
class Reference:
    """The implementation `reference`: the equation as it stands, with the whole matrix of scores."""

    def refusal(self, request: Request) -> str | None:
        """None: every request is honoured."""
        return None

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""
        return f"builds scores of shape {request.shape} in float32"

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a checked request."""
        weights_BNTS, visible, tile = _weights(request)
        weights_BNTS = request.place.drop(weights_BNTS, request.dropout_rate, request.dropout_key, *request.blocks)
        value = request.heads_first[2]
        if visible is not None:
            value = jnp.where(seen_keys(visible, value.shape[1]), value, 0)
        output_BNTE = tile_values(weights_BNTS, value, request.biases, tile)
        return output_BNTE.swapaxes(1, 2).astype(value.dtype)


IMPLEMENTATIONS: dict[str, Any] = {
    "reference": Reference(),
    "blockwise": Blockwise(),
    "cudnn": CuDNN(),
    "splash": Splash(),
}


def chosen_implementation(request: Request, implementation: str | Implementation) -> Implementation:
    """The implementation of a name, what "auto" stands for, or the instance itself."""
    chosen = _auto(request, jax.default_backend())[0] if implementation == "auto" else implementation
    return IMPLEMENTATIONS[_known(chosen)] if isinstance(chosen, str) else chosen


def _known(name):
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {name!r}: 'auto' or one of {sorted(IMPLEMENTATIONS)} is expected")
    return name


def _weights(request):
    """The weights `B N T S`, what is visible (None: all), and the tile that is the whole array."""
    query, key, _ = request.heads_first
    rows, columns = request.blocks
    positions = (request.mask or AttentionMask()).positions_for_biases(rows, columns)
    tile = Tile(query, *positions, request.place.first_head)
    visible = tile_visible(request.mask, request.biases, tile, rows, columns, request.shape[1])
    if visible is not None:
        key = jnp.where(seen_keys(visible, key.shape[1]), key, 0)
        tile = replace(tile, query=jnp.where(visible.any(axis=3)[..., None], query, 0))
    logits_BNTS = tile_logits(tile.query, key, request.biases, tile)
    if request.biases:
        visible = both(visible, ~jnp.isneginf(jax.lax.stop_gradient(logits_BNTS)))
    if visible is None:
        return jax.nn.softmax(logits_BNTS, axis=-1), None, tile
    # softmax(where=visible) says the same and takes twice the time of both selects together (CPU, T = 1,024)
    lowest = jnp.finfo(jnp.float32).min
    weights_BNTS = jax.nn.softmax(jnp.where(visible, logits_BNTS, lowest), axis=-1)
    return jnp.where(visible, weights_BNTS, 0.0), visible, tile


def _request(query, key, value, mask, bias, scale, dropout_rate, dropout_key):
    """The arguments in one form; raises `ValueError` for what does not go together. value None: weights alone."""
    value_size = None if value is None else value.shape[-1]
    value = key if value is None else value
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4) or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{shapes}: B T N H, B S K H, B S K E are expected")
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    if key.shape[0] != B or key.shape[3] != H:
        raise ValueError(f"{shapes}: B T N H, B S K H, B S K E are expected")
    if N % K:
        raise ValueError(f"query has {N} heads, key has {K}: {N} is not a multiple of {K}")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout rate is {dropout_rate}: it lies in [0, 1)")
    mask = None if mask is None else as_mask(mask)
    if mask is not None:
        mask.check(T, S, batch=B, num_heads=N)
        mask = mask if mask.facts else None
    biases = as_biases(bias)
    for one in biases:
        one.check((B, N, T, S), (H, value_size))
    scale = H**-0.5 if scale is None else scale
    return Request(query, key, value, mask, biases, scale, dropout_rate, dropout_key if dropout_rate else None)


# Below so many scores a row and head, one product over all of them beats the loop over blocks (experiments/benchmarks).
_SHORT = 512 * 512


def _auto(request, platform):
    """The name that "auto" stands for, and why."""
    _, _, T, S = request.shape
    fused, passed = {"gpu": "cudnn", "tpu": "splash"}.get(platform), ""
    if fused is not None:
        reason = IMPLEMENTATIONS[fused].refusal(request) or IMPLEMENTATIONS[fused].drawback(request)
        if reason is None:
            return fused, f"the fused kernel of this platform ({platform}) can do it"
        passed = f" (not {fused}: {reason})"
    if T * S < _SHORT:
        return "reference", f"{T} x {S} scores are few: one product over all of them is fastest{passed}"
    return "blockwise", f"{T} x {S} scores are many: they are made in tiles and never kept{passed}"
