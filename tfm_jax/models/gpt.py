"""Decoder-only language models: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), and
with other switches Llama (Touvron et al. 2023), Mistral and Qwen2."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from tfm_jax.config import require
from tfm_jax.models.architecture import Architecture, Dropout, Positions
from tfm_jax.nn.blocks import Encoder
from tfm_jax.nn.heads import SPAN, LabelHead, last_token, require_labels
from tfm_jax.nn.layers import Embedding, param, xavier_uniform, zeros
from tfm_jax.nn.positions import or_counted, position_bias, require_length, with_positions
from tfm_jax.ops import AttentionMask, KVCache, Rotary, dropout
from tfm_jax.ops.blocks import Activation, vocabulary_logits
from tfm_jax.ops.cache import Stored
from tfm_jax.sharding import constrain

Tokens = Int[Array, "B T"]


@dataclass(frozen=True)
class GPTConfig(Architecture):
    """Architecture and sizes; the defaults are GPT-2 small. Llama's are among the presets below."""

    vocab_size: int = 50_257
    """Entries of the vocabulary. Unit: tokens."""
    _: KW_ONLY
    num_layers: int = 12
    """Blocks of the stack."""
    d_model: int = 768
    """Width of the residual stream."""
    d_ff: int = 3072
    """Width of the feed-forward hidden layer."""
    num_heads: int = 12
    """Attention heads of each layer."""
    norm: Literal["post", "pre"] = "pre"
    """Norm before each sublayer and at the end (GPT-2), or after each residual sum (GPT)."""
    activation: Activation = "gelu_tanh"
    """Nonlinearity of the feed-forward network; gelu is the exact one. geglu, geglu_tanh and swiglu have a gate."""
    positions: Positions = "learned"
    """What tells positions apart, as in `TransformerConfig`."""
    tied_embeddings: bool = True
    """Embedding and output layer are one matrix."""
    head: Literal["language", "sequence", "token", "span", "regression"] = "language"
    """What stands on the stack, and so what the model gives: language, logits of the token after each token; sequence,
    logits of each row's label, and regression, a number for each, both from the row's last token; token, logits of each
    token's label; span, logits of being the start and the end of an answer."""
    labels: tuple[str, ...] = ()
    """Names of the labels, for the heads sequence, token and regression."""
    dropout: Dropout = field(default_factory=lambda: Dropout(embedding=0.1, residual=0.1, attention=0.1))
    """Dropout rate of each site; before the layer with the labels it is residual."""

    family: ClassVar[str] = "gpt"
    kind: ClassVar[str] = "decoder"

    def __post_init__(self):
        self.check("num_layers")
        require_labels(self.head, self.labels)
        whole = self.head == "language" or not self.head_bias
        require(whole, f"model.head_bias is {self.head_bias}, model.head {self.head!r}: it is for 'language' alone")


