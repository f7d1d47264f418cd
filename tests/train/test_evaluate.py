"""Measuring: losses over exactly the examples there are, and scores that mean what they are called (B43, B53)."""

import functools
import math
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.decode.test_predict import lively
from tests.hf.test_text import small
from tests.train.killed_run import MODEL
from tfm_jax.config import Corruption, Data, Decode, Mesh, Run, Train
from tfm_jax.data.batches import Batches
from tfm_jax.data.examples import Examples, encode
from tfm_jax.data.sources import Text, parallel
from tfm_jax.data.tasks import Pairs, Ragged, Special
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.sampling import Sampling
from tfm_jax.decode.text import Output, complete
from tfm_jax.models import BERTConfig, build
from tfm_jax.sharding import make_mesh
from tfm_jax.train import evaluate
from tfm_jax.train.evaluate import (
    conclude,
    conclude_labels,
    conclude_language,
    conclude_masked,
    conclude_spans,
    evaluate_loss,
    evaluate_translation,
    score_translations,
)
from tfm_jax.train.objectives import TextToText
from tfm_jax.train.run import Fitted
from tfm_jax.train.step import abstract_params

SMOOTHING = 0.1
REFERENCES = ["Hello, world.", "It's a test."]
TOKENISED = ["Hello , world .", "It 's a test ."]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model():
    return build(MODEL)


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(5))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["abc"], kind="bpe", vocab_size=MODEL.vocab_size)


# --- loss over a data set ---


@pytest.fixture(scope="module")
def examples():
    """Ten pairs of three kinds of length, in no order."""
    rng = np.random.default_rng(0)
    lengths = [(5, 7), (3, 2), (7, 5)] * 3 + [(3, 2)]
    source, target = ([rng.integers(4, 260, n, np.int32) for n in side] for side in zip(*lengths, strict=True))
    special = Special(pad=0, bos=1, eos=2, mask=None, sentinels=(), all=frozenset(range(4)), vocab_size=260)
    task = Pairs(special, Corruption())
    return Examples(task, (Ragged.of(source), Ragged.of(target)), np.full(len(lengths), special.bos, np.int32))


@pytest.fixture(scope="module")
def expected(model, params, examples):
    """Second route: every pair alone and without padding, the formula in float64."""
    apply, losses, right = jax.jit(model.apply), [], []
    for source, target in zip(*examples.texts, strict=True):
        inputs = np.array([[1, *target[:-1]]], np.int32)
        logits = np.asarray(apply(params, source[None], inputs)[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        at_target = log_probs[np.arange(len(target)), target]
        losses += list(-(1 - SMOOTHING) * at_target - SMOOTHING * log_probs.mean(axis=-1))
        right += list(logits.argmax(axis=-1) == target)
    return {"loss": np.mean(losses), "accuracy": np.mean(right)}


@pytest.mark.parametrize(
    "tokens_per_batch, num_buckets, mesh",
    [
        (7, 1, Mesh()),  # batches of one
        (21, 1, Mesh()),  # of three: the last holds one
        (28, 3, Mesh()),  # of four, in as many shapes as are worth it
        (999, 1, Mesh()),  # one of ten
        (28, 1, Mesh(data=2, fsdp=2)),  # of four on four devices: the last holds two
        (999, 1, Mesh(data=4)),  # ten on four devices
    ],
)
def test_the_loss_is_over_the_examples_whatever_the_batches(
    model, params, examples, expected, tokens_per_batch, num_buckets, mesh
):
    """B53: per target token, so that neither padding nor a last batch of few rows counts."""
    devices = make_mesh(mesh)
    batches = Batches(
        examples,
        tokens_per_batch=tokens_per_batch,
        num_buckets=num_buckets,
        seed=0,
        rows_multiple=mesh.batch_shards,
        shuffle=False,
    )
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract_params(model, devices))
    with jax.set_mesh(devices):
        found = evaluate_loss(placed, batches, objective=TextToText(model, SMOOTHING), mesh=devices)
    assert set(found) == set(expected)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)


# --- scores ---


