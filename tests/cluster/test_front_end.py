"""The front end with workers that die, in one process without Ray: engines without a model, pages by memcpy."""

import asyncio
import gc
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from random import Random

import pytest
from fake_runner import Bytes, FakeRunner, reason_of
from refusals import refuses
from scripted_drafts import drafting

from pagepool.cluster import front_end as front_end_module
from pagepool.cluster import worker as worker_module
from pagepool.cluster.front_end import FrontEnd
from pagepool.cluster.messages import Ended, Limits, Waiting, WorkerLost
from pagepool.cluster.ray import serve
from pagepool.cluster.worker import Worker
from pagepool.engine import Engine, SamplingParams, Structured
from pagepool.engine.structured import Grammars
from pagepool.engine.tokenizing import CONTEXT
from pagepool.errors import EngineClosed, RequestRejected
from pagepool.integrations.transformers.pretrained import ModelError
from pagepool.transfer import LocalTransfer

SECONDS = 60
PROMPT = "a prompt that is longer than some blocks"


def wait_until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)


class Died(WorkerLost):
    """The exception that the transport raises if the process of a worker has exited."""


class Side:
    """Workers in this process. `kills` maps the name of a worker to the number of tokens in a call before it dies."""

    def __init__(self):
        self.workers = {}
        self.dead = set()
        self.kills = {}
        self.calls = []

    async def generate(self, name, call):
        self.calls.append((name, call))
        if name in self.dead:
            raise Died(name)
        left = self.kills.get(name)
        stream = self.workers[name].generate(call)
        try:
            async for message in stream:
                if name in self.dead or left == 0:
                    self.dead.add(name)
                    raise Died(name)
                yield message
                if left is not None and not isinstance(message, Waiting):
                    left -= 1
        finally:
            await stream.aclose()

    async def release(self, name, number):
        if name in self.dead:
            raise Died(name)
        self.workers[name].release(number)

    async def reset_prefix_cache(self, name):
        if name in self.dead:
            raise Died(name)
        await self.workers[name].reset_prefix_cache()


