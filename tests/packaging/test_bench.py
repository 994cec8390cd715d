"""The benchmarks of decode run and rate their results as documented. Measured times are not asserted."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagepool

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
if not BENCH.is_dir():
    pytest.skip("needs bench/ of a checkout", allow_module_level=True)
sys.path.append(str(BENCH))
shapes = importlib.import_module("shapes")
verdict = importlib.import_module("peers").verdict
common = importlib.import_module("sides.common")

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the measuring programs")


def limit(tmp_path, *arguments):
    """Return the JSON of `bench/limit.py` for the smallest shape with minimal measuring time."""
    command = [sys.executable, "-W", "error", str(BENCH / "limit.py"), "--shape", "tiny", "--rounds", "1"]
    command += ["--seconds", "0.001", "--dtype", "bfloat16", "--json", str(tmp_path / "found.json"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "found.json").read_text())


@needs_gcc
def test_limit_says_which_limit_binds_and_how_much_of_it_decode_reaches(tmp_path):
    found = limit(tmp_path, "--threads", "1", "--isa", "baseline")
    (row,) = found["rows"]
    side = row["sides"]["baseline"]
    assert row["binds"] == ("fma" if row["fma_ms"] > row["stream_ms"] else "stream")
    assert side["share"] == pytest.approx(max(row["fma_ms"], row["stream_ms"]) / side["ms"])
    assert side["rounds"] == [{"ms": side["ms"], "limit_ms": max(row["fma_ms"], row["stream_ms"])}]
    assert side["best_share"] == pytest.approx(side["share"]) and row["best_fma_ms"] == row["fma_ms"]
    assert side["error"] < 1e-5 and "baseline" in side["way"]
    assert set(found["machine"]["threads"][0]["rates_g_per_s"]) == {"fma", "fma_of_8", "dot", "int8", "widen", "exp"}


def test_a_share_is_the_median_over_rounds_relative_to_the_limit_of_each_round():
    interleave = importlib.import_module("interleave")
    rounds = [{"way": 4.0, "slow": 9.0}, {"way": 5.0, "slow": 9.0}, {"way": 8.0, "slow": 9.0}]
    found = interleave.result(rounds, [3.0, 2.0, 4.0], [2.0, 4.0, 2.0], {"way": 1e-6, "slow": 1e-3})
    assert found["way"] == "way" and found["error"] == 1e-6
    assert found["share"] == 0.75  # the median of 3 / 4, 4 / 5 and 4 / 8
    assert found["stream_share"] == 0.5  # the median of 2 / 4, 4 / 5 and 2 / 8
    assert found["best_share"] == 0.4  # limit 2 (the longer of stream and fastest computing), time 5
    assert [pair["limit_ms"] for pair in found["rounds"]] == [3000.0, 4000.0, 4000.0]


def test_avx2_is_bounded_by_the_rate_of_its_own_vectors_wherever_it_is_forced(monkeypatch):
    bound_of = importlib.import_module("interleave").bound_of
    monkeypatch.delenv("PAGEPOOL_ISA", raising=False)
    assert bound_of("ours", {"PAGEPOOL_ISA": "avx2"}) == "fma_of_8"
    assert bound_of("ours", {}) == bound_of("ours", {"PAGEPOOL_ISA": "avx512"}) == "fma"
    assert bound_of("ours:Bf16", {}) == "fma"  # without AMX, tiles multiply in float32
    monkeypatch.setenv("PAGEPOOL_ISA", "avx2")
    assert bound_of("ours", {}) == "fma_of_8" and bound_of("ggml", {}) == "fma"


@pytest.mark.slow
@needs_gcc
def test_arithmetic_of_bf16_is_measured_against_the_rate_of_dot_products(tmp_path):
    (row,) = limit(tmp_path, "--threads", "1", "--arithmetic", "exact,bf16")["rows"]
    assert row["dtype"] == "bfloat16" and set(row["sides"]) == {"exact", "bf16"}
    assert row["best_fma_ms"] <= row["sides"]["exact"]["compute_ms"]
    side = row["sides"]["bf16"]
    assert side["share"] == pytest.approx(max(side["compute_ms"], row["stream_ms"]) / side["ms"])
    assert 1e-5 < side["error"] < 1e-2


def test_variants_and_a_busy_core_are_measured(tmp_path):
    cost = limit(tmp_path, "--variants", "--threads", "1")["variants"]
    assert {row["variant"] for row in cost} == {"plain", "soft cap", "sinks", "ALiBi", "all three"}
    assert limit(tmp_path, "--busy")["busy"][0]["ratio"] > 0


@needs_gcc
def test_a_build_is_compared_with_itself(tmp_path):
    build = str(Path(pagepool.__file__).parents[1])
    options = ["--only", "append_batch", "--shape", "tiny", "--threads", "1", "--rounds", "1"]
    command = [sys.executable, str(BENCH / "compare.py"), build, build, *options, "--seconds", "0.001"]
    command += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["unit"] for row in rows] == ["ns / token", "ms / call"]
    assert all(row["ratio"] == pytest.approx(row["new"] / row["old"]) for row in rows)


@needs_gcc
def test_prefill_is_reported_relative_to_the_measured_rate(tmp_path):
    command = [sys.executable, "-W", "error", str(BENCH / "prefill.py"), "--cell", "8/2x64:2x64+100:48"]
    command += ["--threads", "1", "--rounds", "1", "--seconds", "0.001", "--dtype", "bfloat16"]
    command += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["cell"] == "8/2x64:2x64+100:48" and row["threads"] == 1
    operations = 4 * 8 * 64 * 2 * (64 * 100 + 64 * 65 // 2)
    assert row["gflops"] == pytest.approx(operations / row["ms"] / 1e6)
    assert row["share"] == pytest.approx(row["gflops"] / row["bound_gflops"])


def test_bytes_and_flops_of_a_shape():
    assert shapes.kv_bytes("S1", "bfloat16") == 2 * 16 * 4096 * 8 * 128 * 2
    assert shapes.page_bytes("S1", "bfloat16") == 64 << 10
    assert shapes.flops("S5") == 4 * 512 * 32 * 64


@pytest.mark.parametrize(
    ("shape", "dtype", "threads", "binds", "share"),
    [
        ("S1", "bfloat16", 2, "stream", 0.80),
        ("S2", "float16", 1, "stream", 0.58),
        ("S5", "float32", 1, "stream", 0.65),
        ("S2", "bfloat16", 1, "fma", 0.75),
        ("S1", "bfloat16", 4, "stream", None),
        ("tiny", "bfloat16", 1, "stream", None),
    ],
)
def test_targets(shape, dtype, threads, binds, share):
    assert shapes.target(shape, dtype, threads, binds) == share


@pytest.mark.parametrize(
    ("ours", "peer", "share", "reached"),
    [(1.0, 2.0, 0.1, True), (1.0, 1.9, 0.79, False), (1.0, 1.9, 0.8, True), (1.0, 0.9, 0.8, False)],
)
def test_twice_the_best_peer_or_the_target_share_and_not_slower(ours, peer, share, reached):
    slow = {"ms": 10 * peer, "share": 0.0}
    row = {"target": 0.8, "sides": {"ours": {"ms": ours, "share": share}, "vllm": {"ms": peer}, "ggml": slow}}
    assert ("below the target" not in verdict(row)) == reached
    assert f"{peer / ours:.2f} times" in verdict(row) and "vLLM" in verdict(row)


def test_every_dtype_holds_the_numbers_of_a_case_and_float64_is_right(tmp_path):
    common.write_case("tiny", tmp_path)
    case = common.Case("tiny", "bfloat16", str(tmp_path))
    exact = case.k * case.UNIT
    assert np.array_equal(exact, exact.astype(np.float16).astype(np.float32))
    assert not (exact.view(np.uint32) & 0xFFFF).any()  # the values are exact in bfloat16
    seq, head = 1, 5
    keys, values = (x[seq, :, head // 4].astype(np.float64) / 64 for x in (case.k, case.v))
    weights = np.exp(keys @ case.q[seq, head].astype(np.float64) / 8)
    assert case.right[seq, head] == pytest.approx(weights @ values / weights.sum(), rel=1e-12)
    assert common.error_of(case.right, case.right) == 0
    assert common.error_of(np.full_like(case.right, np.nan), case.right) == np.inf
    with pytest.raises(NotImplementedError):
        common.Side(case).calls(1)
