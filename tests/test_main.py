"""The command line: as many lines out as in, scores as JSON, and errors in one line."""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import tfm_jax
from tests.decode.test_predict import lively
from tests.decode.test_text import KNOWN, language_model
from tests.hf.test_text import directory_of, random_params, settle, small
from tests.train.killed_run import TRAIN, VALIDATION, tiny_run
from tests.train.test_pretrained import MODEL, bert_directory
from tfm_jax import __main__ as command_line
from tfm_jax import equivalence, hf
from tfm_jax.config import Data, Decode, Run, Train
from tfm_jax.data.batches import make_batches, make_tokenizer
from tfm_jax.data.sources import read_split
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.predict import predict
from tfm_jax.decode.text import BLANK, Output, complete, translate
from tfm_jax.equivalence_cases import Case
from tfm_jax.models import build
from tfm_jax.ops.attention import IMPLEMENTATIONS
from tfm_jax.train import loop
from tfm_jax.train.checkpoint import save_params
from tfm_jax.train.run import PARAMETERS, load, open_run, read_config_file

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time goes into compiling, and XLA's optimisations double it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run that has only begun, so that its outputs are anything."""
    run = tiny_run(tmp_path_factory.mktemp("main") / "run", steps=2)
    return loop.fit(run, train=TRAIN, validation=VALIDATION).directory


@pytest.fixture(scope="module", params=[260, 300], ids=["bytes", "bpe"])
def writer(request, tmp_path_factory):
    """The run directory of a language model that has learned KNOWN."""
    model, params, tokenizer = language_model(request.param)
    directory = tmp_path_factory.mktemp("writer") / "run"
    decode = Decode(beams=1, max_new_tokens=37)
    run = Run(model.config, Train(steps=120), str(directory), Data(max_length=model.config.max_length), decode=decode)
    save_params(open_run(run, tokenizer) / PARAMETERS, params)
    return directory


def process(*arguments, stdin=b""):
    """A process of its own, as a user starts it: outside the repository."""
    command = [sys.executable, "-m", "tfm_jax", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, input=stdin, env=environment, cwd="/", capture_output=True)


