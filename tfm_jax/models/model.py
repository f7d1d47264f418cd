"""A model as a pair: `Model`, the static description, and `params`, a nested dict of arrays."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from tfm_jax.nn import plain


@dataclass(frozen=True)
class Model:
    """A module class and its configuration: hashable, equal when they are equal, a static argument of `jax.jit`.

    Inputs are the arrays that the module's methods take; every method is a pure function of them and of `params`.
    Without a `key` there is no dropout (evaluation); with one there is (training).
    """

    module: type[nnx.Module]
    config: Any

    def init(self, key: Key[Array, ""]) -> dict:
        """Fresh parameters, float32, a function of the key alone."""
        return plain(self.module(self.config, rngs=nnx.Rngs(key)))

    @property
    def shapes(self) -> dict:
        """The tree of `params` as `jax.ShapeDtypeStruct`s, without allocating anything."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain(_skeleton(self)))

    @property
    def axes(self) -> dict:
        """The tree of `params` with the logical axis names of each array, which `sharding` maps to devices."""
        state = nnx.state(_skeleton(self), nnx.Param)
        leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        # a stacked parameter knows its axes without the layer axis, which comes first
        names = [(None,) * (leaf.ndim - len(leaf.axes)) + leaf.axes for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), names)

    @property
    def num_parameters(self) -> int:
        """Count of numbers in `params`; tied parameters count once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))

    def bind(self, params: dict) -> nnx.Module:
        """The Flax module with these parameters."""
        return nnx.merge(_graphdef(self), params)

    def apply(self, params: dict, *tokens: Array, **inputs: Any) -> Array:
        """Logits `B T V` in float32 for tokens `B T`, or what another head gives (`BERT`, `GPT`); two-sided models take
        the source tokens first.

        inputs: segment_ids, positions (`B T`; with the prefix source_ for the encoder's) and key.
        """
        return self.bind(params)(*tokens, **inputs)

    def features(self, params: dict, *tokens: Array, **inputs: Any) -> Array:
        """What the output layer reads, `B T D`; arguments as for `apply`."""
        return self.bind(params).features(*tokens, **inputs)

    def output_layer(self, params: dict) -> tuple[Array, Array | None]:
        """The table `V D` and the bias `V` (None without) that turn features into logits x E^T + b."""
        return self.bind(params).output_layer()

    def hidden_states(self, params: dict, *tokens: Array, **inputs: Any) -> dict:
        """By stack (encoder, decoder), the input of every layer and the final output, on a first axis."""
        return self.bind(params).hidden_states(*tokens, **inputs)

    def attention_weights(self, params: dict, *tokens: Array, layer: int, **inputs: Any) -> dict:
        """By place (encoder, decoder, cross), the weights `B N T S` of a layer, counted from 0.

        A place is left out where its stack has fewer layers; raises `ValueError` where every stack has.
        """
        return self.bind(params).attention_weights(*tokens, layer=layer, **inputs)

    def encode(self, params: dict, source_tokens: Array, **inputs: Any) -> Array:
        """The encoder's output `B S D` (encoder-decoders)."""
        return self.bind(params).encode(source_tokens, **inputs)

    def init_cache(self, params: dict, batch: int, length: int, **inputs: Any) -> Any:
        """An empty cache for `length` columns; encoder-decoders also take encoded and encoded_segment_ids."""
        return self.bind(params).init_cache(batch, length, **inputs)

    def decode_step(
        self, params: dict, tokens: Array, cache: Any, *, positions: Array, visible: Array | None = None
    ) -> tuple[Array, Any]:
        """Logits of T further tokens and the cache that includes them; prefill is the same with more tokens.

        positions: `B T`; -1 marks padding, which is never seen and whose logits mean nothing. The cache must have T
        free columns: logits are NaN when it has not. visible: `B T S`, which of all columns, the new ones included,
        each token may see beside what causality says (None: all). So tokens of a row may be branches of a tree that
        share the columns of their past.
        """
        return self.bind(params).decode_step(tokens, cache, positions=positions, visible=visible)

    def stepper(self, params: dict) -> Callable[..., tuple[Array, Any]]:
        """`decode_step` without its first argument, for a loop: what can be done once with the parameters is done.

        Stacked layers are cut apart here; inside the loop XLA would copy every matrix at every step.
        """
        module = self.bind(params)
        return functools.partial(module.decode_step, layers=module.decoder.each_layer())


@functools.cache
def _skeleton(model: Model) -> nnx.Module:
    return nnx.eval_shape(lambda: model.module(model.config, rngs=nnx.Rngs(0)))


@functools.cache
def _graphdef(model: Model) -> nnx.GraphDef:
    return nnx.graphdef(_skeleton(model))
