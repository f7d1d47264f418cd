"""Lines in, as many translations out, in order, and no line's translation depends on the others (B32, B42)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm_jax.config import Decode
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode import text
from tfm_jax.decode.beam import Hypotheses
from tfm_jax.decode.text import BLANK, Translation, translate
from tfm_jax.models import build
from tfm_jax.models.transformer import TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=260,  # the special tokens and the bytes, no merges: a line has a token a byte, one before and one after
    max_length=19,
    d_model=8,
    d_ff=12,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    positions="learned",
    tied_embeddings="none",
    head_bias=True,
)
SHORT = ["abc", "c a", "ü", "bbbbbb", "x", "hello", "ab", "zz z"]  # with start and end at most 8 tokens: one shape
LONGER = ["world 12", "ab ab ab", "longlines"]  # 9 to 12 tokens
LINES = [*SHORT[:3], "", *LONGER[:2], " \t", *SHORT[3:], "\u3000", LONGER[2]]
DECODE = Decode(beams=3, length_penalty=1.0, max_new_tokens=13, tokens_per_batch=9_999)


END = 5.0  # added to the logit of the end


@pytest.fixture(scope="module")
def tiny():
    """A loud random model: outputs differ, some end early and some not at all."""
    model = build(CONFIG)
    tokenizer = Tokenizer.train(LINES, kind="bpe", vocab_size=CONFIG.vocab_size)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            return jnp.full(leaf.shape, "scale" in name, jnp.float32)
        size = 1.8 if "embedding" in name or "head" in name else 0.7
        return jnp.asarray(rng.normal(0.0, size, leaf.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, model.shapes)
    return model, params | {"head_bias": params["head_bias"].at[tokenizer.eos_id].set(END)}, tokenizer


@pytest.fixture(scope="module")
def whole(tiny):
    """The translations with all lines in one batch a shape."""
    return translate(*tiny, LINES, decode=DECODE)


def counted(monkeypatch):
    """From here on, (rows, source length, max_new_tokens, different lines) of every call of `generate`."""
    calls, generate = [], text.generate

    def search(params, tokens, segment_ids, *inputs, model, settings):
        calls.append((*tokens.shape, settings.max_new_tokens, len(np.unique(tokens, axis=0))))
        return generate(params, tokens, segment_ids, *inputs, model=model, settings=settings)

    monkeypatch.setattr(text, "generate", search)
    return calls


@pytest.fixture
def searches(monkeypatch):
    return counted(monkeypatch)


def assert_same(left, right):
    """Texts, ids and ends are equal; scores up to float32, as other shapes add up in another order."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert [(t.text, t.ids, t.ended) for t in one] == [(t.text, t.ids, t.ended) for t in other]
        np.testing.assert_allclose([t.score for t in one], [t.score for t in other], rtol=1e-4)


def is_blank(line):
    return not line.strip()


def test_the_model_says_different_things(whole):
    """Else the tests below would show nothing: many texts, some that ended and some that did not."""
    best = [hypotheses[0] for line, hypotheses in zip(LINES, whole, strict=True) if not is_blank(line)]
    assert len({hypothesis.ids for hypothesis in best}) >= 5
    assert len({len(hypothesis.ids) for hypothesis in best}) > 2
    assert {hypothesis.ended for row in whole for hypothesis in row} == {True, False}


def test_as_many_translations_as_lines_in_order_and_blank_lines_blank(tiny, whole):
    """B42: reversed lines give reversed translations; white space of any kind is blank."""
    assert len(whole) == len(LINES)
    for line, hypotheses in zip(LINES, whole, strict=True):
        assert (hypotheses == [BLANK]) == is_blank(line)
    assert_same(translate(*tiny, LINES[::-1], decode=DECODE), whole[::-1])


