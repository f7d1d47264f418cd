"""A small model trained with and without the scale 1 / sqrt(d_k): part of the claim `saturation`.

The library's fresh projections halve the variance of queries and of keys, so unscaled scores start with a standard
deviation of about sqrt(d_k) / 2: 5.7 in one head of d_k = 128, saturated, and 1.4 in each of sixteen heads of 8. The
task is the token at the same place from the end: attention must move from wherever it starts to one other position. The
prediction is that one unscaled head takes at least twice the updates of a scaled one, and sixteen small ones less than
twice.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, at_least, at_most
from experiments.theory.figure import drawn
from experiments.theory.learning import language_loss, trained
from tfm_jax.models import BERTConfig, Model, build
from tfm_jax.models.architecture import Dropout

VOCABULARY, LENGTH, ROWS, WIDTH, STEPS = 16, 16, 32, 128, 500
LEARNED = 0.5
"""Loss below which the task counts as learned; guessing has log(16) = 2.8. Unit: nats."""


def mirrored(key: jax.Array) -> dict[str, jax.Array]:
    """A batch whose target at each position is the token at the same place from the end."""
    tokens = jax.random.randint(key, (ROWS, LENGTH), 0, VOCABULARY, jnp.int32)
    return {"tokens": tokens, "targets": tokens[:, ::-1], "weights": jnp.ones((ROWS, LENGTH))}


def small_model(num_heads: int, attention_scale: str) -> Model:
    """One layer that shares `WIDTH` among its heads."""
    config = BERTConfig(
        VOCABULARY,
        num_layers=1,
        max_length=LENGTH,
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        num_heads=num_heads,
        positions="sinusoidal",
        attention_scale=attention_scale,
        dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0),
    )
    return build(config)


def learn(model: Model, steps: int = STEPS) -> tuple[dict, np.ndarray]:
    """Its parameters after so many updates, and the loss before each."""
    loss, params = language_loss(model, mirrored), model.init(jax.random.key(1))
    if model.config.attention_scale == "none":
        # the library lets queries that will not be scaled begin smaller: here they begin as all others do
        attention = params["encoder"]["layers"]["attention"]
        attention["query"] = attention["query"] * attention["query"].shape[-1] ** 0.5
    params, losses = trained(loss, params, steps=steps, learning_rate=1e-3)
    return params, np.asarray(losses)


def trainings(figures: Path) -> list[Row]:
    """Two rows and the losses of one head and of sixteen."""
    curves = {(heads, scale): learn(small_model(heads, scale))[1] for heads in (1, 16) for scale in ("sqrt", "none")}
    draw_training(figures / "saturation_training.png", curves)
    slower = {heads: updates(curves[heads, "none"]) / updates(curves[heads, "sqrt"]) for heads in (1, 16)}
    return [
        at_least(
            "unscaled training takes more updates: one head",
            2.0,
            slower[1],
            note=f"d_k = {WIDTH}: updates until the loss is {LEARNED}, unscaled / scaled",
        ),
        at_most("hardly so with small heads", 2.0, slower[16], note=f"16 heads, d_k = {WIDTH // 16}: as above"),
    ]


def updates(curve: np.ndarray) -> int:
    """Until the mean loss of ten updates is below LEARNED; all of them where it never is."""
    below = np.flatnonzero(np.convolve(curve, np.ones(10) / 10, mode="valid") < LEARNED)
    return int(below[0]) + 10 if len(below) else len(curve)


def draw_training(path: Path, curves: dict[tuple[int, str], np.ndarray]) -> None:
    """The loss of one head and of sixteen."""
    with drawn(path, 2, width=3.8) as panels:
        for heads, axes in zip((1, 16), panels, strict=True):
            for scale, name in (("sqrt", "scaled"), ("none", "unscaled")):
                smooth = np.convolve(curves[heads, scale], np.ones(10) / 10, mode="valid")
                axes.plot(5 + np.arange(len(smooth)), smooth, label=name)
            axes.axhline(LEARNED, color="0.6", linestyle="--", label="counts as learned")
            axes.set_title(f"{heads} head{'s' * (heads > 1)} of $d_k$ = {WIDTH // heads}")
            axes.set_xlabel("update")
            axes.set_ylabel("loss / nats")
            axes.set_ylim(0.0, 3.2)
            axes.legend()
