"""Slots for drafted tokens: reserved by schedule(), written by the caller, unused ones freed by commit()."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, BlockTables, PrefixCache, Scheduler, SchedulerConfig

BLOCK = 4


def make(num_blocks=32, lookahead=3, cache=False, **config):
    allocator = BlockAllocator(num_blocks)
    settings = SchedulerConfig(block_size=BLOCK, lookahead=lookahead, **config)
    return Scheduler(settings, allocator, PrefixCache(allocator, BLOCK) if cache else None), allocator


def start(scheduler, prompt=5, limit=40):
    seq_id = scheduler.add_request([1] * prompt, limit)
    scheduler.commit(scheduler.schedule(), [50])
    return scheduler.get_sequence(seq_id)


def test_a_decode_has_slots_for_its_drafts_and_keeps_those_accepted():
    scheduler, allocator = make()
    seq = start(scheduler)
    batch = scheduler.schedule()
    assert (batch.tokens, batch.num_tokens, batch.lookahead, batch.total_tokens) == ([[50]], [4], [3], 4)
    tables = BlockTables(2, 16).fill(batch)
    assert tables.slot_mapping.tolist() == [5, 6, 7, 8] and tables.seq_lens.tolist() == [9] and allocator.in_use == 3
    scheduler.commit(batch, [[51, 52, 60]])  # two drafts are accepted
    assert seq.output_tokens == [50, 51, 52, 60] and seq.kv.len == seq.fed == 8 and allocator.in_use == 2
    assert scheduler.num_tokens == 8
    assert scheduler.schedule().tokens == [[60]]


@pytest.mark.parametrize("result", [61, [61], None])
def test_one_token_or_none_retracts_all_drafts(result):
    scheduler, _ = make()
    seq = start(scheduler)
    scheduler.commit(scheduler.schedule(), [result])
    assert seq.kv.len == seq.fed == 6 and seq.output_tokens == ([50] if result is None else [50, 61])


def test_without_commit_the_next_step_takes_them_back():
    scheduler, _ = make()
    seq = scheduler.get_sequence(scheduler.add_request([1] * 5, 40))
    scheduler.schedule()
    scheduler.append_token(seq.id, 50)
    scheduler.schedule()
    for token in (51, 52):
        scheduler.append_token(seq.id, token)
    batch = scheduler.schedule()
    assert batch.tokens == [[51, 52]] and batch.lookahead == [0] and seq.kv.len == 8
    scheduler.commit(batch, [53])
    assert scheduler.schedule().lookahead == [3]


@pytest.mark.parametrize(
    ("result", "words"),
    [([51, 52, 53, 54, 55], ("row", 0, 5, 1, 4)), ([], ("row", 0, 1, 4)), ([51, -1], ("row", 0, -1))],
)
def test_wrong_results_change_nothing(result, words):
    scheduler, _ = make()
    seq = start(scheduler)
    batch = scheduler.schedule()
    with refuses(ValueError, *words):
        scheduler.commit(batch, [result])
    with pytest.raises(TypeError):
        scheduler.commit(batch, ["51"])
    assert seq.output_tokens == [50] and seq.kv.len == 9
    scheduler.commit(batch, [[51]])
    with refuses(ValueError, 1):
        scheduler.commit(batch, [[51]])


def test_drafts_are_refused_for_a_sequence_with_newly_appended_tokens():
    """The appended tokens use the slots of the drafts, and the sequence may lack room for both."""
    allocator = BlockAllocator(32)
    scheduler = Scheduler(SchedulerConfig(block_size=BLOCK, lookahead=3), allocator)
    seq = start(scheduler, limit=10)
    batch = scheduler.schedule()
    assert batch.lookahead == [3]
    for token in (51, 52):
        scheduler.append_token(seq.id, token)
    before = seq.fed, seq.kv.len
    with refuses(ValueError, "row", 0, 4, 2):
        scheduler.commit(batch, [[60, 61, 62, 63]])
    assert seq.output_tokens == [50, 51, 52] and (seq.fed, seq.kv.len) == before
    scheduler.commit(batch, [[53]])
    assert seq.output_tokens == [50, 51, 52, 53]
    scheduler.commit(scheduler.schedule(), [[54]])
    assert seq.all_tokens == [1] * 5 + [50, 51, 52, 53, 54] and allocator.in_use == 0


def test_drafts_stop_at_the_limit_and_at_the_budget():
    scheduler, _ = make(max_batch_tokens=3)
    seq = start(scheduler, prompt=3, limit=8)
    while seq.state.name != "DECODING":
        scheduler.commit(scheduler.schedule(), [50])
    batch = scheduler.schedule()
    assert batch.total_tokens <= 3 and batch.lookahead == [2]
    scheduler.commit(batch, [[51, 52, 53]])
    batch = scheduler.schedule()  # 7 of 8 tokens: no draft for the last one
    assert batch.lookahead == [0]
    scheduler.commit(batch, [54])
    assert seq.at_limit and len(seq.output_tokens) == 5


def test_rejected_drafts_are_never_cached():
    scheduler, allocator = make(cache=True)
    seq = start(scheduler, prompt=7, limit=30)
    scheduler.commit(scheduler.schedule(), [[51, 60]])  # slots up to position 10
    assert seq.kv.len == 9
    scheduler.finish_sequence(seq.id)
    cache = scheduler._prefix.cache
    assert cache.cached_tokens([1] * 7 + [50, 51, 60, 0]) == 8
    assert allocator.in_use == 2


@examples(80)
@given(
    st.integers(1, 5), st.integers(6, 16), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.data()
)
def test_any_run_of_acceptances_gives_the_tokens_that_were_committed(lookahead, blocks, prompts, cache, data):
    scheduler, allocator = make(blocks, lookahead, cache, max_batch_tokens=24)
    told = {scheduler.add_request([9] * prompt, prompt + 12): [] for prompt in prompts}
    for _ in range(4000):
        if not scheduler.has_work:
            break
        batch = scheduler.schedule()
        results = []
        for seq_id, tokens, count, slots, wants, state in zip(
            batch.seq_ids, batch.tokens, batch.num_tokens, batch.lookahead, batch.wants_token, batch.states, strict=True
        ):
            seq = scheduler.get_sequence(seq_id)
            assert state.len == seq.fed + slots and (count == len(tokens) + slots or not tokens)
            drafts = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=1 + slots)) if wants else None
            told[seq_id] += drafts or []
            results.append(drafts)
        scheduler.commit(batch, results)
        for seq in scheduler._sequences.values():
            if seq.kv is not None:
                assert seq.kv.len == seq.fed < seq.total_tokens
    for seq in scheduler.drain_finished():
        assert seq.output_tokens == told[seq.id]
    allocator.check()
    assert scheduler.num_tokens == 0


def test_each_sequence_has_as_many_slots_as_it_has_drafts():
    scheduler, _ = make()
    first, second, third = (scheduler.add_request([1] * 5, 40) for _ in range(3))
    scheduler.commit(scheduler.schedule({first: 2}), [50, 50, 50])  # prompts have no drafts
    batch = scheduler.schedule({first: 2, second: 9, 99: 1})
    assert (batch.lookahead, batch.num_tokens) == ([2, 3, 0], [3, 4, 1])
    scheduler.check()
    scheduler.commit(batch, [[51, 60], [51, 52, 53, 60], 60])
    assert scheduler.schedule({}).lookahead == [0, 0, 0]
    assert [scheduler.get_sequence(seq_id).kv.len for seq_id in (first, second, third)] == [8, 10, 7]


@pytest.mark.parametrize(("drafts", "error"), [({1: -1}, ValueError), ({1: 1.5}, TypeError), ([3], TypeError)])
def test_wrong_numbers_of_drafts_change_nothing(drafts, error):
    scheduler, _ = make()
    start(scheduler)
    with refuses(error, "drafts"):
        scheduler.schedule(drafts)
    assert scheduler.outstanding is None and scheduler.num_steps == 1


@pytest.mark.parametrize("drafts", [None, {1: 3, 2: 3}])
def test_drafts_are_dropped_before_a_sequence_loses_blocks(drafts):
    scheduler, allocator = make(num_blocks=4)
    seqs = [scheduler.get_sequence(scheduler.add_request([1] * 6, 9)) for _ in range(2)]
    scheduler.commit(scheduler.schedule(), [50, 50])
    batch = scheduler.schedule(drafts)  # 2 more tokens would need a block more for each
    assert batch.lookahead == [1, 1]
    scheduler.commit(batch, [[51], [51]])
    assert allocator.free_count == 0
    batch = scheduler.schedule(drafts)
    assert batch.lookahead == [0, 0] and scheduler.num_preemptions == 0
    scheduler.commit(batch, [52, 52])
    assert all(seq.at_limit for seq in seqs) and allocator.in_use == 0


def test_a_tenant_pays_for_its_accepted_drafts():
    scheduler, _ = make(policy="fair")
    ids = [scheduler.add_request([1] * 5, 40, tenant=name) for name in ("quick", "slow")]
    scheduler.commit(scheduler.schedule(), [50, 50])
    before = [scheduler._tenants.served(name) for name in ("quick", "slow")]
    scheduler.commit(scheduler.schedule({ids[0]: 3}), [[51, 52, 53, 54], 51])
    quick, slow = (scheduler._tenants.served(name) - old for name, old in zip(("quick", "slow"), before, strict=True))
    assert quick == 4 * slow
