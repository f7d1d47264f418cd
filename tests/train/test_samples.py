"""Samples that people judge: what they show is what the model says, place by place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decode.test_predict import lively
from tests.hf.test_text import random_params, small
from tfm_jax.config import Corruption, Data, Decode
from tfm_jax.data.batches import make_batches
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.beam import Hypotheses
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.train import samples
from tfm_jax.train.samples import filled_masks, restored_spans

LINES = ["the rain in may", "a hat", "on a mat sat a cat", "in the sun and on it", "a man", "ten men at sea", "hot tea"]
LINES += ["tea in the sun and rain", "some man sat on a hat in may"]

ANY = small("decoder", 11)  # where a test decides what the model says


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# --- filled masks ---


@pytest.fixture
def guesses(monkeypatch):
    """Decide what the model says at each place."""

    def install(rows):
        monkeypatch.setattr(samples, "_likeliest", lambda params, tokens, segment_ids, *, model: np.array(rows))

    return install


def test_a_chosen_place_shows_the_guess_and_what_stood_there(guesses):
    """Once where it is right; only the first text of a row is shown, and a row that fills the batch is none."""
    tokenizer = Tokenizer.train(["abcdef"], kind="characters", vocab_size=17, mask=True)
    ids = {name: i for i, name in enumerate(tokenizer.pieces(list(range(tokenizer.vocab_size))))}
    row = lambda text: [ids[name] for name in text.split()]  # noqa: E731
    batch = {
        "tokens": np.array(
            [row("<s> a <mask> <mask> d </s> <s> <mask>"), row("<pad> " * 8), row("<s> e f" + " </s>" * 5)]
        ),
        "targets": np.array([row("<pad> <pad> b c d <pad> <pad> e"), row("<pad> " * 8), row("<pad> " * 8)]),
        "weights": np.array([[0, 0, 1, 1, 1, 0, 0, 1], [0] * 8, [0] * 8], np.float32),
        "segment_ids": np.array([[1, 1, 1, 1, 1, 1, 2, 2], [0] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]),
    }
    guesses([row("f f b e d f f f"), row("a " * 8), row("a " * 8)])
    assert filled_masks(ANY, {}, tokenizer, batch) == ["<s> a [b] [e | c] [d] </s>", "<s> e f </s>"]


def test_pieces_of_words_show_as_they_stand(guesses):
    """What a byte-level piece begins with is no space in the sample."""
    tokenizer = Tokenizer.train(3 * LINES, kind="bpe", vocab_size=280, mask=True)
    ids = tokenizer.encode(["a hat"])[0]
    tokens = np.array([[tokenizer.bos_id, *ids]])
    chosen = np.arange(tokens.shape[1])[None] == 1
    guesses(tokens)
    batch = {"tokens": np.where(chosen, tokenizer.mask_id, tokens), "targets": tokens, "weights": chosen * 1.0}
    (line,) = filled_masks(ANY, {}, tokenizer, batch | {"segment_ids": np.ones_like(tokens)})
    first, *others = tokenizer.pieces(ids)
    assert line == " ".join(["<s>", f"[{first.strip()}]", *(other.strip() for other in others)])


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_the_guess_is_that_of_the_text_alone(batching):
    """B40: in a row with other texts or padding; second route: the model on the first text of the row alone."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=41, mask=True)
    model = build(BERTConfig(tokenizer.vocab_size, num_layers=1, d_model=8, d_ff=13, num_heads=2, max_length=31))
    params = lively(model)
    data = Data(
        max_length=31,
        tokens_per_batch=31 * 4,
        rows_multiple=4,
        num_buckets=1,
        batching=batching,
        corruption=Corruption("mask", rate=0.4),
    )
    batch = make_batches(data, Text((LINES,), ("lines",)), tokenizer, vocab_size=tokenizer.vocab_size, evaluation=True)[
        0
    ]
    lines, apply, places = [], jax.jit(model.apply), np.arange(31)
    for tokens, targets, weights, segments in zip(
        *(batch[name] for name in ("tokens", "targets", "weights", "segment_ids")), strict=True
    ):
        own = segments == 1
        if own.any():
            count = own.sum()
            alone = np.pad(tokens[own], (0, 31 - count))[None]  # one length: each compiles
            logits = apply(params, alone, segment_ids=(places < count).astype(np.int32)[None])
            best = np.asarray(logits[0, :count]).argmax(axis=-1)
            names = tokenizer.pieces(tokens[own].tolist())
            for i, (guess, right) in enumerate(zip(best.tolist(), targets[own].tolist(), strict=True)):
                if weights[own][i]:
                    one, other = (text.strip() for text in tokenizer.pieces([guess, right]))
                    names[i] = f"[{one}]" if guess == right else f"[{one} | {other}]"
            lines.append(" ".join(name.strip() for name in names))
    assert filled_masks(model, params, tokenizer, batch) == lines
    assert filled_masks(model, params, tokenizer, batch, rows=2) == lines[:2] and " | " in "".join(lines)


# --- restored spans ---


