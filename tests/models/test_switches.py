"""Every switch works with the others: a train step, a cache, packing and JSON, in combinations that meet pairwise."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import config as configs
from tfm_jax.models import build, family
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.ops import Rotary

V, B, T, S = 13, 3, 7, 5
FLOAT32 = {"rtol": 1e-5, "atol": 3e-6}
SIZES = {"max_length": 11, "d_model": 12, "d_ff": 17, "num_heads": 4, "d_k": 6, "dropout": Dropout(0.0, 0.0)}
GPTS = {
    "llama": {
        "norm_kind": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "num_kv_heads": 2,
        "attention_bias": False,
        "feed_forward_bias": False,
        "tied_embeddings": False,
    },
    "qwen": {
        "norm_kind": "rmsnorm",
        "activation": "geglu",
        "positions": "rope",
        "rope": Rotary(base=100.0),
        "num_kv_heads": 1,
        "attention_output_bias": False,
    },
    "post": {"norm": "post", "activation": "geglu_tanh", "positions": "alibi", "num_kv_heads": 2, "head_bias": True},
    "shaw": {"norm_kind": "rmsnorm", "norm": "post", "positions": "shaw", "num_kv_heads": 2, "d_v": 5},
    "t5": {"positions": "t5", "t5_buckets": 4, "num_kv_heads": 1, "attention_scale": "none", "activation": "silu"},
}
TRANSFORMERS = {
    "t5": {
        "norm": "pre",
        "norm_kind": "rmsnorm",
        "positions": "t5",
        "t5_buckets": 8,
        "attention_scale": "none",
        "attention_bias": False,
        "feed_forward_bias": False,
        "embedding_scale": False,
        "logits_scale": True,
    },
    "t5 v1.1": {
        "norm": "pre",
        "norm_kind": "rmsnorm",
        "activation": "geglu_tanh",
        "positions": "t5",
        "t5_buckets": 8,
        "attention_scale": "none",
        "attention_bias": False,
        "feed_forward_bias": False,
        "embedding_scale": False,
        "tied_embeddings": "source_target",
    },
    "bart": {"activation": "gelu", "positions": "learned", "embedding_scale": False, "embedding_norm": True},
    "grouped": {
        "norm_kind": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "num_kv_heads": 2,
        "attention_output_bias": False,
        "embedding_norm": True,
        "logits_scale": True,
        "head_bias": True,
    },
}
CONFIGS = {f"gpt {name}": GPTConfig(V, num_layers=2, **SIZES, **switches) for name, switches in GPTS.items()} | {
    f"transformer {name}": TransformerConfig(V, num_encoder_layers=1, num_decoder_layers=2, **SIZES, **switches)
    for name, switches in TRANSFORMERS.items()
}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def params_of(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, jnp.float32), model.shapes)


def ids(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


@functools.partial(jax.jit, static_argnames="model")
def losses(params, sides, *, model, **inputs):
    """The loss of each row, its gradient, and the logits."""

    def loss(params):
        logits = model.apply(params, *sides, **inputs)
        return -jax.nn.log_softmax(logits)[..., 0].sum(), logits

    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return logits, gradient


@functools.partial(jax.jit, static_argnames="model")
def decoded(params, sides, *, model):
    """The logits of the last side, three tokens at once and then one by one."""
    *source, tokens = sides
    encoded = {"encoded": model.encode(params, *source)} if source else {}
    cache, found = model.init_cache(params, B, T, **encoded), []
    for start, stop in ((0, 3), *((i, i + 1) for i in range(3, T))):
        positions = jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (B, stop - start))
        logits, cache = model.decode_step(params, tokens[:, start:stop], cache, positions=positions)
        found.append(logits)
    return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_combination_trains_decodes_and_packs(name):
    """I07, I11, I18: finite gradients for every parameter, a cache changes nothing, nor does what shares a row."""
    model = build(CONFIGS[name])
    params, tokens = params_of(model), ids(1, B, T)
    sides = (ids(2, B, S), tokens) if name.startswith("transformer") else (tokens,)
    logits, gradient = losses(params, sides, model=model)
    assert np.isfinite(logits).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        # a key bias moves all scores of a query alike, which softmax does not see
        moved = "key_bias" in jax.tree_util.keystr(path) or np.abs(leaf).max() > 0
        assert np.isfinite(leaf).all() and moved, jax.tree_util.keystr(path)
    np.testing.assert_allclose(decoded(params, sides, model=model), logits, **FLOAT32)

    half = lambda length: jnp.asarray([[1] * 3 + [2] * (length - 3)] * B, jnp.int32)  # noqa: E731
    count = lambda length: jnp.asarray([[*range(3), *range(length - 3)]] * B, jnp.int32)  # noqa: E731
    inputs = {"segment_ids": half(T), "positions": count(T)}
    if len(sides) == 2:
        inputs |= {"source_segment_ids": half(S), "source_positions": count(S)}
    packed, _ = losses(params, sides, model=model, **inputs)
    first, _ = losses(params, tuple(side[:, :3] for side in sides), model=model)
    np.testing.assert_allclose(packed[:, :3], first, **FLOAT32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_combination_survives_json(name):
    values = json.loads(configs.to_json(CONFIGS[name]))
    assert configs.from_dict(family(values.pop("family"))[1], values) == CONFIGS[name]


@pytest.mark.parametrize("config", [CONFIGS["gpt llama"], CONFIGS["transformer grouped"]])
def test_heads_that_queries_cannot_share_are_refused(config):
    """B18, I34"""
    for kv_heads in (0, 3, 8):
        with pytest.raises(ValueError, match=f"num_heads is 4, num_kv_heads {kv_heads}: 4 is not a multiple"):
            replace(config, num_kv_heads=kv_heads)


def test_fewer_heads_make_a_smaller_cache():
    config = CONFIGS["gpt llama"]
    for kv_heads in (1, 2, 4):
        model = build(replace(config, num_kv_heads=kv_heads))
        cache = jax.eval_shape(lambda model=model: model.init_cache(model.init(jax.random.key(0)), B, T))
        assert cache.layers[0].key.shape == (B, kv_heads, 6, T)
