"""Invalid environment variables cause a warning that names the variable and the value used instead."""

import os
import subprocess
import sys

import pytest

FROM_THE_START = "import pagepool; pagepool.cpu_info(); pagepool.cpu_info()"
LATER = """
import os
import numpy as np
from paged_cases import make_case
from pagepool import KvLayout

case = make_case(KvLayout(1, 2, 64), 4, [33])
os.environ["PAGEPOOL_NUM_THREADS"] = "many"
first, second = case.decode(), case.decode()
assert np.array_equal(first, second)
"""


def warnings_of(program, **environment):
    """Run a program in a new process and return its warnings, one line each."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "always", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "Warning: " in line]


@pytest.mark.parametrize("value", ["0", "-2", "257", "two", "2 ", "1.5"])
def test_an_invalid_number_of_threads_warns_once(value):
    (line,) = warnings_of(FROM_THE_START, PAGEPOOL_NUM_THREADS=value)
    cpus = len(os.sched_getaffinity(0))
    assert f"RuntimeWarning: PAGEPOOL_NUM_THREADS={value!r} is not a number from 1 to 256" in line
    assert line.endswith(f"using {cpus} threads, the number of CPUs of this process")


@pytest.mark.parametrize("value", ["", "1", "256"])
def test_a_valid_or_unset_number_of_threads_does_not_warn(value):
    assert warnings_of(FROM_THE_START, PAGEPOOL_NUM_THREADS=value) == []


def test_a_value_set_later_warns_where_it_is_read():
    (line,) = warnings_of(LATER)
    assert "PAGEPOOL_NUM_THREADS='many'" in line


def test_an_instruction_set_that_this_machine_has_not_is_warned_of():
    (line,) = warnings_of(FROM_THE_START, PAGEPOOL_ISA="avx1024")
    assert "RuntimeWarning: PAGEPOOL_ISA=avx1024 is not one of" in line and line.endswith(" is used")
