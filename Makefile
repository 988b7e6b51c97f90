# `make demo` and `make test` need nothing but Python 3.11 or newer and a network on the first run.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test torture lint types wheel model browser servers unit clean

help:
	@echo "make demo   the demo on a small real model (pulled on the first run)"
	@echo "make test   everything that must hold before a change lands"
	@echo "make torture  the long forms of the crash and load tests, the former resumable (KVDB_TORTURE_DIR)"
	@echo "make clean  remove .venv and what tools left behind"

demo: .venv/.installed
	$(BIN)/kvdb demo

# pytest comes last, so that its closing line is the last one.
test: lint types wheel model unit

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

wheel: .venv/.dev
	bash tests/wheel.sh $(BIN)/python

model: .venv/.dev
	$(BIN)/kvdb models pull smollm2-135m

# The page's tests need a browser; where none can be had they are skipped, and say so.
browser: .venv/.dev
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		$(BIN)/playwright install --only-shell chromium || true

# Redis and what Mooncake needs of the system, by apt-get where that asks no password.
servers: .venv/.dev
	bash tests/servers.sh $(BIN)

# With bytecode, so that the programs that tests start need not compile kvdb anew each time.
unit: export PYTHONDONTWRITEBYTECODE =
unit: .venv/.dev browser servers
	$(BIN)/pytest -q

torture: .venv/.dev
	$(BIN)/pytest -q -s -m torture

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvdb needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
