"""The table of what equals what: it finds what is wrong, says what is refused, and the README shows the kept one."""

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tfm_jax import equivalence
from tfm_jax.equivalence import Row, compact, measure, mismatches
from tfm_jax.equivalence_cases import BIASES, FACTORS, FUSED_FACTORS, LENGTHS, MASKS, Case, Facts, cases, covering_array
from tfm_jax.equivalence_cases import possible as possible_together
from tfm_jax.ops import attention
from tfm_jax.ops.attention import IMPLEMENTATIONS, Reference

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "results" / "equivalence.json"
REST = ("heads", "lengths", "d_v", "dead_row", "nan")


class Broken(Reference):
    """An implementation that is wrong in a way of its own."""

    def __init__(self, change=lambda request: request, after=lambda output: output):
        self.change, self.after = change, after

    def run(self, request):
        return self.after(super().run(self.change(request)))


class Fussy(Reference):
    def refusal(self, request):
        return "no windows" if request.mask is not None and request.mask.window else None


BROKEN = {
    "ignores the mask": Broken(lambda request: replace(request, mask=None)),
    "ignores the bias": Broken(lambda request: replace(request, biases=())),
    "wrong scale": Broken(lambda request: replace(request, scale=0.26)),
    "other dropout": Broken(lambda request: replace(request, dropout_key=jax.random.key(7))),
    "writes NaN": Broken(after=lambda output: output.at[0, 0].set(np.nan)),
    "no gradient": Broken(after=jax.lax.stop_gradient),
}


@pytest.fixture
def implementations(monkeypatch):
    """IMPLEMENTATIONS, with more in it."""

    def add(**more):
        for name, implementation in more.items():
            monkeypatch.setitem(attention.IMPLEMENTATIONS, name, implementation)

    return add


def kept():
    return json.loads(KEPT.read_text(encoding="utf-8"))


def case_of(row):
    return Case(**{name: row[name] for name in asdict(Case())})


@pytest.mark.parametrize(
    "case",
    [
        Case("causal+padding", "t5", lengths="T<S"),
        Case("segments", "shaw", 0.1, "bfloat16", "MQA", "T>S", "!= d_k", True, True),
        Case("none", "dense", 0.0, "float32", "GQA", "T<S", "!= d_k", True, True),
    ],
)
def test_what_runs_here_is_equal(case):
    """B01, B03, B05: dead rows, fewer queries than keys, half precision and NaN, against the oracle."""
    rows = measure(case, implementations=("reference", "blockwise"))
    assert [(row["implementation"], row["quantity"]) for row in rows] == [
        *itertools.product(("reference", "blockwise"), ("output", "dquery", "dkey", "dvalue", "dbias"))
    ]
    assert mismatches(rows) == []
    for row in rows:
        assert row["status"] == "equal" and 0 < row["error"] <= row["limit"] == equivalence.LIMITS[case.dtype]
        assert case_of(row) == case and set(row) == set(Row.__annotations__)


def test_what_is_wrong_is_a_mismatch(implementations):
    implementations(**BROKEN)
    case = Case("window", "alibi", 0.1)
    rows = measure(case, implementations=("reference", *BROKEN))
    wrong = mismatches(rows)
    assert {row["implementation"] for row in wrong} == set(BROKEN)
    for name in ("ignores the mask", "ignores the bias", "wrong scale", "other dropout"):
        assert {row["quantity"] for row in wrong if row["implementation"] == name} == set(equivalence.QUANTITIES)
    errors = {(row["implementation"], row["quantity"]): row["error"] for row in rows}
    assert errors["writes NaN", "output"] == equivalence.NOT_FINITE
    assert errors["no gradient", "output"] < 5e-6 and errors["no gradient", "dvalue"] == 1.0
    text = compact(rows)
    assert "| `writes NaN` | float32 | 0 | 1 | 0 | 0 | 1e+30 |" in text
    assert "\n- `writes NaN` output 1e+30: mask window, bias alibi, dropout 0.1, dtype float32, heads MHA" in text
    assert text.count("\n- ") == len(wrong)
    json.dumps(rows, allow_nan=False)


def test_no_dbias_where_there_is_no_bias_and_one_for_several_arrays(implementations):
    """The worst of the tables counts: a wrong gradient of one of two is seen."""
    assert "dbias" not in {row["quantity"] for row in measure(Case("causal"), implementations=("reference",))}
    no_values = lambda bias: replace(bias, value_table=jax.lax.stop_gradient(bias.value_table))  # noqa: E731
    implementations(half=Broken(lambda request: replace(request, biases=tuple(map(no_values, request.biases)))))
    wrong = mismatches(measure(Case(bias="shaw"), implementations=("half",)))
    assert [(row["quantity"], row["error"]) for row in wrong] == [("dbias", 1.0)]


def test_refused_and_unavailable(implementations, monkeypatch):
    implementations(fussy=Fussy(), distant=Reference())
    monkeypatch.setitem(equivalence.PLATFORMS, "fussy", "tpu")
    monkeypatch.setitem(equivalence.PLATFORMS, "distant", "tpu")
    rows = measure(Case("window"), implementations=("fussy", "distant"))
    assert {(row["implementation"], row["status"], row["error"], row["limit"]) for row in rows} == {
        ("fussy", "refused: no windows", None, 5e-6),
        ("distant", "unavailable here", None, 5e-6),
    }
    assert len(rows) == 8 and mismatches(rows) == []
    text = compact(rows)
    assert "| `fussy` | every | refused (1) |\n| `distant` | every | unavailable here |" in text
    assert text.count("1. `fussy` refused: no windows") == 1


