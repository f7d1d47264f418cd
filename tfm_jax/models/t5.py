"""T5 (Raffel et al. 2020) and its successors as switches of the encoder-decoder Transformer.

RMSNorm before each sublayer, one table of relative position biases for each stack, scores without 1 / sqrt(d_k), no
biases, embeddings as they are. v1.1 (which Flan-T5 and mT5 follow) has a gated feed-forward network and an output layer
of its own.
"""

from typing import Any

from tfm_jax.models.architecture import Dropout
from tfm_jax.models.transformer import TransformerConfig


def t5(
    vocab_size: int = 32_128, *, num_layers: int, d_model: int, d_ff: int, num_heads: int, **other: Any
) -> TransformerConfig:
    """T5 with the ReLU network and the shared matrix of its first version; num_layers on either side."""
    switches = {
        "norm": "pre",
        "norm_kind": "rmsnorm",
        "norm_eps": 1e-6,
        "positions": "t5",
        "attention_scale": "none",
        "attention_bias": False,
        "feed_forward_bias": False,
        "embedding_scale": False,
        "logits_scale": True,
        "max_length": 512,
        "d_k": 64,
        "dropout": Dropout(0.1, 0.1, 0.1, 0.1),
    }
    layers = {"num_encoder_layers": num_layers, "num_decoder_layers": num_layers}
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_heads": num_heads}
    return TransformerConfig(vocab_size, **layers, **sizes, **switches | other)


def t5_v1_1(vocab_size: int = 32_128, **sizes: Any) -> TransformerConfig:
    """T5 v1.1 and Flan-T5; mT5 with a vocabulary of 250,112 entries."""
    own = {"activation": "geglu_tanh", "tied_embeddings": "source_target", "logits_scale": False}
    return t5(vocab_size, **sizes, **own)


def t5_small() -> TransformerConfig:
    """T5 with 60.5 million parameters."""
    return t5(num_layers=6, d_model=512, d_ff=2048, num_heads=8)


def t5_base() -> TransformerConfig:
    """T5 with 223 million parameters."""
    return t5(num_layers=12, d_model=768, d_ff=3072, num_heads=12)


def t5_large() -> TransformerConfig:
    """T5 with 738 million parameters."""
    return t5(num_layers=24, d_model=1024, d_ff=4096, num_heads=16)


def flan_t5_small() -> TransformerConfig:
    """T5 v1.1 or Flan-T5 with 77 million parameters."""
    return t5_v1_1(num_layers=8, d_model=512, d_ff=1024, num_heads=6)


def flan_t5_base() -> TransformerConfig:
    """T5 v1.1 or Flan-T5 with 248 million parameters."""
    return t5_v1_1(num_layers=12, d_model=768, d_ff=2048, num_heads=12)


def flan_t5_large() -> TransformerConfig:
    """T5 v1.1 or Flan-T5 with 783 million parameters."""
    return t5_v1_1(num_layers=24, d_model=1024, d_ff=2816, num_heads=16)


def mt5_small() -> TransformerConfig:
    """mT5 with 300 million parameters (Xue et al. 2021)."""
    return t5_v1_1(250_112, num_layers=8, d_model=512, d_ff=1024, num_heads=6)
