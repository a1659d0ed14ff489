# On a new machine, run make demo or make test. Both first install the package into .venv.

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
SCRIPTS := $(wildcard workers/controller/scripts/*/*.c)
SDK := $(wildcard workers/controller/sdk/*.h workers/controller/sdk/examples/*.c)
FOLDERS := $(PACKAGES) tests benchmarks

.PHONY: install image demo test test-quick test-paused test-long test-hostile test-clients model mutants fuzz chaos ray triton lint bench bench-peers clean
.DEFAULT_GOAL := install

install: $(INSTALLED)

# torch is installed first and alone, because it is most of the download. The installation of the package
# compiles the grammar guest and the GPU worker's native code.
define with_extra
test -x $(PY) || $(PYTHON) -m venv $(VENV)
$(PY) -m pip install --quiet $(TORCH)
$(PY) -m pip install --quiet --editable '.[$(1)]'
endef

# SGLang's parsers of answers are installed without dependencies, which would replace this project's
# versions of transformers and openai. pyproject.toml lists the packages that the parsers import. The tests
# import only the schema of Compose files from compose-viz, which needs none of its dependencies.
$(INSTALLED): pyproject.toml setup.py $(GUEST) $(NATIVE) $(SCRIPTS) $(SDK)
	$(call with_extra,dev)
	$(PY) -m pip install --quiet --no-deps 'llm-router-utils==0.8.1' 'compose-viz==0.3.5'
	touch $@

# Containerfile uses this target. It installs no test tools, and compiles the Python modules, because the
# image's user cannot write to their folders.
image:
	$(call with_extra,all)
	$(PY) -m compileall -q $(PACKAGES)

demo: install
	@$(PY) -m tokenbus.clients.demo

# There are two more test processes than cores, at most four, because tests of whole systems mostly wait. Each
# process needs 3 GiB of memory. A process without tests takes over tests of another process.
# make test ARGS='-k name' passes arguments to pytest. ARGS='-n 0' runs all tests in one process.
define processes
import os
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
print(max(1, min(4, os.cpu_count() + 2, memory // (3 << 30))))
endef
export processes
PYTEST := $(PY) -m pytest -n $$($(PYTHON) -c "$$processes") --dist worksteal --durations 20

test: install
	$(PYTEST) $(ARGS)

# Runs the tests that do not start processes, in about 85 seconds on two cores.
test-quick: install
	$(PYTEST) -m 'not process' $(ARGS)

# Makes all attacks of tests/hostile. make test makes one of three.
test-hostile: install
	ATTACKS=all $(PY) -m pytest -q tests/hostile $(ARGS)

# Runs all tests while random processes are stopped for random times: make test-paused SEED=7.
test-paused: install
	$(PY) -m tests.pauses --seed $(SEED) $(PYTEST) $(ARGS)

# Runs the property tests with twenty times as many examples.
test-long: install
	$(PYTEST) -m 'hypothesis or long' --hypothesis-profile long --timeout 7200 $(ARGS)

# Installs clients of other projects into build/clients, in the versions of tests/agents/environments,
# and runs them against a gateway: make test-clients CLIENTS='openai codex'. The default is all clients.
CLIENTS ?= $(sort $(patsubst tests/agents/with_%.py,%,$(wildcard tests/agents/with_*.py)))
test-clients: install
	$(PY) -m tests.agents.install $(CLIENTS)
	$(PY) -m pytest -p no:xdist $(CLIENTS:%=tests/agents/with_%.py) $(ARGS)

# Plays all runs of a small simulated system with up to two failures, first with one broker and then with
# two, in about five minutes on two cores: make model ARGS='--failures 3' takes hours.
model: install
	$(PY) -m tests.model.search $(ARGS)
	$(PY) -m tests.model.search --brokers 2 $(ARGS)

# Runs the broker's quick tests against each of some forty seeded faults: each must fail.
mutants: install
	$(PY) -m tests.mutants $(ARGS)

# Runs coverage-guided fuzzing: make fuzz TARGET=packing RUNS=1000000. tests/fuzz has the targets.
TARGET ?= packing
RUNS ?= 1000000

fuzz: install
	$(PY) -m pip install --quiet 'atheris>=3,<4'
	$(PY) -m tests.fuzz $(TARGET) --runs $(RUNS)

# Kills and stops processes under load: make chaos SECONDS=600 SEED=7. A seed has a fixed schedule.
SECONDS ?= 120
SEED ?= 1
chaos: install
	$(PY) -m tests.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# Installs Ray, runs workers on the nodes of a Ray cluster on this machine, and kills a node. Do not run
# this on a busy machine, because Ray's processes must start within 30 seconds.
ray: install
	$(PY) -m pip install --quiet --editable '.[ray]'
	$(PY) -m pytest -p no:xdist tests/cluster/ray_nodes.py $(ARGS)

# Installs Triton (285 MB), and tests the GPU kernels in Triton's interpreter on a CPU. make test skips
# these tests, because the interpreter must be chosen before Triton is imported.
triton: install
	$(PY) -m pip install --quiet $(TRITON)
	TRITON_INTERPRET=1 $(PYTEST) tests/workers/gpu/triton $(ARGS)
	$(PY) benchmarks/gpu_check.py --dry --stage 2 --results build/gpu_check_dry.jsonl

# The folders at the root are the subpackages of the namespace tokenbus. mypy reads them through links.
# It does not read tests/agents/programs, which run in environments with packages of their own.
lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@mkdir -p $(TYPECHECK)/tokenbus
	@for p in $(PACKAGES); do ln -sfn ../../../$$p $(TYPECHECK)/tokenbus/$$p; done
	MYPYPATH=$(TYPECHECK) $(PY) -m mypy --strict $(PACKAGES:%=-p tokenbus.%)
	@MYPYPATH=$(TYPECHECK) $(PY) -m mypy --config-file= --ignore-missing-imports \
		--namespace-packages --explicit-package-bases \
		$(filter-out tests/agents/programs/%,$(wildcard tests/*.py tests/*/*.py tests/*/*/*.py \
			tests/*/*/*/*.py tests/*/*/*/*/*.py benchmarks/*.py))
	$(PY) -m tests.lint.sentences
	$(PY) -m tests.lint.lifecycle

# Runs all benchmarks except schemas.py, which takes long and needs an archive of MaskBench, and
# gpu_check.py, which needs a GPU.
# xgrammar is installed without dependencies, because triton has a gigabyte and is not needed on a CPU.
bench: install
	$(PY) -m pip install --quiet --no-deps 'xgrammar==0.2.8' 'apache-tvm-ffi'
	@set -e; for b in $(filter-out benchmarks/_% benchmarks/schemas.py benchmarks/gpu_check.py,$(wildcard benchmarks/*.py)); do echo "== $$b"; $(PY) $$b; done

# Builds llama.cpp's server for benchmarks/serving.py and programs.py, once, in about ten minutes.
bench-peers: install
	$(PY) benchmarks/_llamacpp.py

clean:
	rm -f grammars/guest/*.wasm clients/console/*.wasm
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(FOLDERS) -name __pycache__ -type d -prune -exec rm -rf {} +
