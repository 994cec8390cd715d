# One command for each wish; `make help` lists them. A bare machine needs CPython 3.10 or later, gcc and make: the rest
# is set up in .venv on first use. PYTHON=... chooses the interpreter, CC=... the compiler. What needs an environment of
# its own or another build is a session of noxfile.py.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
NOX := $(VENV)/bin/nox -s
# What plain Python says of the canonical order is worked out once for all builds.
export PAGEPOOL_TEST_ANSWERS ?= $(CURDIR)/build/answers
SESSIONS := test-torch test-models test-clients test-transfer test-ray test-vllm debug clang san-c san-python san-threads aarch64 \
	wheel test-wheel test-sdist test-free-threaded manylinux cibuildwheel workflows

.PHONY: help demo demo-generate test test-all test-kernels ci-models ci-kernels cluster-demo load-test model-test preemption-test pool-test store-test build \
	bench figures lint docs format san san-libraries sessions ci clean $(SESSIONS)
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

demo: build  ## replay 200 requests of a recorded hour with attention on real memory
	$(PY) -m pagepool replay --requests 200 --attend qwen2.5-0.5b
test: build $(VENV)/.test  ## the tests, on up to 8 cores; kernels with a part of their cases
	$(PY) -m pytest -q -n auto --maxprocesses 8 tests
test-all: build $(VENV)/.test  ## every case on every instruction set, long random programs, sanitizers
	PAGEPOOL_TEST_SHARE=1 $(PY) -m pytest -q -n auto --maxprocesses 8 tests
	PAGEPOOL_TEST_SHARE=1 $(MAKE) --no-print-directory model-test preemption-test pool-test san
test-kernels: build $(VENV)/.test  ## the kernel part of test-all
	PAGEPOOL_TEST_SHARE=1 $(PY) -m pytest -q -n auto --maxprocesses 8 tests/attention tests/capi
	$(PY) .ci/kernels.py --passed
model-test: build $(VENV)/.test  ## a long random program on the memory, compared with reference: SEED=1 OPS=10000000
	PYTHONPATH=. $(PY) tests/model_run.py --ops $(or $(OPS),10000000) $(if $(SEED),--seed $(SEED))
preemption-test: build $(VENV)/.test  ## a pool that is full at every step, for STEPS=1000000; SEED=N repeats a run
	PYTHONPATH=. $(PY) tests/scheduling/preemption_run.py --steps $(or $(STEPS),1000000) $(if $(SEED),--seed $(SEED))
pool-test: build $(VENV)/.test  ## processes of a shared pool that race and are killed at random, for SECONDS=600
	PAGEPOOL_RACE_SECONDS=$(or $(SECONDS),600) $(PY) -m pytest -q -rP tests/shared/test_shared_races.py -k "no_page and processes"
store-test: build $(VENV)/.test  ## 4,000 power losses of the prefix store, every byte of its index, a kill at every write
	PAGEPOOL_TEST_SHARE=1 $(PY) -m pytest -q tests/prefix/test_store_damage.py tests/prefix/test_store_failing_disk.py
bench: build $(VENV)/.test  ## the benchmarks, ours beside reference and numpy
	$(PY) bench/figures.py
	$(PY) bench/limit.py --shape S1
	$(PY) -m pytest -q bench --benchmark-columns=min,median,ops --benchmark-group-by=group
figures: build $(VENV)/.tools  ## measure beside the peers and draw the README's pictures; PEERS=DIR has their environments
	$(PY) bench/pictures.py --peers $(or $(PEERS),build/peers)
lint: build $(VENV)/.tools  ## ruff, import-linter, mypy, stubtest, cython-lint, the text
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && PYTHONPATH=. $(VENV)/bin/lint-imports && $(PY) -m mypy
	$(PY) -m mypy.stubtest pagepool --mypy-config-file pyproject.toml \
		--allowlist tests/packaging/stubtest_allowlist.txt --ignore-unused-allowlist
	PATH=$(abspath $(VENV))/bin:$$PATH cython-lint $$(git ls-files '*.pyx' '*.pxd' 2>/dev/null || find pagepool tests -name '*.p[yx][xd]')
	$(PY) .ci/prose.py
docs: build $(VENV)/.tools  ## the guide and the reference as HTML, in build/docs; warnings are errors
	$(PY) -m sphinx -q -E -n -W --keep-going docs build/docs
format: $(VENV)/.tools  ## write Python as ruff wants it
	$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

demo-generate: build $(VENV)/.nox  ## write Python with the tiny model of the repository
	$(NOX) test-models -- -m pagepool generate "$$(printf 'class Reader:\n    def __init__(self, ')" \
		'def read_file(path):' 'import' --max-new-tokens 80 --temperature 0.5 --seed 1
load-test: build $(VENV)/.nox  ## 8 clients that cancel, leave and give up, for SECONDS=600; ATTACK=5: also under attack
	$(NOX) test-models -- bench/load.py --seconds $(or $(SECONDS),600) $(if $(ATTACK),--attack $(ATTACK))
cluster-demo: build $(VENV)/.nox  ## a burst on three engines, one killed in the middle: a table and a picture; RUNS=1
	$(NOX) test-ray -- bench/cluster.py --runs $(or $(RUNS),1)
ci-models: build $(VENV)/.nox
	QUICK=1 $(NOX) test-models && $(MAKE) --no-print-directory demo-generate
ci-kernels: build $(VENV)/.test
	$(PY) .ci/kernels.py || $(MAKE) --no-print-directory test-kernels

$(SESSIONS): build $(VENV)/.nox $(VENV)/.test
	$(NOX) $@
sessions: $(VENV)/.nox  ## list the sessions: other builds, other environments, packages
	$(VENV)/bin/nox -l
san: san-c san-python san-threads  ## C programs, memory, kernels and threads, sanitized
san-c san-python san-threads: san-libraries
san-libraries: build  # once, for the sessions that run side by side
	for kind in address,undefined thread; do PAGEPOOL_SANITIZE=$$kind $(PY) setup.py -q build_clib || exit 1; done
wheel: $(VENV)/.tools
test-wheel test-sdist manylinux: wheel

build: $(VENV)/.build  ## compile in place what has changed
	$(PY) setup.py -q build_ext --inplace

# What a missing piece of the machine means, in one sentence each.
$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: $(PYTHON) is not CPython 3.10 or later; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module with ensurepip; install it (Debian: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { \
		echo "make: $(PYTHON) has no C headers; install them (Debian: apt install python3-dev)"; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || { \
		echo "make: the C compiler $(CC) is missing; install gcc or choose one with: make CC=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) && touch $@

# Packages are installed a group at a time, when a target first needs the group; one after another, whatever -j says.
GROUP_build := build run
GROUP_test := test test-optional
GROUP_nox := sessions
GROUP_tools := lint package plot docs
$(VENV)/.build: $(VENV)/.venv
$(VENV)/.test: $(VENV)/.build
$(VENV)/.nox: $(VENV)/.test
$(VENV)/.tools: $(VENV)/.nox
$(VENV)/.build $(VENV)/.test $(VENV)/.nox $(VENV)/.tools: $(VENV)/.%: pyproject.toml .ci/requirements.py
	$(PY) .ci/requirements.py $(GROUP_$*) > $@.txt && $(PY) -m pip install -q --disable-pip-version-check -r $@.txt && touch $@

ci:  ## all that continuous integration checks
	bash .ci/run
clean:  ## everything that was built, the environment included
	rm -rf build dist $(VENV) *.egg-info pagepool/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find pagepool tests bench \( -name '__pycache__' -o -name '*.so' \) -prune -exec rm -rf {} +
