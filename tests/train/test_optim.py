"""Schedules against the paper's formula, and one optimizer update against Adam written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.config import Optimizer
from tfm_jax.train.optim import make_optimizer, make_schedule, warmup_constant, warmup_inverse_sqrt


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


def test_configuration_chooses_the_schedule():
    for name, make in {"inverse_sqrt": warmup_inverse_sqrt, "constant": warmup_constant}.items():
        chosen = make_schedule(Optimizer(schedule=name, learning_rate=0.5, warmup_steps=3))
        assert [float(chosen(n)) for n in range(9)] == [float(make(0.5, 3)(n)) for n in range(9)]


def adam(settings, gradients, params):
    """Kingma and Ba (2015), algorithm 1, after clipping by the global norm; all in float64."""
    m, v = ({k: 0.0 for k in params} for _ in range(2))
    for n, gradient in enumerate(gradients, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        shrink = 1.0 if settings.clip_norm is None else min(1.0, settings.clip_norm / norm)
        warm = settings.warmup_steps
        rate = settings.learning_rate * min(n / warm, (warm / n) ** 0.5)
        for k, g in gradient.items():
            m[k] = settings.b1 * m[k] + (1 - settings.b1) * shrink * g
            v[k] = settings.b2 * v[k] + (1 - settings.b2) * (shrink * g) ** 2
            mean, square = m[k] / (1 - settings.b1**n), v[k] / (1 - settings.b2**n)
            params = params | {k: params[k] - rate * mean / (np.sqrt(square) + settings.eps)}
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
        expected = adam(settings, grads[:n], start)
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


def test_dtypes_stay_under_x64():
    """B56: float32 parameters, moments and updates, int32 counts."""
    with jax.enable_x64(True):
        optimizer = make_optimizer(Optimizer())
        params = {"w": jnp.ones((3, 5), jnp.float32)}
        updates, state = optimizer.update(params, optimizer.init(params), params)
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((updates, state))}
    assert dtypes == {"float32", "int32"}
