"""Beam search against exhaustive enumeration and a plain Python beam search, both in float64, on toy language models.

A toy model is a table of log-probs. In a `tree` its row is the prefix itself (node n has the children n V + 1 + token),
so every prefix has its own distribution; in a `ring` it is a rolling hash of the prefix, so sequences may be long.
"""

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.decode.beam import BeamSettings, Hypotheses, beam_search
from tfm_jax.decode.constraints import Constraints, History

ALPHAS = [-1.0, 0.0, 0.6, 1.0, 2.0]
EOS, BOS = 0, 1


PENALTIES = {
    "fairseq": lambda length: length,
    "transformers": lambda length: length,
    "gnmt": lambda length: (5 + length) / 6,
    "t2t": lambda length: (5 + length) / 6,
}


def settings(beams, length, alpha=0.0, *, early_stopping=False, eos_ids=(EOS,), pad_id=0, **others):
    return BeamSettings(beams, length, alpha, early_stopping, eos_ids, pad_id, **others)


def score(log_p, length, config):
    return log_p / PENALTIES[config.normalization](length) ** config.length_penalty


def log_softmax(x):
    x = np.asarray(x, np.float64)
    top = x.max(axis=-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True))


def random_tables(seed, shape, *, zeros=0.0):
    """Log-probs of random models (M N V); a share of the tokens has probability zero."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal(shape)
    impossible = rng.random(shape) < zeros
    impossible[..., 1] = False
    return log_softmax(np.where(impossible, -np.inf, logits))


def tree_size(V, T):
    return sum(V**t for t in range(T))


FOLLOW = {  # (node, token, position, shape (N, V) of the table) -> node, for plain integers and arrays alike
    "tree": lambda node, token, position, shape: node * shape[1] + 1 + token,
    "ring": lambda node, token, position, shape: (node * 7 + token * 11 + position * 3 + 5) % shape[0],
}


def device_step(tables, kind):
    """tables: M N V; state: which model a row belongs to, and its node."""

    def step(tokens, state, position):
        follow = FOLLOW[kind](state["node"], tokens, position, tables.shape[1:])
        node = jnp.where(position == 0, 0, follow)
        return tables[state["model"], node], {"model": state["model"], "node": node}

    return step


def initial_state(models, beams):
    model = jnp.repeat(jnp.asarray(models, jnp.int32), beams)
    return {"model": model, "node": jnp.zeros_like(model)}


def take_rows(state, rows):
    return jax.tree.map(lambda x: x[rows], state)


@functools.partial(jax.jit, static_argnames=("config", "kind"))
def search(tables, models, config, kind="tree"):
    """One row of the batch for each entry of models."""
    first = jnp.full(models.shape, BOS, jnp.int32)
    state = initial_state(models, config.beams)
    return beam_search(device_step(tables, kind), state, first, take_rows=take_rows, settings=config)


def run(tables, config, kind="tree", models=None):
    models = np.arange(len(tables)) if models is None else np.asarray(models)
    result = search(jnp.asarray(tables, jnp.float32), jnp.asarray(models, jnp.int32), config, kind)
    return jax.tree.map(np.asarray, result)


def listed(result, row):
    """The hypotheses of a row as (tokens, score, log p, ended), without the empty ones."""
    return [
        (
            tuple(result.tokens[row, w, : result.lengths[row, w]].tolist()),
            *(float(x[row, w]) for x in result[1:3]),
            bool(result.ended[row, w]),
        )
        for w in range(result.scores.shape[1])
        if result.scores[row, w] > -np.inf
    ]


class Walk:
    """The same toy model for plain Python: log-probs after a prefix, recomputed from its first token."""

    def __init__(self, table, kind):
        self.table, self.kind = table, kind

    def __call__(self, prefix):
        node = 0
        for position, token in enumerate(prefix, start=1):
            node = FOLLOW[self.kind](node, token, position, self.table.shape)
        return self.table[node]

    def log_prob(self, sequence):
        return sum(float(self(sequence[:t])[token]) for t, token in enumerate(sequence))


def exhaustive(walk, config):
    """Every hypothesis with its score, best first: all that end, and all that are cut."""
    V, T = walk.table.shape[1], config.max_new_tokens
    words = [t for t in range(V) if t not in config.eos_ids]
    bodies = [body for n in range(T) for body in itertools.product(words, repeat=n)]
    ended = [(*body, end) for body in bodies for end in config.eos_ids]
    cut = list(itertools.product(words, repeat=T))
    scored = [(s, score(log_p, len(s), config), log_p) for s in ended + cut if (log_p := walk.log_prob(s)) > -np.inf]
    return [(*h, h[0][-1] in config.eos_ids) for h in sorted(scored, key=lambda h: -h[1])]


def plain_beam_search(walk, config, *, stop):
    """Textbook beam search on lists. stop: "full" (W have ended), "beaten" (and no live one is better now) or "never".

    So many extensions are looked at that W stay live, whatever ends.
    """
    W, ends = config.beams, config.eos_ids
    live, pool = [((), 0.0)], []

    def entry(sequence, log_p, ended):
        return sequence, score(log_p, len(sequence), config), log_p, ended

    for length in range(1, config.max_new_tokens + 1):
        candidates = [((*s, v), log_p + float(q)) for s, log_p in live for v, q in enumerate(walk(s)) if q > -np.inf]
        candidates = sorted(candidates, key=lambda c: -c[1])[: (1 + len(ends)) * W if W > 1 else 1]
        pool += [entry(s, log_p, True) for s, log_p in candidates[:W] if s[-1] in ends]
        live = [c for c in candidates if c[0][-1] not in ends][:W]
        if stop == "full" and len(pool) >= W and length < config.max_new_tokens:
            live = []
            break
        best = sorted(pool, key=lambda h: -h[1])[:W]
        if stop == "beaten" and live and len(best) == W and best[-1][1] >= score(live[0][1], length, config):
            live = []
            break
    return sorted(pool + [entry(s, log_p, False) for s, log_p in live], key=lambda h: -h[1])[:W]


STOPS = {True: "full", False: "never", "heuristic": "beaten"}


def assert_same(found, expected):
    assert [h[0] for h in found] == [h[0] for h in expected]
    assert [h[3] for h in found] == [h[3] for h in expected]
    np.testing.assert_allclose([h[1:3] for h in found], [h[1:3] for h in expected], rtol=1e-5, atol=1e-6)


def assert_well_formed(result, config, walks):
    """What holds of every result: I19, and the fields agree with each other."""
    for row, walk in enumerate(walks):
        hypotheses = listed(result, row)
        assert len({h[0] for h in hypotheses}) == len(hypotheses)
        for w, (sequence, found, log_p, ended) in enumerate(hypotheses):
            assert not set(config.eos_ids) & set(sequence[:-1])
            assert ended == (sequence[-1] in config.eos_ids)
            assert ended or len(sequence) == config.max_new_tokens
            assert (result.tokens[row, w, len(sequence) :] == config.pad_id).all()
            np.testing.assert_allclose(log_p, walk.log_prob(sequence), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found, score(log_p, len(sequence), config), rtol=1e-6)
        empty = slice(len(hypotheses), None)
        assert (result.tokens[row, empty] == config.pad_id).all()
        assert (result.scores[row, empty] == -np.inf).all() and (result.log_probs[row, empty] == -np.inf).all()
        assert (result.lengths[row, empty] == 0).all() and not result.ended[row, empty].any()
        assert (np.diff(result.scores[row, : len(hypotheses)]) <= 0).all()


def golden_table():
    """B29: p(EOS) = .52, p(A | A) = .95, p(EOS | A A) = .99; what follows A A A does not matter."""
    eos = np.full(tree_size(2, 4), 0.5)
    eos[[0, 2, 6]] = 0.52, 0.05, 0.99  # the nodes of (), A, A A
    return np.log(np.stack([eos, 1 - eos], axis=-1))[None]


@pytest.mark.parametrize("beams", [2, 16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_golden_toy_model(alpha, beams):
    """B29: the short hypothesis under alpha <= 0, the longer one under alpha > 0, though the short one ends first."""
    config = settings(beams, 4, alpha)
    result = run(golden_table(), config)
    expected = ((0,), -0.6539) if alpha <= 0 else ((1, 1, 0), -0.7953)
    sequence, found, log_p, ended = listed(result, 0)[0]
    assert (sequence, round(log_p, 4), ended) == (*expected, True)
    assert found == pytest.approx(
        {-1.0: -0.6539, 0.0: -0.6539, 0.6: -0.4114, 1.0: -0.2651, 2.0: -0.0884}[alpha], abs=1e-4
    )
    walk = Walk(golden_table()[0], "tree")
    assert_well_formed(result, config, [walk])
    if beams == 16:
        assert_same(listed(result, 0), exhaustive(walk, config)[:beams])


@pytest.mark.parametrize("normalization", PENALTIES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_as_many_beams_as_prefixes_find_every_hypothesis(alpha, normalization):
    """B29, B31, I19: V = 3 and beams of V ** L = 27: each of the 15 hypotheses once, in order, the rest empty."""
    config = settings(27, 3, alpha, pad_id=2, normalization=normalization)
    tables = random_tables(0, (5, tree_size(3, 3), 3))
    result = run(tables, config)
    walks = [Walk(table, "tree") for table in tables]
    for row, walk in enumerate(walks):
        assert len(expected := exhaustive(walk, config)) == 15
        assert_same(listed(result, row), expected)
    assert_well_formed(result, config, walks)


def test_more_beams_than_prefixes_change_nothing_and_fewer_find_nothing_better():
    """I19: the best score is the maximum for all exhaustive sizes and an upper bound for the others."""
    tables = random_tables(1, (7, tree_size(3, 3), 3))
    best = {beams: run(tables, settings(beams, 3, 0.6)).scores[:, 0] for beams in (1, 2, 27, 31)}
    np.testing.assert_array_equal(best[31], best[27])
    assert (best[2] <= best[27]).all() and (best[1] <= best[27]).all() and (best[1] < best[27]).any()


@pytest.mark.parametrize("alpha", [-1.0, 2.0])
def test_the_bound_is_safe_under_the_other_penalty(alpha):
    """B29: (5 + length) / 6 grows more slowly than the length."""
    config = settings(3, 5, alpha, normalization="gnmt")
    tables = random_tables(11, (7, tree_size(3, 5), 3))
    result = run(tables, config)
    for row, table in enumerate(tables):
        assert_same(listed(result, row), plain_beam_search(Walk(table, "tree"), config, stop="never"))


def test_golden_scores_of_the_other_penalty():
    """B29: -0.7953 at 3 tokens: -0.5965 by (5 + 3) / 6."""
    config = settings(16, 4, 1.0, normalization="gnmt")
    assert listed(run(golden_table(), config), 0)[0][1] == pytest.approx(-0.5965, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 2, 64])
def test_several_tokens_may_end_a_hypothesis(beams):
    """Among few tokens, where those that end are often all of the best: still as many stay live as there are beams."""
    config = settings(beams, 4, 2.0, eos_ids=(0, 2))
    tables = random_tables(12, (11, tree_size(4, 4), 4))
    tables[..., [0, 2]] += 1.5
    tables = log_softmax(tables)
    result = run(tables, config)
    walks = [Walk(table, "tree") for table in tables]
    for row, walk in enumerate(walks):
        assert_same(listed(result, row), plain_beam_search(walk, config, stop="never"))
        if beams == 64:
            assert_same(listed(result, row), exhaustive(walk, config)[:beams])
    assert_well_formed(result, config, walks)
    assert {h[0][-1] for row in range(11) for h in listed(result, row) if h[3]} == {0, 2}


TREE = (7, tree_size(3, 5), 3)


@pytest.mark.parametrize("early_stopping", [False, True, "heuristic"])
@pytest.mark.parametrize("alpha", ALPHAS)
@given(seed=st.integers(0, 2**32 - 1), zeros=st.sampled_from([0.0, 0.3]))
def test_the_n_best_are_those_of_a_plain_beam_search(alpha, early_stopping, seed, zeros):
    """B29: without early stopping the result is that of a search which runs to the end, so the bound is safe."""
    config = settings(3, 5, alpha, early_stopping=early_stopping)
    tables = random_tables(seed, TREE, zeros=zeros)
    result = run(tables, config)
    walks = [Walk(table, "tree") for table in tables]
    for row, walk in enumerate(walks):
        assert_same(listed(result, row), plain_beam_search(walk, config, stop=STOPS[early_stopping]))
    assert_well_formed(result, config, walks)


@pytest.mark.parametrize(
    "alpha, early_stopping, after_1",
    [
        # Two hypotheses have ended at two tokens: (0,) with log p -0.92 and (1, 0). The live one is (1, 2).
        (-1.0, False, [0.45, 0.0, 0.55]),  # -1.11 * 2 would beat -1.31 * 2, but -1.11 * 3 is the best it can reach
        (0.0, False, [0.60, 0.0, 0.40]),  # -1.43 does not beat -1.02
        (1.0, False, [0.95, 0.0, 0.05]),  # -3.51 / 3, the length of the longest, does not beat -0.92
        (1.0, True, [0.45, 0.0, 0.55]),  # two have ended
    ],
)
def test_a_row_stops_as_soon_as_it_may(alpha, early_stopping, after_1):
    """B29: not a step later than the bound allows: the third step would meet NaN."""
    tables = np.full((1, tree_size(3, 3), 3), np.nan)
    with np.errstate(divide="ignore"):
        tables[0, 0], tables[0, 2] = np.log([0.4, 0.6, 0.0]), np.log(after_1)
    result = run(tables, settings(2, 3, alpha, early_stopping=early_stopping))
    assert sorted(h[0] for h in listed(result, 0)) == [(0,), (1, 0)]


RING = (7, 101, 5)


def ring_tables(seed=2):
    """Models that end at very different lengths: eos becomes less likely from one to the next."""
    logits = 1.5 * np.random.default_rng(seed).standard_normal(RING)
    logits[..., EOS] -= np.linspace(-1.5, 5.0, RING[0])[:, None]
    return log_softmax(logits)


@pytest.mark.parametrize("early_stopping", [False, True, "heuristic"])
def test_a_row_does_not_depend_on_its_neighbours(early_stopping):
    """B32, I02: alone, in pairs, in a batch of 7 and in any order: equal to the last bit."""
    config = settings(3, 23, 1.0, early_stopping=early_stopping, pad_id=4)
    tables = ring_tables()
    together = run(tables, config, "ring")
    assert len(set(together.lengths[:, 0].tolist())) > 3 and not together.ended.all() and together.ended.any()
    for order in [[m] for m in range(7)] + [[m, (3 * m + 1) % 7] for m in range(7)] + [[6, 2, 0, 5, 1, 4, 3]]:
        for field, result, whole in zip(Hypotheses._fields, run(tables, config, "ring", order), together, strict=True):
            np.testing.assert_array_equal(result, whole[order], err_msg=f"{field} of {order}")
    walks = [Walk(table, "ring") for table in tables]
    assert_well_formed(together, config, walks)
    for row, walk in enumerate(walks):
        assert_same(listed(together, row), plain_beam_search(walk, config, stop=STOPS[early_stopping]))


@pytest.mark.parametrize("early_stopping", [False, True, "heuristic"])
def test_one_beam_is_greedy_search(early_stopping):
    """I19, B31: the likeliest token at each step until it is eos, whatever the length penalty."""
    config = settings(1, 23, 2.0, early_stopping=early_stopping)
    tables = ring_tables(3)
    result = run(tables, config, "ring")
    for row, table in enumerate(tables):
        walk, sequence = Walk(table, "ring"), ()
        while len(sequence) < 23 and EOS not in sequence:
            sequence += (int(walk(sequence).argmax()),)
        log_p = walk.log_prob(sequence)
        assert_same(listed(result, row), [(sequence, log_p / len(sequence) ** 2, log_p, EOS in sequence)])
    assert_well_formed(result, config, [Walk(table, "ring") for table in tables])
    assert 0 < result.ended.sum() < 7


def test_one_beam_sees_differences_that_sums_have_lost():
    """I19: near log p = -100 float32 sums are 8e-6 apart; greedy search sees that one logit is 1e-6 higher."""

    def step(tokens, state, position):
        return jnp.array([[-9.0, 1.0, 1.000001, 1.0]]), state

    result = beam_search(step, (), jnp.array([BOS], jnp.int32), take_rows=take_rows, settings=settings(1, 101))
    assert result.tokens.tolist() == [[[2] * 101]]


@pytest.mark.parametrize("V, beams", [(3, 5), (2, 7), (3, 2)])
def test_more_beams_than_tokens(V, beams):
    """B31: 2 W > V, at the first step W > V: no duplicates, nothing of probability zero, the plain search's result."""
    config = settings(beams, 4, 0.6, pad_id=V - 1)
    tables = random_tables(4, (5, tree_size(V, 4), V), zeros=0.3)
    result = run(tables, config)
    walks = [Walk(table, "tree") for table in tables]
    for row, walk in enumerate(walks):
        assert_same(listed(result, row), plain_beam_search(walk, config, stop="never"))
    assert_well_formed(result, config, walks)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_vocabulary_of_eos_alone(beams):
    """B31: V = 1: one hypothesis of probability 1."""
    result = run(np.zeros((2, 5, 1)), settings(beams, 5, 1.0, pad_id=9))
    assert result.tokens.shape == (2, beams, 5)
    assert [listed(result, row) for row in (0, 1)] == [[((0,), 0.0, 0.0, True)]] * 2
    assert_well_formed(result, settings(beams, 5, 1.0, pad_id=9), [Walk(np.zeros((5, 1)), "tree")] * 2)


