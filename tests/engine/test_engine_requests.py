"""The engine with a runner without a model: streams, cancels, failures, limits, and no leaks."""

import asyncio
import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
from fake_runner import Bytes, FakeRunner, random_logits, reason_of, says
from refusals import refuses

from pagepool import SchedulerConfig
from pagepool.engine import Engine, SamplingParams
from pagepool.errors import EngineClosed, RequestRejected

SECONDS = 60  # timeout for operations that take milliseconds


def new_engine(runner=None, tokenizer=None, **options):
    return Engine(runner or FakeRunner(), tokenizer or Bytes(), **options)


def alone(prompt, count, **sampling):
    """Return the output of an engine with this request alone."""
    with new_engine() as engine:
        return engine.submit(prompt, SamplingParams(count, **sampling)).result(SECONDS).token_ids


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.001)


def test_tokens_come_one_by_one_and_their_texts_add_up():
    with new_engine() as engine:
        generation = engine.submit("hello", SamplingParams(20))
        tokens = list(generation)
        assert [token.token_id for token in tokens] == generation.token_ids
        assert "".join(token.text for token in tokens) == generation.text == bytes(generation.token_ids).decode()
        assert generation.finish_reason == "length" and len(tokens) == 20
        assert generation.num_prompt_tokens == 5 and 0 < generation.time_to_first_token < SECONDS
        assert list(generation) == []
        assert engine.runner.threads == {"pagepool-engine"}
    assert engine.runner.is_closed


def test_many_threads_get_what_each_would_get_alone():
    wanted = {seed: alone(f"prompt {seed % 3}", 16, temperature=1.0, seed=seed) for seed in range(12)}
    assert len(set(map(tuple, wanted.values()))) == 12
    found = {}
    with new_engine(FakeRunner(num_blocks=30)) as engine:

        def ask(seed):
            generation = engine.submit(f"prompt {seed % 3}", SamplingParams(16, temperature=1.0, seed=seed))
            found[seed] = [token.token_id for token in generation]

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        engine.check()
    assert found == wanted


def test_coroutines_get_their_tokens_as_they_come():
    async def ask(engine, prompt):
        return [token.token_id async for token in engine.submit(prompt, SamplingParams(12))]

    async def ask_all(engine):
        return await asyncio.gather(*(ask(engine, f"prompt {number}") for number in range(8)))

    with new_engine() as engine:
        assert asyncio.run(ask_all(engine)) == [alone(f"prompt {number}", 12) for number in range(8)]


def test_a_coroutine_that_is_cancelled_leaves_nothing():
    async def ask(engine):
        async for _ in engine.submit("x", SamplingParams(200)):
            await asyncio.sleep(0)

    async def main(engine):
        task = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        asyncio.run(main(engine))
        wait_until(lambda: engine.num_requests == 0)
        engine.check()
        assert engine.stats()["ended"]["abort"] == 1


def test_cancel_ends_it_and_gives_its_blocks_back():
    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        generation = engine.submit("x", SamplingParams(200))
        next(generation)
        generation.cancel()
        assert generation.result(SECONDS).finish_reason == "abort" and len(generation.token_ids) < 200
        generation.cancel()
        wait_until(lambda: engine.num_requests == 0)
        engine.check()


def test_an_iterator_that_is_dropped_or_closed_is_cancelled():
    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        for _ in engine.submit("first", SamplingParams(200)):
            break
        engine.submit("nobody takes it", SamplingParams(200))
        held = engine.submit("closed", SamplingParams(200))
        next(held)
        held.close()
        gc.collect()
        wait_until(lambda: engine.num_requests == 0)
        assert engine.stats()["ended"] == {"stop": 0, "length": 0, "abort": 3, "error": 0}
        engine.check()


def test_requests_that_wait_end_when_their_caller_leaves():
    config = SchedulerConfig(max_sequences=1)
    with new_engine(FakeRunner(step_seconds=0.005), config=config) as engine:
        running = engine.submit("first", SamplingParams(200))
        next(running)
        engine.submit("second", SamplingParams(200))
        wait_until(lambda: engine.num_requests == 1)
        assert engine.stats()["ended"]["abort"] == 1


