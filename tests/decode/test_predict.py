"""What a model with a head for rows gives for lines: as for each alone, with what its tokenizer puts around it."""

import functools
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers

import tfm_jax
import tfm_jax.decode.predict
from tests.hf.test_text import FIXTURES, random_params, small, write_tokenizer
from tests.train.test_pretrained import MODEL, bert_directory
from tfm_jax import hf
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.predict import ROWS, predict
from tfm_jax.models import build
from tfm_jax.models.gpt import GPTConfig

LINES = ["a sunrise", "", "in", "the rains", "on", "on trains", "in"]  # of few lengths: each compiles
LABELS = ("bad", "good", "so-so")
# by head: how many numbers a line has
WIDTHS = {"sequence": 3, "regression": 3, "pooled": 8, "embedding": 8}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def lively(model):
    """Parameters with which what stands in a line decides what is said of it."""
    rng = np.random.default_rng(5)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "bias" in name:
            return jax.numpy.full(leaf.shape, "scale" in name, "float32")
        spread = 1.0 if "table" in name else 1.5 * leaf.shape[-2] ** -0.5
        return jax.numpy.asarray(rng.normal(0, spread, leaf.shape), "float32")

    return jax.tree_util.tree_map_with_path(draw, model.shapes)


@functools.cache
def vocabulary():
    return Tokenizer.train(LINES, kind="characters", vocab_size=41)


@functools.cache
def loaded(family, head):
    labels = LABELS if head in ("sequence", "regression", "token") else ()
    if family == "bert":
        model = build(replace(MODEL, num_layers=1, vocab_size=vocabulary().vocab_size, head=head, labels=labels))
    else:
        sizes = {"num_layers": 1, "d_model": 8, "d_ff": 13, "num_heads": 2, "max_length": 24}
        model = build(GPTConfig(vocabulary().vocab_size, head=head, labels=labels, **sizes))
    return model, lively(model), vocabulary()


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens):
    return model.apply(params, tokens)


def alone(model, params, rows):
    """Each row of ids without padding and without segments."""
    found = {tuple(ids): apply(model, params, np.array([ids], np.int32))[0] for ids in rows}
    return np.stack([found[tuple(ids)] for ids in rows])


HEADS = [*(("bert", head) for head in ROWS), ("gpt", "sequence")]


@pytest.mark.parametrize("family, head", HEADS)
def test_a_line_has_what_the_model_gives_for_it_alone(family, head):
    """B42: between start and end, as in training; an empty line is these two. Repeated lines have the same numbers."""
    model, params, tokenizer = loaded(family, head)
    rows = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode(LINES)]
    found = predict(model, params, tokenizer, LINES)
    assert found.dtype == np.float32 and found.shape == (len(LINES), WIDTHS[head])
    np.testing.assert_allclose(found, alone(model, params, rows), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[2], found[6])
    assert np.median(np.std(found, axis=0)) > 0.01


def test_a_line_does_not_depend_on_the_others():
    """B32: in any order, and with few tokens in a batch; progress counts all of them."""
    model, params, tokenizer = loaded("bert", "sequence")
    found = predict(model, params, tokenizer, LINES)
    for order in (range(6, -1, -1), [2, 1, 5], [4]):
        done = []
        some = predict(model, params, tokenizer, [LINES[i] for i in order], tokens_per_batch=17, progress=done.append)
        np.testing.assert_allclose(some, found[list(order)], rtol=1e-5, atol=1e-5)
        assert done == sorted(done) and done[-1] == len(some)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """kind -> directory of Hugging Face, which is only read."""

    @functools.cache
    def directory(kind):
        folder = tmp_path_factory.mktemp("theirs") / kind
        if kind.startswith("bert"):
            return bert_directory(folder, kind)
        shutil.copytree(FIXTURES / kind, folder)
        write_tokenizer({"roberta-sequence": "bart", "gpt2-sequence": "gpt2"}[kind], folder)
        return folder

    return directory


