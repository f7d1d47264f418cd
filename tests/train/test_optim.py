"""Schedules against closed forms, updates against AdamW written out in float64, and what is frozen or slowed down."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfm_jax.config import Optimizer
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.train.optim import (
    check_patterns,
    make_optimizer,
    make_schedule,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
)


def test_golden_numbers_of_the_paper():
    """B50: d_model 512, 4000 warm-up updates; step 0 is finite."""
    schedule = warmup_inverse_sqrt((512 * 4000) ** -0.5, 4000)
    for n, rate in {0: 0.0, 1: 1.746928e-07, 4000: 6.987712e-04, 8000: 4.941059e-04}.items():
        np.testing.assert_allclose(schedule(n), rate, rtol=1e-6)


@given(d_model=st.integers(1, 2048), warmup=st.integers(1, 10_000), n=st.integers(1, 10**7))
def test_inverse_sqrt_is_equation_3(d_model, warmup, n):
    paper = d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
    np.testing.assert_allclose(warmup_inverse_sqrt((d_model * warmup) ** -0.5, warmup)(n), paper, rtol=1e-6)


@pytest.mark.parametrize("make", [warmup_inverse_sqrt, warmup_constant])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_update_has_a_finite_rate_up_to_the_peak(make, warmup):
    """I24, B50: n from 0 on, warm-up 0 and 1 included; eager, traced and as an array the same float32."""
    schedule, steps = make(0.25, warmup), np.arange(30)
    rates = np.array([schedule(int(n)) for n in steps])
    assert np.isfinite(rates).all() and (rates >= 0).all() and (rates <= 0.25).all()
    assert rates[max(warmup, 1)] == np.float32(0.25)
    assert rates[0] == (0.25 if warmup == 0 else 0.0)
    if warmup:
        np.testing.assert_allclose(rates[: warmup + 1], 0.25 * steps[: warmup + 1] / warmup, rtol=1e-6)
    after = 0.25 * np.sqrt(max(warmup, 1) / steps[warmup + 1 :]) if make is warmup_inverse_sqrt else 0.25
    np.testing.assert_allclose(rates[warmup + 1 :], after, rtol=1e-6)
    traced = jax.jit(schedule)(jnp.asarray(steps, jnp.int32))
    assert traced.dtype == schedule(3).dtype == jnp.float32
    np.testing.assert_allclose(traced, rates, rtol=1e-6)


def closed_form(name, n, *, peak, warmup, end, final):
    """The learning rate of update n in float64."""
    if n < warmup:
        return peak * n / warmup
    if name in ("inverse_sqrt", "constant"):
        return peak * (max(warmup, 1) / max(n, 1)) ** 0.5 if name == "inverse_sqrt" else peak
    passed = min((n - warmup) / (end - warmup), 1.0)
    share = 1.0 - passed if name == "linear" else (1.0 + math.cos(math.pi * passed)) / 2
    return final + (peak - final) * share


FALLING = {"linear": warmup_linear, "cosine": warmup_cosine}


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("final", [0.0, 0.01])
def test_a_falling_rate_is_its_closed_form(name, warmup, final):
    """B50, I24: n from 0 to beyond the end, where it stays; eager, traced and as an array the same float32."""
    schedule, steps = FALLING[name](0.25, warmup, decay_steps=23, final=final), np.arange(40)
    expected = [closed_form(name, n, peak=0.25, warmup=warmup, end=23, final=final) for n in steps.tolist()]
    rates = np.array([schedule(int(n)) for n in steps])
    np.testing.assert_allclose(rates, expected, rtol=2e-6)
    assert (rates[23:] == np.float32(final)).all() and rates.max() == rates[warmup] == np.float32(0.25)
    assert rates[0] == (0.25 if warmup == 0 else 0.0) and (np.diff(rates[warmup:]) <= 0).all()
    traced = jax.jit(schedule)(jnp.asarray(steps, jnp.int32))
    assert traced.dtype == schedule(3).dtype == jnp.float32
    np.testing.assert_allclose(traced, rates, rtol=1e-6)


def test_golden_numbers_of_a_cosine():
    """B50: those of optax's warmup_cosine_decay_schedule(0, 1, 10, 100); decay_steps count from the first update."""
    schedule = warmup_cosine(1.0, 10, decay_steps=100, final=0.0)
    rates = {n: float(schedule(n)) for n in (0, 1, 10, 55, 100, 200)}
    assert rates == pytest.approx({0: 0.0, 1: 0.1, 10: 1.0, 55: 0.5, 100: 0.0, 200: 0.0}, rel=1e-6)


