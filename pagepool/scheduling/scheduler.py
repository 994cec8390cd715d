"""The continuous-batching scheduler: decides who runs, and takes the blocks for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from pagepool.arguments import real, wrong
from pagepool.config import SchedulerConfig
from pagepool.errors import refuse_copy
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.admission import Admission
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.blocks import open_account
from pagepool.scheduling.changes import Changes
from pagepool.scheduling.floors import TenantFloors
from pagepool.scheduling.intake import check_token, check_tokens, read_request, read_results, read_token
from pagepool.scheduling.lookahead import read_drafts
from pagepool.scheduling.planner import Planner
from pagepool.scheduling.policies import POLICIES
from pagepool.scheduling.pressure import PressureLadder
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.reuse import open_reuse
from pagepool.scheduling.swap import SwapFile
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.undo import Undo
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Scheduler"]

FINISHED = SeqState.FINISHED


class Scheduler(Changes):
    """Continuous batching with chunked prefill over a paged pool.

    config        a `SchedulerConfig`; default: its defaults
    pool          a `KvCachePool`, `SequencePool` or `BlockAllocator` whose blocks the sequences take, or None
    prefix_cache  a `PrefixCache` over the same allocator: requests begin with the blocks that it has for their first
                  tokens, and leave their full blocks to it
    swap          a `SwapFile` over the pool, for the rung "swap" of the config's ladder

    Each step: `schedule()` picks the batch and takes its blocks, all or none; the caller runs it;
    `commit(batch, tokens)` hands back the new tokens (or `append_token` and `finish_sequence` do, one by one). Blocks
    are freed when a sequence finishes, is removed or is preempted. When the pool runs out, cached prefixes that nobody
    uses go first; then the newest sequence of the lowest priority gives its blocks back, waits at the front and is
    recomputed later; the oldest always keeps going, so every request ends. `pressure` tells who gave way, and why.
    One thread at a time may use a scheduler, and nothing may in the middle of a call: RuntimeError says so.

    Where a call is interrupted, by a signal or for want of memory, nothing is torn or lost, and the next one goes on: a
    step that was not returned was not taken, and what `commit` has not taken altogether it takes again. `outstanding`
    is the batch that was handed out last; `check()` audits everything.

    >>> scheduler = Scheduler(SchedulerConfig(max_batch_tokens=4))
    >>> scheduler.add_request([11, 12, 13, 14, 15], max_tokens=7)
    1
    >>> batch = scheduler.schedule()
    >>> batch.tokens, batch.is_prefill, batch.wants_token
    ([[11, 12, 13, 14]], [True], [False])
    >>> scheduler.commit(batch, [None])
    >>> while scheduler.has_work:
    ...     batch = scheduler.schedule()
    ...     scheduler.commit(batch, [99] * len(batch))
    >>> [seq.all_tokens for seq in scheduler.drain_finished()]
    [[11, 12, 13, 14, 15, 99, 99]]
    """

    # A deep copy is refused by what owns the blocks; without any it is another scheduler in the same state.
    __copy__ = refuse_copy

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        pool: Any = None,
        prefix_cache: Any = None,
        swap: SwapFile | None = None,
    ) -> None:
        config = SchedulerConfig() if config is None else config
        if not isinstance(config, SchedulerConfig):
            raise TypeError(f"config must be a SchedulerConfig, not {type(config).__name__}")
        if swap is not None and not isinstance(swap, SwapFile):
            raise wrong("swap", "a SwapFile or None", swap)
        self.config = config
        self._account = account = open_account(pool, config.block_size, config.watermark)
        self._policy = POLICIES[config.policy]
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(self._policy, config.max_wait_steps)
        self._active = ActiveSequences(account.blocks_for)
        self._tenants = Tenants(config, account.blocks_for)
        self._reuse = open_reuse(prefix_cache, account, config.cache_outputs, self._policy.by_cache)
        self._floors = TenantFloors(config.tenants, account)
        shared = (self._waiting, self._active, account, self._reuse, self._tenants, self._floors)
        self._ladder = PressureLadder(config, self._sequences, *shared, swap)
        self._admission = Admission(config, *shared, self._ladder)
        self._planner = Planner(config, self._active, self._ladder, self._reuse.block_size)
        self._finished: dict[int, Sequence] = {}
        self._out: ScheduledBatch | None = None  # the last batch, until it is committed
        self._undo: Undo | None = None  # of the call that is under way
        self._next_id = 1
        self._now = float("-inf")  # the latest time that `schedule` was told
        self.num_steps = 0

    def add_request(
        self,
        prompt_tokens: Iterable[int],
        max_tokens: int,
        priority: int | None = None,
        *,
        tenant: Hashable = None,
        cache_salt: str | bytes | int | None = None,
        extra_keys: Iterable[str | bytes | int | None] = (),
        cache_priority: int = 0,
        cache_ttl: float | None = None,
    ) -> int:
        """Queue a request and return its id: 1, 2, ...

        prompt_tokens  token ids, at least one; copied
        max_tokens     limit of prompt + output
        priority       lower goes first; None is 0; equals go in the order of arrival
        tenant         whose it is: counters, quotas and floors of the config are per tenant
        cache_salt, extra_keys  as for `PrefixCache.match_prefix`; no tenant is kept apart from another without a salt
        cache_priority, cache_ttl  as `priority` and `ttl` of `PrefixCache.cache_blocks`, for that policy: what its
                       blocks are worth, for how long from the step that stored them, in the unit of `schedule(now)`

        Raises ValueError, and changes nothing, when the prompt is empty or longer than `max_tokens`, when the pool, the
        tenant's quota or what the floors of other tenants leave could never hold `max_tokens`, or for a cache_priority
        or cache_ttl that no cache, or not this one, takes; TypeError for what is no integer. A prompt of exactly
        `max_tokens` leaves nothing to generate: it is finished at once.
        """
        cached = (cache_salt, extra_keys, cache_priority, cache_ttl)
        seq = read_request(self._next_id, prompt_tokens, max_tokens, priority, tenant, *cached)
        refusal = (
            self._account.refusal(seq.max_tokens)
            or self._tenants.refusal(tenant, seq.max_tokens)
            or self._floors.refusal(tenant, seq.max_tokens)
        )
        if refusal is not None:
            raise ValueError(refusal)
        seq._row = self._reuse.row(seq)
        seq._group = self._floors.group(tenant)
        seq._rank = self._policy.rank(seq)
        seq._arrived = self.num_steps
        self._next_id += 1
        self._add(seq)
        return seq.id

    def append_token(self, seq_id: int, token: int) -> None:
        """Add one output token to a sequence; at its limit it finishes. Unknown and finished ids are ignored.

        Raises TypeError for what is no integer, ValueError for a token that the prefix cache, if there is one, cannot
        hold; then nothing has changed.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.state is FINISHED:
            return
        token = read_token(token)
        if self._reuse.keeps:
            check_token(token)
        self._append(seq, token)

    def finish_sequence(self, seq_id: int) -> None:
        """Stop a sequence and free its blocks; `drain_finished` will return it. Unknown ids are ignored."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        self._stop(seq)

    def remove_sequence(self, seq_id: int) -> None:
        """Forget a sequence entirely and free its blocks. Unknown ids are ignored."""
        self.finish_sequence(seq_id)
        self._forget(seq_id)

    def schedule(self, now: float | None = None) -> ScheduledBatch:
        """The next step, its blocks taken. All budgets of the config hold.

        now  the time, in any unit, never earlier than the last; None: the number of the step, from 1. It is for
             `cache_ttl` alone; no clock is read

        Admits waiting sequences, picks by turns, shares out the tokens, and lets others give way when the pool is out.
        The batch before counts as run. The new one is empty when there is no work, or when blocks that others hold
        (forks, another scheduler on the same pool) leave not even one sequence room: `has_work` stays True then, and
        the caller has to free blocks or wait. Raises TypeError for a `now` that is no number, ValueError for an earlier
        one than the last or inf; then nothing has changed.
        """
        if now is not None:
            now = real("now", now, low=self._now)
            if now == float("inf"):
                raise ValueError("now must be finite, not inf: no time comes after it")
            self._now = now
        return self._step(now)

    def commit(self, batch: ScheduledBatch, tokens: Iterable[Any]) -> None:
        """Hand back the results of `batch`: one entry per sequence, in its order.

        An entry that is None or negative adds nothing; neither does the entry of a prompt chunk that was not the last
        (`wants_token` False) or of a sequence that has finished meanwhile. With lookahead an entry may be a list: the
        drafts that were accepted, then one token more; the slots of the others are taken back. Sequences that reach
        their limit finish. Raises ValueError when the lengths differ, the batch was committed before or is of another
        scheduler, or a token has more than the 32 bits that a prefix cache holds, TypeError when an entry is not an
        integer; nothing has changed then.
        """
        if not isinstance(batch, ScheduledBatch):
            raise wrong("batch", "a ScheduledBatch", batch)
        results = read_results(tokens, self.config.lookahead > 0)
        if len(results) != len(batch._sequences):
            raise ValueError(f"got {len(results)} tokens for a batch of {len(batch._sequences)} sequences")
        if batch._committed:
            raise ValueError("the batch was committed before")
        if batch is not self._out and not all(self._knows(seq) for seq in batch._sequences):
            raise ValueError("the batch is of another scheduler")
        if self._reuse.keeps:
            check_tokens(results)
        self._take(batch, results, read_drafts(batch, results) if self.config.lookahead else None)

    def _knows(self, seq: Sequence) -> bool:
        """Whether it is one of this scheduler's, or has ended."""
        return seq.state is FINISHED or self._sequences.get(seq.id) is seq
