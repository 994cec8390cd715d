"""Names for the shared memory of tiers, pools and budgets, and the files behind them."""

import os
from contextlib import contextmanager
from pathlib import Path


def files_of(name):
    """Return the files in which the memory of a name is."""
    return [*Path("/dev/shm").glob(f"pagepool[-.]*{name}*")]


@contextmanager
def tier_name():
    """Yield a new name, and remove its files afterwards."""
    chosen = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        yield chosen
    finally:
        for path in files_of(chosen):
            path.unlink()
