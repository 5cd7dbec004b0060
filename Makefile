# Everything a fresh machine needs: `make train` (install and train the default job), `make test` (install and test).
PYTHON ?= python3
JOBS ?= 3
BIN := .venv/bin
# Extras of pyproject.toml with what README.md shows.
EXTRAS := plots,tensorboard,hub
STAMP := $(shell date +%Y%m%d-%H%M%S)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test lint docs turn slow cuda fuzz mutants hooks release test-oldest clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12 (which Python makes .venv), JOBS=3 (tests at a time), ARGS="..." (for train, test, mutants, slow, cuda, fuzz, test-oldest)'

train: .venv/.installed ## install, then train the default job into runs/; ARGS="section.key=value"
	$(BIN)/codescent train configs/default.toml run.name=default-$(STAMP) $(ARGS)

# The checks run beside the tests, and print when the tests have ended. Many tests wait for ranks or deadlines, so there
# are more of them at a time than cores; a worker that has none left takes some from the longest queue. They start Python
# hundreds of times: bytecode is kept, whatever the environment says, or each start compiles the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# pytest rewrites each assert when it first reads a test: 25 s, which without this every worker would spend.
REWRITE := ls tests/__pycache__/*pytest*.pyc >/dev/null 2>&1 || PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only >/dev/null

test: .venv/.installed-dev .venv/.installed-docs ## install, check the code and the docs, run the tests; ARGS="tests/test_x.py"
	@mkdir -p build; $(MAKE) --no-print-directory lint docs > build/checks.txt 2>&1 & checks=$$!; \
	$(REWRITE); $(PYTEST) --durations=40 --durations-min=1 $(ARGS); tests=$$?; \
	wait $$checks; checks=$$?; cat build/checks.txt; test $$checks -eq 0 && exit $$tests

mutants: .venv/.installed-dev ## plant a fault in each copy of the code, see which tests catch it: hours; ARGS="--likely-only"
	@mkdir -p build
	$(BIN)/python tests/mutants/plant.py --jobs $(JOBS) $(ARGS)

lint: .venv/.installed-dev ## check style, types and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not with --quiet: warnings would then be no errors.
docs: .venv/.installed-docs ## build the site of the docs into build/site, and check every link in it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# CI runs these after `make test`: those whose turn it is (tests/slow/turn), those of rooms that the last day changed, more.
SPEND ?= 900

turn: .venv/.installed-dev ## run some slow tests: whose turn it is, of rooms that changed in a day, then more; SPEND=900 seconds
	@mkdir -p build
	$(BIN)/python tests/slow/choose.py --jobs $(JOBS) --spend $(SPEND) --out build/turn.txt
	test ! -s build/turn.txt || $(PYTEST) -m "slow and not cuda" --timeout 1200 --durations=40 --durations-min=10 --junitxml=build/turn.xml @build/turn.txt

slow: .venv/.installed-dev ## run the tests that take minutes, and those that draw examples on many more examples
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile deep --timeout 1200 $(ARGS)

# It installs nothing: on a machine without a package index, PYTHON has what is needed. OUT may come from the environment.
OUT ?= build/cuda

cuda: ## run the tests and benchmarks that need a CUDA device: 10 minutes; OUT=folder, ARGS="--nanogpt DIR --llmc DIR"
	@python=$(BIN)/python; test -x $$python || python=$(PYTHON); \
	PYTHONDONTWRITEBYTECODE= $$python tests/devices/run.py --out "$(OUT)" --jobs $(JOBS) $(ARGS)

fuzz: .venv/.installed-dev ## damage files of every kind, see that each command refuses or says the same: 1 hour; ARGS="--cases 20"
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(ARGS)

# The versions are not those of constraints.txt: tests/oldest/pins.py takes the oldest ones from pyproject.toml. 5 GB.
OLDEST ?= build/oldest

test-oldest: ## install the oldest versions that pyproject.toml allows into build/oldest, run the tests there; ARGS="tests/test_x.py"
	@mkdir -p build
	$(PYTHON) tests/oldest/pins.py > build/oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c build/oldest.txt -e '.[test]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

release: .venv/.installed-dev ## build wheel and sdist into dist/, use the wheel in an empty virtual environment and folder
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python release/try_wheel.py dist

hooks: .venv/.installed-dev ## install the git hooks: ruff and mypy before each commit
	$(BIN)/pre-commit install

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "codescent needs Python 3.11 or newer; $(PYTHON) is older, or not there. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv

# torch comes first and with an exact pin, so that nothing else pulls in another build of it.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) torch
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -e '.[dev]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) -e '.[docs]'
	@touch $@

clean: ## remove .venv and what was built; runs/ and datasets/ stay
	rm -rf .venv build dist
