# make demo and make test are all that a fresh machine needs: both install first, into .venv.

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
PY := $(VENV)/bin/python
TORCH := torch==2.13.0
TRITON := triton==3.6.0
INSTALLED := $(VENV)/.installed
TYPECHECK := build/typecheck
PACKAGES := protocol transport broker workers clients grammars inprocess
GUEST := $(wildcard grammars/guest/*.c grammars/guest/*.h)
NATIVE := $(wildcard workers/gpu/model/cpu_native/*.c workers/gpu/model/cpu_native/*.h)
SDK := $(wildcard workers/controller/sdk/*.h workers/controller/sdk/examples/*.c)
FOLDERS := $(PACKAGES) tests benchmarks

.PHONY: install image demo test test-quick test-paused test-long fuzz chaos ray triton lint bench bench-peers clean
.DEFAULT_GOAL := install

install: $(INSTALLED)

# torch goes first and alone: it is most of the download, and what follows then finds it there.
# The guest that runs grammars and the GPU worker's native code are compiled with the package.
define with_extra
test -x $(PY) || $(PYTHON) -m venv $(VENV)
$(PY) -m pip install --quiet $(TORCH)
$(PY) -m pip install --quiet --editable '.[$(1)]'
endef

# SGLang's parsers of answers without what their package depends on, which would replace the
# versions of transformers and openai here; pyproject.toml has what they import.
$(INSTALLED): pyproject.toml setup.py $(GUEST) $(NATIVE) $(SDK)
	$(call with_extra,dev)
	$(PY) -m pip install --quiet --no-deps 'llm-router-utils==0.8.1'
	touch $@

# What Containerfile makes of a bare Python: no tools for tests, and modules that are compiled, as the
# image's user can write to none of their folders.
image:
	$(call with_extra,all)
	$(PY) -m compileall -q $(PACKAGES)

demo: install
	@$(PY) -m tokenbus.clients.demo

# One process of tests more than there are cores, as tests of whole systems mostly wait; with 3 GiB of
# memory for each. Each takes over tests of another that has more of them left.
# make test ARGS='-k name' passes arguments on; ARGS='-n 0' runs all in one process.
define processes
import os
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
print(max(1, min(4, os.cpu_count() + 1, memory // (3 << 30))))
endef
export processes
PYTEST := $(PY) -m pytest -n $$($(PYTHON) -c "$$processes") --dist worksteal --durations 20

test: install
	$(PYTEST) $(ARGS)

# What starts no process, in about 85 seconds on two cores.
test-quick: install
	$(PYTEST) -m 'not process' $(ARGS)

# All of them, while random processes of theirs are stopped for random times: make test-paused SEED=7.
test-paused: install
	$(PY) -m tests.pauses --seed $(SEED) $(PYTEST) $(ARGS)

# The property tests, with twenty times the examples.
test-long: install
	$(PYTEST) -m 'hypothesis or long' --hypothesis-profile long --timeout 7200 $(ARGS)

# Coverage-guided: make fuzz TARGET=packing RUNS=1000000. tests/fuzz has the targets.
TARGET ?= packing
RUNS ?= 1000000

fuzz: install
	$(PY) -m pip install --quiet 'atheris>=3,<4'
	$(PY) -m tests.fuzz $(TARGET) --runs $(RUNS)

# Processes are killed and stopped under load: make chaos SECONDS=600 SEED=7. The seed gives the same
# schedule again.
SECONDS ?= 120
SEED ?= 1
chaos: install
	$(PY) -m tests.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# Workers on the nodes of a Ray cluster on this machine, one of which is killed; installs Ray. Not while
# the machine is busy: Ray gives its processes 30 seconds to start.
ray: install
	$(PY) -m pip install --quiet --editable '.[ray]'
	$(PY) -m pytest -p no:xdist tests/cluster/ray_nodes.py $(ARGS)

# The kernels for GPUs in Triton's interpreter, on a CPU; installs Triton (285 MB). make test skips
# these tests, as the interpreter must be chosen before Triton is imported.
triton: install
	$(PY) -m pip install --quiet $(TRITON)
	TRITON_INTERPRET=1 $(PYTEST) tests/workers/gpu/triton $(ARGS)

# The folders at the root are the subpackages of the namespace tokenbus; mypy sees them through links.
lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@mkdir -p $(TYPECHECK)/tokenbus
	@for p in $(PACKAGES); do ln -sfn ../../../$$p $(TYPECHECK)/tokenbus/$$p; done
	MYPYPATH=$(TYPECHECK) $(PY) -m mypy --strict $(PACKAGES:%=-p tokenbus.%)
	MYPYPATH=$(TYPECHECK) $(PY) -m mypy --config-file= --ignore-missing-imports \
		--namespace-packages --explicit-package-bases \
		$(wildcard tests/*.py tests/*/*.py tests/*/*/*.py tests/*/*/*/*.py tests/*/*/*/*/*.py \
			benchmarks/*.py)
	$(PY) -m tests.lint.sentences

# Not schemas.py, which needs an archive of MaskBench and takes long, and not gpu_check.py, which needs
# a GPU.
# xgrammar without what it depends on: triton is a gigabyte, and is not needed on a CPU.
bench: install
	$(PY) -m pip install --quiet --no-deps 'xgrammar==0.2.8' 'apache-tvm-ffi'
	@set -e; for b in $(filter-out benchmarks/_% benchmarks/schemas.py benchmarks/gpu_check.py,$(wildcard benchmarks/*.py)); do echo "== $$b"; $(PY) $$b; done

# llama.cpp's server, which benchmarks/serving.py measures beside: some ten minutes, once.
bench-peers: install
	$(PY) benchmarks/_llamacpp.py

clean:
	rm -f grammars/guest/*.wasm clients/console/*.wasm
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(FOLDERS) -name __pycache__ -type d -prune -exec rm -rf {} +
