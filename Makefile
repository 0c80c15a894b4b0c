# Two commands for everyone: `make demo` talks to a real model, `make test` checks everything that runs on a CPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 30000
JOBS ?= 2
STAMP := $(VENV)/.installed
FLASHINFER ?= 0.7.4
FLASHINFER_STAMP := $(VENV)/.flashinfer-installed

.PHONY: demo test test-flashinfer mutants asan lint format docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes (torch is large)..."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,test,dev]'
	@touch $@

# The contract tests run FlashInfer's Python code on a CPU; see the requirements file for why without dependencies.
$(FLASHINFER_STAMP): $(STAMP) tests/requirements-flashinfer.txt
	$(BIN)/python -m pip install --quiet --no-deps -r tests/requirements-flashinfer.txt
	@touch $@

# Another version, beside the environment's: it comes first on PYTHONPATH.
.flashinfer-%/.installed: | $(FLASHINFER_STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) flashinfer-python==$*
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m sglang.demo_model --serve --port $(PORT)

# In JOBS processes at a time, a file in one of them; JOBS=0: in the process itself.
test: $(FLASHINFER_STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# The contract tests against another FlashInfer than `make test` has.
test-flashinfer: .flashinfer-$(FLASHINFER)/.installed
	CONTRACT_FLASHINFER=$(FLASHINFER) PYTHONPATH=.flashinfer-$(FLASHINFER) $(BIN)/python -m pytest tests/contract

# Deliberate faults in the FlashInfer backends: at least one contract test must fail for each. Four minutes on one core.
mutants: .flashinfer-$(FLASHINFER)/.installed
	$(BIN)/python tests/contract/check_mutants.py --flashinfer-07 .flashinfer-$(FLASHINFER)

# The CPU kernels' tests with address checks, on the best instructions of this machine and the portable ones.
asan: $(STAMP)
	CXX="c++ -g -fsanitize=address" LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -s tests/kernels/test_cpu_operators.py \
		tests/srt/layers/attention/test_cpu_attention.py tests/srt/layers/quantization/test_cpu_backend.py \
		-k "$$($(BIN)/python -c 'from sglang.kernels.cpu_extension import isas; print(isas()[0].name, "or portable")')"

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .flashinfer-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
