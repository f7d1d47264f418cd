"""The train step and the evaluation step: state in, state out, jitted over a mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from tfm_jax import config
from tfm_jax.models import Model
from tfm_jax.sharding import parameter_shardings, replicated
from tfm_jax.train.optim import make_optimizer, make_schedule

Objective = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes. `step` counts updates; `key` is the run's and never changes."""

    step: Any
    params: Any
    opt_state: Any
    key: Any


def abstract_params(model: Model, mesh: jax.sharding.Mesh) -> dict:
    """The parameters' shapes with their shardings over a mesh."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        model.shapes,
        parameter_shardings(model.axes, mesh, model.shapes),
    )


def abstract_state(model: Model, optimizer: config.Optimizer, mesh: jax.sharding.Mesh) -> TrainState:
    """The state as shapes and shardings: the optimizer's copies of the parameters are laid out as these are."""
    params = abstract_params(model, mesh)
    whole = replicated(mesh)
    on_all = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)  # noqa: E731
    opt_state = optax.tree.map_params(
        make_optimizer(optimizer),
        lambda _, param: param,
        jax.eval_shape(make_optimizer(optimizer).init, params),
        params,
        transform_non_params=on_all,
    )
    step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
    return TrainState(on_all(step), params, opt_state, on_all(key))


def init_state(
    key: Key[Array, ""], *, model: Model, optimizer: config.Optimizer, mesh: jax.sharding.Mesh
) -> TrainState:
    """The state before the first update, born in its shards. Parameters and dropout get keys of their own."""
    return _init(model, optimizer, mesh)(key)


@functools.cache
def _init(model, optimizer, mesh):
    def init(key):
        init_key, dropout_key = jax.random.split(key)
        params = model.init(init_key)
        return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(optimizer).init(params), dropout_key)

    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh))
    return jax.jit(init, out_shardings=shardings)


@functools.partial(jax.jit, static_argnames=("optimizer", "objective"), donate_argnames="state")
def train_step(
    state: TrainState, batch: dict[str, Array], *, optimizer: config.Optimizer, objective: Objective
) -> tuple[TrainState, dict[str, Array]]:
    """One update on a batch. Returns the new state (the old one is donated and cannot be read again) and metrics.

    Metrics are float32 scalars: loss and accuracy per target token, target tokens, gradient_norm (before clipping)
    and the learning_rate used. A batch without any target has zero gradients: what still moves is Adam's momentum.
    """
    key = jax.random.fold_in(state.key, state.step)

    def mean_loss(params):
        sums = objective(params, batch, key)
        total, weight = sums["loss"]
        return total / jnp.maximum(weight, 1.0), sums

    (_, sums), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    updates, opt_state = make_optimizer(optimizer).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {name: total / jnp.maximum(weight, 1.0) for name, (total, weight) in sums.items()} | {
        "tokens": sums["loss"][1],
        "gradient_norm": optax.tree.norm(grads),
        "learning_rate": make_schedule(optimizer)(state.step + 1),
    }
    return replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics


@functools.partial(jax.jit, static_argnames="objective")
def eval_step(params: dict, batch: dict[str, Array], *, objective: Objective) -> dict[str, tuple[Array, Array]]:
    """The objective's (sum, weight) pairs on a batch, without dropout."""
    return objective(params, batch, None)
