"""Optimizers, on optax: the rules, what decays, what is frozen, rates by layer, and the layout of their state."""

import fnmatch
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array
from optax import contrib

from tfm_jax import config
from tfm_jax.train.schedules import make_schedule

HIDDEN = ("query", "key", "value", "output", "gate", "up", "down")  # matrices between hidden states, by their last name


def make_optimizer(optimizer: config.Optimizer) -> optax.GradientTransformation:
    """Clipping by global norm, if any, then the rule and the schedule; the first update uses the schedule's value at 1.

    What is frozen has no part in the norm. Each layer of a stack is updated as if it were no part of one. Parameters,
    which must be of the gradients' dtype, give it to the state and the updates.
    """
    schedule, rule = make_schedule(optimizer), _rule(optimizer)
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)

    def clipped(grads, state, params=None):
        return clip.update(_thawed(grads, optimizer.frozen), state, params)

    def update(grads, state, params=None):
        # optax raises a float to the power of an integer count
        with jax.numpy_dtype_promotion("standard"):
            updates, state = rule.update(grads, state, params)
        updates = _with_weight_decay(updates, params, optimizer)
        # a rule leaves a zero gradient alone, weight decay does not
        return _by_layer(_thawed(updates, optimizer.frozen), optimizer.layer_decay), state

    return optax.chain(
        optax.GradientTransformation(clip.init, clipped),
        optax.GradientTransformation(rule.init, update),
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )


def _rule(optimizer: config.Optimizer) -> optax.GradientTransformation:
    """From gradients to updates, which the learning rate multiplies."""
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    match optimizer.name:
        case "adam" | "adamw":
            return adam
        case "adafactor":
            return _adafactor()
        case "lion":
            return optax.scale_by_lion(b1=optimizer.b1, b2=optimizer.b2)
        case "muon":
            return _muon(optimizer.momentum, elsewhere=adam)
        case "sgd":
            return optax.trace(optimizer.momentum) if optimizer.momentum else optax.identity()


def _muon(momentum: float, *, elsewhere: optax.GradientTransformation) -> optax.GradientTransformation:
    """For each hidden matrix five Newton-Schulz iterations on its momentum (Jordan et al. 2024), else another rule.

    The momentum is Nesterov's, with the correction of bias of Dozat (2016). Times 0.2 sqrt(the longer side) updates are
    about as large, root mean square, as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training").
    """

    def sides(tree):
        return jax.tree_util.tree_map_with_path(lambda path, x: contrib.MuonDimensionNumbers(*_sides(path, x)), tree)

    def scaled(path, x):
        return x * jnp.asarray(0.2 * max(_lengths(path, x)) ** 0.5, x.dtype)

    # the state holds them, and optax's own, of Python's floats, would have x64's dtype
    coefficients = np.array([3.4445, -4.7750, 2.0315], np.float32)
    matrices = optax.chain(
        contrib.scale_by_muon(coefficients, beta=momentum, weight_dimension_numbers=sides),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates)),
    )
    kind = lambda path, _: "hidden" if path[-1].key in HIDDEN else "other"  # noqa: E731
    rules = {"hidden": matrices, "other": elsewhere}
    return optax.partition(rules, lambda tree: jax.tree_util.tree_map_with_path(kind, tree))


def _adafactor() -> optax.GradientTransformation:
    """Algorithms 4 and 5 of Shazeer and Stern (2018) with the constants of 6; rho is the learning rate.

    All that has two sides is factored, in each layer apart. The state is optax's `FactoredState`.
    """
    moments = optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=1, epsilon=1e-30)
    sizes = optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms(1e-3))
    axes = optax.FactoredState(None, 0, 0, 0)

    def begin(path, param):
        start = jax.vmap(moments.init, out_axes=axes) if _is_stacked(path) else moments.init
        return tuple(start(_as_matrix(path, param)))[1:]

    def step(grad, state, param):
        update, state = moments.update(grad, state, param)
        return sizes.update(update, sizes.init(param), param)[0], state

    def init(params):
        states = jax.tree_util.tree_map_with_path(begin, params)
        return optax.FactoredState(jnp.zeros((), jnp.int32), *_apart(states, params, 3))

    def update(grads, state, params=None):
        def updated(path, grad, param, *old):
            one = jax.vmap(step, (0, axes, 0), (0, axes)) if _is_stacked(path) else step
            old = optax.FactoredState(state.count, *old)
            new, (_, *kept) = one(_as_matrix(path, grad), old, _as_matrix(path, param))
            return new.reshape(grad.shape), *kept

        new = jax.tree_util.tree_map_with_path(updated, grads, params, *state[1:])
        updates, *kept = _apart(new, grads, 4)
        return updates, optax.FactoredState(optax.safe_increment(state.count), *kept)

    return optax.GradientTransformation(init, update)


