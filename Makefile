# The first use of a target sets up .venv, once; again only when pyproject.toml changes.
.DEFAULT_GOAL := help
PYTHON ?= python3
IMPL ?= mine
DRILL ?=
WORKERS ?= 2

.PHONY: help grade test check clean

help: ## Show this
	@echo "Attention drills. On a fresh machine, 'make grade IMPL=solutions' sets up and grades the reference."
	@echo
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'
	@echo
	@echo "  IMPL=mine|solutions|DIR   what to grade (mine)      DRILL='l1 f1'   which drills (all)"
	@echo "  PYTHON=python3.12         the Python that .venv is made with"

grade: .venv/ready ## Grade IMPL and print the report
	@.venv/bin/drills grade $(DRILL) --impl "$(IMPL)"

test: .venv/ready-dev check ## Everything: lint, types, this repository's own tests, the graded suite on the reference
	@echo "-- tests, $(WORKERS) workers"
	@.venv/bin/python -m pytest selftests -rf -n $(WORKERS) --dist loadfile -q

check: .venv/ready-dev ## Format, lint and types only
	@echo "-- ruff and mypy"
	@.venv/bin/ruff format --check -q . || { echo "run: .venv/bin/ruff format ."; exit 1; }
	@.venv/bin/ruff check -q .
	@.venv/bin/mypy

clean: ## Remove .venv and caches; nothing of yours
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A marker file is written only when pip has finished, so an interrupted set-up starts again.
.venv/ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: install Python 3.10 or newer, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$$($(PYTHON) --version) is too old: Python 3.10 or newer is needed. Name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "-- setting up .venv, once: torch comes with CUDA, several GB; some minutes"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --disable-pip-version-check --progress-bar on -e .
	@touch $@

.venv/ready-dev: .venv/ready
	@echo "-- adding what this repository's own tests need"
	@.venv/bin/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	@touch $@
