"""Scaled dot-product attention: the one door through which every model attends."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from tfm_jax.ops.dropout import keep_mask
from tfm_jax.ops.masks import AttentionMask

Mask = AttentionMask | Bool[Array, "#B #N #T #S"] | None
Bias = Float[Array, "#B #N #T #S"] | None


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
) -> Float[Array, "B T N E"]:
    """softmax(Q K^T * scale + bias) V (Vaswani et al. 2017, eq. 1), the scale 1 / sqrt(d_k) unless given.

    `mask` is True where a query may attend; a bias of -inf says the same as a False. N query heads share K key heads
    in groups of N / K. Logits and softmax are float32 whatever the inputs, the result has the dtype of `value`.
    A query that may attend to nothing gives zeros and zero gradients. What stands in a slot that no query may see
    never matters, NaN included. Dropout acts on the weights and only with a key.

    Raises `ValueError` for shapes and heads that do not go together, a rate outside [0, 1) and a mask that is not
    boolean.
    """
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}: B T N H, B S K H, B S K E are expected"
        )
    visible = _visible(mask, bias)
    if visible is not None:
        # 0 * NaN is NaN: the products of forward and backward pass are clean only if what they ignore is finite.
        seen_BSN1 = visible.any(axis=2)[..., None].swapaxes(1, 2)
        if visible.shape[1] != 1:
            seen_BSN1 = seen_BSN1.any(axis=2, keepdims=True)
        key, value = jnp.where(seen_BSN1, key, 0), jnp.where(seen_BSN1, value, 0)
    weights_BNTS = attention_weights(query, key, mask=visible, bias=bias, scale=scale)
    if dropout_key is not None and dropout_rate != 0.0:
        keep = keep_mask(dropout_key, weights_BNTS.shape, dropout_rate)
        weights_BNTS = jnp.where(keep, weights_BNTS / (1.0 - dropout_rate), 0.0)
    B, N, T, S = weights_BNTS.shape
    K = key.shape[2]
    weights_BKGTS = weights_BNTS.astype(value.dtype).reshape(B, K, N // K, T, S)
    output_BTKGE = jnp.einsum("BKGTS,BSKE->BTKGE", weights_BKGTS, value, preferred_element_type=jnp.float32)
    return output_BTKGE.reshape(B, T, N, -1).astype(value.dtype)


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
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    if N % K:
        raise ValueError(f"query has {N} heads, key has {K}: {N} is not a multiple of {K}")
    visible = _visible(mask, bias)
    if visible is not None:
        query = jnp.where(visible.any(axis=3).swapaxes(1, 2)[..., None], query, 0)
    query_BTKGH = query.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5 if scale is None else scale, query.dtype)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key, preferred_element_type=jnp.float32)
    logits_BNTS = logits_BKGTS.reshape(B, N, T, S)
    if bias is not None:
        # -inf stays out of the sum: its gradient would be NaN
        logits_BNTS = logits_BNTS + jnp.where(jnp.isneginf(bias), 0, bias).astype(jnp.float32)
    if visible is None:
        return jax.nn.softmax(logits_BNTS, axis=-1)
    return jax.nn.softmax(logits_BNTS, axis=-1, where=visible)


def _visible(mask: Mask, bias: Bias) -> Bool[Array, "#B #N #T #S"] | None:
    if isinstance(mask, AttentionMask):
        mask = mask.array()
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask has dtype {mask.dtype}: a boolean array is expected, True where a query may attend")
    if bias is None:
        return mask
    finite = ~jnp.isneginf(bias)
    return finite if mask is None else mask & finite