class World:
    """Workers, a front end and an event loop. `news()` passes the workers' messages to the front end."""

    def __init__(self, decode, prefill, tokenizer=None, **options):
        self.decode, self.prefill, self.tokenizer = Side(), Side(), tokenizer or Bytes()
        for side, count, kind in ((self.decode, decode, "decode"), (self.prefill, prefill, "prefill")):
            for number in range(count):
                self.add(side, f"{kind}-{number}", bool(prefill), **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.lock, self.ends = threading.Lock(), threading.Event()
        self.new_front_end()
        self.teller = threading.Thread(target=self.tell)
        self.teller.start()

    def add(self, side, name, moves, drafts=None, **options):
        engine = Engine(FakeRunner(num_blocks=256, **options), prefix_events=4096, drafts=drafts)
        engine.grammars = Grammars(self.tokenizer, engine.encoder.vocab_size, [0])
        transfer = LocalTransfer(f"{id(self)}-{name}") if moves else None
        kind = {"is_prefill": side is self.prefill, "stop_token_ids": frozenset([0])}
        side.workers[name] = Worker(engine, name, transfer=transfer, **kind)

    def new_front_end(self, **options):
        limits = next(iter(self.decode.workers.values())).limits()
        prefill = self.prefill if self.prefill.workers else None
        self.front_end = FrontEnd(limits, self.tokenizer, self.decode, prefill, loop=self.loop, **options)
        with self.lock:
            self.wants = dict.fromkeys(self.workers, False)
        self.news()  # the front end asks for snapshots,
        self.news()  # and gets them

    @property
    def workers(self):
        return {**self.decode.workers, **self.prefill.workers}

    def news(self):
        with self.lock:
            for name, worker in self.workers.items():
                if name not in self.decode.dead | self.prefill.dead:
                    self.wants[name] = self.front_end.news(worker.news(self.wants.get(name, False)))
                    worker.follow(self.front_end.epoch)

    def tell(self):
        while not self.ends.wait(0.02):
            self.news()

    def close(self):
        self.ends.set()
        self.teller.join()
        self.front_end.close()
        wait_until(lambda: self.front_end.num_requests == 0)
        for worker in self.workers.values():
            wait_until(lambda worker=worker: worker.engine.num_requests == 0 and worker.load() == 0)
            assert worker.check_empty() == 0
            worker.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@contextmanager
def cluster(decode=2, prefill=0, **options):
    world = World(decode, prefill, **options)
    try:
        yield world
    finally:
        world.close()


def alone(prompt, **options):
    """Return the answer of a single engine."""
    with Engine(FakeRunner(num_blocks=256), Bytes()) as engine:
        found = engine.submit(prompt, SamplingParams(**options)).result(SECONDS)
        return found.token_ids, found.text, found.finish_reason


def answer(generation):
    found = generation.result(SECONDS)
    return found.token_ids, found.text, found.finish_reason


SAMPLING = [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3}]
SAMPLING += [{"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {99: 3}, "bad_words": ["e", [65, 66]]}]
SAMPLING += [{"min_tokens": 12, "stop": "e", "min_p": 0.1, "frequency_penalty": 2.0, "temperature": 1.0, "seed": 3}]
KINDS = ["greedy", "seed", "nucleus", "penalties", "min_tokens"]
if find_spec("llguidance") is not None:
    SAMPLING += [{"structured": Structured(regex="([a-f]{3}-){1,9}"), "temperature": 1.0, "seed": 4}]
    KINDS += ["structured"]


@pytest.mark.parametrize("sampling", SAMPLING, ids=KINDS)
@pytest.mark.parametrize("prefill", [0, 2])
def test_a_cluster_answers_as_one_engine_does(prefill, sampling):
    with cluster(2, prefill) as world:
        for prompt in (PROMPT, PROMPT + "!", "x", "another"):
            generation = world.front_end.submit(prompt, SamplingParams(20, **sampling))
            streamed = list(generation)
            assert answer(generation) == alone(prompt, max_new_tokens=20, **sampling)
            assert [token.token_id for token in streamed] == generation.token_ids
            world.news()
        assert world.front_end.stats()["lost_workers"] == 0


@pytest.mark.parametrize("sampling", SAMPLING, ids=KINDS)
@pytest.mark.parametrize("after", [0, 1, 2, 9, 20])
def test_a_request_continues_on_another_worker_without_repeated_tokens(after, sampling):
    with cluster(3) as world:
        world.decode.kills["decode-0"] = world.decode.kills["decode-1"] = after
        generation = world.front_end.submit(PROMPT, SamplingParams(20, **sampling))
        streamed = list(generation)
        wanted = alone(PROMPT, max_new_tokens=20, **sampling)
        assert answer(generation) == wanted
        assert "".join(token.text for token in streamed) == wanted[1]
        assert world.front_end.stats()["lost_workers"] == (2 if after < 20 else 1)  # with after == 20 one token is left
        continued = [call.num_generated for _, call in world.decode.calls]
        assert continued == sorted(continued)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_prefill_worker_that_dies_is_replaced_by_another_one(after):
    with cluster(1, 2) as world:
        world.prefill.kills["prefill-0"] = after
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        assert world.prefill.calls[0][0] == "prefill-0"


def test_without_prefill_workers_decode_workers_compute_prompts():
    with cluster(1, 1) as world:
        world.prefill.dead.add("prefill-0")
        for _ in range(2):
            assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        assert len(world.prefill.calls) == 1


def test_pages_move_once_and_shared_pages_do_not_move():
    with cluster(1, 1) as world:
        for _ in range(2):
            assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
            world.news()
        stats = world.front_end.stats()
        assert stats["moved_tokens"] == len(PROMPT) // 4 * 4
        assert stats["workers"]["decode-0"]["cached_tokens"] == 2 * (len(PROMPT) // 4 * 4)
        for router in stats["routers"].values():
            assert router["forecast_tokens"] == router["found_tokens"] > 0


def test_the_cost_of_moving_a_token_is_measured():
    with cluster(1, 1) as world:
        side = world.front_end._sides["decode"]
        assert world.front_end._move_cost(side) == 0
        world.front_end.submit(PROMPT, SamplingParams(9)).result(SECONDS)
        wait_until(lambda: world.front_end._move_cost(side) > 0)
        with world.lock:  # no news in between
            half = {"moved_tokens": 50, "move_seconds": 1.0, "step_seconds": 2.0}
            counts = {"prompt_tokens": 150, "cached_tokens": 110, "generated_tokens": 10}
            side.stats = {"one": {**half, **counts}, "two": {**half, **counts}}
            assert world.front_end._move_cost(side) == (2 / 100) / (4 / 100)


def test_pages_of_a_worker_that_died_are_computed_instead():
    with cluster(1, 1) as world:
        decode = world.workers["decode-0"]

        async def generate(name, call, generate=world.decode.generate):
            with world.lock:  # the prefill worker has sent its offer before
                world.prefill.dead.add("prefill-0")
                world.workers["prefill-0"]._pages.close()
            async for message in generate(name, call):
                yield message

        world.decode.generate = generate
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        assert world.front_end.stats()["moved_tokens"] == 0 and decode.engine.stats()["cached_tokens"] == 0


def test_a_text_with_a_stop_string_is_the_same_wherever_a_worker_dies():
    text = alone(PROMPT, max_new_tokens=20)[1]
    stop = text[8:11]
    wanted = alone(PROMPT, max_new_tokens=20, stop=stop)
    assert wanted[1:] == (text[:8], "stop")
    for after in range(1, 12):
        with cluster(2) as world:
            world.decode.kills["decode-0"] = after
            generation = world.front_end.submit(PROMPT, SamplingParams(20, stop=stop))
            assert answer(generation) == wanted and generation.stop_string == stop


def test_a_request_that_every_worker_dies_of_fails_with_one_sentence():
    with cluster(3) as world:
        world.new_front_end(max_attempts=2)
        world.decode.kills = dict.fromkeys(world.decode.workers, 3)
        generation = world.front_end.submit(PROMPT, SamplingParams(20))
        with refuses(RuntimeError, 2, "decode-1"):
            list(generation)
        assert generation.finish_reason == "error" and len(generation.token_ids) == 2 + 2
        assert len(world.decode.dead) == 2


def test_a_request_waits_until_there_is_a_worker():
    with cluster(1) as world:
        world.decode.kills["decode-0"] = 4
        generation = world.front_end.submit(PROMPT, SamplingParams(9))
        wait_until(lambda: world.front_end.stats()["lost_workers"] == 1)
        world.add(world.decode, "decode-1", False)
        assert answer(generation) == alone(PROMPT, max_new_tokens=9)


def test_an_id_is_computed_once_while_it_runs_and_after():
    with cluster(2, step_seconds=0.005) as world:
        first = world.front_end.submit(PROMPT, SamplingParams(30), request_id="one")
        next(first)
        second = world.front_end.submit(PROMPT, SamplingParams(30), request_id="one")
        first.cancel()
        wanted = alone(PROMPT, max_new_tokens=30)
        streamed = list(second)
        assert answer(second) == wanted and [token.token_id for token in streamed] == wanted[0]
        assert first.result(SECONDS).finish_reason == "abort"
        assert answer(world.front_end.submit(PROMPT, SamplingParams(30), request_id="one")) == wanted
        assert world.front_end.stats()["repeated_requests"] == 2 and len(world.decode.calls) == 1
        with refuses(RequestRejected, "request_id", "one"):
            world.front_end.submit(PROMPT, SamplingParams(31), request_id="one")


def test_records_are_bounded_and_the_oldest_goes_first():
    with cluster(1) as world:
        world.new_front_end(max_records=2)
        for name in "abc":
            world.front_end.submit("x", SamplingParams(2), request_id=name).result(SECONDS)
        for name in "cba":
            world.front_end.submit("x", SamplingParams(2), request_id=name).result(SECONDS)
        assert len(world.decode.calls) == 4
        assert world.front_end.stats()["repeated_requests"] == 2


def test_a_cancelled_id_is_computed_again():
    with cluster(1, step_seconds=0.005) as world:
        first = world.front_end.submit(PROMPT, SamplingParams(200), request_id=5)
        next(first)
        first.cancel()
        assert first.result(SECONDS).finish_reason == "abort"
        again = world.front_end.submit(PROMPT, SamplingParams(200), request_id=5)
        next(again)
        assert again.finish_reason is None


def test_a_dropped_generation_is_cancelled_at_the_worker():
    with cluster(1, step_seconds=0.005) as world:
        next(world.front_end.submit(PROMPT, SamplingParams(200)))
        gc.collect()
        wait_until(lambda: world.workers["decode-0"].engine.num_requests == 0)
        assert world.front_end.num_requests == 0


def test_requests_of_a_dead_front_end_are_cancelled():
    with cluster(1, step_seconds=0.005) as world:
        old = world.front_end
        lost = old.submit(PROMPT, SamplingParams(200))
        next(lost)
        worker = world.workers["decode-0"]
        world.new_front_end()
        wait_until(lambda: worker.engine.stats()["ended"]["abort"] == 1)
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        old.close()


def test_a_new_front_end_knows_the_cached_blocks():
    with cluster(2) as world:
        world.front_end.submit(PROMPT, SamplingParams(2)).result(SECONDS)
        (name, _), *_ = world.decode.calls
        worker = world.workers[name]
        with world.lock:
            front_end = FrontEnd(worker.limits(), Bytes(), world.decode, loop=world.loop)
            assert front_end.news(worker.news()) is True and front_end.stats()["workers"] == {}
            news = worker.news(True)
            assert len(news.snapshot.names) == 16 * news.snapshot.num_blocks > 0  # the names and nothing else
            assert front_end.news(news) is False and front_end.stats()["workers"].keys() == {name}
        world.new_front_end()
        world.front_end.submit(PROMPT, SamplingParams(2)).result(SECONDS)
        router = world.front_end.stats()["routers"]["decode"]
        assert router["forecast_tokens"] == router["found_tokens"] == len(PROMPT) - 4
        assert world.decode.calls[-1][0] == name


def test_a_model_that_fails_is_not_tried_elsewhere():
    failures = [ArithmeticError("overflow")]
    with cluster(2, fails=lambda batch: failures.pop() if failures else None) as world:
        with pytest.raises(RuntimeError, match="overflow"):
            list(world.front_end.submit(PROMPT, SamplingParams(9)))
        assert len(world.decode.calls) == 1
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)


@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")
def test_a_request_without_a_possible_token_is_refused_as_by_one_engine():
    params = SamplingParams(9, structured=Structured(choice=["abc"]), bad_words=["b"])
    with Engine(FakeRunner(), Bytes()) as engine:
        known = engine.submit(PROMPT, params)
        assert len(list(islice(known, 1))) == 1 and reason_of(known) == "error"
    with cluster(2) as world:
        generation = world.front_end.submit(PROMPT, params)
        assert reason_of(generation) == "error" and isinstance(generation.error, RequestRejected)
        assert (str(generation.error), generation.error.param) == (str(known.error), known.error.param)
        assert len(world.decode.calls) == 1 and world.front_end.stats()["lost_workers"] == 0


@pytest.mark.parametrize("after", [0, 3, 12, 40])
def test_a_call_of_a_tool_is_the_same_wherever_a_worker_dies(after):
    for name in ("llguidance", "transformers", "jinja2"):
        pytest.importorskip(name, reason=f"{name} is not installed: make test-models")
    from chat_templates import Templated

    from pagepool.serve.tools import ToolCalls, form_of, grammar_of

    tokenizer, tools = Templated("mistral"), [{"type": "function", "function": {"name": "clock"}}]
    form, said = form_of(tokenizer), 'Well.[TOOL_CALLS] [{"name": "clock", "arguments": {}}]'
    structured = Structured(grammar=grammar_of(form, tools))
    params = SamplingParams(200, structured=structured, skip_special_tokens=False)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)
    with cluster(2, tokenizer=tokenizer, next_token=tokenizer.answering(said)) as world:
        world.decode.kills = {"decode-0": after, "decode-1": None}
        generation = world.front_end.submit(prompt, params).result(SECONDS)
        assert (generation.text, generation.finish_reason) == (said, "stop")
        text, calls = ToolCalls(form).add(generation.text)
        assert text == "Well." and [call["function"]["name"] for call in calls] == ["clock"]


def test_the_prefix_caches_of_all_workers_are_reset():
    with cluster(2, prefill=1) as world:
        for prompt in (PROMPT, PROMPT[::-1]):
            answer(world.front_end.submit(prompt, SamplingParams(9)))
        caches = {name: worker.engine.prefix_cache for name, worker in world.workers.items()}
        assert sum(cache.num_cached > 0 for cache in caches.values()) >= 2
        world.decode.dead.add("decode-0")  # a lost worker does not matter
        world.front_end.reset_prefix_cache()
        assert not any(cache.num_cached for name, cache in caches.items() if name != "decode-0")
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        world.decode.workers["decode-1"].engine.close()
        with refuses(EngineClosed, "decode-1"):
            world.front_end.reset_prefix_cache()


def test_drafts_of_the_workers_are_counted():
    tokens, text, reason = alone(PROMPT, max_new_tokens=40)
    with cluster(1, drafts="ngram") as world:
        (worker,) = world.decode.workers.values()
        drafting(worker.engine, {tuple(PROMPT.encode()): tokens + [65] * 9}, seed=2)
        generation = world.front_end.submit(PROMPT, SamplingParams(40), request_id="a")
        assert answer(generation) == (tokens, text, reason)
        stats, again = worker.engine.stats(), world.front_end.submit(PROMPT, SamplingParams(40), request_id="a")
        for one in (generation, again.result(SECONDS)):
            assert one.num_accepted == stats["accepted_tokens"] > 0
            assert one.num_accepted + one.num_rejected == stats["drafted_tokens"] > one.num_accepted


def test_a_worker_that_closes_gives_its_requests_to_others():
    with cluster(2, step_seconds=0.005) as world:
        generation = world.front_end.submit(PROMPT, SamplingParams(40))
        next(generation)
        name, _ = world.decode.calls[0]
        with world.lock:
            world.decode.dead.add(name)
        world.decode.workers[name].engine.close()
        assert answer(generation) == alone(PROMPT, max_new_tokens=40)


def test_a_worker_that_ends_without_an_end_is_lost():
    class Silent(Side):
        async def generate(self, name, call):
            self.calls.append((name, call))
            for message in () if len(self.calls) == 1 else (Ended("length"),):
                yield message

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    side = Silent()
    front_end = FrontEnd(Limits(None, None, 256, 4, frozenset()), Bytes(), side, loop=loop, max_attempts=2)
    with Engine(FakeRunner(), prefix_events=8) as engine:
        worker = Worker(engine, "only")
        generation = front_end.submit("x", SamplingParams(3))
        wants_snapshot = False
        while generation.finish_reason is None:
            wants_snapshot = front_end.news(worker.news(wants_snapshot))
            time.sleep(0.01)
        with refuses(RuntimeError, "only"):
            next(generation)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("seed", range(6))
def test_each_request_gets_the_answer_of_a_single_engine_despite_failures(seed):
    """Workers die and are added, callers disconnect, retry and share ids, the front end is replaced."""
    random = Random(seed)
    prompts = [f"beginning {number % 3} that some share, and {number}" for number in range(12)]
    options = [{"max_new_tokens": 3 + number, "temperature": 1.0, "seed": number} for number in range(12)]
    wanted = [alone(prompt, **option) for prompt, option in zip(prompts, options, strict=True)]
    with cluster(2, 2, step_seconds=0.001) as world:
        world.new_front_end(max_attempts=1000)
        asked, front_ends = [], []
        for step in range(80):
            number, what = random.randrange(12), random.random()
            if what < 0.7:
                request_id = random.choice([None, f"{number}-{step % 5}"])
                asked.append(
                    (
                        number,
                        world.front_end.submit(
                            prompts[number], SamplingParams(**options[number]), request_id=request_id
                        ),
                    )
                )
            elif what < 0.8 and asked:
                asked.pop(random.randrange(len(asked)))[1].cancel()
            elif what < 0.95:
                side = random.choice([world.decode, world.prefill])
                alive = [name for name in side.workers if name not in side.dead]
                with world.lock:
                    world.add(side, f"{step}", True, step_seconds=0.001)
                side.kills[random.choice(alive)] = random.randrange(4)
            else:
                front_ends.append((world.front_end, asked))
                world.new_front_end(max_attempts=1000)
                asked = []
            time.sleep(random.random() * 0.01)
        assert [answer(generation) for _, generation in asked] == [wanted[number] for number, _ in asked]
        for front_end, _ in front_ends:
            front_end.close()


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ("", 1, ("prompt", 1, 0)),
        ("x" * 20, 2000, ("prompt", 20, 2000, 1024)),
        ([256], 1, ("prompt", 255, 256)),
    ],
)
def test_the_front_end_refuses_requests_that_no_worker_can_run(prompt, count, words):
    with cluster(1) as world:
        with refuses(RequestRejected, *words):
            world.front_end.submit(prompt, SamplingParams(count))
        assert world.front_end.num_requests == 0 and world.decode.calls == []


