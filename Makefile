# make demo    a small training run, and its tree
# make test    everything the tests need, then the tests
# make lint    ruff and mypy
# make bench   ours beside the published SDK and OpenTelemetry
# Each target sets up what it needs on its own.

PYTHON ?= python3
BIN := .venv/bin
PEERS := bench/.venv

.PHONY: setup demo test lint bench clean
.DELETE_ON_ERROR:

setup: .venv/.test

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The package alone: what a user gets.
.venv/.package: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

# And what the tests need.
.venv/.test: pyproject.toml constraints.txt | .venv/.package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

demo: .venv/.package
	$(BIN)/python examples/demo.py

test: .venv/.test
	$(BIN)/pytest

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.test $(PEERS)/.done
	$(BIN)/python bench/run.py --peer $(PEERS)/bin/python

$(PEERS)/.done: bench/requirements-peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --requirement bench/requirements-peers.txt
	touch $@

clean:
	rm -rf .venv $(PEERS) .cirron .mypy_cache .pytest_cache .ruff_cache
