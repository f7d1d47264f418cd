"""Updates against the papers' algorithms in float64, what decays, what is frozen or slowed down, where states live."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.train.test_schedules import FALLING, closed_form
from tfm_jax.config import Optimizer
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.train.optim import check_patterns, make_optimizer, state_shapes


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ----------------------------------------------------------------------------------------------------------------------
# The rules in float64, each on one array that is no part of a stack: update n from the gradient g, the parameter p and
# what the rule remembers of that array
# ----------------------------------------------------------------------------------------------------------------------


def adam(settings, n, g, p, *, memory, matrix):
    """Algorithm 1 of Kingma and Ba (2015)."""
    memory["m"] = settings.b1 * memory.get("m", 0.0) + (1 - settings.b1) * g
    memory["v"] = settings.b2 * memory.get("v", 0.0) + (1 - settings.b2) * g**2
    return memory["m"] / (1 - settings.b1**n) / (np.sqrt(memory["v"] / (1 - settings.b2**n)) + settings.eps)


def lion(settings, n, g, p, *, memory, matrix):
    """Algorithm 2 of Chen et al. (2023)."""
    m = memory.get("m", 0.0)
    memory["m"] = settings.b2 * m + (1 - settings.b2) * g
    return np.sign(settings.b1 * m + (1 - settings.b1) * g)


def sgd(settings, n, g, p, *, memory, matrix):
    memory["m"] = settings.momentum * memory.get("m", 0.0) + g
    return memory["m"]


def adafactor(settings, n, g, p, *, memory, matrix):
    """Algorithms 4 and 5 of Shazeer and Stern (2018) with the constants of their algorithm 6, sums as they stand."""
    decay, square = 1 - n**-0.8, g**2 + 1e-30
    if matrix is None:
        memory["v"] = decay * memory.get("v", 0.0) + (1 - decay) * square
        u = g / np.sqrt(memory["v"])
    else:
        square = square.reshape(matrix)
        memory["r"] = decay * memory.get("r", 0.0) + (1 - decay) * square.sum(axis=1)
        memory["c"] = decay * memory.get("c", 0.0) + (1 - decay) * square.sum(axis=0)
        u = g / np.sqrt(np.outer(memory["r"], memory["c"]) / memory["r"].sum()).reshape(g.shape)
    rms = lambda x: np.sqrt((x**2).mean())  # noqa: E731
    return max(1e-3, rms(p)) * u / max(1.0, rms(u))


def muon(settings, n, g, p, *, memory, matrix):
    """Jordan et al. (2024) with Nesterov momentum as Dozat (2016) corrects it, at the scale of Liu et al. (2025)."""
    if matrix is None or memory["name"].split(".")[-1] not in ("query", "output", "up", "down"):
        return adam(settings, n, g, p, memory=memory, matrix=matrix)
    beta = settings.momentum
    memory["m"] = beta * memory.get("m", 0.0) + (1 - beta) * g
    x = (beta * memory["m"] / (1 - beta ** (n + 1)) + (1 - beta) * g / (1 - beta**n)).reshape(matrix)
    x = x / (np.sqrt((x**2).sum()) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return 0.2 * max(matrix) ** 0.5 * x.reshape(g.shape)


BY_HAND = {"adam": adam, "adamw": adam, "adafactor": adafactor, "lion": lion, "muon": muon, "sgd": sgd}
# rows and columns of what is a matrix, in each layer of a stack
MATRICES = {
    "embedding.table": (5, 3),
    "encoder.layers.attention.query": (3, 77),
    "encoder.layers.attention.output": (77, 3),
    "encoder.layers.feed_forward.up": (3, 13),
    "encoder.layers.feed_forward.down": (13, 3),
    "encoder.layers.attention.relative_key": (5, 11),
    "encoder.position_bias.table": (17, 7),
    "position_embedding.table": (5, 3),
    "classifier.dense": (3, 2),
    "up": (3, 5),
    "w": (3, 5),
}


def by_hand(settings, gradients, params, *, decays=None, free=None, slowed=None):
    """Parameters after an update with each gradient: clipped by the global norm, with decoupled decay, in float64.

    The decay is that of Loshchilov and Hutter (2019), algorithm 2. Every layer of a stack is an array of its own. By
    name: decays, 1 where weights decay; free, 1 where parameters move; slowed, the share of the learning rate.
    """
    one = lambda given: {k: 1.0 for k in params} | (given or {})  # noqa: E731
    decays, free, slowed, memories = one(decays), one(free), one(slowed), {}

    def update(name, n, g, p):
        rule = functools.partial(BY_HAND[settings.name], settings, n, matrix=MATRICES.get(name))
        remembered = lambda layer: memories.setdefault((name, layer), {"name": name})  # noqa: E731
        if ".layers." not in name:
            return rule(g, p, memory=remembered(None))
        return np.stack([rule(g[i], p[i], memory=remembered(i)) for i in range(len(g))])

    for n, gradient in enumerate(gradients, start=1):
        gradient = {k: free[k] * g for k, g in gradient.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        shrink = 1.0 if settings.clip_norm is None else min(1.0, settings.clip_norm / norm)
        sizes = {"peak": settings.learning_rate, "warmup": settings.warmup_steps, "stable": settings.stable_steps}
        end = {"end": settings.decay_steps, "final": settings.final_learning_rate}
        rate = closed_form(settings.schedule, n, **sizes, **end)
        for k, g in gradient.items():
            step = update(k, n, shrink * g, params[k]) + settings.weight_decay * decays[k] * params[k]
            params = params | {k: params[k] - rate * slowed[k] * free[k] * step}
    return params


def gradients(updates, scale=1.0):
    rng = np.random.default_rng(0)
    return [{k: scale * rng.standard_normal(s) for k, s in (("w", (3, 5)), ("b", (7,)))} for _ in range(updates)]


@pytest.mark.parametrize("clip_norm", [None, 0.5, 100.0])
def test_updates_are_adam_written_out(clip_norm):
    """I24, B50: update n uses schedule(n), the first one schedule(1) and not schedule(0) = 0."""
    # a large eps, so that the length of a clipped gradient is seen in the update
    settings = Optimizer(learning_rate=0.25, warmup_steps=3, b1=0.8, b2=0.95, eps=0.01, clip_norm=clip_norm)
    optimizer, grads = make_optimizer(settings), gradients(5)
    start = {k: np.ones_like(g) for k, g in grads[0].items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for n, gradient in enumerate(grads, start=1):
        updates, state = update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient), state, params)
        params = optax.apply_updates(params, updates)
        expected = by_hand(settings, grads[:n], start)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), params, expected)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_a_gradient_within_the_norm_is_left_alone():
    """Clipping keeps the direction: a gradient ten times too long and the same at its limit give equal moments."""
    settings = Optimizer(clip_norm=2.0)
    (long,), optimizer = gradients(1, scale=10.0), make_optimizer(settings)
    norm = np.sqrt(sum((g**2).sum() for g in long.values()))
    states = []
    for factor in (1.0, 2.0 / norm, 1.0 / norm):
        grads = jax.tree.map(lambda g, factor=factor: jnp.asarray(factor * g, jnp.float32), long)
        _, state = optimizer.update(grads, optimizer.init(grads), grads)
        states.append(optax.tree.get(state, "mu"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8), states[0], states[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, 2 * y, rtol=1e-6, atol=1e-8), states[0], states[2])


# ----------------------------------------------------------------------------------------------------------------------
# Parameters with names: weight decay, what is frozen, rates by layer
# ----------------------------------------------------------------------------------------------------------------------

# two layers, width 3, 7 heads of 11
STACKED = {
    "embedding.table": (5, 3),
    "encoder.layers.attention.query": (2, 3, 7, 11),
    "encoder.layers.attention.query_bias": (2, 7, 11),
    "encoder.layers.attention.relative_key": (2, 5, 11),
    "encoder.layers.attention.output": (2, 7, 11, 3),
    "encoder.layers.feed_forward.up": (2, 3, 13),
    "encoder.layers.feed_forward.down": (2, 13, 3),
    "encoder.layers.norm.scale": (2, 3),
    "encoder.position_bias.table": (17, 7),
    "encoder.norm.scale": (3,),
    "classifier.dense": (3, 2),
    "classifier.dense_bias": (2,),
}
FLAT = {"up": (3, 5), "up_bias": (5,), "norm.scale": (3,), "position_embedding.table": (5, 3)}
SETTINGS = Optimizer(
    name="adamw",
    schedule="linear",
    learning_rate=0.25,
    warmup_steps=2,
    decay_steps=7,
    final_learning_rate=0.05,
    b1=0.8,
    b2=0.95,
    eps=0.01,
    clip_norm=2.0,
    weight_decay=0.3,
)
OTHER = replace(SETTINGS, b1=0.9, b2=0.98, eps=1e-9)
RULES = {
    "adam": replace(SETTINGS, name="adam", weight_decay=0.0),
    "adamw": SETTINGS,
    "adafactor": replace(OTHER, name="adafactor"),
    "lion": replace(OTHER, name="lion", b1=0.8, b2=0.95),
    "muon": replace(SETTINGS, name="muon", momentum=0.9),
    "sgd": replace(OTHER, name="sgd"),
    "sgd with momentum": replace(OTHER, name="sgd", momentum=0.9),
}
rules = pytest.mark.parametrize("rule", RULES)
# five Newton-Schulz iterations multiply the rounding errors of small singular values by up to 3.4445 ** 5
ROUNDED = {"rtol": 2e-4, "atol": 2e-5}
# what the default patterns spare, written out
SPARED = {
    "encoder.layers.attention.query_bias": 0.0,
    "encoder.layers.attention.relative_key": 0.0,
    "encoder.layers.norm.scale": 0.0,
    "encoder.position_bias.table": 0.0,
    "encoder.norm.scale": 0.0,
    "classifier.dense_bias": 0.0,
    "up_bias": 0.0,
    "norm.scale": 0.0,
    "position_embedding.table": 0.0,
}


def nested(flat):
    """The tree of arrays with dotted names, in float32."""
    tree: dict = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = jnp.asarray(value, jnp.float32)
    return tree


def names_of(tree):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def flattened(tree):
    return dict(zip(names_of(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def random_trees(shapes, count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [{name: scale * rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(count)]


@functools.cache
def update_of(settings):
    """Compiled once for each settings and shapes."""
    return jax.jit(make_optimizer(settings).update)


def trained(settings, start, grads):
    """(parameters, optimizer state) after an update with each gradient."""
    params = nested(start)
    state = make_optimizer(settings).init(params)
    for gradient in grads:
        updates, state = update_of(settings)(nested(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return flattened(params), state


def assert_close(found, expected, *, rtol=2e-5, atol=2e-6):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


@rules
def test_updates_are_the_rule_written_out(rule):
    """One, and three: the rule on each layer apart, decay beside it, times the schedule; B52: counts are updates."""
    settings = RULES[rule]
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 3, seed=1)
    for count in (1, 3):
        found, state = trained(settings, start, grads[:count])
        expected = by_hand(settings, grads[:count], start, decays=SPARED)
        assert_close(found, expected, **(ROUNDED if rule == "muon" else {}))
        counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
        assert counts and all(leaf.shape == () and leaf == count for leaf in counts)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_each_layer_is_updated_as_optax_updates_its_matrices(rule):
    """Those of attention as D x (N H) and (N H) x D, biases as vectors: what is not elementwise sees one layer."""
    settings = replace(RULES[rule], schedule="constant", warmup_steps=0, decay_steps=0, final_learning_rate=0.0)
    settings = replace(settings, weight_decay=0.0, clip_norm=None)
    shapes = {"query": (3, 77), "output": (77, 3), "up": (3, 13), "down": (13, 3)}
    if rule == "adafactor":  # of muon's, all else is optax's NAdam
        shapes |= {"query_bias": (77,)}
    names = {name: full for name in shapes for full in STACKED if full.split(".")[-1] == name}
    ours = {full: STACKED[full] for full in names.values()}
    (start,), grads = random_trees(ours, 1), random_trees(ours, 2, seed=1)
    found, _ = trained(settings, start, grads)
    plain = {
        "adafactor": lambda: optax.adafactor(0.25, min_dim_size_to_factor=1),
        "muon": lambda: optax.contrib.muon(0.25, beta=0.9, consistent_rms=0.2),
    }[rule]()
    for layer in range(2):
        cut = lambda tree, i=layer: {  # noqa: E731
            name: jnp.asarray(tree[full][i].reshape(shapes[name]), jnp.float32) for name, full in names.items()
        }
        params = cut(start)
        state, update = plain.init(params), jax.jit(plain.update)
        for gradient in grads:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(cut(gradient), state, params)
            params = optax.apply_updates(params, updates)
        for name, value in cut(found).items():
            np.testing.assert_allclose(value, params[name], rtol=1e-4, atol=1e-5, err_msg=f"{name} {layer}")


def test_muons_updates_are_nearly_orthogonal_and_as_large_as_adamws():
    """Singular values between 0.65 and 1.25, whatever those of the gradient; root mean square about 0.2."""
    settings = replace(RULES["muon"], schedule="constant", decay_steps=0, final_learning_rate=0.0, warmup_steps=0)
    settings = replace(settings, learning_rate=1.0, weight_decay=0.0, clip_norm=None)
    (gradient,) = random_trees({"down": (23, 11), "up": (11, 23)}, 1)
    gradient["down"] *= np.geomspace(1.0, 0.1, 11)  # of very unequal columns
    start = {name: np.zeros_like(g) for name, g in gradient.items()}
    found, _ = trained(settings, start, [gradient])
    for name, update in found.items():
        values = np.linalg.svd(update / (0.2 * 23**0.5), compute_uv=False)
        assert (0.65 < values).all() and (values < 1.25).all(), name
        assert 0.15 < np.sqrt((update**2).mean()) < 0.25 and (update * gradient[name]).sum() < 0


@rules
def test_layers_without_a_stack_are_updated_alike(rule):
    """The layers of a stack, each as a tree without any."""
    settings = replace(RULES[rule], clip_norm=None)
    ours = {name: shape for name, shape in STACKED.items() if ".layers." in name}
    (start,), grads = random_trees(ours, 1), random_trees(ours, 2, seed=1)
    found, _ = trained(settings, start, grads)
    for layer in range(2):
        cut = lambda tree, i=layer: {name.replace(".layers.", ".block."): x[i] for name, x in tree.items()}  # noqa: E731
        alone, _ = trained(settings, cut(start), [cut(gradient) for gradient in grads])
        assert_close(cut(found), alone, **(ROUNDED if rule == "muon" else {"rtol": 1e-5, "atol": 1e-6}))


@rules
def test_a_gradient_ten_times_the_norm_is_one_at_the_norm(rule):
    """Clipping comes before every rule, and to all parameters together."""
    (start,), (gradient,) = random_trees(FLAT, 1), random_trees(FLAT, 1, seed=1)
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    scaled = [{name: factor / norm * g for name, g in gradient.items()} for factor in (20.0, 2.0)]
    (long, _), (limit, _) = (trained(RULES[rule], start, [each]) for each in scaled)
    assert_close(long, limit)


@rules
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_zero_gradient_moves_nothing_at_first(rule, clip_norm):
    """B27: the first update of every rule on zeros is zero, clipped or not, and no number is undefined."""
    settings = replace(RULES[rule], clip_norm=clip_norm, weight_decay=0.0)
    start = {name: np.ones(shape) for name, shape in STACKED.items()}
    found, state = trained(settings, start, [{name: np.zeros(shape) for name, shape in STACKED.items()}])
    assert all((value == 1).all() for value in found.values())
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state))


@rules
def test_dtypes_stay_under_x64(rule):
    """B56: float32 parameters, moments and updates, int32 counts; the same numbers."""
    settings = replace(RULES[rule], layer_decay=0.5, frozen=("encoder.layers.0.*",))
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 2, seed=1)
    expected, usual = trained(settings, start, grads)
    with jax.enable_x64(True):
        found, state = trained(settings, start, grads)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((found, state))} == {"float32", "int32"}
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, usual)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


@rules
def test_the_state_has_the_dtype_of_the_parameters(rule):
    """bfloat16 in, bfloat16 out: an update gives back a state of the types that it took."""
    optimizer, half = make_optimizer(RULES[rule]), lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    params = half(nested(random_trees(STACKED, 1)[0]))
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert after == state and {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
    # the coefficients of muon's iterations are constants
    numbers = [x.dtype for x in jax.tree.leaves(state) if x.shape != (3,) and x.dtype != jnp.int32]
    assert set(numbers) <= {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_updates_are_adamw_written_out(schedule, clip_norm):
    """One, and five: decay beside the moments and outside the clipped norm, times the schedule; biases have none."""
    end = {} if schedule in FALLING else {"decay_steps": 0, "final_learning_rate": 0.0}
    settings = replace(SETTINGS, schedule=schedule, clip_norm=clip_norm, **end)
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 5, seed=1)
    for count in (1, 5):
        found, state = trained(settings, start, grads[:count])
        assert_close(found, by_hand(settings, grads[:count], start, decays=SPARED))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("shapes", [STACKED, FLAT], ids=["stacked", "flat"])
@pytest.mark.parametrize("rule", [name for name in RULES if name != "adam"])
def test_a_zero_gradient_with_weight_decay_moves_what_decays(rule, shapes):
    """By rate * weight_decay of itself; B27: what has none stays bit for bit."""
    (start,), nothing = random_trees(shapes, 1), [{name: np.zeros(shape) for name, shape in shapes.items()}]
    found, _ = trained(RULES[rule], start, nothing)
    for name, value in found.items():
        before = np.asarray(start[name], np.float32)
        if name in SPARED:
            np.testing.assert_array_equal(value, before, err_msg=name)
        else:
            np.testing.assert_allclose(value, (1 - 0.125 * 0.3) * before, rtol=1e-6, err_msg=name)
    assert {*found} - {*SPARED} == {*shapes} - {*SPARED} and {*found} & {*SPARED}


def test_single_layers_may_have_no_decay():
    """Patterns name the layers of a stack, whose arrays hold all of them."""
    settings = replace(SETTINGS, no_decay=("encoder.layers.1.*", "embedding.*"))
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 3, seed=1)
    first = {name: np.array([1.0, 0.0]).reshape(2, *[1] * (len(shape) - 1)) for name, shape in STACKED.items()}
    decays = {name: share for name, share in first.items() if ".layers." in name} | {"embedding.table": 0.0}
    assert_close(trained(settings, start, grads)[0], by_hand(settings, grads, start, decays=decays))


FROZEN = {
    "a whole leaf": (("embedding.table",), {"embedding.table": 0.0}),
    "one layer": (("encoder.layers.0.*",), {name: "layer 0" for name in STACKED if ".layers." in name}),
    "one array of a layer": (("*.layers.0.attention.query",), {"encoder.layers.attention.query": "layer 0"}),
    "all layers": (("encoder.layers.?.*",), {name: 0.0 for name in STACKED if ".layers." in name}),
    "two patterns": (
        ("emb*", "*.scale"),
        {name: 0.0 for name in ("embedding.table", "encoder.layers.norm.scale", "encoder.norm.scale")},
    ),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen_stays_bit_for_bit_and_out_of_the_norm(case):
    """Three updates with momentum, decay and clipping, gradients a thousand times as large where it is frozen."""
    patterns, free = FROZEN[case]
    where = {
        name: np.array([0.0, 1.0]).reshape(2, *[1] * (len(STACKED[name]) - 1)) if share == "layer 0" else share
        for name, share in free.items()
    }
    settings = replace(SETTINGS, frozen=patterns)
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 3, seed=1)
    loud = [{k: np.where(where.get(k, 1.0) == 0, 1e3, 1.0) * g for k, g in gradient.items()} for gradient in grads]
    start["encoder.layers.norm.scale"][0, 0] = -0.0  # adding 0.0 to it would change its sign
    found, state = trained(settings, start, loud)
    assert_close(found, by_hand(settings, grads, start, decays=SPARED, free=where))
    for name, value in found.items():
        before, still = np.asarray(start[name], np.float32), np.broadcast_to(where.get(name, 1.0), value.shape) == 0
        assert value[still].tobytes() == before[still].tobytes(), name
        assert still.all() or (value != before)[~still].all(), name
        for moment in ("mu", "nu"):
            assert (flattened(optax.tree.get(state, moment))[name][still] == 0).all(), name


def test_a_gradient_that_is_no_number_matters_nowhere_where_it_is_frozen():
    settings = replace(SETTINGS, frozen=("embedding.*",))
    (start,), (gradient,) = random_trees(STACKED, 1), random_trees(STACKED, 1, seed=1)
    spoilt = gradient | {"embedding.table": np.full((5, 3), np.nan)}
    for value, expected in zip(
        *(trained(settings, start, [each])[0].values() for each in (spoilt, gradient)), strict=True
    ):
        np.testing.assert_array_equal(value, expected)


def rates_of(config, decay, **other):
    """By parameter of a model, the share of the learning rate that its first update takes, layer by layer."""
    settings = Optimizer(schedule="constant", learning_rate=0.5, warmup_steps=0, eps=1e-8, layer_decay=decay, **other)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), build(config).shapes)
    optimizer = make_optimizer(settings)
    updates, _ = jax.jit(lambda ones: optimizer.update(ones, optimizer.init(ones), ones))(ones)
    rates = {}
    for name, update in flattened(updates).items():
        for layer, own in enumerate(update) if ".layers." in name else [("", update)]:
            assert (own == own.reshape(-1)[0]).all(), name
            rates[name.replace(".layers.", f".layers.{layer}.")] = -own.reshape(-1)[0] / 0.5
    return rates


SMALL = {"max_length": 11, "d_model": 6, "d_ff": 5, "num_heads": 2}
SIDES = {"num_encoder_layers": 2, "num_decoder_layers": 3}
ATTENTION = ("query", "key", "value", "output")
FEED_FORWARD = ("up", "down")
ENCODER = [f"encoder.layers.attention.{name}" for name in ATTENTION]
ENCODER += [f"encoder.layers.feed_forward.{name}" for name in FEED_FORWARD]
DECODER = [name.replace("encoder", "decoder") for name in ENCODER]
BOTH = ENCODER + DECODER + [f"decoder.layers.cross_attention.{name}" for name in ATTENTION]
# a model, its hidden matrices, and what else decays; biases, norms and positions of any kind do not
FAMILIES = {
    "gpt": (
        GPTConfig(13, num_layers=2, activation="swiglu", tied_embeddings=False, **SMALL),
        [*DECODER, "decoder.layers.feed_forward.gate"],
        ["embedding.table", "head"],
    ),
    "bert": (
        BERTConfig(13, num_layers=2, head="sequence", labels=("a", "b"), **SMALL),
        ENCODER,
        ["embedding.table", "token_type_embedding.table", "pooler.dense", "classifier.dense"],
    ),
    "masked bert": (
        BERTConfig(13, num_layers=2, **SMALL),
        ENCODER,
        ["embedding.table", "token_type_embedding.table", "masked.dense"],
    ),
    "learned": (TransformerConfig(13, positions="learned", **SIDES, **SMALL), BOTH, ["embedding.table"]),
    "shaw": (TransformerConfig(13, positions="shaw", **SIDES, **SMALL), BOTH, ["embedding.table"]),
    "t5": (TransformerConfig(13, positions="t5", norm="pre", **SIDES, **SMALL), BOTH, ["embedding.table"]),
}


def assert_rates(rates, expected):
    """`expected` by the beginning of a name; the rest have 1."""
    for name, rate in rates.items():
        wanted = [value for start, value in expected.items() if name.startswith(start)]
        np.testing.assert_allclose(rate, wanted[0] if wanted else 1.0, rtol=1e-5, err_msg=name)
    assert all(any(name.startswith(start) for name in rates) for start in expected)


def test_each_layer_has_a_smaller_rate_than_the_one_above():
    """One stack of three layers: 1 at the head and the last norm, 0.5 to the fourth at what is added up below."""
    fields = {"norm": "pre", "head": "sequence", "labels": ("a", "b")}
    rates = rates_of(BERTConfig(13, num_layers=3, **fields, **SMALL), 0.5)
    below = {name: 0.5**4 for name in ("embedding.", "position_embedding.", "token_type_embedding.", "embedding_norm.")}
    assert_rates(rates, {f"encoder.layers.{i}.": 0.5 ** (3 - i) for i in range(3)} | below)
    assert rates["classifier.dense"] == rates["encoder.norm.scale"] == pytest.approx(1.0)


def test_two_stacks_count_their_own_layers():
    """Three layers of an encoder and two of a decoder, each with its own bias by distance; both read one embedding."""
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2, "positions": "t5", "norm": "pre"}
    rates = rates_of(TransformerConfig(13, **layers, **SMALL), 0.5)
    expected = {f"encoder.layers.{i}.": 0.5 ** (3 - i) for i in range(3)}
    expected |= {f"decoder.layers.{i}.": 0.5 ** (2 - i) for i in range(2)}
    assert_rates(
        rates, expected | {"encoder.position_bias": 0.5**4, "decoder.position_bias": 0.5**3, "embedding.": 0.5**4}
    )


def test_a_layers_rate_is_that_of_its_decay_too_and_without_layer_decay_all_are_one():
    config = BERTConfig(13, num_layers=2, **SMALL)
    np.testing.assert_allclose(list(rates_of(config, 1.0).values()), 1.0, rtol=1e-5)
    slow, fast = (rates_of(config, decay, name="adamw", weight_decay=0.5, no_decay=()) for decay in (0.5, 1.0))
    assert slow["encoder.layers.0.attention.output"] == pytest.approx(fast["encoder.layers.0.attention.output"] / 4)
    assert fast["encoder.layers.0.attention.output"] == pytest.approx(1.5, rel=1e-5)


@rules
def test_layers_decay_and_freezing_go_together(rule):
    """With clipping, decay and every rule; what is frozen stays bit for bit, whatever its gradient."""
    settings = replace(RULES[rule], layer_decay=0.5, frozen=("encoder.layers.0.*", "classifier.dense"))
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 3, seed=1)
    by_layer = lambda values, name: np.array(values).reshape(2, *[1] * (len(STACKED[name]) - 1))  # noqa: E731
    stack = [name for name in STACKED if ".layers." in name]
    slowed = {name: by_layer([0.25, 0.5], name) for name in stack}
    slowed |= {"embedding.table": 0.125, "encoder.position_bias.table": 0.125}
    free = {name: by_layer([0.0, 1.0], name) for name in stack} | {"classifier.dense": 0.0}
    expected = by_hand(settings, grads, start, decays=SPARED, free=free, slowed=slowed)
    found, _ = trained(settings, start, grads)
    assert_close(found, expected, **(ROUNDED if rule == "muon" else {}))
    for name in stack:
        assert found[name][0].tobytes() == np.asarray(start[name][0], np.float32).tobytes(), name
    assert (found["classifier.dense"] == np.asarray(start["classifier.dense"], np.float32)).all()


def test_a_pattern_that_fits_no_parameter_is_refused():
    """By name, with some that there are; layers of a stack are counted from 0."""
    shapes = build(BERTConfig(13, num_layers=2, **SMALL)).shapes
    good = ("embedding.table", "encoder.layers.1.*", "*bias", "encoder.layers.?.attention.query")
    check_patterns(Optimizer(frozen=good), shapes)
    for pattern in ("encoder.layers.2.*", "decoder.*", "embedding", "Embedding.table"):
        with pytest.raises(
            ValueError, match="optimizer.frozen has .* fits no parameter; some are .*embedding"
        ) as raised:
            check_patterns(Optimizer(frozen=(*good, pattern)), shapes)
        assert repr(pattern) in str(raised.value)


def test_a_pattern_without_decay_that_fits_no_parameter_is_refused():
    """Those that stand there by default are for all families: no BERT has relative keys."""
    shapes, decays = build(BERTConfig(13, num_layers=2, **SMALL)).shapes, {"name": "adamw", "weight_decay": 0.1}
    check_patterns(Optimizer(**decays), shapes)
    check_patterns(Optimizer(**decays, no_decay=("*relative_key", "embedding.table")), shapes)
    with pytest.raises(ValueError, match=r"optimizer.no_decay has '\*relative_values', which fits no parameter"):
        check_patterns(Optimizer(**decays, no_decay=("*relative_value", "*relative_values")), shapes)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"weight_decay": 0.1}, "weight_decay is 0.1: 'adam' has none, adamw has"),
        ({"name": "adamw", "weight_decay": -0.1}, "weight_decay is -0.1: it must not be negative"),
        ({"name": "adamw", "weight_decay": math.inf}, "weight_decay is inf"),
        ({"name": "adamw", "weight_decay": math.nan}, "weight_decay is nan"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0: it lies in"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1: it lies in"),
        ({"layer_decay": math.nan}, "layer_decay is nan: it lies in"),
        ({"no_decay": ("*bias", "*table")}, "no_decay has ['*table'], weight_decay is 0.0: nothing would decay"),
        ({"momentum": 0.5}, "momentum is 0.5: 'adam' has none, leave it at 0.0"),
        ({"name": "adafactor", "b2": 0.999}, "b2 is 0.999: 'adafactor' has none, leave it at 0.98"),
        ({"name": "lion", "eps": 1e-8}, "eps is 1e-08: 'lion' has none, leave it at 1e-09"),
        ({"name": "sgd", "b1": 0.0}, "b1 is 0.0: 'sgd' has none, leave it at 0.9"),
        ({"name": "sgd", "momentum": 1.0}, "momentum is 1.0: it lies in [0, 1)"),
        ({"name": "muon"}, "momentum is 0.0: muon needs one, its authors' is 0.95"),
    ],
)
def test_settings_that_a_rule_does_not_know_are_refused(fields, said):
    with pytest.raises(ValueError) as raised:
        Optimizer(**fields)
    assert said in str(raised.value)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    "fields", [{}, {"name": "adamw", "weight_decay": 0.1, "layer_decay": 0.5, "frozen": ("*bias",)}]
)
def test_the_state_is_that_of_a_plain_chain(clip_norm, fields):
    """Clipping, moments and a count, and a count of the schedule, in this order: checkpoints hold it so, of any age."""
    params = nested(random_trees(STACKED, 1)[0])
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    plain = optax.chain(clip, optax.scale_by_adam(), optax.scale_by_learning_rate(lambda count: 0.1))
    states = [each.init(params) for each in (make_optimizer(Optimizer(clip_norm=clip_norm, **fields)), plain)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(state)] for state in states]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decays_and_what_muon_takes_in_a_model(family):
    """B27, B54: by names, for stacked layers; a tied matrix is one array, an embedding, in parameters and state."""
    config, hidden, others = FAMILIES[family]
    shapes = build(config).shapes
    settings = replace(RULES["sgd"], clip_norm=None)
    ones, zeros = (jax.tree.map(lambda x, v=v: jnp.full(x.shape, v, x.dtype), shapes) for v in (1.0, 0.0))
    updates, _ = update_of(settings)(zeros, make_optimizer(settings).init(ones), ones)
    moved = {name for name, update in flattened(updates).items() if (update != 0).all()}
    assert moved == {*hidden, *others}
    assert all((update == 0).all() for name, update in flattened(updates).items() if name not in moved)
    states = jax.eval_shape(make_optimizer(RULES["muon"]).init, shapes)[1].inner_states
    kept = {kind: {name for name in names_of(state) if ".mu." in name} for kind, state in states.items()}
    assert {name.split(".mu.")[1] for name in kept["hidden"]} == {*hidden}
    assert {name.split(".mu.")[1] for name in kept["other"]} == {*names_of(shapes)} - {*hidden}


# ----------------------------------------------------------------------------------------------------------------------
# Where the state lives
# ----------------------------------------------------------------------------------------------------------------------

# width 12, two heads of 5, three layers, 10 entries: over 4 devices of fsdp and 2 of model
SHARDED = {
    "embedding.table": ((10, 12), ("model", "fsdp")),
    "encoder.layers.attention.query": ((3, 12, 2, 5), (None, "fsdp", "model", None)),
    "encoder.layers.attention.query_bias": ((3, 2, 5), (None, "model", None)),
    "encoder.layers.attention.value": ((3, 12, 5, 2), (None, "fsdp", None, "model")),
    "encoder.layers.attention.output": ((3, 2, 5, 12), (None, "model", None, "fsdp")),
    "encoder.layers.norm.scale": ((3, 12), (None, None)),
    "masked.dense": ((12, 12), ("fsdp", None)),
    "masked.bias": ((10,), ("model",)),
}
# of adafactor: the shorter side, the longer one, and what is not factored; the rest is one number, whole
FACTORED = {
    "v_row.embedding.table": ((10,), ("model",)),
    "v_col.embedding.table": ((12,), ("fsdp",)),
    "v_row.encoder.layers.attention.query": ((3, 10), (None, "model")),
    "v_col.encoder.layers.attention.query": ((3, 12), (None, "fsdp")),
    "v.encoder.layers.attention.query_bias": ((3, 10), (None, "model")),
    # a side of 5 x 2 of which the 2 are cut is not cut as 10
    "v_row.encoder.layers.attention.value": ((3, 10), ()),
    "v_col.encoder.layers.attention.value": ((3, 12), (None, "fsdp")),
    "v_row.encoder.layers.attention.output": ((3, 10), (None, "model")),
    "v_col.encoder.layers.attention.output": ((3, 12), (None, "fsdp")),
    "v.encoder.layers.norm.scale": ((3, 12), ()),
    "v_row.masked.dense": ((12,), ("fsdp",)),
    "v_col.masked.dense": ((12,), ()),
    "v.masked.bias": ((10,), ("model",)),
}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


def spread(mesh):
    """SHARDED as shapes with their shardings."""
    tree: dict = {}
    for name, (shape, axes) in SHARDED.items():
        *path, last = name.split(".")
        branch = functools.reduce(lambda branch, key: branch.setdefault(key, {}), path, tree)
        branch[last] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
    return tree


@rules
def test_the_state_lies_where_the_parameters_are(rule, mesh):
    """Moments as their parameters, the sides of factored ones as these sides, counts everywhere."""
    whole = NamedSharding(mesh, PartitionSpec())
    states = state_shapes(RULES[rule], spread(mesh), otherwise=whole)
    init = make_optimizer(RULES[rule]).init
    assert jax.tree.map(jnp.shape, states) == jax.tree.map(jnp.shape, jax.eval_shape(init, spread(mesh)))
    seen = set()
    for path, x in jax.tree_util.tree_leaves_with_path(states):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        field = next((each for each in (*FACTORED, *SHARDED) if name.endswith(f".{each}")), None)
        if rule == "adafactor" and field in SHARDED:  # the number that stands for what is kept in another way
            assert x.shape in ((1,), (3, 1))
            field = None
        shape, axes = (FACTORED | SHARDED).get(field, (x.shape, ()))
        assert x.shape == shape and x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*axes)), x.ndim), name
        seen.add(name)
    if rule == "adafactor":
        assert all(any(name.endswith(f".{each}") for name in seen) for each in FACTORED)


@rules
def test_updates_on_eight_devices_are_those_on_one(rule, mesh):
    """The state is born in its shards, keeps them, and a device holds its part of a moment."""
    optimizer, whole = make_optimizer(RULES[rule]), NamedSharding(mesh, PartitionSpec())
    layout = jax.tree.map(lambda x: x.sharding, spread(mesh))
    kept = jax.tree.map(lambda x: x.sharding, state_shapes(RULES[rule], spread(mesh), otherwise=whole))
    shapes = {name: shape for name, (shape, _) in SHARDED.items()}
    params, *grads = (nested(tree) for tree in random_trees(shapes, 3))
    expected, alone = optimizer.init(params), params
    put = lambda tree: jax.device_put(tree, layout)  # noqa: E731
    state, spreads = jax.jit(optimizer.init, out_shardings=kept)(put(params)), put(params)
    update = jax.jit(optimizer.update, out_shardings=(layout, kept))
    for gradient in grads:
        updates, expected = update_of(RULES[rule])(gradient, expected, alone)
        alone = optax.apply_updates(alone, updates)
        updates, state = update(put(gradient), state, spreads)
        spreads = put(optax.apply_updates(spreads, updates))
    close = ROUNDED if rule == "muon" else {"rtol": 1e-5, "atol": 1e-6}
    assert_close(flattened(spreads), flattened(alone), **close)
    assert_close(flattened(state), flattened(expected), **close)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_the_factors_of_a_square_matrix_are_told_apart():
    """v_row is the mean over columns, and so laid out as rows are; the other way round in v_col."""
    g = np.random.default_rng(0).standard_normal((5, 5))
    _, state = trained(replace(RULES["adafactor"], clip_norm=None), {"w": g}, [{"w": g}])
    np.testing.assert_allclose(state[1].v_row["w"], (g**2).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(state[1].v_col["w"], (g**2).mean(axis=0), rtol=1e-5)
