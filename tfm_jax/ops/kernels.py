"""Fused kernels that exist: cuDNN's through `jax.nn`, and the Pallas kernel for TPU that ships with JAX.

Neither keeps the contract of `dot_product_attention` by itself: a query that may see nothing gets a mean of values or
NaN from them, and NaN in a slot that is never seen spreads. Such queries and slots are therefore found beforehand, in
linear memory where the kernel needs no T x S array, and zeroed; the output of such queries is selected to zero. What a
kernel cannot do is refused by name.
"""

import functools
import operator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from tfm_jax.ops.biases import DenseBias, SoftCap
from tfm_jax.ops.masks import Block
from tfm_jax.ops.scores import Request, both, seen_keys

_BY_INDEX = frozenset({"causal", "window"})
_SEGMENTS = frozenset({"query_segment_ids", "key_segment_ids"})


@dataclass(frozen=True)
class CuDNN:
    """The implementation `cudnn`: flash attention of NVIDIA's cuDNN in float16 or bfloat16.

    With no mask, and causal (also with a window) by index over as many keys as queries, nothing of T x S is built.
    Every other mask becomes an array, as does a `DenseBias`, which is rounded to the dtype of the query.
    """

    def refusal(self, request: Request) -> str | None:
        """Why the request cannot be honoured; None when it can."""
        _, _, T, S = request.shape
        H, E = request.query.shape[3], request.value.shape[3]
        # the exact type: a class derived from it may mean more
        others = [type(bias).__name__ for bias in request.biases if type(bias) is not DenseBias]
        if others:
            return f"bias {', '.join(others)}: cuDNN takes a dense array alone"
        if H % 8 or not 0 < H <= 128:
            return f"head size {H}: cuDNN takes multiples of 8 up to 128"
        if E != H:
            return f"d_v {E} with d_k {H}: cuDNN takes one size for both"
        if request.biases and request.query.dtype == jnp.float16:
            return "bias with dtype float16: its range ends at 65504, beyond which a bias would be lost"
        if self._builds_array(request) and (T % 2 or S % 2):
            return f"{T} queries and {S} keys with an array of mask or bias: its gradient in cuDNN takes even lengths"
        return _dropout_or_dtype(request, ("float16", "bfloat16")) or _gpu_without_cudnn()

    def drawback(self, request: Request) -> str | None:
        """Why another implementation serves the request better; None when this one is best."""
        return self.scores(request) if self._builds_array(request) else None

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""
        if self._builds_array(request):
            return "cuDNN needs this mask or bias as an array with an entry for every query and key: {2} x {3}".format(
                *request.shape
            )
        return "builds scores in tiles inside the kernel, never an array with an entry for every query and key"

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a request that is not refused."""
        query, key, value, (_, N, T, S) = request.query, request.key, request.value, request.shape
        left, _ = _reach(request.mask)
        native = _native(request)
        bias = visible = None
        if self._builds_array(request):
            if request.biases:
                bias = functools.reduce(operator.add, (one.array.astype(jnp.float32) for one in request.biases))
                visible = ~jnp.isneginf(bias)
            mask, first_head = request.mask, request.place.first_head
            visible = both(visible, None if mask is None else mask.tile(*request.blocks, N, first_head))
            visible = jnp.broadcast_to(visible, (*visible.shape[:2], T, S))
            live = visible.any(axis=3).swapaxes(1, 2)[..., None]
            seen = seen_keys(visible, key.shape[2]).swapaxes(1, 2)
            query, key, value = jnp.where(live, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)
            bias = None if bias is None else jnp.where(visible, bias, 0).astype(query.dtype)
        output = jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            visible,
            scale=float(request.scale),
            is_causal=native == "causal",
            # cuDNN refuses a window beside an array, which then says it all
            local_window_size=(left, 0) if native == "causal" and left is not None and visible is None else None,
            implementation="cudnn",
        )
        return output if visible is None else jnp.where(live, output, 0)

    def _builds_array(self, request):
        return bool(request.biases) or _native(request) is None


@dataclass(frozen=True, kw_only=True)
class Splash:
    """The implementation `splash`: JAX's Pallas kernel for TPU, in float32 or bfloat16; reverse-mode gradients only.

    Takes causal masks, windows and segments, all by array index, and one `SoftCap`; any T, S, d_k and d_v; nothing of
    T x S is built. XLA does not divide it over devices: under a mesh it runs in `Shared`, which gives each device its
    part, or in `jax.shard_map(..., check_vma=False)`.
    """

    interpret: bool = False
    """Run the kernel without a TPU, slowly, to check it."""
    block: int = 512
    """Tiles have at most block x block scores; a multiple of 128."""

    def __post_init__(self):
        if self.block < 128 or self.block % 128:
            raise ValueError(f"block is {self.block}: a multiple of 128 is expected")

    def refusal(self, request: Request) -> str | None:
        """Why the request cannot be honoured; None when it can."""
        others = [type(bias).__name__ for bias in request.biases if type(bias) is not SoftCap]
        if others:
            return f"bias {', '.join(others)}: the TPU kernel has a soft cap alone"
        if len(request.biases) > 1:
            return f"bias SoftCap, {len(request.biases)} times: the TPU kernel has one"
        unknown = set() if request.mask is None else request.mask.facts - _BY_INDEX - _SEGMENTS
        if unknown:
            return f"mask field {', '.join(sorted(unknown))}: the TPU kernel takes causal, window and segments by index"
        mesh = None if self.interpret else _mesh_in_the_way(request)
        if mesh is not None:
            return f"{mesh}: it runs on one device, in Shared, or inside jax.shard_map(..., check_vma=False)"
        return _dropout_or_dtype(request, ("float32", "bfloat16"))

    def drawback(self, request: Request) -> str | None:
        """Why another implementation serves the request better; None when this one is best."""
        _, _, T, S = request.shape
        # not measured on a TPU: the kernel fills whole blocks of 128, and wins where scores outgrow the fast memory
        return None if min(T, S) >= 1024 else f"{T} queries, {S} keys: the TPU kernel pays from 1024 of either"

    def scores(self, request: Request) -> str:
        """As `Explanation.scores`."""
        rows, columns = (_block_length(length, self.block) for length in request.shape[2:])
        return f"builds scores in tiles of {rows} x {columns}, never an array with an entry for every query and key"

    def run(self, request: Request) -> Float[Array, "B T N E"]:
        """Attention of a request that is not refused."""
        B, N, T, S = request.shape
        rows, columns = _block_length(T, self.block), _block_length(S, self.block)
        more_rows, more_columns = -T % rows, -S % columns
        query, key, value = request.heads_first
        live, seen = _partners(request.mask, B, T, S, request.place)
        if live is not None:
            query = jnp.where(live[:, None, :, None], query, 0)
        if seen is not None:
            key, value = (jnp.where(seen[:, None, :, None], x, 0) for x in (key, value))
        kernel = self._kernel(request, (T + more_rows, S + more_columns))
        query, key, value = _longer(query, more_rows), _longer(key, more_columns), _longer(value, more_columns)
        segments = _kernel_segments(request, live, seen, more_rows, more_columns)
        output = jax.vmap(kernel)(query, key, value, segments)[:, :, :T]
        if live is not None:
            output = jnp.where(live[:, None, :, None], output, 0)
        return output.swapaxes(1, 2)

    def _kernel(self, request, shape):
        """The kernel for padded (T, S): a function of query, key, value and segments of one row of the batch."""
        splash, T, (length, _) = _splash(), request.shape[2], shape
        reach, (rows, columns) = _reach(request.mask), (_block_length(n, self.block) for n in request.shape[2:])
        parts = 1 if reach == (None, None) else request.place.shape[2] // T
        if reach == (None, None):
            mask = splash.FullMask(shape)
        else:
            mask = splash.LocalMask((parts * length, shape[1]), reach, offset=0)
            # the rows of each device, which begin where those of the device before end
            mask.q_sequence = mask.q_sequence // length * T + mask.q_sequence % length
        # the fused backward kernel is not taken: it keeps a query gradient for every block of keys, T x S / block
        sizes = splash.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        )
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * request.shape[1]),
            block_sizes=sizes,
            attn_logits_soft_cap=request.biases[0].cap if request.biases else None,
            interpret=self.interpret,
            head_shards=1,
            q_seq_shards=parts,
        )
        return kernel if parts == 1 else _part_of_kernel(kernel, request.place.first_query // T, parts)


def _dropout_or_dtype(request, dtypes):
    """Why the kernel cannot take the request's dropout or dtypes."""
    if request.dropout_key is not None:
        return f"dropout at rate {request.dropout_rate}: the kernel would not drop the elements that the others drop"
    got = {name: getattr(request, name).dtype.name for name in ("query", "key", "value")}
    if len(set(got.values())) > 1:
        return f"dtypes {', '.join(f'{name} {dtype}' for name, dtype in got.items())}: the kernel takes one for all"
    return None if got["query"] in dtypes else f"dtype {got['query']}: the kernel takes {' and '.join(dtypes)}"


