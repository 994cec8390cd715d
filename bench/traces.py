"""Synthetic prompts to test eviction policies: typical serving loads of prefix caches, each generated from a seed.

A prompt is a row of block ids, as in recorded traces. An id identifies a block and all blocks before it, so prompts
with the same prefix start with the same ids. Every function of `TRACES` makes about `size` blocks in a few thousand
prompts, or fewer if its docstring says so. No function copies a recorded trace. Lengths, turns and think times have the
heavy tails of published measurements.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["TRACES", "Row", "make_trace"]

Row: TypeAlias = NDArray[np.int32]


class Source:
    """Random source of one trace: new block ids, and numbers with long-tailed distributions."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.made = 0

    def new(self, blocks: int) -> Row:
        """Return a row of `blocks` new ids."""
        self.made += blocks
        return np.arange(self.made - blocks, self.made, dtype=np.int32)

    def long_tailed(self, median: float, spread: float, low: int = 1, high: int = 400) -> int:
        """Draw from a log-normal distribution: e**spread times the median at one standard deviation."""
        return int(np.clip(median * np.exp(spread * self.random.standard_normal()), low, high))

    def popular(self, number: int, exponent: float) -> NDArray[np.float64]:
        """Return the cumulative probabilities of Zipf's law, in random order."""
        weights = np.arange(1, number + 1) ** -exponent
        self.random.shuffle(weights)
        return np.cumsum(weights / weights.sum())

    def pick(self, cumulated: NDArray[np.float64]) -> int:
        """Draw an index by its probability."""
        return min(int(np.searchsorted(cumulated, self.random.random())), len(cumulated) - 1)

    def tail_of(self, row: Row, cut: int, new: int) -> Row:
        """Return the next prompt of a conversation: `new` blocks replace the last `cut`, which were partial."""
        return np.concatenate([row[: max(0, len(row) - cut)], self.new(new)])


def conversations(source: Source) -> Iterator[Row]:
    """Chats with one system prompt, open loop. Half end after one turn; users return after seconds to hours."""
    system, waiting, now = source.new(1), [], 0.0
    while True:
        now += source.random.exponential(0.3)
        if waiting and waiting[0][0] <= now:
            _, _, row, left = heapq.heappop(waiting)
            row = source.tail_of(row, 1, 1 + source.long_tailed(3, 1.3))
        else:
            row = np.concatenate([system, source.new(source.long_tailed(11, 1.1, 1, 240))])
            left = 0 if source.random.random() < 0.5 else source.random.geometric(0.2)
        yield row
        if left and len(row) < 250:
            heapq.heappush(
                waiting, (now + 90 * np.exp(1.3 * source.random.standard_normal()), source.made, row, left - 1)
            )


def agents(source: Source) -> Iterator[Row]:
    """40 kinds of agents, some popular: system prompt and tools, then a task in one or several steps."""
    kinds = [source.new(source.long_tailed(6, 0.7, 2, 20)) for _ in range(40)]
    popular, waiting, now = source.popular(40, 1.1), [], 0.0
    while True:
        now += source.random.exponential(0.15)
        if waiting and waiting[0][0] <= now:
            _, _, row, left = heapq.heappop(waiting)
            row = source.tail_of(row, 1, 1 + source.long_tailed(2, 1.0))
        else:
            row = np.concatenate([kinds[source.pick(popular)], source.new(source.long_tailed(6, 1.0, 1, 200))])
            left = 0 if source.random.random() < 0.6 else source.random.geometric(0.25)
        yield row
        if left:
            heapq.heappush(
                waiting, (now + 20 * np.exp(1.2 * source.random.standard_normal()), source.made, row, left - 1)
            )


def chats(source: Source) -> Iterator[Row]:
    """48 chat users with blocks of 16 tokens and no system prompt: short questions, answers of about 20 blocks."""
    rows, left = [source.new(0)] * 48, [0] * 48
    ready = [(source.random.exponential(60), user) for user in range(48)]
    heapq.heapify(ready)
    while True:
        now, user = heapq.heappop(ready)
        if left[user] == 0:
            rows[user], left[user] = source.new(0), source.random.geometric(0.22)
        rows[user] = np.concatenate([rows[user], source.new(source.long_tailed(4, 1.2))])
        yield rows[user]
        rows[user] = np.concatenate([rows[user], source.new(source.long_tailed(18, 0.6))])
        left[user] -= 1
        heapq.heappush(ready, (now + 30 * np.exp(1.5 * source.random.standard_normal()), user))


def documents(source: Source) -> Iterator[Row]:
    """Questions about one to three of 800 documents, in blocks of 64 tokens.

    The first document is a cache hit for other questions. A later document is one only after the same documents.
    """
    system, popular = source.new(8), source.popular(800, 0.9)
    after: dict[tuple[int, ...], Row] = {}
    lengths = [source.long_tailed(25, 0.6, 5, 120) for _ in range(800)]
    while True:
        row, chosen = system, ()
        for _ in range(int(source.random.integers(1, 4))):
            chosen += (source.pick(popular),)
            if chosen not in after:
                after[chosen] = source.new(lengths[chosen[-1]])
            row = np.concatenate([row, after[chosen]])
        yield np.concatenate([row, source.new(source.long_tailed(2, 0.6))])


