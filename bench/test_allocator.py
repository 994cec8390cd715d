"""Allocating and freeing: pairs and 64 at once, from Python and without the GIL."""

import pytest
import workloads

SIDES = ["ours", "reference", "numpy"]


@pytest.mark.benchmark(group="allocator pair")
@pytest.mark.parametrize("side", SIDES)
def test_pair(measure, side):
    measure(workloads.allocator_pair(side))


@pytest.mark.benchmark(group="allocator pair")
def test_pair_nogil(measure):
    measure(workloads.nogil_pair())


@pytest.mark.benchmark(group="allocator bulk 64")
@pytest.mark.parametrize("side", SIDES)
def test_bulk(measure, side):
    measure(workloads.allocator_bulk(side))


@pytest.mark.benchmark(group="allocator bulk 64")
def test_bulk_nogil(measure):
    measure(workloads.nogil_bulk())
