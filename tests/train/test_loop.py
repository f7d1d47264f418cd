"""A run that stops, by SIGKILL or otherwise, and goes on ends as if it had not; and ends where its limits say (B48)."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.train import killed_run
from tests.train.killed_run import STEPS_PER_EPOCH, TRAIN, VALIDATION, tiny_run
from tfm_jax.config import Corruption, Mesh
from tfm_jax.data.batches import make_batches
from tfm_jax.data.sources import Text, parallel
from tfm_jax.decode.text import translate
from tfm_jax.models import build
from tfm_jax.models.bert import BERTConfig
from tfm_jax.models.gpt import GPTConfig
from tfm_jax.sharding import make_mesh
from tfm_jax.train import loop, objectives
from tfm_jax.train.checkpoint import Checkpoints
from tfm_jax.train.objectives import TextToText
from tfm_jax.train.report import read_metrics
from tfm_jax.train.run import load
from tfm_jax.train.step import abstract_params, abstract_state

ROOT = Path(__file__).parents[2]
TIMES = {"seconds", "tokens_per_second", "input_wait"}


LINES = Text((TRAIN.source,), ("lines",))


def fit(run, *, train=TRAIN, validation=VALIDATION):
    return loop.fit(run, train=train, validation=validation)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts."""
    return fit(tiny_run(tmp_path_factory.mktemp("whole") / "run"))


def batches_of(run, text, **options):
    """As `fit` makes them."""
    return make_batches(run.data, text, loop.tokenizer_of(run, text), vocab_size=run.model.vocab_size, **options)


class Stopped(Exception):
    """Instead of a power cut."""


@contextlib.contextmanager
def from_update(update, act):
    """`act(state, take)` stands in for this update and later ones; `take(state)` makes the update as usual."""
    train_step = loop.train_step

    def step(state, batch, **options):
        take = lambda state: train_step(state, batch, **options)  # noqa: E731
        return act(state, take) if int(state.step) >= update - 1 else take(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        yield


def stop(state, take):
    raise Stopped


def checkpoints_of(directory, keep_last=99):
    return Checkpoints(Path(directory) / loop.CHECKPOINTS, keep_last=keep_last)


def newest_state(directory):
    """(state, record) of the newest checkpoint, the record without its seconds."""
    run = tiny_run(directory)
    model, mesh = build(run.model), make_mesh(run.mesh)
    abstract = abstract_state(model, run.optimizer, mesh)
    with checkpoints_of(directory) as checkpoints:
        state, record = loop._start(checkpoints, abstract, run, model, mesh)
    assert record.seconds > 0
    return state, replace(record, seconds=0.0)


def content(leaf):
    data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()


def assert_bit_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, one), other in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert content(one) == content(other), jax.tree_util.keystr(path)


def measured(directory):
    """The lines of metrics.jsonl without what the clock decides."""
    lines = read_metrics(Path(directory) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same_run(one, other):
    """Parameters, optimizer state, key, record and measurements."""
    (left, left_record), (right, right_record) = newest_state(one), newest_state(other)
    assert_bit_equal(left, right)
    assert left_record == right_record
    assert measured(one) == measured(other)
    with checkpoints_of(one) as left, checkpoints_of(other) as right:
        assert (left.steps, left.best_step) == (right.steps, right.best_step)


def killed_process(directory, *when):
    command = [sys.executable, killed_run.__file__, str(directory), *map(str, when)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


# --- stopping and going on ---


def test_a_run_leaves_what_it_says(whole):
    """The summary, one line for each update and each checkpoint, the newest two checkpoints, files."""
    directory, summary = whole.directory, whole.summary
    assert {path.name for path in directory.iterdir()} == {
        *(
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "metrics.jsonl",
            "curves.png",
            "checkpoints",
            "parameters",
        )
    }
    assert set(summary) == {
        *("steps", "epochs", "train_seconds", "tokens_per_second", "parameters", "validation_loss"),
        *("dropped_examples", "padding_share"),
    }
    assert summary["steps"] == 7 and summary["epochs"] == 7 / STEPS_PER_EPOCH and summary["dropped_examples"] == 0
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(whole.params))
    assert summary["train_seconds"] > 0 and summary["tokens_per_second"] > 0
    lines = measured(directory)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6, 7]
    assert summary["validation_loss"] == min(line["validation_loss"] for line in lines if "validation_loss" in line)
    assert lines[0]["loss"] > lines[-2]["loss"]
    with checkpoints_of(directory) as checkpoints:
        assert checkpoints.steps == [6, 7]


