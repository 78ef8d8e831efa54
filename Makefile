# The same commands here, in CI, and on a machine that has nothing but python3 and make.
#
#   PYTHON=python3.12        another interpreter (3.11 or later for the pinned set)
#   VENV=.venv               where the environment lives
#   CONSTRAINTS=             an empty value lets pip choose the versions (needed on Python 3.10)
#   TORCH_INDEX=URL          one more package index, e.g. the one with torch's CPU wheels
#   JOBS=3                   test files that run at the same time (they often wait); 0 for one after another, in one process
#   PYTEST_ARGS='-k arena'   more arguments for pytest
#   SLOW=changed             make test: which slow tests run, too: none, changed (since the last landing), all
#   CHANGED=1                make quick: with the tests of what has changed
#   MOMENTS=320              how often make chaos kills something
#   GPU_PART='fp8 bench'     which parts make gpu runs; without it all: tests/gpu/parts.py
#   WHEELS=folder            make gpu: a Python that has torch and reaches no index takes what it lacks from here
#   LANE='colab oldest'      which sets of versions make lane runs

SHELL         := bash
.SHELLFLAGS   := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quick quick-style quick-imports quick-tests demo test test-slow full chaos lane ready gpu lint docs bench deepspeed-ops clean

PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
TORCH_INDEX ?=
PYTEST_ARGS ?=
JOBS        ?= 3
SLOW        ?= none
CHANGED     ?=
MOMENTS     ?= 320
WHEELS      ?=
LANE        ?= colab kaggle oldest between newest dist binder torch_tpu torch_xla

# Images of containers set it; hundreds of processes would each compile what they import anew, and those of the lanes torch.
unexport PYTHONDONTWRITEBYTECODE
# Of a shell in which another environment is active; IPython warns of it.
unexport VIRTUAL_ENV

