"""Blocks with their parameters, and stacks of equal blocks run by one scan over layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from tfm_jax.nn.attention import MultiHeadAttention
from tfm_jax.nn.layers import NORMS, FeedForward, plain
from tfm_jax.ops import blocks
from tfm_jax.ops.blocks import BlockSettings
from tfm_jax.ops.cache import KVCache, Stored
from tfm_jax.ops.multi_head import Bias, Mask, Positions, fused, keys_values
from tfm_jax.sharding import constrain

Dropout = Key[Array, ""] | None


@dataclass(frozen=True)
class BlockSizes:
    """The widths of a block and its biases; heads as in `MultiHeadAttention`."""

    d_model: int
    d_ff: int
    num_heads: int
    d_k: int | None = None
    d_v: int | None = None
    attention_bias: bool = True
    shaw_distance: int = 0
    """k of Shaw's relative positions in self-attention; 0: none."""
    num_kv_heads: int | None = None
    attention_output_bias: bool = True
    feed_forward_bias: bool = True


class EncoderBlock(nnx.Module):
    """`ops.encoder_block` with its parameters."""

    def __init__(self, sizes: BlockSizes, settings: BlockSettings, *, rngs: nnx.Rngs):
        self.settings = settings
        self.attention = _attention(sizes, settings, rngs, shaw_distance=sizes.shaw_distance)
        self.attention_norm = _norm(sizes, settings, rngs)
        self.feed_forward = _feed_forward(sizes, settings, rngs)
        self.feed_forward_norm = _norm(sizes, settings, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Mask = None,
        bias: Bias = None,
        positions: Positions = None,
        key: Dropout = None,
    ) -> Float[Array, "B T D"]:
        settings = self.settings
        own = {"mask": mask, "bias": bias, "positions": positions}
        return blocks.encoder_block(plain(self), x, **own, settings=settings, key=key)[0]


class DecoderBlock(nnx.Module):
    """`ops.decoder_block` with its parameters."""

    def __init__(self, sizes: BlockSizes, settings: BlockSettings, *, rngs: nnx.Rngs):
        self.settings = settings
        self.attention = _attention(sizes, settings, rngs, shaw_distance=sizes.shaw_distance)
        self.attention_norm = _norm(sizes, settings, rngs)
        self.cross_attention = _attention(sizes, settings, rngs)
        self.cross_attention_norm = _norm(sizes, settings, rngs)
        self.feed_forward = _feed_forward(sizes, settings, rngs)
        self.feed_forward_norm = _norm(sizes, settings, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        *,
        mask: Mask = None,
        cross_mask: Mask = None,
        bias: Bias = None,
        positions: Positions = None,
        key: Dropout = None,
    ) -> Float[Array, "B T D"]:
        params = plain(self)
        cross = keys_values(params["cross_attention"], encoded, encoded)
        own = {"mask": mask, "bias": bias, "positions": positions}
        return blocks.decoder_block(params, x, cross, **own, cross_mask=cross_mask, settings=self.settings, key=key)[0]


def _attention(
    sizes: BlockSizes, settings: BlockSettings, rngs: nnx.Rngs, *, shaw_distance: int = 0
) -> MultiHeadAttention:
    return MultiHeadAttention(
        sizes.d_model,
        sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        d_k=sizes.d_k,
        d_v=sizes.d_v,
        bias=sizes.attention_bias,
        output_bias=sizes.attention_output_bias,
        shaw_distance=shaw_distance,
        scaled=settings.attention_scale == "sqrt",
        rngs=rngs,
    )


def _feed_forward(sizes: BlockSizes, settings: BlockSettings, rngs: nnx.Rngs) -> FeedForward:
    options = {"activation": settings.activation, "bias": sizes.feed_forward_bias}
    return FeedForward(sizes.d_model, sizes.d_ff, **options, rngs=rngs)


def _norm(sizes: BlockSizes, settings: BlockSettings, rngs: nnx.Rngs) -> nnx.Module:
    return NORMS[settings.norm_kind](sizes.d_model, eps=settings.norm_eps, rngs=rngs)


