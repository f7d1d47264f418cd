"""Pure functions of arrays: the mathematics of the Transformer, without modules, configuration or hidden state.

One alphabet names the axes of every array, in annotations, einsums and suffixes of local names:

    B batch            N query heads         H head size of queries and keys (d_k)
    T query length     K key/value heads     E head size of values (d_v)
    S key length       G = N / K             F feed-forward width (d_ff)
    D model width      V vocabulary          L layers
    R rows of a table of relative positions, or elements of a head that rotary embedding turns

`logits_BNTS` is an array with the axes batch, head, query, key.
"""

from tfm_jax.ops.attention import attention_weights, dot_product_attention, explain_implementation
from tfm_jax.ops.biases import (
    ALiBi,
    AttentionBias,
    DenseBias,
    ScoreFunction,
    ShawBias,
    SoftCap,
    T5Bias,
    alibi,
    alibi_slopes,
)
from tfm_jax.ops.blocks import BlockSettings, decoder_block, encoder_block, feed_forward, layer_norm
from tfm_jax.ops.blockwise import Blockwise
from tfm_jax.ops.cache import KeyValue, KVCache
from tfm_jax.ops.dropout import dropout
from tfm_jax.ops.kernels import CuDNN, Splash
from tfm_jax.ops.masks import AttentionMask, additive_mask, causal_mask, padding_mask
from tfm_jax.ops.multi_head import multi_head_attention
from tfm_jax.ops.positions import (
    Rotary,
    relative_position_bucket,
    rotary_embedding,
    sinusoidal_positions,
    sinusoidal_table,
)
from tfm_jax.ops.shared import Shared

__all__ = [
    "ALiBi",
    "AttentionBias",
    "AttentionMask",
    "BlockSettings",
    "Blockwise",
    "CuDNN",
    "DenseBias",
    "KVCache",
    "KeyValue",
    "Rotary",
    "ScoreFunction",
    "Shared",
    "ShawBias",
    "SoftCap",
    "Splash",
    "T5Bias",
    "additive_mask",
    "alibi",
    "alibi_slopes",
    "attention_weights",
    "causal_mask",
    "decoder_block",
    "dot_product_attention",
    "dropout",
    "encoder_block",
    "explain_implementation",
    "feed_forward",
    "layer_norm",
    "multi_head_attention",
    "padding_mask",
    "relative_position_bucket",
    "rotary_embedding",
    "sinusoidal_positions",
    "sinusoidal_table",
]
