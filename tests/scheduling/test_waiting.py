"""The queue checks only changed tenants, and returns the same next request as a check of all tenants."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from share import examples

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, Tenant
from pagepool.scheduling.policies import POLICIES
from pagepool.scheduling.request import Sequence
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.waiting import WaitingQueue

TENANTS = st.integers(0, 5)


class WaitingMachine(RuleBasedStateMachine):
    """The queue against a plain list. `room`, `counters` and `found` are the answers of the callbacks per request."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy):
        self.policy = POLICIES[policy]
        self.queue = WaitingQueue(self.policy)
        self.waiting = {}
        self.away = []  # removed requests, which may return
        self.room = dict.fromkeys(range(6), 3)
        self.counters = dict.fromkeys(range(6), 0)
        self.leaders = [Sequence(1000 + number, [1], 2) for number in range(3)]
        self.deferred = {}  # by id: the leader, and the position that it must reach
        self.stopped = set()  # leaders that publish nothing more
        self.next_id = 1

    def served(self, tenant):
        return self.counters[tenant]

    def may_start(self, seq):
        return seq.max_tokens <= self.room[seq.tenant]

    @rule(tenant=TENANTS, priority=st.integers(0, 2), size=st.integers(1, 6), counted=st.booleans())
    def add(self, tenant, priority, size, counted):
        seq = Sequence(self.next_id, [1], size, priority, tenant)
        seq._counted = counted
        seq._rank = self.policy.rank(seq)
        self.next_id += 1
        self.queue.push(seq)
        self.waiting[seq.id] = seq

    @rule(data=st.data(), back=st.booleans())
    def remove(self, data, back):
        if self.waiting:
            seq = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
            self.deferred.pop(seq.id, None)
            self.queue.remove(seq)
            assert seq._awaits is None
            if back:
                self.away.append(seq)

    @rule()
    def admit_and_remove(self):
        seq = self.queue.peek(self, self.may_start)
        if seq is not None:
            self.queue.remove(self.waiting.pop(seq.id))
            self.away.append(seq)

    @rule(leader=st.integers(0, 2), tokens=st.integers(1, 9))
    def defer(self, leader, tokens):
        seq = self.queue.peek(self, self.may_start)
        if seq is not None:
            self.deferred[seq.id] = self.leaders[leader], self.leaders[leader].fed + tokens
            self.queue.defer(seq, *self.deferred[seq.id])

    @rule(leader=st.integers(0, 2), tokens=st.integers(0, 6))
    def read(self, leader, tokens):
        self.leaders[leader].fed += tokens

    @rule(leader=st.integers(0, 2), stops=st.booleans())
    def resume(self, leader, stops):
        self.stopped = {self.leaders[leader]} if stops else set()
        self.queue.resume(lambda leader: leader not in self.stopped)
        for seq_id, (leader, until) in list(self.deferred.items()):
            if leader in self.stopped or leader.fed >= until:
                del self.deferred[seq_id]

    @rule()
    def come_back(self):
        if self.away:
            seq = self.away.pop()
            self.queue.push(seq)
            self.waiting[seq.id] = seq

    @rule(tenant=TENANTS, room=st.integers(0, 6))
    def quota(self, tenant, room):
        self.room[tenant] = room
        self.queue.change(tenant)

    @rule(tenant=TENANTS, tokens=st.integers(1, 4))
    def charge(self, tenant, tokens):
        self.counters[tenant] += tokens

    @invariant()
    def whoever_is_next_of_all(self):
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.waiting)
        lines = {}
        in_line = [seq for seq in self.waiting.values() if seq.id not in self.deferred]
        for seq in sorted(in_line, key=lambda seq: seq._rank):
            lines.setdefault(seq.tenant, []).append(seq)
        counted = [[seq for seq in line if seq._counted] for line in lines.values()]
        heads = [seq for line in lines.values() for seq in line[:1]]
        heads += [line[0] for line in counted if line and line[0] not in heads]
        heads = [seq for seq in heads if self.may_start(seq)]
        expected = min(heads, key=lambda seq: self.policy.key(seq, self), default=None)
        assert self.queue.peek(self, self.may_start) is expected


