"""Generation against loops in Python that run the full forward pass for every prefix, without a cache.

Encoder-decoder and decoder-only, with every way of telling positions apart that a cache could get wrong. What
transformers generates with small random models is in fixtures/generation.json.
"""

import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.constraints import Constraints
from tfm_jax.decode.generate import Prompts, SampleSettings, begin, continued, finished, generate
from tfm_jax.decode.sampling import Sampling, filtered
from tfm_jax.models import Model, build
from tfm_jax.models.gpt import GPT, GPTConfig
from tfm_jax.models.transformer import Dropout, Transformer, TransformerConfig
from tfm_jax.ops import multi_head

V, B, S, P, T = 13, 7, 5, 4, 6
PAD, EOS, BOS, OTHER_EOS = 0, 1, 2, 3
SIZES = {"max_length": 11, "d_model": 10, "d_ff": 17, "num_heads": 2, "d_k": 4, "d_v": 3, "head_bias": True}
# generation never drops anything (B20), so every comparison below is with a model that cannot
NONE, HALF = Dropout(0.0, 0.0, 0.0, 0.0), Dropout(0.5, 0.5, 0.5, 0.5)
TRANSFORMER_SEED, GPT_SEED = 10, 36  # outputs of many kinds and lengths
KINDS = ["learned", "rope", "t5", "sinusoidal"]

GREEDY = BeamSettings(1, T, 1.0, True, (EOS,), PAD)
BEAM = BeamSettings(3, T, 0.6, False, (EOS,), PAD)
EARLY = BeamSettings(3, T, 1.0, True, (EOS,), PAD)
SAMPLED = SampleSettings(T, (EOS,), PAD, Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=3))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Task(NamedTuple):
    """A model and seven texts to continue."""

    model: Model
    params: dict
    prompts: list
    """Token lists."""
    source: Any = None
    """What the encoder reads, tokens and segment ids."""


