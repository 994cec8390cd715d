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
# As setup.py has it: what another compiler builds lies apart.
OF_CC := $(if $(filter-out default,$(origin CC)),-$(notdir $(firstword $(CC))))
ASAN := build/address-undefined$(OF_CC)
TSAN := build/thread$(OF_CC)

.PHONY: help demo test model-test pressure-test build debug bench figures lint docs format san san-c san-python san-threads aarch64 wheel test-wheel test-sdist test-pythons ci clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

demo: build  ## replay 200 requests of a recorded hour with attention on real memory
	$(PY) -m pagepool replay --requests 200 --attend qwen2.5-0.5b

test: build $(VENV)/.test  ## every test but the benchmarks
	$(PY) -m pytest -q tests

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

# Packages are installed one group at a time, when a target first needs the group.
$(VENV)/.build: $(VENV)/.venv pyproject.toml .ci/requirements.py
	$(PY) .ci/requirements.py build run progress > $@.txt
	$(PY) -m pip install -q --disable-pip-version-check -r $@.txt
	@touch $@

$(VENV)/.test $(VENV)/.lint $(VENV)/.docs $(VENV)/.package $(VENV)/.plot: $(VENV)/.%: $(VENV)/.build pyproject.toml .ci/requirements.py
	$(PY) .ci/requirements.py $* > $@.txt
	$(PY) -m pip install -q --disable-pip-version-check -r $@.txt
	@touch $@

# Another build repeats the tests that its difference can make fail: of assertions those that run our C. What every
# instruction set does under assertions the sanitizers see.
DEBUG_TESTS ?= attention foreign memory prefix replay scheduling test_model.py test_state_machine.py test_threads.py
# Assertions on, warnings of our C are errors. The build lies apart; the tests run against it from its own folder.
debug: VARIANT = build/debug$(OF_CC)
debug: $(VENV)/.build $(VENV)/.test  ## the tests that run our C, with assertions; CC=clang for the other compiler
	PAGEPOOL_DEBUG=1 $(PY) setup.py -q build --build-lib $(VARIANT)/lib
	rm -rf $(VARIANT)/tests && cp -r tests $(VARIANT)/tests
	cd $(VARIANT) && PYTHONPATH=lib $(abspath $(PY)) -m pytest -q -p no:cacheprovider \
		--ignore=tests/attention/test_isas.py $(addprefix tests/,$(DEBUG_TESTS))

bench: build $(VENV)/.test  ## the benchmarks, ours beside reference and numpy
	$(PY) bench/figures.py
	$(PY) bench/limit.py --shape S1
	$(PY) -m pytest -q bench --benchmark-columns=min,median,ops --benchmark-group-by=group

PEERS ?= build/peers
figures: build $(VENV)/.plot  ## measure beside the peers and draw the README's pictures; PEERS=DIR has their environments
	$(PY) bench/pictures.py --peers $(PEERS)

lint: build $(VENV)/.lint $(VENV)/.test  ## ruff, mypy, stubtest, cython-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest pagepool --allowlist tests/packaging/stubtest_allowlist.txt --ignore-unused-allowlist
	PATH=$(abspath $(VENV))/bin:$$PATH cython-lint $$(git ls-files '*.pyx' '*.pxd' 2>/dev/null || find pagepool tests -name '*.p[yx][xd]')

docs: build $(VENV)/.docs  ## the guide and the reference as HTML; warnings are errors
	$(PY) -m sphinx -q -n -W --keep-going docs build/docs
	@echo "build/docs/index.html"

format: $(VENV)/.lint  ## write Python as ruff wants it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

san: san-c san-python san-threads  ## the C stress program, the memory and kernel tests and those of threads, sanitized

# plans.c says itself how each chunk prefetches.
PLANS_FLAGS = -Wl,--wrap=pp_prefetch_mode

# The sanitized library is the one that san-python's extensions link, too.
san-c: $(VENV)/.build
	PAGEPOOL_SANITIZE=address,undefined $(PY) setup.py -q build_clib
	PAGEPOOL_SANITIZE=thread $(PY) setup.py -q build_clib
	for name in program variants plans stress workspace; do \
		$(CC) $(CAPI_FLAGS) -fsanitize=address,undefined $$([ $$name = plans ] && echo $(PLANS_FLAGS)) tests/capi/$$name.c \
		$(ASAN)/clib/libpagepool.a -lm -o $(ASAN)/$$name || exit 1; done
	for name in stress plans threads; do \
		$(CC) $(CAPI_FLAGS) -fsanitize=thread $$([ $$name = plans ] && echo $(PLANS_FLAGS)) tests/capi/$$name.c \
		$(TSAN)/clib/libpagepool.a -lm -o $(TSAN)/$$name || exit 1; done
	for isa in $$($(ASAN)/program | cut -d" " -f3-); do for name in program variants "plans 60"; do \
		PAGEPOOL_ISA=$$isa UBSAN_OPTIONS=halt_on_error=1 $(ASAN)/$$name || exit 1; done; done
	UBSAN_OPTIONS=halt_on_error=1 $(ASAN)/stress 3
	ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1 $(ASAN)/workspace
	$$(setarch -R true 2>/dev/null && echo setarch -R) $(TSAN)/stress 2
	$$(setarch -R true 2>/dev/null && echo setarch -R) $(TSAN)/plans 40
	TSAN_OPTIONS=die_after_fork=0 $$(setarch -R true 2>/dev/null && echo setarch -R) $(TSAN)/threads 40

