"""cpu_info: the instruction set in use, and the instruction sets that this CPU supports."""

from pagepool.csrc cimport PP_MAX_THREADS
from pagepool.memory.kernels cimport (
    c_default_num_threads, c_isa, c_isa_available, c_isa_forced_unavailable, c_num_threads_forced_unusable,
    c_tiles_refused, c_use_fork_join,
)

import os
import platform
import warnings

__all__ = ["cpu_info"]

cdef dict warned = {"of": None}  # the last value of PAGEPOOL_NUM_THREADS that a warning named


cdef int c_num_threads() except -1:
    cdef int num_threads = c_default_num_threads()
    if c_num_threads_forced_unusable():
        asked = os.environ.get("PAGEPOOL_NUM_THREADS")
        if asked != warned.get("of"):
            warnings.warn(
                f"PAGEPOOL_NUM_THREADS={asked!r} is not a number from 1 to {PP_MAX_THREADS}: "
                f"using {num_threads} threads, the number of CPUs of this process",
                RuntimeWarning,
                stacklevel=1,
            )
            warned["of"] = asked
    return num_threads


def _use_fork_join(size_t fork_join, int team_size):
    """Run kernels of the calling thread by the function at an address, see `pp_use_fork_join`. 0: by the workers."""
    c_use_fork_join(fork_join, team_size)


def cpu_info():
    """Return the instruction set of the kernels and other facts about the CPU.

    Returns
    -------
    dict
        `isa` is the instruction set in use. `tiles` is "amx" or "vectors": the unit that computes the products of the
        arithmetics "bf16x2" and "bf16". `available` lists the instruction sets of this build that this machine can run,
        best first. `num_threads` is the default of `decode`. `machine` is the architecture.

    Notes
    -----
    Two environment variables change these values. PAGEPOOL_ISA selects one of `available` and is read once. No result
    changes, except with the instruction set "baseline". PAGEPOOL_NUM_THREADS, from 1 to 256, is read at each call. An
    invalid value gives a `RuntimeWarning` that names the value in use.

    Examples
    --------
    >>> info = cpu_info()
    >>> info["isa"] in info["available"] and info["available"][-1] == "baseline"
    True
    """
    available = []
    while c_isa_available(<int>len(available)) != NULL:
        available.append(c_isa_available(<int>len(available)).decode())
    return {
        "isa": c_isa().decode(),
        "tiles": "amx" if <bytes>c_isa() == b"amx" else "vectors",
        "available": available,
        "num_threads": c_num_threads(),
        "machine": platform.machine(),
    }


if c_isa_forced_unavailable():
    warnings.warn(
        f"PAGEPOOL_ISA={os.environ.get('PAGEPOOL_ISA')} is not one of {', '.join(cpu_info()['available'])}: "
        f"{c_isa().decode()} is used",
        RuntimeWarning,
        stacklevel=2,
    )
if c_tiles_refused():
    warnings.warn(
        "the system does not let this process use AMX: the alternate signal stack of a thread is too small for "
        f"the state of tiles (8 KiB and more); {c_isa().decode()} is used",
        RuntimeWarning,
        stacklevel=2,
    )
c_num_threads()  # warns
