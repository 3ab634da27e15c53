# Every target does its own set-up: on a fresh machine `make demo` and `make test` are all there is to type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check
KERNEL := $(wildcard setup.py src/lotformer/ops/cpu/*.cpp src/lotformer/ops/cpu/*.h)

.PHONY: setup demo test lint types bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt $(KERNEL)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (about two minutes the first time) ..."
	@$(PIP) --upgrade pip setuptools wheel
	@$(PIP) torch numpy
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/lotformer demo

test: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/lotformer bench runtime

clean:
	rm -rf $(VENV) build dist src/*.egg-info out