def test_a_failure_of_the_model_ends_the_requests_of_that_step_and_no_other():
    failing = []

    def fails(tokens):
        return ArithmeticError("overflow") if any(7 in row for row in tokens) else None

    runner = FakeRunner(fails=fails, step_seconds=0.002)
    with new_engine(runner, config=SchedulerConfig(max_sequences=1)) as engine:
        good = engine.submit([1, 2], SamplingParams(3))
        bad = engine.submit([7], SamplingParams(3))
        later = engine.submit([3], SamplingParams(3))
        assert reason_of(bad) == "error" and isinstance(bad.error, ArithmeticError)
        with pytest.raises(RuntimeError, match="overflow"):
            failing.extend(bad)
        assert not failing
        assert [good.result(SECONDS).finish_reason, later.result(SECONDS).finish_reason] == ["length", "length"]
        assert engine.is_accepting
        engine.check()


def test_a_step_that_failed_leaves_nothing_in_the_prefix_cache():
    prompt = [*range(1, 41)]
    wanted, failures = alone(prompt, 5), [OSError("a device hiccup")]
    with new_engine(FakeRunner(fails=lambda batch: failures.pop() if failures else None)) as engine:
        assert reason_of(engine.submit(prompt, SamplingParams(5))) == "error"
        assert engine.submit(prompt, SamplingParams(5)).result(SECONDS).token_ids == wanted
        assert engine.stats()["cached_tokens"] == 0
        engine.check()


def test_nan_logits_end_only_their_request():
    def next_token(tokens):
        logits = random_logits(tokens)
        if tokens[0] == 7:
            logits[40] = np.nan
        return logits

    with new_engine(FakeRunner(next_token=next_token)) as engine:
        both = engine.submit([7, 1], SamplingParams(9)), engine.submit([8, 1], SamplingParams(9))
        assert [reason_of(one) for one in both] == ["error", "length"]
        assert "token 40 is nan" in str(both[0].error)
        engine.check()


def test_nan_of_a_prompt_chunk_leaves_nothing_in_the_prefix_cache():
    """Also the chunks before it, and the cached blocks that it read: one of them may be the cause."""
    prompt, wrong = [*range(1, 41)], []

    def next_token(tokens):
        return random_logits(tokens) * (np.nan if len(tokens) in wrong else 1)

    config = SchedulerConfig(max_prefill_tokens=16)
    with new_engine(FakeRunner(next_token=next_token), config=config) as engine:
        wanted = engine.submit(prompt, SamplingParams(5)).result(SECONDS).token_ids
        for length in (16, 32, 40, 42):  # ends of chunks, and a later token
            wrong[:] = [length]
            failed = engine.submit([length, *prompt[1:]], SamplingParams(5))
            with pytest.raises(RuntimeError, match="is nan: the model has failed"):
                list(failed)
            wrong.clear()
            assert engine.prefix_cache.cached_tokens([length, *prompt[1:]]) == 0
        wrong[:] = [40]
        with pytest.raises(RuntimeError):
            list(engine.submit(prompt, SamplingParams(5)))  # it has read the 36 cached tokens
        wrong.clear()
        again = engine.submit(prompt, SamplingParams(5)).result(SECONDS)
        assert (again.num_cached, again.token_ids) == (0, wanted)
        engine.check()


def test_a_request_whose_own_parameters_leave_no_token_forgets_no_pages():
    prompt = [*range(1, 41)]
    with new_engine() as engine:
        engine.submit(prompt, SamplingParams(5)).result(SECONDS)
        impossible = engine.submit(prompt, SamplingParams(5, min_tokens=1, stop_token_ids=range(256)))
        assert reason_of(impossible) == "error"
        assert engine.submit(prompt, SamplingParams(5)).result(SECONDS).num_cached == 36


def test_a_failed_tokenizer_ends_only_its_request():
    class Picky(Bytes):
        def decode(self, ids, skip_special_tokens=True):
            if ord("b") in ids:
                raise KeyError("b")
            return super().decode(ids)

    runner = FakeRunner(next_token=says("abc"))
    with new_engine(runner, Picky()) as engine:
        both = engine.submit("x", SamplingParams(9)), engine.submit("x", SamplingParams(1))
        assert [reason_of(one) for one in both] == ["error", "length"]
        assert isinstance(both[0].error, KeyError) and both[0].text == "a"
        assert engine.is_accepting
        engine.check()


