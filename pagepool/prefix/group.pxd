"""Groups of nodes that one request used: what the policy `gittins` keeps of each, and rows of groups in cells."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

from pagepool.prefix.node cimport NodeList


cdef struct Group:
    int64_t time  # when its nodes were used
    NodeList nodes  # from the head of the prefix to its tail
    int32_t members  # nodes that were used then and not since: in `nodes`, waiting, held and ghosts
    int32_t previous  # in its cell
    int32_t next  # in its cell, or of those without members
    int32_t older  # of all groups with members
    int32_t newer
    int16_t cell
    uint8_t kind
    uint8_t in_lru  # LRU would have its nodes


# `ends`: the first and the last group of a row, or -1. The longest unused group of a row is its first: one that comes
# back, since a node waited for others, may be older than all that are there.
cdef inline void row_put(int32_t *ends, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t first = ends[0], last = ends[1]
    if first >= 0 and groups[number].time < groups[first].time:
        groups[number].previous = -1
        groups[number].next = first
        groups[first].previous = ends[0] = number
        return
    groups[number].previous = last
    groups[number].next = -1
    if last < 0:
        ends[0] = number
    else:
        groups[last].next = number
    ends[1] = number


cdef inline void row_take(int32_t *ends, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t before = groups[number].previous, after = groups[number].next
    if before < 0:
        ends[0] = after
    else:
        groups[before].next = after
    if after < 0:
        ends[1] = before
    else:
        groups[after].previous = before
