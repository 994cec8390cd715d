"""Every benchmark reports nanoseconds per operation in addition to the time of a round."""

import pytest


@pytest.fixture
def measure(benchmark):
    """measure(work) benchmarks work.run and stores `ops` and `ns_per_op` (of the fastest and the median round)."""

    def measure(work):
        benchmark.extra_info["ops"] = work.ops
        benchmark(work.run)
        if benchmark.stats is not None:  # None when benchmarks are disabled
            stats = benchmark.stats.stats
            benchmark.extra_info["ns_per_op"] = round(stats.median / work.ops * 1e9, 2)
            benchmark.extra_info["ns_per_op_min"] = round(stats.min / work.ops * 1e9, 2)

    return measure


def pytest_terminal_summary(terminalreporter, config):
    """Print a table of nanoseconds per operation: pytest-benchmark prints whole rounds only."""
    session = getattr(config, "_benchmarksession", None)
    rows = [bench for bench in getattr(session, "benchmarks", ()) if "ns_per_op" in bench.extra_info]
    if not rows:
        return
    terminalreporter.section("nanoseconds per operation: median, minimum")
    for bench in sorted(rows, key=lambda bench: (bench.group or "", bench.extra_info["ns_per_op"])):
        info = bench.extra_info
        terminalreporter.write_line(
            f"{bench.group or '':<22} {bench.name:<48} {info['ns_per_op']:>12,.2f} {info['ns_per_op_min']:>12,.2f}"
        )
