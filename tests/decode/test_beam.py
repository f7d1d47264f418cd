"""Beam search against exhaustive enumeration and a plain Python beam search, both in float64, on toy language models.

A toy model is a table of log-probs. In a `tree` its row is the prefix itself (node n has the children n V + 1 + token), so
every prefix has its own distribution; in a `ring` it is a rolling hash of the prefix, so sequences may be long.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.decode.beam import BeamSettings, Hypotheses, beam_search

ALPHAS = [-1.0, 0.0, 0.6, 1.0, 2.0]
EOS, BOS = 0, 1


def settings(beams, length, alpha=0.0, *, early_stopping=False, eos_id=EOS, pad_id=0):
    return BeamSettings(beams, length, alpha, early_stopping, eos_id, pad_id)


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


def tree_next(node, token, position, V):
    return node * V + 1 + token


def ring_next(node, token, position, N):
    return (node * 7 + token * 11 + position * 3 + 5) % N


def device_step(tables, kind):
    """tables: M N V; state: which model a row belongs to, and its node."""
    M, N, V = tables.shape

    def step(tokens, state, position):
        after = tree_next(state["node"], tokens, position, V) if kind == "tree" else ring_next(state["node"], tokens, position, N)
        node = jnp.where(position == 0, 0, after)
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
        (tuple(result.tokens[row, w, : result.lengths[row, w]].tolist()), *(float(x[row, w]) for x in result[1:3]), bool(result.ended[row, w]))
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
            node = (tree_next if self.kind == "tree" else ring_next)(node, token, position, self.table.shape[self.kind == "tree"] if self.kind == "tree" else len(self.table))
        return self.table[node]

    def log_prob(self, sequence):
        return sum(float(self(sequence[:t])[token]) for t, token in enumerate(sequence))


def exhaustive(walk, config):
    """Every hypothesis with its score, best first: all that end, and all that are cut."""
    V, T = walk.table.shape[1], config.max_new_tokens
    words = [t for t in range(V) if t != config.eos_id]
    ended = [(*body, config.eos_id) for n in range(T) for body in itertools.product(words, repeat=n)]
    cut = list(itertools.product(words, repeat=T))
    scored = [(s, log_p / len(s) ** config.length_penalty, log_p) for s in ended + cut if (log_p := walk.log_prob(s)) > -np.inf]
    return [(*h, h[0][-1] == config.eos_id) for h in sorted(scored, key=lambda h: -h[1])]


def plain_beam_search(walk, config, *, stop):
    """Textbook beam search on lists. stop: "full" (W have ended) or "never"."""
    W, alpha = config.beams, config.length_penalty
    live, pool = [((), 0.0)], []

    def entry(sequence, log_p, ended):
        return sequence, log_p / len(sequence) ** alpha, log_p, ended

    for _ in range(config.max_new_tokens):
        candidates = [((*s, v), log_p + float(q)) for s, log_p in live for v, q in enumerate(walk(s)) if q > -np.inf]
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * W if W > 1 else 1]
        pool += [entry(s, log_p, True) for s, log_p in candidates[:W] if s[-1] == config.eos_id]
        live = [c for c in candidates if c[0][-1] != config.eos_id][:W]
        if stop == "full" and len(pool) >= W:
            live = []
            break
    return sorted(pool + [entry(s, log_p, False) for s, log_p in live], key=lambda h: -h[1])[:W]


def assert_same(found, expected):
    assert [h[0] for h in found] == [h[0] for h in expected]
    assert [h[3] for h in found] == [h[3] for h in expected]
    np.testing.assert_allclose([h[1:3] for h in found], [h[1:3] for h in expected], rtol=1e-5, atol=1e-6)


def assert_well_formed(result, config, walks):
    """What holds of every result: I19, and the fields agree with each other."""
    for row, walk in enumerate(walks):
        hypotheses = listed(result, row)
        assert len({h[0] for h in hypotheses}) == len(hypotheses)
        for w, (sequence, score, log_p, ended) in enumerate(hypotheses):
            assert config.eos_id not in sequence[:-1]
            assert ended == (sequence[-1] == config.eos_id)
            assert ended or len(sequence) == config.max_new_tokens
            assert (result.tokens[row, w, len(sequence) :] == config.pad_id).all()
            np.testing.assert_allclose(log_p, walk.log_prob(sequence), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(score, log_p / len(sequence) ** config.length_penalty, rtol=1e-6)
        empty = slice(len(hypotheses), None)
        assert (result.tokens[row, empty] == config.pad_id).all()
        assert (result.scores[row, empty] == -np.inf).all() and (result.log_probs[row, empty] == -np.inf).all()
        assert (result.lengths[row, empty] == 0).all() and not result.ended[row, empty].any()
        assert (np.diff(result.scores[row, : len(hypotheses)]) <= 0).all()


def golden_table():
    """B29: p(EOS) = .52, p(A | A) = .95, p(EOS | A A) = .99; what follows A A A does not matter."""
    eos = np.full(tree_size(2, 4), 0.5)
    a, aa = tree_next(0, 1, 1, 2), tree_next(tree_next(0, 1, 1, 2), 1, 2, 2)
    eos[0], eos[a], eos[aa] = 0.52, 0.05, 0.99
    return np.log(np.stack([eos, 1 - eos], axis=-1))[None]


@pytest.mark.parametrize("beams", [2, 16])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_golden_toy_model(alpha, beams):
    """B29: the short hypothesis under alpha <= 0, the longer one under alpha > 0, though the short one ends first."""
    config = settings(beams, 4, alpha)
    result = run(golden_table(), config)
    expected = ((0,), -0.6539) if alpha <= 0 else ((1, 1, 0), -0.7953)
    sequence, score, log_p, ended = listed(result, 0)[0]
    assert (sequence, round(log_p, 4), ended) == (*expected, True)
    assert score == pytest.approx({-1.0: -0.6539, 0.0: -0.6539, 0.6: -0.4114, 1.0: -0.2651, 2.0: -0.0884}[alpha], abs=1e-4)
    walk = Walk(golden_table()[0], "tree")
    assert_well_formed(result, config, [walk])
    if beams == 16:
        assert_same(listed(result, 0), exhaustive(walk, config)[:beams])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_as_many_beams_as_prefixes_find_every_hypothesis(alpha):
    """B29, B31, I19: V = 3 and beams of V ** L = 27: each of the 15 hypotheses once, in order, the rest empty."""
    config = settings(27, 3, alpha, pad_id=2)
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


TREE = (7, tree_size(3, 5), 3)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
@given(seed=st.integers(0, 2**32 - 1), zeros=st.sampled_from([0.0, 0.3]))
def test_the_n_best_are_those_of_a_plain_beam_search(alpha, early_stopping, seed, zeros):
    """B29: without early stopping the result is that of a search which runs to the end, so the bound is safe."""
    config = settings(3, 5, alpha, early_stopping=early_stopping)
    tables = random_tables(seed, TREE, zeros=zeros)
    result = run(tables, config)
    walks = [Walk(table, "tree") for table in tables]
    for row, walk in enumerate(walks):
        assert_same(listed(result, row), plain_beam_search(walk, config, stop="full" if early_stopping else "never"))
    assert_well_formed(result, config, walks)


RING = (7, 101, 5)


def ring_tables(seed=2):
    """Models that end at very different lengths: eos becomes less likely from one to the next."""
    logits = 1.5 * np.random.default_rng(seed).standard_normal(RING)
    logits[..., EOS] -= np.linspace(-1.5, 5.0, RING[0])[:, None]
    return log_softmax(logits)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(early_stopping):
    """B32, I02: alone, in pairs, in a batch of 7 and in any order: equal to the last bit."""
    config = settings(3, 23, 1.0, early_stopping=early_stopping, pad_id=4)
    tables = ring_tables()
    together = run(tables, config, "ring")
    assert len(set(together.lengths[:, 0].tolist())) > 3 and not together.ended.all() and together.ended.any()
    for order in ([[m] for m in range(7)] + [[m, (3 * m + 1) % 7] for m in range(7)] + [[6, 2, 0, 5, 1, 4, 3]]):
        for field, result, whole in zip(Hypotheses._fields, run(tables, config, "ring", order), together, strict=True):
            np.testing.assert_array_equal(result, whole[order], err_msg=f"{field} of {order}")
    walks = [Walk(table, "ring") for table in tables]
    assert_well_formed(together, config, walks)
    for row, walk in enumerate(walks):
        assert_same(listed(together, row), plain_beam_search(walk, config, stop="full" if early_stopping else "never"))


@pytest.mark.parametrize("early_stopping", [False, True])
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
    """I19: after log p = -1000 float32 sums are 6e-5 apart, logits still decide as in greedy search."""
    def step(tokens, state, position):
        first = jnp.array([[-2000.0, -1000.0, -2000.0, 0.0]])
        later = jnp.array([[-9.0, 1.0, 1.000001, -9.0]])
        return jnp.where(position == 0, first.at[0, 3].set(-3000.0), later), state

    result = beam_search(step, (), jnp.array([BOS], jnp.int32), take_rows=take_rows, settings=settings(1, 3))
    assert result.tokens.tolist() == [[[1, 2, 2]]]
