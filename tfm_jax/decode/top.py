"""The largest entries of long rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 32


def best_of_rows(x: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"], Float[Array, "R"]]:
    """Values and indices of the k largest entries of each row, as `lax.top_k` gives them, and log sum exp of the row.

    In two stages: the maxima of blocks, then the entries of the k best blocks; the k largest entries, the lower index
    first among equals, lie in the k blocks with the largest maxima, the lower block first among equals. A row with NaN
    has a NaN sum and any k entries.
    """
    R, V = x.shape
    if V < 4 * BLOCK * k:
        return *lax.top_k(x, k), jax.nn.logsumexp(x, axis=-1)
    # padded, not cut: what is read from the slice of an array, XLA copies once for each reader
    x = jnp.pad(x, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    blocks = x.reshape(R, -1, BLOCK)
    maxima = blocks.max(axis=-1)
    largest = maxima.max(axis=-1)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    total = jnp.log(jnp.exp(x - shift[:, None]).sum(axis=-1)) + shift
    best_blocks = jnp.sort(lax.top_k(maxima, k)[1], axis=-1)
    candidates = _take(blocks, best_blocks[..., None]).reshape(R, k * BLOCK)
    values, chosen = lax.top_k(candidates, k)
    return values, _take(best_blocks, chosen // BLOCK) * BLOCK + chosen % BLOCK, total


def _take(x, index):
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")
