"""Positions beyond the training length: which ways to tell positions apart still work on longer texts.

Trained on 64 tokens, tested on up to 1,024. Press et al. (2022, ALiBi, fig. 1) found on WikiText-103 that sinusoidal
encodings fail soon after the training length, rotary ones (Su et al. 2021) somewhat later, T5's biases later still, and
that ALiBi's do not. Why: what is added to the embedding at position 65 was never seen; RoPE turns by angles never seen;
T5's and Shaw's distances beyond a limit share one value, which was; ALiBi's -m (t - s) goes on as a line. A learned
table has no row 65: the library refuses with `ValueError` and does not clamp.

Task (`learning.registers`): the value that an assignment replaces, that of the latest earlier assignment to the same
register. It needs the order of tokens that are otherwise alike, and once learnt it is no harder in a longer text: half
of the answers stand at most 6 tokens back whatever its length. T5's limit is 32 tokens, Shaw's 16, both well within the
training length, as in the papers. Measured: perplexity, exp(mean cross entropy), over that at 64 tokens: a kind works
where that is at most 1.25. T5 and Shaw work on twice the length, but not on any: what stands beyond their limit has one
value, and takes the more of the softmax the more tokens stand there.
"""

import functools
from pathlib import Path

import jax
import numpy as np

from experiments.theory import Row, at_least, at_most, within
from experiments.theory.figure import drawn
from experiments.theory.learning import language_loss, registers, trained
from tfm_jax.models import Model, build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig

LENGTHS = (64, 128, 256, 512, 1024)
NAMES = VALUES = 8
STEPS, ROWS, RATE, WARMUP = 800, 32, 3e-3, 50
TEST_TOKENS, WORKS = 16_384, 1.25
KINDS = {
    "sinusoidal": {},
    "learned": {},
    "rope": {},
    "t5": {"t5_buckets": 16, "t5_max_distance": 32},
    "shaw": {"shaw_distance": 16},
    "alibi": {},
}
draw = functools.partial(registers, names=NAMES, values=VALUES)


def small_gpt(kind: str) -> Model:
    """Two layers, 64 wide; a table of learned positions has a row for each position of training."""
    length = LENGTHS[0] if kind == "learned" else LENGTHS[-1]
    sizes = {"num_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4, "max_length": length}
    return build(GPTConfig(NAMES * VALUES, positions=kind, dropout=Dropout(0.0, 0.0), **sizes, **KINDS[kind]))


def losses_by_length(kind: str) -> list[float | None]:
    """Of a model trained at the first length, the mean loss at each, in nats; None where the model refuses."""
    model = small_gpt(kind)
    batches = functools.partial(draw, rows=ROWS, length=LENGTHS[0])
    options = {"steps": STEPS, "learning_rate": RATE, "warmup_steps": WARMUP}
    params, _ = trained(language_loss(model, batches), model.init(jax.random.key(0)), **options)

    def tested(length):
        batches = functools.partial(draw, rows=TEST_TOKENS // length, length=length)
        try:
            return float(jax.jit(language_loss(model, batches))(params, jax.random.key(1)))
        except ValueError as error:
            if "max_length" not in str(error):
                raise
            return None

    return [tested(length) for length in LENGTHS]


def measure(figures: Path) -> list[Row]:
    """Six trainings, and the loss of each by length."""
    found = {kind: losses_by_length(kind) for kind in KINDS}
    _draw(figures / "positions_beyond.png", found)
    rise = {kind: np.exp(np.array(one[1:]) - one[0]) for kind, one in found.items() if kind != "learned"}
    refused = sum(loss is None for loss in found["learned"])
    at_64 = ", ".join(f"{kind} {np.exp(one[0]):.2f}" for kind, one in found.items())
    far, twice = "perplexity at 1,024 / at 64", "perplexity at 128 / at 64"
    return [
        at_most(f"ALiBi extrapolates: {far}", WORKS, rise["alibi"][-1], note=f"at 64: {at_64}; by chance {VALUES}"),
        *(
            row
            for kind, name in (("t5", "T5's biases"), ("shaw", "Shaw's distances"), ("rope", "RoPE's angles"))
            for row in (
                at_most(f"{name} work on twice the length: {twice}", WORKS, rise[kind][0]),
                at_least(f"but not on any: {far}", WORKS, rise[kind][-1], note=name),
            )
        ),
        at_least(f"sinusoidal positions fail at once: {twice}", WORKS, rise["sinusoidal"][0]),
        within("a learned table refuses every longer text", len(LENGTHS) - 1, refused, distance=0, note="ValueError"),
    ]


def _draw(path, found):
    with drawn(path, width=5.4, height=3.6) as (axis,):
        for kind, losses in found.items():
            known = [loss for loss in losses if loss is not None]
            label = f"{kind} (refuses more)" if len(known) < len(losses) else kind
            around = {"markersize": 10, "markerfacecolor": "none"} if kind == "learned" else {}
            axis.plot(LENGTHS[: len(known)], known, "o-", label=label, **around)
        axis.axhline(np.log(VALUES), color="0.6", linestyle="--", label="chance")
        axis.axvline(LENGTHS[0], color="0.6", linestyle=":")
        axis.set(xscale="log", xlabel="length of the test / tokens; trained on 64", ylabel="loss / nats an answer")
        axis.set(xticks=LENGTHS, xticklabels=[f"{length:,}" for length in LENGTHS])
        axis.minorticks_off()
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
