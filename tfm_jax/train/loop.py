"""`fit`: the chapters of a training run, top to bottom."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tfm_jax import config
from tfm_jax.data.batches import Batches, make_batches, make_tokenizer
from tfm_jax.data.sources import Text
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.models import Model, build
from tfm_jax.sharding import is_first_process, join_processes, make_mesh
from tfm_jax.train.checkpoint import Checkpoints, average_params, load_params, save_params
from tfm_jax.train.evaluate import evaluate_loss
from tfm_jax.train.feed import Fed, feed
from tfm_jax.train.objectives import check_labels, objective_of
from tfm_jax.train.optim import check_patterns
from tfm_jax.train.pretrained import read_pretrained
from tfm_jax.train.report import Metrics, ProgressBar, plot_curves, read_metrics
from tfm_jax.train.run import CHECKPOINTS, PARAMETERS, TOKENIZER, Fitted, check_run, open_run
from tfm_jax.train.step import TrainState, abstract_state, init_state, train_step


@dataclass(frozen=True)
class _Record:
    """What a checkpoint holds beside parameters and optimizer: where the run stands, in plain numbers."""

    best_loss: float = math.inf
    rounds_without_best: int = 0
    seconds: float = 0.0
    tokens: float = 0.0


def fit(run: config.Run, *, train: Text, validation: Text) -> Fitted:
    """Train the configured model on a text, or continue where its run directory stands.

    Encoder-decoders learn what is two-sided: pairs, or a text with spans or its end hidden; decoder-only models learn
    the next token of a text, encoders what is masked in it, and models with a head for them the labels of texts.

    Killed at any moment and started again with the same configuration, it ends with the same parameters on the same
    devices (when the limit is steps or epochs); on another mesh it sees the same batches. Raises `ValueError` for
    another configuration than the directory's, for text that the model cannot take, and `FloatingPointError` when the
    loss is not finite.

    Several processes, each with devices of its own (hosts of a pod), make one run when each calls this with the same
    arguments (`join_processes` says how they find each other). They share the directory in one file system; the first
    one writes it.
    """
    # may the run stand where it is wanted, on these devices?
    join_processes()
    check_run(run)
    mesh, model = make_mesh(run.mesh), build(run.model)
    abstract = abstract_state(model, run.optimizer, mesh, precision=run.precision)
    check_patterns(run.optimizer, model.shapes)
    # not any folder there: a kill during the first save leaves a part of one
    begun = Checkpoints(Path(run.run_dir) / CHECKPOINTS, keep_last=run.train.keep_last).steps
    pretrained = read_pretrained(model, run.train) if run.train.init_from and not begun else None

    # text to vocabulary to batches; what is wrong with it is found before anything is written
    check_labels(model, run.data, train, validation)
    tokenizer = tokenizer_of(run, train) if pretrained is None else pretrained.tokenizer
    sizes = {"vocab_size": run.model.vocab_size}
    train_batches = make_batches(run.data, train, tokenizer, **sizes)
    validation_batches = make_batches(run.data, validation, tokenizer, **sizes, evaluation=True)
    two_sided = len(train_batches.shapes[0].lengths) == 2
    rates = {"label_smoothing": run.train.label_smoothing, "z_loss": run.train.z_loss}
    objective = objective_of(model, run.data, two_sided=two_sided, **rates)

    # state: restored or born
    directory = open_run(run, tokenizer)
    with jax.set_mesh(mesh), ProgressBar() as bar:
        bar.note(_describe(model, tokenizer, train_batches, validation_batches))
        with Checkpoints(directory / CHECKPOINTS, keep_last=run.train.keep_last) as checkpoints:
            state, record = _start(checkpoints, abstract, run, model, mesh)
            if pretrained is not None:
                bar.note(f"{run.train.init_from}: {pretrained}")
                state = replace(state, params=pretrained.into(state.params))
            if int(state.step):
                bar.note(f"continuing from update {int(state.step)} of {directory}")
            loop = _Loop(run, mesh, objective, train_batches, validation_batches, checkpoints, bar)
            metrics = Metrics(directory / "metrics.jsonl", after_step=int(state.step))
            state, record = loop.train(state, record, metrics)
            metrics.close()
            checkpoints.wait()

            # the parameters the run ends with
            params = _final_params(directory / PARAMETERS, checkpoints, state, run)
    if is_first_process():
        plot_curves(read_metrics(directory / "metrics.jsonl"), directory / "curves.png")
    steps = int(state.step)
    summary = {
        "steps": steps,
        "epochs": steps / train_batches.steps_per_epoch,
        "train_seconds": record.seconds,
        "tokens_per_second": record.tokens / max(record.seconds, 1e-9),
        "parameters": model.num_parameters,
        "validation_loss": record.best_loss,
        "dropped_examples": train_batches.examples.dropped + validation_batches.examples.dropped,
        "padding_share": train_batches.padding_share,
    }
    return Fitted(run, model, params, tokenizer, summary)


class _Loop:
    """The training loop with the things it uses."""

    def __init__(self, run, mesh, objective, train_batches, validation_batches, checkpoints, bar):
        self.run, self.mesh, self.objective, self.bar = run, mesh, objective, bar
        self.batches, self.validation, self.checkpoints = train_batches, validation_batches, checkpoints
        limits = [run.train.steps, run.train.epochs and run.train.epochs * train_batches.steps_per_epoch]
        self.last_step = min((limit for limit in limits if limit is not None), default=None)
        self.settings = {
            "optimizer": run.optimizer,
            "objective": objective,
            "micro_batches": run.train.micro_batches,
            "precision": run.precision,
        }
        unit = 1 if run.train.checkpoint_unit == "steps" else train_batches.steps_per_epoch
        self.round = run.train.checkpoint_every * unit

    def train(self, state: TrainState, record: _Record, metrics: Metrics) -> tuple[TrainState, _Record]:
        """Update until a limit is reached; measure, save and report on the way."""
        first, began, before = int(state.step), time.monotonic(), record
        if self._ended(first, record):
            return state, record
        workers = self.run.data.workers
        fed = feed(self.batches, first, self.last_step, mesh=self.mesh, workers=workers)
        window = _Window()
        with contextlib.closing(fed):
            for index, batch, tokens in window.timed(fed):
                step = index + 1
                state, values = train_step(state, batch, **self.settings)
                window.add(values, tokens)
                seconds = _since(began, before)
                if self.run.train.max_minutes is not None:
                    seconds = _agreed(seconds)
                record = replace(record, tokens=record.tokens + tokens, seconds=seconds)
                due = step % self.round == 0 or self._ended(step, record)
                if step % self.run.train.log_every == 0 or step == first + 1 or due:
                    self._log(step, window.close(step), record, metrics, from_step=first, earlier=before.seconds)
                if due:
                    record = self._checkpoint(state, record, metrics, lambda: _since(began, before))
                    if self._ended(step, record):
                        break
        return state, record

    def _ended(self, step: int, record: _Record) -> bool:
        limits = self.run.train
        return (
            (self.last_step is not None and step >= self.last_step)
            or (limits.max_minutes is not None and record.seconds >= 60 * limits.max_minutes)
            or (limits.patience is not None and record.rounds_without_best >= limits.patience)
        )

    def _log(self, step, values, record, metrics, *, from_step, earlier):
        epoch = step / self.batches.steps_per_epoch
        metrics.write(step, {"epoch": epoch, "seconds": record.seconds} | values)
        shares = [0.0 if self.last_step is None else step / self.last_step]
        lefts = []
        if self.last_step is not None:
            pace = (record.seconds - earlier) / (step - from_step)
            lefts.append((self.last_step - step) * pace)
        if (minutes := self.run.train.max_minutes) is not None:
            shares.append(record.seconds / (60 * minutes))
            lefts.append(60 * minutes - record.seconds)
        text = (
            f"update {step} epoch {epoch:.1f} loss {values['loss']:.3f} lr {values['learning_rate']:.2e} "
            f"{values['tokens_per_second']:,.0f} tok/s"
        )
        self.bar.update(min(max(shares), 1.0), text, seconds_left=max(0.0, min(lefts, default=0.0)))

    def _checkpoint(self, state, record, metrics, seconds) -> _Record:
        """Measure the validation loss, then give state and record to be saved."""
        step = int(state.step)
        values = evaluate_loss(state.params, self.validation, objective=self.objective, mesh=self.mesh)
        _require_finite(values["loss"], f"the validation loss after update {step}")
        better = values["loss"] < record.best_loss
        record = replace(
            record,
            best_loss=min(values["loss"], record.best_loss),
            rounds_without_best=0 if better else record.rounds_without_best + 1,
            seconds=_agreed(seconds()),
        )
        metrics.write(step, {f"validation_{name}": value for name, value in values.items()})
        rest = {"step": state.step, "key": state.key} | asdict(record)
        self.checkpoints.save(step, params=state.params, opt_state=state.opt_state, rest=rest, metric=values["loss"])
        self.bar.note(
            f"update {step}  epoch {step / self.batches.steps_per_epoch:.1f}  validation loss {values['loss']:.3f}  "
            + (f"accuracy {values['accuracy']:.3f}  " if "accuracy" in values else "")
            + f"{record.seconds:.0f} s"
            + ("  (best)" if better else "")
        )
        return record


class _Window:
    """Train metrics of the updates since the last line, as token-weighted means."""

    def __init__(self):
        self._open()

    def _open(self):
        self._waiting, self._values, self._tokens, self._began = None, [], 0, time.monotonic()
        self._for_input = 0.0

    def timed(self, fed: Iterator[Fed]) -> Iterator[Fed]:
        """The same; the time that each takes to come counts as waiting for input."""
        began = time.monotonic()
        for each in fed:
            self._for_input += time.monotonic() - began
            yield each
            began = time.monotonic()

    def add(self, values, tokens: int) -> None:
        # wait for the update before this one: the device stays busy and time limits stay true
        self._values.append(values)
        self._tokens += tokens
        if self._waiting is not None:
            jax.block_until_ready(self._waiting)
        self._waiting = values["loss"]

    def close(self, step: int) -> dict[str, float]:
        values = jax.device_get(self._values)
        weights = np.array([v["tokens"] for v in values], np.float64)
        mean = {
            name: float(np.dot([v[name] for v in values], weights) / max(weights.sum(), 1.0))
            for name in values[0].keys() & {"loss", "accuracy"}
        }
        last = {name: float(values[-1][name]) for name in ("gradient_norm", "learning_rate")}
        _require_finite(mean["loss"], f"the mean loss of {len(values)} updates up to update {step}")
        seconds = time.monotonic() - self._began
        speed = {"tokens_per_second": self._tokens / seconds, "input_wait": self._for_input / seconds}
        self._open()
        return mean | last | speed


def _require_finite(loss: float, what: str) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"{what} is {loss}: lower the learning rate, lengthen the warm-up or clip gradients (optimizer.clip_norm); "
            "the newest checkpoint is from before"
        )


def _since(began: float, before: _Record) -> float:
    return before.seconds + time.monotonic() - began


def _agreed(number: float) -> float:
    """The number of the first process, in all of them, which wait for each other."""
    # as whole numbers: jax would round float64
    bits = np.array([number], np.float64).view(np.uint32)
    return float(multihost_utils.broadcast_one_to_all(bits).view(np.float64)[0])


def tokenizer_of(run: config.Run, train: Text) -> Tokenizer:
    """The run's vocabulary: the one it has saved, or as its configuration says, of the training text."""
    path = Path(run.run_dir) / TOKENIZER
    return Tokenizer.load(path) if path.exists() else make_tokenizer(run.data, train, vocab_size=run.model.vocab_size)