def sweeps(source: Source) -> Iterator[Row]:
    """Benchmark sweeps: 12 tasks one after another, each with its examples and 150 questions; repeated endlessly."""
    tasks = [(source.new(source.long_tailed(30, 0.5)), []) for _ in range(12)]
    for examples, questions in tasks:
        questions += [np.concatenate([examples, source.new(source.long_tailed(3, 0.7))]) for _ in range(150)]
    while True:
        for _, questions in tasks:
            yield from questions


def loop(source: Source) -> Iterator[Row]:
    """A loop over 220 documents of about 60 blocks, each with a question."""
    rows = [source.new(source.long_tailed(60, 0.3)) for _ in range(220)]
    while True:
        for row in rows:
            yield np.concatenate([row, source.new(2)])


def phases(source: Source) -> Iterator[Row]:
    """1,500 documents of about 20 blocks with Zipf popularity. The popular ones change every 1,500 questions."""
    rows = [source.new(source.long_tailed(20, 0.5)) for _ in range(1500)]
    while True:
        popular = source.popular(1500, 1.0)
        for _ in range(1500):
            yield np.concatenate([rows[source.pick(popular)], source.new(source.long_tailed(2, 0.5))])


def regimes(source: Source) -> Iterator[Row]:
    """Alternating regimes that mislead a learning policy: a loop, chats of recent users, and one-time prompts."""
    looped = [source.new(40) for _ in range(150)]
    while True:
        for turn in range(450):
            yield np.concatenate([looped[turn % 150], source.new(1)])
        recent = [source.new(30) for _ in range(60)]
        for _ in range(700):
            back = min(int(source.random.exponential(8)), 59)
            row = np.concatenate([recent.pop(-1 - back), source.new(4)])
            if len(row) > 90:
                row = source.new(30)
            recent.append(row)
            yield row
        for _ in range(120):
            yield source.new(60)


def recency(source: Source) -> Iterator[Row]:
    """The prompt from n prompts ago repeats, with small n most often: the ideal load for LRU."""
    rows = [source.new(source.long_tailed(20, 0.5)) for _ in range(3000)]
    while True:
        back = int(np.exp(source.random.random() * np.log(3000)))
        rows.append(rows.pop(-min(back, len(rows))) if source.random.random() < 0.8 else source.new(20))
        rows[:-3000] = []
        yield rows[-1]


def crowds(source: Source) -> Iterator[Row]:
    """Popular documents, interrupted at random by 40 consecutive prompts that never repeat."""
    rows, popular = [source.new(source.long_tailed(25, 0.5)) for _ in range(900)], source.popular(900, 0.8)
    while True:
        if source.random.random() < 0.004:
            for _ in range(40):
                yield source.new(source.long_tailed(60, 0.3))
        yield np.concatenate([rows[source.pick(popular)], source.new(2)])


def coding(source: Source) -> Iterator[Row]:
    """12 users of coding agents, blocks of 64 tokens: one system prompt, contexts of hundreds of blocks.

    Contexts grow by a few blocks each turn, sub-agents run in between, and some contexts are compacted.
    """
    system = source.new(150)
    users = [np.concatenate([system, source.new(20)]) for _ in range(12)]
    ready = [(source.random.exponential(30), user) for user in range(12)]
    heapq.heapify(ready)
    while True:
        now, user = heapq.heappop(ready)
        draw, grown = source.random.random(), source.long_tailed(6, 1.2)
        if len(users[user]) > 1500 or draw < 0.004:
            users[user] = np.concatenate([system, source.new(20)])
        elif draw < 0.01:
            side = np.concatenate([system[:40], source.new(30)])
            for _ in range(8):
                side = np.concatenate([side, source.new(source.long_tailed(5, 1.0))])
                yield side
        users[user] = source.tail_of(users[user], 1, 1 + grown)
        yield users[user]
        pause = 200 * np.exp(source.random.standard_normal()) if draw > 0.9 else source.random.exponential(8)
        heapq.heappush(ready, (now + pause, user))


def branches(source: Source) -> Iterator[Row]:
    """Tree-of-thoughts searches: a prompt, then 40 extensions of one of its branches, good branches more often."""
    while True:
        tree = [source.new(source.long_tailed(20, 0.6))]
        for _ in range(40):
            row = tree[-1 - min(int(source.random.exponential(5)), len(tree) - 1)]
            tree.append(np.concatenate([row, source.new(source.long_tailed(3, 0.6))]))
            yield tree[-1]


def tenants(source: Source) -> Iterator[Row]:
    """Conversations, agents, documents and a benchmark, served concurrently by one machine."""
    parts = [make(source) for make in (conversations, agents, documents, sweeps)]
    shares = np.cumsum([0.4, 0.35, 0.15, 0.1])
    while True:
        yield next(parts[source.pick(shares)])


TRACES: dict[str, Callable[[Source], Iterator[Row]]] = {
    make.__name__: make
    for make in (
        *(conversations, agents, chats, documents, sweeps, loop, phases),
        *(regimes, recency, crowds, coding, branches, tenants),
    )
}


def make_trace(name: str, seed: int, size: int = 250_000) -> list[Row]:
    """Return the prompts of a trace until they have `size` blocks. The same arguments give the same prompts."""
    rows, blocks = [], 0
    for row in TRACES[name](Source(zlib.crc32(name.encode()) ^ seed)):
        if blocks >= size:
            break
        rows.append(row)
        blocks += len(row)
    return rows
