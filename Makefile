# One-word commands. Each one sets up .venv by itself the first time, and again when pyproject.toml changes.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
NIGHTLY ?= not nightly

PY := .venv/bin/python
# the name holds the folder, so that a moved or copied checkout is set up anew
STAMP := .venv/.ready-$(shell pwd | cksum | cut -d' ' -f1)
TRACKERS := .venv-trackers/.ready
TRANSFORMERS4 := .venv-transformers4/.ready
VLLM := .venv-vllm/.ready
VLLM_TESTS := tests/rollout/contract tests/rollout/over_vllm

# Threads of one test process: as many test processes run as there are cores to use.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(PY) -m pytest

.PHONY: help setup demo package test test-shared test-vllm test-gpu test-faults nightly trackers transformers4 vllm check format clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv (versions from constraints.txt); nothing to do the second time
	@echo "setup: .venv is ready"

$(STAMP): pyproject.toml constraints.txt scripts/setup
	@scripts/setup "$(PYTHON)" "$(STAMP)"

demo: $(STAMP)  ## a small model learns to think, on the CPU, in minutes: make demo ARGS="seed=7"
	@$(PY) -m dapo demo $(ARGS)

test: $(STAMP)  ## all tests but the GPU's, the nightly ones and those over ../shared
	@scripts/system_package chromium chromium "the tests of the page, a browser that"
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m "not gpu and not nightly and not shared and not vllm" $(ARGS)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-vllm)

test-shared: $(STAMP)  ## tests over the shared cases and data in ../shared
	@test -d ../shared || { echo "make test-shared: the folder ../shared is missing. It holds the project's shared" \
		"cases and data; 'make test' does not need it." >&2; exit 1; }
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m "shared and not gpu and not nightly and not vllm" $(ARGS)

# where vLLM has no build, scripts/vllm_env says so
test-vllm: $(VLLM)  ## tests over vLLM, which "make test" ends with
	@[[ ! -x .venv-vllm/bin/python ]] || $(TEST_ENV) .venv-vllm/bin/python -m pytest \
		-m "vllm and not gpu and $(NIGHTLY)" $(if $(ARGS),$(ARGS),$(VLLM_TESTS))

test-gpu: $(STAMP)  ## tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

test-faults: $(STAMP)  ## some sixty faults done to runs, and who survived; ARGS=SIGTERM for those named so
	@$(TEST_ENV) PYTHONPATH=tests/support $(PY) tests/faults/fault_table.py $(ARGS)

nightly: $(STAMP) trackers transformers4  ## tests too slow for CI
	@$(PYTEST) -m "nightly and not gpu and not vllm" $(ARGS)
	@$(if $(ARGS),,$(TEST_ENV) .venv-trackers/bin/python -m pytest -m nightly -k "not verifiers" \
		tests/data/test_procedural.py tests/environments/test_other_libraries.py)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-vllm NIGHTLY=nightly)

package: $(STAMP)  ## build wheel and sdist, install the wheel in an empty environment, and use it there
	@scripts/package $(ARGS)

trackers: $(TRACKERS)  ## make .venv-trackers and .venv-verifiers: packages that are heavy, for make nightly

# What .venv has is seen from .venv-trackers, too; its own packages come first. verifiers pins other ones: it is alone.
$(TRACKERS): $(STAMP)
	@echo "setup: installing wandb, mlflow, trackio, reasoning-gym and openenv into .venv-trackers"
	@$(PY) -m venv .venv-trackers
	@.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check \
		wandb mlflow trackio "reasoning-gym<1" "openenv<1"
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv-trackers/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/dapo-venv.pth"
	@$(PY) -m venv .venv-verifiers
	@.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check "verifiers>=0.4,<0.5" uv
	@touch $@

transformers4: $(TRANSFORMERS4)  ## make .venv-transformers4: Transformers 4, which reads what runs write, for make nightly

$(TRANSFORMERS4): $(STAMP)
	@echo "setup: installing transformers 4.57.6 into .venv-transformers4"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-transformers4 --upgrade \
		transformers==4.57.6 'huggingface_hub<1' 'tokenizers>=0.22,<=0.23' requests urllib3 idna certifi \
		charset_normalizer || { echo "make transformers4: the package index cannot be reached" >&2; exit 1; }
	@touch $@

vllm: $(VLLM)  ## make .venv-vllm: vLLM's CPU build, with a dapo command of its own

$(VLLM): $(STAMP) scripts/vllm_env
	@scripts/vllm_env $(PY) $@

check: $(STAMP)  ## format, lint, types, and no more lines of code than before (scripts/lines.py)
	@$(PY) -m ruff format --check --quiet . || { echo "make check: some files are not formatted; run 'make format'" >&2; \
		$(PY) -m ruff format --check .; exit 1; }
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) scripts/lines.py

format: $(STAMP)  ## format the code and mend what the linter can mend
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

clean:  ## remove .venv and caches; runs/ stays
	@rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
