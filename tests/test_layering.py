"""The house: which file may import what, how long a file may be, and names that say nothing."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfm_jax"
MAX_LINES = 350
NAMELESS = {"base", "common", "helper", "helpers", "misc", "registry", "type", "types", "util", "utils"}

# Every floor, and the modules of ours it may import besides itself. The longest path that fits a file is its floor.
LOW = {"ops", "config", "sharding"}
BELOW_TRAIN = LOW | {"models", "data", "decode", "hf"}
ALL = BELOW_TRAIN | {"nn", "train"}
ORACLES = {"oracle", "oracle_biases", "oracle_blocks"}
OURS = {
    "ops": set(),
    "config": set(),
    "sharding": {"config"},
    "nn": LOW,
    "models": LOW | {"nn"},
    "data": {"config"},
    "decode": LOW | {"models"},
    "decode.text": LOW | {"models", "data"},
    "decode.score": LOW | {"models", "data"},
    "decode.predict": LOW | {"models", "data"},
    "hf": {"config", "sharding", "models", "data.tokenizer"},
    "train": BELOW_TRAIN,
    "oracle": ALL | ORACLES,
    "oracle_biases": ALL | ORACLES,
    "oracle_blocks": ALL | ORACLES,
    "equivalence": ALL | ORACLES | {"equivalence_cases"},
    "equivalence_cases": ALL | ORACLES,
    "audit": ALL | ORACLES,
    "plan": ALL,
    "__main__": ALL | ORACLES | {"equivalence", "audit", "plan", "__init__"},
    "__init__": ALL | ORACLES | {"equivalence", "audit", "plan"},
}

# The only libraries a floor may import besides the standard library; a floor that is not listed may import any.
ONLY = {"ops": {"jax", "jaxtyping"}, "config": set(), "sharding": {"jax", "jaxtyping"}} | {
    x: {"numpy"} for x in ORACLES
}
NEVER_IN = {"data": {"jax", "jaxlib", "flax", "optax"}}
NEVER = {"beartype", "ctranslate2", "tensorflow", "torch", "transformers"}
ONLY_BY = {"orbax": "train.checkpoint", "matplotlib": "train.report"}
ONLY_IN_FUNCTIONS = {"matplotlib"}


def within(name, prefixes):
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def module_of(path):
    """tfm_jax/ops/masks.py gives "ops.masks", tfm_jax/ops/__init__.py "ops", tfm_jax/__init__.py "__init__"."""
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path, source):
    """Pairs (dotted name, inside a function?) of all that a file imports; each name of `from a import b` gives a.b."""
    tree = ast.parse(source)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    nested = {node for function in ast.walk(tree) if isinstance(function, functions) for node in ast.walk(function)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                package = ".".join(Path(path).parts[:-level]) if level else ""
                prefix = ".".join(filter(None, [package, module]))
                targets = [f"{prefix}.{alias.name}" for alias in names]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"), args=[name, *_]
            ):
                # A computed name cannot be judged; only the __init__ files, which load on first use, may have one.
                targets = [name.value if isinstance(name, ast.Constant) else "(computed)"]
            case _:
                continue
        yield from ((target, node in nested) for target in targets)


def refusal(path, target, in_function):
    """Why the file may not import the target, or None."""
    module = module_of(path)
    floor = max((name for name in OURS if within(module, [name])), key=len, default=None)
    library, _, name = target.partition(".")
    if floor is None:
        return f"{module} is on no floor of the table"
    if target == "(computed)":
        return None if Path(path).name == "__init__.py" else "a computed import hides what it imports"
    if library == "tfm_jax":
        itself = module.partition(".")[0]
        allowed = OURS[floor] | {itself}
        return None if within(name or "__init__", allowed) else f"{floor} may import {sorted(allowed)} of ours"
    if library in sys.stdlib_module_names:
        return None
    if floor in ONLY and library not in ONLY[floor]:
        return f"of other libraries {floor} may import {sorted(ONLY[floor])}"
    if library in NEVER or library in NEVER_IN.get(floor, ()):
        return f"{floor} does not import {library}"
    if module != ONLY_BY.get(library, module):
        return f"only {ONLY_BY[library]} imports {library}"
    if library in ONLY_IN_FUNCTIONS and not in_function:
        return f"{library} is imported where it is used, inside a function"
    return None


def violations(path, source):
    """One line for each import that the table does not allow. `path` starts at the package: tfm_jax/ops/masks.py."""
    found = ((target, refusal(path, target, in_function)) for target, in_function in imports(path, source))
    return [f"{path} imports {target}: {reason}" for target, reason in found if reason]


def library():
    """Path from the repository's root -> source, of every file of the package."""
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_import_is_allowed():
    found = [line for path, source in library().items() for line in violations(path, source)]
    assert not found, "\n".join(found)


def test_no_file_is_too_long():
    lines = {path: len(source.splitlines()) for path, source in library().items()}
    assert lines["tfm_jax/config/run.py"] > 0
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def test_every_name_says_what_is_inside():
    assert not [p for p in library() if NAMELESS & {part.strip("_") for part in Path(p).with_suffix("").parts}]


