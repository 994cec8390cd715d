# One command for each wish; `make help` lists them. A bare machine needs CPython 3.10 or later, gcc and make: the rest
# is set up in .venv on first use. PYTHON=... chooses the interpreter, CC=... the compiler.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CAPI_FLAGS := -std=c11 -D_POSIX_C_SOURCE=200809L -g -O1 -Wall -Wextra -ffp-contract=off -pthread \
	-Iinclude -Ipagepool/csrc
CSRC := $(wildcard pagepool/csrc/*.c)
HEADERS := $(wildcard include/pagepool/*.h pagepool/csrc/*.h tests/capi/*.h)
AARCH64 := aarch64-linux-gnu
# As setup.py has it: each variant of the build lies apart, and so does what another compiler makes.
OF_CC := $(if $(filter-out default,$(origin CC)),-$(notdir $(firstword $(CC))))
DEBUG := build/debug$(OF_CC)
ASAN := build/address-undefined$(OF_CC)
TSAN := build/thread$(OF_CC)
FREE := build/free-threaded
# What plain Python says of the canonical order is worked out once for all builds.
export PAGEPOOL_TEST_ANSWERS ?= $(CURDIR)/build/answers

.PHONY: help demo demo-generate test test-torch test-models ci-models test-transfer test-ray cluster-demo load-test model-test preemption-test build debug clang bench figures lint docs format san san-c san-python \
	san-threads cross-compiler aarch64 run-aarch64 wheel test-wheel test-sdist test-free-threaded ci clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

demo: build  ## replay 200 requests of a recorded hour with attention on real memory
	$(PY) -m pagepool replay --requests 200 --attend qwen2.5-0.5b

test: build $(VENV)/.test  ## every test but the benchmarks, on up to 8 cores
	$(PY) -m pytest -q -n auto --maxprocesses 8 tests

# torch is large and `test` needs none: an environment of its own, with torch's build for CPUs. The index is PyTorch's;
# another with a build for CPUs does as well, and it is asked for torch alone. TORCH=torch==... chooses the version.
TORCH_VENV ?= build/torch-venv
TORCH ?= torch
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# An environment with torch: $(call torch_venv,FOLDER,GROUPS OF REQUIREMENTS).
define torch_venv
$(PY) -m venv $1
$(PY) .ci/requirements.py $2 > $1/.requirements.txt
$1/bin/python -m pip install -q --disable-pip-version-check --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
$1/bin/python -m pip install -q --disable-pip-version-check -r $1/.requirements.txt
endef
test-torch: build $(TORCH_VENV)/.test  ## the tests that hand torch's tensors to every call
	$(TORCH_VENV)/bin/python -m pytest -q -p no:cacheprovider tests/integrations/test_torch.py

$(TORCH_VENV)/.test: pyproject.toml .ci/requirements.py $(VENV)/.build
	$(call torch_venv,$(TORCH_VENV),run test test-torch)
	@touch $@

# The same for models of transformers. QUICK=1 leaves out the families that do nothing that another does not.
MODELS_VENV ?= build/models-venv
test-models: build $(MODELS_VENV)/.test  ## models of transformers over pages, beside transformers alone; QUICK=1: some
	$(MODELS_VENV)/bin/python -m pytest -q -p no:cacheprovider $(if $(QUICK),-m "not slow") tests/models tests/engine

$(MODELS_VENV)/.test: pyproject.toml .ci/requirements.py $(VENV)/.build
	$(call torch_venv,$(MODELS_VENV),run test transformers serve test-models)
	@touch $@

# NIXL's metadata asks for torch, which its transfer engine does not use: NIXL is installed without dependencies.
TRANSFER_VENV ?= build/transfer-venv
NIXL ?= nixl==1.5.1 nixl-cu12==1.5.1
test-transfer: build $(TRANSFER_VENV)/.test  ## pages between processes by NIXL, whose peers stop, die and leave
	@$(TRANSFER_VENV)/bin/python -c 'import nixl._api' || { echo "make: NIXL does not start"; exit 1; }
	$(TRANSFER_VENV)/bin/python -m pytest -q -p no:cacheprovider -rP tests/transfer/test_transfer_processes.py

$(TRANSFER_VENV)/.test: pyproject.toml .ci/requirements.py $(VENV)/.build
	$(PY) -m venv $(TRANSFER_VENV)
	$(PY) .ci/requirements.py run test > $@.txt
	$(TRANSFER_VENV)/bin/python -m pip install -q --disable-pip-version-check -r $@.txt
	$(TRANSFER_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(NIXL)
	@touch $@

# Ray, torch and NIXL together.
RAY_VENV ?= build/ray-venv
test-ray: build $(RAY_VENV)/.test  ## engines behind one front end, by Ray: streams, and processes that are killed
	$(RAY_VENV)/bin/python -m pytest -q -p no:cacheprovider -rP tests/cluster/test_ray_serve.py tests/cluster/test_ray_start.py

RUNS ?= 1
cluster-demo: build $(RAY_VENV)/.test  ## a burst on three engines, one killed in the middle: a table and a picture; RUNS=1
	PYTHONPATH=. $(RAY_VENV)/bin/python bench/cluster.py --runs $(RUNS)

$(RAY_VENV)/.test: pyproject.toml .ci/requirements.py $(VENV)/.build
	$(call torch_venv,$(RAY_VENV),run test ray test-models plot)
	$(RAY_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(NIXL)
	@touch $@

# What CI runs of models, where torch can be installed.
ci-models: build
	@if $(MAKE) -s $(MODELS_VENV)/.test >build/models.log 2>&1; then \
		$(MAKE) --no-print-directory QUICK=1 test-models && $(MAKE) --no-print-directory demo-generate; \
	else echo "models: skipped, torch and transformers cannot be installed:"; tail -n 3 build/models.log; fi

demo-generate: build $(MODELS_VENV)/.test  ## write Python with the tiny model of the repository
	$(MODELS_VENV)/bin/python -m pagepool generate "$$(printf 'class Reader:\n    def __init__(self, ')" \
		'def read_file(path):' 'import' --max-new-tokens 80 --temperature 0.5 --seed 1

SECONDS ?= 600
load-test: build $(MODELS_VENV)/.test  ## 8 clients that cancel, leave and give up, against a server, for SECONDS=600
	PYTHONPATH=. $(MODELS_VENV)/bin/python bench/load.py --seconds $(SECONDS)

OPS ?= 10000000
model-test: build $(VENV)/.test  ## a long random program on the memory, compared with reference: SEED=1 OPS=10000000
	PYTHONPATH=. $(PY) tests/model_run.py --ops $(OPS) $(if $(SEED),--seed $(SEED))

build: $(VENV)/.build  ## compile in place what has changed
	$(PY) setup.py -q build_ext --inplace

# What a missing piece of the machine means, in one sentence each.
$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: $(PYTHON) is not CPython 3.10 or later; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) has no venv module with ensurepip; install it (Debian: apt install python3-venv)" \
		"or choose another interpreter with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { \
		echo "make: $(PYTHON) has no C headers; install them (Debian: apt install python3-dev)" \
		"or choose another interpreter with: make PYTHON=/path/to/python3"; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || { \
		echo "make: the C compiler $(CC) is missing; install gcc or choose one with: make CC=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Packages are installed a group at a time, when a target first needs the group; one after another, whatever -j says.
GROUP_build := build run progress
GROUP_test := test
GROUP_tools := lint package plot docs
$(VENV)/.build: $(VENV)/.venv
$(VENV)/.test: $(VENV)/.build
$(VENV)/.tools: $(VENV)/.test
$(VENV)/.build $(VENV)/.test $(VENV)/.tools: $(VENV)/.%: pyproject.toml .ci/requirements.py
	$(PY) .ci/requirements.py $(GROUP_$*) > $@.txt
	$(PY) -m pip install -q --disable-pip-version-check -r $@.txt
	@touch $@

# The tests against the build in a folder, from there: $(call test_in,FOLDER,[ENVIRONMENT] PYTHON,PYTEST'S ARGUMENTS).
define test_in
rm -rf $1/tests && cp -r tests $1/tests
cd $1 && PYTHONPATH=lib $2 -m pytest -q -p no:cacheprovider $3
endef

# Another build repeats the tests that its difference can make fail: of assertions those that run our C. What every
# instruction set does under assertions the sanitizers see.
DEBUG_TESTS ?= attention engine foreign memory prefix test_model.py test_state_machine.py test_threads.py
# Assertions on, warnings of our C are errors. Every build but that of the wheel takes the C that `build` had Cython write.
debug: build $(VENV)/.test  ## the tests that run our C, with assertions; CC=clang for the other compiler
	PAGEPOOL_DEBUG=1 $(PY) setup.py -q build --build-lib $(DEBUG)/lib
	$(call test_in,$(DEBUG),$(abspath $(PY)),--ignore=tests/attention/test_isas.py $(addprefix tests/,$(DEBUG_TESTS)))

clang: $(VENV)/.build  ## compile the C with clang, where it is installed, warnings being errors
	@if command -v clang >/dev/null; then PAGEPOOL_DEBUG=1 CC=clang $(PY) setup.py -q build_clib; else \
		echo "clang: skipped, it is not installed (Debian: apt install clang)"; fi

bench: build $(VENV)/.test  ## the benchmarks, ours beside reference and numpy
	$(PY) bench/figures.py
	$(PY) bench/limit.py --shape S1
	$(PY) -m pytest -q bench --benchmark-columns=min,median,ops --benchmark-group-by=group

PEERS ?= build/peers
figures: build $(VENV)/.tools  ## measure beside the peers and draw the README's pictures; PEERS=DIR has their environments
	$(PY) bench/pictures.py --peers $(PEERS)

lint: build $(VENV)/.tools  ## ruff, mypy, stubtest, import-linter, cython-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports
	$(PY) -m mypy
	$(PY) -m mypy.stubtest pagepool --mypy-config-file pyproject.toml \
		--allowlist tests/packaging/stubtest_allowlist.txt --ignore-unused-allowlist
	PATH=$(abspath $(VENV))/bin:$$PATH cython-lint $$(git ls-files '*.pyx' '*.pxd' 2>/dev/null || find pagepool tests -name '*.p[yx][xd]')

docs: build $(VENV)/.tools  ## the guide and the reference as HTML; warnings are errors
	$(PY) -m sphinx -q -n -W --keep-going docs build/docs
	@echo "build/docs/index.html"

format: $(VENV)/.tools  ## write Python as ruff wants it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

STEPS ?= 1000000
preemption-test: build $(VENV)/.test  ## a pool that is full at every step, for STEPS steps; SEED=N repeats a run
	PYTHONPATH=. $(PY) tests/scheduling/preemption_run.py --steps $(STEPS) $(if $(SEED),--seed $(SEED))

san: san-c san-python san-threads  ## the C stress program, the memory and kernel tests and those of threads, sanitized

$(ASAN)/clib/libpagepool.a $(TSAN)/clib/libpagepool.a: build/%$(OF_CC)/clib/libpagepool.a: $(CSRC) $(HEADERS) setup.py \
		| $(VENV)/.build
	PAGEPOOL_SANITIZE=$(subst -,$(comma),$*) $(PY) setup.py -q build_clib
	@touch $@

comma := ,
$(ASAN)/%: tests/capi/%.c $(ASAN)/clib/libpagepool.a
	$(CC) $(CAPI_FLAGS) -fsanitize=address,undefined $^ -lm -o $@
$(TSAN)/%: tests/capi/%.c $(TSAN)/clib/libpagepool.a
	$(CC) $(CAPI_FLAGS) -fsanitize=thread $^ -lm -o $@

# TSan does not start where addresses are laid out at random in a wide range.
NO_RANDOM = $$(setarch -R true 2>/dev/null && echo setarch -R)
san-c: export UBSAN_OPTIONS = halt_on_error=1
san-c: $(addprefix $(ASAN)/,program variants quantised plans cascade prefill stress workspace) \
		$(addprefix $(TSAN)/,stress quantised plans cascade prefill threads)
	for isa in $$($(ASAN)/program | cut -d" " -f3-); do for name in program variants "quantised 2" cascade prefill; do \
		PAGEPOOL_ISA=$$isa $(ASAN)/$$name || exit 1; done; for mode in none once twice; do \
		PAGEPOOL_ISA=$$isa PAGEPOOL_PREFETCH=$$mode $(ASAN)/plans 20 || exit 1; done; done
	$(ASAN)/stress 3
	ASAN_OPTIONS=allocator_may_return_null=1 $(ASAN)/workspace
	$(NO_RANDOM) $(TSAN)/stress 2
	$(NO_RANDOM) $(TSAN)/plans 40
	$(NO_RANDOM) $(TSAN)/cascade
	$(NO_RANDOM) $(TSAN)/quantised 8
	$(NO_RANDOM) $(TSAN)/prefill 4
	TSAN_OPTIONS=die_after_fork=0 $(NO_RANDOM) $(TSAN)/threads 40

# What a sanitizer reports goes to the descriptor of standard error: pytest must not keep it. The C programs above run
# every instruction set; what is compared with the canonical order in plain Python reaches no code that others do not.
SAN_TESTS ?= memory attention prefix engine/test_sampling.py
san-python: build $(ASAN)/clib/libpagepool.a $(VENV)/.test
	PAGEPOOL_SANITIZE=address,undefined $(PY) setup.py -q build --build-lib $(ASAN)/lib
	$(call test_in,$(ASAN),PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" $(abspath $(PY)),\
		--capture=sys -k "not canonical_order" --ignore=tests/attention/test_isas.py $(addprefix tests/,$(SAN_TESTS)))

THREAD_TESTS ?= test_threads.py memory/test_nogil.py
san-threads: build $(TSAN)/clib/libpagepool.a $(VENV)/.test  ## the tests of threads under TSan
	PAGEPOOL_SANITIZE=thread $(PY) setup.py -q build --build-lib $(TSAN)/lib
	$(call test_in,$(TSAN),PAGEPOOL_SANITIZE=thread LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" $(NO_RANDOM) \
		$(abspath $(PY)),\
		--capture=sys $(addprefix tests/,$(THREAD_TESTS)))

# Cross-compiled with warnings as errors; run under qemu-user when it is there. CI has root and apt: it installs both.
aarch64: build $(if $(CI),cross-compiler)  ## compile the C for aarch64 and run it, where a cross compiler is installed
	@if ! command -v $(AARCH64)-gcc >/dev/null; then \
		echo "aarch64: skipped, $(AARCH64)-gcc is not installed (Debian: apt install gcc-aarch64-linux-gnu qemu-user)"; \
	else $(MAKE) --no-print-directory $(AARCH64_PROGRAMS) && if command -v qemu-aarch64 >/dev/null; then \
		$(MAKE) --no-print-directory run-aarch64; else \
		echo "aarch64: compiled, not run: qemu-aarch64 is not installed (Debian: apt install qemu-user)"; fi; fi

# A CPU without dot products of 8-bit integers and one with them: each gets its own kernels, with the bits of this
# machine's in every 24th case, int8 and int4 of K and of V among them.
run-aarch64:
	$(CC) $(CAPI_FLAGS) tests/capi/quantised.c pagepool/lib/libpagepool.a -o build/aarch64/native-quantised -lm
	@bits=$$(build/aarch64/native-quantised 24 | cut -d" " -f3) && for run in cortex-a53:neon max:neon_dotprod; do \
		on="qemu-aarch64 -L /usr/$(AARCH64) -cpu $${run%:*}"; \
		$$on build/aarch64/program && said=$$($$on build/aarch64/quantised 24) && echo "$$said" || exit 1; \
		[ "$$said" = "ok $${run#*:} $$bits" ] || { \
			echo "aarch64: $${run%:*} should have said: ok $${run#*:} $$bits"; exit 1; }; done

cross-compiler:
	@mkdir -p build
	@command -v $(AARCH64)-gcc qemu-aarch64 >/dev/null || \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y --no-install-recommends \
		gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; } >build/apt.log 2>&1 || tail -n 1 build/apt.log

AARCH64_PROGRAMS := build/aarch64/program build/aarch64/quantised
AARCH64_OBJECTS := $(CSRC:pagepool/csrc/%.c=build/aarch64/%.o)
$(AARCH64_OBJECTS): build/aarch64/%.o: pagepool/csrc/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(AARCH64)-gcc $(CAPI_FLAGS) -Werror -c $< -o $@
$(AARCH64_PROGRAMS): build/aarch64/%: tests/capi/%.c $(AARCH64_OBJECTS)
	$(AARCH64)-gcc $(CAPI_FLAGS) -Werror $^ -o $@ -lm

# The sdist is unpacked once: its C, which knows nothing of Python, is compiled for the wheel and serves every Python.
SHIPPED := $(shell find pagepool include -type f ! -name '*.so' ! -name '*.pyc' ! -name '*.a')
wheel: build/dist  ## dist/: an sdist, and a wheel built from it in isolation
build/dist: $(SHIPPED) setup.py pyproject.toml MANIFEST.in | $(VENV)/.tools
	rm -rf dist build/sdist
	@mkdir -p build/sdist
	$(PY) -m build --sdist --outdir dist . > build/package.log 2>&1 || { cat build/package.log; exit 1; }
	tar -xzf dist/*.tar.gz -C build/sdist --strip-components=1
	$(PY) -m build --wheel --outdir dist build/sdist > build/package.log 2>&1 || { cat build/package.log; exit 1; }
	$(PY) .ci/check_dist.py dist
	@touch $@

# In an environment and a folder of their own, so that nothing of the checkout can be imported. The code is that of
# `make test`; what may be missing or lie elsewhere are modules, all of which smoke.py imports, headers, the library
# and data.
WHEEL_TESTS ?= capi cluster foreign integrations packaging replay transfer
test-wheel: build/dist  ## what users do with the built wheel, in a clean environment and from another directory
	rm -rf build/wheel-venv && $(PY) -m venv build/wheel-venv
	$(PY) .ci/requirements.py test > build/wheel-venv/requirements.txt
	build/wheel-venv/bin/python -m pip install -q --disable-pip-version-check -r build/wheel-venv/requirements.txt dist/*.whl
	elsewhere=$$(mktemp -d) && trap 'rm -rf "$$elsewhere"' EXIT && cp -r tests docs README.md pyproject.toml "$$elsewhere" && \
		wheel_python=$(abspath build/wheel-venv/bin/python) smoke=$(abspath .ci/smoke.py) && cd "$$elsewhere" && \
		"$$wheel_python" "$$smoke" && \
		"$$wheel_python" -m pytest -q -p no:cacheprovider -k "not every_variant and not plans_at_random" \
		$(addprefix tests/,$(WHEEL_TESTS))

# Builds from the sdist on each Python that is on this machine but that of .venv, which has built the wheel.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
test-sdist: build/dist  ## build the sdist and use it on every other Python from 3.10 to 3.14 that is here
	@set -e; for version in $(filter-out $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'),$(PYTHONS)); do \
		found=; \
		for candidate in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python; do \
			if $$candidate -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" \
				2>/dev/null; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then echo "Python $$version: not on this machine, not tried"; continue; fi; \
		place=build/python$$version; rm -rf $$place; $$found -m venv $$place; \
		$$place/bin/python -m pip install -q --disable-pip-version-check ./build/sdist; \
		(cd $$place && bin/python ../../.ci/smoke.py); \
	done

# A CPython without a GIL, 3.13 or later: PYTHON=... on this command line, or what is found. Of each package it takes the
# newest that is built for it. Warnings are errors: a module that does not declare that it needs no GIL fails. So does
# the test in which the GIL comes back on (tests/conftest.py), in whatever way.
FREE_THREADED := $(or $(if $(filter command,$(origin PYTHON)),$(PYTHON)),$(PYTHON_FREE_THREADED),$(shell \
	command -v python3.14t || command -v python3.13t))
FREE_TESTS ?= .
ifeq ($(FREE_THREADED),)
test-free-threaded:
	@echo "free-threaded: skipped, there is no python3.14t or python3.13t"
else
test-free-threaded: build $(FREE)/.test  ## the tests without the GIL: PYTHON=/path/to/python3.13t
	$(FREE)/bin/python setup.py -q build --build-lib $(FREE)/lib
	$(call test_in,$(FREE),$(abspath $(FREE)/bin/python),-n auto --maxprocesses 8 $(addprefix tests/,$(FREE_TESTS)))
endif

$(FREE)/.test: pyproject.toml .ci/requirements.py $(VENV)/.build
	rm -rf $(FREE) && $(FREE_THREADED) -m venv $(FREE)
	$(PY) .ci/requirements.py build run progress test > $@.txt
	$(FREE)/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: -r $@.txt
	@touch $@

ci:  ## all that continuous integration checks
	bash .ci/run

clean:  ## everything that was built, the environment included
	rm -rf build dist $(VENV) *.egg-info pagepool/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find pagepool tests bench -name '__pycache__' -prune -exec rm -rf {} +
	find pagepool -name '*.so' -delete
