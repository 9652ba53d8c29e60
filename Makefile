# Each target works alone on a fresh clone: it makes .venv and installs what it needs.
#
#   PYTHON=python3.12 make test    another interpreter for .venv
#   make test JOBS=8               more workers
#   make test BROWSER=no           leave out the tests that drive Chromium

PYTHON  ?= python3
JOBS    ?= 2
BROWSER ?= yes

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help venv demo test check format bench docs browser clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## create .venv with everything that development needs

# The build backend is installed from the same pins, so nothing unpinned is fetched on the way.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pipeloom needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small model on 4 local ranks
	$(BIN)/pipeloom demo

check: $(STAMP) ## lint, format, types, import rules, cost of importing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/unit/test_import_cost.py

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

ifeq ($(BROWSER),no)
TESTS := -m "not browser"
test: $(STAMP)
else
TESTS :=
test: $(STAMP) browser
endif
test: ## run every test, doctest and sample of the docs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(TESTS)

bench: $(STAMP) ## run every benchmark, each beside torch in the same run
	@set -e; for file in benchmarks/*.py; do \
	  case $$file in */_*) continue ;; esac; \
	  echo "== $$file"; $(BIN)/python $$file; \
	done

docs: $(STAMP) ## build the documentation into docs/_build
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

# The browser tests drive the system's Chromium.
browser:
	@if command -v chromium >/dev/null 2>&1; then exit 0; fi; \
	if ! command -v apt-get >/dev/null 2>&1; then \
	  echo "The browser tests need 'chromium' on PATH, and there is no apt-get to install it." >&2; \
	  echo "Install it, or run: make test BROWSER=no" >&2; exit 1; \
	fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	if [ -n "$$sudo" ] && ! command -v sudo >/dev/null 2>&1; then \
	  echo "The browser tests need Debian's chromium, and installing it needs root." >&2; \
	  echo "Run as root: apt-get install chromium; or leave them out: make test BROWSER=no" >&2; exit 1; \
	fi; \
	echo "installing chromium"; \
	{ $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    chromium fonts-dejavu-core >/dev/null; } || { \
	  echo "chromium could not be installed; leave its tests out with: make test BROWSER=no" >&2; exit 1; }

clean: ## remove what the tools left behind; .venv stays
	rm -rf docs/_build docs/_generated build dist .mypy_cache .ruff_cache .pytest_cache \
	  .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
