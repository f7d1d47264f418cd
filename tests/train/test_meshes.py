"""Every family over every kind of mesh: one device's loss, gradient and updates, its share of the bytes, and no
collective that the mesh does not call for."""

import functools
import re
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from tfm_jax import config
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.sharding import make_mesh
from tfm_jax.train.feed import put
from tfm_jax.train.objectives import LanguageModel, TextToText
from tfm_jax.train.step import init_state, train_step

# sizes that eight devices divide
V, B, S, T = 32, 16, 8, 12
SIZES = {"d_model": 16, "d_ff": 24, "num_heads": 8, "d_k": 3, "d_v": 5, "max_length": 13}
T5 = {
    "norm": "pre",
    "norm_kind": "rmsnorm",
    "activation": "geglu_tanh",
    "positions": "t5",
    "attention_scale": "none",
    "attention_bias": False,
    "feed_forward_bias": False,
    "embedding_scale": False,
    "tied_embeddings": "source_target",
}
OFF, ON = Dropout(0.0, 0.0), Dropout(embedding=0.1, residual=0.1, attention=0.1, feed_forward=0.1)
LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
FAMILIES = {
    "transformer": TransformerConfig(V, **LAYERS, **SIZES, dropout=OFF),
    "bert": BERTConfig(V, num_layers=2, **SIZES, dropout=OFF),
    "gpt": GPTConfig(V, num_layers=2, **SIZES, dropout=OFF),
    "t5": TransformerConfig(V, **LAYERS, **SIZES, **T5, dropout=OFF),
}
MESHES = {
    "data 8": config.Mesh(data=8),
    "fsdp 8": config.Mesh(fsdp=8),
    "model 8": config.Mesh(model=8),
    "data 2 model 4": config.Mesh(data=2, model=4),
    "fsdp 4 model 2": config.Mesh(fsdp=4, model=2),
    "fsdp 2 sequence 4": config.Mesh(fsdp=2, sequence=4),
}
families = pytest.mark.parametrize("family", FAMILIES)


def combinations():
    """All of them; in `make test` those of one axis for one family, and those of two axes for every family."""
    for family in FAMILIES:
        for mesh in MESHES:
            late = pytest.mark.slow if mesh in ("data 8", "fsdp 8", "model 8") and family != "gpt" else ()
            yield pytest.param(family, mesh, marks=late, id=f"{family}-{mesh}")


on_every_mesh = pytest.mark.parametrize(("family", "mesh"), list(combinations()))
# after the first update its momentum is the gradient
SGD = config.Optimizer(name="sgd", momentum=0.9, schedule="constant", learning_rate=0.1, warmup_steps=0)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def batch_of(family, seed):
    """Two rows for each of eight devices, with as many targets as `LENGTHS` says; two segments in the first row."""
    rng = np.random.default_rng(seed)
    inside = np.arange(T)[None] < LENGTHS[:, None]
    ids = lambda length: rng.integers(0, V, (B, length)).astype(np.int32)  # noqa: E731
    batch = {"tokens": ids(T), "targets": ids(T), "weights": inside.astype(np.float32)}
    batch["segment_ids"] = inside.astype(np.int32) + (np.arange(T) >= 7) * (np.arange(B) == 0)[:, None]
    if family in ("transformer", "t5"):
        inside = np.arange(S)[None] < np.maximum(LENGTHS[:, None] - 3, 0)
        segments = inside.astype(np.int32) + (np.arange(S) >= 5) * (np.arange(B) == 0)[:, None]
        batch |= {"source_tokens": ids(S), "source_segment_ids": segments}
    return {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in batch.items()}


LENGTHS = np.array([12, 12, 1, 1, 0, 3, 0, 0, 2, 4, 0, 1, 0, 2, 9, 3])  # the fourth device has nothing but padding


def objective_of(family, dropout=OFF):
    model = build(replace(FAMILIES[family], dropout=dropout))
    return (TextToText if family in ("transformer", "t5") else LanguageModel)(model, 0.1)


def start(family, mesh):
    """The state before the first update, over a mesh of jax."""
    state = init_state(jax.random.key(3), model=build(FAMILIES[family]), optimizer=SGD, mesh=mesh)
    return jax.block_until_ready(state)


