"""Traces as bytes, for tests."""

import json

HEADER = {"fmt": "ptrace-1", "name": "test", "block": 0, "unit": "ms", "licence": "none", "n": 0}


def lines_of(records, **header):
    """A trace with these records, and header fields of choice."""
    head = HEADER | {"n": len(records)} | header
    return "".join(json.dumps(line) + "\n" for line in [head, *records]).encode()
