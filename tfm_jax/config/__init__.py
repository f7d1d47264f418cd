"""The configuration of a run: frozen dataclasses, checked when built, strict JSON in and out.

A family's own configuration (`TransformerConfig`, ...) lives in the file of its model; `Run` is generic in it. Every
docstring under a field is its help on the command line.
"""

from tfm_jax.config.checks import require, require_rates
from tfm_jax.config.data import Corruption, Data
from tfm_jax.config.json import differences, from_dict, to_dict, to_json
from tfm_jax.config.run import Decode, Mesh, Optimizer, Precision, Run, Train

__all__ = [
    "Corruption",
    "Data",
    "Decode",
    "Mesh",
    "Optimizer",
    "Precision",
    "Run",
    "Train",
    "differences",
    "from_dict",
    "require",
    "require_rates",
    "to_dict",
    "to_json",
]