_KEPT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose parameters have a leading axis of num_layers, each layer with its own initial values."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num_layers)
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys))


class _Stack(nnx.Module):
    """num_layers equal blocks, and a last norm where blocks are pre-LN.

    position_bias: a module that makes the bias of self-attention, one for all layers (`T5PositionBias`). Inputs are x
    `B T D`, the mask of self-attention, and the positions of x for rope (None: 0, 1, ...).
    """

    block: type[nnx.Module]

    def __init__(
        self,
        sizes: BlockSizes,
        settings: BlockSettings,
        num_layers: int,
        *,
        position_bias: Callable[[], Bias] | None = None,
        rngs: nnx.Rngs,
    ):
        self.settings, self.num_layers = settings, num_layers
        self.layers = stacked(lambda rngs: self.block(sizes, settings, rngs=rngs), num_layers, rngs=rngs)
        self.position_bias = position_bias
        if settings.norm == "pre":
            self.norm = _norm(sizes, settings, rngs)

    def _last(self, x):
        return self.norm(x) if self.settings.norm == "pre" else x

    def _bias(self):
        return None if self.position_bias is None else self.position_bias()

    def each_layer(self) -> list[dict]:
        """The parameters layer by layer. A step that unrolls them beats a scan, which cuts every cache out and in."""
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], plain(self.layers)) for i in range(self.num_layers)]
        return [layer | {"attention": fused(layer["attention"])} for layer in layers]

    def _loop(self, body, x, layers):
        """The scan over layers: (the output of the last, the input of each)."""
        settings = self.settings
        if settings.remat != "none":
            # a scan's body is a program of its own: what is computed again cannot be merged with what was
            body = jax.checkpoint(body, prevent_cse=False, policy=_KEPT[settings.remat])
        return jax.lax.scan(body, x, _numbered(layers), unroll=settings.unroll)

    def _layer(self, layer: int) -> dict:
        """The parameters of one layer."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}: the stack has layers 0 to {self.num_layers - 1}")
        return jax.tree.map(lambda leaf: leaf[layer], plain(self.layers))

    def _before(self, layer: int) -> dict:
        """The stacked parameters of the layers before one, whose input takes no more than these to compute."""
        return jax.tree.map(lambda leaf: leaf[:layer], plain(self.layers))


class Encoder(_Stack):
    """A stack of encoder blocks; with a causal mask, of a decoder without an encoder."""

    block = EncoderBlock

    def __call__(
        self, x: Float[Array, "B T D"], *, mask: Mask = None, positions: Positions = None, key: Dropout = None
    ) -> Float[Array, "B T D"]:
        return self._last(self._scan(plain(self.layers), x, mask, positions, key)[0])

    def hidden_states(
        self, x: Float[Array, "B T D"], *, mask: Mask = None, positions: Positions = None
    ) -> Float[Array, "L B T D"]:
        """The input of every layer and the output of the stack: num_layers + 1 arrays on a new first axis."""
        x, inputs = self._scan(plain(self.layers), x, mask, positions, None)
        return jnp.concatenate([inputs, self._last(x)[None]])

    def attention_weights(
        self, x: Float[Array, "B T D"], layer: int, *, mask: Mask = None, positions: Positions = None
    ) -> Float[Array, "B N T T"]:
        """The self-attention weights of a layer, for the input x of the stack, whatever the implementation."""
        params = self._layer(layer)
        x = self._scan(self._before(layer), x, mask, positions, None)[0] if layer else x
        own = {"mask": mask, "bias": self._bias(), "positions": positions}
        return blocks.encoder_block_weights(params, x, **own, settings=self.settings)

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: KVCache,
        start: Int[Array, ""],
        *,
        mask: Mask,
        positions: Positions = None,
        layers: list[dict] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Run T new columns, written at column `start` of the cache: a decoder without an encoder.

        layers: what `each_layer` gives, where a loop has it from outside and need not cut it in every step.
        """
        own, stored = {"mask": mask, "bias": self._bias(), "positions": positions, "settings": self.settings}, []
        for params, old in zip(layers or self.each_layer(), cache.layers, strict=True):
            x, new = blocks.encoder_block(params, x, **own, cache=old, start=start)
            stored.append(new)
        return self._last(x), replace(cache, layers=tuple(stored))

    def _scan(self, layers, x, mask, positions, key):
        own = {"mask": mask, "bias": self._bias(), "positions": positions}

        def body(x, layer):
            params, index = layer
            y, _ = blocks.encoder_block(params, x, **own, settings=self.settings, key=_fold(key, index))
            return constrain(y, "batch", "length", None), x

        return self._loop(body, x, layers)


