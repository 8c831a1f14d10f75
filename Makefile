# Everything a developer or CI does, on a machine that has python 3.11 (or newer) and make.
# Any target makes its environment first; when that is fresh, it takes no time.

PYTHON ?= python3
VENV ?= .venv
VENV_PROTO ?= .venv-proto
VENV_SGLANG ?= .venv-sglang
VENV_TOOLS := .venv-tools
TOOLS := .tools
BIN := $(VENV)/bin
# More arguments for the tool behind a target: make test ARGS="-k router -x"
ARGS ?=

READY := $(VENV)/.ready
READY_PROTO := $(VENV_PROTO)/.ready
READY_SGLANG := $(VENV_SGLANG)/.ready
READY_TOOLS := $(TOOLS)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup sglang tools demo test test-all check format proto bench clean

help: ## Show this list
	@echo "make TARGET, where TARGET is"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-9s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Make .venv with everything, at the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Furlong needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "This Python cannot make environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV): downloads PyTorch and more, a minute or a few in which pip says nothing"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[all,dev]'
	@touch $@

sglang: $(READY_SGLANG) ## Make .venv-sglang: the real SGLang, for a machine without a GPU

$(READY_SGLANG): deploy/sglang-cpu/constraints.txt | $(READY)
	@test -x $(VENV_SGLANG)/bin/python || $(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python -m pip install --quiet --constraint $< torch
	$(VENV_SGLANG)/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

tools: $(READY_TOOLS) ## Fetch real Prometheus, statsd, MLflow, nginx, other routers and more for tests; what cannot be had is named

$(READY_TOOLS): deploy/tools/make_tools.py deploy/tools/requirements.txt deploy/tools/requirements-routers.txt benchmarks/routerbench/fakeworker.c
	@$(PYTHON) deploy/tools/make_tools.py --root $(TOOLS) --venv $(VENV_TOOLS)

demo: setup ## Train the arithmetic example: four services on this machine, each time in a new run folder
	@number=1; while [ -e runs/arithmetic-$$number ]; do number=$$((number + 1)); done; \
	exec $(BIN)/furlong up --config examples/arithmetic/config.toml --run-dir runs/arithmetic-$$number $(ARGS)

test: setup ## Run the tests that need neither a GPU, nor SGLang, nor tools, nor patience
	$(BIN)/python -m pytest -m "not slow and not sglang and not tools and not gpu" $(ARGS)

# Where tests and benchmarks look for SGLang; tests/sglang_environment.py says what else they take.
test-all bench: export FURLONG_TEST_SGLANG_PYTHON ?= $(abspath $(VENV_SGLANG))/bin/python

test-all: setup sglang tools ## Run every test that this machine can run
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

check: setup $(READY_PROTO) ## Format, lint, types, import rules, freshness of the generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports
	$(VENV_PROTO)/bin/python protos/generate.py --check

format: setup ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY_PROTO) ## Make furlong/v1 from protos/
	$(VENV_PROTO)/bin/python protos/generate.py

$(READY_PROTO): constraints-proto.txt
	@test -x $(VENV_PROTO)/bin/python || $(PYTHON) -m venv $(VENV_PROTO)
	$(VENV_PROTO)/bin/python -m pip install --quiet --requirement constraints-proto.txt
	@touch $@

bench: setup sglang tools ## Run the benchmarks, beside SGLang where that makes sense
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo "There are no benchmarks yet." >&2; exit 1; }
	@missed=; for bench in $$(grep -l __main__ benchmarks/*.py); do \
	  echo "== $$bench"; $(BIN)/python $$bench $(ARGS) || { [ $$? -lt 128 ] || exit 1; missed="$$missed $$bench"; }; done; \
	[ -z "$$missed" ] || { echo "over a limit, or failed:$$missed" >&2; exit 1; }

clean: ## Remove the environments, caches and build results; runs/ stays
	rm -rf $(VENV) $(VENV_PROTO) $(VENV_SGLANG) $(VENV_TOOLS) $(TOOLS) build dist .pytest_cache .ruff_cache .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
