"""Multi-head attention with its parameters."""

import functools

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from tfm_jax.nn.layers import param, plain, zeros
from tfm_jax.ops import multi_head
from tfm_jax.ops.multi_head import Bias, Mask


def head_size(d_model: int, num_heads: int, d_k: int | None) -> int:
    """d_k where it is given, else d_model / num_heads; raises `ValueError` when that is not whole."""
    if num_heads < 1 or (d_k is not None and d_k < 1):
        raise ValueError(f"num_heads is {num_heads}, d_k {d_k}: both are at least 1")
    if d_k is not None:
        return d_k
    if d_model % num_heads:
        raise ValueError(
            f"d_model is {d_model}, num_heads {num_heads}: {d_model} is not a multiple of {num_heads}; "
            "change one of them or give d_k, the size of a head"
        )
    return d_model // num_heads


def kv_heads_of(num_heads: int, num_kv_heads: int | None) -> int:
    """num_kv_heads where it is given, else num_heads; raises `ValueError` unless query heads share them evenly."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(f"num_heads is {num_heads}, num_kv_heads {kv_heads}: {num_heads} is not a multiple of it")
    return kv_heads


class MultiHeadAttention(nnx.Module):
    """`ops.multi_head_attention` with its parameters: 4 D^2 weights, beside biases, where N d_k = N d_v = D.

    d_k and d_v (the head sizes) are free; left out, d_k is d_model / num_heads and d_v is d_k. num_kv_heads: heads of
    keys and values, each for as many heads of queries (Ainslie et al. 2023); None: num_heads. bias: of the projections,
    the last one's only with output_bias. shaw_distance: k of the relative positions of Shaw et al. (2018), which add
    two tables with 2 k + 1 rows that all heads share (their section 3.3); 0: none. scaled: whether scores will be
    divided by sqrt(d_k); where not, queries begin smaller by that, as T5's do, so that scores begin alike.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        bias: bool = True,
        output_bias: bool = True,
        shaw_distance: int = 0,
        scaled: bool = True,
        rngs: nnx.Rngs,
    ):
        d_k = head_size(d_model, num_heads, d_k)
        d_v = d_k if d_v is None else d_v
        kv_heads = kv_heads_of(num_heads, num_kv_heads)
        # half the variance of Xavier: query, key and value count as one matrix of three times the fan out
        inward = functools.partial(
            jax.nn.initializers.variance_scaling, mode="fan_avg", distribution="uniform", in_axis=0, out_axis=(1, 2)
        )
        outward = jax.nn.initializers.xavier_uniform(in_axis=(0, 1), out_axis=2)
        projections = {"query": (num_heads, d_k), "key": (kv_heads, d_k), "value": (kv_heads, d_v)}
        for name, heads in projections.items():
            shape, axes = (d_model, *heads), ("embed", "heads" if name == "query" else "kv_heads", None)
            smaller = name == "query" and not scaled
            setattr(self, name, param(shape, axes=axes, init=inward(0.5 / d_k if smaller else 0.5), rngs=rngs))
            if bias:
                setattr(self, f"{name}_bias", param(shape[1:], axes=axes[1:], init=zeros, rngs=rngs))
        shape, axes = (num_heads, d_v, d_model), ("heads", None, "embed")
        self.output = param(shape, axes=axes, init=outward, rngs=rngs)
        if bias and output_bias:
            self.output_bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)
        if shaw_distance:
            for name, size in (("relative_key", d_k), ("relative_value", d_v)):
                shape, init = (2 * shaw_distance + 1, size), jax.nn.initializers.xavier_uniform()
                setattr(self, name, param(shape, axes=(None, None), init=init, rngs=rngs))

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"] | None = None,
        value: Float[Array, "B S D"] | None = None,
        *,
        mask: Mask = None,
        bias: Bias = None,
        dropout_rate: float = 0.0,
        dropout_key: Key[Array, ""] | None = None,
        implementation: str = "auto",
    ) -> Float[Array, "B T D"]:
        """Attention from `query` to `key` and `value`; the key is the query, the value the key, where left out."""
        key = query if key is None else key
        value = key if value is None else value
        return multi_head.multi_head_attention(
            plain(self),
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            implementation=implementation,
        )
