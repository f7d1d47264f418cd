"""Encoder-only models: BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019)."""

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from tfm_jax.config import require
from tfm_jax.models.architecture import Architecture, Dropout, Positions
from tfm_jax.nn.blocks import Encoder
from tfm_jax.nn.layers import NORMS, Embedding, param, xavier_uniform, zeros
from tfm_jax.nn.positions import or_counted, position_bias, require_length, with_positions
from tfm_jax.ops import AttentionMask, dropout
from tfm_jax.ops.blocks import ACTIVATIONS, GATES, Activation, vocabulary_logits
from tfm_jax.ops.multi_head import add_bias
from tfm_jax.sharding import constrain

Tokens = Int[Array, "B T"]


@dataclass(frozen=True)
class BERTConfig(Architecture):
    """Architecture and sizes; the defaults are BERT base."""

    vocab_size: int = 30_522
    """Entries of the vocabulary. Unit: tokens."""
    _: KW_ONLY
    num_layers: int = 12
    """Blocks of the stack."""
    max_length: int = 512
    """Longest sequence the model accepts; learned positions have so many rows. Unit: tokens."""
    d_model: int = 768
    """Width of the residual stream."""
    d_ff: int = 3072
    """Width of the feed-forward hidden layer."""
    num_heads: int = 12
    """Attention heads of each layer."""
    norm_eps: float = 1e-12
    """Added to the variance, or the mean square, in the norm."""
    activation: Activation = "gelu"
    """Nonlinearity of the feed-forward network; gelu is the exact one. geglu, geglu_tanh and swiglu have a gate."""
    positions: Positions = "learned"
    """What tells positions apart, as in `TransformerConfig`."""
    token_types: int = 2
    """Kinds of tokens, first and second text: a vector for each is added to the embedding. 0: none."""
    head: Literal["masked", "pooled"] = "masked"
    """What stands on the encoder: the head of masked language modelling, or the pooler, a layer on the first token."""
    head_bias: bool = True
    """A bias in the output layer."""
    dropout: Dropout = field(default_factory=lambda: Dropout(embedding=0.1, residual=0.1, attention=0.1))
    """Dropout rate of each site."""

    family: ClassVar[str] = "bert"
    kind: ClassVar[str] = "encoder"

    def __post_init__(self):
        self.check("num_layers")
        require(self.token_types >= 0, f"model.token_types is {self.token_types}: 0 or more are needed")


