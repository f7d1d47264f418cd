"""Heads cost no parameters, let one layer look at several places, and specialise.

N heads of size d / N have 4 d^2 weights whatever N is (Vaswani et al. 2017, section 3.2.2; table 3, A: one head is 0.9
BLEU worse than eight, and 32 are worse again). A head mixes values by one distribution, so what needs two places at
once needs two heads, or one that tells two mixed values apart. Head size d / N below the number of places bounds how
sharp a head can look (Bhojanapalli et al. 2020).

Task: a source of n symbols x; target t is the pair (x_{n-1-t}, x_{t+3 mod n}) as one token. An encoder-decoder of one
layer each is trained for equally many updates with 1 to 16 heads. The alignment is known, so the score of a head of
cross-attention is its mean weight at the right place: 1 / n for weights that know nothing (an untrained model, a
shuffled alignment), more than a half for a head that has found its place.

Previous-token heads (Clark et al. 2019; Elhage et al. 2021): a chain of second order, x_t = x_{t-1} + x_{t-2} mod 5 in
four of five cases, else any symbol, cannot be predicted from the last symbol alone. A sum is symmetric, so a head of a
GPT of one layer has all that it needs when it gives half of its weight to the token before and the rest to the token
itself; untrained weights give the token before the mean of 1 / (t + 1).
"""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.theory import Row, at_least, at_most, near, within
from experiments.theory.figure import drawn
from experiments.theory.learning import Batch, chains, language_loss, trained
from tfm_jax.models import GPTConfig, Model, TransformerConfig, build
from tfm_jax.train.objectives import TextToText

HEADS, STEPS, ROWS = (1, 2, 4, 8, 16), 800, 64
SYMBOLS, N = 5, 8  # of a source
PLACES = {"reversed": (N - 1 - np.arange(N)), "three on": (np.arange(N) + 3) % N}
START = SYMBOLS**2
CHAIN, CHAIN_HEADS = 16, 4  # tokens
draw_chains = functools.partial(chains, rows=ROWS, length=CHAIN, symbols=SYMBOLS, free=0.2)


def pairs(key: jax.Array) -> Batch:
    """Sources and the pairs of symbols that are their targets."""
    source = jax.random.randint(key, (ROWS, N), 0, SYMBOLS, jnp.int32)
    one, other = (source[:, place] for place in PLACES.values())
    targets = one * SYMBOLS + other
    tokens = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    weights = jnp.ones(targets.shape, jnp.float32)
    return {"source_tokens": source, "tokens": tokens, "targets": targets, "weights": weights}


