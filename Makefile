# Needs Python 3.10 to 3.13 and make. Everything runs on a CPU; nothing is installed outside this folder.
PYTHON ?= python3
DEMO_ARGS ?= --verify
PYTEST_ARGS ?=

PIP_FLAGS := -qq --disable-pip-version-check
SOURCES := $(wildcard ds_mla_ulysses tests examples benchmarks setup.py)
FREE_PORT := import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])
# The lowest releases that setup.py allows, as name==version.
FLOORS = $$(sed -n 's/^ *"\(deepspeed\|transformers\|accelerate\)>=\([0-9.]*\).*/\1==\2/p' setup.py)

.PHONY: help demo test lint test-floor clean

help:
	@echo "make demo        train a small model on two processes and compare it with one (DEMO_ARGS=$(DEMO_ARGS))"
	@echo "make test        the whole test suite"
	@echo "make lint        ruff: rules and formatting"
	@echo "make test-floor  tests/hf and tests/deepspeed with the oldest supported releases"
	@echo "make clean       remove environments and caches"
	@echo "The first of them makes .venv (2 minutes and 2.5 GB with a CPU build of torch, more with CUDA). Another Python: make PYTHON=python3.12 test"

.venv/stamp: setup.py constraints.txt
	@echo "Making .venv with torch, deepspeed, transformers and trl (about 2 minutes, once)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v < (3, 14) and "Python 3.10 to 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=..." % v)'
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@# torch first and pinned: what comes next must not look for a newer one, with gigabytes of CUDA
	@.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch==2.13.0
	@.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $@

demo: .venv/stamp
	@echo "Training on two processes (about 1 minute)"
	@DS_ACCELERATOR=cpu PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/deepspeed --num_gpus 2 --master_port $$($(PYTHON) -c '$(FREE_PORT)') examples/train_loop.py $(DEMO_ARGS)

test: .venv/stamp
	@echo "Running the test suite (about 14 minutes on 2 cores)"
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

lint: .venv/stamp
	@echo "Checking rules and formatting (seconds)"
	@.venv/bin/ruff check $(SOURCES)
	@.venv/bin/ruff format --check $(SOURCES)

.venv-floor/stamp: setup.py constraints.txt
	@echo "Making .venv-floor with the oldest supported releases:" $(FLOORS) "(about 2 minutes, once)"
	@test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	@.venv-floor/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0 pytest $(FLOORS)
	@.venv-floor/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

test-floor: .venv-floor/stamp
	@echo "Running tests/hf and tests/deepspeed with the oldest supported releases (about 6 minutes on 2 cores)"
	@.venv-floor/bin/python -m pytest tests/hf tests/deepspeed $(PYTEST_ARGS)

clean:
	@echo "Removing environments, build outputs and caches"
	@rm -rf .venv .venv-floor build dist *.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
