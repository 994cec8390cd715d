"""A KV connector for vLLM on CPUs: pages in a `PageTier`, which several engines of a host share.

The connector of the scheduler finds pages and holds them. The connector of the worker copies pages between the tier and
the blocks of vLLM, in the step that computes with them. docs/guide/vllm.md has the command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pagepool.errors import PoolError
from pagepool.integrations.vllm_model import digest_of_model
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_tier import PageTier, TierMatch

__all__ = ["PagepoolConnector"]

OPTIONS = {"name", "bytes", "store", "store_bytes", "weights"}
LAYOUT = "LBHNC"  # each layer has a region of its own, and each block is contiguous in it
NULL_BLOCK = 0  # vLLM's block for a state without memory: such a copy is not made
FLUSH_SECONDS = 10.0  # how long the end of an engine may wait for the store

Rows = list[NDArray[np.uint8]]  # the blocks of each layer as bytes, (num_blocks, bytes of a block)


@dataclass
class BlockCopy:
    """Pages of a prompt and the blocks of vLLM that they are copied to or from: the last pages of the prompt.

    A hybrid model has `state_ids` too: the blocks with the states after its last token, one for each group of states.
    """

    request_id: str
    tokens: NDArray[np.int32]
    cache_salt: str | None
    block_ids: list[int]
    state_ids: list[int] = field(default_factory=list)


@dataclass
class _Copies(KVConnectorMetadata):
    """The copies of a step: the worker loads before the model runs, and saves after it."""

    loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)


class _Pages(Sequence[Rows]):
    """The pages in blocks of vLLM, each as its pieces of all layers."""

    def __init__(self, rows: Rows, block_ids: list[int]) -> None:
        self._rows, self._block_ids = rows, block_ids

    def __len__(self) -> int:
        return len(self._block_ids)

    @overload
    def __getitem__(self, place: int) -> Rows: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Rows]: ...
    def __getitem__(self, place: int | slice) -> Rows | Sequence[Rows]:
        if isinstance(place, slice):
            return _Pages(self._rows, self._block_ids[place])
        block = self._block_ids[place]
        return [row[block] for row in self._rows]


class PagepoolConnector(KVConnectorBase_V1):
    """Keeps the pages of full blocks in a `PageTier`, and loads the pages of prompts that begin with the same tokens.

    Every token is compared. A page is found only with equal weights, parameters, version of vLLM and layout of the
    pages. A tier that is full, a disk that fails and a process that is killed cost lines in the log "pagepool", and no
    request. A page that cannot be loaded is computed.

    Requests with images, adapters or embeddings of the prompt are computed without the tier.

    Parameters
    ----------
    vllm_config, role, kv_cache_config
        From vLLM. `kv_connector_extra_config` has `name` and `bytes` of the tier, optional `store` and `store_bytes`
        as in `PageTier`, and optional `weights`, which identifies the weights of a model that is not a directory.
        Sizes are numbers, or texts such as "8G".

    Raises
    ------
    ValueError
        An unknown option, or a model or parameter of vLLM that the connector does not support. The message names it.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse(type(self).__name__, vllm_config, kv_cache_config, self._unsupported_groups(kv_cache_config))
        self._kv_transfer_config.kv_load_failure_policy = "recompute"  # vLLM's default is to fail the request
        options = self._kv_transfer_config.kv_connector_extra_config
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._tier = _open_tier(vllm_config, kv_cache_config, options, is_scheduler)
        self._size = self._tier.block_size
        # Used by the scheduler:
        self._requests: dict[str, Any] = {}  # requests that use the tier
        self._matches: dict[str, tuple[Future[TierMatch], int]] = {}  # of waiting requests, with vLLM's own blocks
        self._num_saved: dict[str, int] = {}  # blocks of a request that were loaded or handed to `put`
        self._loads: list[BlockCopy] = []
        self._held: list[TierMatch] = []  # matches that the next step reads
        self._read: list[TierMatch] = []  # matches that the last step has read
        # Used by the worker:
        self._rows: Rows = []
        self._failed: set[int] = set()
        self._error: BaseException | None = None  # that the caller of the step handles
        self._is_interrupted = False  # vLLM takes blocks as computed that are not

    @property
    def requires_kv_delivery(self) -> bool:
        """False: pages that are not saved are computed again."""
        return False

    # The scheduler.

    def on_new_request(self, request: Any) -> None:
        """Note a request that the tier can serve."""
        is_text = request.prompt_token_ids is not None and request.prompt_embeds is None and not request.mm_features
        if is_text and request.lora_request is None and not request.resumable:
            self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the computed ones the tier has, and False: the step loads them.

        Returns None while a thread reads pages from the store. vLLM runs other requests and asks again.
        """
        if request.request_id not in self._requests or request.skip_reading_prefix_cache:
            return 0, False
        match, _ = self._matches.pop(request.request_id, (None, 0))
        if match is None:
            most = (request.num_tokens - 1) // self._size  # vLLM must compute one token
            match = self._tier.submit_match(self._tokens(request, most), cache_salt=request.cache_salt)
        num_found = match.result().num_tokens if match.done() else None
        if num_found is not None and num_found <= num_computed_tokens:
            match.result().close()
            return 0, False
        self._matches[request.request_id] = match, num_computed_tokens // self._size
        return None if num_found is None else num_found - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of a request that vLLM has found blocks for."""
        match, first = self._matches.pop(request.request_id, (None, 0))
        if match is None:
            return
        found = match.result()  # vLLM knows the number of its tokens
        if not num_external_tokens:
            found.close()
            return
        end = first + num_external_tokens // self._size
        self._loads.append(self._copy(request, blocks.get_block_ids(), first, end))
        self._held.append(found)
        self._num_saved[request.request_id] = end

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the copies of this step. Saves the blocks that the step completes."""
        for found in self._read:  # vLLM schedules a step after the one before it has run
            found.close()
        self._read, self._held = self._held, []
        copies, self._loads = _Copies(self._loads), []
        num_new = 0
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            # The last sampled token has no keys and values yet, whatever the number of tokens is.
            end = self._end_of_save(min(request.num_computed_tokens + count, request.num_tokens))
            before = self._num_saved.get(request_id, 0)
            if end > before:
                block_ids = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                copies.saves.append(self._copy(request, block_ids, 0, end))
                self._num_saved[request_id] = end
                num_new += end - before + len(copies.saves[-1].state_ids)
        if num_new:
            self._tier.make_room(num_new)
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Let the store write the pages of a request that has ended. vLLM frees its blocks now."""
        match, _ = self._matches.pop(request.request_id, (None, 0))
        if match is not None and not match.cancel():
            match.add_done_callback(lambda done: done.result().close())
        end = self._num_saved.pop(request.request_id, 0)
        if self._requests.pop(request.request_id, None) is not None and end:
            self._tier.store(self._tokens(request, end), cache_salt=request.cache_salt)
        return False, None

    def reset_cache(self) -> bool | None:
        """Forget all pages of the tier, in all engines that share it. Return whether they are forgotten."""
        try:
            self._tier.clear()
        except PoolError:
            return False
        return True

    def _tokens(self, request: Any, num_blocks: int) -> NDArray[np.int32]:
        return np.array(request.all_token_ids[: num_blocks * self._size], np.int32)

    def _end_of_save(self, num_tokens: int) -> int:
        """Return how many blocks of a request can be saved, with this many tokens after a step."""
        return num_tokens // self._size

    def _copy(self, request: Any, block_ids: Sequence[list[int]], first: int, end: int) -> BlockCopy:
        """Return the copy of blocks `first` to `end` of a request; `block_ids` has the blocks of each group."""
        [ids] = block_ids
        return BlockCopy(request.request_id, self._tokens(request, end), request.cache_salt, ids[first:end])

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the memory of vLLM's blocks."""
        group = _attention_group(self._kv_cache_config)
        size, num_blocks = group.kv_cache_spec.page_size_bytes, self._kv_cache_config.num_blocks
        rows = []
        for name in group.layer_names:
            layer = kv_caches[name]
            if layer.device.type != "cpu" or not layer.is_contiguous() or layer.nbytes != num_blocks * size:
                raise ValueError(
                    f"the KV cache of {name} must be {num_blocks} contiguous blocks of {size} bytes on the CPU, not "
                    f"{layer.nbytes} bytes of shape {tuple(layer.shape)} on {layer.device.type}"
                )
            rows.append(layer.view(torch.uint8).numpy().reshape(num_blocks, size))
        self._rows = rows

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._error = sys.exc_info()[1]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy pages of the tier into blocks of vLLM."""
        for load in self._copies().loads:
            with self._tier.match(load.tokens, cache_salt=load.cache_salt) as found:
                if found.num_tokens < len(load.tokens) or NULL_BLOCK in load.state_ids:
                    self._fail(load)
                else:
                    pages = self._pages(load)
                    self._tier.read(found, pages, len(found.blocks) - len(pages))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: `start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: `wait_for_save` copies all layers."""

    def wait_for_save(self) -> None:
        """Copy the blocks that the step has completed into the tier."""
        # vLLM calls this in `finally`, also if a signal or an error has ended the step before all layers were computed.
        self._is_interrupted |= sys.exc_info()[1] is not self._error
        if self._is_interrupted or self._failed:  # or the step computed with blocks that were not loaded
            return
        for save in self._copies().saves:
            if NULL_BLOCK not in save.state_ids:
                self._tier.put(save.tokens, self._pages(save), cache_salt=save.cache_salt)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded in this step. vLLM computes them again."""
        failed, self._failed = self._failed, set()
        return failed

    def _fail(self, load: BlockCopy) -> None:
        """Note a load that found too few pages in the tier."""
        self._failed.update(load.block_ids)

    def _pages(self, copy: BlockCopy) -> Sequence[Rows]:
        """Return the memory of vLLM that belongs to a copy."""
        return _Pages(self._rows, copy.block_ids)

    def _copies(self) -> _Copies:
        copies = self._get_connector_metadata()
        assert isinstance(copies, _Copies)
        return copies

    # Both.

    @staticmethod
    def _unsupported_groups(kv_cache_config: Any) -> str | None:
        """Return what the groups of KV caches have that the connector does not support, or None."""
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        if kinds == [FullAttentionSpec.__name__]:
            return None
        return f"KV cache groups of {', '.join(kinds)}, only one group of full attention"

    def shutdown(self) -> None:
        """Let the store write the pages that it does not have, for at most 10 s, and leave the tier."""
        self._tier.flush(FLUSH_SECONDS)
        self._tier.close()


def _open_tier(vllm_config: Any, kv_cache_config: Any, options: dict[str, Any], is_scheduler: bool) -> PageTier:
    """Return the tier of an engine. The scheduler evicts and looks prompts up, so only its tier has the store."""
    missing = {"name", "bytes"} - options.keys()
    unknown = options.keys() - OPTIONS
    if missing or unknown:
        wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has unknown {', '.join(sorted(unknown))}"
        raise ValueError(f"kv_connector_extra_config {wrong}; its keys are {', '.join(sorted(OPTIONS))}")
    store = options.get("store")
    weights = digest_of_model(
        vllm_config.model_config.model, options.get("weights"), None if store is None else Path(store)
    )
    fingerprint = _fingerprint_of(vllm_config, kv_cache_config, weights)
    if store is None or not is_scheduler:
        return PageTier(options["name"], _bytes_of("bytes", options["bytes"]), fingerprint)
    return PageTier(
        options["name"],
        _bytes_of("bytes", options["bytes"]),
        fingerprint,
        store=store,
        store_bytes=_bytes_of("store_bytes", options.get("store_bytes", options["bytes"])),
    )


def _bytes_of(name: str, size: Any) -> int:
    """Return a number of bytes, given as a number or a text such as "8G"."""
    match = re.fullmatch(r"([0-9]{1,15})([kMGT]?)", str(size))
    if match is None:
        raise ValueError(f"{name} must be a number of bytes, or a text such as 512M or 8G, not {size!r}")
    return int(match[1]) << 10 * " kMGT".index(match[2] or " ")


def _fingerprint_of(vllm_config: Any, kv_cache_config: Any, weights: str) -> Fingerprint:
    """Return a fingerprint of everything that determines the bytes of a page, except its tokens."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # loads all layers, and other plug-ins need none

    group = _attention_group(kv_cache_config)
    spec, model = group.kv_cache_spec, vllm_config.model_config
    states = [other for other in kv_cache_config.kv_cache_groups if other is not group]
    described = {
        "engine": f"vllm {vllm.__version__}, torch {torch.__version__}",
        "weights": weights,
        "model": model.compute_hash(),
        "overrides": str(model.hf_overrides),
        "layers": list(group.layer_names),
        "spec": str(spec),
        # Kernels for AMX order the keys of a block in another way than those for vectors.
        "order": [kv_cache_config.kv_cache_layout, _get_attn_isa(model.dtype, spec.block_size, spec.head_size)],
    }
    if states:
        described["states"] = [[*other.layer_names, str(other.kv_cache_spec)] for other in states]
    page_bytes = len(group.layer_names) * spec.page_size_bytes
    return Fingerprint(json.dumps(described, sort_keys=True), page_bytes, spec.block_size)


