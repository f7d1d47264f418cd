"""Meshes, the two tables from logical axis names to mesh axes, and the refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tfm_jax import config
from tfm_jax.sharding import (
    ACTIVATION_AXES,
    PARAMETER_AXES,
    abstract_mesh,
    batch_sharding,
    constrain,
    make_mesh,
    parameter_shardings,
    partition_spec,
    replicated,
)

MESH = config.Mesh(data=2, fsdp=2, model=2)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_mesh_has_four_axes_over_the_first_devices():
    mesh = make_mesh(config.Mesh(data=3, model=2))
    assert dict(mesh.shape) == {"data": 3, "fsdp": 1, "sequence": 1, "model": 2}
    assert set(mesh.devices.flat) == set(jax.devices()[:6])
    assert dict(make_mesh(config.Mesh()).shape) == {"data": 1, "fsdp": 1, "sequence": 1, "model": 1}


def test_mesh_larger_than_the_machine_is_refused():
    needed = r"data 3 x fsdp 1 x sequence 1 x model 5 needs 15 devices, there are 8 \(cpu\)"
    with pytest.raises(ValueError, match=needed):
        make_mesh(config.Mesh(data=3, model=5))


@pytest.mark.parametrize(
    ("axes", "rules", "spec"),
    [
        ((), PARAMETER_AXES, ()),
        (("embed", "mlp"), PARAMETER_AXES, ("fsdp", "model")),
        ((None, "embed", "heads", None), PARAMETER_AXES, (None, "fsdp", "model", None)),
        (("vocab", "embed"), PARAMETER_AXES, ("model", "fsdp")),
        (("unnamed_in_the_table",), PARAMETER_AXES, (None,)),
        # a mesh axis lays out one dimension: the first that asks for it
        (("heads", "kv_heads", "mlp"), PARAMETER_AXES, ("model", None, None)),
        (("batch", None, "vocab"), ACTIVATION_AXES, (("data", "fsdp"), None, "model")),
        (("batch", "batch"), ACTIVATION_AXES, (("data", "fsdp"), None)),
        (("embed", "batch"), ACTIVATION_AXES | {"embed": "data"}, ("data", None)),
    ],
)
def test_partition_spec(axes, rules, spec):
    assert partition_spec(axes, rules) == PartitionSpec(*spec)


def test_parameter_shardings_follow_names_leaf_by_leaf():
    mesh = make_mesh(MESH)
    axes = {"up": ("embed", "mlp"), "norm": {"scale": (None,)}, "layers": (None, "mlp", "embed")}
    shapes = {"up": shape(6, 10), "norm": {"scale": shape(7)}, "layers": shape(3, 10, 6)}
    found = parameter_shardings(axes, mesh, shapes)
    assert found == {
        "up": NamedSharding(mesh, PartitionSpec("fsdp", "model")),
        "norm": {"scale": NamedSharding(mesh, PartitionSpec(None))},
        "layers": NamedSharding(mesh, PartitionSpec(None, "model", "fsdp")),
    }
    # and jax can lay arrays out so
    placed = jax.device_put(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), found)
    assert placed["layers"].addressable_shards[0].data.shape == (3, 5, 3)


def test_a_size_that_the_mesh_does_not_divide_is_refused_by_name():
    axes, shapes = {"encoder": {"up": ("embed", "mlp")}}, {"encoder": {"up": shape(6, 7)}}
    with pytest.raises(ValueError, match=r"encoder\.up.*axis mlp of size 7.*mesh axis model of 2"):
        parameter_shardings(axes, make_mesh(MESH), shapes)
    # an axis of one device divides everything
    parameter_shardings(axes, make_mesh(config.Mesh(fsdp=2)), shapes)


def test_batches_are_cut_over_data_and_fsdp():
    mesh = make_mesh(MESH)
    batch = jax.device_put(np.arange(8 * 3, dtype=np.int32).reshape(8, 3), batch_sharding(mesh))
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 3)}
    assert MESH.batch_shards == 4 and config.Mesh(model=8).batch_shards == 1


def test_replicated_is_whole_on_every_device():
    whole = jax.device_put(jnp.arange(5, dtype=jnp.int32), replicated(make_mesh(MESH)))
    assert [shard.data.shape for shard in whole.addressable_shards] == [(5,)] * 8


def test_constrain_is_the_identity_without_a_mesh():
    x = jnp.zeros((3, 5))
    assert constrain(x, "batch", None) is x


def test_constrain_lays_an_activation_out():
    with jax.set_mesh(make_mesh(MESH)):
        placed = jax.jit(lambda x: constrain(2 * x, "batch", None, "heads"))(jnp.ones((4, 3, 6)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 3, 3)}
    np.testing.assert_array_equal(placed, 2 * np.ones((4, 3, 6)))


def test_constrain_outside_jit():
    """In an eager call under a mesh too; what the mesh does not divide, and axes that a mesh lacks, stay whole."""
    with jax.set_mesh(make_mesh(MESH)):
        placed = constrain(jnp.ones((4, 3, 5)), "batch", "length", "heads")
        assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 3, 5)}
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        placed = constrain(jnp.ones((4, 3, 6)), "batch", "length", "heads")
        assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3, 6)}


def test_an_abstract_mesh_lays_out_as_one_of_devices_does():
    axes, shapes = {"up": ("embed", "mlp")}, {"up": shape(6, 10)}
    (abstract,), (real,) = (
        parameter_shardings(axes, mesh, shapes).values() for mesh in (abstract_mesh(MESH), make_mesh(MESH))
    )
    assert abstract.spec == real.spec and abstract.shard_shape((6, 10)) == real.shard_shape((6, 10)) == (3, 5)
    # more than there are
    many = parameter_shardings(axes, abstract_mesh(config.Mesh(data=100, fsdp=3, model=5)), shapes)
    assert many["up"].shard_shape((6, 10)) == (2, 2)
    with pytest.raises(ValueError, match=r"up.*axis embed of size 6.*mesh axis fsdp of 4"):
        parameter_shardings(axes, abstract_mesh(config.Mesh(fsdp=4)), shapes)