def test_an_engine_whose_scheduler_fails_ends_everything_and_says_so(monkeypatch):
    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        first = engine.submit("x", SamplingParams(200))
        next(first)
        monkeypatch.setattr(engine.scheduler._prefix, "publish_filled", lambda batch: 1 / 0)
        assert reason_of(first) == "error" and isinstance(first.error, ZeroDivisionError)
        wait_until(lambda: not engine.is_accepting)
        with pytest.raises(RuntimeError, match="accepts no more requests"):
            engine.submit("y", SamplingParams(1))
        assert engine.runner.pool.allocator.in_use == engine.prefix_cache.num_cached


def test_stop_strings_end_the_text_wherever_tokens_part():
    with new_engine(FakeRunner(next_token=says("one two three"))) as engine:
        generation = engine.submit("x", SamplingParams(50, stop=["zzz", "two th"]))
        texts = [token.text for token in generation]
        assert generation.text == "".join(texts) == "one " and generation.finish_reason == "stop"
        assert bytes(generation.token_ids) == b"one two th"
        assert texts == [*"one ", "", "", "", "", "", ""]
        engine.check()


def test_an_incomplete_stop_string_is_text():
    with new_engine(FakeRunner(next_token=says("one two"))) as engine:
        assert engine.submit("x", SamplingParams(50, stop="two three")).result(SECONDS).text == "one two"
        assert engine.submit("x", SamplingParams(6, stop="two three")).result(SECONDS).text == "one tw"


def test_a_character_of_several_tokens_is_never_halved():
    with new_engine(FakeRunner(next_token=says("aé€😀b"))) as engine:
        generation = engine.submit("x", SamplingParams(50))
        assert [token.text for token in generation] == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
        cut = engine.submit("x", SamplingParams(5)).result(SECONDS)
        assert cut.text == "aé\ufffd" and cut.finish_reason == "length"


def test_stop_tokens_end_it_and_are_no_text():
    with new_engine(FakeRunner(next_token=says("abcdef"))) as engine:
        generation = engine.submit("x", SamplingParams(50, stop_token_ids=[ord("d")])).result(SECONDS)
        assert (generation.text, generation.finish_reason) == ("abc", "stop")
        assert generation.token_ids[-1] == ord("d")
        generation = engine.submit("x", SamplingParams(50)).result(SECONDS)
        assert (generation.text, generation.token_ids[-1]) == ("abcdef", 0)


def test_ignore_eos_leaves_the_stop_tokens_of_the_request_alone():
    with new_engine(FakeRunner(next_token=says("abcdef"))) as engine:
        wanted = engine.submit("x", SamplingParams(7)).result(SECONDS)
        assert (wanted.finish_reason, wanted.token_ids[-1]) == ("stop", 0)
        found = engine.submit("x", SamplingParams(7, ignore_eos=True)).result(SECONDS)
        assert (found.text, found.finish_reason, found.token_ids) == ("abcdef", "length", wanted.token_ids)
        found = engine.submit("x", SamplingParams(7, ignore_eos=True, stop_token_ids=[ord("d")])).result(SECONDS)
        assert (found.text, found.finish_reason) == ("abc", "stop")


def test_stop_tokens_do_not_come_before_min_tokens():
    def next_token(tokens):
        logits = np.zeros(256, np.float32)
        logits[[0, ord("a"), ord("b")]] = 9.0, 7.0, 8.0  # without min_tokens the stop token would be first
        return logits

    with new_engine(FakeRunner(next_token=next_token)) as engine:
        for count in range(5):
            params = SamplingParams(20, min_tokens=count, stop_token_ids=[ord("b")])
            found = engine.submit("x", params).result(SECONDS)
            assert (found.token_ids, found.finish_reason) == ([*b"a" * count, 0], "stop")
        drawn = engine.submit("x", SamplingParams(20, temperature=1.0, seed=1, min_tokens=20)).result(SECONDS)
        assert len(drawn.token_ids) == 20 and 0 not in drawn.token_ids
        begun = engine.read([*b"xaa"], SamplingParams(20, min_tokens=3, stop_token_ids=[ord("b")]))
        assert engine._submit(begun, 2).result(SECONDS).token_ids == [ord("a"), 0]


