"""Without positions an encoder sees a set.

Vaswani et al. (2017), section 3.5: the model has no recurrence and no convolution, so order must be told to it. Of
self-attention every output is a sum over the keys, and all else is done to each token alone. So for every permutation P

    encoder(P x) = P encoder(x)        (permutation equivariance),

exactly in exact arithmetic. In float32 sums over n keys in another order may differ by n 2^-23 of their size, after L
layers by L n 2^-23, as the last norm makes entries of size 1: that is the limit; the oracle in float64 has its own.
Every kind of positions must break it by far more. So does a causal mask alone, but from the second layer on: the last
token of one causal layer sees its past as a set. A task that needs order, with and without positions, is in
`first_mark`.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, at_least, within
from experiments.theory.figure import drawn
from experiments.theory.first_mark import CONFIG, LAYERS, LENGTH, ROWS, STEPS, TAUGHT, VOCABULARY, learned_order
from tfm_jax import oracle_blocks
from tfm_jax.models import GPTConfig, Model, build

KINDS = ("none", "sinusoidal", "learned", "rope", "alibi", "shaw", "t5")
ROUNDING = LAYERS * LENGTH * 2.0**-23


def outputs(model: Model, params: dict, tokens: jax.Array) -> jax.Array:
    """The stack's output, B T D."""
    (states,) = model.hidden_states(params, tokens).values()
    return states[-1]


def change(model: Model, order: np.ndarray, where: slice = slice(None)) -> float:
    """The largest difference between encoder(P x) and P encoder(x), P x having token order[t] at t."""
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, VOCABULARY, jnp.int32)
    run = jax.jit(lambda tokens: outputs(model, params, tokens))
    return float(jnp.abs(run(tokens[:, order]) - run(tokens)[:, order])[:, where].max())


def oracle_change(order: np.ndarray) -> float:
    """The same of the layers without positions in NumPy and float64."""
    layers = build(replace(CONFIG, positions="none")).init(jax.random.key(0))["encoder"]["layers"]
    x = np.random.default_rng(1).standard_normal((1, LENGTH, CONFIG.d_model))

    def run(x):
        for i in range(LAYERS):
            params = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
            x = oracle_blocks.encoder_block(params, x, mask=None, norm_eps=CONFIG.norm_eps, activation="gelu")
        return x

    return float(np.abs(run(x[:, order]) - run(x)[:, order]).max())


def causal_change(num_layers: int) -> float:
    """How much the last token's output of a causal model without positions depends on the order of its past."""
    sizes = {"d_model": CONFIG.d_model, "d_ff": CONFIG.d_ff, "num_heads": CONFIG.num_heads}
    config = GPTConfig(VOCABULARY, num_layers=num_layers, max_length=LENGTH, positions="none", **sizes)
    return change(
        build(config), np.append(np.random.default_rng(0).permutation(LENGTH - 1), LENGTH - 1), slice(-1, None)
    )


def measure(figures: Path) -> list[Row]:
    """Six rows, and what each kind of positions changes and lets a model learn."""
    order = np.random.default_rng(0).permutation(LENGTH)
    changes = {kind: change(build(replace(CONFIG, positions=kind)), order) for kind in KINDS}
    least = min(changes[kind] for kind in KINDS[1:])
    learned = {kind: learned_order(kind) for kind in TAUGHT}
    draw(figures / "permutations.png", changes, learned)
    tokens = f"{LAYERS} layers, {LENGTH} tokens, {ROWS} rows"
    task = f"{STEPS} updates; 1,024 new rows, each with its twin"
    told = {kind: right for kind, (_, right) in learned.items() if kind != "none"}
    return [
        within("encoder(P x) = P encoder(x) without positions", 0.0, changes["none"], distance=ROUNDING, note=tokens),
        within(
            "the same in float64",
            0.0,
            oracle_change(order),
            distance=ROUNDING * 2.0**-29,
            note="oracle in NumPy, one row: what remains is rounding",
        ),
        at_least(
            "lost with positions, of every kind",
            1000 * ROUNDING,
            least,
            note=f"the smallest change of {', '.join(KINDS[1:])}; predicted: 1,000 times the limit of rounding",
        ),
        within(
            "one causal layer without positions: its last token sees a set",
            0.0,
            causal_change(1),
            distance=ROUNDING,
            note="the past permuted",
        ),
        at_least(
            "two causal layers tell order without positions",
            1000 * ROUNDING,
            causal_change(2),
            note="so 'order is lost without positions' is false of decoders",
        ),
        within(
            "which of two marks is first, without positions: guessed", 0.5, learned["none"][1], distance=0.01, note=task
        ),
        at_least(
            "the same with positions: solved", 0.98, min(told.values()), note=f"{task}; the worst of {', '.join(told)}"
        ),
    ]


def draw(path: Path, changes: dict[str, float], learned: dict[str, tuple[np.ndarray, float]]) -> None:
    """The change by kind of positions beside the limit of rounding; losses of the task."""
    with drawn(path, 2, width=4.6) as (bars, curves):
        bars.barh(list(changes), list(changes.values()), color=[f"C{kind in KINDS[1:]:d}" for kind in changes])
        bars.axvline(ROUNDING, color="0.3", linestyle="--", label="limit of rounding")
        bars.set_xscale("log")
        bars.invert_yaxis()
        bars.set_xlabel("largest |encoder(P x) - P encoder(x)|")
        bars.set_ylabel("positions")
        bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
        for kind, (losses, right) in learned.items():
            smooth = losses[: len(losses) // 10 * 10].reshape(-1, 10).mean(axis=1)
            curves.plot(5 + 10 * np.arange(len(smooth)), smooth, label=f"{kind}: {right:.0%} right")
        curves.axhline(np.log(2.0), color="0.6", linestyle="--", label="a guess, log 2")
        curves.set_xlabel("update")
        curves.set_ylabel("loss / nats")
        curves.legend(loc="center right")
