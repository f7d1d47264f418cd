"""Multi-head attention: projections around `dot_product_attention`, as functions of (params, arrays)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.ops.attention import Implementation, attention_weights, cached_attention, dot_product_attention
from tfm_jax.ops.biases import AttentionBias, ShawBias
from tfm_jax.ops.cache import KeyValue, Stored
from tfm_jax.ops.masks import AttentionMask
from tfm_jax.ops.positions import Rotary, rotary_embedding

Dropout = Key[Array, ""] | None
Mask = AttentionMask | Bool[Array, "_ _ _ _"] | None  # one name for masks of different lengths
Bias = AttentionBias | Float[Array, "_ _ _ _"] | tuple | list | None
Positions = Int[Array, "_ _"] | None
FEW_QUERIES = 64


def multi_head_attention(
    params: dict,
    query: Float[Array, "B T Dq"],
    key: Float[Array, "B S Dk"],
    value: Float[Array, "B S Dv"],
    *,
    mask: Mask = None,
    bias: Bias = None,
    dropout_rate: float = 0.0,
    dropout_key: Dropout = None,
    implementation: str | Implementation = "auto",
) -> Float[Array, "B T D"]:
    """Concat(head_1, ..., head_N) W_O with head_n = Attention(Q W_Q, K W_K, V W_V) (Vaswani et al. 2017, 3.2.2).

    Query, key and value may come from anywhere. params: query (Dq N H), key (Dk K H), value (Dv K E), output (N E D)
    and query_bias, key_bias, value_bias, output_bias of the trailing shapes; relative_key (2k+1 H) and relative_value
    (2k+1 E), where given, are Shaw's tables (`ShawBias`).
    """
    projected = keys_values(params, key, value)
    return attend(
        params,
        query,
        projected,
        mask=mask,
        bias=bias,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )


def keys_values(
    params: dict,
    key: Float[Array, "B S Dk"],
    value: Float[Array, "B S Dv"],
    *,
    rope: Rotary | None = None,
    positions: Positions = None,
) -> KeyValue:
    """The projections K W_K (B S K H), turned by `rope` at its positions, and V W_V (B S K E), which decoding keeps."""
    return KeyValue(_turned(_heads(params, "key", key), rope, positions), _heads(params, "value", value))


def attend(
    params: dict,
    query: Float[Array, "B T Dq"],
    projected: KeyValue | Stored,
    *,
    mask: Mask = None,
    bias: Bias = None,
    scale: float | None = None,
    rope: Rotary | None = None,
    positions: Positions = None,
    dropout_rate: float = 0.0,
    dropout_key: Dropout = None,
    implementation: str | Implementation = "auto",
) -> Float[Array, "B T D"]:
    """`multi_head_attention` over keys and values that are projected already; rope turns the queries.

    scale: of the scores; None: 1 / sqrt(d_k).

    From a cache (`Stored`) a few queries read as it stands, without dropout; more of them, as in the prefill of a long
    prompt, go through `dot_product_attention`, which chooses for itself.
    """
    query_BTNH, bias = _turned(_heads(params, "query", query), rope, positions), _with_shaw(params, bias)
    dropout = {"dropout_rate": dropout_rate, "dropout_key": dropout_key}
    given = {"mask": mask, "bias": bias, "scale": scale}
    return _attended(params, query_BTNH, projected, given, implementation=implementation, **dropout)


def attend_cached(
    params: dict,
    x: Float[Array, "B T D"],
    cache: Stored,
    start: Int[Array, ""],
    *,
    mask: Mask,
    bias: Bias = None,
    scale: float | None = None,
    rope: Rotary | None = None,
    positions: Positions = None,
) -> tuple[Float[Array, "B T D"], Stored]:
    """Self-attention of T new columns, written at column `start` of the cache, and the cache that includes them."""
    if "projections" in params:
        query, key, value = _fused_heads(params, x)
    else:
        query, key, value = (_heads(params, name, x) for name in ("query", "key", "value"))
    cache = cache.write(KeyValue(_turned(key, rope, positions), value), start)
    given = {"mask": mask, "bias": _with_shaw(params, bias), "scale": scale}
    return _attended(params, _turned(query, rope, positions), cache, given), cache


def _attended(params, query_BTNH, projected, given, **options):
    with jax.named_scope("attention"):
        if isinstance(projected, Stored) and query_BTNH.shape[1] <= FEW_QUERIES:
            heads_BTNE = cached_attention(query_BTNH, projected, **given)
        elif isinstance(projected, Stored):
            heads_BTNE = dot_product_attention(query_BTNH, *projected.projected, **given)
        else:
            heads_BTNE = dot_product_attention(query_BTNH, *projected, **given, **options)
    return add_bias(jnp.einsum("BTNE,NED->BTD", heads_BTNE, params["output"]), params.get("output_bias"))


def head_weights(
    params: dict,
    query: Float[Array, "B T D"],
    projected: KeyValue,
    *,
    mask: Mask,
    bias: Bias = None,
    scale: float | None = None,
    rope: Rotary | None = None,
    positions: Positions = None,
) -> Float[Array, "B N T S"]:
    """The attention weights that `attend` applies, whatever its implementation."""
    query_BTNH = _turned(_heads(params, "query", query), rope, positions)
    return attention_weights(query_BTNH, projected.key, mask=mask, bias=_with_shaw(params, bias), scale=scale)


def fused(params: dict) -> dict:
    """The parameters of a self-attention, its three projections as one matrix too: for few tokens one product costs a
    step less than three."""
    names = ("query", "key", "value")
    flat = {name: params[name].reshape(params[name].shape[0], -1) for name in names}
    joined = {"projections": jnp.concatenate([flat[name] for name in names], axis=1)}
    if "query_bias" in params:
        joined["projections_bias"] = jnp.concatenate([params[f"{name}_bias"].reshape(-1) for name in names])
    return params | joined


def _fused_heads(params, x):
    """Query `B T N H`, key `B T K H` and value `B T K E` by the one matrix that `fused` made."""
    joined = add_bias(x @ params["projections"], params.get("projections_bias"))
    shapes = [params[name].shape[1:] for name in ("query", "key", "value")]
    ends = [0]
    for N, H in shapes:
        ends.append(ends[-1] + N * H)
    parts = (joined[..., start:end] for start, end in zip(ends[:-1], ends[1:], strict=True))
    return [part.reshape(*x.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]


def add_bias(x: Float[Array, "B T D"], bias: Float[Array, "D"] | None) -> Float[Array, "B T D"]:
    """x + bias, or x where there is none."""
    return x if bias is None else x + bias[None, None]


def _heads(params, name, x):
    heads = jnp.einsum("BTD,DNH->BTNH", x, params[name])
    bias = params.get(f"{name}_bias")
    return heads if bias is None else heads + bias[None, None]


def _turned(heads, rope, positions):
    if rope is None:
        return heads
    if positions is None:
        positions = jnp.arange(heads.shape[1], dtype=jnp.int32)[None]
    return rotary_embedding(heads, positions, rope)


def _with_shaw(params, bias):
    """The biases of the scores, Shaw's before them where the layer has its tables."""
    if not {"relative_key", "relative_value"} & set(params):
        return bias
    shaw = ShawBias(params.get("relative_key"), params.get("relative_value"))
    return shaw if bias is None else (shaw, bias)
