"""One look for all pictures: size, fonts, labelled axes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STYLE = {
    "figure.dpi": 120,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "image.cmap": "viridis",
}


@contextmanager
def drawn(path: Path, columns: int = 1, *, width: float = 4.2, height: float = 3.2) -> Iterator[list[Any]]:
    """The axes of a picture of so many panels side by side, written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, height), layout="constrained")
        yield [axes] if columns == 1 else list(axes)
        figure.savefig(path)
        pyplot.close(figure)
