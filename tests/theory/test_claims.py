"""Claims that take a moment hold here and now; what the table of all of them shows is what was kept."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.theory import Row, __main__, at_least, at_most, near, within
from experiments.theory.__main__ import CLAIMS

KEPT = Path(__file__).parents[2] / "experiments" / "results" / "theory"
QUICK = ("parameters", "sinusoids", "masks", "search", "families")


@pytest.mark.parametrize("name", QUICK)
def test_it_holds(name, tmp_path):
    rows = importlib.import_module(f"experiments.theory.{name}").measure(tmp_path)
    assert rows and all(row.holds for row in rows), [row for row in rows if not row.holds]
    pictures = [*tmp_path.iterdir()]
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_row_holds_within_its_limit_alone():
    assert near("", 2.0, 2.19, share=0.1).holds and not near("", 2.0, 2.21, share=0.1).holds
    assert near("", -2.0, -1.81, share=0.1).holds and not near("", -2.0, -1.79, share=0.1).holds
    assert within("", 0.0, -0.09, distance=0.1).holds and not within("", 0.0, 0.11, distance=0.1).holds
    assert at_most("", 1.0, 1.0).holds and not at_most("", 1.0, 1.01).holds
    assert at_least("", 1.0, 1.0).holds and not at_least("", 1.0, 0.99).holds
    for row in (near, within):
        limit = {"share": 0.1} if row is near else {"distance": 0.1}
        assert not row("", 1.0, float("nan"), **limit).holds
    assert not at_most("", 1.0, float("nan")).holds and not at_least("", 1.0, float("nan")).holds


def test_the_command_writes_what_it_prints_and_fails_where_a_row_does_not_hold(tmp_path, monkeypatch, capsys):
    good, bad = within("one | two", 1.0, 1.0, distance=0.0, note="why"), Row("three", 2.0, 3.0, "at most", False)
    for name, rows in (("masks", [good]), ("families", [good, bad])):
        module = importlib.import_module(f"experiments.theory.{name}")
        draw = lambda figures, name=name: (figures / f"{name}.png").write_bytes(b"")  # noqa: E731
        monkeypatch.setattr(module, "measure", lambda figures, rows=rows, draw=draw: [draw(figures), rows][1])
    path = tmp_path / "new" / "theory.json"
    assert __main__.command(str(path), ("masks",)) == 0
    assert __main__.command(str(path), ("masks", "families")) == 1
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["rows"] == [
        asdict(good) | {"file": "masks"},
        asdict(good) | {"file": "families"},
        asdict(bad) | {"file": "families"},
    ]
    assert kept["pictures"] == {"masks": ["masks.png"], "families": ["families.png"]}
    assert (path.parent / "masks.png").exists() and (path.parent / "families.png").exists()
    printed, page = capsys.readouterr().out, path.with_suffix(".md").read_text(encoding="utf-8")
    assert "| one \\| two (why) | 1 | 1 | +- 0 | yes |" in printed and "| three | 2 | 3 | at most | no |" in printed
    assert page == __main__.page(kept) and page.startswith("# The architecture, verified\n\n2 of 3 rows hold;")


def test_an_unknown_claim_is_refused_by_name():
    with pytest.raises(SystemExit, match="--only names nonsense: there are dot_products, "):
        __main__.command(only=("masks", "nonsense"))


@pytest.mark.parametrize("path", ["runs/theory", "theory.md"])
def test_a_place_where_no_result_can_go_is_refused_before_the_work(path):
    with pytest.raises(SystemExit, match=f"--json {path}: name a file that ends in .json"):
        __main__.command(path, ("masks",))


def test_every_file_with_a_measurement_is_a_claim():
    folder = Path(__main__.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "\ndef measure(" in path.read_text(encoding="utf-8")}
    assert files == {*CLAIMS} and len(CLAIMS) == len({*CLAIMS})


def test_the_kept_table_is_whole_and_holds():
    kept = json.loads((KEPT / "theory.json").read_text(encoding="utf-8"))
    assert [*kept["pictures"]] == [*CLAIMS] and len(kept["rows"]) >= 25
    assert all(row["holds"] for row in kept["rows"]) and sum(kept["seconds"].values()) <= 25 * 60
    assert (KEPT / "theory.md").read_text(encoding="utf-8") == __main__.page(kept)
    assert all((KEPT / picture).exists() for pictures in kept["pictures"].values() for picture in pictures)
