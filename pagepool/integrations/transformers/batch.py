"""`generate_batch` over pages: continuous batching by pagepool's scheduler, with the interface of transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from pagepool.config import SchedulerConfig
from pagepool.integrations.transformers.runner import ModelRunner
from pagepool.prefix.cache import PrefixCache
from pagepool.scheduling.scheduler import Scheduler

__all__ = ["generate_batch"]

BATCH_TOKENS = 512  # default limit of tokens per step
# Unsupported fields of a generation config, with the values that leave the feature off.
UNSUPPORTED = {"num_beams": (None, 1), "assistant_early_exit": (None,), "prompt_lookup_num_tokens": (None,)}


class Batch:
    """The requests of one call of `generate_batch`, and their outputs."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, config: Any, record_timestamps: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._config = config
        self._record_timestamps = record_timestamps
        self._processors: dict[int, Any] = {}
        self._stops = stop_tokens(config)
        self.outputs: dict[str, GenerationOutput] = {}
        self._running: dict[int, GenerationOutput] = {}

    def add(self, request_id: str, prompt: list[int], max_new_tokens: int) -> None:
        """Queue a request. If it cannot be served, its output has the status FAILED and the reason in `error`."""
        output = GenerationOutput(request_id, prompt, timestamps=[] if self._record_timestamps else None)
        self.outputs[request_id] = output
        limit = self._runner.length_limit
        try:
            if limit is not None and len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"asked for {len(prompt)} and {max_new_tokens} tokens, and the model takes {limit} over pages"
                )
            number = self._scheduler.add_request(
                prompt, max_new_tokens=max_new_tokens, stop_token_ids=self._stops, request_id=request_id
            )
        except (TypeError, ValueError) as error:
            output.error, output.status = str(error), RequestStatus.FAILED
            return
        self._running[number] = output
        self._processors[number] = self._runner.model._get_logits_processor(
            self._config, input_ids_seq_length=len(prompt), device="cpu"
        )

    def step(self) -> int:
        """Run one step of the scheduler. Return the number of requests that have ended."""
        batch = self._scheduler.schedule()
        now = time.perf_counter()
        for number in batch.seq_ids:
            output = self._running[number]
            if output.status is RequestStatus.PENDING:
                output.status, output.lifespan = RequestStatus.PREFILLING, (now, -1)
        logits = self._runner.forward(batch.tokens, batch.states, [1] * len(batch))
        are_right = logits.amax(-1).isfinite().tolist()
        wants = [is_right and wants for is_right, wants in zip(are_right, batch.wants_token, strict=True)]
        wanted = list(compress(batch.seq_ids, wants))
        chosen = iter(self._choose(wanted, logits[torch.tensor(wants)]))
        tokens = [next(chosen) if wants_token else None for wants_token in wants]
        for number, is_right in zip(batch.seq_ids, are_right, strict=True):
            if not is_right:  # before `commit`, so that none of the pages of this step is cached
                self._scheduler.remove_sequence(number, discard=True)
                output = self._running.pop(number)
                output.error, output.status = "a logit is NaN or infinite: the model has failed", RequestStatus.FAILED
        self._scheduler.commit(batch, tokens)
        now = time.perf_counter()
        for number in wanted:
            if self._running[number].timestamps is not None:
                self._running[number].timestamps.append(now)
        ended = self._scheduler.drain_finished()
        for sequence in ended:
            output = self._running.pop(sequence.id)
            output.generated_tokens, output.status = sequence.output_tokens, RequestStatus.FINISHED
            output.lifespan = (output.lifespan[0], now)
        return len(ended) + sum(not is_right for is_right in are_right)

    def _choose(self, numbers: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Sample the next token of each request according to the generation config."""
        scores = []
        for number, row in zip(numbers, logits, strict=True):
            processors = self._processors[number]
            if processors:
                sequence = self._scheduler.get_sequence(number)
                assert sequence is not None
                tokens = torch.tensor([sequence.all_tokens])
                row = processors(tokens, row[None])[0]
            scores.append(row)
        if not scores:
            return []
        if self._config.do_sample:
            chosen = torch.multinomial(torch.stack(scores).softmax(-1), 1)[:, 0]
        else:
            chosen = torch.stack(scores).argmax(-1)
        return chosen.tolist()  # type: ignore[no-any-return]


def stop_tokens(config: Any) -> list[int]:
    """Return the stop tokens of a generation config, without -1, which means that the model has no stop token."""
    eos = config.eos_token_id
    tokens = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return [token for token in tokens if token >= 0]


def generate_batch(
    runner: ModelRunner,
    prefix_cache: PrefixCache | None,
    inputs: Sequence[Sequence[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    max_new_tokens: int | None = None,
) -> dict[str, GenerationOutput]:
    """Generate outputs for many prompts with continuous batching, as `generate_batch` of transformers.

    Parameters
    ----------
    runner : ModelRunner
        The runner of the model.
    prefix_cache : PrefixCache or None
        A prefix cache over the runner's pool.
    inputs : sequence of sequence of int
        Token ids of each prompt.
    generation_config : GenerationConfig or None
        Sampling parameters and number of tokens. None: the model's own config. Beam search and drafts are not
        supported.
    continuous_batching_config : ContinuousBatchingConfig or None
        Only `max_batch_tokens` and `max_requests_per_batch` are used. The runner defines the memory.
    record_timestamps : bool
        Whether outputs have the time of each token.
    progress_bar : bool
        Whether to show a progress bar.
    persistent_manager, warmup : bool
        Ignored. They exist for compatibility with transformers.
    max_new_tokens : int or None
        Replaces `max_new_tokens` of the config.

    Returns
    -------
    dict of str to GenerationOutput
        Outputs by request id, in the order of the prompts. A request that cannot be served has its `error` set, and all
        other requests are served.

    Raises
    ------
    ValueError
        The config asks for beam search, drafts or log probabilities.
    """
    config, _ = runner.model._prepare_generation_config(generation_config)
    for name, plain in UNSUPPORTED.items():
        if getattr(config, name, None) not in plain:
            raise ValueError(f"generate_batch takes no {name}, which is {getattr(config, name)}: use generate")
    if getattr(continuous_batching_config, "return_logprobs", False):
        raise ValueError("generate_batch over pages returns no log probabilities: return_logprobs is True")
    runner.model._prepare_special_tokens(config, True, device="cpu")
    count = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    tokens = getattr(continuous_batching_config, "max_batch_tokens", None) or max(BATCH_TOKENS, runner.max_sequences)
    rows = getattr(continuous_batching_config, "max_requests_per_batch", None) or runner.max_sequences
    rows = min(rows, runner.max_sequences, tokens)
    budgets = SchedulerConfig(
        block_size=runner.block_size,
        max_sequences=rows,
        max_batch_sequences=rows,
        max_batch_tokens=tokens,
        max_prefill_tokens=tokens,
    )
    scheduler = runner.scheduler(budgets, prefix_cache)
    with torch.inference_mode():
        batch = Batch(runner, scheduler, config, record_timestamps)
        for place, prompt in enumerate(inputs):
            length = config.max_length - len(prompt) if count is None else count
            ids = [f"req_{place}", *(f"req_{place}__child#{child}" for child in range(config.num_return_sequences - 1))]
            for request_id in ids:
                batch.add(request_id, list(prompt), length)
        try:
            with tqdm(total=len(batch.outputs), disable=not progress_bar, unit="request") as bar:
                while scheduler.has_work:
                    bar.update(batch.step())
        finally:
            scheduler.close()
    return batch.outputs