def test_epochs_come_in_different_orders(whole):
    """B48: the second epoch is not the first one again."""
    batches = batches_of(tiny_run(whole.directory), TRAIN)
    assert batches.steps_per_epoch == STEPS_PER_EPOCH
    first, second = ([batches[i + start]["tokens"].tolist() for i in range(3)] for start in (0, STEPS_PER_EPOCH))
    assert first != second
    assert sorted(row for batch in first for row in batch) == sorted(row for batch in second for row in batch)


@pytest.mark.parametrize("update", [1, 2, 4, 6, 7])
def test_stopped_before_any_update_and_continued_is_uninterrupted(whole, tmp_path, update):
    """B48, in one process: before the first checkpoint, between two, in mid-epoch and at the end of an epoch."""
    with from_update(update, stop), pytest.raises(Stopped):
        fit(tiny_run(tmp_path / "run"))
    assert not (tmp_path / "run" / "parameters").exists()
    continued = fit(tiny_run(tmp_path / "run"))
    assert_same_run(continued.directory, whole.directory)
    assert_bit_equal(continued.params, whole.params)


def test_killed_and_continued_by_another_process_is_uninterrupted(whole, tmp_path):
    """B48: SIGKILL in the second epoch, one update after its checkpoint; the rest crosses into the third."""
    process = killed_process(tmp_path / "run", 6, 4)
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    with checkpoints_of(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [2, 4]
    assert measured(tmp_path / "run")[-1]["step"] == 5, "the killed process went on after its checkpoint"
    continued = fit(tiny_run(tmp_path / "run"))
    assert_same_run(continued.directory, whole.directory)
    assert_bit_equal(continued.params, whole.params)


@pytest.mark.slow
def test_killed_again_and_again_at_any_moment_is_uninterrupted(whole, tmp_path):
    """B48: kills while importing, compiling, training, saving and writing the end, until one process gets through."""
    rng, started = random.Random(0), time.monotonic()
    assert killed_process(tmp_path / "timed").wait() == 0
    whole_time, kills = time.monotonic() - started, 0
    for share in [*(rng.uniform(0.3, 1.0) for _ in range(8)), *(rng.uniform(0.8, 1.05) for _ in range(8)), 10.0]:
        process = killed_process(tmp_path / "run")
        try:
            said = process.communicate(timeout=share * whole_time)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, said
        break
    assert kills
    assert_same_run(tmp_path / "run", whole.directory)
    assert_bit_equal(load(tmp_path / "run")[1], whole.params)


def test_a_finished_run_trains_no_further(whole):
    before = measured(whole.directory)
    with from_update(1, stop):
        again = fit(tiny_run(whole.directory))
    assert_bit_equal(again.params, whole.params)
    assert again.summary == whole.summary
    assert measured(whole.directory) == before


# --- what is refused ---


def test_another_configuration_is_refused_by_its_fields(whole):
    other = tiny_run(whole.directory, steps=8, label_smoothing=0.2)
    other = replace(other, data=replace(other.data, seed=5))
    before = (whole.directory / "config.json").read_bytes()
    with pytest.raises(ValueError, match="another configuration") as refusal:
        fit(other)
    for line in ("train.steps: 8, 7", "train.label_smoothing: 0.2, 0.1", "data.seed: 5, 0"):
        assert line in str(refusal.value)
    assert "run_dir:" not in str(refusal.value) and "train.epochs" not in str(refusal.value)
    assert (whole.directory / "config.json").read_bytes() == before


def test_a_model_without_an_encoder_is_refused_before_anything_is_written(tmp_path):
    run = tiny_run(tmp_path / "run", steps=2)
    decoder = GPTConfig(260, max_length=24, d_model=8, d_ff=12, num_heads=2, num_layers=1)
    with pytest.raises(ValueError, match=r"'gpt' model \(decoder\) learns from .* none, and this data is pairs"):
        fit(replace(run, model=decoder))
    assert not (tmp_path / "run").exists()


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        fit(tiny_run(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_directory_and_one_killed_at_its_birth_are_no_obstacle(tmp_path):
    """B48: a kill while config.json is written leaves its partial file and nothing else."""
    for name, file in {"empty": None, "killed": "config.json.partial"}.items():
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).write_text('{"model": {"fam')
        with from_update(1, stop), pytest.raises(Stopped):
            fit(tiny_run(tmp_path / name))


def test_a_pair_that_is_too_long_is_refused_by_file_and_line_or_dropped_and_counted(tmp_path):
    """The first pair over the limit is named; dropped ones are counted over both texts and change nothing else."""
    limit = killed_run.MODEL.max_length - 2  # a space before the line, the end after it
    source = [*TRAIN.source[:4], "a" * limit, "a" * (limit + 1), *TRAIN.source[4:]]
    target = [*TRAIN.target[:4], "b", "b", *TRAIN.target[4:]]
    text = parallel(source, target, "long.src", "long.tgt")
    with pytest.raises(ValueError, match=r"long\.src:6 has 25 tokens and long\.tgt:6 has 3.*max_length is 24"):
        fit(tiny_run(tmp_path / "error"), train=text)
    # nothing was written, so the run that drops such pairs may stand in the same place
    run = tiny_run(tmp_path / "error")
    longer = parallel(["a" * 99, *TRAIN.source], ["b", *TRAIN.target], "long.src", "long.tgt")
    run = replace(run, data=replace(run.data, too_long="drop"))
    one = parallel(["ab", *VALIDATION.source], ["b" * 99, *VALIDATION.target], "v.src", "v.tgt")
    fitted = fit(run, train=longer, validation=one)
    assert fitted.summary["dropped_examples"] == 2


# --- where a run ends, and with what ---


@pytest.fixture
def losses(monkeypatch):
    """Decide the validation losses."""

    def install(*values):
        values = iter(values)
        monkeypatch.setattr(loop, "evaluate_loss", lambda *_, **__: {"loss": next(values), "accuracy": 0.5})

    return install


def params_of(directory, step):
    run = tiny_run(directory)
    with checkpoints_of(directory) as checkpoints:
        return checkpoints.restore_params(step, abstract_params(build(run.model), make_mesh(run.mesh)))


@pytest.mark.parametrize("final, steps", [("last", [7]), ("best", [2]), ("average", [6, 7])])
def test_the_final_parameters_are_the_newest_the_best_or_the_mean_of_the_newest(tmp_path, losses, final, steps):
    """The best checkpoint is kept besides the newest, and counts for no mean."""
    losses(1.0, 3.0, 2.0, 4.0)
    fitted = fit(tiny_run(tmp_path / "run", final=final))
    with checkpoints_of(tmp_path / "run") as checkpoints:
        assert (checkpoints.steps, checkpoints.best_step) == ([2, 6, 7], 2)
    trees = [params_of(tmp_path / "run", step) for step in steps]
    expected = jax.tree.map(lambda *leaves: np.mean([np.asarray(x, np.float64) for x in leaves], axis=0), *trees)
    for tree in (fitted.params, load(tmp_path / "run")[1]):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9), tree, expected)
    assert fitted.summary["validation_loss"] == 1.0