@pytest.mark.parametrize(
    "hypotheses, references, tokenizer, bleu",
    [
        (TOKENISED, REFERENCES, "13a", 57.74),  # what goes wrong where one forgets to detokenise
        (REFERENCES, REFERENCES, "13a", 100.0),
        (TOKENISED, TOKENISED, "none", 100.0),
        (["Hello, world.", ""], REFERENCES, "13a", 36.79),  # no output is an output
    ],
)
def test_bleu_is_of_text_and_says_how_it_was_made(hypotheses, references, tokenizer, bleu):
    """B43"""
    scores = score_translations(hypotheses, references, decode=Decode(bleu_tokenizer=tokenizer))
    assert set(scores) == {"bleu", "bleu_signature", "chrf", "exact_match"}
    assert scores["bleu"] == pytest.approx(bleu, abs=0.005)
    assert f"tok:{tokenizer}|" in scores["bleu_signature"] and "case:mixed" in scores["bleu_signature"]
    assert "version:" in scores["bleu_signature"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_hypothesis_for_each_reference(count):
    """B43: sacreBLEU scores one hypothesis for two references 0.0 and says nothing."""
    with pytest.raises(ValueError, match=f"{count} hypotheses for 2 references"):
        score_translations(["Hello."] * count, REFERENCES, decode=Decode())
    with pytest.raises(ValueError, match="0 hypotheses for 0 references"):
        score_translations([], [], decode=Decode())


def test_case_counts_unless_it_is_told_not_to():
    upper = [text.upper() for text in REFERENCES]
    exact = score_translations(upper, REFERENCES, decode=Decode())
    folded = score_translations(upper, REFERENCES, decode=Decode(lowercase=True))
    assert exact["bleu"] < 50 and exact["chrf"] < 50 and exact["exact_match"] == 0.0
    assert folded["bleu"] == pytest.approx(100) and folded["chrf"] == pytest.approx(100) and folded["exact_match"] == 1
    assert "case:lc" in folded["bleu_signature"]


def test_exact_match_is_a_share_of_lines():
    references = ["a", "b", "c", "d"]
    assert score_translations(["a", "x", "c", ""], references, decode=Decode())["exact_match"] == 0.5


# --- translating and scoring ---


@pytest.fixture
def written(monkeypatch):
    """Decide what the model writes, line by line."""

    def install(*outputs):
        rows = [[Output(output, -1.0, (5, 2), True), Output("worse", -2.0, (6, 2), True)] for output in outputs]
        monkeypatch.setattr(evaluate, "translate", lambda *_, **__: rows)

    return install


def ended(directory, model, params, tokenizer):
    run = Run(MODEL, Train(steps=1), str(directory), Data(max_length=9), decode=Decode(max_new_tokens=9))
    return Fitted(run, model, params, tokenizer, summary={})


def test_the_best_hypotheses_are_scored_and_kept(model, params, tokenizer, tmp_path, written, capsys):
    """hypotheses.txt has a line for each line, alignments.png is made, and some lines are shown."""
    text = parallel(["eins", "zwei", "", "vier"], ["one", "two", "", "for"], "de", "en")
    written("one", "too", "", "for")
    scores, hypotheses = conclude(ended(tmp_path, model, params, tokenizer), text)
    assert hypotheses == ["one", "too", "", "for"] and scores["exact_match"] == 0.75
    assert (tmp_path / "hypotheses.txt").read_text(encoding="utf-8") == "one\ntoo\n\nfor\n"
    assert (tmp_path / "alignments.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("zwei", "too", "two"))


def test_a_model_that_writes_nothing_is_scored_too(model, params, tokenizer, tmp_path, written):
    text = parallel(["eins", "zwei"], ["one", "two"], "de", "en")
    written("", " ")
    scores, _ = conclude(ended(tmp_path, model, params, tokenizer), text)
    assert scores["bleu"] == 0.0
    assert not (tmp_path / "alignments.png").exists()


def test_a_line_end_that_a_model_writes_does_not_shift_the_lines(model, params, tokenizer, tmp_path, written):
    text = parallel(["eins", "zwei"], ["one", "two"], "de", "en")
    written("o\nne", "two")
    conclude(ended(tmp_path, model, params, tokenizer), text)
    lines = (tmp_path / "hypotheses.txt").read_bytes().split(b"\n")
    assert len(lines) == 3 and lines[1:] == [b"two", b""]


def test_a_text_of_more_tokens_than_the_model_takes_spoils_no_result(model, params, tokenizer, tmp_path, written):
    """What a model wrote may have more tokens when it is read again: bytes that are no character come back as three."""
    text = parallel(["eins", "zwei"], ["one", "two"], "de", "en")
    written("\ufffd" * MODEL.max_length, "two")
    scores, _ = conclude(ended(tmp_path, model, params, tokenizer), text)
    assert scores["exact_match"] == 0.5


def test_a_line_that_is_too_long_is_named_as_in_its_file(model, params, tokenizer):
    """Of a text that begins further down in its file too."""
    text = parallel(["a", "b", "c" * 99, "d"], ["a", "b", "c", "d"], "long.de", "long.en")
    decode = replace(Decode(), max_new_tokens=5)
    for part in (text, text.split(2)[1]):
        with pytest.raises(ValueError, match=r"long\.de:3: "):
            evaluate_translation(model, params, tokenizer, part, decode=decode)


def test_a_line_that_is_too_long_may_be_left_out_and_is_counted(model, params, tokenizer):
    text = parallel(["a", "c" * 99], ["a", ""], "long.de", "long.en")
    decode = replace(Decode(beams=1), max_new_tokens=5)
    scores, hypotheses = evaluate_translation(model, params, tokenizer, text, decode=decode, too_long="drop")
    assert scores["too_long_lines"] == 1 and hypotheses[1] == ""


# --- at the end of a run of each kind ---

LINES = ["the rain in may", "", "on a mat sat a cat", "a man", "ten men at sea  sat", "hot tea"]
WORDS = 4 + 0 + 6 + 2 + 5 + 2 + len(LINES)
LABELS = ("low", "mid", "high")
LABELLED = {"max_length": 29, "format": "tsv", "features": ("text",), "label": "label"}


def fitted_of(directory, model, tokenizer, *, mesh=None, **data):
    """A run that has ended, in the directory, with parameters laid out over its mesh."""
    data = Data(**{"tokens_per_batch": 116, "num_buckets": 2, "rows_multiple": 4} | data)
    decode = Decode(beams=1, max_new_tokens=5)
    run = Run(model.config, Train(steps=1), str(directory), data, decode=decode, mesh=mesh or Mesh())
    shapes = abstract_params(model, make_mesh(run.mesh))
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), lively(model), shapes)
    return Fitted(run, model, params, tokenizer, summary={})


