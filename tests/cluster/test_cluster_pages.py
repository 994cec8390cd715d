"""PageMover: pages of prompts between two prefix caches, with and without failures."""

import asyncio
import time
from threading import Thread

import numpy as np
import pytest
from fake_runner import FakeRunner
from refusals import refuses

from pagepool import KvCachePool, KvLayout, PoolError, PrefixCache
from pagepool.cluster.messages import Call, Waiting
from pagepool.cluster.pages import Fetched, PageMover, model_identity
from pagepool.cluster.worker import Worker
from pagepool.engine import Engine, SamplingParams
from pagepool.transfer import LocalTransfer

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
TOKENS = list(range(1, 18))  # 4 full blocks and the last token


class Place:
    """A pool with its cache and its mover."""

    def __init__(self, name, num_blocks=16, seconds=30.0):
        self.pool = KvCachePool.from_layout(LAYOUT, num_blocks)
        self.allocator = self.pool.allocator
        self.cache = PrefixCache(self.allocator)
        self.mover = PageMover(LocalTransfer(name), self.pool, self.cache, seconds=seconds)

    def compute(self, tokens):
        """Cache the pages of a prompt, each filled with its first token."""
        self.cache.touch(tokens)
        for index, block in enumerate(self.match(tokens)):
            self.pool.page(block)[:] = tokens[4 * index]

    def match(self, tokens):
        blocks = self.cache.match_prefix(tokens)
        self.allocator.free(blocks)
        return blocks.tolist()

    def close(self):
        self.mover.close()
        self.cache.reset_prefix_cache()
        self.allocator.check(others=0)
        assert self.allocator.in_use == 0


@pytest.fixture
def source():
    place = Place("source")
    yield place
    place.close()


@pytest.fixture
def reader():
    place = Place("reader")
    yield place
    place.close()


def test_pages_arrive_and_are_found(source, reader):
    source.compute(TOKENS)
    offer = source.mover.offer("source", TOKENS)
    assert reader.mover.fetch(offer, TOKENS) == Fetched(0, 16, "")
    blocks = reader.match(TOKENS)
    assert [float(reader.pool.page(block)[0]) for block in blocks] == [1, 5, 9, 13]
    assert reader.mover.fetch(offer, TOKENS) == Fetched(16, 0, "")
    assert reader.allocator.in_use == 4


def test_only_missing_pages_move(source, reader):
    source.compute(TOKENS)
    reader.compute(TOKENS[:8])
    before = reader.match(TOKENS)
    assert reader.mover.fetch(source.mover.offer("source", TOKENS), TOKENS) == Fetched(8, 8, "")
    assert reader.match(TOKENS)[:2] == before
    assert [float(reader.pool.page(block)[0]) for block in reader.match(TOKENS)] == [1, 5, 9, 13]


def test_a_salt_keeps_prompts_apart(source, reader):
    source.compute(TOKENS)
    assert source.mover.offer("source", TOKENS, "other") is None
    source.cache.touch(TOKENS, cache_salt="mine")
    assert reader.mover.fetch(source.mover.offer("source", TOKENS, "mine"), TOKENS, "mine").moved_tokens == 16
    assert reader.match(TOKENS) == [] and reader.cache.cached_tokens(TOKENS, cache_salt="mine") == 16


def test_a_reallocated_page_ends_the_usable_prefix(source, reader):
    source.compute(TOKENS)
    offer = source.mover.offer("source", TOKENS)
    source.mover.release(offer.number)
    source.mover.release(offer.number)
    third = source.match(TOKENS)[2]
    source.cache.discard([third])
    assert source.allocator.allocate() == third
    fetched = reader.mover.fetch(offer, TOKENS)
    assert (fetched.found_tokens, fetched.moved_tokens) == (0, 8)
    assert fetched.error == f"1 of 4 pages do not match the ticket: block {third} has generation 2, not 1"
    assert reader.cache.cached_tokens(TOKENS) == 8 and reader.allocator.in_use == 2
    source.allocator.free(third)


