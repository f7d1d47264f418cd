"""Every combination of switches either works with everything, or is refused when the configuration is built.

It works: it initialises, trains a step, decodes with a cache, packs and pads, and survives JSON and a checkpoint.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.models import space
from tfm_jax import config as configs
from tfm_jax.models import FAMILIES, build, family
from tfm_jax.ops import Rotary, Splash
from tfm_jax.ops.attention import IMPLEMENTATIONS
from tfm_jax.sharding import make_mesh
from tfm_jax.train.checkpoint import load_params, save_params
from tfm_jax.train.objectives import LanguageModel, TextToText
from tfm_jax.train.optim import make_optimizer
from tfm_jax.train.step import TrainState, abstract_params, train_step

FLOAT32 = {"rtol": 1e-5, "atol": 3e-6}
# of the sentence, of its source, and of what stands before or after it in a row
T, S, MORE = 7, 5, 2
OPTIMIZER = configs.Optimizer(schedule="constant", learning_rate=0.01, warmup_steps=0)
# dropout takes half of the time to compile, so not all have it
NO_DROPOUT = {"embedding": 0.0, "residual": 0.0}
SIZES = {"vocab_size": 13, "max_length": 11, "d_model": 12, "d_ff": 17, "num_heads": 4}
ONE_LAYER, ONE_LAYER_EACH = {"num_layers": 1}, {"num_encoder_layers": 1, "num_decoder_layers": 1}
LLAMA = {
    "norm_kind": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "attention_bias": False,
    "feed_forward_bias": False,
    "tied_embeddings": False,
    "dropout": NO_DROPOUT,
    "d_k": 6,
    "num_layers": 2,
}
QWEN2 = LLAMA | {"attention_bias": True, "attention_output_bias": False, "tied_embeddings": True}
T5 = {
    "norm": "pre",
    "norm_kind": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "t5",
    "attention_scale": "none",
    "attention_bias": False,
    "feed_forward_bias": False,
    "embedding_scale": False,
    "dropout": NO_DROPOUT,
    "d_k": 5,
    "num_encoder_layers": 1,
}
V1_1 = T5 | {"activation": "geglu_tanh", "tied_embeddings": "source_target", "num_decoder_layers": 1}
BART = {"positions": "learned", "activation": "gelu", "embedding_scale": False, "embedding_norm": True}
MARIAN = {"positions": "sinusoidal_halves", "activation": "silu", "head_bias": True}
NAMED = {
    "llama": ("gpt", LLAMA | {"num_kv_heads": 2}),
    "qwen2": ("gpt", QWEN2 | ONE_LAYER | {"num_kv_heads": 1}),
    "mistral": ("gpt", LLAMA | ONE_LAYER | {"rope": {"base": 1e6}, "implementation": "blockwise"}),
    "gpt2": ("gpt", ONE_LAYER),
    "t5": ("transformer", T5 | {"t5_buckets": 8, "logits_scale": True, "num_decoder_layers": 2}),
    "t5 v1.1 and mt5": ("transformer", V1_1 | {"t5_buckets": 6, "t5_max_distance": 4}),
    "bart": ("transformer", BART | ONE_LAYER_EACH | {"dropout": NO_DROPOUT}),
    "marian": ("transformer", MARIAN | ONE_LAYER_EACH | {"dropout": NO_DROPOUT}),
    "attention is all you need": ("transformer", ONE_LAYER_EACH | {"dropout": {"embedding": 0.3, "residual": 0.3}}),
    "bert": ("bert", ONE_LAYER),
    "roberta, pooled": ("bert", ONE_LAYER | {"token_types": 1, "norm_eps": 1e-5, "head": "pooled"}),
    # what none of them has
    "alibi": (
        "gpt",
        ONE_LAYER | {"positions": "alibi", "norm": "post", "activation": "geglu", "num_kv_heads": 2, "head_bias": True},
    ),
    "shaw": (
        "bert",
        ONE_LAYER | {"positions": "shaw", "shaw_distance": 3, "d_v": 5, "token_types": 0, "dropout": NO_DROPOUT},
    ),
    "no positions": (
        "transformer",
        ONE_LAYER_EACH | {"positions": "none", "tied_embeddings": "none", "num_kv_heads": 2, "dropout": NO_DROPOUT},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def a_tpu_in_the_interpreter():
    """Splash is accepted for a TPU, which is not here."""
    real = IMPLEMENTATIONS["splash"]
    IMPLEMENTATIONS["splash"] = Splash(interpret=True, block=128)
    yield
    IMPLEMENTATIONS["splash"] = real


# ----------------------------------------------------------------------------------------------------------------------
# What works
# ----------------------------------------------------------------------------------------------------------------------


def rows(rng, vocab_size, length):
    """A text three times: padding follows, another text stands before it in its row, padding stands before it.

    Tokens, segment ids, positions, and where in each row the text begins.
    """
    text, starts = rng.integers(0, vocab_size, length), (0, MORE, MORE)
    tokens = rng.integers(0, vocab_size, (3, length + MORE))
    segments, positions = np.zeros_like(tokens), np.full_like(tokens, -1)
    segments[1, :MORE], positions[1, :MORE] = 1, range(MORE)
    for row, start in enumerate(starts):
        columns = slice(start, start + length)
        tokens[row, columns], segments[row, columns], positions[row, columns] = text, 2, range(length)
    return *(jnp.asarray(x, jnp.int32) for x in (tokens, segments, positions)), starts


def inputs_of(model):
    """Sides of a call, its other inputs, and the text alone as one row for each side."""
    rng, two_sided = np.random.default_rng(1), model.config.kind == "encoder-decoder"
    sides, inputs, alone = [], {}, []
    for prefix, length in ((("source_", S),) if two_sided else ()) + (("", T),):
        tokens, segments, positions, starts = rows(rng, model.config.vocab_size, length)
        sides.append(tokens)
        alone.append(tokens[:1, :length])
        inputs |= {f"{prefix}segment_ids": segments, f"{prefix}positions": positions}
    if model.config.implementation == "splash":
        # it knows causality by index alone, so positions cannot be given, and texts begin at column 0
        inputs, starts = {name: x for name, x in inputs.items() if not name.endswith("positions")}, starts[:1]
    if model.config.kind == "encoder" and model.config.token_types:
        inputs["token_types"] = jnp.full_like(sides[0], model.config.token_types - 1)
    return tuple(sides), inputs, tuple(alone), starts


def objective_for(model):
    """What trains the model; without an output layer, any loss of what the head gives."""
    if getattr(model.config, "head", "masked") == "pooled":
        return functools.partial(squares, model)
    return (TextToText if model.config.kind == "encoder-decoder" else LanguageModel)(model, label_smoothing=0.1)


def squares(model, params, batch, key):
    return {"loss": (jnp.square(model.apply(params, batch["tokens"], key=key) - 1.0).sum(), jnp.float32(1.0))}


def decoded(model, params, alone):
    """The logits of the text, three tokens at once and then one by one."""
    *source, tokens = alone
    encoded = {"encoded": model.encode(params, *source)} if source else {}
    cache = model.init_cache(params, 1, T, **encoded)
    positions = jnp.arange(T, dtype=jnp.int32)
    first, cache = model.decode_step(params, tokens[:, :3], cache, positions=positions[None, :3])

    def step(cache, column):
        token, position = column
        logits, cache = model.decode_step(params, token[None, None], cache, positions=position[None, None])
        return cache, logits[0, 0]

    _, rest = jax.lax.scan(step, cache, (tokens[0, 3:], positions[3:]))
    return jnp.concatenate([first[0], rest])


@functools.partial(jax.jit, static_argnames="model")
def everything(fresh, key, params, sides, inputs, alone, *, model):
    """One program: the parameters after a train step and its metrics, what a call gives, and logits by cache."""
    state = TrainState(jnp.zeros((), jnp.int32), fresh, make_optimizer(OPTIMIZER).init(fresh), key)
    batch = dict(zip(("source_tokens", "tokens") if len(alone) == 2 else ("tokens",), alone, strict=True))
    batch |= {"targets": jnp.flip(batch["tokens"]), "weights": jnp.ones(batch["tokens"].shape)}
    state, metrics = train_step(state, batch, optimizer=OPTIMIZER, objective=objective_for(model))
    by_cache = None if model.config.kind == "encoder" else decoded(model, params, alone)
    return state.params, metrics, model.apply(params, *sides, **inputs), by_cache


def params_of(model):
    """Random in every leaf, so that nothing is hidden behind a zero or a one."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, jnp.float32), model.shapes)


