"""Every experiment runs for two updates, in a size that a test has time for, and leaves the result it promises."""

import gzip
import json
import lzma
import os
import runpy
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from experiments import (
    bert_mlm,
    dates,
    gpt_shakespeare,
    gpt_wikitext,
    multi30k,
    multi30k_bpe,
    parallel_text,
    precision,
    sst2,
    t5_span,
    t5_tasks,
)
from tests.train.test_pretrained import bert_directory
from tfm_jax.config import Run
from tfm_jax.data.sources import read_splits
from tfm_jax.decode.predict import predict
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.train import evaluate, loop
from tfm_jax.train.run import load, read_config

EXPERIMENTS = {
    "bert_mlm": bert_mlm,
    "dates": dates,
    "gpt_shakespeare": gpt_shakespeare,
    "gpt_wikitext": gpt_wikitext,
    "multi30k": multi30k,
    "parallel_text": parallel_text,
    "precision": precision,
    "sst2": sst2,
    "t5_span": t5_span,
    "t5_tasks": t5_tasks,
}
# --data.dir names their folder, and this is in it
NEEDS_FOLDER = {
    "bert_mlm": "wiki.train.tokens.xz",
    "gpt_shakespeare": "input.txt",
    "gpt_wikitext": "wiki.train.tokens.xz",
    "multi30k": "train.lc.norm.tok.en.gz",
    "precision": "train.lc.norm.tok.en.gz",
    "sst2": "train.tsv.gz",
    "t5_span": "wiki.train.tokens.xz",
    "t5_tasks": "deu-eng.zip",
}
ONE_STACK = """
--train.steps 2 --train.log-every 1 --model.d-model 8 --model.d-ff 8 --model.num-heads 2 --data.num-buckets 1
--data.rows-multiple 1 --decode.max-new-tokens 9
"""
SMALL = f"{ONE_STACK} --model.num-encoder-layers 1 --model.num-decoder-layers 1 --decode.beams 1"
SHORT = "--model.max-length 47 --data.max-length 47 --data.tokens-per-batch 188"
BYTES = "--model.vocab-size 260 --model.max-length 128 --data.max-length 128 --data.tokens-per-batch 256"
FITTED = {"steps", "train_seconds", "tokens_per_second", "parameters", "validation_loss", "dropped_examples"}
PAIRS = [
    ("a dog runs .", "ein hund rennt ."),
    ("two men sit .", "zwei männer sitzen ."),
    ("a girl in red", "ein mädchen in rot"),
    ("the sea", "das meer"),
]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def run(experiment, directory, arguments="", *, small=SMALL):
    """Train in `directory` with the command line's overrides; gives result.json."""
    result = result_of(experiment, directory, arguments, small=small)
    assert set(result) >= FITTED
    assert result["steps"] == 2 and result["train_seconds"] > 0 and result["tokens_per_second"] > 0
    assert result["parameters"] == load(directory)[0].num_parameters
    return result


def result_of(experiment, directory, arguments="", *, small=SMALL):
    """result.json of what the command line says."""
    arguments = [*small.split(), *arguments.split(), "--run-dir", str(directory)]
    kind = Run[type(experiment.CONFIG.model)]
    experiment.main(tyro.cli(kind, default=experiment.CONFIG, args=arguments))
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


