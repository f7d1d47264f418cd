"""The decoder-only model: what it has, what it sees, and that a cache, padding and packing change nothing."""

import functools
import json
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import config as configs
from tfm_jax.models import build, family
from tfm_jax.models.gpt import GPT, GPTConfig, gpt2_small
from tfm_jax.models.transformer import Dropout
from tfm_jax.sharding import make_mesh
from tfm_jax.train.losses import linear_cross_entropy
from tfm_jax.train.step import eval_step, init_state, train_step

V, B, T = 13, 3, 7
CONFIG = GPTConfig(V, max_length=11, d_model=10, d_ff=17, num_heads=2, num_layers=2, d_k=4, d_v=3, norm_eps=1e-3)
KINDS = ["sinusoidal", "learned", "rope", "alibi", "shaw", "t5", "none"]
FLOAT32 = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def random_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, jnp.float32), model.shapes)


def tokens_of(seed=1, shape=(B, T)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


@functools.partial(jax.jit, static_argnames="model")
def apply(params, tokens, *, model, **inputs):
    return model.apply(params, tokens, **inputs)


def size(config):
    """The closed form: embeddings, layers of attention and feed-forward with biases and norms, a last norm."""
    V, D, F, N = config.vocab_size, config.d_model, config.d_ff, config.num_heads
    H = config.d_k or D // N
    E = config.d_v or H
    attention = N * (2 * D * H + D * E + E * D) + (N * (2 * H + E) + D) * config.attention_bias
    layer = attention + 2 * D * F + D + F + 2 * 2 * D
    positions = config.max_length * D if config.positions == "learned" else 0
    heads = V * D * (not config.tied_embeddings) + V * config.head_bias
    return V * D + positions + config.num_layers * layer + 2 * D * (config.norm == "pre") + heads


def test_gpt2_small_has_its_published_size():
    assert build(gpt2_small()).num_parameters == size(gpt2_small()) == 124_439_808


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embeddings": False, "head_bias": True},
        {"norm": "post", "attention_bias": False},
        {"positions": "rope"},
        {"d_k": None, "d_v": None},
    ],
    ids=str,
)
def test_parameter_count_is_the_closed_form(change):
    config = replace(CONFIG, **change)
    assert build(config).num_parameters == size(config)


def test_every_parameter_has_axes():
    model = build(replace(CONFIG, tied_embeddings=False, head_bias=True))
    jax.tree.map(lambda shape, axes: len(axes) == len(shape.shape) or pytest.fail(str(axes)), model.shapes, model.axes)
    assert model.axes["embedding"]["table"] == model.axes["head"] == ("vocab", "embed")
    assert model.axes["position_embedding"]["table"] == (None, "embed") and model.axes["head_bias"] == ("vocab",)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"d_model": 10, "num_heads": 3, "d_k": None}, "10 is not a multiple of 3"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"positions": "rope", "d_k": 3}, "rope"),
        ({"t5_buckets": 16}, "t5_buckets is 16"),
    ],
)
def test_illegal_configurations_are_refused(change, message):
    """B18, I34: when built."""
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize("config", [CONFIG, gpt2_small(), replace(CONFIG, positions="t5", t5_buckets=8)], ids=str)
def test_a_configuration_survives_json(config):
    values = json.loads(configs.to_json(config))
    name = values.pop("family")
    assert name == "gpt" and family(name) == (GPT, GPTConfig)
    assert configs.from_dict(family(name)[1], values) == config
    with pytest.raises(ValueError, match="unknown fields"):
        configs.from_dict(GPTConfig, values | {"num_encoder_layers": 2})


