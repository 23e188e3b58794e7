# Every target sets up what it needs first (tools/setup): a virtual environment in .venv and the compiled core.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-all conformance chaos check docs lint format types macos benchmark fuzz clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## virtual environment, pinned packages, compiled core
	@PYTHON=$(PYTHON) tools/setup

demo: setup ## the main job: train a digits model on a local fleet of two workers
	@$(BIN)/mccl-fleet submit configs/jobs/digits.yaml --follow

test: setup ## the quick tests
	@$(BIN)/pytest -m "not slow" -q

test-all: setup ## all tests
	@$(BIN)/pytest -q

chaos: MINUTES ?= 2
chaos: SEED ?= 1
chaos: setup ## random faults for MINUTES=2, with SEED=1 (Linux, root)
	@PYTHONPATH=tests $(BIN)/python -m chaos --minutes $(MINUTES) --seed $(SEED)

conformance: setup ## PyTorch's own distributed_test.py, with 3, 4 and 8 ranks, compared with Gloo
	@$(BIN)/python -m tests.conformance

check: lint types ## what CI asks of the sources

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell --quiet-level 2 $$(git ls-files | grep -v -E '^(LICENSE|constraints.txt|tests/fuzz/corpus/.*)$$')
	@git ls-files 'mccl_core/csrc/*.?pp' 'tests/cpp/*.cpp' 'tests/fuzz/*.?pp' | xargs $(BIN)/clang-format --dry-run --Werror
	@PYTHONPATH=cli $(BIN)/lint-imports

types: setup
	@$(BIN)/mypy

docs: setup ## docs/api.md and docs/environment.md, from the sources
	@$(BIN)/python tools/document.py

format: setup ## format Python and C++
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@git ls-files 'mccl_core/csrc/*.?pp' 'tests/cpp/*.cpp' 'tests/fuzz/*.?pp' | xargs $(BIN)/clang-format -i

macos: setup ## compile and link the extension for macOS arm64, and check it (TORCH=2.13.0 for one release)
	@$(BIN)/python -m tools.macos $(foreach version,$(TORCH),--torch $(version))

benchmark: setup ## the README's table: all-reduce, mccl and Gloo in turns
	@$(BIN)/python benchmarks/allreduce.py --markdown

fuzz: MINUTES ?= 10
fuzz: setup ## fuzz what a peer's bytes meet, for MINUTES=10
	@$(BIN)/python tests/fuzz/campaign.py --minutes $(MINUTES)

clean: ## everything that was built
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
