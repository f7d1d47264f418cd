"""The encoder-only model: equal to the oracle, what it sees, its heads, and what it cannot do."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle_blocks
from tfm_jax.config import Corruption, Data
from tfm_jax.decode.text import require_encoder, require_no_encoder
from tfm_jax.models import build
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.bert import BERTConfig
from tfm_jax.train.objectives import LanguageModel, objective_of

V, B, T, D = 13, 2, 7, 12
PLAIN = BERTConfig(
    V, num_layers=2, max_length=11, d_model=D, d_ff=17, num_heads=3, norm_eps=1e-3, dropout=Dropout(0.0, 0.0)
)
OTHER = replace(
    PLAIN,
    norm="pre",
    norm_kind="rmsnorm",
    activation="swiglu",
    positions="rope",
    num_kv_heads=1,
    token_types=0,
    head_bias=False,
)
FLOAT32 = {"rtol": 1e-5, "atol": 3e-6}


@functools.cache
def random_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 2, jnp.float32), model.shapes)


def ids(seed=1, low=0, high=V):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, (B, T)), jnp.int32)


SEGMENTS = jnp.asarray([[1] * T, [1, 1, 1, 1, 0, 0, 0]], jnp.int32)


def test_it_is_the_oracles():
    """B58, B60: embedding, position and type added up, a norm, post-norm blocks, the masked head; types matter."""
    model = build(PLAIN)
    params, tokens, types = random_params(model), ids(), ids(2, high=2)
    table = {name: np.asarray(params[name]["table"], np.float64) for name in params if name.endswith("embedding")}
    x = table["embedding"][tokens] + table["position_embedding"][:T] + table["token_type_embedding"][types]
    x = oracle_blocks.layer_norm(params["embedding_norm"], x, eps=1e-3)
    mask = (np.asarray(SEGMENTS)[:, None, :, None] == np.asarray(SEGMENTS)[:, None, None, :]) & True
    for layer in range(2):
        own = jax.tree.map(lambda leaf, i=layer: leaf[i], params["encoder"]["layers"])
        x = oracle_blocks.encoder_block(own, x, mask=mask, norm="post", norm_eps=1e-3, activation="gelu")
    head = params["masked"]
    h = x @ np.asarray(head["dense"], np.float64) + np.asarray(head["dense_bias"])
    h = oracle_blocks.layer_norm(head["norm"], oracle_blocks.ACTIVATIONS["gelu"](h), eps=1e-3)
    expected = h @ table["embedding"].T + np.asarray(head["bias"])
    logits = model.apply(params, tokens, segment_ids=SEGMENTS, token_types=types)
    live = np.asarray(SEGMENTS) > 0
    np.testing.assert_allclose(np.asarray(logits)[live], expected[live], **FLOAT32)
    assert np.abs(model.apply(params, tokens, segment_ids=SEGMENTS) - logits)[live].max() > 1e-2


@pytest.mark.parametrize("config", [PLAIN, OTHER], ids=["plain", "other"])
def test_every_parameter_learns_and_padding_does_not_matter(config):
    model = build(config)
    params, tokens = random_params(model), ids()

    @jax.jit
    def loss(params, tokens):
        logits = model.apply(params, tokens, segment_ids=SEGMENTS)
        return jnp.where((SEGMENTS > 0)[..., None], jnp.square(logits), 0.0).sum()

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.grad(loss)(params, tokens)):
        moved = "key_bias" in jax.tree_util.keystr(path) or np.abs(leaf).max() > 0
        assert np.isfinite(leaf).all() and moved, jax.tree_util.keystr(path)
    other = jnp.where(SEGMENTS > 0, tokens, (tokens + 5) % V)
    assert loss(params, tokens) == loss(params, other)
    earlier = tokens.at[0, T - 1].set((tokens[0, T - 1] + 1) % V)
    first = lambda tokens: model.apply(params, tokens)[0, 0]  # noqa: E731
    assert np.abs(first(tokens) - first(earlier)).max() > 1e-3, "the first token sees the last"


def test_what_it_learns_from_and_what_it_cannot_do():
    masked = Data(corruption=Corruption("mask"))
    assert objective_of(build(PLAIN), masked, two_sided=False) == LanguageModel(build(PLAIN), 0.0)
    with pytest.raises(ValueError, match="head is 'pooled'"):
        objective_of(build(replace(PLAIN, head="pooled")), masked, two_sided=False)
    with pytest.raises(
        ValueError, match=r"'bert' model \(encoder\) learns from a text .* mask, and this data is .* none"
    ):
        objective_of(build(PLAIN), Data(), two_sided=False)
    for require in (require_encoder, require_no_encoder):
        with pytest.raises(ValueError, match="'bert' model does not .*: it has no decoder"):
            require(build(PLAIN))