class GPT(nnx.Module):
    """A causal stack with its embedding and output layer.

    Tokens are int32 `B T`; segment ids of the same shape are 0 on padding and tell packed texts apart, all 1 where left
    out; positions count from 0 in every row where left out.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.max_length, config.d_model, axis=None, rngs=rngs)
        bias = position_bias(config, bidirectional=False, rngs=rngs)
        self.decoder = Encoder(config.sizes, config.settings, config.num_layers, position_bias=bias, rngs=rngs)
        if config.head == "language" and not config.tied_embeddings:
            shape = (config.vocab_size, config.d_model)
            self.head = param(shape, axes=("vocab", "embed"), init=xavier_uniform(), rngs=rngs)
        if config.head_bias:
            self.head_bias = param((config.vocab_size,), axes=("vocab",), init=zeros, rngs=rngs)
        if labels := SPAN if config.head == "span" else config.labels:
            bias = config.head in ("token", "span")
            self.classifier = LabelHead(config.d_model, len(labels), bias=bias, rngs=rngs)

    def __call__(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B ..."]:
        """What the head gives, in float32. With a key, dropout is on.

        B T V with head language, B C with sequence and regression, B T C with token, where C counts the labels, and
        B T 2 with span. Row by row: a head for rows knows no packed texts.
        """
        stack_key, head_key = (None, None) if key is None else tuple(jax.random.split(key))
        x = self._stack(tokens, segment_ids, positions, stack_key)
        dropped = {"dropout_rate": self.config.dropout.residual, "key": head_key}
        match self.config.head:
            case "language":
                return self._logits(x)
            case "sequence" | "regression":
                return self.classifier(last_token(x, segment_ids), **dropped)
            case "token":
                return self.classifier(x, **dropped)
            case "span":
                return self.classifier(x, dropout_rate=0.0, key=None)

    def features(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What the output layer reads, with head language alone; inputs as for a call."""
        self._require_output_layer()
        return self._stack(tokens, segment_ids, positions, None if key is None else jax.random.split(key)[0])

    def _stack(self, tokens, segment_ids, positions, key):
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
        self._require_output_layer()
        config, dtype = self.config, self.embedding.table.dtype
        d_k, d_v = config.head_sizes
        shape = Stored(
            jax.ShapeDtypeStruct((batch, config.kv_heads, d_k, length), dtype),
            jax.ShapeDtypeStruct((batch, config.kv_heads, length, d_v), dtype),
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
        return constrain(dropout(x, rate=self.config.dropout.embedding, key=key), "batch", "length", None)

    def output_layer(self) -> tuple[Float[Array, "V D"], Float[Array, "V"] | None]:
        """As `Model.output_layer`."""
        self._require_output_layer()
        table = self.embedding.table if self.config.tied_embeddings else self.head
        return table[...], self.head_bias[...] if self.config.head_bias else None

    def _require_output_layer(self):
        head = self.config.head
        if head != "language":
            raise ValueError(f"model.head is {head!r}: only a model with head 'language' has an output layer")

    def _logits(self, x):
        table, bias = self.output_layer()
        logits = vocabulary_logits(x, table)
        return constrain(
            logits if bias is None else logits + bias.astype(logits.dtype)[None, None], "batch", "length", "vocab"
        )


def gpt2_small() -> GPTConfig:
    """GPT-2 with 124 million parameters: 12 layers, 768 wide, 12 heads."""
    return GPTConfig()


def gpt2_medium() -> GPTConfig:
    """GPT-2 with 355 million parameters."""
    return GPTConfig(num_layers=24, d_model=1024, d_ff=4096, num_heads=16)


def gpt2_large() -> GPTConfig:
    """GPT-2 with 774 million parameters."""
    return GPTConfig(num_layers=36, d_model=1280, d_ff=5120, num_heads=20)


def gpt2_xl() -> GPTConfig:
    """GPT-2 with 1.56 billion parameters."""
    return GPTConfig(num_layers=48, d_model=1600, d_ff=6400, num_heads=25)


def llama(
    vocab_size: int, *, num_layers: int, d_model: int, d_ff: int, num_heads: int, num_kv_heads: int, **other: Any
) -> GPTConfig:
    """The switches of Llama (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, no biases, a head of its own."""
    switches = {
        "norm_kind": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "attention_bias": False,
        "feed_forward_bias": False,
        "tied_embeddings": False,
        "dropout": Dropout(0.0, 0.0),
    }
    sizes = {"num_layers": num_layers, "d_model": d_model, "d_ff": d_ff}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return GPTConfig(vocab_size, **sizes, **heads, **switches | other)


def llama2_7b() -> GPTConfig:
    """Llama 2 with 6.74 billion parameters."""
    sizes = {"num_layers": 32, "d_model": 4096, "d_ff": 11_008, "num_heads": 32, "num_kv_heads": 32}
    return llama(32_000, **sizes, max_length=4096)


def llama3_8b() -> GPTConfig:
    """Llama 3 with 8.03 billion parameters: 8 heads of keys and values for 32 of queries."""
    sizes = {"num_layers": 32, "d_model": 4096, "d_ff": 14_336, "num_heads": 32, "num_kv_heads": 8}
    return llama(128_256, **sizes, max_length=8192, rope=Rotary(base=500_000.0))


def mistral_7b() -> GPTConfig:
    """Mistral 7B (v0.3), 7.25 billion parameters, attention over the whole sequence."""
    sizes = {"num_layers": 32, "d_model": 4096, "d_ff": 14_336, "num_heads": 32, "num_kv_heads": 8}
    return llama(32_768, **sizes, max_length=32_768, rope=Rotary(base=1_000_000.0))


def qwen2_05b() -> GPTConfig:
    """Qwen2 with 0.49 billion parameters: biases in query, key and value alone, one matrix for embedding and output."""
    sizes = {"num_layers": 24, "d_model": 896, "d_ff": 4864, "num_heads": 14, "num_kv_heads": 2}
    own = {"attention_bias": True, "attention_output_bias": False, "tied_embeddings": True, "norm_eps": 1e-6}
    return llama(151_936, **sizes, max_length=32_768, rope=Rotary(base=1_000_000.0), **own)
