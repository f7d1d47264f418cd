"""What people see of a run: lines that survive kills, and pictures that are pictures."""

import json

import jax
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.train.killed_run import MODEL
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import build
from tfm_jax.train.report import (
    LineCounter,
    Metrics,
    ProgressBar,
    plot_alignments,
    plot_curves,
    plot_data,
    plot_heads,
    read_metrics,
)


@pytest.fixture(scope="module")
def tiny():
    model = build(MODEL)
    tokenizer = Tokenizer.train(["abc"], kind="bpe", vocab_size=MODEL.vocab_size)
    return model, model.init(jax.random.key(0)), tokenizer


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that is saved, as dicts."""
    saved, savefig = [], Figure.savefig

    def save(figure, path, **options):
        savefig(figure, path, **options)
        saved.append(
            [
                {
                    "labels": (axis.get_xlabel(), axis.get_ylabel()),
                    "lines": {line.get_label(): line.get_xydata() for line in axis.lines},
                    "columns": [text.get_text() for text in axis.get_xticklabels()],
                    "rows": [text.get_text() for text in axis.get_yticklabels()],
                    "images": [np.asarray(image.get_array()) for image in axis.images],
                }
                for axis in figure.axes
            ]
        )

    monkeypatch.setattr(Figure, "savefig", save)
    return saved


def assert_picture(path, *, wide, high):
    """A PNG with something on it, of so many pixels: (least, most)."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    assert wide[0] <= pixels.shape[1] <= wide[1] and high[0] <= pixels.shape[0] <= high[1]
    assert pixels[..., :3].std() > 0.02


# --- metrics.jsonl ---


def write_metrics(path, steps):
    metrics = Metrics(path, after_step=0)
    for step in steps:
        metrics.write(step, {"loss": 1.0 / step})
    metrics.close()