def round_trip(config):
    values = json.loads(configs.to_json(config))
    return configs.from_dict(family(values.pop("family"))[1], values)


def assert_works(config):
    model = build(config)
    again = build(round_trip(config))
    assert again == model and hash(again) == hash(model) and again.config is not config
    sides, inputs, alone, starts = inputs_of(model)
    key = jax.random.key(3)
    fresh, arguments = model.init(key), (key, params_of(model), sides, inputs, alone)
    trained, metrics, output, by_cache = everything(fresh, *arguments, model=model)

    assert jax.tree.map(lambda x: (x.shape, x.dtype), fresh) == jax.tree.map(lambda x: (x.shape, x.dtype), model.shapes)
    ranks = jax.tree.map(len, model.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(lambda x: x.ndim, model.shapes)
    assert all(np.isfinite(x).all() and x.dtype == jnp.float32 for x in jax.tree.leaves(fresh))
    assert all(np.isfinite(x) for x in metrics.values()), metrics
    for (path, before), after in zip(jax.tree.leaves_with_path(fresh), jax.tree.leaves(trained), strict=True):
        name = jax.tree_util.keystr(path)
        # a bias of keys moves all scores of a query alike, unless it is turned
        assert np.isfinite(after).all() and ((before != after).any() or "key_bias" in name), name

    assert output.dtype == jnp.float32 and np.isfinite(output).all()
    if output.ndim == 3:
        texts = [output[row, start : start + T] for row, start in enumerate(starts)]
        for other in (*texts[1:], *(() if by_cache is None else (by_cache,))):
            np.testing.assert_allclose(other, texts[0], **FLOAT32)

    mesh = make_mesh(configs.Mesh())
    with tempfile.TemporaryDirectory() as directory:
        save_params(Path(directory) / "params", trained)
        loaded = load_params(Path(directory) / "params", abstract_params(model, mesh))
    assert jax.tree.structure(loaded) == jax.tree.structure(model.shapes)
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)


