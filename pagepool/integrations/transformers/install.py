"""`use` and `release`: switch a model's own `generate` and `generate_batch` to pages, and back."""

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
    """Make `model.generate` and `model.generate_batch` use pagepool's memory.

    Calls that specify a cache (`cache=`, `cache_implementation=`) or `use_cache=False` run as before. Direct calls
    `model(...)` also run as before.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, on the CPU.
    pool_bytes, num_blocks, dtype, block_size, max_sequences
        As in `ModelRunner`.
    prefix_cache : bool
        Whether `generate_batch` reuses prefixes that earlier calls have computed. For models without windows and
        recurrent states, `generate` reuses them also.

    Returns
    -------
    ModelRunner
        The runner of the model.

    Raises
    ------
    ValueError
        The model is already in use, or cannot run over pages, see `ModelRunner`. Nothing has changed.
    TypeError
        `model` is not a causal language model of transformers. Nothing has changed.

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
    calls = threading.local()  # `caches`: created by the running call of `generate`

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
            if generation_config.is_assistant:  # rejected drafts will be cropped
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
                if getattr(result, "cache", None) is not cache:  # it was not returned to the caller
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
    """Undo `use` and free the memory. Raises ValueError if the model is not in use."""
    if not hasattr(model, RUNNER):
        raise ValueError(f"this {type(model).__name__} is not in use")
    runner: ModelRunner = vars(model).pop(RUNNER)
    for name in HOOKED:
        vars(model).pop(name, None)
    runner.close()