def test_where_nothing_may_follow_there_is_no_hypothesis():
    """B31: a live hypothesis whose next tokens all have probability zero is gone; without others the row is empty."""
    table = np.full((2, tree_size(3, 3), 3), -np.inf)
    table[0, 0] = log_softmax([-np.inf, 0.0, 1.0])
    table[1, [0, 2]] = log_softmax([-np.inf, 0.0, 1.0]), log_softmax([0.0, -np.inf, -np.inf])
    result = run(table, settings(2, 3))
    assert listed(result, 0) == []
    assert [h[0] for h in listed(result, 1)] == [(1, 0)]


def test_equal_values_come_in_the_order_of_beams_and_tokens():
    """B32: a model that knows nothing; the lowest index first."""
    result = run(np.full((1, tree_size(3, 2), 3), math.log(1 / 3)), settings(3, 2, 1.0))
    assert [h[0] for h in listed(result, 0)] == [(0,), (1, 0), (1, 1)]


def test_the_state_follows_its_hypothesis():
    """B32: without the reordering of rows the log-probs are those of other prefixes."""
    tables, config = random_tables(5, TREE), settings(3, 5)
    step, first = device_step(jnp.asarray(tables, jnp.float32), "tree"), jnp.full(7, BOS, jnp.int32)

    def errors(take_rows):
        result = beam_search(step, initial_state(range(7), 3), first, take_rows=take_rows, settings=config)
        return [abs(h[2] - Walk(tables[b], "tree").log_prob(h[0])) for b in range(7) for h in listed(result, b)]

    assert max(errors(take_rows)) < 1e-5
    assert max(errors(lambda state, rows: state)) > 0.1