class MaskedHead(nnx.Module):
    """norm(activation(x W + b)): what the output layer, the embedding's table, reads (BERT's own code)."""

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs):
        width = config.d_model
        # of a gated network, the activation of its gate: one matrix has nothing to gate
        self.activation = ACTIVATIONS[GATES.get(config.activation, config.activation)]
        self.dense = param((width, width), axes=("embed", None), init=xavier_uniform(), rngs=rngs)
        self.dense_bias = param((width,), axes=(None,), init=zeros, rngs=rngs)
        self.norm = NORMS[config.norm_kind](width, eps=config.norm_eps, rngs=rngs)
        if config.head_bias:
            self.bias = param((config.vocab_size,), axes=("vocab",), init=zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.norm(self.activation(add_bias(x @ self.dense[...], self.dense_bias[...])))


class Pooler(nnx.Module):
    """tanh(x_0 W + b) of the first token (Devlin et al. 2019)."""

    def __init__(self, d_model: int, *, rngs: nnx.Rngs):
        self.dense = param((d_model, d_model), axes=("embed", None), init=xavier_uniform(), rngs=rngs)
        self.dense_bias = param((d_model,), axes=(None,), init=zeros, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        return jnp.tanh(add_bias(x[:, :1] @ self.dense[...], self.dense_bias[...]))[:, 0]


class BERT(nnx.Module):
    """A stack in which every token sees every other of its segment, with its embeddings and a head.

    Tokens are int32 `B T`; segment ids of the same shape are 0 on padding and tell packed texts apart, all 1 where left
    out; token types are 0 where left out; positions count from 0 in every row where left out.
    """

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.max_length, config.d_model, axis=None, rngs=rngs)
        if config.token_types:
            self.token_type_embedding = Embedding(config.token_types, config.d_model, axis=None, rngs=rngs)
        self.embedding_norm = NORMS[config.norm_kind](config.d_model, eps=config.norm_eps, rngs=rngs)
        bias = position_bias(config, bidirectional=True, rngs=rngs)
        self.encoder = Encoder(config.sizes, config.settings, config.num_layers, position_bias=bias, rngs=rngs)
        if config.head == "masked":
            self.masked = MaskedHead(config, rngs=rngs)
        else:
            self.pooler = Pooler(config.d_model, rngs=rngs)

    def __call__(self, tokens: Tokens, **inputs: Tokens | Key[Array, ""] | None) -> Float[Array, "B T V"]:
        """Logits of what stands at each token; inputs as for `contextual`. ValueError without the masked head."""
        table, bias = self.output_layer()
        logits = vocabulary_logits(self.features(tokens, **inputs), table)
        return constrain(logits if bias is None else logits + bias[None, None], "batch", None, "vocab")

    def features(self, tokens: Tokens, **inputs: Tokens | Key[Array, ""] | None) -> Float[Array, "B T D"]:
        """What the output layer reads; inputs as for `contextual`."""
        self._require("masked")
        return self.masked(self.contextual(tokens, **inputs))

    def pooled(self, tokens: Tokens, **inputs: Tokens | Key[Array, ""] | None) -> Float[Array, "B D"]:
        """The pooler's output for each row; inputs as for `contextual`. ValueError without the pooler."""
        self._require("pooled")
        return self.pooler(self.contextual(tokens, **inputs))

    def contextual(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        token_types: Tokens | None = None,
        positions: Tokens | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """The stack's output for each token. With a key, dropout is on."""
        embed_key, stack_key = (None, None) if key is None else tuple(jax.random.split(key))
        x, inputs = self._inputs(tokens, segment_ids, token_types, positions, embed_key)
        return self.encoder(x, **inputs, key=stack_key)

    def hidden_states(self, tokens: Tokens, **inputs: Tokens | None) -> dict[str, Float[Array, "L B T D"]]:
        """As `Model.hidden_states`; inputs as for `contextual`, without key."""
        x, own = self._own(tokens, **inputs)
        return {"encoder": self.encoder.hidden_states(x, **own)}

    def attention_weights(
        self, tokens: Tokens, *, layer: int, **inputs: Tokens | None
    ) -> dict[str, Float[Array, "B N T T"]]:
        """As `Model.attention_weights`; inputs as for `contextual`, without key."""
        x, own = self._own(tokens, **inputs)
        return {"encoder": self.encoder.attention_weights(x, layer, **own)}

    def output_layer(self) -> tuple[Float[Array, "V D"], Float[Array, "V"] | None]:
        """As `Model.output_layer`."""
        self._require("masked")
        return self.embedding.table[...], self.masked.bias[...] if self.config.head_bias else None

    def _own(self, tokens, *, segment_ids=None, token_types=None, positions=None):
        return self._inputs(tokens, segment_ids, token_types, positions, None)

    def _inputs(self, tokens, segment_ids, token_types, positions, key):
        require_length(tokens, self.config.max_length)
        x = self.embedding(tokens)
        if self.config.token_types:
            x = x + self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        kind, table = self.config.positions, getattr(self, "position_embedding", None)
        x = self.embedding_norm(with_positions(x, or_counted(positions, tokens), kind, table))
        x = constrain(dropout(x, rate=self.config.dropout.embedding, key=key), "batch", None, None)
        relative = positions if kind in ("alibi", "shaw", "t5") else None
        return x, {"mask": AttentionMask(relative, relative, segment_ids, segment_ids), "positions": positions}

    def _require(self, head):
        if self.config.head != head:
            raise ValueError(f"model.head is {self.config.head!r}: this needs a model with head {head!r}")


def mean_pooled(x: Float[Array, "B T D"], segment_ids: Tokens) -> Float[Array, "B D"]:
    """The mean of each row's tokens, padding (segment 0) left out: a sentence embedding (Reimers and Gurevych 2019).

    A row of padding alone gives zeros.
    """
    live = (segment_ids > 0)[..., None]
    total = jnp.where(live, x.astype(jnp.float32), 0.0).sum(axis=1)
    return total / jnp.maximum(live.sum(axis=1).astype(jnp.float32), 1.0)


def bert_base() -> BERTConfig:
    """BERT base, uncased: 109 million parameters."""
    return BERTConfig()


def bert_large() -> BERTConfig:
    """BERT large, uncased: 335 million parameters."""
    return BERTConfig(num_layers=24, d_model=1024, d_ff=4096, num_heads=16)


def roberta_base() -> BERTConfig:
    """RoBERTa base: 125 million parameters; one kind of tokens, its positions counted from 0 here."""
    return BERTConfig(50_265, token_types=1, norm_eps=1e-5)
