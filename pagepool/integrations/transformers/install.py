"""`use` and `release`: a model's own `generate` and `generate_batch` over pages, and back."""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

from pagepool.integrations.transformers.batch import generate_batch
from pagepool.integrations.transformers.paged_cache import PagedCache
from pagepool.integrations.transformers.runner import ModelRunner

__all__ = ["release", "use"]

RUNNER = "_pagepool_runner"
HOOKED = ("forward", "generate", "generate_batch", "_prepare_cache_for_generation")


def use(
    model: Any,
    *,
    pool_bytes: int | None = None,
    num_blocks: int | None = None,
    dtype: Any = None,
    block_size: int = 16,
    max_sequences: int = 32,
    prefix_cache: bool = True,
) -> ModelRunner:
    """Lets `model.generate` and `model.generate_batch` run over pagepool's memory; returns the model's `ModelRunner`.

    A call with a cache of its own (`cache=`, `cache_implementation=`) or with `use_cache=False` runs as
    before, and so does `model(...)`. Raises as `ModelRunner`, and ValueError for a model that is in use already; then
    nothing has changed.

    Parameters
    ----------
    model
        A causal language model of transformers, on the CPU.
    pool_bytes, num_blocks, dtype, block_size, max_sequences
        As for `ModelRunner`.
    prefix_cache
        Whether prompts begin with what earlier calls have computed of them: those of `generate_batch`, and for a
        model without windows and recurrent states those of `generate`, too.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> runner = use(model, num_blocks=64)
    >>> model.generate(torch.tensor([[11, 12, 13]]), max_new_tokens=5, do_sample=False, eos_token_id=None).shape
    torch.Size([1, 8])
    >>> release(model)
    """
    if hasattr(model, RUNNER):
        raise ValueError(f"this {type(model).__name__} is in use already: release it first")
    runner = ModelRunner(
        model,
        pool_bytes=pool_bytes,
        num_blocks=num_blocks,
        dtype=dtype,
        block_size=block_size,
        max_sequences=max_sequences,
    )
    prefixes = runner.new_prefix_cache() if prefix_cache else None
    forward, generate, prepare = model.forward, model.generate, model._prepare_cache_for_generation
    calls = threading.local()  # `caches`: those that the running call of `generate` has made

    @wraps(forward)
    def paged_forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if isinstance(cache, PagedCache):
            return cache.forward(*args, **{name: value for name, value in kwargs.items() if name != "cache"})
        return forward(*args, **kwargs)

    @wraps(prepare)
    def paged_prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        is_ours = model_kwargs.get("cache") is None and generation_config.cache_implementation is None
        if is_ours and generation_config.use_cache is not False:
            cache = model_kwargs["cache"] = PagedCache(runner, prefixes)
            calls.caches.append(cache)
            if generation_config.is_assistant:  # its drafts will be taken back
                cache.activate_past_recording()
        return prepare(generation_config, model_kwargs, *args, **kwargs)

    @wraps(generate)
    def paged_generate(*args: Any, **kwargs: Any) -> Any:
        calls.caches = []
        result = None
        try:
            result = generate(*args, **kwargs)
        finally:
            for cache in calls.caches:
                if getattr(result, "cache", None) is not cache:  # it was not handed to the caller
                    cache.close()
        return result

    @wraps(model.generate_batch)
    def paged_generate_batch(*args: Any, **kwargs: Any) -> Any:
        return generate_batch(runner, prefixes, *args, **kwargs)

    model.forward = paged_forward
    model.generate_batch = paged_generate_batch
    model.generate = paged_generate
    model._prepare_cache_for_generation = paged_prepare
    vars(model)[RUNNER] = runner
    return runner


def release(model: Any) -> None:
    """Undoes `use` and frees the memory. Raises ValueError for a model that is not in use."""
    if not hasattr(model, RUNNER):
        raise ValueError(f"this {type(model).__name__} is not in use")
    runner: ModelRunner = vars(model).pop(RUNNER)
    for name in HOOKED:
        vars(model).pop(name, None)
    runner.close()
