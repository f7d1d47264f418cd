"""What equals what: every implementation of attention against the float64 NumPy oracle, output and gradients.

`table` computes rows, `compact` prints them, `python -m tfm_jax equivalence` does both. An implementation takes part as
soon as it is in `tfm_jax.ops.attention.IMPLEMENTATIONS`; masks and biases are rows of tables in `equivalence_cases`.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from tfm_jax import oracle
from tfm_jax.equivalence_cases import BIASES, LONG, MASKS, Case, Facts, cases
from tfm_jax.ops.attention import IMPLEMENTATIONS, dot_product_attention, explain_implementation
from tfm_jax.ops.blockwise import Blockwise
from tfm_jax.ops.dropout import keep_mask
from tfm_jax.train.report import LineCounter, write_whole

LIMITS = {"float32": 5e-6, "bfloat16": 2e-2}
"""The largest error that counts as equal."""
NOT_FINITE = 1e30
"""The error of what has an infinity or NaN in it, or not the shape of the oracle's; JSON has no word for these."""
QUANTITIES = ("output", "dquery", "dkey", "dvalue", "dbias")
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
"""The platform that an implementation needs; one that is not here runs on any."""
# Tiles that leave no case within one block; the long cases run the implementation as users have it.
_SMALL_TILES = {"blockwise": Blockwise(block=16)}


class Row(TypedDict):
    """One quantity of one implementation in one case; the keys up to `nan` are those of `Case`."""

    implementation: str
    mask: str
    bias: str
    dropout: float
    dtype: str
    heads: str
    lengths: str
    d_v: str
    dead_row: bool
    nan: bool
    quantity: str
    error: float | None
    """max |x - oracle| / max |oracle|, of several arrays the worst; None where nothing was computed."""
    limit: float
    status: str
    """"equal" or "mismatch", by error and limit; "refused: reason"; "unavailable here": on another platform only."""


def table(*, implementations: Sequence[str] | None = None, full: bool = True, dtype: str = "float32") -> list[Row]:
    """The rows of all cases, with a bar on stderr where that is a terminal.

    implementations: names in `IMPLEMENTATIONS`; None: all of them. full: with the product of all masks and biases, in
    `dtype`; else only cases in which every two values meet. What an implementation raises comes through.
    """
    rows, todo = [], cases(full=full, dtype=dtype, fused=jax.default_backend() in PLATFORMS.values())
    with LineCounter("comparing", len(todo)) as counter:
        for i, case in enumerate(todo, 1):
            rows += measure(case, implementations=implementations)
            counter.update(i)
    return rows


def measure(case: Case, *, implementations: Sequence[str] | None = None) -> list[Row]:
    """The rows of one case. Products are in full float32, which GPUs and TPUs have on demand only."""
    facts, names = Facts(case), list(IMPLEMENTATIONS if implementations is None else implementations)
    dropout_key = jax.random.key(0) if case.dropout else None
    arrays, truth = _truth(facts, dropout_key)
    library = MASKS[case.mask].library(facts), BIASES[case.bias].library(facts)
    arrays, (mask, bias) = jax.tree.map(jnp.asarray, (arrays, library))
    dropout = {"dropout_rate": case.dropout, "dropout_key": dropout_key}
    refused = explain_implementation(*arrays[:3], mask=mask, bias=bias, **dropout).refused
    ends = {name: _not_run(name, refused) for name in names}
    tiles = {} if case.lengths == LONG else _SMALL_TILES
    run = tuple((name, tiles.get(name, name)) for name in names if ends[name] is None)
    with jax.default_matmul_precision("highest"):
        found = _found(arrays, mask, bias, dropout_key, dropout_rate=case.dropout, run=run)
    rows, limit = [], LIMITS[case.dtype]
    for name, quantity in itertools.product(names, truth):
        error, status = None, ends[name]
        if status is None:
            error = _error(found[name][quantity], truth[quantity])
            status, error = "equal" if error <= limit else "mismatch", float(f"{error:.3g}")
        rows.append(
            Row(implementation=name, **asdict(case), quantity=quantity, error=error, limit=limit, status=status)
        )
    return rows


def _not_run(name, refused):
    """Why an implementation cannot run here; None when it can."""
    if name in refused:
        return f"refused: {refused[name]}"
    here = jax.default_backend()
    return None if PLATFORMS.get(name, here) == here else "unavailable here"


def _truth(f, dropout_key):
    """Query, key, value and the gradient by the output; and what the oracle says of each quantity."""
    case, mask = f.case, MASKS[f.case.mask]
    query, key = f.draw("query", f.B, f.T, f.N, f.H), f.draw("key", f.B, f.S, f.K, f.H)
    value, gradient = f.draw("value", f.B, f.S, f.K, f.E), f.draw("gradient", f.B, f.T, f.N, f.E)
    options = {"mask": mask.twin(f), "bias": BIASES[case.bias].twin(f, *mask.positions(f))}
    if case.nan:
        seen_BNTS = oracle.attention_weights(query, key, **options) > 0.0
        seen_BKS = seen_BNTS.reshape(f.B, f.K, -1, f.S).any(axis=2)
        hidden_BSK = ~seen_BKS.swapaxes(1, 2)
        key[hidden_BSK] = value[hidden_BSK] = np.nan
        query[~seen_BNTS.any(axis=3).swapaxes(1, 2)] = np.nan
    if case.dropout:
        keep = np.asarray(keep_mask(dropout_key, (f.B, f.N, f.T, f.S), case.dropout))
        options |= {"dropout_rate": case.dropout, "keep": keep}
    output = oracle.dot_product_attention(query, key, value, **options)
    by_query, by_key, by_value, by_bias = oracle.attention_gradients(query, key, value, gradient, **options)
    truth = zip(QUANTITIES, (output, by_query, by_key, by_value, *by_bias), strict=False)
    return (query, key, value, gradient), dict(truth)


