"""Decoding over a mesh: parameters in shards, rows shared, and the outputs of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import config
from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import Prompts, SampleSettings, generate
from tfm_jax.decode.sampling import Sampling
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.sharding import make_mesh, parameter_shardings

V, B, S, P = 24, 8, 7, 3
SIZES = {"d_model": 16, "d_ff": 40, "num_heads": 8, "d_k": 2, "max_length": 24}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}
T5 = {"norm": "pre", "norm_kind": "rmsnorm", "activation": "geglu_tanh", "positions": "t5", "attention_bias": False}
FAMILIES = {
    "transformer": TransformerConfig(V, **LAYERS, **SIZES),
    "gpt": GPTConfig(V, num_layers=2, num_kv_heads=4, positions="rope", **SIZES),
    "t5": TransformerConfig(V, **LAYERS, **SIZES, **T5, tied_embeddings="source_target"),
}
MESHES = {
    "data 8": config.Mesh(data=8),
    "fsdp 8": config.Mesh(fsdp=8),
    "model 8": config.Mesh(model=8),
    "data 2 model 4": config.Mesh(data=2, model=4),
    "fsdp 4 model 2": config.Mesh(fsdp=4, model=2),
    "fsdp 2 sequence 4": config.Mesh(fsdp=2, sequence=4),
}
WHEN_THERE_IS_TIME = {("data 8", f) for f in FAMILIES} | {("fsdp 8", f) for f in FAMILIES} | {("data 2 model 4", "t5")}
BEAMS = BeamSettings(3, 9, 1.0, True, (2,), 0)
DRAWS = SampleSettings(9, (2,), 0, sampling=Sampling(temperature=1.0, top_k=5))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def written(family, mesh, settings):
    """Tokens and scores of prompts of unequal length, for a model that is sure of itself."""
    model, mesh, rng = build(FAMILIES[family]), make_mesh(mesh), np.random.default_rng(0)
    ids = lambda length: jnp.asarray(rng.integers(3, V, (B, length)), jnp.int32)  # noqa: E731
    source = (ids(S), jnp.asarray(np.arange(S) < rng.integers(2, S + 1, (B, 1)), jnp.int32))
    prompts = Prompts(ids(P), jnp.asarray(np.arange(P) >= rng.integers(0, P, (B, 1)), jnp.int32))
    prompts = prompts if family == "gpt" else Prompts(prompts.tokens, prompts.segment_ids, *source)
    # far from a tie: what is written does not hang on rounding
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(1)))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, parameter_shardings(model.axes, mesh, model.shapes))
        return jax.device_get(generate(params, prompts, model=model, settings=settings))


def cases():
    for mesh in MESHES:
        # a model over 8 devices divides 4 heads of keys by no device
        for family in FAMILIES if mesh != "model 8" else ("transformer", "t5"):
            late = pytest.mark.slow if (mesh, family) in WHEN_THERE_IS_TIME else ()
            yield pytest.param(family, mesh, marks=late, id=f"{family}-{mesh}")


@pytest.mark.parametrize(("family", "mesh"), list(cases()))
def test_devices_search_as_one(family, mesh):
    """B22, B32: token for token, three hypotheses a row."""
    found, alone = written(family, MESHES[mesh], BEAMS), written(family, config.Mesh(), BEAMS)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    # logits reach 50 here, of which a unit in the last place is 4e-6
    np.testing.assert_allclose(found.scores, alone.scores, rtol=0, atol=5e-5)
    assert len(np.unique(alone.tokens)) > 8


@pytest.mark.parametrize("mesh", ["fsdp 4 model 2", "fsdp 2 sequence 4"])
def test_devices_draw_as_one(mesh):
    """B22: a draw depends on seed, request and step, wherever the row is computed."""
    found, alone = written("gpt", MESHES[mesh], DRAWS), written("gpt", config.Mesh(), DRAWS)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
