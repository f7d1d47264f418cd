"""The task of the claim `permutations`: labels by a second route, and twins that differ in nothing but the marks."""

import jax
import numpy as np

from experiments.theory.first_mark import FIRST, LENGTH, ROWS, SECOND, START, marked, twins


def test_labels_say_which_mark_comes_first():
    batch = jax.device_get(marked(jax.random.key(0)))
    for tokens, label in zip(batch["tokens"].tolist(), batch["labels"], strict=True):
        assert tokens[0] == START and len(tokens) == LENGTH
        assert tokens.count(FIRST) == tokens.count(SECOND) == 1
        assert label == (tokens.index(FIRST) < tokens.index(SECOND))
    assert 0 < batch["labels"].sum() < ROWS


def test_a_twin_has_its_marks_exchanged_and_the_other_label():
    batch = jax.device_get(marked(jax.random.key(1)))
    twin = jax.device_get(twins(batch))
    both = (batch["tokens"] == FIRST) | (batch["tokens"] == SECOND)
    np.testing.assert_array_equal(twin["tokens"][both], FIRST + SECOND - batch["tokens"][both])
    np.testing.assert_array_equal(twin["tokens"][~both], batch["tokens"][~both])
    np.testing.assert_array_equal(twin["labels"] + batch["labels"], 1)
    np.testing.assert_array_equal(np.sort(twin["tokens"], axis=1), np.sort(batch["tokens"], axis=1))
