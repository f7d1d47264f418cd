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
from tfm_jax.nn.heads import SPAN, LabelHead, MaskedHead, Pooler, mean_pooled, require_labels, unit_length
from tfm_jax.nn.layers import NORMS, Embedding
from tfm_jax.nn.positions import or_counted, position_bias, require_length, with_positions
from tfm_jax.ops import AttentionMask, dropout
from tfm_jax.ops.blocks import Activation, vocabulary_logits
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
    head: Literal["masked", "pooled", "sequence", "token", "span", "regression", "embedding"] = "masked"
    """What stands on the encoder, and so what the model gives: masked, logits of what stands at each token; pooled, the
    pooler's output for the first token; sequence, logits of each row's label, and regression, a number for each, both
    from the pooler's output; token, logits of each token's label; span, logits of being the start and the end of an
    answer; embedding, each row's mean over its tokens, of length 1."""
    labels: tuple[str, ...] = ()
    """Names of the labels, for the heads sequence, token and regression."""
    head_bias: bool = True
    """A bias in the output layer of head masked."""
    dropout: Dropout = field(default_factory=lambda: Dropout(embedding=0.1, residual=0.1, attention=0.1))
    """Dropout rate of each site; before the layer with the labels it is residual."""

    family: ClassVar[str] = "bert"
    kind: ClassVar[str] = "encoder"

    def __post_init__(self):
        self.check("num_layers")
        require(self.token_types >= 0, f"model.token_types is {self.token_types}: 0 or more are needed")
        require_labels(self.head, self.labels)


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
            kinds = {"activation": config.activation, "norm_kind": config.norm_kind, "norm_eps": config.norm_eps}
            bias_size = config.vocab_size if config.head_bias else 0
            self.masked = MaskedHead(config.d_model, **kinds, bias_size=bias_size, rngs=rngs)
        if config.head in ("pooled", "sequence", "regression"):
            self.pooler = Pooler(config.d_model, rngs=rngs)
        if labels := SPAN if config.head == "span" else config.labels:
            self.classifier = LabelHead(config.d_model, len(labels), rngs=rngs)

    def __call__(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        key: Key[Array, ""] | None = None,
        **inputs: Tokens | None,
    ) -> Float[Array, "B ..."]:
        """What the head gives, in float32; inputs as for `contextual`.

        B T V with head masked, B D with pooled and embedding, B C with sequence and regression, B T C with token, where
        C counts the labels, and B T 2 with span. Row by row: a head for rows knows no packed texts.
        """
        stack_key, head_key = (None, None) if key is None else tuple(jax.random.split(key))
        x = self.contextual(tokens, segment_ids=segment_ids, key=stack_key, **inputs)
        dropped = {"dropout_rate": self.config.dropout.residual, "key": head_key}
        match self.config.head:
            case "masked":
                table, bias = self.output_layer()
                logits = vocabulary_logits(self.masked(x), table)
                return constrain(
                    logits if bias is None else logits + bias.astype(logits.dtype)[None, None],
                    "batch",
                    "length",
                    "vocab",
                )
            case "pooled":
                return self.pooler(x)
            case "embedding":
                return unit_length(mean_pooled(x, segment_ids))
            case "sequence" | "regression":
                return self.classifier(self.pooler(x), **dropped)
            case "token":
                return self.classifier(x, **dropped)
            case "span":
                return self.classifier(x, dropout_rate=0.0, key=None)

    def features(
        self, tokens: Tokens, *, key: Key[Array, ""] | None = None, **inputs: Tokens | None
    ) -> Float[Array, "B T D"]:
        """What the output layer reads, with head masked alone; inputs as for `contextual`."""
        self._require_output_layer()
        stack_key = None if key is None else jax.random.split(key)[0]
        return self.masked(self.contextual(tokens, key=stack_key, **inputs))

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
        self._require_output_layer()
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
        x = constrain(dropout(x, rate=self.config.dropout.embedding, key=key), "batch", "length", None)
        relative = positions if kind in ("alibi", "shaw", "t5") else None
        return x, {"mask": AttentionMask(relative, relative, segment_ids, segment_ids), "positions": positions}

    def _require_output_layer(self):
        if self.config.head != "masked":
            raise ValueError(f"model.head is {self.config.head!r}: only a model with head 'masked' has an output layer")


def bert_base() -> BERTConfig:
    """BERT base, uncased: 109 million parameters."""
    return BERTConfig()


def bert_large() -> BERTConfig:
    """BERT large, uncased: 335 million parameters."""
    return BERTConfig(num_layers=24, d_model=1024, d_ff=4096, num_heads=16)


def roberta_base() -> BERTConfig:
    """RoBERTa base: 125 million parameters; one kind of tokens, its positions counted from 0 here."""
    return BERTConfig(50_265, token_types=1, norm_eps=1e-5)
