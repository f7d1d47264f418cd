"""The architecture, verified: measure every claim and print the table claim | predicted | measured | limit | holds.

    python -m experiments.theory --json runs/theory/theory.json
    python -m experiments.theory --only saturation positions_beyond

In about 10 minutes on two CPU cores. Beside the JSON file, whose rows have the keys claim, predicted, measured,
limit, holds, note and file, come the pictures and a page with all of it. The exit status is 1 where a row does not
hold.
"""

import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.progress import track

from experiments.theory import Row

CLAIMS = (
    "dot_products",
    "saturation",
    "parameters",
    "permutations",
    "sinusoids",
    "positions_beyond",
    "masks",
    "forgotten_mask",
    "residuals",
    "warm_up",
    "complexity",
    "crossing",
    "path_length",
    "long_range",
    "memory",
    "heads",
    "explanation",
    "search",
    "families",
    "data_hunger",
)
HEAD = ("| claim | predicted | measured | limit | holds |", "| --- | --- | --- | --- | --- |")


def markdown(rows: list[dict]) -> str:
    """The table."""
    lines = [*HEAD]
    for row in rows:
        numbers = f"{number(row['predicted'])} | {number(row['measured'])}"
        note = f" ({row['note']})" if row["note"] else ""
        claim = f"{row['claim']}{note}".replace("|", "\\|")
        lines.append(f"| {claim} | {numbers} | {row['limit']} | {'yes' if row['holds'] else 'no'} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """A count with all its digits, anything else with four."""
    return f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.4g}"


def page(result: dict) -> str:
    """A heading, the table and the pictures of every claim."""
    parts = [f"# The architecture, verified\n\n{summary(result)}"]
    for name in dict.fromkeys(row["file"] for row in result["rows"]):
        title = importlib.import_module(f"experiments.theory.{name}").__doc__.split("\n\n")[0].replace("\n", " ")
        rows = markdown([row for row in result["rows"] if row["file"] == name])
        pictures = "\n".join(f"![{picture}]({picture})" for picture in result["pictures"][name])
        parts.append(f"## {title}\n\nFormulas and setting: `experiments/theory/{name}.py`.\n\n{rows}\n\n{pictures}")
    return "\n\n".join(parts) + "\n"


def summary(result: dict) -> str:
    """How many rows hold, where, and in what time."""
    holds, device, versions = [row["holds"] for row in result["rows"]], result["device"], result["versions"]
    return (
        f"{sum(holds)} of {len(holds)} rows hold; {device['kind']}, {device['cores']} cores, jax {versions['jax']}, "
        f"{sum(result['seconds'].values()) / 60:.0f} minutes. Again: `python -m experiments.theory --json FILE`. "
        "`within x of it` is a share of what is predicted, `+- x` a distance."
    )


def main(json_file: str, only: tuple[str, ...]) -> int:
    """Measure, print, write; 1 where a row does not hold."""
    unknown = sorted({*only} - {*CLAIMS})
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}: there are {', '.join(CLAIMS)}")
    path, console, rows, seconds, pictures = Path(json_file), Console(stderr=True), [], {}, {}
    if path.suffix != ".json" or path.is_dir():
        raise SystemExit(f"--json {json_file}: name a file that ends in .json; a page and pictures come beside it")
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in track(only or CLAIMS, description="claims", console=console):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found: list[Row] = importlib.import_module(f"experiments.theory.{name}").measure(Path(folder))
            drawn = sorted(Path(folder).iterdir())
            for picture in drawn:
                shutil.copyfile(picture, path.parent / picture.name)
        pictures[name] = [picture.name for picture in drawn]
        seconds[name] = time.perf_counter() - began
        rows += [asdict(row) | {"file": name} for row in found]
        console.print(f"{name}: {sum(row.holds for row in found)} of {len(found)} hold, {seconds[name]:.0f} s")
    device = jax.devices()[0]
    result = {
        "experiment": "theory",
        "device": {"platform": device.platform, "kind": device.device_kind, "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "seconds": seconds,
        "pictures": pictures,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(result), encoding="utf-8")
    print(f"{markdown(rows)}\n\n{path}")
    return int(not all(row["holds"] for row in rows))


def command(json: str = "runs/theory/theory.json", only: tuple[str, ...] = ()) -> int:
    """Measure every claim and print the table.

    Args:
        json: Where the result goes; beside it, pictures and a page with the table and the pictures.
        only: Names of claims; none: all of them.
    """
    return main(json, only)


if __name__ == "__main__":
    sys.exit(tyro.cli(command, description=__doc__))