def _gpu_without_cudnn():
    """What this process's GPU, if it has one, lacks."""
    if jax.default_backend() != "gpu":
        return None
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))
    major = capability.split(".")[0]
    if major.isdecimal() and int(major) >= 8:
        return None
    return f"GPU of compute capability {capability}: cuDNN's fused attention needs CUDA and 8.0"


def _mesh_in_the_way(request):
    """Why a Pallas kernel cannot be lowered where the request is made; None: it can."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    divided = ", ".join(f"{name} {size}" for name, size, kind in axes if size > 1 and kind != AxisType.Manual)
    if divided:
        return f"mesh {divided}, over which XLA does not divide a Pallas kernel"
    # the kernel that ships with JAX does not say over which axes its outputs vary
    followed = [getattr(jax.typeof(x), "manual_axis_type", None) for x in (request.query, request.key, request.value)]
    varying = any(getattr(axes, "varying", None) for axes in followed)
    return "jax.shard_map with check_vma=True, which does not take this Pallas kernel" if varying else None


def _reach(mask):
    """(left, right): by causality and window, a query sees keys from its index - left to + right; None: no bound."""
    left, right = (mask and mask.window) or (None, None)
    return left, 0 if mask is not None and mask.causal else right


def _native(request):
    """How cuDNN says the mask by itself: "none", "causal" (its window included), or None, it cannot."""
    mask, (_, _, T, S) = request.mask, request.shape
    if mask is None or (mask.facts <= _BY_INDEX and _reach(mask) == (None, None)):
        return "none"
    # where T != S the corner to which cuDNN aligns depends on its version
    square = T == S == request.place.shape[2]
    return "causal" if mask.facts <= _BY_INDEX and _reach(mask)[1] == 0 and square else None


def _splash():
    # importing Pallas takes a second, which who never calls the kernel need not wait
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention


def _part_of_kernel(kernel, part, parts):
    """What the kernel knows of its blocks, cut to those of a part of its rows (`kernel.manual_sharding_spec`)."""

    def cut(x, axis):
        length = 0 if x is None else x.shape[axis] // parts
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, part * length, length, axis)

    def own(info):
        by_block = {name: cut(getattr(info, name), 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**by_block, q_sequence=cut(info.q_sequence, 0))

    infos = (own(info) for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
    return type(kernel)(*infos, **kernel.kwargs)


def _block_length(length, block):
    """The multiple of 128 that cuts an axis into the fewest blocks of at most `block`, with the least padding."""
    count = max(1, -(-length // block))
    return max(1, -(-length // (count * 128))) * 128


def _longer(x, more):
    """B N t H with zeros at the end of the third axis."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))


