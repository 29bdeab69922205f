# Needs Python 3.10 to 3.13 and make. Everything runs on a CPU; nothing is installed outside this folder.
PYTHON ?= python3
DEMO_ARGS ?= --verify
TORCH ?= 2.15.0
PYTEST_ARGS ?=

PIP_FLAGS := -qq --disable-pip-version-check
SOURCES := $(wildcard ds_mla_ulysses tests examples benchmarks setup.py)
FREE_PORT := import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
VERSIONS := import runpy, sys; v = runpy.run_path("ds_mla_ulysses/version.py")
# The lowest supported releases of all required packages, and of peft, which the tests need, as name==version.
FLOORS = $$($(PYTHON) -c '$(VERSIONS); peft = {"peft": v["OPTIONAL_REQUIREMENTS"]["peft"]}; print(*(f"{name}=={lowest}" for name, (lowest, _) in (v["REQUIREMENTS"] | peft).items()))')

.PHONY: help demo test test-fast matrix families lint docs wheel test-floor test-torch clean

help:
	@echo "make demo        train a small model on two processes and compare it with one (DEMO_ARGS=$(DEMO_ARGS))"
	@echo "make test        run the whole test suite (part of it: PYTEST_ARGS=tests/unit)"
	@echo "make test-fast   run the tests that need no launcher and at most two processes"
	@echo "make matrix      run the rest of the full products of parameters, and store the result in tests/results"
	@echo "make families    check every language model of transformers, store the result, and write docs/supported-models.md"
	@echo "make lint        ruff (rules and formatting) and mypy"
	@echo "make docs        build the documentation in site/; warnings are errors"
	@echo "make wheel       build the sdist and the wheel in dist/ and check the wheel in a new environment"
	@echo "make test-floor  run tests/hf and tests/deepspeed with the lowest supported releases"
	@echo "make test-torch  run tests/hf with another release of torch (TORCH=$(TORCH))"
	@echo "make clean       remove environments, build outputs and caches"
	@echo "The first target makes .venv (2 minutes and 2.5 GB with a CPU build of torch, more with CUDA). Another Python: make PYTHON=python3.12 test"

.venv/stamp: setup.py ds_mla_ulysses/version.py constraints.txt
	@echo "Making .venv with torch, deepspeed, transformers and trl (about 2 minutes, once)"
	@$(PYTHON) -c '$(VERSIONS); low, high = v["PYTHON"]; sys.exit(not low <= sys.version_info[:2] <= high and "Python %d.%d to %d.%d is needed, $(PYTHON) is %d.%d: make PYTHON=..." % (*low, *high, *sys.version_info[:2]))'
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@# torch comes first and pinned, so that nothing after it looks for a newer release with gigabytes of CUDA
	@.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	@.venv/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/stamp
	@echo "Training on two processes (about 1 minute)"
	@DS_ACCELERATOR=cpu PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/deepspeed --num_gpus 2 --master_port $$($(PYTHON) -c '$(FREE_PORT)') examples/train_loop.py $(DEMO_ARGS)

test: .venv/stamp
	@echo "Running the test suite (about 18 minutes on 2 cores)"
	@.venv/bin/python -m pytest -m "not matrix" $(PYTEST_ARGS)

test-fast: .venv/stamp
	@echo "Running the fast tests (less than 3 minutes on 2 cores)"
	@RANKS_AT_MOST=2 .venv/bin/python -m pytest -m "not launcher and not four_ranks and not slow and not matrix" $(PYTEST_ARGS)

matrix: .venv/stamp
	@echo "Running the rest of the full products of parameters, which make test leaves out (about 5 minutes on 2 cores)"
	@.venv/bin/python -m pytest -m matrix $(PYTEST_ARGS) --junitxml build/matrix.xml
	@.venv/bin/python tests/matrix_result.py build/matrix.xml tests/results

families: .venv/stamp
	@echo "Checking every language model of transformers on two processes (about 10 minutes on 2 cores)"
	@.venv/bin/python tests/families/sweep.py tests/results/families_$$(date +%F).json
	@.venv/bin/python tests/families/table.py

lint: .venv/stamp
	@echo "Checking rules, formatting and types (less than 1 minute)"
	@.venv/bin/ruff check $(SOURCES)
	@.venv/bin/ruff format --check $(SOURCES)
	@.venv/bin/mypy

docs: .venv/stamp
	@echo "Building the documentation in site/ (seconds)"
	@.venv/bin/mkdocs build --strict

# The wheel is built from the sdist. Its environment is made in a temporary folder and borrows the dependencies of
# .venv through a .pth file, which does not activate the editable installation of this clone.
wheel: .venv/stamp
	@echo "Building the sdist and the wheel, and checking the wheel on two processes (less than 1 minute)"
	@rm -rf dist build *.egg-info
	@.venv/bin/python -m build --outdir dist .
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	.venv/bin/python -m venv --without-pip "$$folder/venv"; \
	.venv/bin/python -m pip --python "$$folder/venv/bin/python" install $(PIP_FLAGS) --no-deps dist/*.whl; \
	.venv/bin/python -c '$(SITE_PACKAGES)' > "$$("$$folder/venv/bin/python" -c '$(SITE_PACKAGES)')/dependencies.pth"; \
	cp tests/wheel_check.py "$$folder"; \
	cd "$$folder"; \
	unset PYTHONPATH; \
	venv/bin/ds-mla-ulysses plan --model deepseek-v3 --sp 2 --tokens 4096 > plan.txt; \
	DS_ACCELERATOR=cpu venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 wheel_check.py
	@ls -l dist

.venv-floor/stamp: setup.py ds_mla_ulysses/version.py constraints.txt
	@echo "Making .venv-floor with the lowest supported releases:" $(FLOORS) "(about 2 minutes, once)"
	@test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	@.venv-floor/bin/python -m pip install $(PIP_FLAGS) pytest $(FLOORS)
	@.venv-floor/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

test-floor: .venv-floor/stamp
	@echo "Running tests/hf and tests/deepspeed with the lowest supported releases (about 8 minutes on 2 cores)"
	@.venv-floor/bin/python -m pytest tests/hf tests/deepspeed -m "not matrix" $(PYTEST_ARGS)

.venv-torch-$(TORCH)/stamp: setup.py ds_mla_ulysses/version.py constraints.txt
	@echo "Making $(@D) (gigabytes, if pip finds a build with CUDA only)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) torch==$(TORCH)
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(@D)/constraints.txt -e '.[test]'
	@touch $@

test-torch: .venv-torch-$(TORCH)/stamp
	@echo "Running tests/hf with torch $(TORCH) (about 8 minutes on 2 cores)"
	@$(<D)/bin/python -m pytest tests/hf -m "not matrix" $(PYTEST_ARGS)

clean:
	@echo "Removing environments, build outputs and caches"
	@rm -rf .venv .venv-floor .venv-torch-* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
