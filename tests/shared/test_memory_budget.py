"""Pools of several models under one budget of bytes: bound, order of eviction, dead and stopped processes."""

import errno
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pools
import pytest
from share import WHOLE
from tier_names import files_of, tier_name

from pagepool import KvCachePool, KvLayout, MemoryBudget, PoolError, PrefixCache, Scheduler, SchedulerConfig
from pagepool.errors import PoolExhausted
from pagepool.memory import budget as budget_module
from pagepool.memory import shared_files

MIB = 1 << 20
BYTES = 16 * MIB
GRAIN = 2 * MIB
FIRST = KvLayout(num_layers=1, num_kv_heads=1, head_dim=40, block_size=16, dtype="float32")  # 5 KiB a block
SECOND = KvLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=32, dtype="float32")  # 32 KiB
MOST = {"a": 2867, "b": 448}  # what the budget has room for if a pool has all of it
LAYOUTS = {"a": FIRST, "b": SECOND}


@pytest.fixture
def name():
    with tier_name() as chosen:
        yield chosen


def open_pool(name, which, num_blocks=0, num_bytes=BYTES, **options):
    budget = MemoryBudget(name, num_bytes)
    options = {"max_blocks": MOST[which], "shared": f"{name}.{which}", "budget": budget, **options}
    return KvCachePool.from_layout(LAYOUTS[which], num_blocks, **options)


def memory(*pools_):
    return sum(os.stat(f"/dev/shm/pagepool-{pool.shared}").st_blocks * 512 for pool in pools_)


def grow(pool, num_blocks, takes=True):
    """Raise the limit as the scheduler does, until the pool has `num_blocks` or the budget is full."""
    while pool.num_blocks < num_blocks:
        if not pool.allocator.shared_pages.extend(num_blocks - pool.num_blocks, takes):
            break
    return pool.num_blocks


def most_blocks(which, num_bytes=BYTES):
    """The blocks of a pool that has all of the budget, apart from the 2 MiB in which each pool has its header."""
    return (num_bytes - 2 * GRAIN) // LAYOUTS[which].block_bytes


def cache_prompt(pool, num_blocks, seed=0):
    """Fill blocks and cache them; no sequence holds them afterwards. Return the tokens."""
    cache = PrefixCache(pool.allocator)
    tokens = np.random.default_rng(seed).integers(0, 1000, num_blocks * pool.block_size, np.int32)
    blocks = pool.allocator.allocate_n(num_blocks)
    for block in blocks:
        pool.page(block)[:] = tokens[0] + block
    cache.cache_blocks(tokens, blocks)
    pool.allocator.free(blocks)
    return cache, tokens


def test_a_pool_takes_the_whole_budget_and_no_more(name):
    pool, other = open_pool(name, "a", 10), open_pool(name, "b")
    assert (pool.num_blocks, pool.max_blocks) == (10, MOST["a"])
    most = most_blocks("a")
    with pytest.raises(OSError, match=f"{most + 1} blocks .* of {BYTES} bytes has room for {most}") as caught:
        pool.grow(most + 1)
    assert caught.value.errno == errno.ENOSPC
    assert pool.num_blocks == 10
    pool.grow(most)
    assert BYTES - FIRST.block_bytes < memory(pool, other) <= BYTES
    budget = MemoryBudget(name, BYTES)
    assert budget.used == memory(pool, other)
    assert budget.pools() == {f"{name}.a": memory(pool), f"{name}.b": memory(other)}
    assert len(pool.allocator.allocate_n(most)) == most
    with pytest.raises(PoolExhausted):
        pool.allocator.allocate()
    with pytest.raises(OSError, match=rf"needs {GRAIN} bytes, .* of {BYTES} bytes has 0 left"):
        open_pool(name, "a", shared=f"{name}.c")
    assert not os.path.exists(f"/dev/shm/pagepool-{name}.c")
    assert grow(pool, MOST["a"]) == most
    with pytest.raises(ValueError, match=f"2868 blocks need {BYTES + GRAIN} bytes, .* has {BYTES}"):
        open_pool(name, "a", max_blocks=2868)
    assert budget.most_blocks(FIRST.block_bytes, 16) in range(2200, most)


def test_growth_takes_the_rest_of_the_budget_then_idle_blocks_of_other_pools_but_none_in_use(name):
    first, second = open_pool(name, "a"), open_pool(name, "b")
    assert grow(first, 1) * FIRST.block_bytes > GRAIN - FIRST.block_bytes  # a chunk, so that the lock is rarely needed
    grow(first, 1200)
    held = first.allocator.allocate_n(400)
    cache, tokens = cache_prompt(first, 700)
    left = grow(second, MOST["b"], takes=False)
    assert 0 < left < most_blocks("b") and cache.num_cached == 700
    assert memory(first, second) <= BYTES
    assert grow(second, left + 20) >= left + 20
    assert 0 < cache.num_cached < 700
    assert cache.cached_tokens(tokens) == cache.num_cached * FIRST.block_size  # the last blocks of the prompt went
    most = grow(second, MOST["b"])
    assert memory(first, second) <= BYTES
    assert (cache.num_cached, first.allocator.in_use) == (0, 400)
    assert most == (BYTES - 2 * GRAIN - -(-400 * FIRST.block_bytes // GRAIN) * GRAIN) // SECOND.block_bytes
    first.allocator.check(others=400)
    first.allocator.free(held)
    assert grow(second, MOST["b"]) == most_blocks("b")
    assert (first.num_blocks, first.allocator.free_count) == (0, 0)
    assert grow(first, 1)


def test_blocks_in_use_above_the_limit_count_when_the_pool_grows_again(name):
    first, second = open_pool(name, "a"), open_pool(name, "b")
    grow(first, MOST["a"])
    held = first.allocator.allocate_n(first.num_blocks)
    first.allocator.free(held[: -7 * MIB // FIRST.block_bytes])  # an odd number of MiB: part of a grain is left
    first.shrink(100)
    grow(second, MOST["b"], takes=False)
    second.allocator.allocate_n(second.num_blocks)
    grow(first, MOST["a"])
    assert BYTES - 2 * GRAIN < memory(first, second) <= BYTES


def test_a_process_that_is_stopped_or_dead_cannot_keep_memory_that_it_does_not_use(name):
    def fill():
        pool = open_pool(name, "a")
        grow(pool, MOST["a"])
        cache_prompt(pool, 1500)
        pool.allocator.allocate_n(100)
        os.kill(os.getpid(), signal.SIGSTOP)

    other = pools.in_child(fill)
    os.waitpid(other, os.WUNTRACED)
    pool = open_pool(name, "b")
    assert grow(pool, MOST["b"]) > most_blocks("b") - 2 * GRAIN // SECOND.block_bytes
    assert MemoryBudget(name, BYTES).used <= BYTES
    pools.kill(other)
    assert grow(pool, MOST["b"]) == most_blocks("b")


def test_other_budgets_and_pools_are_refused_by_name(name):
    pool = open_pool(name, "a")
    with pytest.raises(ValueError, match=f"has {BYTES} bytes, not {BYTES + 1}"):
        MemoryBudget(name, BYTES + 1)
    other = MemoryBudget(f"{name}.other", BYTES)
    shared = {"shared": f"{name}.a", "max_blocks": MOST["a"]}
    with pytest.raises(ValueError, match=f"memory budget '{name}', not '{name}.other'"):
        KvCachePool.from_layout(FIRST, 0, budget=other, **shared)
    with pytest.raises(ValueError, match=f"memory budget '{name}', not None"):
        KvCachePool.from_layout(FIRST, 0, **shared)
    KvCachePool.from_layout(FIRST, 0, shared=f"{name}.free", max_blocks=8)
    with pytest.raises(ValueError, match=f"memory budget None, not '{name}'"):
        KvCachePool.from_layout(FIRST, 0, shared=f"{name}.free", max_blocks=8, budget=pool_budget(pool))
    assert [*pool_budget(pool).pools()] == [f"{name}.a"]
    with pytest.raises(ValueError, match="must have a name"):
        KvCachePool.from_layout(FIRST, 0, shared=5, budget=other)
    with pytest.raises(ValueError, match="no budget"):
        KvCachePool.from_layout(FIRST, 0, budget=other)
    with pytest.raises(TypeError, match="MemoryBudget"):
        KvCachePool.from_layout(FIRST, 0, budget=BYTES, **shared)
    for wrong in ("", "../x", "a" * 101):
        with pytest.raises(ValueError, match="memory budget must have 1 to 100"):
            MemoryBudget(wrong, BYTES)
    for wrong in (0, -1, 10**18):
        with pytest.raises(ValueError, match=f"not {wrong}"):
            MemoryBudget(name, wrong)
    with pytest.raises(TypeError, match="name must be a str"):
        MemoryBudget(5, BYTES)


def pool_budget(pool):
    return pool.allocator.shared_pages.budget


def test_names_of_pools_and_budgets_are_apart(name):
    for pool in (name, f"budget-{name}"):
        KvCachePool.from_layout(FIRST, 0, shared=pool, budget=MemoryBudget(name, 64 * MIB))
    assert len(MemoryBudget(name, 64 * MIB).pools()) == 2
    assert len(files_of(name)) == 3


def test_every_damage_of_the_file_is_an_error_or_a_right_answer(name):
    open_pool(name, "a").close()
    path = Path(f"/dev/shm/pagepool.budget-{name}")
    whole = path.read_bytes()
    for at in range(len(whole)):
        for value in range(256):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            if value == whole[at]:
                assert MemoryBudget(name, BYTES).used <= BYTES
            else:
                with pytest.raises((PoolError, ValueError), match=r"damaged|bytes, not"):
                    MemoryBudget(name, BYTES)
    for content in (b"", whole[:-1], whole + b"x", b"\0" * 4096):
        path.write_bytes(content)
        with pytest.raises(PoolError, match="damaged"):
            open_pool(name, "a")
    path.write_bytes(whole)
    path.chmod(0o644)
    with pytest.raises(PoolError, match="mode 0600"):
        MemoryBudget(name, BYTES)
    path.chmod(0o600)


def test_damaged_and_foreign_files_of_pools_are_counted_or_left_alone(name):
    pool = open_pool(name, "a", 100)
    folder = Path(f"/dev/shm/pagepool-{name}.folder")
    folder.mkdir()
    link = Path(f"/dev/shm/pagepool-{name}.link")
    link.symlink_to("/nowhere")
    text = Path(f"/dev/shm/pagepool-{name}.text")
    text.write_bytes(b"x" * 9000)
    other = open_pool(name, "b", 100)
    path = f"/dev/shm/pagepool-{name}.b"
    with open(path, "r+b") as file:
        whole = file.read(4096 + 8)
        choose = random.Random(3)
        for at in [*range(4096 - 360, 4096 + 8), *choose.sample(range(4096), 300)]:
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << choose.randrange(8)]), at)
            assert grow(pool, pool.num_blocks + 1) >= 100
            os.pwrite(file.fileno(), whole, 0)
            pool.shrink(100)
            assert other.num_blocks <= 100
    assert MemoryBudget(name, BYTES).used == memory(pool, other)
    folder.rmdir()


def test_a_pool_whose_file_was_removed_cannot_grow(name):
    pool = open_pool(name, "a", 10)
    pools.remove(f"{name}.a")
    with pytest.raises(OSError, match="has room for"):
        pool.grow(1000)
    assert not pool.allocator.shared_pages.extend(1, True)
    assert (pool.num_blocks, MemoryBudget(name, BYTES).used) == (10, 0)


def test_growth_that_the_file_system_refuses_is_exhaustion_and_changes_nothing(name, monkeypatch):
    pool = open_pool(name, "a", 10)
    before = memory(pool)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(shared_files, "check_room", refuse)
    assert not pool.allocator.shared_pages.extend(100, True)
    with pytest.raises(OSError, match="no room"):
        pool.grow(20)
    assert (pool.num_blocks, memory(pool)) == (10, before)


def test_another_process_that_keeps_the_lock_delays_growth_but_hangs_nothing(name, monkeypatch):
    pool = open_pool(name, "a", 10)

    def keep():
        with MemoryBudget(name, BYTES).grant(None, 0):
            os.kill(os.getpid(), signal.SIGSTOP)

    other = pools.in_child(keep)
    os.waitpid(other, os.WUNTRACED)
    assert not pool.allocator.shared_pages.extend(1, True)
    assert pool.allocator.allocate_n(10).size == 10
    monkeypatch.setattr(budget_module, "PATIENCE", 0.2)
    with pytest.raises(PoolError, match="another process has locked"):
        pool.grow(20)
    pools.kill(other)
    assert pool.allocator.shared_pages.extend(1, True)


def test_a_process_that_is_stopped_while_it_changes_its_limit_stops_no_other_pool(name):
    pool, second = open_pool(name, "a"), open_pool(name, "b")
    grow(pool, MOST["a"])
    most = pool.num_blocks

    def keep():
        own = open_pool(name, "a")
        pools.lock_limit(f"/dev/shm/pagepool-{name}.a")
        os.kill(os.getpid(), signal.SIGSTOP)
        own.close()

    other = pools.in_child(keep)
    os.waitpid(other, os.WUNTRACED)
    room = grow(second, MOST["b"])
    assert pool.num_blocks == most and room < most_blocks("b")
    pools.kill(other)
    assert grow(second, MOST["b"]) == most_blocks("b")


def test_a_full_file_system_is_named_with_what_it_has_left(name, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(budget_module.os, "write", refuse)
    with pytest.raises(OSError, match=rf"/dev/shm/pagepool.budget-{name}: No space .* has \d+ bytes available"):
        MemoryBudget(name, BYTES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_files_of_another_user_stop_no_growth_and_are_refused_by_name(name):
    def act():
        os.setgid(12345)
        os.setuid(12345)
        pool = open_pool(name, "a", 10)
        assert grow(pool, 20) >= 20
        with pytest.raises(PoolError, match=r"must be a regular file of user 12345 .* belongs to user 0"):
            shared_files.open_private(path)
        pool.close()

    path = Path(f"/dev/shm/pagepool.new-{name}")
    path.touch(0o600)
    try:
        assert pools.wait(pools.in_child(act)) == 0
    finally:
        path.unlink()


def test_a_forked_child_keeps_no_lock_and_can_use_the_budget(name):
    budget = MemoryBudget(name, BYTES)
    ready, told = os.pipe()
    done, tell = os.pipe()

    def parent():
        with budget.grant(None, 0):
            if os.fork() == 0:
                os.close(tell)
                os.write(told, b"x")
                os.read(done, 1)
                os._exit(0)
            signal.pause()

    other = pools.in_child(parent)
    os.read(ready, 1)
    pools.kill(other)
    assert pools.wait(pools.in_child(lambda: open_pool(name, "a", 10))) == 0
    with budget.grant(None, 0, seconds=0.0) as room:
        assert room > 0
    for fd in (ready, told, done, tell):
        os.close(fd)


def take_all(name, which):
    """In a new process: the pool can have everything that the other one does not need."""
    open_pool(name, "b" if which == "a" else "a").close()
    pool = open_pool(name, which)
    assert grow(pool, MOST[which]) == most_blocks(which), (pool.num_blocks, pool_budget(pool).pools())
    PrefixCache(pool.allocator).reset_prefix_cache()
    blocks = pool.allocator.allocate_n(pool.num_blocks)
    for block in blocks:
        pool.page(block)[:] = block
    assert memory(pool) + GRAIN <= BYTES
    pool.allocator.free(blocks)


def kill_at_line(number):
    """Kill this process before the n-th line of budget.py that it runs."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != budget_module.__file__:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def test_a_process_that_is_killed_at_any_line_loses_no_bytes(name):
    open_pool(name, "a").close()

    def victim():
        pool = open_pool(name, "a")
        grow(pool, MOST["a"])
        cache_prompt(pool, most_blocks("a") - 10)

    def workload(number):
        kill_at_line(number)
        pool = open_pool(name, "b", 20)
        grow(pool, 200)
        sys.settrace(None)

    for number in range(1, 2000, 4):
        assert pools.wait(pools.in_child(victim)) == 0
        status = pools.wait(pools.in_child(workload, number))
        assert status in (0, -signal.SIGKILL)
        assert sum(path.stat().st_blocks for path in files_of(name)) * 512 <= BYTES + 4096  # and the budget's own file
        assert pools.wait(pools.in_child(take_all, name, "a")) == 0
        if status == 0:
            break
    assert number > 100
    assert len(files_of(name)) == 3


def test_the_bound_holds_at_every_sample_while_processes_of_two_models_are_stopped_and_killed():
    found = json.loads(pools.run_script("budget_load.py", "8" if WHOLE else "3", "1"))
    assert found["most"] <= BYTES
    assert found["wrong"] == 0


def run(scheduler, pool, prompt, count):
    """Generate tokens that follow from the prompt; the pages hold them. Return the sequence."""
    scheduler.add_request(prompt, max_new_tokens=count)
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert not batch.is_empty
        for state, tokens in zip(batch.states, batch.tokens, strict=True):
            places = np.arange(state.len - len(tokens), state.len)
            slots = np.asarray(state.blocks, np.int64)[places // pool.block_size] * pool.block_size
            shape = (len(tokens), pool.num_kv_heads, pool.head_dim)
            rows = np.broadcast_to(np.asarray(tokens, np.float32)[:, None, None], shape).copy()
            pool.append(0, slots + places % pool.block_size, rows, rows)
            everything = scheduler.get_sequence(batch.seq_ids[0]).all_tokens[: state.len]
            assert np.array_equal(pool.gather(0, state.blocks, state.len)[0][:, 0, 0], everything)
        scheduler.commit(batch, [state.len % 97 for state in batch.states])
    return scheduler.drain_finished()[0]


def open_both(name):
    """Return the pools of two models under one budget, their caches and their schedulers."""
    opened = [open_pool(name, which) for which in "ab"]
    caches = [PrefixCache(pool.allocator) for pool in opened]
    config = SchedulerConfig(max_batch_tokens=512)
    return opened, caches, [Scheduler(config, pool, cache) for pool, cache in zip(opened, caches, strict=True)]


def test_running_requests_win_over_the_cached_blocks_of_another_model_and_lose_nothing(name):
    opened, caches, (first, second) = open_both(name)
    long, short = [5] * 16 * 2400, [6] * 32 * 300
    assert run(first, opened[0], long, 4).num_cached == 0
    assert (caches[0].num_cached, opened[0].num_blocks) == (2400, most_blocks("a"))
    seq = run(second, opened[1], short, 4)
    assert len(seq.output_tokens) == 4 and second.num_preemptions == 0
    assert caches[0].num_cached < 1200 and memory(*opened) <= BYTES
    again = run(first, opened[0], long, 4)
    assert 0 < again.num_cached < len(long)
    assert memory(*opened) <= BYTES
    for pool, cache, scheduler in zip(opened, caches, (first, second), strict=True):
        scheduler.check()
        cache.check()
        pool.allocator.check(others=0)


def test_a_pool_evicts_its_own_cached_blocks_before_it_takes_those_of_others(name):
    opened, caches, (first, second) = open_both(name)
    run(second, opened[1], [1] * 32 * 180, 1)
    theirs = caches[1].num_cached
    for prompt in range(8):
        run(first, opened[0], [prompt] * 16 * 500, 1)
    assert caches[1].num_cached == theirs
    assert caches[0].stats()["evicted"] > 0


def test_a_request_is_preempted_if_other_models_use_the_budget(name):
    pool, other = open_pool(name, "a"), open_pool(name, "b")
    grow(other, 300)
    held = other.allocator.allocate_n(300)
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=512), pool, PrefixCache(pool.allocator))
    for prompt in range(4):
        scheduler.add_request([prompt] * 1500, max_new_tokens=3000)
    for _ in range(4000):
        batch = scheduler.schedule()
        scheduler.commit(batch, [3] * len(batch))
    assert scheduler.num_preemptions > 0
    assert memory(pool, other) <= BYTES
    other.allocator.free(held)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch, [3] * len(batch))
    assert [len(seq.output_tokens) for seq in scheduler.drain_finished()] == [3000] * 4