class Decoder(_Stack):
    """A stack of decoder blocks."""

    block = DecoderBlock

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        *,
        mask: Mask = None,
        cross_mask: Mask = None,
        positions: Positions = None,
        key: Dropout = None,
    ) -> Float[Array, "B T D"]:
        return self._last(self._scan(plain(self.layers), x, encoded, mask, cross_mask, positions, key)[0])

    def hidden_states(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        *,
        mask: Mask = None,
        cross_mask: Mask = None,
        positions: Positions = None,
    ) -> Float[Array, "L B T D"]:
        """As `Encoder.hidden_states`."""
        x, inputs = self._scan(plain(self.layers), x, encoded, mask, cross_mask, positions, None)
        return jnp.concatenate([inputs, self._last(x)[None]])

    def attention_weights(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        layer: int,
        *,
        mask: Mask = None,
        cross_mask: Mask = None,
        positions: Positions = None,
    ) -> tuple[Float[Array, "B N T T"], Float[Array, "B N T S"]]:
        """The self-attention and the cross-attention weights of a layer, as `Encoder.attention_weights`."""
        params = self._layer(layer)
        x = self._scan(self._before(layer), x, encoded, mask, cross_mask, positions, None)[0] if layer else x
        cross = keys_values(params["cross_attention"], encoded, encoded)
        own = {"mask": mask, "bias": self._bias(), "positions": positions}
        return blocks.decoder_block_weights(params, x, cross, **own, cross_mask=cross_mask, settings=self.settings)

    def cross_keys_values(self, encoded: Float[Array, "B S D"]) -> tuple[Stored, ...]:
        """The encoder's output projected for every layer's cross-attention, computed once per sentence."""
        return tuple(Stored.of(keys_values(one["cross_attention"], encoded, encoded)) for one in self.each_layer())

    def decode(
        self,
        x: Float[Array, "B T D"],
        cache: KVCache,
        start: Int[Array, ""],
        *,
        mask: Mask,
        cross_mask: Mask = None,
        positions: Positions = None,
        layers: list[dict] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Run T new columns, written at column `start` of the cache; layers as in `Encoder.decode`."""
        own, stored = {"mask": mask, "bias": self._bias(), "positions": positions, "settings": self.settings}, []
        for params, old, cross in zip(layers or self.each_layer(), cache.layers, cache.cross, strict=True):
            x, new = blocks.decoder_block(params, x, cross, **own, cross_mask=cross_mask, cache=old, start=start)
            stored.append(new)
        return self._last(x), replace(cache, layers=tuple(stored))

    def _scan(self, layers, x, encoded, mask, cross_mask, positions, key):
        own = {"mask": mask, "bias": self._bias(), "positions": positions}

        def body(x, layer):
            params, index = layer
            cross, key_ = keys_values(params["cross_attention"], encoded, encoded), _fold(key, index)
            settings = self.settings
            y, _ = blocks.decoder_block(params, x, cross, **own, cross_mask=cross_mask, settings=settings, key=key_)
            return constrain(y, "batch", "length", None), x

        return self._loop(body, x, layers)


def _numbered(layers):
    """Stacked parameters with the number of each layer."""
    return layers, jnp.arange(jax.tree.leaves(layers)[0].shape[0], dtype=jnp.uint32)


def _fold(key, index):
    return None if key is None else jax.random.fold_in(key, index)