def test_log_probabilities_of_prompts_are_refused():
    with cluster(1) as world, refuses(RequestRejected, "log probabilities of prompts", "cluster"):
        world.front_end.submit(PROMPT, SamplingParams(2, prompt_logprobs=0))


def test_a_burst_with_shared_prefixes_and_two_deaths_answers_all():
    with cluster(3, 2) as world:
        prompts = [f"shared beginning number {number % 4}, and then {number}" for number in range(40)]
        wanted = [alone(prompt, max_new_tokens=12) for prompt in prompts]
        world.decode.kills["decode-1"] = 6
        generations = [world.front_end.submit(prompt, SamplingParams(12)) for prompt in prompts[:20]]
        world.prefill.kills["prefill-0"] = 0
        generations += [world.front_end.submit(prompt, SamplingParams(12)) for prompt in prompts[20:]]
        assert [answer(generation) for generation in generations] == wanted
        assert world.front_end.stats()["lost_workers"] >= 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"workers": 0}, ValueError, ("workers", 1, 64, 0)),
        ({"workers": (3, 2)}, ValueError, (3, 64, 2)),
        ({"prefill": -1}, ValueError, ("prefill", 0, 64, -1)),
        ({"workers": (1, 65)}, ValueError, (1, 64, 65)),
        ({"dtype": "int8"}, ValueError, ("dtype",)),
        ({"engine": 3}, TypeError, ("engine", "dict", "None")),
        ({"model": "/nowhere"}, ModelError, ("/nowhere: it has no config.json",)),
    ],
)
def test_an_invalid_cluster_is_refused_before_anything_starts(options, error, words):
    with refuses(error, *words):
        serve(**{"model": "bench/tiny_llama", **options})


