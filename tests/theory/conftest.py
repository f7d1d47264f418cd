"""What holds in every test of the claims."""

import pytest


@pytest.fixture(autouse=True)
def without_strictness(as_a_reader_has_it):
    """Experiments are written as a reader of the library would write them."""
