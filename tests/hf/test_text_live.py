"""Strings in, strings out, beside AutoTokenizer and `generate` of transformers, from the same directories."""

import functools
import json

import jax
import numpy as np
import pytest

import tfm_jax
from tests.hf.test_exchange import maker
from tests.hf.test_text import DECODE, KINDS, SPECIALS, WRITTEN, random_params, settle, small, write_tokenizer
from tfm_jax import hf
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.data.vocabulary import Kind
from tfm_jax.decode.text import complete, translate

pytestmark = pytest.mark.oracles

LINES = ["the other", "a", "sun and rain", "in a tower", "xyz", "thin", "or", "st an", "quiz", "<s>b"]
SHORT = [line for line in LINES if len(line) < 6]
# of each family what its published models set, besides greedy search
# early_stopping is what it is by default, a heuristic, where it is not said
BEAMS = {"num_beams": 4, "num_return_sequences": 2}
SETTINGS = {
    "gpt2": BEAMS | {"max_new_tokens": 9, "eos_token_id": [1, 9], "repetition_penalty": 1.3},
    "llama": BEAMS
    | {
        "early_stopping": True,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "suppress_tokens": [30, 3],
        "length_penalty": 0.0,
    },
    "t5": BEAMS | {"max_length": 11, "no_repeat_ngram_size": 2, "decoder_start_token_id": 0},
    # those of bart-large-cnn, but shorter
    "bart": BEAMS
    | {"max_length": 12, "min_length": 5, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
    | {"forced_bos_token_id": 0},
    "marian": BEAMS
    | {"early_stopping": "never", "max_length": 10, "bad_words_ids": [[40], [0]], "repetition_penalty": 1.2},
}
# with these a model writes many different texts
SEEDS = {"gpt2": 25, "llama": 24, "t5": 25, "bart": 31, "marian": 23}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def generated(directory, lines):
    """What transformers makes of each line, all its outputs; a continuation without the text of its prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer, two_sided = AutoTokenizer.from_pretrained(directory), AutoConfig.from_pretrained(directory)
    two_sided = two_sided.is_encoder_decoder
    model = (AutoModelForSeq2SeqLM if two_sided else AutoModelForCausalLM).from_pretrained(directory).eval()
    tokenizer.padding_side = "right" if two_sided else "left"
    with torch.no_grad():
        inputs = tokenizer(lines, return_tensors="pt", padding=True)
        output = model.generate(**inputs)
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    count = len(texts) // len(lines)
    if not two_sided:
        prompts = tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        texts = [text[len(prompts[i // count]) :] for i, text in enumerate(texts)]
    return [texts[i : i + count] for i in range(0, len(texts), count)]


def written(loaded, lines, decode):
    """The same by ours."""
    if loaded[0].config.kind == "encoder-decoder":
        found = translate(*loaded, lines, decode=decode)
    else:
        found = complete(*loaded, lines, decode=decode, sampling=None)
    return [[output.text for output in outputs] for outputs in found]


@functools.cache
def their_model(kind):
    make = maker()
    return make.random_model(*make.settings(kind), seed=SEEDS[kind])


@pytest.mark.parametrize("kind", SPECIALS)
def test_a_directory_of_theirs(kind, tmp_path):
    """B33: greedy and with 4 beams and the settings of published models, as generation_config.json says."""
    their_model(kind).save_pretrained(tmp_path)
    write_tokenizer(kind, tmp_path)
    settle(tmp_path, max_new_tokens=9)
    loaded = tfm_jax.load(tmp_path)
    expected = generated(tmp_path, LINES)
    assert len(np.unique(expected)) > 8
    assert written(loaded, LINES, hf.read_generation(tmp_path)) == expected
    settle(tmp_path, **{"max_new_tokens": None} | SETTINGS[kind])
    expected = generated(tmp_path, SHORT)
    assert len(np.unique(expected)) > len(SHORT)
    assert written(loaded, SHORT, hf.read_generation(tmp_path)) == expected


def test_what_is_said_in_an_old_config(tmp_path):
    """Before there was generation_config.json; transformers reads it from config.json too."""
    their_model("bart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | SETTINGS["bart"] | {"forced_bos_token_id": 5}))
    write_tokenizer("bart", tmp_path)
    expected = generated(tmp_path, SHORT)
    assert written(tfm_jax.load(tmp_path), SHORT, hf.read_generation(tmp_path)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_ours(kind, tmp_path):
    """Exported with how the run decodes; what training calls a text is what AutoTokenizer makes of it."""
    tokenizer = Tokenizer.train(LINES, kind="characters", vocab_size=53)
    model = small(kind, tokenizer.vocab_size)
    ours = model, random_params(model), tokenizer
    hf.save(tmp_path, *ours)
    hf.save_generation(tmp_path, hf.write_generation(DECODE, kind))
    decode = (
        DECODE if kind == "encoder-decoder" else tfm_jax.config.Decode(beams=1, max_new_tokens=9, no_repeat_ngram=3)
    )
    own = written(ours, SHORT, decode)
    assert generated(tmp_path, SHORT) == own and len(np.unique(own)) > 3


@pytest.mark.parametrize("kind", Kind.__args__)
def test_vocabularies_of_ours(kind, tmp_path):
    """The same ids, around them what training puts there, also of text that spells a special token."""
    from transformers import AutoTokenizer

    lines = ["the cat sat on the mat", "thé cat", "a", "  two  spaces "]
    # a model of pieces reads "</s>" as one of them, in transformers even where it is text
    lines += [] if kind == "unigram" else WRITTEN
    tokenizer = Tokenizer.train(lines, kind=kind, vocab_size=331, mask=True, sentinels=2)
    for place, model in enumerate(small(kind, tokenizer.vocab_size) for kind in KINDS):
        directory = tmp_path / str(place)
        hf.save(directory, model, random_params(model), tokenizer)
        theirs = AutoTokenizer.from_pretrained(directory)
        found = [theirs(line)["input_ids"] for line in lines]
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        framed = [
            [*ids, eos] if model.config.kind == "encoder-decoder" else [bos, *ids] for ids in tokenizer.encode(lines)
        ]
        assert found == framed
        assert theirs.batch_decode(found, skip_special_tokens=True) == tokenizer.decode(framed)
        assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.pad_id, bos, eos)
