"""Deep post-LN needs a warm-up, pre-LN does not.

With post-LN the gradients near the output are large at the start however deep the stack, of order d sqrt(ln d); with
pre-LN they shrink as 1 / sqrt(L) (Xiong et al. 2020, theorem 1; claim `residuals`). Adam turns either into steps of one
learning rate, before it knows the gradients' size well: for post-LN too far. So a learning rate that rises from 0
(Vaswani et al. 2017, eq. 3) decides whether it learns. Measured: a GPT of `DEPTH` layers trained on random walks, whose
loss goes from ln 16, a guess, to ln 2, the entropy of a step. (Twice as deep, post-LN does not learn with it either.)
"""

import functools
import math
from pathlib import Path

import jax
import numpy as np

from experiments.theory import Row, at_least, at_most
from experiments.theory.figure import drawn
from experiments.theory.learning import language_loss, trained, walks
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig

STATES, DEPTH, STEPS, WARMUP, RATE = 16, 12, 400, 200, 3e-3
SIZES = {"num_layers": DEPTH, "d_model": 64, "d_ff": 128, "num_heads": 4, "max_length": 32}
RUNS = {
    "post-LN, no warm-up": ("post", 0),
    f"post-LN, warm-up of {WARMUP}": ("post", WARMUP),
    "pre-LN, no warm-up": ("pre", 0),
}
draw = functools.partial(walks, rows=8, length=32, states=STATES)


def losses(norm: str, warmup_steps: int) -> np.ndarray:
    """Of each update, in nats."""
    model = build(GPTConfig(STATES, norm=norm, positions="rope", dropout=Dropout(0.0, 0.0), **SIZES))
    options = {"steps": STEPS, "learning_rate": RATE, "warmup_steps": warmup_steps}
    return np.asarray(trained(language_loss(model, draw), model.init(jax.random.key(0)), **options)[1])


def measure(figures: Path) -> list[Row]:
    """Three trainings."""
    curves = {name: losses(*run) for name, run in RUNS.items()}
    chance, entropy = math.log(STATES), math.log(2)
    with drawn(figures / "warm_up.png", width=5) as (axis,):
        for name, curve in curves.items():
            axis.plot(curve, label=name)
        axis.axhline(chance, color="0.6", linestyle="--", label="ln 16, a guess")
        axis.axhline(entropy, color="black", linestyle=":", label="ln 2, the entropy")
        axis.set(title=f"GPT of {DEPTH} layers", xlabel="update", ylabel="loss / nats a token", ylim=0)
        axis.legend()
    without, warmed, pre = (float(curve[-30:].mean()) for curve in curves.values())
    note = f"{DEPTH} layers, Adam, learning rate {RATE:g}, {STEPS} updates"
    return [
        at_least("post-LN without warm-up does not learn: loss, 0.8 ln 16", 0.8 * chance, without, note=note),
        at_most(
            "post-LN with warm-up does: loss, 1.2 ln 2", 1.2 * entropy, warmed, note=f"warm-up of {WARMUP} updates"
        ),
        at_most("pre-LN without warm-up does: loss, 1.2 ln 2", 1.2 * entropy, pre),
    ]
