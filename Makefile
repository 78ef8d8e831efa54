# The same commands here, in CI, and on a machine that has nothing but python3 and make.
#
#   PYTHON=python3.12        another interpreter (3.11 or later for the pinned set)
#   VENV=.venv               where the environment lives
#   CONSTRAINTS=             an empty value lets pip choose the versions (needed on Python 3.10)
#   TORCH_INDEX=URL          one more package index, e.g. the one with torch's CPU wheels
#   PYTEST_ARGS='-k arena'   more arguments for pytest

SHELL         := bash
.SHELLFLAGS   := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench deepspeed-ops clean

PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN     := $(VENV)/bin
INSTALL  = $(BIN)/python -m pip install --quiet \
           $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

demo: $(VENV)/.demo  ## train the quickstart notebook on two CPU workers; prints its accuracy and the time
	@$(BIN)/python notebooks/run.py notebooks/01_quickstart.ipynb --label demo

test: $(VENV)/.dev  ## run all tests, and the notebooks in real kernels
	@$(BIN)/python -m pytest --nbval-lax --nbval-current-env tests notebooks $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## style, types, import direction, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

bench: $(VENV)/.dev  ## time launches, steps and live workers against the peers (takes hours; wants a quiet machine)
	@$(BIN)/python benchmarks/launch.py
	@$(BIN)/python benchmarks/step.py
	@$(BIN)/python benchmarks/pool.py
	@$(BIN)/python benchmarks/zero_memory.py

deepspeed-ops: $(VENV)/.dev  ## build DeepSpeed's C++ operations once (minutes), for the tests that need a real engine
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c 'import deepspeed, sys; \
	  from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder; \
	  [builder().load() for builder in (ShareMemCommBuilder, FusedAdamBuilder, CPUAdamBuilder)]'

clean:  ## remove the environment, the caches and what was built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: written when pip is through, so the next call starts at once. The file that names the packages renews them.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "nbaccel needs Python 3.10 or later, got " + sys.version)'
	@$(PYTHON) -m venv $(VENV) || { echo "make: no environment without the venv module: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "setting up $(VENV) for the demo (once; a few minutes where torch must be fetched)"
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "setting up $(VENV) for the tests (once; a few minutes where torch must be fetched)"
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.demo