@given(
    name=st.sampled_from(sorted(FALLING)),
    warmup=st.integers(0, 10_000),
    length=st.integers(1, 10**6),
    share=st.floats(0.0, 1.2),
)
@example(name="cosine", warmup=0, length=10_000, share=0.9999)
def test_a_falling_rate_is_exact_up_to_its_end(name, warmup, length, share):
    """The last steps of a cosine are small, and no less exact for it."""
    n, end = round(share * (warmup + length)), warmup + length
    sizes = {"peak": 3e-4, "warmup": warmup, "end": end, "final": 0.0}
    rate = FALLING[name](3e-4, warmup, decay_steps=end, final=0.0)(n)
    np.testing.assert_allclose(rate, closed_form(name, n, **sizes), rtol=1e-5, atol=1e-15)


def test_configuration_chooses_the_schedule():
    for name, make in {"inverse_sqrt": warmup_inverse_sqrt, "constant": warmup_constant}.items():
        chosen = make_schedule(Optimizer(schedule=name, learning_rate=0.5, warmup_steps=3))
        assert [float(chosen(n)) for n in range(9)] == [float(make(0.5, 3)(n)) for n in range(9)]
    for name, make in FALLING.items():
        end = {"learning_rate": 0.5, "warmup_steps": 3, "decay_steps": 7, "final_learning_rate": 0.25}
        chosen, expected = make_schedule(Optimizer(schedule=name, **end)), make(0.5, 3, decay_steps=7, final=0.25)
        assert [float(chosen(n)) for n in range(9)] == [float(expected(n)) for n in range(9)]


def adamw(settings, gradients, params, *, decays=None, free=None, slowed=None):
    """Algorithm 2 of Loshchilov and Hutter (2019) after clipping by the global norm, in float64; Adam without decay.

    By name: decays, 1 where weights decay; free, 1 where parameters move; slowed, the share of the learning rate.
    """
    one = lambda given: {k: 1.0 for k in params} | (given or {})  # noqa: E731
    decays, free, slowed = one(decays), one(free), one(slowed)
    m, v = ({k: 0.0 for k in params} for _ in range(2))
    for n, gradient in enumerate(gradients, start=1):
        gradient = {k: free[k] * g for k, g in gradient.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        shrink = 1.0 if settings.clip_norm is None else min(1.0, settings.clip_norm / norm)
        sizes = {"peak": settings.learning_rate, "warmup": settings.warmup_steps}
        end = {"end": settings.decay_steps, "final": settings.final_learning_rate}
        rate = closed_form(settings.schedule, n, **sizes, **end)
        for k, g in gradient.items():
            m[k] = settings.b1 * m[k] + (1 - settings.b1) * shrink * g
            v[k] = settings.b2 * v[k] + (1 - settings.b2) * (shrink * g) ** 2
            mean, square = m[k] / (1 - settings.b1**n), v[k] / (1 - settings.b2**n)
            update = mean / (np.sqrt(square) + settings.eps) + settings.weight_decay * decays[k] * params[k]
            params = params | {k: params[k] - rate * slowed[k] * free[k] * update}
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
        expected = adamw(settings, grads[:n], start)
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


def test_a_zero_gradient_moves_nothing_at_first():
    """B27: the first update of Adam on zeros is zero, clipped or not."""
    for clip_norm in (None, 1.0):
        optimizer = make_optimizer(Optimizer(warmup_steps=0, clip_norm=clip_norm))
        params = {"w": jnp.ones((3, 5))}
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        assert (updates["w"] == 0).all()


@pytest.mark.parametrize("fields", [{}, {"layer_decay": 0.5, "frozen": ("encoder.layers.0.*",)}], ids=["adam", "all"])
def test_dtypes_stay_under_x64(fields):
    """B56: float32 parameters, moments and updates, int32 counts."""
    settings = replace(SETTINGS, **fields) if fields else Optimizer()
    with jax.enable_x64(True):
        optimizer, params = make_optimizer(settings), nested(random_trees(STACKED, 1)[0])
        updates, state = optimizer.update(params, optimizer.init(params), params)
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((updates, state))}
    assert dtypes == {"float32", "int32"}


# ----------------------------------------------------------------------------------------------------------------------
# Parameters with names: weight decay, what is frozen, rates by layer
# ----------------------------------------------------------------------------------------------------------------------

