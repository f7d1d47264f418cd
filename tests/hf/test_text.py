"""Text in and out of Hugging Face directories: what stands around it, how it is written, and saved again.

test_text_live.py compares the same directories with transformers.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

import tfm_jax
from tfm_jax import hf
from tfm_jax.config import Decode
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.score import perplexity, score_targets
from tfm_jax.decode.text import complete, stream, translate
from tfm_jax.models import GPTConfig, TransformerConfig, build

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
V = 41
# id -> special token, as the fixtures' config.json have them
SPECIALS = {
    "gpt2": {0: "<pad>", 1: "<|endoftext|>"},
    "llama": {0: "<pad>", 1: "<s>", 2: "<unk>"},
    "t5": {0: "<pad>", 1: "</s>", 2: "<unk>", 40: "<extra_id_0>"},
    "bart": {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", 40: "<mask>"},
    "marian": {0: "</s>", 1: "<unk>", 40: "<pad>"},
}
ROLES = {
    "gpt2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<pad>"},
    "llama": {"bos": "<s>", "eos": "<s>", "pad": "<pad>", "unk": "<unk>"},
    "t5": {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"},
    "bart": {
        "bos": "<s>",
        "eos": "</s>",
        "cls": "<s>",
        "sep": "</s>",
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
    },
    "marian": {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"},
}
# what stands before and after a text
TEMPLATES = {"gpt2": ((), ()), "llama": ((1,), ()), "t5": ((), (1,)), "bart": ((0,), (2,)), "marian": ((), (0,))}
MERGES = ("th", "he", "in", "an", "er", "ou", "on", "_t", "_a", "_s", "st", "or")


def tokenizer_of(kind):
    """A tokenizer as the family has it, with the letters and some pairs of them."""
    specials, byte_level = SPECIALS[kind], kind in ("gpt2", "bart")
    space = "Ġ" if byte_level else "▁"
    pieces = [space, *"abcdefghijklmnopqrstuvwxyz", *(pair.replace("_", space) for pair in MERGES)]
    entries = [specials.get(i) or pieces.pop(0) for i in range(V)]
    if kind in ("t5", "marian"):
        scores = [(entry, -8.0 - i if len(entry) < 3 else 0.0) for i, entry in enumerate(entries)]
        tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=entries.index("<unk>")))
    else:
        merges = [tuple(pair.replace("_", space)) for pair in MERGES if pair.replace("_", space) in entries]
        unk = None if byte_level else "<unk>"
        tokenizer = tokenizers.Tokenizer(
            models.BPE({entry: i for i, entry in enumerate(entries)}, merges, unk_token=unk)
        )
    if byte_level:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    end = [(name, i) for i, name in specials.items() if name == "</s>"]
    tokenizer.post_processor = {
        "gpt2": lambda: processors.ByteLevel(trim_offsets=False),
        "llama": lambda: processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)]),
        "bart": lambda: processors.RobertaProcessing(("</s>", 2), ("<s>", 0)),
    }.get(kind, lambda: processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", end))()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=name == "<mask>") for name in specials.values()]
    )
    return tokenizer


def write_tokenizer(kind, directory, **changes):
    """tokenizer.json and tokenizer_config.json."""
    tokenizer_of(kind).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{role}_token": token for role, token in ROLES[kind].items()}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | changes), encoding="utf-8")


def directory_of(kind, directory, **generation):
    """The model of a fixture with a tokenizer; `generation`: more of generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(FIXTURES / kind / name, directory)
    settle(directory, **generation)
    write_tokenizer(kind, directory)
    return directory


def settle(directory, **generation):
    path = directory / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | generation))


LINES = ["the other", "a", "sun and rain", "in a house", " x  y"]
WRITTEN = ["one</s> two", "the<extra_id_0> cat", "<mask> a", "<s>b"]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", params=SPECIALS)
def theirs(request, tmp_path_factory):
    """Kind, directory, and what is loaded from it."""
    directory = directory_of(request.param, tmp_path_factory.mktemp("theirs"), max_new_tokens=7)
    return request.param, directory, tfm_jax.load(directory)


def test_text_is_read_as_the_file_says(theirs):
    """With what its template puts around it, and special tokens where the text spells them: B33."""
    kind, _, (_, _, tokenizer) = theirs
    assert tokenizer.template == TEMPLATES[kind]
    file = tokenizer_of(kind)
    lines = [*LINES, *WRITTEN, ""]
    assert tokenizer.encode_sources(lines) == [file.encode(line).ids for line in lines]
    before, _ = TEMPLATES[kind]
    alone = [file.encode(line, add_special_tokens=False).ids for line in lines]
    assert tokenizer.encode(lines) == alone
    assert tokenizer.encode_prompts(lines[:-1]) == [[*before, *ids] for ids in alone[:-1]]
    assert tokenizer.encode_prompts([""]) == [[*before] or [tokenizer.bos_id]]
    run = Tokenizer.load(theirs[1])
    assert run.template is None and set(run.encode(WRITTEN)[0]).isdisjoint(run.special_ids - {run.unk_id})