@pytest.mark.parametrize("name", NAMED)
def test_a_combination_works(name):
    """I07, I11, I18, B15, B33, B40, B54: the switches of published models, and some that none of them has."""
    kind, values = NAMED[name]
    assert_works(space.made(kind, SIZES | values))


def refused_or_made(kind, values):
    """The configuration, or None where it is refused with the name of a field."""
    hypothesis.note(f"{kind}: {values}")
    try:
        return space.made(kind, values)
    except ValueError as error:
        assert set(re.findall(r"\w+", str(error))) & set(space.names_of(kind)), error
        return None


@pytest.mark.slow
@settings(max_examples=150, phases=[hypothesis.Phase.generate])
@given(space.drawn(space.perhaps_legal))
def test_every_combination_is_refused_or_works(drawn):
    """I07, I11, I18, I34, B15, B33, B40, B54: whatever is set, nothing fails after the configuration is built."""
    config = refused_or_made(*drawn)
    if config is not None:
        assert_works(config)
        jax.clear_caches()  # some hundred programs take gigabytes


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(space.drawn(space.legal))
def test_what_is_legal_is_accepted_and_survives_json(drawn):
    """The rules of the space say so without looking at the checks."""
    config = refused_or_made(*drawn)
    assert config is not None
    again = round_trip(config)
    assert again == config and hash(again) == hash(config) and again is not config


@settings(max_examples=300)
@given(space.drawn(space.perhaps_legal))
def test_what_is_refused_names_a_field(drawn):
    """I34: nothing but a ValueError."""
    config = refused_or_made(*drawn)
    assert config is None or round_trip(config) == config


