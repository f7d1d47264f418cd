"""Likelihoods against NumPy, and the scores that generation gives against those of a full forward pass (B29)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decode.test_text import CONFIG, KNOWN, LINES, apply, is_blank, language_model
from tfm_jax.config import Decode
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.sampling import Sampling
from tfm_jax.decode.score import Score, log_likelihood, perplexity, score_targets
from tfm_jax.decode.text import complete, translate
from tfm_jax.models import build

V, T = CONFIG.vocab_size, 13


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def loud(model, seed=0):
    """Random parameters whose outputs differ from text to text."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.0, 0.8, x.shape), jnp.float32), model.shapes)


@pytest.fixture(scope="module")
def pair():
    """An encoder-decoder with a bias in its output layer."""
    model = build(CONFIG)
    return model, loud(model), Tokenizer.train(LINES, kind="bpe", vocab_size=V)


@pytest.fixture(scope="module")
def alone():
    """A decoder-only model that knows nothing."""
    known, _, tokenizer = language_model(260)
    model = build(replace(known.config, head_bias=True, max_length=T))
    return model, loud(model), tokenizer


def target_log_probs(logits, targets):
    """log p of each target in float64: V last in logits."""
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logits, np.asarray(targets)[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("family", ["pair", "alone"])
def test_log_likelihood_is_that_of_numpy(family, request):
    """With fractional weights; what stands without a weight, an impossible target too, counts for nothing."""
    model, params, _ = request.getfixturevalue(family)
    rng = np.random.default_rng(1)
    shape, lengths = (3, 7), np.array([[7], [2], [5]])
    segments = jnp.asarray(np.arange(7)[None] < lengths, jnp.int32)
    batch = {name: jnp.asarray(rng.integers(4, V, shape), jnp.int32) for name in ("tokens", "targets")}
    weights = np.where(segments > 0, rng.uniform(0.0, 2.0, shape), 0.0).astype(np.float32)
    sources = {}
    if family == "pair":
        sources = {"source_tokens": batch["targets"][:, ::-1], "source_segment_ids": segments[:, ::-1]}
    logits = apply(
        model,
        params,
        *[sources[name] for name in sources if name == "source_tokens"],
        batch["tokens"],
        segment_ids=segments,
        **{name: value for name, value in sources.items() if name != "source_tokens"},
    )
    expected = (target_log_probs(logits, batch["targets"]) * weights).sum(axis=1)
    batch |= sources | {"segment_ids": segments, "weights": jnp.asarray(weights)}
    sums, counts = log_likelihood(model, params, batch)
    assert sums.dtype == counts.dtype == jnp.float32
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(counts, weights.sum(axis=1), rtol=1e-6)
    batch["targets"] = jnp.where(batch["weights"] > 0, batch["targets"], -1)
    np.testing.assert_array_equal(log_likelihood(model, params, batch)[0], sums)
    for outside in (-1, V):
        batch["targets"] = batch["targets"].at[0, 0].set(outside)
        assert np.isnan(log_likelihood(model, params, batch)[0]).tolist() == [True, False, False]


def rescored(model, params, tokenizer, outputs, *, source=None, begun=()):
    """log p and count of the ids of each output after those it began with, each row by the full forward pass."""
    length = 48
    rows = {name: np.zeros((len(outputs), length), np.int32) for name in ("tokens", "targets", "segment_ids")}
    weights = np.zeros((len(outputs), length), np.float32)
    for row, output in enumerate(outputs):
        ids = [*begun, *output.ids[len(begun) :]] if source is not None else [*begun, *output.ids]
        rows["tokens"][row, : len(ids)] = [tokenizer.bos_id, *ids[:-1]]
        rows["targets"][row, : len(ids)] = ids
        rows["segment_ids"][row, : len(ids)] = 1
        weights[row, len(begun) : len(ids)] = 1.0
    if source is not None:
        ids = [*tokenizer.encode([source])[0], tokenizer.eos_id]
        rows = {name: array[:, : model.config.max_length] for name, array in rows.items()}
        weights = weights[:, : model.config.max_length]
        padded = np.pad(np.array(ids, np.int32), (0, 12 - len(ids)))
        rows["source_tokens"] = np.repeat(padded[None], len(outputs), axis=0)
        rows["source_segment_ids"] = (rows["source_tokens"] > 0).astype(np.int32)
    batch = jax.tree.map(jnp.asarray, rows | {"weights": weights})
    return jax.device_get(log_likelihood(model, params, batch))


@pytest.mark.parametrize("begun", ["", "zx"])
def test_the_scores_of_translate_are_those_of_rescoring(pair, begun):
    """B29: log p over length ** alpha, with the end, without the prefix; ended and cut hypotheses alike."""
    model, params, tokenizer = pair
    lines = [line for line in LINES if not is_blank(line)]
    decode = Decode(beams=3, nbest=3, length_penalty=0.7, max_new_tokens=9)
    found = translate(*pair, lines, decode=decode, prefixes=[begun] * len(lines))
    ids = tokenizer.encode([begun])[0]
    for line, outputs in zip(lines, found, strict=True):
        sums, counts = rescored(model, params, tokenizer, outputs, source=line, begun=ids)
        scores = [output.score for output in outputs]
        np.testing.assert_allclose(scores, sums / counts**0.7, rtol=1e-4, atol=1e-4)
    assert len({output.text for outputs in found for output in outputs}) > 5


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.3, top_k=50, seed=1)], ids=["beams", "drawn"])
def test_the_scores_of_complete_are_those_of_rescoring(sampling):
    """B29: of drawn tokens too log p is the model's, before temperature and filters."""
    model, params, tokenizer = language_model(260)
    decode = Decode(beams=3, nbest=3, length_penalty=0.7, max_new_tokens=37)
    for prompt in ("the", "été"):
        (outputs,) = complete(model, params, tokenizer, [prompt], decode=decode, sampling=sampling)
        sums, counts = rescored(model, params, tokenizer, outputs, begun=tokenizer.encode([prompt])[0])
        scores = [output.score for output in outputs]
        np.testing.assert_allclose(scores, sums / counts**0.7, rtol=1e-4, atol=1e-4)