STEPS ?= 1000000
pressure-test: build $(VENV)/.test  ## a pool that is full at every step, for STEPS steps; SEED=N repeats a run
	PYTHONPATH=. $(PY) tests/scheduling/pressure_run.py --steps $(STEPS) $(if $(SEED),--seed $(SEED))

# What a sanitizer reports goes to the descriptor of standard error: pytest must not keep it.
SAN_TESTS ?= memory attention prefix
san-python: SAN = $(ASAN)
san-python: $(VENV)/.build $(VENV)/.test
	PAGEPOOL_SANITIZE=address,undefined $(PY) setup.py -q build --build-lib $(SAN)/lib
	rm -rf $(SAN)/tests && cp -r tests $(SAN)/tests
	cd $(SAN) && PYTHONPATH=lib PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		$(abspath $(PY)) -m pytest -q -p no:cacheprovider --capture=sys -k "not canonical_order" \
		$(addprefix tests/,$(SAN_TESTS))

THREAD_TESTS ?= test_threads.py memory/test_nogil.py
san-threads: SAN = $(TSAN)
san-threads: $(VENV)/.build $(VENV)/.test  ## the tests of threads under TSan
	PAGEPOOL_SANITIZE=thread $(PY) setup.py -q build --build-lib $(SAN)/lib
	rm -rf $(SAN)/tests && cp -r tests $(SAN)/tests
	cd $(SAN) && PYTHONPATH=lib PAGEPOOL_SANITIZE=thread LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		$$(setarch -R true 2>/dev/null && echo setarch -R) \
		$(abspath $(PY)) -m pytest -q -p no:cacheprovider --capture=sys $(addprefix tests/,$(THREAD_TESTS))

# Cross-compiled with warnings as errors; run under qemu-user when it is there.
aarch64:  ## compile the C for aarch64 and run its program, where a cross compiler is installed
	@if command -v $(AARCH64)-gcc >/dev/null; then $(MAKE) --no-print-directory aarch64-run; else \
		echo "aarch64: skipped, $(AARCH64)-gcc is not installed (Debian: apt install gcc-aarch64-linux-gnu qemu-user)"; fi

.PHONY: aarch64-run
aarch64-run: build/aarch64/program
	@if command -v qemu-aarch64 >/dev/null; then qemu-aarch64 -L /usr/$(AARCH64) $<; else \
		echo "aarch64: compiled, not run: qemu-aarch64 is not installed (Debian: apt install qemu-user)"; fi

build/aarch64/program: tests/capi/program.c $(CSRC) $(HEADERS)
	@mkdir -p $(@D)
	$(AARCH64)-gcc $(CAPI_FLAGS) -O2 -Werror $< $(CSRC) -o $@ -lm

# The sdist is unpacked once: its C, which knows nothing of Python, is compiled for the wheel and serves every Python.
wheel: $(VENV)/.package  ## dist/: an sdist, and a wheel built from it in isolation
	rm -rf dist build/sdist
	@mkdir -p build/sdist
	$(PY) -m build --sdist --outdir dist . > build/package.log 2>&1 || { cat build/package.log; exit 1; }
	tar -xzf dist/*.tar.gz -C build/sdist --strip-components=1
	$(PY) -m build --wheel --outdir dist build/sdist > build/package.log 2>&1 || { cat build/package.log; exit 1; }
	$(PY) .ci/check_dist.py dist

# In an environment and a folder of their own, so that nothing of the checkout can be imported. The code is that of
# `make test`; what may be missing or lie elsewhere are modules, all of which smoke.py imports, headers, the library
# and data.
WHEEL_TESTS ?= attention capi foreign integrations memory packaging replay
test-wheel:  ## what users do with the built wheel, in a clean environment and from another directory
	test -n "$(wildcard dist/*.whl)" || $(MAKE) --no-print-directory wheel
	rm -rf build/wheel-venv && $(PY) -m venv build/wheel-venv
	$(PY) .ci/requirements.py test > build/wheel-venv/requirements.txt
	build/wheel-venv/bin/python -m pip install -q --disable-pip-version-check -r build/wheel-venv/requirements.txt dist/*.whl
	elsewhere=$$(mktemp -d) && trap 'rm -rf "$$elsewhere"' EXIT && cp -r tests docs README.md pyproject.toml "$$elsewhere" && \
		wheel_python=$(abspath build/wheel-venv/bin/python) smoke=$(abspath .ci/smoke.py) && cd "$$elsewhere" && \
		"$$wheel_python" "$$smoke" && \
		"$$wheel_python" -m pytest -q -p no:cacheprovider --ignore=tests/attention/test_isas.py \
		--ignore=tests/memory/test_no_memory.py $(addprefix tests/,$(WHEEL_TESTS))

# Builds from the sdist on each Python that is on this machine, imports everything and runs a few calls.
PYTHONS ?= 3.10 3.11 3.12 3.13
test-pythons: test-sdist
test-sdist:  ## build the sdist and use it on every Python from 3.10 to 3.13 that is here
	test -n "$(and $(wildcard dist/*.tar.gz),$(wildcard build/sdist/setup.py))" || $(MAKE) --no-print-directory wheel
	@set -e; for version in $(PYTHONS); do \
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

ci:  ## all that continuous integration checks
	bash .ci/run

clean:  ## everything that was built, the environment included
	rm -rf build dist $(VENV) *.egg-info pagepool/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find pagepool tests bench -name '__pycache__' -prune -exec rm -rf {} +
	find pagepool -name '*.so' -delete
