"""Started by test_no_memory.py under failing_malloc: a scheduler of which each allocation fails in turn.

Whatever it was doing, its requests can be removed then, which leaves nothing behind, and it goes on with others. Prints
how many failed, and what went wrong.
"""

import json
import sys

from failing import countdown

from pagepool import BlockAllocator, PrefixCache, Scheduler, SchedulerConfig

STARTS = (0, 3, 8, 15, 22)  # steps before those with failures: admission, prefill, decode, full, giving way


class World:
    def __init__(self):
        self.allocator = BlockAllocator(60)
        self.cache = PrefixCache(self.allocator, 4)
        config = SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8, block_size=4, ladder=("partial",))
        self.scheduler = Scheduler(config, self.allocator, self.cache)
        self.ids = [self.scheduler.add_request([*range(20), 100 + i], 60) for i in range(7)]

    def step(self, number):
        for _ in range(number):
            batch = self.scheduler.schedule()
            self.scheduler.commit(batch, [7] * len(batch))

    def recover(self):
        for seq_id in self.ids:
            self.scheduler.remove_sequence(seq_id)
        assert not self.scheduler.has_work, "there is work and no request"
        self.allocator.check()
        self.cache.check()
        self.cache.reset_prefix_cache()
        assert self.allocator.in_use == 0, f"{self.allocator.in_use} blocks are lost"
        self.scheduler.add_request(list(range(30)), 40)
        self.step(12)
        assert len(self.scheduler.drain_finished()) == 1 and not self.scheduler.has_work, "it does not go on"


def main():
    sys.unraisablehook = lambda _: None  # a generator that is dropped says that it wanted memory
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
                world.recover()
            except Exception as error:
                wrong.append(f"start {start}, allocation {n}: {error!r}")
    print(json.dumps({"failures": failures, "wrong": wrong}))


if __name__ == "__main__":
    main()