def test_text_is_written_as_the_file_says(theirs):
    """No special token shows, nor what has no entry."""
    kind, _, (_, _, tokenizer) = theirs
    file, rng = tokenizer_of(kind), np.random.default_rng(3)
    rows = [[*rng.integers(0, V, 11).tolist(), V + 2] for _ in range(7)]
    assert tokenizer.decode(rows) == [file.decode(row, skip_special_tokens=True) for row in rows]
    with pytest.raises(ValueError, match="-1 is negative"):
        tokenizer.decode([[5, -1]])


def test_the_decoder_starts_as_config_json_says(theirs):
    kind, directory, (_, _, tokenizer) = theirs
    start = json.loads((directory / "config.json").read_text()).get("decoder_start_token_id", 1)
    assert tokenizer.bos_id == start


def test_generation_config_says_more_than_config(tmp_path):
    """As in transformers, which reads the start of the decoder there."""
    directory = directory_of("t5", tmp_path, decoder_start_token_id=4)
    assert hf.load(directory)[2].bos_id == 4
    settle(directory, decoder_start_token_id=[4, 5])
    with pytest.raises(ValueError, match=r"decoder_start_token_id is \[4, 5\]: one id"):
        hf.load(directory)


def test_saved_again_it_is_the_same(theirs, tmp_path):
    """The template, the settings beside it and what is read and written; the start is no bos_token."""
    kind, directory, (model, params, tokenizer) = theirs
    write_tokenizer(kind, directory, chat_template="{{ x }}", model_max_length=19)
    hf.save(tmp_path / "again", model, params, hf.load(directory)[2], model_type=kind)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((directory / name).read_text())
    again = hf.load(tmp_path / "again")[2]
    assert (again.template, again.bos_id) == (tokenizer.template, tokenizer.bos_id)
    assert again.encode_sources([*LINES, *WRITTEN]) == tokenizer.encode_sources([*LINES, *WRITTEN])


def test_a_directory_without_tokenizer(tmp_path):
    directory_of("gpt2", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist: .*save_pretrained\(DIRECTORY\)"):
        hf.load(tmp_path)


def log_p(model, params, *tokens):
    """log p of the token after each, without batches or padding."""
    arrays = [jax.numpy.asarray([ids], "int32") for ids in tokens]
    return np.asarray(jax.nn.log_softmax(model.apply(params, *arrays)[0]))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_target_is_scored_with_what_stands_around_it(tmp_path, kind):
    model, params, tokenizer = tfm_jax.load(directory_of(kind, tmp_path))
    (before, after), (start, eos) = TEMPLATES[kind], {"t5": (0, 1), "bart": (2, 2)}[kind]
    x, y = tokenizer.encode(["the sun", "a hat"])
    target = [*before, *y, *after]
    assert target[-1] == eos
    scores = log_p(model, params, [*before, *x, *after], [start, *target[:-1]])
    (score,) = score_targets(model, params, tokenizer, ["the sun"], ["a hat"])
    assert score.tokens == len(target)
    np.testing.assert_allclose(score.log_prob, scores[np.arange(len(target)), target].sum(), rtol=1e-4)


@pytest.mark.parametrize("kind, start", [("gpt2", (1,)), ("llama", (1,)), ("llama", (1, 4))])
def test_a_text_is_predicted_from_what_stands_before_it(tmp_path, kind, start):
    """From bos where that is nothing; of a longer start nothing is predicted, nor twice what windows share."""
    model, params, tokenizer = tfm_jax.load(directory_of(kind, tmp_path))
    if len(start) > 1:
        tokenizer = Tokenizer.load(tmp_path).with_template(start, (), {})
    for text, stride in (("the sun", None), ("quiz: the sun and rain on it at noon", 8)):
        ids = [*start, *tokenizer.encode([text])[0], 1]
        assert (len(ids) > 25) == (stride is not None)
        found = perplexity(model, params, tokenizer, [text], stride=stride)
        total, read = 0.0, len(start)
        for at in range(0, len(ids), stride or len(ids)):
            window = ids[at : at + 25]
            scores = log_p(model, params, window[:-1])
            new = [i for i in range(1, len(window)) if at + i >= read]
            total, read = total - sum(scores[i - 1, window[i]] for i in new), max(read, at + len(window))
        assert found.tokens == len(ids) - len(start)
        np.testing.assert_allclose(found.nats_per_token * found.tokens, total, rtol=1e-4)


# --- our models there ---

KINDS = ("encoder-decoder", "decoder")
DECODE = Decode(beams=3, nbest=2, max_new_tokens=9, length_penalty=0.5, no_repeat_ngram=3, min_new_tokens=1)


def small(kind, vocab_size):
    """A model of this kind that transformers has too."""
    sizes = {"d_model": 12, "d_ff": 17, "num_heads": 3, "max_length": 29}
    if kind == "decoder":
        return build(GPTConfig(vocab_size, num_layers=1, **sizes))
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "positions": "learned", "embedding_norm": True}
    return build(TransformerConfig(vocab_size, **sizes, activation="gelu", tied_embeddings="all", head_bias=True))


