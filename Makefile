# Two commands are enough on a fresh machine: `make quickstart` and `make test`.
#   PYTHON=/path/to/python   the Python of the environment (3.11 or newer)
#   EXTRAS=train,tpu         the extras to install: train, show, tpu, cuda, hf
#   ARGS="..."               further arguments for quickstart, test, test-oldest and bench
#   WORKERS=4                test processes; each holds 8 virtual devices

PYTHON ?= python3
OLDEST_PYTHON ?= python3.11
EXTRAS ?= train
WORKERS ?= 2
ARGS ?=

export EXTRAS
BIN := .venv/bin
OLDEST_BIN := .venv-oldest/bin
SETUP := bash scripts/setup_env.sh
PYTEST_FLAGS := -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup setup-run setup-test setup-oldest quickstart test test-oldest lint format \
	typecheck check bench aot-report constraints clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## Make or update .venv with all that developers need
	@$(SETUP) "$(PYTHON)" .venv dev

setup-run:
	@$(SETUP) "$(PYTHON)" .venv run

setup-test:
	@$(SETUP) "$(PYTHON)" .venv test

setup-oldest:
	@$(SETUP) "$(OLDEST_PYTHON)" .venv-oldest test

quickstart: setup-run ## Set up, then train a small model
	$(BIN)/farspan train quickstart $(ARGS)

test: setup-test ## Set up, then run the tests: make test ARGS="-k ring"
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(ARGS)

test-oldest: setup-oldest ## Run the smoke tests on the oldest Python and jax
	@$(OLDEST_BIN)/python -c 'import sys, jax; pair = sys.version_info[:2], jax.__version__; \
		sys.exit(pair != ((3, 11), "0.10.2") and f"not the oldest pair: {pair}")'
	$(OLDEST_BIN)/python -m pytest $(PYTEST_FLAGS) -m smoke $(ARGS)

lint: setup ## Check style, format and the order of the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: setup ## Mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: setup ## Check the types of src
	$(BIN)/pyright

check: lint typecheck test ## Every check but test-oldest

bench: setup-run ## Hold the CPU kernel beside its peers: make bench ARGS=--quick
	$(BIN)/python benchmarks/attention.py $(ARGS)

aot-report: EXTRAS = train,tpu
aot-report: setup ## Compile whole steps for 64 TPU chips and write docs/aot
	$(BIN)/python benchmarks/aot_report.py $(ARGS)

constraints: setup ## Resolve the newest versions into requirements/constraints.txt
	$(BIN)/uv pip compile --universal --python-version 3.11 --all-extras --group dev --upgrade \
		--generate-hashes --no-emit-index-url --no-annotate --quiet \
		--custom-compile-command "make constraints" \
		pyproject.toml --output-file requirements/constraints.txt

clean: ## Remove environments, caches and builds
	rm -rf .venv .venv-oldest .venv-peers .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
