"""The scheduler and a pool: admission, blocks per step, preemption, and blocks held outside of the scheduler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, BlockTables, PagedSeqState, Scheduler, SchedulerConfig, SeqState

BLOCK = 4


def make(num_blocks, allocator=BlockAllocator, **config):
    allocator = allocator(num_blocks)
    return Scheduler(SchedulerConfig(block_size=BLOCK, **config), allocator), allocator


def run_to_end(scheduler, limit=20_000):
    for _ in range(limit):
        if not scheduler.has_work:
            return scheduler.drain_finished()
        batch = scheduler.schedule()
        assert not batch.is_empty
        scheduler.commit(batch, [7] * len(batch))
    raise AssertionError(f"requests still run after {limit} steps")


def blocks_held(scheduler):
    return sum(len(seq.kv.blocks) for seq in scheduler._sequences.values() if seq.kv is not None)


def test_kv_follows_the_tokens_fed():
    scheduler, allocator = make(8, max_prefill_tokens=3)
    scheduler.add_request([1] * 5, 10)
    seq = scheduler.get_sequence(1)
    assert seq.kv is None and scheduler.num_tokens == 0
    lengths = []
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch.states == [seq.kv]
        lengths.append(seq.kv.len)
        assert seq.kv.len == seq.fed == scheduler.num_tokens
        scheduler.commit(batch, [9])
    assert lengths == [3, 5, 6, 7]
    assert seq.kv.max_blocks_per_seq == 3 and allocator.in_use == 2


def test_a_token_fed_again_takes_no_new_slot():
    scheduler, _ = make(8)
    scheduler.add_request([1] * 4, 10)
    scheduler.schedule()
    batch = scheduler.schedule()
    assert (batch.tokens, batch.num_tokens, batch.states[0].len) == ([[1]], [1], 4)
    tables = BlockTables(4, 8).fill(batch)
    assert tables.slot_mapping.tolist() == [3] and tables.seq_lens.tolist() == [4]


def test_tables_fill_from_a_batch_of_decodes_and_prompts():
    scheduler, _ = make(16, max_prefill_tokens=6)
    scheduler.add_request([1] * 3, 10)
    scheduler.commit(scheduler.schedule(), [5])
    scheduler.add_request([1] * 9, 12)
    batch = scheduler.schedule()
    assert batch.num_tokens == [1, 6] and batch.num_decodes == 1
    tables = BlockTables(4, 8).fill(batch)
    assert tables.seq_lens.tolist() == [4, 6] and tables.query_start_loc.tolist() == [0, 1, 7]
    assert tables.slot_mapping.tolist() == [3, *range(4, 10)]


@pytest.mark.parametrize("end", ["finish", "remove", "limit", "commit"])
def test_blocks_are_freed_at_the_end_not_at_drain(end):
    scheduler, allocator = make(8)
    scheduler.add_request([1] * 6, 7)
    batch = scheduler.schedule()
    seq = scheduler.get_sequence(1)
    assert allocator.in_use == 2
    if end == "finish":
        scheduler.finish_sequence(1)
    elif end == "remove":
        scheduler.remove_sequence(1)
    elif end == "limit":
        scheduler.append_token(1, 5)
    else:
        scheduler.commit(batch, [5])
    assert allocator.in_use == 0 and seq.kv is None and scheduler.num_tokens == 0


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    scheduler, _ = make(3)
    with refuses(ValueError, 13, 4, 3):
        scheduler.add_request([1], 13)
    assert scheduler.total_count == 0
    assert scheduler.add_request([1], 12) == 1
    empty, _ = make(0)
    with refuses(ValueError, 1, 4, 0):
        empty.add_request([1], 1)


def test_a_request_as_large_as_the_pool_runs():
    scheduler, allocator = make(5)
    scheduler.add_request([1] * 19, 20)
    assert [seq.total_tokens for seq in run_to_end(scheduler)] == [20]
    assert allocator.peak_in_use == 5 and allocator.in_use == 0


def test_admission_leaves_a_hundredth_of_the_blocks_while_others_run():
    scheduler, _ = make(200)
    scheduler.add_request([1] * 400, 404)
    scheduler.add_request([1] * 396, 400)  # needs 99 of the 100 free blocks, which would leave 1
    scheduler.schedule()
    assert (scheduler.active_count, scheduler.waiting_count) == (1, 1)
    scheduler.finish_sequence(1)
    scheduler.add_request([1] * 392, 396)  # needs 98 of 101 free blocks, which leaves 3
    assert scheduler.schedule().seq_ids == [2, 3]


def test_admission_counts_blocks_that_admitted_prompts_still_need():
    scheduler, _ = make(10, max_prefill_tokens=4)
    scheduler.add_request([1] * 24, 28)
    scheduler.add_request([1] * 20, 24)
    for _ in range(6):
        assert scheduler.schedule().seq_ids == [1]  # 6 blocks are reserved, although it starts with 1
    assert scheduler.num_preemptions == 0


def test_the_newest_of_the_lowest_priority_is_preempted_and_recomputed():
    scheduler, allocator = make(6)
    for priority in (0, 1, 1):
        scheduler.add_request([1, 2, 3, 4, 5, 6, 7], 16, priority=priority)
    batch = scheduler.schedule()
    assert allocator.free_count == 0
    scheduler.commit(batch, [50, 51, 52])
    batch = scheduler.schedule()
    scheduler.commit(batch, [60, 61, 62])  # 9 tokens each, 8 of them stored: each needs a block next
    batch = scheduler.schedule()
    assert batch.seq_ids == [1, 2] and scheduler.num_preemptions == 1
    newest = scheduler.get_sequence(3)
    assert newest.state is SeqState.PREEMPTED and newest.kv is None and newest.num_preemptions == 1
    assert (newest.prompt_pos, newest.fed, newest.output_tokens) == (0, 0, [52, 62])
    scheduler.add_request([9], 4, priority=1)
    scheduler.finish_sequence(1)
    scheduler.finish_sequence(2)
    scheduler.commit(batch, [70, 71])  # ended requests take no token
    batch = scheduler.schedule()
    # The preempted request resumes before the new one, and feeds prompt and outputs as one prompt.
    assert batch.seq_ids == [3, 4] and batch.is_prefill == [True, True]
    assert batch.tokens[0] == [1, 2, 3, 4, 5, 6, 7, 52, 62] and batch.wants_token[0]
    scheduler.commit(batch, [72, 5])
    assert newest.output_tokens == [52, 62, 72]
    assert scheduler.schedule().tokens[0] == [72]


def test_the_oldest_is_never_preempted():
    scheduler, allocator = make(8, max_sequences=6)
    for _ in range(12):
        scheduler.add_request([1] * 6, 20)
    oldest = scheduler.get_sequence(1)
    finished = run_to_end(scheduler)
    assert len(finished) == 12 and finished[0] is oldest
    assert oldest.num_preemptions == 0 and scheduler.num_preemptions > 0
    allocator.check()
    assert allocator.in_use == 0


def test_blocks_that_others_hold_give_an_empty_batch_not_a_loop():
    scheduler, allocator = make(4)
    scheduler.add_request([1] * 4, 12)
    scheduler.commit(scheduler.schedule(), [5])
    held = allocator.allocate_n(3)
    seq = scheduler.get_sequence(1)
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch.is_empty and scheduler.has_work
        assert (seq.state, seq.kv.len, scheduler.num_preemptions) == (SeqState.DECODING, 4, 0)
    allocator.free(held)
    assert scheduler.schedule().tokens == [[5]]


def test_nothing_is_admitted_without_blocks_for_its_first_chunk():
    scheduler, allocator = make(4)
    held = allocator.allocate_n(4)
    scheduler.add_request([1] * 4, 12)
    assert scheduler.schedule().is_empty and scheduler.active_count == 0 and scheduler.has_work
    allocator.free(held)
    assert scheduler.schedule().seq_ids == [1]


def test_a_forked_sequence_may_be_written_on():
    """A fork shares the last block. The next step copies it, or preempts to make room for the copy."""
    scheduler, allocator = make(4)
    for _ in range(2):
        scheduler.add_request([1] * 6, 8)
    scheduler.commit(scheduler.schedule(), [5, 5])
    child = scheduler.get_sequence(1).kv.fork()
    batch = scheduler.schedule()
    assert batch.seq_ids == [1] and scheduler.num_preemptions == 1
    assert batch.states[0].blocks[1] != child.blocks[1] and child.len == 6
    child.release()
    scheduler.commit(batch, [5])
    assert len(run_to_end(scheduler)) == 2
    assert allocator.in_use == 0


@examples(60)
@given(
    st.integers(3, 20),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=20),
)
def test_every_request_ends_however_small_the_pool(num_blocks, requests):
    config = {"max_sequences": 6, "max_batch_tokens": 10, "max_batch_sequences": 4, "max_prefill_tokens": 5}
    scheduler, allocator = make(num_blocks, **config)
    accepted = 0
    for prompt, outputs, priority in requests:
        if -(-(prompt + outputs) // BLOCK) <= num_blocks:
            scheduler.add_request([1] * prompt, prompt + outputs, priority)
            accepted += 1
    finished = run_to_end(scheduler)
    assert len(finished) == accepted and all(seq.at_limit for seq in finished)
    allocator.check()
    assert allocator.in_use == 0 and scheduler.num_tokens == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Random calls on a small shared pool. All invariants of the scheduler hold after each call."""

    @initialize(blocks=st.integers(2, 12), data=st.data())
    def start(self, blocks, data):
        self.config = SchedulerConfig(
            max_sequences=data.draw(st.integers(1, 6)),
            max_batch_tokens=data.draw(st.integers(1, 12)),
            max_batch_sequences=data.draw(st.integers(1, 5)),
            max_prefill_tokens=data.draw(st.integers(1, 6)),
            block_size=BLOCK,
        )
        self.allocator = BlockAllocator(blocks)
        self.scheduler = Scheduler(self.config, self.allocator)
        self.batch = None
        self.has_committed = False
        self.outside = []  # sequences in the pool that the scheduler does not know
        self.ids = []

    @rule(prompt=st.integers(1, 10), outputs=st.integers(1, 10), priority=st.sampled_from([None, 0, 1]))
    def add(self, prompt, outputs, priority):
        needed, capacity = -(-(prompt + outputs) // BLOCK), self.allocator.capacity
        if needed > capacity:
            with refuses(ValueError, needed, 4, capacity):
                self.scheduler.add_request(range(prompt), prompt + outputs, priority)
        else:
            self.ids.append(self.scheduler.add_request(range(prompt), prompt + outputs, priority))

    @rule()
    def schedule(self):
        known = self.scheduler._sequences.values()
        before = {seq.id: seq.fed for seq in known if seq.kv is not None}
        free = self.allocator.free_count
        if self.has_committed and self.batch:
            with pytest.raises(RuntimeError, match=f"a batch of {len(self.batch)} sequences is outstanding"):
                self.scheduler.schedule()
            self.scheduler.give_up(self.batch)
            before = {}
        batch = self.batch = self.scheduler.schedule()
        assert len(batch) <= self.config.max_batch_sequences
        assert batch.total_tokens == sum(batch.num_tokens) <= self.config.max_batch_tokens
        assert all(count <= self.config.max_prefill_tokens for count in batch.num_tokens[batch.num_decodes :])
        for seq_id, tokens, count, state in zip(
            batch.seq_ids, batch.tokens, batch.num_tokens, batch.states, strict=True
        ):
            seq = self.scheduler.get_sequence(seq_id)
            assert state is seq.kv and len(tokens) == count
            assert tokens == seq.all_tokens[seq.fed - count : seq.fed]
            assert seq.fed >= before.get(seq_id, 0)
        if batch.is_empty and self.scheduler.has_work:
            assert self.outside, "a pool of its own always has room for one"
            assert self.scheduler.active_count <= 1 and free < self.allocator.capacity

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def commit(self, data):
        size = len(self.batch)
        plain = data.draw(st.booleans())
        token = st.integers(0, 99) if plain else st.one_of(st.none(), st.just(-1), st.integers(0, 99))
        self.scheduler.commit(self.batch, data.draw(st.lists(token, min_size=size, max_size=size)))
        self.has_committed |= size > 0
        self.batch = None

    @precondition(lambda self: self.batch is not None)
    @rule()
    def give_up(self):
        self.scheduler.give_up(self.batch)
        self.batch = None

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self.schedule()
            self.scheduler.commit(self.batch, [3] * len(self.batch))
            self.has_committed |= len(self.batch) > 0
            self.batch = None

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), call=st.sampled_from(["append_token", "append_token", "finish_sequence", "remove_sequence"]))
    def touch(self, data, call):
        seq_id = data.draw(st.sampled_from(self.ids))
        arguments = (seq_id, 8) if call == "append_token" else (seq_id,)
        getattr(self.scheduler, call)(*arguments)
        if call == "remove_sequence":
            assert self.scheduler.get_sequence(seq_id) is None

    @rule(data=st.data())
    def fork_or_take(self, data):
        running = [seq.kv for seq in self.scheduler._sequences.values() if seq.kv is not None]
        if running and data.draw(st.booleans()):
            self.outside.append(data.draw(st.sampled_from(running)).fork())
        elif self.allocator.free_count:
            state = PagedSeqState(self.allocator, BLOCK)
            state.append(1)
            self.outside.append(state)

    @precondition(lambda self: self.outside)
    @rule()
    def give_back(self):
        self.outside.pop().release()

    @rule()
    def drain(self):
        for seq in self.scheduler.drain_finished():
            assert seq.state is SeqState.FINISHED and (seq.stopped or seq.at_limit)
            assert self.scheduler.get_sequence(seq.id) is None

    @invariant()
    def equations(self):
        if not hasattr(self, "scheduler"):
            return
        self.allocator.check()
        scheduler = self.scheduler
        sequences = list(scheduler._sequences.values())
        active = [seq for seq in sequences if seq.state in (SeqState.PREFILLING, SeqState.DECODING)]
        waiting = [seq for seq in sequences if seq.state in (SeqState.WAITING, SeqState.PREEMPTED)]
        assert (len(active), len(waiting)) == (scheduler.active_count, scheduler.waiting_count)
        assert len(active) <= self.config.max_sequences
        for seq in sequences:
            assert seq.kv is not None if seq in active else seq.kv is None or seq.state is SeqState.PREEMPTED
            assert seq.total_tokens <= seq.max_tokens
            if seq.state is not SeqState.FINISHED:
                read = seq.state is SeqState.DECODING or seq.fed >= len(seq.prompt_tokens)
                assert seq.prompt_pos == (len(seq.prompt_tokens) if read else seq.fed)
        holders = [seq for seq in sequences if seq.kv is not None]
        assert all(seq.kv.len == seq.fed for seq in holders)
        assert scheduler.num_tokens == sum(seq.kv.len for seq in holders)
        inner = scheduler._active
        prefills = [seq for seq in active if seq.state is SeqState.PREFILLING]
        assert len(inner) == len(active) and len(inner.prefills) == len(prefills)
        # Blocks of the scheduler and of others: shared blocks count once.
        held = {block for state in [*(seq.kv for seq in holders), *self.outside] for block in state.blocks}
        assert len(held) == self.allocator.in_use

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for state in self.outside:
            state.release()
        if self.batch is not None:
            self.scheduler.give_up(self.batch)
        run_to_end(self.scheduler)
        self.allocator.check()
        assert self.allocator.in_use == 0


SchedulerMachine.TestCase.settings = examples(100, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
