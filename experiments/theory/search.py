"""The likeliest output is not found one token at a time, and without a length penalty it is too short.

Greedy search takes argmax p(y_t | y_<t) at each step; what is wanted is argmax over y of the product of all of them. On
the Markov chain `GREEDY_IS_WRONG` they differ by a known factor, and two beams find the right one. Textbooks add that a
wider beam finds nothing worse. That is false until it holds every prefix: on `WIDER_IS_WORSE` greedy search beats two
beams, as two beginnings that look better crowd out the right one. From (V - 1)^(T - 1) beams on it is exhaustive.

log p falls with every token, so the likeliest output is short (Murray and Chiang 2018; Stahlberg and Byrne 2019). With
score = log p / length^alpha (Wu et al. 2016, eq. 14) the best output never gets shorter as alpha grows: of optima y at
alpha and z at a larger one, both inequalities together say |z| >= |y|. On `SHORT_IS_LIKELY` the best has one token at
alpha = 0 and three at alpha = 1. Measured with `decode.beam.beam_search` against a list of all outputs.
"""

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, at_most, near, within
from experiments.theory.figure import drawn
from tfm_jax.decode.beam import BeamSettings, Hypotheses, beam_search

END = "."  # the end of an output; the empty string is its beginning
Chain = dict[str, dict[str, float]]
GREEDY_IS_WRONG: Chain = {
    "": {"A": 0.6, "B": 0.4},
    "A": {END: 0.4, "C": 0.35, "D": 0.25},
    "B": {END: 0.9, "C": 0.1},
    "C": {END: 1.0},
    "D": {END: 1.0},
}
WIDER_IS_WORSE: Chain = {
    "": {"A": 0.36, "B": 0.33, "C": 0.31},
    "A": {"D": 0.4, "G": 0.3, "H": 0.3},
    "B": {"E": 0.5, "F": 0.5},
    "C": {"G": 0.5, "H": 0.5},
    "D": {END: 1.0},
} | {letter: {"A": 0.25, "B": 0.25, "C": 0.25, END: 0.25} for letter in "EFGH"}
SHORT_IS_LIKELY: Chain = {"": {END: 0.52, "A": 0.48}, "A": {"B": 0.95, END: 0.05}, "B": {END: 0.99, "B": 0.01}}
MODELS, V, T = 200, 4, 4  # random chains: tokens, the end included, and the longest output
ENOUGH = (V - 1) ** (T - 1)  # beams that hold every prefix
BEAMS, ALPHAS = (1, 2, 3, 4, 8, 16, ENOUGH, ENOUGH + 1), (0.0, 0.5, 1.0, 2.0)


def letters(chain: Chain) -> str:
    """Its tokens in order of their ids, the end first."""
    return END + "".join(sorted(set(chain) - {""}))


def table(chain: Chain) -> np.ndarray:
    """Log-probs of the next token after each token, float64; the last row is that of the beginning."""
    names = letters(chain)
    rows = [chain.get(name, {END: 1.0}) for name in (*names, "")]
    with np.errstate(divide="ignore"):
        return np.log([[row.get(name, 0.0) for name in names] for row in rows])


def searched(tables: np.ndarray, *, beams: int, length: int, alpha: float = 0.0) -> Hypotheses:
    """What beam search finds in each chain of `tables` (M V+1 V)."""
    settings = BeamSettings(beams, length, alpha, early_stopping=False, eos_ids=(0,), pad_id=0)
    return jax.tree.map(np.asarray, _searched(jnp.asarray(tables, jnp.float32), settings))


@functools.partial(jax.jit, static_argnames="settings")
def _searched(tables, settings):
    models = jnp.repeat(jnp.arange(len(tables)), settings.beams)
    begin = jnp.full(len(tables), tables.shape[2], jnp.int32)
    # the last token is all that a chain remembers
    step = lambda tokens, state, position: (tables[models, tokens], state)  # noqa: E731
    return beam_search(step, (), begin, take_rows=lambda state, rows: state, settings=settings)


def gain(chain: Chain) -> float:
    """Probability of what two beams find over that of what one finds."""
    two, one = (searched(table(chain)[None], beams=beams, length=4).log_probs[0, 0] for beams in (2, 1))
    return math.exp(two - one)