def _attention_group(kv_cache_config: Any) -> Any:
    """Return the only group of full attention."""
    groups = kv_cache_config.kv_cache_groups
    [group] = [group for group in groups if type(group.kv_cache_spec) is FullAttentionSpec]
    return group


def _refuse(connector: str, config: Any, kv_cache_config: Any, groups: str | None) -> None:
    """Raise `ValueError` that names the first part that the connector does not support; `groups`: such groups."""
    num_workers, load_format = config.parallel_config.world_size, config.load_config.load_format
    dtype, layout = config.cache_config.cache_dtype, kv_cache_config.kv_cache_layout
    role = config.kv_transfer_config.kv_role
    supported = {
        "a device other than the CPU": current_platform.is_cpu(),
        f"{num_workers} workers (tensor or pipeline parallelism)": num_workers == 1,
        str(groups): groups is None,
        f"the KV cache layout {layout}": layout == LAYOUT,
        f"a KV cache of dtype {dtype}": dtype == "auto",
        "speculative decoding": config.speculative_config is None,
        "asynchronous scheduling": not config.scheduler_config.async_scheduling,
        # vLLM then takes blocks as computed that others of the step share, if their load has failed.
        "long_prefill_token_threshold": not config.scheduler_config.long_prefill_token_threshold,
        f"weights of load format {load_format}, which have no digest": load_format != "dummy",
        "weights that change while the engine runs": config.weight_transfer_config is None,
        f"the role {role}, only kv_both": role == "kv_both",
        "models and poolers without prefix caching in vLLM": config.model_config.is_prefix_caching_supported,
    }
    for what, is_supported in supported.items():
        if not is_supported:
            raise ValueError(f"{connector} does not support {what}")
