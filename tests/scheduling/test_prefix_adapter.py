"""The scheduler with a prefix cache: blocks are matched at admission, cached at commit, evicted before preemption."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_engine import LAYOUT, Engine
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig

BLOCK = 4


def make(num_blocks=32, cache_policy="gittins", **config):
    allocator = BlockAllocator(num_blocks)
    cache = PrefixCache(allocator, BLOCK, cache_policy)
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), allocator, cache), cache


def run_step(scheduler):
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch))
    return batch


def run_to_end(scheduler, limit=5000):
    batches = []
    for _ in range(limit):
        if not scheduler.has_work:
            return batches
        batches.append(run_step(scheduler))
    raise AssertionError(f"requests still run after {limit} steps")


def test_a_second_request_reads_only_what_is_new():
    scheduler, cache = make()
    scheduler.add_request(range(10), 12)
    run_to_end(scheduler)
    assert cache.num_cached == 2  # 11 stored tokens fill two blocks
    scheduler.add_request(range(10), 12)
    batch = scheduler.schedule()
    assert batch.tokens == [[8, 9]] and batch.states[0].len == 10 and scheduler.get_sequence(2).num_cached == 8
    scheduler.commit(batch, [7])
    assert cache.stats()["hits"] == 2


def test_a_request_knows_why_its_prompt_was_not_cached():
    scheduler, cache = make(explain_misses=True)
    scheduler.add_request(range(12), 14)
    run_to_end(scheduler)
    for prompt in (range(12), [*range(9), 5, 6, 7, 8, 9, 10]):
        scheduler.add_request(prompt, len(prompt) + 1)
        run_to_end(scheduler)
    cache.evict(100)
    scheduler.add_request([*range(8), 1], 10)
    run_to_end(scheduler)
    cold, same, other, evicted = scheduler.drain_finished()
    assert (cold.miss.found, cold.miss.counts()) == (0, {"never_seen": 8, "short": 4})
    assert (same.miss.found, same.miss.counts()) == (8, {"short": 4})  # one token is always computed
    assert (other.miss.found, other.miss.counts()) == (8, {"diverges": 4, "short": 3})
    assert (other.miss.divergence.position, other.miss.divergence.token) == (9, 5)
    assert evicted.miss.counts() == {"evicted": 8, "short": 1}


def test_nothing_is_explained_unless_it_is_asked_for():
    scheduler, _ = make()
    for reads_cache in (True, False):
        scheduler.add_request(range(12), 14, reads_cache=reads_cache)
    run_to_end(scheduler)
    assert [seq.miss for seq in scheduler.drain_finished()] == [None, None]


def test_at_least_one_token_is_always_computed():
    scheduler, _ = make()
    scheduler.add_request(range(8), 12)
    run_to_end(scheduler)
    scheduler.add_request(range(8), 12)
    batch = scheduler.schedule()
    assert batch.tokens == [[4, 5, 6, 7]] and batch.wants_token == [True]


def test_prompt_blocks_are_cached_as_soon_as_they_are_committed():
    scheduler, cache = make(max_prefill_tokens=8, max_batch_tokens=64)
    scheduler.add_request(range(20), 30)
    batch = scheduler.schedule()
    assert cache.num_cached == 0  # not committed, so perhaps not stored
    scheduler.commit(batch, [None])
    assert cache.num_cached == 2
    scheduler.add_request([*range(8), 99], 12)
    assert scheduler.schedule().tokens == [[*range(8, 16)], [99]]


def test_outputs_are_kept_when_the_sequence_ends():
    scheduler, cache = make()
    scheduler.add_request(range(3), 12)
    run_to_end(scheduler)
    assert cache.cached_tokens([0, 1, 2, *[7] * 9]) == 8
    assert scheduler._blocks.allocator.in_use == cache.num_cached == 2


def test_a_branch_starts_with_the_tokens_of_its_trunk():
    scheduler, _ = make()
    trunk = scheduler.add_request(range(6), 40)
    for _ in range(8):
        batch = scheduler.schedule()
        scheduler.commit(batch, [7])
    prompt = scheduler.get_sequence(trunk).all_tokens
    for end in (50, 51):
        scheduler.add_request([*prompt, end], 40)
    batch = scheduler.schedule()
    assert [scheduler.get_sequence(seq_id).num_cached for seq_id in (2, 3)] == [12, 12]
    assert [len(tokens) for tokens in batch.tokens] == [1, 3, 3]


@examples(60)
@given(st.data(), st.sampled_from([2, 8]), st.sampled_from([0, 2]), st.integers(8, 40))
def test_every_full_block_that_was_committed_is_cached_at_once(data, places, lookahead, blocks):
    """This holds for tokens from commit or append_token, in any order, with drafts, and for steps without tokens."""
    config = {"max_batch_sequences": places, "lookahead": lookahead, "max_prefill_tokens": 6}
    scheduler, cache = make(blocks, **config)
    for number in range(data.draw(st.integers(1, 5))):
        prompt = [number] * data.draw(st.integers(1, 9))
        scheduler.add_request(prompt, len(prompt) + data.draw(st.integers(1, 20)))
    for _ in range(60):
        batch = scheduler.schedule()
        way = data.draw(st.sampled_from(["commit", "commit", "commit", "none", "append", "abort"]))
        if way == "append":
            for seq_id, wants in zip(batch.seq_ids, batch.wants_token, strict=True):
                if wants:
                    scheduler.append_token(seq_id, 7)
            scheduler.commit(batch, [None] * len(batch))
            continue
        if way == "abort" and not batch.is_empty:
            scheduler.remove_sequence(data.draw(st.sampled_from(batch.seq_ids)))
        scheduler.commit(
            batch,
            [None if way == "none" else [7] * (1 + slots) for slots in batch.lookahead]
            if lookahead and not any(batch.is_prefill)
            else [7] * len(batch),
        )
        for seq in list(scheduler._sequences.values()):
            if seq.kv is not None:
                known = cache.cached_tokens([*seq.all_tokens[: seq.fed], 99])
                assert known == seq.fed // BLOCK * BLOCK
    cache.check()


def test_a_sequence_replaces_unreachable_cached_blocks_of_the_same_tokens():
    """The first block was evicted. So the later blocks are not found, and the sequence computes them again."""
    scheduler, cache = make(12, cache_policy="lru")
    for end in (14, 18):
        scheduler.add_request([*range(13)], end)
        run_step(scheduler)
        if end == 14:
            run_to_end(scheduler)
            assert cache.evict(1) == 1 and cache.cached_tokens([*range(13)]) == 0 and cache.num_cached == 2
    seq = scheduler.get_sequence(2)
    assert seq.num_cached == 0 and cache.cached_tokens([*range(13)]) == 12
    assert cache.evict(12) == 0 and scheduler._blocks.allocator.in_use == 4
    assert [block in cache.references() for block in seq.kv.blocks] == [True, True, True, False]
    run_to_end(scheduler)
    cache.check()


def test_a_prompt_computed_by_two_sequences_stays_cached_while_one_of_them_runs():
    """First the blocks of the first sequence are cached. After it ends, the cache has the blocks of the second."""
    scheduler, cache = make(16, cache_policy="lru")
    for end in (15, 40):
        scheduler.add_request([*range(8)], end, reads_cache=False)  # neither request waits for the other
    while len(scheduler.drain_finished()) == 0:
        batch = scheduler.schedule()
        scheduler.commit(batch, batch.seq_ids)
    seq = scheduler.get_sequence(2)
    assert [block in cache.references() for block in seq.kv.blocks] == [False, False, True, False]
    assert cache.evict(2) == 2 and cache.cached_tokens(seq.all_tokens) == 0
    for _ in range(BLOCK):
        run_step(scheduler)
    assert cache.cached_tokens(seq.all_tokens) == seq.fed // BLOCK * BLOCK == 16
    assert {*seq.kv.blocks[: seq.fed // BLOCK]} <= {*cache.references()}
    run_to_end(scheduler)
    cache.check()


def test_a_request_fits_once_its_shared_prompt_is_cached():
    """It did not fit before its prompt was cached. There are no more free blocks now, but it needs fewer."""
    scheduler, _ = make(100, max_prefill_tokens=512)
    for last in range(3):
        scheduler.add_request([*[7] * 320, last], 380)
    assert [run_step(scheduler).seq_ids for _ in range(2)] == [[1], [1, 2, 3]]
    assert [scheduler.get_sequence(seq_id).num_cached for seq_id in (2, 3)] == [320, 320]


class CountedCache:
    """A prefix cache that counts how often prompts are looked up."""

    def __init__(self, cache):
        self._cache = cache
        self.lookups = 0

    def __getattr__(self, name):
        if name in ("cached_tokens", "match_held", "match_prefix"):
            self.lookups += 1
        return getattr(self._cache, name)


def test_a_waiting_request_is_looked_up_again_only_after_new_cached_blocks():
    allocator = BlockAllocator(24)
    cache = CountedCache(PrefixCache(allocator, BLOCK))
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, cache)
    scheduler.add_request([1] * 8, 90)
    run_step(scheduler)
    scheduler.add_request([2] * 95, 96)
    run_step(scheduler)
    lookups, inserted = cache.lookups, cache.inserted
    for _ in range(60):
        assert run_step(scheduler).seq_ids == [1]
    assert cache.inserted - inserted == 15
    assert cache.lookups - lookups == cache.inserted - inserted
    run_to_end(scheduler)


class WatchedCache:
    """A prefix cache that records `start` of each cache_blocks call with blocks."""

    def __init__(self, cache):
        self._cache = cache
        self.starts = []

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def cache_blocks(self, tokens, blocks, *, start=0, **options):
        if len(blocks):
            self.starts.append(start)
        return self._cache.cache_blocks(tokens, blocks, start=start, **options)


@pytest.mark.parametrize("cached", [0, 2])
def test_blocks_that_the_cache_has_are_not_looked_at_again_in_every_step(cached):
    allocator = BlockAllocator(32)
    cache = WatchedCache(PrefixCache(allocator, BLOCK))
    blocks = allocator.allocate_n(cached)
    cache.cache_blocks([*range(cached * BLOCK)], blocks)
    allocator.free(blocks)
    cache.starts.clear()
    config = SchedulerConfig(block_size=BLOCK, max_prefill_tokens=2 * BLOCK)
    scheduler = Scheduler(config, allocator, cache)
    scheduler.add_request([*range(8 * BLOCK)], 8 * BLOCK + 5)
    run_to_end(scheduler)
    assert cache.starts == [*range(cached, 9, 2)]
    assert cache.num_cached == 9
    cache.check()


def test_an_abort_in_the_middle_of_a_step_keeps_nothing_of_that_step():
    scheduler, cache = make(max_prefill_tokens=8)
    scheduler.add_request(range(20), 30)
    scheduler.commit(scheduler.schedule(), [None])
    scheduler.schedule()
    scheduler.finish_sequence(1)
    assert cache.num_cached == 2 and cache.cached_tokens(list(range(20))) == 8
    assert scheduler._blocks.allocator.in_use == 2


def test_salts_and_keys_keep_requests_apart():
    scheduler, _ = make()
    for keys in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a", "extra_keys": (3,)}):
        scheduler.add_request(range(10), 12, **keys)
        assert len(run_to_end(scheduler)[0].tokens[0]) == 10
    scheduler.add_request(range(10), 12, cache_salt="a", extra_keys=(3,))
    assert len(run_to_end(scheduler)[0].tokens[0]) == 2


def test_a_request_that_does_not_read_the_cache_computes_its_prompt_and_caches_it():
    scheduler, cache = make(max_prefill_tokens=8, max_batch_tokens=64)
    scheduler.add_request(range(20), 22)
    run_step(scheduler)
    # This request does not wait for the blocks that the other request computes.
    first = scheduler.add_request(range(20), 22, reads_cache=False)
    assert scheduler.schedule().tokens == [[*range(8, 16)], [*range(8)]]
    scheduler.close()
    scheduler, cache = make()
    first = scheduler.add_request(range(10), 12, reads_cache=False)
    run_to_end(scheduler)
    assert cache.cached_tokens(range(10)) == 8
    second = scheduler.add_request(range(10), 12, reads_cache=False)
    assert scheduler.schedule().tokens == [[*range(10)]]
    assert [scheduler.get_sequence(seq_id).num_cached for seq_id in (first, second)] == [0, 0]


def test_cached_prefixes_go_before_anybody_gives_way():
    scheduler, cache = make(8)
    for head in (10, 20):
        scheduler.add_request(range(head, head + 12), 13)
        run_to_end(scheduler)
    assert cache.num_cached == 6
    scheduler.add_request(range(40, 60), 32)
    run_to_end(scheduler)
    assert scheduler.num_preemptions == 0 and scheduler.stats()["actions"]["evict"] > 0
    assert scheduler.stats()["given"]["evict"] == cache.stats()["evicted"] >= 6
    cache.check()


def test_a_preempted_sequence_finds_its_own_blocks_again():
    scheduler, _ = make(14, max_batch_tokens=64)
    for number in range(3):
        scheduler.add_request([number] * 10, 24)
    run_to_end(scheduler)
    preempted = [seq for seq in scheduler.drain_finished() if seq.num_preemptions]
    assert preempted and all(seq.num_cached > 0 for seq in preempted)


def test_a_request_that_does_not_fit_leaves_queue_and_cache_unchanged():
    scheduler, cache = make(8)
    scheduler.add_request(range(8), 10)
    run_to_end(scheduler)
    held = scheduler._blocks.allocator.allocate_n(4)
    scheduler.add_request(range(50, 58), 30)
    scheduler.commit(scheduler.schedule(), [None])
    scheduler.add_request(range(16), 30)
    before = cache.stats()
    for _ in range(3):
        scheduler.commit(scheduler.schedule(), [None])
    waiting = scheduler.get_sequence(3)
    assert waiting.kv is None and waiting.fed == 0 and scheduler.waiting_count == 1
    assert cache.stats()["cached"] == before["cached"]
    cache.check()
    scheduler._blocks.allocator.free(held)


def test_a_cache_must_match_the_pool():
    allocator = BlockAllocator(4)
    with pytest.raises(ValueError, match="prefix_cache must have the allocator of the pool"):
        Scheduler(pool=allocator, prefix_cache=PrefixCache(BlockAllocator(4)))
    with refuses(ValueError, "blocks", 8, 16):
        Scheduler(pool=allocator, prefix_cache=PrefixCache(allocator, 8))
    with refuses(ValueError, "pool"):
        Scheduler(prefix_cache=PrefixCache(allocator))
    scheduler = Scheduler(pool=allocator, prefix_cache=PrefixCache(allocator))
    for tokens, error in ((["a"], TypeError), ([2**40], ValueError)):
        with pytest.raises(error):
            scheduler.add_request(tokens, 5)
    with pytest.raises(TypeError):
        scheduler.add_request([1], 5, extra_keys=(1.5,))
    assert scheduler.total_count == 0


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("wide", [2**31, 2**40, 10**30])
def test_a_token_that_the_cache_cannot_hold_is_refused_before_anything_changes(lookahead, wide):
    allocator = BlockAllocator(32)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK, lookahead=lookahead), allocator, cache)
    for number in range(3):
        scheduler.add_request([number, 8, 9], 16)
    # The sequences fill blocks at different steps. A check at that time would find the wrong token after other changes.
    for step in range(10):
        batch = scheduler.schedule()
        before = [list(scheduler.get_sequence(seq_id).output_tokens) for seq_id in (1, 2, 3)]
        fed = [scheduler.get_sequence(seq_id).fed for seq_id in (1, 2, 3)]
        stats = cache.stats(), allocator.free_count
        wrong = [[5, 6, wide], [wide, 5, None], *([[5, [wide], 6], [5, 6, [5, wide]]] if lookahead else [])]
        for tokens in wrong:
            with refuses(ValueError, "token", wide, 32, 2147483647):
                scheduler.commit(batch, tokens)
        with refuses(ValueError, "token", wide, 32):
            scheduler.append_token(2, wide)
        assert [list(scheduler.get_sequence(seq_id).output_tokens) for seq_id in (1, 2, 3)] == before
        assert [scheduler.get_sequence(seq_id).fed for seq_id in (1, 2, 3)] == fed
        assert (cache.stats(), allocator.free_count) == stats
        cache.check()
        scheduler.commit(batch, [2**31 - 1, 5, step])
    assert cache.num_cached >= 6


def test_without_a_cache_tokens_may_be_any_objects():
    scheduler = Scheduler()
    scheduler.add_request([1], 3)
    scheduler.commit(scheduler.schedule(), [2**40])
    assert scheduler.get_sequence(1).output_tokens == [2**40]


def test_pages_found_in_the_cache_hold_the_right_keys():
    engine = Engine(24)
    cache = PrefixCache(engine.pool.allocator, LAYOUT.block_size)
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=32), engine.pool, cache)
    rng = np.random.default_rng(0)
    for number in range(60):
        head = [int(rng.integers(3))] * 9
        scheduler.add_request([*head, *rng.integers(0, 3, int(rng.integers(1, 20))).tolist()], 48)
        while scheduler.waiting_count > 2 or (number == 59 and scheduler.has_work):
            batch = scheduler.schedule()
            engine.run(scheduler, batch)
            scheduler.commit(batch, rng.integers(0, 3, len(batch)).tolist())
    assert cache.stats()["hits"] > 50 and scheduler.stats()["actions"]["evict"] > 0
    cache.check()


@pytest.mark.parametrize("forget", ["discard", "reset"])
def test_discarded_blocks_are_not_cached_again_by_sequences_that_hold_them(forget):
    """Two sequences hold a block that turns out to be wrong. A later request computes its prompt again."""
    allocator = BlockAllocator(60)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, cache)
    for _ in range(2):
        scheduler.add_request([1] * 12, 40)
        run_step(scheduler)
    first, second = (scheduler.get_sequence(number) for number in (1, 2))
    assert second.kv.blocks[:2] == first.kv.blocks[:2]
    wrong, kept = first.kv.blocks[1], cache.num_cached
    if forget == "discard":
        assert cache.discard([wrong]) == 1
    else:
        cache.reset_prefix_cache()
    run_to_end(scheduler)
    assert cache.num_cached == (kept - 1 if forget == "discard" else 0)
    assert cache.cached_tokens([1] * 12) == (4 if forget == "discard" else 0)
    scheduler.add_request([1] * 12, 40)
    run_to_end(scheduler)
    assert cache.cached_tokens([1] * 12 + [7] * 24) == 36
    cache.check()


def test_a_sequence_that_is_removed_with_its_blocks_leaves_only_the_blocks_of_others():
    scheduler, cache = make(max_prefill_tokens=8)
    for prompt in ([1] * 8 + [2] * 12, [1] * 8 + [3] * 12):
        scheduler.add_request(prompt, 40)
        for _ in range(3):
            run_step(scheduler)
    assert cache.num_cached == 8 and scheduler.get_sequence(2).num_cached == 8
    scheduler.remove_sequence(2, discard=True)
    assert cache.cached_tokens([1] * 8) == 0 and cache.num_cached == 3  # behind the two that both have read
    scheduler.remove_sequence(7, discard=True)  # unknown: nothing
    run_to_end(scheduler)
    assert cache.num_cached == 3
    scheduler.add_request([1] * 8 + [2] * 12, 24)
    run_to_end(scheduler)
    assert cache.cached_tokens([1] * 8 + [2] * 12) == 20
    cache.check()


@pytest.mark.parametrize("resets", [False, True])
def test_a_removed_sequence_stops_only_the_caching_of_those_with_its_beginning(resets):
    allocator = BlockAllocator(60)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(
        SchedulerConfig(block_size=BLOCK), allocator, InterruptedCache(cache, "discarded" if resets else "")
    )
    wrong = scheduler.add_request([1, 2], 40)
    run_step(scheduler)
    (fork,) = scheduler.fork(wrong)  # copies tokens of a block that is not full
    others = [
        scheduler.add_request([1, 2, 7, 7, 5, 5], 40),  # computed what the cache then had
        scheduler.add_request([1, 2], 40, cache_salt="x"),
        scheduler.add_request([3, 2], 40),
    ]
    run_step(scheduler)
    run_step(scheduler)
    scheduler.remove_sequence(wrong, discard=True)
    epoch = cache.epoch
    keeps = [scheduler.get_sequence(number)._prefix.epoch == epoch for number in (fork, *others)]
    assert keeps == [False, False, not resets, not resets]
    kept = cache.num_cached
    run_to_end(scheduler)
    assert cache.num_cached == kept + (0 if resets else 2 * 9)
    cache.check()


class InterruptedCache:
    """A prefix cache in which another thread resets right behind a look-up, or before a publication or a discard."""

    def __init__(self, cache, moment):
        self.cache, self.moment = cache, moment

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def match_held(self, *arguments, **options):
        found = self.cache.match_held(*arguments, **options)
        if self.moment == "found":
            self.cache.reset_prefix_cache()
        return found

    def discard(self, blocks):
        if self.moment == "discarded":
            self.cache.reset_prefix_cache()
        return self.cache.discard(blocks)

    def cache_blocks(self, *arguments, **options):
        if self.moment == "published":
            self.cache.reset_prefix_cache()
        return self.cache.cache_blocks(*arguments, **options)


@pytest.mark.parametrize("moment", ["found", "published"])
def test_a_reset_reaches_a_request_at_any_moment(moment):
    """Its blocks, or the cached ones that it begins with, are void: nothing that it computes from them is cached."""
    allocator = BlockAllocator(60)
    cache = PrefixCache(allocator, BLOCK)
    blocks = allocator.allocate_n(2)
    cache.cache_blocks([1] * 8, blocks)
    allocator.free(blocks)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, InterruptedCache(cache, moment))
    scheduler.add_request([1] * 12, 40)
    batch = run_step(scheduler)
    assert batch.tokens == [[1] * 4]  # it read the cached blocks
    run_to_end(scheduler)
    assert (cache.num_cached, cache.cached_tokens([1] * 12)) == (0, 0)
    cache.check()


@pytest.mark.parametrize("forget", ["discard", "reset"])
def test_a_running_sequence_hears_of_a_reset_while_the_cache_is_empty(forget):
    allocator = BlockAllocator(60)
    cache = PrefixCache(allocator, BLOCK)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK), allocator, cache)
    scheduler.add_request([1] * 12, 16)
    batch = scheduler.schedule()
    if forget == "discard":
        cache.discard(scheduler.get_sequence(1).kv.blocks)
    else:
        cache.reset_prefix_cache()
    scheduler.commit(batch, [7])
    run_to_end(scheduler)
    assert cache.num_cached == 0
    scheduler.add_request([1] * 12, 16)  # it begins after the reset
    run_to_end(scheduler)
    assert cache.cached_tokens([1] * 12) == 12
