"""What a layer costs: operations and memory as XLA counts them in its program, and time."""

import time
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Layer = Callable[[jax.Array], jax.Array]


def lowered(layer: Layer, n: int, d: int) -> jax.stages.Lowered:
    """The program of a layer over n tokens of width d, not compiled."""
    return jax.jit(lambda x: layer(x)).lower(jax.ShapeDtypeStruct((1, n, d), jnp.float32))


def operations(layer: Layer, n: int, d: int) -> float:
    """Of a forward pass, a multiplication and an addition being two. The body of a loop counts once."""
    return lowered(layer, n, d).cost_analysis()["flops"]


def held(layer: Layer, n: int, d: int) -> int:
    """What the gradient of a layer by its input needs beside both; nothing is run. Unit: bytes."""
    gradient = jax.grad(lambda x: jnp.square(layer(x)).sum())
    return lowered(gradient, n, d).compile().memory_analysis().temp_size_in_bytes


def seconds(cases: dict[Hashable, tuple[Layer, int, int]], *, rounds: int = 7) -> dict[Hashable, float]:
    """Of each (layer, n, d) its fastest forward pass; all run by turns, as whatever else the machine does meets all."""
    calls = {}
    for case, (layer, n, d) in cases.items():
        calls[case] = (lowered(layer, n, d).compile(), jax.random.normal(jax.random.key(n), (1, n, d)))
    found = dict.fromkeys(cases, np.inf)
    for _ in range(rounds):
        for case, (program, x) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            found[case] = min(found[case], time.perf_counter() - start)
    return found


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p of cost = c size^p that fits best."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
