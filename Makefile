# Everything a fresh machine needs: `make train` (install and train the default job), `make test` (install and test).
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := $(shell date +%Y%m%d-%H%M%S)

.PHONY: train test lint slow mutants clean

train: .venv/.installed
	$(BIN)/codescent train configs/default.toml run.name=default-$(STAMP) $(ARGS)

test: .venv/.installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

slow: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow --timeout 1200 $(ARGS)

# Hours. Plants faults, one at a time, in copies of this checkout: docs/mutants.md.
mutants: .venv/.installed-dev
	$(BIN)/python tests/mutants/plant.py --jobs $(JOBS) $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "codescent needs Python 3.11 or newer; $(PYTHON) is older. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv

# torch comes first and with an exact pin, so that nothing else pulls in another build of it.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist
