"""Memory: who owns which block, which bytes, and which sequence maps to what."""

from importlib import import_module

import_module("pagepool.memory.capi")  # puts the allocator's table of C functions in its place