def _apart(tuples: Any, tree: Any, count: int) -> tuple:
    """From a tuple at each leaf of a tree to a tuple of trees."""
    return jax.tree.transpose(jax.tree.structure(tree), jax.tree.structure((0,) * count), tuples)


def state_shapes(optimizer: config.Optimizer, params: Any, *, otherwise: Sharding) -> Any:
    """The optimizer's state as shapes with shardings, for parameters given so, with a `NamedSharding` each.

    What has a parameter's shape is laid out as the parameter is, means over one side of a matrix as the other side;
    counts and all else have the sharding `otherwise`.
    """
    owners = dict(jax.tree_util.tree_leaves_with_path(params))

    def laid_out(path, x):
        start = next((i for i in range(len(path)) if path[i:] in owners), None)
        sharding = None if start is None else _sharding_like(path[start:], owners[path[start:]], x, path[start - 1])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=otherwise if sharding is None else sharding)

    return jax.tree_util.tree_map_with_path(laid_out, jax.eval_shape(make_optimizer(optimizer).init, params))


def _sharding_like(path: Any, param: jax.ShapeDtypeStruct, x: jax.ShapeDtypeStruct, field: Any) -> Sharding | None:
    """The sharding of a parameter for an array of the state that is as large, or as large as one of its sides."""
    if x.shape == param.shape:
        return param.sharding
    (rows, columns), lengths = _sides(path, param), _lengths(path, param)
    # optax has the shorter side, or the first of two that are equal, in v_row, what has one side in v
    side = rows if not columns or (lengths[0] <= lengths[1]) == (field.name == "v_row") else columns
    layers = int(_is_stacked(path))
    if x.shape[layers:] != (math.prod(param.shape[axis] for axis in side),):
        return None
    spec = (*param.sharding.spec, *[None] * param.ndim)
    # the axes of a side become one, which is cut as the first of them
    return NamedSharding(param.sharding.mesh, PartitionSpec(*spec[:layers], spec[side[0]]))


def check_patterns(optimizer: config.Optimizer, shapes: dict) -> None:
    """Raise `ValueError` for a pattern of optimizer.frozen that fits no parameter of a tree of shapes.

    Or one of optimizer.no_decay, except for those that stand there by default, for every family.
    """
    names = [name for path, x in jax.tree_util.tree_leaves_with_path(shapes) for name in _names(path, x)]
    given = [("frozen", pattern) for pattern in optimizer.frozen]
    given += [("no_decay", pattern) for pattern in optimizer.no_decay if pattern not in config.Optimizer.no_decay]
    for field, pattern in given:
        if not fnmatch.filter(names, pattern):
            some = ", ".join(names[:: max(1, len(names) // 8)])
            raise ValueError(f"optimizer.{field} has {pattern!r}, which fits no parameter; some are {some}")


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


def _sides(path: Any, x: Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of an array that are the rows of a matrix, or of each layer's, and those that are its columns.

    Those of attention are D x (N H) and (N H) x D. Biases are vectors, all rows, also where they have two axes.
    """
    name, axes = path[-1].key, tuple(range(int(_is_stacked(path)), x.ndim))
    rows = len(axes) if name.endswith("bias") else len(axes) - 1 if name == "output" else 1
    return axes[:rows], axes[rows:]


def _lengths(path: Any, x: Array | jax.ShapeDtypeStruct) -> list[int]:
    rows, columns = _sides(path, x)
    return [math.prod(x.shape[axis] for axis in side) for side in ((rows, columns) if columns else (rows,))]


def _as_matrix(path: Any, x: Array) -> Array:
    return x.reshape(*x.shape[: int(_is_stacked(path))], *_lengths(path, x))


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