@pytest.mark.parametrize("kind", ["bert-sequence", "bert-pooled", "roberta-sequence", "gpt2-sequence"])
def test_a_directory_has_its_own_template(theirs, kind):
    """The ids are those that the file's post-processor makes, as transformers does; GPT-2 has nothing around a text."""
    model, params, tokenizer = tfm_jax.load(theirs(kind))
    file = tokenizers.Tokenizer.from_file(str(theirs(kind) / "tokenizer.json"))
    rows = [file.encode(line).ids or [tokenizer.bos_id] for line in LINES]
    found = predict(model, params, tokenizer, LINES)
    np.testing.assert_allclose(found, alone(model, params, rows), rtol=1e-5, atol=1e-5)
    assert (rows[1] == [1]) == (kind == "gpt2-sequence") and len({len(row) for row in rows}) > 2


def test_no_lines():
    for head, width in WIDTHS.items():
        assert predict(*loaded("bert", head), []).shape == (0, width)


def test_a_line_that_is_too_long_is_refused_before_the_work(monkeypatch):
    """By its name; one that fills the model is not too long."""
    model, params, tokenizer = loaded("bert", "sequence")
    fits = "a" * (model.config.max_length - 2)
    assert predict(model, params, tokenizer, [fits]).shape == (1, 3)
    monkeypatch.setattr(tfm_jax.decode.predict, "_apply", lambda *_, **__: pytest.fail("the work was done"))
    with pytest.raises(ValueError, match="input:2: the line has 25 tokens with start and end, the model accepts 24"):
        predict(model, params, tokenizer, ["a", fits + "a"])
    with pytest.raises(ValueError, match="file:7: the line has 26 tokens"):
        predict(model, params, tokenizer, ["aa" + fits, fits + "a"], where=lambda i: f"file:{i + 7}")


@pytest.mark.parametrize("family, head", [("bert", "masked"), ("bert", "token"), ("bert", "span"), ("gpt", "language")])
def test_another_head_is_refused(family, head):
    with pytest.raises(ValueError, match=f"a '{family}' model with head '{head}' gives nothing for a line: .*sequence"):
        predict(*loaded(family, head), LINES)


def test_a_model_that_writes_is_refused():
    model = small("encoder-decoder", vocabulary().vocab_size)
    with pytest.raises(ValueError, match="a 'transformer' model with head None gives nothing for a line"):
        predict(model, random_params(model), vocabulary(), LINES)


def test_what_is_no_number_is_no_label():
    """Of NaN the first label would be the largest."""
    model, params, tokenizer = loaded("bert", "sequence")
    broken = jax.tree.map(lambda x: x * np.float32("nan"), params)
    with pytest.raises(FloatingPointError, match="the model gives NaN"):
        predict(model, broken, tokenizer, LINES)


def test_it_is_public():
    assert tfm_jax.predict is predict


@pytest.mark.oracles
@pytest.mark.parametrize("kind", ["ours", "bert-sequence", "roberta-sequence", "gpt2-sequence"])
def test_transformers_says_the_same(theirs, tmp_path, kind):
    """Of their directories, and of what is written of a model of ours; without the empty line where it has no token."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if kind == "ours":
        model, params, tokenizer = loaded("bert", "sequence")
        hf.save(tmp_path / "ours", model, params, tokenizer)
    directory = tmp_path / "ours" if kind == "ours" else theirs(kind)
    lines = [line for line in LINES if line or kind != "gpt2-sequence"]
    reader = AutoTokenizer.from_pretrained(directory)
    judge = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    inputs = {name: x for name, x in reader(lines, padding=True, return_tensors="pt").items() if "type" not in name}
    with torch.no_grad():
        expected = judge(**inputs).logits.numpy()
    found = predict(*(loaded("bert", "sequence") if kind == "ours" else tfm_jax.load(directory)), lines)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert [judge.config.id2label[i] for i in range(3)] == list(LABELS)