@functools.cache
def trained(family, mesh, *, dropout=OFF, micro_batches=1):
    """(loss of each of three updates, the first gradient, the parameters after them, the program)."""
    mesh = make_mesh(mesh)
    with jax.set_mesh(mesh):
        state = start(family, mesh)
        settings = {"optimizer": SGD, "objective": objective_of(family, dropout), "micro_batches": micro_batches}
        batches = [put(batch_of(family, seed), mesh) for seed in range(3)]
        program = train_step.lower(state, batches[0], **settings).compile()
        losses, gradient = [], None
        for batch in batches:
            state, metrics = program(state, batch)
            losses.append(float(metrics["loss"]))
            gradient = jax.device_get(optax.tree.get(state.opt_state, "trace")) if gradient is None else gradient
        return losses, gradient, jax.device_get(state.params), program.as_text()


def assert_close(found, wanted, share=1e-6):
    """Every number together: the distance is a share of the norm."""
    difference = jax.tree.map(np.subtract, found, wanted)
    assert optax.tree.norm(difference) <= share * optax.tree.norm(wanted)


@on_every_mesh
def test_devices_train_as_one(family, mesh):
    """B22, B25, I15: unequal numbers of targets, a device with none; three updates of SGD with momentum."""
    losses, gradient, params, program = trained(family, MESHES[mesh])
    alone = trained(family, config.Mesh())
    assert abs(losses[0] - alone[0][0]) <= 1e-6
    # of parameters that differ by rounding; a float32 of this size has steps of 2e-7
    np.testing.assert_allclose(losses[1:], alone[0][1:], rtol=1e-6)
    assert_close(gradient, alone[1])
    assert_close(params, alone[2])
    assert collectives(program) <= CALLED_FOR[mesh], collectives(program)
    assert collectives(program) >= {"all-reduce"} | ({"all-gather"} if "fsdp" in mesh else set())


# Sums of gradients and of the loss; whole matrices of parameters in shards; sums of what heads, parts of the
# feed-forward network and of the vocabulary give; keys and values of all parts of a text. reduce-scatter is a sum of
# which each device keeps a part: XLA makes it for accelerators.
CALLED_FOR = {
    "data 8": {"all-reduce"},
    "fsdp 8": {"all-reduce", "all-gather", "reduce-scatter"},
    "model 8": {"all-reduce"},
    "data 2 model 4": {"all-reduce"},
    "fsdp 4 model 2": {"all-reduce", "all-gather", "reduce-scatter"},
    "fsdp 2 sequence 4": {"all-reduce", "all-gather", "reduce-scatter"},
}
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def collectives(program):
    return set(re.findall(rf" ({KINDS})(?:-start)?\(", program))


def test_one_device_has_no_collective():
    assert not collectives(trained("gpt", config.Mesh())[3])


@pytest.mark.parametrize("mesh", ["fsdp 4 model 2", "fsdp 2 sequence 4"])
@families
def test_devices_drop_the_same_elements(family, mesh):
    """B22: with dropout at every site a gradient is that of one device, so the masks are."""
    losses, gradient, params, _ = trained(family, MESHES[mesh], dropout=ON)
    alone = trained(family, config.Mesh(), dropout=ON)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)  # a unit in the last place is 2e-7 of it
    assert abs(alone[0][0] - trained(family, config.Mesh())[0][0]) > 1e-3
    assert_close(gradient, alone[1])
    assert_close(params, alone[2])


