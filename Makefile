# Everything happens in .venv, which the first target creates; nothing else is needed but Python 3.11+.
#   make train        train a byte-level GPT on 8 virtual CPU devices
#   make test         the tests, a sample of them compiled as users do before; PYTEST_ARGS="-k name -x" narrows them
#   make test-slow    the slow ones
#   make test-browser open a report in Chromium, which has to be there with its driver
#   make test-gpu     those that need a GPU
#   make test-matrix  the tests on the oldest and the newest Python and jax that are supported
#   make docs         write docs/primitives.md from the rule table
#   make site         build the documentation's pages; docs/_build/html/index.html is the first
#   make wheel-test   build wheel and sdist, try the wheel from another folder
#   make lint | format | coverage | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# Two suit two cores.
WORKERS ?= 2
PYTEST_ARGS ?=
PIP_FLAGS := --quiet --disable-pip-version-check

usable = $(1) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
# XLA's compiler for GPUs works with a jaxlib of its own version alone, which its requirements do not say.
fit_compiler = $(1) -m pip install $(PIP_FLAGS) "jax-cuda12-plugin==$$($(1) -c 'import jaxlib; print(jaxlib.__version__)')"
# The first that starts: a name on the path can be a shim for a version that is not there.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $(call usable,$$python); then echo $$python; break; fi; done)

.PHONY: help venv train test test-slow test-browser test-gpu test-matrix docs site wheel-test lint format coverage clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
		if [ -z "$(PYTHON)" ] || ! $(call usable,$(PYTHON)); then \
			echo "autopar needs Python 3.11 or later with the venv module; found: '$(PYTHON)'. Try make PYTHON=/path/to/python3.12" >&2; exit 1; \
		fi; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@echo "Installing autopar and its tools into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@$(call fit_compiler,$(BIN)/python)
	@touch $@

train: $(VENV)/.installed
	@$(BIN)/python -m benchmarks.train

# Most tests compile with less optimization than users do, which is much quicker. Exit code 5: none of the sample is asked
# for.
test: $(VENV)/.installed
	$(BIN)/python -m pytest --xla-defaults -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

test-browser: $(VENV)/.installed
	@for program in chromium chromedriver; do \
		if ! command -v $$program >/dev/null; then \
			echo "make test-browser needs $$program, which is not here: apt-get install chromium chromium-driver" >&2; exit 1; \
		fi; \
	done
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed
	@if ! nvidia-smi >/dev/null 2>&1; then echo "make test-gpu needs an NVIDIA GPU, which is not here" >&2; exit 1; fi
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

docs: $(VENV)/.installed
	@JAX_PLATFORMS=cpu $(BIN)/python -m tests.passes.rules.document

# Every page is read anew: of pages that have not changed Sphinx would not repeat its warnings, which are errors here.
site: $(VENV)/.installed
	@JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet \
		--doctree-dir docs/_build/doctrees docs docs/_build/html

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m benchmarks.figures --check

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ---- Packaging ----

# The wheel is built from the sdist, and tried in an environment of its own that has only what it declares.
wheel-test: $(VENV)/.installed
	@rm -rf dist .venv-wheel
	@$(BIN)/python -m build --outdir dist . >dist.log 2>&1 || { cat dist.log >&2; exit 1; }
	@rm dist.log
	@$(BIN)/python tests/wheel/contents.py . dist
	@$(BIN)/python -m venv .venv-wheel
	@.venv-wheel/bin/python -m pip install $(PIP_FLAGS) dist/*.whl
	@cd "$$(mktemp -d)" && JAX_PLATFORMS=cpu $(CURDIR)/.venv-wheel/bin/python -W error -I $(CURDIR)/tests/wheel/smoke.py
	@rm -rf .venv-wheel

# ---- Other versions ----

# Pairs python:jax, the oldest and the newest supported; a Python that is not on this machine is skipped, with a word.
MATRIX ?= 3.11:0.10.0 3.12:newest

test-matrix:
	@$(MAKE) --no-print-directory --keep-going $(addprefix test-matrix-,$(subst :,-,$(MATRIX)))

test-matrix-%:
	@version=$(word 1,$(subst -, ,$*)); jax=$(word 2,$(subst -, ,$*)); venv=.venv-$$version-jax-$$jax; python=; \
	for candidate in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
		if $(call usable,$$candidate); then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "Skipped: no usable Python $$version on this machine"; exit 0; fi; \
	requirement="--upgrade jax jaxlib"; \
	if [ $$jax != newest ]; then requirement="jax==$$jax jaxlib==$$jax jax-cuda12-plugin==$$jax"; fi; \
	if [ ! $$venv/.installed -nt pyproject.toml ]; then \
		echo "Installing Python $$version with $$requirement into $$venv ..."; \
		$$python -m venv $$venv; \
		$$venv/bin/python -m pip install $(PIP_FLAGS) --editable '.[dev]' $$requirement; \
		$(call fit_compiler,$$venv/bin/python); \
		touch $$venv/.installed; \
	fi; \
	$$venv/bin/python -c 'import jax, sys; print("Python", *sys.version.split()[:1], "jax", jax.__version__)'; \
	$$venv/bin/python -m pytest -n $(WORKERS) --dist worksteal -p no:cacheprovider $(PYTEST_ARGS)

# ---- The rest ----

coverage: $(VENV)/.installed
	@$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean:
	rm -rf .venv .venv-* build dist dist.log docs/_build *.egg-info .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
