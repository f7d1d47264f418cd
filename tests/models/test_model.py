"""`Model`: initial values, shapes and axis names without arrays, and the numbers of the Flax module it describes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax.models import FAMILIES, Model, build, family
from tfm_jax.models.transformer import Dropout, Transformer, TransformerConfig, transformer_base
from tfm_jax.nn import Embedding
from tfm_jax.sharding import PARAMETER_AXES

V, D, N, H, E, F, MAX = 23, 14, 2, 7, 5, 17, 19
CONFIG = TransformerConfig(
    V,
    max_length=MAX,
    d_model=D,
    d_ff=F,
    num_heads=N,
    num_encoder_layers=3,
    num_decoder_layers=2,
    d_k=H,
    d_v=E,
    norm="pre",
    positions="learned",
    tied_embeddings="none",
    head_bias=True,
    dropout=Dropout(embedding=0.5),
)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model():
    return build(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


def paths(tree, is_leaf=None):
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def test_parameters_are_a_function_of_the_key_alone(model, params):
    again, other = build(CONFIG).init(jax.random.key(0)), model.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    same = {path for path, leaf in paths(params).items() if (leaf == paths(other)[path]).all()}
    assert same == {path for path in paths(params) if path.endswith(("bias", "scale"))}


def test_shapes_are_those_of_the_parameters(model, params):
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params) == model.shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert model.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert all(isinstance(key.key, str) for path, _ in jax.tree.leaves_with_path(params) for key in path)


def test_shapes_of_a_large_model_cost_nothing():
    """Billions of parameters are described without being made."""
    config = dataclasses.replace(transformer_base(), d_model=16_384, d_ff=65_536, num_encoder_layers=60)
    assert build(config).num_parameters > 200e9


def test_axes_name_every_dimension(model):
    """The layer axis and head sizes have no name; every name is in the table of `sharding`."""
    shapes, axes = paths(model.shapes), paths(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert axes.keys() == shapes.keys()
    assert all(len(axes[path]) == len(shapes[path].shape) for path in shapes)
    assert {name for names in axes.values() for name in names} == set(PARAMETER_AXES) | {None}
    sizes = {"embed": {D}, "mlp": {F}, "heads": {N}, "kv_heads": {N}, "vocab": {V}}
    for path, names in axes.items():
        for name, size in zip(names, shapes[path].shape, strict=True):
            assert name is None or size in sizes[name], path
    assert axes["encoder.layers.feed_forward.up"] == (None, "embed", "mlp")
    assert axes["decoder.layers.cross_attention.value"] == (None, "embed", "kv_heads", None)
    assert axes["decoder.layers.attention.output"] == (None, "heads", None, "embed")
    assert axes["embedding.table"] == ("vocab", "embed") and axes["position_embedding.table"] == (None, "embed")


def test_initial_values(params):
    """Embeddings D^-1/2; Xavier with half the variance for query, key and value; every layer its own draw."""
    found = paths(params)
    for path in ("embedding.table", "source_embedding.table", "position_embedding.table"):
        np.testing.assert_allclose(found[path].std(), D**-0.5, rtol=0.15)
    limits = {
        "encoder.layers.attention.query": math.sqrt(3 / (D + N * H)),
        "decoder.layers.cross_attention.value": math.sqrt(3 / (D + N * E)),
        "decoder.layers.attention.output": math.sqrt(6 / (N * E + D)),
        "encoder.layers.feed_forward.up": math.sqrt(6 / (D + F)),
        "decoder.layers.feed_forward.down": math.sqrt(6 / (D + F)),
        "head": math.sqrt(6 / (D + V)),
    }
    for path, limit in limits.items():
        largest = np.abs(found[path]).max()
        assert 0.9 * limit < largest <= limit, path
    for path, leaf in found.items():
        if path.endswith("bias"):
            assert (leaf == 0).all()
        elif path.endswith("scale"):
            assert (leaf == 1).all()
        elif ".layers." in path:
            assert np.abs(leaf[0] - leaf[1]).min() > 0, path
    assert np.abs(found["embedding.table"] - found["source_embedding.table"]).min() > 0


def test_the_flax_module_gives_the_same_numbers(model, params):
    """`Transformer(config, rngs=...)(tokens)` works as any module does, and `bind` puts parameters into one."""
    rng = np.random.default_rng(0)
    source, tokens = (jnp.asarray(rng.integers(0, V, shape), jnp.int32) for shape in ((3, 6), (3, 5)))
    module = Transformer(CONFIG, rngs=nnx.Rngs(jax.random.key(0)))
    with jax.disable_jit():
        expected = model.apply(params, source, tokens)
        np.testing.assert_array_equal(module(source, tokens), expected)
        bound = model.bind(params)
        assert isinstance(bound, Transformer)
        np.testing.assert_array_equal(bound(source, tokens), expected)
        np.testing.assert_array_equal(bound.encode(source), model.encode(params, source))
        # binding copies nothing and keeps nothing: other parameters, other numbers
        doubled = jax.tree.map(lambda x: 2 * x, params)
        assert np.abs(model.bind(doubled)(source, tokens) - expected).max() > 1e-3
        np.testing.assert_array_equal(bound(source, tokens), expected)


def test_equal_models_are_one_key():
    """B55: equal configuration, equal model, equal hash; any difference in a nested field tells them apart."""
    one, other = build(CONFIG), Model(Transformer, dataclasses.replace(CONFIG))
    assert one == other and hash(one) == hash(other) and one == build(CONFIG)
    assert one != build(dataclasses.replace(CONFIG, dropout=Dropout(embedding=0.25)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.config = CONFIG


def test_families_are_found_by_name():
    assert family("transformer") == (Transformer, TransformerConfig)
    assert all(config.family == name for name, (_, config) in FAMILIES.items())
    with pytest.raises(ValueError, match="'gru'.*transformer"):
        family("gru")


def test_an_embedding_has_the_same_values_under_x64():
    """B56: draws name their dtype."""
    expected = Embedding(V, D, rngs=nnx.Rngs(0)).table[...]
    with jax.enable_x64(True):
        found = Embedding(V, D, rngs=nnx.Rngs(0)).table[...]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)
