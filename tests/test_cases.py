"""cases.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_case_names_tests_that_exist():
    rows = [line for line in (HERE / "cases.md").read_text().splitlines() if re.match(r"\| B\d\d ", line)]
    assert len(rows) >= 23
    for row in rows:
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert names, row
        for file, test in names:
            assert re.search(rf"^    def {test}\(|^def {test}\(", (HERE / file).read_text(), re.M), f"{file}::{test}"
