"""Learning-rate schedules and optimizers, on optax."""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def warmup_linear(peak: float, warmup_steps: int, *, decay_steps: int, final: float) -> Schedule:
    """Learning rate of update n: linear to `peak` at warmup_steps, linear to `final` at decay_steps, then `final`."""
    return _falling(peak, warmup_steps, decay_steps, final, lambda left: left)


def warmup_cosine(peak: float, warmup_steps: int, *, decay_steps: int, final: float) -> Schedule:
    """As `warmup_linear`, falling as half a period of a cosine (Loshchilov and Hutter 2017)."""
    # (1 + cos(pi (1 - left))) / 2, which would cancel near the end
    return _falling(peak, warmup_steps, decay_steps, final, lambda left: jnp.square(jnp.sin(jnp.pi / 2 * left)))


def _falling(peak, warmup_steps, decay_steps, final, shape):
    def schedule(n):
        n = jnp.asarray(n).astype(jnp.float32)
        left = jnp.clip((decay_steps - n) / (decay_steps - warmup_steps), 0.0, 1.0)
        fallen = final + (peak - final) * shape(left)
        return jnp.where(n < warmup_steps, peak * n / max(warmup_steps, 1), fallen).astype(jnp.float32)

    return schedule


def make_schedule(optimizer: config.Optimizer) -> Schedule:
    """The schedule that the configuration names: update number (1 is the first) -> learning rate."""
    sizes = (optimizer.learning_rate, optimizer.warmup_steps)
    end = {"decay_steps": optimizer.decay_steps, "final": optimizer.final_learning_rate}
    match optimizer.schedule:
        case "inverse_sqrt":
            return warmup_inverse_sqrt(*sizes)
        case "constant":
            return warmup_constant(*sizes)
        case "linear":
            return warmup_linear(*sizes, **end)
        case "cosine":
            return warmup_cosine(*sizes, **end)


def make_optimizer(optimizer: config.Optimizer) -> optax.GradientTransformation:
    """Clipping by global norm, if any, then Adam with the schedule; the first update uses the schedule's value at 1.

    What is frozen has no part in the norm.
    """
    schedule = make_schedule(optimizer)
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)

    def clipped(grads, state, params=None):
        return clip.update(_thawed(grads, optimizer.frozen), state, params)

    def update(grads, state, params=None):
        # optax raises a float to the power of an integer count
        with jax.numpy_dtype_promotion("standard"):
            updates, state = adam.update(grads, state, params)
        updates = _with_weight_decay(updates, params, optimizer)
        # Adam leaves a zero gradient alone, weight decay does not
        return _by_layer(_thawed(updates, optimizer.frozen), optimizer.layer_decay), state

    return optax.chain(
        optax.GradientTransformation(clip.init, clipped),
        optax.GradientTransformation(adam.init, update),
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )


def check_patterns(optimizer: config.Optimizer, shapes: dict) -> None:
    """Raise `ValueError` for a pattern of optimizer.frozen that fits no parameter of a tree of shapes."""
    names = [name for path, x in jax.tree_util.tree_leaves_with_path(shapes) for name in _names(path, x)]
    for pattern in optimizer.frozen:
        if not fnmatch.filter(names, pattern):
            some = ", ".join(names[:: max(1, len(names) // 8)])
            raise ValueError(f"optimizer.frozen has {pattern!r}, which fits no parameter; some are {some}")


def _thawed(updates: Any, frozen: tuple[str, ...]) -> Any:
    """Zeros for what is frozen, whatever stands there."""

    def thawed(path, x):
        free = _unless_named(path, x, frozen)
        return x if free is None else jnp.where(free, x, jnp.zeros((), x.dtype))

    return jax.tree_util.tree_map_with_path(thawed, updates) if frozen else updates


def _with_weight_decay(updates: Any, params: Any, optimizer: config.Optimizer) -> Any:
    def decayed(path, x, param):
        decays, step = _unless_named(path, param, optimizer.no_decay), optimizer.weight_decay * param
        return x + (step if decays is None else jnp.where(decays, step, jnp.zeros((), step.dtype)))

    return jax.tree_util.tree_map_with_path(decayed, updates, params) if optimizer.weight_decay else updates


def _by_layer(updates: Any, decay: float) -> Any:
    """Times decay ** n, where n - 1 layers of its stack stand above.

    Below the layers n is one more than there are of them; below two stacks, than there are of the deeper one.
    """
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    depths = {path[0].key: x.shape[0] for path, x in leaves if _is_stacked(path)}
    deepest = max(depths.values(), default=0)

    def scaled(path, x):
        if _is_stacked(path):
            return x * _along_first(decay ** np.arange(x.shape[0], 0, -1.0), x).astype(x.dtype)
        at_the_bottom = any("embedding" in key.key or key.key == "position_bias" for key in path)
        below = decay ** (depths.get(path[0].key, deepest) + 1)
        return x * jnp.asarray(below, x.dtype) if at_the_bottom else x

    return updates if decay == 1.0 else jax.tree_util.tree_map_with_path(scaled, updates)


def _is_stacked(path: Any) -> bool:
    return any(key.key == "layers" for key in path)


def _names(path: Any, x: Array | jax.ShapeDtypeStruct) -> list[str]:
    """The dotted name of a parameter, or one for each layer of a stack's."""
    keys = [str(key.key) for key in path]
    if not _is_stacked(path):
        return [".".join(keys)]
    at = keys.index("layers") + 1
    return [".".join([*keys[:at], str(layer), *keys[at:]]) for layer in range(x.shape[0])]


def _unless_named(path: Any, x: Array, patterns: tuple[str, ...]) -> Array | None:
    """False where a pattern fits the name and True elsewhere, of as many axes as the array; None where all is True."""
    free = [not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in _names(path, x)]
    return None if all(free) else _along_first(np.array(free), x)


def _along_first(values: np.ndarray, x: Array) -> Array:
    return jnp.asarray(values).reshape(-1, *(1,) * (x.ndim - 1))
