"""Encoder and decoder blocks and their parts: functions of (params, arrays, settings).

`params` are nested dicts of arrays, as the modules of `nn` own them; a bias that is absent is not added.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.ops.attention import attention_weights, dot_product_attention
from tfm_jax.ops.cache import KeyValue, write
from tfm_jax.ops.dropout import dropout
from tfm_jax.ops.masks import AttentionMask

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}
Dropout = Key[Array, ""] | None
Mask = AttentionMask | Bool[Array, "_ _ _ _"] | None  # one name for masks of different lengths


@dataclass(frozen=True)
class BlockSettings:
    """The static switches of a block."""

    norm: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-5
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0


def layer_norm(params: dict, x: Float[Array, "B T D"], *, eps: float) -> Float[Array, "B T D"]:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis (Ba et al. 2016), computed in float32.

    params: scale (D), bias (D).
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    scale, bias = params["scale"].astype(jnp.float32), params["bias"].astype(jnp.float32)
    return (normal * scale[None, None] + bias[None, None]).astype(x.dtype)


def feed_forward(
    params: dict, x: Float[Array, "B T D"], *, activation: str, dropout_rate: float = 0.0, key: Dropout = None
) -> Float[Array, "B T D"]:
    """activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), dropout on the hidden layer.

    params: up (D F), up_bias (F), down (F D), down_bias (D).
    """
    hidden_BTF = ACTIVATIONS[activation](_add_bias(x @ params["up"], params.get("up_bias")))
    hidden_BTF = dropout(hidden_BTF, rate=dropout_rate, key=key)
    return _add_bias(hidden_BTF @ params["down"], params.get("down_bias"))


def multi_head_attention(
    params: dict,
    query: Float[Array, "B T Dq"],
    key: Float[Array, "B S Dk"],
    value: Float[Array, "B S Dv"],
    *,
    mask: Mask = None,
    dropout_rate: float = 0.0,
    dropout_key: Dropout = None,
) -> Float[Array, "B T D"]:
    """Concat(head_1, ..., head_N) W_O with head_n = Attention(Q W_Q, K W_K, V W_V) (Vaswani et al. 2017, 3.2.2).

    Query, key and value may come from anywhere. params: query (Dq N H), key (Dk K H), value (Dv K E), output (N E D)
    and query_bias, key_bias, value_bias, output_bias of the trailing shapes.
    """
    projected = keys_values(params, key, value)
    return attend(params, query, projected, mask=mask, dropout_rate=dropout_rate, dropout_key=dropout_key)


def keys_values(params: dict, key: Float[Array, "B S Dk"], value: Float[Array, "B S Dv"]) -> KeyValue:
    """The projections K W_K (B S K H) and V W_V (B S K E), which decoding keeps."""
    return KeyValue(_heads(params, "key", key), _heads(params, "value", value))


def attend(
    params: dict,
    query: Float[Array, "B T Dq"],
    projected: KeyValue,
    *,
    mask: Mask = None,
    dropout_rate: float = 0.0,
    dropout_key: Dropout = None,
) -> Float[Array, "B T D"]:
    """`multi_head_attention` over keys and values that are projected already."""
    with jax.named_scope("attention"):
        heads_BTNE = dot_product_attention(
            _heads(params, "query", query), *projected, mask=mask, dropout_rate=dropout_rate, dropout_key=dropout_key
        )
    return _add_bias(jnp.einsum("BTNE,NED->BTD", heads_BTNE, params["output"]), params.get("output_bias"))


def head_weights(
    params: dict, query: Float[Array, "B T D"], projected: KeyValue, *, mask: Mask
) -> Float[Array, "B N T S"]:
    """The attention weights that `attend` applies."""
    return attention_weights(_heads(params, "query", query), projected.key, mask=mask)


@jax.custom_vjp
def vocabulary_logits(x: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """x E^T in float32: the output layer, its table the embedding's or its own."""
    return jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)


def _vocabulary_logits_forward(x, table):
    return vocabulary_logits(x, table), (x, table)


def _vocabulary_logits_backward(residuals, gradient_BTV):
    x, table = residuals
    gradient_BTV = gradient_BTV.astype(x.dtype)
    # asked for as D V and transposed after: as V D, XLA transposes the gradient, the largest array of a train step,
    # which takes longer than the product
    table_gradient_DV = jnp.einsum("BTD,BTV->DV", x, gradient_BTV, preferred_element_type=jnp.float32)
    x_gradient = jnp.einsum("BTV,VD->BTD", gradient_BTV, table, preferred_element_type=jnp.float32)
    return x_gradient.astype(x.dtype), table_gradient_DV.T.astype(table.dtype)


vocabulary_logits.defvjp(_vocabulary_logits_forward, _vocabulary_logits_backward)


