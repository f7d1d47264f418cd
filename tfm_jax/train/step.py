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
from tfm_jax.train.optim import make_optimizer, make_schedule, state_shapes

Objective = Callable[..., Any]
FLOAT32 = config.Precision()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes. `step` counts updates; `key` is the run's and never changes."""

    step: Any
    params: Any
    opt_state: Any
    key: Any


def abstract_params(model: Model, mesh: jax.sharding.Mesh, *, dtype: str = "float32") -> dict:
    """The parameters' shapes with their shardings over a mesh."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, dtype, sharding=sharding),
        model.shapes,
        parameter_shardings(model.axes, mesh, model.shapes),
    )


def abstract_state(
    model: Model, optimizer: config.Optimizer, mesh: jax.sharding.Mesh, *, precision: config.Precision = FLOAT32
) -> TrainState:
    """The state as shapes and shardings: the optimizer's copies of the parameters are laid out as these are."""
    whole = replicated(mesh)
    opt_state = state_shapes(optimizer, abstract_params(model, mesh, dtype=precision.reduce), otherwise=whole)
    step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
    on_all = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)  # noqa: E731
    return TrainState(on_all(step), abstract_params(model, mesh, dtype=precision.params), opt_state, on_all(key))


def init_state(
    key: Key[Array, ""],
    *,
    model: Model,
    optimizer: config.Optimizer,
    mesh: jax.sharding.Mesh,
    precision: config.Precision = FLOAT32,
) -> TrainState:
    """The state before the first update, born in its shards. Parameters and dropout get keys of their own."""
    return _init(model, optimizer, mesh, precision)(key)


@functools.cache
def _init(model, optimizer, mesh, precision):
    def init(key):
        init_key, dropout_key = jax.random.split(key)
        params = cast(model.init(init_key), precision.params)
        opt_state = make_optimizer(optimizer).init(cast(params, precision.reduce))
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, dropout_key)

    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model, optimizer, mesh, precision=precision))
    return jax.jit(init, out_shardings=shardings)


@functools.partial(
    jax.jit, static_argnames=("optimizer", "objective", "micro_batches", "precision"), donate_argnames="state"
)
def train_step(
    state: TrainState,
    batch: dict[str, Array],
    *,
    optimizer: config.Optimizer,
    objective: Objective,
    micro_batches: int = 1,
    precision: config.Precision = FLOAT32,
) -> tuple[TrainState, dict[str, Array]]:
    """One update on a batch. Returns the new state (the old one is donated and cannot be read again) and metrics.

    micro_batches: parts of the batch whose gradients are made one after another and added up; the update is that of the
    whole batch, but for dropout, which has a key for each. Raises `ValueError` where they do not divide the rows.

    Metrics are float32 scalars: loss and accuracy per target token, target tokens, gradient_norm (before clipping)
    and the learning_rate used. A batch without any target has zero gradients: what still moves is momentum.
    """
    key = jax.random.fold_in(state.key, state.step)
    grads, sums = _gradients(state.params, batch, key, objective, micro_batches, precision)
    total, weight = sums["loss"]
    grads = jax.tree.map(lambda x: x / jnp.maximum(weight, 1.0).astype(x.dtype), grads)
    wide = cast(state.params, precision.reduce)
    updates, opt_state = make_optimizer(optimizer).update(grads, state.opt_state, wide)
    params = cast(optax.apply_updates(wide, updates), precision.params)
    metrics = {name: total / jnp.maximum(weight, 1.0) for name, (total, weight) in sums.items()} | {
        "tokens": sums["loss"][1],
        "gradient_norm": optax.tree.norm(cast(grads, "float32")),
        "learning_rate": make_schedule(optimizer)(state.step + 1),
    }
    return replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics


def _gradients(params, batch, key, objective, micro_batches, precision):
    """The gradient of the sum of losses, in the dtype of reductions, and the objective's sums."""
    # once, not in every micro-batch
    params = cast(params, precision.compute)

    def part(batch, key):
        def loss(params):
            sums = objective(params, batch, key)
            return sums["loss"][0], sums

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return cast(grads, precision.reduce), sums

    if micro_batches == 1:
        return part(batch, key)

    def add(total, numbered):
        index, rows = numbered
        return jax.tree.map(jnp.add, total, part(rows, jax.random.fold_in(key, index))), None

    parts = jax.tree.map(functools.partial(_parts, count=micro_batches), batch)
    first = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts), key)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    return jax.lax.scan(add, zero, (jnp.arange(micro_batches, dtype=jnp.uint32), parts))[0]


def _parts(rows, *, count):
    """Every count-th row from the first, the second, ... on a new first axis: each device keeps the rows it has."""
    if rows.shape[0] % count:
        raise ValueError(f"a batch of {rows.shape[0]} rows does not divide into {count} micro-batches: change one")
    return jnp.moveaxis(rows.reshape(-1, count, *rows.shape[1:]), 1, 0)


def cast(tree: Any, dtype: str) -> Any:
    """The tree with its floating-point arrays in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@functools.partial(jax.jit, static_argnames="objective")
def eval_step(params: dict, batch: dict[str, Array], *, objective: Objective) -> dict[str, tuple[Array, Array]]:
    """The objective's (sum, weight) pairs on a batch, without dropout, in the parameters' dtype."""
    return objective(params, batch, None)