def test_lines_are_there_when_write_returns(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl", after_step=0)
    metrics.write(3, {"loss": 0.1})
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [{"step": 3, "loss": 0.1}]
    metrics.close()


@pytest.mark.parametrize("after_step, kept", [(0, []), (3, [1, 2, 3]), (4, [1, 2, 3, 4, 4]), (9, [1, 2, 3, 4, 4, 5])])
def test_lines_beyond_the_step_that_a_run_continues_from_are_removed(tmp_path, after_step, kept):
    path = tmp_path / "m.jsonl"
    write_metrics(path, [1, 2, 3, 4, 4, 5])
    metrics = Metrics(path, after_step=after_step)
    metrics.write(10, {"loss": 0.5})
    metrics.close()
    assert [line["step"] for line in read_metrics(path)] == [*kept, 10]


@pytest.mark.parametrize(
    "rest", ["{", '{"step": 3, "loss": 0.', '{"step": 3, "loss": 0.5}', '{"step": 3, "a": "\n'[:-1]]
)
def test_an_unfinished_last_line_does_not_count(tmp_path, rest):
    """A kill leaves a part of a line, or all of it but its end."""
    path = tmp_path / "m.jsonl"
    write_metrics(path, [1, 2])
    path.write_text(path.read_text() + rest)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    metrics = Metrics(path, after_step=7)
    metrics.write(3, {"loss": 0.25})
    metrics.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_an_empty_file_has_no_lines(tmp_path):
    (tmp_path / "m.jsonl").write_text("")
    assert read_metrics(tmp_path / "m.jsonl") == []


# --- bars ---


def test_where_stderr_is_a_file_only_notes_are_written(capfd):
    """Brackets are text, a long note is one line."""
    note = "update 2 [bold]of[/bold] " + "x" * 300
    with ProgressBar() as bar:
        bar.update(0.5, "update 1", seconds_left=61.0)
        bar.note(note)
    with LineCounter("translating", 3) as counter:
        counter.update(2)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.strip() == note


# --- plots ---


def test_curves_show_training_and_validation(tmp_path, drawn):
    metrics = [{"step": s, "loss": 5.0 / s, "accuracy": 0.1 * s, "learning_rate": 1e-3 * s} for s in (1, 2, 3, 5)]
    metrics.insert(2, {"step": 2, "validation_loss": 4.0, "validation_accuracy": 0.2})
    plot_curves(metrics, tmp_path / "curves.png")
    assert_picture(tmp_path / "curves.png", wide=(1000, 2500), high=(300, 800))
    loss, accuracy, rate = drawn[0]
    np.testing.assert_allclose(loss["lines"]["loss"], [[1, 5.0], [2, 2.5], [3, 5 / 3], [5, 1.0]])
    np.testing.assert_allclose(loss["lines"]["validation loss"], [[2, 4.0]])
    np.testing.assert_allclose(accuracy["lines"]["validation accuracy"], [[2, 0.2]])
    assert set(rate["lines"]) == {"learning rate"}
    assert all(axis["labels"][0] == "updates" and axis["labels"][1] for axis in drawn[0])


def test_curves_of_a_long_run_and_of_none(tmp_path):
    plot_curves([{"step": s, "loss": np.exp(-s / 300)} for s in range(1, 1000)], tmp_path / "long.png")
    assert_picture(tmp_path / "long.png", wide=(1000, 2500), high=(300, 800))
    plot_curves([], tmp_path / "none.png")
    assert_picture(tmp_path / "none.png", wide=(1000, 2500), high=(300, 800))


def test_alignments_have_tokens_on_the_axes(tmp_path, tiny, drawn):
    """Columns are the source with its end, rows what is written; a row's weights add up to one."""
    plot_alignments(tmp_path / "a.png", *tiny, [("a b", "cd"), ("éb", "é")], layer=0)
    assert_picture(tmp_path / "a.png", wide=(1000, 2500), high=(400, 900))
    first, second, bar = drawn[0]
    assert first["columns"] == ["␣", "a", "␣", "b", "</s>"]
    assert first["rows"] == ["␣", "c", "d", "</s>"]
    assert second["columns"] == ["␣", "\\xc3", "\\xa9", "b", "</s>"]
    assert second["rows"] == ["␣", "\\xc3", "\\xa9", "</s>"]
    assert [axis["images"][0].shape for axis in (first, second)] == [(4, 5), (4, 5)]
    for axis in (first, second):
        np.testing.assert_allclose(axis["images"][0].sum(axis=1), 1.0, rtol=1e-5)
    assert "layer 0" in bar["labels"][1]


def test_alignment_weights_are_causal(tmp_path, tiny, drawn):
    """Row i reads the start and the tokens before i: other tokens from there on change nothing in it."""
    plot_alignments(tmp_path / "a.png", *tiny, [("a b", "cd"), ("a b", "ce"), ("a b", "fd")], layer=0)
    one, other, third = (axis["images"][0] for axis in drawn[0][:3])
    np.testing.assert_allclose(one[:3], other[:3], atol=1e-6)  # start, space, c
    np.testing.assert_allclose(one[:2], third[:2], atol=1e-6)
    assert abs(one[3] - other[3]).max() > 1e-4 and abs(one[2] - third[2]).max() > 1e-4


def test_every_head_has_its_picture(tmp_path, tiny, drawn):
    """Encoder, decoder and cross, each head with tokens on both axes; rows add up to one, the decoder looks back."""
    plot_heads(tmp_path / "h.png", *tiny, ("a b", "cd"), layer=0)
    *pictures, bar = drawn[0]
    source, output = ["␣", "a", "␣", "b", "</s>"], ["␣", "c", "d", "</s>"]
    heads = MODEL.num_heads
    assert len(pictures) == 3 * heads and "layer 0" in bar["labels"][1]
    axes = [(source, source)] * heads + [(["<s>", *output[:-1]],) * 2] * heads + [(output, source)] * heads
    for picture, (rows, columns) in zip(pictures, axes, strict=True):
        assert (picture["rows"], picture["columns"]) == (rows, columns)
        np.testing.assert_allclose(picture["images"][0].sum(axis=1), 1.0, rtol=1e-5)
    for picture in pictures[heads : 2 * heads]:
        assert not np.triu(picture["images"][0], 1).any()
    assert not np.allclose(pictures[0]["images"][0], pictures[1]["images"][0])


@pytest.mark.parametrize("kind, text", [("word_bpe", "$x$ $$ a_b \\frac"), ("bpe", "$$ $x$ $$ $$")])
def test_any_token_can_stand_on_an_axis(tmp_path, drawn, kind, text):
    """matplotlib takes what stands between two dollars for mathematics."""
    tokenizer = Tokenizer.train([text] * 9, kind=kind, vocab_size=290)
    model = build(type(MODEL)(**{**vars(MODEL), "vocab_size": 290}))
    plot_alignments(tmp_path / "a.png", model, model.init(jax.random.key(0)), tokenizer, [(text, text)], layer=0)
    assert any("$" in text.replace("\\$", "$") for text in drawn[0][0]["columns"])
    assert_picture(tmp_path / "a.png", wide=(500, 1000), high=(400, 900))


def test_a_text_of_more_tokens_than_the_model_takes_spoils_no_picture(tmp_path, tiny):
    """Text that a model wrote may have more tokens than it wrote: bytes that are no character come back as three."""
    long = "\ufffd" * MODEL.max_length
    plot_alignments(tmp_path / "a.png", *tiny, [("abc", long)], layer=0)
    assert_picture(tmp_path / "a.png", wide=(500, 1000), high=(400, 900))


def test_data_shows_lengths_by_side_and_padding_by_shape(tmp_path, monkeypatch):
    """Bars add up to all cells, each curve to 100 % of a split."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kws: [figures.append(self), savefig(self, *args, **kws)]
    )
    rng = np.random.default_rng(5)
    lengths = {"train": rng.integers(2, 211, (307, 2)), "validation and test": rng.integers(2, 89, (31, 2))}
    shapes = [("272 x 15, 13", 6101, 1515), ("16 x 209, 181", 5003, 1237)]
    plot_data(tmp_path / "data.png", lengths, sides=("source", "target"), shapes=shapes)
    assert_picture(tmp_path / "data.png", wide=(1200, 2000), high=(300, 800))
    (figure,) = figures
    source, target, cells = figure.axes
    for axis, side in ((source, "source"), (target, "target")):
        assert axis.get_xlabel() == f"length of the {side} (tokens)"
        assert {text.get_text() for text in axis.get_legend().texts} == {"train (307)", "validation and test (31)"}
        for curve in axis.patches:  # an outline: each height at both edges of its bin
            assert curve.get_xy()[:, 1].sum() / 2 == pytest.approx(100.0)
    assert [(bar.get_x(), bar.get_width()) for bar in cells.patches] == [
        (0, 6101),
        (0, 5003),
        (6101, 1515),
        (5003, 1237),
    ]
    assert [text.get_text() for text in cells.get_yticklabels()] == [name for name, _, _ in shapes]
    assert [text.get_text() for text in cells.get_legend().texts] == ["tokens", "padding"]


def test_data_of_one_length(tmp_path):
    plot_data(tmp_path / "d.png", {"train": np.full((7, 1), 13)}, sides=("text",), shapes=[("8 x 13", 91, 13)])
    assert_picture(tmp_path / "d.png", wide=(700, 1400), high=(300, 800))