def test_stop_strings_do_not_end_a_text_before_min_tokens():
    with new_engine(FakeRunner(next_token=says("one one one"))) as engine:
        for count, text in ((0, ""), (2, "one "), (3, "one "), (4, "one "), (6, "one one "), (9, "one one one")):
            generation = engine.submit("x", SamplingParams(50, stop=["one"], min_tokens=count)).result(SECONDS)
            assert (generation.text, generation.finish_reason) == (text, "stop")


def test_logprobs_are_those_of_the_logits():
    with new_engine() as engine:
        generation = engine.submit("x", SamplingParams(4, temperature=2.0, seed=1, logprobs=3))
        context = list(b"x")
        for token in generation:
            logits = random_logits(context).astype(np.float64)
            wanted = logits - np.log(np.exp(logits).sum())
            assert token.logprob == pytest.approx(wanted[token.token_id])
            best = np.argsort(-wanted)[:3]
            assert token.top_logprobs == pytest.approx({int(index): wanted[index] for index in best})
            context.append(token.token_id)
        assert next(engine.submit("x", SamplingParams(1))).logprob is None
        assert next(engine.submit("x", SamplingParams(1, logprobs=0))).top_logprobs == {}


def test_a_prompt_begins_with_the_pages_of_an_earlier_one():
    with new_engine() as engine:
        engine.submit("a prompt of some length", SamplingParams(1)).result(SECONDS)
        again = engine.submit("a prompt of some length", SamplingParams(1)).result(SECONDS)
        other = engine.submit("a prompt of some length", SamplingParams(1), cache_salt="other").result(SECONDS)
        assert (again.num_cached, other.num_cached) == (20, 0)
    with new_engine(prefix_cache=False) as engine:
        engine.submit("a prompt of some length", SamplingParams(1)).result(SECONDS)
        assert engine.submit("a prompt of some length", SamplingParams(1)).result(SECONDS).num_cached == 0
        engine.check()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_request_that_another_engine_has_begun_goes_on(sampling):
    whole = alone("hello", 16, **sampling)
    for count in (0, 1, 9, 15):
        with new_engine() as engine:
            begun = [*b"hello", *whole[:count]]
            request = engine.read(begun, SamplingParams(16 - count, **sampling))
            assert engine._submit(request, count).result(SECONDS).token_ids == whole[count:]
            with refuses(ValueError, "num_generated", 5, 6):
                engine._submit(engine.read("hello", None), 6)


def test_the_events_of_the_prefix_cache_are_noted_if_they_are_asked_for():
    with new_engine(prefix_events=8) as engine:
        engine.submit("a prompt of some length", SamplingParams(1)).result(SECONDS)
        assert [event.kind for event in engine.prefix_cache.drain_events()] == ["stored"] * 5
    with new_engine() as engine, pytest.raises(ValueError):
        engine.prefix_cache.drain_events()


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, ("prompt", 1, 0)),
        ([], {}, ("prompt", 1, 0)),
        ([300], {}, ("prompt", 255, 300)),
        ([-1], {}, ("prompt", 255, -1)),
        ("\ud800", {}, ("prompt", "character 0")),
        ("x" * 90, {"max_new_tokens": 20}, ("prompt", 90, 20, 100)),
        ("x" * 40, {"max_new_tokens": 50}, ("prompt", 40, 50, 64)),
        ("x" * 100, {"max_new_tokens": None}, ("prompt", 100, 1)),
        ("x", {"max_new_tokens": 0}, ("max_new_tokens", 1, 0)),
        ("x", {"temperature": -1}, ("temperature", -1)),
        ("x", {"temperature": float("inf")}, ("temperature", "inf")),
        ("x", {"top_k": -1}, ("top_k", 0, -1)),
        ("x", {"top_p": 0.0}, ("top_p", 1, 0.0)),
        ("x", {"stop": [""]}, ("stop", 1, 0)),
        ("x", {"logprobs": 21}, ("logprobs", 20, 21)),
        ("x", {"min_tokens": -1}, ("min_tokens", 0, -1)),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_others_go_on(prompt, options, words):
    with new_engine(FakeRunner(num_blocks=16, max_model_len=100)) as engine:
        running = engine.submit("other", SamplingParams(20))
        with refuses(RequestRejected if "prompt" in words else ValueError, *words):
            engine.submit(prompt, SamplingParams(**{"max_new_tokens": 5, **options}))
        assert running.result(SECONDS).finish_reason == "length"
        assert engine.num_requests == 0


