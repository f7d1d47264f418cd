"""Generation against loops in Python that run the full forward pass for every prefix, without a cache."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.decode.beam import BeamSettings
from tfm_jax.decode.generate import generate
from tfm_jax.models import Model, build
from tfm_jax.models.transformer import Dropout, Transformer, TransformerConfig

V, B, S, T = 13, 7, 5, 6
PAD, EOS, BOS = 0, 1, 2
CONFIG = TransformerConfig(
    V,
    max_length=11,
    d_model=10,
    d_ff=17,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=2,
    d_k=3,
    tied_embeddings="none",
    head_bias=True,
    dropout=Dropout(0.0, 0.0),
)
MODEL = build(CONFIG)
# generation never drops anything (B20), so every comparison below is with a model that cannot
DROPPING = build(replace(CONFIG, dropout=Dropout(0.5, 0.5, 0.5, 0.5)))
GREEDY = BeamSettings(1, T, 1.0, True, EOS, PAD)
BEAM = BeamSettings(3, T, 0.6, False, EOS, PAD)
EARLY = BeamSettings(3, T, 1.0, True, EOS, PAD)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def params():
    """Random in every leaf, with favourites that change from place to place and from sentence to sentence."""
    return random_params(0)


def random_params(seed):
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name, values = jax.tree_util.keystr(path), rng.standard_normal(shape.shape)
        values = 1 + 0.1 * values if "scale" in name else (0.1 if "bias" in name else 0.8) * values
        # the source must matter more than it does to a model that was never trained
        return jnp.asarray(2 * values if "cross_attention'" in name else values, jnp.float32)

    params = jax.tree_util.tree_map_with_path(leaf, MODEL.shapes)
    # ending must be likely enough to happen and unlikely enough to happen late
    return params | {"head_bias": params["head_bias"].at[EOS].add(2.0)}


@pytest.fixture(scope="module")
def source():
    """Seven sentences of 1 to 5 tokens, and their segment ids."""
    rng = np.random.default_rng(1)
    lengths = np.array([5, 3, 1, 4, 2, 5, 3])
    tokens = rng.integers(3, V, (B, S)).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray(np.arange(S)[None] < lengths[:, None], jnp.int32)


def run(params, source, settings, model=DROPPING):
    first = jnp.full(len(source[0]), BOS, jnp.int32)
    return generate(params, *source, first, model=model, settings=settings)


@functools.partial(jax.jit, static_argnames="model")
def full_forward(params, source, segments, tokens, *, model=MODEL):
    return model.apply(params, source, tokens, source_segment_ids=segments)


def log_probs(params, source, outputs):
    """log p of every next token at every place of B outputs (B T, padded anyhow), in float64: B T V."""
    inputs = np.concatenate([np.full((len(outputs), 1), BOS), outputs[:, :-1]], axis=1)
    logits = np.asarray(full_forward(params, *source, jnp.asarray(inputs, jnp.int32)), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def score_of(tokens, rows, alpha):
    """(score, log p, length) of one output, given log p of the next token at each of its places."""
    length = tokens.tolist().index(EOS) + 1 if EOS in tokens else len(tokens)
    total = rows[np.arange(length), tokens[:length]].sum()
    return total / length**alpha, total, length


def test_greedy_is_the_argmax_of_full_forward_passes(params, source):
    """I07, I19."""
    outputs, ended = np.full((B, T), PAD), np.zeros(B, bool)
    for t in range(T):
        best = log_probs(params, source, outputs)[:, t].argmax(axis=-1)
        outputs[:, t] = np.where(ended, PAD, best)
        ended |= outputs[:, t] == EOS
    found = run(params, source, GREEDY)
    np.testing.assert_array_equal(found.tokens[:, 0], outputs)
    np.testing.assert_array_equal(found.ended[:, 0], ended)
    assert 0 < ended.sum() < B and len({tuple(row) for row in outputs}) > 2  # the case has something to say


def plain_beam(params, source, settings):
    """The search of `beam_search`'s docstring for one sentence: [(score, tokens, ended)], best first."""
    W, alpha = settings.beams, settings.length_penalty
    live, pool = [(0.0, [])], []

    def keep(entering):
        pool.extend(entering)
        pool.sort(key=lambda hypothesis: -hypothesis[0])
        del pool[W:]

    for length in range(1, T + 1):
        prefixes = np.full((B, T), PAD)
        for row, (_, tokens) in enumerate(live):
            prefixes[row, : length - 1] = tokens
        rows = log_probs(params, source, prefixes)[:, length - 1]
        extended = [(total + rows[i, v], [*tokens, v]) for i, (total, tokens) in enumerate(live) for v in range(V)]
        best = sorted(extended, key=lambda hypothesis: -hypothesis[0])[: 2 * W]
        keep([(total / length**alpha, tokens, True) for total, tokens in best[:W] if tokens[-1] == EOS])
        live = [(total, tokens) for total, tokens in best if tokens[-1] != EOS][:W]
        bound = live[0][0] / T**alpha  # alpha is positive here
        if len(pool) == W and (settings.early_stopping or pool[-1][0] >= bound):
            return pool
    keep([(total / T**alpha, tokens, False) for total, tokens in live])
    return pool


