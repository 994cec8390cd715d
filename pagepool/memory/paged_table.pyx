"""PagedTable: the block table of a sequence and all that moves it, without the GIL. `PagedSeqState` is its face."""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pagepool.csrc cimport (
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_NO_MEMORY,
    PP_OK,
    PP_OVER_MAXIMUM,
    pp_status,
)
from pagepool.memory.holders cimport Holder
from pagepool.memory.ids cimport list_ids
from pagepool.memory.saved_table cimport (
    SavedTable,
    saved_abort,
    saved_commit,
    saved_give_back,
    saved_needs,
    saved_new,
    saved_references,
    saved_takes,
)

from pagepool.errors import InvalidBlock, refuse_copy

__all__ = ["PagedTable"]

cdef int64_t FEW_BLOCKS = 64  # as many are taken by way of the stack
cdef int64_t MAX_TOKENS = <int64_t>1 << 60  # keeps sums of lengths within 64 bits
cdef int64_t INVALID = -1, OVER_MAXIMUM = -2


@cython.no_gc
cdef class PagedTable(Holder):
    """The data of a `PagedSeqState`, which sets it up, and its `c_` methods. Internal."""

    def __dealloc__(self):
        self.c_delist()
        while self.saved != NULL:
            self.c_commit()
        if self.num_blocks and self.c_release() != PP_OK:
            raise InvalidBlock(f"one of the {self.num_blocks} blocks of a sequence that goes was freed by someone else")

    cdef pp_status c_ensure_capacity(self, int64_t target_len) noexcept nogil:
        cdef pp_status status
        cdef int64_t needed
        if target_len < 0 or self.is_closed:
            return PP_INVALID_ARGUMENT
        needed = target_len // self.block_size + (target_len % self.block_size != 0)
        if needed > self.max_blocks_per_seq:
            return PP_OVER_MAXIMUM
        if needed <= self.num_blocks:
            return PP_OK
        status = self.allocator.c_allocate_n(<int32_t>needed - self.num_blocks, self.c_blocks + self.num_blocks)
        if status == PP_OK:
            self.num_blocks = <int32_t>needed
        return status

    cdef int64_t c_blocks_to_append(self, int64_t n) noexcept nogil:
        cdef int64_t target, needed, wanted, i
        if n < 0 or self.is_closed:
            return INVALID
        if n > MAX_TOKENS:
            return OVER_MAXIMUM
        target = self.length + n
        needed = target // self.block_size + (target % self.block_size != 0)
        if needed > self.max_blocks_per_seq:
            return OVER_MAXIMUM
        wanted = max(needed - self.num_blocks, 0)
        if n:
            for i in range(self.length // self.block_size, min(needed, self.num_blocks)):
                wanted += self.allocator.c_is_shared(self.c_blocks[i])
        return wanted

    cdef pp_status c_append(self, int64_t n, int64_t *slots_out) noexcept nogil:
        cdef int32_t few[64]
        cdef int32_t *taken = few
        cdef pp_status status
        cdef int64_t first = self.length, used
        cdef int64_t wanted = self.c_blocks_to_append(n)
        if wanted < 0:
            return PP_INVALID_ARGUMENT if wanted == INVALID else PP_OVER_MAXIMUM
        if wanted:
            if wanted > FEW_BLOCKS:
                taken = <int32_t *>malloc(<size_t>wanted * sizeof(int32_t))
                if taken == NULL:
                    return PP_NO_MEMORY
            status = self.allocator.c_allocate_n(<int32_t>wanted, taken)
            if status == PP_OK:
                used = self.c_append_taken(n, taken)
                self.allocator.c_free_n(taken + used, wanted - used)
            if taken != few:
                free(taken)
            if status != PP_OK:
                return status
        else:
            self.length += n
        if slots_out != NULL:
            self.c_slots(first, n, slots_out)
        return PP_OK

    cdef int64_t c_append_taken(self, int64_t n, const int32_t *taken) noexcept nogil:
        cdef int64_t tail = self.length // self.block_size, target = self.length + n
        cdef int64_t needed = target // self.block_size + (target % self.block_size != 0)
        cdef int64_t i, used = 0
        cdef int32_t old
        if n:
            for i in range(tail, min(needed, self.num_blocks)):
                old = self.c_blocks[i]
                if not self.allocator.c_is_shared(old):
                    continue
                if i == tail and self.length % self.block_size:
                    self.allocator.c_copy_page(taken[used], old)
                self.c_blocks[i] = taken[used]
                used += 1
                if self.saved == NULL or not saved_takes(self.saved, <int32_t>i, old):
                    self.allocator.c_free(old)
        while self.num_blocks < needed:
            self.c_blocks[self.num_blocks] = taken[used]
            self.num_blocks += 1
            used += 1
        self.length = target
        return used

    cdef void c_slots(self, int64_t first, int64_t n, int64_t *slots_out) noexcept nogil:
        """The slots of tokens first to first + n - 1, all of them below the length and in blocks that it has."""
        cdef int64_t block = first // self.block_size, offset = first % self.block_size, i
        for i in range(n):
            slots_out[i] = <int64_t>self.c_blocks[block] * self.block_size + offset
            offset += 1
            if offset == self.block_size:
                offset = 0
                block += 1

    cdef bint c_holds_all(self) noexcept nogil:
        cdef int32_t i
        for i in range(self.first_block, self.num_blocks):
            if self.allocator.c_ref_count(self.c_blocks[i]) < 1:
                return False
        return True

    cdef pp_status c_give_back(self, int32_t begin, int32_t end) noexcept nogil:
        if self.saved == NULL:
            return self.allocator.c_free_n(self.c_blocks + begin, end - begin)
        return saved_give_back(self.saved, self.allocator, self.c_blocks, begin, end)

    cdef pp_status c_truncate(self, int64_t new_len) noexcept nogil:
        """In a transaction, a last block that is cut within is shared with it: what comes next is written elsewhere."""
        cdef pp_status status
        cdef int32_t keep, last
        cdef bint cut = False
        if not 0 <= new_len <= self.length or self.is_closed:
            return PP_INVALID_ARGUMENT
        if new_len < <int64_t>self.first_block * self.block_size and new_len:
            return PP_INVALID_ARGUMENT
        keep = <int32_t>((new_len + self.block_size - 1) // self.block_size)
        if self.saved != NULL and new_len < self.saved.length and new_len % self.block_size:
            last = self.c_blocks[keep - 1]
            cut = saved_needs(self.saved, keep - 1, last)
            if cut:
                status = self.allocator.c_share_n(&last, 1)
                if status != PP_OK:
                    return status
        status = self.c_give_back(max(keep, self.first_block), self.num_blocks)
        if status == PP_OK:
            if cut:
                saved_takes(self.saved, keep - 1, last)
            self.c_forget(keep)
            self.length = new_len
        elif cut:
            self.allocator.c_free(last)
        return status

    cdef pp_status c_drop_before(self, int64_t position) noexcept nogil:
        cdef pp_status status = PP_OK
        cdef int32_t first, i
        if position < 0 or self.is_closed:
            return PP_INVALID_ARGUMENT
        first = <int32_t>(min(position, self.length) // self.block_size)
        if first > self.first_block:
            status = self.c_give_back(self.first_block, first)
            if status == PP_OK:
                for i in range(self.first_block, first):
                    self.c_blocks[i] = -1
                self.first_block = first
        return status

    cdef pp_status c_release(self) noexcept nogil:
        cdef pp_status status = self.c_truncate(0)
        if status == PP_OK:
            self.generations += 1
            self.generation = self.generations
        return status

    cdef pp_status c_close(self) noexcept nogil:
        cdef pp_status status = self.c_release()
        if status == PP_OK:
            self.is_closed = True
        return status

    cdef pp_status c_adopt(self, const int32_t *blocks, Py_ssize_t n, int64_t num_tokens) noexcept nogil:
        cdef pp_status status
        if self.num_blocks or self.is_closed or num_tokens < 0 or num_tokens > MAX_TOKENS:
            return PP_INVALID_ARGUMENT
        if n != num_tokens // self.block_size + (num_tokens % self.block_size != 0):
            return PP_INVALID_ARGUMENT
        if n > self.max_blocks_per_seq:
            return PP_OVER_MAXIMUM
        status = self.allocator.c_share_n(blocks, n)
        if status == PP_OVER_MAXIMUM:
            return PP_INVALID_BLOCK
        if status == PP_OK:
            memcpy(self.c_blocks, blocks, <size_t>n * sizeof(int32_t))
            self.num_blocks = <int32_t>n
            self.length = num_tokens
        return status

    cdef void c_forget(self, int32_t keep) noexcept nogil:
        memset(self.c_blocks + keep, 0, <size_t>(self.num_blocks - keep) * sizeof(int32_t))
        self.num_blocks = keep
        self.first_block = min(self.first_block, keep)

    cdef pp_status c_begin(self) noexcept nogil:
        cdef SavedTable *saved
        if self.is_closed:
            return PP_INVALID_ARGUMENT
        saved = saved_new(
            self.c_blocks, self.first_block, self.num_blocks, self.length, self.generation, self.saved
        )
        if saved == NULL:
            return PP_NO_MEMORY
        self.saved = saved
        return PP_OK

    cdef pp_status c_commit(self) noexcept nogil:
        cdef SavedTable *saved = self.saved
        if saved == NULL:
            return PP_INVALID_ARGUMENT
        self.saved = saved.outer
        saved_commit(saved, self.allocator, self.c_blocks, self.num_blocks, self.length)
        return PP_OK

    cdef pp_status c_abort(self) noexcept nogil:
        cdef SavedTable *saved = self.saved
        cdef int32_t first = self.first_block, end = self.num_blocks
        if saved == NULL:
            return PP_INVALID_ARGUMENT
        self.saved = saved.outer
        self.first_block = saved.first
        self.num_blocks = saved.end
        self.length = saved.length
        self.generation = saved.generation
        self.is_closed = False
        saved_abort(saved, self.allocator, self.c_blocks, first, end)
        return PP_OK

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        name = type(self).__name__ if self._label is None else f"{type(self).__name__} {self._label!r}"
        if self.is_closed:
            return f"<{name}: closed>"
        held = self.num_blocks - self.first_block
        return f"<{name}: {self.length} tokens, {held} blocks of {self.block_size}>"

    @property
    def open_transactions(self):
        """How many transactions have begun and not ended."""
        cdef const SavedTable *saved = self.saved
        cdef int count = 0
        while saved != NULL:
            count += 1
            saved = saved.outer
        return count

    cdef list references(self):
        return list_ids(self.c_blocks + self.first_block, self.num_blocks - self.first_block) + saved_references(
            self.saved
        )