def _describe(model: Model, tokenizer: Tokenizer, train: Batches, validation: Batches) -> str:
    return (
        f"{model.num_parameters:,} parameters, {tokenizer.vocab_size:,} vocabulary entries; an epoch is "
        f"{train.steps_per_epoch} updates in {len(train.shapes)} shapes, {train.padding_share:.1%} padding; "
        f"dropped as too long: {train.examples.dropped} examples for training, {validation.examples.dropped} for "
        "validation"
    )


def _start(
    checkpoints: Checkpoints, abstract: TrainState, run: config.Run, model: Model, mesh: jax.sharding.Mesh
) -> tuple[TrainState, _Record]:
    """The newest checkpoint, or the state before the first update."""
    rest = {"step": abstract.step, "key": abstract.key} | asdict(_Record())
    found = checkpoints.restore({"params": abstract.params, "opt_state": abstract.opt_state, "rest": rest})
    if found is None:
        key = jax.random.key(run.train.seed)
        settings = {"optimizer": run.optimizer, "precision": run.precision}
        return init_state(key, model=model, mesh=mesh, **settings), _Record()
    _, saved = found
    rest = dict(saved["rest"])
    return TrainState(rest.pop("step"), saved["params"], saved["opt_state"], rest.pop("key")), _Record(**rest)


def _final_params(path: Path, checkpoints: Checkpoints, state: TrainState, run: config.Run) -> dict:
    """The parameters that `train.final` names, saved where `load` finds them."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.params)
    if path.exists():
        return load_params(path, abstract)
    match run.train.final:
        case "last":
            params = state.params
        case "best":
            params = checkpoints.restore_params(checkpoints.best_step, abstract)
        case "average":
            newest = checkpoints.steps[-run.train.keep_last :]
            params = average_params(checkpoints.restore_params(step, abstract) for step in newest)
    save_params(path, params)
    return params
