"""Masks by the rule of positions and segments, as arrays, in the additive form and as data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import AttentionMask, additive_mask, causal_mask, dot_product_attention, padding_mask


def integers(seed, low, high, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


@pytest.mark.parametrize("queries, keys", [(2, 2), (1, 1), (2, 1), (1, 2)])
def test_masks_are_the_oracles(queries, keys):
    """Positions in any order, with empty slots (-1) on both sides; either batch may be 1."""
    query_positions, key_positions = integers(1, -1, 5, queries, 5), integers(2, -1, 5, keys, 7)
    causal = causal_mask(query_positions, key_positions)
    np.testing.assert_array_equal(causal, oracle.causal_mask(query_positions, key_positions))
    query_ids, key_ids = integers(3, 0, 3, queries, 5), integers(4, 0, 3, keys, 7)
    padding = padding_mask(query_ids, key_ids)
    np.testing.assert_array_equal(padding, oracle.padding_mask(query_ids, key_ids))
    assert causal.dtype == padding.dtype == bool
    assert causal.shape == padding.shape == (max(queries, keys), 1, 5, 7)
    together = AttentionMask(query_positions, key_positions, query_ids, key_ids, causal=True)
    np.testing.assert_array_equal(together.array(), causal & padding)


def test_a_mask_as_data_makes_what_its_facts_say():
    positions, ids = integers(1, 0, 5, 2, 5), integers(2, 0, 3, 2, 5)
    assert AttentionMask().array() is None
    assert AttentionMask(query_positions=positions, key_positions=positions).array() is None
    np.testing.assert_array_equal(
        AttentionMask(positions, positions, causal=True).array(), causal_mask(positions, positions)
    )
    np.testing.assert_array_equal(
        AttentionMask(query_segment_ids=ids, key_segment_ids=ids).array(), padding_mask(ids, ids)
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"causal": True},
        {"causal": True, "query_positions": jnp.zeros((2, 5), jnp.int32)},
        {"query_segment_ids": jnp.ones((2, 5), jnp.int32)},
        {"key_segment_ids": jnp.ones((2, 5), jnp.int32)},
    ],
)
def test_half_of_a_fact_is_refused(facts):
    with pytest.raises(ValueError, match="positions|segment_ids"):
        AttentionMask(**facts).array()


def test_a_mask_as_data_passes_through_transformations():
    positions, ids = integers(1, 0, 5, 2, 5), integers(2, 0, 3, 2, 5)
    mask = AttentionMask(positions, positions, ids, ids, causal=True)
    expected = mask.array()
    np.testing.assert_array_equal(jax.jit(lambda mask: mask.array())(mask), expected)
    row = lambda mask: jax.tree.map(lambda x: x[None], mask).array()[0]  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(row)(mask), expected)


def test_segments_keep_packed_sentences_apart():
    """B40: three and two tokens of two sentences, then padding, which neither sees nor is seen."""
    ids = jnp.asarray([[1, 1, 1, 2, 2, 0]], jnp.int32)
    expected = np.zeros((6, 6), bool)
    expected[:3, :3] = expected[3:5, 3:5] = True
    np.testing.assert_array_equal(padding_mask(ids, ids)[0, 0], expected)


def test_the_additive_form():
    mask = jnp.asarray([[True, False], [False, False]])
    matrix = additive_mask(mask)
    assert matrix.dtype == jnp.float32
    np.testing.assert_array_equal(matrix, np.asarray([[0, -np.inf], [-np.inf, -np.inf]], np.float32))


@jax.jit
def attend_by_position(query_positions, key_positions):
    """The causal mean of the numbers 0, 1, ..., S - 1."""
    T, S = query_positions.shape[1], key_positions.shape[1]
    value = jnp.arange(S, dtype=jnp.float32)[None, :, None, None]
    mask = AttentionMask(query_positions, key_positions, causal=True)
    return dot_product_attention(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), value, mask=mask)[0, :, 0, 0]


@pytest.mark.parametrize("T, S", [(1, 8), (2, 5), (5, 2), (4, 4)])
def test_causal_is_a_rule_of_positions(T, S):
    """B03: queries that follow a cache (the last T positions) and queries that start with the keys (the first T)."""
    keys = np.arange(S, dtype=np.int32)[None]
    for first in (S - T, 0):
        queries = np.arange(first, first + T, dtype=np.int32)[None]
        expected = np.zeros(T)
        for t, position in enumerate(queries[0]):
            visible = [s for s in range(S) if s <= position]
            expected[t] = np.mean(visible) if visible else 0.0
        np.testing.assert_allclose(attend_by_position(jnp.asarray(queries), jnp.asarray(keys)), expected, rtol=1e-6)


def test_the_two_corners_of_a_causal_mask():
    """B03: the published numbers; T > S gives zero rows where a query comes before every key."""
    positions = lambda *numbers: jnp.asarray([numbers], jnp.int32)  # noqa: E731
    np.testing.assert_allclose(attend_by_position(positions(0, 1), positions(0, 1, 2, 3, 4)), [0, 0.5])
    np.testing.assert_allclose(attend_by_position(positions(3, 4), positions(0, 1, 2, 3, 4)), [1.5, 2.0])
    np.testing.assert_allclose(attend_by_position(positions(0, 1, 2, 3, 4), positions(3, 4)), [0, 0, 0, 0, 0.5])
