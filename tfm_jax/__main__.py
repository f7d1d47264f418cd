"""The command line: `python -m tfm_jax translate --run DIR < in > out`, `python -m tfm_jax evaluate --run DIR ...`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

import tyro

from tfm_jax.data.sources import read_parallel, split_lines
from tfm_jax.decode.text import one_line
from tfm_jax.decode.text import translate as translate_lines
from tfm_jax.equivalence import compact, mismatches, save, table
from tfm_jax.train.checkpoint import DamagedCheckpoint
from tfm_jax.train.evaluate import evaluate_translation
from tfm_jax.train.report import LineCounter
from tfm_jax.train.run import load, read_config


def translate(run: str, beams: int | None = None) -> None:
    """Translate stdin to stdout: n lines in, n lines out, in order, blank lines blank.

    Args:
        run: Directory of the run that trained the model.
        beams: Hypotheses kept at each step, 1 is greedy search. None: as the run's configuration says.
    """
    decode = _decode(run, beams)
    model, params, tokenizer = load(run)
    lines = split_lines(sys.stdin.buffer.read(), "stdin")
    with LineCounter("translating", len(lines)) as counter:
        found = translate_lines(model, params, tokenizer, lines, decode=decode, name="stdin", progress=counter.update)
    for best, *_ in found:
        sys.stdout.buffer.write(one_line(best.text).encode() + b"\n")


def evaluate(run: str, source: str, target: str, beams: int | None = None) -> None:
    """Translate a file and print its scores as JSON: bleu with its signature, chrf, exact_match.

    Args:
        run: Directory of the run that trained the model.
        source: File with one sentence a line, plain or .gz.
        target: File with the translation of each line.
        beams: Hypotheses kept at each step, 1 is greedy search. None: as the run's configuration says.
    """
    decode, text = _decode(run, beams), read_parallel(source, target)
    model, params, tokenizer = load(run)
    scores, _ = evaluate_translation(model, params, tokenizer, text, decode=decode)
    print(json.dumps(scores | {"examples": len(text)}, indent=2, ensure_ascii=False))


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


def _decode(run: str, beams: int | None):
    decode = read_config(run).decode
    return decode if beams is None else dataclasses.replace(decode, beams=beams)


COMMANDS = {"translate": translate, "evaluate": evaluate, "equivalence": equivalence}


def main() -> None:
    """Run a command; what is wrong with the input is said in one line, without a traceback."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="python -m tfm_jax", description=__doc__)
    except (ValueError, OSError, ArithmeticError, DamagedCheckpoint) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
