"""Where the parameters are: 4 d^2 in attention, 8 d^2 in the feed-forward network.

Vaswani et al. (2017), sections 3.2.2 and 3.3. Query, key and value of N heads of size d / N, and the output that joins
them, are four matrices d x d however many heads share them; the feed-forward network with d_ff = 4 d has two, d x 4d.
With every bias and the two norms (scale and bias) an encoder block has

    4 d^2 + 4 d  +  8 d^2 + 5 d  +  2 * 2 d  =  12 d^2 + 13 d,

3,152,384 at d = 512. About 2.4M is often quoted for it. That is 9 d^2 = 2,359,296: the feed-forward network and one
matrix of attention. What it leaves out is three of the four, 3 d^2 = 786,432.

Counted in the library's modules, leaf by leaf; nothing is measured with a tolerance but what the paper rounds.
"""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from experiments.theory import Row, near, within
from experiments.theory.figure import drawn
from tfm_jax.models import build, preset
from tfm_jax.nn import DecoderBlock, Encoder, EncoderBlock, FeedForward, MultiHeadAttention, plain
from tfm_jax.nn.blocks import BlockSizes
from tfm_jax.ops import BlockSettings

D, D_FF, LAYERS = 512, 2048, 6
HEADS = (1, 2, 4, 8, 16, 32, 64)
SIZES, SETTINGS = BlockSizes(D, D_FF, num_heads=8), BlockSettings()


def counts(kind: type[nnx.Module], *sizes, **options) -> dict[str, int]:
    """Of a new module, by parameter; nothing is allocated."""
    leaves = jax.tree_util.tree_leaves_with_path(
        plain(nnx.eval_shape(lambda: kind(*sizes, **options, rngs=nnx.Rngs(0))))
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf.size for path, leaf in leaves}


def total(counted: dict[str, int], *parts: str) -> int:
    """Of the parameters whose name contains one of `parts`, or of all."""
    return sum(size for name, size in counted.items() if not parts or any(part in name for part in parts))


def matrices(counted: dict[str, int]) -> int:
    """Of all that is no bias and no norm."""
    return total(counted) - total(counted, "bias", "norm")


def measure(figures: Path) -> list[Row]:
    """Exact counts, and where they are."""
    attention = [matrices(counts(MultiHeadAttention, D, heads)) for heads in HEADS]
    block = counts(EncoderBlock, SIZES, SETTINGS)
    stack = total(counts(Encoder, SIZES, SETTINGS, LAYERS))
    draw(figures / "parameters.png", block, counts(DecoderBlock, SIZES, SETTINGS))
    left_out = total(block) - matrices(block)
    exactly = {"distance": 0.0}
    return [
        within(
            "attention has 4 d^2 whatever the heads",
            4 * D**2,
            max(attention, key=lambda count: abs(count - 4 * D**2)),
            **exactly,
            note=f"d = {D}, without biases; of {', '.join(map(str, HEADS))} heads the count farthest from it",
        ),
        within("the FFN has 8 d^2", 8 * D**2, matrices(counts(FeedForward, D, D_FF)), **exactly, note="without biases"),
        within(
            "an encoder block has 12 d^2 + 13 d = 3.15M",
            12 * D**2 + 13 * D,
            total(block),
            **exactly,
            note=f"d = {D}, d_ff = {D_FF}; {left_out:,} of them in biases and norms",
        ),
        near(
            "the often quoted 2.4M is a block without three of the four matrices of attention",
            2.4e6,
            matrices(block)
            - total({name: block[name] for name in block if "bias" not in name}, ".query", ".key", ".value"),
            share=0.02,
            note="9 d^2 = 2,359,296, without biases: the whole block has 3.15M",
        ),
        within("a stack of six has 6 (12 d^2 + 13 d) = 18.9M", LAYERS * (12 * D**2 + 13 * D), stack, **exactly),
        near(
            "the base model of Vaswani et al. has 65M",
            65e6,
            build(preset("transformer_base")).num_parameters,
            share=0.05,
            note="6 + 6 layers and one embedding of 37,000 rows, about the paper's vocabulary",
        ),
    ]


def draw(path: Path, encoder: dict[str, int], decoder: dict[str, int]) -> None:
    """A bar for each block, cut into its parts."""
    parts = {
        "self-attention": ("attention.",),
        "cross-attention": ("cross_attention.",),
        "feed-forward": ("feed_forward.",),
        "norms (2,048 and 3,072)": ("norm.",),
    }
    sums = np.array([[total(block, *names) for block in (encoder, decoder)] for names in parts.values()]) / 1e6
    sums[0] -= sums[1]  # "attention." is in the other's name too
    with drawn(path, width=5.6, height=2.4) as (axes,):
        left = np.zeros(2)
        for name, row in zip(parts, sums, strict=True):
            axes.barh(["encoder block", "decoder block"], row, left=left, label=name)
            left += row
        for y, end in enumerate(left):
            axes.text(end + 0.05, y, f"{end:.2f}M", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0.0, 5.0)
        axes.set_xlabel(f"parameters / million ($d$ = {D}, $d_{{ff}}$ = {D_FF})")
        axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1.0, handlelength=1.0)
