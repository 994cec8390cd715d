"""Memory: who owns which block, which bytes, and which sequence maps to what."""
