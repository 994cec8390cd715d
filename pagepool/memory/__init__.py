"""Memory: who owns which block, which bytes, and which sequence maps to what."""

from pagepool.memory import allocator_api as allocator_api  # puts the table of C functions in its place