@pytest.mark.parametrize("kind", ["learned", "shaw"])
def test_no_token_sees_a_later_one(kind):
    """B10, I05, I06: the Jacobian towards later tokens and other rows is zero, exactly; not towards earlier ones."""
    model = build(replace(CONFIG, positions=kind, tied_embeddings=False))
    params, tokens = random_params(model), tokens_of()

    def logits(shifts):
        """Every place of every row with an embedding of its own."""
        table = jnp.concatenate([params["embedding"]["table"][tokens.reshape(-1)] + shifts])
        own = params | {"embedding": {"table": table}}
        return model.apply(own, jnp.arange(B * T, dtype=jnp.int32).reshape(B, T))[..., 0]

    jacobian = jax.jit(jax.jacrev(logits))(jnp.zeros((B * T, CONFIG.d_model)))
    reached = (jacobian != 0).any(axis=-1).reshape(B, T, B, T)
    expected = np.zeros((B, T, B, T), bool)
    for b in range(B):
        expected[b, :, b] = np.tril(np.ones((T, T), bool))
    np.testing.assert_array_equal(reached, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_is_the_full_forward_pass(kind):
    """I07, B13, B33: in pieces, and with padding before the text."""
    model = build(replace(CONFIG, positions=kind))
    params, tokens = random_params(model), tokens_of()
    full = apply(params, tokens, model=model)
    gap = 2
    padding = jnp.full((B, gap), -1, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    padded = jnp.concatenate([padding * 0 + 4, tokens], axis=1)
    positions = jnp.concatenate([padding, positions], axis=1)
    step = jax.jit(model.decode_step)
    cache, found = model.init_cache(params, B, T + gap), []
    for columns in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, T + gap)):
        logits, cache = step(params, padded[:, columns], cache, positions=positions[:, columns])
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1)[:, gap:], full, rtol=1e-4, atol=1e-5)
    assert full.dtype == jnp.float32
    overflow, _ = step(params, tokens[:, -1:], cache, positions=positions[:, -1:] + 1)
    assert np.isnan(overflow).all()


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_a_tree_are_texts_of_their_own(kind):
    """Two continuations side by side in one row, each with its own past."""
    model = build(replace(CONFIG, positions=kind))
    params, tokens = random_params(model), tokens_of(shape=(1, 3))
    branches = tokens_of(2, (2, 2))  # two tokens each
    texts = jnp.concatenate([jnp.broadcast_to(tokens, (2, 3)), branches], axis=1)
    full = apply(params, texts, model=model)
    step = jax.jit(model.decode_step)
    cache = model.init_cache(params, 1, 7)
    _, cache = step(params, tokens, cache, positions=jnp.asarray([[0, 1, 2]], jnp.int32))
    own = np.zeros((1, 2, 7), bool)
    own[:, :, :3] = True
    for t in range(2):
        own[0, [0, 1], [3 + 2 * t, 4 + 2 * t]] = True
        positions = jnp.full((1, 2), 3 + t, jnp.int32)
        logits, cache = step(params, branches[None, :, t], cache, positions=positions, visible=jnp.asarray(own))
        np.testing.assert_allclose(logits[0], full[:, 3 + t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "rope", "alibi"])
def test_padding_and_packing_do_not_matter(kind):
    """I03, I18, B33, B40: texts packed into a row, and padded on either side, equal the texts alone."""
    model = build(replace(CONFIG, positions=kind))
    params = random_params(model)
    one, other = tokens_of(3, (1, 3)), tokens_of(4, (1, 4))
    counted = lambda n: jnp.arange(n, dtype=jnp.int32)[None]  # noqa: E731
    alone = jax.jit(functools.partial(model.apply, params))
    expected = jnp.concatenate([alone(one), alone(other)], axis=1)

    @jax.jit
    def packed(filler, before, after):
        pad = lambda n, value: jnp.full((1, n), value, jnp.int32)  # noqa: E731
        tokens = jnp.concatenate([filler[:, :2] * before, one, other, filler[:, 2:] * after], axis=1)
        segments = jnp.concatenate([pad(2, 0), pad(3, 1), pad(4, 2), pad(2, 0)], axis=1)
        positions = jnp.concatenate([pad(2, 0), counted(3), counted(4), pad(2, 0)], axis=1)
        return model.apply(params, tokens, segment_ids=segments, positions=positions)[:, 2:9]

    for seed in (5, 6):
        found = packed(tokens_of(seed, (1, 4)), jnp.int32(1), jnp.int32(1))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_hidden_states_and_attention_weights_are_those_of_the_forward_pass(norm):
    model = build(replace(CONFIG, norm=norm))
    params, tokens = random_params(model), tokens_of()
    states = jax.jit(model.hidden_states)(params, tokens)["decoder"]
    assert states.shape == (CONFIG.num_layers + 1, B, T, CONFIG.d_model)
    np.testing.assert_allclose(states[-1], model.features(params, tokens), **FLOAT32)
    table, bias = model.output_layer(params)
    assert bias is None
    logits = np.einsum("BTD,VD->BTV", states[-1], table)
    np.testing.assert_allclose(apply(params, tokens, model=model), logits, rtol=1e-4, atol=1e-5)
    first = params["embedding"]["table"][tokens] + params["position_embedding"]["table"][:T][None]
    np.testing.assert_allclose(states[0], first, **FLOAT32)
    for layer in range(CONFIG.num_layers):
        weights = np.asarray(model.attention_weights(params, tokens, layer=layer)["decoder"])
        assert weights.shape == (B, CONFIG.num_heads, T, T)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tril(np.ones((T, T), bool)), weights.shape))
    with pytest.raises(ValueError, match="layer is 2: the stack has layers 0 to 1"):
        model.attention_weights(params, tokens, layer=2)


