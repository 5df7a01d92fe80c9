# `make demo` and `make test` work on a fresh machine: they make .venv, install what constraints.txt pins, and run.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Python compiles what is imported: to compile all of 16,000 modules as they are installed takes a minute.
INSTALL := $(PIP) install --no-compile -c constraints.txt
CODE := $(patsubst %/__init__.py,%,$(wildcard */__init__.py)) tests

# Where it is set every process of the tests would compile each module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup install demo test test-slow test-ci test-all ci soak stories lint docs format bench dist proto hashes clean \
	distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv and install everything that is pinned

# S3 in tests, and all that it needs beside what is here anyway. By name, for botocore asks for an older dateutil than others do,
# and works with theirs.
MOTO = moto boto3 botocore s3transfer jmespath responses xmltodict py-partiql-parser flask flask-cors werkzeug itsdangerous \
	blinker

# editable_mode=compat: mypy finds the packages of an installation by a path, and not by an import hook.
# recbole is taken for the ratings in its wheel and never imported: without its dependencies, which nobody needs.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "elasticps needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "this Python cannot make a virtual environment; on Debian and Ubuntu its package is python3-venv"; exit 1; }
	@echo "installing into $(VENV); this takes a few minutes the first time"
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --config-settings editable_mode=compat -e '.[dev]'
	$(INSTALL) --no-deps recbole $(MOTO)
	@touch $@

install: $(INSTALLED) ## Make .venv and install everything that is pinned; compile no kernels yet

# Apart, for what runs nothing: it need not wait for a compiler.
$(READY): $(INSTALLED)
	@echo "compiling kernels for this machine; this takes up to a minute"
	@$(BIN)/python -m elasticps.warm 2>/dev/null
	@touch $@

demo: $(READY) ## Train a recommender on real ratings while servers die, come and go, and a worker starts again
	$(BIN)/elasticps demo --servers 3 --replicas 2

# Three or four processes: many tests start clusters, and wait for them. A group of tests, which
# tests/conftest.py makes, stays in one process. What ends a process would end the next one, too: after 700 s, if it hangs.
PARALLEL = -n $$(($$(getconf _NPROCESSORS_ONLN) < 3 ? 3 : 4)) --dist loadgroup --max-worker-restart 0

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(READY) ## Run the slow tests, but those that take minutes each
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not long'

test-ci: $(READY) ## Run the tests, and of the slow ones those that every change must pass
	$(BIN)/python -m pytest $(PARALLEL) -rs -m 'not slow or ci'

# Both at once: to lint takes one core, and tests wait for their processes now and then.
ci: $(INSTALLED) ## What every change must pass: lint and test-ci, at the same time
	$(MAKE) --no-print-directory --jobs 2 lint test-ci

test-all: $(READY) ## Run all tests, slow ones too
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow or not slow'

soak: $(READY) ## Random examples; fifty stories for each planted bug; ten million hostile frames; then stories, as `make stories`
	$(BIN)/python -m pytest $(PARALLEL) -m 'hypothesis and not slow' --hypothesis-profile=random
	$(BIN)/python -m tests.sim.planted
	$(BIN)/python -m tests.fuzz --frames 10_000_000 --seed $(or $(SEED),0)
	$(MAKE) stories

# A hundred thousand take half a day: what was played of the same code counts, whoever stopped it.
stories: $(READY) ## Stories on all cores until stopped, or RUNS=N in all; goes on behind tests/sim/played.json, or from SEED=N on
	$(BIN)/elasticps sim --runs $(or $(RUNS),0) $(if $(SEED),--seed $(SEED),--record tests/sim/played.json)

lint: $(INSTALLED) docs ## ruff, mypy --strict, the contracts on who imports whom, and broken links in the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

docs: $(INSTALLED) ## Build the site into docs/_build/html; a broken link or reference fails
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html

format: $(INSTALLED) ## Sort imports and format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(READY) ## Measure pulls and pushes against this machine's own limits, recovery, training, servers coming and going
	$(BIN)/elasticps bench sparse
	$(BIN)/elasticps bench sparse --servers 3 --replicas 1 --replicas 2 --batch 64 --batch 8192
	$(BIN)/elasticps bench dense
	$(BIN)/elasticps bench failover
	$(BIN)/elasticps bench elastic
	$(BIN)/elasticps bench control
	$(BIN)/elasticps bench train

proto: $(INSTALLED) ## Generate the gRPC stubs again
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. elasticps/admin/admin.proto elasticps/serving/lookup.proto

# For Python 3.12, as the image has it; a release's hashes are those of all its files, for other processors too.
HASHES = echo setuptools | $(BIN)/uv pip compile -q --extra kernels --generate-hashes --no-header --no-annotate -c constraints.txt \
	--python-version 3.12 --python-platform x86_64-unknown-linux-gnu pyproject.toml -

dist: $(INSTALLED) ## Build the wheel and the source distribution into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

hashes: $(INSTALLED) ## Write down again what images install, with hashes, after constraints.txt has changed
	$(INSTALL) uv
	$(HASHES) -o deploy/requirements.txt
	$(HASHES) --extra chaos --extra kubernetes -o deploy/requirements-chaos.txt

clean: ## Remove caches and what runs have left
	rm -rf build dist runs docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)
