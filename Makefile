# `make demo` and `make test` need nothing but Python 3.11 or later: they make .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-notebooks test-oracles lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.installed ## make .venv with the library, the demo and the tests (PYTHON=python3.12 chooses an interpreter)

demo: venv ## train a small translation model on generated dates into runs/demo
	$(BIN)/python experiments/dates.py --run-dir runs/demo

test: venv ## the tests that are not slow, on all cores
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

test-slow: venv ## the slow tests
	$(BIN)/python -m pytest -m "slow and not oracles"

test-notebooks: venv ## execute the notebooks, five minutes on two cores
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile notebooks

test-oracles: $(VENV)/.installed-oracles ## compare with torch and transformers, and a published checkpoint (installs them)
	$(BIN)/python -m pytest -m oracles --numprocesses auto --dist loadfile

lint: venv ## style and formatting
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

# The stamp is the last thing written, so an install that failed is tried again.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tfm_jax needs Python 3.11 or later, but $(PYTHON) is " + sys.version.split()[0] + ": choose another with make PYTHON=python3.12 ...")'
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo,test]'
	@touch $@

$(VENV)/.installed-oracles: $(VENV)/.installed
	@rm -f $@
	$(BIN)/python -m pip install --quiet --editable '.[oracles]'
	@touch $@