BIN     := $(VENV)/bin
# Those that need a driver of TPUs, which the lanes torch_tpu and torch_xla have.
TPU_NOTEBOOKS := notebooks/08_tpu.ipynb
NOTEBOOKS     := $(filter-out $(TPU_NOTEBOOKS), $(wildcard notebooks/*.ipynb))
PLUGINS  = -p tests.no_grammar -p tests.rerun_alone
# Whole files go to one process, in the order in which they were collected.
PYTEST   = $(BIN)/python -m pytest $(PLUGINS) --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
NBVAL    = --nbval-lax --nbval-current-env
# Tests of modules that start nothing, and one launch, one cell, one prepared step.
QUICK_TESTS := tests/config tests/plan tests/calls/test_shutdown.py tests/workers/test_causes.py tests/workers/test_failure.py \
               tests/output/test_console.py tests/output/test_chart.py \
               tests/output/panel/test_facts.py tests/output/panel/test_rank_times.py \
               tests/transfer/test_free_names.py tests/transfer/test_pickling.py tests/transfer/test_object_walk.py \
               tests/notebook/test_magic_line.py \
               tests/base/test_env.py tests/base/test_errors.py tests/base/test_optional_packages.py tests/base/test_units.py \
               tests/house/test_public_surface.py tests/house/test_structure.py \
               tests/calls/test_launch.py::test_the_notebooks_model_is_the_trained_model \
               tests/calls/test_pool.py::test_cells_keep_names_show_values_once_where_equal_and_run_on_some_ranks \
               tests/accelerator/test_gradient_steps.py::test_five_batches_in_groups_of_two_sync_at_the_second_fourth_and_last
INSTALL  = $(BIN)/python -m pip install --quiet \
           $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# With WHEELS, what is missing beside that Python's own packages lies in a folder of its own, and nothing of it is changed.
GPU_SITE  := .gpu/site
GPU_PART  ?=
GPU_READY  = $(if $(WHEELS),$(GPU_SITE)/.ready,$(VENV)/.dev)
GPU_PYTHON = $(if $(WHEELS),PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) $(PYTHON),$(BIN)/python)

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

quick: $(VENV)/.dev  ## while working: style, imports, and tests, in a minute; CHANGED=1 adds those of what has changed
	@$(MAKE) --no-print-directory --jobs 3 quick-style quick-imports quick-tests

quick-style:
	@$(BIN)/ruff check --quiet .
quick-imports:
	@told=$$($(BIN)/lint-imports --no-logo) || { echo "$$told"; exit 1; }
quick-tests:
	@$(PYTEST) --numprocesses 2 --quiet --slow none $(QUICK_TESTS) \
		$(if $(CHANGED),$$($(BIN)/python -m tests.selection)) $(PYTEST_ARGS)

demo: $(VENV)/.demo  ## run the quickstart: a small language model is taught and fine-tuned by two CPU workers, and writes
	@$(BIN)/python notebooks/run.py notebooks/01_quickstart.ipynb --label demo

test: $(VENV)/.dev $(VENV)/.deepspeed $(VENV)/.browser $(if $(filter-out none,$(SLOW)),$(VENV)/.hosts)  ## run the tests, and the notebooks in real kernels (under ten minutes)
	@$(PYTEST) $(NBVAL) --slow $(SLOW) $(NOTEBOOKS) tests $(PYTEST_ARGS)

test-slow: $(VENV)/.dev $(VENV)/.deepspeed $(VENV)/.browser $(VENV)/.hosts  ## the rest: a browser, the peers, full disks, kills at every step
	@$(PYTEST) $(NBVAL) --slow only $(NOTEBOOKS) tests $(PYTEST_ARGS)

full: ready  ## before a release: all tests with examples that no run has tried, 320 kills, all lanes
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint docs
	@$(MAKE) --no-print-directory chaos lane
	@$(MAKE) --no-print-directory test SLOW=all PYTEST_ARGS='--hypothesis-profile explore $(PYTEST_ARGS)'

chaos: $(VENV)/.dev  ## kill processes of a notebook at hundreds of moments; nothing may be torn (ten minutes or so)
	@$(BIN)/python -m tests.chaos --moments $(MOMENTS)

gpu: $(GPU_READY)  ## on a machine with a GPU: its tests and figures, in parts of four minutes; GPU_PART=fp8 for one of them
	@$(GPU_PYTHON) -m tests.gpu.lacking
	@$(GPU_PYTHON) -m tests.gpu.parts $(GPU_PART) -- $(PYTEST_ARGS)

lane: $(VENV)/.dev  ## tests with the versions of LANE=colab, kaggle, oldest, between, newest; dist: as installed; binder; torch_tpu, torch_xla
	@$(BIN)/python -m tests.lanes $(LANE)

lint: $(VENV)/.dev  ## style, types, import direction, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

# NO_MKDOCS_2_WARNING: mkdocs-material advertises with every build.
docs: $(VENV)/.docs  ## build the documentation into build/docs; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml
	@echo "build/docs/index.html"

bench: $(VENV)/.dev  ## time launches, steps, live workers and fp32 weights against the peers (takes hours; wants a quiet machine)
	@$(BIN)/python benchmarks/launch.py
	@$(BIN)/python benchmarks/step.py
	@$(BIN)/python benchmarks/collectives.py
	@$(BIN)/python benchmarks/report_cost.py
	@$(BIN)/python benchmarks/pool.py
	@$(BIN)/python benchmarks/zero_to_fp32.py
	@$(BIN)/python benchmarks/zero_memory.py
	@$(BIN)/python benchmarks/zero_training.py
	@$(BIN)/python benchmarks/pickers.py
	@$(BIN)/python benchmarks/output.py
	@$(BIN)/python benchmarks/bigmodel.py

deepspeed-ops: $(VENV)/.deepspeed  ## build DeepSpeed's C++ operations for the tests, once (a minute or two)

clean:  ## remove the environment, the caches and what was built
	rm -rf .venv .lanes build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready: $(VENV)/.dev $(VENV)/.deepspeed $(VENV)/.browser $(VENV)/.hosts $(VENV)/.docs  ## all set-up of the other targets

# Stamps: written when pip is through, so the next call starts at once. The file that names the packages renews them.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "nbaccel needs Python 3.10 or later, got " + sys.version)'
	@$(PYTHON) -m venv $(VENV) || { echo "make: no environment without the venv module: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "setting up $(VENV) for the demo (once; a few minutes where torch must be fetched)"
	@$(INSTALL) --editable . ipykernel nbclient
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "setting up $(VENV) for the tests (once; a few minutes where torch must be fetched)"
	@$(INSTALL) --editable '.[dev]'
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/transformer-engine transformer-engine==2.20.2
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "setting up $(VENV) for the documentation (once)"
	@$(INSTALL) --editable '.[docs]'
	@touch $@

$(GPU_SITE)/.ready: $(wildcard $(WHEELS)/*.whl)
	@echo "taking what is missing from $(WHEELS)"
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl
	@touch $@

# Written when all are built. What the machine lacks for one is said, and only its tests are skipped.
$(VENV)/.deepspeed: $(VENV)/.dev tests/deepspeed/operations.py
	@if $(BIN)/python -m tests.deepspeed.operations; then touch $@; fi

# Written when Chromium is there; where it cannot be installed without asking, tests that need it are skipped with a message.
$(VENV)/.browser: $(VENV)/.dev tests/browser/chromium.py
	@if $(BIN)/python -m tests.browser.chromium; then touch $@; fi

# Written when the packages of the system are there that hosts of tests are made with; as above, where they cannot be installed.
$(VENV)/.hosts: $(VENV)/.dev tests/hosts/packages.py
	@if $(BIN)/python -m tests.hosts.packages; then touch $@; fi