def test_prompts_do_not_wait_for_prefill_workers_that_are_silent(monkeypatch):
    with cluster(1, 1) as world:
        world.front_end.submit(PROMPT, SamplingParams(2)).result(SECONDS)
        assert [name for name, _ in world.prefill.calls] == ["prefill-0"]
        world.prefill.dead.add("prefill-0")  # it dies while idle
        later = time.monotonic() + 3600
        monkeypatch.setattr(front_end_module, "monotonic", lambda: later)
        with world.lock:  # only messages of decode workers
            world.front_end.news(world.workers["decode-0"].news())
        assert not world.front_end._sides["prefill"].heard
        found = answer(world.front_end.submit(PROMPT + "?", SamplingParams(9)))
        assert found == alone(PROMPT + "?", max_new_tokens=9) and len(world.prefill.calls) == 1
        assert world.front_end.stats()["lost_workers"] == 0


def test_a_tokenizer_that_fails_ends_one_request_and_loses_no_worker(monkeypatch):
    class Broken(Bytes):
        def decode(self, ids, skip_special_tokens=True):
            if len(ids) > CONTEXT:
                raise ValueError("no such piece")
            return super().decode(ids)

    with cluster(2) as world:
        with monkeypatch.context() as patch:
            patch.setattr(world.front_end, "tokenizer", Broken())
            with pytest.raises(RuntimeError, match="no such piece"):
                list(world.front_end.submit(PROMPT, SamplingParams(9)))
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        assert world.front_end.stats()["lost_workers"] == 0 and len(world.front_end.stats()["workers"]) == 2