def test_patience_counts_rounds_without_a_better_loss_over_parts_of_a_run(tmp_path, losses):
    """Ten rounds were possible; the second part remembers the best loss and how long ago it was."""
    run = tiny_run(tmp_path / "run", steps=20, patience=3)
    losses(3.0, 2.0, 2.5, 2.0)
    with from_update(9, stop), pytest.raises(Stopped):
        fit(run)
    losses(2.1, 1.0)
    fitted = fit(run)
    assert fitted.summary["steps"] == 10
    assert fitted.summary["validation_loss"] == 2.0


def test_a_validation_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path, losses):
    losses(3.0, float("nan"))
    with pytest.raises(FloatingPointError, match="validation loss after update 4 is nan"):
        fit(tiny_run(tmp_path / "run"))
    with checkpoints_of(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [2]


def test_epochs_are_a_limit_and_a_unit(tmp_path):
    fitted = fit(tiny_run(tmp_path / "run", steps=None, epochs=2, checkpoint_every=1, checkpoint_unit="epochs"))
    assert (fitted.summary["steps"], fitted.summary["epochs"]) == (2 * STEPS_PER_EPOCH, 2.0)
    assert [line["step"] for line in measured(tmp_path / "run") if "validation_loss" in line] == [3, 6]


def test_the_first_limit_ends_a_run(tmp_path):
    assert fit(tiny_run(tmp_path / "run", steps=2, epochs=1)).summary["steps"] == 2


def test_a_minute_is_a_minute_over_the_parts_of_a_run(tmp_path, monkeypatch):
    """Six seconds an update: stopped before the 8th with a checkpoint at the 6th, the run ends with the 10th."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def slow(state, take):
        clock.now += 6.0
        if int(state.step) == 7 and clock.now < 60.0:
            raise Stopped
        return take(state)

    run = tiny_run(tmp_path / "run", steps=None, max_minutes=1.0)
    with from_update(1, slow):
        with pytest.raises(Stopped):
            fit(run)
        clock.now = 1_000.0
        fitted = fit(run)
        assert fit(run).summary == fitted.summary
    assert fitted.summary["steps"] == 10
    assert fitted.summary["train_seconds"] == pytest.approx(60.0)


def test_a_limit_of_next_to_no_time_makes_one_update_and_saves_it(tmp_path):
    fitted = fit(tiny_run(tmp_path / "run", steps=None, max_minutes=1e-6))
    assert fitted.summary["steps"] == 1
    assert_bit_equal(fitted.params, params_of(tmp_path / "run", 1))


# --- losses that are no numbers ---


def spoil(state, take):
    return take(replace(state, params=jax.tree.map(lambda x: x * jax.numpy.float32("nan"), state.params)))


def test_a_loss_that_is_no_number_ends_the_run_with_advice(tmp_path):
    with from_update(4, spoil), pytest.raises(FloatingPointError, match=r"update.* 4 is nan.*learning rate.*clip"):
        fit(tiny_run(tmp_path / "run"))
    with checkpoints_of(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == [2]


@pytest.mark.parametrize("steps, checkpoint_every", [(4, 99), (7, 2)])
def test_no_checkpoint_and_no_end_without_a_look_at_the_loss(tmp_path, steps, checkpoint_every):
    """The lines of metrics.jsonl are further apart than the checkpoints, and than the end."""
    with from_update(4, spoil), pytest.raises(FloatingPointError, match="newest checkpoint is from before"):
        fit(tiny_run(tmp_path / "run", steps=steps, checkpoint_every=checkpoint_every, log_every=50))
    with checkpoints_of(tmp_path / "run") as checkpoints:
        assert checkpoints.steps == ([2] if checkpoint_every == 2 else [])
    assert not (tmp_path / "run" / "parameters").exists()


# --- devices and compilations ---


def test_four_devices_train_as_one_does(whole, tmp_path):
    """Parameters and batch in two shards, heads and widths in two more: the same batches, the same first losses."""
    fitted = fit(tiny_run(tmp_path / "run", mesh=Mesh(fsdp=2, model=2)))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(fitted.params)} == {4}
    ours, theirs = measured(tmp_path / "run"), measured(whole.directory)
    for name in ("loss", "gradient_norm", "accuracy"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-5), name
    # Adam turns rounding into steps where the gradient is noise, so later losses only come close
    assert [line["loss"] for line in ours if "loss" in line] == pytest.approx(
        [line["loss"] for line in theirs if "loss" in line], rel=1e-2
    )
    alone = load(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, fitted.params, alone[1])
    decode, lines = replace(tiny_run("").decode, beams=1), ["abc", "", "gfedcb"]
    texts = [
        [best[0].text for best in translate(*of, lines, decode=decode)]
        for of in ((fitted.model, fitted.params, fitted.tokenizer), alone)
    ]
    assert texts[0] == texts[1]


def test_a_run_goes_on_with_the_same_batches_on_another_mesh(whole, tmp_path):
    """B46: begun on one device, continued on two; the configuration may differ in nothing else."""
    with from_update(5, stop), pytest.raises(Stopped):
        fit(tiny_run(tmp_path / "run"))
    fitted = fit(replace(tiny_run(tmp_path / "run", mesh=Mesh(data=2)), data=replace(tiny_run("").data, workers=0)))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(fitted.params)} == {2}
    ours, theirs = measured(tmp_path / "run"), measured(whole.directory)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name in {"loss", "validation_loss", "tokens"} & set(one):
            assert one[name] == pytest.approx(other[name], rel=1e-3), (one["step"], name)


# --- what is not a pair ---


def test_a_decoder_only_model_learns_a_text(tmp_path):
    run = tiny_run(tmp_path / "run", steps=2)
    model = GPTConfig(260, max_length=24, d_model=8, d_ff=12, num_heads=2, num_layers=1)
    fitted = fit(
        replace(run, model=model, data=replace(run.data, batching="blocks")), train=LINES, validation=LINES.split(5)[0]
    )
    assert fitted.summary["steps"] == 2 and 4 < fitted.summary["validation_loss"] < 7  # log 260 is 5.6
    assert load(tmp_path / "run")[0].config == model


def test_an_encoder_decoder_learns_what_is_hidden(tmp_path):
    """Packed, so that segments and positions of both sides reach the model."""
    run = tiny_run(tmp_path / "run", steps=2)
    data = replace(run.data, corruption=Corruption("spans", rate=0.3, sentinels=7), batching="packed")
    run = replace(run, model=replace(run.model, vocab_size=267), data=data)
    fitted = fit(run, train=LINES, validation=LINES.split(5)[0])
    assert fitted.summary["steps"] == 2 and 4 < fitted.summary["validation_loss"] < 7


def test_an_encoder_learns_what_is_masked(tmp_path):
    run = tiny_run(tmp_path / "run", steps=2)
    model = BERTConfig(261, max_length=24, d_model=8, d_ff=12, num_heads=2, num_layers=1)
    data = replace(run.data, corruption=Corruption("mask", rate=0.3), batching="blocks")
    fitted = fit(replace(run, model=model, data=data), train=LINES, validation=LINES.split(5)[0])
    assert fitted.summary["steps"] == 2 and 4 < fitted.summary["validation_loss"] < 7
    assert load(tmp_path / "run")[0].config == model


@pytest.mark.parametrize("change", [{"corruption": Corruption(name="mask")}, {}])
def test_what_a_model_cannot_learn_is_refused_before_anything_is_written(tmp_path, change):
    run = tiny_run(tmp_path / "run", steps=2)
    run = replace(run, model=replace(run.model, vocab_size=267), data=replace(run.data, **change))
    said = f"learns from pairs, .*, and this data is a text with data.corruption.name {'mask' if change else 'none'}"
    with pytest.raises(ValueError, match=said):
        fit(run, train=LINES, validation=LINES)
    assert not (tmp_path / "run").exists()


def test_each_shape_compiles_once(tmp_path, monkeypatch):
    """Two epochs and two checkpoints; an objective is called when it is traced."""
    traced = []

    class Counted(TextToText):
        def __call__(self, params, batch, key):
            traced.append(("eval" if key is None else "train", *batch["tokens"].shape, batch["source_tokens"].shape[1]))
            return super().__call__(params, batch, key)

    monkeypatch.setattr(objectives, "TextToText", Counted)
    run = tiny_run(tmp_path / "run", steps=None, epochs=2, checkpoint_every=1, checkpoint_unit="epochs")
    run = replace(run, data=replace(run.data, num_buckets=2))
    source = [*("abc" for _ in range(18)), *("abcdef" for _ in range(12))]  # nine and six of them fill a batch
    text = parallel(source, source, "two.src", "two.tgt")
    fit(run, train=text)
    batches = batches_of(run, text)
    assert len(batches.shapes) == 2
    trained = [(rows, target, source) for kind, rows, target, source in traced if kind == "train"]
    assert sorted(trained) == sorted((rows, target, source) for rows, (source, target) in batches.shapes)
    assert len(traced) - len(trained) == len(batches_of(run, VALIDATION, evaluation=True).shapes)


def test_config_json_is_the_configuration(whole):
    values = json.loads((whole.directory / "config.json").read_text())
    assert values["model"]["family"] == "transformer" and values["train"]["steps"] == 7
