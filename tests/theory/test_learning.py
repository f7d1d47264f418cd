"""What the trainings of the claims share: batches against a plain loop, updates against Adam by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theory.learning import chain_entropy, chains, registers, trained, walks


def test_registers_ask_for_the_value_that_is_replaced():
    names, values = 3, 5
    batch = jax.device_get(registers(jax.random.key(0), rows=7, length=29, names=names, values=values))
    for tokens, targets, weights in zip(batch["tokens"], batch["targets"], batch["weights"], strict=True):
        held = {}
        for token, target, weight in zip(tokens, targets, weights, strict=True):
            name, value = divmod(int(token), values)
            assert weight == (name in held)
            assert target == held.get(name, 0)
            held[name] = value
    assert {*batch["tokens"].ravel()} == {*range(names * values)}


def test_a_walk_goes_where_the_coin_says_and_targets_are_the_next_tokens():
    batch = jax.device_get(walks(jax.random.key(0), rows=11, length=97, states=16))
    tokens, targets = batch["tokens"], batch["targets"]
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    coins = (targets - 2 * tokens) % 16
    assert {*coins.ravel()} == {0, 1}
    assert abs(coins.mean() - 0.5) < 0.06  # three standard deviations of 1,067 coins are 0.046
    assert (batch["weights"] == 1).all()


def test_training_is_adam_with_a_warmup_and_a_key_for_each_update():
    def loss(params, key):
        return jnp.square(params["x"] - jax.random.normal(key, ())).sum()

    start = {"x": jnp.array([3.0, -2.0])}
    params, losses = trained(loss, start, steps=5, learning_rate=0.1, warmup_steps=2, seed=4)
    x, mean, square = np.array([3.0, -2.0]), np.zeros(2), np.zeros(2)
    for n, key in enumerate(jax.random.split(jax.random.key(4), 5), start=1):
        gradient = 2 * (x - float(jax.random.normal(key, ())))
        np.testing.assert_allclose(losses[n - 1], np.square(gradient / 2).sum(), rtol=1e-5)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        x = x - 0.1 * min(n / 2, 1) * (mean / (1 - 0.9**n)) / np.sqrt(square / (1 - 0.98**n))
    np.testing.assert_allclose(params["x"], x, rtol=1e-5)


def test_chains_are_of_second_order():
    """Four of five symbols, and a fifth of the others by chance, are the sum of the two before; one says nothing."""
    batch = jax.device_get(chains(jax.random.key(0), rows=256, length=16, symbols=5, free=0.2))
    tokens, targets = batch["tokens"], batch["targets"]
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    right = targets[:, 1:] == (tokens[:, 1:] + tokens[:, :-1]) % 5
    expected = 0.8 + 0.2 / 5
    assert abs(right.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / right.size)
    pairs = np.bincount((5 * tokens + targets).ravel(), minlength=25)
    assert pairs.min() > 0.7 * pairs.mean()  # 164 of each on average
    assert chain_entropy(5, 1.0) == pytest.approx(np.log(5))
    assert chain_entropy(5, 0.2) == pytest.approx(-(0.84 * np.log(0.84) + 0.16 * np.log(0.04)))
