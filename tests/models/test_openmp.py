"""The worker threads of libgomp and of pagepool while an engine computes. Each test runs in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")

import pagepool  # noqa: E402

HEAD = """
import os, time
import torch
from pagepool.engine import openmp
from pagepool.engine.openmp import OpenmpWorkers

def threads():
    return len(os.listdir("/proc/self/task"))

def settled(wanted):
    end = time.monotonic() + 30
    while threads() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == wanted, (threads(), wanted)

torch.set_num_threads(3)
os.environ["PAGEPOOL_NUM_THREADS"] = "3"
before = threads()
torch.zeros(1 << 20).add_(1)
assert threads() == before + 2
"""


def run(program):
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", HEAD + program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_spin_ends_the_workers_of_the_calling_thread():
    run("workers = OpenmpWorkers('spin'); settled(before); workers.close(); assert not workers.is_sleeping")


def test_sleep_keeps_more_threads_than_there_are_cpus_until_it_is_closed():
    run("""
workers = OpenmpWorkers("sleep")
settled(before + len(os.sched_getaffinity(0)) + 1)
workers.note_step(1.0, 1.0)
assert workers.is_sleeping
workers.close()
workers.close()
settled(before)
""")


def test_auto_sleeps_while_the_thread_has_to_wait_for_a_cpu():
    run("""
workers = OpenmpWorkers("auto")
settled(before)
workers.note_step(0.4, 0.1)  # a single short step does not decide
assert not workers.is_sleeping
workers.note_step(0.4, 0.3)
assert workers.is_sleeping
settled(before + len(os.sched_getaffinity(0)) + 1)
workers.note_step(0.6, 0.6)  # sleeping workers say nothing about other load
assert workers.is_sleeping
openmp.monotonic = lambda: time.monotonic() + openmp.LEAST_CALM
workers.note_step(0.6, 0.6)
assert not workers.is_sleeping
settled(before)
workers.note_step(0.6, 0.6)
assert not workers.is_sleeping
workers.close()
""")


def test_auto_sleeps_during_other_work_of_the_engine_and_shortly_after_it():
    run("""
for mode in ("spin", "sleep"):
    workers = OpenmpWorkers(mode)
    with workers.giving_way():
        assert workers.is_sleeping is (mode == "sleep")
    workers.close()
workers = OpenmpWorkers("auto")
settled(before)
now = 0.0
openmp.monotonic = lambda: now
with workers.giving_way():
    settled(before + len(os.sched_getaffinity(0)) + 1)
    with workers.giving_way():
        pass
    now += 64.0
    workers.note_step(1.0, 0.1)
    assert workers.is_sleeping
workers.note_step(1.0, 1.0)
assert workers.is_sleeping
now += openmp.AFTER_WORK
workers.note_step(1.0, 1.0)
assert not workers.is_sleeping
settled(before)
with workers.giving_way():
    workers.close()
    assert not workers.is_sleeping
with workers.giving_way():
    assert not workers.is_sleeping
settled(before)
""")


def test_other_work_that_finds_no_thread_leaves_nothing_behind():
    run("""
workers = OpenmpWorkers("auto")
own, openmp.Thread = openmp.Thread, None
try:
    with workers.giving_way():
        raise AssertionError
except TypeError:
    pass
openmp.Thread = own
assert not workers.is_sleeping and not workers._num_blocks
with workers.giving_way():
    assert workers.is_sleeping
workers.close()
settled(before)
""")


def test_auto_sleeps_twice_as_long_while_the_load_lasts():
    run("""
workers = OpenmpWorkers("auto")
now = 0.0
openmp.monotonic = lambda: now

def sleep_of(*cpu_seconds):
    global now
    for used in cpu_seconds:
        assert not workers.is_sleeping
        workers.note_step(1.0, used)
    began = now
    while workers.is_sleeping:
        now += 1.0
        workers.note_step(1.0, 1.0)
    return now - began

assert [sleep_of(0.1) for _ in range(6)] == [4.0, 8.0, 16.0, 32.0, 64.0, 64.0]
assert sleep_of(1.0, 0.1) == 4.0  # the load had ended
workers.close()
""")


DECODE = """
import numpy as np
from pagepool import KvCachePool, KvLayout, decode

pool = KvCachePool.from_layout(KvLayout(1, 4, 64, dtype="float32"), 512)
rng = np.random.default_rng(0)
q, tables = rng.standard_normal((2, 8, 64), np.float32), np.arange(512, dtype=np.int32).reshape(2, 256)
pool.numpy()[:] = rng.standard_normal(pool.numpy().shape, np.float32)
own = pool.block_size * np.array([256, 200], np.int32)

def attend():
    return decode(q, pool, 0, tables, own, num_threads=3)
"""


def test_attention_runs_on_the_workers_that_spin():
    run(
        DECODE
        + """
workers = OpenmpWorkers("spin")
settled(before)
torch.zeros(1 << 20).add_(1)
assert threads() == before + 2
workers.note_step(1.0, 1.0)
found = attend()
assert threads() == before + 2  # no worker of pagepool has started
workers.close()
child = os.fork()
if not child:
    os._exit(0 if (attend() == found).all() else 1)  # with pagepool's own workers: the child has none of libgomp
assert os.waitpid(child, 0)[1] == 0
"""
    )


def test_attention_runs_on_its_own_workers_where_the_environment_makes_those_of_openmp_sleep():
    run(
        DECODE
        + """
os.environ["OMP_WAIT_POLICY"] = " Passive"  # libgomp has read another value
workers = OpenmpWorkers("spin")
settled(before)
workers.note_step(1.0, 1.0)
attend()
assert threads() == before + 2
workers.close()
"""
    )


def test_attention_runs_on_its_own_workers_while_those_of_openmp_sleep_or_are_fewer():
    run(
        DECODE
        + """
workers = OpenmpWorkers("spin")
settled(before)
torch.set_num_threads(2)
workers.note_step(1.0, 1.0)
attend()
assert threads() == before + 2
workers.close()
"""
    )
    run(
        DECODE
        + """
workers = OpenmpWorkers("auto")
workers.note_step(1.0, 0.1)
assert workers.is_sleeping
settled(before + len(os.sched_getaffinity(0)) + 1)
sleeping = threads()
attend()
assert threads() == sleeping + 2
workers.close()
"""
    )
