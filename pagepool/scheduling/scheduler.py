"""The continuous-batching scheduler: which sequences run next, with which tokens, in which blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from pagepool._arguments import integer
from pagepool.config import SchedulerConfig
from pagepool.errors import PoolError, refuse_copy
from pagepool.memory.hybrid import KvGroup
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.prefix.checkpoints import StateCheckpoints
from pagepool.scheduling.active import ActiveSequences
from pagepool.scheduling.admission import Admission
from pagepool.scheduling.batch import ScheduledBatch, build_batch
from pagepool.scheduling.block_manager import open_blocks
from pagepool.scheduling.guard import Guard, Inbox
from pagepool.scheduling.policies import POLICIES
from pagepool.scheduling.preemption import Preemption, PreemptionRecord
from pagepool.scheduling.prefix_adapter import PrefixAdapter
from pagepool.scheduling.request import SeqState, Sequence, by_id
from pagepool.scheduling.tenants import Tenants
from pagepool.scheduling.validate import (
    check_drafts,
    check_hybrid,
    check_outstanding,
    check_results,
    check_token,
    check_width,
    read_batch,
    read_drafts,
    read_request,
    read_results,
    read_token,
    up_to_stop,
)
from pagepool.scheduling.waiting import WaitingQueue

__all__ = ["Scheduler"]

DECODING, FINISHED = SeqState.DECODING, SeqState.FINISHED


class Scheduler:
    """Continuous batching with chunked prefill over a paged pool.

    Parameters
    ----------
    config : SchedulerConfig, optional
        Default: `SchedulerConfig()`.
    pool : KvCachePool, SequencePool, BlockAllocator or None
        The source of blocks.
    prefix_cache : PrefixCache or None
        A cache over the same allocator. Requests begin with cached blocks for their first tokens, and publish their
        full blocks. While one request computes blocks that another request needs next, the other one waits.
    groups : iterable of KvGroup or None
        For hybrid models: the groups of each sequence, over the pool's allocator. Then `Sequence.kv` is a
        `HybridSequence`. None: one group, if there is a pool. A prefix cache needs groups with its own block size.
    states : SsmStatePool or None
        For hybrid models: the pool of recurrent states. Each draft holds a free slot during its step.
    checkpoints : StateCheckpoints or None
        Required for a prefix cache with `states`: keeps recurrent states at some cached positions. Its `align` must be
        a multiple of the block size.

    Notes
    -----
    A step has three parts. `schedule()` chooses the batch and takes its blocks, all or nothing. The caller runs the
    forward pass. `commit(batch, tokens)` takes the new tokens, or `give_up(batch)` undoes the step if the model has
    failed. Blocks are freed when a sequence finishes, is removed or is preempted.

    If the pool runs out of blocks, unused cached blocks are evicted first. Then sequences are preempted, in the reverse
    order of the policy. A preempted sequence loses its last blocks, or all, waits at the front of the queue, and
    computes them again later. The first sequence in the policy's order is never preempted, so every request ends.
    `preemptions` is the log.

    Any thread may call `submit` and `cancel` at any time. Only one other call that changes the scheduler may run. A
    second such call, by another thread, a finalizer or a signal handler, raises RuntimeError and changes nothing. Wrong
    arguments change nothing. Any other exception inside a call, including KeyboardInterrupt and MemoryError, closes the
    scheduler: later calls that change it, and `check()`, raise RuntimeError and name the cause. `close()` frees all
    blocks, after a failure or at any other time.

    Examples
    --------
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

    __reduce__ = refuse_copy

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        pool: Any = None,
        prefix_cache: Any = None,
        *,
        groups: Iterable[KvGroup] | None = None,
        states: SsmStatePool | None = None,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        config = SchedulerConfig() if config is None else config
        if not isinstance(config, SchedulerConfig):
            raise TypeError(f"config must be a SchedulerConfig, not {type(config).__name__}")
        self.config = config
        self.num_steps = 0
        self._policy = POLICIES[config.policy]
        step = max(config.lookahead + 1, min(config.max_prefill_tokens, config.max_batch_tokens))
        self._blocks = open_blocks(pool, config.block_size, groups, states, step)
        check_hybrid(self._blocks, prefix_cache, checkpoints)
        self._prefix = PrefixAdapter(prefix_cache, self._blocks, checkpoints, config.explain_misses)
        self._guard = Guard()
        self._inbox = Inbox()
        self._sequences: dict[int, Sequence] = {}
        self._finished: dict[int, Sequence] = {}
        self._outstanding: ScheduledBatch | None = None  # the last batch until `commit` or `give_up`
        self._has_committed = False
        self._waiting, self._active, self._tenants = waiting, active, tenants = self._empty()
        blocks, prefix = self._blocks, self._prefix
        self._preemption = Preemption(waiting, active, blocks, prefix)
        self._admission = Admission(config, waiting, active, blocks, prefix, tenants, self._preemption)

    def add_request(
        self,
        prompt_tokens: Iterable[int],
        max_tokens: int | None = None,
        priority: int | None = None,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Iterable[int] = (),
        request_id: int | str | None = None,
        tenant: Hashable = None,
        cache_salt: str | bytes | int | None = None,
        extra_keys: Iterable[str | bytes | int | None] = (),
        reads_cache: bool = True,
    ) -> int:
        """Queue a request.

        Parameters
        ----------
        prompt_tokens : iterable of int
            At least one token id, none below 0. Copied.
        max_tokens : int or None
            Limit of prompt + output.
        priority : int or None
            Lower numbers go first, equal numbers by arrival. None: 0.
        max_new_tokens : int or None
            Limit of the output. If both limits are given, the lower one counts.
        stop_token_ids : iterable of int
            Token ids that end the sequence when they are generated. They stay in its output.
        request_id : int, str or None
            The caller's own id, for `Sequence.request_id` and as the label of its blocks. Need not be unique.
        tenant : hashable
            The name of a `Tenant`.
        cache_salt, extra_keys
            As in `PrefixCache.match_prefix`. Without a salt, tenants share cached blocks.
        reads_cache : bool
            Begin with cached blocks. False: compute the whole prompt, for callers that need the result of each token.
            The blocks of the request are cached in both cases.

        Returns
        -------
        int
            The id of the sequence: 1, 2, ... A request without room for output is finished at once.

        Raises
        ------
        ValueError
            If the prompt is empty, is longer than `max_tokens`, has a token below 0, or can never fit the pool or the
            tenant's quota. A failed call changes nothing.
        TypeError
            If a token is not an integer, or the request has no limit.

        Examples
        --------
        >>> scheduler = Scheduler()
        >>> scheduler.add_request([11, 12], max_new_tokens=8, stop_token_ids=[2], request_id="chat-7")
        1
        >>> while scheduler.has_work:
        ...     batch = scheduler.schedule()
        ...     scheduler.commit(batch, [2])
        >>> [(seq.request_id, seq.output_tokens, seq.finish_reason) for seq in scheduler.drain_finished()]
        [('chat-7', [2], 'stop')]
        """
        seq = self._read_request(
            prompt_tokens,
            max_tokens,
            priority,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            request_id=request_id,
            tenant=tenant,
            cache_salt=cache_salt,
            extra_keys=extra_keys,
            reads_cache=reads_cache,
        )
        with self._guard:
            self._guard.is_changing = True
            seq.id = self._inbox.number()
            self._accept(seq)
        return seq.id

    def submit(
        self,
        prompt_tokens: Iterable[int],
        max_tokens: int | None = None,
        priority: int | None = None,
        **request: Any,
    ) -> int:
        """Queue a request from any thread and at any time, also during another call.

        See `add_request` for arguments, result and errors. The next `schedule` accepts the request. Until then
        `get_sequence` does not find it, and `has_work` is True. A closed scheduler raises RuntimeError.

        Examples
        --------
        >>> scheduler = Scheduler()
        >>> scheduler.submit([11, 12], max_new_tokens=1)
        1
        >>> scheduler.total_count, scheduler.has_work
        (0, True)
        >>> scheduler.schedule().tokens
        [[11, 12]]
        """
        seq = self._read_request(prompt_tokens, max_tokens, priority, **request)
        self._guard.check_open()
        seq.id = seq_id = self._inbox.number()
        self._inbox.items.append(seq)
        return seq_id

    def cancel(self, seq_id: int) -> None:
        """Stop a sequence from any thread and at any time. It finishes at the beginning of the next `schedule`.

        Its `finish_reason` is "abort". Unknown and finished ids are ignored, other types than int raise TypeError.
        """
        number = integer("seq_id", seq_id)
        if not self._guard.is_closed:
            self._inbox.items.append(number)

    def fork(self, seq_id: int, n: int = 1) -> list[int]:
        """Start `n` sequences with the tokens and blocks of a decoding sequence.

        Use it for several samples of a prompt, and for beams. The forks decode from the next step on, with the limits,
        stop tokens, tenant and `request_id` of the original. Shared blocks are copied on write. `remove_sequence` drops
        a beam and frees the blocks that no other sequence shares.

        To give each fork its own next token, call it after the forward pass and before `commit`. Pass the original's
        token to `commit`, and the tokens of the forks to `append_token`.

        Parameters
        ----------
        seq_id : int
            A sequence in the state DECODING: the last chunk of its prompt has been scheduled.
        n : int
            Number of forks, at least 1.

        Returns
        -------
        list of int
            The ids of the forks.

        Raises
        ------
        ValueError
            If the sequence is not decoding, or `n` more sequences exceed `max_sequences` or the tenant's quota. A
            failed call changes nothing.

        Examples
        --------
        >>> scheduler = Scheduler()
        >>> seq_id = scheduler.add_request([11, 12], max_new_tokens=2)
        >>> batch = scheduler.schedule()
        >>> others = scheduler.fork(seq_id, 2)
        >>> scheduler.commit(batch, [7])
        >>> for other, token in zip(others, (8, 9)):
        ...     scheduler.append_token(other, token)
        >>> scheduler.schedule().tokens
        [[7], [8], [9]]
        """
        number = integer("n", n, 1)
        with self._guard:
            seq = self._sequences.get(seq_id)
            if seq is None or seq.state is not DECODING:
                state = "unknown" if seq is None else seq.state.value
                raise ValueError(f"sequence {seq_id} must be decoding to be forked, but is {state}")
            refusal = self._admission.refuses_forks(seq, number)
            if refusal is not None:
                raise ValueError(refusal)
            self._guard.is_changing = True
            forks = [seq._fork(self._inbox.number()) for _ in range(number)]
            for fork in forks:
                self._sequences[fork.id] = fork
                self._blocks.fork(seq, fork)
                fork._rank = self._policy.rank(fork)
                if self._outstanding is not None:
                    self._outstanding.add_fork(seq, fork)
                self._tenants.arrive(fork)
                self._admission.enter(fork)
        return [fork.id for fork in forks]

    def append_token(self, seq_id: int, token: int) -> None:
        """Add one output token to a sequence. The sequence finishes at its limit or at a stop token.

        Unknown and finished ids are ignored. Raises TypeError for a token that is not an integer, ValueError for a
        token below 0 or, with a prefix cache, above 2**31 - 1. A failed call changes nothing.
        """
        with self._guard:
            seq = self._sequences.get(seq_id)
            if seq is None or seq.state is FINISHED:
                return
            token = read_token(token)
            check_token(token)
            if self._prefix.cache is not None:
                check_width(token)
            self._guard.is_changing = True
            seq.output_tokens.append(token)
            if seq._has_ended:
                self._finish([seq])

    def finish_sequence(self, seq_id: int) -> None:
        """Stop a sequence and free its blocks. `drain_finished` will return it. Unknown ids are ignored."""
        with self._guard:
            seq = self._sequences.get(seq_id)
            self._guard.is_changing = True
            self._stop(seq, "stop")

    def remove_sequence(self, seq_id: int, *, discard: bool = False) -> None:
        """Forget a sequence entirely and free its blocks. Unknown ids are ignored.

        Parameters
        ----------
        seq_id : int
            The sequence.
        discard : bool
            Also forget the blocks that it has written or read in the prefix cache, because the model returned NaN for
            it. Sequences that run now and begin with the same tokens cache nothing more.
        """
        with self._guard:
            seq = self._sequences.get(seq_id)
            self._guard.is_changing = True
            if discard and seq is not None:
                self._prefix.discard(seq, self._sequences.values())
            self._stop(seq, "abort")
            self._finished.pop(seq_id, None)
            self._sequences.pop(seq_id, None)

    def drain_finished(self) -> list[Sequence]:
        """Remove and return the finished sequences, in the order in which they finished."""
        with self._guard:
            self._guard.is_changing = True
            finished, self._finished = self._finished, {}
            for seq_id in finished:
                del self._sequences[seq_id]
            return list(finished.values())

    def schedule(self, drafts: Mapping[int, int] | None = None) -> ScheduledBatch:
        """Return the next batch, within all budgets of the config and with its blocks taken.

        Accepts submitted requests, stops cancelled ones, and admits waiting sequences. Chooses sequences in turn, gives
        each its tokens, and preempts if the pool runs out of blocks, but never for drafted tokens.

        Parameters
        ----------
        drafts : mapping of int to int, optional
            Number of drafted tokens by sequence id. A decode gets as many slots, up to `lookahead`, its limit, the
            budget of tokens and the blocks and free states that are left. Default: `lookahead` for all.

        Returns
        -------
        ScheduledBatch
            Empty without work. Also empty if not even one sequence fits, because other users of the pool hold
            the blocks. Then `has_work` stays True, and the caller must free blocks or wait.

        Raises
        ------
        RuntimeError
            If a batch is `outstanding`, and the scheduler has a prefix cache or has committed a batch before. Otherwise
            an outstanding batch counts as run, and `append_token` alone is enough.
        TypeError, ValueError
            If a number of drafts is not an integer, or is below 0. A failed call changes nothing.
        """
        drafts = read_drafts(drafts)
        with self._guard:
            step = self.num_steps + 1
            out = self._outstanding
            if out is not None and (self._has_committed or self._prefix.cache is not None):
                raise RuntimeError(f"a batch of {len(out)} sequences is outstanding: commit it or give it up first")
            self._guard.is_changing = True
            self._take_in()
            self.num_steps = step
            if out is not None:
                self._end_step(out)
            self._admission.admit(step)
            active = self._active
            while len(active):
                batch = build_batch(*active.pick(), self.config, self._blocks.free_slots, self._blocks.step, drafts)
                taken = self._preemption.take(batch, step)
                active.put_back(taken)
                if taken:
                    active.feed(batch)
                    self._tenants.charge(batch)
                    self._outstanding = None if batch.is_empty else batch
                    return batch
                if any(batch.lookahead):
                    drafts = {}
                elif not self._preemption.make_room(batch, step):
                    break
            return ScheduledBatch.empty()

    def commit(self, batch: ScheduledBatch, tokens: Iterable[Any]) -> None:
        """Take the results of `batch`. Sequences at their limit or at a stop token finish.

        With a prefix cache, this publishes the blocks that the step has filled.

        Parameters
        ----------
        batch : ScheduledBatch
            The outstanding batch, or an empty one.
        tokens : iterable
            One entry per sequence, in the order of the batch. None or a number below 0 adds nothing. Entries are
            ignored for a prompt chunk that is not the last one (`wants_token` is False), and for a sequence that has
            finished since `schedule`. With lookahead an entry may be a list: the accepted drafts, then the next token.
            The slots of other drafts are removed, and tokens after a stop token are dropped.

        Raises
        ------
        ValueError
            If the lengths differ, the batch is not outstanding, drafts were accepted for a sequence that got tokens
            since `schedule`, or a token has more than 32 bits and there is a prefix cache. A failed call changes
            nothing.
        TypeError
            If an entry is not an integer.
        """
        sequences = read_batch(batch)._sequences
        results = read_results(tokens, self.config.lookahead > 0)
        if len(results) != len(sequences):
            raise ValueError(f"tokens must have {len(sequences)} entries, one per sequence, not {len(results)}")
        check_results(batch, results, for_cache=self._prefix.cache is not None)
        drafts = self.config.lookahead > 0
        with self._guard:
            if batch.is_empty:
                return
            check_outstanding(batch, self._outstanding)
            if drafts:
                check_drafts(batch, results)
            self._guard.is_changing = True
            outputs, may_stop = batch._outputs, batch._may_stop
            ended: list[Sequence] = []
            for seq, output, result, wants in zip(sequences, outputs, results, batch.wants_token, strict=True):
                if result is None or not wants or seq.state is FINISHED:
                    continue
                if drafts and type(result) is list:
                    result = up_to_stop(result, seq.stop_token_ids)
                    output += result
                    seq.fed += len(result) - 1  # accepted drafts stay in their slots
                    self._tenants.charge_drafts(seq, len(result) - 1)
                elif result >= 0:
                    output.append(result)
                else:
                    continue
                if len(output) >= seq._max_output or (may_stop and output[-1] in seq.stop_token_ids):
                    ended.append(seq)
            self._has_committed = True
            self._end_step(batch)
            if ended:
                self._finish(ended)

    def give_up(self, batch: ScheduledBatch) -> None:
        """Undo a failed step. Its tokens are fed again in a later step.

        Nothing of the step is published to the prefix cache. Sequences stay active and keep tokens from `append_token`.
        Forks made since `schedule` also feed the tokens again. A recurrent state may include some of the tokens, so a
        sequence with a recurrent state is preempted and restarts from a saved state or from its first token. Sequences
        that have finished since `schedule` stay finished.

        Parameters
        ----------
        batch : ScheduledBatch
            The outstanding batch, or an empty one.

        Raises
        ------
        ValueError
            If the batch is not outstanding. A failed call changes nothing.

        Examples
        --------
        >>> scheduler = Scheduler()
        >>> seq_id = scheduler.add_request([11, 12], max_new_tokens=1)
        >>> batch = scheduler.schedule()
        >>> scheduler.give_up(batch)
        >>> scheduler.schedule().tokens
        [[11, 12]]
        """
        read_batch(batch)
        with self._guard:
            if batch.is_empty:
                return
            check_outstanding(batch, self._outstanding)
            self._guard.is_changing = True
            self._outstanding = None
            if self.config.policy == "fair":
                self._tenants.charge(batch, -1)
                for seq in batch._sequences:
                    self._waiting.change(seq.tenant)  # its counter has fallen
            before = [(seq, fed) for seq, fed in batch.fed_before() if seq.state is not FINISHED]
            self._active.take_back(before)
            for seq, fed in before:
                if self._blocks.free_slots is not None:
                    self._preemption.restart(seq, self.num_steps)
                elif seq.kv is not None:
                    self._blocks.truncate(seq, fed)

    def get_sequence(self, seq_id: int) -> Sequence | None:
        """Return the sequence with this id, or None if it is unknown, drained or removed."""
        return self._sequences.get(seq_id)

    @property
    def outstanding(self) -> ScheduledBatch | None:
        """The last batch of `schedule` until `commit` or `give_up`, else None.

        A caller that was interrupted may run it again, which stores the same keys and values. A recurrent state must
        not process its tokens twice: `give_up` the batch instead.
        """
        return self._outstanding

    @property
    def active_count(self) -> int:
        """Number of sequences that are prefilling or decoding."""
        return len(self._active)

    @property
    def waiting_count(self) -> int:
        """Number of waiting sequences, including preempted ones."""
        return len(self._waiting)

    @property
    def total_count(self) -> int:
        """Number of sequences that wait, are active, or have finished and are not drained."""
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or is active, or something was submitted or cancelled since the last step."""
        return len(self._active) > 0 or len(self._waiting) > 0 or len(self._inbox.items) > 0

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions of active sequences."""
        return self._preemption.num_preemptions

    @property
    def preemptions(self) -> list[PreemptionRecord]:
        """The last 1,024 actions of the scheduler when blocks ran out, newest last. `stats()` has the totals.

        Each one is a `PreemptionRecord` `(step, action, seq_id, blocks, wanted, free, reason)`. `step` is the number of
        the `schedule` call. `action` is "evict", "partial" or "recompute". `seq_id` is the sequence that lost blocks, 0
        for cached blocks. `blocks` were freed, `wanted` were needed by the step, `free` were available before.
        """
        return list(self._preemption.records)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the blocks of active and preempted sequences, 0 without a pool."""
        return self._blocks.num_tokens

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters. `actions` counts the preemption actions, `given` the blocks that they freed."""
        blocks = self._blocks
        return {
            "steps": self.num_steps,
            "active": self.active_count,
            "waiting": self.waiting_count,
            "finished": len(self._finished),
            "tokens": blocks.num_tokens,
            "capacity": blocks.capacity,
            "available": blocks.available(),
            "promised": self._active.promised,
            "preemptions": self.num_preemptions,
            "actions": dict(self._preemption.counts),
            "given": dict(self._preemption.given),
        }

    def __repr__(self) -> str:
        counts = f"{self.active_count} active, {self.waiting_count} waiting, {len(self._finished)} finished"
        return f"<{type(self).__name__}: {counts}>"

    def check(self) -> None:
        """Check all invariants of the scheduler. O(sequences).

        Recounts everything from the sequences. The allocator and the prefix cache have their own `check`.

        Raises
        ------
        PoolError
            If an invariant is broken. The message names it.

        Examples
        --------
        >>> Scheduler().check()
        """
        with self._guard:
            broken = self._audit()
        if broken is not None:
            raise PoolError(f"broken invariant: {broken}")

    def close(self) -> None:
        """Free all blocks and recurrent states, also after a failure. May be called twice.

        Sequences that have not finished end with the `finish_reason` "abort"; `get_sequence` still finds them. Later
        calls that change the scheduler, and `check`, raise RuntimeError; `cancel` does nothing. Do not call it inside
        another call, from a finalizer or a signal handler.

        Raises
        ------
        RuntimeError
            If another thread is inside a call. A failed call changes nothing.

        Examples
        --------
        >>> scheduler = Scheduler()
        >>> seq_id = scheduler.add_request([11, 12], max_new_tokens=4)
        >>> scheduler.close()
        >>> scheduler.has_work, scheduler.get_sequence(seq_id).finish_reason
        (False, 'abort')
        """
        with self._guard.closing():
            self._outstanding = None
            self._inbox.items.clear()
            self._blocks.free_all(self._sequences.values())
            for seq in self._sequences.values():
                if seq.state is not FINISHED:
                    seq.state, seq._stopped_by = FINISHED, "abort"
            self._waiting, self._active, self._tenants = self._empty()

    def _end_step(self, batch: ScheduledBatch) -> None:
        """End the step of `batch`, which was run: remove the slots of drafts and publish the filled blocks."""
        self._outstanding = None
        if any(batch.lookahead):
            self._blocks.remove_slots(batch._sequences)
        self._prefix.publish_filled(batch)
        self._prefix.keep_states(batch)

    def _finish(self, sequences: list[Sequence]) -> None:
        """Finish sequences in the order of ids: remove them from all structures and free their blocks."""
        sequences.sort(key=by_id)
        for seq in sequences:
            if seq.kv is not None:
                # K and V of the outstanding batch may not be stored yet.
                unsure = self._outstanding.fed_of(seq) if self._outstanding else 0
                self._prefix.publish(seq, seq.fed - unsure)
                if not unsure:
                    self._prefix.keep_state(seq, "end")
        self._blocks.close(sequences)
        for seq in sequences:
            if seq._is_active:
                self._active.remove(seq)
            else:
                self._waiting.remove(seq)
            seq.state = FINISHED
            self._finished[seq.id] = seq
            self._tenants.leave(seq)
            self._waiting.change(seq.tenant)  # the tenant's quota has more room now

    def _read_request(self, *arguments: Any, **names: Any) -> Sequence:
        """Check a request and return its sequence, without an id. Changes nothing."""
        seq = read_request(*arguments, **names)
        refusal = self._blocks.refusal(seq.max_tokens) or self._tenants.refusal(seq.tenant, seq.max_tokens)
        if refusal is not None:
            raise ValueError(refusal)
        self._prefix.read(seq)
        return seq

    def _accept(self, seq: Sequence) -> None:
        """Queue a new sequence that has its id."""
        seq._rank = self._policy.rank(seq)
        self._sequences[seq.id] = seq
        if seq.at_limit:
            seq.state = FINISHED
            self._finished[seq.id] = seq
        else:
            self._tenants.arrive(seq)
            self._waiting.push(seq)

    def _take_in(self) -> None:
        """Accept the submitted requests and cancellations, in the order of arrival."""
        items = self._inbox.items
        for _ in range(len(items)):
            item = items.popleft()
            if isinstance(item, Sequence):
                self._accept(item)
            else:
                seq = self._sequences.get(item)
                if seq is not None and seq.state is not FINISHED:
                    self._stop(seq, "abort")

    def _stop(self, seq: Sequence | None, reason: str) -> None:
        if seq is not None:
            seq._stopped_by = reason
            if seq.state is not FINISHED:
                self._finish([seq])

    def _empty(self) -> tuple[WaitingQueue, ActiveSequences, Tenants]:
        """Return the structures of a scheduler without sequences."""
        config, blocks = self.config, self._blocks
        return WaitingQueue(self._policy), ActiveSequences(config, blocks.blocks_for), Tenants(config, blocks)

    def _audit(self) -> str | None:
        """Return the first broken invariant, or None."""
        sequences, blocks, out = self._sequences, self._blocks, self._outstanding
        slots = {} if out is None else dict(zip(out.seq_ids, out.lookahead, strict=True))
        ended = {seq_id: seq for seq_id, seq in sequences.items() if seq.state is FINISHED}
        alive = [seq for seq in sequences.values() if seq.state is not FINISHED]
        if any(seq.id != seq_id for seq_id, seq in sequences.items()) or self._finished != ended:
            return f"{len(ended)} sequences have finished, {len(self._finished)} are to be drained"
        for seq in sequences.values():
            broken = seq._audit(slots.get(seq.id, 0), blocks.has_states)
            if broken is not None:
                return f"sequence {seq.id}, {seq.state.value}: {broken}"
        waiting, active, tenants = self._empty()
        for seq in alive:
            tenants.count(seq)
            if seq._is_active:
                active.add(seq)
            else:
                waiting.push(seq)
        found = {**self._waiting.summary(), **self._active.summary(), **self._tenants.summary()}
        for name, expected in {**waiting.summary(), **active.summary(), **tenants.summary()}.items():
            if found[name] != expected:
                return f"the {name} are {expected}, not {found[name]}"
        return blocks.audit([seq.kv for seq in alive if seq.kv is not None])
