"""Command-line arguments for the model, and the engine that is opened from them."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagepool.attention.cpu import cpu_info
from pagepool.cli.usage import UsageError, between, budget, file_name, pool_name, size_in_bytes
from pagepool.config import KV_DTYPES, SchedulerConfig
from pagepool.errors import PoolError
from pagepool.integrations.transformers.pretrained import DTYPES, ModelError, load_pretrained
from pagepool.memory.budget import MemoryBudget
from pagepool.prefix.fingerprint import weights_digest

if TYPE_CHECKING:
    from pagepool.engine import Engine

__all__ = [
    "add_model_arguments",
    "memory_of",
    "model_directory",
    "open_engine",
    "require",
    "scheduler_config",
    "summary_of",
    "weights_of",
]

MAX_SEQUENCES = 4096
MAX_BATCH_TOKENS = 1 << 20
KV_EVENTS = 1 << 16  # events that wait until they are published
MAX_THREADS = 256  # limit of `decode`
# Part of a checkout and of an unpacked sdist, but not of the wheel.
TINY_LLAMA = Path(__file__).parents[2] / "bench" / "tiny_llama"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `open_engine` reads."""
    add = parser.add_argument_group("model and memory").add_argument
    add(
        "--model",
        type=file_name,
        metavar="PATH",
        help="directory of a model in transformers' format, or a GGUF file; default in a checkout: bench/tiny_llama",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="dtype of the weights; default: as stored, but float32 for float16",
    )
    add(
        "--weights",
        choices=("int8", "int4"),
        help="quantise the linear layers when the model is loaded; default: the weights as they are",
    )
    add(
        "--kv-dtype",
        choices=(*KV_DTYPES, "int8"),  # int4 needs channel scales of the keys
        help="dtype of the pages of keys and values; default: the dtype of the weights",
    )
    add(
        "--pool-bytes",
        type=size_in_bytes,
        metavar="BYTES",
        help="size of the pool of pages, such as 512M; default: room for 2,048 tokens per sequence",
    )
    add(
        "--max-sequences",
        type=between(1, MAX_SEQUENCES),
        default=32,
        metavar="N",
        help="maximum number of sequences that run at the same time; default: 32",
    )
    add(
        "--max-batch-tokens",
        type=between(1, MAX_BATCH_TOKENS),
        default=SchedulerConfig.max_batch_tokens,
        metavar="N",
        help="maximum number of tokens of one step, of prompts and new ones; default: %(default)s",
    )
    add(
        "--max-prefill-tokens",
        type=between(1, MAX_BATCH_TOKENS),
        default=SchedulerConfig.max_prefill_tokens,
        metavar="N",
        help="maximum number of tokens of one prompt in one step; default: %(default)s",
    )
    add("--threads", type=between(1, MAX_THREADS), metavar="N", help="threads of torch and of attention; default: all")
    add(
        "--openmp",
        choices=("auto", "spin", "sleep"),
        default="auto",
        help="how idle torch threads wait: spin or sleep; auto (default) chooses by the load of the machine",
    )
    add(
        "--drafts",
        choices=("ngram",),
        help="predict tokens from earlier ones and verify several in a step, where it pays; ngram: from the request",
    )
    add("--no-prefix-cache", action="store_true", help="do not cache prefixes: compute every prompt from its beginning")
    add(
        "--store",
        type=file_name,
        metavar="DIR",
        help="keep cached prefixes in this directory: they survive restarts and can exceed the memory",
    )
    add(
        "--shared-pool",
        type=pool_name,
        metavar="NAME",
        help="share the pool of this name with other servers of the model: they find each other's prefixes",
    )
    add(
        "--memory-budget",
        type=budget,
        metavar="NAME:BYTES",
        help="limit for the --shared-pool of several models together, such as host:16G; idle pages move between them",
    )
    add(
        "--special-tokens-in-texts",
        action="store_true",
        help="let control tokens such as <|im_end|> in the texts of chat messages be control tokens",
    )
    add(
        "--store-bytes",
        type=size_in_bytes,
        metavar="BYTES",
        help="maximum size of --store for all models, such as 20G",
    )