class TestWaitingMachine(WaitingMachine.TestCase):
    settings = examples(100, stateful_step_count=60)


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
@pytest.mark.parametrize("quota", [None, 40])
def test_unchanged_waiting_requests_are_not_checked_in_every_step(policy, quota, monkeypatch):
    """Three of 200 tenants run and have used up their quotas. The requests of other tenants do not fit."""
    asked = []
    may_start, served = Tenants.may_start, Tenants.served
    monkeypatch.setattr(Tenants, "may_start", lambda self, seq: asked.append(seq) or may_start(self, seq))
    monkeypatch.setattr(Tenants, "served", lambda self, tenant: asked.append(tenant) or served(self, tenant))
    allocator = BlockAllocator(79)
    cache = PrefixCache(allocator, 4)
    config = SchedulerConfig(
        policy=policy, block_size=4, max_batch_tokens=512, max_prefill_tokens=512,
        tenants={} if quota is None else {number: Tenant(max_blocks=quota) for number in range(200)},
    )  # fmt: skip
    scheduler = Scheduler(config, allocator, cache)
    for number in range(400):
        scheduler.add_request([1000 + number] * 80, 100, tenant=number % 200)
    while scheduler.active_count < 3:
        batch = scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch))
    scheduler.commit(scheduler.schedule(), [7] * 3)  # new cached blocks trigger one check
    asked.clear()
    for _ in range(15):
        batch = scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch))
    assert (scheduler.active_count, scheduler.waiting_count) == (3, 397)
    # "fair" checks the first request, and requests that move ahead of it as tenants are served.
    assert len(asked) <= (15 * 4 if policy == "fair" else 0)


def test_many_changes_leave_no_more_entries_than_tenants_that_wait():
    queue = WaitingQueue(POLICIES["fcfs"])
    seqs = [Sequence(number, [1], 1, 0, number % 7) for number in range(1, 8)]
    for seq in seqs:
        seq._rank = (0, seq.id)
        queue.push(seq)
    for _ in range(2000):
        for tenant in range(7):
            queue.change(tenant)
        assert queue.peek(None, lambda seq: True) is seqs[0]
    assert len(queue._best._heap) <= 2 * 7 + 64 + 7


def waiting_line(policy, count, tenant=None):
    queue = WaitingQueue(POLICIES[policy])
    seqs = [Sequence(number, [1], 1, 0, tenant) for number in range(1, count + 1)]
    for seq in seqs:
        seq._rank = POLICIES[policy].rank(seq)
        queue.push(seq)
    return queue, seqs


@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_request_that_is_removed_and_queued_again_is_listed_once(place):
    queue, seqs = waiting_line("fcfs", 40)
    queue._heads(None)
    back = seqs[place]
    queue.remove(back)
    queue.push(back)
    assert queue._heads(None) == sorted(seqs, key=lambda seq: seq._rank)[:1]
    for seq in seqs[:8]:
        queue.remove(seq)
    assert queue._heads(None) == sorted(seqs[8:], key=lambda seq: seq._rank)[:1]


def test_names_of_ended_tenants_are_not_kept():
    scheduler = Scheduler(SchedulerConfig(max_sequences=1))
    runs = scheduler.add_request([1], 10**6)
    waiting = scheduler._waiting
    scheduler.schedule()
    for number in range(50):  # the only place is taken, so the scheduler does not ask the queue
        seq_id = scheduler.add_request([1] * 8, 9, tenant=number)
        scheduler.commit(scheduler.schedule(), [1])
        scheduler.remove_sequence(seq_id)
    scheduler.remove_sequence(runs)
    for number in range(200):
        scheduler.add_request([1] * 8, 9, tenant=number)
        scheduler.commit(scheduler.schedule(), [1])
    assert scheduler.total_count == len(scheduler.drain_finished())
    assert (waiting._best._changed, waiting._best._entries) == ({}, {})
    assert len(waiting._best._heap) <= 64


def test_a_preempted_request_resumes_before_requests_blocked_by_its_quota():
    config = SchedulerConfig(block_size=4, tenants={"t": Tenant(max_blocks=5)})
    scheduler = Scheduler(config, BlockAllocator(8))
    scheduler.add_request([1] * 4, 20, priority=2, tenant="t")
    preempted = scheduler.add_request([1] * 8, 20, priority=1, tenant="t")
    scheduler.schedule()
    scheduler.add_request([2] * 20, 28, priority=0, tenant="u")
    kept_out = False
    for _ in range(300):
        if not kept_out and scheduler.get_sequence(preempted).num_preemptions:
            scheduler.add_request([3] * 4, 8, priority=0, tenant="t")
            kept_out = True
        batch = scheduler.schedule()
        scheduler.commit(batch, [7] * len(batch.seq_ids))
    assert kept_out
    assert not scheduler.has_work
