"""Memory: who owns which block, which bytes, and which sequence maps to what."""

from pagepool.memory import capi as capi  # puts the table of C functions in its place
