"""A pool that several processes share: sizes and contents, refusals, fork, dead processes."""

import errno
import os
import random
import signal
from pathlib import Path

import numpy as np
import pools
import pytest
from share import WHOLE

from pagepool import BlockAllocator, KvCachePool, KvLayout, PagedSeqState, PoolError
from pagepool.errors import InvalidBlock, PoolExhausted, StaleHandle


@pytest.fixture
def name():
    chosen = pools.new_name()
    yield chosen
    if os.path.lexists(f"/dev/shm/pagepool-{chosen}"):
        pools.remove(chosen)


@pytest.fixture
def memfd():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def rows(seed, n):
    k, v = np.random.default_rng(seed).standard_normal((2, n, 1, 8)).astype(np.float32)
    return k, v


def test_a_fresh_pool_hands_out_the_same_ids_as_a_private_one(name):
    pool = pools.attach(name, 8)
    assert pool.allocator.allocate_n(3).tolist() == [0, 1, 2]
    pool.allocator.free([0, 2])
    assert [pool.allocator.allocate() for _ in range(3)] == [2, 0, 3]
    assert (pool.allocator.in_use, pool.allocator.free_count, pool.allocator.peak_in_use) == (4, 4, 4)
    pool.allocator.check(others=4)


def test_the_file_is_private_to_the_user_and_outlives_its_processes(name):
    def write():
        pool = pools.attach(name)
        pool.page(5)[:] = 7

    assert pools.wait(pools.in_child(write)) == 0
    assert os.stat(f"/dev/shm/pagepool-{name}").st_mode & 0o777 == 0o600
    assert pools.attach(name).page(5).tolist() == [7.0] * 256


def test_two_views_never_get_the_same_block(name):
    first, second = pools.attach(name, 10), pools.attach(name, 10)
    ours, theirs = first.allocator.allocate_n(6).tolist(), second.allocator.allocate_n(4).tolist()
    assert sorted(ours + theirs) == list(range(10))
    for allocator in (first.allocator, second.allocator):
        assert (allocator.in_use, allocator.free_count) == (10, 0)
        with pytest.raises(PoolExhausted, match="asked for 2 blocks, 0 of 10"):
            allocator.allocate_n(2)
    with pytest.raises(InvalidBlock, match="block"):
        second.allocator.free(ours[0])
    first.allocator.free(ours[:2])
    assert sorted(second.allocator.allocate_n(2).tolist()) == ours[:2]
    first.allocator.check(others=4)
    second.allocator.check(others=6)


def test_allocate_n_takes_all_or_nothing(name):
    first, second = pools.attach(name, 10), pools.attach(name, 10)
    first.allocator.allocate_n(6)
    with pytest.raises(PoolExhausted, match="asked for 5 blocks, 4 of 10"):
        second.allocator.allocate_n(5)
    assert (second.allocator.free_count, second.allocator.in_use) == (4, 6)
    second.allocator.check(others=0)


def test_pages_that_one_process_appends_are_read_by_another(memfd):
    k, v = rows(1, 20)
    pool = pools.attach(memfd)

    def write():
        own = pools.attach(memfd)
        own.append(0, PagedSeqState(own.allocator).append(20), k, v)

    assert pools.wait(pools.in_child(write)) == 0
    # The child had slot 1 of 30: its search for free blocks began at block 64 * 1 // 30.
    found_k, found_v = pool.gather(0, [2, 3], 20)
    assert np.array_equal(found_k, k) and np.array_equal(found_v, v)


def test_sequences_fork_and_copy_on_write(name):
    pool = pools.attach(name)
    state = PagedSeqState(pool.allocator)
    k, v = rows(2, 10)
    pool.append(0, state.append(10), k, v)
    other = state.fork()
    k2, v2 = rows(3, 1)
    pool.append(0, other.append(), k2, v2)
    assert other.blocks != state.blocks
    assert np.array_equal(pool.gather(0, state.blocks, 10)[0], k)
    assert np.array_equal(pool.gather(0, other.blocks, 11)[0], np.concatenate([k, k2]))
    state.release()
    other.release()
    assert pool.allocator.in_use == 0
    pool.allocator.check(others=0)


