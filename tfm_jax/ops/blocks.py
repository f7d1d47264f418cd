"""Encoder and decoder blocks and their parts: functions of (params, arrays, settings).

`params` are nested dicts of arrays, as the modules of `nn` own them; a bias that is absent is not added.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tfm_jax.ops.attention import Implementation
from tfm_jax.ops.cache import KeyValue, Stored
from tfm_jax.ops.dropout import dropout
from tfm_jax.ops.multi_head import (
    Bias,
    Dropout,
    Mask,
    Positions,
    add_bias,
    attend,
    attend_cached,
    head_weights,
    keys_values,
)
from tfm_jax.ops.positions import Rotary

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh", "swiglu"]


def _gelu(x):
    """x Phi(x) (Hendrycks and Gimpel 2016), in float32. By erf, as torch has it: the erfc of jax.nn.gelu is right to
    more digits where the result is next to nothing, and makes a train step on a CPU a fifth slower."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}
GATES = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
"""Gated feed-forward networks (Shazeer 2020), by the activation of their gate."""


@dataclass(frozen=True)
class BlockSettings:
    """The static switches of a block."""

    norm: Literal["post", "pre"] = "post"
    norm_kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "relu"
    attention_scale: Literal["sqrt", "none"] = "sqrt"
    """Scores divided by sqrt(d_k), or as they are (T5)."""
    rope: Rotary | None = None
    """Rotary embedding of the queries and keys of self-attention; None: none."""
    implementation: str | Implementation = "auto"
    """Of attention: a name in `ops.attention.IMPLEMENTATIONS`, or auto."""
    remat: Literal["none", "dots", "full"] = "dots"
    """What a stack of blocks computes again for the gradient: nothing, all but products with parameters, or all."""
    unroll: int = 1
    """Blocks in one turn of a stack's loop."""
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


def rms_norm(params: dict, x: Float[Array, "B T D"], *, eps: float) -> Float[Array, "B T D"]:
    """x / sqrt(mean of x^2 + eps) * scale over the last axis (Zhang and Sennrich 2019, eq. 4), computed in float32.

    params: scale (D).
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + eps)
    return (normal * params["scale"].astype(jnp.float32)[None, None]).astype(x.dtype)


NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm}


def feed_forward(
    params: dict, x: Float[Array, "B T D"], *, activation: str, dropout_rate: float = 0.0, key: Dropout = None
) -> Float[Array, "B T D"]:
    """activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), dropout on the hidden layer.

    With a gate (`GATES`) the hidden layer is activation(x V + c) * (x W1 + b1) (Shazeer 2020, eq. 6).
    params: up (D F), up_bias (F), down (F D), down_bias (D), with a gate also gate (D F) and gate_bias (F).
    """
    hidden_BTF = add_bias(x @ params["up"], params.get("up_bias"))
    if activation in GATES:
        gate_BTF = add_bias(x @ params["gate"], params.get("gate_bias"))
        hidden_BTF = ACTIVATIONS[GATES[activation]](gate_BTF) * hidden_BTF
    else:
        hidden_BTF = ACTIVATIONS[activation](hidden_BTF)
    hidden_BTF = dropout(hidden_BTF, rate=dropout_rate, key=key)
    return add_bias(hidden_BTF @ params["down"], params.get("down_bias"))


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
    # rounded to the dtype of the arguments by the product itself: XLA on CPU has none from bfloat16 to float32 that
    # comes out transposed
    table_gradient_DV = jnp.einsum("BTD,BTV->DV", x, gradient_BTV, preferred_element_type=table.dtype)
    x_gradient = jnp.einsum("BTV,VD->BTD", gradient_BTV, table, preferred_element_type=x.dtype)
    return x_gradient, table_gradient_DV.T


vocabulary_logits.defvjp(_vocabulary_logits_forward, _vocabulary_logits_backward)


def encoder_block(
    params: dict,
    x: Float[Array, "B T D"],
    *,
    mask: Mask,
    bias: Bias = None,
    positions: Positions = None,
    settings: BlockSettings,
    key: Dropout = None,
    cache: Stored | None = None,
    start: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Stored | None]:
    """Self-attention and feed-forward, each with residual, norm and dropout (Vaswani et al. 2017, section 3.1).

    bias: of the scores of self-attention. positions: of x (`B T` or `1 T`), for rope; None: 0, 1, .... Returns the
    output and the cache's new content, as `decoder_block` does; with a causal mask this is the block of a decoder that
    has no encoder.
    params: attention, attention_norm, feed_forward, feed_forward_norm.
    """
    keys = _split(key, 4)
    x, cache = _self_attention_sublayer(params, x, mask, bias, positions, settings, keys[:2], cache=cache, start=start)
    return _feed_forward_sublayer(params, x, settings, keys[2:]), cache


def encoder_block_weights(
    params: dict,
    x: Float[Array, "B T D"],
    *,
    mask: Mask,
    bias: Bias = None,
    positions: Positions = None,
    settings: BlockSettings,
) -> Float[Array, "B N T T"]:
    """The self-attention weights of `encoder_block` (and of `decoder_block`, which begins alike) at its input x."""
    h = _enter(params["attention_norm"], x, settings)
    turn = {"rope": settings.rope, "positions": positions}
    projected = keys_values(params["attention"], h, h, **turn)
    return head_weights(params["attention"], h, projected, mask=mask, bias=bias, scale=_scale(settings), **turn)


def decoder_block(
    params: dict,
    x: Float[Array, "B T D"],
    cross: KeyValue | Stored,
    *,
    mask: Mask,
    cross_mask: Mask,
    bias: Bias = None,
    positions: Positions = None,
    settings: BlockSettings,
    key: Dropout = None,
    cache: Stored | None = None,
    start: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Stored | None]:
    """Causal self-attention, attention to the encoder and feed-forward (Vaswani et al. 2017, section 3.1).

    `cross` holds the encoder's output as keys and values of this block (`keys_values(params["cross_attention"], ...)`).
    Returns the output and the cache's new content when one is given: T new columns are written at `start`, and the mask
    speaks of all columns. bias and positions as in `encoder_block`; cross-attention knows neither.
    params: attention, attention_norm, cross_attention, cross_attention_norm, feed_forward, feed_forward_norm.
    """
    keys = _split(key, 5)
    own_keys = _split(keys[0], 2)
    x, cache = _self_attention_sublayer(params, x, mask, bias, positions, settings, own_keys, cache=cache, start=start)
    h = _enter(params["cross_attention_norm"], x, settings)
    y = attend(
        params["cross_attention"],
        h,
        cross,
        mask=cross_mask,
        scale=_scale(settings),
        dropout_rate=settings.attention_dropout,
        dropout_key=keys[1],
        implementation=settings.implementation,
    )
    x = _leave(params["cross_attention_norm"], x, y, settings, keys[2])
    return _feed_forward_sublayer(params, x, settings, keys[3:]), cache


def decoder_block_weights(
    params: dict,
    x: Float[Array, "B T D"],
    cross: KeyValue,
    *,
    mask: Mask,
    cross_mask: Mask,
    bias: Bias = None,
    positions: Positions = None,
    settings: BlockSettings,
) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T S"]]:
    """The weights of self-attention and of cross-attention of `decoder_block` at its input x."""
    own = encoder_block_weights(params, x, mask=mask, bias=bias, positions=positions, settings=settings)
    x, _ = _self_attention_sublayer(params, x, mask, bias, positions, settings, _split(None, 2))
    h = _enter(params["cross_attention_norm"], x, settings)
    return own, head_weights(params["cross_attention"], h, cross, mask=cross_mask, scale=_scale(settings))


def _self_attention_sublayer(params, x, mask, bias, positions, settings, keys, *, cache=None, start=None):
    h = _enter(params["attention_norm"], x, settings)
    turn = {"rope": settings.rope, "positions": positions}
    own = {"mask": mask, "bias": bias, "scale": _scale(settings)}
    if cache is not None:
        y, cache = attend_cached(params["attention"], h, cache, start, **own, **turn)
        return _leave(params["attention_norm"], x, y, settings, keys[1]), cache
    projected = keys_values(params["attention"], h, h, **turn)
    y = attend(
        params["attention"],
        h,
        projected,
        **own,
        **turn,
        dropout_rate=settings.attention_dropout,
        dropout_key=keys[0],
        implementation=settings.implementation,
    )
    return _leave(params["attention_norm"], x, y, settings, keys[1]), None


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
            return NORMS[settings.norm_kind](norm, x, eps=settings.norm_eps)
        case "post":
            return x
        case other:
            raise ValueError(f"norm placement must be 'pre' or 'post', got {other!r}")


def _leave(norm, x, y, settings, key):
    """The residual connection around a sublayer whose output is y, and the norm after it (post-LN)."""
    x = x + dropout(y, rate=settings.residual_dropout, key=key)
    return x if settings.norm == "pre" else NORMS[settings.norm_kind](norm, x, eps=settings.norm_eps)


def _scale(settings):
    """What scores are multiplied by; None: 1 / sqrt(d_k)."""
    return None if settings.attention_scale == "sqrt" else 1.0


def _split(key, count):
    return [None] * count if key is None else list(jax.random.split(key, count))
