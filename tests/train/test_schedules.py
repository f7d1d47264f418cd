"""Schedules against closed forms in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfm_jax.config import Optimizer
from tfm_jax.train.schedules import (
    make_schedule,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
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


def closed_form(name, n, *, peak, warmup, end, final, stable=0):
    """The learning rate of update n in float64."""
    if n < warmup:
        return peak * n / warmup
    if name in ("inverse_sqrt", "constant"):
        return peak * (max(warmup, 1) / max(n, 1)) ** 0.5 if name == "inverse_sqrt" else peak
    start = stable if name == "warmup_stable_decay" else warmup
    passed = min(max(n - start, 0) / (end - start), 1.0)
    share = (1.0 + math.cos(math.pi * passed)) / 2 if name == "cosine" else 1.0 - passed
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


@pytest.mark.parametrize("stable", [7, 8, 22])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_a_rate_stays_and_then_falls(warmup, stable):
    """B50, I24: at the peak from the end of the warm-up to the update stable_steps, both included."""
    schedule, steps = warmup_stable_decay(0.25, warmup, stable_steps=stable, decay_steps=23, final=0.01), np.arange(40)
    sizes = {"peak": 0.25, "warmup": warmup, "end": 23, "final": 0.01, "stable": stable}
    expected = [closed_form("warmup_stable_decay", n, **sizes) for n in steps.tolist()]
    rates = np.array([schedule(int(n)) for n in steps])
    np.testing.assert_allclose(rates, expected, rtol=2e-6)
    at_the_peak = (steps >= warmup) & (steps <= stable)
    assert ((rates == np.float32(0.25)) == at_the_peak).all() and (rates[23:] == np.float32(0.01)).all()
    np.testing.assert_allclose(jax.jit(schedule)(jnp.asarray(steps, jnp.int32)), rates, rtol=1e-6)


def test_golden_numbers_that_stay_and_fall():
    """MiniCPM's shape on 100 updates: warm-up 10, at the peak up to 80, half way down at 90."""
    schedule = warmup_stable_decay(2.0, 10, stable_steps=80, decay_steps=100, final=0.0)
    rates = {n: float(schedule(n)) for n in (0, 5, 10, 45, 80, 90, 95, 100, 300)}
    expected = {0: 0.0, 5: 1.0, 10: 2.0, 45: 2.0, 80: 2.0, 90: 1.0, 95: 0.5, 100: 0.0, 300: 0.0}
    assert rates == pytest.approx(expected, rel=1e-6)


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
    chosen = make_schedule(Optimizer(schedule="warmup_stable_decay", stable_steps=5, **end))
    expected = warmup_stable_decay(0.5, 3, stable_steps=5, decay_steps=7, final=0.25)
    assert [float(chosen(n)) for n in range(9)] == [float(expected(n)) for n in range(9)]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"schedule": "linear"}, "decay_steps is 0, warmup_steps 4000: linear ends after the warm-up"),
        ({"schedule": "cosine", "decay_steps": 4000}, "decay_steps is 4000, warmup_steps 4000: cosine ends after"),
        (
            {"decay_steps": 9000},
            "decay_steps, final_learning_rate are for linear, cosine and warmup_stable_decay, not 'inverse_sqrt'",
        ),
        ({"schedule": "constant", "final_learning_rate": 1e-5}, "and warmup_stable_decay, not 'constant'"),
        (
            {"schedule": "linear", "decay_steps": 9000, "final_learning_rate": 6e-4},
            "final_learning_rate is 0.0006: it lies between 0 and the peak, 0.0005",
        ),
        ({"schedule": "linear", "decay_steps": 9000, "final_learning_rate": -1e-9}, "final_learning_rate is -1e-09"),
        (
            {"schedule": "warmup_stable_decay", "decay_steps": 9000},
            "warmup_steps, stable_steps, decay_steps are 4000, 0, 9000: they come in this order",
        ),
        ({"schedule": "warmup_stable_decay", "stable_steps": 5000, "decay_steps": 5000}, "are 4000, 5000, 5000: they"),
        (
            {"schedule": "cosine", "stable_steps": 5000, "decay_steps": 9000},
            "stable_steps is 5000: it is for warmup_stable_decay, not 'cosine'",
        ),
        ({"stable_steps": -1}, "stable_steps is -1: it is for warmup_stable_decay, not 'inverse_sqrt'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, said):
    """B50: a warm-up as long as the whole run; what the schedule does not know."""
    with pytest.raises(ValueError) as raised:
        Optimizer(**fields)
    assert said in str(raised.value)


def test_the_shortest_parts_are_accepted():
    """No update between the warm-up and the end of what stays, one to fall; and no warm-up."""
    Optimizer(schedule="warmup_stable_decay", warmup_steps=4, stable_steps=4, decay_steps=5)
    Optimizer(schedule="warmup_stable_decay", warmup_steps=0, stable_steps=0, decay_steps=1)
