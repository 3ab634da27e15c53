# Every target does its own set-up: on a fresh machine `make demo` and `make test` are all there is to type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check
KERNEL := $(wildcard setup.py src/lotformer/ops/cpu/*.cpp src/lotformer/ops/cpu/*.h)

.PHONY: setup demo test lint types bench torture sanitize clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml paper/pyproject.toml constraints.txt $(KERNEL)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (about two minutes the first time) ..."
	@$(PIP) --upgrade pip setuptools wheel
	@$(PIP) torch numpy
	@$(PIP) --no-build-isolation -e ".[dev]" -e ./paper
	@touch $@

demo: setup
	$(BIN)/lotformer demo

test: setup
	$(BIN)/python -m pytest -n 2 --maxschedchunk 1

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/lotformer bench runtime

# A training run killed again and again must end as one that nobody touched; about four minutes.
torture: setup
	PYTHONPATH=tests $(BIN)/python -m support.torture --kills 50
	PYTHONPATH=tests $(BIN)/python -m support.torture --kills 50 --spoiled 0.1

# The tests of the CPU kernel with a kernel that watches every access and every shift; about ten minutes.
SANITIZED := build/sanitized
SANITIZE  := -fsanitize=address,undefined
# tests run out of memory on purpose, where the sanitizer would abort, and watch for memory that is kept, as its quarantine is
ASAN_OPTIONS := detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=8
sanitize: setup
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src tests setup.py pyproject.toml README.md $(SANITIZED)
	cd $(SANITIZED) && LOTFORMER_CXXFLAGS="$(SANITIZE) -fno-sanitize=vptr -O1 -g" LOTFORMER_LDFLAGS="$(SANITIZE)" \
		$(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && PYTHONPATH=src ASAN_OPTIONS=$(ASAN_OPTIONS) UBSAN_OPTIONS=halt_on_error=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
		$(abspath $(BIN))/python -m pytest -q -p no:cacheprovider tests/ops/test_cpu_kernel.py tests/ops/test_cpu_kernel_layouts.py \
		tests/ops/test_cpu_kernel_in_torch.py tests/ops/test_pivots_of_samples.py tests/ops/test_found_kernel.py \
		tests/nn/test_key_masses.py tests/nn/test_local_mixing.py tests/nn/test_near_keys_kernel.py tests/nn/test_prefix_rows.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info out
