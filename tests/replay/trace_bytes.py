"""Traces as bytes, for tests."""

import json

HEADER = {"fmt": "ptrace-1", "name": "test", "block": 0, "unit": "ms", "licence": "none", "n": 0}


def lines_of(records, **header):
    """Return a trace with these records and header fields."""
    head = HEADER | {"n": len(records)} | header
    return "".join(json.dumps(line) + "\n" for line in [head, *records]).encode()
