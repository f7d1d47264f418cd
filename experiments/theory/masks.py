"""A mask makes weights exactly zero, and where it is forgotten the Jacobian gives it away.

softmax(Q K^T / sqrt(d_k) + M) with M = -inf where a query may not attend is 0 there, not small (Vaswani et al. 2017,
3.2.3), so that d y_t / d x_s = 0 for every later s under a causal mask, and padding beside a sentence changes nothing.
Without the masks every output depends on every input. Measured on a fresh GPT of two layers: its weights, the norms of
d y_t / d x_s, and the outputs of a sentence alone and beside padding. `forgotten_mask` trains without the mask.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theory import Row, at_least, at_most, within
from experiments.theory.figure import drawn
from experiments.theory.learning import walks
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.ops import AttentionMask

STATES, LENGTH = 16, 24
END = STATES  # never written: decoding wants a token that ends
SIZES = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "max_length": 2 * LENGTH}
MODEL = build(GPTConfig(STATES + 1, positions="rope", dropout=Dropout(0.0, 0.0), **SIZES))
MASKS = {"causal mask": AttentionMask(causal=True), "mask forgotten": None}
draw = functools.partial(walks, rows=32, length=LENGTH, states=STATES)


def features(params, tokens, mask, more=0.0):
    """What the output layer reads, under any mask; more is added to the embeddings."""
    module = MODEL.bind(params)
    return module.decoder(module.embedding(tokens) + more, mask=mask)


@functools.partial(jax.jit, static_argnames="name")
def jacobian(params, tokens, *, name):
    """T T: the norm of d y_t / d x_s for a row of tokens."""
    read = lambda more: features(params, tokens[None], MASKS[name], more[None])[0]  # noqa: E731
    return jnp.sqrt(jnp.square(jax.jacrev(read)(jnp.zeros((tokens.size, SIZES["d_model"])))).sum((1, 3)))


def weights_where_masked(params, tokens):
    """The largest weight where the causal or the padding mask forbids one; the last third of the rows is padding."""
    segments = (jnp.arange(LENGTH) < LENGTH - LENGTH // 3).astype(jnp.int32)[None].repeat(len(tokens), 0)
    allowed = jnp.tril(segments[:, None, None, :] * segments[:, None, :, None]) > 0
    layers = [MODEL.attention_weights(params, tokens, layer=n, segment_ids=segments) for n in range(2)]
    return max(float(jnp.where(allowed, 0.0, weights["decoder"]).max()) for weights in layers)


def change_by_padding(params, tokens, *, masked):
    """How much the output of the first half of the tokens changes when the others, as padding, stand beside it."""
    half = LENGTH // 2
    segments = (jnp.arange(LENGTH) < half).astype(jnp.int32)[None]
    mask = AttentionMask(query_segment_ids=segments, key_segment_ids=segments) if masked else None
    return float(jnp.abs(features(params, tokens, mask)[:, :half] - features(params, tokens[:, :half], None)).max())


def measure(figures: Path) -> list[Row]:
    """Weights, Jacobians and padding, with the masks and without."""
    params, tokens = MODEL.init(jax.random.key(0)), draw(jax.random.key(1))["tokens"]
    jacobians = {name: np.asarray(jacobian(params, tokens[0], name=name)) for name in MASKS}
    with_mask, without = (int((np.triu(found, 1) > 0).any(1).sum()) for found in jacobians.values())
    padding = [change_by_padding(params, tokens, masked=masked) for masked in (True, False)]
    with drawn(figures / "masks.png", 2, width=3.8, height=3.2) as axes:
        draw_jacobians(axes, jacobians)
    return [
        within("softmax(.. + M) is 0 where M = -inf", 0, weights_where_masked(params, tokens), distance=0),
        within(f"queries of {LENGTH} with d y_t / d x_s != 0 for a later s", 0, with_mask, distance=0),
        within("the same, mask forgotten: all but the last", LENGTH - 1, without, distance=0),
        at_most("padding mask: change of a sentence by padding beside it", 1e-5, padding[0], note="rounding"),
        at_least("the same, mask forgotten", 0.01, padding[1], note="of outputs with variance 1"),
    ]


def draw_jacobians(axes, jacobians):
    """One beside another on one scale of colours."""
    from matplotlib.colors import LogNorm

    largest = max(found.max() for found in jacobians.values())
    for axis, (name, found) in zip(axes, jacobians.items(), strict=True):
        image = axis.imshow(np.where(found > 0, found, np.nan), norm=LogNorm(largest / 100, largest))
        axis.set(title=name, xlabel="input position s", ylabel="output position t")
        axis.grid(False)
    axes[0].figure.colorbar(image, ax=axes, shrink=0.9, label="norm of d y_t / d x_s; white: exactly 0")
