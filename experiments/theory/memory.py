"""Attention that builds its matrix needs memory that grows as n^2; computed in blocks it needs none of it.

softmax(Q K^T / sqrt(d_k)) of n = 10,000 tokens has n^2 entries: 4 n^2 bytes = 400 MB in float32, for every head and
layer. Online softmax over blocks (Rabe and Staats 2021; Dao et al. 2022) gives the same output and gradients with tiles
of fixed size, beside some arrays as large as its input: predicted at most ten of them, 10 * 4 n d bytes, and so memory
that grows as n.

Measured by XLA's analysis of the compiled programs for one head of 64, for every implementation of the library that
runs on this platform. Nothing of that size is run. The programs give gradients: of a forward pass alone XLA may make a
single kernel in which the matrix never stands in memory (for CPUs that of jax 0.10 does, from n = 5,000 on).
"""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.theory import Row, at_least, at_most, near
from experiments.theory.costs import exponent
from experiments.theory.figure import drawn
from tfm_jax.equivalence import PLATFORMS
from tfm_jax.ops import attention_weights, dot_product_attention, explain_implementation
from tfm_jax.ops.attention import IMPLEMENTATIONS

HEAD = 64
LENGTH = 10_000
LENGTHS = (1_250, 2_500, 5_000, 10_000, 20_000)


def heads(n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key and value of n tokens as shapes."""
    return (jax.ShapeDtypeStruct((1, n, 1, HEAD), jnp.float32),) * 3


def gradients(name: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Of an implementation, by query, key and value."""
    attend = functools.partial(dot_product_attention, implementation=name)
    return jax.grad(lambda *arrays: jnp.square(attend(*arrays)).sum(), argnums=(0, 1, 2))


def temporary(function: Callable, n: int) -> int:
    """What a program needs beside what it reads and gives. Unit: bytes."""
    return jax.jit(function).lower(*heads(n)).compile().memory_analysis().temp_size_in_bytes


def runnable() -> tuple[list[str], str]:
    """The implementations that run here, and in words why the others do not."""
    here, refused = jax.default_backend(), explain_implementation(*heads(LENGTH)).refused
    elsewhere = {name: f"for {platform}" for name, platform in PLATFORMS.items() if platform != here}
    why = refused | elsewhere
    return [name for name in IMPLEMENTATIONS if name not in why], "; ".join(f"{name}: {why[name]}" for name in why)


def measure(figures: Path) -> list[Row]:
    """The matrix, what holds it and what does not."""
    names, others = runnable()
    found = {name: [temporary(gradients(name), n) for n in LENGTHS] for name in names}
    at = LENGTHS.index(LENGTH)
    weights = jax.jit(attention_weights).lower(*heads(LENGTH)[:2]).compile().memory_analysis().output_size_in_bytes
    draw(figures, found)
    return [
        near("The n x n matrix of one head has 4 n^2 bytes: MB at n = 10,000", 400.0, weights / 1e6, share=0.0),
        at_least(
            "Attention that builds the matrix holds it for its gradients: MB at n = 10,000",
            400.0,
            found["reference"][at] / 1e6,
            note="temporary memory: the matrix, its gradient and the scores'",
        ),
        at_most(
            "Attention in blocks holds at most ten arrays of n x d: MB at n = 10,000",
            10 * 4 * LENGTH * HEAD / 1e6,
            found["blockwise"][at] / 1e6,
            note=f"d = {HEAD}; not here: {others}",
        ),
        at_most(
            "Memory of attention in blocks grows no faster than n: the exponent",
            1.0,
            exponent(LENGTHS, found["blockwise"]),
            note=f"n = {LENGTHS[0]:,} ... {LENGTHS[-1]:,}: tiles of a fixed size, and arrays of n x d",
        ),
    ]


def draw(figures: Path, found: dict[str, list[int]]) -> None:
    """Memory against length."""
    with drawn(figures / "memory.png") as (axes,):
        for name, sizes in found.items():
            axes.loglog(LENGTHS, [size / 1e6 for size in sizes], "o-", label=name)
        axes.loglog(LENGTHS, [4 * n**2 / 1e6 for n in LENGTHS], color="0.6", linestyle=":", label="the matrix, $4 n^2$")
        axes.axvline(LENGTH, color="0.8", zorder=0)
        axes.set(
            xlabel="length n (tokens)",
            ylabel="temporary memory of gradients (MB)",
            title=f"One head of {HEAD}, float32",
        )
        axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
        axes.minorticks_off()
        axes.legend()