def seq2seq(heads: int) -> tuple[Model, Callable]:
    """The model with so many heads, and its loss."""
    sizes = {"d_model": 64, "d_ff": 64, "num_heads": heads, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = build(TransformerConfig(START + 1, max_length=N, tied_embeddings="none", **sizes))

    def loss(params, key):
        total, weight = TextToText(model)(params, pairs(key), None)["loss"]
        return total / weight

    return model, loss


def alignment(model: Model, params: dict, places: np.ndarray) -> Float[Array, " N"]:
    """Of each cross-attention head, the mean weight that target t gives source places[t]."""
    batch = pairs(jax.random.key(7))
    weights = model.attention_weights(params, batch["source_tokens"], batch["tokens"], layer=0)["cross"]
    return weights[:, :, np.arange(N), places].mean(axis=(0, 2))


def on_neighbours(model: Model, params: dict) -> Float[np.ndarray, "2 N"]:
    """Of each head of a GPT, the mean weights that token t >= 1 gives itself and token t - 1."""
    weights = model.attention_weights(params, draw_chains(jax.random.key(7))["tokens"], layer=0)["decoder"]
    now = np.arange(1, CHAIN)
    return np.stack([weights[:, :, now, now - back].mean(axis=(0, 2)) for back in (0, 1)])


def measure(figures: Path) -> list[Row]:
    """Five trainings on pairs, one on chains."""
    sizes, losses, scores = {}, {}, {}
    for heads in HEADS:
        model, loss = seq2seq(heads)
        start = model.init(jax.random.key(0))
        params, curve = trained(loss, start, steps=STEPS, learning_rate=2e-3, warmup_steps=50)
        sizes[heads], losses[heads] = model.num_parameters, np.asarray(curve)
        for name, tree in (("untrained", start), ("trained", params)):
            scores[heads, name] = np.stack([alignment(model, tree, place) for place in PLACES.values()])
        random = np.random.default_rng(0)
        scores[heads, "shuffled"] = np.stack([alignment(model, params, random.permutation(N)) for _ in range(20)])
    last = {heads: float(np.median(curve[-200:])) for heads, curve in losses.items()}

    own = {"d_model": 64, "d_ff": 128, "num_heads": CHAIN_HEADS, "num_layers": 1, "positions": "rope"}
    gpt = build(GPTConfig(SYMBOLS, max_length=CHAIN, **own))
    start = gpt.init(jax.random.key(1))
    params, _ = trained(language_loss(gpt, draw_chains), start, steps=STEPS, learning_rate=2e-3, warmup_steps=50)
    (_, before), (itself, after) = on_neighbours(gpt, start), on_neighbours(gpt, params)
    draw(figures, losses, scores, before, after)
    least = scores[8, "trained"].max(axis=1).min()
    shuffled, uniform = scores[8, "shuffled"].max(axis=1).mean(), np.mean(1 / np.arange(2, CHAIN + 1))
    return [
        near("Heads cost nothing: parameters with 16 heads / with 1", 1.0, sizes[16] / sizes[1], share=0.0),
        at_most(
            "One head of 64 learns to look at two places, too: loss",
            0.1,
            last[1],
            note="nats; that it takes two heads is false: it gives both weight and tells the mixed values apart",
        ),
        at_least(
            "Heads smaller than the number of places are the worse: loss of 16 heads of 4 / the worst of the others",
            1.0,
            last[16] / max(loss for heads, loss in last.items() if heads < 16),
            note=", ".join(f"{heads} heads {loss:.2g}" for heads, loss in last.items()),
        ),
        within(
            "A cross-attention head that knows nothing gives the right place 1 / n: best of 8, untrained",
            1 / N,
            scores[8, "untrained"].max(),
            distance=0.5 / N,
            note=f"trained, against a shuffled alignment, {shuffled:.2f}",
        ),
        at_least(
            "A trained one gives it more than half: the best of 8 for the harder of both places",
            0.5,
            least,
            note="heads of one place give the other " + f"{scores[8, 'trained'].min(axis=1).max():.2f} at least",
        ),
        near(
            "A previous-token head: half of its weight on the token before",
            0.5,
            after.max(),
            share=0.15,
            note=f"best of {CHAIN_HEADS}; untrained {before.max():.2f}, uniform {uniform:.2f}",
        ),
        at_least(
            "and most of the rest on the token itself",
            0.5,
            itself[after.argmax()] / (1 - after.max()),
            note=f"the same head: {itself[after.argmax()]:.2f}",
        ),
    ]


def draw(figures: Path, losses: dict, scores: dict, before: np.ndarray, after: np.ndarray) -> None:
    """Losses by heads, and what each head looks at."""
    with drawn(figures / "heads.png", 3) as (curves, places, tokens):
        for heads, curve in losses.items():
            smooth = curve.reshape(-1, 20).mean(axis=1)
            curves.plot(20 * np.arange(1, len(smooth) + 1), smooth, label=f"{heads} of {64 // heads}")
        curves.set(title="Heads of equal parameters", xlabel="update", ylabel="loss (nats a token)", yscale="log")
        curves.legend(title="heads of size")
        head = np.arange(8)
        for name, score, shift in zip(PLACES, scores[8, "trained"], (-0.2, 0.2), strict=True):
            places.bar(head + shift, score, 0.4, label=f"place {name}")
        places.axhline(1 / N, color="grey", linestyle="--", label="untrained, 1 / n")
        places.set(
            title="Cross-attention heads, trained", xlabel="head", ylabel="weight at the right place", ylim=(0, 1.25)
        )
        places.set_xticks(head)
        places.legend(ncols=2, loc="upper center", fontsize=7)
        head = np.arange(CHAIN_HEADS)
        tokens.bar(head - 0.2, after, 0.4, label="trained")
        tokens.bar(head + 0.2, before, 0.4, label="untrained")
        tokens.set(title="Heads of a GPT", xlabel="head", ylabel="weight on the token before", ylim=(0, 1.1))
        tokens.set_xticks(head)
        tokens.legend()