@pytest.mark.parametrize(
    "options", [{"seed": "x"}, {"stop": 5}, {"stop": [3]}, {"top_k": 1.5}, {"logprobs": "3"}, {"ignore_eos": 1}]
)
def test_a_request_of_wrong_types_is_refused(options):
    with new_engine() as engine, pytest.raises(TypeError):
        engine.submit("x", SamplingParams(5, **options))


def test_without_parameters_a_text_may_fill_the_pool_or_the_model():
    for limits, room in (({"num_blocks": 16}, 64), ({"max_model_len": 40}, 40)):
        with new_engine(FakeRunner(**limits)) as engine:
            assert engine.max_model_len == limits.get("max_model_len")
            generation = engine.submit("hello").result(SECONDS)
            assert (len(generation.token_ids), generation.finish_reason) == (room - 5, "length")
            with refuses(TypeError, "params", "int"):
                engine.submit("hello", 5)


def test_an_engine_without_a_tokenizer_takes_token_ids():
    with Engine(FakeRunner()) as engine:
        generation = engine.submit([*b"hello"], SamplingParams(4)).result(SECONDS)
        assert generation.token_ids == alone("hello", 4) and generation.text == ""
        with refuses(TypeError, "tokenizer"):
            engine.submit("hello", SamplingParams(4))
        with refuses(TypeError, "stop"):
            engine.submit([1], SamplingParams(4, stop="x"))
        for wrong in (b"hello", bytearray(b"hello"), memoryview(b"hello"), {1: 2}, {1, 2}):
            with refuses(TypeError, "prompt", type(wrong).__name__):
                engine.submit(wrong, SamplingParams(4))
        with refuses(ValueError, "min_tokens", 3, 9):
            engine.submit([1], SamplingParams(3, min_tokens=9))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"prefix_cache": "no"}, TypeError, ("prefix_cache", "bool", "str")),
        ({"tokenizer": "DIR"}, TypeError, ("tokenizer", "str", "DIR")),
        ({"config": {"max_sequences": 4}}, TypeError, ("config", "SchedulerConfig", "dict")),
        ({"memory_budget": "host:1G", "shared_pool": "x"}, TypeError, ("memory_budget", "MemoryBudget", "str")),
        ({"store_bytes": 1 << 26}, ValueError, ("store_bytes", 1 << 26, "None")),
        ({"num_blocks": 0}, ValueError, ("num_blocks", 1, 0)),
        ({"num_blocks": 128}, ValueError, ("num_blocks", 128, "runner")),
        ({"pool_bytes": 128}, ValueError, ("pool_bytes", 128, "runner")),
        ({"dtype": "bfloat16"}, ValueError, ("dtype", "bfloat16", "runner")),
        ({"pack_weights": True}, ValueError, ("pack_weights", "True", "runner")),
        ({"shared_pool": "x"}, ValueError, ("shared_pool", "x", "runner")),
        ({"openmp": "fast"}, ValueError, ("openmp", "fast")),
    ],
)
def test_arguments_that_an_engine_would_ignore_are_refused(arguments, error, words):
    runner = FakeRunner()
    with refuses(error, *words):
        Engine(runner, **arguments)
    assert not runner.is_closed and runner.pool.allocator.in_use == 0


def test_an_engine_that_cannot_be_made_closes_its_store(tmp_path):
    for _ in range(2):
        with refuses(ValueError, "openmp"):
            new_engine(store=tmp_path, store_bytes=1 << 26, openmp="fast")
    with new_engine(store=tmp_path, store_bytes=1 << 26) as engine:
        assert engine.store.is_writer


def test_the_result_of_a_request_that_failed_is_an_error():
    runner = FakeRunner(fails=lambda tokens: OSError("a device hiccup") if tokens[0][0] == 7 else None)
    with new_engine(runner) as engine:
        failed = engine.submit([7, 1], SamplingParams(3))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the generation failed: a device hiccup") as caught:
                failed.result(SECONDS)
            assert isinstance(caught.value.__cause__, OSError) and failed.token_ids == []
        stopped = engine.submit([1, 2], SamplingParams(60))
        stopped.cancel()
        assert stopped.result(SECONDS).finish_reason in ("abort", "length")  # a cancelled request has not failed