@pytest.fixture
def call(monkeypatch, capsysbinary):
    """The same in this process: (exit status or message, stdout)."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["tfm_jax", *map(str, arguments)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "stdin", type("Stdin", (), {"buffer": type("Buffer", (), {"read": lambda self: stdin})()})
            )
            try:
                command_line.main()
                code = 0
            except SystemExit as end:
                code = end.code
        return code, capsysbinary.readouterr().out

    return run


def test_as_many_lines_out_as_in_with_blank_lines_blank(directory):
    """B42: line ends of Windows, a byte order mark, any script, white space, and no end of the last line."""
    stdin = "\ufeffabc\r\n\r\nГруша 日本\n \t\ngfe\n\n\u2028\nab\rc".encode()
    done = process("translate", "--run", directory, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().split("\n")
    assert lines.pop() == "" and len(lines) == 8
    inputs = ["abc", "", "Груша 日本", " \t", "gfe", "", "\u2028", "ab\rc"]
    assert [i for i, line in enumerate(lines) if not line.strip()][:4] == [1, 3, 5, 6]
    found = translate(*load(directory), inputs, decode=tiny_run("").decode)
    assert lines == [best[0].text.replace("\n", " ") for best in found]
    assert b"Traceback" not in done.stderr and b"\x1b" not in done.stderr


def test_a_missing_run_is_one_line_and_a_failure(tmp_path):
    done = process("translate", "--run", tmp_path / "no run", stdin=b"abc\n")
    assert done.returncode == 1
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ") and "no run" in line


def test_nothing_in_nothing_out(directory, call):
    assert call("translate", "--run", directory) == (0, b"")


def test_a_line_end_that_a_model_writes_is_no_line(directory, call, monkeypatch):
    rows = [[Output("a\nb", -1.0, (5, 2), True)], [BLANK]]
    monkeypatch.setattr(command_line, "translate_lines", lambda *_, **__: rows)
    assert call("translate", "--run", directory, stdin=b"x\n\n") == (0, b"a b\n\n")


def test_beams_replace_those_of_the_run(directory, call, monkeypatch):
    asked = []

    def spy(*_, decode, **__):
        asked.append(decode)
        return []

    monkeypatch.setattr(command_line, "translate_lines", spy)
    call("translate", "--run", directory)
    call("translate", "--run", directory, "--beams", 1)
    assert [decode.beams for decode in asked] == [2, 1]
    assert asked[0] == tiny_run("").decode


def test_n_best_are_n_lines_with_their_scores(directory, call):
    """B42: each line gives n lines, a blank one blanks."""
    arguments = ("translate", "--run", directory, "--beams", 3, "--nbest", 3)
    code, plain = call(*arguments, stdin=b"abc\n\ngfe\n")
    lines = plain.decode().split("\n")
    assert code == 0 and lines.pop() == "" and len(lines) == 9 and lines[3:6] == ["", "", ""]
    scored = call(*arguments, "--scores", stdin=b"abc\n\ngfe\n")[1].decode().split("\n")[:-1]
    assert scored[3:6] == ["", "", ""]
    scores, texts = zip(*[line.split("\t", 1) for line in scored[:3] + scored[6:]], strict=True)
    assert [*texts] == lines[:3] + lines[6:]
    found = translate(*load(directory), ["abc", "gfe"], decode=Decode(beams=3, nbest=3, max_new_tokens=13))
    assert [*scores] == [f"{output.score:.5f}" for outputs in found for output in outputs]


def test_hypotheses_that_are_missing_are_empty_lines(directory, call, monkeypatch):
    rows = [[Output("a", -1.0, (5, 2), True)], [BLANK], [Output("", -0.25, (2,), True), Output("b", -2.5, (6,), False)]]
    monkeypatch.setattr(command_line, "translate_lines", lambda *_, **__: rows)
    code, out = call("translate", "--run", directory, "--nbest", 2, "--scores", stdin=b"x\n\ny\n")
    assert (code, out) == (0, b"-1.00000\ta\n\n\n\n-0.25000\t\n-2.50000\tb\n")


def test_generate_continues_what_the_model_knows(writer, call):
    for known, prompt in zip(KNOWN, ("the cat", "été à"), strict=True):
        code, out = call("generate", "--run", writer, "--prompt", prompt)
        assert code == 0 and prompt + out.decode() == known + "\n"


def test_generate_draws_as_it_is_told(writer, call):
    """The same as by the Python API; two seeds draw different texts."""
    flags = "--temperature 1.5 --top-k 40 --top-p 0.99 --min-p 0.001 --seed 5 --max-new-tokens 11".split()
    flags += "--repetition-penalty 1.1 --no-repeat-ngram 2".split()
    code, out = call("generate", "--run", writer, "--prompt", "the", *flags)
    sampling = tfm_jax.Sampling(temperature=1.5, top_k=40, top_p=0.99, min_p=0.001, seed=5)
    decode = Decode(max_new_tokens=11, repetition_penalty=1.1, no_repeat_ngram=2)
    ((output,),) = complete(*load(writer), ["the"], decode=decode, sampling=sampling)
    assert code == 0 and out.decode() == output.text + "\n"
    assert call("generate", "--run", writer, "--prompt", "the", *flags, "--seed", 6)[1] != out


def test_generate_writes_as_it_goes(writer, monkeypatch):
    """Each piece is flushed before the next one is asked for."""
    seen = []

    class Out:
        buffer = property(lambda self: self)
        write = staticmethod(seen.append)
        flush = staticmethod(lambda: seen.append("flushed"))

    def two(*_, **__):
        yield "日"
        assert seen == ["日".encode(), "flushed"]
        yield "b"

    monkeypatch.setattr(command_line, "stream_text", two)
    monkeypatch.setattr(sys, "stdout", Out())
    command_line.generate(str(writer), "a")
    assert seen[2:4] == [b"b", "flushed"]


def test_generate_is_a_command(writer):
    done = process("generate", "--run", writer, "--prompt", "été à")
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()
    assert done.stdout.decode() == KNOWN[1].removeprefix("été à") + "\n"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--top-k", "0"], "top_k is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0.5"], "at temperature 0 nothing is"),
        (["--repetition-penalty", "0"], "decode.repetition_penalty is 0.0"),
        (["--max-new-tokens", "0"], "decode.max_new_tokens is 0"),
        (["--max-new-tokens", "66"], "max_new_tokens 66 are"),
    ],
)
def test_what_generate_cannot_do_is_said_in_a_line(writer, call, arguments, said):
    code, out = call("generate", "--run", writer, "--prompt", "the cat", *arguments)
    assert code.startswith("error: ") and said in code and "\n" not in code
    assert out == b""


def test_a_run_of_the_other_kind_names_the_command_for_it(writer, directory, call):
    code, out = call("translate", "--run", writer, stdin=b"the cat\n")
    assert code.startswith("error: ") and "generate" in code and out == b""
    code, out = call("generate", "--run", directory, "--prompt", "abc")
    assert code.startswith("error: ") and "translate" in code and out == b""


def test_evaluate_prints_scores_as_json(directory, call, tmp_path):
    (tmp_path / "in").write_text("abc\ngfe\n\n", encoding="utf-8")
    (tmp_path / "out").write_text("cba\nefg\n\n", encoding="utf-8")
    code, out = call("evaluate", "--run", directory, "--source", tmp_path / "in", "--target", tmp_path / "out")
    assert code == 0
    scores = json.loads(out)
    assert set(scores) == {"bleu", "bleu_signature", "chrf", "exact_match", "too_long_lines", "examples"}
    assert scores["examples"] == 3 and scores["exact_match"] >= 1 / 3


@pytest.mark.parametrize(
    "arguments, stdin, said",
    [
        (["--beams", "0"], b"abc\n", "decode.beams is 0"),
        (["--nbest", "0"], b"abc\n", "decode.nbest is 0"),
        (["--nbest", "3"], b"abc\n", "decode.nbest is 3, more than decode.beams, 2"),
        ([], b"abc\n\xff\n", "stdin:2: "),
        ([], b"abc\n" + b"a" * 99 + b"\n", "stdin:2: the line has 101 tokens"),
    ],
)
def test_what_is_wrong_with_the_input_is_said_in_a_line(directory, call, arguments, stdin, said):
    code, out = call("translate", "--run", directory, *arguments, stdin=stdin)
    assert code.startswith("error: ") and said in code and "\n" not in code
    assert out == b""


def test_texts_that_do_not_go_together_are_refused(directory, call, tmp_path):
    (tmp_path / "in").write_text("abc\n")
    (tmp_path / "out").write_text("cba\nefg\n")
    arguments = ("evaluate", "--run", directory, "--source", tmp_path / "in", "--target")
    assert "has 1 lines" in call(*arguments, tmp_path / "out")[0]
    assert "does not exist" in call(*arguments, tmp_path / "missing")[0]


def test_damaged_parameters_are_said_in_a_line(directory, call, tmp_path):
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "parameters" / "_CHECKPOINT_METADATA").write_text("{}")
    code, out = call("translate", "--run", copy, stdin=b"abc\n")
    assert str(code).startswith("error: ") and "damaged" in code and out == b""


def rows(*cases):
    return [row for case in cases for row in equivalence.measure(case, implementations=("reference", "cudnn"))]


def test_equivalence_prints_the_table_and_writes_its_rows(call, monkeypatch, tmp_path):
    asked, found = [], rows(Case(), Case("causal", heads="MQA"))
    monkeypatch.setattr(command_line, "table", lambda **options: asked.append(options) or found)
    code, out = call("equivalence", "--json", tmp_path / "rows.json", "--no-full", "--dtype", "bfloat16")
    assert code == 0 and out.decode() == equivalence.compact(found) + "\n"
    assert json.loads((tmp_path / "rows.json").read_text()) == found
    assert call("equivalence") == (0, out)
    assert asked == [{"full": False, "dtype": "bfloat16"}, {"full": True, "dtype": "float32"}]


def test_a_mismatch_is_exit_code_1_and_is_written(call, monkeypatch, tmp_path):
    class Doubled(type(IMPLEMENTATIONS["reference"])):
        def run(self, request):
            return super().run(request) * 2.0

    monkeypatch.setitem(IMPLEMENTATIONS, "reference", Doubled())
    monkeypatch.setattr(equivalence, "cases", lambda **_: [Case("causal")])
    code, out = call("equivalence", "--json", tmp_path / "rows.json")
    assert code == 1 and b"| **1e+00 mismatch** |" in out
    statuses = {(row["implementation"], row["status"]) for row in json.loads((tmp_path / "rows.json").read_text())}
    assert ("reference", "mismatch") in statuses and ("blockwise", "equal") in statuses


def test_where_the_rows_cannot_go_is_said_before_the_work(call, monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, "table", lambda **_: pytest.fail("the work was done"))
    code, out = call("equivalence", "--json", tmp_path / "no" / "rows.json")
    assert code.startswith("error: ") and "no directory" in code and out == b""


@pytest.mark.slow
def test_all_implementations_are_equal(tmp_path):
    """The whole command: no mismatch, and cases and refusals as in the kept table, in at most 10 minutes."""
    start = time.monotonic()
    done = process("equivalence", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert time.monotonic() - start < 600 and b"\x1b" not in done.stderr
    kept = json.loads((ROOT / "experiments" / "results" / "equivalence.json").read_text())
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row | {"error": 0} for row in found] == [row | {"error": 0} for row in kept]


# --- directories of Hugging Face ---

TEXTS = ["a sun", "the rain", "", "in a"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """kind -> directory of a small model, which is only read."""
    folder = tmp_path_factory.mktemp("theirs")
    return functools.cache(lambda kind: directory_of(kind, folder / kind, max_new_tokens=7))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_generate_from_a_directory(theirs, call, kind):
    """As greedy search over the ids does, which begin as the file says."""
    directory = theirs(kind)
    model, params, tokenizer = hf.load(directory)
    code, out = call("generate", "--run", directory, "--prompt", "the rain")
    ((output,),) = complete(model, params, tokenizer, ["the rain"], decode=Decode(max_new_tokens=7, eos_ids=(1,)))
    assert code == 0 and out.decode() == output.text + "\n" and output.text
    code, out = call("generate", "--run", directory, "--prompt", "the rain", "--max-new-tokens", 3)
    assert code == 0 and output.text.startswith(out.decode()[:-1])


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_translate_from_a_directory(theirs, call, tmp_path, kind):
    """Greedily, and with the beams that its generation_config.json or the flag asks for."""
    loaded, stdin = hf.load(theirs(kind)), "".join(f"{line}\n" for line in TEXTS).encode()
    code, greedy = call("translate", "--run", theirs(kind), stdin=stdin)
    decode = hf.read_generation(theirs(kind))
    assert decode.beams == 1 and decode.max_new_tokens == 7
    expected = [row[0].text for row in translate(*loaded, TEXTS, decode=decode)]
    assert code == 0 and greedy.decode() == "".join(f"{text}\n" for text in expected)
    if kind == "t5":
        copy = shutil.copytree(theirs(kind), tmp_path / "copy")
        settle(copy, num_beams=3, num_return_sequences=2)
        code, both = call("translate", "--run", copy, stdin=stdin)
        beams = ["translate", "--run", theirs(kind), "--beams", 3, "--nbest", 2]
        assert (code, both) == call(*beams, stdin=stdin) and both.count(b"\n") == 2 * len(TEXTS)


def test_evaluate_a_directory(theirs, call, tmp_path):
    """Its own outputs are what it should write."""
    texts = [text for text in TEXTS if text]
    found = translate(*hf.load(theirs("marian")), texts, decode=hf.read_generation(theirs("marian")))
    (tmp_path / "in").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "out").write_text("".join(f"{row[0].text}\n" for row in found))
    arguments = ("--run", theirs("marian"), "--source", tmp_path / "in", "--target", tmp_path / "out")
    code, out = call("evaluate", *arguments)
    assert code == 0 and json.loads(out)["exact_match"] == 1.0 and json.loads(out)["examples"] == len(texts)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_convert_a_directory(theirs, call, tmp_path, kind):
    """Every file says the same, and so does the model."""
    source = shutil.copytree(theirs(kind), tmp_path / "source")
    settle(source, do_sample=True, temperature=0.6, num_beam_groups=2)
    assert call("convert", source, tmp_path / "new")[0] == 0
    values = {path: hf.generation_values(path) for path in (source, tmp_path / "new")}
    assert values[source].items() <= values[tmp_path / "new"].items()
    left, right = (hf.load(path) for path in (source, tmp_path / "new"))
    assert left[0] == right[0] and left[2].template == right[2].template
    jax.tree.map(lambda x, y: (x == y).all() or pytest.fail("other numbers"), left[1], right[1])


def test_convert_an_old_directory(theirs, call, tmp_path):
    """What config.json said about generation stands in generation_config.json."""
    source = shutil.copytree(theirs("bart"), tmp_path / "source")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_beams": 3, "max_length": 9}))
    decode = hf.read_generation(source)
    assert call("convert", source, tmp_path / "new")[0] == 0
    assert hf.read_generation(tmp_path / "new") == decode and decode.beams == 3


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder"])
def test_convert_a_run(call, tmp_path, kind):
    """The directory writes what the run does."""
    tokenizer = Tokenizer.train(TEXTS, kind="characters", vocab_size=53)
    model = small(kind, tokenizer.vocab_size)
    decode = Decode(beams=3, max_new_tokens=7, length_penalty=0.5)
    run = Run(model.config, Train(steps=1), str(tmp_path / "run"), Data(max_length=29), decode=decode)
    save_params(open_run(run, tokenizer) / PARAMETERS, random_params(model))
    assert call("convert", tmp_path / "run", tmp_path / "new")[0] == 0
    for use in (["translate"], ["generate", "--prompt", "the"]):
        if (use[0] == "translate") == (kind == "encoder-decoder"):
            left, right = (call(*use, "--run", tmp_path / name, stdin=b"the rain\n") for name in ("run", "new"))
            assert left == right and left[0] == 0 and len(left[1]) > 2


def test_convert_says_what_it_leaves_out(call, tmp_path):
    tokenizer = Tokenizer.train(TEXTS, kind="characters", vocab_size=53)
    model = small("encoder-decoder", tokenizer.vocab_size)
    decode = Decode(max_new_tokens=7, normalization="gnmt")
    run = Run(model.config, Train(steps=1), str(tmp_path / "run"), Data(max_length=29), decode=decode)
    save_params(open_run(run, tokenizer) / PARAMETERS, random_params(model))
    noted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "_note", noted.append)
        assert call("convert", tmp_path / "run", tmp_path / "new")[0] == 0
    assert "decode.normalization is 'gnmt'" in noted[0] and str(tmp_path / "new") in noted[1]
    assert hf.generation_values(tmp_path / "new").keys() == {"decoder_start_token_id", "eos_token_id", "pad_token_id"}


def test_what_is_no_model_is_said_in_a_line(theirs, call, tmp_path):
    bare = shutil.copytree(theirs("gpt2"), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"name": "x"}')
    refused = directory_of("bart", tmp_path / "refused", num_beam_groups=2)
    for arguments, said in [
        (["generate", "--run", tmp_path / "none", "--prompt", "a"], "holds no run, nor a model of Hugging Face"),
        (["generate", "--run", other, "--prompt", "a"], "model.family is missing (and model_type"),
        (["generate", "--run", bare, "--prompt", "a"], "tokenizer.json does not exist: AutoTokenizer"),
        (["translate", "--run", refused], "num_beam_groups is 2, which is not supported"),
        (["translate", "--run", theirs("gpt2")], "'gpt' model does not translate"),
        (["convert", tmp_path / "none", tmp_path / "x"], "holds no run"),
        (["convert", bare, bare / "../bare"], "source and target are both"),
        (["convert", theirs("gpt2"), theirs("bart")], "already holds a model"),
        (["convert", theirs("gpt2"), other], "already holds a model"),
    ]:
        code, out = call(*arguments, stdin=b"a\n")
        assert code.startswith("error: ") and said in code and "\n" not in code and out == b"", arguments
    assert not (tmp_path / "x").exists()


# --- classify ---


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """(kind, head) -> directory of a small model that reads lines, which is only read."""
    folder = tmp_path_factory.mktemp("judge")

    @functools.cache
    def directory(kind, head):
        tokenizer = Tokenizer.train(TEXTS, kind="characters", vocab_size=53)
        labels = {"sequence": ("bad", "so so"), "regression": ("x", "y")}.get(head, ())
        config = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size, head=head, labels=labels)
        model = build(config)
        run = Run(
            config, Train(steps=1), str(folder / f"{kind} {head}"), Data(max_length=24), decode=Decode(max_new_tokens=1)
        )
        params = lively(model)
        if head == "sequence":  # so that the line alone decides
            params["classifier"]["dense_bias"] -= predict(model, params, tokenizer, JUDGED).mean(axis=0)
        if kind == "run":
            save_params(open_run(run, tokenizer) / PARAMETERS, params)
        else:
            hf.save(run.run_dir, model, params, tokenizer)
        return run.run_dir

    return directory


JUDGED = ["a sun", "", "the rain", "\u2028", " in a\t", "a sun", "é"]


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_classify_says_the_label_of_each_line(judge, call, kind):
    """B42: a label and its probability for every line, blank ones too; ends of Windows, and none of the last line."""
    directory = judge(kind, "sequence")
    code, out = call("classify", "--run", directory, stdin="\r\n".join(JUDGED).encode())
    lines = out.decode().split("\n")
    assert code == 0 and lines.pop() == "" and len(lines) == len(JUDGED) and lines[0] == lines[5]
    for line, row in zip(lines, predict(*load(directory), JUDGED).astype(float), strict=True):
        label, share = line.split("\t")
        two = [math.exp(number) for number in row]
        assert label == ("bad", "so so")[two.index(max(two))]
        assert float(share) == pytest.approx(max(two) / sum(two), abs=6e-6)
    assert len({line.split("\t")[0] for line in lines}) == 2


def test_classify_says_the_numbers_of_each_line(judge, call):
    for kind in ("run", "hf"):
        directory = judge(kind, "regression")
        code, out = call("classify", "--run", directory, stdin=b"a sun\nthe rain\n")
        found = predict(*load(directory), ["a sun", "the rain"])
        assert code == 0 and out.decode() == "".join(f"{x:.5f}\t{y:.5f}\n" for x, y in found)
        assert len(set(found.reshape(-1).tolist())) == 4


def test_classify_of_nothing_is_nothing(judge, call):
    assert call("classify", "--run", judge("run", "sequence")) == (0, b"")


def test_the_probability_of_large_numbers_is_a_number(judge, call, monkeypatch):
    monkeypatch.setattr(command_line, "predict", lambda *_, **__: np.array([[-2000.0, 1000.0]], np.float32))
    assert call("classify", "--run", judge("run", "sequence"), stdin=b"a\n") == (0, b"so so\t1.00000\n")


def test_what_classify_cannot_do_is_said_in_a_line(judge, directory, theirs, call, tmp_path):
    for run, said in [
        (judge("run", "pooled"), "a 'bert' model with head 'pooled' has no labels for a line"),
        (judge("run", "embedding"), "with head 'embedding' has no labels"),
        (judge("run", "masked"), "a 'bert' model with head 'masked' has no labels for a line"),
        (theirs("gpt2"), "a 'gpt' model with head 'language' has no labels for a line"),
        (directory, "a 'transformer' model with head None has no labels for a line"),
        (tmp_path, "holds no run"),
    ]:
        code, out = call("classify", "--run", run, stdin=b"a\n")
        assert code.startswith("error: ") and said in code and "\n" not in code and out == b"", run
    for stdin, said in [(b"a\n" + b"a" * 23 + b"\n", "stdin:2: the line has 25 tokens"), (b"a\n\xff\n", "stdin:2: ")]:
        code, out = call("classify", "--run", judge("run", "sequence"), stdin=stdin)
        assert code.startswith("error: ") and said in code and "\n" not in code and out == b""


def test_classify_refuses_a_model_of_two_texts(judge, call, tmp_path):
    """A line would be half of what it was trained on."""
    directory = shutil.copytree(judge("run", "sequence"), tmp_path / "run")
    values = json.loads((directory / "config.json").read_text())
    values["data"] |= {"format": "tsv", "train_source": "pairs.tsv", "features": ["1", "2"], "label": "3"}
    (directory / "config.json").write_text(json.dumps(values))
    code, out = call("classify", "--run", directory, stdin=b"a\n")
    assert "was trained on two texts at once" in code and "\n" not in code and out == b""


# --- data ---


@pytest.fixture
def written(tmp_path):
    """A configuration written by hand; the target is what every second letter of the source leaves."""
    source = ["abcdefghi"[: 1 + i % 7] for i in range(31)]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in source))
    (tmp_path / "out").write_text("".join(f"{line[::2]}\n" for line in source))
    data = {"dir": str(tmp_path), "train_source": "in", "train_target": "out", "tokenizer": "bytes"}
    sizes = {"max_length": 11, "tokens_per_batch": 44, "rows_multiple": 2, "num_buckets": 2}
    model = {"family": "transformer", "vocab_size": 300, "max_length": 11}
    run = {"model": model, "train": {"steps": 1}, "run_dir": "nowhere", "decode": {"max_new_tokens": 7}}
    (tmp_path / "mine.json").write_text(json.dumps(run | {"data": data | sizes}))
    return tmp_path / "mine.json"


def test_data_prints_what_a_model_sees(written, call):
    """Lengths of 28 lines and 3 that are held out, by hand; padding as counted in an epoch; rows; a picture."""
    code, out = call("data", "--config", written, "--batches", 2, "--rows", 1, "--seconds", 0)
    shown = out.decode()
    assert code == 0
    assert (
        f"train: {written.parent / 'in'}, {written.parent / 'out'}\n  28 examples made of 28 read, 232 tokens\n"
        in shown
    )
    assert re.search(r"source +140 +5\.0 +5\.0 +8\.0 +8\n", shown)  # 4 x (2 + 3 + ... + 8)
    assert re.search(r"target +92 +3\.3 +3\.0 +5\.0 +5\n", shown)  # 4 x (2 + 2 + 3 + 3 + 4 + 4 + 5)
    assert re.search(r"validation and test: .*, from line 29\n  3 examples made of 3 read, 16 tokens\n", shown)
    run = read_config_file(written)
    train = read_split(run.data, "train")
    batches = make_batches(run.data, train, make_tokenizer(run.data, train, vocab_size=300), vocab_size=300)
    cells = tokens = 0
    for step in range(batches.steps_per_epoch):
        for name in ("segment_ids", "source_segment_ids"):
            cells, tokens = cells + batches[step][name].size, tokens + (batches[step][name] > 0).sum()
    assert tokens == 232
    assert f"{batches.steps_per_epoch} updates an epoch, {1 - tokens / cells:.1%} padding\n" in shown
    assert re.search(r"\(threads\) delivers [0-9,]+ tokens/s", shown)
    rows = re.findall("^row 0.*\n  source +(.*) </s>\n  target +(.*) </s>$", shown, re.MULTILINE)
    assert len(rows) == 2 and all(source[::2] == target for source, target in rows)
    assert max(map(len, shown.replace(str(written.parent), "").split("\n"))) < 110
    assert (written.parent / "data.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_data_takes_the_vocabulary_of_the_run(written, call, tmp_path):
    """And the directory of the run for its configuration; that vocabulary knows two letters."""
    run = shutil.copytree(written.parent, tmp_path / "run")
    (run / "mine.json").rename(run / "config.json")
    tokenizer = Tokenizer.train(["ab"], kind="characters", vocab_size=300)
    tokenizer.save(run / "tokenizer.json")
    code, out = call("data", "--config", run, "--batches", 0, "--seconds", 0, "--png", tmp_path / "x.png")
    assert code == 0
    assert out.decode().startswith(f"vocabulary: {tokenizer.vocab_size} entries, {run / 'tokenizer.json'}\n\ntrain: ")
    # of 4 x (1 + 2 + ... + 7) letters 28 are a and 24 b, of 4 x (1 + 1 + 2 + 2 + 3 + 3 + 4) 28 are a
    assert f"unknown tokens: {60 / 112:.2%} of the first text, {36 / 64:.2%} of the second\n" in out.decode()
    assert (tmp_path / "x.png").exists() and not (run / "data.png").exists() and b"row 0" not in out


@pytest.mark.parametrize("kind", ["hf", "run"])
def test_data_takes_the_vocabulary_that_the_run_begins_with(call, tmp_path, monkeypatch, kind):
    """And learns none: a run that has no vocabulary yet will have that of train.init_from."""
    theirs = bert_directory(tmp_path / "theirs")
    if kind == "run":
        theirs = shutil.copytree(theirs, tmp_path / "run")
        run = {"model": {"family": "bert", "vocab_size": 41}, "train": {"steps": 1}, "run_dir": "nowhere"}
        (theirs / "config.json").write_text(json.dumps(run))
    (tmp_path / "reviews").write_text("sentence\tlabel\n" + "a good film\t1\nbad [SEP]\t0\n" * 9)
    data = {"format": "tsv", "features": ["sentence"], "label": "label", "train_source": str(tmp_path / "reviews")}
    data |= {"max_length": 24, "tokens_per_batch": 96, "validation_source": str(tmp_path / "reviews")}
    model = {"family": "bert", "vocab_size": 41, "max_length": 24, "head": "sequence", "labels": ["x", "y"]}
    run = {"model": model, "train": {"steps": 1, "init_from": str(theirs)}, "run_dir": "no", "data": data}
    (tmp_path / "mine.json").write_text(json.dumps(run | {"decode": {"max_new_tokens": 7}}))
    monkeypatch.setattr(command_line, "make_tokenizer", lambda *_, **__: pytest.fail("a vocabulary was learned"))
    code, out = call("data", "--config", tmp_path / "mine.json", "--batches", 1, "--rows", 4, "--seconds", 0)
    assert code == 0, code
    assert out.decode().startswith(f"vocabulary: 41 entries, that of {theirs}\n\n")
    assert re.search(r"  text +\[CLS\] bad \[UNK\] \[UNK\] \[UNK\] \[SEP\]\n  label +0\n", out.decode())


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "model.family is missing"),
        ('{"model": {"family": "transformer", "vocab_size": 300}}', "missing fields"),
        ('{"model": {"family": "transformer", "depth": 3}}', "unknown fields"),
    ],
)
def test_a_configuration_that_is_none_is_said_in_a_line(call, tmp_path, content, said):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    code, out = call("data", "--config", path)
    assert code.startswith("error: ") and said in code and "\n" not in code and out == b""


def test_what_data_cannot_do_is_said_before_the_work(written, call):
    for arguments, said in [
        (["--rows", "-1"], "batches, rows are 2, -1"),
        (["--png", written.parent / "no" / "x.png"], "no directory"),
        (["--config", written.parent], "holds no run"),
    ]:
        code, out = call("data", "--config", written, *arguments)
        assert code.startswith("error: ") and said in code and "\n" not in code and out == b""


def test_every_public_name_is_there():
    for name in tfm_jax.__all__:
        assert getattr(tfm_jax, name) is not None
    assert set(tfm_jax.__all__) <= set(dir(tfm_jax))
    assert tfm_jax.fit is loop.fit and tfm_jax.translate is translate and tfm_jax.load is load
    with pytest.raises(AttributeError, match="no attribute 'Trainer'.*TransformerConfig"):
        _ = tfm_jax.Trainer
