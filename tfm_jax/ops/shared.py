"""Attention shared by the devices of a mesh: each computes some rows, some heads and some queries, over all keys.

XLA's partitioner divides an implementation that is a few products of arrays, but hardly a loop over tiles, and no
kernel. In `jax.shard_map` every device runs the implementation on its part as if it were alone. What crosses devices is
keys and values, gathered once where the queries of a row are divided, and sums of gradients of what devices share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from tfm_jax.ops.attention import Implementation, chosen_implementation
from tfm_jax.ops.biases import AttentionBias
from tfm_jax.ops.masks import ARRAY_AXES, AttentionMask
from tfm_jax.ops.scores import Place, Request

Names = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shared:
    """An implementation on every device of the mesh in use (`jax.set_mesh`), each with its part of the request.

    The fields but the first name mesh axes, of type Auto; those that the mesh lacks count as size 1. An axis is used
    where it divides the size: of the batch, of the queries, and of the heads such that each device has the key heads of
    its query heads. Where none is used the inner implementation runs as it is. So it does, left to XLA's partitioner,
    with a mask of a derived class and with a bias that does not say how it is divided (`AttentionBias.outer_axes`).
    """

    inner: str | Implementation = "auto"
    """A name as in `dot_product_attention`, where "auto" chooses by what one device has to do, or an instance."""
    batch: Names = ("data", "fsdp")
    heads: Names = "model"
    length: Names = "sequence"
    """Divides the queries, in order: with a causal mask the last devices, whose queries see most, take longest."""

    def __post_init__(self):
        names = _several(self.batch) + _several(self.heads) + _several(self.length)
        if len(set(names)) < len(names):
            raise ValueError(f"mesh axes are {names}: each divides one of batch, heads and length")

    def refusal(self, request: Request) -> str | None:
        """Why the inner implementation cannot do a device's part; None when it can."""
        inner, reason = self._asked(request, lambda inner, part: (inner, inner.refusal(part)))
        return None if reason is None else f"{type(inner).__name__} cannot do this: {reason}"

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""
        said = self._asked(request, lambda inner, part: f"{type(inner).__name__} {inner.scores(part)}")
        division = self._division(request)
        return said if division is None else f"on each of {division.devices} devices {said}"

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a request that is not refused."""
        run = lambda part: chosen_implementation(part, self.inner).run(part)  # noqa: E731
        division = self._division(request)
        if division is None:
            return run(request)
        mapped, arrays = division.mapped(division.projected(request), run)
        return mapped(*arrays)

    def _asked(self, request, question):
        """question(inner implementation, a device's part of the request)."""
        answers, division = [], self._division(request)

        def ask(part):
            answers.append(question(chosen_implementation(part, self.inner), part))
            return part.query

        if division is None:
            ask(request)
        else:
            mapped, arrays = division.mapped(request, ask)
            jax.eval_shape(mapped, *arrays)
        return answers[0]

    def _division(self, request):
        """How the mesh in use divides the request; None: it does not."""
        mesh, (B, N, T, S), K = jax.sharding.get_abstract_mesh(), request.shape, request.key.shape[2]
        kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        sizes = {name: size for name, size, kind in kinds if kind == AxisType.Auto}
        batch = _dividing(self.batch, sizes, lambda n: B % n == 0)
        # as many key heads on each device, or one that several devices share
        heads = _dividing(self.heads, sizes, lambda n: N % n == 0 and (K % n == 0 or n % K == 0))
        division = _Division(sizes, batch, heads, _dividing(self.length, sizes, lambda n: T % n == 0))
        if division.devices == 1 or not _known(request.mask):
            return None
        part = (B // division.count(batch), N // division.count(heads), T // division.count(division.length), S)
        return division if all(bias.divisible(part) for bias in request.biases) else None


@dataclass(frozen=True)
class _Division:
    """The mesh axes that divide the batch, the heads and the queries of a request."""

    sizes: dict[str, int]
    """Of all Auto axes of the mesh; what one does not divide is computed by each of its devices."""
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    length: tuple[str, ...]

    @property
    def devices(self) -> int:
        return self.count(self.batch + self.heads + self.length)

    def count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.sizes[name] for name in names)

    def projected(self, request: Request) -> Request:
        """The request with its keys divided as its queries are, until `mapped` gathers them.

        Asked for whole, they would be made whole: XLA would gather what they are projected from and project all of it
        on every device.
        """
        if not self.length or request.shape[3] % self.count(self.length):
            return request
        heads = self._key_heads_axis(request)
        key, value = (_laid_out(x, self._spec(x, 0, heads, 1)) for x in (request.key, request.value))
        return replace(request, key=key, value=value)

    def mapped(self, request: Request, function: Callable[[Request], Array]) -> tuple[Callable[..., Array], list[Any]]:
        """function(a device's part of the request), an array laid out as the query, of the arrays in the list."""
        whole = (request.query, request.key, request.value, request.mask, request.biases, request.dropout_key)
        leaves, tree = jax.tree.flatten(whole)
        specs = tree.flatten_up_to(self._specs(request))
        # what is one array to the caller stays one, by which kernels know that both sides have the same segments
        names = [(id(leaf), spec) for leaf, spec in zip(leaves, specs, strict=True)]
        once = dict(zip(names, leaves, strict=True))

        def of_a_device(*arrays):
            given = dict(zip(once, arrays, strict=True))
            return function(self._part(request, *tree.unflatten([given[name] for name in names])))

        mapped = jax.shard_map(
            of_a_device,
            in_specs=tuple(spec for _, spec in once),
            out_specs=self._spec(request.query, 0, 2, 1),
            axis_names=set(self.sizes),
            # kernels do not say over which axes their outputs vary
            check_vma=False,
        )
        return mapped, list(once.values())

    def _part(self, request, query, key, value, mask, biases, dropout_key):
        (B, T, N, _), group = query.shape, request.query.shape[2] // request.key.shape[2]
        lengths = ((self.batch, B), (self.heads, N), (self.length, T))
        first_row, first_head, first_query = (jax.lax.axis_index(names) * n if names else 0 for names, n in lengths)
        if self._key_heads_axis(request) is None:
            own = lambda x: jax.lax.dynamic_slice_in_dim(x, first_head // group, 1, axis=2)  # noqa: E731
            key, value = own(key), own(value)
        place = Place(first_row, first_head, first_query, request.shape)
        arguments = (mask, biases, request.scale, request.dropout_rate, dropout_key)
        return Request(query, key, value, *arguments, part_of=place)

    def _key_heads_axis(self, request):
        """The axis over heads of keys and values; None where devices share one key head."""
        return None if request.key.shape[2] % self.count(self.heads) else 2

    def _specs(self, request):
        """How the arrays of a request are laid out."""
        keys = [self._spec(x, 0, self._key_heads_axis(request)) for x in (request.key, request.value)]
        biases = tuple(self._bias_specs(bias) for bias in request.biases)
        dropout_key = None if request.dropout_key is None else PartitionSpec()
        return self._spec(request.query, 0, 2, 1), *keys, self._mask_specs(request.mask), biases, dropout_key

    def _mask_specs(self, mask):
        if mask is None:
            return None
        given = {name: axes for name, axes in ARRAY_AXES.items() if getattr(mask, name) is not None}
        specs = {
            name: self._spec(getattr(mask, name), 0, 1 if name == "dense" else None, queries)
            for name, (queries, _) in given.items()
        }
        return replace(mask, **specs, also=tuple(self._mask_specs(other) for other in mask.also))

    def _bias_specs(self, bias: AttentionBias):
        outer, inner, specs = bias.outer_axes, bias.axes, {}
        for name in {*outer, *inner}:
            (batch, heads), (queries, _) = outer.get(name, (None, None)), inner.get(name, (None, None))
            specs[name] = self._spec(getattr(bias, name), batch, heads, queries)
        return replace(jax.tree.map(self._spec, bias), **specs)

    def _spec(self, x, batch_axis=None, heads_axis=None, queries_axis=None):
        """The layout of an array with such axes; one of length 1 stands for all and is whole."""
        names = [()] * x.ndim
        for axis, divided in ((batch_axis, self.batch), (heads_axis, self.heads), (queries_axis, self.length)):
            if axis is not None and x.shape[axis] != 1:
                names[axis] = divided
        # the gradient of what an axis does not divide is summed over it: over a single device in vain
        single = tuple(name for name, size in self.sizes.items() if size == 1)
        names[:1] = [first + single for first in names[:1]]
        return PartitionSpec(*(axes or None for axes in names))


# outside jit, an array of a single device has to be told through jit
_laid_out = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _known(mask):
    return mask is None or (type(mask) is AttentionMask and all(map(_known, mask.also)))


def _several(names):
    return (names,) if isinstance(names, str) else tuple(names or ())


def _dividing(names, sizes, fits):
    """Those axes of more than one device that divide, taken in order as long as their product does."""
    taken, count = (), 1
    for name in _several(names):
        size = sizes.get(name, 1)
        if size > 1 and fits(count * size):
            taken, count = (*taken, name), count * size
    return taken
