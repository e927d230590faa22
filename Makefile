# Both targets do all the set-up themselves: a virtual environment in .venv, installed from the project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP = $(VENV)/.installed-$(1)

.PHONY: demo test test-all lint types check bench gpu hub1 docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(call STAMP,run): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(call STAMP,test): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	@touch $@ $(call STAMP,run)

demo: $(call STAMP,run)
	$(BIN)/lora-merge demo demo

lint: $(call STAMP,test)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: types-linux types-win32 types-darwin

types-%: $(call STAMP,test)
	$(BIN)/mypy --platform $* --cache-dir .mypy_cache/$*

test: $(call STAMP,test)
	$(MAKE) -j 2 lint types  # each uses one core
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal  # compiled once for all processes

# Every lane: full products, many examples with new seeds, builds, the site, the browser.
test-all: $(call STAMP,test)
	$(MAKE) -j 2 lint types
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= LORA_MERGE_TESTS=all \
	  $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not bench and not gpu'

# The older of the two series of huggingface_hub that the extra `hub` allows; the other tests use the newer one.
hub1: $(call STAMP,test)
	$(BIN)/python -m pip install --quiet --target $(VENV)/hub1 'huggingface_hub>=1.1,<2'
	PYTHONPATH=$(VENV)/hub1 $(BIN)/python -m pytest -q -m 'slow or not slow' tests/sources/test_hub.py tests/sources/test_hub_upload.py tests/sources/test_url.py

docs: $(call STAMP,test)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file configs/site/mkdocs.yml

bench: $(call STAMP,test)
	$(BIN)/python -m tests.bench

# A Python that has all that is needed is used as it is: machines with GPUs have their own torch, and often no network.
GPU_MINUTES ?= 29
GPU_OPTIONS ?=

gpu:
	if $(PYTHON) -m tests.gpu.ready; then python=$(PYTHON); \
	elif $(MAKE) $(call STAMP,test); then python=$(BIN)/python; else python=$(PYTHON); fi; \
	$$python -m tests.gpu --minutes $(GPU_MINUTES) $(GPU_OPTIONS)

clean:
	rm -rf $(VENV) demo build dist *.egg-info
