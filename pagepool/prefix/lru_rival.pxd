"""LRU beside the policy `gittins`: what it would have found, counted, and whether to do as it does for a while.

Which blocks LRU would have is known without a second cache: those used last, as many as there can be. With groups in
the order of their times it has the newest ones, and the oldest of them that does not fit whole has lost the head of a
prefix, so that nothing of it would be found. A group is in or out, and the count of hits is LRU's own to the block.

To follow LRU means to evict the longest unused group: from the tail, so that never less is found than by LRU. That is
done at first, when nothing is learnt; where LRU misses less than 3 % of what it finds, so that little can be won; and,
for a while, after learning has cost more than a tenth of the cache and a quarter of what it had won before.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.group cimport Group
from pagepool.prefix.reuse_ages cimport add_ones


cdef struct LruRival:
    # size = the sum of the members of the groups from `oldest` to `newest`, all `in_lru`; at most the capacity
    int64_t capacity
    int64_t size
    int32_t oldest  # or -1
    int32_t newest  # of all groups, or -1
    int64_t lead  # blocks used that were here and LRU would not have, less those that it would have and were not here
    int64_t base  # the lead when we last began to go our own way
    int64_t most  # the highest since
    int64_t pause  # how long LRU is followed after a loss: twice as long after each without a gain
    int64_t resume  # when that ends
    # Of uses, fading as those of ReuseAges do: in LRU; known and not in LRU; and nodes forgotten.
    double hits
    double misses
    double forgotten
    uint8_t losing
    uint8_t idle  # too little to be won
    uint8_t followed


cdef inline void rival_clear(LruRival *self, int64_t capacity) noexcept nogil:
    self.capacity = capacity
    self.size = self.lead = self.base = self.most = self.pause = self.resume = 0
    self.oldest = self.newest = -1
    self.hits = self.misses = self.forgotten = 0.0
    self.losing = self.idle = 0
    self.followed = 1


# A group without members begins to have some.
cdef inline void rival_open(LruRival *self, Group *groups, int32_t number) noexcept nogil:
    groups[number].older = self.newest
    groups[number].newer = -1
    groups[number].in_lru = 1
    if self.newest >= 0:
        groups[self.newest].newer = number
    self.newest = number
    if self.oldest < 0:
        self.oldest = number


# It has n members more: O(1) amortised.
cdef inline void rival_add(LruRival *self, Group *groups, int32_t number, int32_t n) noexcept nogil:
    cdef int32_t out
    self.size += n * groups[number].in_lru
    while self.size > self.capacity:
        out = self.oldest
        groups[out].in_lru = 0
        self.size -= groups[out].members
        self.oldest = groups[out].newer


# It has no members any more.
cdef inline void rival_close(LruRival *self, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t older = groups[number].older, newer = groups[number].newer
    if older >= 0:
        groups[older].newer = newer
    if newer >= 0:
        groups[newer].older = older
    else:
        self.newest = older
    if self.oldest == number:
        self.oldest = newer


# n nodes of the group were used, which were here or not; most often LRU would have them, and they are here.
cdef inline void rival_count(LruRival *self, const Group *group, int32_t n, bint here) noexcept nogil:
    if group.in_lru:
        self.hits = add_ones(self.hits, n)
        if not here:
            self.lead -= n
    else:
        self.misses = add_ones(self.misses, n)
        self.lead += n * here


# Of what is forgotten, a tenth is taken to come back unseen.
cdef inline void rival_learn(LruRival *self, double fade) noexcept nogil:
    self.idle = self.misses + 0.1 * self.forgotten < 0.03 * self.hits
    self.hits *= fade
    self.misses *= fade
    self.forgotten *= fade


# Whether LRU is followed in the request that begins.
cdef inline bint rival_follows(LruRival *self, int64_t clock) noexcept nogil:
    cdef int64_t allowed
    if clock < 2 * self.capacity:
        self.base = self.most = self.lead
        return True
    if self.losing:
        if clock >= self.resume:
            self.losing = 0
            self.base = self.most = self.lead
    elif not self.idle:
        self.most = max(self.most, self.lead)
        allowed = self.capacity // 10 + (self.most - self.base) // 4
        if self.most - self.lead > allowed:
            self.losing = 1
            self.pause = 4 * self.capacity if self.pause == 0 or self.most - self.base > allowed else 2 * self.pause
            self.resume = clock + self.pause
    return self.losing or self.idle


# Once a request: whether it goes another way than the one before.
cdef inline bint rival_turns(LruRival *self, int64_t clock) noexcept nogil:
    cdef uint8_t before = self.followed
    self.followed = rival_follows(self, clock)
    return self.followed != before
