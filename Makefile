# One command each; `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := transfer kvstore engine prefill_node decode_node gateway launch
SOURCES := $(PACKAGES) tests benchmarks
TORCH ?= torch==2.13.0

.PHONY: help venv demo lint test bench clean

help:
	@echo "make demo   install, pull a model, hold a conversation through separate processes"
	@echo "make test   format, lint, types, house rules, tests"
	@echo "make bench  speed and footprint beside transformers, transfers beside their limits"
	@echo "make venv   only the virtual environment in $(VENV)"

# Installed again when pyproject.toml changes; the stamp appears only after a complete install.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and the rest into $(VENV): this takes a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

venv: $(VENV)/.installed

demo: venv
	$(BIN)/python -m launch.demo

lint: venv
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

# Tests that start real processes share two cores badly: they run alone, after the others.
test: lint
	$(BIN)/python -m pytest -n 2 -m "not net and not gpu" --dist loadfile
	$(BIN)/python -m pytest -m "net and not gpu"

bench: venv
	$(BIN)/python -m benchmarks.system_bench
	$(BIN)/python -m benchmarks.footprint
	$(BIN)/python -m benchmarks.transfer

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