@pytest.mark.parametrize(
    "path, source",
    [
        ("tfm_jax/ops/masks.py", "from tfm_jax.config import Mesh"),
        ("tfm_jax/ops/masks.py", "def f():\n    import tfm_jax.config"),
        ("tfm_jax/ops/masks.py", "from ..config import Mesh"),
        ("tfm_jax/ops/masks.py", "from .. import config"),
        ("tfm_jax/ops/masks.py", "from tfm_jax import config"),
        ("tfm_jax/ops/masks.py", "import tfm_jax"),
        ("tfm_jax/ops/masks.py", "from tfm_jax import load"),
        ("tfm_jax/ops/masks.py", "import importlib\nx = importlib.import_module('tfm_jax.config')"),
        ("tfm_jax/ops/masks.py", "x = __import__('numpy')"),
        ("tfm_jax/ops/masks.py", "from importlib import import_module\nimport_module('tfm_' + 'jax.config')"),
        ("tfm_jax/ops/masks.py", "import numpy as np"),
        ("tfm_jax/ops/masks.py", "from flax import nnx"),
        ("tfm_jax/ops/__init__.py", "from ..nn import layers"),
        ("tfm_jax/config/run.py", "import jax"),
        ("tfm_jax/config/run.py", "from ..sharding import mesh"),
        ("tfm_jax/sharding.py", "from tfm_jax.models import Model"),
        ("tfm_jax/sharding.py", "import flax"),
        ("tfm_jax/nn/layers.py", "from tfm_jax.models.model import Model"),
        ("tfm_jax/models/bert.py", "from tfm_jax.data import tokenizer"),
        ("tfm_jax/data/batches.py", "import jax.numpy as jnp"),
        ("tfm_jax/data/batches.py", "from tfm_jax.ops import masks"),
        ("tfm_jax/decode/beam.py", "from tfm_jax.data.tokenizer import Tokenizer"),
        ("tfm_jax/decode/beam.py", "from tfm_jax.nn import layers"),
        ("tfm_jax/hf/names.py", "from tfm_jax.data.batches import batches"),
        ("tfm_jax/hf/names.py", "from tfm_jax.data import *"),
        ("tfm_jax/hf/names.py", "import torch"),
        ("tfm_jax/train/loop.py", "import orbax.checkpoint as ocp"),
        ("tfm_jax/train/loop.py", "from orbax.checkpoint import v1"),
        ("tfm_jax/train/loop.py", "from tfm_jax.equivalence import table"),
        ("tfm_jax/train/loop.py", "def plot():\n    import matplotlib"),
        ("tfm_jax/train/report.py", "import matplotlib.pyplot as plt"),
        ("tfm_jax/oracle.py", "from tfm_jax.plan import memory"),
        ("tfm_jax/oracle_biases.py", "import jax"),
        ("tfm_jax/plan.py", "import tfm_jax.__main__"),
        ("tfm_jax/extra.py", "import jax"),
    ],
)
def test_a_violation_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("tfm_jax/ops/masks.py", "import functools\nimport jax\nimport jaxtyping\nfrom .biases import alibi"),
        ("tfm_jax/ops/masks.py", "from tfm_jax.ops import biases"),
        ("tfm_jax/sharding.py", "import jax\nfrom tfm_jax.config import Mesh"),
        ("tfm_jax/models/bert.py", "import flax\nfrom tfm_jax.nn.layers import FeedForward\nfrom ..ops import masks"),
        ("tfm_jax/models/__init__.py", "import importlib\nimportlib.import_module(f'tfm_jax.models.{name}')"),
        ("tfm_jax/data/batches.py", "import numpy as np\nimport grain\nfrom tfm_jax.config import Data"),
        ("tfm_jax/decode/text.py", "from tfm_jax.data.tokenizer import Tokenizer\nfrom . import beam"),
        ("tfm_jax/hf/names.py", "from tfm_jax.data.tokenizer import Tokenizer\nfrom tfm_jax.data import tokenizer"),
        ("tfm_jax/train/checkpoint.py", "from orbax.checkpoint import v1 as ocp"),
        ("tfm_jax/train/report.py", "def plot():\n    import matplotlib.pyplot as plt"),
        ("tfm_jax/train/loop.py", "from tfm_jax import decode\nfrom tfm_jax.data import batches"),
        ("tfm_jax/oracle_blocks.py", "import numpy as np\nfrom tfm_jax.oracle import attention_weights"),
        ("tfm_jax/equivalence.py", "from tfm_jax.oracle import attention\nfrom tfm_jax.nn import layers"),
        ("tfm_jax/__main__.py", "import tfm_jax\nfrom tfm_jax.plan import memory"),
        ("tfm_jax/__init__.py", "def __getattr__(name):\n    from tfm_jax import models"),
    ],
)
def test_what_the_table_allows_is_not_refused(path, source):
    assert violations(path, source) == []
