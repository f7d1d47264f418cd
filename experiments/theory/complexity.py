"""A layer of self-attention costs O(n^2 d), a recurrent one O(n d^2), a convolution O(k n d^2).

Vaswani et al. (2017), table 1, of scores and mixing alone: 4 n^2 d operations. A step of an LSTM has 16 d^2, a
convolution 2 k n d^2. Held for the gradient are n^2 weights by attention that builds its matrix, which no width changes
while n >> d, and n d activations by the others. A stack of convolutions that joins all n positions has log_k n layers
if they are dilated (van den Oord et al. 2016).

Predicted are the exponents of n and d. Measured are slopes, in log-log coordinates, of what XLA counts in the programs
(the loop of the recurrence unrolled, as the body of a loop counts once), of the memory that it plans, and of time.
Times are of whatever else the machine does, too, and for small sizes of the start of every operation: their limit is
wide.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
from flax import nnx

from experiments.theory import Row, near, within
from experiments.theory.baselines import LSTM, Convolutions
from experiments.theory.costs import Layer, exponent, held, operations, seconds
from experiments.theory.figure import drawn
from tfm_jax.ops import dot_product_attention

KERNEL, JOINING = 3, 6
WIDTH, LENGTH = 128, 512
"""Of what is not growing."""
LENGTHS = {"Operations": (64, 128, 256, 512), "Memory": (256, 512, 1024, 2048), "Time": (1024, 2048, 4096, 8192)}
"""Memory stays below n = 4,096, from where on XLA for CPUs (of jax 0.10) holds three matrices instead of four."""
WIDTHS = {"Operations": (64, 128, 256, 512), "Memory": (64, 128, 256, 512), "Time": (256, 512, 1024)}


def attention(x: jax.Array) -> jax.Array:
    """Scores and mixing of one head over x, without projections."""
    head = x[:, :, None]
    return dot_product_attention(head, head, head, implementation="reference")[:, :, 0]


def recurrence(d: int, unroll: int = 1) -> LSTM:
    """A recurrent layer."""
    return LSTM(d, unroll=unroll, rngs=nnx.Rngs(0))


def convolution(d: int, layers: int = 1) -> Convolutions:
    """A convolution, or a stack of them with dilations 1, k, k^2, ...."""
    return Convolutions(d, KERNEL, tuple(KERNEL**i for i in range(layers)), rngs=nnx.Rngs(0))


LAYERS: dict[str, Callable[[int], Layer]] = {
    "self-attention": lambda d: attention,
    "recurrence": recurrence,
    "convolution": convolution,
}
POWERS = {
    "self-attention": {"Operations": (2, 1), "Memory": (2, 0), "Time": (2, 1)},
    "recurrence": {"Operations": (1, 2), "Memory": (1, 1), "Time": (1, 2)},
    "convolution": {"Operations": (1, 2), "Memory": (1, 1), "Time": (1, 2)},
}
"""By layer, the exponents of n and of d."""
LIMITS = {"Operations": 0.05, "Memory": 0.1, "Time": 0.5}
UNITS = {
    "Operations": ("operations / million", 1e6),
    "Memory": ("memory for the gradient / MiB", 2**20),
    "Time": ("time of a forward pass / ms", 1e-3),
}


def counted(name: str, n: int, d: int) -> float:
    """Operations of a layer."""
    return operations(recurrence(d, unroll=n) if name == "recurrence" else LAYERS[name](d), n, d)


def sizes(what: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (n, d) that are compared: with n growing, and with d growing, n >> d for memory."""
    length = LENGTHS[what][-1] if what == "Memory" else LENGTH
    return [(n, WIDTH) for n in LENGTHS[what]], [(length, d) for d in WIDTHS[what]]


def measured() -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """By quantity and layer, the costs with n growing, and with d growing."""
    layers = {(name, n, d): (LAYERS[name](d), n, d) for name in LAYERS for part in sizes("Time") for n, d in part}
    times = seconds(layers)
    cost = {
        "Operations": counted,
        "Memory": lambda name, n, d: held(LAYERS[name](d), n, d),
        "Time": lambda *case: times[case],
    }
    return {
        what: {name: tuple([of(name, n, d) for n, d in part] for part in sizes(what)) for name in LAYERS}
        for what, of in cost.items()
    }


def measure(figures: Path) -> list[Row]:
    """Exponents of operations, memory and time, and the cost of joining all positions."""
    found, rows = measured(), []
    draw(figures, found)
    for what, by_layer in found.items():
        for name, costs in by_layer.items():
            powers, cases = POWERS[name][what], sizes(what)
            for index, letter in enumerate("nd"):
                other = f"n = {cases[1][0][0]:,}" if index else f"d = {WIDTH}"
                slope = exponent([case[index] for case in cases[index]], costs[index])
                claim = f"{what} of {name}: the exponent of {letter}"
                rows.append(within(claim, powers[index], slope, distance=LIMITS[what], note=other))
    return [*rows, joined()]


def joined() -> Row:
    """The stack of dilated convolutions that joins all positions, beside one layer."""
    n = KERNEL**JOINING
    cost = functools.partial(operations, n=n, d=WIDTH)
    ratio = cost(convolution(WIDTH, JOINING)) / cost(convolution(WIDTH))
    claim = "Dilated convolutions join n positions at log_k n times the cost of one"
    return near(claim, JOINING, ratio, share=0.1, note=f"k = {KERNEL}, n = {n}; XLA leaves out products with padding")


def draw(figures: Path, found: dict[str, dict[str, tuple[list[float], list[float]]]]) -> None:
    """Each quantity with n and with d growing."""
    for index, letter in enumerate("nd"):
        with drawn(figures / f"complexity_{letter}.png", len(found), width=3.8) as axes:
            for panel, (what, by_layer) in zip(axes, found.items(), strict=True):
                part = sizes(what)[index]
                (label, unit), ticks = UNITS[what], [case[index] for case in part]
                for layer, costs in by_layer.items():
                    slope = exponent(ticks, costs[index])
                    panel.loglog(ticks, [x / unit for x in costs[index]], "o-", label=f"{layer}: {slope:.2f}")
                along = f"width d, n = {part[0][0]:,} tokens" if index else f"length n / tokens, d = {WIDTH}"
                panel.set(xlabel=along, ylabel=label)
                panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
                panel.minorticks_off()
                panel.legend(title="fitted exponent")