def _partners(mask, B, T, S, place):
    """Which queries see a key and which keys are seen by a query, `#B T` and `#B S`; None: all."""
    (left, right), first, last = _reach(mask), place.first_query, place.shape[2]
    if mask is None or mask.query_segment_ids is None:
        live = None if left is None or last <= S + left else (first + jnp.arange(T, dtype=jnp.int32) < S + left)[None]
        seen = None if right is None or S <= last + right else (jnp.arange(S) < last + right)[None]
        return live, seen
    query, key = _segments(mask, B, T, S)
    if mask.query_segment_ids is mask.key_segment_ids and T == S:
        return query > 0, key > 0  # every slot sees itself
    return _partners_by_tile(replace(mask, query_segment_ids=query, key_segment_ids=key), T, S, first)


def _partners_by_tile(mask, T, S, first):
    """As `_partners`, from the mask itself in linear memory; a sort would take XLA for TPU a minute to compile."""
    rows = min(T, 512)
    count = -(-T // rows)
    mask = mask.padded(count * rows - T, 0)  # by segment 0, which sees nothing

    def visit(seen, i):
        tile = mask.tile(Block(i * rows, rows, first), Block(0, S), 1)
        return seen | tile.any(axis=(1, 2)), tile.any(axis=(1, 3))

    B = mask.query_segment_ids.shape[0]
    seen, live = jax.lax.scan(visit, jnp.zeros((B, S), bool), jnp.arange(count, dtype=jnp.int32))
    return live.swapaxes(0, 1).reshape(B, count * rows)[:, :T], seen


def _segments(mask, B, T, S):
    """Segment ids of queries and keys; all 1 where the mask has none."""
    if mask is None or mask.query_segment_ids is None:
        return jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32)
    query, key = mask.query_segment_ids.astype(jnp.int32), mask.key_segment_ids.astype(jnp.int32)
    return jnp.broadcast_to(query, (B, T)), jnp.broadcast_to(key, (B, S))


def _kernel_segments(request, live, seen, more_rows, more_columns):
    """Ids that the kernel compares for equality alone, so that what is hidden has one that the other side never has."""
    B, _, T, S = request.shape
    right = _reach(request.mask)[1]
    beyond_reach = more_columns == 0 or (right is not None and request.place.shape[2] + right <= S)
    if beyond_reach and (request.mask is None or request.mask.query_segment_ids is None):
        return None
    query, key = _segments(request.mask, B, T, S)
    query = query if live is None else jnp.where(live, query, -1)
    key = key if seen is None else jnp.where(seen, key, -2)
    query = jnp.pad(query, ((0, 0), (0, more_rows)), constant_values=-1)
    key = jnp.pad(key, ((0, 0), (0, more_columns)), constant_values=-2)
    return _splash().SegmentIds(query, key)
