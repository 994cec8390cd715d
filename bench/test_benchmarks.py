"""The workloads of pagepool, the reference and NumPy under pytest-benchmark. Larger decodes are in limit.py."""

import pytest
import workloads

SIDES = ["ours", "reference", "numpy"]


@pytest.mark.benchmark(group="allocator pair")
@pytest.mark.parametrize("side", SIDES)
def test_allocator_pair(measure, side):
    measure(workloads.allocator_pair(side))


@pytest.mark.benchmark(group="allocator pair")
def test_allocator_pair_nogil(measure):
    measure(workloads.nogil_pair())


@pytest.mark.benchmark(group="allocator bulk 64")
@pytest.mark.parametrize("side", SIDES)
def test_allocator_bulk(measure, side):
    measure(workloads.allocator_bulk(side))


@pytest.mark.benchmark(group="allocator bulk 64")
def test_allocator_bulk_nogil(measure):
    measure(workloads.nogil_bulk())


@pytest.mark.benchmark(group="tables ensure")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_table_ensure(measure, side):
    measure(workloads.table_ensure(side))


@pytest.mark.benchmark(group="tables append")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_table_append(measure, side):
    measure(workloads.table_append(side))


@pytest.mark.benchmark(group="tables append")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_table_append_batch(measure, side):
    measure(workloads.table_append_batch(side))


@pytest.mark.benchmark(group="tables fill")
@pytest.mark.parametrize("side", SIDES)
def test_table_fill(measure, side):
    measure(workloads.table_fill(side))


@pytest.mark.benchmark(group="append prefill")
@pytest.mark.parametrize("side", SIDES)
def test_append_prefill(measure, side):
    measure(workloads.append_kv(side))


@pytest.mark.benchmark(group="append decode step")
@pytest.mark.parametrize("side", SIDES)
def test_append_decode_step(measure, side):
    measure(workloads.append_kv(side, prefill=False))


@pytest.mark.benchmark(group="append prefill")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_append_prefill_as(measure, dtype):
    measure(workloads.append_kv("ours", dtype))


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


@pytest.mark.benchmark(group="scheduler step")
@pytest.mark.parametrize("waiting", [1_000, 100_000])
def test_scheduler_step(measure, waiting):
    measure(workloads.scheduler_step(waiting))
