# `make demo` and `make test` are all that a fresh machine needs: each makes .venv if it is missing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/paceline/native/*.[ch]pp)

.PHONY: demo test test-all test-gpu gpu-evidence papers check docs format clean

demo: .venv/installed
	$(BIN)/paceline train lenet5 --data digits --workers 2 --strategy auto --epochs 25 --learning-rate 0.1

# Three processes for two cores, because many tests wait. Each has one thread: threads of torch that
# share a core wait for each other. Bytecode is kept, because hundreds of processes import the same
# modules.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := --numprocesses=3 --dist=loadfile --no-loadscope-reorder

# What is run for each change: all but tests/integrations and what is marked as slow.
test: .venv/tested
	$(PYTEST) tests -m "not slow" --ignore=tests/gpu --ignore=tests/integrations $(PARALLEL)

# Everything that needs no GPU: before an issue is resolved, and before a release.
test-all: .venv/developed
	$(PYTEST) tests --ignore=tests/gpu $(PARALLEL)

test-gpu: .venv/tested
	$(BIN)/python -m pytest tests/gpu

# What needs a GPU, in parts that each leave a file in OUT; PARTS="sums codecs" for some. With BIN=
# on the command line the Python there is taken as it is, and nothing is installed.
gpu-evidence: $(if $(filter command line,$(origin BIN)),,.venv/developed)
	@test -n "$(OUT)" || { echo 'name a folder: make gpu-evidence OUT=folder' >&2; exit 2; }
	$(BIN)/python3 benchmarks/gpu/main.py $(OUT) $(PARTS)

# The tables of the five papers beside the plans; PAPERS="cgdp wheel" for some.
papers: .venv/tested
	$(BIN)/python benchmarks/papers/main.py $(PAPERS)

check: .venv/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in build/site; a link or an anchor that leads nowhere, or a page in no menu, is an error.
# Not --quiet, which keeps warnings from being counted.
docs: .venv/developed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: .venv/developed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	$(PIP) -e '.[data]'
	touch $@

.venv/tested: .venv/bin/python $(SOURCES)
	$(PIP) -e '.[test]'
	touch $@ .venv/installed

.venv/developed: .venv/bin/python $(SOURCES)
	$(PIP) -e '.[dev]'
	touch $@ .venv/tested .venv/installed

clean:
	rm -rf .venv build runs