def test_random_calls_of_three_views_agree_with_sets(name):
    views = [pools.attach(name, 24) for _ in range(3)]
    held = [{} for _ in views]
    choose = random.Random(11)
    for _ in range(4000):
        i = choose.randrange(3)
        allocator, own = views[i].allocator, held[i]
        used = {block for counts in held for block in counts}
        action = choose.randrange(5)
        if action == 0:
            n = choose.randint(0, 6)
            if n > 24 - len(used):
                with pytest.raises(PoolExhausted):
                    allocator.allocate_n(n)
            else:
                taken = allocator.allocate_n(n).tolist()
                assert len({*taken}) == n and not {*taken} & used
                own.update(dict.fromkeys(taken, 1))
        elif action == 1 and own:
            block = choose.choice(list(own))
            allocator.share(block)
            own[block] += 1
        elif action in (2, 3) and own:
            blocks = choose.choices(list(own), k=choose.randint(1, 4))
            if any(blocks.count(block) > own[block] for block in blocks):
                with pytest.raises(InvalidBlock):
                    allocator.free(blocks)
            else:
                allocator.free(blocks)
                for block in blocks:
                    own[block] -= 1
                held[i] = {block: count for block, count in own.items() if count}
        elif action == 4 and choose.random() < 0.05:
            views[i].close()
            views[i], held[i] = pools.attach(name, 24), {}
        used = {block for counts in held for block in counts}
        for view, counts in zip(views, held, strict=True):
            assert (view.allocator.in_use, view.allocator.free_count) == (len(used), 24 - len(used))
            assert all(view.allocator.ref_count(block) == counts.get(block, 0) for block in range(24))
    for view, counts in zip(views, held, strict=True):
        view.allocator.check(others=sum(counts.values()))


def refusal(error, match, shared, *arguments, **options):
    with pytest.raises(error, match=match):
        pools.attach(shared, *arguments, **options)


def test_a_pool_of_another_kind_is_refused_by_name(name):
    pool = pools.attach(name, fingerprint='{"weights": "a", "rope": {"theta": 1}}')
    refusal(ValueError, "head_dim 8, the layout has 16", name, layout=KvLayout(1, 1, 16, dtype="float32"))
    refusal(ValueError, "dtype float32, the layout has bfloat16", name, layout=KvLayout(1, 1, 8))
    refusal(ValueError, "room for 64 blocks, not 65", name, 65)
    refusal(ValueError, "fingerprint.weights 'a', not 'b'", name, fingerprint='{"weights": "b"}')
    refusal(ValueError, "rope.theta 1, not 2", name, fingerprint='{"weights": "a", "rope": {"theta": 2}}')
    refusal(ValueError, "at most 3584 bytes, not 3585", name, fingerprint=b"x" * 3585)
    refusal(ValueError, "letters, digits", "../etc/passwd")
    refusal(TypeError, "shared must be", 1.5)
    refusal(TypeError, "fingerprint must be", name, fingerprint=1)
    assert pool.stats()["processes"] == 1


def test_bytes_between_two_fields_of_the_layout_do_not_matter(memfd):
    pools.attach(memfd).close()
    after_tiled = 16 + 9 * 4  # magic, byte order and version; 9 fields of 32 bits
    os.pwrite(memfd, b"\xa5" * 4, after_tiled)
    assert pools.attach(memfd).allocator.allocate() == 0
    os.pwrite(memfd, b"\xa5", after_tiled + 4)  # of item_bytes
    with pytest.raises(PoolError, match="page order"):
        pools.attach(memfd)


def test_scales_of_quantised_keys_are_part_of_the_pool(name):
    layout = KvLayout(1, 1, 8, dtype="int8")
    scale = np.ones((1, 1, 8), np.float32)
    pools.attach(name, layout=layout, k_channel_scale=scale).close()
    pools.attach(name, layout=layout, k_channel_scale=scale).close()
    refusal(ValueError, "k_channel_scale", name, layout=layout, k_channel_scale=2 * scale)


