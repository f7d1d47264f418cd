"""Learning-rate schedules and optimizers, on optax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tfm_jax import config

Schedule = Callable[[Array | int], Array]


def warmup_inverse_sqrt(peak: float, warmup_steps: int) -> Schedule:
    """Learning rate of update n = 1, 2, ...: linear to `peak` at n = warmup_steps, then peak * sqrt(warmup_steps / n).

    Vaswani et al. (2017), eq. 3, d_model ** -0.5 * min(n ** -0.5, n * warmup ** -1.5), is this with
    peak = (d_model * warmup) ** -0.5. At n = 0 it is 0; without warm-up it is peak / sqrt(n), peak at n = 0.
    """
    warmup = max(warmup_steps, 1)

    def schedule(n):
        n = jnp.asarray(n).astype(jnp.float32)
        decayed = jnp.sqrt(warmup / jnp.maximum(n, 1.0))
        return jnp.float32(peak) * (jnp.minimum(n / warmup, decayed) if warmup_steps else decayed)

    return schedule


def warmup_constant(peak: float, warmup_steps: int) -> Schedule:
    """Learning rate of update n: linear to `peak` at n = warmup_steps, then `peak`."""

    def schedule(n):
        n = jnp.asarray(n).astype(jnp.float32)
        return jnp.float32(peak) * (jnp.minimum(n / warmup_steps, 1.0) if warmup_steps else jnp.ones_like(n))

    return schedule


def make_schedule(optimizer: config.Optimizer) -> Schedule:
    """The schedule that the configuration names: update number (1 is the first) -> learning rate."""
    make = {"inverse_sqrt": warmup_inverse_sqrt, "constant": warmup_constant}[optimizer.schedule]
    return make(optimizer.learning_rate, optimizer.warmup_steps)


def make_optimizer(optimizer: config.Optimizer) -> optax.GradientTransformation:
    """Clipping by global norm, if any, then Adam with the schedule; the first update uses the schedule's value at 1."""
    schedule = make_schedule(optimizer)
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)

    def update(grads, state, params=None):
        # optax raises a float to the power of an integer count
        with jax.numpy_dtype_promotion("standard"):
            return adam.update(grads, state, params)

    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)
    return optax.chain(
        clip,
        optax.GradientTransformation(adam.init, update),
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )
