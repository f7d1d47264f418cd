"""Masks by the rule of positions and segments, as arrays, in the additive form and as data that makes any tile."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax import oracle
from tfm_jax.ops import AttentionMask, additive_mask, causal_mask, padding_mask
from tfm_jax.ops.masks import Block

B, T, S, N = 2, 5, 7, 3


def integers(seed, low, high, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def booleans(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6)


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
    np.testing.assert_array_equal(together.array(5, 7), causal & padding)


def near_or_of_a_head(query_position, key_position, query_segment, key_segment, head):
    """Heads differ: head n sees every (n + 2)-th distance."""
    return (query_position - key_position) % (head + 2) == 0


def segments_in_order(query_position, key_position, query_segment, key_segment, head):
    """An earlier segment may be seen from a later one, itself or not."""
    return key_segment <= query_segment


# Positions jump, repeat and have empty slots; those of POSITIONS and OTHERS differ.
POSITIONS = {"query_positions": integers(1, 0, 6, B, T), "key_positions": integers(2, -1, 6, B, S)}
OTHERS = {"query_positions": integers(3, 2, 9, 1, T), "key_positions": integers(4, -1, 9, B, S)}
SEGMENTS = {"query_segment_ids": integers(5, 0, 3, B, T), "key_segment_ids": integers(6, 0, 3, B, S)}
GLOBALS = {"query_global": booleans(7, B, T), "key_global": booleans(8, B, S)}
PREFIX = {"prefix_lengths": jnp.asarray([4, 0], jnp.int32)}
FACTS = {
    "positions": POSITIONS,
    "causal by index": {"causal": True},
    "causal": POSITIONS | {"causal": True},
    "causal, other positions": OTHERS | {"causal": True},
    "prefix": POSITIONS | PREFIX | {"causal": True},
    "prefix by index": PREFIX | {"causal": True},
    "segments": SEGMENTS,
    "window by index": {"window": (2, 1)},
    "window to the left": POSITIONS | {"window": (1, None)},
    "window to the right": OTHERS | {"window": (None, 2)},
    "window of one": POSITIONS | {"window": (0, 0)},
    "window without bounds": {"window": (None, None)},
    "window and global tokens": POSITIONS | GLOBALS | {"window": (1, 1)},
    "window and global keys": {"key_global": GLOBALS["key_global"], "window": (0, 1)},
    "function of a head": POSITIONS | {"function": near_or_of_a_head},
    "function by index": {"function": near_or_of_a_head},
    "function of segments": SEGMENTS | {"function": segments_in_order},
    "dense": {"dense": booleans(9, B, N, T, S)},
    "dense for all queries": {"dense": booleans(10, B, 1, 1, S)},
    "dense for all keys": {"dense": booleans(11, 1, N, T, 1)},
    "everything": POSITIONS
    | SEGMENTS
    | GLOBALS
    | PREFIX
    | {"causal": True, "window": (2, 2), "function": near_or_of_a_head, "dense": booleans(12, B, 1, T, S)},
}
MASKS = {name: AttentionMask(**facts) for name, facts in FACTS.items()}


def expected(facts):
    """The conjunction of what the oracle says of each fact: B N T S."""
    index = {"query_positions": np.arange(T)[None], "key_positions": np.arange(S)[None]}
    positions = [(index | facts)[name] for name in ("query_positions", "key_positions")]
    segments = [facts.get(name, np.ones((1, length), int)) for name, length in zip(SEGMENTS, (T, S), strict=True)]
    masks = [np.asarray(facts["key_positions"])[:, None, None] >= 0] if "key_positions" in facts else []
    if "prefix_lengths" in facts:
        masks.append(oracle.prefix_mask(*positions, facts["prefix_lengths"]))
    elif "causal" in facts:
        masks.append(oracle.causal_mask(*positions))
    if "window" in facts:
        exceptions = {name: facts[name] for name in GLOBALS if name in facts}
        masks.append(oracle.window_mask(*positions, facts["window"], **exceptions))
    if "query_segment_ids" in facts:
        masks.append(oracle.padding_mask(*segments))
    if "function" in facts:
        masks.append(oracle.function_mask(facts["function"], *positions, *segments, N))
    if "dense" in facts:
        masks.append(np.asarray(facts["dense"]))
    together = np.ones((B, N, T, S), bool)
    for mask in masks:
        together = together & mask
    return together


def whole(mask):
    return np.broadcast_to(mask.array(T, S, N), (B, N, T, S))


@pytest.mark.parametrize("name", FACTS)
def test_a_mask_as_data_makes_what_its_facts_say(name):
    """Each fact alone and all in one; the axes over batch and heads are no longer than the facts need."""
    array = MASKS[name].array(T, S, N)
    assert array.dtype == bool and array.shape[2:] == (T, S)
    np.testing.assert_array_equal(np.broadcast_to(array, (B, N, T, S)), expected(FACTS[name]))
    assert array.shape[1] == (N if (expected(FACTS[name])[:, :1] != expected(FACTS[name])).any() else 1)


def test_a_mask_without_facts_is_none():
    assert AttentionMask().array(T, S) is None
    assert AttentionMask().tile(Block(0, 2), Block(3, 2), N) is None
    assert (AttentionMask() & AttentionMask()).array(T, S) is None
    assert not (AttentionMask() & AttentionMask()).facts


@jax.jit
def tiles(mask, starts):
    """The tiles of 2 x 3 that start at each pair of traced numbers."""
    return jax.lax.map(lambda at: mask.tile(Block(at[0], 2), Block(at[1], 3), N), starts)


@pytest.mark.parametrize("name", FACTS)
def test_any_tile_is_the_slice_of_the_whole(name):
    """Traced starts at every place, and the edges as plain numbers, whole axes included."""
    mask, array = MASKS[name], whole(MASKS[name])
    starts = list(itertools.product(range(T - 1), range(S - 2)))
    for (row, column), tile in zip(starts, tiles(mask, jnp.asarray(starts, jnp.int32)), strict=True):
        part = array[:, :, row : row + 2, column : column + 3]
        np.testing.assert_array_equal(np.broadcast_to(tile, part.shape), part, err_msg=f"{row} {column}")
    for rows, columns in ((Block(4, 1), Block(0, 7)), (Block(0, 5), Block(6, 1)), (Block(1, 3), Block(2, 5))):
        row, column = (slice(block.start, block.start + block.length) for block in (rows, columns))
        part = array[:, :, row, column]
        np.testing.assert_array_equal(np.broadcast_to(mask.tile(rows, columns, N), part.shape), part)


@pytest.mark.parametrize("name", FACTS)
def test_a_longer_mask_says_the_same_of_the_old_rows_and_columns(name):
    longer = MASKS[name].padded(2, 3).tile(Block(0, T + 2), Block(0, S + 3), N)
    longer = np.broadcast_to(longer, (B, N, T + 2, S + 3))
    np.testing.assert_array_equal(longer[:, :, :T, :S], whole(MASKS[name]))


@pytest.mark.parametrize("name", FACTS)
def test_a_conjunction_is_the_boolean_and(name):
    """With each of the others, with different positions on the two sides, and whichever comes first."""
    one = MASKS[name]
    for other_name, other in MASKS.items():
        np.testing.assert_array_equal(whole(one & other), whole(one) & whole(other), err_msg=f"{name} & {other_name}")
        assert (one & other).facts - {"also"} == one.facts | other.facts


def test_a_conjunction_of_many_is_the_boolean_and():
    three = MASKS["causal"] & (MASKS["window by index"] & MASKS["causal, other positions"]) & MASKS["segments"]
    names = ("causal", "window by index", "causal, other positions", "segments")
    together = np.logical_and.reduce([whole(MASKS[name]) for name in names])
    np.testing.assert_array_equal(whole(three), together)
    longer = np.broadcast_to(three.padded(2, 3).tile(Block(0, T + 2), Block(0, S + 3), N), (B, N, T + 2, S + 3))
    np.testing.assert_array_equal(longer[:, :, :T, :S], together)


def test_a_conjunction_takes_a_boolean_array():
    dense = booleans(9, B, 1, T, S)
    np.testing.assert_array_equal(whole(MASKS["causal"] & dense), whole(MASKS["causal"]) & np.asarray(dense))
    np.testing.assert_array_equal(whole(MASKS["dense"] & dense), whole(MASKS["dense"]) & np.asarray(dense))


def test_facts_that_fit_share_one_mask():
    """What does not change the meaning of the other's fields goes into them; the rest is kept beside."""
    assert (AttentionMask(**POSITIONS, causal=True) & AttentionMask(**SEGMENTS)).also == ()
    assert (AttentionMask(**POSITIONS, causal=True) & AttentionMask(**POSITIONS, window=(1, 1))).also == ()
    assert len((MASKS["causal"] & MASKS["causal, other positions"]).also) == 1
    assert len((MASKS["causal by index"] & MASKS["positions"]).also) == 1
    assert len((MASKS["function of a head"] & MASKS["segments"]).also) == 1


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"query_positions": POSITIONS["query_positions"], "causal": True}, "query_positions and key_positions"),
        ({"key_positions": POSITIONS["key_positions"]}, "positions are given for one side"),
        ({"query_segment_ids": SEGMENTS["query_segment_ids"]}, "segment_ids are given for one side"),
        ({"key_segment_ids": SEGMENTS["key_segment_ids"]}, "query_segment_ids and key_segment_ids"),
        (PREFIX, "causal=True"),
        (GLOBALS, "window="),
        ({"key_global": GLOBALS["key_global"]}, "window="),
        ({"window": (-1, 0)}, r"window is \(-1, 0\)"),
        ({"window": (0, -2)}, r"window is \(0, -2\)"),
        (POSITIONS | {"query_positions": integers(1, 0, 5, B, T + 1)}, r"query_positions has shape \(2, 6\)"),
        (POSITIONS | {"key_positions": integers(1, 0, 5, B, T)}, "key_positions .* must have length 7"),
        (SEGMENTS | {"key_segment_ids": integers(1, 0, 5, B, T)}, "there are 5 queries and 7 keys"),
        ({"window": (1, 1), "key_global": booleans(1, B, T)}, "key_global"),
        ({"dense": booleans(1, B, 1, S, T)}, r"dense has shape \(2, 1, 7, 5\)"),
        ({"dense": booleans(1, B, 1, T, T)}, "axis 3 must have length 7"),
        ({"dense": booleans(1, T, S)}, r"dense has shape \(5, 7\)"),
        ({"dense": jnp.ones((B, 1, T, S))}, "dtype float32: a boolean array is expected.* bias"),
        ({"dense": jnp.ones((B, 1, T, S), jnp.int32)}, "dtype int32"),
        ({"key_positions": integers(1, 0, 5, S), "query_positions": integers(1, 0, 5, T)}, r"has shape \(5,\)"),
    ],
)
def test_facts_that_do_not_go_together_or_do_not_fit_are_refused(facts, message):
    """Half a fact, an exception without its rule, a shape or a dtype; nested ones too."""
    mask = AttentionMask(**facts)
    nested = AttentionMask(**OTHERS, causal=True, window=(1, 1)) & AttentionMask(causal=True, also=(mask,))
    for refused in (mask, nested):
        with pytest.raises(ValueError, match=message):
            refused.check(T, S)
        with pytest.raises(ValueError, match=message):
            refused.array(T, S)


