"""A scheduler serves requests over a shared pool while another process changes the limit and is killed."""

import os
import random
import signal
import threading
import time
import zlib
from contextlib import suppress

import numpy as np
import pools
import pytest

from pagepool import PoolExhausted, PrefixCache, Scheduler, SchedulerConfig

BLOCKS, SIZE, WIDTH = 64, 16, 32


@pytest.fixture
def memfd():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def view(fd):
    pool = pools.attach(fd, BLOCKS, pools.WHOLE_PAGES)
    return pool, PrefixCache(pool.allocator)


def change_limits(fd, seed, most):
    pool, choose, parent = view(fd)[0], random.Random(seed), os.getppid()
    while os.getppid() == parent:
        limit = choose.randrange(most)
        with suppress(ValueError):  # another process has changed the limit meanwhile
            pool.shrink(min(limit, pool.num_blocks))
            pool.grow(max(limit, pool.num_blocks))
        time.sleep(choose.random() * 0.004)


def next_token(tokens):
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 1000


def answer(prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_step(pool, scheduler):
    """Run one step of a model that reads all tokens of a sequence from the pages. Returns the number of sequences."""
    batch = scheduler.schedule()
    results = []
    for state, tokens in zip(batch.states, batch.tokens, strict=True):
        first = state.len - len(tokens)
        slots = np.array([state.blocks[i // SIZE] * SIZE + i % SIZE for i in range(first, state.len)])
        rows = np.repeat(np.asarray(tokens, np.float32), WIDTH).reshape(-1, 1, WIDTH)
        pool.append(0, slots, rows, rows)
        k, v = pool.gather(0, state.blocks, state.len)
        assert np.array_equal(k, v) and (k == k[:, :, :1]).all()
        results.append(next_token(k[:, 0, 0].astype(np.int32)))
    scheduler.commit(batch, results)
    return len(results)


def test_requests_are_answered_while_another_process_changes_the_limit_and_is_killed(memfd):
    pool, cache = view(memfd)
    full = pools.allocated(memfd)
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=256, max_prefill_tokens=128), pool, cache)
    choose = random.Random(9)
    wanted, answers, child, kills, empty, lowest = {}, {}, None, 0, 0, full
    while kills < 20 or scheduler.has_work:
        if child is None and kills < 20:
            child = pools.in_child(change_limits, memfd, choose.random(), BLOCKS + 1)
        if kills < 20 and len(wanted) - len(answers) < 8:
            prompt = [*range(choose.randrange(4) * 100, 400 + choose.randrange(4)), choose.randrange(1000)]
            n = choose.randint(1, 60)
            wanted[scheduler.add_request(prompt, max_new_tokens=n)] = answer(prompt, n)
        if not run_step(pool, scheduler):
            empty += 1
            time.sleep(0.0005)
        answers.update({seq.id: seq.output_tokens for seq in scheduler.drain_finished()})
        lowest = min(lowest, pools.allocated(memfd))
        if child is not None and len(answers) > 5 * kills and choose.random() < 0.03:
            assert pools.kill(child) == -9
            child, kills = None, kills + 1
            cache.check()
            if kills == 20:
                pool.reap()
                pool.grow(BLOCKS)
    assert answers == wanted and len(answers) > 95
    assert empty and scheduler.num_preemptions and lowest < full - BLOCKS // 2
    scheduler.check()
    cache.check()
    assert pool.allocator.in_use == cache.num_cached
    scheduler.close()
    pool.allocator.check(others=0)
    pool.shrink(8)
    assert pools.allocated(memfd) == full - (BLOCKS - 8) and pool.allocator.in_use == cache.num_cached <= 8
    pool.grow(BLOCKS)
    cache.evict(BLOCKS)
    assert sorted(pool.allocator.allocate_n(BLOCKS).tolist()) == [*range(BLOCKS)]


def test_a_request_waits_for_a_higher_limit_and_no_running_one_is_lost(memfd):
    pool, cache = view(memfd)
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=256, max_prefill_tokens=256), pool, cache)
    prompts = [[*range(seed, seed + 100)] for seed in (0, 500)]
    first = scheduler.add_request(prompts[0], max_new_tokens=60)
    for _ in range(5):
        assert run_step(pool, scheduler) == 1
    pool.shrink(3)  # the sequence has 7 blocks and needs an eighth after 13 tokens
    second = scheduler.add_request(prompts[1], max_new_tokens=5)
    steps = [run_step(pool, scheduler) for _ in range(30)]
    assert steps[0] == 1 and steps[-1] == 0 and scheduler.has_work
    pool.grow(BLOCKS)
    while scheduler.has_work:
        assert run_step(pool, scheduler)
    found = {seq.id: seq.output_tokens for seq in scheduler.drain_finished()}
    assert found == {first: answer(prompts[0], 60), second: answer(prompts[1], 5)}
    scheduler.check()
    cache.check()
    pool.allocator.check()


@pytest.fixture
def stopped(memfd):
    """The pid of a process that was stopped while it had the limit locked."""
    pool = view(memfd)[0]  # has blocks when the other process attaches

    def keep():
        own = view(memfd)[0]
        pools.lock_limit(f"/proc/self/fd/{memfd}")
        os.kill(os.getpid(), signal.SIGSTOP)
        own.close()

    child = pools.in_child(keep)
    os.waitpid(child, os.WUNTRACED)
    yield child
    pools.kill(child)
    pool.close()


def test_a_process_that_is_stopped_while_it_changes_the_limit_stops_no_other_process(memfd, stopped):
    pool, cache = view(memfd)  # attaches
    failed = []

    def shrink():
        with pytest.raises(pools.PoolError, match=f"process {stopped} has locked the limit .* for 2 s") as caught:
            pool.shrink(8)
        failed.append(str(caught.value))

    thread = threading.Thread(target=shrink)
    thread.start()
    served = 0
    while thread.is_alive():
        blocks = pool.allocator.allocate_n(4)
        cache.cache_blocks(range(served, served + 4 * SIZE), blocks)
        pool.allocator.free(blocks)
        cache.evict(4)
        served += 1
    thread.join()
    assert failed and served > 10 and pool.num_blocks == BLOCKS
    pool.allocator.check(others=0)
    cache.check()


def test_processes_that_change_the_limit_at_the_same_time_lose_no_memory(memfd):
    pool = view(memfd)[0]
    full = pools.allocated(memfd)
    children = [pools.in_child(change_limits, memfd, seed, BLOCKS + 1) for seed in (1, 2)]
    done = 0
    while done < 200:
        limit = random.randrange(BLOCKS + 1)
        with suppress(ValueError, PoolExhausted):
            pool.shrink(min(limit, pool.num_blocks))
            pool.grow(max(limit, pool.num_blocks))
            pool.allocator.free(pool.allocator.allocate_n(3))
            done += 1
        pool.allocator.check(others=0)
    for child in children:
        pools.kill(child)
    pool.shrink(0)
    assert pools.allocated(memfd) == full - BLOCKS
    pool.grow(BLOCKS)
    assert pools.allocated(memfd) == full and pool.allocator.free_count == BLOCKS