def outputs_of(vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """Every output: those that end, and those cut at `length`."""
    bodies = [body for size in range(length) for body in itertools.product(range(1, vocabulary), repeat=size)]
    return [*((*body, 0) for body in bodies), *itertools.product(range(1, vocabulary), repeat=length)]


def all_outputs(tables: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(log p, M n; tokens, n) of every output."""
    outputs, begin = outputs_of(tables.shape[2], length), tables.shape[2]
    log_p = [tables[:, (begin, *output[:-1]), output].sum(axis=1) for output in outputs]
    return np.stack(log_p, axis=1), np.array([len(output) for output in outputs])


def measure(figures: Path) -> list[Row]:
    """Three chains by hand and `MODELS` at random."""
    logits = 1.5 * np.random.default_rng(0).standard_normal((MODELS, V + 1, V))
    tables = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    log_p, lengths = all_outputs(tables, T)
    right, best = log_p.max(axis=1), {W: searched(tables, beams=W, length=T).log_probs[:, 0] for W in BEAMS}
    missed = max(np.abs(best[W] - right).max() for W in BEAMS if W >= ENOUGH)
    found = np.stack([searched(tables, beams=ENOUGH, length=T, alpha=alpha).lengths[:, 0] for alpha in ALPHAS])
    one, three = (searched(table(SHORT_IS_LIKELY)[None], beams=8, length=4, alpha=alpha) for alpha in (0.0, 1.0))
    draw(figures, best, right, found)
    greedy, wider = "Greedy search misses the likeliest output", "A wider beam may find what is less likely"
    false = "false in textbooks, where a wider beam finds nothing worse: two better beginnings crowd out the right one"
    random = f"{MODELS} random chains, V = {V}, T = {T}"
    return [
        near(f"{greedy}: p(B.) / p(A.) = (0.4 * 0.9) / (0.6 * 0.4)", 1.5, gain(GREEDY_IS_WRONG), share=1e-5),
        near(
            f"{wider}: p(2 beams) / p(greedy) = (0.33 * 0.5 * 0.25) / (0.36 * 0.4)",
            (0.33 * 0.5 * 0.25) / (0.36 * 0.4),
            gain(WIDER_IS_WORSE),
            share=1e-5,
            note=false,
        ),
        within(
            "From (V - 1)^(T - 1) beams on, beam search is exhaustive: log p below the best of all outputs",
            0.0,
            missed,
            distance=1e-5,
            note=f"{random}, {len(lengths)} outputs each",
        ),
        near(
            "Without a length penalty the best output is shorter: tokens at alpha = 1 / at alpha = 0",
            3.0,
            three.lengths[0, 0] / one.lengths[0, 0],
            share=0.0,
            note="p(.) = 0.52 beats p(AB.) = 0.48 * 0.95 * 0.99; per token it does not",
        ),
        at_most(
            "The best output never gets shorter as alpha of log p / length^alpha grows: cases where it does",
            0,
            (np.diff(found, axis=0) < 0).sum(),
            note=f"alpha {ALPHAS}, {random}",
        ),
    ]


def draw(figures: Path, best: dict[int, np.ndarray], right: np.ndarray, found: np.ndarray) -> None:
    """The outputs of the first chain, what beams find, and lengths."""
    with drawn(figures / "search.png", 3) as (outputs, width, length):
        (log_p,), _ = all_outputs(table(GREEDY_IS_WRONG)[None], 4)
        names, there = letters(GREEDY_IS_WRONG), np.argsort(-log_p)[: np.isfinite(log_p).sum()]
        texts = ["".join(names[i] for i in outputs_of(len(names), 4)[place]) for place in there]
        marks = {"B.": "two beams", "A.": "greedy"}
        bars = outputs.bar(
            texts, np.exp(log_p[there]), color=["tab:orange" if t in marks else "tab:blue" for t in texts]
        )
        outputs.bar_label(bars, [marks.get(text, "") for text in texts])
        outputs.set(title="All outputs of a chain", xlabel="output (. is the end)", ylabel="probability", ylim=(0, 0.4))
        worse = [(best[wide] < best[narrow] - 1e-5).mean() for narrow, wide in itertools.pairwise(BEAMS)]
        width.plot(BEAMS, [(np.abs(best[W] - right) < 1e-5).mean() for W in BEAMS], "o-", label="finds the likeliest")
        width.plot(BEAMS[1:], worse, "s--", label="finds less than the one before")
        width.axvline(ENOUGH, color="grey", linestyle=":", label="(V - 1)^(T - 1)")
        width.set(title=f"{MODELS} random chains", xlabel="beams", ylabel="share of the chains", xscale="log")
        width.set_xticks(BEAMS[:-1], BEAMS[:-1])
        width.minorticks_off()
        width.legend(loc="center left")
        shares = np.stack([(found == size).mean(axis=1) for size in range(1, T + 1)])
        image = length.imshow(shares, origin="lower", aspect="auto", extent=(-0.5, len(ALPHAS) - 0.5, 0.5, T + 0.5))
        length.figure.colorbar(image, label="share of the chains")
        length.plot(found.mean(axis=1), "r.-", label="mean")
        length.set(title="Length of the best output", xlabel="alpha of the length penalty", ylabel="length (tokens)")
        length.set_xticks(range(len(ALPHAS)), ALPHAS)
        length.set_yticks(range(1, T + 1), [*range(1, T), f"{T}\nor cut"])
        length.grid(visible=False)
        length.legend(labelcolor="white", loc="upper left")
