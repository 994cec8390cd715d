"""The machine's memory bandwidth and compute rates, measured by stream.c and rates.c."""

import ctypes
import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).resolve().parent
# Access patterns to try: prefetch distance in bytes, cache level that prefetches fill, and whether several chunks are
# read interleaved. Interleaved reads prefetch at most one chunk ahead.
STREAM_WAYS = ((0, 1, False), (2048, 1, False), (8192, 1, False))
CHUNK_WAYS = (
    (0, 1, False),
    (4096, 1, False),
    (4096, 2, False),
    (16384, 2, False),
    (2048, 1, True),
    (4096, 1, True),
    (4096, 2, True),
)
RATES = ("fma", "fma_of_8", "dot", "int8", "widen", "exp")
_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]


class Machine:
    """Rates in bytes, flops or values per second; times in seconds."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "libmachine.so"
            compiler = shlex.split(os.environ.get("CC", "gcc"))
            subprocess.run([*compiler, *_FLAGS, HERE / "stream.c", HERE / "rates.c", "-o", library], check=True)
            self._lib = ctypes.CDLL(str(library))
        pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._lib.stream_buffer.restype = pointer
        self._lib.stream_buffer.argtypes = [size]
        self._lib.stream_free.argtypes = [pointer, size]
        self._lib.stream_run.argtypes = [pointer, size, *[whole] * 2, size, *[whole] * 2, pointer, size, whole, pointer]
        for name in RATES:
            rate = getattr(self._lib, "rate_" + name)
            rate.argtypes, rate.restype = [ctypes.c_double], ctypes.c_double
        self._buffer, self._size = None, 0

    def reserve(self, num_bytes):
        """Allocate a touched buffer of at least `num_bytes` bytes for the next measurements; free the previous one."""
        if num_bytes > self._size:
            self.close()
            self._buffer = self._lib.stream_buffer(num_bytes)
            if not self._buffer:
                raise MemoryError(f"no memory for a stream of {num_bytes} bytes")
            self._size = num_bytes

    def close(self):
        if self._buffer:
            self._lib.stream_free(self._buffer, self._size)
        self._buffer, self._size = None, 0

    def stream(self, num_bytes, copies, threads, calls):
        """Return the median time to read `num_bytes` contiguous bytes, at the best prefetch distance."""
        self.reserve(num_bytes * copies)
        return min(self._run(num_bytes, copies, threads, way, None, 0, calls) for way in STREAM_WAYS)

    def chunks(self, num_bytes, copies, chunk, threads, calls, ways=CHUNK_WAYS):
        """Return the median times to read `num_bytes` bytes in shuffled chunks, one for each access pattern."""
        self.reserve(num_bytes * copies)
        order = np.random.default_rng(2).permutation(num_bytes // chunk).astype(np.uint32)
        return [self._run(num_bytes, copies, threads, way, order.ctypes.data, chunk, calls) for way in ways]

    def _run(self, num_bytes, copies, threads, way, order, chunk, calls):
        times = (ctypes.c_double * calls)()
        if self._lib.stream_run(self._buffer, num_bytes, copies, threads, *way, order, chunk, calls, times):
            raise RuntimeError("the stream could not start its threads")
        return median(times)

    def rate(self, name, threads, seconds=0.02):
        """Return operations per second of `threads` cores at once; 0 if the CPU lacks the instruction."""
        run = getattr(self._lib, "rate_" + name)
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(run, [seconds] * threads))


def cpu_name():
    """Return the CPU's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return "an unnamed processor"
