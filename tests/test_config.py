"""The configuration of a run: strict JSON both ways, refusals that name the value, and the command line."""

import ast
import contextlib
import dataclasses
import inspect
import json
import re
import textwrap

import pytest
import tyro

from tfm_jax.config import (
    Corruption,
    Data,
    Decode,
    Mesh,
    Optimizer,
    Precision,
    Run,
    Train,
    differences,
    from_dict,
    to_dict,
    to_json,
)
from tfm_jax.models import family
from tfm_jax.models.architecture import Dropout
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.models.transformer import TransformerConfig

SECTIONS = (
    Run,
    TransformerConfig,
    GPTConfig,
    BERTConfig,
    Dropout,
    Train,
    Data,
    Corruption,
    Optimizer,
    Decode,
    Mesh,
    Precision,
)


def run(**changes):
    """A run in which no field that matters to JSON has its default."""
    model = TransformerConfig(
        23, max_length=301, d_model=12, num_heads=3, d_v=5, norm="pre", head_bias=True, dropout=Dropout(attention=0.25)
    )
    fields = {
        "model": model,
        "train": Train(epochs=3, max_minutes=2.5, patience=7, final="average"),
        "run_dir": "runs/x",
        "data": Data(
            format="jsonl",
            dir="données",
            features=("text", "übersetzung.de"),
            tokenizer="word_bpe",
            merges=3,
            tokens_per_batch=701,
            rows_multiple=6,
            corruption=Corruption(rate=0.25),
        ),
        "optimizer": Optimizer(schedule="constant", clip_norm=0.5),
        "decode": Decode(beams=3, early_stopping=False, eos_ids=(2, 7), forced_ids=(5,), suppressed_ids=(3, 11)),
        "mesh": Mesh(data=2, model=3),
    }
    return Run(**fields | changes)


def read(values):
    """A run from its dict, its model's class found by the family's name."""
    model = {name: value for name, value in values["model"].items() if name != "family"}
    _, config_class = family(values["model"]["family"])
    return from_dict(Run, values | {"model": from_dict(config_class, model, "config.model")})


def test_json_gives_the_same_run_back():
    original = run()
    again = read(json.loads(to_json(original)))
    assert again == original
    assert to_json(again) == to_json(original)
    assert again.model.dropout == Dropout(attention=0.25)


def test_json_holds_every_field_and_the_family():
    values = json.loads(to_json(run()))
    assert values["model"]["family"] == "transformer"
    for name in ("model", "train", "data", "optimizer", "decode", "mesh"):
        section = getattr(run(), name)
        assert set(values[name]) - {"family"} == {f.name for f in dataclasses.fields(section)}
    assert values["train"]["steps"] is None and values["train"]["max_minutes"] == 2.5


def test_json_refuses_what_json_cannot_say():
    with pytest.raises(ValueError):
        to_json(run(train=Train(max_minutes=float("inf"))))


def test_defaults_may_be_left_out_of_json():
    values = {"model": TransformerConfig(23), "train": {"steps": 5}, "run_dir": "r"}
    assert from_dict(Run, values) == Run(TransformerConfig(23), Train(steps=5), "r")


