"""BERT, GPT and T5 are one architecture; they differ in what a position may see and in what they learn from a text.

Of n positions, the pairs (one that reads, one that is seen) that have a weight are in
- BERT (Devlin et al. 2019), where every position sees every other, n^2;
- GPT (Radford et al. 2018), where each sees itself and those before, n (n + 1) / 2;
- a prefix language model (Raffel et al. 2020, section 3.2.1), where the first p see each other too,
  n (n + 1) / 2 + p (p - 1) / 2;
- T5, with S positions of the encoder, T of the decoder and cross-attention, S^2 + T (T + 1) / 2 + T S. That is the
  prefix language model's number for p = S and n = S + T: the same mask, on two stacks.
Counted are the weights above 0 that small random models give for one sentence.

What they learn from it, by `data.tasks`: BERT about 15 % of the words, those that are chosen (and mostly masked); GPT
every next word; T5 the hidden runs, round(0.15 n) words. So a text teaches GPT seven times as many words as BERT.
"""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, near, within
from experiments.theory.figure import drawn
from tfm_jax.config import Corruption, Data
from tfm_jax.data.examples import Examples, encode
from tfm_jax.data.sources import Text
from tfm_jax.data.tasks import Example
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import BERTConfig, GPTConfig, TransformerConfig, build
from tfm_jax.ops import AttentionMask, attention_weights

SENTENCE = "the cat sat on the mat because it was tired"
EPOCHS, SEED = 1_000, 34  # in each epoch a corruption hides other words
OBJECTIVES = {
    "mask": "masked (BERT)",
    "none": "next word (GPT)",
    "spans": "hidden runs (T5)",
    "prefix": "after a prefix",
}


@functools.cache
def tokenizer() -> Tokenizer:
    """Its pieces are the sentence's words."""
    return Tokenizer.train([SENTENCE] * 9, kind="wordpiece", vocab_size=60, mask=True, sentinels=4)


def words(ids: np.ndarray) -> list[str]:
    """To label an axis."""
    return [piece.strip() for piece in tokenizer().pieces(ids.tolist())]


def examples(corruption: str) -> Examples:
    """The sentence as an objective has it."""
    data = Data(corruption=Corruption(corruption, sentinels=4), max_length=32)
    return encode(Text(([SENTENCE],), ("sentence",)), tokenizer(), data, vocab_size=tokenizer().vocab_size)


def seen_pairs(cases: dict[str, Example]) -> dict[str, np.ndarray]:
    """By family, whether the position of a row gives the one of a column a weight."""
    size, sizes = tokenizer().vocab_size, {"max_length": 32, "d_model": 16, "d_ff": 16, "num_heads": 1}
    bert, gpt = (build(config(size, num_layers=1, **sizes)) for config in (BERTConfig, GPTConfig))
    t5 = build(TransformerConfig(size, num_encoder_layers=1, num_decoder_layers=1, **sizes))

    def seen(model, *tokens):
        tokens, params = [jnp.asarray(ids)[None] for ids in tokens], model.init(jax.random.key(0))
        found = model.attention_weights(params, *tokens, layer=0)
        return {place: np.asarray(weights[0, 0] > 0) for place, weights in found.items()}

    p, two = len(cases["prefix"].source), seen(t5, cases["spans"].source, cases["spans"].tokens)
    query = jax.random.normal(jax.random.key(1), (1, p + len(cases["prefix"].tokens), 1, 8))
    mask = AttentionMask(causal=True, prefix_lengths=jnp.array([p]))
    return {
        "BERT": seen(bert, cases["mask"].tokens)["encoder"],
        "GPT": seen(gpt, cases["none"].tokens)["decoder"],
        "prefix LM": np.asarray(attention_weights(query, query, mask=mask)[0, 0] > 0),
        "T5": np.block([[two["encoder"], np.zeros_like(two["cross"].T)], [two["cross"], two["decoder"]]]),
    }