def test_a_cache_gives_what_recomputing_everything_gives():
    """B32, I07: the state is the whole prefix, and each step starts again from its first token."""
    tables, config = jnp.asarray(ring_tables(), jnp.float32), settings(3, 11, 0.6, pad_id=4)

    def step(tokens, prefix, position):
        prefix = prefix.at[:, position].set(tokens)
        node = jnp.zeros_like(tokens)
        for t in range(1, 11):
            node = jnp.where(t <= position, FOLLOW["ring"](node, prefix[:, t], t, RING[1:]), node)
        return tables[jnp.repeat(jnp.arange(7, dtype=jnp.int32), 3), node], prefix

    prefix, first = jnp.zeros((21, 11), jnp.int32), jnp.full(7, BOS, jnp.int32)
    recomputed = beam_search(step, prefix, first, take_rows=lambda x, rows: x[rows], settings=config)
    for found, expected in zip(recomputed, run(tables, config, "ring"), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_state_may_change_its_shape_between_stages():
    """It has room for the steps that come, is prepared once before each stage, and the result is that of one stage."""
    tables, config, first = (
        jnp.asarray(ring_tables(), jnp.float32),
        settings(3, 11, 0.6, pad_id=4),
        jnp.full(7, BOS, jnp.int32),
    )
    step, prepared = device_step(tables, "ring"), []

    def writing(tokens, state, position):
        logits, inner = step(tokens, {name: state[name] for name in ("model", "node")}, position)
        written = state["written"].at[:, position].set(tokens, mode="promise_in_bounds")
        past = (jnp.arange(written.shape[1], dtype=jnp.int32) <= position)[None]
        full = jnp.where(past, written >= 0, True).all(axis=1)  # NaN as soon as a column is lost
        return jnp.where(full[:, None], logits, jnp.nan), inner | {"written": written}

    def room(columns, state):
        prepared.append(columns)
        more = columns - state["written"].shape[1]
        return state | {"written": jnp.pad(state["written"], ((0, 0), (0, more)), constant_values=-1)}

    @jax.jit
    def search(stages=(4, 7, 11)):
        state = initial_state(range(7), 3) | {"written": jnp.zeros((21, 0), jnp.int32)}
        stages = [(end, functools.partial(room, end)) for end in stages]
        return beam_search(writing, state, first, take_rows=take_rows, settings=config, stages=stages)

    found = search()
    assert prepared == [4, 7, 11]
    for one, other in zip(found, run(tables, config, "ring"), strict=True):
        np.testing.assert_array_equal(one, other)


class Constrained(Walk):
    """The rule of plain Python: no pair of tokens twice, what was read before included, and no end before 2 tokens."""

    def __init__(self, table, kind, read):
        super().__init__(table, kind)
        self.read = tuple(read)

    def __call__(self, prefix):
        row, text = super().__call__(prefix).copy(), (*self.read, *prefix)
        pairs = set(itertools.pairwise(text))
        row[[v for v in range(len(row)) if text and (text[-1], v) in pairs]] = -np.inf
        if len(prefix) < 2:
            row[EOS] = -np.inf
        return row


@pytest.mark.parametrize("beams", [3, 7])
def test_constraints_see_what_was_read_before(beams):
    """Log-probs are not normalised again, as in transformers; rows have read texts of different lengths, or nothing."""
    rule = Constraints(no_repeat_ngram=2, min_new_tokens=2)
    config, tables = settings(beams, 5, 0.6, constraints=rule), random_tables(13, (7, tree_size(4, 5), 4))
    texts = [[1, 2, 1], [3], [2, 2, 3, 3, 1, 1], [1, 3, 1, 2], [2, 1, 2, 3, 2], [3, 2, 1], [1, 1]]
    tokens = jnp.asarray([text + [1] * (6 - len(text)) for text in texts], jnp.int32)

    @functools.partial(jax.jit, static_argnames="config")
    def search(lengths, config):
        step = device_step(jnp.asarray(tables, jnp.float32), "tree")
        state, first = initial_state(range(7), config.beams), jnp.full(7, BOS, jnp.int32)
        history = History(tokens, lengths)
        return beam_search(step, state, first, take_rows=take_rows, settings=config, history=history)

    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    for read, sizes in ((texts, lengths), ([[]] * 7, lengths * 0)):
        result = jax.tree.map(np.asarray, search(sizes, config))
        for row, table in enumerate(tables):
            walk = Constrained(table, "tree", read[row])
            assert_same(listed(result, row), plain_beam_search(walk, config, stop="never"))
    free = run(tables, settings(beams, 5, 0.6))
    assert (free.tokens != result.tokens).any()


def test_first_tokens_reach_the_step():
    """The first call of step gets each row's own token, once a beam, and position 0."""

    def step(tokens, state, position):
        return jnp.where(position == 0, jax.nn.one_hot(tokens, 7) * 50, jax.nn.one_hot(tokens * 0, 7) * 50), state

    first = jnp.array([3, 5], jnp.int32)
    result = beam_search(step, (), first, take_rows=take_rows, settings=settings(2, 3))
    assert result.tokens[:, 0].tolist() == [[3, 0, 0], [5, 0, 0]]


def test_jit_equals_eager_and_traces_once():
    """I01, B55: the same bits, and other models, tokens or lengths of output do not trace again."""
    config, first, traces = settings(3, 5, 0.6), jnp.full(7, BOS, jnp.int32), []

    def decode(tables):
        traces.append(1)
        state = initial_state(range(7), 3)
        return beam_search(device_step(tables, "tree"), state, first, take_rows=take_rows, settings=config)

    tables = [jnp.asarray(random_tables(seed, TREE), jnp.float32) for seed in (6, 7, 8)]
    jitted = jax.jit(decode)
    found = [jitted(t) for t in tables]
    assert len(traces) == 1
    for compiled, eager in zip(found[1], decode(tables[1]), strict=True):
        np.testing.assert_array_equal(compiled, eager)


def test_dtypes_do_not_follow_the_logits_or_the_x64_flag():
    """B56, I28: int32, float32 and bool for bfloat16 logits and for float64 ones, and the numbers of float32."""
    tables, config = random_tables(9, TREE), settings(3, 5, 0.6)
    coarse = jnp.asarray(tables, jnp.bfloat16)
    expected = run(coarse.astype(jnp.float32), config)
    state, first = initial_state(range(7), 3), jnp.full(7, BOS, jnp.int32)
    low = beam_search(device_step(coarse, "tree"), state, first, take_rows=take_rows, settings=config)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(coarse, np.float64))
        assert wide.dtype == jnp.float64
        high = beam_search(device_step(wide, "tree"), state, first, take_rows=take_rows, settings=config)
    for field, *results in zip(Hypotheses._fields, low, high, expected, strict=True):
        dtype = {"tokens": "int32", "lengths": "int32", "ended": "bool"}.get(field, "float32")
        for result in results:
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, results[-1], err_msg=field)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_reported_and_stays_in_its_row(bad):
    """B32: the loop ends, the row says NaN, the others are as without it; what only a dead beam meets does no harm."""
    tables, config = random_tables(10, TREE), settings(3, 5, 0.6)
    expected = run(tables, config)
    tables[2, [2, 3], 1] = bad  # after either of the two first tokens that do not end
    result = run(tables, config)
    others = [0, 1, 3, 4, 5, 6]
    for found, clean in zip(result, expected, strict=True):
        np.testing.assert_array_equal(found[others], clean[others])
    assert np.isnan(result.scores[2]).all() and np.isnan(result.log_probs[2]).all()
    assert (result.tokens[2] == 0).all() and (result.lengths[2] == 0).all() and not result.ended[2].any()

    never_seen = np.full((1, tree_size(3, 5), 3), bad)
    never_seen[0, 0] = log_softmax([9.0, -np.inf, -np.inf])
    assert [h[0] for h in listed(run(never_seen, config), 0)] == [(0,)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"beams": 0}, "beams is 0"),
        ({"beams": 2.0}, "beams is 2.0"),
        ({"beams": True}, "beams is True"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"eos_ids": (-1,)}, r"eos_ids is \(-1,\)"),
        ({"pad_id": None}, "pad_id is None"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"length_penalty": "1"}, "length_penalty is '1'"),
        ({"length_penalty": -40.0}, "leaves float32"),
        ({"early_stopping": "never"}, "early_stopping is 'never'"),
        ({"normalization": "marian"}, "normalization is .marian."),
        ({"eos_ids": ()}, r"eos_ids is \(\)"),
    ],
)
def test_settings_without_meaning_are_refused(change, message):
    """I34: when built, saying which value came."""
    valid = dict(
        beams=2,
        max_new_tokens=11,
        length_penalty=1.0,
        early_stopping=True,
        eos_ids=(0,),
        pad_id=0,
        normalization="fairseq",
    )
    assert hash(BeamSettings(**valid)) == hash(BeamSettings(**valid))
    with pytest.raises(ValueError, match=message):
        # Not by the constructor: there the type checker of the tests would answer first.
        BeamSettings.__post_init__(types.SimpleNamespace(**valid | change))


@pytest.mark.parametrize(
    "shape, config, message",
    [
        ((2, 3), settings(2, 3), r"logits of shape \(2, 3\): \(4, V\)"),
        ((4, 1, 3), settings(2, 3), r"logits of shape \(4, 1, 3\)"),
        ((4, 3), settings(2, 3, eos_ids=(3,)), r"eos_ids is \(3,\), but step gives logits for 3 tokens"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(shape, config, message):
    """B17: before anything is compiled."""

    def step(tokens, state, position):
        return jnp.zeros(shape), state

    with pytest.raises(ValueError, match=message):
        beam_search(step, (), jnp.zeros(2, jnp.int32), take_rows=take_rows, settings=config)
