# Three things a newcomer types: make demo, make test, make setup. Everything lives in .venv and runs/.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo demo-seeds test test-slow check

setup: $(STAMP)

# torch first and by its exact version: pip then takes a CPU build where one is at hand
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m rbd_train.embedded
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh

# three seeds, each with questions of its own: make demo's and two more, about 13 minutes a seed on two free cores
demo-seeds: demo
	for seed in 1 2; do PATH="$(CURDIR)/$(BIN):$$PATH" NAME=demo-$$seed SEED=$$seed bash launch/demo.sh || exit 1; done
	$(BIN)/rbd report name=demo-seeds from=demo 'runs=[demo,demo-1,demo-2]' 'title="Three seeds (in full: demo)"'

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: check
	$(BIN)/python -m rbd_train.embedded
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m "slow and not gpu" --timeout 3600
