"""Owners of blocks: the owner map, the leak report and the audit of every reference."""

import gc

import pytest

from pagepool import BlockAllocator, PagedSeqState, PoolError, PrefixCache, Scheduler, SchedulerConfig, StaleHandle


def world():
    allocator = BlockAllocator(16)
    cache = PrefixCache(allocator, 4)
    first = PagedSeqState(allocator, 4, label="request 1")
    first.append(10)
    cache.cache_blocks(list(range(10)), first.blocks)
    second = first.fork()
    second.label = 2
    return allocator, cache, first, second


def test_the_owners_of_a_block_add_up_to_its_references():
    allocator, cache, first, second = world()
    allocator.share([0, 0])
    owners = allocator.owners(0)
    assert [owner[:3] for owner in owners] == [
        ("sequence", "request 1", 1),
        ("sequence", 2, 1),
        ("cache", "gittins", 1),
        ("other", None, 2),
    ]
    assert [owner.object for owner in owners] == [first, second, cache, None]
    assert sum(owner.references for owner in owners) == allocator.ref_count(0) == 5
    assert allocator.owners(15) == []
    assert sorted(allocator.owners()) == [0, 1, 2]
    with pytest.raises(PoolError, match="block 16 is out of range: there are 16 blocks"):
        allocator.owners(16)


def test_leaks_name_sequences_and_their_own_blocks_but_no_cache():
    allocator, _cache, first, second = world()
    second.append(3)  # copies the last block and takes one more
    taken = allocator.allocate()
    report = [leak[:4] for leak in allocator.leaks()]
    assert report == [
        ("sequence", 2, [0, 1, 3, 4], [3, 4]),
        ("sequence", "request 1", [0, 1, 2], [2]),
        ("other", None, [taken], [taken]),
    ]
    allocator.free(taken)
    first.release()
    second.close()
    assert allocator.leaks() == [] and allocator.in_use == 2


def test_check_finds_references_without_owner_and_owners_without_reference():
    allocator, _cache, first, _second = world()
    allocator.check(others=0)
    allocator.share(2)
    allocator.check()
    with pytest.raises(PoolError, match="1 references belong to no holder, not 0"):
        allocator.check(others=0)
    allocator.free([2, 2])  # one too many: drops a table's reference
    with pytest.raises(PoolError, match="block 2 has 1 references, its holders have 2"):
        allocator.check()
    allocator.share(2)
    assert first.len == 10


def test_another_holder_is_audited_while_it_lives():
    class Engine:
        kind, label = "engine", "draft"

        def references(self):
            return [0, 0]

    allocator = BlockAllocator(4)
    allocator.share([allocator.allocate()])
    engine = Engine()
    allocator.add_owner(engine)
    allocator.add_owner(engine)
    assert [owner[:3] for owner in allocator.owners(0)] == [("engine", "draft", 2)]
    allocator.check(others=0)
    del engine
    gc.collect()
    allocator.check(others=2)


def test_a_freed_sequence_is_not_listed():
    allocator, _cache, first, second = world()
    del first, second
    assert allocator.leaks() == []
    allocator.check(others=0)


@pytest.mark.parametrize("label", [1.5, b"x", ["list"]])
def test_a_label_is_a_number_or_a_name(label):
    with pytest.raises(TypeError, match="a label must be an int, a str or None"):
        PagedSeqState(BlockAllocator(1), 4, label=label)
    with pytest.raises(TypeError, match="a label must be"):
        PagedSeqState(BlockAllocator(1), 4).label = label


def test_a_scheduler_labels_its_sequences_and_closes_finished_ones():
    allocator = BlockAllocator(8)
    scheduler = Scheduler(SchedulerConfig(block_size=4), allocator)
    number = scheduler.add_request([1, 2, 3, 4, 5], 10)
    batch = scheduler.schedule()
    state = batch.states[0]
    assert [leak[:3] for leak in allocator.leaks()] == [("sequence", number, [0, 1])]
    scheduler.finish_sequence(number)
    assert state.closed and allocator.in_use == 0
    with pytest.raises(StaleHandle, match=f"the sequence {number} was closed"):
        state.append()
