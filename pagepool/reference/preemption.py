"""Eviction and preemption when blocks run out, in plain Python."""

from __future__ import annotations

from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.errors import PoolExhausted
from pagepool.reference.batch import append_batch
from pagepool.reference.request import Request
from pagepool.reference.tenants import Tenants

__all__ = ["Preemption"]


class Preemption:
    """The blocks of a scheduler: how many are available, and which requests are preempted.

    `records` has the step, the action, the id of the request, and the numbers of freed, wanted and available blocks.
    """

    def __init__(self, config: SchedulerConfig, allocator: Any, block_size: int, cache: Any, tenants: Tenants) -> None:
        self.config = config
        self.allocator = allocator
        self.block_size = block_size
        self.cache = cache
        self.tenants = tenants
        self.groups: Any = None
        self.states: Any = None
        self.checkpoints: Any = None
        self.partial = "partial" in config.preemption_actions or cache is not None
        self.now = self.wanted = self.num_preemptions = 0
        self.records: list[tuple[int, str, int, int, int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens. A window needs at most the blocks of one step."""
        if self.groups is None:
            return -(-num_tokens // self.block_size)
        step, total = self.step, 0
        for group in self.groups:
            count, window = -(-num_tokens // group.block_size), group.window
            total += count if window is None else min(count, -(-(window + step) // group.block_size) + 1)
        return total

    @property
    def step(self) -> int:
        """Maximum number of tokens of a hybrid sequence per step."""
        config = self.config
        return max(config.lookahead + 1, min(config.max_prefill_tokens, config.max_batch_tokens))

    def new_blocks(self, kv: Any, count: int) -> int:
        """Return the blocks that `count` more tokens need, minus blocks that windows free. Excludes copy-on-write."""
        if self.groups is None:
            return self.blocks_for(kv.len + count) - self.blocks_for(kv.len)
        total = 0
        for table, start in zip(kv.kv, kv._starts(), strict=True):
            size = table.block_size
            total += -(-(table.len + count) // size) - -(-table.len // size)
            left = table._blocks[table.first_block : max(table.first_block, start // size)]
            total -= sum(table.allocator.ref_count(block) == 1 for block in left)
        return max(0, total)

    def held(self, request: Request) -> int:
        """Return the number of blocks that preempting the request frees."""
        return (
            self.blocks_for(request.fed) if self.groups is None else sum(len(table.blocks) for table in request.kv.kv)
        )

    def available(self) -> int:
        """Return the number of blocks that are free, can be grown or can be evicted."""
        evictable: int = 0 if self.cache is None else self.cache.evictable
        return int(self.allocator.available) + evictable

    def take(self, requests: list[Request], counts: list[int], now: int) -> bool:
        """Append to all requests. Evicts cached blocks if needed. Returns false, without appending, if blocks lack."""
        lens = [0 if request.kv is None else request.kv.len for request in requests]
        pairs = zip(lens, counts, strict=True)
        wanted = sum(self.blocks_for(length + count) - self.blocks_for(length) for length, count in pairs)
        evicted = 0
        while True:
            taken = self.append(requests, counts)
            if taken or self.cache is None:
                break
            missing = max(1, self.needed(requests, counts) - self.allocator.available)
            gone = int(self.cache.evict(missing))
            evicted += gone
            if not gone:
                break
        if evicted:
            self.now, self.wanted = now, wanted
            self._record("evict", 0, evicted, 0)
        return taken

    def append(self, requests: list[Request], counts: list[int]) -> bool:
        """Append to all requests if there are enough free blocks. Otherwise append to none and return false."""
        try:
            if self.groups is None:
                append_batch([request.kv for request in requests if request.kv is not None], counts)
            else:
                self._append_hybrids(requests, counts)
        except PoolExhausted:
            if self.groups is not None:
                for request in requests:
                    request.kv.trim()
            return False
        return True

    def needed(self, requests: list[Request], counts: list[int]) -> int:
        """Return the number of new blocks, excluding copy-on-write."""
        return sum(self.new_blocks(request.kv, count) for request, count in zip(requests, counts, strict=True))

    def _append_hybrids(self, requests: list[Request], counts: list[int]) -> None:
        needed = self.needed(requests, counts)
        for request, count in zip(requests, counts, strict=True):
            for table in request.kv.kv if count else ():
                is_cut = table.len % table.block_size > 0
                needed += is_cut and self.allocator.ref_count(table.blocks[-1]) > 1
        if self.allocator is not None:
            self.allocator.demand(needed)
        for request, count in zip(requests, counts, strict=True):
            request.kv.append(count)

    def make_room(self, requests: list[Request], counts: list[int], active: list[Request], now: int) -> bool:
        """Preempt requests until the step fits without them. Returns false if no request can be preempted."""
        wants = {request.id: self.needed([request], [count]) for request, count in zip(requests, counts, strict=True)}
        self.now, gave = now, False
        for victim in self._victims(active):
            wants.pop(victim.id, None)
            self.wanted = sum(wants.values())
            missing = self.wanted - self.available()
            if gave and missing <= 0:
                break
            self._give_way(victim, max(missing, 1))
            gave = True
        return gave

    def make_room_for(self, request: Request, wanted: int, now: int) -> bool:
        """Take blocks from preempted requests until `wanted` are free. Used while no request is active."""
        self.now, self.wanted = now, wanted
        for victim in self._victims([]):
            missing = wanted - self.available()
            if missing <= 0:
                break
            if victim is not request:
                self._give_way(victim, missing)
        return self.available() >= wanted

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks of the first `num_tokens` tokens to the prefix cache.

        Publishes nothing if the cache was told to forget blocks since the request began: its own blocks may have been
        computed from wrong ones.
        """
        if self.cache is None:
            return
        full = num_tokens // self.block_size
        if full and request.epoch == self.cache.epoch:
            tokens = request.all_tokens[: full * self.block_size]
            for group, table in enumerate(getattr(request.kv, "kv", [request.kv])):
                keys, left = self.keys_of(request, group), tokens[: table.first_block * self.block_size]
                if self.cache.cached_tokens(left, **keys) == len(left):  # otherwise no lookup finds the later blocks
                    blocks = ([-1] * table.first_block + table.blocks)[:full]
                    self.cache.cache_blocks(tokens, blocks, **keys)
        request.published = full

    def keys_of(self, request: Request, group: int) -> dict[str, Any]:
        """Return the cache keys for the blocks of a group."""
        own = (group,) if self.groups is not None and len(self.groups) > 1 else ()
        return {**request.keys, "extra_keys": (*request.keys["extra_keys"], *own)}

    def _victims(self, active: list[Request]) -> list[Request]:
        """Return the requests to preempt: preempted ones, then active ones except the first; greatest rank first."""
        parked = [request for request in self.tenants.requests() if request.state == "preempted"]
        parked.sort(key=lambda request: request.rank, reverse=True)
        running = sorted(active, key=lambda request: request.rank, reverse=True)[:-1]
        return [request for request in parked + running if request.kv is not None]

    def _give_way(self, request: Request, blocks: int) -> None:
        """Free the last blocks of a request, or all, and make it wait."""
        held = self.held(request)
        given = min(blocks, held) if self.partial else held
        keep = (held - given) * self.block_size
        free = self.available()
        self.publish(request, request.fed)
        if keep:
            request.kv.truncate(keep)
        else:
            request.kv.close()
            request.kv = None
        request.fed, request.published = keep, self.blocks_for(keep)
        if request.state != "preempted":
            self._park(request)
        self._record("partial" if keep else "recompute", request.id, given, free)

    def restart(self, request: Request, now: int) -> None:
        """Free all blocks of a request with a recurrent state after a failed step, and make it wait."""
        self.now, self.wanted = now, 0
        held, free = self.held(request), self.available()
        request.kv.close()
        request.kv, request.fed, request.published = None, 0, 0
        self._park(request)
        self._record("recompute", request.id, held, free)

    def _park(self, request: Request) -> None:
        """Make an active request wait."""
        request.state = "preempted"
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.gone(request)

    def gone(self, request: Request) -> None:
        """Remove a request from the ring when it is preempted or ends."""
        raise NotImplementedError

    def _record(self, action: str, seq_id: int, blocks: int, free: int) -> None:
        self.records.append((self.now, action, seq_id, blocks, self.wanted, free))
