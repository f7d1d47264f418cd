"""The encoder-decoder Transformer of Vaswani et al., "Attention Is All You Need" (2017)."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.models.architecture import Architecture, Dropout
from tfm_jax.nn.blocks import Decoder, Encoder
from tfm_jax.nn.layers import NORMS, Embedding, param, xavier_uniform, zeros
from tfm_jax.nn.positions import or_counted, position_bias, require_length, with_positions
from tfm_jax.ops import AttentionMask, KVCache, dropout
from tfm_jax.ops.blocks import vocabulary_logits
from tfm_jax.sharding import constrain

Tokens = Int[Array, "B T"]
SourceTokens = Int[Array, "B S"]


@dataclass(frozen=True)
class TransformerConfig(Architecture):
    """Architecture and sizes; the defaults are the paper's base model."""

    vocab_size: int
    """Entries of the vocabulary that source and target share. Unit: tokens."""
    _: KW_ONLY
    num_encoder_layers: int = 6
    """Blocks of the encoder."""
    num_decoder_layers: int = 6
    """Blocks of the decoder."""
    tied_embeddings: Literal["all", "target_output", "source_target", "none"] = "all"
    """Which of source embedding, target embedding and output layer are one matrix."""
    embedding_scale: bool = True
    """Embeddings are multiplied by sqrt(d_model) (Vaswani et al. 2017, section 3.4), or taken as they are."""
    embedding_norm: bool = False
    """A norm of norm_kind on the sum of embedding and position (BART)."""
    logits_scale: bool = False
    """What the output layer reads is divided by sqrt(d_model), as T5 does where it shares the embedding's matrix."""

    family: ClassVar[str] = "transformer"
    kind: ClassVar[str] = "encoder-decoder"

    def __post_init__(self):
        self.check("num_encoder_layers", "num_decoder_layers")


class Transformer(nnx.Module):
    """Encoder and decoder with their embeddings and output layer.

    Tokens are int32 `B S` (source) and `B T` (target); segment ids of the same shape are 0 on padding and tell packed
    sentences apart, all 1 where left out; positions count from 0 in every row where left out.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        tied, sizes, settings = config.tied_embeddings, config.sizes, config.settings
        # what is read as it is begins with variance 1, unless logits, which nothing divides, come of the same table
        as_it_is = not config.embedding_scale and (config.logits_scale or tied in ("source_target", "none"))
        std = 1.0 if as_it_is else None
        self.embedding = Embedding(config.vocab_size, config.d_model, std=std, rngs=rngs)
        if tied in ("target_output", "none"):
            self.source_embedding = Embedding(config.vocab_size, config.d_model, std=std, rngs=rngs)
        if config.positions == "learned":
            shape, options = (config.max_length, config.d_model), {"axis": None, "std": std, "rngs": rngs}
            self.position_embedding, self.source_position_embedding = (Embedding(*shape, **options) for _ in range(2))
        if config.embedding_norm:
            norm = NORMS[config.norm_kind]
            self.embedding_norm = norm(config.d_model, eps=config.norm_eps, rngs=rngs)
            self.source_embedding_norm = norm(config.d_model, eps=config.norm_eps, rngs=rngs)
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
        return self._read(self.decoder(x, encoded, **inputs, key=stack_key))

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
        x = self._embed(tokens, positions, self.embedding, "", None)
        dense = None if visible is None else visible[:, None]
        mask = AttentionMask(positions, cache.positions, dense=dense, causal=True)
        cross_mask = AttentionMask(
            query_segment_ids=(positions >= 0).astype(jnp.int32), key_segment_ids=cache.cross_segment_ids
        )
        inputs = {"mask": mask, "cross_mask": cross_mask, "positions": positions, "layers": layers}
        x, cache = self.decoder.decode(x, cache, start, **inputs)
        return self._logits(self._read(jnp.where(cache.length <= cache.columns, x, jnp.nan))), cache

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
        x = self._embed(tokens, or_counted(positions, tokens), embedding, "source_", embed_key)
        relative = positions if self.config.positions in ("alibi", "shaw", "t5") else None
        mask = AttentionMask(relative, relative, segment_ids, segment_ids)
        return x, {"mask": mask, "positions": positions}, stack_key

    def _decoder_inputs(self, encoded, tokens, source_segment_ids, segment_ids, positions, key):
        require_length(tokens, self.config.max_length)
        embed_key, stack_key = _two(key)
        x = self._embed(tokens, or_counted(positions, tokens), self.embedding, "", embed_key)
        mask = AttentionMask(positions, positions, segment_ids, segment_ids, causal=True)
        cross_mask = None
        if segment_ids is not None or source_segment_ids is not None:
            ones = lambda ids, shape: jnp.ones(shape, jnp.int32) if ids is None else ids  # noqa: E731
            cross_mask = AttentionMask(
                query_segment_ids=ones(segment_ids, tokens.shape),
                key_segment_ids=ones(source_segment_ids, encoded.shape[:2]),
            )
        return x, {"mask": mask, "cross_mask": cross_mask, "positions": positions}, stack_key

    def _embed(self, tokens, positions, embedding, side, key):
        """Embedding x sqrt(d_model) + position, with dropout (sections 3.4 and 5.4 of the paper)."""
        x = embedding(tokens)
        x = x * self.config.d_model**0.5 if self.config.embedding_scale else x
        x = with_positions(x, positions, self.config.positions, getattr(self, f"{side}position_embedding", None))
        x = getattr(self, f"{side}embedding_norm")(x) if self.config.embedding_norm else x
        x = dropout(x, rate=self.config.dropout.embedding, key=key)
        return constrain(x, "batch", "length", None)

    def _read(self, x):
        """What the output layer reads of the decoder's output."""
        return x * self.config.d_model**-0.5 if self.config.logits_scale else x

    def output_layer(self) -> tuple[Float[Array, "V D"], Float[Array, "V"] | None]:
        """As `Model.output_layer`."""
        tied = self.config.tied_embeddings in ("all", "target_output")
        table = self.embedding.table if tied else self.head
        return table[...], self.head_bias[...] if self.config.head_bias else None

    def _logits(self, x):
        table, bias = self.output_layer()
        logits = vocabulary_logits(x, table)
        logits = logits if bias is None else logits + bias.astype(logits.dtype)[None, None]
        return constrain(logits, "batch", "length", "vocab")


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


def bart_base() -> TransformerConfig:
    """BART with 139 million parameters (Lewis et al. 2020): learned positions, a norm on the embeddings, exact GELU."""
    return TransformerConfig(
        50_265,
        max_length=1024,
        d_model=768,
        d_ff=3072,
        num_heads=12,
        activation="gelu",
        positions="learned",
        embedding_scale=False,
        embedding_norm=True,
        dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.1),
    )


def bart_large() -> TransformerConfig:
    """BART with 406 million parameters."""
    layers = {"num_encoder_layers": 12, "num_decoder_layers": 12}
    return replace(bart_base(), **layers, d_model=1024, d_ff=4096, num_heads=16)


def marian_base(vocab_size: int = 58_101) -> TransformerConfig:
    """Marian (Junczys-Dowmunt et al. 2018) as OPUS-MT trains it (Tiedemann and Thottingal 2020): the paper's base model
    with SiLU, sines before cosines, and a bias in the output layer. The default vocabulary is English to German's."""
    return TransformerConfig(
        vocab_size, max_length=512, activation="silu", positions="sinusoidal_halves", head_bias=True
    )
