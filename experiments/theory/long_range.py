"""What decides at the end and stands at the beginning is learned where a gradient reaches it.

The first of 81 random bits is the label, which is read off the last position. A layer of attention reaches it directly,
four dilated convolutions (k = 3) just so, 3^4 = 81. Four contiguous ones reach 9 bits, so that they can do nothing but
guess. An LSTM can hold a bit (Hochreiter and Schmidhuber 1997), but a fresh one forgets: after 80 steps at most
0.75^80 = 1e-10 of a gradient is left (`path_length`), and so it guesses too. (Forget gates that begin open would help
it, Gers et al. 2000.) Guesses are right half of the time.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.theory import Row, at_least, at_most
from experiments.theory.baselines import LSTM
from experiments.theory.figure import drawn
from experiments.theory.learning import trained
from experiments.theory.path_length import (
    ATTENTION,
    CONTIGUOUS,
    DILATED,
    LAYERS,
    RECURRENT,
    WIDTH,
    K,
    N,
    Step,
    convolutions,
)
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig

STEPS, ROWS, RATE = 800, 64, 3e-3
TESTED = 2048
"""Rows; the accuracy of guesses deviates by 0.011."""


class Reader(nnx.Module):
    """Bits to the logits of a label, read at the last of them."""

    def __init__(self, body: Step, *, rngs: nnx.Rngs):
        self.embedding, self.body, self.label = nnx.Embed(2, WIDTH, rngs=rngs), body, nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """B T -> B 2."""
        return self.label(self.body(self.embedding(tokens))[:, -1])


def learned(apply: Callable[[Any, jax.Array], jax.Array], params: Any) -> tuple[float, np.ndarray]:
    """(accuracy, losses) of learning which bit was the first of N."""
    draw = lambda key, rows: jax.random.randint(key, (rows, N), 0, 2, jnp.int32)  # noqa: E731

    def loss(params, key):
        tokens = draw(key, ROWS)
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, tokens), tokens[:, 0]).mean()

    params, losses = trained(loss, params, steps=STEPS, learning_rate=RATE)
    tokens = draw(jax.random.key(STEPS), TESTED)
    return float((jax.jit(apply)(params, tokens).argmax(axis=1) == tokens[:, 0]).mean()), np.asarray(losses)


def tasks() -> dict[str, tuple[float, np.ndarray]]:
    """What each learns of the first token."""
    sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "num_heads": 2, "max_length": N}
    switches = {"positions": "sinusoidal", "head": "sequence", "labels": ("0", "1"), "dropout": Dropout(0.0, 0.0)}
    model = build(GPTConfig(2, num_layers=1, **sizes, **switches))
    found = {ATTENTION: learned(model.apply, model.init(jax.random.key(0)))}
    layers = {
        RECURRENT: LSTM(WIDTH, rngs=nnx.Rngs(1)),
        CONTIGUOUS: convolutions([1] * LAYERS),
        DILATED: convolutions(K**i for i in range(LAYERS)),
    }
    for name, own in layers.items():
        structure, params = nnx.split(Reader(own, rngs=nnx.Rngs(0)))
        found[name] = learned(
            lambda params, tokens, own=structure: nnx.merge(own, params)(tokens), nnx.to_pure_dict(params)
        )
    return found


def measure(figures: Path) -> list[Row]:
    """The accuracy of each."""
    found = tasks()
    with drawn(figures / "long_range.png", width=5.0) as (axes,):
        for name, (accuracy, losses) in found.items():
            axes.plot(np.arange(10, STEPS, 20), losses.reshape(-1, 20).mean(axis=1), label=f"{name}: {accuracy:.2f}")
        axes.axhline(math.log(2), color="0.6", linestyle=":")
        axes.set(xlabel="update", ylabel="loss (nats)", title=f"The first of {N} bits, asked at the end")
        axes.legend(title="accuracy", loc="center right")
    asked, note = f"The first of {N} bits decides the label at the end", f"{STEPS} updates of {ROWS} rows"
    right = [at_least(f"{asked}: accuracy of {name}", 0.99, found[name][0], note=note) for name in (ATTENTION, DILATED)]
    return right + [
        at_most(f"{asked}: accuracy of {name}", 0.55, found[name][0], note=note) for name in (RECURRENT, CONTIGUOUS)
    ]
