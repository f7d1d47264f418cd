"""Attention costs more than the feed-forward network beside it only where the text is long.

The network of width 4d has 16 n d^2 operations, scores and mixing 4 n^2 d, the four projections of attention 8 n d^2.
So scores and mixing alone overtake it at n = 4d, attention with its projections at n = 2d. With d = 4,096 that is
16,384 and 8,192 tokens.

Measured are the operations that XLA counts, and the time. Expected in time is a crossing not after n = 4d: the softmax
takes time and hardly operations.
"""

import functools
from pathlib import Path

import numpy as np
from flax import nnx

from experiments.theory import Row, at_most, near
from experiments.theory.complexity import attention
from experiments.theory.costs import operations, seconds
from experiments.theory.figure import drawn
from tfm_jax.nn import FeedForward, MultiHeadAttention

WIDTH = 128
LENGTHS = (64, 128, 256, 512, 1024, 2048)
ALONE, WHOLE, NETWORK = "scores and mixing", "attention with its projections", "feed-forward network"


def meeting(costs: dict[str, list[float]], name: str) -> float:
    """The n / d at which it costs as much as the network; between lengths, ratios are powers of the length."""
    ratio = np.log(costs[name]) - np.log(costs[NETWORK])
    return float(np.exp(np.interp(0.0, ratio, np.log(LENGTHS)))) / WIDTH


def measure(figures: Path) -> list[Row]:
    """The crossings in operations and in time."""
    layers = {
        ALONE: attention,
        WHOLE: functools.partial(MultiHeadAttention(WIDTH, 1, rngs=nnx.Rngs(0)), implementation="reference"),
        NETWORK: FeedForward(WIDTH, 4 * WIDTH, rngs=nnx.Rngs(0)),
    }
    counts = {name: [operations(layer, n, WIDTH) for n in LENGTHS] for name, layer in layers.items()}
    found = seconds({(name, n): (layer, n, WIDTH) for name, layer in layers.items() for n in LENGTHS})
    times = {name: [found[name, n] for n in LENGTHS] for name in layers}
    draw(figures, counts, times)
    overtakes = "overtakes the feed-forward network (d_ff = 4d) at n / d ="
    note = f"d = {WIDTH}, one head"
    return [
        near(f"Operations: scores and mixing {overtakes} 4", 4.0, meeting(counts, ALONE), share=0.05, note=note),
        near(f"Operations: {WHOLE} {overtakes} 2", 2.0, meeting(counts, WHOLE), share=0.05, note=note),
        at_most(f"Time: scores and mixing {overtakes} 4 or before", 4.0, meeting(times, ALONE), note=note),
    ]


def draw(figures: Path, counts: dict, times: dict) -> None:
    """Attention as a multiple of the network."""
    ratios = np.divide(LENGTHS, WIDTH)
    with drawn(figures / "crossing.png", 2) as axes:
        for panel, costs, what in ((axes[0], counts, "operations"), (axes[1], times, "time")):
            for name, style in ((ALONE, "o-"), (WHOLE, "s-")):
                label = f"{name}: {meeting(costs, name):.2f}"
                panel.loglog(ratios, np.divide(costs[name], costs[NETWORK]), style, label=label)
            panel.axhline(1.0, color="0.4", linestyle="--", label=NETWORK)
            for place in (2.0, 4.0):
                panel.axvline(place, color="0.7", linestyle=":")
            panel.set(xlabel=f"n / d, d = {WIDTH}", ylabel=f"{what} / those of the network", title=what.capitalize())
            panel.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
            panel.minorticks_off()
            panel.legend(title="crosses at")