def test_a_mask_as_data_passes_through_transformations():
    """jit, vmap over rows, scan over layers, and any map over its arrays; nested masks too."""
    mask = AttentionMask(**POSITIONS, **SEGMENTS, function=segments_in_order) & MASKS["window to the right"]
    mask = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape[1:])), mask)
    array = np.asarray(mask.array(T, S, N))
    assert mask.also and array.any() and not array.all()
    np.testing.assert_array_equal(jax.jit(lambda mask: mask.array(T, S, N))(mask), array)
    row = lambda mask: jax.tree.map(lambda x: x[None], mask).array(T, S, N)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(row))(mask), array)
    layers = jax.tree.map(lambda *x: jnp.stack(x), mask, jax.tree.map(lambda x: x[::-1], mask))
    step = lambda seen, mask: (seen & mask.array(T, S, N), mask.array(T, S, N))  # noqa: E731
    both, each = jax.lax.scan(step, jnp.ones(array.shape, bool), layers)
    np.testing.assert_array_equal(each, [array, array[::-1]])
    np.testing.assert_array_equal(both, array & array[::-1])


def test_equal_masks_share_a_program():
    """The same function object, flags and shapes compile once; another function compiles anew."""
    traces = []

    @jax.jit
    def array(mask):
        traces.append(mask.facts)
        return mask.array(T, S, N)

    for seed in range(3):
        mask = AttentionMask(integers(seed, 0, 5, B, T), integers(seed, 0, 5, B, S), function=near_or_of_a_head)
        array(mask & AttentionMask(causal=True))
    assert len(traces) == 1
    array(AttentionMask(**POSITIONS, function=segments_in_order) & AttentionMask(causal=True))
    assert len(traces) == 2