KINDS = {"rope": "rope", "shaw_distance": "shaw", "t5_buckets": "t5", "t5_max_distance": "t5"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_wrong_value_is_refused_by_name(kind):
    """I34: from Python as from JSON: out of range, of another type, not finite, or none of the choices."""
    own = set(space.names_of(kind))
    assert own == set(space.SWITCHES | space.OWN[kind] | space.OTHER)
    for name in own:
        right = SIZES | {"d_k": 6, "positions": KINDS.get(name, "none")}
        assert space.made(kind, right)
        for value in space.WRONG[name]:
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                space.made(kind, right | {name: value})
    with pytest.raises(ValueError, match="model.rope.pairing is 'quarter': one of"):
        # Rotary itself looks at it only when it turns something
        rope = Rotary()
        object.__setattr__(rope, "pairing", "quarter")
        FAMILIES[kind][1](**SIZES, d_k=6, positions="rope", rope=rope)


TOGETHER = [
    ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads 3: 4 is not a multiple"),
    ({"num_kv_heads": 8}, "num_heads is 4, num_kv_heads 8: 4 is not a multiple"),
    ({"d_model": 13}, "d_model is 13, num_heads 4: 13 is not a multiple of 4.*give d_k"),
    ({"positions": "rope"}, "rope turns pairs of elements.*head of size 3 is 3: an even number"),
    ({"positions": "rope", "d_k": 6, "rope": {"fraction": 0.5}}, "rope .*fraction 0.5 of a head of size 6 is 3"),
    ({"positions": "rope", "d_k": 6, "t5_buckets": 8}, "model.t5_buckets is 8.*positions is 'rope', not 't5'"),
    ({"positions": "learned", "rope": {"base": 5.0}}, "model.rope is .*positions is 'learned', not 'rope'"),
    ({"positions": "alibi", "t5_max_distance": 9}, "model.t5_max_distance is 9.*positions is 'alibi', not 't5'"),
    ({"positions": "t5", "shaw_distance": 3}, "model.shaw_distance is 3.*positions is 't5', not 'shaw'"),
    ({"positions": "t5", "t5_max_distance": 16}, "model.t5_max_distance: .*16 buckets are single distances"),
    ({"positions": "shaw", "implementation": "cudnn"}, "model.implementation 'cudnn' cannot .*ShawBias"),
    ({"positions": "alibi", "implementation": "cudnn"}, "model.implementation 'cudnn' cannot .*ALiBi"),
    ({"positions": "t5", "implementation": "cudnn"}, "model.implementation 'cudnn' cannot .*T5Bias"),
    ({"positions": "none", "implementation": "cudnn", "d_k": 8}, "model.implementation 'cudnn' cannot .*float32"),
    ({"positions": "shaw", "implementation": "splash"}, "model.implementation 'splash' cannot .*ShawBias"),
    ({"positions": "alibi", "implementation": "splash"}, "model.implementation 'splash' cannot .*ALiBi"),
    ({"positions": "t5", "implementation": "splash"}, "model.implementation 'splash' cannot .*T5Bias"),
    (
        {"positions": "none", "implementation": "splash", "dropout": {"attention": 0.1}},
        "model.implementation 'splash' cannot .*dropout at rate 0.1",
    ),
]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("changes", "message"), TOGETHER, ids=[str(changes) for changes, _ in TOGETHER])
def test_what_does_not_go_together_is_refused(kind, changes, message):
    """B18, I34: when the configuration is built, with the reason."""
    with pytest.raises(ValueError, match=message):
        space.made(kind, SIZES | {"dropout": NO_DROPOUT} | changes)


def test_fewer_heads_make_a_smaller_cache():
    for kv_heads in (1, 2, 4):
        model = build(space.made("gpt", SIZES | NAMED["llama"][1] | {"num_kv_heads": kv_heads}))
        cache = jax.eval_shape(lambda model=model: model.init_cache(model.init(jax.random.key(0)), 3, T))
        assert cache.layers[0].key.shape == (3, kv_heads, 6, T)
