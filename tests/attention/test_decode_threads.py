"""decode from several Python threads at once, and in the child of a fork."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paged_cases import assert_same_bits, make_case

from pagepool import KvLayout

FORK = """
import os, sys
import numpy as np
import fork_with_asan
from paged_cases import make_case
from pagepool import KvLayout

case = make_case(KvLayout(1, 2, 64), 4, [3000, 700, 1, 0])
expected = case.decode(num_threads=4, return_lse=True)
for _ in range(5):
    child = os.fork()
    if child == 0:
        got = case.decode(num_threads=4, return_lse=True)
        same = all(np.array_equal(a, b) for a, b in zip(got, expected))
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(not np.array_equal(case.decode(num_threads=2), expected[0]))
        os._exit(not same or os.waitpid(grandchild, 0)[1])
    assert np.array_equal(case.decode(num_threads=4), expected[0])
    assert os.waitpid(child, 0)[1] == 0, "the child's bits differ"
print("same bits")
"""


def test_four_python_threads_at_once_get_the_same_bits():
    cases = [make_case(KvLayout(1, 2, 64), 4, [3000, 700, 1, 0, 90], seed=seed) for seed in range(4)]
    expected = [case.decode(num_threads=1, return_lse=True) for case in cases]

    def work(number):
        for _ in range(30):
            assert_same_bits(cases[number].decode(num_threads=2, return_lse=True), expected[number])
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]


def test_decode_works_after_fork():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "same bits\n"), run.stderr
