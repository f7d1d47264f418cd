"""generation_config.json: what each of its fields is to us, what is refused by name, and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tfm_jax import hf
from tfm_jax.config import Decode

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
LONGEST = 24  # of all fixtures but T5's


def directory_of(kind, directory, values, *, config=None):
    """config.json of a fixture with more fields, and generation_config.json (None: there is none)."""
    directory.mkdir(exist_ok=True)
    found = json.loads((FIXTURES / kind / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(found))
    if values is not None:
        (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


# what a file that says nothing means
GREEDY = Decode(beams=1, early_stopping="heuristic", normalization="transformers", max_new_tokens=LONGEST)


@pytest.mark.parametrize(
    "values, ours",
    [
        ({}, {}),
        ({"num_beams": 4, "num_return_sequences": 3}, {"beams": 4, "nbest": 3}),
        ({"length_penalty": 2, "repetition_penalty": 1.25}, {"length_penalty": 2.0, "repetition_penalty": 1.25}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram": 3}),
        ({"early_stopping": True}, {"early_stopping": True}),
        ({"early_stopping": "never"}, {"early_stopping": False}),
        ({"early_stopping": False}, {"early_stopping": "heuristic"}),
        # both count the token that the decoder starts with
        ({"max_length": 12, "min_length": 5}, {"max_new_tokens": 11, "min_new_tokens": 4}),
        ({"max_length": 12, "max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"min_length": 5, "min_new_tokens": 2}, {"min_new_tokens": 2}),
        ({"min_length": 0}, {}),
        ({"max_new_tokens": 512}, {"max_new_tokens": LONGEST}),
        ({"max_length": 512}, {"max_new_tokens": LONGEST}),
        ({"eos_token_id": 5}, {"eos_ids": (5,)}),
        ({"eos_token_id": [7, 5, 7]}, {"eos_ids": (7, 5)}),
        ({"forced_bos_token_id": 0}, {"forced_ids": (0,)}),
        ({"suppress_tokens": [9, 3]}, {"suppressed_ids": (9, 3)}),
        # theirs does not ban the end by its words, but by suppress_tokens
        (
            {"bad_words_ids": [[9], [5], [1]], "suppress_tokens": [9, 5], "eos_token_id": [5, 1]},
            {"suppressed_ids": (9, 5), "eos_ids": (5, 1)},
        ),
        ({"num_beams": None, "max_length": None, "eos_token_id": None}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "forced_eos_token_id": 2}, {}),
        ({"transformers_version": "5.24.0", "output_scores": True, "use_cache": False, "bos_token_id": 3}, {}),
    ],
)
def test_what_a_field_is_to_us(tmp_path, values, ours):
    assert hf.read_generation(directory_of("bart", tmp_path, values)) == replace(GREEDY, **ours)


@pytest.mark.parametrize(
    "values, most",
    [
        # a prompt needs room too
        ({}, LONGEST // 2),
        ({"max_length": 20}, LONGEST // 2),
        ({"max_length": 9}, 8),
        ({"max_new_tokens": 23}, 23),
        ({"max_new_tokens": 24}, LONGEST // 2),
        ({"min_length": 1}, LONGEST // 2),
    ],
)
def test_the_limit_of_a_decoder(tmp_path, values, most):
    found = hf.read_generation(directory_of("gpt2", tmp_path, values))
    assert found == replace(GREEDY, max_new_tokens=most)


def test_of_a_long_decoder_the_limit_is_ours(tmp_path):
    directory = directory_of("llama", tmp_path, {"max_length": 4096}, config={"max_position_embeddings": 4096})
    assert hf.read_generation(directory).max_new_tokens == Decode().max_new_tokens


def test_an_encoder_writes_nothing(tmp_path):
    assert hf.read_generation(FIXTURES / "bert") == Decode()


REFUSED = {
    "begin_suppress_tokens": [3],
    "constraints": [[3]],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [3, 1.1],
    "force_words_ids": [[3]],
    "guidance_scale": 1.5,
    "max_time": 3.0,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "renormalize_logits": True,
    "sequence_bias": [[[3], 1.0]],
    "stop_strings": ["a"],
    "token_healing": True,
    "watermarking_config": {"bias": 2.5},
}
NEUTRAL = {
    "begin_suppress_tokens": [],
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "renormalize_logits": False,
    "token_healing": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_have_is_refused_by_name(tmp_path, name):
    directory = directory_of("bart", tmp_path, {name: REFUSED[name]})
    with pytest.raises(ValueError, match=rf"generation_config.json: {name} is .*, which is not supported: take it out"):
        hf.read_generation(directory)
    # in an old config.json too
    directory = directory_of("bart", tmp_path / "old", None, config={name: REFUSED[name]})
    with pytest.raises(ValueError, match=rf"config.json: {name} is .*, which is not supported"):
        hf.read_generation(directory)


def test_what_changes_nothing_is_not_refused(tmp_path):
    values = dict.fromkeys(REFUSED) | NEUTRAL
    assert hf.read_generation(directory_of("bart", tmp_path, values)) == GREEDY


@pytest.mark.parametrize(
    "kind, values, said",
    [
        ("bart", {"num_beams": "4"}, "num_beams is '4': an int is expected"),
        ("bart", {"num_beams": 4.0}, "num_beams is 4.0: an int is expected"),
        ("bart", {"num_beams": True}, "num_beams is True: an int"),
        ("bart", {"max_length": 9.5}, "max_length is 9.5: an int"),
        ("bart", {"length_penalty": "x"}, "length_penalty is 'x': a number is expected"),
        ("bart", {"early_stopping": "soon"}, "early_stopping is 'soon': true, false or 'never'"),
        ("bart", {"early_stopping": 1}, "early_stopping is 1: true, false or 'never'"),
        ("bart", {"num_return_sequences": 2}, "decode.nbest is 2, more than decode.beams, 1"),
        ("bart", {"max_length": 4, "min_length": 9}, "decode.min_new_tokens is 8, more than decode.max_new_tokens, 3"),
        ("bart", {"bad_words_ids": [[3], [4, 5]]}, "bad_words_ids is .*: words of one token each"),
        ("bart", {"bad_words_ids": [3]}, "bad_words_ids is .*: words of one token each"),
        ("bart", {"eos_token_id": "2"}, "eos_token_id is '2': an id or a list of ids"),
        ("bart", {"eos_token_id": -1}, r"eos_token_id is \[-1\]: an id or a list of ids"),
        ("bart", {"suppress_tokens": 3}, "suppress_tokens is 3: a list of ids"),
        ("bart", {"forced_bos_token_id": [3]}, r"forced_bos_token_id is \[3\]: an id is expected"),
        ("bart", {"forced_bos_token_id": 3, "suppress_tokens": [3]}, r"both hold \[3\]"),
        ("gpt2", {"forced_bos_token_id": 3}, "forced_bos_token_id is 3, which depends on the prompt"),
        ("gpt2", {"min_length": 5}, "min_length is 5, which counts the prompt: give min_new_tokens"),
    ],
)
def test_values_that_cannot_be(tmp_path, kind, values, said):
    with pytest.raises(ValueError, match=f"generation_config.json: .*{said}"):
        hf.read_generation(directory_of(kind, tmp_path, values))


def test_files_that_are_none(tmp_path):
    directory = directory_of("bart", tmp_path, {})
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="generation_config.json holds no object"):
        hf.read_generation(directory)
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        hf.read_generation(directory)
    shutil.rmtree(directory)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        hf.read_generation(directory)


def test_an_old_config_says_it_itself(tmp_path):
    """Only where there is no generation_config.json; the rest of config.json is not about generation."""
    old = {"num_beams": 6, "max_length": 19, "early_stopping": True, "eos_token_id": 2, "length_penalty": 2.0}
    ours = replace(GREEDY, beams=6, max_new_tokens=18, early_stopping=True, eos_ids=(2,), length_penalty=2.0)
    directory = directory_of("bart", tmp_path, None, config=old)
    assert hf.read_generation(directory) == ours
    ids = {"bos_token_id": 0, "decoder_start_token_id": 2, "pad_token_id": 1}
    assert hf.generation_values(directory) == old | ids
    directory_of("bart", tmp_path, None, config=old | {"force_bos_token_to_be_generated": True})
    assert hf.read_generation(directory) == replace(ours, forced_ids=(0,))
    directory_of("bart", tmp_path, {"num_beams": 3})
    assert hf.read_generation(directory) == replace(GREEDY, beams=3)


DECODES = [
    Decode(max_new_tokens=13),
    Decode(beams=1, max_new_tokens=13, early_stopping=False, no_repeat_ngram=2, repetition_penalty=1.5),
    Decode(beams=4, nbest=3, max_new_tokens=13, min_new_tokens=2, early_stopping=False, length_penalty=-0.5),
    Decode(beams=3, max_new_tokens=9, early_stopping="heuristic"),
    Decode(beams=3, max_new_tokens=9, eos_ids=(3, 2), forced_ids=(7,), suppressed_ids=(9, 11)),
    Decode(beams=3, max_new_tokens=9, early_stopping="heuristic", normalization="gnmt", length_penalty=0.0),
]


@pytest.mark.parametrize("decode", DECODES)
def test_ours_comes_back(tmp_path, decode):
    """But for what decides nothing: the rule of stopping without beams, and the division by anything ** 0."""
    directory = directory_of("bart", tmp_path, hf.write_generation(decode, "encoder-decoder"))
    same = {"normalization": "transformers"} | ({"early_stopping": "heuristic"} if decode.beams == 1 else {})
    assert hf.read_generation(directory) == replace(decode, **same)


def test_a_decoder_is_continued_greedily(tmp_path):
    decode = Decode(beams=5, nbest=2, max_new_tokens=9, repetition_penalty=1.5, eos_ids=(3,), suppressed_ids=(4,))
    values = hf.write_generation(decode, "decoder")
    assert values.keys().isdisjoint({"num_beams", "num_return_sequences", "early_stopping", "length_penalty"})
    found = hf.read_generation(directory_of("gpt2", tmp_path, values))
    assert found == replace(decode, beams=1, nbest=1, early_stopping="heuristic", normalization="transformers")


@pytest.mark.parametrize(
    "decode, kind, said",
    [
        (Decode(normalization="gnmt"), "encoder-decoder", "decode.normalization is 'gnmt'"),
        (Decode(forced_ids=(3, 4)), "encoder-decoder", r"decode.forced_ids is \(3, 4\): transformers forces one token"),
        (Decode(forced_ids=(3,)), "decoder", "decode.forced_ids"),
    ],
)
def test_what_they_do_not_have(decode, kind, said):
    with pytest.raises(ValueError, match=said):
        hf.write_generation(decode, kind)


def test_settings_are_added_to_a_file(tmp_path):
    directory = directory_of("bart", tmp_path, {"eos_token_id": 2, "num_beams": 3})
    hf.save_generation(directory, {"num_beams": 4, "max_new_tokens": 5})
    assert hf.generation_values(directory) == {"eos_token_id": 2, "num_beams": 4, "max_new_tokens": 5}
    (directory / "generation_config.json").unlink()
    hf.save_generation(directory, {"num_beams": 4})
    assert hf.generation_values(directory) == {"num_beams": 4}