def require(command: str, extra: str, *modules: str) -> None:
    """Raise `UsageError` if a module of an extra is not installed."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UsageError(
                f"{command} needs {module}, which is not installed ({error}): pip install 'pagepool[{extra}]'"
            ) from None


def model_directory(name: str | None) -> Path:
    """Return the path of a model. Without a name: the tiny Llama. Raises `UsageError` if that is missing."""
    if name is not None:
        return Path(name)
    if not (TINY_LLAMA / "model.safetensors").is_file():
        raise UsageError(
            "no model: give one with --model DIR. A checkout of pagepool has a tiny one in bench/tiny_llama"
        )
    return TINY_LLAMA


def open_engine(options: argparse.Namespace, command: str) -> Engine:
    """Load the model and open an engine with it. Raises `UsageError` if this fails."""
    folder = model_directory(options.model)
    require(command, "transformers", "torch", "transformers")
    if folder.is_file():
        require(command, "gguf", "gguf")
    from pagepool.engine import Engine  # imported late: other commands start faster without it

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if options.pool_bytes is not None and options.pool_bytes > memory:
        raise UsageError(f"--pool-bytes must be at most the machine's {memory} bytes, not {options.pool_bytes}")
    digest = weights_of(folder, options)
    if options.threads is not None:
        import_module("torch").set_num_threads(options.threads)
        os.environ["PAGEPOOL_NUM_THREADS"] = str(options.threads)
    try:
        model, tokenizer = load_pretrained(folder, options.dtype)
        return Engine(
            model,
            tokenizer,
            pool_bytes=options.pool_bytes,
            dtype=options.kv_dtype,
            config=scheduler_config(options),
            prefix_cache=not options.no_prefix_cache,
            prefix_events=KV_EVENTS if getattr(options, "kv_events_config", None) else 0,
            openmp=options.openmp,
            store=options.store,
            store_bytes=options.store_bytes,
            weights=options.weights,
            weights_digest=digest,
            shared_pool=options.shared_pool,
            memory_budget=None if options.memory_budget is None else MemoryBudget(*options.memory_budget),
            drafts=options.drafts,
        )
    except ModelError as error:
        raise UsageError(str(error)) from error
    except (TypeError, ValueError, PoolError, OSError) as error:
        raise UsageError(f"{folder}: {error}") from error


def scheduler_config(options: argparse.Namespace) -> SchedulerConfig:
    """Return the budgets of the scheduler. All running sequences may be in one step."""
    return SchedulerConfig(
        max_sequences=options.max_sequences,
        max_batch_sequences=options.max_sequences,
        max_batch_tokens=options.max_batch_tokens,
        max_prefill_tokens=options.max_prefill_tokens,
        policy=getattr(options, "policy", SchedulerConfig.policy),
        explain_misses=getattr(options, "show_misses", False),
    )


def weights_of(model: Path, options: argparse.Namespace) -> str | None:
    """The digest of a model's weights if a store or a session needs it, else None. Makes the directory of the store.

    The directory, or without a store one in the user's cache, also keeps the digests of unchanged files. Raises
    `UsageError` if it cannot be made or options cannot be used together.
    """
    has_session = getattr(options, "session", None) is not None
    is_shared = options.shared_pool is not None
    if options.memory_budget is not None and not is_shared:
        raise UsageError("--memory-budget needs --shared-pool")
    if options.store is None and options.store_bytes is None and not has_session and not is_shared:
        return None
    if (options.store is None) != (options.store_bytes is None):
        raise UsageError("--store and --store-bytes must be used together")
    if options.no_prefix_cache and (options.store is not None or has_session):
        raise UsageError(
            "--store and --session keep pages of the prefix cache: they cannot be used with --no-prefix-cache"
        )
    if options.store is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pagepool")
    else:
        folder = Path(options.store)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return weights_digest(model, folder / "weights.json")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def summary_of(engine: Engine, options: argparse.Namespace) -> list[str]:
    """Return the lines that a server prints at its start: model, threads and memory."""
    runner, cpu = engine.runner, cpu_info()
    model = runner.model
    sizes = (getattr(module, "num_weights", 0) for module in model.modules())  # of quantised layers
    parameters = sum(weight.numel() for weight in model.parameters()) + sum(sizes)
    dtype, quantised = str(model.dtype).rpartition(".")[2], getattr(model, "_pagepool_weights", None)
    kind = dtype if quantised is None else f"{quantised} weights, {dtype}"
    found = [f"model    {type(model).__name__} of {parameters / 1e6:,.1f}M parameters, {kind}"]
    found.append(
        f"threads  {import_module('torch').get_num_threads()} of torch, {cpu['num_threads']} of attention, {cpu['isa']}"
    )
    for pool in runner.pools:
        layout, figures = pool.layout, pool.stats()
        room = f"{figures['capacity_bytes'] / (1 << 20):,.1f} MiB: {figures['capacity']:,} blocks"
        found.append(f"pool     {room} of {layout.block_size} tokens, {layout.dtype}")
        if pool.shared is not None:
            found.append(f"shared   {pool.shared!r}: {figures['processes']} processes")
        if options.memory_budget is not None:
            name, size = options.memory_budget
            found.append(f"budget   {name!r}: {size / (1 << 20):,.1f} MiB, up to {pool.max_blocks:,} blocks")
    if runner.states is not None:
        found.append(f"states   {runner.states.stats()['capacity']:,} sequences")
    if engine.store is not None:
        kind = "" if engine.store.is_writer else ", which this process only reads"
        room = f"{engine.store.max_bytes / (1 << 20):,.1f} MiB: {engine.store.num_slots:,} blocks"
        found.append(f"store    {options.store}{kind}: {room}")
    length = "any number of" if engine.max_model_len is None else f"{engine.max_model_len:,}"
    cache = "no prefix cache" if options.no_prefix_cache else "prefix cache"
    found.append(f"context  {length} tokens, up to {options.max_sequences} sequences, {cache}")
    return found


def memory_of(engine: Engine) -> dict[str, Any]:
    """Return sizes in bytes: the peak of the pages, the capacity of the pool, and the peak of the process."""
    resource = import_module("resource")
    pool = engine.runner.pool
    peak = room = 0
    if pool is not None:
        peak, room = pool.stats()["peak"] * pool.layout.block_bytes, pool.stats()["capacity_bytes"]
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"pages_peak_bytes": peak, "pool_bytes": room, "process_peak_bytes": process}
