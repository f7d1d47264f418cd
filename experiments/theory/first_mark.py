"""Which of two marks comes first? A task that needs order and nothing else: part of the claim `permutations`.

A model without positions gives a row and its twin, where the marks are exchanged, one and the same answer. On rows with
their twins it is right exactly half of the time, trained or not.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory.learning import trained
from tfm_jax.models import BERTConfig, build
from tfm_jax.models.architecture import Dropout
from tfm_jax.train.objectives import Labels

LENGTH, VOCABULARY, LAYERS, ROWS, STEPS = 17, 29, 2, 32, 400
TAUGHT = ("none", "sinusoidal", "rope")
"""Kinds of positions whose models learn the task."""
START, FIRST, SECOND = 0, 1, 2
"""Tokens that are no filling: where the answer is read, and the two marks."""
CONFIG = BERTConfig(
    VOCABULARY,
    num_layers=LAYERS,
    max_length=LENGTH,
    d_model=32,
    d_ff=64,
    num_heads=4,
    token_types=0,
    norm_eps=1e-5,
    dropout=Dropout(embedding=0.0, residual=0.0, attention=0.0),
)


def marked(key: jax.Array) -> dict[str, jax.Array]:
    """Rows with two marks at random places, and whether the first of them comes first."""
    filling, places = jax.random.split(key)
    tokens = jax.random.randint(filling, (ROWS, LENGTH), SECOND + 1, VOCABULARY, jnp.int32)
    order = jax.vmap(lambda key: jax.random.permutation(key, LENGTH - 1))(jax.random.split(places, ROWS)) + 1
    each = jnp.arange(ROWS)
    tokens = tokens.at[:, 0].set(START).at[each, order[:, 0]].set(FIRST).at[each, order[:, 1]].set(SECOND)
    return {"tokens": tokens, "labels": (order[:, 0] < order[:, 1]).astype(jnp.int32), "label_weights": jnp.ones(ROWS)}


def twins(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A batch with its marks exchanged."""
    tokens = batch["tokens"]
    exchanged = jnp.where(tokens == FIRST, SECOND, jnp.where(tokens == SECOND, FIRST, tokens))
    return batch | {"tokens": exchanged, "labels": 1 - batch["labels"]}


def learned_order(positions: str) -> tuple[np.ndarray, float]:
    """Losses in training, and the share of right answers on new rows and their twins."""
    model = build(replace(CONFIG, positions=positions, head="sequence", labels=("second", "first")))
    objective = Labels(model)

    def loss(params, key):
        total, weight = objective(params, marked(key), None)["loss"]
        return total / weight

    params, losses = trained(loss, model.init(jax.random.key(0)), steps=STEPS, learning_rate=1e-3)

    @jax.jit
    def right(key):
        both = [objective(params, batch, None)["accuracy"][0] for batch in (marked(key), twins(marked(key)))]
        return (both[0] + both[1]) / (2 * ROWS)

    return np.asarray(losses), float(np.mean([right(key) for key in jax.random.split(jax.random.key(9), 32)]))
