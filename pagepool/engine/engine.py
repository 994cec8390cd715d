"""An engine: a model, a scheduler, and one stepping thread. Other threads submit prompts and get tokens."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import eq
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.config import SchedulerConfig
from pagepool.engine.drafts import KINDS, MAX_DRAFTS, Drafter, Drafts, Drawn, verify
from pagepool.engine.generation import Generation, Token
from pagepool.engine.intake import Intake, Request
from pagepool.engine.logits import Logits
from pagepool.engine.memory import check_memory, pool_tokens, present
from pagepool.engine.openmp import OpenmpWorkers
from pagepool.engine.prompt_logprobs import PromptLogprobs
from pagepool.engine.sampling import Sampler, check_logits, sampling_defaults_of
from pagepool.engine.tokenizing import stop_token_ids_of
from pagepool.errors import EngineClosed, RequestRejected
from pagepool.memory.budget import MemoryBudget
from pagepool.prefix.following import following

__all__ = ["Engine"]

logger = logging.getLogger("pagepool")

MAX_BATCH_SEQUENCES = 32
FLUSH_SECONDS = 30.0  # time for writing pages to the store when the engine is closed
EMPTY_STEP = 0.01  # seconds until the next step if no sequence could run


@dataclass(slots=True)
class _Running:
    """State of a request in the stepping thread. The reference to the generation is weak: the caller owns it."""

    generation: weakref.ref[Generation]
    sampler: Sampler
    request: Request
    request_id: int | str
    prompt: PromptLogprobs | None  # None if the request does not ask for them
    drafter: Drafter | None  # None without drafts
    has_begun: bool = False  # true after its first step


class Engine(Intake):
    """Generates text with a model over pagepool's pages. Any thread may call it.

    One thread runs all steps: schedule, run the model, sample, commit. Close the engine at the end, or use it as a
    context manager. An engine that is dropped ends after its last request, without writing pages to its store. The
    logger "pagepool" gets all failures with their traceback.

    Parameters
    ----------
    model : object
        A causal language model of transformers, in evaluation mode on the CPU; or an object with the methods of
        `pagepool.integrations.transformers.ModelRunner`. The engine then uses the memory of that object.
    tokenizer : object, optional
        The tokenizer of the model. Without one, prompts are token ids and generations have no text.
    pool_bytes, num_blocks : int, optional
        Size of the pool. Give at most one of them. The default is the default of `ModelRunner`.
    dtype : str, optional
        dtype of the pages. Default: the dtype of the model.
    config : SchedulerConfig, optional
        Default: `SchedulerConfig` with up to 32 sequences per step.
    prefix_cache : bool
        Reuse pages and recurrent states of earlier prompts.
    prefix_events : int
        Maximum number of undrained events of the prefix cache, for a `Router`. 0: no events.
    pack_weights : bool or str
        As for `ModelRunner`. By default the engine packs the weights of linear layers of a model in bfloat16, where the
        CPU has instructions for it. The model then has no weights outside of the engine until `close`.
    openmp : str
        How torch's worker threads wait between two loops, if torch uses GNU's OpenMP. "spin" gives the shortest steps
        if no other process needs the CPUs. "sleep" leaves the CPUs to other processes. "auto" spins, and sleeps for 4
        to 64 seconds whenever the engine's thread had to wait for a CPU.
    store : path, optional
        Directory of a `PrefixStore`: prefixes survive restarts and reboots. `close` writes all cached pages and all
        kept recurrent states to it.
    store_bytes : int, optional
        Limit in bytes of the store's directory, over all models. Required with `store`.
    weights : {"int8", "int4"}, optional
        Quantise the linear layers of the model and free their own weights, as for `ModelRunner`. Default: the weights
        of the model as they are.
    weights_digest : str, optional
        A digest of the weights, for the store or the shared pool, as `weights_digest` returns it. Default: the engine
        reads all weights.
    shared_pool : str or int, optional
        The name or memfd of a pool that engines of one model share, see `KvCachePool.from_layout`. Each engine finds
        the prefixes of all. It needs the same number of blocks in each engine.
    memory_budget : MemoryBudget, optional
        A limit in bytes for the shared pools of several models, for a `shared_pool` with a name. The pool grows and
        shrinks within it, up to `num_blocks` or `pool_bytes`; by default it may have all of it.
    drafts : {"ngram"}, optional
        Speculative decoding: "ngram" predicts the next tokens of a request from its own tokens and from cached texts
        of the same salt, and the model verifies several in one step. The generated tokens are the same. The engine
        measures how often predictions are right and the cost of steps with more tokens, and drafts only where this
        raises the tokens per second. At most `config.lookahead` drafts per sequence and step, 15 by default. With
        recurrent states each draft needs a state that no sequence uses, of `config.max_sequences`.

    Attributes
    ----------
    runner : ModelRunner
        Runs the model and owns its pools.
    scheduler : Scheduler
        Schedules the steps.
    prefix_cache : PrefixCache or None
        The prefix cache.
    store : PrefixStore or None
        The store of prefixes on disk.
    tokenizer : object or None
        The tokenizer that was given.
    encoder : Encoder
        Turns prompts into token ids.
    max_model_len : int or None
        Maximum number of tokens of prompt and output that the model accepts.
    sampling_defaults : dict
        The model's own defaults of `SamplingParams`, for a server. `submit` does not read them.
    is_accepting : bool
        False after `drain`, `close` or a failure of the engine.
    failure : BaseException or None
        The exception that ended the stepping thread.

    Raises
    ------
    ImportError
        If torch or transformers is missing.
    OSError
        If the directory of the store cannot be made.
    ValueError
        If the model cannot run over pages, or cannot have a store, or `store` lacks `store_bytes` or a prefix cache.

    Examples
    --------
    >>> with Engine(model, tokenizer, pool_bytes=1 << 30) as engine:  # doctest: +SKIP
    ...     for token in engine.submit("def main():", SamplingParams(max_new_tokens=64)):
    ...         print(token.text, end="", flush=True)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        pool_bytes: int | None = None,
        num_blocks: int | None = None,
        dtype: Any = None,
        config: SchedulerConfig | None = None,
        prefix_cache: bool = True,
        prefix_events: int = 0,
        pack_weights: bool | str = "auto",
        openmp: str = "auto",
        store: str | Path | None = None,
        store_bytes: int | None = None,
        weights: str | None = None,
        weights_digest: str | None = None,
        shared_pool: str | int | None = None,
        memory_budget: MemoryBudget | None = None,
        drafts: str | None = None,
    ) -> None:
        if drafts is not None and drafts not in KINDS:
            raise ValueError(f"drafts must be {' or '.join(map(repr, KINDS))} or None, not {drafts!r}")
        for name, value, kind in (("config", config, SchedulerConfig), ("memory_budget", memory_budget, MemoryBudget)):
            if not isinstance(value, kind | None):
                raise wrong(name, f"a {kind.__name__} or None", value)
        if not isinstance(prefix_cache, bool):
            raise wrong("prefix_cache", "a bool", prefix_cache)
        if isinstance(tokenizer, str | Path):
            raise wrong("tokenizer", "a tokenizer of transformers or None", tokenizer)
        if (store is None) != (store_bytes is None) or (store is not None and not prefix_cache):
            raise ValueError(f"a store needs store_bytes, not {store_bytes}, and a prefix cache; store is {store!r}")
        if memory_budget is not None and shared_pool is None:
            raise ValueError(f"memory_budget {memory_budget.name!r} needs a shared_pool with a name")
        if num_blocks is not None:
            integer("num_blocks", num_blocks, 1)
        config = SchedulerConfig(max_batch_sequences=MAX_BATCH_SEQUENCES) if config is None else config
        if drafts is None and config.lookahead:
            raise ValueError(f"a lookahead of {config.lookahead} needs drafts: give drafts='ngram'")
        if drafts is not None and not config.lookahead:
            config = replace(config, lookahead=MAX_DRAFTS)
        self.runner = model
        if hasattr(model, "run"):
            of_runner = {"pool_bytes": pool_bytes, "num_blocks": num_blocks, "dtype": dtype, "weights": weights}
            of_runner |= {"shared_pool": shared_pool, "memory_budget": memory_budget}
            of_runner["pack_weights"] = None if pack_weights == "auto" else pack_weights
            for name, value in of_runner.items():
                if value is not None:
                    raise ValueError(f"{name} {value!r} is for a model of transformers: give it to the runner")
        else:
            from pagepool.integrations.transformers import ModelRunner

            options: dict[str, Any] = {"max_sequences": config.max_sequences, "pack_weights": pack_weights}
            if config.block_size is not None:
                options["block_size"] = config.block_size
            if shared_pool is not None:
                options |= {"shared": shared_pool, "weights_digest": weights_digest, "budget": memory_budget}
            if weights is not None:
                options["weights"] = weights
            self.runner = ModelRunner(model, pool_bytes=pool_bytes, num_blocks=num_blocks, dtype=dtype, **options)
        self.store = None
        try:
            self._open(tokenizer, config, prefix_cache, prefix_events, store, store_bytes, weights_digest, openmp)
        except BaseException:
            if self.store is not None:
                self.store.close()
            if self.runner is not model:
                self.runner.close()
            raise
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # the interpreter must not exit while the thread runs the model
        self._thread.start()

    def _open(
        self,
        tokenizer: Any,
        config: SchedulerConfig,
        prefix_cache: bool,
        prefix_events: int,
        store: str | Path | None,
        store_bytes: int | None,
        weights_digest: str | None,
        openmp: str,
    ) -> None:
        """Make all that needs the runner. If it raises, `__init__` closes what was opened."""
        super().__init__(
            tokenizer,
            self.runner.vocab_size,
            stop_token_ids_of(self.runner.model, tokenizer),
            self.runner.max_model_len,
            pool_tokens(self.runner),
            is_exact=self.runner.groups is None,
            sampling_defaults=sampling_defaults_of(self.runner.model),
        )
        self.store = None if store is None else self.runner.open_store(store, store_bytes, weights_digest)
        options = {} if self.store is None else {"store": self.store}
        self._drafts = None
        if config.lookahead:
            if not getattr(self.runner, "takes_drafts", self.runner.states is None):
                name = type(self.runner.model or self.runner).__name__
                raise ValueError(f"drafts cannot be used with {name}: its recurrent layers cannot drop rejected drafts")
            self._drafts = Drafts(config.lookahead)
        self.prefix_cache = self.runner.new_prefix_cache(prefix_events, **options) if prefix_cache else None
        self.scheduler = self.runner.scheduler(config, self.prefix_cache)
        self._requests: dict[int, _Running] = {}
        self._changed = Condition()  # guards the requests, `is_accepting`, `failure` and the next two fields
        self._is_closing, self._is_idle = False, True
        self._resets_wanted = self._resets_done = 0  # calls of `reset_prefix_cache`
        self._stepping = Lock()  # held by the stepping thread during a step
        self._step_began: float | None = None
        self._seconds = {"step_seconds": 0.0, "model_seconds": 0.0}
        self._openmp = OpenmpWorkers(openmp)  # must come after the trial of the model
        self.grammars.giving_way = self._openmp.giving_way
        self._pid = os.getpid()
        self._wake: SimpleQueue[Engine | None] = SimpleQueue()  # `put` can be called in a finalizer
        resources = [self._openmp] if self.store is None else [self._openmp, self.store]
        self._thread = Thread(target=_serve, args=(self._wake, resources), name="pagepool-engine", daemon=True)

    @classmethod
    def from_gguf(cls, path: str | Path, dtype: str = "auto", **options: Any) -> Engine:
        """Return an engine for the model and tokenizer of a GGUF file. Needs the extras `transformers` and `gguf`.

        Parameters
        ----------
        path : path
            The file. Its quantised weights stay as they are.
        dtype : str
            Dtype of activations and other weights, as for `load_pretrained`.
        **options
            Arguments of `Engine`.

        Raises
        ------
        ValueError
            The file is damaged or not supported (`ModelError`), or `Engine` raises it.

        Examples
        --------
        >>> with Engine.from_gguf("SmolLM2-135M-Instruct.Q4_1.gguf") as engine:  # doctest: +SKIP
        ...     print(engine.submit("The capital of France is", SamplingParams(max_new_tokens=8)).result().text)
        """
        from pagepool.integrations.transformers.pretrained import load_pretrained

        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file")
        model, tokenizer = load_pretrained(path, dtype)
        return cls(model, tokenizer, **options)

    def _submit(self, request: Request, num_generated: int = 0, **options: Any) -> Generation:
        """Queue a checked request.

        A request can continue an earlier run. Then the last `num_generated` tokens of its prompt are the output of that
        run, and the request's random generator continues where that run stopped.
        """
        integer("num_generated", num_generated, 0, len(request.prompt))
        drafter = None if self._drafts is None else self._drafts.drafter(request.prompt, self._following(options))
        if os.getpid() != self._pid:  # before the lock, which a thread of the parent may have held
            raise EngineClosed(f"the engine runs in process {self._pid}, and this is a child of it: make a new engine")
        with self._changed:
            if not self.is_accepting:
                raise EngineClosed("the engine accepts no more requests") from self.failure
            params, prompt = request.params, None
            limits = {"max_new_tokens": params.max_new_tokens, "stop_token_ids": params.stop_token_ids}
            if params.prompt_logprobs is not None:
                prompt = PromptLogprobs(request.prompt, params.prompt_logprobs)
                options["reads_cache"] = False
            if params.max_new_tokens == 0:  # it runs until its first token, which the engine drops
                limits = {"max_new_tokens": 1}
            try:
                seq_id = self.scheduler.submit(request.prompt, **limits, **options)
            except ValueError as error:
                raise RequestRejected(str(error)) from error
            except RuntimeError as error:  # the scheduler has failed since the check of `is_accepting`
                raise EngineClosed(str(error)) from error
            found = None if prompt is None else prompt.found
            generation = Generation(request.prompt, partial(self.scheduler.cancel, seq_id), found)
            # The callback runs when the caller drops the generation. `Scheduler.cancel` may be called in a finalizer.
            reference = weakref.ref(generation, lambda _: self.scheduler.cancel(seq_id))
            name = seq_id if options.get("request_id") is None else options["request_id"]
            output = request.prompt[len(request.prompt) - num_generated :]
            matcher = None if request.grammar is None else request.grammar.matcher(output)
            sampler = Sampler(params, num_generated, request.prompt, matcher)
            self._requests[seq_id] = _Running(reference, sampler, request, name, prompt, drafter)
            self._counts["prompt_tokens"] += len(request.prompt)
            if self._is_idle:
                self._is_idle = False
                self._wake.put(self)
        return generation

    def stats(self) -> dict[str, Any]:
        """Return the counters of the engine.

        Returns
        -------
        dict
            `requests` is the number of requests that run or wait. `ended` counts ended requests by `finish_reason`.
            `prompt_tokens`, `cached_tokens` and `generated_tokens` count tokens. `step_seconds` and `model_seconds` are
            the seconds of all steps and of the model within them. `scheduler` holds the counters of the scheduler.
            With drafts, `drafted_tokens` and `accepted_tokens` count the drafts that the model verified, and those that
            became output.
        """
        names = () if self._drafts is None else ("drafted_tokens", "accepted_tokens")
        return {**self._stats(*names), **self._seconds, "scheduler": self.scheduler.stats()}

    def observed(self) -> dict[str, Any]:
        """Return the arguments of `PagepoolCollector` for this engine."""
        pools, caches = {"kv": self.runner.pool, "states": self.runner.states}, {"prefix": self.prefix_cache}
        return {"scheduler": self.scheduler, "pools": present(pools), "caches": present(caches)}

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    @property
    def seconds_in_step(self) -> float:
        """Seconds since the current step began, 0.0 between steps. A value far above a step's usual time: it hangs."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    def check(self) -> None:
        """Check the invariants of the scheduler, the prefix cache and the pools between two steps.

        If no request is left, the prefix cache must own every block in use, and no state may be in use.

        Raises
        ------
        PoolError
            If an invariant is broken. The message names it.
        """
        with self._stepping, self._changed:
            if not self._is_closing and self.failure is None:  # otherwise the scheduler is closed, or will be soon
                self.scheduler.check()
            check_memory(self.runner, self.prefix_cache, is_idle=not self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, including those of the store, between two steps. Waits until this is done.

        Sequences that run go on; what they have computed is not cached.

        Raises
        ------
        EngineClosed
            If the engine is closed or has failed.
        """
        with self._changed:
            self._resets_wanted += 1
            number = self._resets_wanted
            self._wake.put(self)
            self._changed.wait_for(lambda: self._resets_done >= number or self._is_closing or self.failure is not None)
            if self._resets_done < number:
                raise EngineClosed("the engine has ended: it has no prefix cache to reset") from self.failure

    @property
    def _wants_reset(self) -> bool:
        return self._resets_done < self._resets_wanted

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until all requests have ended.

        Parameters
        ----------
        timeout : float, optional
            Maximum time to wait, in seconds. Default: no limit.

        Returns
        -------
        bool
            False if requests are left after `timeout` seconds.
        """
        with self._changed:
            self.is_accepting = False
            return self._changed.wait_for(lambda: not self._requests, timeout)

    def close(self) -> None:
        """End all requests with the reason "abort", stop the thread and free the memory. May be called twice.

        Does nothing in a child process after a fork: the engine belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self.is_accepting, self._is_closing = False, True
            self._changed.notify_all()
            self._wake.put(self)
        self._thread.join()
        atexit.unregister(self._at_exit)
        self.grammars.close()
        self._openmp.close()
        if self.store is not None:
            if self.failure is None and self.prefix_cache is not None:
                self.prefix_cache.flush(FLUSH_SECONDS)
            self.store.close()
        self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
            self._wake.put(None)

    # The stepping thread.

    def _run(self) -> bool:
        """Run steps until there is no work. Return False after `close`."""
        if self.failure is not None:
            return not self._is_closing
        failure: BaseException | None = None
        try:
            while True:
                with self._changed:
                    if self._is_closing:
                        break
                    if self._wants_reset and self.prefix_cache is not None:
                        self.prefix_cache.reset_prefix_cache()
                    self._resets_done = self._resets_wanted
                    self._changed.notify_all()
                    self._is_idle = not self.scheduler.has_work
                    if self._is_idle:
                        return True
                with self._stepping:
                    self._step()
                    self._step_began = None
        except BaseException as error:
            self._step_began = None
            failure = error
            logger.critical("the engine's stepping thread failed: it accepts no more requests", exc_info=error)
        with self._changed:
            self.is_accepting, self.failure = False, failure
            self._changed.notify_all()
        try:
            with self._stepping:
                self.scheduler.close()
        finally:
            for seq_id in list(self._requests):
                self._end(seq_id, "abort" if failure is None else "error", failure)
        return failure is not None

    def _step(self) -> None:
        self._step_began = began = perf_counter()
        drafts = self._choose_drafts()
        batch = self.scheduler.schedule({seq_id: len(tokens) for seq_id, tokens in drafts.items()})
        with self._changed:  # waits for `submit`, which queues a request before it adds it to `_requests`
            requests = [self._requests[seq_id] for seq_id in batch.seq_ids]
        self._end_finished()  # requests that were cancelled
        if batch.is_empty:
            sleep(EMPTY_STEP if self.scheduler.has_work else 0.0)
            return
        self._note_begun(requests)
        slots = zip(batch.seq_ids, batch.lookahead, strict=True)
        fed = [drafts[seq_id][:count] if count else [] for seq_id, count in slots]
        for running in requests:
            running.sampler.begin()
        model_began, cpu_began = perf_counter(), thread_time()
        try:
            rows, ends = self._run_model(batch, requests, fed)
        except Exception as error:
            names = ", ".join(str(request.request_id) for request in requests)
            logger.error("the model failed in a step of the requests %s", names, exc_info=error)
            self.scheduler.give_up(batch)
            for seq_id in batch.seq_ids:
                self._fail(seq_id, error)
            return
        model_seconds = perf_counter() - model_began
        self._openmp.note_step(model_seconds, thread_time() - cpu_began)
        self._seconds["model_seconds"] += model_seconds
        if self._drafts is not None and batch.num_decodes == len(batch):
            self._drafts.costs.note(batch.total_tokens, model_seconds)
        results: list[Any] = [None] * len(batch)
        found: list[tuple[int, _Running, list[Drawn], list[int]]] = []
        largest = rows.largest() if any(request.sampler.takes_largest for request in requests) else []
        for place, (seq_id, request) in enumerate(zip(batch.seq_ids, requests, strict=True)):
            begin, end = ends[place : place + 2]
            try:
                if request.prompt is not None:
                    request.prompt.add(rows[begin:end])
                if not batch.wants_token[place] or request.request.params.max_new_tokens == 0:
                    check_logits(rows[end - 1], rows[end - 1].max())
                    results[place] = 0 if batch.wants_token[place] else None
                    continue
                first, stops = end - 1 - len(fed[place]), request.request.params.stop_token_ids
                drawn = verify(request.sampler, rows, largest, first, fed[place], stops)
                results[place] = [token for token, _ in drawn] if fed[place] else drawn[0][0]
                found.append((seq_id, request, drawn, fed[place]))
            except RequestRejected as error:  # the model has not failed
                self._fail(seq_id, error)
            except Exception as error:
                logger.error("sampling failed for the request %s", request.request_id, exc_info=error)
                self._fail(seq_id, error, is_wrong=not rows.is_right(slice(begin, end)))
        self.scheduler.commit(batch, results)
        for piece in found:
            try:
                self._deliver(*piece)
            except Exception as error:
                logger.error("the tokenizer failed for the request %s", piece[1].request_id, exc_info=error)
                self._fail(piece[0], error)
        self._end_finished()
        self._seconds["step_seconds"] += perf_counter() - began

    def _following(self, options: dict[str, Any]) -> Any:
        """Return a function for a `Drafter`: the tokens that followed some tokens in a cached text of the same salt."""
        if self.prefix_cache is None:
            return None
        cache, salt = self.prefix_cache, options.get("cache_salt")
        keys = (
            (0,) if len(self.runner.groups or ()) > 1 else ()
        )  # as the scheduler caches the blocks of the first group
        return lambda tokens, most: following(cache, tokens, most, cache_salt=salt, extra_keys=keys).tolist()

    def _choose_drafts(self) -> dict[int, list[int]]:
        """Return the drafts of the next step, by sequence id."""
        if self._drafts is None:
            return {}
        with self._changed:
            found = {seq_id: running.drafter for seq_id, running in self._requests.items()}
        known = {seq_id: one for seq_id, one in found.items() if one is not None and one.num_new}
        states = self.runner.states  # each draft needs one
        return self._drafts.choose(known) if states is None else self._drafts.choose(known, states.free_count)

    def _run_model(self, batch: Any, requests: list[_Running], drafts: list[list[int]]) -> tuple[Logits, list[int]]:
        """Run the model on a batch.

        Parameters
        ----------
        batch : ScheduledBatch
            The batch.
        requests : list of _Running
            Its requests.
        drafts : list of list of int
            The drafts of each sequence.

        Returns
        -------
        rows : Logits
            Rows of all sequences, one sequence after the other. A sequence has a row for its last token, one for
            each draft, and one for each prompt token with requested log probabilities. The row of a chunk shows whether
            its pages are right.
        ends : list of int
            The rows of sequence i are `rows[ends[i]:ends[i + 1]]`.
        """
        tokens = [[*row, *added] if added else row for row, added in zip(batch.tokens, drafts, strict=True)]
        keep = [1 + len(added) for added in drafts]
        for place, running in enumerate(requests):
            if running.prompt is not None:
                fed = self.scheduler.get_sequence(batch.seq_ids[place]).fed
                keep[place] = max(keep[place], running.prompt.num_wanted(fed))
        if hasattr(self.runner, "logits"):
            logits = self.runner.logits(tokens, batch.states, keep)
        elif keep == batch.wants_token:
            logits = self.runner.run(batch)
        else:
            logits = self.runner.forward(tokens, batch.states, keep)
        return Logits(np.asarray(logits)), [0, *accumulate(keep)]

    def _note_begun(self, requests: list[_Running]) -> None:
        """Set `scheduled_at` of the generations in their first step."""
        for request in requests:
            if not request.has_begun:
                request.has_begun = True
                generation = request.generation()
                if generation is not None:
                    generation.scheduled_at = monotonic()

    def _deliver(self, seq_id: int, running: _Running, drawn: list[Drawn], drafts: list[int]) -> None:
        """Pass committed tokens to their generation. Ends the request at a stop string."""
        sequence, generation = self.scheduler.get_sequence(seq_id), running.generation()
        accepted = sum(map(eq, drafts, [token for token, _ in drawn]))
        self._counts["drafted_tokens"] += len(drafts)
        self._counts["accepted_tokens"] += accepted
        if generation is not None:  # before the tokens: who reads the last one reads the counts, too
            generation.num_accepted += accepted
            generation.num_rejected += len(drafts) - accepted
        for place, (token, logprobs) in enumerate(drawn, 1):
            text, reason = running.request.text_of(token, sequence.finish_reason if place == len(drawn) else None)
            if reason is not None and sequence.finish_reason is None:
                self.scheduler.finish_sequence(seq_id)
            if generation is not None:
                generation._put(Token(token, text, *logprobs), sequence.num_cached, sequence._miss)
            if running.drafter is not None:
                running.drafter.add(token)
            self._counts["generated_tokens"] += 1
            if reason is not None:  # at a stop string the later tokens are dropped
                dropped = max(0, accepted - place)
                self._counts["accepted_tokens"] -= dropped
                if generation is not None:
                    generation.num_accepted -= dropped
                    generation.num_rejected += dropped
                break
        if len(sequence.output_tokens) == 1:
            self._counts["cached_tokens"] += sequence.num_cached

    def _end_finished(self) -> None:
        for sequence in self.scheduler.drain_finished():
            stopped = self._requests[sequence.id].request.detokenizer.stopped
            self._end(sequence.id, "stop" if stopped else sequence.finish_reason)

    def _fail(self, seq_id: int, error: Exception, is_wrong: bool = False) -> None:
        """End a request. If the model returned NaN, pages that it wrote or read may have NaN: no request finds them."""
        self.scheduler.remove_sequence(seq_id, discard=is_wrong)
        self._end(seq_id, "error", error)

    def _end(self, seq_id: int, reason: str, error: BaseException | None = None) -> None:
        with self._changed:
            ended = self._requests.pop(seq_id)
            self._counts[reason] += 1
            self._changed.notify_all()
        if (generation := ended.generation()) is not None:
            generation._end(reason, error, ended.request.detokenizer.stop_string)


def _serve(wake: SimpleQueue[Engine | None], resources: Sequence[Any]) -> None:
    """Run the stepping thread of an engine. It refers to the engine only while there is work.

    An engine that was dropped wakes it with None.
    """
    while (engine := wake.get()) is not None:
        is_open = engine._run()
        del engine
        if not is_open:
            return
    for resource in resources:
        resource.close()


def _close(engine: weakref.ref[Engine]) -> None:
    """Close an engine at the end of the interpreter."""
    found = engine()
    if found is not None:
        found.close()
