# Targets for people and CI. `make` alone lists them. PYTHON and TORCH_INDEX are the two variables
# that a machine may need: the Python 3.11 to use, and a package index with the CPU build of torch
# where pip is not configured with one.

PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest

# The test models are tiny: idle OpenMP threads would only spin against each other.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# Quick suites first. A suite whose folder does not exist is skipped.
SUITES := $(wildcard $(addprefix tests/,ring cpu commands fixes deploy packaging kernels rocm rehearse engine clients cluster soak))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-rounding faults rehearse-all soak engine-answers engine-others engine-rounding bench coupling lint types clean $(SUITES)

help:
	@echo "make setup       make or refresh $(VENV)"
	@echo "make demo        generate with rings on a small model, and show what they save"
	@echo "make test        lint, types, then every test suite"
	@echo "make test-quick  the tests that take seconds"
	@echo "make test-rounding  the tests with engines where products round by the number of rows"
	@echo "make faults      every deliberate fault, each put into a copy and seen by its test"
	@echo "make rehearse-all  the whole ROCm engine on CPU tensors, every graph mode and draft"
	@echo "make soak        the long randomised runs at full size: about an hour"
	@echo "make bench       time rings against vLLM's paged path"
	@echo "make coupling    list again what our source uses of vLLM"
	@echo "make lint        ruff: rules and format"
	@echo "make types       mypy"
	@echo "make clean       remove what builds and tests leave behind, but not $(VENV)"

setup:
	@$(PYTHON) tools/setup_env.py --folder $(VENV) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

demo: setup
	$(RUN) -m vllm_dsv4.commands.cli.main demo --cache .cache/demo

bench: setup
	$(RUN) benchmarks/decode_bytes.py
	$(RUN) -m vllm_dsv4.commands.cli.main bench --out docs/benchmarks

coupling: setup
	$(RUN) tools/coupling.py

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# kernels/ is installed as vllm_dsv4.kernels, so mypy sees it apart.
types: setup
	$(RUN) -m mypy vllm_dsv4 tools
	$(RUN) -m mypy kernels

test-quick: setup
	$(PYTEST) tests/unit

# Two suites at a time, the longest from the start; those that start several workers come last. The
# engine's tests are by far the longest, and are two suites here.
ALONE := $(filter tests/cluster tests/soak,$(SUITES))
ANSWERS := $(addprefix tests/engine/test_,exactness.py fuzz.py mtp.py own_draft.py speculation.py)
test: lint types test-quick
	@$(MAKE) --no-print-directory -j2 engine-answers engine-others engine-rounding \
		$(filter-out tests/engine $(ALONE),$(SUITES))
	@set -e; for suite in $(ALONE); do $(MAKE) --no-print-directory $$suite; done

engine-answers: setup
	$(PYTEST) $(ANSWERS)

engine-others: setup
	$(PYTEST) $(filter-out $(ANSWERS),$(wildcard tests/engine/test_*.py))

# Bits and scores where products round by the number of rows. Any suite can run so.
engine-rounding: setup
	TEST_ROUNDING=rows $(PYTEST) tests/engine/test_prefix_cache.py

test-rounding: setup
	TEST_ROUNDING=rows $(PYTEST) tests/engine

faults: setup
	$(RUN) -m tests.faults

REHEARSE := $(RUN) -m vllm_dsv4.commands.cli.main rehearse
rehearse-all: setup
	$(REHEARSE)
	$(REHEARSE) --mode eager --sleep
	$(REHEARSE) --mode eager --drafts ngram
	$(REHEARSE) --mode piecewise
	$(REHEARSE) --drafts mtp

soak: setup
	SOAK_REQUESTS=10000 $(PYTEST) tests/soak -s
	BENCH_REQUESTS=10000 $(PYTEST) tests/clients/test_tools.py
	MODEL_OPERATIONS=1000000 $(PYTEST) tests/ring/test_model_of_the_manager.py

clean:
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf *.egg-info tools/vllm_metadata/build tools/vllm_metadata/*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
