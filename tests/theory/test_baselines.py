"""What attention is compared with, against NumPy; and how costs and paths are measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.theory import costs, path_length
from experiments.theory.baselines import LSTM, Convolutions

B, T, D = 2, 7, 5


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def test_lstm_is_that_of_the_papers():
    """Gates input, forget and output, candidate; from Hochreiter and Schmidhuber (1997) with Gers et al. (2000)."""
    lstm = LSTM(D, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (B, T, D)))
    found = jax.jit(lambda x: lstm(x))(x)
    inward, recurrent = lstm.cell.dense_i, lstm.cell.dense_h
    c = h = np.zeros((B, D))
    for t in range(T):
        joined = x[:, t] @ np.asarray(inward.kernel[...]) + h @ np.asarray(recurrent.kernel[...])
        i, f, g, o = np.split(joined + np.asarray(recurrent.bias[...]), 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        np.testing.assert_allclose(found[:, t], h, atol=1e-6)


def test_convolutions_reach_back_by_their_dilation():
    """Each layer adds the nonlinearity of the tokens 0, r, 2 r before."""
    stack = Convolutions(D, 3, (1, 2), rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (B, T, D)))
    wanted = x
    for dilation, layer in zip((1, 2), stack.convolutions, strict=True):
        padded = np.pad(wanted, ((0, 0), (2 * dilation, 0), (0, 0)))
        taps = [padded[:, i * dilation : i * dilation + T] @ np.asarray(layer.kernel[...])[i] for i in range(3)]
        wanted = wanted + np.asarray(jax.nn.gelu(np.sum(taps, axis=0) + np.asarray(layer.bias[...])))
    np.testing.assert_allclose(jax.jit(lambda x: stack(x))(x), wanted, atol=1e-5)


@pytest.mark.parametrize("n", [3, 9])
def test_paths_are_as_long_as_receptive_fields_say(n):
    found = path_length.paths(n)
    assert found == {name: expected(n) for name, (_, expected) in path_length.EXPECTED.items()}


def test_a_first_token_out_of_reach_is_an_error():
    with pytest.raises(ValueError, match="out of reach"):
        path_length.rounds([lambda state: state], (jnp.ones((1, 3, 2)),))


def test_costs_of_a_product():
    """2 n d^2 operations for n rows times a matrix, and the exponent of a power."""
    matrix = jnp.ones((D, D))
    assert costs.operations(lambda x: x @ matrix, 11, D) == 2 * 11 * D**2
    assert costs.exponent((2, 3, 5), [7 * n**1.5 for n in (2, 3, 5)]) == pytest.approx(1.5)