def test_int_is_taken_for_float_and_nothing_else_is_converted():
    built = from_dict(Optimizer, {"learning_rate": 1, "clip_norm": 2})
    assert type(built.learning_rate) is float and type(built.clip_norm) is float
    assert from_dict(Optimizer, {"clip_norm": None}).clip_norm is None


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"train": {"steps": 3, "stepz": 4}}, ["config.train", "stepz", "steps"]),
        ({"speed": 1}, ["config", "speed", "run_dir"]),
        ({"model": {"vocab_size": 7, "dropout": {"embeding": 0.1}}}, ["config.model.dropout", "embeding", "embedding"]),
        ({"run_dir": ...}, ["missing", "run_dir"]),
        ({"train": ..., "run_dir": ...}, ["missing", "run_dir", "train"]),
        ({"model": {"d_model": 8}}, ["config.model", "missing", "vocab_size"]),
        ({"train": {"steps": "3"}}, ["config.train.steps", "'3'", "str", "int"]),
        ({"train": {"steps": 3.0}}, ["config.train.steps", "3.0", "float", "int"]),
        ({"train": {"steps": True}}, ["config.train.steps", "True", "bool", "int"]),
        ({"train": {"steps": 3, "seed": None}}, ["config.train.seed", "None", "int"]),
        ({"train": {"steps": 3, "label_smoothing": "0.1"}}, ["config.train.label_smoothing", "'0.1'", "float"]),
        ({"decode": {"early_stopping": 1}}, ["config.decode.early_stopping", "1", "bool"]),
        ({"decode": {"early_stopping": "soon"}}, ["config.decode.early_stopping", "'soon'", "heuristic"]),
        ({"decode": {"eos_ids": 2}}, ["config.decode.eos_ids", "2", "a list"]),
        ({"decode": {"eos_ids": [2, "3"]}}, ["config.decode.eos_ids[1]", "'3'", "int"]),
        ({"data": {"dir": 5}}, ["config.data.dir", "5", "str"]),
        ({"data": {"tokenizer": "sentencepiece"}}, ["config.data.tokenizer", "sentencepiece", "word_bpe"]),
        ({"model": {"vocab_size": 7, "norm": "mid"}}, ["config.model.norm", "mid", "post", "pre"]),
        ({"model": {"vocab_size": 7, "num_heads": [2]}}, ["config.model.num_heads", "[2]", "list", "int"]),
        # a section that is no object at all
        ({"train": 3}, ["config.train", "3"]),
        ({"train": ["steps"]}, ["config.train", "steps"]),
        ({"model": {"vocab_size": 7, "dropout": None}}, ["config.model.dropout", "None"]),
    ],
)
def test_wrong_json_is_refused_by_name(change, fragments):
    values = {"model": {"vocab_size": 7}, "train": {"steps": 3}, "run_dir": "r"} | change
    values = {name: value for name, value in values.items() if value is not ...}
    values["model"] = {"family": "transformer"} | values["model"]
    with pytest.raises(ValueError) as refusal:
        read(values)
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_unknown_family_names_those_there_are():
    with pytest.raises(ValueError, match="'rnn'.*transformer"):
        read(to_dict(run()) | {"model": {"family": "rnn"}})


def test_differences_name_the_field_and_both_values():
    ours, theirs = run(), run(train=Train(steps=11), optimizer=Optimizer(schedule="constant", clip_norm=0.75))
    assert differences(to_dict(ours), to_dict(ours)) == []
    lines = differences(to_dict(ours), to_dict(theirs))
    assert "optimizer.clip_norm: 0.5, 0.75" in lines
    assert "train.steps: None, 11" in lines and "train.final: 'average', 'last'" in lines
    assert sorted(lines) == lines and len(lines) == 6


def test_differences_see_a_field_that_one_side_lacks():
    assert differences({"a": 1}, {"a": 1, "b": {"c": 2}}) == ["b: None, {'c': 2}"]
    assert differences({"a": {"c": 2}}, {"a": 3}) == ["a: {'c': 2}, 3"]


def model(**changes):
    return TransformerConfig(**{"vocab_size": 23, "d_model": 12, "num_heads": 3} | changes)