def measure(figures: Path) -> list[Row]:
    """One sentence, four masks, four objectives."""
    made = {name: examples(name) for name in OBJECTIVES}
    cases = {name: made[name].make(0, seed=SEED, epoch=0) for name in OBJECTIVES}
    seen = seen_pairs(cases)
    draw_masks(figures, seen, cases)
    draw_objectives(figures, cases)
    n, total, words_ = len(seen["GPT"]), len(seen["prefix LM"]), len(SENTENCE.split())
    p, S, T = len(cases["prefix"].source), len(cases["spans"].source), len(cases["spans"].tokens)
    pairs = {
        "BERT": ("each of n positions sees all, n^2 pairs", len(seen["BERT"]) ** 2),
        "GPT": ("each sees itself and those before, n (n + 1) / 2 pairs", n * (n + 1) / 2),
        "prefix LM": ("n (n + 1) / 2 + p (p - 1) / 2 pairs", total * (total + 1) / 2 + p * (p - 1) / 2),
        "T5": (
            "S^2 + T (T + 1) / 2 + T S pairs, a prefix LM's for p = S and n = S + T",
            S * S + T * (T + 1) / 2 + T * S,
        ),
    }
    chosen = sum(made["mask"].make(0, seed=SEED, epoch=epoch).predicted.sum() for epoch in range(EPOCHS))
    hidden = np.isin(cases["spans"].targets, [*tokenizer().special_ids], invert=True).sum()
    deviation = math.sqrt(0.15 * 0.85 / (words_ * EPOCHS))
    return [
        *(near(f"{name}: {what}", right, seen[name].sum(), share=0.0) for name, (what, right) in pairs.items()),
        within(
            "BERT predicts 15 % of the words, GPT all",
            0.15,
            chosen / (words_ * EPOCHS),
            distance=4 * deviation,
            note=f"four standard deviations of a binomial: {EPOCHS} epochs of {words_} words",
        ),
        near("T5 hides round(0.15 n) / n of n words", round(0.15 * words_) / words_, hidden / words_, share=0.0),
    ]


def draw_masks(figures: Path, seen: dict[str, np.ndarray], cases: dict[str, Example]) -> None:
    """Who sees whom; a red line stands between prefix and rest, source and target."""
    shown = dict(zip(seen, (cases[name] for name in ("mask", "none", "prefix", "spans")), strict=True))
    with drawn(figures / "families.png", 4, width=3.6, height=4.1) as panels:
        for panel, (name, case) in zip(panels, shown.items(), strict=True):
            ids = case.tokens if case.source is None else np.concatenate([case.source, case.tokens])
            n, edges = len(ids), np.arange(len(ids) + 1) - 0.5
            panel.pcolormesh(
                edges, edges, seen[name], cmap="Blues", vmin=0.0, vmax=1.4, edgecolor="white", linewidth=0.5
            )
            panel.set(
                title=f"{name}: {seen[name].sum()} of {n * n} pairs", xlabel="is seen", ylabel="reads", aspect="equal"
            )
            panel.set_xticks(range(n), words(ids), rotation=90, fontsize=7)
            panel.set_yticks(range(n), words(ids), fontsize=7)
            panel.invert_yaxis()
            panel.grid(visible=False)
            for line in (panel.axvline, panel.axhline) if case.source is not None else ():
                line(len(case.source) - 0.5, color="tab:red", linewidth=1.0)


def draw_objectives(figures: Path, cases: dict[str, Example]) -> None:
    """What each objective reads and is to predict; what has no weight is left out."""
    lines = {}
    for name, case in cases.items():
        lines |= {} if case.source is None else {f"{OBJECTIVES[name]}: encoder reads": (case.source, None)}
        weighed = np.ones(len(case.targets), bool) if case.predicted is None else case.predicted
        lines |= {
            f"{OBJECTIVES[name]}: reads": (case.tokens, None),
            f"{OBJECTIVES[name]}: predicts": (case.targets, weighed),
        }
    with drawn(figures / "families_objectives.png", width=11.5, height=4.2) as (panel,):
        for line, (ids, weighed) in enumerate(lines.values()):
            for column, word in enumerate(words(ids)):
                if weighed is None or weighed[column]:
                    box = {
                        "facecolor": "tab:blue" if weighed is None else "tab:orange",
                        "alpha": 0.3,
                        "edgecolor": "none",
                    }
                    panel.text(column, line, word, ha="center", va="center", fontsize=7, bbox=box)
        panel.set(xlim=(-0.8, 11.8), ylim=(len(lines) - 0.4, -0.6), xlabel="place in the sequence (tokens)")
        panel.set_yticks(range(len(lines)), lines)
        panel.set_xticks(range(12))
        panel.set_title("One sentence, four objectives: what is read (blue), what is predicted and weighed (orange)")