STACKED = {
    "embedding.table": (5, 3),
    "encoder.layers.attention.query": (2, 3, 3),
    "encoder.layers.attention.query_bias": (2, 3),
    "encoder.layers.norm.scale": (2, 3),
    "encoder.position_bias.table": (7, 2),
    "encoder.norm.scale": (3,),
    "classifier.dense": (3, 2),
    "classifier.dense_bias": (2,),
}
FLAT = {"up": (3, 5), "up_bias": (5,), "norm.scale": (3,)}
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
# what the default patterns spare, written out
SPARED = {name: 0.0 for name in (*STACKED, *FLAT) if name.endswith(("bias", "scale", "position_bias.table"))}


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


def flattened(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


def random_trees(shapes, count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [{name: scale * rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(count)]


def trained(settings, start, grads):
    """(parameters, optimizer state) after an update with each gradient."""
    optimizer, params = make_optimizer(settings), nested(start)
    state = optimizer.init(params)
    for gradient in grads:
        updates, state = optimizer.update(nested(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return flattened(params), state


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_updates_are_adamw_written_out(schedule, clip_norm):
    """One, and five: decay beside the moments and outside the clipped norm, times the schedule; biases have none."""
    end = {} if schedule in FALLING else {"decay_steps": 0, "final_learning_rate": 0.0}
    settings = replace(SETTINGS, schedule=schedule, clip_norm=clip_norm, **end)
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 5, seed=1)
    for count in (1, 5):
        found, state = trained(settings, start, grads[:count])
        assert_close(found, adamw(settings, grads[:count], start, decays=SPARED))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("shapes", [STACKED, FLAT], ids=["stacked", "flat"])
def test_a_zero_gradient_with_weight_decay_moves_what_decays(shapes):
    """By rate * weight_decay of itself; B27: what has none stays bit for bit."""
    (start,), nothing = random_trees(shapes, 1), [{name: np.zeros(shape) for name, shape in shapes.items()}]
    found, _ = trained(SETTINGS, start, nothing)
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
    assert_close(trained(settings, start, grads)[0], adamw(settings, grads, start, decays=decays))


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
    assert_close(found, adamw(settings, grads, start, decays=SPARED, free=where))
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


def test_layers_decay_and_freezing_go_together():
    settings = replace(SETTINGS, layer_decay=0.5, frozen=("encoder.layers.0.*",))
    (start,), grads = random_trees(STACKED, 1), random_trees(STACKED, 3, seed=1)
    by_layer = lambda values, name: np.array(values).reshape(2, *[1] * (len(STACKED[name]) - 1))  # noqa: E731
    stack = [name for name in STACKED if ".layers." in name]
    slowed = {name: by_layer([0.25, 0.5], name) for name in stack}
    slowed |= {"embedding.table": 0.125, "encoder.position_bias.table": 0.125}
    free = {name: by_layer([0.0, 1.0], name) for name in stack}
    expected = adamw(settings, grads, start, decays=SPARED, free=free, slowed=slowed)
    assert_close(trained(settings, start, grads)[0], expected)


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


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"schedule": "linear"}, "decay_steps is 0, warmup_steps 4000: linear ends after the warm-up"),
        ({"schedule": "cosine", "decay_steps": 4000}, "decay_steps is 4000, warmup_steps 4000: cosine ends after"),
        ({"decay_steps": 9000}, "decay_steps, final_learning_rate are for linear and cosine, not 'inverse_sqrt'"),
        ({"schedule": "constant", "final_learning_rate": 1e-5}, "are for linear and cosine, not 'constant'"),
        (
            {"schedule": "linear", "decay_steps": 9000, "final_learning_rate": 6e-4},
            "final_learning_rate is 0.0006: it lies between 0 and the peak, 0.0005",
        ),
        ({"schedule": "linear", "decay_steps": 9000, "final_learning_rate": -1e-9}, "final_learning_rate is -1e-09"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1: 'adam' has none, adamw has"),
        ({"name": "adamw", "weight_decay": -0.1}, "weight_decay is -0.1: it must not be negative"),
        ({"name": "adamw", "weight_decay": math.inf}, "weight_decay is inf"),
        ({"name": "adamw", "weight_decay": math.nan}, "weight_decay is nan"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0: it lies in"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1: it lies in"),
        ({"layer_decay": math.nan}, "layer_decay is nan: it lies in"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, said):
    """B50: a warm-up as long as the whole run; what the schedule or the rule does not know."""
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
