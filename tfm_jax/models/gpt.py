"""Decoder-only language models after GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners")."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.config import require
from tfm_jax.models.transformer import Dropout
from tfm_jax.nn.attention import head_size
from tfm_jax.nn.blocks import BlockSizes, Encoder
from tfm_jax.nn.layers import Embedding, param, xavier_uniform, zeros
from tfm_jax.nn.positions import (
    or_counted,
    position_bias,
    require_implementation,
    require_length,
    require_positions,
    with_positions,
)
from tfm_jax.ops import AttentionMask, BlockSettings, KVCache, Rotary, dropout
from tfm_jax.ops.blocks import vocabulary_logits
from tfm_jax.ops.cache import Stored
from tfm_jax.sharding import constrain

Tokens = Int[Array, "B T"]


@dataclass(frozen=True)
class GPTConfig:
    """Architecture and sizes; the defaults are GPT-2 small."""

    vocab_size: int = 50_257
    """Entries of the vocabulary. Unit: tokens."""
    max_length: int = 1024
    """Longest sequence the model accepts; learned positions have so many rows. Unit: tokens."""
    d_model: int = 768
    """Width of the residual stream."""
    d_ff: int = 3072
    """Width of the feed-forward hidden layer."""
    num_heads: int = 12
    """Attention heads of each layer."""
    num_layers: int = 12
    """Blocks."""
    d_k: int | None = None
    """Width of a head's queries and keys. None: d_model / num_heads, which must be whole."""
    d_v: int | None = None
    """Width of a head's values. None: d_k."""
    norm: Literal["post", "pre"] = "pre"
    """Layer norm before each sublayer and at the end (GPT-2), or after each residual sum (GPT)."""
    norm_eps: float = 1e-5
    """Added to the variance in layer norm."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "gelu_tanh"
    """Nonlinearity of the feed-forward network; gelu is the exact one."""
    positions: Literal["sinusoidal", "learned", "rope", "alibi", "shaw", "t5", "none"] = "learned"
    """What tells positions apart, as in `TransformerConfig`."""
    rope: Rotary = field(default_factory=Rotary)
    """Rotary embedding, for positions = rope."""
    shaw_distance: int = 16
    """Distance from which on all share one vector, for positions = shaw. Unit: tokens."""
    t5_buckets: int = 32
    """Buckets of distances, for positions = t5."""
    t5_max_distance: int = 128
    """Distance from which on all share the last bucket, for positions = t5. Unit: tokens."""
    implementation: Literal["auto", "reference", "blockwise", "cudnn", "splash"] = "auto"
    """Of attention over whole sequences; auto chooses by platform, shape and request (`ops.explain_implementation`)."""
    tied_embeddings: bool = True
    """Embedding and output layer are one matrix."""
    attention_bias: bool = True
    """Biases in the four projections of attention."""
    head_bias: bool = False
    """A bias in the output layer."""
    dropout: Dropout = field(default_factory=lambda: Dropout(embedding=0.1, residual=0.1, attention=0.1))
    """Dropout rate of each site."""

    family: ClassVar[str] = "gpt"

    def __post_init__(self):
        for name in ("vocab_size", "max_length", "d_model", "d_ff", "num_heads", "num_layers", "d_k", "d_v"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name} is {value}: at least 1 is needed")
        require(self.norm_eps > 0, f"model.norm_eps is {self.norm_eps}: it must be positive")
        d_k = head_size(self.d_model, self.num_heads, self.d_k)
        require_positions(self, d_k)
        require_implementation(self, d_k)


class GPT(nnx.Module):
    """A causal stack with its embedding and output layer.

    Tokens are int32 `B T`; segment ids of the same shape are 0 on padding and tell packed texts apart, all 1 where left
    out; positions count from 0 in every row where left out.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        rates = config.dropout
        settings = BlockSettings(
            norm=config.norm,
            norm_eps=config.norm_eps,
            activation=config.activation,
            rope=config.rope if config.positions == "rope" else None,
            implementation=config.implementation,
            residual_dropout=rates.residual,
            attention_dropout=rates.attention,
            feed_forward_dropout=rates.feed_forward,
        )
        shaw_distance = config.shaw_distance if config.positions == "shaw" else 0
        heads = (config.num_heads, config.d_k, config.d_v, config.attention_bias, shaw_distance)
        sizes = BlockSizes(config.d_model, config.d_ff, *heads)
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.max_length, config.d_model, axis=None, rngs=rngs)
        bias = position_bias(config, bidirectional=False, rngs=rngs)
        self.decoder = Encoder(sizes, settings, config.num_layers, position_bias=bias, rngs=rngs)
        if not config.tied_embeddings:
            shape = (config.vocab_size, config.d_model)
            self.head = param(shape, axes=("vocab", "embed"), init=xavier_uniform(), rngs=rngs)
        if config.head_bias:
            self.head_bias = param((config.vocab_size,), axes=("vocab",), init=zeros, rngs=rngs)

    def __call__(self, tokens: Tokens, **inputs: Tokens | Key[Array, ""] | None) -> Float[Array, "B T V"]:
        """Logits of the token after each token; inputs as for `features`."""
        return self._logits(self.features(tokens, **inputs))

    def features(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """The stack's output, which the output layer reads. With a key, dropout is on."""
        embed_key, stack_key = (None, None) if key is None else tuple(jax.random.split(key))
        x, inputs = self._inputs(tokens, segment_ids, positions, embed_key)
        return self.decoder(x, **inputs, key=stack_key)

    def hidden_states(self, tokens: Tokens, **inputs: Tokens | None) -> dict[str, Float[Array, "L B T D"]]:
        """As `Model.hidden_states`; inputs as for a call, without key."""
        x, own = self._inputs(tokens, inputs.get("segment_ids"), inputs.get("positions"), None)
        return {"decoder": self.decoder.hidden_states(x, **own)}

    def attention_weights(
        self, tokens: Tokens, *, layer: int, **inputs: Tokens | None
    ) -> dict[str, Float[Array, "B N T T"]]:
        """As `Model.attention_weights`; inputs as for a call, without key."""
        x, own = self._inputs(tokens, inputs.get("segment_ids"), inputs.get("positions"), None)
        return {"decoder": self.decoder.attention_weights(x, layer, **own)}

    def init_cache(self, batch: int, length: int) -> KVCache:
        """An empty cache for `length` columns."""
        config, dtype = self.config, self.embedding.table.dtype
        d_k = head_size(config.d_model, config.num_heads, config.d_k)
        shape = Stored(
            jax.ShapeDtypeStruct((batch, config.num_heads, d_k, length), dtype),
            jax.ShapeDtypeStruct((batch, config.num_heads, length, config.d_v or d_k), dtype),
        )
        return KVCache.empty((shape,) * config.num_layers, length)

    def decode_step(
        self,
        tokens: Tokens,
        cache: KVCache,
        *,
        positions: Tokens,
        visible: Bool[Array, "B T _"] | None = None,
        layers: list[dict] | None = None,
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """As `Model.decode_step`."""
        if visible is None:  # branches of a tree stand side by side, not one after another
            require_length(tokens, self.config.max_length)
        start, cache = cache.length, cache.append(positions)
        dense = None if visible is None else visible[:, None]
        mask = AttentionMask(positions, cache.positions, dense=dense, causal=True)
        inputs = {"mask": mask, "positions": positions, "layers": layers}
        x, cache = self.decoder.decode(self._embed(tokens, positions, None), cache, start, **inputs)
        return self._logits(jnp.where(cache.length <= cache.columns, x, jnp.nan)), cache

    def _inputs(self, tokens, segment_ids, positions, key):
        require_length(tokens, self.config.max_length)
        mask = AttentionMask(positions, positions, segment_ids, segment_ids, causal=True)
        return self._embed(tokens, or_counted(positions, tokens), key), {"mask": mask, "positions": positions}

    def _embed(self, tokens, positions, key):
        x = self.embedding(tokens)
        x = with_positions(x, positions, self.config.positions, getattr(self, "position_embedding", None))
        return constrain(dropout(x, rate=self.config.dropout.embedding, key=key), "batch", None, None)

    def output_layer(self) -> tuple[Float[Array, "V D"], Float[Array, "V"] | None]:
        """As `Model.output_layer`."""
        table = self.embedding.table if self.config.tied_embeddings else self.head
        return table[...], self.head_bias[...] if self.config.head_bias else None

    def _logits(self, x):
        table, bias = self.output_layer()
        logits = vocabulary_logits(x, table)
        return constrain(logits if bias is None else logits + bias[None, None], "batch", None, "vocab")


def gpt2_small() -> GPTConfig:
    """GPT-2 with 124 million parameters: 12 layers, 768 wide, 12 heads."""
    return GPTConfig()