def write(path, lines, *, open=open):
    path.parent.mkdir(exist_ok=True, parents=True)
    with open(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def lines_of(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_importing_an_experiment_does_nothing(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    file = EXPERIMENTS[name].__file__
    contents = runpy.run_path(file, run_name=name)
    assert contents["CONFIG"] == EXPERIMENTS[name].CONFIG
    assert not os.listdir() and capfd.readouterr() == ("", "")
    assert contents["CONFIG"].run_dir == f"runs/{name}"
    assert f"python experiments/{Path(file).name}" in contents["__doc__"]


@pytest.fixture
def no_alignments(monkeypatch):
    """Every picture of attention compiles for as long as the rest of a test; one experiment draws them."""
    for name in ("plot_alignments", "plot_heads"):
        monkeypatch.setattr(evaluate, name, lambda *_, **__: None)


def test_dates(tmp_path, no_alignments):
    sizes = "--data.train-source 60 --data.validation-source 20 --data.test-source 90"
    arguments = f"--model.vocab-size 500 --data.tokens-per-batch 256 {sizes}"
    result = run(dates, tmp_path / "run", arguments)
    assert set(result) >= {"exact_match", "exact_match_by_language", "examples"}
    assert 0.0 <= result["exact_match"] <= 1.0 and result["examples"] == 90
    assert set(result["exact_match_by_language"]) == set(dates.LANGUAGES)
    assert all(0.0 <= share <= 1.0 for share in result["exact_match_by_language"].values())
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 90


def write_multi30k(folder):
    for name, pairs in {"train": PAIRS * 5, "val": PAIRS[:3], "test_2016_flickr": PAIRS[1:]}.items():
        for side, language in enumerate(("en", "de")):
            path = folder / "tok" / f"{name}.lc.norm.tok.{language}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, [pair[side] for pair in pairs], open=gzip.open)


def test_multi30k(tmp_path, no_alignments):
    write_multi30k(tmp_path / "data")
    result = run(multi30k, tmp_path / "run", f"--data.dir {tmp_path / 'data'} --data.merges 13 --model.vocab-size 97")
    assert set(result) >= {"bleu", "bleu_signature", "chrf", "exact_match"}
    assert 0.0 <= result["bleu"] <= 100.0 and "tok:none" in result["bleu_signature"]
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 3


def test_precision(tmp_path):
    """The curve in bfloat16 is another one, and close."""
    write_multi30k(tmp_path / "data")
    data = f"--data.dir {tmp_path / 'data'} --data.merges 13 --model.vocab-size 97"
    result = result_of(precision, tmp_path / "run", data)
    assert 0 < result["loss_largest_difference"] < 0.01 and result["validation_loss_largest_difference"] < 0.01
    assert result["loss_float32"] != result["loss_bfloat16"]
    assert read_config(tmp_path / "run" / "bfloat16").precision.compute == "bfloat16"


@pytest.mark.parametrize("name", NEEDS_FOLDER)
def test_without_its_data_an_experiment_says_what_to_give(name, tmp_path, monkeypatch):
    """In one line; in a folder without the file it names the file. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    experiment, config = EXPERIMENTS[name], EXPERIMENTS[name].CONFIG
    with pytest.raises(SystemExit, match="--data.dir DIR") as end:
        experiment.main(config)
    assert "\n" not in end.value.code
    monkeypatch.setattr(sst2, "installed", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=NEEDS_FOLDER[name]):
        experiment.main(replace(config, data=replace(config.data, dir=str(tmp_path))))
    assert not os.listdir()


# --- the recipes on real text, in small ---

PROSE = """\
 = The cat =

 The cat sat on the mat , and the dog ran .
 In the 19th century the cats ran after dogs .

 = = History = =
 A dog is no cat , and a cat is no dog ; both sit on mats .
""".split("\n")


@pytest.fixture
def wiki(tmp_path):
    """A folder with what WikiText's files are called."""
    for name, lines in {"train": PROSE * 3, "valid": PROSE}.items():
        write(tmp_path / "data" / f"wiki.{name}.tokens.xz", lines, open=lzma.open)
    return tmp_path / "data"


def test_bert_mlm(wiki, tmp_path, capsys):
    result = run(
        bert_mlm,
        tmp_path / "run",
        f"{SHORT} --model.num-layers 1 --model.vocab-size 97 --data.dir {wiki}",
        small=ONE_STACK,
    )
    assert set(result) >= {"loss", "accuracy", "commonest_token_accuracy"}
    assert 0.0 <= result["accuracy"] <= 1.0 and 0.0 < result["commonest_token_accuracy"] < 1.0
    shown = capsys.readouterr().out
    assert " times that of the guess" in shown and "\n<s> " in shown and " | " in shown


def test_gpt_wikitext(wiki, tmp_path, capsys):
    """Its words are those between spaces, with the end of each line."""
    arguments = f"{SHORT} --model.num-layers 1 --model.vocab-size 270 --data.dir {wiki}"
    result = run(gpt_wikitext, tmp_path / "run", arguments, small=ONE_STACK)
    assert result["evaluated_words"] == sum(len(line.split()) + 1 for line in PROSE)
    nats = result["nats_per_token"] * result["evaluated_tokens"]
    assert result["perplexity_per_word"] == pytest.approx(np.exp(nats / result["evaluated_words"]))
    shown = capsys.readouterr().out
    assert all(f"\n{prompt}|" in shown for prompt in (" The game was", " In the 19th century ,", " = = History = ="))


def test_gpt_shakespeare(tmp_path, monkeypatch, capsys):
    """The model learns from the first nine tenths of all characters and is measured on the others, with an end."""
    text = "\n".join([f"ROMEO:\nLine {i}, so be it.\n" for i in range(40)])
    write(tmp_path / "data" / "input.txt", text.split("\n"))
    text, texts, fit = text + "\n", [], gpt_shakespeare.fit
    monkeypatch.setattr(gpt_shakespeare, "fit", lambda run, **given: texts.append(given) or fit(run, **given))
    arguments = f"{SHORT} --model.num-layers 1 --data.dir {tmp_path / 'data'}"
    result = run(gpt_shakespeare, tmp_path / "run", arguments, small=ONE_STACK)
    cut = len(text) * 9 // 10
    assert texts[0]["train"].source == [text[:cut]] and texts[0]["validation"].source == [text[cut:]]
    assert result["evaluated_tokens"] == len(text) - cut + 1 and result["nats_per_token"] > 0
    assert "\n\nROMEO:\n|" in capsys.readouterr().out


def test_t5_span(wiki, tmp_path, capsys):
    arguments = f"{SHORT} --model.vocab-size 97 --data.corruption.sentinels 11 --data.dir {wiki}"
    result = run(t5_span, tmp_path / "run", arguments)
    assert result["loss"] > 0 and 0.0 < result["unigram_entropy"] < np.log(97)
    shown = capsys.readouterr().out
    assert "\nread " in shown and "\nrestored " in shown and "<extra_id_0>" in shown


REVIEWS = [("a good film", 1), ("bad", 0), ("a dog", 1), ("no good", 0), ("a dead film", 0), ("lead on", 1)]


def write_reviews(folder):
    for name, count in {"train": 5, "heldout": 2, "dev": 1}.items():
        rows = [f"{text}\t{label}" for text, label in REVIEWS * count]
        write(folder / f"{name}.tsv.gz", ["sentence\tlabel", *rows], open=gzip.open)


def test_sst2(tmp_path, capsys):
    """A checkpoint of Hugging Face in, one out: it says of every line what the run says of it."""
    write_reviews(tmp_path / "data")
    theirs = bert_directory(tmp_path / "theirs")
    sizes = "--model.vocab-size 41 --model.num-layers 2 --model.d-ff 13 --model.num-heads 4 --model.norm-eps 0.0002"
    lengths = "--model.max-length 24 --data.max-length 24 --data.tokens-per-batch 192"
    folders = f"--data.dir {tmp_path / 'data'} --train.init-from {theirs}"
    result = run(sst2, tmp_path / "run", f"{sizes} {lengths} {folders}", small=ONE_STACK)
    assert result["examples"] == len(REVIEWS)
    own, written = (load(tmp_path / "run" / name) for name in ("", "huggingface"))
    lines = [text for text, _ in REVIEWS]
    numbers = predict(*own, lines)
    np.testing.assert_array_equal(predict(*written, lines), numbers)
    best = numbers.argmax(axis=1)
    assert result["accuracy"] == pytest.approx(np.mean(best == [label for _, label in REVIEWS]))
    assert written[0].config.labels == ("negative", "positive") and written[2].template == ((2,), (3,))
    rows = lines_of(tmp_path / "run" / "predictions.tsv")[1:]
    assert rows == [
        f"{own[0].config.labels[i]}\t{own[0].config.labels[label]}\t{text}"
        for i, (text, label) in zip(best, REVIEWS, strict=True)
    ]
    train = read_config(tmp_path / "run").train
    assert (train.init_from, train.init_partial) == (str(theirs), True)
    assert "a good film" in capsys.readouterr().out


def test_sst2_without_a_checkpoint_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sst2, "installed", lambda: "")
    with pytest.raises(SystemExit, match="--train.init-from DIRECTORY, or pip install"):
        sst2.main(replace(sst2.CONFIG, data=replace(sst2.CONFIG.data, dir=str(tmp_path))))
    assert not os.listdir()


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with sentence pairs and reviews, of which 13 English sentences are scored."""
    monkeypatch.setattr(t5_tasks, "HELD_OUT", 13)
    pairs = [(f"I see {i} dogs", f"ich sehe {i} hunde") for i in range(540)]
    pairs += [(english, f"da sind {i} hunde") for i, (english, _) in enumerate(pairs)]
    pairs += [("one two three four five six seven eight nine", "neun"), (" a b c d e f g h ", "acht")]
    folder = tmp_path / "data"
    write_reviews(folder / "sst2")
    (folder / "tatoeba_deu_eng").mkdir()
    with zipfile.ZipFile(folder / "tatoeba_deu_eng" / "deu-eng.zip", "w") as file:
        file.writestr(
            "deu.txt", "".join(f"{english}\t{german}\tsource {i}\n" for i, (english, german) in enumerate(pairs))
        )
    return folder, pairs


def test_t5_tasks(tasks, tmp_path, no_alignments, capsys):
    arguments = f"{SHORT} --data.tokens-per-batch 940 --model.vocab-size 97 --data.dir {tasks[0]}"
    result = run(t5_tasks, tmp_path / "run", arguments)
    assert set(result) >= {"bleu", "bleu_signature", "chrf", "sst2_accuracy"}
    assert 0.0 <= result["bleu"] <= 100.0 and 0.0 <= result["sst2_accuracy"] <= 1.0
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 13
    shown = capsys.readouterr().out
    assert "source     translate: I see " in shown and "  review: a good film\n" in shown


def test_no_scored_sentence_of_t5_tasks_is_learned(tasks):
    """Whatever its translation is; of several it is scored against the first, and long ones are neither."""
    folder, pairs = tasks
    train, validation, test = t5_tasks.translations(replace(t5_tasks.CONFIG.data, dir=str(folder)))
    assert (len(validation), len(test)) == (500, 13)
    english = [set(text.source) for text in (train, validation, test)]
    assert sum(map(len, english)) == len(set().union(*english)) == 541
    assert len(train) == 2 * len(english[0]) - ("translate: a b c d e f g h" in english[0])
    first = {f"translate: {one.strip()}": other for one, other in reversed(pairs)}
    for text in (validation, test):
        assert text.target == [first[source] for source in text.source]
    known = {(f"translate: {one.strip()}", other) for one, other in pairs}
    assert set(zip(train.source, train.target, strict=True)) <= known


def test_reviews_of_t5_tasks_are_answered_by_words(tasks):
    text = t5_tasks.reviews(replace(t5_tasks.CONFIG.data, dir=str(tasks[0])), "heldout")
    words = Counter(zip(text.source, text.target, strict=True))
    assert words == {(f"review: {line}", ("negative", "positive")[label]): 2 for line, label in REVIEWS}


def test_parallel_text(tmp_path):
    """Plain and gzip files; without a test text the validation text is scored."""
    files = {}
    for name, pairs in {"train": PAIRS * 5, "validation": PAIRS[1:]}.items():
        for side, role in enumerate(("source", "target")):
            path = tmp_path / "data" / (f"{name}.{role}" + (".gz" if side else ""))
            write(path, [pair[side] for pair in pairs], open=gzip.open if side else open)
            files[f"--data.{name}-{role}"] = path
    arguments = " ".join(f"{option} {path}" for option, path in files.items())
    result = run(parallel_text, tmp_path / "run", f"{BYTES} {arguments}")
    assert set(result) >= {"bleu", "bleu_signature", "chrf", "exact_match"}
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 3
    assert (tmp_path / "run" / "alignments.png").exists() and (tmp_path / "run" / "curves.png").exists()


def test_parallel_text_without_training_text_says_what_to_give(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--data.train-source FILE --data.train-target FILE"):
        parallel_text.main(parallel_text.CONFIG)
    # one side alone has no translations to learn from
    write(tmp_path / "some.en", ["a text"] * 20)
    config = parallel_text.CONFIG
    with pytest.raises(ValueError, match="learns from pairs, .*, and this data is a text"):
        parallel_text.main(replace(config, data=replace(config.data, train_source="some.en", num_buckets=1)))
    assert os.listdir() == ["some.en"]


def parallel_config(tmp_path, source, arguments=""):
    write(tmp_path / "data" / "source", source)
    write(tmp_path / "data" / "target", source[::-1])
    given = f"--data.train-source {tmp_path / 'data' / 'source'} --data.train-target {tmp_path / 'data' / 'target'}"
    arguments = f"{SMALL} {BYTES} {given} {arguments} --run-dir {tmp_path / 'run'}"
    return tyro.cli(Run[TransformerConfig], default=parallel_text.CONFIG, args=arguments.split())


def test_parallel_text_holds_out_the_end_of_the_training_text(tmp_path):
    lines = [f"line {i}" for i in range(30)]
    data = parallel_config(tmp_path, lines).data
    train, validation, test = read_splits(data).values()
    assert (train.source, validation.source, test) == (lines[:27], lines[27:], validation)
    assert validation.where(0) == f"{tmp_path / 'data' / 'source'}:28"
    train, validation, test = read_splits(
        parallel_config(
            tmp_path, lines, f"--data.test-source {tmp_path}/data/target --data.test-target {tmp_path}/data/source"
        ).data
    ).values()
    assert test.source == lines[::-1] and test.target == lines and len(validation) == 3


def test_parallel_text_of_few_lines_says_that_it_has_none_to_hold_out(tmp_path):
    """A tenth of nine lines is no line."""
    config = parallel_config(tmp_path, [f"line {i}" for i in range(9)])
    with pytest.raises((SystemExit, ValueError), match="validation"):
        parallel_text.main(config)


def test_parallel_text_that_is_too_long_to_score_does_not_cost_the_training(tmp_path, monkeypatch):
    """It is refused before the training, or the others are scored."""
    trained = []
    fit = loop.fit
    monkeypatch.setattr(parallel_text, "fit", lambda *a, **k: trained.append(1) or fit(*a, **k))
    config = parallel_config(tmp_path, [*(f"line {i}" for i in range(29)), "a" * 200])
    try:
        parallel_text.main(config)
    except (ValueError, SystemExit) as error:
        assert "30" in str(error) and not trained
    else:
        assert (tmp_path / "run" / "result.json").exists()


def test_dates_are_made_and_read_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        tyro.cli(Run[TransformerConfig], default=dates.CONFIG, args=["--data.dir", "x"])
    assert "data.dir is 'x', but dates are made, not read" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )
    assert not os.listdir()


def test_the_files_of_the_published_vocabulary_are_written_and_compared(tmp_path, capsys):
    """Of another text they are not the published ones, and it says so; those of the text itself need the data."""
    for name in multi30k_bpe.TEXTS.values():
        for side, language in enumerate(("en", "de")):
            path = tmp_path / "data" / "tok" / f"{name}.lc.norm.tok.{language}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, [pair[side] for pair in PAIRS * 2], open=gzip.open)
    config = replace(multi30k_bpe.CONFIG, dir=str(tmp_path / "data"), out=str(tmp_path / "out"), merges=3)
    multi30k_bpe.main(config)
    assert "0 of 7 files" in capsys.readouterr().out
    assert (tmp_path / "out" / "code").read_text().startswith("#version: 0.2\n")
    lines = lines_of(tmp_path / "out" / "train.bpe.de")
    assert [line.replace("@@ ", "") for line in lines] == [pair[1] for pair in PAIRS * 2]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["entries"] < 60 and set(result.values()) == {result["entries"], False}
