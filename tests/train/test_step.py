"""The train step: on eight devices as on one, repeatable, compiled once, and silent where there is nothing to learn."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tfm_jax import config
from tfm_jax.models import build
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.sharding import batch_sharding, make_mesh, parameter_shardings, replicated
from tfm_jax.train.objectives import TextToText
from tfm_jax.train.optim import make_schedule
from tfm_jax.train.step import abstract_params, abstract_state, eval_step, init_state, train_step

# sizes that eight devices divide on the axes that are cut
V, B, S, T = 22, 16, 7, 5
CONFIG = TransformerConfig(
    V,
    max_length=11,
    d_model=16,
    d_ff=14,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=1,
    d_k=3,
    d_v=5,
    dropout=Dropout(embedding=0.0, residual=0.1, attention=0.1),
)
MODEL = build(CONFIG)
OPTIMIZER = config.Optimizer(learning_rate=0.01, warmup_steps=10, clip_norm=1.0)
ONE = config.Mesh()
MESHES = {"data 8": config.Mesh(data=8), "fsdp 8": config.Mesh(fsdp=8), "data 4 model 2": config.Mesh(data=4, model=2)}
meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


@dataclass(frozen=True)
class Counted:
    """An objective that counts how often it is traced."""

    objective: Any

    def __call__(self, params, batch, key):
        TRACES.append(self.objective)
        return self.objective(params, batch, key)


TRACES = []
OBJECTIVE = Counted(TextToText(MODEL, 0.1))
step = functools.partial(train_step, optimizer=OPTIMIZER, objective=OBJECTIVE)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_batch(seed, *, lengths=None):
    """Random sentences; lengths are those of source and target rows, 0 for a row of padding."""
    rng = np.random.default_rng(seed)
    source_lengths = rng.integers(1, S + 1, B) if lengths is None else lengths * S // T
    lengths = rng.integers(1, T + 1, B) if lengths is None else lengths
    ids = lambda width: rng.integers(0, V, (B, width)).astype(np.int32)  # noqa: E731
    inside = np.arange(T)[None] < lengths[:, None]
    return {
        "source_tokens": ids(S),
        "source_segment_ids": (np.arange(S)[None] < source_lengths[:, None]).astype(np.int32),
        "tokens": ids(T),
        "segment_ids": inside.astype(np.int32),
        "targets": ids(T),
        "weights": inside.astype(np.float32),
    }


UNEQUAL = np.array([5, 5, 1, 1, 0, 3, 0, 0, 2, 4, 0, 1, 5, 2, 3, 3])  # two rows a device; the fourth has only padding


@pytest.fixture(scope="module")
def born():
    """The state before the first update on one device; copied, because a train step consumes it."""
    return init_state(jax.random.key(7), model=MODEL, optimizer=OPTIMIZER, mesh=make_mesh(ONE))


@pytest.fixture
def state(born):
    return copy(born)


def copy(state):
    return jax.tree.map(jnp.copy, state)


def on(mesh, tree, shardings=None):
    return jax.device_put(tree, batch_sharding(mesh) if shardings is None else shardings)


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def run(state, batches):
    metrics = []
    for batch in batches:
        state, values = step(state, batch)
        metrics.append(jax.device_get(values))
    return state, metrics


# ----------------------------------------------------------------------------------------------------------------------
# Devices
# ----------------------------------------------------------------------------------------------------------------------


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def mean_loss(params, batch, key):
    sums = TextToText(MODEL, 0.1)(params, batch, key)
    return sums["loss"][0] / sums["loss"][1], sums


def gradients(mesh, state, batch):
    """((loss, sums), gradient) with the dropout of the next step, laid out over a mesh."""
    mesh, key = make_mesh(mesh), jax.random.fold_in(state.key, int(state.step))
    with jax.set_mesh(mesh):
        params = on(mesh, state.params, parameter_shardings(MODEL.axes, mesh, MODEL.shapes))
        return jax.device_get(mean_loss(params, on(mesh, batch), on(mesh, key, replicated(mesh))))


@pytest.fixture(scope="module")
def alone(born):
    return gradients(ONE, born, make_batch(1, lengths=UNEQUAL))


@meshes
def test_devices_share_a_batch_without_changing_it(mesh, born, alone):
    """B22, B25, I15: unequal token counts, one device with only padding, dropout on; Adam would amplify rounding."""
    (loss, sums), gradient = gradients(mesh, born, make_batch(1, lengths=UNEQUAL))
    assert abs(loss - alone[0][0]) < 1e-6
    assert sums["loss"][1] == UNEQUAL.sum()
    difference = jax.tree.map(np.subtract, gradient, alone[1])
    assert optax.tree.norm(difference) < 1e-6 * optax.tree.norm(alone[1])


@pytest.mark.parametrize("mesh", [MESHES["fsdp 8"], MESHES["data 4 model 2"]], ids=["fsdp 8", "data 4 model 2"])
def test_the_state_is_born_in_its_shards_and_keeps_them(mesh, born):
    """B22, B55: the initial values of one device, bit for bit; laid out by the table, after an update too."""
    mesh = make_mesh(mesh)
    state = init_state(jax.random.key(7), model=MODEL, optimizer=OPTIMIZER, mesh=mesh)
    assert_equal(state.params, born.params)
    assert_equal(jax.random.key_data(state.key), jax.random.key_data(born.key))
    shardings = parameter_shardings(MODEL.axes, mesh, MODEL.shapes)
    abstract = abstract_state(MODEL, OPTIMIZER, mesh)
    with jax.set_mesh(mesh):
        updated, metrics = step(copy(state), on(mesh, make_batch(1)))
    for found in (state, updated):
        for part in (found.params, optax.tree.get(found.opt_state, "mu"), optax.tree.get(found.opt_state, "nu")):
            jax.tree.map(lambda x, wanted: assert_laid_out(x, wanted), part, shardings)
        jax.tree.map(lambda x, wanted: assert_laid_out(x, wanted.sharding), found, abstract)
    up = state.params["encoder"]["layers"]["feed_forward"]["up"].addressable_shards[0].data.shape
    assert up == (2, 16 // mesh.shape["fsdp"], 14 // mesh.shape["model"])
    _, expected = step(copy(born), make_batch(1))
    for name in ("loss", "gradient_norm", "tokens", "learning_rate"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def assert_laid_out(x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


def test_abstract_state_describes_the_state(born):
    """Shapes and dtypes of parameters, optimizer and key, as a checkpoint needs them."""
    abstract = abstract_state(MODEL, OPTIMIZER, make_mesh(ONE))
    assert jax.tree.structure(abstract) == jax.tree.structure(born)
    jax.tree.map(lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)), abstract, born)
    params = abstract_params(MODEL, make_mesh(ONE))
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.sharding, y.sharding), params, abstract.params)


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    odd = build(replace(CONFIG, d_ff=13))
    with pytest.raises(ValueError, match="feed_forward.*mlp of size 13.*model of 2"):
        init_state(jax.random.key(0), model=odd, optimizer=OPTIMIZER, mesh=make_mesh(config.Mesh(model=2)))


# ----------------------------------------------------------------------------------------------------------------------
# One update
# ----------------------------------------------------------------------------------------------------------------------


def test_metrics_say_what_happened(state, alone):
    """B50: loss per token of this batch, the norm of the gradient before clipping, the rate that was used."""
    batch, schedule = make_batch(1, lengths=UNEQUAL), make_schedule(OPTIMIZER)
    (_, sums), _ = alone
    state, metrics = step(state, batch)
    assert {name: (value.shape, value.dtype.name) for name, value in metrics.items()} == dict.fromkeys(
        ("loss", "accuracy", "tokens", "gradient_norm", "learning_rate"), ((), "float32")
    )
    np.testing.assert_allclose(metrics["loss"], np.divide(*sums["loss"]), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.divide(*sums["accuracy"]), rtol=1e-5)
    assert float(metrics["tokens"]) == UNEQUAL.sum() and metrics["gradient_norm"] > 0
    _, later = run(state, [make_batch(seed) for seed in range(2, 14)])
    rates = [metrics["learning_rate"], *(values["learning_rate"] for values in later)]
    np.testing.assert_allclose(rates, [schedule(n) for n in range(1, 14)], rtol=1e-6)


def test_the_update_is_the_optimizer_on_the_gradient(born, state, alone):
    """The first update of Adam is the rate times the sign of the gradient, wherever it is well above eps."""
    batch, (_, gradient) = make_batch(1, lengths=UNEQUAL), alone
    updated, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert updated.step == 1

    def check(before, after, slope):
        clear = np.abs(slope) > 1e-5
        moved = np.where(clear, np.asarray(after) - np.asarray(before), 0)
        np.testing.assert_allclose(moved, np.where(clear, -0.001 * np.sign(slope), 0), rtol=2e-3, atol=1e-7)

    jax.tree.map(check, born.params, updated.params, gradient)


def test_a_batch_without_targets_changes_no_parameter(born, state):
    """B27: loss 0, gradient 0, Adam's first update 0; all rows are padding."""
    updated, metrics = step(state, make_batch(1, lengths=np.zeros(B, int)))
    assert_equal(updated.params, born.params)
    assert metrics["loss"] == metrics["tokens"] == metrics["gradient_norm"] == metrics["accuracy"] == 0
    assert updated.step == 1
    # targets that are ignored are never looked at
    nothing = make_batch(1) | {"weights": np.zeros((B, T), np.float32), "targets": np.full((B, T), -100, np.int32)}
    updated, metrics = step(copy(born), nothing)
    assert_equal(updated.params, born.params)
    assert metrics["loss"] == 0