def test_records_are_bounded_by_their_bytes(monkeypatch):
    """The record of a token with 20 logprobs is about ten times as large as one without."""
    with cluster(1) as world:
        for name, logprobs in (("plain", None), ("large", 20)):
            params = SamplingParams(30, stop_token_ids=(), logprobs=logprobs)
            world.front_end.submit(PROMPT, params, request_id=name).result(SECONDS)
        wait_until(lambda: not world.front_end.num_requests)
        plain, large = (world.front_end._records[None, name] for name in ("plain", "large"))
        assert large.num_bytes > 5 * plain.num_bytes
        assert world.front_end._record_bytes == plain.num_bytes + large.num_bytes
        monkeypatch.setattr(front_end_module, "MAX_RECORD_BYTES", 2 * plain.num_bytes)
        world.front_end.submit(PROMPT, SamplingParams(30, stop_token_ids=()), request_id="last").result(SECONDS)
        wait_until(lambda: not world.front_end.num_requests)
        assert list(world.front_end._records) == [(None, "last")]
        assert world.front_end._record_bytes == world.front_end._records[None, "last"].num_bytes


def test_a_used_request_id_of_another_client_reveals_nothing():
    with cluster(1) as world:
        submit = world.front_end.submit
        submit(PROMPT, SamplingParams(30), request_id="one", tenant="first").result(SECONDS)
        other = submit("other", SamplingParams(5), request_id="one", tenant="second")
        assert answer(other) == alone("other", max_new_tokens=5)
        with pytest.raises(RequestRejected) as caught:
            submit("other", SamplingParams(5), request_id="one", tenant="first")
        assert not any(digit in str(caught.value) for digit in "0123456789")


