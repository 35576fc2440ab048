# Pennyweight. `make` alone lists what there is. Needs Python 3.11 or newer and make; everything else it fetches.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A pipe fails when any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Options for `pennyweight up`, pytest or the benchmark, as in: make up ARGS="--port 8090"
ARGS ?=
# Set GPU=1 for PyTorch with CUDA. Without it the CPU build is taken, which on Linux x86-64 is 190 MB and not 3 GB.
GPU ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^torch==\(.*\)/\1/p' constraints.txt)
FLAVOUR := $(if $(filter 1 yes true,$(GPU)),cuda,cpu)
TORCH_STAMP := $(VENV)/.torch-$(FLAVOUR)

.DEFAULT_GOAL := help
.PHONY: up test test-slow check bench bench-quality bench-attribution clean help

up: $(VENV)/.run ## Install what is missing, then run the whole system on this machine (Ctrl-C stops it)
	@exec $(BIN)/pennyweight up $(ARGS)

test: $(VENV)/.dev ## Run the tests; under ten minutes on two cores
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(VENV)/.dev ## Run the tests that take minutes each
	$(BIN)/pytest -m slow $(ARGS)

check: $(VENV)/.dev ## Check style, spelling, borders between folders and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell service engine billing dashboard migrations tests benchmarks deploy docs .ci README.md CHANGELOG.md pyproject.toml compose.yaml Makefile Dockerfile
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/.dev ## Measure tokens per second, beside the limits of this machine
	$(BIN)/python -m benchmarks $(ARGS)

bench-quality: $(VENV)/.dev ## Measure what weights in fewer bits cost in quality
	$(BIN)/python -m benchmarks.quality $(ARGS)

bench-attribution: $(VENV)/.dev ## Hold the cost of each request against its true Shapley value, measured
	$(BIN)/python -m benchmarks.attribution $(ARGS)

clean: ## Remove .venv and caches; .pennyweight with its data stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@test ! -d .pennyweight || echo "Kept: .pennyweight (keys, books, model). Remove it yourself to start over."

help: ## Show this
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make up ARGS="--port 8090 --no-dashboard"   options: $(BIN)/pennyweight up --help'
	@echo '  GPU=1 make up                               with CUDA'

# --- .venv, in steps that are done once: a stamp file each ---

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "This makes $(VENV) and downloads, once:"
	@echo "  PyTorch $(TORCH)$(if $(filter cuda,$(FLAVOUR)), with CUDA        about 3 GB, for the CPU    about 190 MB; GPU=1 for CUDA)"
	@echo "  PostgreSQL and Valkey      about 30 MB"
	@echo "  some 100 Python packages   about 200 MB (Streamlit, pandas, Litestar, Celery …)"
	@echo "  and at the first start the model SmolLM2-135M-Instruct, 93 MB"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

# --no-deps: what PyTorch needs comes with the next step, from the constraints.
$(TORCH_STAMP): $(VENV)/.made constraints.txt
	@rm -f $(VENV)/.torch-*
ifeq ($(FLAVOUR),cuda)
	@if $(PIP) list 2>/dev/null | grep -q '^torch .*+cpu'; then $(PIP) uninstall --quiet --yes torch; fi
	$(PIP) install --no-deps torch==$(TORCH)
else
	@echo "PyTorch: local wheel, else $(TORCH_CPU_INDEX), else the package index"
	@$(PIP) install -qq --no-index --no-deps torch==$(TORCH) 2>/dev/null \
	  || $(PIP) install --retries 0 --timeout 15 --no-deps --index-url $(TORCH_CPU_INDEX) torch==$(TORCH) \
	  || { echo "That index can't be reached; the package index may give the larger CUDA build."; \
	       $(PIP) install --no-deps torch==$(TORCH); }
endif
	@touch $@

$(VENV)/.run: $(TORCH_STAMP) pyproject.toml constraints.txt
	@echo "Installing the packages of constraints.txt (a few minutes) …"
	@$(PIP) install -c constraints.txt -e '.[service,engine,dashboard]' | awk '/^ *Downloading/ {print "  " $$2, $$3, $$4; fflush()}'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing the tools for tests and checks …"
	@$(PIP) install -c constraints.txt -e '.[service,engine,dashboard,dev]' | awk '/^ *Downloading/ {print "  " $$2, $$3, $$4; fflush()}'
	@touch $@