def test_the_old_state_is_gone(state):
    """B54: donated, so reading it is a clear error, and evaluation between steps reads the new one."""
    updated, _ = step(state, make_batch(1))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params["embedding"]["table"])
    assert np.isfinite(updated.params["embedding"]["table"]).all()


def test_dropout_depends_on_the_step_and_on_the_key(born):
    batch, key = make_batch(1), jax.device_put(jax.random.key(11), born.key.sharding)
    starts = [born, born, *(replace(born, step=born.step + n) for n in (1, 2)), replace(born, key=key)]
    losses = [float(step(copy(start), batch)[1]["loss"]) for start in starts]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4


def test_a_seed_gives_the_same_run_bit_for_bit(born):
    """I13: and another dropout key another one."""
    batches = [make_batch(seed) for seed in range(3)]
    (one, metrics), (other, again) = (run(copy(born), batches) for _ in range(2))
    assert_equal(one.params, other.params)
    assert_equal(one.opt_state, other.opt_state)
    assert metrics == again
    key = jax.device_put(jax.random.key(8), born.key.sharding)
    different, _ = run(replace(copy(born), key=key), batches)
    assert (np.asarray(different.params["embedding"]["table"]) != np.asarray(one.params["embedding"]["table"])).any()


def test_one_compilation_for_all_steps(born):
    """B55, I27: 20 steps whose lengths, tokens and rates differ."""
    run(copy(born), [make_batch(0)])
    TRACES.clear()
    compiled = train_step._cache_size()
    run(copy(born), [make_batch(seed) for seed in range(20)])
    assert not TRACES and train_step._cache_size() == compiled


