from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t


cdef extern from *:
    """
    /* Before CPython 3.12 the collector may run wherever compiled code makes an object, and with it the Python code of
     * any finalizer, in which another thread may begin: between these two no other thread runs. */
    #if PY_VERSION_HEX < 0x030C0000
    #define pp_pause_collector() PyGC_Disable()
    #define pp_resume_collector(paused) ((paused) ? (void)PyGC_Enable() : (void)0)
    #else
    #define pp_pause_collector() 0
    #define pp_resume_collector(paused) ((void)(paused))
    #endif
    """
    int pause_collector "pp_pause_collector"()
    void resume_collector "pp_resume_collector"(int paused)


# 16 bytes, see csrc/names.h.
cdef struct Name:
    uint64_t words[2]


# A cached block for other processes and for a store.
cdef struct NamedBlock:
    Name name
    Name parent  # of the prefix before the block
    int32_t block


# What has cached blocks with names: under the zero secret for events, and under the secret of a store.
cdef class NameSource:
    cdef readonly int32_t block_size

    # At least the number of cached blocks.
    cdef int64_t c_most_named(self) noexcept nogil
    # Writes all cached blocks under the secret of this number, and the tokens of each; returns their number.
    cdef int64_t c_list_named(self, int number, NamedBlock *blocks, int32_t *tokens) noexcept nogil


cdef enum:
    NOWHERE = -2  # value of next_in_bucket for a node without a bucket


# The list of a node with a block: a list of the policy, or aside, because its block was in use when it was to be
# evicted.
cdef enum:
    LISTED
    IN_USE


# 64 bytes.
cdef struct Node:
    uint64_t hash  # of parent and tokens, if it is in a bucket; of a root: the address of its key
    int32_t parent  # -1 for a root
    int32_t root  # of its tree; its own for a root
    int32_t next_in_bucket
    int32_t block  # below 0 when it has none: see `evicted_at`; -1 when it is not alive
    int32_t num_children
    int32_t last_child  # the child found or added last, or -1; the next walk compares it first
    int32_t first_child
    int32_t previous_sibling
    int32_t next_sibling
    int32_t previous  # in a NodeList
    int32_t next  # in a NodeList; of the first node of an unused span, the next span
    int32_t list  # used by the policy
    int32_t cached_children  # used by the policy
    uint8_t uses  # used by the policy
    uint8_t ghost  # without a block, yet remembered by the policy, or held by a PrefixTree
    uint8_t place  # of a node with a block
    uint8_t alive


# When the block of a node was evicted, in the unit of `NodeTable.now`; -1 if it has a block, or never had one.
cdef inline int32_t evicted_at(const Node *node) noexcept nogil:
    return -2 - node.block if node.block < -1 else -1


# Oldest first. size nodes are linked from head to tail by next, and back by previous; -1 ends both ways.
cdef struct NodeList:
    int32_t head
    int32_t tail
    int32_t size


cdef inline void list_clear(NodeList *self) noexcept nogil:
    self.head = -1
    self.tail = -1
    self.size = 0


cdef inline void list_remove(NodeList *self, Node *nodes, int32_t node) noexcept nogil:
    cdef int32_t before = nodes[node].previous
    cdef int32_t after = nodes[node].next
    if before < 0:
        self.head = after
    else:
        nodes[before].next = after
    if after < 0:
        self.tail = before
    else:
        nodes[after].previous = before
    self.size -= 1


cdef inline void list_push(NodeList *self, Node *nodes, int32_t node) noexcept nogil:
    nodes[node].previous = self.tail
    nodes[node].next = -1
    if self.tail < 0:
        self.head = node
    else:
        nodes[self.tail].next = node
    self.tail = node
    self.size += 1


# Returns true if links and size agree. All nodes of the list must be alive.
cdef inline bint list_is_sound(const NodeList *self, const Node *nodes) noexcept nogil:
    cdef int32_t node = self.head, before = -1, size = 0
    while node >= 0 and size <= self.size:
        if nodes[node].previous != before or not nodes[node].alive:
            return False
        before = node
        node = nodes[node].next
        size += 1
    return node < 0 and before == self.tail and size == self.size


# Raises ValueError for the first negative one of `tokens[begin:end]`.
cdef int refuse_negative(const int32_t *tokens, int64_t begin, int64_t end) except -1


