"""The modules behind the switch `positions`: their parameters, and the biases that they hand to a stack."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfm_jax import ops
from tfm_jax.nn import Decoder, Encoder, MultiHeadAttention, plain
from tfm_jax.nn.blocks import BlockSizes
from tfm_jax.nn.positions import ALiBiPositionBias, T5PositionBias, position_bias
from tfm_jax.ops import ALiBi, BlockSettings, T5Bias, alibi_slopes

D, F, N, H, E, L = 6, 7, 3, 5, 2, 2
CONFIG = {"num_heads": N, "t5_buckets": 11, "t5_max_distance": 13}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bias_of(positions, bidirectional):
    config = SimpleNamespace(positions=positions, **CONFIG)
    return position_bias(config, bidirectional=bidirectional, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_has_one_number_for_each_bucket_and_head(bidirectional):
    """B15: a small table at first, so that a fresh model still attends by content."""
    module = bias_of("t5", bidirectional)
    assert isinstance(module, T5PositionBias) and list(plain(module)) == ["table"]
    bias = module()
    assert isinstance(bias, T5Bias) and (bias.bidirectional, bias.max_distance) == (bidirectional, 13)
    np.testing.assert_array_equal(bias.table, plain(module)["table"])
    large = T5PositionBias(61, num_buckets=53, max_distance=97, bidirectional=bidirectional, rngs=nnx.Rngs(1))
    table = plain(large)["table"]
    assert table.shape == (53, 61) and table.dtype == jnp.float32
    # of 3,233 numbers, the deviation is known to 1.3 %
    np.testing.assert_allclose([table.mean(), table.std()], [0.0, 0.02], atol=1e-3)


def test_alibi_has_no_parameters():
    module = bias_of("alibi", True)
    assert isinstance(module, ALiBiPositionBias) and isinstance(module(), ALiBi) and plain(module) == {}
    np.testing.assert_allclose(module().slopes, alibi_slopes(N), rtol=1e-7)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "shaw", "none"])
def test_other_kinds_need_no_bias_of_the_stack(positions):
    assert bias_of(positions, True) is None


def test_shaws_tables_belong_to_self_attention():
    """One row for each distance from -k to k, shared by the heads, of the width of keys and of values."""
    attention = MultiHeadAttention(D, N, d_k=H, d_v=E, shaw_distance=4, rngs=nnx.Rngs(0))
    tables = {name: x for name, x in plain(attention).items() if name.startswith("relative")}
    assert {name: x.shape for name, x in tables.items()} == {"relative_key": (9, H), "relative_value": (9, E)}
    assert all(x.std() > 0.1 for x in tables.values())
    sizes = BlockSizes(D, F, N, H, E, shaw_distance=4)
    layers = nnx.eval_shape(lambda: Decoder(sizes, BlockSettings(), L, rngs=nnx.Rngs(0))).layers
    assert layers.attention.relative_value.shape == (L, 9, E)
    assert not hasattr(layers.cross_attention, "relative_value")


def test_all_layers_of_a_stack_share_one_bias():
    """B15: one table, whatever the number of layers."""
    sizes, settings, x = BlockSizes(D, F, N, H, E), BlockSettings(), normal(0, 2, 17, D)

    def make():
        table = T5PositionBias(N, num_buckets=8, max_distance=9, bidirectional=True, rngs=nnx.Rngs(0))
        return Encoder(sizes, settings, L, position_bias=table, rngs=nnx.Rngs(1))

    skeleton = nnx.eval_shape(make)
    leaves, tree = jax.tree.flatten(plain(skeleton))
    params = jax.tree.unflatten(tree, [normal(seed, *leaf.shape) for seed, leaf in enumerate(leaves)])
    table = params["position_bias"]["table"]
    assert table.shape == (8, N)
    block = jax.jit(ops.encoder_block, static_argnames="settings")

    def by_layer(table):
        y = x
        for i in range(L):
            layer, bias = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), T5Bias(table, max_distance=9)
            y, _ = block(layer, y, mask=None, bias=bias, settings=settings)
        return y

    found = nnx.merge(nnx.graphdef(skeleton), params)(x)
    np.testing.assert_allclose(found, by_layer(table), rtol=1e-5, atol=1e-5)
    assert np.abs(found - by_layer(0 * table)).max() > 0.01