@functools.partial(jax.jit, static_argnames=("dropout_rate", "run"))
def _found(arrays, mask, bias, dropout_key, *, dropout_rate, run):
    """Each quantity of each implementation: one compilation a case, which is what takes the time."""
    *arrays, gradient = arrays
    options = {"mask": mask, "dropout_rate": dropout_rate, "dropout_key": dropout_key}
    found = {}
    for name, implementation in run:
        attend = functools.partial(dot_product_attention, **options, implementation=implementation)
        output, pullback = jax.vjp(lambda *x, attend=attend: attend(*x[:3], bias=x[3]), *arrays, bias)
        found[name] = dict(zip(QUANTITIES, (output, *pullback(gradient)), strict=True))
    return found


def _error(found, truth):
    """As `Row.error`: the oracle gives a dict of the fields of a bias, a tuple for a field of several arrays."""
    if isinstance(truth, dict):
        return max(_error(getattr(found, name), x) for name, x in truth.items())
    if isinstance(truth, tuple):
        return max(_error(*two) for two in zip(found, truth, strict=True))
    found = np.asarray(found, np.float64)
    if found.shape != truth.shape or not np.isfinite(found).all():
        return NOT_FINITE
    return float(np.abs(found - truth).max() / (np.abs(truth).max() or 1.0))


def mismatches(rows: Sequence[Row]) -> list[Row]:
    """The rows that are not what the oracle says."""
    return [row for row in rows if row["status"] == "mismatch"]


def save(rows: Sequence[Row], path: str) -> None:
    """Write the rows as a JSON list, one a line."""
    write_whole(Path(path), "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def compact(rows: Sequence[Row]) -> str:
    """The rows as Markdown: worst errors of a full product, how the other cases ended, what is refused and why."""
    numbers = {}
    for row in rows:
        if row["status"].startswith("refused"):
            numbers.setdefault((row["implementation"], row["status"]), len(numbers) + 1)
    usual = {name: x for name, x in asdict(Case()).items() if name not in ("mask", "bias", "dtype")}
    plain = [row for row in rows if all(row[name] == x for name, x in usual.items())]
    count = len(_groups(rows, "mask")) * len(_groups(rows, "bias"))
    products = {x: same for x, same in _groups(plain, "dtype").items() if len(_groups(same, "mask", "bias")) == count}
    shown = {id(row) for same in products.values() for row in same}
    rest = [row for row in rows if id(row) not in shown]
    parts = [_product(dtype, same, numbers) for dtype, same in products.items()]
    parts += [_others(rest)] if rest else []
    parts += ["\n".join(f"{i}. `{name}` {status}" for (name, status), i in numbers.items())] if numbers else []
    parts += ["Mismatches:\n\n" + "\n".join(map(_line, mismatches(rows)))] if mismatches(rows) else []
    return "\n\n".join(parts)


def _product(dtype, rows, numbers):
    """Implementation and mask down, bias across; masks with the same cells share a line."""
    lines = []
    for name, own in _groups(rows, "implementation").items():
        alike = {}
        for mask, line in _groups(own, "mask").items():
            alike.setdefault(tuple(_cell(x, numbers) for x in _groups(line, "bias").values()), []).append(mask)
        for cells, masks in alike.items():
            lines.append([f"`{name}`", "every" if len(alike) == 1 else ", ".join(masks), *cells])
    title = (
        f"Worst relative error of output and gradients in {dtype}, by mask and bias (equal: at most {LIMITS[dtype]:g}):"
    )
    return _markdown(title, ["implementation", "mask", *_groups(rows, "bias")], lines)


def _cell(rows, numbers):
    status = rows[0]["status"]
    if rows[0]["error"] is None:
        return f"refused ({numbers[rows[0]['implementation'], status]})" if status.startswith("refused") else status
    return f"**{_worst(rows)} mismatch**" if mismatches(rows) else _worst(rows)


def _others(rows):
    """Of each implementation and dtype, how many cases ended how, and the worst error of each quantity."""
    names, ends = [field.name for field in fields(Case)], ("equal", "mismatch", "refused", "unavailable here")
    lines = []
    for (name, dtype), own in _groups(rows, "implementation", "dtype").items():
        ended = [x[0] if not mismatches(x) else mismatches(x)[0] for x in _groups(own, *names).values()]
        counts = Counter(row["status"].partition(":")[0] for row in ended)
        errors = [_worst([row for row in own if row["quantity"] == quantity]) for quantity in QUANTITIES]
        lines.append([f"`{name}`", dtype, *(str(counts[end]) for end in ends), *errors])
    title = f"{len(_groups(rows, *names))} more cases, in which every two values of {', '.join(names)} meet:"
    return _markdown(title, ["implementation", "dtype", *ends, *QUANTITIES], lines)


def _line(row):
    case = ", ".join(f"{field.name} {row[field.name]}" for field in fields(Case))
    return f"- `{row['implementation']}` {row['quantity']} {row['error']:.0e}: {case}"


def _worst(rows):
    errors = [row["error"] for row in rows if row["error"] is not None]
    return f"{max(errors):.0e}" if errors else ""


def _groups(rows, *names):
    """The rows by their values of these names (a tuple where they are several), in the order of their first."""
    groups = {}
    for row in rows:
        values = tuple(row[name] for name in names)
        groups.setdefault(values if len(names) > 1 else values[0], []).append(row)
    return groups


def _markdown(title, header, lines):
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))])
