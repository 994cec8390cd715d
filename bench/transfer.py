"""Transfer of pages between the pools of two processes, compared with memcpy page by page in the same run.

    python bench/transfer.py [--rounds 30] [--reads 10000] [--json FILE]

The first part times one read of pages (512 KiB and other sizes) between scattered blocks, from `read` until `poll`
returns it, generations checked. `share` is memcpy's median time over the read's. `memcpy` is measured before the
transport starts. `beside` is memcpy measured between the reads, while the transport's threads slow it down.

The second part is a race: the source reuses its blocks as fast as it can. It counts the reads that a reader without a
check of generations would have accepted wrongly. Needs the environment of `make test-transfer`. With `UCX_TLS=tcp` in
the environment, NIXL uses TCP.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "transfer"))

from transfer_source import SourceProcess, race, words_of

from pagepool import KvCachePool, KvLayout
from pagepool.transfer.nixl import NixlTransfer

# Layers of 8 heads of 64 dims in bfloat16: 32 KiB a layer.
LAYERS = {32: 1, 128: 4, 512: 16, 2048: 64}
PAGES = (1, 4, 16, 64, 256)
POOL_BYTES = 256 << 20


def layout_of(kib):
    return KvLayout(num_layers=LAYERS[kib], num_kv_heads=8, head_dim=64)


def shares(kib, rounds):
    """Return one row for each number of pages: medians of the share and of the rates in GiB/s."""
    num_blocks = POOL_BYTES // (kib << 10)
    pool = KvCachePool.from_layout(layout_of(kib), num_blocks)
    words = words_of(pool)
    words[:] = 1  # committed before anything is timed
    choose = random.Random(1)
    sizes = [n for n in PAGES if n <= num_blocks // 2]
    alone = {n: statistics.median(copy(words, choose, n) for _ in range(rounds + 3)) for n in sizes}
    source = SourceProcess(layout_of(kib), num_blocks)
    with NixlTransfer("reader", serves=False) as reader:
        reader.register(pool)
        reader.meet(source.describe())
        for pages in sizes:
            took = [(once(source, reader, pool, choose, pages), copy(words, choose, pages)) for _ in range(rounds + 3)]
            read, beside = map(statistics.median, zip(*took[3:], strict=True))
            size = pages * (kib << 10) / 2**30
            yield {
                "page_kib": kib,
                "pages": pages,
                "share": alone[pages] / read,
                "read_gib_per_s": size / read,
                "memcpy_gib_per_s": size / alone[pages],
                "beside_gib_per_s": size / beside,
            }
    source.end()


def once(source, reader, pool, choose, pages):
    """Return the seconds of one read."""
    ticket = source.offer(choose.sample(range(pool.max_blocks), pages), 60)
    order = choose.sample(range(pool.max_blocks), pool.max_blocks)
    pool.allocator.free(pool.allocator.allocate_n(pool.max_blocks)[order])  # shuffles the free list
    blocks = pool.allocator.allocate_n(pages).tolist()
    began = time.perf_counter()
    reader.read(ticket, blocks)
    (result,) = reader.poll(60)
    read = time.perf_counter() - began
    assert not result.failed, result.error
    pool.allocator.free(blocks)
    return read


def copy(words, choose, pages):
    """Return the seconds of memcpy of `pages` pages between scattered places of a pool."""
    places = choose.sample(range(len(words)), 2 * pages)
    began = time.perf_counter()
    for here, there in zip(places[:pages], places[pages:], strict=True):
        np.copyto(words[here], words[there])
    return time.perf_counter() - began


def races(reads):
    """Return the counts of `race`, with 4 pages of 32 KiB per read."""
    source = SourceProcess(layout_of(32), 64)
    pool = KvCachePool.from_layout(layout_of(32), 64)
    with NixlTransfer("reader", serves=False) as reader:
        reader.register(pool)
        counts, reused = race(source, reader, pool, reads, 4)
    source.end()
    return {"reads": reads, "blocks_reused": reused, **counts}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", default="512,32,128,2048", help="sizes of pages in KiB, of 32, 128, 512 and 2048")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--reads", type=int, default=10_000, help="reads of the race; 0 skips it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"rows": []}
    print(f"{'KiB':>5} {'pages':>5} {'GiB/s':>6} {'memcpy':>6} {'beside':>6} {'share':>5}")
    for kib in map(int, options.kib.split(",")):
        for row in shares(kib, options.rounds):
            found["rows"].append(row)
            rates = [row[f"{what}_gib_per_s"] for what in ("read", "memcpy", "beside")]
            print(
                f"{kib:5} {row['pages']:5}",
                *(f"{rate:6.2f}" for rate in rates),
                f"{row['share']:5.2f}",
                flush=True,
            )
    if options.reads:
        found["race"] = races(options.reads)
        print(f"race: {json.dumps(found['race'])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