@pytest.mark.parametrize("rows", [1, 7])
def test_batches_of_one_seven_and_all_lines_give_the_same(tiny, whole, searches, rows):
    """B32, B42: the budget of a batch decides nothing but its size."""
    decode = replace(DECODE, tokens_per_batch=rows * DECODE.beams * 8)
    assert_same(translate(*tiny, LINES, decode=decode), whole)
    assert sum(lines for *_, lines in searches) == len(SHORT) + len(LONGER)
    assert rows > 1 or {B for B, *_ in searches} == {1}


def all_ended(params, tokens, *inputs, model, settings):
    """Stands in for `generate`: every hypothesis is the end alone."""
    shape = (tokens.shape[0], settings.beams)
    ids = np.full((*shape, settings.max_new_tokens), settings.eos_id, np.int32)
    scores = np.zeros(shape, np.float32)
    return Hypotheses(ids, scores, scores, np.ones(shape, np.int32), np.ones(shape, bool))


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_no_batch_exceeds_its_budget(tiny, monkeypatch, rows):
    """beams x rows x padded source length, rows of nothing included; a line that alone is more goes alone."""
    monkeypatch.setattr(text, "generate", all_ended)
    decode = replace(DECODE, tokens_per_batch=rows * DECODE.beams * 8 + 1)
    with monkeypatch.context() as patch:
        shapes = counted(patch)
        translate(*tiny, LINES, decode=decode)
    assert shapes
    assert all(B == 1 or B * S * DECODE.beams <= decode.tokens_per_batch for B, S, *_ in shapes)


def test_lines_of_any_length_are_few_shapes(tiny, monkeypatch):
    """Forty lines of 1 to 17 bytes: a shape a length class, and one more for its last batch."""
    monkeypatch.setattr(text, "generate", all_ended)
    with monkeypatch.context() as patch:
        shapes = counted(patch)
        translate(*tiny, ["a" * (1 + i % 17) for i in range(40)], decode=replace(DECODE, tokens_per_batch=400))
    assert len({S for _, S, *_ in shapes}) <= 4
    assert len({(B, S) for B, S, *_ in shapes}) <= 8