def test_dtypes_stay_under_x64(born):
    """B56: parameters, moments, metrics float32; counters int32."""
    with jax.enable_x64(True):
        state, metrics = jax.eval_shape(step, born, make_batch(1))
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype, state, born)
    assert all(jax.tree.leaves(same))
    assert {value.dtype.name for value in metrics.values()} == {"float32"}


# ----------------------------------------------------------------------------------------------------------------------
# Precision
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "params", "moments"),
    [
        (config.Precision(compute="bfloat16"), "float32", "float32"),
        (config.Precision("bfloat16", "bfloat16"), "bfloat16", "float32"),
        (config.Precision("bfloat16", "bfloat16", "bfloat16"), "bfloat16", "bfloat16"),
    ],
    ids=["products", "parameters", "all"],
)
def test_precision_says_what_is_kept_in_which_dtype(precision, params, moments, born):
    """And the first update learns from nearly the gradient of float32: the loss within 1 %, the norm within 5 %."""
    mesh, settings = make_mesh(ONE), {"optimizer": OPTIMIZER, "precision": precision}
    state = init_state(jax.random.key(7), model=MODEL, mesh=mesh, **settings)
    dtypes = lambda tree: {x.dtype.name for x in jax.tree.leaves(tree)}  # noqa: E731
    for _ in range(2):
        assert dtypes(state.params) == {params} and dtypes(optax.tree.get(state.opt_state, "mu")) == {moments}
        abstract = abstract_state(MODEL, OPTIMIZER, mesh, precision=precision)
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), state, abstract)
        state, metrics = train_step(state, make_batch(1), objective=TextToText(MODEL, 0.1), **settings)
        assert dtypes(metrics) == {"float32"}
    _, (_, wide) = run(copy(born), [make_batch(1)] * 2)
    np.testing.assert_allclose(metrics["loss"], wide["loss"], rtol=0.01)
    np.testing.assert_allclose(metrics["gradient_norm"], wide["gradient_norm"], rtol=0.05)
    assert metrics["loss"] != wide["loss"]


