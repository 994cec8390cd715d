"""Plug-ins for vLLM, which imports this module by its path. docs/guide/vllm.md has the commands.

`PagepoolConnector` shares pages between engines on CPUs. For the offloading connector of GPUs, `GittinsCachePolicy`
evicts from the CPU tier as `PrefixCache` does, and `PageStoreTier` keeps chunks of the CPU tier in a `PageStore`.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from pagepool.integrations.vllm_connector import PagepoolConnector
from pagepool.integrations.vllm_hybrid import PagepoolHybridConnector
from pagepool.integrations.vllm_model import digest_of_model, refuse_other_versions
from pagepool.prefix.eviction import EvictionPolicy
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_store import PageStore

__all__ = ["GittinsCachePolicy", "PageStoreTier", "PagepoolConnector", "PagepoolHybridConnector"]

logger = logging.getLogger("pagepool")

refuse_other_versions()


@dataclass
class _Prefixes:
    """The keys of a request in the order of its prompt, one chain for each KV cache group."""

    num_read: int = 0
    parents: dict[OffloadKey, OffloadKey | None] = field(default_factory=dict)
    last: dict[int, OffloadKey] = field(default_factory=dict)

    def read(self, request: ReqContext) -> None:
        """Follow the keys that the scheduler has added to the request since the last call."""
        keys = request._offload_key_positions
        for key in islice(keys, self.num_read, None):
            group = get_offload_group_idx(key)
            self.parents[key] = self.last.get(group)
            self.last[group] = key
        self.num_read = len(keys)


def _parents_of(request: ReqContext) -> dict[OffloadKey, OffloadKey | None]:
    """Return the key before each key of a request."""
    prefixes: _Prefixes | None = request.get_state(_Prefixes)
    if prefixes is None:
        prefixes = _Prefixes()
        request.set_state(prefixes)
    prefixes.read(request)
    return prefixes.parents


class GittinsCachePolicy(CachePolicy):
    """Evicts the chunks that come back least, as the policy "gittins" of `PrefixCache` learns it.

    A chunk that is read or written is held until it is not. A use of a chunk is noted when vLLM begins to read it, or
    when the request ends that has found it on the device; a new chunk is used once when it is stored.

    Parameters
    ----------
    cache_capacity : int
        The number of chunks of the CPU tier.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = EvictionPolicy("gittins", cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._parents: dict[OffloadKey, OffloadKey | None] = {}  # of each key that vLLM will insert
        self._noted: set[OffloadKey] = set()  # chunks that count as used since vLLM began to read them

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk of a key, or None."""
        return self._chunks.get(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note the chunk before each chunk in the prompt: `insert` does not get it."""
        parents = _parents_of(req_context)
        for key in keys:
            self._parents[key] = parents.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """Add a chunk, and hold it until vLLM has written it."""
        self._order.insert(key, self._parents.pop(key, None))
        self._chunks[key] = chunk
        if chunk.ref_cnt != 0:
            self._order.hold(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk that could not be written."""
        self._order.remove(key)
        self._noted.discard(key)
        del self._chunks[key]

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of each chunk."""
        for key in keys:
            if key in self._chunks:
                self._order.touch(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Note a use of each chunk that the request has read."""
        for keys in key_groups:
            self.touch([key for key in keys if key in reused_keys and key not in self._noted], req_context)
            self._noted.difference_update(keys)
            for key in keys:
                self._parents.pop(key, None)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly n chunks that are not read or written, or none."""
        keys = self._order.evict(n, protected)
        if keys is None:
            return None
        self._noted.difference_update(map(OffloadKey, keys))  # a tier below reads chunks after their request has ended
        return [(OffloadKey(key), self._chunks.pop(OffloadKey(key))) for key in keys]

    def clear(self) -> None:
        """Forget all chunks and all that was learnt."""
        self._order.clear()
        self._chunks.clear()
        self._noted.clear()
        self._parents.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        """Release a chunk after the last read or write."""
        self._order.release(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Hold a chunk that vLLM begins to read, and note this use."""
        self._order.touch(key)
        self._order.hold(key)
        self._noted.add(key)


class PageStoreTier(SecondaryTierManager):
    """Keeps chunks of the CPU tier in a `PageStore`, for restarts and for more chunks than memory.

    One thread reads and another one writes, so that a load waits for no store. A chunk is loaded as it was stored, or
    not at all: torn, damaged and old pages fail their sums, and pages of other weights have another fingerprint. A disk
    that is full or fails costs one line in the log "pagepool", and no request.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        From vLLM. Memory (num_chunks, bytes of a chunk) of the CPU tier.
    path : str
        The directory of the store, as in `PageStore`. Several vLLM processes may have the same one: one of them writes.
    max_bytes : int
        The bound of the directory.
    weights : str or None
        Identifies the weights. None: the digest of the model's files (`weights_digest`).

    Raises
    ------
    ValueError
        The model is not a directory, and `weights` is None; or `max_bytes` has no room for four chunks.
    OSError
        As in `PageStore`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        max_bytes: int,
        weights: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        text = _describe(offloading_spec, weights, Path(path))
        self._chunks: Any = np.asarray(primary_kv_view).view(np.uint8)
        self._store = PageStore(path, max_bytes, Fingerprint(text, page_bytes=self.block_size_bytes))
        self._reader, self._writer = (ThreadPoolExecutor(1, f"pagepool-{name}") for name in ("reader", "writer"))
        self._running: set[Future[None]] = set()
        self._finished: deque[JobResult] = deque()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the store has a chunk. Reads no page."""
        return LookupResult.HIT if self._store.contains(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Let the writer store chunks. A chunk is dropped before the chunk before it in the prompt."""
        parents = _parents_of(job_metadata.req_context)

        def put(key: OffloadKey, chunk: Any) -> bool:
            return self._store.put(key, chunk, parents.get(key))

        self._submit(self._writer, job_metadata, put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Let the reader fill chunks of the CPU tier."""
        self._submit(self._reader, job_metadata, self._store.get)

    def _submit(self, threads: ThreadPoolExecutor, job: TransferJob, move: Callable[[OffloadKey, Any], bool]) -> None:
        """Move the chunks of a job in order, and note which of them were moved."""

        moved: list[OffloadKey] = []

        def run() -> None:
            begin = monotonic()
            try:
                for key, number in zip(job.keys, job.chunk_ids, strict=True):
                    if move(key, self._chunks[number]):
                        moved.append(key)
            except Exception:  # vLLM waits for every job
                logger.exception("%d chunks of %d were not moved", len(job.keys) - len(moved), len(job.keys))
            took, size = monotonic() - begin, len(moved) * self.block_size_bytes
            self._finished.append(JobResult(job.job_id, len(moved) == len(job.keys), tuple(moved), took, size))

        future = threads.submit(run)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of each chunk."""
        for key in keys:
            self._store.touch(key)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for no chunks besides those that are new."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until every job has ended."""
        wait(list(self._running))

    def shutdown(self) -> None:
        """Wait for the jobs, and close the store."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._chunks = None
        self._store.close()


def _describe(spec: Any, weights: str | None, place: Path) -> str:
    """Return what the bytes of a chunk depend on besides its key, as JSON."""
    config = spec.config
    described = {
        "engine": f"vllm {vllm.__version__}",
        "weights": digest_of_model(config.model.name, weights, place),
        "dtype": config.model.dtype,
        "groups": [(group.tokens_per_block, *group.layer_names) for group in config.groups],
        "cache": asdict(config.cache),
        "rank": (config.parallel.rank, config.parallel.world_size),
        "parallel": [getattr(config.parallel, f"{kind}_size") for kind in ("tp", "pp", "pcp", "dcp")],
        "layout": (config.kv_cache_layout, config.canonical_layout, config.replicated_layout),
    }
    return json.dumps(described, sort_keys=True)