def random_params(model):
    """Loud, so that outputs differ."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(0, 0.8, leaf.shape), "float32"), model.shapes)


@pytest.fixture(scope="module", params=KINDS)
def ours(request):
    """A model and a tokenizer as training makes it."""
    tokenizer = Tokenizer.train(["the cats sat on a mat", "</s> <mask> "], kind="unigram", vocab_size=53, sentinels=2)
    model = small(request.param, tokenizer.vocab_size)
    return model, random_params(model), tokenizer


SHORT = ["the a", "a", "sat on", "mat", "o"]


def written(model, params, tokenizer, decode):
    """The texts of SHORT, and log p of the first two given the last two."""
    if model.config.kind == "decoder":
        found = complete(model, params, tokenizer, SHORT, decode=replace(decode, nbest=1), sampling=None)
        whole = perplexity(model, params, tokenizer, SHORT).nats_per_token
        return [[o.text for o in row] for row in found], [whole]
    found = translate(model, params, tokenizer, SHORT, decode=decode)
    scores = score_targets(model, params, tokenizer, SHORT[:2], SHORT[2:4])
    return [[o.text for o in row] for row in found], [score.log_prob for score in scores]


def test_a_model_of_ours_there_writes_the_same(ours, tmp_path):
    """Its template is what it was trained with, and generation_config.json says how it decodes."""
    model, params, tokenizer = ours
    kind = model.config.kind
    hf.save(tmp_path, *ours)
    hf.save_generation(tmp_path, hf.write_generation(DECODE, kind))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    again, same, there = hf.load(tmp_path)
    assert there.template == (((bos,), ()) if kind == "decoder" else ((), (eos,)))
    assert there.bos_id == bos and there.eos_id == eos and there.pad_id == tokenizer.pad_id
    assert there.encode(LINES) == tokenizer.encode(LINES)
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [[bos, *ids] if kind == "decoder" else [*ids, eos] for ids in tokenizer.encode(LINES)]
    assert [file.encode(line).ids for line in LINES] == expected
    decode = hf.read_generation(tmp_path)
    if kind == "encoder-decoder":
        assert decode == replace(DECODE, normalization="transformers", eos_ids=(eos,))
    texts, scores = written(again, same, there, replace(decode, beams=3, length_penalty=0.5, early_stopping=True))
    own_texts, own_scores = written(*ours, replace(DECODE, normalization="transformers"))
    np.testing.assert_allclose(scores, own_scores, rtol=1e-5)
    hidden = [(f"<{name}>", "") for name in ("unk", "extra_id_0", "extra_id_1")]
    for old, new in hidden:
        own_texts = [[text.replace(old, new) for text in row] for row in own_texts]
    assert texts == own_texts and len({row[0] for row in texts}) > 2
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["padding_side"] == ("left" if kind == "decoder" else "right")


def test_the_ids_of_generation_config(ours, tmp_path):
    model, _, tokenizer = ours
    hf.save(tmp_path, *ours)
    start = "bos_token_id" if model.config.kind == "decoder" else "decoder_start_token_id"
    expected = {start: tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == expected


def test_a_decoder_with_labels_reads_there_what_it_was_trained_on(ours, tmp_path):
    """Start, text and end; it writes nothing, so nothing says how."""
    model, _, tokenizer = ours
    if model.config.kind == "encoder-decoder":
        model = small("decoder", tokenizer.vocab_size)
    labelled = build(replace(model.config, head="sequence", labels=("bad", "good")))
    hf.save(tmp_path, labelled, random_params(labelled), tokenizer)
    again, _, there = hf.load(tmp_path)
    assert again == labelled and there.template == ((tokenizer.bos_id,), (tokenizer.eos_id,))
    assert not (tmp_path / "generation_config.json").exists()


def test_a_stream_is_the_whole(tmp_path):
    directory = directory_of("llama", tmp_path, max_new_tokens=7)
    loaded, decode = tfm_jax.load(directory), hf.read_generation(directory)
    for prompt in (*LINES[:2], "", "<s>"):
        ((output,),) = complete(*loaded, [prompt], decode=decode)
        assert "".join(stream(*loaded, prompt, decode=decode, chunk=3)) == output.text
