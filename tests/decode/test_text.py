"""Strings in, strings out, in order, and no line's or prompt's result depends on the others (B32, B42)."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfm_jax.config import Decode, Mesh, Optimizer
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode import text
from tfm_jax.decode.beam import Hypotheses
from tfm_jax.decode.sampling import Sampling
from tfm_jax.decode.text import BLANK, Output, complete, pieces, stream, translate
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import Dropout, TransformerConfig
from tfm_jax.sharding import make_mesh
from tfm_jax.train.objectives import LanguageModel
from tfm_jax.train.step import init_state, train_step

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
DECODE = Decode(beams=3, nbest=3, length_penalty=1.0, max_new_tokens=13, tokens_per_batch=9_999)


END = 5.0  # added to the logit of the end
# what the language models learn by heart; characters of two to four bytes
KNOWN = ["the cat sat on the mat.", "été à 日本 🎉 fin"]
WRITE = Decode(beams=3, max_new_tokens=37, tokens_per_batch=9_999)


@functools.cache
def language_model(vocab_size):
    """A tiny decoder-only model that has learned KNOWN; of 260 entries each is a byte, of 300 most are words."""
    tokenizer = Tokenizer.train(3 * KNOWN, kind="bpe", vocab_size=vocab_size)
    sizes = {"max_length": 67, "d_model": 24, "d_ff": 40, "num_heads": 2, "num_layers": 1}
    model = build(GPTConfig(tokenizer.vocab_size, **sizes, dropout=Dropout(0.0, 0.0)))
    ids = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode(KNOWN)]
    length = max(map(len, ids))
    targets, segment_ids = text.padded(ids, length, tokenizer.pad_id)
    tokens, _ = text.padded([[tokenizer.bos_id, *row[:-1]] for row in ids], length, tokenizer.pad_id)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "weights": segment_ids.astype("float32")}
    optimizer = Optimizer(schedule="constant", learning_rate=1e-2, warmup_steps=5)
    state = init_state(jax.random.key(0), model=model, optimizer=optimizer, mesh=make_mesh(Mesh()))
    batch = jax.tree.map(jnp.asarray, batch)
    for _ in range(120):
        state, _ = train_step(state, batch, optimizer=optimizer, objective=LanguageModel(model))
    return model, state.params, tokenizer


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, *tokens, **inputs):
    return model.apply(params, *tokens, **inputs)


def counted(monkeypatch):
    """From here on, (rows, source length, max_new_tokens, different lines) of every call of `generate`."""
    calls, generate = [], text.generate

    def search(params, prompts, *, model, settings):
        tokens = prompts.source_tokens
        calls.append((*tokens.shape, settings.max_new_tokens, len(np.unique(tokens, axis=0))))
        return generate(params, prompts, model=model, settings=settings)

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


def all_ended(params, prompts, *, model, settings):
    """Stands in for `generate`: every hypothesis is the end alone."""
    shape = (prompts.tokens.shape[0], settings.beams)
    ids = np.full((*shape, settings.max_new_tokens), settings.eos_ids[0], np.int32)
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
    decode = replace(DECODE, beams=beams, nbest=beams)
    for line, hypotheses in zip(LINES, translate(*tiny, LINES, decode=decode), strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert is_blank(line) or len(hypotheses) == beams
        assert scores == sorted(scores, reverse=True)
        assert len({hypothesis.ids for hypothesis in hypotheses}) == len(hypotheses)


def test_one_beam_is_the_likeliest_token_again_and_again(tiny):
    """Second route: the whole prefix through the model at every step, one line at a time, without a cache."""
    model, params, tokenizer = tiny
    lines = ["abc", "xyz", "hel", "ooo"]
    found = translate(*tiny, lines, decode=replace(DECODE, beams=1, nbest=1))
    for line, (hypothesis,) in zip(lines, found, strict=True):
        source = jnp.array([[*tokenizer.encode([line])[0], tokenizer.eos_id]], jnp.int32)
        ids, log_probs = [], []
        while len(ids) < DECODE.max_new_tokens and tokenizer.eos_id not in ids:
            prefix = np.zeros((1, DECODE.max_new_tokens), np.int32)
            prefix[0, : len(ids) + 1] = [tokenizer.bos_id, *ids]
            logits = apply(model, params, source, jnp.asarray(prefix))[0, len(ids)]
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
    settings = text.search_settings

    def short(tokenizer, decode, *, length):
        whole = settings(tokenizer, decode, length=length)
        return whole if length is None else replace(whole, max_new_tokens=6)

    monkeypatch.setattr(text, "search_settings", short)
    done = []
    assert_same(translate(*tiny, LINES, decode=DECODE, progress=done.append), whole)
    again = [row for row in whole if not all(t.ended and len(t.ids) <= 6 for t in row)]
    assert 0 < len(again) < len(SHORT) + len(LONGER)
    tried = {limit: sum(lines for _, _, L, lines in searches if L == limit) for limit in (6, DECODE.max_new_tokens)}
    assert tried == {6: len(SHORT) + len(LONGER), DECODE.max_new_tokens: len(again)}
    assert done == sorted(done) and done[-1] == len(LINES)


def test_the_first_try_has_less_room_only_where_that_is_exact(tiny, monkeypatch):
    """Without early stopping of beams the limit itself decides when a search is done; no end before min_new_tokens."""
    monkeypatch.setattr(text, "generate", all_ended)
    long, params, tokenizer = build(replace(CONFIG, max_length=99)), *tiny[1:]
    greedy = {"beams": 1, "nbest": 1, "early_stopping": False}
    for changes, expected in [
        ({"early_stopping": True}, 2 * 8 + 8),
        ({"min_new_tokens": 7}, 2 * 8 + 8 + 7),
        ({"forced_ids": (5, 6)}, 2 * 8 + 8 + 2),
        ({"early_stopping": False}, 99),
        ({"early_stopping": "heuristic"}, 99),
        (greedy, 2 * 8 + 8),
    ]:
        with monkeypatch.context() as patch:
            shapes = counted(patch)
            translate(long, params, tokenizer, ["abc"], decode=replace(DECODE, max_new_tokens=99, **changes))
        assert {limit for _, _, limit, _ in shapes} == {expected}


def test_progress_counts_every_line(tiny, monkeypatch):
    monkeypatch.setattr(text, "generate", all_ended)
    done = []
    translate(*tiny, LINES, decode=replace(DECODE, tokens_per_batch=50), progress=done.append)
    assert done == sorted(done) and done[-1] == len(LINES) and len(done) > 5


def test_nothing_in_nothing_out(tiny):
    assert translate(*tiny, [], decode=DECODE) == []
    assert translate(*tiny, ["", " "], decode=DECODE) == [[BLANK], [BLANK]]
    assert BLANK == Output("", 0.0, (), True)


def test_a_line_that_is_too_long_is_refused_by_its_number_before_any_work(tiny, searches):
    """B42: 17 bytes and start and end are all that the model takes."""
    lines = ["abc", "a" * 17, "", "b" * 18, "c" * 99]
    with pytest.raises(ValueError, match=r"my\.file:4: the line has 20 tokens with its end, the model accepts 19"):
        translate(*tiny, lines, decode=DECODE, where=lambda i: f"my.file:{i + 1}")
    assert not searches


def test_the_longest_line_that_the_model_takes_is_translated(tiny):
    """Padding to a common length must not exceed what the model accepts."""
    (hypotheses,) = translate(*tiny, ["a" * 17], decode=replace(DECODE, beams=1, nbest=1))
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


PREFIXES = ["c", "", "a longer", "x", "hell", "", "y", "é", "", "bb", "", "c", "", "ab"]


@pytest.fixture(scope="module")
def continued(tiny):
    """Translations that begin with a given text, of 0 to 8 tokens, greedily."""
    return translate(*tiny, LINES, decode=replace(DECODE, beams=1, nbest=1, max_new_tokens=7), prefixes=PREFIXES)


def test_translations_begin_with_their_prefixes_and_are_scored_without(tiny, continued):
    """Second route: the likeliest token after start and prefix, again and again, without a cache."""
    model, params, tokenizer = tiny
    assert len(PREFIXES) == len(LINES)
    for line, prefix, (output,) in zip(LINES, PREFIXES, continued, strict=True):
        if is_blank(line):
            assert output == BLANK
            continue
        begun = tokenizer.encode([prefix])[0]
        assert output.text.startswith(prefix) and output.ids[: len(begun)] == tuple(begun)
        assert output.text == tokenizer.decode([list(output.ids)])[0]
        read = np.zeros((1, 17), np.int32)
        read[0, : len(output.ids)] = [tokenizer.bos_id, *output.ids[:-1]]
        source = jnp.array([[*tokenizer.encode([line])[0], tokenizer.eos_id]], jnp.int32)
        source = jnp.pad(source, ((0, 0), (0, 12 - source.shape[1])))
        segments = (source > 0).astype(jnp.int32)
        log_p = np.asarray(
            jax.nn.log_softmax(apply(model, params, source, jnp.asarray(read), source_segment_ids=segments)[0])
        )
        new = range(len(begun), len(output.ids))
        assert [int(log_p[at].argmax()) for at in new] == [output.ids[at] for at in new]
        expected = np.mean([log_p[at, output.ids[at]] for at in new])
        np.testing.assert_allclose(output.score, expected, rtol=1e-4)


def test_prefixes_do_not_depend_on_the_batch(tiny, continued):
    """B32: each line alone, in another order."""
    decode = replace(DECODE, beams=1, nbest=1, max_new_tokens=7, tokens_per_batch=8)
    rows = [i for i in reversed(range(len(LINES))) if LINES[i] in SHORT]
    found = translate(*tiny, [LINES[i] for i in rows], decode=decode, prefixes=[PREFIXES[i] for i in rows])
    assert_same(found, [continued[i] for i in rows])


def test_empty_prefixes_are_none(tiny, whole, searches):
    assert_same(translate(*tiny, LINES, decode=DECODE, prefixes=[""] * len(LINES)), whole)


def test_a_prefix_that_leaves_no_room_is_refused_before_any_work(tiny, searches):
    """The start, 7 tokens and 13 new ones, the last of which is never read, are one more than 19."""
    with pytest.raises(ValueError, match=r"my\.file:4: 8 tokens.*max_new_tokens 13 are 1 more than"):
        translate(*tiny, ["abc", "abc"], decode=DECODE, prefixes=["a" * 5, "a" * 6], where=lambda i: f"my.file:{i + 3}")
    with pytest.raises(ValueError, match="2 prefixes for 3 lines"):
        translate(*tiny, ["abc"] * 3, decode=DECODE, prefixes=["a", "b"])
    assert not searches


def test_the_best_n_are_the_first_n(tiny, whole):
    found = translate(*tiny, LINES, decode=replace(DECODE, nbest=2))
    assert_same(found, [hypotheses[:2] for hypotheses in whole])


def test_constraints_are_kept(tiny):
    """B35."""
    decode = replace(DECODE, beams=2, nbest=2, min_new_tokens=5, no_repeat_ngram=1)
    for hypotheses in translate(*tiny, SHORT, decode=decode):
        for hypothesis in hypotheses:
            assert len(hypothesis.ids) > 5 and len(set(hypothesis.ids)) == len(hypothesis.ids)


def test_forced_tokens_cost_nothing_and_count_for_the_length(tiny):
    """Second route: the same tokens as a prefix, which the model reads as it does what it has written itself."""
    ids = tuple(tiny[2].encode(["ca"])[0])
    decode = replace(DECODE, max_new_tokens=9, length_penalty=0.0)
    more = replace(decode, max_new_tokens=9 + len(ids), forced_ids=ids)
    forced = translate(*tiny, SHORT, decode=more)
    begun = translate(*tiny, SHORT, decode=decode, prefixes=["ca"] * len(SHORT))
    assert_same(forced, begun)
    assert all(output.ids[: len(ids)] == ids and output.text.startswith("ca") for row in forced for output in row)
    log_p = {(i, output.ids): output.score for i, row in enumerate(forced) for output in row}
    found = translate(*tiny, SHORT, decode=replace(more, length_penalty=1.0))
    both = [(i, o) for i, row in enumerate(found) for o in row if (i, o.ids) in log_p]
    assert len(both) > len(SHORT)
    np.testing.assert_allclose([o.score * len(o.ids) for _, o in both], [log_p[i, o.ids] for i, o in both], rtol=1e-4)


def test_forced_tokens_come_before_a_prefix(tiny):
    """B32: what has a prefix has read them, what has none writes them, in whatever batch."""
    decode, prefixes = replace(DECODE, max_new_tokens=9), ["", "a", "", "bb", "a", "", "x", ""]
    forced = replace(decode, forced_ids=tuple(tiny[2].encode(["c"])[0]))
    found = translate(*tiny, SHORT, decode=forced, prefixes=prefixes)
    begun = [i for i, prefix in enumerate(prefixes) if prefix]
    longer = translate(*tiny, [SHORT[i] for i in begun], decode=decode, prefixes=[f"c {prefixes[i]}" for i in begun])
    assert_same([found[i] for i in begun], longer)
    alone = translate(*tiny, SHORT, decode=forced)
    assert_same([row for i, row in enumerate(found) if i not in begun], [alone[i] for i in (0, 2, 5, 7)])


def test_suppressed_tokens_are_never_written(tiny, whole):
    """And nothing else changes: what was best without them stays so."""
    frequent = np.bincount([i for row in whole for output in row for i in output.ids]).argsort()[::-1].tolist()
    banned = tuple([i for i in frequent if i != tiny[2].eos_id][:3])
    found = translate(*tiny, SHORT, decode=replace(DECODE, suppressed_ids=banned))
    assert all(set(banned).isdisjoint(output.ids) for row in found for output in row)
    assert any(not set(banned).isdisjoint(output.ids) for row in whole for output in row)


def test_an_output_ends_at_the_first_of_its_ends(tiny):
    """Greedily: the output without that end, cut after it. Its text is shown."""
    decode = replace(DECODE, beams=1, nbest=1)
    free = [row[0].ids for row in translate(*tiny, SHORT, decode=decode)]
    end = max(set(sum(free, ())) - {tiny[2].eos_id}, key=sum(free, ()).count)
    found = translate(*tiny, SHORT, decode=replace(decode, eos_ids=(tiny[2].eos_id, end)))
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in free]
    assert [row[0].ids for row in found] == expected != free
    assert all(row[0].ended for row, ids in zip(found, expected, strict=True) if end in ids)
    assert all(row[0].text == tiny[2].decode([list(row[0].ids)])[0] for row in found)


def test_a_language_model_keeps_them_too():
    model, params, tokenizer = language_model(260)
    (x,) = tokenizer.encode(["x"])
    decode = replace(
        WRITE, max_new_tokens=11, forced_ids=(x[-1],), suppressed_ids=(x[0],), eos_ids=(tokenizer.eos_id, 7)
    )
    ((output,),) = complete(model, params, tokenizer, ["the"], decode=decode)
    assert output.ids[0] == x[-1] and x[0] not in output.ids and output.text.startswith("x")
    assert output.ended == (output.ids[-1] in decode.eos_ids)
    assert "".join(stream(model, params, tokenizer, "the", decode=decode)) == output.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nbest": 0}, "decode.nbest is 0"),
        ({"beams": 2, "nbest": 3}, "decode.nbest is 3, more than decode.beams, 2"),
        ({"min_new_tokens": -1}, "decode.min_new_tokens is -1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "decode.min_new_tokens is 4, more than decode.max_new_tokens, 3"),
        ({"no_repeat_ngram": -2}, "decode.no_repeat_ngram is -2"),
        *(({"repetition_penalty": x}, f"decode.repetition_penalty is {x}") for x in (0.0, -1.0, float("nan"))),
    ],
)
def test_settings_without_meaning_are_refused(values, said):
    """I34."""
    with pytest.raises(ValueError, match=said):
        Decode(**values)


def test_each_kind_of_model_names_what_it_does(tiny):
    with pytest.raises(ValueError, match="'gpt' model does not translate: it has no encoder.*generate"):
        translate(*language_model(260), ["abc"], decode=DECODE)
    for use in (complete, stream):
        with pytest.raises(ValueError, match="'transformer' model.*translate"):
            use(*tiny, ["abc"] if use is complete else "abc", decode=DECODE)


@pytest.mark.parametrize("vocab_size", [260, 300])
def test_a_language_model_continues_what_it_knows(vocab_size):
    prompts = ["the cat", "été à", ""]
    found = complete(*language_model(vocab_size), prompts, decode=WRITE)
    (known, other, begun), ended = zip(*[(outputs[0].text, outputs[0].ended) for outputs in found], strict=True)
    assert (prompts[0] + known, prompts[1] + other) == tuple(KNOWN) and begun in KNOWN
    assert all(ended) and [len(outputs) for outputs in found] == [1, 1, 1]
    assert complete(*language_model(vocab_size), [], decode=WRITE) == []


DRAWN = Sampling(temperature=1.5, seed=3)
PROMPTS = ["the", "the cat", "", "été à", "the", "q", "the cat sat on the", "the"]


@pytest.fixture(scope="module")
def drawn():
    return complete(*language_model(260), PROMPTS, decode=WRITE, sampling=DRAWN)


def test_draws_do_not_depend_on_the_batch(drawn):
    """B32: the seed and the place in the list decide."""
    done, decode = [], replace(WRITE, tokens_per_batch=16)
    found = complete(*language_model(260), PROMPTS, decode=decode, sampling=DRAWN, progress=done.append)
    assert_same(found, drawn)
    assert len({drawn[i][0].text for i in (0, 4, 7)}) == 3
    assert done == sorted(done) and done[-1] == len(PROMPTS) and len(done) > 3


def test_outputs_of_a_language_model_are_without_their_prompts(drawn):
    tokenizer = language_model(260)[2]
    for prompt, (output,) in zip(PROMPTS, drawn, strict=True):
        assert prompt + output.text == tokenizer.decode([[*tokenizer.encode([prompt])[0], *output.ids]])[0]
        assert output.ended == (output.ids[-1] == tokenizer.eos_id)


def test_beam_search_with_a_language_model():
    """One beam is greedy search, and more are n-best; the best is what greedy search gives a model so sure."""
    prompts = ["the cat", "été à"]
    greedy = complete(*language_model(260), prompts, decode=WRITE)
    assert_same(complete(*language_model(260), prompts, decode=replace(WRITE, beams=1), sampling=None), greedy)
    found = complete(*language_model(260), prompts, decode=replace(WRITE, nbest=3), sampling=None)
    assert [len(outputs) for outputs in found] == [3, 3]
    assert [prompt + outputs[0].text for prompt, outputs in zip(prompts, found, strict=True)] == KNOWN


def test_prompts_that_leave_no_room_are_refused_by_their_number_before_any_work(monkeypatch):
    """The start, 30 bytes, a space before them and 37 new tokens, the last never read, are one more than 67."""
    monkeypatch.setattr(text, "generate", lambda *_, **__: pytest.fail("the work was done"))
    monkeypatch.setattr(text, "begin", lambda *_, **__: pytest.fail("the work was done"))
    for use, prompts, number in ((complete, ["a", "a" * 29, "b" * 30], 2), (stream, "b" * 30, 0)):
        with pytest.raises(ValueError, match=f"prompts {number}: 32 tokens.*max_new_tokens 37 are 1 more"):
            use(*language_model(260), prompts, decode=WRITE)


def test_the_longest_prompt_that_there_is_room_for_is_continued():
    (outputs,) = complete(*language_model(260), ["a" * 29], decode=WRITE)
    assert outputs[0].ids


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("sampling", [text.GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_pieces_of_a_stream_are_the_whole(sampling, chunk):
    ((output,),) = complete(*language_model(260), ["été à"], decode=WRITE, sampling=sampling)
    found = [*stream(*language_model(260), "été à", decode=WRITE, sampling=sampling, chunk=chunk)]
    assert "".join(found) == output.text and all(found)
    if sampling is text.GREEDY and chunk == 1:
        assert found == [*output.text] == [*" 日本 🎉 fin"]


def test_a_stream_comes_as_it_is_written(monkeypatch):
    """Nothing is computed ahead of the piece that is asked for."""
    steps, continued = [], text.continued
    monkeypatch.setattr(text, "continued", lambda *a, **k: steps.append(1) or continued(*a, **k))
    found = stream(*language_model(260), "the cat", decode=WRITE)
    assert (next(found), next(found), len(steps)) == (" ", "s", 2)
    with pytest.raises(ValueError, match="chunk is 0"):
        stream(*language_model(260), "the cat", decode=WRITE, chunk=0)


TOKENIZERS = {
    "bytes": lambda: language_model(260)[2],
    "bpe": lambda: language_model(300)[2],
    "words": functools.cache(lambda: Tokenizer.train(3 * KNOWN, kind="word_bpe", vocab_size=90)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_never_hold_a_part_of_a_character(kind, data):
    """Any ids in any portions: joined they are the text, and each is a prefix of what its bytes will always be."""
    tokenizer = TOKENIZERS[kind]()
    (begun,) = tokenizer.encode([data.draw(st.sampled_from(["", "the cat", "日本 é", " "]))])
    (known,) = tokenizer.encode([data.draw(st.text("é日🎉 ca.\ufffd", max_size=6))])
    ids = [*known, *data.draw(st.lists(st.integers(2, tokenizer.vocab_size - 1), max_size=6))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    portions = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    found = [*pieces(tokenizer, begun, portions)]
    shown = tokenizer.decode([begun])[0]
    assert shown + "".join(found) == tokenizer.decode([begun + ids])[0]
    assert all(found)


def test_a_character_waits_for_its_bytes():
    tokenizer = language_model(260)[2]
    ids = tokenizer.encode(["é日🎉"])[0]
    assert len(ids) == 1 + 2 + 3 + 4
    assert [*pieces(tokenizer, ids[:1], ([i] for i in ids[1:]))] == ["é", "日", "🎉"]
    assert [*pieces(tokenizer, ids[:1], ([i] for i in ids[1:5]))] == ["é", "\ufffd"]  # no more bytes came


def test_parameters_that_are_no_numbers_write_nothing():
    model, params, tokenizer = language_model(260)
    params = jax.tree.map(lambda x: x * jnp.float32("nan"), params)
    with pytest.raises(FloatingPointError, match="NaN"):
        complete(model, params, tokenizer, ["the"], decode=WRITE)
    with pytest.raises(FloatingPointError, match="NaN"):
        [*stream(model, params, tokenizer, "the", decode=WRITE)]