def random_params(model, seed):
    """Random in every leaf, with favourites that change from place to place and from sentence to sentence."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name, values = jax.tree_util.keystr(path), rng.standard_normal(shape.shape)
        if "scale" in name:
            return jnp.asarray(1 + 0.1 * values, jnp.float32)
        share = 0.1 if name.endswith("bias']") else 1.0 if "embedding" in name or "head" in name else 0.4
        return jnp.asarray(share * values, jnp.float32)

    params = jax.tree_util.tree_map_with_path(leaf, model.shapes)
    # ending must be likely enough to happen and unlikely enough to happen late
    return params | {"head_bias": params["head_bias"].at[EOS].add(2.0)}


@functools.cache
def task(family, positions="learned"):
    rng = np.random.default_rng(1)
    lengths, deep = [4, 3, 1, 4, 2, 4, 3], 2 if positions == "learned" else 1
    if family == "gpt":
        config = GPTConfig(V, **SIZES, num_layers=deep, positions=positions, tied_embeddings=False, dropout=NONE)
        prompts = [rng.integers(4, V, length).tolist() for length in lengths]
        return Task(build(config), random_params(build(config), GPT_SEED), prompts)
    layers = {"num_encoder_layers": 1, "num_decoder_layers": deep}
    config = TransformerConfig(V, **SIZES, **layers, positions=positions, tied_embeddings="none", dropout=NONE)
    source = rng.integers(3, V, (B, S)), np.arange(S)[None] < np.array([5, 3, 1, 4, 2, 5, 3])[:, None]
    arrays = tuple(jnp.asarray(x, jnp.int32) for x in source)
    return Task(build(config), random_params(build(config), TRANSFORMER_SEED), [[BOS]] * B, arrays)


TASKS = [(family, kind) for family in ("transformer", "gpt") for kind in KINDS]
BOTH = ["transformer", "gpt"]


def dropping(model):
    return build(replace(model.config, dropout=HALF))


def padded(prompts, *, side="left", width=None, filler=PAD):
    width = width or max(map(len, prompts))
    gaps = [width - len(row) for row in prompts]
    fill = lambda value, gap: [value] * gap  # noqa: E731
    if side == "left":
        rows = [
            (fill(filler, gap) + row, fill(0, gap) + [1] * len(row)) for gap, row in zip(gaps, prompts, strict=True)
        ]
    else:
        rows = [
            (row + fill(filler, gap), [1] * len(row) + fill(0, gap)) for gap, row in zip(gaps, prompts, strict=True)
        ]
    return tuple(jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True))


def prompts_of(one, rows=None, requests=None, **padding):
    rows = np.arange(len(one.prompts)) if rows is None else np.asarray(rows)
    padding = {"width": max(map(len, one.prompts))} | padding
    source = (None, None) if one.source is None else tuple(x[rows] for x in one.source)
    requests = None if requests is None else jnp.asarray(requests, jnp.int32)
    return Prompts(*padded([one.prompts[row] for row in rows], **padding), *source, requests)


def run(one, settings, rows=None, **inputs):
    found = generate(one.params, prompts_of(one, rows, **inputs), model=dropping(one.model), settings=settings)
    return jax.tree.map(np.asarray, found)


@functools.partial(jax.jit, static_argnames="model")
def full_forward(params, source, tokens, *, model):
    if source is None:
        return model.apply(params, tokens)
    return model.apply(params, source[0], tokens, source_segment_ids=source[1])


ROWS, COLUMNS = 4 * B, P + T - 1


def logits_of(one, rows, outputs):
    """Of every next token at every place of n outputs (n T, padded anyhow) that continue the prompts of `rows`: n T V.

    One shape for all calls. A causal model cares neither for what follows nor for the other rows.
    """
    tokens, rows = np.zeros((ROWS, COLUMNS), np.int32), np.asarray(rows)
    for i, row in enumerate(rows):
        whole = [*one.prompts[row], *outputs[i]][:COLUMNS]
        tokens[i, : len(whole)] = whole
    every = np.concatenate([rows, np.zeros(ROWS - len(rows), int)])
    source = None if one.source is None else tuple(x[every] for x in one.source)
    logits = np.asarray(full_forward(one.params, source, jnp.asarray(tokens), model=one.model), np.float64)
    places = np.array([len(one.prompts[row]) - 1 for row in rows])[:, None] + np.arange(T)
    return np.take_along_axis(logits[: len(rows)], places[..., None], axis=1)


def log_probs(one, rows, outputs):
    logits = logits_of(one, rows, outputs)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


PENALTIES = dict.fromkeys(("fairseq", "transformers"), lambda n: n) | dict.fromkeys(
    ("gnmt", "t2t"), lambda n: (5 + n) / 6
)


def score_of(log_p, length, settings):
    return log_p / PENALTIES[settings.normalization](length) ** settings.length_penalty


def plain_greedy(one, eos_ids=(EOS,)):
    """B T tokens and which rows have ended."""
    outputs, ended = np.full((B, T), PAD), np.zeros(B, bool)
    for t in range(T):
        best = log_probs(one, range(B), outputs)[:, t].argmax(axis=-1)
        outputs[:, t] = np.where(ended, PAD, best)
        ended |= np.isin(outputs[:, t], eos_ids)
    return outputs, ended


def plain_beam(one, settings):
    """The search of `beam_search`'s docstring: for each row [(score, log p, tokens, ended)], best first.

    Without early stopping it runs to the end.
    """
    W, ends = settings.beams, settings.eos_ids
    live, pools, done = [[(0.0, [])] for _ in range(B)], [[] for _ in range(B)], [False] * B

    def keep(pool, entering):
        pool.extend((score_of(total, len(tokens), settings), total, tokens, ended) for total, tokens, ended in entering)
        pool.sort(key=lambda hypothesis: -hypothesis[0])
        del pool[W:]

    for length in range(1, T + 1):
        places = [(b, total, tokens) for b in range(B) for total, tokens in live[b]]
        rows = log_probs(one, [b for b, _, _ in places], [tokens for _, _, tokens in places])[:, length - 1]
        extended = [[] for _ in range(B)]
        for (b, total, tokens), row in zip(places, rows, strict=True):
            extended[b] += [(total + row[v], [*tokens, v]) for v in range(V)]
        for b in range(B):
            best = sorted(extended[b], key=lambda hypothesis: -hypothesis[0])[: (1 + len(ends)) * W]
            keep(pools[b], [(total, tokens, True) for total, tokens in best[:W] if tokens[-1] in ends])
            live[b] = [(total, tokens) for total, tokens in best if tokens[-1] not in ends][:W]
            done[b] |= settings.early_stopping and len(pools[b]) == W and length < T
            live[b] = [] if done[b] else live[b]
        if not any(live):
            return pools
    for b in range(B):
        keep(pools[b], [(total, tokens, False) for total, tokens in live[b]])
    return pools


def assert_is_plain_beam(found, one, settings):
    for b, expected in enumerate(plain_beam(one, settings)):
        outputs = [tokens + [PAD] * (T - len(tokens)) for _, _, tokens, _ in expected]
        np.testing.assert_array_equal(found.tokens[b], outputs)
        np.testing.assert_array_equal(found.ended[b], [ended for *_, ended in expected])
        np.testing.assert_allclose(found.scores[b], [score for score, *_ in expected], rtol=1e-4)
        np.testing.assert_allclose(found.log_probs[b], [total for _, total, *_ in expected], rtol=1e-4)


def assert_same(found, expected, rtol=1e-5):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.ended, expected.ended)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=rtol, atol=1e-6)


def assert_is_rescored(found, one, settings):
    """Every hypothesis scored again by the full forward pass; only padding after the end."""
    W = found.tokens.shape[1]
    assert found.tokens.dtype == np.int32 and found.tokens.shape == (B, W, T)
    rows = log_probs(one, np.repeat(np.arange(B), W), found.tokens.reshape(B * W, T)).reshape(B, W, T, V)
    for b, w in np.ndindex(B, W):
        tokens = found.tokens[b, w].tolist()
        length = next((i + 1 for i, token in enumerate(tokens) if token in settings.eos_ids), T)
        total = rows[b, w, np.arange(length), tokens[:length]].sum()
        np.testing.assert_allclose(found.log_probs[b, w], total, rtol=1e-4)
        np.testing.assert_allclose(found.scores[b, w], score_of(total, length, settings), rtol=1e-4)
        assert found.lengths[b, w] == length and found.ended[b, w] == (tokens[length - 1] in settings.eos_ids)
        assert (found.tokens[b, w, length:] == PAD).all()
    assert (np.diff(found.scores, axis=1) <= 0).all()


@pytest.mark.parametrize("family, kind", [("transformer", "learned"), *(("gpt", kind) for kind in KINDS)])
def test_greedy_is_the_argmax_of_full_forward_passes(family, kind):
    """I07, I19, B13, B33: prompts of different lengths, padded on either side."""
    one = task(family, kind)
    outputs, ended = plain_greedy(one)
    found = run(one, GREEDY)
    np.testing.assert_array_equal(found.tokens[:, 0], outputs)
    np.testing.assert_array_equal(found.ended[:, 0], ended)
    assert_is_rescored(found, one, GREEDY)
    assert len({tuple(row) for row in outputs}) > 3 and 0 < ended.sum()  # the case has something to say
    if family == "gpt":
        assert_same(run(one, GREEDY, side="right"), found)


@pytest.mark.parametrize("family, kind", TASKS)
def test_beam_search_is_that_of_full_forward_passes(family, kind):
    """B29, B32, B33: the branches of a tree in one row of the cache are the search that recomputes everything."""
    one = task(family, kind)
    found = run(one, BEAM)
    assert_is_plain_beam(found, one, BEAM)
    assert_is_rescored(found, one, BEAM)
    assert found.ended.any() and len(set(found.lengths.ravel().tolist())) > 1
    if family == "gpt":
        assert_same(run(one, BEAM, side="right"), found)


@pytest.mark.parametrize("family", BOTH)
def test_the_other_ways_to_stop_and_to_normalize(family):
    """B29: both families, both signs of the length penalty."""
    one = task(family)
    plain = run(one, BEAM)
    others = [EARLY, replace(BEAM, normalization="gnmt", length_penalty=2.0), replace(BEAM, length_penalty=-1.0)]
    for settings in others if family == "gpt" else others[:1]:
        found = run(one, settings)
        assert_is_plain_beam(found, one, settings)
        assert_is_rescored(found, one, settings)
        assert (found.tokens != plain.tokens).any()
    assert (plain.tokens[:, 0] != run(one, GREEDY).tokens[:, 0]).any()


SETTINGS = {"greedy": GREEDY, "sampled": SAMPLED, "beam": BEAM}
every_way = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


@pytest.mark.parametrize("family, way", [("transformer", "beam"), ("gpt", "greedy"), ("gpt", "sampled")])
def test_a_text_is_decoded_the_same_in_any_batch(family, way):
    """B32, I02: batches of 1, 2 and 7 in any order; draws follow the request, not the row."""
    one, settings = task(family), SETTINGS[way]
    whole = run(one, settings, requests=100 + np.arange(B))
    for rows in ([3, 0, 6, 1, 5, 2, 4], [2, 5], [4, 0], [6], [2]):
        found = run(one, settings, rows, requests=100 + np.array(rows))
        assert_same(found, jax.tree.map(lambda x, rows=rows: x[np.array(rows)], whole))


def test_draws_depend_on_seed_request_and_step():
    """B32: the draws, drawn again one by one from the full forward pass."""
    one, requests = task("gpt"), np.array([5, 0, 77, 2, 5, 1, 9])
    found = run(one, SAMPLED, requests=requests)
    outputs = found.tokens[:, 0]
    logits = logits_of(one, range(B), outputs).astype(np.float32)
    scores = filtered(jnp.asarray(logits.reshape(B * T, V)), SAMPLED.sampling).reshape(B, T, V)
    for b in range(B):
        key = jax.random.fold_in(jax.random.key(SAMPLED.sampling.seed), int(requests[b]))
        for t in range(found.lengths[b, 0]):
            assert outputs[b, t] == jax.random.categorical(jax.random.fold_in(key, t), scores[b, t])
    assert_is_rescored(found, one, replace(SAMPLED, length_penalty=0.0))
    counted = run(one, SAMPLED)
    assert_same(run(one, SAMPLED, requests=np.arange(B)), counted)
    assert (counted.tokens != found.tokens).any()
    other = replace(SAMPLED, sampling=replace(SAMPLED.sampling, seed=4))
    assert (run(one, other).tokens != counted.tokens).any()


def test_temperature_zero_is_greedy_search():
    one = task("gpt")
    cold = SampleSettings(T, (EOS,), PAD, length_penalty=1.0)
    assert_same(run(one, cold), run(one, GREEDY))


@pytest.mark.parametrize("family", BOTH)
def test_what_stands_in_padding_does_not_matter(family):
    """I03, B17: ids outside the vocabulary included, and how much of it there is."""
    one = task(family)
    whole = run(one, BEAM)
    if family == "gpt":
        for filler in (4, -1, V + 3):
            assert_same(run(one, BEAM, filler=filler), whole)
            assert_same(run(one, BEAM, filler=filler, side="right"), whole)
        assert_same(run(one, BEAM, width=P + 1), whole)
        return
    tokens, segments = one.source
    for filler in (4, -1, V + 3):
        other = jnp.where(segments > 0, tokens, filler)
        assert_same(run(one._replace(source=(other, segments)), BEAM), whole)
    wider = tuple(jnp.pad(x, ((0, 0), (0, 3))) for x in one.source)
    assert_same(run(one._replace(source=wider), BEAM), whole)


@pytest.mark.parametrize("family", BOTH)
def test_a_prompt_split_anywhere_is_continued_the_same(family):
    """I07: read as prompt, or written because it is forced."""
    one = task(family)
    word = (7, 5)
    longer = one._replace(prompts=[row + list(word) for row in one.prompts])
    for settings in (GREEDY, replace(BEAM, length_penalty=0.0)) if family == "gpt" else (GREEDY,):
        forced = run(one, replace(settings, constraints=Constraints(forced_first=word)))
        read = run(longer, replace(settings, max_new_tokens=T - len(word)))
        np.testing.assert_array_equal(forced.tokens[..., : len(word)], np.broadcast_to(word, (*read.scores.shape, 2)))
        np.testing.assert_array_equal(forced.tokens[..., len(word) :], read.tokens)
        np.testing.assert_array_equal(forced.lengths, read.lengths + len(word))
        if settings.beams > 1:  # what is forced has probability one there; greedy search gives the model's own
            np.testing.assert_allclose(forced.scores, read.scores, rtol=1e-5)
        else:
            assert_is_rescored(forced, one, settings)


def test_an_output_read_as_prompt_is_continued_by_the_rest():
    """I07, B33: the prefix of a translation too."""
    one, k = task("transformer"), 2
    whole = run(one, GREEDY)
    rows = np.flatnonzero(whole.lengths[:, 0] > k)
    assert len(rows) > 2
    read = one._replace(prompts=[one.prompts[b] + whole.tokens[b, 0, :k].tolist() for b in range(B)])
    rest = run(read, replace(GREEDY, max_new_tokens=T - k))
    np.testing.assert_array_equal(rest.tokens[rows], whole.tokens[rows][..., k:])


def test_the_stages_of_the_cache_change_nothing(monkeypatch):
    """Growing at 3 and 5 tokens, or not at all."""
    one, traced = task("transformer"), []
    whole = run(one, BEAM)
    stages = lambda length: traced.append(length) or [3, 5, length]  # noqa: E731
    monkeypatch.setattr("tfm_jax.decode.generate._stages", stages)
    found = generate(one.params, prompts_of(one), model=one.model, settings=BEAM)  # another key than `run`'s
    assert traced == [T]
    assert_same(found, whole)


@pytest.mark.parametrize("family", BOTH)
def test_long_prompts_and_many_beams_read_the_cache_as_few_queries_do(family, monkeypatch):
    """Beyond a number of queries the cache is read through the door that whole sequences go through."""
    monkeypatch.setattr(multi_head, "FEW_QUERIES", 1)
    one, settings = task(family), replace(BEAM, length_penalty=0.7)  # another key than any test's
    found = run(one, settings)
    assert_is_plain_beam(found, one, settings)
    assert_is_rescored(found, one, settings)


def test_a_long_output_passes_the_stages_there_are():
    """20 new tokens: one stage ends at 16."""
    config = replace(task("gpt").model.config, max_length=29)
    one = task("gpt")._replace(model=build(config), params=random_params(build(config), 5))
    settings = BeamSettings(2, 20, 1.0, False, (EOS,), PAD)
    found = run(one, settings)
    assert (found.lengths > 16).any() and np.isfinite(found.scores).all()
    sequences = [(b, found.tokens[b, 0, : found.lengths[b, 0]].tolist()) for b in range(B)]
    for b, tokens in sequences:
        whole = jnp.asarray([one.prompts[b] + tokens + [PAD] * (29 - len(one.prompts[b]) - len(tokens))], jnp.int32)
        logits = np.asarray(full_forward(one.params, None, whole, model=one.model), np.float64)[0]
        logits = logits[len(one.prompts[b]) - 1 :][: len(tokens)]
        rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(found.log_probs[b, 0], rows[np.arange(len(tokens)), tokens].sum(), rtol=1e-4)


def test_any_of_several_tokens_may_end_an_output():
    one, ends = task("gpt"), (EOS, OTHER_EOS)
    params = one.params | {"head_bias": one.params["head_bias"].at[OTHER_EOS].add(1.5)}
    one = one._replace(params=params)
    outputs, ended = plain_greedy(one, ends)
    found = run(one, replace(GREEDY, eos_ids=ends))
    np.testing.assert_array_equal(found.tokens[:, 0], outputs)
    np.testing.assert_array_equal(found.ended[:, 0], ended)
    assert {outputs[b, found.lengths[b, 0] - 1] for b in np.flatnonzero(ended)} == set(ends)
    settings = replace(BEAM, eos_ids=ends)
    found = run(one, settings)
    assert_is_plain_beam(found, one, settings)
    assert_is_rescored(found, one, settings)


def test_tokens_as_they_come_are_those_of_the_whole():
    """In chunks of 1 and of 3, and nothing more once all have ended or the room is full."""
    one = task("gpt")
    whole = run(one, SAMPLED)
    fixed = {"model": dropping(one.model), "settings": SAMPLED}
    for chunk in (1, 3):
        writing, shown = begin(one.params, prompts_of(one), **fixed), []
        for _ in range(T // chunk + 1):
            before = int(writing.step)
            writing = continued(one.params, writing, jnp.int32(chunk), **fixed)
            shown.append(np.asarray(writing.tokens)[:, before : int(writing.step)])
        np.testing.assert_array_equal(np.concatenate(shown, axis=1), whole.tokens[:, 0, : int(writing.step)])
        assert_same(finished(writing, SAMPLED), whole)
    assert begin._cache_size() == continued._cache_size() == 1  # B55
    partial = continued(one.params, begin(one.params, prompts_of(one), **fixed), jnp.int32(2), **fixed)
    partial = jax.tree.map(np.asarray, finished(partial, SAMPLED))
    assert (partial.lengths <= 2).all() and not partial.ended[whole.lengths > 2].any()


@every_way
def test_constraints_hold_in_what_is_written(settings):
    """B35: forced at both ends, forbidden and allowed tokens, no end too early, no word twice."""
    rule = Constraints(
        forced_first=(7,),
        forced_last=EOS,
        banned=(PAD, 6),
        allowed=(0, 1, 4, 5, 7, 8, 9, 11),
        min_new_tokens=3,
        no_repeat_ngram=1,
    )
    one = task("gpt")
    found = run(one, replace(settings, constraints=rule))
    free = run(one, settings)
    assert (found.tokens != free.tokens).any() and found.ended[:, 0].all()
    assert (found.ended | (found.scores == -np.inf)).all()  # so few tokens are left that there may be no third best
    for b, w in zip(*np.nonzero(found.ended), strict=True):
        tokens = found.tokens[b, w, : found.lengths[b, w]].tolist()
        assert tokens[0] == 7 and tokens[-1] == EOS and len(tokens) > 3
        assert set(tokens) <= {1, 4, 5, 7, 8, 9, 11}
        words = one.prompts[b] + tokens[1:-1]
        assert all(word not in words[: i + len(one.prompts[b])] for i, word in enumerate(tokens[1:-1]))
    if settings is not BEAM:  # there log p is the model's own, whatever was forbidden
        assert_is_rescored(found, one, settings)


def nothing_after_eight(scores, history, lengths):
    """Nothing may follow where a row holds eight tokens."""
    return jnp.where((lengths == 8)[:, None], -jnp.inf, scores)


@every_way
def test_where_nothing_may_follow_it_is_said(settings):
    """B35: an index into a row of -inf would look like a choice."""
    one = task("gpt")
    found = run(one, replace(settings, constraints=Constraints(function=nothing_after_eight, min_new_tokens=T)))
    reads = np.array([len(row) for row in one.prompts])
    stuck = reads + T > 8
    assert stuck.any() and not stuck.all()
    if settings is BEAM:
        assert (found.scores[stuck] == -np.inf).all() and (found.lengths[stuck] == 0).all()
    else:
        assert np.isnan(found.scores[stuck]).all() and np.isnan(found.log_probs[stuck]).all()
    assert np.isfinite(found.scores[~stuck]).all()


@every_way
def test_a_model_of_nan_is_reported(settings):
    one = task("gpt")
    broken = one._replace(params=one.params | {"head_bias": one.params["head_bias"].at[5].set(jnp.nan)})
    found = run(broken, settings)
    assert np.isnan(found.scores).all() and np.isnan(found.log_probs).all()


class CountedTransformer(Transformer):
    """Counts how often it is traced."""

    traces = 0

    def encode(self, *args, **kwargs):
        CountedTransformer.traces += 1
        return super().encode(*args, **kwargs)


class CountedGPT(GPT):
    """Counts how often it is traced."""

    traces = 0

    def init_cache(self, *args, **kwargs):
        CountedGPT.traces += 1
        return super().init_cache(*args, **kwargs)


@pytest.mark.parametrize("family, module", [("transformer", CountedTransformer), ("gpt", CountedGPT)])
def test_one_compilation_whatever_the_content(family, module):
    """B55: neither the texts nor the number of tokens until they end matter; equal settings are one key."""
    one, lengths = task(family), set()
    model = Model(module, one.model.config)
    for shift in range(4):
        prompts = prompts_of(one, side="left" if shift % 2 else "right")
        if one.source is None:
            prompts = replace(prompts, tokens=(prompts.tokens + shift) % V, requests=jnp.arange(B, dtype=jnp.int32))
        else:
            prompts = replace(prompts, source_tokens=(prompts.source_tokens + shift) % V)
        found = generate(one.params, prompts, model=model, settings=replace(GREEDY))
        lengths.add(tuple(np.asarray(found.lengths[:, 0])))
    assert len(lengths) > 1
    assert module.traces == 1


@pytest.mark.parametrize("family, prompt, longest", [("transformer", 1, 11), ("gpt", 4, 8)])
def test_more_tokens_than_the_model_accepts_are_refused(family, prompt, longest):
    """B17: before any work."""
    one = task(family)
    message = f"prompts of {prompt} tokens and max_new_tokens {longest + 1} need 12 positions, the model accepts 11"
    for settings in (GREEDY, BEAM, SAMPLED):
        with pytest.raises(ValueError, match=message):
            run(one, replace(settings, max_new_tokens=longest + 1))
    with pytest.raises(ValueError, match=message):
        begin(one.params, prompts_of(one), model=one.model, settings=replace(SAMPLED, max_new_tokens=longest + 1))


@pytest.mark.parametrize("family, longest", [("transformer", 11), ("gpt", 8)])
def test_the_longest_output_that_the_model_accepts(family, longest):
    """Its last column is decoded from the full cache, which is not yet an overflow."""
    one = task(family)
    found = run(one, replace(GREEDY, max_new_tokens=longest))
    assert found.tokens.shape == (B, 1, longest) and np.isfinite(found.scores).all()
    assert (found.lengths == longest).any()
    np.testing.assert_array_equal(found.tokens[:, 0, :T], run(one, GREEDY).tokens[:, 0])


def test_tokens_outside_the_vocabulary_are_refused():
    """B17: of constraints and ends."""
    one = task("gpt")
    for change in ({"constraints": Constraints(banned=(V,))}, {"eos_ids": (EOS, V)}):
        with pytest.raises(ValueError, match="vocabulary"):
            run(one, replace(GREEDY, **change))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        SampleSettings(0, (EOS,), PAD)


def beam_program(family, new_tokens):
    """A model with large caches, the shapes of its prompts, and a search with four beams."""
    config = replace(task(family).model.config, max_length=new_tokens + P, d_k=32, d_v=32)
    model = build(config)
    prompts = jax.eval_shape(lambda: prompts_of(task(family)))
    settings = BeamSettings(4, new_tokens, 1.0, False, (EOS,), PAD)
    return model, prompts, settings


def equations(program):
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("family", BOTH)
def test_no_step_copies_the_cache(family):
    """Nothing in the program gathers rows of keys or values: branches share the columns of their past."""
    model, prompts, settings = beam_program(family, 64)
    search = functools.partial(generate, model=model, settings=settings)
    program = jax.make_jaxpr(search)(model.shapes, prompts)
    sizes = {"gather": [], "dynamic_update_slice": []}
    for equation in equations(program.jaxpr):
        if equation.primitive.name in sizes:
            sizes[equation.primitive.name].append(equation.invars[0].aval.shape)
    caches = {shape for shape in sizes["dynamic_update_slice"] if len(shape) == 4}  # what the layers write
    assert {shape[0] for shape in caches} == {B} and len(caches) > 2  # a row a text, whatever the number of beams
    assert not caches & set(sizes["gather"])


@pytest.mark.parametrize("family", BOTH)
def test_memory_grows_with_the_tokens_and_not_with_their_square(family):
    """What the search needs beside its arguments, for 64 and 128 tokens of four beams."""
    needed = []
    for new_tokens in (64, 128):
        model, prompts, settings = beam_program(family, new_tokens)
        compiled = jax.jit(functools.partial(generate, model=model, settings=settings)).lower(model.shapes, prompts)
        needed.append(compiled.compile().memory_analysis().temp_size_in_bytes)
        columns, config = 4 * new_tokens + P - 1, model.config
        one_layer = B * columns * config.num_heads * (config.d_k + config.d_v) * 4
        layers = config.num_layers if family == "gpt" else config.num_decoder_layers
        assert needed[-1] < 5 * layers * one_layer
    assert needed[1] < 2.2 * needed[0]


FIXTURES = Path(__file__).parent.parent / "fixtures"
KEPT = json.loads((FIXTURES / "generation.json").read_text())


@functools.cache
def maker():
    """The script that made the fixtures; its weights and settings need no torch."""
    spec = importlib.util.spec_from_file_location("make_generation", FIXTURES / "make_generation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_like(theirs):
    """Our name for settings of transformers.

    Its early_stopping=True is ours: a row is done when as many hypotheses as beams have ended. Its "never" is our
    False: both stop when no live hypothesis can get better than the worst, and the bounds, though not the same, are
    both safe. Its False, the default, bounds by the present length and is our heuristic.
    """
    make = maker()
    first = theirs.get("forced_bos_token_id")
    constraints = Constraints(
        repetition_penalty=theirs.get("repetition_penalty", 1.0),
        no_repeat_ngram=theirs.get("no_repeat_ngram_size", 0),
        min_new_tokens=theirs.get("min_new_tokens", 0),
        forced_first=() if first is None else (first,),
        forced_last=theirs.get("forced_eos_token_id"),
        banned=tuple(token for (token,) in theirs.get("bad_words_ids", [])),
    )
    alpha, early = theirs.get("length_penalty", 0.0), theirs.get("early_stopping", True)
    return BeamSettings(
        beams=theirs.get("num_beams", 1),
        max_new_tokens=make.NEW_TOKENS,
        length_penalty=alpha,
        early_stopping={True: True, False: "heuristic", "never": False}[early],
        eos_ids=tuple(theirs.get("eos_token_id", [make.EOS])),
        pad_id=make.PAD,
        normalization="transformers",
        constraints=constraints,
    )


def assert_is_that_of_transformers(kind, name, seed, expected):
    make = maker()
    sizes = {"max_length": make.POSITIONS, "d_model": make.D, "d_ff": make.F, "num_heads": make.N}
    if kind == "gpt2":
        model = build(GPTConfig(make.V, **sizes, num_layers=make.L))
        prompts = Prompts(*padded(make.PROMPTS))
    else:
        layers = {"num_encoder_layers": make.L, "num_decoder_layers": make.L}
        model = build(TransformerConfig(make.V, **sizes, **layers, activation="silu", head_bias=True))
        start = jnp.full((len(make.SOURCES), 1), make.START, jnp.int32)
        prompts = Prompts(start, jnp.ones_like(start), *padded(make.SOURCES, side="right"))
    params = jax.tree.map(jnp.asarray, make.weights(kind, seed))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.shapes)
    found = generate(params, prompts, model=model, settings=settings_like(make.CASES[kind][name]))
    n = len(expected["tokens"][0])
    outputs = [
        [row[:length].tolist() for row, length in zip(*pair, strict=True)]
        for pair in zip(np.asarray(found.tokens)[:, :n], np.asarray(found.lengths)[:, :n], strict=True)
    ]
    assert outputs == expected["tokens"]
    np.testing.assert_allclose(np.asarray(found.scores)[:, :n], expected["scores"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in ("gpt2", "marian") for name in KEPT[kind]])
def test_outputs_are_those_of_transformers(kind, name):
    """B33, B35: token for token, with the same weights; prompts padded to the left, sources to the right."""
    assert set(KEPT[kind]) == set(maker().CASES[kind])
    assert_is_that_of_transformers(kind, name, maker().SEED, KEPT[kind][name])


@pytest.mark.oracles
@pytest.mark.parametrize("kind", ["gpt2", "marian"])
def test_outputs_of_other_models_are_those_of_transformers_too(kind):
    pytest.importorskip("transformers")
    found = maker().run(kind)
    assert {name: case["tokens"] for name, case in found.items()} == {
        name: case["tokens"] for name, case in KEPT[kind].items()
    }
    for seed in (1, 2):
        for name, expected in maker().run(kind, seed).items():
            assert_is_that_of_transformers(kind, name, seed, expected)


def test_a_normalization_that_nobody_knows_is_refused_when_built():
    with pytest.raises(ValueError, match="normalization is 'marian': one of .*fairseq"):
        SampleSettings(3, (EOS,), PAD, normalization="marian")