def encoder(tokenizer, head, labels=()):
    sizes = {"num_layers": 1, "d_model": 8, "d_ff": 13, "num_heads": 2, "max_length": 29}
    return build(BERTConfig(tokenizer.vocab_size, **sizes, head=head, labels=labels))


def scored(model, params, tokens, *, targets, chosen, source=None):
    """(nats, right) summed over the chosen places of one row, from the logits in float64."""
    length = model.config.max_length
    sides = [np.array(ids, np.int32) for ids in ((tokens,) if source is None else (source, tokens))]
    rows = [np.pad(ids, (0, length - len(ids)))[None] for ids in sides]  # one length: each compiles
    live = [(np.arange(length) < len(ids)).astype(np.int32)[None] for ids in sides]
    segments = dict(zip(("segment_ids", "source_segment_ids"), reversed(live), strict=False))
    logits = np.asarray(applied(model, params, *rows, **segments)[0, : len(tokens)], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    at = np.flatnonzero(chosen)
    return -log_probs[at, targets[at]].sum(), (logits.argmax(axis=-1)[at] == targets[at]).sum()


@functools.partial(jax.jit, static_argnums=0)
def applied(model, params, *tokens, **inputs):
    return model.apply(params, *tokens, **inputs)


def by_hand(fitted, text):
    """nats and right targets a target token, and how often each id is a target: each example in a row of its own."""
    examples = encode(text, fitted.tokenizer, fitted.run.data, vocab_size=fitted.model.config.vocab_size)
    nats, right, counts = 0.0, 0, Counter()
    for i in range(len(examples)):
        source, tokens, targets, predicted, _ = examples.make(i, seed=fitted.run.data.seed, epoch=0)
        chosen = np.ones(len(targets), bool) if predicted is None else predicted
        what = {"targets": targets, "chosen": chosen, "source": source}
        one, other = scored(fitted.model, fitted.params, tokens, **what)
        nats, right = nats + one, right + other
        counts.update(targets[chosen].tolist())
    return nats / counts.total(), right / counts.total(), counts


def test_labels_are_counted_and_written(tmp_path, capsys):
    """accuracy is the share of lines whose largest number is that of their label; the text of a line stays a line."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41)
    model = encoder(tokenizer, "sequence", LABELS)
    fitted = fitted_of(tmp_path, model, tokenizer, **LABELLED)
    lines = ["a man", "", "hot t", "in", "at sea", "no", "a hat", "on", "i sat"]  # of few lengths: each compiles
    rows = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode(lines)]
    numbers = np.stack([applied(model, fitted.params, np.array([ids], np.int32))[0] for ids in rows])
    fitted.params["classifier"]["dense_bias"] -= numbers.mean(axis=0)  # now a line alone decides
    best = (numbers - numbers.mean(axis=0)).argmax(axis=1).tolist()
    labels = np.array([0, 1, 2] * 3, np.int32)
    right = sum(one == other for one, other in zip(best, labels.tolist(), strict=True))
    assert 0 < right < 9 and set(best) == {0, 1, 2}
    scores = conclude_labels(fitted, Text((lines,), ("dev",), labels))
    assert scores == {"accuracy": pytest.approx(right / 9), "examples": 9}
    written = (tmp_path / "predictions.tsv").read_text(encoding="utf-8").split("\n")
    wanted = [f"{LABELS[a]}\t{LABELS[b]}\t{line}" for a, b, line in zip(best, labels, lines, strict=True)]
    assert written == ["predicted\tlabel\ttext", *wanted, ""]
    assert f"{LABELS[best[0]]:>12} (label low)  {lines[0]}\n" in capsys.readouterr().out


def test_numbers_are_compared_by_their_squares(tmp_path):
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41)
    model = encoder(tokenizer, "regression", ("score",))
    fitted = fitted_of(tmp_path, model, tokenizer, **LABELLED)
    lines = ["a man", "", "hot t", "a hat", "on it", "i sat"]
    rows = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode(lines)]
    found = [applied(model, fitted.params, np.array([ids], np.int32))[0, 0] for ids in rows]
    found, values = np.array(found, np.float64), np.array([0.5, -1.0, 2.0, 0.0, 1.25, 3.0], np.float32)
    scores = conclude_labels(fitted, Text((lines,), ("dev",), values))
    assert scores == {"mean_squared_error": pytest.approx(((found - values) ** 2).mean(), rel=1e-4), "examples": 6}
    written = (tmp_path / "predictions.tsv").read_text().split("\n")
    assert written[1] == f"{found[0]:.3f}\t0.5\ta man"


@pytest.mark.parametrize(
    "text, said",
    [
        (Text((["a", "b"],), ("dev",), np.array([0, -1], np.int32)), "dev:2: label -1 .*is no class of the model"),
        (Text((["a", "b"],), ("dev",), np.array([3, 0], np.int32)), "dev:1: label 3 .*is no class of the model"),
        (Text((["a"],), ("dev",), np.array([1.0], np.float32)), "dev:1: label 1.0 .*is no class of the model"),
        (Text((["a"],), ("dev",)), "dev has no labels"),
        (Text((["a"], ["b"]), ("dev", "dev"), np.array([1], np.int32)), "dev, dev are two texts in one"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, text, said):
    """GLUE's test files have -1 for what is not told, which must not count as the last class."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41)
    fitted = fitted_of(tmp_path, encoder(tokenizer, "sequence", LABELS), tokenizer, **LABELLED)
    with pytest.raises(ValueError, match=said):
        conclude_labels(fitted, text)


@pytest.mark.parametrize(
    "batching, mesh", [("blocks", Mesh()), ("packed", Mesh()), ("buckets", Mesh()), ("blocks", Mesh(data=2, fsdp=2))]
)
def test_perplexity_is_of_words(tmp_path, capsys, batching, mesh):
    """B53: all nats, those of the ends too, over the words and an end for each line; blank lines and gaps are no words.

    Second route: every row alone, without padding, in float64.
    """
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41)
    model = small("decoder", 40)
    fitted = fitted_of(tmp_path, model, tokenizer, mesh=mesh, max_length=11, too_long="split", batching=batching)
    text, sampling = Text((LINES,), ("dev",)), Sampling(temperature=0.7, seed=3)
    nats, _, counts = by_hand(fitted, text)
    assert counts.total() == sum(map(len, LINES)) + len(LINES)
    scores = conclude_language(fitted, text, prompts=["a", "the sea"], sampling=sampling)
    assert scores == {
        "nats_per_token": pytest.approx(nats, rel=1e-5),
        "perplexity_per_word": pytest.approx(math.exp(nats * counts.total() / WORDS), rel=1e-4),
        "evaluated_tokens": counts.total(),
        "evaluated_words": WORDS,
    }
    single = lively(model), tokenizer, ["a", "the sea"]
    found = complete(model, *single, decode=fitted.run.decode, sampling=sampling)
    assert f"\na|{found[0][0].text}\n\nthe sea|{found[1][0].text}\n" == capsys.readouterr().out


def test_words_that_were_not_measured_are_not_counted(tmp_path):
    """What is left out as too long would make the perplexity smaller than it is."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41)
    fitted = fitted_of(tmp_path, small("decoder", 41), tokenizer, max_length=16, too_long="drop")
    with pytest.raises(ValueError, match="2 examples of dev are too long and would not be measured: split them"):
        conclude_language(fitted, Text((LINES,), ("dev",)), prompts=["a"], sampling=Sampling())


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_masked_tokens_are_measured_beside_the_commonest(tmp_path, capsys, batching):
    """The guess is right as often as the commonest of the chosen tokens is chosen; a line for each row is shown."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41, mask=True)
    hidden = Corruption("mask", rate=0.4)
    settings = {"max_length": 29, "batching": batching, "corruption": hidden}
    fitted = fitted_of(tmp_path, encoder(tokenizer, "masked"), tokenizer, **settings)
    text = Text((LINES,), ("dev",))
    nats, right, counts = by_hand(fitted, text)
    assert conclude_masked(fitted, text) == {
        "loss": pytest.approx(nats, rel=1e-5),
        "accuracy": pytest.approx(right),
        "commonest_token_accuracy": pytest.approx(counts.most_common(1)[0][1] / counts.total()),
    }
    shown = [line for line in capsys.readouterr().out.split("\n") if line]
    assert shown and all(line.startswith("<s> ") and line.endswith(" </s>") for line in shown)


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_hidden_runs_are_measured_beside_the_entropy_of_their_tokens(tmp_path, capsys, batching):
    """In nats, sentinels and ends included, as the loss is; what was read and what is made of it is shown."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41, sentinels=5)
    hidden = Corruption("spans", rate=0.3, mean_span=2.0, sentinels=5)
    settings = {"max_length": 29, "batching": batching, "corruption": hidden}
    fitted = fitted_of(tmp_path, small("encoder-decoder", tokenizer.vocab_size), tokenizer, **settings)
    text = Text((LINES,), ("dev",))
    nats, right, counts = by_hand(fitted, text)
    shares = [count / counts.total() for count in counts.values()]
    assert conclude_spans(fitted, text) == {
        "loss": pytest.approx(nats, rel=1e-5),
        "accuracy": pytest.approx(right),
        "unigram_entropy": pytest.approx(-math.fsum(share * math.log(share) for share in shares)),
    }
    shown = capsys.readouterr().out
    assert shown.count("\nread      ") == shown.count("\nrestored  ") > 1 and "<extra_id_0>" in shown
