"""pagepool: paged memory for the keys, values and recurrent states of an LLM engine on CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagepool._paths import get_include, get_library_dir
from pagepool._version import __version__
from pagepool.attention.cpu import cpu_info
from pagepool.attention.decode import decode, prefill
from pagepool.attention.merge import merge_states
from pagepool.config import KvLayout, SchedulerConfig, StateLayout, Tenant
from pagepool.errors import (
    EngineClosed,
    InvalidBlock,
    InvalidSlot,
    PoolError,
    PoolExhausted,
    RequestRejected,
    StaleHandle,
    TransferError,
)
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.block_refs import PrefixMatch
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.block_tables import BlockTables
from pagepool.memory.hybrid import HybridSequence, KvGroup
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.sequence_pool import SequencePool
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.memory.state import (
    AttentionSequenceState,
    Mamba2SequenceState,
    SequenceSlot,
    SequenceState,
)
from pagepool.prefix import (
    PrefixCache,
    StateCheckpoints,
)
from pagepool.prefix.eviction import EvictionPolicy
from pagepool.scheduling import (
    ScheduledBatch,
    Scheduler,
    SeqState,
    Sequence,
)

if TYPE_CHECKING:
    from pagepool.engine import Engine, Generation, SamplingParams, Structured
    from pagepool.memory.budget import MemoryBudget
    from pagepool.prefix.page_store import PageStore
    from pagepool.prefix.page_tier import PageTier
    from pagepool.prefix.store import PrefixStore

__all__ = [
    "AttentionSequenceState",
    "BlockAllocator",
    "BlockTables",
    "Engine",
    "EngineClosed",
    "EvictionPolicy",
    "Generation",
    "HybridSequence",
    "InvalidBlock",
    "InvalidSlot",
    "KvCachePool",
    "KvGroup",
    "KvLayout",
    "Mamba2SequenceState",
    "MemoryBudget",
    "PageStore",
    "PageTier",
    "PagedSeqState",
    "PoolError",
    "PoolExhausted",
    "PrefixCache",
    "PrefixMatch",
    "PrefixStore",
    "RequestRejected",
    "SamplingParams",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "SeqState",
    "Sequence",
    "SequencePool",
    "SequenceSlot",
    "SequenceState",
    "SsmStatePool",
    "StaleHandle",
    "StateCheckpoints",
    "StateLayout",
    "Structured",
    "Tenant",
    "TransferError",
    "__version__",
    "cpu_info",
    "decode",
    "get_include",
    "get_library_dir",
    "merge_states",
    "prefill",
]

PLACES = {"PageStore": "page_store", "PageTier": "page_tier", "PrefixStore": "store"}


def __getattr__(name: str) -> Any:
    if name in (
        "Engine",
        "Generation",
        "SamplingParams",
        "Structured",
    ):  # an engine takes longer to import than all of the above
        return getattr(import_module("pagepool.engine"), name)
    if name == "MemoryBudget":  # only users of shared pools need it
        return import_module("pagepool.memory.budget").MemoryBudget
    if name in PLACES:  # only users of a store need the hashes of OpenSSL
        return getattr(import_module(f"pagepool.prefix.{PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
