"""What stands on a stack: each head against NumPy on the stack's states, what it reads, learns, and refuses."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import config as configs
from tfm_jax.config import Corruption, Data
from tfm_jax.decode.text import require_no_encoder
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.train.objectives import objective_of

V, B, T, D = 13, 2, 7, 12
LABELS = ("bad", "good", "so-so")
SIZES = {"num_layers": 1, "max_length": 11, "d_model": D, "d_ff": 17, "num_heads": 3, "dropout": Dropout(0.0, 0.0)}
FAMILIES = {"bert": (BERTConfig, "encoder"), "gpt": (GPTConfig, "decoder")}
HEADS = [("bert", head) for head in ("pooled", "sequence", "token", "span", "regression", "embedding")]
HEADS += [("gpt", head) for head in ("sequence", "token", "span", "regression")]
FLOAT32 = {"rtol": 1e-5, "atol": 3e-6}
# padding on the right, padding on the left, none
SEGMENTS = jnp.asarray([[1, 1, 1, 1, 0, 0, 0], [1] * T], jnp.int32)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def model_of(family, head, **other):
    labels = LABELS if head in ("sequence", "token", "regression") else ()
    return build(FAMILIES[family][0](V, head=head, labels=labels, **SIZES | other))


@functools.cache
def random_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, jnp.float32), model.shapes)


def ids(seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (B, T)), jnp.int32)


@functools.partial(jax.jit, static_argnames="model")
def outputs(params, tokens, segment_ids, *, model):
    inputs = {"segment_ids": segment_ids}
    return model.apply(params, tokens, **inputs), model.hidden_states(params, tokens, **inputs)


def expected(family, head, params, x, segments):
    """In float64, from the states x of the last layer."""
    x, params = np.asarray(x, np.float64), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    label = params.get("classifier", {})
    if head == "embedding":
        mean = np.stack([row[live].mean(axis=0) for row, live in zip(x, segments > 0, strict=True)])
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    if head in ("token", "span"):
        return x @ label["dense"] + label["dense_bias"]
    if family == "gpt":
        last = [np.flatnonzero(row)[-1] for row in segments]
        return np.stack([row[i] for row, i in zip(x, last, strict=True)]) @ label["dense"]
    pooled = np.tanh(x[:, 0] @ params["pooler"]["dense"] + params["pooler"]["dense_bias"])
    return pooled if head == "pooled" else pooled @ label["dense"] + label["dense_bias"]


@pytest.mark.parametrize("family, head", HEADS)
def test_a_head_is_numpys_and_does_not_read_padding(family, head):
    """I03: the states are those of the same stack; what stands on padding does not matter."""
    model = model_of(family, head)
    params, tokens = random_params(model), ids()
    found, states = outputs(params, tokens, SEGMENTS, model=model)
    live, x = np.asarray(SEGMENTS) > 0, states[FAMILIES[family][1]][-1]
    where = live if head in ("token", "span") else slice(None)
    np.testing.assert_allclose(found[where], expected(family, head, params, x, np.asarray(SEGMENTS))[where], **FLOAT32)
    assert found.dtype == jnp.float32
    other, _ = outputs(params, jnp.where(SEGMENTS > 0, tokens, (tokens + 5) % V), SEGMENTS, model=model)
    np.testing.assert_array_equal(found[where], other[where])
    if family == "gpt":  # padding on the left
        turned, states = outputs(params, tokens, SEGMENTS[:, ::-1], model=model)
        x, where = states["decoder"][-1], live[:, ::-1] if head in ("token", "span") else slice(None)
        reference = expected(family, head, params, x, np.asarray(SEGMENTS)[:, ::-1])
        np.testing.assert_allclose(turned[where], reference[where], **FLOAT32)


@pytest.mark.parametrize("family, head", HEADS)
def test_every_parameter_of_a_head_learns(family, head):
    model = model_of(family, head)

    @jax.jit
    def gradient(params, tokens):
        return jax.grad(lambda params: (model.apply(params, tokens, segment_ids=SEGMENTS) ** 3).sum())(params)

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(random_params(model), ids())):
        # a key bias moves all scores of a query alike; a row's length is what an embedding of length 1 does not have
        moved = "key_bias" in jax.tree_util.keystr(path) or np.abs(leaf).max() > 0
        assert np.isfinite(leaf).all() and moved, jax.tree_util.keystr(path)


def test_an_embedding_of_padding_alone_is_zero_and_has_a_gradient():
    """B27"""
    model = model_of("bert", "embedding")
    params, nothing = random_params(model), jnp.zeros((B, T), jnp.int32)
    found, gradient = jax.jit(jax.value_and_grad(lambda params: model.apply(params, ids(), segment_ids=nothing).sum()))(
        params
    )
    assert found == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "family, head", [("bert", "sequence"), ("bert", "token"), ("gpt", "sequence"), ("gpt", "token")]
)
def test_dropout_stands_before_the_labels(family, head):
    """With rates of 0 elsewhere, what a key changes is the head's; without one it is off."""
    model = model_of(family, head, dropout=Dropout(0.0, 0.5), num_layers=1)
    params = random_params(model)
    # all that blocks add is nothing, so that their dropout has nothing to drop
    stack = params[FAMILIES[family][1]]["layers"]
    for sublayer, out in (("attention", "output"), ("feed_forward", "down")):
        own = {name: jnp.zeros_like(x) if name.startswith(out) else x for name, x in stack[sublayer].items()}
        stack = stack | {sublayer: own}
    params = params | {FAMILIES[family][1]: params[FAMILIES[family][1]] | {"layers": stack}}
    draw = jax.jit(jax.vmap(lambda key: model.apply(params, ids(), key=key)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    still = np.asarray(model.apply(params, ids()))
    assert np.abs(drawn - still).max() > 0.1
    spread = drawn.std(axis=0)
    np.testing.assert_array_less(np.abs(drawn.mean(axis=0) - still), 5 * spread / 4000**0.5 + 1e-6)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"head": "sequence"}, "model.head is 'sequence', model.labels (): the name of each label is needed"),
        ({"labels": ("a",)}, "only heads sequence, token, regression have labels"),
        ({"head": "span", "labels": ("a", "b")}, "only heads sequence, token, regression have labels"),
        ({"head": "token", "labels": ("a", "b", "a")}, "a name twice"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_that_do_not_fit_the_head_are_refused(family, fields, words):
    with pytest.raises(ValueError) as raised:
        FAMILIES[family][0](V, **SIZES | fields)
    assert words in str(raised.value)


def test_a_bias_of_the_output_layer_needs_one():
    with pytest.raises(ValueError, match="model.head_bias is True, model.head 'span': it is for 'language' alone"):
        GPTConfig(V, head="span", head_bias=True, **SIZES)


@pytest.mark.parametrize("family, head", HEADS)
def test_what_has_no_output_layer_says_so(family, head):
    model = model_of(family, head)
    own = "masked" if family == "bert" else "language"
    words = f"model.head is '{head}': only a model with head '{own}' has an output layer"
    data = Data(corruption=Corruption("mask" if family == "bert" else "none"))
    calls = [lambda: model.output_layer(random_params(model)), lambda: objective_of(model, data, two_sided=False)]
    calls.append(lambda: model.features(random_params(model), ids()))
    if family == "gpt":
        calls += [lambda: model.init_cache(random_params(model), B, T), lambda: require_no_encoder(model)]
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        assert words in str(raised.value)


@pytest.mark.parametrize("family, head", HEADS)
def test_a_head_survives_json_and_has_axes(family, head):
    model = model_of(family, head)
    values = json.loads(configs.to_json(model.config))
    assert configs.from_dict(FAMILIES[family][0], {k: v for k, v in values.items() if k != "family"}) == model.config
    if "classifier" in model.axes:
        count = 2 if head == "span" else len(LABELS)
        assert model.axes["classifier"]["dense"] == ("embed", None)
        assert model.shapes["classifier"]["dense"].shape == (D, count)
    assert ("head" in model.shapes, "masked" in model.shapes) == (False, False)


def test_an_untied_language_model_with_another_head_has_no_second_matrix():
    assert replace(model_of("gpt", "token").config, tied_embeddings=False).num_layers == 1
    model = build(replace(model_of("gpt", "token").config, tied_embeddings=False))
    assert sorted(model.shapes) == ["classifier", "decoder", "embedding", "position_embedding"]