def test_a_shared_pool_has_its_own_allocator_and_one_pool(name):
    refusal(ValueError, "allocator of its own", name, allocator=BlockAllocator(64))
    refusal(ValueError, "cannot be checked", name, checked=True)
    pool = pools.attach(name)
    with pytest.raises(ValueError, match="second pool"):
        KvCachePool.from_layout(pools.LAYOUT, 64, pool.allocator)
    with pytest.raises(ValueError, match="not shared"):
        KvCachePool.from_layout(pools.LAYOUT, 64, fingerprint="x")
    assert (pool.trim(), pool.shared, pool.checked) == (0, name, False)


def test_files_of_others_and_other_files_are_refused(name, tmp_path):
    path = Path(f"/dev/shm/pagepool-{name}")
    path.write_bytes(b"")
    path.chmod(0o644)
    refusal(PoolError, "mode 0600", name)
    path.chmod(0o600)
    refusal(PoolError, "damaged", name)
    path.write_bytes(b"x" * 100_000)
    refusal(PoolError, "damaged", name)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    refusal(OSError, "symbolic links", name)
    with open(tmp_path / "file", "w+b") as file:
        refusal(ValueError, "memfd that allows seals", file.fileno())
    unsealable = os.memfd_create("x", 0)
    refusal(ValueError, "memfd that allows seals", unsealable)
    os.close(unsealable)


def test_a_memfd_cannot_be_truncated(memfd):
    pool = pools.attach(memfd)
    with pytest.raises(PermissionError):
        os.ftruncate(memfd, 0)
    assert pool.allocator.allocate() == 0


def test_a_pool_larger_than_memory_is_refused_before_anything_is_allocated(name, memfd):
    for shared in (name, memfd):
        with pytest.raises(OSError, match=r"needs \d+ bytes, .* has \d+ available") as caught:
            pools.attach(shared, 2**31 - 1, layout=KvLayout(64, 16, 128))
        assert caught.value.errno == errno.ENOSPC
    assert not os.path.exists(f"/dev/shm/pagepool-{name}")


def test_memory_below_the_limit_is_allocated_when_the_pool_is_made(name):
    layout = KvLayout(1, 1, 8, block_size=1024, dtype="float32")
    pool = pools.attach(name, 16, layout=layout, max_blocks=256)
    path, page = f"/dev/shm/pagepool-{name}", layout.block_bytes
    assert 16 * page <= os.stat(path).st_blocks * 512 <= 16 * page + (4 << 20)
    assert (pool.num_blocks, pool.max_blocks, pool.allocator.free_count) == (16, 256, 16)
    blocks = pool.allocator.allocate_n(16)
    with pytest.raises(PoolExhausted):
        pool.allocator.allocate()
    pool.grow(256)
    assert os.stat(path).st_blocks * 512 >= 256 * page
    more = pool.allocator.allocate_n(240)
    pool.allocator.free([*more[:-1], *blocks[1:]])
    assert pool.shrink(4) == 4  # the last block is in use and stays
    pool.page(more[-1])[:] = 3
    assert os.stat(path).st_blocks * 512 <= 5 * page + (4 << 20)
    assert (pool.allocator.free_count, pool.allocator.in_use) == (3, 2)
    with pytest.raises(ValueError, match="from 4 to 256, not 257"):
        pool.grow(257)
    pool.allocator.free(more[-1])
    assert sorted(pool.allocator.allocate_n(3).tolist()) == [1, 2, 3]
    pool.allocator.check()


