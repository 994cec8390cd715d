"""Two models under one budget, each with two processes under load, which are stopped and killed at random.

    python tests/shared/budget_load.py SECONDS SEED

Meanwhile this process adds up the memory of the pools: it must never exceed the budget. Prints what was done.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import time

import numpy as np
import pools
from test_memory_budget import BYTES, LAYOUTS, files_of, open_pool, take_all

from pagepool import PoolError, PrefixCache, Scheduler, SchedulerConfig

MODELS = ("a", "a", "b", "b")
TOKENS = {"a": 4000, "b": 1500}  # of a request: about 1 MiB of the 12 MiB of pages
COUNTS = ("steps", "cached", "wrong")


def expected(tokens):
    return np.asarray(tokens, np.float32) + 7 * np.arange(len(tokens), dtype=np.float32) % 1000


def check_step(pool, scheduler, batch, choose):
    """Write the pages of a step; return 1 if the pages of a sequence differ from its tokens."""
    size = pool.block_size
    wrong = 0
    for seq_id, tokens, state in zip(batch.seq_ids, batch.tokens, batch.states, strict=True):
        begin, blocks = state.len - len(tokens), np.asarray(state.blocks, np.int64)
        wanted = expected(scheduler.get_sequence(seq_id).all_tokens[: state.len])
        places = np.arange(begin, state.len)
        shape = (len(tokens), pool.num_kv_heads, pool.head_dim)
        rows = np.broadcast_to(wanted[begin:, None, None], shape).copy()
        for layer in range(pool.num_layers):
            pool.append(layer, blocks[places // size] * size + places % size, rows, rows)
        if choose.random() < 0.2:
            k, v = pool.gather(pool.num_layers - 1, state.blocks, state.len)
            wrong += not (np.array_equal(k[:, 0, 0], wanted) and np.array_equal(v[:, -1, -1], wanted))
    return wrong


def serve(name, which, seed, counts):
    choose = random.Random(seed)
    totals = [0, 0, 0]
    while True:
        try:
            pool = open_pool(name, which)
        except (OSError, PoolError):  # no room, or a stopped process has the lock
            time.sleep(0.01)
            continue
        cache = PrefixCache(pool.allocator)
        config = SchedulerConfig(max_batch_tokens=1024, max_sequences=6)
        scheduler = Scheduler(config, pool, cache)
        for _ in range(choose.randint(1, 60)):
            stem = np.random.default_rng(choose.randrange(6)).integers(0, 500, TOKENS[which])
            prompt = stem[: choose.randint(1, TOKENS[which] - 60)].tolist()
            scheduler.add_request(prompt, max_new_tokens=choose.randint(1, 50))
        while scheduler.has_work:
            batch = scheduler.schedule()
            if batch.is_empty:
                time.sleep(0.001)
            totals[2] += check_step(pool, scheduler, batch, choose)
            scheduler.commit(batch, [choose.randrange(500) for _ in batch.seq_ids])
            totals[0] += 1
            totals[1] += sum(seq.num_cached for seq in scheduler.drain_finished())
            struct.pack_into("3q", counts, 0, *totals)
        scheduler.check()
        if choose.random() < 0.5:
            scheduler.close()
            pool.close()


def main(seconds, seed):
    choose, name = random.Random(seed), pools.new_name()
    paths = [f"/dev/shm/pagepool-{name}.a", f"/dev/shm/pagepool-{name}.b"]
    found = dict.fromkeys(("samples", "kills", "stops", "most", *COUNTS), 0)
    counts = [mmap.mmap(-1, 4096) for _ in MODELS]
    children = [None] * len(MODELS)

    def start(i):
        for key, count in zip(COUNTS, struct.unpack_from("3q", counts[i]), strict=True):
            found[key] += count
        struct.pack_into("3q", counts[i], 0, 0, 0, 0)
        children[i] = pools.in_child(serve, name, MODELS[i], choose.random(), counts[i])

    def sample():
        sizes = []
        for path in paths:
            try:
                sizes.append(os.stat(path).st_blocks * 512)
            except FileNotFoundError:
                sizes.append(0)
        return sizes

    def is_enough():
        return (
            found["samples"] > 100
            and found["kills"] > 5
            and min(found[key] for key in ("stops", "steps", "cached")) > 0
        )

    for i in range(len(MODELS)):
        start(i)
    end = next_act = time.monotonic()
    end += seconds
    while time.monotonic() < end or not is_enough():  # a slow machine takes longer
        sizes = sample()
        if sizes == sample():  # else memory moved while it was counted
            found["samples"] += 1
            found["most"] = max(found["most"], sum(sizes))
        if time.monotonic() > next_act:
            next_act += choose.random() * 0.2
            i = choose.randrange(len(MODELS))
            if choose.random() < 0.3:
                os.kill(children[i], signal.SIGSTOP)
                found["stops"] += 1
                os.kill(children[choose.randrange(len(MODELS))], signal.SIGCONT)
            else:
                status = pools.kill(children[i])
                assert status == -signal.SIGKILL, status
                found["kills"] += 1
                start(i)
    for child in children:
        status = pools.kill(child)
        assert status == -signal.SIGKILL, status
    for which in LAYOUTS:
        assert pools.wait(pools.in_child(take_all, name, which)) == 0
    for path in files_of(name):
        path.unlink()
    print(json.dumps(found))
    assert found["most"] <= BYTES and found["wrong"] == 0


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
