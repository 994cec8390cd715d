"""Run every kernel test once per instruction set of this machine, each in a process that forces it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagepool import cpu_info

FOLDER = Path(__file__).parent
KERNEL_TESTS = ["test_decode_accuracy.py", "test_decode_bits.py", "test_decode_special.py"]
KERNEL_TESTS += ["test_decode_variants.py", "test_head_dims.py", "test_several_queries.py", "test_block_scores.py"]
KERNEL_TESTS += ["test_merge.py", "test_page_conversion.py", "test_arithmetic_bf16.py", "test_any_call.py"]
KERNEL_TESTS += ["test_prefill.py", "test_quantised.py", "../memory/test_append_runs.py", "../engine/test_sampling.py"]
KERNEL_TESTS += ["../integrations/test_elementwise.py", "../integrations/test_linear_quantised.py"]


def test_the_forced_instruction_set_is_in_use():
    forced = os.environ.get("PAGEPOOL_ISA")
    info = cpu_info()
    assert info["isa"] in info["available"]
    assert "baseline" in info["available"]
    if forced in info["available"]:
        assert info["isa"] == forced


def calls():
    """Return each instruction set that is not in use with each file of tests that it can make fail."""
    available = cpu_info()["available"]
    for isa in available:
        # A set without dot products of bf16 shares all other kernels with the set that has them.
        only_dots = f"{isa}_bf16" in available
        for name in ["test_arithmetic_bf16.py", "test_prefill.py"] if only_dots else KERNEL_TESTS:
            # Baseline emulates fma in software: two parts of each number take minutes there.
            too_slow = isa == "baseline" and name == "test_prefill.py"
            words = ["bf16"] * only_dots + ["not bf16x2"] * too_slow
            if isa != cpu_info()["isa"]:
                yield pytest.param(isa, name, words, id=f"{isa}-{Path(name).stem}")


@pytest.mark.parametrize(("isa", "name", "words"), list(calls()))
def test_kernels_with(isa, name, words):
    # Comparisons with the canonical order cover no additional code, and sanitizers make the plain Python slow.
    words = [*words, *["not canonical_order"] * ("asan" in os.environ.get("LD_PRELOAD", ""))]
    chosen = " or ".join(["forced", *[" and ".join(f"({word})" for word in words)] * bool(words)])
    files = [str(FOLDER / name), f"{__file__}::test_the_forced_instruction_set_is_in_use"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *["-k", chosen] * bool(words), *files],
        env={**os.environ, "PAGEPOOL_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"PAGEPOOL_ISA={isa}\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout
