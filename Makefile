# setup demo test lint format bench, and for vLLM engine-vllm demo-vllm test-engines: each works on a fresh machine with Python 3.11 to 3.13.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint format bench engine-vllm demo-vllm test-engines clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "eyas needs Python 3.11, 3.12 or 3.13; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	@echo "setting up $(VENV) (PyTorch, transformers and what eyas needs; some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[fetch,tensorboard,data,dev]'
	@touch $@

demo: setup
	@$(BIN)/eyas fetch smollm2-135m
	@$(BIN)/eyas run smollm2-135m

test: setup
	@$(BIN)/python -m pytest

engine-vllm: setup
	@$(BIN)/eyas engine setup vllm --python $(BIN)/python

demo-vllm: engine-vllm
	@$(BIN)/eyas fetch smollm2-135m
	@$(BIN)/eyas plan smollm2-135m-vllm --profile
	@$(BIN)/eyas run smollm2-135m-vllm

test-engines: engine-vllm
	@$(BIN)/eyas fetch smollm2-135m
	@$(BIN)/python -m pytest -o addopts= -q -s tests/engines

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/eyas fetch smollm2-135m
	@$(BIN)/python benchmarks/generation.py models/smollm2-135m
	@$(BIN)/python benchmarks/decoding.py models/smollm2-135m

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
