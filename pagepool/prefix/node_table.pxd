from libc.stdint cimport int32_t, int64_t, uint64_t

from pagepool.prefix.node cimport Node
from pagepool.prefix.root_keys cimport RootKeys
from pagepool.prefix.unused_nodes cimport UnusedNodes


cdef class NodeTable:
    # A node is a prefix: its parent and block_size tokens more. Nodes 0 to num_made - 1 were made at least once:
    #   num_alive + num_unused = num_made <= room        num_buckets >= num_hashed, a power of two
    #   num_children = the live nodes whose parent it is
    #   alive while it has a block, a child, a ghost or a pin; a pin counts as a child
    #   a node with siblings is in the bucket of its hash, once; one without may be: its parent leads to it
    #   roots = {key: node} have no parent
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
    cdef int32_t num_hashed  # those in buckets
    cdef UnusedNodes unused
    cdef uint64_t hash_mask
    cdef uint64_t seed  # of hashes
    cdef long long collisions
    cdef RootKeys root_keys
    cdef dict roots  # of `root_keys`
    cdef uint64_t stamp  # how often the roots have changed

    # Names from now on: before the first node is made.
    cdef void c_give_names(self) noexcept
    # Room for n more nodes: c_add_run then cannot fail. Pointers into the table end here.
    cdef int reserve(self, int64_t n) except -1
    # What `root` takes. Runs Python code: before `reserve`, since another thread may come between.
    cdef tuple named_key(self, bytes key)
    # The root of a key, made when it is not there; `reserve` first.
    cdef int32_t root(self, tuple named_key) except -1
    # The child with these tokens, every one compared, or -1.
    cdef int32_t c_find(self, int32_t parent, const int32_t *tokens) noexcept nogil
    # How many of n blocks of tokens are those of nodes node + 1, node + 2, ..., each the child of the one before
    # it, and cached if only those are asked for.
    cdef int64_t c_follow(self, int32_t node, const int32_t *tokens, int64_t n, bint cached_only) noexcept nogil
    # The child with a block whose first tokens, of at most n, are the same for longest, or -1, and for how long; of
    # several the one in the lowest block. The 1,024 youngest children are looked at.
    cdef int32_t c_find_part(self, int32_t parent, const int32_t *tokens, int64_t n, int32_t *common) noexcept
    cdef uint64_t c_hash(self, int32_t parent, const int32_t *tokens) noexcept nogil
    cdef void c_into_bucket(self, int32_t node) noexcept
    cdef void c_out_of_bucket(self, int32_t node) noexcept
    # Makes up to n nodes with ids in a row, for as many blocks of tokens, the first the child of `parent`, which has
    # none with these tokens, each other one that of the one before it; returns how many, 1 or more, and the first.
    cdef int32_t c_add_run(self, int32_t parent, const int32_t *tokens, int64_t n, int32_t *first) noexcept
    # Unmakes the node if nothing keeps it alive, then its parent, and so on.
    cdef void c_collect(self, int32_t node) noexcept
    cdef void c_out_of_siblings(self, int32_t node) noexcept
    # Up to n nodes with ids in a row, from `first` on: what they are is up to the caller.
    cdef int32_t c_make(self, int32_t n, int32_t *first) noexcept
    cdef void c_clear(self) noexcept
    cdef str audit(self)
