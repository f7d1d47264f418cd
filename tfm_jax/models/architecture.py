"""The switches that all families share: one field a mechanism, checked when built."""

import math
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tfm_jax.config import require, require_rates
from tfm_jax.nn.attention import head_size, kv_heads_of
from tfm_jax.nn.blocks import BlockSizes
from tfm_jax.nn.positions import require_implementation, require_positions
from tfm_jax.ops import BlockSettings, Rotary, Shared
from tfm_jax.ops.blocks import Activation
from tfm_jax.sharding import ACTIVATION_AXES

DIVIDED = {name: ACTIVATION_AXES[name] for name in ("batch", "heads", "length")}
Positions = Literal["sinusoidal", "sinusoidal_halves", "learned", "rope", "alibi", "shaw", "t5", "none"]


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
class Architecture:
    """Sizes and switches of a Transformer's blocks; a family adds what is its own and chooses its defaults."""

    _: KW_ONLY
    max_length: int = 1024
    """Longest sequence the model accepts; learned positions have so many rows. Unit: tokens."""
    d_model: int = 512
    """Width of the residual stream."""
    d_ff: int = 2048
    """Width of the feed-forward hidden layer."""
    num_heads: int = 8
    """Attention heads of each layer."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each of which serves num_heads / num_kv_heads heads of queries: fewer make a smaller
    cache (grouped-query attention, Ainslie et al. 2023; 1: multi-query, Shazeer 2019). None: num_heads."""
    d_k: int | None = None
    """Width of a head's queries and keys. None: d_model / num_heads, which must be whole."""
    d_v: int | None = None
    """Width of a head's values. None: d_k."""
    norm: Literal["post", "pre"] = "post"
    """Norm after each residual sum (Vaswani et al. 2017), or before sublayers and at the end (Xiong et al. 2020)."""
    norm_kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Layer norm (Ba et al. 2016), or its scale alone (Zhang and Sennrich 2019)."""
    norm_eps: float = 1e-5
    """Added to the variance, or the mean square, in the norm."""
    activation: Activation = "relu"
    """Nonlinearity of the feed-forward network; gelu is the exact one. geglu, geglu_tanh and swiglu have a gate, and so
    a third matrix (Shazeer 2020)."""
    positions: Literal["sinusoidal", "sinusoidal_halves", "learned", "rope", "alibi", "shaw", "t5", "none"] = (
        "sinusoidal"
    )
    """What tells positions apart: a vector added to the embedding (sinusoidal, its sines and cosines in turn, or in
    halves as Marian has them; learned), turned queries and keys (rope) or biases by distance (alibi, shaw, t5)."""
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
    remat: Literal["none", "dots", "full"] = "dots"
    """What a training step computes again for the gradient instead of keeping it: nothing; all of a layer but its
    products with parameters, the fastest on a CPU; or all of it, from its input alone, for the least memory."""
    unroll: int = 1
    """Layers that the loop over equal layers runs in one turn; more of them compile longer and may run faster. The last
    turn may have fewer. Unit: layers."""
    attention_scale: Literal["sqrt", "none"] = "sqrt"
    """Scores divided by sqrt(d_k), or left as they are (T5)."""
    attention_bias: bool = True
    """Biases in the projections of attention."""
    attention_output_bias: bool = True
    """Whether the last of them, the output projection, has one too (Qwen2's has none)."""
    feed_forward_bias: bool = True
    """Biases in the feed-forward network."""
    head_bias: bool = False
    """A bias in the output layer."""
    dropout: Dropout = field(default_factory=Dropout)
    """Dropout rate of each site."""

    def check(self, *layers: str) -> None:
        """Raise `ValueError` for switches that do not go together; `layers` name the numbers of layers."""
        _require_types(self, "model")
        for name in ("vocab_size", "max_length", "d_model", "d_ff", "num_heads", "unroll", *layers, "d_k", "d_v"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name} is {value}: at least 1 is needed")
        # the gradient of a norm takes it to the power -3/2 where all that is normed is equal
        require(self.norm_eps >= 1e-25, f"model.norm_eps is {self.norm_eps}: float32 needs at least 1e-25")
        d_k = head_size(self.d_model, self.num_heads, self.d_k)
        kv_heads_of(self.num_heads, self.num_kv_heads)
        require_positions(self, d_k)
        require_implementation(self, d_k)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return kv_heads_of(self.num_heads, self.num_kv_heads)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """(d_k, d_v) as they are."""
        d_k = head_size(self.d_model, self.num_heads, self.d_k)
        return d_k, d_k if self.d_v is None else self.d_v

    @property
    def settings(self) -> BlockSettings:
        """The switches as blocks take them."""
        return BlockSettings(
            norm=self.norm,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            activation=self.activation,
            attention_scale=self.attention_scale,
            rope=self.rope if self.positions == "rope" else None,
            implementation=Shared(self.implementation, **DIVIDED),
            remat=self.remat,
            unroll=self.unroll,
            residual_dropout=self.dropout.residual,
            attention_dropout=self.dropout.attention,
            feed_forward_dropout=self.dropout.feed_forward,
        )

    @property
    def sizes(self) -> BlockSizes:
        """The widths as blocks take them."""
        return BlockSizes(
            self.d_model,
            self.d_ff,
            self.num_heads,
            d_k=self.d_k,
            d_v=self.d_v,
            attention_bias=self.attention_bias,
            shaw_distance=self.shaw_distance if self.positions == "shaw" else 0,
            num_kv_heads=self.num_kv_heads,
            attention_output_bias=self.attention_output_bias,
            feed_forward_bias=self.feed_forward_bias,
        )


def _require_types(config: Any, where: str) -> None:
    """Raise `ValueError` for what a field's annotation does not allow, and for a number that is not finite.

    JSON and the command line refuse these before; a call from Python would train something else, or fail while tracing.
    """
    hints = get_type_hints(type(config))
    for name, value in ((f.name, getattr(config, f.name)) for f in fields(config)):
        hint, options, said = hints[name], get_args(hints[name]), f"{where}.{name} is {value!r}"
        if get_origin(hint) is Literal:
            require(value in options, f"{said}: one of {list(options)} is expected")
            continue
        if get_origin(hint) is tuple:
            right = type(value) is tuple and all(type(item) is options[0] for item in value)
            require(right, f"{said}: {hint} is expected")
            continue
        allowed = options or (hint,)
        allowed = (*allowed, int) if float in allowed else allowed
        require(type(value) in allowed, f"{said} ({type(value).__name__}): {hint} is expected")
        require(type(value) is not float or math.isfinite(value), f"{said}: a finite number is expected")
        if is_dataclass(value):
            _require_types(value, f"{where}.{name}")
