"""Objectives against NumPy in float64, and what their sums and gradients must not depend on."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data import tiny
from tfm_jax import config
from tfm_jax.config import Corruption, Data
from tfm_jax.data.batches import make_batches
from tfm_jax.data.sources import Text
from tfm_jax.models import Model, build
from tfm_jax.models.bert import BERT, BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.sharding import batch_sharding, make_mesh, replicated
from tfm_jax.train import loop
from tfm_jax.train.objectives import Labels, LanguageModel, TextToText, check_labels, objective_of

B, S, T, V, LONGEST = 8, 7, 5, 11, 13
CLASSES = ("bad", "good", "so-so")
SIZES = {"max_length": LONGEST, "d_model": 6, "d_ff": 5, "num_heads": 2}
SMOOTHING, Z_LOSS = 0.1, 0.03
WORDS = ("transformer", "gpt language", "bert masked")
LABELLED = tuple(
    f"{family} {head}" for family in ("bert", "gpt") for head in ("sequence", "token", "span", "regression")
)
# what may stand in rows of several texts
PACKED = (*WORDS, "bert token")
# through a whole model with its gradients; the other heads on outputs that are drawn, which compile in a moment
every = pytest.mark.parametrize("name", (*WORDS, "bert token", "bert span"))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# ----------------------------------------------------------------------------------------------------------------------
# Models, batches, and what a batch costs
# ----------------------------------------------------------------------------------------------------------------------


def config_of(name, **other):
    """Of "transformer", or of family and head."""
    fields = SIZES | {"dropout": Dropout(0.5, 0.5)} | other
    if name == "transformer":
        return TransformerConfig(V, num_encoder_layers=1, num_decoder_layers=1, **fields)
    family, head = name.split()
    labels = {"sequence": CLASSES, "token": CLASSES, "regression": ("score",)}.get(head, ())
    return {"bert": BERTConfig, "gpt": GPTConfig}[family](V, num_layers=1, head=head, labels=labels, **fields)


def objective_for(name, *, label_smoothing=SMOOTHING, z_loss=Z_LOSS):
    kind = TextToText if name == "transformer" else LanguageModel if name in WORDS else Labels
    return kind(build(config_of(name)), label_smoothing=label_smoothing, z_loss=z_loss)


@functools.cache
def loud_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.0, 0.5, x.shape), jnp.float32), model.shapes)


def make_batch(name):
    """Eight rows: two without anything to learn, one of them and of the others with padding, one all padding."""
    rng, head = np.random.default_rng(7), name.split()[-1]
    lengths, source_lengths = np.array([5, 2, 4, 1, 3, 5, 2, 0]), np.array([2, 7, 3, 1, 4, 5, 2, 0])
    ids = lambda width, most=V: rng.integers(0, most, (B, width)).astype(np.int32)  # noqa: E731
    live = lambda width, lengths: (np.arange(width)[None] < lengths[:, None]).astype(np.int32)  # noqa: E731
    batch = {"tokens": ids(T), "segment_ids": live(T, lengths)}
    if name == "transformer":
        batch |= {"source_tokens": ids(S), "source_segment_ids": live(S, source_lengths)}
    if name in LABELLED:
        batch |= {"token_types": ids(T, 2)}
    taught = np.array([1.0, 2.0, 1.0, 0.5, 0.0, 0.0, 1.0, 0.0], np.float32)
    if name in WORDS or head == "token":
        some = rng.choice([0.0, 1.0, 1.0, 0.5], (B, T)) * (taught[:, None] > 0) * batch["segment_ids"]
        return batch | {"targets": ids(T, len(CLASSES) if head == "token" else V), "weights": some.astype(np.float32)}
    labels = {
        "sequence": rng.integers(0, len(CLASSES), B).astype(np.int32),
        "span": rng.integers(0, np.maximum(lengths, 1)[:, None], (B, 2)).astype(np.int32),
        "regression": rng.normal(size=B).astype(np.float32),
    }
    return batch | {"labels": labels[head], "label_weights": taught}


@functools.cache
def measured(objective):
    """(params, batch) -> sums, and the gradient of the mean loss as `train_step` takes it."""

    def mean(params, batch):
        sums = objective(params, batch, None)
        total, weight = sums["loss"]
        return total / jnp.maximum(weight, 1.0), sums

    def run(params, batch):
        (_, sums), gradient = jax.value_and_grad(mean, has_aux=True)(params, batch)
        return sums, gradient

    return jax.jit(run)


def measure(name, batch):
    objective = objective_for(name)
    return measured(objective)(loud_params(objective.model), jax.tree.map(jnp.asarray, batch))


def assert_close(found, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), found, expected)


def one_loss(logits, target, smoothing, z_loss):
    """-sum_v q_v log p_v + z (log sum_v exp logit_v)^2, written out."""
    logits = np.asarray(logits, np.float64)
    log_total = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    q = np.full(len(logits), smoothing / len(logits))
    q[target] += 1.0 - smoothing
    return -(q * (logits - log_total)).sum() + z_loss * log_total**2


def expected_sums(head, found, batch, smoothing=SMOOTHING, z_loss=Z_LOSS):
    """Loops over what has a weight, in float64."""
    loss = right = weight = 0.0
    if "weights" in batch:
        for b, t in np.argwhere(batch["weights"] > 0):
            own, target = batch["weights"][b, t], batch["targets"][b, t]
            weight += own
            loss += own * one_loss(found[b, t], target, smoothing, z_loss)
            right += own * (found[b, t].argmax() == target)
        return {"loss": (loss, weight), "accuracy": (right, weight)}
    for b in np.flatnonzero(batch["label_weights"] > 0):
        own, label = batch["label_weights"][b], batch["labels"][b]
        weight += own
        if head == "sequence":
            loss += own * one_loss(found[b], label, smoothing, z_loss)
            right += own * (found[b].argmax() == label)
        if head == "span":
            ends = found[b][batch["segment_ids"][b] > 0].T
            loss += own * np.mean([one_loss(*end, smoothing, z_loss) for end in zip(ends, label, strict=True)])
            right += own * (ends.argmax(axis=1) == label).all()
        if head == "regression":
            loss += own * np.mean((np.asarray(found[b], np.float64) - label) ** 2)
    return {"loss": (loss, weight)} | ({} if head == "regression" else {"accuracy": (right, weight)})


# ----------------------------------------------------------------------------------------------------------------------
# Against NumPy
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORDS + LABELLED)
def test_an_objective_is_numpys_on_what_the_model_gives(name):
    """Loss with smoothing and z-loss, and accuracy; batches of labels hold token types for every family."""
    batch, objective = make_batch(name), objective_for(name)
    kinds = ("token_types",) if name.startswith("bert") else ()

    def both(params, batch):
        texts = [batch[side] for side in ("source_tokens", "tokens") if side in batch]
        inputs = {n: batch[n] for n in ("segment_ids", "source_segment_ids", *kinds) if n in batch}
        return objective(params, batch, None), objective.model.apply(params, *texts, **inputs)

    sums, found = jax.jit(both)(loud_params(objective.model), jax.tree.map(jnp.asarray, batch))
    assert_close(sums, expected_sums(name.split()[-1], np.asarray(found), batch), rtol=1e-5, atol=1e-5)
    assert all(value.dtype == jnp.float32 and value.shape == () for value in jax.tree.leaves(sums))
    assert float(sums["loss"][1]) > 0


class Given(Model):
    """A model whose head gives what its parameters hold."""

    def apply(self, params, tokens, **inputs):
        return params["found"]


def given(head, seed=0, labels=None):
    """An objective on outputs that are drawn, with a batch for them."""
    names = labels or config_of(f"bert {head}").labels
    model = Given(BERT, replace(config_of(f"bert {head}"), labels=names))
    shape = {"token": (B, T, 3), "sequence": (B, 3), "span": (B, T, 2), "regression": (B, len(names))}[head]
    found = np.random.default_rng(seed).normal(0.0, 2.0, shape).astype(np.float32)
    return functools.partial(Labels, model), found, make_batch(f"bert {head}")


def sums_of(objective, found, batch):
    return jax.jit(objective)({"found": jnp.asarray(found)}, jax.tree.map(jnp.asarray, batch), None)


@functools.cache
def graded(objective):
    return jax.jit(jax.value_and_grad(lambda found, batch: objective({"found": found}, batch, None)["loss"][0]))


def labels_loss(objective, found, batch):
    """(loss, gradient for what the model gives)."""
    return graded(objective)(jnp.asarray(found), jax.tree.map(jnp.asarray, batch))


@pytest.mark.parametrize("head", ["sequence", "token", "span", "regression"])
def test_smoothing_and_z_loss_are_options(head):
    """None, each, both; a regression has no classes to smooth over."""
    make, found, batch = given(head)
    losses = []
    for smoothing, z_loss in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.1), (0.3, 0.1)):
        sums = sums_of(make(smoothing, z_loss), found, batch)
        assert_close(sums, expected_sums(head, found, batch, smoothing, z_loss))
        losses.append(float(sums["loss"][0]))
    assert len(set(losses)) == (1 if head == "regression" else 4)


def test_several_numbers_of_a_row_count_as_their_mean():
    """Labels B C; and B for a single number."""
    make, found, batch = given("regression", labels=("a", "b"))
    batch["labels"] = np.random.default_rng(1).normal(size=(B, 2)).astype(np.float32)
    total, _ = sums_of(make(), found, batch)["loss"]
    error = (found.astype(np.float64) - batch["labels"]) ** 2
    np.testing.assert_allclose(total, (error.mean(axis=1) * batch["label_weights"]).sum(), rtol=1e-6)


def test_whole_numbers_are_numbers_to_a_regression():
    """A column of values that are all whole is int32."""
    make, found, batch = given("regression")
    whole = np.arange(B, dtype=np.int32)
    expected = labels_loss(make(), found, batch | {"labels": whole.astype(np.float32)})
    assert_close(labels_loss(make(), found, batch | {"labels": whole}), expected)


def test_a_key_turns_dropout_on():
    objective, batch = objective_for("gpt language"), jax.tree.map(jnp.asarray, make_batch("gpt language"))
    run = jax.jit(lambda key: objective(loud_params(objective.model), batch, key)["loss"][0])
    drawn = [float(run(jax.random.key(seed))) for seed in (0, 1)]
    assert len({*drawn, float(measure("gpt language", batch)[0]["loss"][0])}) == 3


@pytest.mark.parametrize("name", ["transformer", "gpt language", "bert sequence"])
def test_equal_objectives_are_one_static_argument(name):
    one, other = objective_for(name), objective_for(name)
    assert one == other and hash(one) == hash(other) and one != objective_for(name, z_loss=0.0)


@pytest.mark.parametrize("name", ["bert masked", "bert pooled", "bert embedding", "gpt language"])
def test_labels_need_a_head_for_them(name):
    objective = Labels(build(config_of(name)))
    with pytest.raises(ValueError, match=f"model.head is '{name.split()[1]}': sequence, token, span and regression"):
        jax.eval_shape(objective, objective.model.shapes, make_batch("bert sequence"), None)


# ----------------------------------------------------------------------------------------------------------------------
# What does not matter
# ----------------------------------------------------------------------------------------------------------------------


def packed(batch):
    """The texts of a batch four to a row, with segments and positions, shorter rows padded."""
    sides, result = [("", ("tokens", "targets", "weights"))], {}
    if "source_tokens" in batch:
        sides.append(("source_", ("source_tokens",)))
    for side, names in sides:
        live = batch[f"{side}segment_ids"] > 0
        names = [*names, f"{side}segment_ids", f"{side}positions"]
        result |= {name: np.zeros((2, LONGEST), np.float32 if name == "weights" else np.int32) for name in names}
        for row in (0, 1):
            at = 0
            for number, text in enumerate(range(4 * row, 4 * row + 4), start=1):
                length = live[text].sum()
                cells = row, slice(at, at + length)
                for name in set(names) & set(batch):
                    result[name][cells] = batch[name][text, :length]
                result[f"{side}segment_ids"][cells], result[f"{side}positions"][cells] = number, np.arange(length)
                at += length
    if "token_types" in batch:
        result["token_types"] = np.zeros((2, LONGEST), np.int32)
    return result


@pytest.mark.parametrize("name", PACKED)
def test_packed_texts_are_separate_ones(name):
    """B40, I18: sums and gradients; two rows of up to four texts against a row for each."""
    batch = make_batch(name)
    if "token_types" in batch:
        batch["token_types"] = np.zeros((B, T), np.int32)
    found, expected = measure(name, packed(batch)), measure(name, batch)
    assert_close(found, expected)


@every
def test_micro_batches_add_up_to_the_whole(name):
    """B24, I16: four times two rows with unequal weights, one of them with none; sums are added, divided once."""
    batch = make_batch(name)
    sums, gradient = measure(name, batch)
    parts = [measure(name, {key: rows[i : i + 2] for key, rows in batch.items()}) for i in range(0, B, 2)]
    weights = [float(part["loss"][1]) for part, _ in parts]
    assert len(set(weights)) >= 3 and weights[2] == 0
    assert_close(jax.tree.map(lambda *x: np.sum(x, axis=0), *(part for part, _ in parts)), sums)
    undone = [jax.tree.map(lambda x, w=w: x * max(w, 1.0), part) for w, (_, part) in zip(weights, parts, strict=True)]
    assert_close(jax.tree.map(lambda *x: np.sum(x, axis=0) / sum(weights), *undone), gradient)


@every
def test_a_batch_without_anything_to_learn(name):
    """B27: labels all -100: loss 0, weight 0, gradients 0."""
    batch = make_batch(name)
    for key, value in {"weights": 0, "label_weights": 0, "targets": -100, "labels": -100}.items():
        if key in batch:
            batch[key] = np.full_like(batch[key], value)
    sums, gradient = measure(name, batch)
    assert all(value == 0 for value in jax.tree.leaves(sums))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def with_garbage(batch, nothing):
    """Other words in rows without weight and in padding; labels and targets without weight that are none, or NaN."""
    weights = batch["weights"] if "weights" in batch else batch["label_weights"][:, None]
    silent = (weights == 0).all(axis=1, keepdims=True) | (batch["segment_ids"] == 0)
    other = batch | {"tokens": np.where(silent, (batch["tokens"] + 3) % V, batch["tokens"])}
    if "targets" in batch:
        return other | {"targets": np.where(weights > 0, batch["targets"], np.int32(nothing))}
    labels = batch["labels"].copy()
    labels[weights[:, 0] == 0] = np.nan if labels.dtype == np.float32 else nothing
    return other | {"labels": labels}


@every
@pytest.mark.parametrize("nothing", [-100, 2**31 - 1])
def test_what_has_no_weight_does_not_matter(name, nothing):
    """B27's kind, I03: sums and gradients, whatever the words, labels and targets are."""
    batch = make_batch(name)
    assert_close(measure(name, with_garbage(batch, nothing)), measure(name, batch), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("head", ["sequence", "regression"])
def test_rows_with_labels_add_up_and_those_without_do_not_matter(head):
    """B24, B27: pairs of rows with unequal weights, one with none; NaN and ids of no class where none is asked."""
    make, found, batch = given(head)
    objective = make(SMOOTHING, Z_LOSS)
    total, gradient = labels_loss(objective, found, batch)
    cut = lambda i: {key: rows[i : i + 2] for key, rows in batch.items()}  # noqa: E731
    totals, gradients = zip(*(labels_loss(objective, found[i : i + 2], cut(i)) for i in range(0, B, 2)), strict=True)
    np.testing.assert_allclose(np.sum(totals), total, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-6)
    assert totals[2] == 0 and (gradients[2] == 0).all() and np.abs(gradient).max() > 0
    for nothing in (-100, 2**31 - 1):
        for value, expected in zip(
            labels_loss(objective, found, with_garbage(batch, nothing)), (total, gradient), strict=True
        ):
            np.testing.assert_array_equal(value, expected)
    silent = batch | {"label_weights": np.zeros(B, np.float32)}
    assert sums_of(objective, found, with_garbage(silent, -100))["loss"] == (0, 0)


def test_more_padding_does_not_matter():
    """I03: three columns more."""
    batch = make_batch("gpt language")
    wider = {key: np.pad(value, ((0, 0), (0, 3))) for key, value in batch.items()}
    assert_close(measure("gpt language", wider), measure("gpt language", batch))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("head", ["sequence", "token", "span", "regression"])
def test_features_without_a_weight_reach_neither_loss_nor_gradient(head, poison):
    """B27's kind: NaN times a weight of zero would be NaN. For spans padding is such a place in every row."""
    make, found, batch = given(head)
    silent = batch["weights"] == 0 if head == "token" else batch["label_weights"] == 0
    if head == "span":
        silent = silent[:, None] | (batch["segment_ids"] == 0)
    silent = silent.reshape(silent.shape + (1,) * (found.ndim - silent.ndim))
    objective = make(SMOOTHING, Z_LOSS)
    expected, slope = labels_loss(objective, found, batch)
    value, gradient = labels_loss(objective, np.where(silent, np.float32(poison), found), batch)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(gradient, slope)
    assert (np.where(silent, gradient, 0) == 0).all() and np.abs(gradient).max() > 0


@pytest.mark.parametrize("head", ["sequence", "token", "span", "regression"])
def test_four_devices_sum_as_one(head):
    """B25: two rows each, one device without anything to learn, one with a row of padding; sums and gradients."""
    make, found, batch = given(head)
    objective, mesh = make(SMOOTHING, Z_LOSS), make_mesh(config.Mesh(data=4))

    def mean(found, batch):
        sums = objective({"found": found}, batch, None)
        return sums["loss"][0] / sums["loss"][1], sums

    run = jax.jit(jax.value_and_grad(mean, has_aux=True))
    alone = jax.device_get(run(found, batch))
    with jax.set_mesh(mesh):
        shared = run(*jax.device_put((found, batch), batch_sharding(mesh)))
    assert_close(jax.device_get(shared), alone, rtol=1e-6, atol=1e-7)


def test_four_devices_mask_as_one():
    """The same through a model: what is masked, with its output layer in pieces."""
    name, mesh = "bert masked", make_mesh(config.Mesh(data=4))
    objective, batch = objective_for(name), make_batch(name)
    alone = jax.device_get(measure(name, batch))
    with jax.set_mesh(mesh):
        params = jax.device_put(loud_params(objective.model), replicated(mesh))
        shared = jax.device_get(measured(objective)(params, jax.device_put(batch, batch_sharding(mesh))))
    assert_close(shared, alone)


# ----------------------------------------------------------------------------------------------------------------------
# Spans and classes
# ----------------------------------------------------------------------------------------------------------------------


def test_an_answer_never_lies_on_padding():
    """However large its logits: padding takes no probability, no share of smoothing, and is never what is found."""
    make, found, batch = given("span")
    live = batch["segment_ids"][..., None] > 0
    best = np.where(live, found, -np.inf).argmax(axis=1).astype(np.int32)
    batch |= {"labels": best, "label_weights": (batch["segment_ids"].sum(axis=1) > 0).astype(np.float32)}
    loud = np.where(live, found, np.float32(1e6))
    sums = sums_of(make(0.3), loud, batch)
    assert float(sums["accuracy"][0]) == float(sums["accuracy"][1]) == 7
    assert_close(sums, expected_sums("span", found, batch, 0.3, 0.0))
    # an answer that lies there all the same has no probability
    batch["labels"][1, 1] = 2
    sums = sums_of(make(0.3), loud, batch)
    assert np.isinf(sums["loss"][0]) and float(sums["accuracy"][0]) == 6


def test_without_segments_every_token_may_be_an_answer():
    make, found, batch = given("span")
    whole = batch | {"segment_ids": np.ones((B, T), np.int32)}
    bare = {key: value for key, value in batch.items() if key != "segment_ids"}
    assert_close(labels_loss(make(0.3), found, bare), labels_loss(make(0.3), found, whole), rtol=0, atol=0)


def test_both_ends_of_a_span_must_be_found():
    make, found, batch = given("span")
    found[:] = 0.0
    found[0, [1, 3], [0, 1]] = found[1, [1, 0], [0, 1]] = 1.0
    batch |= {"labels": np.zeros((B, 2), np.int32), "label_weights": np.array([1.0, 1, 0, 0, 0, 0, 0, 0], np.float32)}
    for labels, right in (([[1, 3], [1, 0]], 2), ([[1, 2], [1, 0]], 1), ([[1, 2], [0, 0]], 0)):
        batch["labels"][:2] = labels
        assert sums_of(make(), found, batch)["accuracy"] == (right, 2)


@pytest.mark.parametrize("head, classes", [("sequence", 3), ("token", 3), ("span", T)])
def test_a_label_that_is_no_class_is_nan_with_a_weight(head, classes):
    """B17: -1 is not the last class."""
    make, found, batch = given(head)
    name = "targets" if head == "token" else "labels"
    place = tuple(np.argwhere(batch["weights"] > 0)[0]) if head == "token" else (0,) if head == "sequence" else (0, 1)
    for label in (-1, classes):
        batch[name][place] = label
        sums = sums_of(make(SMOOTHING), found, batch)
        assert np.isnan(sums["loss"][0]) and np.isfinite(sums["accuracy"][0])


# ----------------------------------------------------------------------------------------------------------------------
# Which model learns from which data
# ----------------------------------------------------------------------------------------------------------------------

LABEL = {"format": "tsv", "features": ("text",), "label": "class"}
DATA = {
    "pairs": (Data(), True),
    "spans": (Data(corruption=Corruption("spans")), True),
    "prefix": (Data(corruption=Corruption("prefix")), True),
    "text": (Data(), False),
    "mask": (Data(corruption=Corruption("mask")), False),
    "label": (Data(**LABEL), False),
}
FITS = {
    ("transformer", "pairs"): TextToText,
    ("transformer", "spans"): TextToText,
    ("transformer", "prefix"): TextToText,
    ("gpt language", "text"): LanguageModel,
    ("bert masked", "mask"): LanguageModel,
} | {(f"{family} {head}", "label"): Labels for family in ("bert", "gpt") for head in ("sequence", "regression")}
NAMES = (*WORDS, *LABELLED, "bert pooled", "bert embedding")


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_each_model_learns_from_its_data_alone(name, kind):
    """What fits gives its objective with both options; what does not is refused by family, and by head or data."""
    model, (data, two_sided) = build(config_of(name)), DATA[kind]
    choose = functools.partial(objective_of, model, data, two_sided=two_sided, label_smoothing=0.1, z_loss=0.2)
    if (name, kind) in FITS:
        assert choose() == FITS[name, kind](model, label_smoothing=0.1, z_loss=0.2)
        return
    family, head = (name.split() + ["None"])[:2]
    about = {
        "label": f"data.label is 'class', but a '{family}' model .* with head '?{head}'? predicts no labels",
        "pairs": f"a '{family}' model .*, and this data is pairs, or a text with data.corruption.name spans or prefix",
        "text": f"a '{family}' model .* learns from .*, and this data is a text with data.corruption.name none",
        "mask": f"a '{family}' model .* learns from .*, and this data is a text with data.corruption.name mask",
    }
    about |= {"spans": about["pairs"], "prefix": about["pairs"]}
    own = {"gpt": "text", "bert": "mask"}.get(family) == kind
    with pytest.raises(ValueError, match=f"model.head is '{head}': only a model with head" if own else about[kind]):
        choose()


@pytest.mark.parametrize("name", ["bert sequence", "gpt regression"])
@pytest.mark.parametrize("columns", [1, 2])
def test_batches_of_labelled_texts_are_what_objectives_read(name, columns):
    """One text and two in a sequence, a BERT with one kind of tokens too; a row of padding counts nothing."""
    kind = np.float32 if name.endswith("regression") else np.int32
    text = replace(tiny.text(7, columns=columns, longest=4), labels=(np.arange(7) % 3).astype(kind))
    data = Data(**LABEL | {"features": ("a", "b")[:columns]}, max_length=LONGEST, tokens_per_batch=999, num_buckets=1)
    batch = make_batches(data, text, tiny.Numbers(), vocab_size=tiny.VOCAB_SIZE, evaluation=True)[0]
    other = {"token_types": 1} if name.startswith("bert") and columns == 2 else {}
    model = build(replace(config_of(name), vocab_size=tiny.VOCAB_SIZE, **other))
    check_labels(model, data, text)
    objective = objective_of(model, data, two_sided=False)
    sums = jax.jit(objective)(loud_params(model), jax.tree.map(jnp.asarray, batch), None)
    assert float(sums["loss"][1]) == 7 and np.isfinite(sums["loss"][0])


def labelled(values, dtype):
    lines = [f"text {i}" for i in range(len(values))]
    return Text((lines,), ("a.tsv",), np.array(values, dtype), lines=range(2, len(values) + 2))


@pytest.mark.parametrize(
    "name, values, dtype, said",
    [
        (
            "bert sequence",
            [0, 2, 3, 1, -1],
            np.int32,
            r"a\.tsv:4: label 3 \(2 such .*\) .* 0 bad, 1 good, 2 so-so: mend",
        ),
        ("gpt sequence", [-1, 0], np.int32, r"a\.tsv:2: label -1 \(1 such"),
        ("bert sequence", [0, 0.5, 1], np.float32, r"a\.tsv:3: label 0.5 \(1 such"),
        ("bert sequence", [0, 1, 2], np.float32, r"a\.tsv:2: label 0.0 \(3 such"),
        ("bert regression", None, None, "data.label is 'class', but a.tsv has no labels"),
    ],
)
def test_labels_that_are_no_classes_are_refused_by_line(name, values, dtype, said):
    text = Text((["a"],), ("a.tsv",)) if values is None else labelled(values, dtype)
    with pytest.raises(ValueError, match=said):
        check_labels(build(config_of(name)), Data(**LABEL), labelled([1.0, 2.0], np.int32), text)


def test_labels_that_fit_pass():
    for name, values, dtype in (
        ("bert sequence", [2, 0, 1], np.int32),
        ("gpt regression", [-7, 3], np.int32),
        ("gpt regression", [-7.5, 3], np.float32),
        ("bert token", [99], np.int32),  # `objective_of` refuses the head
    ):
        check_labels(build(config_of(name)), Data(**LABEL), labelled(values, dtype))
    check_labels(build(config_of("transformer")), Data(), Text((["a"], ["b"]), ("a", "b")))


def test_a_text_has_one_number():
    model = build(replace(config_of("bert regression"), labels=("a", "b")))
    with pytest.raises(ValueError, match="model.labels is .*'a', 'b'.*, but a text has one number"):
        check_labels(model, Data(**LABEL), labelled([0.5], np.float32))


def test_labels_that_nobody_asked_for_are_refused():
    """A model would be trained on batches in which nothing is to be predicted."""
    with pytest.raises(ValueError, match="data.label is '', but a.tsv has labels"):
        check_labels(build(config_of("gpt language")), Data(), labelled([0], np.int32))


@pytest.mark.parametrize("wrong", ["train", "validation"])
def test_fit_refuses_a_label_before_anything_is_written(tmp_path, wrong):
    texts = {split: labelled([0, 1, 7 if split == wrong else 2], np.int32) for split in ("train", "validation")}
    run = config.Run(
        run_dir=str(tmp_path / "run"),
        model=config_of("bert sequence"),
        train=config.Train(steps=1),
        data=Data(**LABEL, max_length=LONGEST),
        decode=config.Decode(max_new_tokens=2),
    )
    with pytest.raises(ValueError, match=r"a\.tsv:4: label 7 \(1 such"):
        loop.fit(run, **texts)
    assert not (tmp_path / "run").exists()
