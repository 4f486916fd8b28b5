# `make demo` and `make test` need a Python (3.10 to 3.13) and nothing else: each makes the
# environment it lacks in .venv. Name another interpreter with `make test PYTHON=python3.12`.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# the oldest Triton that emitted code must run on, with the newest numpy its interpreter takes
VENV36 := .venv-triton36
READY36 := $(VENV36)/.ready
OLDEST := triton==3.6.0 'numpy<2.4'

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input -c .ci/constraints.txt
HOUSE := pyproject.toml .ci/constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test fmt lint types layers check generated unit unit36 aot gpu bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## one tree through every stage, then a real model that decodes with one
	@$(BIN)/python -m examples.demo
	@$(BIN)/python -m examples.tree_decoding --prompts 1 --tokens 24

test: lint types layers check unit ## everything that needs no GPU; the tests come last

fmt: $(READY) ## format, and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

lint: $(READY) ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(READY) ## mypy --strict
	@$(BIN)/mypy

layers: $(READY) ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo

check: $(READY) ## compare generated/ with what the compiler emits now
	@$(BIN)/bolegen check

generated: $(READY) ## write generated/ anew
	@$(BIN)/bolegen check --write

# one thread a worker: two workers that take every core each only slow one another down
unit: $(READY) ## pytest on the CPU, kernels under Triton's interpreter
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=ci

unit36: $(READY36) ## the same tests under the oldest supported Triton
	@OMP_NUM_THREADS=1 $(VENV36)/bin/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=ci

aot: $(READY) $(READY36) ## build every emitted kernel for real GPUs, under the newest and the oldest Triton
	@$(BIN)/python -m bolegen.resources
	@$(VENV36)/bin/python -m bolegen.resources

# with PYTHON itself, whose torch must see the GPU; warnings of other versions are no errors there
gpu: export PYTHONPATH := .:runtime
gpu: ## the tests that need a GPU and the memory checkers, into docs/validation.md
	@$(PYTHON) benchmarks/validate.py

bench: export PYTHONPATH := .:runtime
bench: ## other projects' kernels and ours, side by side on this GPU, into docs/performance.md
	@test -f .peers/versions.json || $(PYTHON) benchmarks/peers/fetch.py
	@$(PYTHON) benchmarks/compare.py
	@$(PYTHON) benchmarks/compare.py --mixers --append
	@$(PYTHON) benchmarks/compare.py --scaling --append
	@$(PYTHON) benchmarks/render.py

clean: ## remove caches and builds; the environments stay
	@rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

define make_venv
@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 10) <= v[:2] <= (3, 13) and \
  "bolegen needs Python 3.10 to 3.13; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v[:2])'
@echo "making $(1) (some minutes: it installs torch)"
@$(PYTHON) -m venv $(1)
endef

$(READY): $(HOUSE)
	$(call make_venv,$(VENV))
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev,hf]'
	@touch $@

$(READY36): $(HOUSE)
	$(call make_venv,$(VENV36))
	@$(VENV36)/bin/python $(PIP_INSTALL) $(OLDEST)
	@$(VENV36)/bin/python $(PIP_INSTALL) 'numpy<2.4' -e '.[dev,hf]'
	@$(VENV36)/bin/python $(PIP_INSTALL) --no-deps $(OLDEST) # a CUDA torch brings its own triton
	@touch $@