def test_the_module_is_a_flax_module_too():
    """The pair and the bound module are one function."""
    model = build(CONFIG)
    params, tokens = random_params(model), tokens_of()
    np.testing.assert_array_equal(model.bind(params)(tokens), model.apply(params, tokens))


def test_without_a_key_there_is_no_dropout():
    """B20, I13."""
    half, none = Dropout(0.5, 0.5, 0.5, 0.5), Dropout(0.0, 0.0, 0.0, 0.0)
    on, off = (build(replace(CONFIG, dropout=rates)) for rates in (half, none))
    params, tokens = random_params(on), tokens_of()
    np.testing.assert_array_equal(apply(params, tokens, model=on), apply(params, tokens, model=off))
    one, other = (apply(params, tokens, model=on, key=jax.random.key(seed)) for seed in (0, 1))
    assert (one != other).any()


def test_too_long_an_input_is_refused():
    """B17: by every way in; a position beyond a learned table gives NaN."""
    model = build(CONFIG)
    params, long = random_params(model), tokens_of(shape=(B, 12))
    for way in (model.apply, model.hidden_states, functools.partial(model.attention_weights, layer=0)):
        with pytest.raises(ValueError, match="the input has 12 tokens, the model accepts 11"):
            way(params, long)
    positions = jnp.arange(5, 12, dtype=jnp.int32)[None]
    beyond = np.isnan(apply(params, tokens_of(), model=model, positions=jnp.broadcast_to(positions, (B, T))))
    assert beyond[:, -1].all()


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token."""

    model: Any

    def __call__(self, params, batch, key):
        log_probs = jax.nn.log_softmax(self.model.apply(params, batch["tokens"], key=key))
        chosen = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
        return {"loss": (-(chosen * batch["weights"]).sum(), batch["weights"].sum())}


def test_it_learns_and_a_tied_table_stays_one():
    """B54: a text learned by heart; embedding and output layer are one leaf."""
    model = build(replace(CONFIG, dropout=Dropout(0.0, 0.0, 0.0, 0.0)))
    text = tokens_of(7, (B, T + 1))
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": jnp.ones((B, T))}
    optimizer = configs.Optimizer(learning_rate=0.02, warmup_steps=5)
    settings = {"optimizer": optimizer, "objective": NextToken(model)}
    state = init_state(jax.random.key(0), model=model, optimizer=optimizer, mesh=make_mesh(configs.Mesh()))
    before, weight = eval_step(state.params, batch, objective=settings["objective"])["loss"]
    assert abs(before / weight - np.log(V)) < 1  # an untrained model knows nothing
    for _ in range(60):
        state, metrics = train_step(state, batch, **settings)
    assert metrics["loss"] < 0.3
    assert jax.tree.structure(state.params) == jax.tree.structure(model.shapes) and "head" not in state.params


def test_parameters_in_bfloat16_have_gradients():
    """Of the logits and of the training loss, near those in float32 (8 bits of mantissa, 0.4 % a rounding)."""
    jax.config.update("jax_disable_most_optimizations", False)  # without them XLA on CPU has no such products
    model = build(replace(CONFIG, num_layers=1, head_bias=True, dropout=Dropout(0.0, 0.0)))
    params = random_params(model)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens, ones = tokens_of(), jnp.ones((B, T), jnp.float32)

    def squares(params):
        return jnp.square(model.apply(params, tokens)).mean()

    def loss(params):
        features = model.features(params, tokens)
        return linear_cross_entropy(features, model.output_layer(params), tokens, ones)["loss"][0]

    for function in (squares, loss):
        wide, narrow = (jax.tree.leaves(jax.jit(jax.grad(function))(p)) for p in (params, rounded))
        assert all(x.dtype == jnp.bfloat16 for x in narrow)
        wide, narrow = (np.concatenate([np.asarray(x, np.float64).ravel() for x in tree]) for tree in (wide, narrow))
        assert np.linalg.norm(narrow - wide) < 0.1 * np.linalg.norm(wide)
    jax.config.update("jax_disable_most_optimizations", True)
