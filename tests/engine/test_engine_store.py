"""An engine with a store finds the prompts of earlier engines."""

import re

import pytest
from fake_runner import FakeRunner

from pagepool import Engine, SamplingParams
from pagepool.prefix.page_file import PageFile
from pagepool.scheduling import prefix_adapter
from pagepool.scheduling.prefix_adapter import PrefixAdapter

STORE_BYTES = 16 << 20
LONG = list(range(1, 102))  # 25 full blocks, and a token
PARAMS = SamplingParams(max_new_tokens=8)


def answers(engine, prompts):
    running = [engine.submit(prompt, PARAMS) for prompt in prompts]
    return [(generation.result().token_ids, generation.num_cached) for generation in running]


def test_an_engine_finds_the_prompts_of_the_engine_before_it(tmp_path):
    prompts = [list(range(1, 42)), list(range(60, 90)), [*range(1, 20), 7, 7, 7]]
    with Engine(FakeRunner()) as engine:
        wanted = [tokens for tokens, _ in answers(engine, prompts)]
    for number in range(3):
        with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES) as engine:
            found = answers(engine, prompts)
            assert [tokens for tokens, _ in found] == wanted
            assert [cached for _, cached in found][:2] == ([40, 28] if number else [0, 0])
            engine.check()
    with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES, weights_digest="others") as engine:
        assert answers(engine, prompts)[0][1] == 0


def test_a_pool_that_is_too_small_for_all_prompts_finds_them_in_the_store(tmp_path):
    """The cached prompts exceed the memory: 60 prompts of 10 blocks each, and a pool of 64 blocks."""
    prompts = [[number % 250 + 1, *range(1, 40)] for number in range(60)]
    with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES) as engine:
        wanted = [answers(engine, [prompt])[0][0] for prompt in prompts]
        assert engine.prefix_cache.flush()
        found = [answers(engine, [prompt])[0] for prompt in prompts]
        assert [tokens for tokens, _ in found] == wanted
        assert sum(cached for _, cached in found) >= 50 * 36
        engine.check()


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="store_bytes"):
        Engine(FakeRunner(), store=tmp_path)
    with pytest.raises(ValueError, match="prefix cache"):
        Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES, prefix_cache=False)
    with pytest.raises(ValueError, match=re.escape("max_bytes") + r".*1000"):
        Engine(FakeRunner(), store=tmp_path, store_bytes=1000)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Return a function that starts an engine which reads two blocks at a time, and the tokens after a stored prompt.

    `engine.reads` has the number of blocks of each read. `engine.at_read` is called after a step has read. By the
    engine's clock, reading two blocks takes a second, and a step of the model takes `engine.model_seconds`.
    """
    with Engine(FakeRunner(), store=tmp_path, store_bytes=STORE_BYTES) as engine:
        [(wanted, _)] = answers(engine, [LONG])
        page_bytes = engine.prefix_cache.link.queue.page_bytes
    monkeypatch.setattr(prefix_adapter, "PART_BYTES", 2 * page_bytes)
    read, load = PageFile.load, PrefixAdapter.load

    def start(**options):
        seconds = [0.0]

        def step(tokens):
            seconds[0] += engine.model_seconds

        engine = Engine(FakeRunner(fails=step, **options), store=tmp_path, store_bytes=STORE_BYTES)
        engine.reads, engine.at_read, engine.model_seconds = [], lambda: None, 0.0

        def noted(file, entries, *more):
            engine.reads.append(len(entries))
            seconds[0] += len(entries) / 2
            return read(file, entries, *more)

        def loaded(adapter, seq):
            has_read = load(adapter, seq)
            if has_read:
                engine.at_read()
            return has_read

        monkeypatch.setattr(PageFile, "load", noted)
        monkeypatch.setattr(PrefixAdapter, "load", loaded)
        monkeypatch.setattr(prefix_adapter, "perf_counter", lambda: seconds[0])
        return engine

    return start, wanted


def beside_another(engine, prompt):
    """Return the generation of a prompt that arrives while another request runs, and the tokens of both."""
    other = engine.submit([9, 9, 9], SamplingParams(max_new_tokens=60, ignore_eos=True))
    next(iter(other))
    generation = engine.submit(prompt, PARAMS)
    return generation, generation.result().token_ids, other.result().token_ids


def test_steps_of_other_requests_read_a_few_blocks_each(stored):
    start, wanted = stored
    with start() as engine:
        generation, found, other = beside_another(engine, LONG)
        assert (found, generation.num_cached) == (wanted, 100) and engine.reads == [2] * 12 + [1]
        engine.check()
        engine.reset_prefix_cache()
    with Engine(FakeRunner()) as engine:
        assert answers(engine, [[9, 9, 9]])[0][0] == other[: PARAMS.max_new_tokens]


def test_long_steps_read_for_as_long_as_a_step_takes(stored):
    start, wanted = stored
    with start() as engine:
        counts = []
        engine.model_seconds, engine.at_read = 4.0, lambda: counts.append(sum(engine.reads))
        generation, found, _ = beside_another(engine, LONG)
        assert (found, generation.num_cached) == (wanted, 100) and counts == [2, 10, 18]


def test_a_prompt_that_nothing_runs_beside_is_read_at_once(stored):
    start, wanted = stored
    with start() as engine:
        assert answers(engine, [LONG]) == [(wanted, 100)] and engine.reads == [25]


def test_blocks_that_are_forgotten_while_others_are_read_are_computed(stored):
    start, wanted = stored
    with start() as engine:

        def forget():
            if len(engine.reads) == 5:
                engine.prefix_cache.reset_prefix_cache()

        engine.at_read = forget
        generation, found, _ = beside_another(engine, LONG)
        assert (found, generation.num_cached) == (wanted, 0)
        engine.check()


def test_a_request_that_is_cancelled_while_its_blocks_are_read_leaves_none_behind(stored):
    start, _ = stored
    with start() as engine:
        engine.at_read = lambda: len(engine.reads) == 3 and generation.cancel()
        other = engine.submit([9, 9, 9], SamplingParams(max_new_tokens=60, ignore_eos=True))
        next(iter(other))
        generation = engine.submit(LONG, PARAMS)
        other.result()
        assert len(engine.reads) <= 4
        engine.check()


@pytest.mark.parametrize("num_blocks", [30, 34, 40])
def test_a_pool_without_room_for_all_blocks_ends_the_reading(stored, num_blocks):
    start, wanted = stored
    with start(num_blocks=num_blocks) as engine:
        _, found, _ = beside_another(engine, LONG)
        assert found == wanted
        engine.check()