@on_every_mesh
def test_a_device_holds_its_share(family, mesh):
    """Parameters and the optimizer's copies of them: by hand from their names, and as the arrays say."""
    sizes = MESHES[mesh]
    with jax.set_mesh(make_mesh(sizes)):
        state = start(family, make_mesh(sizes))
    for tree in (state.params, optax.tree.get(state.opt_state, "trace")):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        held = sum(x.addressable_shards[0].data.nbytes for _, x in leaves)
        assert held == sum(x.nbytes // shards(path, sizes) for path, x in leaves)
        assert all(len({shard.data.shape for shard in x.addressable_shards}) == 1 for _, x in leaves)
    whole, parts = sum(x.nbytes for _, x in leaves), sizes.fsdp * sizes.model
    # what is not divided, or not by both axes, are vectors and tables of positions
    assert held < 1.5 * whole / parts + 0.05 * whole


def shards(path, sizes):
    """How many different parts a parameter has over the devices."""
    *_, kind, name = ("", *(key.key for key in path))
    if name in ("query", "key", "value", "output", "up", "gate", "down", "head"):
        return sizes.fsdp * sizes.model
    if name == "table":
        return {"embedding": sizes.fsdp * sizes.model, "position_bias": sizes.model}.get(kind, sizes.fsdp)
    if name == "dense":
        return sizes.fsdp
    divided = ("query_bias", "key_bias", "value_bias", "up_bias", "gate_bias")
    return sizes.model if name in divided or kind == "masked" and name == "bias" else 1


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_micro_batches_make_the_update_of_the_whole(count):
    """B24, B27, I16: unequal numbers of targets, and with eight of them parts without any; counters count updates."""
    losses, gradient, params, _ = trained("gpt", config.Mesh(), micro_batches=count)
    alone = trained("gpt", config.Mesh())
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    assert_close(gradient, alone[1])
    assert_close(params, alone[2])


def test_some_micro_batch_is_empty():
    """What the test above relies on: of eight parts, every eighth row from the k-th, one has no target at all."""
    targets = [LENGTHS[k::8].sum() for k in range(8)]
    assert min(targets) == 0 and len(set(targets)) > 4


@pytest.mark.parametrize("mesh", ["data 2", "fsdp 2 sequence 2"])
def test_micro_batches_over_a_mesh(mesh):
    """Each device takes its micro-batches from the rows that it has: no row moves."""
    sizes = {"data 2": config.Mesh(data=2), "fsdp 2 sequence 2": config.Mesh(fsdp=2, sequence=2)}[mesh]
    losses, gradient, params, program = trained("transformer", sizes, micro_batches=4)
    alone = trained("transformer", config.Mesh())
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    assert_close(gradient, alone[1])
    assert_close(params, alone[2])
    assert collectives(program) <= {"all-reduce", "all-gather", "reduce-scatter"} - {
        mesh.startswith("data") * "all-gather"
    }


def test_micro_batches_must_divide_the_rows():
    mesh = make_mesh(config.Mesh())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="16 rows does not divide into 3 micro-batches"):
        settings = {"optimizer": SGD, "objective": objective_of("gpt"), "micro_batches": 3}
        jax.eval_shape(functools.partial(train_step, **settings), start("gpt", mesh), batch_of("gpt", 0))


def test_dropout_differs_between_micro_batches():
    """Each has a key of its own: equal rows in different parts give another gradient than the rows at once would."""
    whole, parts = (trained("gpt", config.Mesh(), dropout=ON, micro_batches=count) for count in (1, 2))
    assert abs(whole[0][0] - parts[0][0]) > 1e-4


def test_clipping_is_of_the_accumulated_gradient():
    """B52: the norm of the sum is clipped, not that of each part; the counter counts updates."""
    clipped = replace(SGD, clip_norm=0.5, momentum=0.0)
    mesh = make_mesh(config.Mesh())
    _, gradient, _, _ = trained("gpt", config.Mesh())
    with jax.set_mesh(mesh):
        before = start("gpt", mesh)
        state = replace(
            before,
            opt_state=init_state(
                jax.random.key(3), model=build(FAMILIES["gpt"]), optimizer=clipped, mesh=mesh
            ).opt_state,
        )
        first = jax.device_get(before.params)
        state, metrics = train_step(
            state, batch_of("gpt", 0), optimizer=clipped, objective=objective_of("gpt"), micro_batches=4
        )
    moved = jax.tree.map(np.subtract, first, jax.device_get(state.params))
    norm = optax.tree.norm(gradient)
    assert norm > 0.6
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert_close(moved, jax.tree.map(lambda x: x * (0.05 / norm), gradient), share=3e-5)  # differences of parameters
    assert state.step == 1
