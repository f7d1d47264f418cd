"""The encoder-decoder Transformer of Vaswani et al., "Attention Is All You Need" (2017)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.config import require, require_rates
from tfm_jax.nn.attention import head_size
from tfm_jax.nn.blocks import BlockSizes, Decoder, Encoder
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
from tfm_jax.sharding import constrain

Tokens = Int[Array, "B T"]
SourceTokens = Int[Array, "B S"]


@dataclass(frozen=True)
class Dropout:
    """Dropout rate of each site."""

    embedding: float = 0.1
    """On the sum of embedding and position."""
    residual: float = 0.1
    """On the output of each sublayer, before it is added to the residual stream."""
    attention: float = 0.0
    """On the attention weights."""
    feed_forward: float = 0.0
    """On the hidden layer of the feed-forward network."""

    def __post_init__(self):
        require_rates("dropout", self)


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture and sizes; the defaults are the paper's base model."""

    vocab_size: int
    """Entries of the vocabulary that source and target share. Unit: tokens."""
    max_length: int = 1024
    """Longest sequence the model accepts; learned positions have so many rows. Unit: tokens."""
    d_model: int = 512
    """Width of the residual stream."""
    d_ff: int = 2048
    """Width of the feed-forward hidden layer."""
    num_heads: int = 8
    """Attention heads of each layer."""
    num_encoder_layers: int = 6
    """Blocks of the encoder."""
    num_decoder_layers: int = 6
    """Blocks of the decoder."""
    d_k: int | None = None
    """Width of a head's queries and keys. None: d_model / num_heads, which must be whole."""
    d_v: int | None = None
    """Width of a head's values. None: d_k."""
    norm: Literal["post", "pre"] = "post"
    """Layer norm after each residual sum (the paper), or before each sublayer and at the end (Xiong et al. 2020)."""
    norm_eps: float = 1e-5
    """Added to the variance in layer norm."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """Nonlinearity of the feed-forward network; gelu is the exact one."""
    positions: Literal["sinusoidal", "learned", "rope", "alibi", "shaw", "t5", "none"] = "sinusoidal"
    """What tells positions apart: a vector added to the embedding (sinusoidal, learned), turned queries and keys (rope)
    or biases by distance (alibi, shaw, t5) in self-attention."""
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
    tied_embeddings: Literal["all", "target_output", "source_target", "none"] = "all"
    """Which of source embedding, target embedding and output layer are one matrix."""
    attention_bias: bool = True
    """Biases in the four projections of attention."""
    head_bias: bool = False
    """A bias in the output layer."""
    dropout: Dropout = field(default_factory=Dropout)
    """Dropout rate of each site."""

    family: ClassVar[str] = "transformer"

    def __post_init__(self):
        sizes = ("vocab_size", "max_length", "d_model", "d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers")
        for name in (*sizes, "d_k", "d_v"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name} is {value}: at least 1 is needed")
        require(self.norm_eps > 0, f"model.norm_eps is {self.norm_eps}: it must be positive")
        d_k = head_size(self.d_model, self.num_heads, self.d_k)
        require_positions(self, d_k)
        require_implementation(self, d_k)


class Transformer(nnx.Module):
    """Encoder and decoder with their embeddings and output layer.

    Tokens are int32 `B S` (source) and `B T` (target); segment ids of the same shape are 0 on padding and tell packed
    sentences apart, all 1 where left out; positions count from 0 in every row where left out.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        rates, tied = config.dropout, config.tied_embeddings
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
        sizes = BlockSizes(
            config.d_model,
            config.d_ff,
            config.num_heads,
            config.d_k,
            config.d_v,
            config.attention_bias,
            config.shaw_distance if config.positions == "shaw" else 0,
        )
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if tied in ("target_output", "none"):
            self.source_embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.max_length, config.d_model, axis=None, rngs=rngs)
            self.source_position_embedding = Embedding(config.max_length, config.d_model, axis=None, rngs=rngs)
        bias = position_bias(config, rngs=rngs, bidirectional=True)
        self.encoder = Encoder(sizes, settings, config.num_encoder_layers, position_bias=bias, rngs=rngs)
        bias = position_bias(config, rngs=rngs, bidirectional=False)
        self.decoder = Decoder(sizes, settings, config.num_decoder_layers, position_bias=bias, rngs=rngs)
        if tied in ("source_target", "none"):
            shape = (config.vocab_size, config.d_model)
            self.head = param(shape, axes=("vocab", "embed"), init=xavier_uniform(), rngs=rngs)
        if config.head_bias:
            self.head_bias = param((config.vocab_size,), axes=("vocab",), init=zeros, rngs=rngs)

    def __call__(
        self, source_tokens: SourceTokens, tokens: Tokens, **inputs: SourceTokens | Tokens | Key[Array, ""] | None
    ) -> Float[Array, "B T V"]:
        """Logits of the token after each target token; inputs as for `features`."""
        return self._logits(self.features(source_tokens, tokens, **inputs))

    def features(
        self,
        source_tokens: SourceTokens,
        tokens: Tokens,
        *,
        source_segment_ids: SourceTokens | None = None,
        segment_ids: Tokens | None = None,
        source_positions: SourceTokens | None = None,
        positions: Tokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's output, which the output layer reads. With a key, dropout is on."""
        encoder_key, decoder_key = _two(key)
        encoded = self.encode(
            source_tokens, source_segment_ids=source_segment_ids, source_positions=source_positions, key=encoder_key
        )
        x, inputs, stack_key = self._decoder_inputs(
            encoded, tokens, source_segment_ids, segment_ids, positions, decoder_key
        )
        return self.decoder(x, encoded, **inputs, key=stack_key)

    def encode(
        self,
        source_tokens: SourceTokens,
        *,
        source_segment_ids: SourceTokens | None = None,
        source_positions: SourceTokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output."""
        x, inputs, stack_key = self._encoder_inputs(source_tokens, source_segment_ids, source_positions, key)
        return self.encoder(x, **inputs, key=stack_key)

    def hidden_states(
        self, source_tokens: SourceTokens, tokens: Tokens, **inputs: SourceTokens | Tokens | None
    ) -> dict[str, Float[Array, "L _ _ D"]]:
        """As `Model.hidden_states`; inputs as for a call, without key."""
        (x, own), (y, encoded, inputs) = self._stack_inputs(source_tokens, tokens, **inputs)
        encoder, decoder = self.encoder.hidden_states(x, **own), self.decoder.hidden_states(y, encoded, **inputs)
        return {"encoder": encoder, "decoder": decoder}

    def attention_weights(
        self, source_tokens: SourceTokens, tokens: Tokens, *, layer: int, **inputs: SourceTokens | Tokens | None
    ) -> dict[str, Float[Array, "B N _ _"]]:
        """As `Model.attention_weights`; inputs as for a call, without key."""
        (x, encoder_inputs), (y, encoded, inputs) = self._stack_inputs(source_tokens, tokens, **inputs)
        deepest = max(self.encoder.num_layers, self.decoder.num_layers)
        if not 0 <= layer < deepest:
            raise ValueError(f"layer is {layer}: the model has layers 0 to {deepest - 1}")
        weights = {}
        if layer < self.encoder.num_layers:
            weights["encoder"] = self.encoder.attention_weights(x, layer, **encoder_inputs)
        if layer < self.decoder.num_layers:
            weights["decoder"], weights["cross"] = self.decoder.attention_weights(y, encoded, layer, **inputs)
        return weights

    def init_cache(
        self,
        batch: int,
        length: int,
        *,
        encoded: Float[Array, "B S D"],
        encoded_segment_ids: SourceTokens | None = None,
    ) -> KVCache:
        """An empty cache for `length` target columns, with the encoder's output projected for cross-attention."""
        if encoded.shape[0] != batch:
            raise ValueError(f"batch is {batch}, but the encoder's output has {encoded.shape[0]} rows")
        cross = self.decoder.cross_keys_values(encoded)
        if encoded_segment_ids is None:
            encoded_segment_ids = jnp.ones(encoded.shape[:2], jnp.int32)
        return KVCache.empty(cross, length, cross=cross, cross_segment_ids=(encoded_segment_ids > 0).astype(jnp.int32))

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
        x = self._embed(tokens, positions, self.embedding, "position_embedding", None)
        dense = None if visible is None else visible[:, None]
        mask = AttentionMask(positions, cache.positions, dense=dense, causal=True)
        cross_mask = AttentionMask(
            query_segment_ids=(positions >= 0).astype(jnp.int32), key_segment_ids=cache.cross_segment_ids
        )
        inputs = {"mask": mask, "cross_mask": cross_mask, "positions": positions, "layers": layers}
        x, cache = self.decoder.decode(x, cache, start, **inputs)
        return self._logits(jnp.where(cache.length <= cache.columns, x, jnp.nan)), cache

    def _stack_inputs(
        self,
        source_tokens,
        tokens,
        *,
        source_segment_ids=None,
        segment_ids=None,
        source_positions=None,
        positions=None,
    ):
        x, own, _ = self._encoder_inputs(source_tokens, source_segment_ids, source_positions, None)
        encoded = self.encoder(x, **own)
        y, inputs, _ = self._decoder_inputs(encoded, tokens, source_segment_ids, segment_ids, positions, None)
        return (x, own), (y, encoded, inputs)

    def _encoder_inputs(self, tokens, segment_ids, positions, key):
        embedding = getattr(self, "source_embedding", self.embedding)
        require_length(tokens, self.config.max_length)
        embed_key, stack_key = _two(key)
        x = self._embed(tokens, or_counted(positions, tokens), embedding, "source_position_embedding", embed_key)
        relative = positions if self.config.positions in ("alibi", "shaw", "t5") else None
        mask = AttentionMask(relative, relative, segment_ids, segment_ids)
        return x, {"mask": mask, "positions": positions}, stack_key

    def _decoder_inputs(self, encoded, tokens, source_segment_ids, segment_ids, positions, key):
        require_length(tokens, self.config.max_length)
        embed_key, stack_key = _two(key)
        x = self._embed(tokens, or_counted(positions, tokens), self.embedding, "position_embedding", embed_key)
        mask = AttentionMask(positions, positions, segment_ids, segment_ids, causal=True)
        cross_mask = None
        if segment_ids is not None or source_segment_ids is not None:
            ones = lambda ids, shape: jnp.ones(shape, jnp.int32) if ids is None else ids  # noqa: E731
            cross_mask = AttentionMask(
                query_segment_ids=ones(segment_ids, tokens.shape),
                key_segment_ids=ones(source_segment_ids, encoded.shape[:2]),
            )
        return x, {"mask": mask, "cross_mask": cross_mask, "positions": positions}, stack_key

    def _embed(self, tokens, positions, embedding, position_embedding, key):
        """Embedding x sqrt(d_model) + position, with dropout (sections 3.4 and 5.4 of the paper)."""
        d_model = self.config.d_model
        x = embedding(tokens) * d_model**0.5
        x = with_positions(x, positions, self.config.positions, getattr(self, position_embedding, None))
        x = dropout(x, rate=self.config.dropout.embedding, key=key)
        return constrain(x, "batch", None, None)

    def output_layer(self) -> tuple[Float[Array, "V D"], Float[Array, "V"] | None]:
        """As `Model.output_layer`."""
        tied = self.config.tied_embeddings in ("all", "target_output")
        table = self.embedding.table if tied else self.head
        return table[...], self.head_bias[...] if self.config.head_bias else None

    def _logits(self, x):
        table, bias = self.output_layer()
        logits = vocabulary_logits(x, table)
        logits = logits if bias is None else logits + bias[None, None]
        return constrain(logits, "batch", None, "vocab")


def _two(key):
    return (None, None) if key is None else tuple(jax.random.split(key))


def transformer_base(vocab_size: int = 37_000) -> TransformerConfig:
    """The paper's base model: 6 + 6 layers, 512 wide, 2048 feed-forward, 8 heads, dropout 0.1."""
    return TransformerConfig(vocab_size)


def transformer_big(vocab_size: int = 37_000) -> TransformerConfig:
    """The paper's big model: 6 + 6 layers, 1024 wide, 4096 feed-forward, 16 heads, dropout 0.3."""
    return TransformerConfig(
        vocab_size, d_model=1024, d_ff=4096, num_heads=16, dropout=Dropout(embedding=0.3, residual=0.3)
    )


def transformer_tiny(vocab_size: int = 9_712) -> TransformerConfig:
    """Wu et al.'s (ACL 2021) model for small data: 4 + 4 layers, 128 wide, 256 feed-forward, 4 heads, dropout 0.3."""
    return TransformerConfig(
        vocab_size,
        d_model=128,
        d_ff=256,
        num_heads=4,
        num_encoder_layers=4,
        num_decoder_layers=4,
        dropout=Dropout(embedding=0.3, residual=0.3),
    )
