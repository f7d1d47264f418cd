"""Small trainings that several claims share: one jitted loop over updates, and batches that are made on the device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from tfm_jax.config import Optimizer
from tfm_jax.models import Model
from tfm_jax.train.objectives import LanguageModel
from tfm_jax.train.optim import make_optimizer

Batch = dict[str, Array]
Loss = Callable[[Any, Key[Array, ""]], Float[Array, ""]]


def trained(
    loss: Loss, params: Any, *, steps: int, learning_rate: float, warmup_steps: int = 0, seed: int = 0
) -> tuple[Any, Float[Array, " steps"]]:
    """Parameters after so many updates of Adam, and the loss before each of them.

    loss(params, key) draws its batch with the key, a new one for each update. The learning rate is constant after a
    linear warm-up of warmup_steps updates. params: nested dicts of float32 arrays; they are not changed.
    """
    options = {"schedule": "constant", "learning_rate": learning_rate, "warmup_steps": warmup_steps}
    optimizer = make_optimizer(Optimizer(**options))

    def update(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def run(params, keys):
        (params, _), losses = jax.lax.scan(update, (params, optimizer.init(params)), keys)
        return params, losses

    return run(params, jax.random.split(jax.random.key(seed), steps))


def language_loss(model: Model, draw: Callable[[Key[Array, ""]], Batch]) -> Loss:
    """The loss of `trained` for a model of one text on batches `draw(key)`: mean cross entropy per target, in nats."""
    objective = LanguageModel(model)

    def loss(params, key):
        total, weight = objective(params, draw(key), None)["loss"]
        return total / weight

    return loss


def registers(key: Key[Array, ""], *, rows: int, length: int, names: int, values: int) -> Batch:
    """Assignments in random order; to predict at each, the value that it replaces.

    Token r * values + v assigns v to register r, and its target is the value of the latest assignment to r before it
    (weight 0 where there is none): the answer needs the order of what is alike. Half of the latest assignments are at
    most 0.7 * names tokens away, so a longer row is no harder. tokens, targets and weights are `rows length`.
    """
    name_key, value_key = jax.random.split(key)
    name_BT = jax.random.randint(name_key, (rows, length), 0, names, jnp.int32)
    value_BT = jax.random.randint(value_key, (rows, length), 0, values, jnp.int32)

    def step(held_BR, now):
        name_B, value_B = now
        each = jnp.arange(rows)
        return held_BR.at[each, name_B].set(value_B), held_BR[each, name_B]

    held_BR = jnp.full((rows, names), -1, jnp.int32)
    _, before_TB = jax.lax.scan(step, held_BR, (name_BT.T, value_BT.T))
    weights = (before_TB.T >= 0).astype(jnp.float32)
    return {"tokens": name_BT * values + value_BT, "targets": jnp.maximum(before_TB.T, 0), "weights": weights}


def walks(key: Key[Array, ""], *, rows: int, length: int, states: int) -> Batch:
    """Random walks whose every step is a coin's: from s to 2 s or 2 s + 1, modulo the number of states.

    Each target is the token after; given the token before it, its entropy is ln 2 nats, and no model that reads the
    past alone can have a smaller expected loss. tokens, targets and weights are `rows length`.
    """
    start_key, coin_key = jax.random.split(key)
    start_B = jax.random.randint(start_key, (rows,), 0, states, jnp.int32)
    coin_TB = jax.random.randint(coin_key, (length, rows), 0, 2, jnp.int32)
    step = lambda state, coin: ((2 * state + coin) % states,) * 2  # noqa: E731
    _, after_TB = jax.lax.scan(step, start_B, coin_TB)
    after_BT = after_TB.T
    tokens = jnp.concatenate([start_B[:, None], after_BT[:, :-1]], axis=1)
    return {"tokens": tokens, "targets": after_BT, "weights": jnp.ones((rows, length), jnp.float32)}


def chains(key: Key[Array, ""], *, rows: int, length: int, symbols: int, free: float) -> Batch:
    """Symbols that are the sum of the two before, modulo their number, but for a share `free` that is any symbol.

    Each target is the symbol after. One symbol says nothing of the next, two nearly all. tokens, targets and weights
    are `rows length`.
    """
    symbol_key, free_key = jax.random.split(key)
    any_TB = jax.random.randint(symbol_key, (length + 1, rows), 0, symbols, jnp.int32)
    free_TB = jax.random.bernoulli(free_key, free, any_TB.shape)

    def step(before, now):
        symbol_B = jnp.where(now[1], now[0], (before[0] + before[1]) % symbols)
        return (before[1], symbol_B), symbol_B

    _, symbol_TB = jax.lax.scan(step, (any_TB[0], any_TB[1]), (any_TB, free_TB))
    tokens = symbol_TB.T
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": jnp.ones((rows, length), jnp.float32)}


def chain_entropy(symbols: int, free: float) -> float:
    """Of the next symbol of `chains`, given the two before. Unit: nats."""
    other = free / symbols
    likely = 1.0 - (symbols - 1) * other
    return -likely * math.log(likely) - (symbols - 1) * other * math.log(other)
