"""Sequences and block tables: reserving, appending, filling the arrays of a step."""

import pytest
import workloads


@pytest.mark.benchmark(group="tables ensure")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_ensure(measure, side):
    measure(workloads.table_ensure(side))


@pytest.mark.benchmark(group="tables append")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_append(measure, side):
    measure(workloads.table_append(side))


@pytest.mark.benchmark(group="tables append")
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_append_batch(measure, side):
    measure(workloads.table_append_batch(side))


@pytest.mark.benchmark(group="tables fill")
@pytest.mark.parametrize("side", ["ours", "reference", "numpy"])
def test_fill(measure, side):
    measure(workloads.table_fill(side))
