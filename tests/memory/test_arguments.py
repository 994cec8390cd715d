"""Integer arguments: integers of any type are accepted, other types are refused with a clear error."""

import warnings

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    BlockTables,
    HybridSequence,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    SsmStatePool,
    StaleHandle,
    StateLayout,
)
from pagepool.memory.batch import append_batch

LAYOUT = StateLayout(layers=[{"h": ((2,), "float32")}])


def sequence(**options):
    allocator = BlockAllocator(400)
    return HybridSequence([KvGroup(allocator, 4), KvGroup(allocator, 4, window=4)], **options)


def test_small_integers_of_numpy_do_not_wrap():
    hybrid = sequence(keep=np.uint8(200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            hybrid.append(np.int8(100))
        assert hybrid.len == 300 and type(hybrid.len) is int
        back = hybrid.rollback(np.uint8(5))
        assert back == 295 and type(back) is int
        hybrid.truncate(np.int16(290))
        hybrid.append(np.uint8(255))
        hybrid.trim()
    hybrid.check()
    assert hybrid.len == 545 and type(hybrid.len) is int and type(hybrid.keep) is int
    assert [table.len for table in hybrid.kv] == [545, 545]
    assert [type(number) for number in hybrid.stats().values()] == [int] * 5
    assert type(hybrid.checkpoint().position) is int

    allocator = BlockAllocator(100)
    group = KvGroup(allocator, np.int8(2), np.int8(100), np.uint8(200))
    assert [type(number) for number in (group.block_size, group.window, group.max_blocks_per_seq)] == [int] * 3
    cached = PagedSeqState(allocator, 2)
    cached.append(100)
    adopted = HybridSequence([group])
    adopted.adopt([cached.blocks], np.int8(100))
    adopted.append(np.int8(100))
    adopted.check()
    assert adopted.len == 200 and type(adopted.len) is int


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: KvGroup(None), TypeError, ("allocator", "BlockAllocator", "None")),
        (lambda: KvGroup("x"), TypeError, ("allocator", "BlockAllocator", "str", "x")),
        (lambda: KvGroup(BlockAllocator(1), 4, window=1.5), TypeError, ("window", "float", "1.5")),
        (lambda: KvGroup(BlockAllocator(1), window=float("nan")), TypeError, ("window", "nan")),
        (lambda: KvGroup(BlockAllocator(1), window=-1), ValueError, ("window", 0, -1)),
        (lambda: KvGroup(BlockAllocator(1), 0), ValueError, ("block_size", 1, 1024, 0)),
        (lambda: KvGroup(BlockAllocator(1), "4"), TypeError, ("block_size", "str", "4")),
        (lambda: KvGroup(BlockAllocator(1), 4, None, -1), ValueError, ("max_blocks_per_seq", 0, -1)),
        (lambda: sequence(keep=1.5), TypeError, ("keep", "float", "1.5")),
        (lambda: sequence(keep=float("nan")), TypeError, ("keep", "float", "nan")),
        (lambda: sequence(keep=None), TypeError, ("keep", "None")),
        (lambda: sequence(keep=-1), ValueError, ("keep", 0, -1)),
        (lambda: sequence(label=1.5), TypeError, ("label", "int", "str", "None", "float", "1.5")),
        (lambda: sequence(states=5), TypeError, ("states", "SsmStatePool", "None", "int", 5)),
        (lambda: HybridSequence([1]), TypeError, ("groups[0]", "KvGroup", "int", 1)),
        (lambda: HybridSequence(5), TypeError, ("groups", "KvGroup", "int", 5)),
        (lambda: HybridSequence([[0] * 999]), TypeError, ("list", 0)),
        (lambda: AttentionSequenceState(1.5), TypeError, ("max_context", "float", "1.5")),
    ],
)
def test_invalid_constructor_arguments_are_refused_in_one_sentence(make, error, words):
    with refuses(error, *words):
        make()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda it: it.append(1.0), ("n", "float", "1.0")),
        (lambda it: it.append(None), ("n", "None")),
        (lambda it: it.rollback(None), ("to", "Checkpoint", "None")),
        (lambda it: it.rollback(0.0), ("to", "Checkpoint", "float", "0.0")),
        (lambda it: it.truncate("x"), ("len", "str", "x")),
        (lambda it: it.truncate(0.0), ("len", "float", "0.0")),
        (lambda it: it.discard(3), ("checkpoint", "Checkpoint", "int", 3)),
        (lambda it: it.adopt([[], []], None), ("num_tokens", "None")),
        (lambda it: it.adopt(5, 0), ("blocks", "int", 5)),
    ],
)
@pytest.mark.parametrize("tokens", [0, 9])
def test_a_call_with_a_wrong_type_changes_nothing(use, words, tokens):
    hybrid = sequence(states=SsmStatePool.from_layout(LAYOUT, 4))
    hybrid.append(tokens)
    hybrid.checkpoint()
    before = hybrid.stats(), [table.blocks for table in hybrid.kv]
    with refuses(TypeError, *words):
        use(hybrid)
    hybrid.check()
    assert (hybrid.stats(), [table.blocks for table in hybrid.kv]) == before


