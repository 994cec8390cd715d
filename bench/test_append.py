"""K and V into their slots."""

import pytest
import workloads


@pytest.mark.benchmark(group="append prefill")
@pytest.mark.parametrize("side", ["ours", "reference", "numpy"])
def test_prefill(measure, side):
    measure(workloads.append_kv(side))


@pytest.mark.benchmark(group="append decode step")
@pytest.mark.parametrize("side", ["ours", "reference", "numpy"])
def test_decode_step(measure, side):
    measure(workloads.append_kv(side, prefill=False))


@pytest.mark.benchmark(group="append prefill")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_prefill_as(measure, dtype):
    measure(workloads.append_kv("ours", dtype))