def test_targets_are_scored_in_order_whatever_the_batch(pair):
    """By NumPy, one pair at a time; a blank side is an end alone."""
    model, params, tokenizer = pair
    sources = ["abc", "", "hello", "a longer line", "x"]
    targets = ["b", "xyz", "", "é", "another line"]
    found = score_targets(*pair, sources, targets)
    for source, target, score in zip(sources, targets, found, strict=True):
        read, ids = ([*x, tokenizer.eos_id] for x in tokenizer.encode([source, target]))
        rows = [np.pad(np.array(x, np.int32), (0, 19 - len(x)))[None] for x in (read, [tokenizer.bos_id, *ids[:-1]])]
        segments = jnp.asarray(np.arange(19)[None] < len(read), jnp.int32)
        logits = apply(model, params, *map(jnp.asarray, rows), source_segment_ids=segments)[0, : len(ids)]
        expected = target_log_probs(logits, ids).sum()
        np.testing.assert_allclose(score.log_prob, expected, rtol=1e-5)
        assert score.tokens == len(ids)
    small = score_targets(*pair, sources[::-1], targets[::-1], tokens_per_batch=16)[::-1]
    np.testing.assert_allclose([s.log_prob for s in small], [s.log_prob for s in found], rtol=1e-5)
    assert isinstance(found[0], Score) and score_targets(*pair, [], []) == []