def test_a_failed_call_forgets_no_worker_and_another_one_goes_on():
    with cluster(2) as world:
        generate, failed = world.decode.generate, []

        async def fails_once(name, call):
            if not failed:
                failed.append(name)
                raise OSError("the call was lost")
            async for message in generate(name, call):
                yield message

        world.decode.generate = fails_once
        assert answer(world.front_end.submit(PROMPT, SamplingParams(9))) == alone(PROMPT, max_new_tokens=9)
        stats = world.front_end.stats()
        assert stats["lost_workers"] == 0 and stats["routers"]["decode"]["snapshots"] == 2, "a worker was forgotten"
        assert world.decode.calls[-1][0] != failed[0]


@pytest.mark.parametrize("after", [0, 5])
def test_a_worker_without_progress_loses_its_requests_and_gets_no_new_ones(after):
    """A worker accepts calls but sends no messages, from the beginning or after some tokens. Its news still arrive."""
    with cluster(2) as world:
        world.new_front_end(max_silence=0.5)
        generate, stuck = world.decode.generate, []

        async def stops(name, call):
            stuck[:] = stuck or [name]
            left = after
            async for message in generate(name, call):
                if name == stuck[0] and left == 0:
                    await asyncio.sleep(SECONDS)
                yield message
                left -= 1

        world.decode.generate = stops
        began = time.monotonic()
        for number in range(6):
            prompt = f"{PROMPT} {number}"
            assert answer(world.front_end.submit(prompt, SamplingParams(9))) == alone(prompt, max_new_tokens=9)
        assert time.monotonic() - began < SECONDS / 2
        assert [name for name, _ in world.decode.calls].count(stuck[0]) == 1
        assert world.front_end.stats()["lost_workers"] == 0


def test_a_worker_that_computes_for_long_says_that_it_is_alive(monkeypatch):
    monkeypatch.setattr(worker_module, "WAITING_SECONDS", 0.05)
    with cluster(1, step_seconds=0.5) as world:
        world.new_front_end(max_silence=0.3)
        assert answer(world.front_end.submit(PROMPT, SamplingParams(3))) == alone(PROMPT, max_new_tokens=3)
        assert len(world.decode.calls) == 1


def test_without_a_worker_a_request_fails_after_a_limit():
    with cluster(1) as world:
        with world.lock:
            world.decode.dead.add("decode-0")
        world.new_front_end(max_wait=0.2)
        generation = world.front_end.submit(PROMPT, SamplingParams(3))
        with pytest.raises(RuntimeError, match=r"there was no worker for 0.2 s") as caught:
            generation.result(SECONDS)
        assert isinstance(caught.value.__cause__, EngineClosed)
