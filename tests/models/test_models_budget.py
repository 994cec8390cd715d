"""Engines of two models under one budget of bytes."""

import os

import pytest

for name in ("torch", "transformers"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from families import prompts, tiny_model  # noqa: E402

from pagepool import Engine, MemoryBudget, SamplingParams  # noqa: E402

SECONDS = 60
MIB = 1 << 20
LENGTHS = (450, 350, 400, 300)


@pytest.fixture
def budget():
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield MemoryBudget(name, 8 * MIB)
    for path in (f"pagepool-{name}.llama", f"pagepool-{name}.gemma", f"pagepool.budget-{name}"):
        if os.path.exists(f"/dev/shm/{path}"):
            os.unlink(f"/dev/shm/{path}")


def answers(engine, seed):
    running = [engine.submit(prompt, SamplingParams(8)) for prompt in prompts(LENGTHS, seed)]
    return [generation.result(SECONDS).token_ids for generation in running]


def test_a_model_takes_memory_of_the_prefixes_of_another_and_both_generate_the_same_tokens(budget):
    families = {"llama": "Llama", "gemma": "Gemma3"}
    wanted = {}
    for key, family in families.items():
        with Engine(tiny_model(family), num_blocks=1024) as engine:
            wanted[key] = [answers(engine, seed) for seed in range(4)]
    engines = {
        key: Engine(tiny_model(family), shared_pool=f"{budget.name}.{key}", memory_budget=budget)
        for key, family in families.items()
    }
    try:
        taken = 0
        for turn in range(2):
            for key, engine in engines.items():
                before = engines["llama"].prefix_cache.num_cached
                for seed in (2 * turn, 2 * turn + 1):
                    assert answers(engine, seed) == wanted[key][seed]
                    assert budget.used <= budget.bytes
                if key == "gemma":
                    taken += before - engines["llama"].prefix_cache.num_cached
                engine.check()
        assert taken > 0
        assert budget.pools().keys() == {f"{budget.name}.{key}" for key in families}
    finally:
        for engine in engines.values():
            engine.close()


def test_a_budget_needs_a_shared_pool(budget):
    with pytest.raises(ValueError, match=f"memory_budget '{budget.name}' needs a shared_pool"):
        Engine(tiny_model("Llama"), memory_budget=budget)
