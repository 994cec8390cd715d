"""After `keep_freed_memory`, memory that was freed is used again without page faults, until `return_freed_memory`."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer replaces malloc"),
]
PAGES = 8 * (12 << 20) // os.sysconf("SC_PAGE_SIZE")  # of one call of `use`
CODE = """
import resource, sys
from pathlib import Path
from threading import Thread
from pagepool.engine.malloc import keep_freed_memory, return_freed_memory

def use():
    held = []
    for _ in range(8):
        held.append(bytearray(12 << 20))

def count():
    use()
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

if sys.argv[1] == "keep":
    keep_freed_memory()
for thread in (Thread(target=count), Thread(target=count)):
    thread.start()
    thread.join()
before = resident()
return_freed_memory()
print(before - resident())
"""


def run(what, **environment):
    """Return the page faults of one call of `use` in each of two threads, and the pages that were returned."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", CODE, what]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=True)
    return [*map(int, done.stdout.split())]


def test_freed_memory_is_used_again_without_page_faults():
    *without, _ = run("default")
    *kept, returned = run("keep")
    assert min(without) > PAGES // 10
    assert max(kept) < PAGES // 100
    assert returned > PAGES // 2


def test_the_environment_has_precedence():
    *faults, _ = run("keep", MALLOC_TRIM_THRESHOLD_="0")
    assert min(faults) > PAGES // 10
