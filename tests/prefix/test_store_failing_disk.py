"""A process that is killed, or a disk that fails, at any change of the store's files: right pages or none."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from share import WHOLE

import pagepool

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Return a function that runs `run_failing_disk.py` and returns its counts."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build failing_disk.so")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the library of the sanitizer must be the first one")
    shim = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", shim, HERE / "failing_disk.c", "-ldl"]
    subprocess.run(command, check=True)

    def run(folder, sample, error):
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": str(Path(pagepool.__file__).parents[1]),
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, HERE / "run_failing_disk.py", folder, str(sample), str(error)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run


def test_a_kill_at_any_change_of_a_file_leaves_no_wrong_page(tmp_path, disk):
    counts = disk(tmp_path, 1 << 30 if WHOLE else 20, 0)
    print(counts)
    assert counts["killed"] == counts["places"] >= 20 and counts["found"] > 20 * counts["places"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_from_any_change_on_costs_no_request(tmp_path, disk, error):
    """Also when it fails while the store is opened. There is a line for each kind of fault."""
    counts = disk(tmp_path, 100 if WHOLE else 8, error)
    print(counts)
    lines = counts["lines"]
    assert len(lines) == counts["places"] <= sum(lines) and max(lines) <= 3