@pytest.mark.parametrize("beams", [1, 2])
def test_hypotheses_are_sorted_and_distinct(tiny, beams):
    decode = replace(DECODE, beams=beams)
    for line, hypotheses in zip(LINES, translate(*tiny, LINES, decode=decode), strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert is_blank(line) or len(hypotheses) == beams
        assert scores == sorted(scores, reverse=True)
        assert len({hypothesis.ids for hypothesis in hypotheses}) == len(hypotheses)


def test_one_beam_is_the_likeliest_token_again_and_again(tiny):
    """Second route: the whole prefix through the model at every step, one line at a time, without a cache."""
    model, params, tokenizer = tiny
    lines = ["abc", "xyz", "hel", "ooo"]
    apply = jax.jit(model.apply)
    found = translate(*tiny, lines, decode=replace(DECODE, beams=1))
    for line, (hypothesis,) in zip(lines, found, strict=True):
        source = jnp.array([[*tokenizer.encode([line])[0], tokenizer.eos_id]], jnp.int32)
        ids, log_probs = [], []
        while len(ids) < DECODE.max_new_tokens and tokenizer.eos_id not in ids:
            prefix = np.zeros((1, DECODE.max_new_tokens), np.int32)
            prefix[0, : len(ids) + 1] = [tokenizer.bos_id, *ids]
            logits = apply(params, source, jnp.asarray(prefix))[0, len(ids)]
            ids.append(int(logits.argmax()))
            log_probs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
        assert hypothesis.ids == tuple(ids)
        assert hypothesis.score == pytest.approx(sum(log_probs) / len(ids), rel=1e-4)
        assert hypothesis.ended == (ids[-1] == tokenizer.eos_id)
        assert hypothesis.text == tokenizer.decode([ids])[0]


def test_outputs_without_an_end_are_flagged(tiny, whole):
    eos = tiny[2].eos_id
    for hypotheses in whole:
        for hypothesis in hypotheses:
            if hypothesis == BLANK:
                continue
            assert hypothesis.ended == (hypothesis.ids[-1] == eos)
            assert eos not in hypothesis.ids[:-1]
            assert hypothesis.ended or len(hypothesis.ids) == DECODE.max_new_tokens


def test_a_short_first_try_changes_no_result(tiny, whole, searches, monkeypatch):
    """Lines whose hypotheses all ended within it are done; the others are searched again with all the room."""
    settings = text._settings

    def short(tokenizer, decode, *, length):
        whole = settings(tokenizer, decode, length=length)
        return whole if length is None else replace(whole, max_new_tokens=6)

    monkeypatch.setattr(text, "_settings", short)
    done = []
    assert_same(translate(*tiny, LINES, decode=DECODE, progress=done.append), whole)
    again = [row for row in whole if not all(t.ended and len(t.ids) <= 6 for t in row)]
    assert 0 < len(again) < len(SHORT) + len(LONGER)
    tried = {limit: sum(lines for _, _, L, lines in searches if L == limit) for limit in (6, DECODE.max_new_tokens)}
    assert tried == {6: len(SHORT) + len(LONGER), DECODE.max_new_tokens: len(again)}
    assert done == sorted(done) and done[-1] == len(LINES)


def test_the_first_try_has_less_room_only_where_that_is_exact(tiny, monkeypatch):
    """Without early stopping the limit itself decides when a search is done."""
    monkeypatch.setattr(text, "generate", all_ended)
    for early_stopping, limits in {True: {2 * 8 + 8}, False: {99}}.items():
        with monkeypatch.context() as patch:
            shapes = counted(patch)
            decode = replace(DECODE, max_new_tokens=99, early_stopping=early_stopping)
            translate(*tiny, ["abc"], decode=decode)
        assert {limit for _, _, limit, _ in shapes} == limits


def test_progress_counts_every_line(tiny, monkeypatch):
    monkeypatch.setattr(text, "generate", all_ended)
    done = []
    translate(*tiny, LINES, decode=replace(DECODE, tokens_per_batch=50), progress=done.append)
    assert done == sorted(done) and done[-1] == len(LINES) and len(done) > 5


def test_nothing_in_nothing_out(tiny):
    assert translate(*tiny, [], decode=DECODE) == []
    assert translate(*tiny, ["", " "], decode=DECODE) == [[BLANK], [BLANK]]
    assert BLANK == Translation("", 0.0, (), True)


def test_a_line_that_is_too_long_is_refused_by_its_number_before_any_work(tiny, searches):
    """B42: 17 bytes and start and end are all that the model takes."""
    lines = ["abc", "a" * 17, "", "b" * 18, "c" * 99]
    with pytest.raises(ValueError, match=r"my\.file:4: the line has 20 tokens with its end, the model accepts 19"):
        translate(*tiny, lines, decode=DECODE, name="my.file")
    assert not searches


def test_the_longest_line_that_the_model_takes_is_translated(tiny):
    """Padding to a common length must not exceed what the model accepts."""
    (hypotheses,) = translate(*tiny, ["a" * 17], decode=replace(DECODE, beams=1))
    assert hypotheses[0].ids


def test_a_long_line_of_white_space_is_blank(tiny):
    """B42: it is never given to the model, so it cannot be too long for it."""
    assert translate(*tiny, [" " * 40], decode=DECODE) == [[BLANK]]


def test_parameters_that_are_no_numbers_are_no_translation(tiny):
    """A line has at least one hypothesis, or there is an error that says why."""
    model, params, tokenizer = tiny
    params = jax.tree.map(lambda x: x * jnp.float32("nan"), params)
    with pytest.raises((FloatingPointError, ValueError), match="(?i)nan|not finite|no number"):
        translate(model, params, tokenizer, ["abc"], decode=DECODE)
