"""Budgets and fairness hold in every step, for any mix of requests. pagepool/scheduling/active.py has the proof."""

from hypothesis import given
from hypothesis import strategies as st
from share import examples

from pagepool import Scheduler, SchedulerConfig, SeqState

ACTIVE = (SeqState.PREFILLING, SeqState.DECODING)


def check_budgets(config, scheduler, batch):
    assert len(batch) <= config.max_batch_sequences
    assert batch.total_tokens == sum(batch.num_tokens) == sum(map(len, batch.tokens)) <= config.max_batch_tokens
    assert scheduler.active_count <= config.max_sequences
    assert len(set(batch.seq_ids)) == len(batch)
    for count, is_prefill in zip(batch.num_tokens, batch.is_prefill, strict=True):
        assert 1 <= count <= (config.max_prefill_tokens if is_prefill else 1)


def test_the_seed_case():
    """32 prompts of 300 tokens. Pagepool's predecessor exceeded a budget of 512 tokens here, and 24 never decoded."""
    config = SchedulerConfig()
    scheduler = Scheduler(config)
    for _ in range(32):
        scheduler.add_request([1] * 300, 400)
    scheduler.schedule()
    assert scheduler.active_count == 32
    decoded = set()
    for _ in range(200):
        batch = scheduler.schedule()
        check_budgets(config, scheduler, batch)
        decoded.update(batch.seq_ids[: batch.num_decodes])
        scheduler.commit(batch, [1] * len(batch))
    assert decoded == set(range(1, 33))


configs = st.builds(
    SchedulerConfig,
    max_sequences=st.integers(1, 12),
    max_batch_tokens=st.integers(1, 20),
    max_batch_sequences=st.integers(1, 9),
    max_prefill_tokens=st.integers(1, 8),
)
requests = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 25), st.integers(1, 12)), min_size=1, max_size=25
)  # step of arrival, prompt, outputs


@examples(150)
@given(configs, requests, st.randoms(use_true_random=False))
def test_budgets_and_turns(config, arrivals, random):
    """Budgets and waiting times hold in every step.

    No active sequence waits more than 2 * ceil(active / places) steps. While prompts wait, one advances in every step
    (with a single place in every second step), and the token budget is used completely.
    """
    scheduler = Scheduler(config)
    places = min(config.max_batch_sequences, config.max_batch_tokens)
    arrivals = sorted(arrivals)
    waited: dict[int, int] = {}
    most_active: dict[int, int] = {}
    steps = idle_prefills = 0
    by_commit = random.random() < 0.5
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= steps:
            _, prompt, outputs = arrivals.pop(0)
            scheduler.add_request([1] * prompt, prompt + outputs)
        steps += 1
        assert steps < 5000
        before = [seq for seq in scheduler._sequences.values() if seq.state is SeqState.PREFILLING]
        unread = {seq.id: seq.total_tokens - seq.fed for seq in before}
        batch = scheduler.schedule()
        check_budgets(config, scheduler, batch)
        idle_prefills = idle_prefills + 1 if before and not any(batch.is_prefill) else 0
        assert idle_prefills <= (1 if places == 1 else 0)
        for seq_id, count, is_prefill in zip(batch.seq_ids, batch.num_tokens, batch.is_prefill, strict=True):
            if is_prefill and count < min(config.max_prefill_tokens, unread.get(seq_id, count)):
                assert batch.total_tokens == config.max_batch_tokens
        active = {seq.id for seq in scheduler._sequences.values() if seq.state in ACTIVE}
        for seq_id in active | set(batch.seq_ids):
            waited[seq_id] = waited.get(seq_id, 0) + 1
            most_active[seq_id] = max(most_active.get(seq_id, 0), len(active | set(batch.seq_ids)))
            assert waited[seq_id] <= 2 * -(-most_active[seq_id] // places)
        for seq_id in batch.seq_ids:
            waited[seq_id] = most_active[seq_id] = 0
        if by_commit:
            scheduler.commit(batch, [1] * len(batch))
        else:
            for seq_id, wanted in zip(batch.seq_ids, batch.wants_token, strict=True):
                if wanted:
                    scheduler.append_token(seq_id, 1)
        if active and random.random() < 0.05:
            scheduler.finish_sequence(random.choice(sorted(active)))
        for seq in scheduler.drain_finished():
            waited.pop(seq.id, None)
            assert seq.stopped or seq.at_limit


def test_one_place_is_shared_by_prompts_and_decodes():
    scheduler = Scheduler(SchedulerConfig(max_batch_sequences=1, max_prefill_tokens=1, max_sequences=3))
    scheduler.add_request([1], 50)
    scheduler.commit(scheduler.schedule(), [1])
    scheduler.add_request([1] * 6, 50)
    kinds = []
    for _ in range(12):
        batch = scheduler.schedule()
        kinds.append(batch.is_prefill[0])
        scheduler.commit(batch, [1])
    assert kinds == [True, False] * 6
