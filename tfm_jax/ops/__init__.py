"""Pure functions of arrays: the mathematics of the Transformer, without modules, configuration or hidden state.

One alphabet names the axes of every array, in annotations, einsums and suffixes of local names:

    B batch            N query heads         H head size of queries and keys (d_k)
    T query length     K key/value heads     E head size of values (d_v)
    S key length       G = N / K             F feed-forward width (d_ff)
    D model width      V vocabulary          L layers

`logits_BNTS` is an array with the axes batch, head, query, key.
"""

from tfm_jax.ops.attention import attention_weights, dot_product_attention
from tfm_jax.ops.blocks import (
    BlockSettings,
    decoder_block,
    encoder_block,
    feed_forward,
    layer_norm,
    multi_head_attention,
)
from tfm_jax.ops.cache import KeyValue, KVCache
from tfm_jax.ops.dropout import dropout
from tfm_jax.ops.masks import AttentionMask, additive_mask, causal_mask, padding_mask
from tfm_jax.ops.positions import sinusoidal_positions, sinusoidal_table

__all__ = [
    "AttentionMask",
    "BlockSettings",
    "KVCache",
    "KeyValue",
    "additive_mask",
    "attention_weights",
    "causal_mask",
    "decoder_block",
    "dot_product_attention",
    "dropout",
    "encoder_block",
    "feed_forward",
    "layer_norm",
    "multi_head_attention",
    "padding_mask",
    "sinusoidal_positions",
    "sinusoidal_table",
]
