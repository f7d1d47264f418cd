"""A causal mask that was forgotten: the loss is too good to be true, and what the model writes is not.

Without the mask a language model reads its target at position t + 1. Its text here is a chain whose symbols are the sum
of the two before, modulo their number, but for a fifth that is any symbol: no model that reads the past alone can have
an expected loss below the entropy of that. When it writes, there is nothing ahead to look at, and what it needs then,
the two symbols before, it never had to learn. One thing hides the mistake: where the last token of a row has a target
too, one beyond the row, there is nothing ahead in training either, and the model learns there what writing takes. Where
targets are the row's own tokens shifted, it does not.

Measured on the GPT of `masks`: losses of training with and without the causal mask, and how often what each then writes
is the sum.
"""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.theory import Row, at_least, at_most, near
from experiments.theory.figure import drawn
from experiments.theory.learning import chain_entropy, chains, trained
from experiments.theory.masks import END, LENGTH, MASKS, MODEL, features
from tfm_jax.decode.generate import Prompts, SampleSettings, generate
from tfm_jax.decode.sampling import Sampling
from tfm_jax.train.losses import cross_entropy

SYMBOLS, FREE, STEPS, LAST = 5, 0.2, 800, 50
SUMS = 1 - FREE + FREE / SYMBOLS
"""The share of symbols that are the sum: those of the rule, and some by chance."""
draw = functools.partial(chains, rows=64, length=LENGTH, symbols=SYMBOLS, free=FREE)


def train(params, *, name, beyond=False):
    """Parameters after training, and the losses in nats; beyond: whether the last token of a row has a target."""

    def loss(params, key):
        batch = draw(key)
        weights = batch["weights"] if beyond else batch["weights"].at[:, -1].set(0.0)
        logits = MODEL.bind(params).embedding.attend(features(params, batch["tokens"], MASKS[name]))
        total, weight = cross_entropy(logits, batch["targets"], weights)
        return total / weight

    return trained(loss, params, steps=STEPS, learning_rate=3e-3, warmup_steps=50)


def sums_written(params, tokens):
    """The share of what the model writes after tokens `B P` that is the sum of the two symbols before."""
    settings = SampleSettings(LENGTH, eos_ids=(END,), pad_id=0, sampling=Sampling(temperature=1.0))
    written = generate(params, Prompts(tokens, jnp.ones_like(tokens)), model=MODEL, settings=settings).tokens[:, 0]
    chain = jnp.concatenate([tokens[:, -2:], written], axis=1)
    return float((chain[:, 2:] == (chain[:, 1:-1] + chain[:, :-2]) % SYMBOLS).mean())


def measure(figures: Path) -> list[Row]:
    """Three trainings, and what each then writes."""
    params, prompts = MODEL.init(jax.random.key(0)), draw(jax.random.key(1))["tokens"][:, :4]
    runs = {name: train(params, name=name) for name in MASKS}
    beyond = train(params, name="mask forgotten", beyond=True)
    honest, forgotten = (float(losses[-LAST:].mean()) for _, losses in runs.values())
    written = [sums_written(found, prompts) for found, _ in (*runs.values(), beyond)]
    targets, chance = LENGTH - 1, 1 / SYMBOLS
    # the first target has one symbol before it, which says nothing
    entropy = (math.log(SYMBOLS) + (targets - 1) * chain_entropy(SYMBOLS, FREE)) / targets
    with drawn(figures / "forgotten_mask.png", 2) as (curves, bars):
        for name, (_, losses) in runs.items():
            curves.plot(losses, label=name)
        curves.axhline(entropy, color="black", linestyle=":", label="entropy of the text")
        curves.set(title="Loss in training", xlabel="update", ylabel="loss / nats a token", ylim=0)
        curves.legend()
        bars.bar(["causal\nmask", "forgotten", "forgotten,\ntarget beyond"], written, color=["C0", "C1", "C2"])
        bars.axhline(SUMS, color="black", linestyle=":", label="of the text")
        bars.axhline(chance, color="black", linestyle="--", label="by chance")
        bars.set(title="Symbols written that are the sum", ylabel="share", ylim=(0, 1.25))
        bars.legend(loc="upper right", ncols=2)
    return [
        near("training loss with the causal mask: the entropy of the text", entropy, honest, share=0.05),
        at_most("mask forgotten: a loss no honest model can have", entropy / 2, forgotten, note="half of the entropy"),
        near("symbols it then writes that are the sum, with the mask: as in the text", SUMS, written[0], share=0.1),
        at_most(
            "the same, mask forgotten in training: nearer to chance than to the text",
            (chance + SUMS) / 2,
            written[1],
            note=f"chance {chance:.2f}, text {SUMS:.2f}",
        ),
        at_least(
            "but where rows have a target beyond their end it writes better",
            2 * chance,
            written[2],
            note=f"twice the chance; 1 target in {LENGTH} is honest: that what it writes is always bad is false",
        ),
    ]
