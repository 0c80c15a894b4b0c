# Two commands for everyone: `make demo` talks to a real model, `make test` checks everything that runs on a CPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 30000
STAMP := $(VENV)/.installed

.PHONY: demo test lint format docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes (torch is large)..."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,test,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m sglang.demo_model --serve --port $(PORT)

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
