"""The scheduler in plain Python. It makes the same decisions as `pagepool.scheduling`, from scratch in every step.

Lists are sorted and filtered whenever a decision needs them. The scheduler of `pagepool.scheduling` has the same
control flow, but uses a heap, a ring and running sums. Tests compare the two step by step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.reference.admission import Admission
from pagepool.reference.request import Batch, Request, rank
from pagepool.reference.tenants import Tenants

__all__ = ["Scheduler"]

MAX_TOKEN = 2**31 - 1  # largest token id that a prefix cache accepts
TOO_WIDE = f"token {{}} has more than 32 bits: {MAX_TOKEN} is the largest that the cache holds"


class Scheduler(Admission):
    """Continuous batching over a pool or allocator. See `pagepool.Scheduler`. `states` needs `groups`.

    >>> from pagepool.reference import BlockAllocator
    >>> scheduler = Scheduler(SchedulerConfig(max_batch_tokens=4), BlockAllocator(8))
    >>> scheduler.add_request([11, 12, 13, 14, 15], max_tokens=7)
    1
    >>> batch = scheduler.schedule()
    >>> batch.tokens, batch.is_prefill, batch.wants_token
    ([[11, 12, 13, 14]], [True], [False])
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: Any,
        prefix_cache: Any = None,
        *,
        groups: Any = None,
        states: Any = None,
        checkpoints: Any = None,
    ) -> None:
        allocator = getattr(pool, "allocator", pool)
        size = 16 if allocator is None else allocator.read_block_size(config.block_size)
        self.known: dict[int, Request] = {}
        tenants = Tenants(config, self.blocks_for, self.requests)
        super().__init__(config, allocator, size, prefix_cache, tenants)
        if groups is not None:
            self.groups, self.states, self.checkpoints, self.partial = groups, states, checkpoints, False
        self.finished: list[Request] = []
        self.outstanding: Batch | None = None
        self.has_committed = False
        self.next_id = 1
        self.inbox: list[Request | int] = []
        self.prefill_next = True

    def add_request(self, *request: Any, **names: Any) -> int:
        """Queue a request; returns its id."""
        found = self._make(*request, **names)
        self._accept(found)
        return found.id

    def submit(self, *request: Any, **names: Any) -> int:
        """Queue a request at the beginning of the next step. See `add_request`."""
        found = self._make(*request, **names)
        self.inbox.append(found)
        return found.id

    def cancel(self, seq_id: int) -> None:
        """Stop a request at the beginning of the next step."""
        self.inbox.append(seq_id)

    def fork(self, seq_id: int, n: int = 1) -> list[int]:
        """Make `n` requests that share the tokens and blocks of a decoding request."""
        request = self.known[seq_id]
        needed = n * self.blocks_for(request.max_tokens)
        reserved = sum(self.blocks_for(other.max_tokens) for other in self.ring)
        if request.state != "decoding" or len(self.ring) + n > self.config.max_sequences:
            raise ValueError(
                f"{n} forks of {request.state} sequence {seq_id} are impossible: {len(self.ring)} are active"
            )
        if self.config.admission == "whole" and reserved + needed > self.allocator.max_capacity:
            raise ValueError(f"{n} forks may need {needed} blocks in addition to {reserved} reserved ones")
        if self.states is not None and self.states.free_count < n:
            raise ValueError(f"{n} forks need {n} slots, {self.states.free_count} are free")
        if not self.tenants.has_room(request.tenant, needed):
            raise ValueError(f"{n} forks are above the quota of tenant {request.tenant!r}")
        unsure = self._unsure(request)
        forks = []
        for _ in range(n):
            fork = replace(request, id=self.next_id, kv=request.kv.fork(), num_cached=request.fed, num_preemptions=0)
            self.next_id += 1
            self._cut(fork)
            fork.output_tokens, fork.stops = request.output_tokens.copy(), []
            fork.rank, fork.arrived = rank(self.config.policy, fork), self.num_steps
            self.tenants.arrive(fork)
            self.known[fork.id] = fork
            self.ring.append(fork)
            self.admitted.append(fork)
            if self.outstanding is not None:
                self.outstanding.forked.append((fork, unsure))
            forks.append(fork.id)
        return forks

    def append_token(self, seq_id: int, token: int) -> None:
        """Append an output token. Raises ValueError for a token below 0, or too large for the cache."""
        request = self.known.get(seq_id)
        if request is not None and request.state != "finished":
            check_token(token)
            if self.cache is not None and token > MAX_TOKEN:
                raise ValueError(TOO_WIDE.format(token))
            request.output_tokens.append(token)
            if request.has_ended:
                self._finish([request])

    def finish_sequence(self, seq_id: int) -> None:
        """End a request with the reason "stop"."""
        self._stop(seq_id, "stop")

    def remove_sequence(self, seq_id: int) -> None:
        """End and forget a request."""
        self._stop(seq_id, "abort")
        request = self.known.pop(seq_id, None)
        if request in self.finished:
            self.finished.remove(request)

    def drain_finished(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        drained, self.finished = self.finished, []
        for request in drained:
            del self.known[request.id]
        return drained

    def get_sequence(self, seq_id: int) -> Request | None:
        """Return a request by id, or None."""
        return self.known.get(seq_id)

    @property
    def has_work(self) -> bool:
        """True while a request is active, waits, or is in the inbox."""
        return bool(self.requests() or self.inbox)

    def schedule(self) -> Batch:
        """Return the batch of the next step.

        Raises RuntimeError while a batch is outstanding, if there is a cache or a batch was committed before.
        """
        if self.outstanding is not None and (self.cache is not None or self.has_committed):
            raise RuntimeError(f"a batch of {len(self.outstanding)} sequences is outstanding")
        for item in self.inbox:
            if isinstance(item, Request):
                self._accept(item)
            elif item in self.known and self.known[item].state != "finished":
                self._stop(item, "abort")
        self.inbox = []
        self.num_steps += 1
        if self.outstanding is not None:
            self._close(self.outstanding)
        self._admit()
        batch = self._plan()
        if not batch.is_empty:
            self.outstanding = batch
            if self.config.policy == "fair":
                self.tenants.charge(batch)
        return batch

    def commit(self, batch: Batch, tokens: Iterable[Any]) -> None:
        """Take the results of a step. Each row gets a token, None, or a list of accepted drafts and the next token."""
        if batch.is_empty:
            return
        self._check_outstanding(batch)
        got = []
        rows = [list(result) if hasattr(result, "__len__") else [result] for result in tokens]
        for token in [token for row in rows for token in row]:
            if self.cache is not None and token is not None and token > MAX_TOKEN:
                raise ValueError(TOO_WIDE.format(token))
        for number, (request, row) in enumerate(zip(batch.requests, rows, strict=True)):
            since = request.total_tokens - batch.known[number]
            if len(row) > 1 and min(row) < 0:
                raise ValueError(f"row {number} got token {min(row)}, which is below 0")
            if len(row) > 1 and since and request.state != "finished":
                raise ValueError(f"row {number} got {len(row)} tokens, and {since} since it was scheduled")
        for request, row, wants in zip(batch.requests, rows, batch.wants_token, strict=True):
            if request.state != "finished" and wants and row[-1] is not None and row[-1] >= 0:
                stops = [place for place, token in enumerate(row) if token in request.stop_token_ids]
                row = row[: stops[0] + 1] if stops else row
                request.output_tokens += row
                request.fed += len(row) - 1
                got.append(request)
        self.has_committed = True
        self._close(batch)
        self._finish([request for request in got if request.has_ended])

    def give_up(self, batch: Batch) -> None:
        """Undo a failed step. Its tokens are fed again."""
        if batch.is_empty:
            return
        self._check_outstanding(batch)
        self.outstanding = None
        if self.config.policy == "fair":
            self.tenants.charge(batch, -1)
        rows = zip(batch.requests, batch.grow, batch.lookahead, strict=True)
        for request, count in [*((request, grow - drafts) for request, grow, drafts in rows), *batch.forked]:
            if request.state == "finished":
                continue
            request.fed -= count
            request.state = "prefilling" if request.fed < request.prefill_end else "decoding"
            if self.states is not None:
                self.restart(request, self.num_steps)
            else:
                self._cut(request)

    def _check_outstanding(self, batch: Batch) -> None:
        if batch is not self.outstanding:
            raise ValueError(f"the batch of {len(batch)} sequences is not outstanding")

    def requests(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [request for request in self.known.values() if request.state != "finished"]

    def _make(
        self,
        prompt_tokens: Iterable[int],
        max_tokens: int | None = None,
        priority: int | None = None,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Iterable[int] = (),
        request_id: Any = None,
        tenant: Any = None,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
        reads_cache: bool = True,
    ) -> Request:
        """Make a request. Checks only its tokens."""
        prompt = list(prompt_tokens)
        limits = (max_tokens, None if max_new_tokens is None else len(prompt) + max_new_tokens)
        limit = min(limit for limit in limits if limit is not None)
        request = Request(self.next_id, prompt, limit, priority or 0, tenant)
        request.stop_token_ids, request.request_id = tuple(stop_token_ids), request_id
        check_token(min(request.prompt_tokens))
        request.keys = {"cache_salt": cache_salt, "extra_keys": tuple(extra_keys)}
        request.reads_cache = reads_cache
        request.rank = rank(self.config.policy, request)
        self.next_id += 1
        return request

    def _accept(self, request: Request) -> None:
        request.arrived = self.num_steps
        if request.at_limit:
            request.state = "finished"
            self.finished.append(request)
        else:
            self.tenants.arrive(request)
        self.known[request.id] = request

    def _stop(self, seq_id: int, reason: str) -> None:
        request = self.known.get(seq_id)
        if request is not None:
            request.stopped_by = reason
            if request.state != "finished":
                self._finish([request])

    def _close(self, batch: Batch) -> None:
        """Close a batch that was run: remove slots of drafts, publish the filled blocks, in the order of ids."""
        self.outstanding = None
        for request in sorted(batch.requests, key=lambda request: request.id):
            if request.kv is None:
                continue
            self._cut(request)
            if request.fed // self.block_size > request.published and not request.has_ended:
                self.publish(request, request.fed)
        for request in sorted(batch.requests[batch.num_decodes :], key=lambda request: request.id):
            while request.stops and request.stops[0][0] <= request.fed:
                position, reason = request.stops.pop(0)
                if position == request.fed and request.kv is not None:
                    self._keep_state(request, reason)

    def _keep_state(self, request: Request, reason: str) -> None:
        """Save the recurrent state after all fed tokens."""
        if self.checkpoints is not None and request.epoch == self.cache.epoch:
            if request.fed and request.fed % self.checkpoints.index.align == 0:
                tokens, salt = request.all_tokens, request.keys["cache_salt"]
                self.checkpoints.save(request.kv.state.index, tokens, request.fed, reason, cache_salt=salt)

    def _finish(self, requests: list[Request]) -> None:
        requests.sort(key=lambda request: request.id)
        for request in requests:
            if request.kv is not None:
                unsure = self._unsure(request)
                self.publish(request, request.fed - unsure)
                if not unsure:
                    self._keep_state(request, "end")
        for request in requests:
            if request.kv is not None:
                request.kv.close()
                request.kv = None
            if request in self.ring:
                self.gone(request)
            request.state, request.awaits = "finished", None
            self.finished.append(request)
            self.tenants.leave(request)

    def _cut(self, request: Request) -> None:
        """Remove the slots of drafts."""
        if self.groups is None:
            request.kv.truncate(request.fed)
        elif request.kv.len > request.fed:
            request.kv.retract(request.fed)

    def _unsure(self, request: Request) -> int:
        """Return the number of the request's tokens in the outstanding batch. Their K and V may not be stored yet."""
        if self.outstanding is None:
            return 0
        out = self.outstanding
        rows = zip(out.requests, out.grow, out.lookahead, strict=True)
        found = [*((other, grow - drafts) for other, grow, drafts in rows), *out.forked]
        return sum(count for other, count in found if other is request)

    def _plan(self) -> Batch:
        """Choose sequences, distribute the token budget, take blocks. Preempts and retries while blocks are missing."""
        while self.ring:
            decodes, prefills, taken = self._pick()
            batch = self._rows(decodes, prefills)
            fits = self.take(batch.requests, batch.grow, self.num_steps)
            if taken is not None:
                self.ring = self.ring + taken if fits else taken + self.ring
                self.prefill_next ^= fits
            if fits:
                for row, request in enumerate(batch.requests):
                    request.fed += batch.grow[row] - batch.lookahead[row]
                    if batch.is_prefill[row] and request.fed == request.prefill_end:
                        request.state = "decoding"
                return batch
            if not self.make_room(batch.requests, batch.grow, self.ring, self.num_steps):
                break
        return Batch()

    def _pick(self) -> tuple[list[Request], list[Request], list[Request] | None]:
        """Return decodes and prefills of the step. If places are scarce, also the requests taken from the ring."""
        prefills = self._prefills()
        places = min(self.config.max_batch_sequences, self.config.max_batch_tokens)
        if len(self.ring) <= places:
            return [request for request in self.ring if request.state == "decoding"], prefills, None
        oldest = prefills[0] if prefills and (places > 1 or self.prefill_next) else None
        taken, self.ring = self.ring[:places], self.ring[places:]
        chosen = taken
        if oldest is not None:
            if oldest not in taken:
                self.ring.insert(0, taken.pop())
            chosen = [oldest, *(request for request in taken if request is not oldest)]
        by_state = {state: [r for r in chosen if r.state == state] for state in ("decoding", "prefilling")}
        return by_state["decoding"], by_state["prefilling"], taken

    def _rows(self, decodes: list[Request], prefills: list[Request]) -> Batch:
        """Make the batch: distribute the tokens of the step."""
        if self.states is not None:  # a recurrent state must not process a token twice
            decodes = [request for request in decodes if request.total_tokens > request.fed]
        rows = decode_rows(decodes, self.config.lookahead)
        most = self.config.max_batch_tokens if self.groups is None else self.step
        unread = [(r.stops[0][0] if r.stops else r.prefill_end) - r.fed for r in prefills]
        counts = share_tokens([min(new + drafts, most) for new, drafts in rows], unread, self.config)
        batch = Batch(num_tokens=counts, num_decodes=len(decodes))
        for request, count, (new, drafts) in zip(decodes, counts, rows, strict=False):
            grow = min(count, new + drafts)
            fed = min(grow, new)
            batch.add(request, fed, grow, grow - fed, fed >= new)
        for request, count in zip(prefills, counts[len(decodes) :], strict=False):
            batch.add(request, count, count, 0, request.fed + count == request.total_tokens)
        return batch


def check_token(token: int) -> None:
    """Raise ValueError for a token below 0. In the results of a step, -1 means no token."""
    if token < 0:
        raise ValueError(f"a token must be 0 or more, not {token}")


def decode_rows(decodes: list[Request], lookahead: int) -> list[tuple[int, int]]:
    """Return the number of tokens to feed and of usable draft slots for each decode.

    Drafts follow only a single token. The last token of a sequence needs no draft.
    """
    rows = []
    for request in decodes:
        new = request.total_tokens - request.fed
        most = min(lookahead, request.max_tokens - request.total_tokens - 1)
        rows.append((new, most if new == 1 else 0))
    return rows


def share_tokens(decodes: list[int], prefills: list[int], config: SchedulerConfig) -> list[int]:
    """Distribute the token budget: one token for each sequence, then more for decodes, then prompt chunks."""
    counts, left = [], config.max_batch_tokens - len(decodes) - len(prefills)
    for most in [*decodes, *(min(unread, config.max_prefill_tokens) for unread in prefills)]:
        extra = max(0, min(most - 1, left))
        counts.append(1 + extra)
        left -= extra
    return counts
