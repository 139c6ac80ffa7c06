# make demo: train a small GPT on two ranks, with DDP + AdamW and with shardstep.   make test: the tests.
# make quick: one or two of them for each topic, in two minutes: at every change.
# make test-slow: the rest of them, of checkpoints, examples and docs.
# make test-gpu: those that need a GPU, with a Python that has torch for CUDA (GPU_PYTHON).
# make test-third-party: optimizers of other packages against the plain ones; third-party-table writes docs/optimizers.md.
# make docs: the site, in site/.   make dist: a wheel and an sdist, in dist/; test-wheel tries the wheel elsewhere.
# make test-oldest, test-newest: the tests on the oldest and the newest torch and Python that are supported.
# make test-frameworks: Accelerate, Hugging Face's Trainer, Lightning, Ray Train; frameworks installs them.
# make test-kernel: the kernels, in Triton's interpreter.
# make fuzz: many random programs against the plain optimizer.   make check: formatting, lint, types, then the tests.
# Everything lives in .venv; nothing is installed twice.
# Any Python from 3.10 on, 3.11 first because the pinned packages were tried with it; PYTHON=... chooses another.
first-python = $(firstword $(foreach name,$(1),$(shell \
	$(name) -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $(name))))
PYTHON ?= $(call first-python,python3.11 python3.12 python3.13 python3.10 python3 python)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo quick test test-slow test-oldest test-newest test-gpu test-kernel fuzz test-third-party third-party-table frameworks \
	test-frameworks dist test-wheel check lint docs bench bench-gpu clean

demo: $(READY)
	$(BIN)/shardstep demo $(ARGS)

# Two processes side by side, as ranks wait for each other half of their time: each begins with half of the tests, and takes
# over what the other has left when it is done. PARALLEL= runs one after the other.
PARALLEL ?= -n 2 --dist worksteal

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

# Five hundred tests of tests/quick.txt: all of planning, and one or two of every topic on one and two ranks. A line is a
# file, a test or one case of it; pytest says so if it is not there.
quick: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) @tests/quick.txt $(ARGS)

# Checkpoints that are killed and damaged, the reshard matrix, conversions, and every example and block of code in the docs.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(PARALLEL) $(ARGS)

# The ends of what is supported: pyproject.toml's oldest torch with the oldest Python, and the newest of both. Each has an
# environment of its own, of 5 GB: on Linux these builds of torch bring CUDA along.
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
pyenv-python = $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1))
OLDEST_PYTHON ?= $(call first-python,python3.10 $(call pyenv-python,3.10) $(PYTHON))
NEWEST_PYTHON ?= $(call first-python,python3.14 python3.13 $(call pyenv-python,3.13) $(PYTHON))

test-oldest: .torch-$(OLDEST_TORCH)/.ready
	.torch-$(OLDEST_TORCH)/bin/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

test-newest: .torch-$(NEWEST_TORCH)/.ready
	.torch-$(NEWEST_TORCH)/bin/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

.torch-$(OLDEST_TORCH)/.ready: WITH = $(OLDEST_PYTHON)
.torch-$(NEWEST_TORCH)/.ready: WITH = $(NEWEST_PYTHON)
.torch-%/.ready: requirements.txt pyproject.toml
	rm -rf $(@D)
	$(WITH) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' requirements.txt >$(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --requirement $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Where torch has brought no Triton. It goes beside .venv, so that all other tests run as they do without it.
KERNEL := .kernel
test-kernel: $(KERNEL)/.ready
	PYTHONPATH=$(KERNEL) $(BIN)/python -m pytest tests/stepping/test_kernel.py $(ARGS)

$(KERNEL)/.ready: requirements-kernel.txt $(READY)
	rm -rf $(KERNEL)
	mkdir $(KERNEL)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps --target $(KERNEL) \
		--requirement requirements-kernel.txt
	touch $@

# Three hundred random programs instead of thirty.
fuzz: $(READY)
	SHARDSTEP_FUZZ=300 $(BIN)/python -m pytest tests/engine/test_fuzz.py $(ARGS)

# Nothing is installed for it: the interpreter with CUDA has what it needs, and its torch is not the one that is pinned.
GPU_PYTHON ?= python3
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) tests/gpu/run_gpu.py $(ARGS)

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

# Beside .venv, not in it: what `make test` runs with stays what requirements.txt says.
THIRD_PARTY := .third-party
test-third-party: $(THIRD_PARTY)/.ready
	PYTHONPATH=$(THIRD_PARTY) $(BIN)/python -m pytest tests/optimizers/test_third_party.py $(ARGS)

third-party-table: $(THIRD_PARTY)/.ready
	PYTHONPATH=$(THIRD_PARTY):tests/support $(BIN)/python tests/support/third_party.py

$(THIRD_PARTY)/.ready: requirements-third-party.txt $(READY)
	rm -rf $(THIRD_PARTY)
	$(BIN)/python -m pip install --quiet --no-deps --target $(THIRD_PARTY) --requirement requirements-third-party.txt
	touch $@

# The site, in site/. A warning is an error.
DOCS := .docs
docs: $(DOCS)/.ready
	PYTHONPATH=$(DOCS) $(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs site
	@echo "The site is in site/index.html"

$(DOCS)/.ready: requirements-docs.txt $(READY)
	rm -rf $(DOCS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(DOCS) --requirement requirements-docs.txt
	touch $@

# Beside .venv as well, and beside the optimizers: a framework and an optimizer may want different versions of a package.
FRAMEWORKS := .frameworks
frameworks: $(FRAMEWORKS)/.ready

test-frameworks: $(FRAMEWORKS)/.ready
	PYTHONPATH=$(FRAMEWORKS) $(BIN)/python -m pytest tests/integrations $(ARGS)

$(FRAMEWORKS)/.ready: requirements-frameworks.txt $(READY)
	rm -rf $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(FRAMEWORKS) --requirement requirements-frameworks.txt
	touch $@

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build

# As a user would: an environment with nothing of this folder, and what the wheel asks for, in the versions that are pinned.
WHEEL := .wheel
test-wheel: dist
	rm -rf $(WHEEL)
	$(BIN)/python -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --constraint requirements.txt "$$(ls dist/*.whl)[cli]"
	SHARDSTEP_WHEEL=$(WHEEL) $(BIN)/python -m pytest tests/package/test_wheel.py $(ARGS)

check: lint test test-slow test-kernel

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/drop_in.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/fast_lane.py
	$(BIN)/python benchmarks/host_work.py
	$(BIN)/python benchmarks/scale.py

$(VENV):
	@test -n "$(PYTHON)" || { echo "shardstep needs Python 3.10 or newer with its venv module, and none is found here:" \
		"install one (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp is newer than what it was made from: an edited requirements.txt or pyproject.toml installs again, nothing else does.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(MAKE) --no-print-directory $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

clean:
	rm -rf $(VENV) .torch-* $(WHEEL) $(KERNEL) $(THIRD_PARTY) $(FRAMEWORKS) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
