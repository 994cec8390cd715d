"""A step of 256 running sequences, with few and with many waiting."""

import pytest
import workloads


@pytest.mark.benchmark(group="scheduler step")
@pytest.mark.parametrize("waiting", [1_000, 100_000])
@pytest.mark.parametrize("side", ["ours", "reference"])
def test_step(measure, side, waiting):
    measure(workloads.scheduler_step(side, waiting))