def test_what_cannot_be_scored_is_refused(pair, alone):
    with pytest.raises(ValueError, match="2 sources, 1 targets"):
        score_targets(*pair, ["a", "b"], ["a"])
    with pytest.raises(ValueError, match="targets 1: the text has 20 tokens with its end, the model accepts 19"):
        score_targets(*pair, ["a", "b"], ["a" * 17, "a" * 18])
    with pytest.raises(ValueError, match="sources 0: the text has 20 tokens"):
        score_targets(*pair, ["a" * 18], ["a"])
    with pytest.raises(ValueError, match="'gpt' model does not translate: it has no encoder"):
        score_targets(*alone, ["a"], ["a"])
    with pytest.raises(ValueError, match="'transformer' model"):
        perplexity(*pair, ["a"])
    with pytest.raises(ValueError, match="no texts"):
        perplexity(*alone, [])
    with pytest.raises(ValueError, match="words is 0"):
        perplexity(*alone, ["a"], words=0)
    with pytest.raises(ValueError, match=f"texts 1: the text has 14 tokens with its end, the model accepts {T}.*7"):
        perplexity(*alone, ["a" * 11, "a" * 12])
    for stride in (0, T + 1):
        with pytest.raises(ValueError, match=f"stride is {stride}: from 1 to {T}"):
            perplexity(*alone, ["a"], stride=stride)


def nats(model, params, tokenizer, text, start):
    """-log p of each target of a text in the window that begins at `start`, by NumPy."""
    ids = [*tokenizer.encode([text])[0], tokenizer.eos_id]
    tokens = [tokenizer.bos_id, *ids[:-1]][start : start + T]
    logits = apply(model, params, jnp.asarray(np.pad(np.array(tokens, np.int32), (0, T - len(tokens)))[None]))[0]
    return -target_log_probs(logits[: len(tokens)], ids[start : start + T])


def test_perplexity_is_that_of_numpy(alone):
    texts = ["abc", "", "été", "a" * 11, "the cat"]
    every = np.concatenate([nats(*alone, text, 0) for text in texts])
    found = perplexity(*alone, texts, words=7)
    assert found.tokens == len(every) == sum(len(text.encode()) + 2 for text in texts) - 1
    np.testing.assert_allclose(found.nats_per_token, every.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.per_token, np.exp(every.mean()), rtol=1e-4)
    np.testing.assert_allclose(found.per_word, np.exp(every.sum() / 7), rtol=1e-3)
    assert perplexity(*alone, texts, tokens_per_batch=8).per_word is None
    np.testing.assert_allclose(perplexity(*alone, texts, tokens_per_batch=8)[:3], found[:3], rtol=1e-4)


@pytest.mark.parametrize("stride", [1, 5, T])
@pytest.mark.parametrize("bytes_", [3, T - 2, T - 1, 2 * T + 3])
def test_a_stride_counts_each_token_once_with_all_the_context_there_is(alone, stride, bytes_):
    """Windows of 13 tokens by NumPy: targets that a window before had are skipped."""
    text = ("the cat sat on the mat. " * 3)[:bytes_]
    length, expected, seen, start = bytes_ + 2, [], 0, 0
    while seen < length:
        window = nats(*alone, text, start)
        expected += [*window[seen - start :]]
        seen, start = start + len(window), start + stride
    found = perplexity(*alone, [text], stride=stride)
    assert found.tokens == len(expected) == length
    np.testing.assert_allclose(found.nats_per_token, np.mean(expected), rtol=1e-5)


def test_perplexity_of_what_is_known_and_of_what_is_not(alone):
    """Texts learned by heart are almost certain; a model of zeros finds all entries equally likely."""
    assert perplexity(*language_model(260), KNOWN).per_token < 1.05
    assert perplexity(*language_model(260), ["zebra"]).per_token > 10
    model, params, tokenizer = alone
    zeros = jax.tree.map(jnp.zeros_like, params)
    np.testing.assert_allclose(perplexity(model, zeros, tokenizer, ["abc"]).per_token, V, rtol=1e-5)
    broken = jax.tree.map(lambda x: x * jnp.float32("nan"), params)
    with pytest.raises(FloatingPointError, match="not finite"):
        perplexity(model, broken, tokenizer, ["abc"])
