"""pagepool: paged memory for the keys, values and recurrent states of an LLM engine on CPU."""

from pagepool._paths import get_include, get_library_dir
from pagepool._version import __version__
from pagepool.attention.cpu import cpu_info
from pagepool.attention.decode import decode
from pagepool.config import KvLayout, SchedulerConfig, StateLayout
from pagepool.errors import InvalidBlock, InvalidSlot, PoolError, PoolExhausted
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.block_tables import BlockTables
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.paged_seq import PagedSeqState
from pagepool.scheduling import ScheduledBatch, Scheduler, SeqState, Sequence

__all__ = [
    "BlockAllocator",
    "BlockTables",
    "InvalidBlock",
    "InvalidSlot",
    "KvCachePool",
    "KvLayout",
    "PagedSeqState",
    "PoolError",
    "PoolExhausted",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "SeqState",
    "Sequence",
    "StateLayout",
    "__version__",
    "cpu_info",
    "decode",
    "get_include",
    "get_library_dir",
]