PAIR = {"train_source": "a", "train_target": "b"}
LABELLED = {"format": "tsv", "features": ("s",), "label": "l"}
REFUSED = [
    *((Mesh, {name: 0}, [f"mesh.{name}", "0"]) for name in ("data", "fsdp", "model", "sequence")),
    (Mesh, {"data": -2}, ["mesh.data", "-2"]),
    (Data, {"max_length": 1}, ["data.max_length", "1", "2"]),
    *((Data, {name: 0}, [f"data.{name}", "0"]) for name in ("num_buckets", "rows_multiple", "lengths_multiple")),
    *((Data, {name: -1}, [f"data.{name}", "-1"]) for name in ("workers", "seed")),
    (Data, {"max_length": 3, "corruption": Corruption("prefix")}, ["data.max_length", "3", "prefix", "4"]),
    (Data, {"batching": "packed", "rows_multiple": 17}, ["4096", "256", "data.rows_multiple", "17"]),
    (Data, {"max_rows": 12, "rows_multiple": 8}, ["data.max_rows", "12", "data.rows_multiple", "8"]),
    (Data, {"max_length": 256, "lengths_multiple": 7}, ["data.max_length", "256", "data.lengths_multiple", "7"]),
    (Data, {"format": "tsv"}, ["data.features", "one or two", "tsv"]),
    (Data, {"format": "jsonl", "features": ("a", "b", "c")}, ["data.features", "one or two", "jsonl"]),
    (Data, {"features": ("a",)}, ["data.features", "none", "text"]),
    (Data, {"label": "a"}, ["data.label", "a", "text"]),
    (Data, {"format": "tfds", "features": ("a",)}, ["data.dataset", "tfds"]),
    (Data, {"dataset": "glue/sst2"}, ["data.dataset", "glue/sst2", "text"]),
    (Data, {"format": "dates", "dir": "x"}, ["data.dir", "x", "dates"]),
    (Data, {"format": "dates", "documents": "file"}, ["data.documents", "file"]),
    (Data, PAIR | {"documents": "paragraphs"}, ["data.documents", "paragraphs"]),
    (Data, PAIR | {"corruption": Corruption("mask")}, ["data.corruption.name", "mask", "pairs"]),
    (Data, PAIR | {"batching": "blocks"}, ["data.batching", "blocks", "packed"]),
    (Data, PAIR | {"too_long": "split"}, ["data.too_long", "split", "drop"]),
    (Data, PAIR | {"merges": 5}, ["data.merges", "5", "word_bpe", "bpe"]),
    (Data, LABELLED | {"batching": "packed"}, ["data.label", "l", "buckets"]),
    (Data, LABELLED | {"corruption": Corruption("spans")}, ["data.label", "l", "none"]),
    *((Corruption, {"rate": rate}, ["data.corruption.rate", str(rate)]) for rate in (0.0, 1.0, float("nan"))),
    (Corruption, {"mean_span": 0.5}, ["data.corruption.mean_span", "0.5"]),
    (Corruption, {"masked": 0.8, "random": 0.3}, ["data.corruption.masked", "0.8", "0.3"]),
    (Corruption, {"masked": -0.1}, ["data.corruption.masked", "-0.1"]),
    (Corruption, {"sentinels": 0}, ["data.corruption.sentinels", "0"]),
    (Data, {"max_length": 307, "tokens_per_batch": 293}, ["data.tokens_per_batch", "293", "data.max_length", "307"]),
    (Precision, {"params": "bfloat16"}, ["precision.params", "bfloat16", "precision.compute", "float32"]),
    (Optimizer, {"learning_rate": 0.0}, ["optimizer.learning_rate", "0.0"]),
    (Optimizer, {"learning_rate": -0.5}, ["optimizer.learning_rate", "-0.5"]),
    (Optimizer, {"learning_rate": float("nan")}, ["optimizer.learning_rate", "nan"]),
    (Optimizer, {"warmup_steps": -1}, ["optimizer.warmup_steps", "-1"]),
    (Optimizer, {"b1": 1.0}, ["optimizer.b1", "1.0"]),
    (Optimizer, {"b2": -0.25}, ["optimizer.b2", "-0.25"]),
    (Optimizer, {"momentum": -0.1}, ["optimizer.momentum", "-0.1"]),
    (Optimizer, {"clip_norm": 0.0}, ["optimizer.clip_norm", "0.0", "None"]),
    (Train, {}, ["steps", "epochs", "max_minutes"]),
    (Train, {"steps": 0}, ["train.steps", "0"]),
    (Train, {"epochs": -3}, ["train.epochs", "-3"]),
    (Train, {"max_minutes": 0.0}, ["train.max_minutes", "0.0"]),
    (Train, {"steps": 5, "patience": 0}, ["train.patience", "0"]),
    (Train, {"steps": 5, "checkpoint_every": 0}, ["train.checkpoint_every", "0"]),
    (Train, {"steps": 5, "keep_last": 0}, ["train.keep_last", "0"]),
    (Train, {"steps": 5, "micro_batches": 0}, ["train.micro_batches", "0"]),
    (Train, {"steps": 5, "log_every": -1}, ["train.log_every", "-1"]),
    (Train, {"steps": 5, "label_smoothing": 1.0}, ["train.label_smoothing", "1.0"]),
    (Train, {"steps": 5, "label_smoothing": -0.1}, ["train.label_smoothing", "-0.1"]),
    *((Decode, {name: 0}, [f"decode.{name}", "0"]) for name in ("beams", "max_new_tokens", "tokens_per_batch")),
    *((Decode, {n: (4, -1)}, [f"decode.{n}", "(4, -1)"]) for n in ("eos_ids", "forced_ids", "suppressed_ids")),
    (Decode, {"forced_ids": (4, 5), "max_new_tokens": 1}, ["decode.forced_ids", "2", "decode.max_new_tokens", "1"]),
    (Decode, {"forced_ids": (4, 5), "suppressed_ids": (3, 5)}, ["decode.forced_ids", "decode.suppressed_ids", "[5]"]),
    *((Dropout, {f.name: 1.0}, [f"dropout.{f.name}", "1.0"]) for f in dataclasses.fields(Dropout)),
    (Dropout, {"residual": -0.1}, ["dropout.residual", "-0.1"]),
    (Dropout, {"residual": float("nan")}, ["dropout.residual", "nan"]),
    *(
        (model, {name: 0}, [f"model.{name}", "0"])
        for name in ("vocab_size", "max_length", "d_model", "d_ff", "num_heads", "num_encoder_layers", "d_k", "d_v")
    ),
    (model, {"num_decoder_layers": -1}, ["model.num_decoder_layers", "-1"]),
    (model, {"norm_eps": 0.0}, ["model.norm_eps", "0.0"]),
    (model, {"d_model": 10}, ["10", "3", "d_k"]),
    (run, {"data": Data(max_length=302)}, ["data.max_length", "302", "model.max_length", "301"]),
    (run, {"mesh": Mesh(data=4)}, ["mesh.data x mesh.fsdp", "4", "data.rows_multiple", "6"]),
    (run, {"train": Train(steps=1, micro_batches=4)}, ["train.micro_batches 4", "data.rows_multiple, 6"]),
    (run, {"mesh": Mesh(sequence=4)}, ["mesh.sequence is 4", "data.lengths_multiple, 1"]),
    (run, {"decode": Decode(max_new_tokens=303)}, ["decode.max_new_tokens", "303", "model.max_length", "301"]),
]


