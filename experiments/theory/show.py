"""Rows and pictures of claims in a notebook."""

import tempfile
from dataclasses import asdict
from pathlib import Path

from IPython.display import Image, Markdown

from experiments.theory import Row
from experiments.theory.__main__ import markdown

FIGURES = Path(tempfile.mkdtemp(prefix="theory-"))
"""Where claims draw; it lasts as long as the notebook is of use."""


def table(rows: list[Row]) -> Markdown:
    """The rows as `python -m experiments.theory` prints them."""
    return Markdown(markdown([asdict(row) for row in rows]))


def picture(name: str) -> Image:
    """A picture that was drawn into `FIGURES`."""
    return Image(data=(FIGURES / name).read_bytes())