def test_a_slot_at_a_negative_position_is_never_seen():
    """With key positions an empty cache slot is invisible under every fact, causal or not, and to every query."""
    empty = np.asarray(POSITIONS["key_positions"]) < 0
    assert empty.any()
    for facts in FACTS.values():
        if "key_positions" in facts:
            empty = np.asarray(facts["key_positions"]) < 0
            assert not (whole(AttentionMask(**facts)) & empty[:, None, None]).any()
    window = AttentionMask(**POSITIONS, window=(None, None))
    np.testing.assert_array_equal(
        whole(window), np.broadcast_to(np.asarray(POSITIONS["key_positions"])[:, None, None] >= 0, (B, N, T, S))
    )


def test_segments_keep_packed_sentences_apart():
    """B40: three and two tokens of two sentences, then padding, which neither sees nor is seen."""
    ids = jnp.asarray([[1, 1, 1, 2, 2, 0]], jnp.int32)
    expected = np.zeros((6, 6), bool)
    expected[:3, :3] = expected[3:5, 3:5] = True
    np.testing.assert_array_equal(padding_mask(ids, ids)[0, 0], expected)
    np.testing.assert_array_equal(AttentionMask(query_segment_ids=ids, key_segment_ids=ids).array(6, 6)[0, 0], expected)


def test_the_additive_form():
    mask = jnp.asarray([[True, False], [False, False]])
    matrix = additive_mask(mask)
    assert matrix.dtype == jnp.float32
    np.testing.assert_array_equal(matrix, np.asarray([[0, -np.inf], [-np.inf, -np.inf]], np.float32))
