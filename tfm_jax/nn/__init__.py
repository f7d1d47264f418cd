"""Flax NNX modules that own the parameters of the functions in `ops`.

A module declares parameters (shape, initial values, axis names) and calls the function of the same name on
`plain(self)`, the nested dict of its arrays. To change what a layer computes, write the function and a module around
it: a parent calls its function on its own tree, so replacing a child's `__call__` has no effect.
"""

from tfm_jax.nn.attention import MultiHeadAttention
from tfm_jax.nn.blocks import Decoder, DecoderBlock, Encoder, EncoderBlock
from tfm_jax.nn.layers import Embedding, FeedForward, LayerNorm, plain

__all__ = [
    "Decoder",
    "DecoderBlock",
    "Embedding",
    "Encoder",
    "EncoderBlock",
    "FeedForward",
    "LayerNorm",
    "MultiHeadAttention",
    "plain",
]
