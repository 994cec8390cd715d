"""Run the tests of kernels on the other instruction sets of this machine, each in processes that force it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from share import WHOLE

from pagepool import cpu_info

FOLDER = Path(__file__).parent
# Bits do not depend on the instruction set, and tests/capi compares them. So `make test` runs these files on two sets,
# and those that check arguments, masks and tables above all with a part of their cases.
KERNEL_TESTS = ["test_decode_bits.py", "test_merge.py", "test_page_conversion.py"]
KERNEL_TESTS += ["../memory/test_append_runs.py", "../engine/test_sampling.py", "../integrations/test_elementwise.py"]
KERNEL_TESTS += ["../integrations/test_linear_quantised.py"]
IN_PART = ["test_prefill.py", "test_quantised.py", "test_head_dims.py", "test_arithmetic_bf16.py"]
ONLY_WHOLE = ["test_decode_accuracy.py", "test_decode_special.py", "test_decode_variants.py"]
ONLY_WHOLE += ["test_several_queries.py", "test_any_call.py"]


def test_the_forced_instruction_set_is_in_use():
    forced = os.environ.get("PAGEPOOL_ISA")
    info = cpu_info()
    assert info["isa"] in info["available"]
    assert "baseline" in info["available"]
    if forced in info["available"]:
        assert info["isa"] == forced


def runs():
    """Return instruction set, files, share of their cases and words that choose some, for each run.

    The available sets are sorted, best first. This process runs all tests on the one that is in use.
    """
    others = [isa for isa in cpu_info()["available"] if isa != cpu_info()["isa"]]
    if not WHOLE:
        fast = ["not bf16x2", "not latent_model"]  # on baseline they take a minute
        return [(isa, *run) for isa in others[-2:] for run in ((KERNEL_TESTS, 1, []), (IN_PART, 20, fast))]
    found = []
    for isa in others:
        for name in KERNEL_TESTS + IN_PART + ONLY_WHOLE:
            # Baseline emulates fma in software: two parts of each number take minutes there.
            too_slow = isa == "baseline" and name == "test_prefill.py"
            found.append((isa, [name], 1, ["not bf16x2"] * too_slow))
    return found


@pytest.mark.parametrize(
    ("isa", "names", "share", "words"), [pytest.param(*run, id=f"{run[0]}-{Path(run[1][0]).stem}") for run in runs()]
)
def test_kernels_with(isa, names, share, words):
    # Comparisons with the canonical order cover no additional code, and sanitizers make the plain Python slow.
    words = [*words, *["not canonical_order"] * ("asan" in os.environ.get("LD_PRELOAD", ""))]
    chosen = " or ".join(["forced", *[" and ".join(f"({word})" for word in words)] * bool(words)])
    files = [*(str(FOLDER / name) for name in names), f"{__file__}::test_the_forced_instruction_set_is_in_use"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *["-k", chosen] * bool(words), *files],
        env={**os.environ, "PAGEPOOL_ISA": isa, "PAGEPOOL_TEST_SHARE": str(share)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"PAGEPOOL_ISA={isa}\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout
