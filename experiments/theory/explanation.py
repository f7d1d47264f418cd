"""Attention is not explanation: weights say neither what mattered, nor are they the only ones with that output.

Jain and Wallace (2019): on a trained classifier the rank correlation (Kendall's tau) of a word's weight with its
importance, by the gradient |dL/dx_t . x_t| or by occlusion |L - L without word t|, is far below 1 (means of 0.3 to 0.5
in their table 2), while both importances agree better with each other. L is the difference of the logits of both
classes. They have it of recurrent models; of a Transformer that is sure of its answer the slope of L says little of
what a missing word does, so that both importances are predicted to agree as badly. x_t is what the first layer reads.
(The embedding stands before a norm, whose gradient is orthogonal to what it reads: gradient . input is 0 there.)

Weights are not identifiable either (Brunner et al. 2020): the output sum_t a_t v_t leaves the weights of n words free
along every d with d V = 0 and sum d = 0, in n - 1 - d_v dimensions where V has full rank. As a > 0, a + c d is another
pattern with the same output; a linear program finds the one with least weight on the word that had most. Wiegreffe and
Pinter (2019) answer that a pattern found for one text is no model that would learn it: what is shown is that weights
alone prove no importance, not that they say nothing.

The classifier: a BERT of two layers with one head of 8, trained to say whether words with the values +1, 0 and -1, the
value turned where `not` stands before, sum to more than 0. Its last layer's weights from the first position count.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog
from scipy.stats import kendalltau

from experiments.theory import Row, at_most, near, within
from experiments.theory.figure import drawn
from experiments.theory.learning import trained
from tfm_jax.models import BERTConfig, build
from tfm_jax.ops import attention_weights, dot_product_attention
from tfm_jax.ops.multi_head import keys_values
from tfm_jax.train.objectives import Labels

START, NOT, GOOD, BAD = 0, 1, 10, 18  # 2 to 9 are worth nothing, 10 to 17 are good, 18 to 25 bad
WORDS, LENGTH, TEXTS, STEPS = 26, 15, 200, 800
CONFIG = BERTConfig(
    WORDS, num_layers=2, max_length=16, d_model=32, d_ff=64, num_heads=1, d_k=8, token_types=0,
    head="sequence", labels=("negative", "positive"),
)  # fmt: skip


def texts(key: jax.Array, rows: int) -> dict[str, jax.Array]:
    """A batch of random texts behind the start token, with their classes."""
    word_key, not_key = jax.random.split(key)
    words = jax.random.randint(word_key, (rows, LENGTH), 2, WORDS, jnp.int32)
    words = jnp.where(jax.random.bernoulli(not_key, 0.2, words.shape), NOT, words)
    value = (words >= GOOD).astype(jnp.int32) - 2 * (words >= BAD)
    turned = jnp.pad(words[:, :-1], ((0, 0), (1, 0))) == NOT
    total = jnp.where(turned, -value, value).sum(axis=1)
    tokens = jnp.pad(words, ((0, 0), (1, 0)), constant_values=START)
    return {"tokens": tokens, "labels": (total > 0).astype(jnp.int32), "label_weights": jnp.ones(rows, jnp.float32)}


def importances(model, params, tokens: jax.Array) -> dict[str, jax.Array]:
    """Of each word of one text behind its start: weight, gradient and occlusion."""
    module = model.bind(params)
    x = model.hidden_states(params, tokens[None])["encoder"][0]

    def difference(x):
        pooled = module.pooler(module.encoder(x, mask=None))
        logits = module.classifier(pooled, dropout_rate=0.0, key=None)
        return logits[0, 1] - logits[0, 0]

    whole, gradient = jax.value_and_grad(difference)(x)
    hidden = 1 - jnp.eye(LENGTH + 1, dtype=jnp.int32)[1:]  # a word in segment 0 is seen by none
    without = model.apply(params, jnp.broadcast_to(tokens, hidden.shape), segment_ids=hidden)
    weights = model.attention_weights(params, tokens[None], layer=CONFIG.num_layers - 1)["encoder"][0, 0, 0]
    occlusion = jnp.abs(whole - (without[:, 1] - without[:, 0]))
    return {"attention": weights[1:], "gradient": jnp.abs((gradient * x).sum(axis=2))[0, 1:], "occlusion": occlusion}


def other_pattern(weights: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, int]:
    """(The pattern with the same output and the least weight on the word with the most, free dimensions)."""
    kept = np.vstack([values.T, np.ones(len(values))])
    cost = np.eye(len(weights))[weights.argmax()]
    found = linprog(cost, A_eq=kept, b_eq=kept @ weights, bounds=(0, None))
    return found.x, len(weights) - np.linalg.matrix_rank(kept)


def outputs(patterns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights, outputs) of attention whose scores are the logarithms of patterns, one a query."""
    with np.errstate(divide="ignore"):
        bias = jnp.asarray(np.log(patterns), jnp.float32)[None, None]
    query, key = jnp.zeros((1, len(patterns), 1, 1)), jnp.zeros((1, len(values), 1, 1))
    value = jnp.asarray(values, jnp.float32)[None, :, None]
    found = attention_weights(query, key, bias=bias), dot_product_attention(query, key, value, bias=bias)
    return np.asarray(found[0][0, 0]), np.asarray(found[1][0, :, 0])


