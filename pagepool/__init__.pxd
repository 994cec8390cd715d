from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.block_tables cimport BlockTables
from pagepool.memory.kv_pool cimport KvCachePool
from pagepool.memory.block_table cimport PagedSeqState
from pagepool.memory.ssm_pool cimport SsmStatePool
from pagepool.prefix.cache cimport PrefixCache
