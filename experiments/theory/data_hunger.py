"""Transformers need more data than recurrent networks of their size.

An LSTM reads in order whatever it has learned, a Transformer has to learn what near and later mean; with enough text it
is ahead, as it can look anything up (Kaplan et al. 2020, section 3.2.1 and figure 7; for few data the other way round,
Ezen-Can 2020). So predicted is, for validation losses, Transformer - LSTM > 0 for the smallest training set and < 0 for
the largest. Only the signs are predicted.

Measured on dates in ten languages as characters, `de: 3. April 2021=2021-04-03`: what is learned is the part after the
sign of equality, in nats a character. Both have as many parameters, the same batches, learning rate and validation set,
on which each stops early: a row compares the best of each. No validation date occurs in training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.theory import Row, at_least, at_most
from experiments.theory.baselines import LSTM
from experiments.theory.figure import drawn
from tfm_jax.config import Optimizer
from tfm_jax.data.synthetic import dates
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.train.losses import Sums, accuracy, cross_entropy
from tfm_jax.train.objectives import LanguageModel
from tfm_jax.train.optim import make_optimizer
from tfm_jax.train.step import TrainState, eval_step, train_step

SIZES = (64, 512, 4096, 32768)
VALIDATION, ROWS = 512, 32
STEPS, EVERY, PATIENCE = 1000, 50, 4
WIDTH, LAYERS, HEADS = 64, 2, 4
OPTIMIZER = Optimizer(schedule="constant", learning_rate=3e-3, warmup_steps=50, clip_norm=1.0)
TRANSFORMER, RECURRENT = "Transformer", "LSTM"
Batch = dict[str, np.ndarray]


class Recurrent(nnx.Module):
    """Layers of LSTM between an embedding and the same matrix as output layer."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.recurrences = nnx.List([LSTM(width, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """B T -> B T V."""
        x = self.embedding(tokens)
        for layer in self.recurrences:
            x = layer(x)
        return self.embedding.attend(x)


@dataclass(frozen=True)
class RecurrentModel:
    """The objective of `Recurrent`, as those of the library are."""

    structure: Any

    def __call__(self, params: Any, batch: dict[str, jax.Array], key: Any) -> Sums:
        """By metric, (sum, weight)."""
        case = (nnx.merge(self.structure, params)(batch["tokens"]), batch["targets"], batch["weights"])
        return {"loss": cross_entropy(*case), "accuracy": accuracy(*case)}


def read() -> tuple[Batch, Batch, int]:
    """Training and validation with a row for each date, and the number of ids there are; 0 is padding."""
    splits = dates(train=max(SIZES), validation=VALIDATION, test=0, seed=0)
    texts = {name: list(map("=".join, zip(*splits[name].columns, strict=True))) for name in ("train", "validation")}
    every = texts["train"] + texts["validation"]
    ids = {letter: i for i, letter in enumerate(sorted(set("".join(every))), start=1)}
    coded = lambda text: np.pad([ids[letter] for letter in text], (0, max(map(len, every)) - len(text)))  # noqa: E731
    found = []
    for own in texts.values():
        tokens = np.stack(list(map(coded, own))).astype(np.int32)
        answer = np.cumsum(tokens == ids["="], axis=1)[:, :-1] > 0
        weights = (answer & (tokens[:, 1:] > 0)).astype(np.float32)
        found.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})
    return *found, len(ids) + 1


def models(vocabulary: int, length: int) -> dict[str, tuple[Any, Any]]:
    """(objective, parameters) of both; the LSTM is as wide as brings its size nearest to the Transformer's."""
    sizes = {"num_layers": LAYERS, "d_model": WIDTH, "d_ff": 4 * WIDTH, "num_heads": HEADS, "max_length": length}
    config = GPTConfig(vocabulary, **sizes, positions="sinusoidal", dropout=Dropout(0.0, 0.0))
    model = build(config)
    count = lambda width: vocabulary * width + LAYERS * (8 * width**2 + 4 * width)  # noqa: E731
    width = min(range(1, 4 * WIDTH), key=lambda width: abs(count(width) - model.num_parameters))
    structure, params = nnx.split(Recurrent(vocabulary, width, rngs=nnx.Rngs(0)))
    return {
        TRANSFORMER: (LanguageModel(model), model.init(jax.random.key(0))),
        RECURRENT: (RecurrentModel(structure), nnx.to_pure_dict(params)),
    }


def best(objective: Any, params: Any, train: Batch, validation: Batch) -> float:
    """The lowest validation loss of a training, which ends when it has not fallen `PATIENCE` times."""
    # the step gives its state away
    params = jax.tree.map(jnp.copy, params)
    opt_state = make_optimizer(OPTIMIZER).init(params)
    state, rng, losses = (
        TrainState(jnp.zeros((), jnp.int32), params, opt_state, jax.random.key(0)),
        np.random.default_rng(0),
        [],
    )
    for step in range(1, STEPS + 1):
        rows = rng.integers(len(train["tokens"]), size=ROWS)
        batch = {name: array[rows] for name, array in train.items()}
        state, _ = train_step(state, batch, optimizer=OPTIMIZER, objective=objective)
        if step % EVERY == 0:
            total, weight = eval_step(state.params, validation, objective=objective)["loss"]
            losses.append(float(total / weight))
            if len(losses) - 1 - int(np.argmin(losses)) == PATIENCE:
                break
    return min(losses)


def measure(figures: Path) -> list[Row]:
    """The signs for the smallest and the largest training set."""
    train, validation, vocabulary = read()
    found = {}
    for name, (objective, params) in models(vocabulary, train["tokens"].shape[1]).items():
        parts = ({key: array[:size] for key, array in train.items()} for size in SIZES)
        found[name] = [best(objective, params, part, validation) for part in parts]
    with drawn(figures / "data_hunger.png") as (axes,):
        for name, losses in found.items():
            axes.loglog(SIZES, losses, "o-", label=name)
        axes.set(xlabel="training set (dates)", ylabel="best validation loss (nats a character)")
        axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        axes.minorticks_off()
        axes.legend()
    gap = np.subtract(found[TRANSFORMER], found[RECURRENT])
    note = "nats a character, early stopping, equal numbers of parameters"
    claim = f"Validation loss of a {TRANSFORMER} less that of an {RECURRENT}"
    return [
        at_least(f"{claim}, {SIZES[0]} dates: above 0", 0.0, float(gap[0]), note=note),
        at_most(f"{claim}, {SIZES[-1]:,} dates: below 0", 0.0, float(gap[-1]), note=note),
    ]
