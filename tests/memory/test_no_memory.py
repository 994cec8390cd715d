"""Every malloc, posix_memalign and mmap fails in turn: the call raises MemoryError, changes and leaks nothing."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pagepool

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a script with failing_malloc preloaded and returns its output."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build failing_malloc.so")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer replaces malloc")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("CPython without a GIL needs mimalloc: it has no PYTHONMALLOC=malloc")
    shim = tmp_path_factory.mktemp("shim") / "failing_malloc.so"
    source = str(HERE / "failing_malloc.c")
    subprocess.run(["gcc", "-O1", "-Wall", "-shared", "-fPIC", source, "-o", str(shim), "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(Path(pagepool.__file__).parents[1]),
        "OPENBLAS_NUM_THREADS": "1",
    }

    def run(script, *options):
        command = [sys.executable, str(script), *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
        return done.stdout

    return run


def test_every_allocation_may_fail(run):
    results = json.loads(run(HERE / "run_out_of_memory.py"))
    wrong = {name: what for name, what in results.items() if not isinstance(what, int)}
    assert not wrong
    spared = {name for name, failures in results.items() if failures == 0}
    appends = {"append of k and v", "append of k and v with other strides"}
    assert spared <= {"allocate", "reserve", "truncate", "lend", "end of priorities", *appends}
    assert len(results) > 25 and sum(results.values()) > 100


def test_hybrid_sequences_leave_nothing_behind_and_their_close_wants_no_memory(run):
    results = json.loads(run(HERE / "run_hybrid_out_of_memory.py"))
    wrong = {name: what for name, what in results.items() if not isinstance(what, int)}
    assert not wrong
    spared = {name for name, failures in results.items() if failures == 0}
    assert spared == {"close of a hybrid", "close with drafts"}
    assert len(results) > 15 and sum(results.values()) > 100


def test_a_scheduler_without_memory_leaks_nothing_and_continues(run):
    result = json.loads(run(HERE / "run_scheduler_out_of_memory.py"))
    assert result["wrong"] == [] and result["failures"] > 400


def test_a_random_program_goes_on_after_each_allocation_that_fails(run):
    said = run(HERE.parent / "model_run.py", "--ops", "20000", "--seed", "7", "--failing")
    assert int(said.split(" allocations failed")[0].split()[-1]) > 100, said