def test_a_forked_child_can_neither_submit_nor_wait():
    """No thread of the child runs the request."""
    with new_engine() as engine:
        running = engine.submit("hello", SamplingParams(20))
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: engine.submit("x"), running.result, lambda: next(running)):
                try:
                    call()
                except EngineClosed as error:
                    refused += str(os.getppid()) in str(error)
            engine.close()  # as at the exit of the child
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert running.result(SECONDS).finish_reason == "length"
        engine.check()


def test_drain_waits_for_running_requests_and_refuses_new_ones():
    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        generation = engine.submit("x", SamplingParams(30))
        assert not engine.drain(0.01) and generation.finish_reason is None
        with pytest.raises(EngineClosed):
            engine.submit("y", SamplingParams(1))
        assert engine.drain(SECONDS) and generation.finish_reason == "length"


def test_close_aborts_running_and_waiting_requests():
    engine = new_engine(FakeRunner(step_seconds=0.005), config=SchedulerConfig(max_sequences=1))
    running, waiting = (engine.submit("x", SamplingParams(200)) for _ in range(2))
    next(running)
    engine.close()
    engine.close()
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert list(waiting) == []
    with pytest.raises(RuntimeError) as raised:
        engine.submit("y", SamplingParams(1))
    assert isinstance(raised.value, EngineClosed)


def test_an_engine_that_is_dropped_ends_after_its_last_request(tmp_path):
    for _ in range(2):
        engine = new_engine(store=tmp_path, store_bytes=1 << 24)
        assert engine.store.is_writer  # the engine before has closed it
        thread, reference = engine._thread, weakref.ref(engine)
        generation = engine.submit("hello", SamplingParams(20))
        del engine
        assert reason_of(generation) == "length"
        end = time.monotonic() + SECONDS
        while reference() is not None and time.monotonic() < end:
            gc.collect()
        thread.join(SECONDS)
        assert reference() is None and not thread.is_alive()


def test_result_times_out_and_the_request_goes_on():
    with new_engine(FakeRunner(step_seconds=0.005)) as engine:
        generation = engine.submit("x", SamplingParams(20))
        with refuses(TimeoutError, "0.01"):
            generation.result(0.01)
        assert len(generation.result(SECONDS).token_ids) == 20


def test_stats_count_tokens_and_endings():
    with new_engine() as engine:
        for _ in range(2):
            engine.submit("a prompt of some length", SamplingParams(5)).result(SECONDS)
        wait_until(lambda: engine.stats()["scheduler"]["active"] == 0)
        stats = engine.stats()
        assert (stats["requests"], stats["ended"]["length"]) == (0, 2)
        assert (stats["prompt_tokens"], stats["cached_tokens"], stats["generated_tokens"]) == (46, 20, 10)
        assert 0 < stats["model_seconds"] < stats["step_seconds"]


def test_a_reset_forgets_prefixes_also_of_a_request_that_runs():
    prompt = "a prompt of some length"
    with new_engine(FakeRunner(num_blocks=128, step_seconds=0.005)) as engine:
        engine.submit(prompt, SamplingParams(1)).result(SECONDS)
        running = engine.submit(prompt, SamplingParams(60))
        next(running)
        assert running.num_cached > 0
        engine.reset_prefix_cache()
        assert running.finish_reason is None and engine.prefix_cache.num_cached == 0
        assert running.result(SECONDS).token_ids == alone(prompt, 60)
        assert engine.submit(prompt, SamplingParams(1)).result(SECONDS).num_cached == 0
        engine.check()
    with refuses(EngineClosed, "prefix cache"):
        engine.reset_prefix_cache()
    with new_engine(prefix_cache=False) as engine:
        engine.reset_prefix_cache()


def test_a_checked_request_gives_several_choices_of_their_own():
    with new_engine() as engine:
        checked = engine.read("x", SamplingParams(20, temperature=1.0, seed=1, stop="no"))
        found = [engine.submit(checked.choice(seed=seed)).result(SECONDS).text for seed in (1, 2, 1)]
        wanted = [engine.submit("x", SamplingParams(20, temperature=1.0, seed=seed, stop="no")) for seed in (1, 2)]
        assert found == [wanted[number].result(SECONDS).text for number in (0, 1, 0)] and found[0] != found[1]
