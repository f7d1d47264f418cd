"""Claims of the architecture, each as an experiment: prediction, measurement, picture, verdict.

Every file of this folder is one claim of the literature. Its `measure(figures)` measures it with the library's own
functions, draws into the folder `figures`, and gives rows for the table of `python -m experiments.theory`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    claim: str
    """One sentence, with the formula."""
    predicted: float
    measured: float
    limit: str
    """How near the two must be, in words and numbers."""
    holds: bool
    note: str = ""
    """The setting; where the textbook's claim is false, why."""


def near(claim: str, predicted: float, measured: float, *, share: float, note: str = "") -> Row:
    """A row that holds where measured differs from predicted by at most a share of it."""
    holds = abs(measured - predicted) <= share * abs(predicted)
    return Row(claim, float(predicted), float(measured), f"within {share:.2g} of it", bool(holds), note)


def within(claim: str, predicted: float, measured: float, *, distance: float, note: str = "") -> Row:
    """A row that holds where measured and predicted are at most so far apart."""
    holds = abs(measured - predicted) <= distance
    return Row(claim, float(predicted), float(measured), f"+- {distance:.2g}", bool(holds), note)


def at_most(claim: str, predicted: float, measured: float, *, note: str = "") -> Row:
    """A row that holds where measured is no more than predicted."""
    return Row(claim, float(predicted), float(measured), "at most", bool(measured <= predicted), note)


def at_least(claim: str, predicted: float, measured: float, *, note: str = "") -> Row:
    """A row that holds where measured is no less than predicted."""
    return Row(claim, float(predicted), float(measured), "at least", bool(measured >= predicted), note)