def measure(figures: Path) -> list[Row]:
    """Train, correlate over `TEXTS` texts, and find a second pattern for one of them."""
    model, objective = build(CONFIG), Labels(build(CONFIG))
    loss = lambda params, key: objective(params, texts(key, 128), None)["loss"][0] / 128  # noqa: E731
    params, _ = trained(loss, model.init(jax.random.key(0)), steps=STEPS, learning_rate=3e-3, warmup_steps=50)
    batch = texts(jax.random.key(99), TEXTS)
    right, _ = jax.jit(lambda params: objective(params, batch, None)["accuracy"])(params)
    each = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda t: importances(model, params, t)))(batch["tokens"]))
    pairs = (("attention", "gradient"), ("attention", "occlusion"), ("gradient", "occlusion"))
    taus = {
        pair: [kendalltau(*case).statistic for case in zip(each[pair[0]], each[pair[1]], strict=True)] for pair in pairs
    }
    mean = {pair: float(np.mean(tau)) for pair, tau in taus.items()}

    tokens, layer = batch["tokens"][:1], jax.tree.map(lambda x: x[-1], params["encoder"]["layers"]["attention"])
    x = model.hidden_states(params, tokens)["encoder"][CONFIG.num_layers - 1]
    values = np.asarray(keys_values(layer, x, x).value[0, :, 0], np.float64)
    weights = model.attention_weights(params, tokens, layer=CONFIG.num_layers - 1)["encoder"][0, 0, 0]
    weights = np.asarray(weights, np.float64) / np.asarray(weights, np.float64).sum()
    other, free = other_pattern(weights, values)
    _, found = outputs(np.stack([weights, other]), values)
    disjoint, same = outputs(
        np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), np.array([[2.0, 0.0], [0.0, 4.0], [1.0, 2.0]])
    )
    draw(figures, taus, weights, other, np.asarray(tokens[0]))
    moved = np.abs(weights - other).sum() / 2
    setting = f"{TEXTS} texts of {LENGTH} words, accuracy {float(right) / TEXTS:.3f}"
    return [
        at_most(
            "Weights do not rank words as the gradient does: tau <= 0.5 (Jain and Wallace)",
            0.5,
            mean[pairs[0]],
            note=setting,
        ),
        at_most("nor as occlusion does: tau <= 0.5", 0.5, mean[pairs[1]]),
        at_most(
            "But gradient and occlusion do not agree either: tau <= 0.5",
            0.5,
            mean[pairs[2]],
            note="that they do is false of a classifier that is sure: slopes say little of what a missing word does",
        ),
        near(
            "Weights of n words with the same output: n - 1 - d_v free dimensions",
            LENGTH + 1 - 1 - 8,
            free,
            share=0.0,
            note=f"n = {LENGTH + 1}, d_v = 8, values of the trained model",
        ),
        within(
            "Two patterns, one output: largest difference of the outputs of a trained head",
            0.0,
            np.abs(found[0] - found[1]).max(),
            distance=1e-5,
            note=f"the largest weight {weights.max():.2f} became {other[weights.argmax()]:.2f}, {moved:.0%} have moved",
        ),
        within(
            "Patterns without a common word, one output: v_3 = (v_1 + v_2) / 2, weights (1/2, 1/2, 0) and (0, 0, 1)",
            0.0,
            np.abs(same[0] - same[1]).max(),
            distance=1e-6,
            note=f"{np.abs(disjoint[0] - disjoint[1]).sum() / 2:.0%} of the weight have moved",
        ),
    ]


def draw(figures: Path, taus: dict, weights: np.ndarray, other: np.ndarray, tokens: np.ndarray) -> None:
    """Correlations over the texts, and both patterns of one."""
    kinds = {START: "<s>", NOT: "not"}
    names = [kinds.get(int(i)) or ("neutral" if i < GOOD else "good" if i < BAD else "bad") for i in tokens]
    with drawn(figures / "explanation.png", 2, width=5.0) as (left, right):
        for pair, tau in taus.items():
            left.hist(
                tau, bins=np.linspace(-1.0, 1.0, 31), alpha=0.5, label=f"{pair[0]}, {pair[1]}: {np.mean(tau):.2f}"
            )
        left.axvline(1.0, color="grey", linestyle=":")
        left.set(title="Rank correlation over texts", xlabel="Kendall's tau", ylabel="texts")
        left.legend(loc="upper left", title="means", fontsize=7)
        place = np.arange(len(weights))
        right.bar(place - 0.2, weights, 0.4, label="of the trained model")
        right.bar(place + 0.2, other, 0.4, label="another with the same output")
        right.set_xticks(place, names, rotation=60, ha="right", fontsize=7)
        highest = 1.35 * max(weights.max(), other.max())
        right.set(title="Two patterns, one output", xlabel="word of one text", ylabel="weight", ylim=(0, highest))
        right.legend(loc="upper left")