@pytest.mark.parametrize("settings", [BEAM, EARLY], ids=["exact", "early"])
def test_beam_search_is_that_of_full_forward_passes(params, source, settings):
    """B32: the cache follows the beams; equal to a search that recomputes everything."""
    found = run(params, source, settings)
    ends = []
    for b in range(B):
        alone = tuple(jnp.broadcast_to(x[b], (B, S)) for x in source)
        expected = plain_beam(params, alone, settings)
        padded = [tokens + [PAD] * (T - len(tokens)) for _, tokens, _ in expected]
        np.testing.assert_array_equal(found.tokens[b], padded)
        np.testing.assert_allclose(found.scores[b], [score for score, _, _ in expected], rtol=1e-4)
        np.testing.assert_array_equal(found.ended[b], [ended for _, _, ended in expected])
        ends += [ended for _, _, ended in expected]
    assert 0 < sum(ends)
    if not settings.early_stopping:
        assert (np.asarray(found.tokens[:, 0]) != np.asarray(run(params, source, GREEDY).tokens[:, 0])).any()


@pytest.mark.parametrize("settings", [GREEDY, BEAM, EARLY], ids=["greedy", "exact", "early"])
def test_scores_are_those_of_rescoring_and_nothing_follows_the_end(params, source, settings):
    """B29, I19: every hypothesis scored again by one full forward pass; only padding after eos."""
    found = jax.tree.map(np.asarray, run(params, source, settings))
    assert found.tokens.shape == (B, settings.beams, T) and found.tokens.dtype == np.int32
    for w in range(settings.beams):
        rows = log_probs(params, source, found.tokens[:, w])
        for b in range(B):
            tokens = found.tokens[b, w]
            score, total, length = score_of(tokens, rows[b], settings.length_penalty)
            np.testing.assert_allclose(found.scores[b, w], score, rtol=1e-4)
            np.testing.assert_allclose(found.log_probs[b, w], total, rtol=1e-4)
            assert found.lengths[b, w] == length and found.ended[b, w] == (EOS in tokens)
            assert (tokens[length:] == PAD).all()
    assert (np.diff(found.scores, axis=1) <= 0).all()


def assert_same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_a_sentence_is_decoded_the_same_in_any_batch(params, source, settings):
    """B32, I02: batches of 1, 2 and 7 in any order."""
    whole = run(params, source, settings)
    for order in ([3, 0, 6, 1, 5, 2, 4], [2, 5], [4, 0], [6], [2]):
        rows = np.array(order)
        found = run(params, tuple(x[rows] for x in source), settings)
        assert_same(found, jax.tree.map(lambda x, rows=rows: x[rows], whole))


def test_padding_of_the_source_does_not_matter(params, source):
    """I03: what stands in it, and how much of it there is."""
    whole, (tokens, segments) = run(params, source, BEAM), source
    other = jnp.where(segments > 0, tokens, (tokens + 5) % V)
    assert_same(run(params, (other, segments), BEAM), whole)
    wider = (jnp.pad(other, ((0, 0), (0, 3)), constant_values=4), jnp.pad(segments, ((0, 0), (0, 3))))
    assert_same(run(params, wider, BEAM), whole)


class Counted(Transformer):
    """Counts how often its encoder is traced."""

    traces = 0

    def encode(self, *args, **kwargs):
        Counted.traces += 1
        return super().encode(*args, **kwargs)


def test_one_compilation_whatever_the_content(params, source):
    """B55: neither the sentences nor the number of tokens until they end matter; equal settings are one key."""
    model, lengths = Model(Counted, CONFIG), set()
    for shift in range(4):
        tokens, segments = source
        found = run(params, ((tokens + shift) % V, segments), replace(GREEDY), model)
        lengths.add(tuple(np.asarray(found.lengths[:, 0])))
    assert len(lengths) > 1
    assert Counted.traces == 1


def test_more_tokens_than_the_model_accepts_are_refused(params, source):
    """B17."""
    with pytest.raises(ValueError, match="max_new_tokens is 12, the model accepts 11"):
        run(params, source, replace(GREEDY, max_new_tokens=12))


def test_the_longest_output_that_the_model_accepts(params, source):
    """Its last column is decoded from the full cache, which is not yet an overflow."""
    found = run(params, source, replace(GREEDY, max_new_tokens=11))
    assert found.tokens.shape == (B, 1, 11) and np.isfinite(found.scores).all()
    assert (found.lengths == 11).any()
    np.testing.assert_array_equal(found.tokens[:, 0, :T], run(params, source, GREEDY).tokens[:, 0])
