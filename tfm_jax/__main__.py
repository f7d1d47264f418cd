"""The command line: `python -m tfm_jax translate --run DIR < in > out`, and so generate, classify, evaluate, ..."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from tfm_jax import hf
from tfm_jax.config import Decode, Mesh
from tfm_jax.data.batches import make_batches, make_tokenizer
from tfm_jax.data.look import describe, look_at_splits, measure_rate, shape_uses, show_batches, side_names
from tfm_jax.data.sources import read_parallel, read_splits, split_lines
from tfm_jax.data.tokenizer import Tokenizer
from tfm_jax.decode.predict import predict
from tfm_jax.decode.sampling import GREEDY, Sampling
from tfm_jax.decode.text import BLANK, one_line
from tfm_jax.decode.text import stream as stream_text
from tfm_jax.decode.text import translate as translate_lines
from tfm_jax.equivalence import compact, mismatches, save, table
from tfm_jax.plan import cache_bytes, find_model, parameter_layout, unit
from tfm_jax.sharding import make_mesh
from tfm_jax.train.checkpoint import DamagedCheckpoint
from tfm_jax.train.evaluate import evaluate_translation
from tfm_jax.train.pretrained import read_vocabulary
from tfm_jax.train.report import LineCounter, plot_data
from tfm_jax.train.run import TOKENIZER, decode_settings, is_hf, load, read_config, read_config_file

ONE_DEVICE = Mesh()


def translate(
    run: str, beams: int | None = None, nbest: int | None = None, mesh: Mesh = ONE_DEVICE, *, scores: bool = False
) -> None:
    """Translate stdin to stdout: n lines in, n lines out, in order, blank lines blank.

    A Hugging Face directory says in generation_config.json how it translates, else greedily; sampling is not taken.

    Args:
        run: Directory of the run that trained the model, or of a Hugging Face model.
        beams: Hypotheses kept at each step, 1 is greedy search. None: as the directory says.
        nbest: So many lines for each line, the best translation first, empty where there are not so many. None: as the
            directory says.
        mesh: Devices by axis, over which the model lies.
        scores: Put the score of a translation and a tab before it: log p / penalty ** length_penalty.
    """
    decode = _decode(run, beams=beams, nbest=nbest)
    devices, lines = make_mesh(mesh), split_lines(sys.stdin.buffer.read(), "stdin")
    model, params, tokenizer = load(run, mesh=devices)
    with jax.set_mesh(devices), LineCounter("translating", len(lines)) as counter:
        found = translate_lines(
            model, params, tokenizer, lines, decode=decode, where=lambda i: f"stdin:{i + 1}", progress=counter.update
        )
    for outputs in found:
        for output in [*outputs, *[BLANK] * (decode.nbest - len(outputs))]:
            score = f"{output.score:.5f}\t" if scores and output != BLANK else ""
            sys.stdout.buffer.write(f"{score}{one_line(output.text)}\n".encode())


def generate(
    run: str,
    prompt: str,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = GREEDY,
    max_new_tokens: int | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram: int | None = None,
    mesh: Mesh = ONE_DEVICE,
) -> None:
    """Continue a text: what a decoder-only model writes after the prompt goes to stdout as it is written.

    Each token is the likeliest, unless the flags below ask for draws. Of generation_config.json in a Hugging Face
    directory the limits, ends and penalties are taken, but neither do_sample, temperature, top_k and top_p, as what is
    drawn could not be the same, nor num_beams, as beams cannot be written as they go.

    Args:
        run: Directory of the run that trained the model, or of a Hugging Face model.
        prompt: The text to continue.
        sampling: How a token is drawn.
        max_new_tokens: Longest text, its end included. None: as the directory says. Unit: tokens.
        repetition_penalty: Above 1, tokens that occurred already are less likely. None: as the directory says.
        no_repeat_ngram: No sequence of so many tokens occurs twice. None: as the directory says. Unit: tokens.
        mesh: Devices by axis, over which the model lies.
    """
    if sampling.temperature == 0 and replace(sampling, seed=0) != GREEDY:
        raise ValueError("top-k, top-p and min-p say what may be drawn, but at temperature 0 nothing is: raise it")
    limits = {"repetition_penalty": repetition_penalty, "no_repeat_ngram": no_repeat_ngram}
    decode = _decode(run, max_new_tokens=max_new_tokens, **limits)
    devices = make_mesh(mesh)
    with jax.set_mesh(devices):
        for piece in stream_text(*load(run, mesh=devices), prompt, decode=decode, sampling=sampling):
            sys.stdout.buffer.write(piece.encode())
            sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")


def classify(run: str, mesh: Mesh = ONE_DEVICE) -> None:
    """Write what a model says of each line of stdin: n lines in, n lines out, in order, without the text.

    A line of a model with head sequence is the likeliest label, a tab and its probability; of one with head regression
    its numbers, with tabs between them.

    Args:
        run: Directory of the run that trained the model, or of a Hugging Face model.
        mesh: Devices by axis, over which the model lies.
    """
    devices = make_mesh(mesh)
    model, params, tokenizer = load(run, mesh=devices)
    head, labels = getattr(model.config, "head", None), getattr(model.config, "labels", ())
    if head not in ("sequence", "regression"):
        raise ValueError(f"a {model.config.family!r} model with head {head!r} has no labels for a line: give another")
    if not is_hf(run) and len(read_config(run).data.features) == 2:
        raise ValueError(f"the model in {run} was trained on two texts at once, and a line is one: use model.apply")
    lines = split_lines(sys.stdin.buffer.read(), "stdin")
    with jax.set_mesh(devices), LineCounter("reading", len(lines)) as counter:
        where = lambda i: f"stdin:{i + 1}"  # noqa: E731
        rows = predict(model, params, tokenizer, lines, where=where, progress=counter.update).astype(np.float64)
    for row in rows:
        if head == "regression":
            said = [f"{number:.5f}" for number in row]
        else:
            said = [labels[row.argmax()], f"{1 / np.exp(row - row.max()).sum():.5f}"]
        line = one_line("\t".join(said))
        sys.stdout.buffer.write(f"{line}\n".encode())


def evaluate(run: str, source: str, target: str, beams: int | None = None, mesh: Mesh = ONE_DEVICE) -> None:
    """Translate a file and print its scores as JSON: bleu with its signature, chrf, exact_match.

    Args:
        run: Directory of the run that trained the model, or of a Hugging Face model.
        source: File with one sentence a line, plain or .gz.
        target: File with the translation of each line.
        beams: Hypotheses kept at each step, 1 is greedy search. None: as the directory says.
        mesh: Devices by axis, over which the model lies.
    """
    decode, text, devices = _decode(run, beams=beams), read_parallel(source, target), make_mesh(mesh)
    model, params, tokenizer = load(run, mesh=devices)
    with jax.set_mesh(devices):
        scores, _ = evaluate_translation(model, params, tokenizer, text, decode=decode)
    print(json.dumps(scores | {"examples": len(text)}, indent=2, ensure_ascii=False))


def data(config: str, batches: int = 2, rows: int = 3, seconds: float = 2.0, png: str | None = None) -> None:
    """Show what a model sees: the lengths of its texts, shapes and padding of its batches, and some rows as text.

    Args:
        config: A run's config.json or the directory that holds it, trained or not.
        batches: How many training batches are shown.
        rows: How many rows of each.
        seconds: For how long the rate of the loader is measured, an epoch at most.
        png: File for a plot of lengths and padding. None: data.png beside the configuration.
    """
    if min(batches, rows) < 0:
        raise ValueError(f"batches, rows are {batches}, {rows}: numbers from 0 up are expected")
    path = Path(config)
    run, folder = (read_config(path), path) if path.is_dir() else (read_config_file(path), path.parent)
    picture = folder / "data.png" if png is None else Path(png)
    if not picture.absolute().parent.is_dir():
        raise ValueError(f"{picture} cannot be written: there is no directory {picture.absolute().parent}")
    texts = read_splits(run.data)
    if (folder / TOKENIZER).exists():
        tokenizer, origin = Tokenizer.load(folder / TOKENIZER), str(folder / TOKENIZER)
    elif run.train.init_from:
        tokenizer, origin = read_vocabulary(run.train.init_from), f"that of {run.train.init_from}"
    else:
        _note("making the vocabulary")
        tokenizer = make_tokenizer(run.data, texts["train"], vocab_size=run.model.vocab_size)
        origin = run.data.tokenizer_file or f"{run.data.tokenizer}, made now"
    _note("encoding the texts")
    size = {"vocab_size": run.model.vocab_size}
    training = make_batches(run.data, texts["train"], tokenizer, **size)
    looks = look_at_splits(run.data, texts, tokenizer, training.examples, **size)
    rate = measure_rate(training, workers=run.data.workers, seconds=seconds)
    parts = [f"vocabulary: {tokenizer.vocab_size:,} entries, {origin}", describe(run.data, looks, training, rate)]
    print("\n\n".join([*parts, show_batches(training, tokenizer, count=batches, rows=rows)]).rstrip())
    plot_data(
        picture,
        {name: look.lengths for name, look in looks.items()},
        sides=side_names(len(training.shapes[0].lengths)),
        shapes=[(use.name, use.tokens, use.padding) for use in shape_uses(training)],
    )
    _note(f"plotted in {picture}")


def convert(
    source: tyro.conf.Positional[str], target: tyro.conf.Positional[str], model_type: str | None = None
) -> None:
    """Write a run, or a Hugging Face directory, as a Hugging Face directory that transformers reads.

    generation_config.json says there how the run decodes, or what the other directory says.

    Args:
        source: Directory of the run or of the model.
        target: Directory to write; it must not hold a model yet.
        model_type: What config.json calls the model (bert, gpt2, llama, t5, ...). None: what fits.
    """
    if Path(source).resolve() == Path(target).resolve():
        raise ValueError(f"source and target are both {source}: give another directory to write to")
    if (Path(target) / "config.json").exists():
        raise ValueError(f"{target} already holds a model (config.json): give another directory to write to")
    loaded = load(source)
    hf.save(target, *loaded, model_type=model_type)
    model = loaded[0].config
    if hf.writes_text(model):
        try:
            theirs = is_hf(source)
            how = hf.generation_values(source) if theirs else hf.write_generation(decode_settings(source), model.kind)
            hf.save_generation(target, how)
        except ValueError as error:
            _note(f"generation_config.json does not say how to decode: {error}")
    _note(f"written to {target}")


def plan(
    source: tyro.conf.Positional[str],
    mesh: Mesh = ONE_DEVICE,
    dtype: Literal["float32", "bfloat16"] = "float32",
    batch: int | None = None,
    length: int | None = None,
) -> None:
    """Show how a model would lie over a mesh: each parameter, and what each device holds. No device need be there.

    Args:
        source: Directory of a run, of a Hugging Face model (its config.json is enough), or a preset such as llama2_7b.
        mesh: Devices by axis.
        dtype: Of the parameters and of the cache.
        batch: Rows of a cache to count besides, with length. None: none is counted.
        length: Columns of that cache. Unit: tokens.
    """
    if (batch is None) != (length is None):
        raise ValueError(f"batch, length are {batch}, {length}: a cache has both, give the other too")
    model = find_model(source)
    print(parameter_layout(model, mesh, dtype=dtype).table())
    if batch is not None:
        held = cache_bytes(model, mesh, batch=batch, length=length, dtype=dtype)
        print(f"the cache of {batch} rows of {length:,} tokens: {unit(held)} on each device")


def equivalence(json: str | None = None, full: bool = True, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
    """Compare every implementation of attention with float64 NumPy: output and gradients. A mismatch is exit code 1.

    Args:
        json: File for the rows, one for each quantity of each implementation in each case. None: they are printed only.
        full: Every mask with every bias, and after that every two values of all that varies; else the latter alone.
        dtype: What every mask with every bias is computed in.
    """
    if json is not None and not Path(json).absolute().parent.is_dir():
        raise ValueError(f"{json} cannot be written: there is no directory {Path(json).absolute().parent}")
    rows = table(full=full, dtype=dtype)
    if json is not None:
        save(rows, json)
    print(compact(rows))
    if mismatches(rows):
        raise SystemExit(1)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _decode(run: str, **changes: int | float | None) -> Decode:
    """As the run's configuration says, but for what is not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(decode_settings(run), **given)


COMMANDS = {
    "translate": translate,
    "generate": generate,
    "classify": classify,
    "evaluate": evaluate,
    "data": data,
    "equivalence": equivalence,
    "plan": plan,
    "convert": convert,
}


def main() -> None:
    """Run a command; what is wrong with the input is said in one line, without a traceback."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m tfm_jax", description=__doc__)
    except (ValueError, OSError, ArithmeticError, DamagedCheckpoint) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
