"""Depth: programs that do not grow with the number of layers, and memory for computation (remat)."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tfm_jax import config
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.sharding import batch_sharding, make_mesh
from tfm_jax.train.objectives import LanguageModel, TextToText
from tfm_jax.train.step import abstract_state, train_step

OPTIMIZER = config.Optimizer()
DROPOUT = Dropout(embedding=0.1, residual=0.1, attention=0.1)
GPT = GPTConfig(37, num_layers=4, d_model=24, d_ff=96, num_heads=2, max_length=64, dropout=DROPOUT)
B, T = 8, 64


def objective_of(**changes):
    return LanguageModel(build(replace(GPT, **changes)))


def batch_of(rows=B, length=T):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 37, (rows, length)), jnp.int32)
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones((rows, length))}


def lowered(objective, batch):
    """The train step, not yet compiled."""
    state = abstract_state(objective.model, OPTIMIZER, make_mesh(config.Mesh()))
    return train_step.lower(state, batch, optimizer=OPTIMIZER, objective=objective)


def instructions(program):
    return len(re.findall(r"^ +\S+ = ", program.as_text(), re.MULTILINE))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_program_does_not_grow_with_depth(remat):
    """One trace and one body whatever the number of layers, so trace and compile time are the same too."""
    shallow, deep = (lowered(objective_of(num_layers=n, remat=remat), batch_of()) for n in (4, 24))
    assert instructions(shallow) == instructions(deep)


def test_unrolled_layers_need_no_loop():
    """And a number that does not divide the layers is no error."""
    looped, all_of_them, some = (
        lowered(objective_of(unroll=n), batch_of()).as_text().count("stablehlo.while") for n in (1, 4, 3)
    )
    assert looped == some == all_of_them + 2  # forward and backward


def product_flops(jaxpr, times=1):
    """Floating-point operations of all products of a program, those in a scan as often as it turns."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * times * equation.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        turns = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += product_flops(inner, turns)
    return total


@pytest.fixture(scope="module")
def steps():
    """By remat: (loss and gradient of 12 layers, temporary bytes of the compiled step, FLOPs of its products)."""
    found = {}
    for remat in ("none", "dots", "full"):
        objective, batch = objective_of(num_layers=12, remat=remat), batch_of()

        def loss(params, objective=objective, batch=batch):
            return objective(params, batch, jax.random.key(1))["loss"][0]

        params = objective.model.init(jax.random.key(0))
        step = jax.jit(jax.value_and_grad(loss))
        program = step.lower(params).compile()
        flops = product_flops(jax.make_jaxpr(step)(params).jaxpr)
        found[remat] = (program(params), program.memory_analysis().temp_size_in_bytes, flops)
    return found


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_what_is_computed_again_changes_no_gradient(steps, remat):
    """B22: nor the masks of dropout, which are drawn twice."""
    (loss, gradient), (found, again) = steps["none"][0], steps[remat][0]
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert optax.tree.norm(jax.tree.map(np.subtract, gradient, again)) < 1e-6 * optax.tree.norm(gradient)


def test_memory_for_computation(steps):
    """12 layers: computing all of a layer again takes a quarter of the memory for a third more products at most."""
    (_, most, least_flops), (_, some, some_flops), (_, least, most_flops) = (steps[n] for n in ("none", "dots", "full"))
    assert least < most / 4 and least < some < most
    assert 1.2 * least_flops < most_flops < 1.35 * least_flops
    assert least_flops <= some_flops < most_flops


def test_flops_are_counted_in_loops():
    """The count that the test above relies on, by hand: 6 N tokens for the parameters in products, and attention's."""
    objective = objective_of(num_layers=3, remat="none")
    params = objective.model.shapes
    loss = lambda params: objective(params, batch_of(), None)["loss"][0]  # noqa: E731
    found = product_flops(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    D, F, L, V = 24, 96, 3, 37
    by_parameters = 6 * B * T * (L * (4 * D * D + 2 * D * F) + V * D)
    by_attention = 3 * L * 2 * (2 * B * T * T * D)
    assert found == by_parameters + by_attention


def test_an_encoder_decoder_is_computed_again_too():
    small = {"num_encoder_layers": 2, "num_decoder_layers": 3, "d_model": 16, "d_ff": 14, "num_heads": 2}
    rng = np.random.default_rng(0)
    ids = lambda length: jnp.asarray(rng.integers(0, 37, (4, length)), jnp.int32)  # noqa: E731
    batch = {"source_tokens": ids(7), "tokens": ids(5), "targets": ids(5), "weights": jnp.ones((4, 5))}

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, objective):
        return jax.grad(lambda params: objective(params, batch, jax.random.key(1))["loss"][0])(params)

    plain = TransformerConfig(37, max_length=8, dropout=DROPOUT, **small)
    params = build(plain).init(jax.random.key(0))
    kept, again = (gradient(params, TextToText(build(replace(plain, remat=remat)))) for remat in ("none", "full"))
    assert optax.tree.norm(jax.tree.map(np.subtract, kept, again)) < 1e-6 * optax.tree.norm(kept)


def test_devices_that_share_a_text_share_its_memory():
    """Sequence parallel: eight devices take each less than a fourth of the temporary memory of one (measured: 1/6)."""
    objective, taken = objective_of(num_layers=2, max_length=2048, implementation="blockwise"), {}
    for devices in (1, 8):
        mesh = make_mesh(config.Mesh(sequence=devices))
        with jax.set_mesh(mesh):
            state = abstract_state(objective.model, OPTIMIZER, mesh)
            batch = jax.device_put(batch_of(1, 2048), batch_sharding(mesh))
            step = train_step.lower(state, batch, optimizer=OPTIMIZER, objective=objective)
        taken[devices] = step.compile().memory_analysis().temp_size_in_bytes
    assert taken[8] < taken[1] / 4


def test_a_step_calls_no_python():
    """A host callback would stop an accelerator at every step."""
    text = lowered(objective_of(remat="full"), batch_of()).as_text()
    assert "stablehlo.dot_general" in text and "callback" not in text


def test_no_layer_in_a_turn_is_refused():
    with pytest.raises(ValueError, match="model.unroll is 0: at least 1"):
        replace(GPT, unroll=0)
