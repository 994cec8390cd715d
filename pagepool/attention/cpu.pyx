"""cpu_info: the instruction set in use and what the CPU has."""

from pagepool.memory.kernels cimport c_default_num_threads, c_isa, c_isa_available, c_isa_forced_unavailable

import os
import platform
import warnings

__all__ = ["cpu_info"]


def cpu_info():
    """What the kernels run on.

    Returns a dict: `isa`, the instruction set in use; `available`, all that this build has and this machine can run,
    best first; `num_threads`, the default of `decode`; `machine`, the architecture. The environment's PAGEPOOL_ISA
    names one of `available` to be used instead of the best; it is read once.

    >>> info = cpu_info()
    >>> info["isa"] in info["available"] and info["available"][-1] == "baseline"
    True
    """
    available = []
    while c_isa_available(<int>len(available)) != NULL:
        available.append(c_isa_available(<int>len(available)).decode())
    return {
        "isa": c_isa().decode(),
        "available": available,
        "num_threads": c_default_num_threads(),
        "machine": platform.machine(),
    }


if c_isa_forced_unavailable():
    warnings.warn(
        f"PAGEPOOL_ISA={os.environ.get('PAGEPOOL_ISA')} is not one of {', '.join(cpu_info()['available'])}: "
        f"{c_isa().decode()} is used",
        RuntimeWarning,
        stacklevel=2,
    )
