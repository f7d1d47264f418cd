"""Residuals carry the gradient through depth, and tokens stay apart; where the norm stands says how large it is.

post-LN (Vaswani et al. 2017)   x <- LN(x + sublayer(x))
pre-LN (Xiong et al. 2020)      x <- x + sublayer(LN(x)), and LN at the end
no residual                     x <- LN(sublayer(x))

Xiong et al. (2020), theorem 1: at the start the gradient of the last feed-forward network has a norm of order
d sqrt(ln d) with post-LN, whatever the number of layers L, and d sqrt(ln d / L) with pre-LN: exponents of L of 0 and
-1/2. Without residuals attention averages the tokens until they are equal (Dong et al. 2021), and then scores have no
effect: the gradient of queries and keys vanishes (Noci et al. 2022). That all gradients vanish is false where each
sublayer is normalised: each then passes on a signal of one size.

Measured in fresh stacks of 6 to 48 layers on random input: the norm of each layer's gradient of one token's loss.
"""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.theory import Row, at_least, at_most, within
from experiments.theory.figure import drawn
from tfm_jax.nn import EncoderBlock, plain
from tfm_jax.nn.blocks import BlockSizes, stacked
from tfm_jax.ops import BlockSettings, encoder_block, feed_forward, layer_norm, multi_head_attention

DEPTHS = (6, 12, 24, 48)
SIZES, ROWS, LENGTH, CLASSES = BlockSizes(64, 256, 4), 8, 32, 64
POST = BlockSettings(norm="post")
PRE = replace(POST, norm="pre")


def without_residual(params, x):
    """A block whose sublayers replace x instead of being added to it."""
    attended = multi_head_attention(params["attention"], x, x, x)
    x = layer_norm(params["attention_norm"], attended, eps=POST.norm_eps)
    forwarded = feed_forward(params["feed_forward"], x, activation=POST.activation)
    return layer_norm(params["feed_forward_norm"], forwarded, eps=POST.norm_eps)


def with_residual(params, x, *, settings):
    return encoder_block(params, x, mask=None, settings=settings)[0]


BLOCKS = {
    "post-LN": functools.partial(with_residual, settings=POST),
    "pre-LN": functools.partial(with_residual, settings=PRE),
    "no residual": without_residual,
}


def likeness(x):
    """Mean cosine between the tokens of a row: 1 where they are all alike."""
    unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.einsum("BTD,BSD->BTS", unit, unit).mean()


@functools.partial(jax.jit, static_argnames="kind")
def by_layer(layers, key, *, kind):
    """Of each layer, norms of the gradient of one token's loss and likeness of outputs: means over ROWS rows."""
    found = jax.vmap(functools.partial(_of_a_row, layers, kind))(jax.random.split(key, ROWS))
    return jax.tree.map(lambda x: x.mean(axis=0), found)


def _of_a_row(layers, kind, key):
    x_key, head_key = jax.random.split(key)
    x = jax.random.normal(x_key, (1, LENGTH, SIZES.d_model))
    head = jax.random.normal(head_key, (SIZES.d_model, CLASSES)) * SIZES.d_model**-0.5
    norm = {"scale": jnp.ones(SIZES.d_model), "bias": jnp.zeros(SIZES.d_model)}

    def loss(layers):
        body = lambda x, layer: ((x := BLOCKS[kind](layer, x)), likeness(x))  # noqa: E731
        y, alike = jax.lax.scan(body, x, layers)
        y = layer_norm(norm, y, eps=POST.norm_eps) if kind == "pre-LN" else y
        return -jax.nn.log_softmax(y[0, -1] @ head)[0], alike

    grads, alike = jax.grad(loss, has_aux=True)(layers)
    attention = grads["attention"]
    parts = {"all": grads, "scores": [attention["query"], attention["key"]], "last": grads["feed_forward"]["down"]}
    return {name: norms(tree) for name, tree in parts.items()} | {"alike": alike}


def norms(tree):
    """The norm of each layer's part of stacked arrays."""
    return jnp.sqrt(sum(jnp.square(x).reshape(x.shape[0], -1).sum(axis=1) for x in jax.tree.leaves(tree)))


def measure(figures: Path) -> list[Row]:
    """Fresh stacks of every depth."""
    fresh = {n: plain(stacked(lambda rngs: EncoderBlock(SIZES, POST, rngs=rngs), n, rngs=nnx.Rngs(0))) for n in DEPTHS}
    found = {
        kind: {n: jax.tree.map(np.asarray, by_layer(fresh[n], jax.random.key(1), kind=kind)) for n in DEPTHS}
        for kind in BLOCKS
    }
    with drawn(figures / "residuals.png", 2) as axes:
        draw_depths(axes, found)
    slope = {
        kind: np.polyfit(np.log(DEPTHS), [np.log(one["last"][-1]) for one in each.values()], 1)[0]
        for kind, each in found.items()
    }
    deep, note = {kind: each[DEPTHS[-1]] for kind, each in found.items()}, f"{DEPTHS[-1]} layers"
    scores = {kind: np.median(one["scores"]) for kind, one in deep.items()}
    alone = deep["no residual"]["all"]
    return [
        within("post-LN: gradient of the last layer ~ L^0", 0.0, slope["post-LN"], distance=0.15),
        within("pre-LN: gradient of the last layer ~ L^(-1/2)", -0.5, slope["pre-LN"], distance=0.15),
        at_least("no residual: tokens alike (mean cosine) after 6 layers", 0.99, found["no residual"][6]["alike"][-1]),
        at_most("pre-LN: tokens stay apart", 0.95, deep["pre-LN"]["alike"][-1], note=note),
        at_most(
            "no residual: gradient of W_Q and W_K over that with pre-LN",
            1e-3,
            scores["no residual"] / scores["pre-LN"],
            note=f"median of {note}",
        ),
        at_least(
            "no residual, but normalised: gradient of the first layer over the last's",
            0.1,
            alone[0] / alone[-1],
            note=f"{note}; that without residuals all gradients vanish is false here",
        ),
    ]


def draw_depths(axes, found):
    """Both quantities against the layer, for every depth measured; paler lines are shallower stacks."""
    titles = {"scores": "Gradient of W_Q and W_K, fresh stack", "alike": "Tokens grow alike"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for colour, (kind, each) in enumerate(found.items()):
            for depth, one in each.items():
                label, alpha = (kind, 1.0) if depth == max(each) else (None, 0.35)
                axis.plot(np.arange(1, depth + 1), one[name], color=f"C{colour}", alpha=alpha, label=label)
        axis.set(title=title, xlabel="layer")
        axis.legend()
    axes[0].set(ylabel="norm", yscale="log")
    axes[1].set(ylabel="mean cosine between tokens", ylim=(0, 1.05))