def test_a_limit_holds_in_every_process(name):
    first, second = pools.attach(name, 4, max_blocks=8), pools.attach(name, 4, max_blocks=8)
    first.grow(8)
    assert len(second.allocator.allocate_n(8)) == 8
    first.shrink(2)
    second.allocator.free(np.arange(8))
    assert (second.num_blocks, second.allocator.free_count) == (2, 2)
    assert sorted(second.allocator.allocate_n(2).tolist()) == [0, 1]
    with pytest.raises(PoolExhausted):
        second.allocator.allocate()


@pytest.mark.parametrize("ending", ["free", "close", "reap", "attach"])
def test_blocks_above_a_lower_limit_give_their_memory_back_when_their_holder_ends(memfd, ending):
    pool = pools.attach(memfd, layout=pools.WHOLE_PAGES)
    full = pools.allocated(memfd)
    (ready, told), (more, tell) = os.pipe(), os.pipe()

    def child():
        own = pools.attach(memfd, layout=pools.WHOLE_PAGES)
        blocks = own.allocator.allocate_n(64)
        os.write(told, b"x")
        os.read(more, 1)
        if ending == "free":
            own.allocator.free(blocks[::2])
            own.allocator.free(blocks[1::2])
        elif ending == "close":
            own.close()
        os.write(told, b"x")
        os.read(more, 1)

    other = pools.in_child(child)
    os.close(told)  # if the child fails, the reads below end
    assert os.read(ready, 1) and pool.shrink(40) == 40
    assert (pools.allocated(memfd), pool.allocator.in_use) == (full, 64)
    os.write(tell, b"x")
    assert os.read(ready, 1)
    if ending in ("reap", "attach"):
        assert pools.kill(other) == -9 and pools.allocated(memfd) == full
    if ending == "reap":
        assert pool.reap() == 1
    elif ending == "attach":
        assert pools.attach(memfd, layout=pools.WHOLE_PAGES).num_blocks == 40
    assert (pools.allocated(memfd), pool.allocator.free_count) == (full - 24, 40)
    os.write(tell, b"x")
    assert ending in ("reap", "attach") or pools.wait(other) == 0
    pool.grow(64)
    assert pools.allocated(memfd) == full
    for fd in (ready, more, tell):
        os.close(fd)


def test_the_handle_of_a_forked_child_is_closed(name):
    pool = pools.attach(name)
    state = PagedSeqState(pool.allocator)
    k, v = rows(4, 20)
    pool.append(0, state.append(20), k, v)
    before = pool.numpy().copy()
    parent = os.getpid()

    def child():
        for call in (
            pool.allocator.allocate,
            lambda: pool.allocator.allocate_n(2),
            lambda: pool.page(0),
            lambda: pool.append(0, np.arange(20), k, v),
            lambda: pool.gather(0, state.blocks, 20),
            lambda: state.append(20),
            pool.reap,
        ):
            with pytest.raises(StaleHandle, match=f"attached by process {parent}, not by {os.getpid()}"):
                call()
        state.release()
        own = pools.attach(name)
        assert own.stats()["processes"] == 2
        assert not {*own.allocator.allocate_n(62).tolist()} & {0, 1}

    assert pools.wait(pools.in_child(child)) == 0
    assert np.array_equal(pool.numpy()[:2], before[:2])
    assert (pool.reap(), pool.allocator.in_use) == (0, 2)
    assert np.array_equal(pool.gather(0, state.blocks, 20)[0], k)
    pool.allocator.check()


def test_the_lock_of_a_dead_parent_goes_although_a_child_lives_on(name):
    ready, told = os.pipe()
    done, tell = os.pipe()

    def parent():
        pool = pools.attach(name)
        pool.allocator.allocate_n(5)
        if os.fork() == 0:
            os.write(told, b"x")
            os.close(tell)  # otherwise this process would wait for itself
            os.read(done, 1)
            os._exit(0)
        signal.pause()

    first = pools.in_child(parent)
    os.read(ready, 1)
    pools.kill(first)
    pool = pools.attach(name)
    assert (pool.stats()["processes"], pool.allocator.in_use) == (1, 0)
    os.write(tell, b"x")
    for fd in (ready, told, done, tell):
        os.close(fd)


