"""Replay of recorded traffic under a virtual clock: `pagepool replay`."""
