"""Long run of a scheduler whose pool is always full: python tests/scheduling/preemption_run.py

    --steps N       steps of each run (default: 1,000,000); the seed is printed, --seed N repeats a run
    --mode NAME     plain, cache or tenants; default: all of them, one after another

Requests arrive as soon as no request is waiting, so that the pool is full at every step. The baseline is the same pool
with arrivals only below 80 % usage. The figure is the tokens of finished requests per virtual second.
"""

import argparse
import random
import time
from dataclasses import dataclass

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig, Tenant
from pagepool.replay.clock import CostModel

BLOCKS, BLOCK = 256, 16
COST = CostModel()
# For each mode: eviction policy of the prefix cache or None, tenants.
TENANTS = {1: Tenant(max_blocks=180), 2: Tenant(max_blocks=160, weight=2.0)}
MODES = {
    "plain": (None, {}),
    "cache": ("lru", {}),
    "tenants": ("lru", TENANTS),
}
ACTIONS = ("partial", "recompute")


@dataclass
class Outcome:
    """Result of a run. `tokens` counts the tokens of finished requests."""

    steps: int
    tokens: int
    time_us: int
    finished: int
    preemptions: int
    occupancy: float
    longest_stay: int  # maximum steps from arrival to end of a request
    actions: dict[str, int]

    @property
    def throughput(self):
        return self.tokens / self.time_us * 1e6


def run(steps, seed, mode, share):
    """Do a run. Requests are added while less than `share` of the pool is in use; 1.0 always keeps requests waiting."""
    policy, tenants = MODES[mode]
    rng = random.Random(seed)
    allocator = BlockAllocator(BLOCKS)
    config = SchedulerConfig(
        max_sequences=64,
        max_batch_sequences=64,
        max_batch_tokens=512,
        max_prefill_tokens=512,
        block_size=BLOCK,
        tenants=tenants,
        policy="fair" if tenants else "priority",
    )
    cache = PrefixCache(allocator, BLOCK, policy) if policy else None
    scheduler = Scheduler(config, allocator, cache)
    came, tokens, time_us, finished, full, longest, idle = {}, 0, 0, 0, 0, 0, 0
    for step in range(steps):
        while (
            scheduler.waiting_count < (64 if tenants else 8)  # requests of tenants at their quota fill the queue
            if share >= 1.0
            else not scheduler.waiting_count and BLOCKS - scheduler.stats()["available"] < share * BLOCKS
        ):
            # Long outputs of short prompts: all sequences grow after admission.
            prompt, output = rng.randint(8, 160), rng.randint(8, 400)
            head = [rng.randrange(4)] * min(prompt, 64)
            row = head + [rng.randrange(1000) for _ in range(prompt - len(head))]
            about = {"tenant": rng.randrange(4)} if tenants else {}
            came[scheduler.add_request(row, prompt + output, **about)] = step
        batch = scheduler.schedule()
        assert not batch.is_empty, "a pool of its own always has room for one"
        time_us += COST.of(batch.total_tokens - batch.num_decodes, batch.num_decodes)
        full += BLOCKS - scheduler.stats()["available"]
        scheduler.commit(batch, [rng.randrange(1000)] * len(batch))
        done = scheduler.drain_finished()
        idle = 0 if done else idle + 1
        assert idle < 2000, "no request ended in 2,000 steps: a livelock"
        for seq in done:
            finished += 1
            tokens += seq.total_tokens
            longest = max(longest, step - came.pop(seq.id))
    actions = scheduler.stats()["actions"]
    assert sum(actions.get(action, 0) for action in ACTIONS) >= scheduler.num_preemptions
    assert all(record.reason for record in scheduler.preemptions)
    allocator.check()
    for seq_id in came:
        scheduler.remove_sequence(seq_id)
    if cache is not None:
        cache.check()
        cache.reset_prefix_cache()
    assert allocator.in_use == 0 and scheduler.num_tokens == 0
    occupancy = full / steps / BLOCKS
    return Outcome(steps, tokens, time_us, finished, scheduler.num_preemptions, occupancy, longest, actions)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--mode", choices=MODES)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    for mode in [arguments.mode] if arguments.mode else MODES:
        results = {}
        for share in (0.8, 1.0):
            start = time.perf_counter()
            results[share] = outcome = run(arguments.steps, arguments.seed, mode, share)
            print(
                f"{mode:<14} {share:>4.0%}: {outcome.throughput:7.1f} tokens/s of virtual time, "
                f"{outcome.occupancy:.1%} of the pool in use, {outcome.finished:,} finished, "
                f"{outcome.preemptions:,} preempted, longest stay {outcome.longest_stay:,} steps, "
                f"{outcome.actions} ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
        ratio = results[1.0].throughput / results[0.8].throughput
        print(f"{mode:<14} throughput of a full pool over that at 80 %: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
