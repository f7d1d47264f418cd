"""Learning rates: from the number of an update, of which 1 is the first, to a float32."""

from collections.abc import Callable

import jax.numpy as jnp
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
    return warmup_stable_decay(peak, warmup_steps, stable_steps=warmup_steps, decay_steps=decay_steps, final=final)


def warmup_cosine(peak: float, warmup_steps: int, *, decay_steps: int, final: float) -> Schedule:
    """As `warmup_linear`, falling as half a period of a cosine (Loshchilov and Hutter 2017)."""
    # (1 + cos(pi (1 - left))) / 2, which would cancel near the end
    shape = lambda left: jnp.square(jnp.sin(jnp.pi / 2 * left))  # noqa: E731
    return _falling(peak, warmup_steps, (warmup_steps, decay_steps), final, shape)


def warmup_stable_decay(
    peak: float, warmup_steps: int, *, stable_steps: int, decay_steps: int, final: float
) -> Schedule:
    """Learning rate of update n: linear to `peak` at warmup_steps, `peak` until stable_steps, linear to `final` at
    decay_steps, then `final` (Hu et al. 2024, MiniCPM; Hagele et al. 2024, who let it fall linearly too).
    """
    return _falling(peak, warmup_steps, (stable_steps, decay_steps), final, lambda left: left)


def _falling(peak, warmup_steps, span, final, shape):
    start, end = span

    def schedule(n):
        n = jnp.asarray(n).astype(jnp.float32)
        left = jnp.clip((end - n) / (end - start), 0.0, 1.0)
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
        case "warmup_stable_decay":
            return warmup_stable_decay(*sizes, stable_steps=optimizer.stable_steps, **end)