@pytest.mark.parametrize(("make", "fields", "fragments"), REFUSED, ids=lambda x: None if callable(x) else str(x))
def test_what_has_no_meaning_is_refused_when_built(make, fields, fragments):
    """I34: the message names the field and its value."""
    with pytest.raises(ValueError) as refusal:
        make(**fields)
    for fragment in fragments:
        assert re.search(rf"(?<![\w.-]){re.escape(fragment)}(?![\w])", str(refusal.value)), (fragment, refusal.value)


def test_heads_that_do_not_divide_the_width_may_have_a_size_of_their_own():
    """B18: 10 over 3 heads is refused above, and accepted with an explicit head size."""
    assert model(d_model=10, d_k=4).d_k == 4


def test_edges_that_have_a_meaning_are_accepted():
    Optimizer(warmup_steps=0, b1=0.0, b2=0.0, clip_norm=None)
    Optimizer(name="muon", momentum=0.95, b1=0.0)
    Optimizer(name="sgd")
    # without weight decay nothing is spared; run directories hold defaults of before, which are among today's
    Optimizer(no_decay=("*bias", "*scale", "*position_bias.table"))
    Optimizer(no_decay=())
    Train(max_minutes=0.001, label_smoothing=0.0)
    Data(max_length=307, tokens_per_batch=307)
    Run(TransformerConfig(5, max_length=7), Train(steps=1), "", Data(max_length=7), decode=Decode(max_new_tokens=7))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_help(section):
    """The docstring under a field is its help; without one, tyro would show whatever comment is near."""
    classes = [each for each in section.__mro__ if dataclasses.is_dataclass(each)]
    bodies = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body for each in classes]
    helped = {
        field.target.id
        for body in bodies
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and len(str(text.value.value).split()) >= 3
    }
    assert helped == {field.name for field in dataclasses.fields(section)}