def test_reallocated_pages_do_not_end_other_reads_from_the_same_worker(source, reader):
    source.compute(TOKENS)
    other = [number + 100 for number in TOKENS]
    source.compute(other)
    stale, good = source.mover.offer("source", TOKENS), source.mover.offer("source", other)
    source.mover.release(stale.number)
    source.cache.discard(source.match(TOKENS))
    transfer, found = reader.mover._transfer, []
    forget = transfer.forget
    transfer.forget = lambda peer: found.append(peer) or forget(peer)
    fetched = reader.mover.fetch(stale, TOKENS)
    assert fetched.moved_tokens == 0 and "4 of 4 pages do not match the ticket" in fetched.error
    assert found == [], "a healthy worker was forgotten"
    assert reader.mover.fetch(good, other) == Fetched(0, 16, "")


def test_prompts_that_begin_alike_do_not_queue_behind_a_stopped_source(source):
    """Without a limit eight reads would take eight times the timeout, one after another."""

    class Stopped(LocalTransfer):
        def _check(self, request):
            return False

    reader = Place("reader", num_blocks=64)
    reader.mover.close()
    reader.mover = PageMover(Stopped("reader", timeout=2.0), reader.pool, reader.cache)
    source.compute(TOKENS)
    offer, fetched = source.mover.offer("source", TOKENS), []
    threads = [Thread(target=lambda: fetched.append(reader.mover.fetch(offer, TOKENS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one.error for one in fetched]
    assert sum("has not answered for 2 s" in error for error in errors) == 1
    assert sum("did not answer another read" in error for error in errors) == 7
    reader.close()


def test_pages_of_another_prompt_are_refused(source, reader):
    """If an offer is paired with a wrong prompt, its pages are never cached for that prompt."""
    source.compute(TOKENS)
    offer = source.mover.offer("source", TOKENS)
    for tokens, salt in ([[*TOKENS[:4], *range(50, 63)], None], [TOKENS, "salt"]):
        fetched = reader.mover.fetch(offer, tokens, salt)
        assert fetched.moved_tokens == 0 and "the ticket is for another prompt: the name of block" in fetched.error
        assert reader.cache.cached_tokens(tokens, cache_salt=salt) == 0 and reader.allocator.in_use == 0
    assert reader.mover.fetch(offer, TOKENS).moved_tokens == 16


def test_a_full_pool_evicts_only_the_blocks_that_are_missing(source):
    reader = Place("reader", num_blocks=6)
    source.compute(TOKENS)
    reader.compute([*range(200, 212), 0])  # 3 of 6 blocks
    assert reader.mover.fetch(source.mover.offer("source", TOKENS), TOKENS) == Fetched(0, 16, "")
    assert len(reader.match([*range(200, 212), 0])) == 2
    reader.close()


def test_a_lost_source_leaves_nothing_and_can_return(reader):
    source = Place("source")
    source.compute(TOKENS)
    offer = source.mover.offer("source", TOKENS)
    assert reader.mover.fetch(offer, TOKENS[:9]) == Fetched(0, 8, "")
    source.close()
    fetched = reader.mover.fetch(offer, TOKENS)
    assert (fetched.found_tokens, fetched.moved_tokens) == (8, 0) and "'source'" in fetched.error
    again = Place("source")
    again.compute(TOKENS)
    assert reader.mover.fetch(again.mover.offer("source", TOKENS), TOKENS) == Fetched(8, 8, "")
    again.close()


def test_a_pool_without_room_takes_nothing(source):
    source.compute(TOKENS)
    small = Place("small", num_blocks=3)
    small.compute([90, 91, 92, 93])
    held = small.allocator.allocate_n(1)
    offer = source.mover.offer("source", TOKENS)
    fetched = small.mover.fetch(offer, TOKENS)
    assert fetched == Fetched(0, 0, "asked for 4 blocks, 2 of 3 are free")  # one of the blocks was cached
    assert small.mover.fetch(offer, TOKENS[:9]).moved_tokens == 8
    small.allocator.free(held)
    small.close()


def test_an_offer_holds_its_blocks_until_it_expires():
    source = Place("source", seconds=0.02)
    source.compute(TOKENS)
    source.mover.offer("source", TOKENS)
    assert source.cache.evictable == 0
    time.sleep(0.03)
    source.mover.poll()
    assert source.cache.evictable == 4
    source.close()


def test_concurrent_requests_with_a_shared_prefix_move_it_once(source, reader):
    source.compute(TOKENS)
    offers = [source.mover.offer("source", TOKENS) for _ in range(8)]
    found = []
    threads = [Thread(target=lambda offer=offer: found.append(reader.mover.fetch(offer, TOKENS))) for offer in offers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched.moved_tokens for fetched in found) == [0] * 7 + [16]
    source.mover.release_all()
    assert source.cache.evictable == 4


def test_another_model_is_refused_and_its_pages_are_computed(source):
    other = Place("other")
    other.mover.close()
    other.mover = PageMover(LocalTransfer("other-model"), other.pool, other.cache, "another model")
    source.compute(TOKENS)
    fetched = other.mover.fetch(source.mover.offer("source", TOKENS), TOKENS)
    assert fetched.moved_tokens == 0 and "model 'another model'" in fetched.error
    other.close()


def test_pages_of_other_weights_under_the_same_name_are_refused(source, tmp_path):
    identities = []
    for number in range(2):
        folder = tmp_path / str(number) / "model"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes([number]) * 8)
        identities.append(model_identity("model", folder, "float32"))
    assert model_identity("model", folder, "bfloat16") != identities[1] == model_identity("model", folder, "float32")
    places = [Place(name) for name in ("first", "second")]
    for place, name, identity in zip(places, ("1", "2"), identities, strict=True):
        place.mover.close()
        place.mover = PageMover(LocalTransfer(name), place.pool, place.cache, identity)
    places[0].compute(TOKENS)
    fetched = places[1].mover.fetch(places[0].mover.offer("first", TOKENS), TOKENS)
    assert fetched.moved_tokens == 0 and identities[0] in fetched.error and identities[1] in fetched.error
    for place in places:
        place.close()


def test_a_worker_of_a_model_without_a_prefix_cache_moves_no_pages():
    with Engine(FakeRunner(), prefix_cache=False) as engine:
        with refuses(ValueError, "pages"):
            Worker(engine, "one", transfer=LocalTransfer("one"))
        worker = Worker(engine, "one")
        assert worker.news(True).snapshot == (1, b"", 0) and worker.news().events == []


def test_a_worker_of_a_model_with_windows_moves_no_pages():
    with Engine(FakeRunner()) as engine:
        engine.runner.groups = ("a window",)
        with refuses(ValueError, "windows", "attention"):
            Worker(engine, "one", transfer=LocalTransfer("one"))


def test_a_worker_that_runs_something_is_not_empty():
    engine = Engine(FakeRunner(step_seconds=0.01), prefix_events=8)
    worker = Worker(engine, "one")

    async def run():
        messages = worker.generate(Call([1, 2], 0, SamplingParams(50), {}, None, False, 1))
        while isinstance(await anext(messages), Waiting):
            continue
        with refuses(PoolError, 1):
            worker.check_empty()
        assert worker.load() == 1
        await messages.aclose()

    asyncio.run(run())
    end = time.monotonic() + 60
    while engine.num_requests and time.monotonic() < end:
        time.sleep(0.01)
    assert worker.check_empty() == 0 == worker.load()
    worker.close()


def test_pages_are_those_that_were_computed_at_random(source, reader):
    random = np.random.default_rng(3)
    for _ in range(60):
        tokens = [int(random.integers(3))] * 4 + [int(token) for token in random.integers(0, 2, random.integers(0, 24))]
        source.compute(tokens)
        offer = source.mover.offer("source", tokens)
        reader.mover.fetch(offer, tokens)
        source.mover.release(offer.number)
        for index, block in enumerate(reader.match(tokens[: (len(tokens) - 1) // 4 * 4])):
            assert float(reader.pool.page(block)[0]) == tokens[4 * index]
        reader.cache.check()
