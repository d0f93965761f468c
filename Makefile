# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test unit check docs bench release-check clean

demo: $(READY)
	$(BIN)/residuum demo

test: $(READY)
	$(BIN)/python -m pytest

unit: $(READY)
	$(BIN)/python -m pytest tests/unit

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not --quiet: mkdocs would not count the warnings that --strict refuses.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The built package, installed without the repository: it starts, scans and finds a leak.
release-check: $(READY)
	rm -rf dist/check
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps -w dist/check .
	$(PYTHON) -m venv dist/check/venv
	dist/check/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	dist/check/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/check/residuum-*.whl
	cd dist/check && venv/bin/residuum --version && venv/bin/residuum demo

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch comes first and pinned: an unpinned one may pull gigabytes of a build nobody asked for.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "residuum needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)
