"""Measuring: losses over exactly the examples there are, and scores that mean what they are called (B43, B53)."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.train.killed_run import MODEL
from tfm_jax.config import Corruption, Data, Decode, Mesh, Run, Train
from tfm_jax.data.batches import Batches
from tfm_jax.data.examples import Examples
from tfm_jax.data.sources import parallel
from tfm_jax.data.tasks import Pairs, Ragged, Special
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.text import Output
from tfm_jax.models import build
from tfm_jax.sharding import make_mesh
from tfm_jax.train import evaluate
from tfm_jax.train.evaluate import conclude, evaluate_loss, evaluate_translation, score_translations
from tfm_jax.train.losses import TextToText
from tfm_jax.train.run import Fitted
from tfm_jax.train.step import abstract_params

SMOOTHING = 0.1
REFERENCES = ["Hello, world.", "It's a test."]
TOKENISED = ["Hello , world .", "It 's a test ."]


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