def encoder_block(
    params: dict, x: Float[Array, "B T D"], *, mask: Mask, settings: BlockSettings, key: Dropout = None
) -> Float[Array, "B T D"]:
    """Self-attention and feed-forward, each with residual, norm and dropout (Vaswani et al. 2017, section 3.1).

    params: attention, attention_norm, feed_forward, feed_forward_norm.
    """
    keys = _split(key, 4)
    x, _ = _self_attention_sublayer(params, x, mask, settings, keys[:2])
    return _feed_forward_sublayer(params, x, settings, keys[2:])


def encoder_block_weights(
    params: dict, x: Float[Array, "B T D"], *, mask: Mask, settings: BlockSettings
) -> Float[Array, "B N T T"]:
    """The self-attention weights of `encoder_block` (and of `decoder_block`, which begins alike) at its input x."""
    h = _enter(params["attention_norm"], x, settings)
    return head_weights(params["attention"], h, keys_values(params["attention"], h, h), mask=mask)


def decoder_block(
    params: dict,
    x: Float[Array, "B T D"],
    cross: KeyValue,
    *,
    mask: Mask,
    cross_mask: Mask,
    settings: BlockSettings,
    key: Dropout = None,
    cache: KeyValue | None = None,
    start: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], KeyValue]:
    """Causal self-attention, attention to the encoder and feed-forward (Vaswani et al. 2017, section 3.1).

    `cross` holds the encoder's output as keys and values of this block (`keys_values(params["cross_attention"], ...)`).
    Returns the output and the keys and values of self-attention, which are the cache's new content when one is given:
    its T new columns are written at `start`, and the mask speaks of all its columns.
    params: attention, attention_norm, cross_attention, cross_attention_norm, feed_forward, feed_forward_norm.
    """
    keys = _split(key, 5)
    own_keys = _split(keys[0], 2)
    x, projected = _self_attention_sublayer(params, x, mask, settings, own_keys, cache=cache, start=start)
    h = _enter(params["cross_attention_norm"], x, settings)
    y = attend(
        params["cross_attention"],
        h,
        cross,
        mask=cross_mask,
        dropout_rate=settings.attention_dropout,
        dropout_key=keys[1],
    )
    x = _leave(params["cross_attention_norm"], x, y, settings, keys[2])
    return _feed_forward_sublayer(params, x, settings, keys[3:]), projected


def decoder_block_weights(
    params: dict,
    x: Float[Array, "B T D"],
    cross: KeyValue,
    *,
    mask: Mask,
    cross_mask: Mask,
    settings: BlockSettings,
) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T S"]]:
    """The weights of self-attention and of cross-attention of `decoder_block` at its input x."""
    own = encoder_block_weights(params, x, mask=mask, settings=settings)
    x, _ = _self_attention_sublayer(params, x, mask, settings, _split(None, 2))
    h = _enter(params["cross_attention_norm"], x, settings)
    return own, head_weights(params["cross_attention"], h, cross, mask=cross_mask)


def _self_attention_sublayer(params, x, mask, settings, keys, *, cache=None, start=None):
    h = _enter(params["attention_norm"], x, settings)
    projected = keys_values(params["attention"], h, h)
    if cache is not None:
        projected = write(cache, projected, start)
    y = attend(
        params["attention"], h, projected, mask=mask, dropout_rate=settings.attention_dropout, dropout_key=keys[0]
    )
    return _leave(params["attention_norm"], x, y, settings, keys[1]), projected


def _feed_forward_sublayer(params, x, settings, keys):
    h = _enter(params["feed_forward_norm"], x, settings)
    with jax.named_scope("feed_forward"):
        y = feed_forward(
            params["feed_forward"],
            h,
            activation=settings.activation,
            dropout_rate=settings.feed_forward_dropout,
            key=keys[0],
        )
    return _leave(params["feed_forward_norm"], x, y, settings, keys[1])


def _enter(norm, x, settings):
    """What a sublayer sees: x after the norm (pre-LN, Xiong et al. 2020) or x as it is (post-LN)."""
    match settings.norm:
        case "pre":
            return layer_norm(norm, x, eps=settings.norm_eps)
        case "post":
            return x
        case other:
            raise ValueError(f"norm placement must be 'pre' or 'post', got {other!r}")


def _leave(norm, x, y, settings, key):
    """The residual connection around a sublayer whose output is y, and the norm after it (post-LN)."""
    x = x + dropout(y, rate=settings.residual_dropout, key=key)
    return x if settings.norm == "pre" else layer_norm(norm, x, eps=settings.norm_eps)


def _heads(params, name, x):
    heads = jnp.einsum("BTD,DNH->BTNH", x, params[name])
    bias = params.get(f"{name}_bias")
    return heads if bias is None else heads + bias[None, None]


def _add_bias(x, bias):
    return x if bias is None else x + bias[None, None]


def _split(key, count):
    return [None] * count if key is None else list(jax.random.split(key, count))
