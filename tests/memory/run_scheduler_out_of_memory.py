"""Run by test_no_memory.py with failing_malloc: each allocation of a scheduler's calls fails in turn.

After a failure either the call has changed nothing, or the scheduler is closed. Then `close` frees everything, and
another scheduler serves the same requests with the same pool and cache. Prints the number of failures and the errors.
"""

import json
import sys

from failing import countdown

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig

STARTS = (0, 3, 8, 15, 22)  # first step with failures: during admission, prefill, decode, a full pool, preemption


class World:
    def __init__(self):
        self.allocator = BlockAllocator(60)
        self.cache = PrefixCache(self.allocator, 4)
        self.begin()

    def begin(self):
        sizes = {"max_batch_tokens": 64, "max_batch_sequences": 8, "block_size": 4}
        config = SchedulerConfig(**sizes)
        self.scheduler = Scheduler(config, self.allocator, self.cache)
        self.ids = [self.scheduler.add_request([*range(20), 100 + i], 60) for i in range(7)]

    def step(self, number):
        for _ in range(number):
            batch = self.scheduler.schedule()
            self.scheduler.commit(batch, [7] * len(batch))

    def close(self):
        scheduler = self.scheduler
        try:
            scheduler.schedule()
        except RuntimeError as error:
            assert any(words in str(error) for words in ("closed", "cut short", "outstanding")), error
        scheduler.close()
        self.allocator.check()
        self.cache.check()
        assert self.allocator.in_use == self.cache.num_cached, f"{self.allocator.in_use} blocks are in use"

    def serve_all(self):
        self.begin()
        while self.scheduler.has_work:
            self.step(1)
        self.scheduler.check()
        ended = self.scheduler.drain_finished()
        assert sorted(seq.id for seq in ended) == self.ids, f"only {len(ended)} requests end"
        assert all(seq.total_tokens == 60 for seq in ended), "tokens are lost"
        self.cache.reset_prefix_cache()
        assert self.allocator.in_use == 0, f"{self.allocator.in_use} blocks are lost"


def main():
    sys.unraisablehook = lambda _: None  # a dropped generator reports its MemoryError here
    failures, wrong = 0, []
    for start in STARTS:
        for n in range(1, 10_000, 3):
            world = World()
            world.step(start)
            countdown.value = n
            try:
                world.step(3)
                if countdown.value:
                    break
            except (MemoryError, SystemError):  # CPython 3.11 loses the MemoryError of a frame
                failures += 1
            finally:
                countdown.value = 0
            try:
                world.close()
                if n % 5 == 0:
                    world.serve_all()
            except Exception as error:
                wrong.append(f"start {start}, allocation {n}: {error!r}")
    print(json.dumps({"failures": failures, "wrong": wrong}))


if __name__ == "__main__":
    main()
