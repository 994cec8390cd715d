"""Admission of waiting requests, in plain Python."""

from __future__ import annotations

from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.reference.block_table import PagedSeqState
from pagepool.reference.hybrid import HybridSequence
from pagepool.reference.preemption import Preemption
from pagepool.reference.request import WINDOW, Request, pick
from pagepool.reference.tenants import Tenants

__all__ = ["Admission"]

SPARE_BLOCKS = 1  # blocks per active request that must stay free when a preempted request is admitted


class Admission(Preemption):
    """Moves requests from the waiting queue to the active requests.

    `ring` has the active requests, the one that waited longest for a step first. `admitted` has the same requests in
    the order of admission. `short` describes the last request that did not fit: the request, the number of requests
    that had left until then, the available blocks, and its cached tokens.
    """

    def __init__(self, config: SchedulerConfig, allocator: Any, block_size: int, cache: Any, tenants: Tenants) -> None:
        super().__init__(config, allocator, block_size, cache, tenants)
        self.ring: list[Request] = []
        self.admitted: list[Request] = []
        self.short: tuple[Request, int, int, int] | None = None
        self.num_gone = 0
        self.num_steps = 0

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests, including preempted ones."""
        return [request for request in self.tenants.requests() if request.state in ("waiting", "preempted")]

    def gone(self, request: Request) -> None:
        """Remove a request from the active requests."""
        self.ring.remove(request)
        self.admitted.remove(request)
        self.num_gone += 1

    def _admit(self) -> None:
        """Admit as many requests as places, quotas and blocks allow. No request overtakes the next one."""
        config = self.config
        for known in self.waiting:
            if known.awaits is not None and (self._is_aged(known) or not self._is_coming(*known.awaits)):
                known.awaits = None
        while self.waiting and len(self.ring) < config.max_sequences:
            request, is_aged = self._next()
            if request is None or (self.states is not None and not self.states.free_count):
                return
            now = (request, self.num_gone, self.available() - self._promised(), self._cached(request))
            if self.short is not None and self.ring and self.short[:2] == now[:2]:
                if now[2] <= self.short[2] and now[3] <= self.short[3]:
                    return
            request.awaits = None if is_aged else self._leader(request)
            if request.awaits is not None:
                self._stop_at(*request.awaits)
                continue
            if not self._start(request):
                self.short = (*now[:3], self._cached(request))
                return
            self.short = None
            if is_aged:
                request.rank = (0, 0, request.id)
            request.counted = True
            request.num_cached = request.fed
            request.prefill_end = request.total_tokens
            request.state = "prefilling"
            self.ring.append(request)
            self.admitted.append(request)

    def _next(self) -> tuple[Request | None, bool]:
        """Return the next request, and true if it has waited so long that no request may overtake it."""
        policy = self.config.policy
        lines: dict[Any, list[Request]] = {}
        for request in sorted(self.waiting, key=lambda request: request.rank):
            if request.awaits is None:
                lines.setdefault(request.tenant, []).append(request)
        # The quota still counts a preempted request, so this request may always start. Other requests of its tenant
        # wait until it has started.
        counted = [[request for request in line if request.counted] for line in lines.values()]
        oldest = [min(line, key=lambda request: request.id) for line in [*lines.values(), *counted] if line]
        old = [request for request in oldest if self._is_aged(request) and self.tenants.may_start(request)]
        if old:
            return min(old, key=lambda request: request.id), True
        heads = [request for line in lines.values() for request in line[: WINDOW.get(policy, 1)]]
        heads += [line[0] for line in counted if line and line[0] not in heads]
        heads = [request for request in heads if self.tenants.may_start(request)]
        if not heads:
            return None, False
        chosen = pick(policy, heads, self._cached, self.tenants.served)
        return chosen, self._is_aged(chosen)

    def _is_aged(self, request: Request) -> bool:
        most = self.config.max_wait_steps
        return most is not None and self.num_steps - request.arrived >= most

    def _leader(self, request: Request) -> tuple[Request, int] | None:
        """Return the prefill to wait for and the number of tokens that it must process first, or None.

        This is the prefill that computes the most of the request's next blocks. Its priority must not be lower.
        """
        known = max(request.fed, self._cached(request))
        leader = None
        if not request.reads_cache:
            return None
        for other in self._prefills():
            shared = self._shared(request, other)
            is_later = other.rank[:2] > request.rank[:2] or other.keys != request.keys
            if is_later or shared <= known or not self._is_coming(other, shared):
                continue
            if leader is None or shared > leader[1]:
                leader = (other, shared)
        return leader

    def _shared(self, request: Request, other: Request) -> int:
        """Return the number of tokens in common leading blocks. Leaves at least one token of the request to compute."""
        most = min(len(request.prompt_tokens), request.total_tokens - 1, len(other.prompt_tokens))
        pairs = zip(request.prompt_tokens[:most], other.prompt_tokens, strict=False)
        same = next((place for place, (one, two) in enumerate(pairs) if one != two), most)
        return same // self.block_size * self.block_size

    def _is_coming(self, leader: Request, until: int) -> bool:
        """Return true if the leader will still process its tokens up to `until` and publish them."""
        is_known = self.cache is not None and leader.epoch == self.cache.epoch
        return is_known and leader.state == "prefilling" and leader.fed < until

    def _cached(self, request: Request) -> int:
        if self.cache is None or not request.reads_cache:
            return 0
        groups = range(1 if self.groups is None else len(self.groups))
        prompt = request.prompt_tokens
        return min(int(self.cache.cached_tokens(prompt, **self.keys_of(request, group))) for group in groups)

    def _start(self, request: Request) -> bool:
        """Start a request with cached blocks and its kept blocks. Returns false, unchanged, if it does not fit."""
        before, fed = request.kv, request.fed
        if before is None:
            request.kv = self._open(request)
            if self.cache is not None:
                request.epoch = self.cache.epoch
        found = self._adopt(request)
        if self._fits(request):
            return True
        if before is None:
            request.kv.close()
            request.kv = None
        elif found:
            request.kv.truncate(fed)
        request.fed, request.published = fed, self.blocks_for(fed)
        return False

    def _open(self, request: Request) -> Any:
        if self.groups is not None:
            return HybridSequence(self.groups, self.states, label=request.id)
        return PagedSeqState(self.allocator, self.block_size, self.blocks_for(request.max_tokens))

    def _adopt(self, request: Request) -> bool:
        """Use cached blocks if they hold more tokens than the blocks that the request kept."""
        if not request.reads_cache:
            return False
        full = (request.total_tokens - 1) // self.block_size
        least = request.fed // self.block_size + 1
        if self.cache is not None and self.groups is not None:
            return self._adopt_hybrid(request)
        if self.cache is None or full < least:
            return False
        epoch = self.cache.epoch
        blocks = self.cache.match_prefix(request.all_tokens[: full * self.block_size], **request.keys)
        found = len(blocks) >= least
        if found:
            request.kv.close()
            request.kv = self._open(request)
            request.kv.adopt(blocks)
            request.fed, request.published = request.kv.len, len(blocks)
            request.epoch = epoch
        self.allocator.free(blocks)
        return found

    def _adopt_hybrid(self, request: Request) -> bool:
        """Use cached blocks up to the longest prefix with a saved recurrent state."""
        size, tokens, keys = self.block_size, request.all_tokens, {"cache_salt": request.keys["cache_salt"]}
        most, groups = tokens[: (len(tokens) - 1) // size * size], range(len(self.groups))
        found = [self.cache.match_prefix(most, **self.keys_of(request, group)) for group in groups]
        begin = known = min(map(len, found)) * size
        if self.checkpoints is not None:
            self.checkpoints.follow(self.cache)
            begin = self.checkpoints.resume(request.kv.state.index, tokens, known, **keys)
            request.stops = [tuple(stop) for stop in self.checkpoints.stops(tokens, known, begin, **keys)]
        if begin:
            request.kv.adopt([blocks[: begin // size] for blocks in found], begin)
            request.kv.trim()
        request.fed, request.published = begin, begin // size
        for blocks in found:
            self.allocator.free(blocks)
        return begin > 0

    def _stop_at(self, leader: Request, until: int) -> None:
        """Make the leader save its recurrent state at `until`, for a request that shares these tokens."""
        if self.checkpoints is not None:
            position = until - until % self.checkpoints.index.align
            if position > leader.fed and position not in [known for known, _ in leader.stops]:
                leader.stops = sorted([*leader.stops, (position, "branch")])

    def _fits(self, request: Request) -> bool:
        config, held = self.config, self.blocks_for(request.fed)
        if not self.ring:
            unread = request.total_tokens - request.fed
            end = request.fed + min(unread, config.max_prefill_tokens, config.max_batch_tokens)
            wanted = self.blocks_for(end) - held
            return self.available() >= wanted or self.make_room_for(request, wanted, self.num_steps)
        capacity = self.allocator.max_capacity
        reserved = sum(self.blocks_for(other.max_tokens) for other in [*self.ring, request])
        if config.admission == "whole" and reserved > capacity:
            return False
        wanted = self.blocks_for(request.total_tokens) - held
        if request.state == "preempted":
            wanted += SPARE_BLOCKS * len(self.ring)
        left = self.available() - self._promised() - wanted
        return left >= int(capacity * config.watermark)

    def _promised(self) -> int:
        return sum(self.blocks_for(r.prefill_end) - self.blocks_for(r.fed) for r in self._prefills())

    def _prefills(self) -> list[Request]:
        return [request for request in self.admitted if request.state == "prefilling"]