cdef class NodeTable(NameSource):
    # A node is a prefix: its parent and block_size tokens more. Nodes 0 to num_made - 1 were made at least once:
    #   num_alive + those in spans of unused ones = num_made <= room        num_buckets >= num_hashed, a power of two
    #   a span has ids in a row, and nodes before and behind it that are alive, or were never made. Its first node has
    #   its size in num_children, and in previous and next the spans before and behind it; its last node has the first
    #   one in parent
    #   num_children = the number of live children
    #   alive while it has a block, a child, a ghost or a pin; a pin counts as a child
    #   a node with siblings is in the bucket of its hash, once; one without may be: its parent leads to it
    #   roots = {key: node} have no parent
    cdef Node *nodes
    cdef int32_t *tokens  # block_size of each node's own
    cdef int32_t *buckets
    cdef Name *names  # one of each node for each secret
    cdef list secrets
    cdef int num_names  # number of secrets
    cdef int64_t num_buckets
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_alive
    cdef int32_t num_hashed  # those in buckets
    cdef int32_t unused  # the first node of the first span of unused nodes, or -1
    cdef uint64_t seed  # of hashes
    cdef long long collisions
    cdef dict roots
    # The owner of the table sets `now` before it removes blocks. -1: times are not noted.
    cdef int32_t now
    cdef int32_t forgotten_at  # the latest `evicted_at` of the nodes that are no longer alive, or -1

    # Adds a secret and returns its number. Call it before the first node is made.
    cdef int give_names(self, bytes secret) except -1
    # A node with a block, under the secret of this number.
    cdef inline NamedBlock c_named(self, int32_t node, int number) noexcept nogil:
        cdef NamedBlock named
        named.name = self.names[<int64_t>node * self.num_names + number]
        named.parent = self.names[<int64_t>self.nodes[node].parent * self.num_names + number]
        named.block = self.nodes[node].block
        return named

    # Reserves room for n more nodes, so that c_add cannot fail. Invalidates pointers into the table.
    cdef int reserve(self, int64_t n) except -1
    # Returns the argument of `root`. Runs Python code, during which other threads may run, so call it before `reserve`.
    cdef tuple named_key(self, bytes key)
    # Returns the root of a key, and makes it if needed. Call `reserve` first.
    cdef int32_t root(self, tuple named_key) except -1
    # Returns the child with these tokens, or -1. Compares every token.
    cdef int32_t c_find(self, int32_t parent, const int32_t *tokens) noexcept nogil
    # Walks down from `node` along n blocks of tokens until a node is missing (`cached_only`: or has no block). Writes
    # the nodes to `path` and returns their number.
    cdef int64_t c_walk(
        self, int32_t node, const int32_t *tokens, int64_t n, bint cached_only, int32_t *path
    ) noexcept nogil
    # Returns the cached child that shares the most leading tokens with `tokens` (n of them), or -1, and writes their
    # number to `common`. The lowest block wins a tie. Only the 1,024 youngest children are compared.
    cdef int32_t c_find_part(self, int32_t parent, const int32_t *tokens, int64_t n, int32_t *common) noexcept
    # Returns the child that shares the most leading tokens with a block of `tokens`, cached or not, or -1 without
    # children, and writes their number to `common`. The youngest child wins a tie. Only the `most` youngest children
    # are compared.
    cdef int32_t c_nearest(self, int32_t parent, const int32_t *tokens, int32_t most, int32_t *common) noexcept nogil
    # Explains why the first n blocks of `tokens` are not all cached; `Explanation.of` reads the result. `root` is the
    # root of their key, or -1. `node` is the node of the first `start` blocks, which are cached, or the root. `path`
    # has room for n nodes. At most `most_compared` children and, with `compares_keys`, other roots are compared.
    cdef tuple miss(
        self, int32_t root, int32_t node, int64_t start, const int32_t *tokens, int64_t n, int32_t most_compared,
        bint compares_keys, int32_t *path
    )
    # Adds a child. `parent` must not have a child with these tokens.
    cdef int32_t c_add(self, int32_t parent, const int32_t *tokens) noexcept
    # Pin and unpin. A pinned node and its ancestors stay alive. Unpinning removes the node if nothing else keeps it
    # alive.
    cdef inline void c_pin(self, int32_t node) noexcept:
        self.nodes[node].num_children += 1

    cdef inline void c_unpin(self, int32_t node) noexcept:
        self.nodes[node].num_children -= 1
        if self.nodes[node].num_children == 0:
            self.c_collect(node)

    # Removes the node if nothing keeps it alive, then its parent, and so on.
    cdef void c_collect(self, int32_t node) noexcept
    cdef uint64_t c_hash(self, int32_t parent, const int32_t *tokens) noexcept nogil
    cdef void c_into_bucket(self, int32_t node) noexcept
    cdef void c_out_of_bucket(self, int32_t node) noexcept
    cdef void c_out_of_siblings(self, int32_t node) noexcept
    cdef int32_t c_make(self, int32_t parent) noexcept
    # Take the next unused node, or one that was never made; mark n dead nodes from `first` on as unused. O(1).
    cdef int32_t c_take_unused(self) noexcept
    cdef void c_put_unused(self, int32_t first, int32_t n) noexcept
    cdef void c_link_span(self, int32_t first, int32_t size) noexcept
    cdef void c_unlink_span(self, int32_t first) noexcept
    cdef void c_clear(self) noexcept
    cdef str audit(self)
