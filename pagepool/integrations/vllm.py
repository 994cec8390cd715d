"""Evict from the CPU tier of vLLM's offloading connector as `PrefixCache` does.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "eviction_policy": "GittinsCachePolicy",
        "cache_policy_module_path": "pagepool.integrations.vllm"}}'

vLLM imports the module in the process of its scheduler. The policy touches no device and no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import vllm
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from pagepool.prefix.eviction import EvictionPolicy

__all__ = ["GittinsCachePolicy"]

TESTED = ("0.32.",)  # versions of vLLM with this interface
if not vllm.__version__.startswith(TESTED):
    raise ImportError(
        f"pagepool.integrations.vllm was tested with vLLM {TESTED[0]}x, not with {vllm.__version__}: "
        "an eviction policy of another interface could evict chunks that are being read"
    )


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
        prefixes = req_context.get_state(_Prefixes)
        if prefixes is None:
            prefixes = _Prefixes()
            req_context.set_state(prefixes)
        prefixes.read(req_context)
        for key in keys:
            self._parents[key] = prefixes.parents.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """Add a chunk, and hold it until vLLM has written it."""
        self._order.insert(key, self._parents.pop(key, None))
        self._chunks[key] = chunk
        if chunk.ref_cnt != 0:
            self._order.hold(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk that could not be written."""
        self._order.remove(key)
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
        return None if keys is None else [(OffloadKey(key), self._chunks.pop(OffloadKey(key))) for key in keys]

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
