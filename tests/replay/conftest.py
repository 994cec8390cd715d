import lzma

import pytest
from trace_bytes import lines_of


@pytest.fixture
def make_trace(tmp_path):
    """Return a function that writes a trace from records, or from raw bytes, and returns its path."""

    def make(records, name="trace.ptrace", compress=False, **header):
        data = records if isinstance(records, bytes) else lines_of(records, **header)
        path = tmp_path / name
        path.write_bytes(lzma.compress(data) if compress else data)
        return path

    return make
