from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.prefix.node cimport Node


cdef class NodeTable:
    # A node is a prefix: its parent and block_size tokens more. Nodes 0 to num_made - 1 were made at least once:
    #   num_alive + num_unused = num_made <= room        num_buckets >= num_alive, a power of two
    #   num_children = the live nodes whose parent it is
    #   alive while it has a block, a child, a ghost or a pin; a pin counts as a child
    #   each live node but the roots is in the bucket of its hash, once; roots = {key: node} are the others
    cdef readonly int32_t block_size
    cdef Node *nodes
    cdef int32_t *tokens  # block_size of each node's own
    cdef int32_t *buckets
    cdef uint64_t *names  # two words of each node, for events; NULL where nobody asked for any
    cdef bint named
    cdef int64_t num_buckets
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_alive
    cdef int32_t unused  # the first of those to make again, linked by next_in_bucket
    cdef uint64_t hash_mask
    cdef uint64_t root_hash
    cdef long long collisions
    cdef dict roots
    cdef uint64_t stamp  # how often the roots have changed
    cdef dict root_keys

    # Names from now on: before the first node is made.
    cdef void c_give_names(self) noexcept
    # Room for n more nodes: c_add then cannot fail. Pointers into the table end here.
    cdef int reserve(self, int64_t n) except -1
    # What `root` takes. Runs Python code: before `reserve`, since another thread may come between.
    cdef tuple named_key(self, bytes key)
    # The root of a key, made when it is not there; `reserve` first.
    cdef int32_t root(self, tuple named_key) except -1
    # The child with these tokens, every one compared, or -1, and then its hash.
    cdef int32_t c_find(self, int32_t parent, const int32_t *tokens, uint64_t *hash) noexcept nogil
    # How many of n blocks of tokens are those of nodes node + 1, node + 2, ..., each the child of the one before it.
    cdef int64_t c_follow(self, int32_t node, const int32_t *tokens, int64_t n) noexcept nogil
    # The child with a block whose first tokens, of at most n, are the same for longest, or -1, and for how long; of
    # several the one in the lowest block. The 1,024 youngest children are looked at.
    cdef int32_t c_find_part(self, int32_t parent, const int32_t *tokens, int64_t n, int32_t *common) noexcept
    cdef uint64_t c_hash(self, int32_t parent, const int32_t *tokens) noexcept nogil
    cdef int32_t c_add(self, int32_t parent, const int32_t *tokens, uint64_t hash) noexcept
    # Unmakes the node if nothing keeps it alive, then its parent, and so on.
    cdef void c_collect(self, int32_t node) noexcept
    cdef int32_t c_make(self) noexcept
    cdef void c_clear(self) noexcept
    cdef str audit(self)