def test_command_line_overrides_the_default():
    default = run(model=model(), data=Data(max_length=64))
    arguments = ["--train.steps", "3", "--model.d-model", "8", "--model.num-heads", "2"]
    arguments += ["--optimizer.clip-norm", "None", "--decode.early-stopping", "False"]
    parsed = tyro.cli(Run[TransformerConfig], default=default, args=arguments)
    expected = dataclasses.replace(
        default,
        train=dataclasses.replace(default.train, steps=3),
        model=dataclasses.replace(default.model, d_model=8, num_heads=2),
        optimizer=dataclasses.replace(default.optimizer, clip_norm=None),
        decode=dataclasses.replace(default.decode, early_stopping=False),
    )
    assert parsed == expected
    assert tyro.cli(Run[TransformerConfig], default=default, args=[]) == default
    stops = tyro.cli(Run[TransformerConfig], default=default, args=["--decode.early-stopping", "heuristic"])
    assert stops.decode.early_stopping == "heuristic"


@pytest.mark.parametrize(
    "arguments", ["--train.stepz 3", "--train.steps three", "--model.norm mid", "--model.d-model 13"]
)
def test_command_line_refuses_what_has_no_meaning(arguments, capsys):
    with pytest.raises((SystemExit, ValueError)) as refusal:
        tyro.cli(Run[TransformerConfig], default=run(), args=arguments.split())
    said = str(refusal.value) + "".join(capsys.readouterr())
    assert arguments.split()[1] in said


def test_command_line_help_shows_every_field(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Run[TransformerConfig], default=run(), args=["--help"])
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())

    def flags(section, prefix):
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), f"{prefix}{field.name.replace('_', '-')}"
            yield from flags(value, f"{name}.") if dataclasses.is_dataclass(value) else [f"--{name}"]

    assert not [flag for flag in flags(run(), "") if flag not in said]
    assert "On the attention weights." in said and "Length of the linear warm-up." in said


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_target_needs_its_source(part):
    with pytest.raises(ValueError, match=f"data.{part}_source is '', data.{part}_target 'file'.*both files or neither"):
        Data(**{f"{part}_target": "file"})


@pytest.mark.parametrize("part", ["validation", "test"])
def test_every_text_has_as_many_sides_as_the_training_text(part):
    with pytest.raises(ValueError, match=f"data.{part}_source is 'c', data.{part}_target ''.*two sides"):
        Data(**PAIR, **{f"{part}_source": "c"})
    with pytest.raises(ValueError, match=f"data.{part}_source is 'c', data.{part}_target 'd'.*one side"):
        Data(train_source="a", **{f"{part}_source": "c", f"{part}_target": "d"})
    with pytest.raises(ValueError, match="'d'.*format 'tsv' has both sides in one"):
        Data(format="tsv", features=("1", "2"), **{f"{part}_source": "c", f"{part}_target": "d"})


def test_how_many_texts_an_example_has():
    sides = lambda **fields: Data(**fields).sides  # noqa: E731
    assert sides() == 1 and sides(**PAIR) == sides(format="dates") == sides(format="tsv", features=("1", "2")) == 2
    assert sides(format="tsv", features=("1", "2"), label="3") == sides(**LABELLED) == 1


@pytest.mark.parametrize("batching, words", [("packed", "'packed'"), ("blocks", "'blocks'"), ("buckets", None)])
def test_a_kernel_without_positions_takes_no_rows_of_several_texts(batching, words):
    model = TransformerConfig(7, implementation="splash")
    refused = contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words)
    with refused:
        Run(model, Train(steps=1), "r", Data(batching=batching))
