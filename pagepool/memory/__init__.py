"""Memory: block allocator, page pools, block tables and recurrent states."""

from importlib import import_module

import_module("pagepool.memory.capi")  # publishes the allocator's table of C functions
