"""Memory, prefix cache and attention in readable pure Python: specification, test oracle and baseline.

The core never imports it. The classes have the same names, methods and results as the compiled classes, so that either
can replace the other.
"""

from pagepool.reference.allocator import BlockAllocator
from pagepool.reference.attention import decode
from pagepool.reference.batch import append_batch, release_batch
from pagepool.reference.block_table import BlockTables, PagedSeqState
from pagepool.reference.hybrid import HybridSequence
from pagepool.reference.kv_pool import KvCachePool
from pagepool.reference.prefix import PrefixCache
from pagepool.reference.ssm_pool import AttentionSequenceState, Mamba2SequenceState, SequenceSlot, SsmStatePool

__all__ = [
    "AttentionSequenceState",
    "BlockAllocator",
    "BlockTables",
    "HybridSequence",
    "KvCachePool",
    "Mamba2SequenceState",
    "PagedSeqState",
    "PrefixCache",
    "SequenceSlot",
    "SsmStatePool",
    "append_batch",
    "decode",
    "release_batch",
]
