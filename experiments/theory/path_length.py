"""From the last position to the first it is one layer by attention, n steps by recurrence, and by convolutions as many
layers as their reach needs.

Vaswani et al. (2017), table 1: a maximum path length, and so a number of operations one after the other, of O(1), O(n)
and O(log_k n) or O(n / k). To the letter, a layer of a contiguous causal stack reaches k - 1 tokens further, so that
(n - 1) / (k - 1) layers are needed, not n / k; with dilations 1, k, k^2, ... the reach is k to the power of the layers.

Measured by the receptive field: the gradient of the last position goes back layer by layer, or step by step of a
recurrence in which all positions move at once, until it reaches the first token. How much of it arrives: a step of a
fresh LSTM keeps at most about its forget gate, 1/2, and what returns through input and output gates, 1/2 * 1/2, so that
a gradient falls at least as 0.75^distance (Hochreiter 1991; Bengio et al. 1994); through attention it does not fall.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.theory import Row, at_most, near
from experiments.theory.baselines import LSTM, Convolutions
from experiments.theory.figure import drawn
from tfm_jax.nn import MultiHeadAttention
from tfm_jax.ops import AttentionMask

K, LAYERS, WIDTH = 3, 4, 32
N = K**LAYERS
LENGTHS = (9, 27, 81)
"""Of 243 steps of a recurrence nothing arrives: the gradient is less than the smallest float32."""
ATTENTION, RECURRENT, CONTIGUOUS, DILATED = "attention", "recurrence", "contiguous convolutions", "dilated convolutions"
EXPECTED: dict[str, tuple[str, Callable[[int], int]]] = {
    ATTENTION: ("1 layer", lambda n: 1),
    RECURRENT: ("n steps", lambda n: n),
    CONTIGUOUS: ("(n - 1) / (k - 1) layers", lambda n: math.ceil((n - 1) / (K - 1))),
    DILATED: ("log_k n layers", lambda n: round(math.log(n, K))),
}
Step = Callable[[Any], Any]


def attention() -> Step:
    """A layer of causal self-attention."""
    layer, mask = MultiHeadAttention(WIDTH, 1, rngs=nnx.Rngs(0)), AttentionMask(causal=True)
    return lambda x: layer(x, mask=mask)


def convolutions(dilations: Iterable[int]) -> Step:
    """A stack of causal convolutions."""
    return Convolutions(WIDTH, K, tuple(dilations), rngs=nnx.Rngs(0))


def recurrent_step() -> Step:
    """Every position of a recurrence reads its token and the state that its neighbour had."""
    cell = LSTM(WIDTH, rngs=nnx.Rngs(0)).cell
    late = lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]  # noqa: E731

    def step(state):
        x, c, h = state
        (c, h), _ = cell((late(c), late(h)), x)
        return x, c, h

    return step


@functools.partial(jax.jit, static_argnames="step")
def back(gradient: Any, state: Any, *, step: Step) -> Any:
    """The gradient before a step, from that after it."""
    return jax.vjp(step, state)[1](gradient)[0]


def rounds(steps: Iterable[Step], state: tuple[jax.Array, ...]) -> int:
    """Steps back until the gradient of the last position has reached the first token.

    state: arrays 1 n d, the tokens first and the output last; they may be the same.
    """
    gradient = [jnp.zeros_like(x) for x in state]
    gradient[-1] = gradient[-1].at[:, -1].set(1.0)
    gradient = tuple(gradient)
    for count, step in enumerate(steps, 1):
        gradient = back(gradient, state, step=step)
        if gradient[0][:, 0].any():
            return count
    raise ValueError("the first token is out of reach of all steps")


def paths(n: int) -> dict[str, int]:
    """`rounds` of everything that joins n tokens."""
    x = jax.random.normal(jax.random.key(n), (1, n, WIDTH))
    alone = lambda layer: lambda state: (layer(state[0]),)  # noqa: E731
    return {
        ATTENTION: rounds([alone(attention())], (x,)),
        RECURRENT: rounds(itertools.repeat(recurrent_step(), n), (x, jnp.zeros_like(x), jnp.zeros_like(x))),
        CONTIGUOUS: rounds(itertools.repeat(alone(convolutions([1])), n), (x,)),
        DILATED: rounds((alone(convolutions([K**i])) for i in range(n)), (x,)),
    }


def arriving(layers: Step, *, samples: int = 16) -> np.ndarray:
    """Norm of the gradient of a random direction of the last output by each token, nearest first; mean of samples."""
    x, direction = jax.random.normal(jax.random.key(0), (2, samples, N, WIDTH))
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(layers(x)[:, -1], direction[:, -1])))(x)
    # squares of what is left of a recurrence are less than the smallest float32
    return np.linalg.norm(np.asarray(gradient, np.float64), axis=2).mean(axis=0)[::-1]


def measure(figures: Path) -> list[Row]:
    """Paths, and what of a gradient arrives along them."""
    found = {n: paths(n) for n in LENGTHS}
    norms = {
        ATTENTION: arriving(attention()),
        RECURRENT: arriving(LSTM(WIDTH, rngs=nnx.Rngs(0))),
        CONTIGUOUS: arriving(convolutions([1] * found[N][CONTIGUOUS])),
        DILATED: arriving(convolutions(K**i for i in range(LAYERS))),
    }
    draw(figures, found, norms)
    note = f"n = {N}, k = {K}"
    notes = {
        CONTIGUOUS: f"{note}; the textbook's n / k = {N / K:.0f} is the order: a layer reaches k - 1 tokens further"
    }
    rows = []
    for name, (words, expected) in EXPECTED.items():
        claim = f"The longest path of {name} is {words}"
        rows.append(near(claim, expected(N), found[N][name], share=0.0, note=notes.get(name, note)))
    steps = N // 2
    kept = float((norms[RECURRENT][steps] / norms[RECURRENT][0]) ** (1 / steps))
    flat = "Gradients through attention do not fall with distance: farthest / nearest but one"
    return [
        *rows,
        at_most(
            "A step of a fresh LSTM keeps at most 1/2 + 1/4 of a gradient", 0.75, kept, note=f"mean of {steps} steps"
        ),
        near(flat, 1.0, norms[ATTENTION][-1] / norms[ATTENTION][1], share=0.3, note=f"distances {N - 1} and 1"),
    ]


def draw(figures: Path, found: dict[int, dict[str, int]], norms: dict[str, np.ndarray]) -> None:
    """Paths by length, gradients by distance."""
    with drawn(figures / "path_length.png", 2) as (path, gradient):
        for name, norm in norms.items():
            path.loglog(LENGTHS, [found[n][name] for n in LENGTHS], "o-", label=name)
            gradient.semilogy(norm / norm.max(), label=name)
        path.set(xlabel="length n (tokens)", ylabel="longest path (layers or steps)", title=f"k = {K}")
        path.set_xticks(LENGTHS, LENGTHS)
        path.minorticks_off()
        gradient.set(xlabel="distance from the last token (tokens)", ylabel="norm of its gradient / largest of all")
        gradient.set(title=f"n = {N}, fresh layers")
        gradient.legend(loc="lower left")