def test_a_position_is_copied_from_a_state_alone():
    state = AttentionSequenceState(4)
    with refuses(TypeError, "other", "AttentionSequenceState", "int", 5):
        state.copy_from(5)
    assert state.step_position == 0


def test_closed_objects_without_a_label_are_named_by_their_type():
    hybrid, state = sequence(), PagedSeqState(BlockAllocator(4), 4)
    hybrid.close()
    state.close()
    for use in (lambda: hybrid.append(1), lambda: state.append(1), lambda: append_batch([state], [1])):
        with pytest.raises(StaleHandle, match=r"^(the sequence|sequence 0) was closed: its blocks may have another"):
            use()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_blocks", lambda value: BlockAllocator(value)),
        ("max_blocks", lambda value: BlockAllocator(1, value)),
        ("n", lambda value: BlockAllocator(1).allocate_n(value)),
        ("num_blocks", lambda value: BlockAllocator(1).grow(value)),
        ("num_blocks", lambda value: BlockAllocator(1).shrink(value)),
        ("block", lambda value: BlockAllocator(1).owners(value)),
        ("block_size", lambda value: PagedSeqState(BlockAllocator(1), value)),
        ("max_blocks_per_seq", lambda value: PagedSeqState(BlockAllocator(1), 4, value)),
        ("max_seqs", lambda value: BlockTables(value, 1)),
        ("max_blocks_per_seq", lambda value: BlockTables(1, value)),
        ("page_size", lambda value: KvCachePool(value, 1)),
        ("initial_pages", lambda value: KvCachePool(8, value)),
        ("num_blocks", lambda value: KvCachePool.from_layout(KvLayout(1, 1, 8), value)),
        ("capacity", lambda value: SsmStatePool.from_layout(LAYOUT, value)),
        ("request_id", lambda value: SsmStatePool.from_layout(LAYOUT, 1).alloc(value)),
        ("a slot", lambda value: SsmStatePool.from_layout(LAYOUT, 1).release(value)),
        ("layer", lambda value: SsmStatePool.from_layout(LAYOUT, 1).view(value, "h")),
    ],
)
def test_a_value_that_is_not_an_integer_is_named(name, call):
    with refuses(TypeError, name, "str", "x"):
        call("x")
    with refuses(TypeError, name, "float", "1.0"):
        call(1.0)


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        (5, TypeError, ("layers", "int")),
        ([{"h": ((2,), object())}], TypeError, ("dtype", "h", 0)),
        ([{}, {"h": ((2,), None)}], TypeError, ("dtype", "h", 1, "None")),
        ([{"h": ((2,), 5)}], TypeError, ("dtype", "h", 0, 5)),
        ([{"h": ((2,), "float33")}], ValueError, ("dtype", "h", 0, "float33")),
        ([{"h": ((2,), "f4,(")}], ValueError, ("dtype", "h", 0, "f4,(")),
        ([{"h": ((2,), "O")}], ValueError, ("dtype", "h", 0, "O")),
        ([{"h": ((2,), "S0")}], ValueError, ("dtype", "h", 0, "S0")),
        ([{"h": ((10**30,), "int8")}], ValueError, ("state", "h", 0, 10**30, "bytes")),
        ([{"h": ((1 << 39, 2), "int8")}], ValueError, (1 << 40, "bytes")),
        ([{"h": ((2.0,), "int8")}], TypeError, ("h", 0, "float")),
    ],
)
def test_a_layout_of_states_is_checked_when_it_is_made(layers, error, words):
    with refuses(error, *words):
        StateLayout(layers=layers)
