"""Every experiment runs for two updates, in a size that a test has time for, and leaves the result it promises."""

import gzip
import json
import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from experiments import dates, multi30k, multi30k_bpe, parallel_text
from tfm_jax.config import Run
from tfm_jax.data.sources import read_splits
from tfm_jax.models.transformer import TransformerConfig
from tfm_jax.train import evaluate, loop
from tfm_jax.train.run import load

EXPERIMENTS = {"dates": dates, "multi30k": multi30k, "parallel_text": parallel_text}
SMALL = """
--train.steps 2 --train.log-every 1 --model.d-model 8 --model.d-ff 8 --model.num-heads 2 --model.num-encoder-layers 1
--model.num-decoder-layers 1 --data.num-buckets 1 --data.rows-multiple 1 --decode.beams 1 --decode.max-new-tokens 9
"""
BYTES = "--model.vocab-size 260 --model.max-length 128 --data.max-length 128 --data.tokens-per-batch 256"
FITTED = {"steps", "train_seconds", "tokens_per_second", "parameters", "validation_loss", "dropped_examples"}
PAIRS = [
    ("a dog runs .", "ein hund rennt ."),
    ("two men sit .", "zwei männer sitzen ."),
    ("a girl in red", "ein mädchen in rot"),
    ("the sea", "das meer"),
]


def run(experiment, directory, arguments=""):
    """Train in `directory` with the command line's overrides; gives result.json."""
    arguments = [*SMALL.split(), *arguments.split(), "--run-dir", str(directory)]
    experiment.main(tyro.cli(Run[TransformerConfig], default=experiment.CONFIG, args=arguments))
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    assert set(result) >= FITTED
    assert result["steps"] == 2 and result["train_seconds"] > 0 and result["tokens_per_second"] > 0
    assert result["parameters"] == load(directory)[0].num_parameters
    return result


def write(path, lines, *, open=open):
    path.parent.mkdir(exist_ok=True)
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
    monkeypatch.setattr(evaluate, "plot_alignments", lambda *_, **__: None)


def test_dates(tmp_path, no_alignments):
    sizes = "--data.train-source 60 --data.validation-source 20 --data.test-source 90"
    arguments = f"--model.vocab-size 500 --data.tokens-per-batch 256 {sizes}"
    result = run(dates, tmp_path / "run", arguments)
    assert set(result) >= {"exact_match", "exact_match_by_language", "examples"}
    assert 0.0 <= result["exact_match"] <= 1.0 and result["examples"] == 90
    assert set(result["exact_match_by_language"]) == set(dates.LANGUAGES)
    assert all(0.0 <= share <= 1.0 for share in result["exact_match_by_language"].values())
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 90


def test_multi30k(tmp_path, no_alignments):
    for name, pairs in {"train": PAIRS * 5, "val": PAIRS[:3], "test_2016_flickr": PAIRS[1:]}.items():
        for side, language in enumerate(("en", "de")):
            path = tmp_path / "data" / "tok" / f"{name}.lc.norm.tok.{language}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, [pair[side] for pair in pairs], open=gzip.open)
    result = run(multi30k, tmp_path / "run", f"--data.dir {tmp_path / 'data'} --data.merges 13 --model.vocab-size 97")
    assert set(result) >= {"bleu", "bleu_signature", "chrf", "exact_match"}
    assert 0.0 <= result["bleu"] <= 100.0 and "tok:none" in result["bleu_signature"]
    assert len(lines_of(tmp_path / "run" / "hypotheses.txt")) == 3


def test_multi30k_without_its_data_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--data.dir DIR"):
        multi30k.main(multi30k.CONFIG)
    with pytest.raises(FileNotFoundError, match="train.lc.norm.tok.en.gz"):
        multi30k.main(replace(multi30k.CONFIG, data=replace(multi30k.CONFIG.data, dir=str(tmp_path))))
    assert not os.listdir()


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