def die_with(shared, n):
    pool = pools.attach(shared)
    pool.allocator.allocate_n(n)
    os.kill(os.getpid(), signal.SIGKILL)


def test_blocks_of_the_dead_are_freed_by_reap_by_attaching_and_before_exhaustion(name):
    pool = pools.attach(name)
    assert pools.wait(pools.in_child(die_with, name, 10)) == -9
    assert pool.allocator.in_use == 10
    assert (pool.reap(), pool.reap(), pool.allocator.in_use) == (1, 0, 0)
    assert pools.wait(pools.in_child(die_with, name, 10)) == -9
    other = pools.attach(name)
    assert other.allocator.in_use == 0
    assert pools.wait(pools.in_child(die_with, name, 64)) == -9
    assert pool.allocator.free_count == 0
    assert len(pool.allocator.allocate_n(64)) == 64
    pool.allocator.check(others=64)


def test_a_process_without_descriptors_is_not_taken_for_dead(name):
    pool = pools.attach(name)
    ready, told = os.pipe()

    def child():
        own = pools.attach(name)
        own.allocator.allocate_n(3)
        os.dup2(told, 3)
        os.closerange(4, 1000)
        os.write(3, b"x")
        signal.pause()

    other = pools.in_child(child)
    os.read(ready, 1)
    assert (pool.reap(), pool.allocator.in_use) == (0, 3)
    assert pools.attach(name).stats()["processes"] == 3
    pools.kill(other)
    assert (pool.reap(), pool.allocator.in_use) == (1, 0)
    os.close(ready)
    os.close(told)


def test_a_stopped_process_is_not_dead(name):
    pool = pools.attach(name)
    ready, told = os.pipe()

    def child():
        pools.attach(name).allocator.allocate_n(3)
        own = pools.attach(name)
        own.allocator.allocate_n(2)
        os.write(told, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)

    other = pools.in_child(child)
    os.read(ready, 1)
    os.waitpid(other, os.WUNTRACED)
    assert (pool.reap(), pool.allocator.in_use) == (0, 2)
    pools.kill(other)
    assert (pool.reap(), pool.allocator.in_use) == (1, 0)
    os.close(ready)
    os.close(told)


def test_thirty_processes_and_no_more(memfd):
    views = [pools.attach(memfd) for _ in range(30)]
    with pytest.raises(PoolError, match="has 30 processes, the most"):
        pools.attach(memfd)
    assert len({view.allocator.allocate() for view in views}) == 30
    assert views[0].allocator.in_use == 30
    views[7].close()
    assert pools.attach(memfd).stats()["processes"] == 30
    for view in views:
        view.close()


def test_closing_frees_the_blocks_and_makes_the_handle_stale(name):
    pool, other = pools.attach(name), pools.attach(name)
    state = PagedSeqState(pool.allocator, block_size=16)
    state.append(40)
    with pytest.warns(ResourceWarning, match="3 blocks"):
        pool.close()
    assert (other.allocator.in_use, other.stats()["processes"]) == (0, 1)
    with pytest.raises(StaleHandle, match="is closed"):
        pool.allocator.allocate()
    theirs = other.allocator.allocate_n(64)
    state.release()  # drops no reference of the other process
    assert other.allocator.free_count == 0
    other.allocator.check(others=len(theirs))
    with pytest.raises(ValueError, match="closed"):
        pool.page(0)


def test_a_pool_that_is_dropped_gives_its_blocks_back(name):
    other = pools.attach(name)
    pools.attach(name).allocator.allocate_n(5)
    assert (other.allocator.in_use, other.stats()["processes"]) == (0, 1)


def test_processes_that_are_killed_at_random_lose_no_block_and_share_none():
    found = pools.run_script("stress.py", "8" if WHOLE else "2", "3")
    assert '"wrong": 0' in found and '"lost": 0' in found


def test_a_damaged_header_raises_or_works_and_ends_no_process():
    assert int(pools.run_script("fuzz.py", "7")) > 300