def test_micro_batches_are_added_in_the_dtype_of_sums(born):
    """In float32 four parts in bfloat16 are as near to the whole as rounding each part's gradient leaves them."""
    grads = {}
    for reduce in ("float32", "bfloat16"):
        precision = config.Precision(compute="bfloat16", reduce=reduce)
        settings = {"optimizer": OPTIMIZER, "objective": TextToText(MODEL, 0.1), "precision": precision}
        state = init_state(
            jax.random.key(7), model=MODEL, optimizer=OPTIMIZER, mesh=make_mesh(ONE), precision=precision
        )
        lowered = train_step.lower(state, make_batch(1), micro_batches=4, **settings).as_text()
        grads[reduce] = lowered
    # the loop over parts carries the sums of gradients: its table's is one of them
    carried = re.compile(r"stablehlo.while.*tensor<22x16x(\w+)>")
    assert "f32" in carried.findall(grads["float32"]) and "bf16" in carried.findall(grads["bfloat16"])


# ----------------------------------------------------------------------------------------------------------------------
# Learning
# ----------------------------------------------------------------------------------------------------------------------


def test_random_tokens_cannot_be_learned(born):
    """B10: 120 steps on fresh tokens stay at log V; the same model, shown its targets, falls far below."""

    def last_losses(leak):
        batches = [make_batch(100 + seed, lengths=np.full(B, T)) for seed in range(120)]
        if leak:
            batches = [batch | {"tokens": batch["targets"]} for batch in batches]
        _, metrics = run(copy(born), batches)
        return np.mean([values["loss"] for values in metrics[-20:]])

    assert last_losses(leak=False) > np.log(V) - 0.05
    assert last_losses(leak=True) < np.log(V) - 1.0


def test_evaluation_has_no_dropout(born):
    """B20: twice the same, and the sums of the model that cannot drop."""
    batch = make_batch(1, lengths=UNEQUAL)
    never = TextToText(build(replace(CONFIG, dropout=Dropout(0.0, 0.0))), 0.1)
    once, twice = (eval_step(born.params, batch, objective=TextToText(MODEL, 0.1)) for _ in range(2))
    assert_equal(once, twice)
    expected = eval_step(born.params, batch, objective=never)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), once, expected)
    assert float(once["loss"][1]) == float(once["accuracy"][1]) == UNEQUAL.sum()