def test_an_error_is_relative_to_the_largest_entry_of_each_array():
    truth = np.array([4.0, -8.0])
    assert equivalence._error(np.array([4.0, -7.0]), truth) == 1 / 8
    assert equivalence._error((truth, np.array([1.0])), (truth, np.array([2.0]))) == 0.5
    assert equivalence._error(np.array([0.25, 0.0]), np.zeros(2)) == 0.25
    assert equivalence._error(np.array([4.0]), truth) == equivalence.NOT_FINITE
    assert equivalence._error(np.array([4.0, np.inf]), truth) == equivalence.NOT_FINITE


@pytest.mark.parametrize("factors", [FACTORS, FUSED_FACTORS])
def test_every_two_values_meet(factors):
    rows = covering_array(factors, possible_together)
    assert rows == covering_array(factors, possible_together)
    assert all(list(row) != [] and set(row) == set(factors) and possible_together(row) for row in rows)
    for one, two in itertools.combinations(factors, 2):
        wanted = set(itertools.product(factors[one], factors[two]))
        assert {(row[one], row[two]) for row in rows} == wanted
    largest, second = sorted(map(len, factors.values()))[:-3:-1]
    assert len(rows) <= 1.1 * largest * second


def test_what_cannot_be_met_is_left_out():
    rows = covering_array({"x": (0, 1), "y": (0, 1), "z": (0, 1)}, lambda row: not (row.get("x") and row.get("y")))
    assert all(not (row["x"] and row["y"]) for row in rows)
    assert {(row["y"], row["z"]) for row in rows} == set(itertools.product((0, 1), (0, 1)))


def test_cases_are_the_product_long_ones_and_the_pairs():
    every = cases()
    assert len(every) == len(set(every))
    assert every[:48] == [Case(mask, bias) for mask in MASKS for bias in BIASES]
    assert all(min(LENGTHS[case.lengths]) > 512 for case in every[48:51])
    assert [case for case in cases(full=False) if case not in every] == []
    assert {case.dtype for case in cases(dtype="bfloat16")[:51]} == {"bfloat16"}
    fused = [case for case in cases(fused=True) if case not in every]
    assert {case.mask for case in fused} == set(MASKS) and {case.dropout for case in fused} == {0.0}


@pytest.mark.parametrize(
    "case", cases(full=False, fused=True), ids=lambda case: "-".join(map(str, asdict(case).values()))
)
def test_the_facts_are_what_the_case_says(case):
    """A row sees nothing, and what no row sees is NaN, where the case says so and nowhere else."""
    f = Facts(case)
    (query, key, value, _), truth = equivalence._truth(f, jax.random.key(0) if case.dropout else None)
    mask = MASKS[case.mask]
    visible = np.ones((f.B, f.N, f.T, f.S), bool)
    seen = visible & (True if mask.twin(f) is None else mask.twin(f)) & (case.bias != "dense" or f.dense > -np.inf)
    assert (~seen.any(axis=3)).any() == case.dead_row
    hidden = ~seen.reshape(f.B, f.K, -1, f.S).any(axis=2).swapaxes(1, 2)
    for x in (key, value):
        assert (np.isnan(x.astype(np.float32)).all(axis=3) == (hidden & case.nan)).all()
    assert hidden.any() or not case.nan
    dead = ~seen.any(axis=3).swapaxes(1, 2)
    assert (np.isnan(query.astype(np.float32)).all(axis=3) == (dead & case.nan)).all()
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in jax.tree.leaves(truth))


def test_the_kept_table_is_of_todays_masks_biases_and_implementations():
    """Stale: run `python -m tfm_jax equivalence --json experiments/results/equivalence.json`."""
    rows = kept()
    for name, today in {"implementation": IMPLEMENTATIONS, "mask": MASKS, "bias": BIASES}.items():
        assert list(dict.fromkeys(row[name] for row in rows)) == list(today)
    assert list(dict.fromkeys(map(case_of, rows))) == cases()
    assert all(set(row) == set(Row.__annotations__) for row in rows)
    for row in rows:
        assert row["limit"] == equivalence.LIMITS[row["dtype"]]
        if row["status"] == "equal":
            assert 0 <= row["error"] <= row["limit"]
        else:
            assert row["status"] == "unavailable here" or row["status"].startswith("refused: "), row
            assert row["error"] is None and row["implementation"] in ("cudnn", "splash")


def test_the_readme_shows_the_kept_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- equivalence -->\n(.*?)\n<!-- /equivalence -->", readme, re.DOTALL)
    assert shown.strip() == compact(kept())


def test_compact_of_a_product_has_a_cell_for_each_mask_and_bias():
    text = compact(kept())
    assert "| implementation | mask | none | alibi | t5 | shaw | dense | user |" in text
    cells = re.findall(r"^\| `(\w+)` \| ([\w+, ]+) \|(.*)\|$", text.partition(" more cases")[0], re.MULTILINE)
    for name in ("reference", "blockwise"):
        own = [(mask, re.findall(r"\de-\d\d", rest)) for implementation, mask, rest in cells if implementation == name]
        assert [mask for mask, _ in own] == list(MASKS) and {len(numbers) for _, numbers in own} == {len(BIASES)}
    for name in ("cudnn", "splash"):
        masks = [mask for implementation, mask, _ in cells if implementation == name]
        assert masks == ["every"] or ", ".join(masks).count(",") == len(MASKS) - 1