@pytest.fixture(scope="module")
def spans():
    """Tokenizer and a batch of texts with hidden runs, of which some rows hold two texts and one is filler."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=53, sentinels=5)
    data = Data(
        max_length=31,
        tokens_per_batch=31 * 8,
        rows_multiple=8,
        batching="packed",
        corruption=Corruption("spans", rate=0.3, mean_span=2.0, sentinels=5),
    )
    batch = make_batches(data, Text((LINES,), ("lines",)), tokenizer, vocab_size=53, evaluation=True)[0]
    filled = (batch["source_segment_ids"][:, 0] > 0).sum()
    assert 2 < filled < 8 and batch["source_segment_ids"].max() > 1
    return tokenizer, batch, filled


def first(batch, side, row):
    """The ids of a row's first text."""
    name, segments = {"source": ("source_tokens", "source_segment_ids"), "target": ("targets", "segment_ids")}[side]
    return batch[name][row][batch[segments][row] == 1].tolist()


@pytest.fixture
def written(monkeypatch):
    """Decide what the model writes; gives what it was asked."""
    asked = []

    def install(rows):
        def generate(params, prompts, *, model, settings):
            asked.append((prompts, settings))
            tokens = np.zeros((len(rows), 2, max(map(len, rows))), np.int32)
            for own, ids in zip(tokens, rows, strict=True):
                own[0, : len(ids)] = ids
            lengths = np.array([[len(ids), 1] for ids in rows], np.int32)
            zeros = jnp.zeros(lengths.shape, jnp.float32)
            return Hypotheses(jnp.asarray(tokens), zeros, zeros, jnp.asarray(lengths), zeros > -1)

        monkeypatch.setattr(samples, "generate", generate)
        return asked

    return install


def test_a_model_that_is_right_restores_the_text(spans, written):
    """Every row that holds a text shows its first one whole, beside what the encoder read of it."""
    tokenizer, batch, filled = spans
    decode = Decode(beams=3, max_new_tokens=19, length_penalty=0.5, early_stopping=False, normalization="gnmt")
    asked = written([first(batch, "target", row) for row in range(filled)])
    pairs = restored_spans(ANY, {}, tokenizer, batch, decode=decode, rows=8)
    assert len(pairs) == filled and {text for _, text in pairs} < set(LINES)
    for row, (source, text) in enumerate(pairs):
        assert source == "".join(tokenizer.pieces(first(batch, "source", row)[:-1])) and "<extra_id_0>" in source
        kept = map(re.escape, re.split("<extra_id_[0-9]>", source))
        assert re.fullmatch(".+".join(kept), text)
    ((prompts, settings),) = asked
    assert (settings.beams, settings.max_new_tokens, settings.length_penalty) == (3, 19, 0.5)
    assert (settings.early_stopping, settings.normalization, settings.eos_ids) == (False, "gnmt", (tokenizer.eos_id,))
    assert prompts.tokens.tolist() == [[tokenizer.bos_id]] * filled
    for row in range(filled):
        live = np.asarray(prompts.source_segment_ids[row]) > 0
        assert np.asarray(prompts.source_tokens[row])[live].tolist() == first(batch, "source", row)


def test_a_model_with_other_sentinels_shows_what_it_wrote(spans, written):
    """Or one that did not end: there is no place to put it."""
    tokenizer, batch, _ = spans
    one, two = (tokenizer.sentinel_ids[i] for i in (0, 1))
    a, end = tokenizer.encode(["a"])[0][0], tokenizer.eos_id
    written([[two, a, one, a, end], first(batch, "target", 1)[:-1]])
    pairs = restored_spans(ANY, {}, tokenizer, batch, decode=Decode(max_new_tokens=19), rows=2)
    assert pairs[0][1] == "<extra_id_1>a<extra_id_0>a"
    assert pairs[1][1] == tokenizer.decode([first(batch, "target", 1)])[0] and "<extra_id_0>" in pairs[1][1]


def test_what_is_restored_is_what_the_model_writes(spans):
    """Greedily, one token after the other, each text alone."""
    tokenizer, batch, filled = spans
    model = small("encoder-decoder", tokenizer.vocab_size)
    params, apply = random_params(model), jax.jit(model.apply)
    row = int(np.argmin([len(first(batch, "source", row)) for row in range(filled)]))
    batch = {name: x[row:] for name, x in batch.items()}
    source = first(batch, "source", 0)
    batch = {name: x[:, :29] if name.startswith("source") else x for name, x in batch.items()}
    ids = [tokenizer.bos_id]
    while len(ids) < 8 and ids[-1] != tokenizer.eos_id:
        inputs = np.array([[*ids, *[0] * (8 - len(ids))]], np.int32)
        ids.append(int(np.asarray(apply(params, np.array([source], np.int32), inputs))[0, len(ids) - 1].argmax()))
    ((_, text),) = restored_spans(model, params, tokenizer, batch, decode=Decode(beams=1, max_new_tokens=7), rows=1)
    assert text == tokenizer.decode([ids])[0]
