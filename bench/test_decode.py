"""Attention over pages at one size in between; large sizes against the memory's limit are in limit.py."""

import pytest
import workloads


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("side", ["ours", "numpy"])
def test_decode(measure, side):
    measure(workloads.decode_step(side))


@pytest.mark.benchmark(group="decode", min_rounds=3, max_time=0.5)
def test_decode_reference(measure):
    measure(workloads.decode_step("reference"))


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_decode_as(measure, dtype):
    measure(workloads.decode_step("ours", dtype))
