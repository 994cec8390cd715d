"""KvCachePool: one buffer of pages that hold keys and values."""

cimport cython
from cpython.buffer cimport Py_buffer
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport getenv
from libc.string cimport memcpy, strcmp

from pagepool.csrc cimport (
    PP_BF16,
    PP_F16,
    PP_F32,
    PP_INT4,
    PP_INT8,
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_INVALID_SLOT,
    PP_OK,
    pp_dtype,
    pp_kv_layout,
    pp_kv_layout_init_dtypes,
    pp_kv_layout_init_v,
    pp_kv_rows,
    pp_lock_acquire,
    pp_lock_release,
    pp_status,
)
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport (
    IdArray,
    list_ids,
    new_float32,
    read_id,
    read_ids,
    read_number,
    release_ids,
)
from pagepool.memory.dlpack cimport PP_DL_BFLOAT, PP_DL_CPU, PP_DL_FLOAT, PP_DL_IS_COPIED, PP_DL_UINT, export_capsule
from pagepool.memory.kernels cimport c_kv_append_rows, c_kv_gather
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.memory.shared_pages cimport (
    SharedPages,
    attach_shared,
    pp_shared_is_stale,
    pp_shared_processes,
    pp_shared_view,
)
from pagepool.memory.token_rows cimport TokenRows

import numpy as np

from pagepool.config import KvLayout
from pagepool.errors import InvalidBlock, refuse_copy
from pagepool.memory.dlpack import BFloat16Bits
from pagepool._arguments import dtype_name, integer, wrong
from pagepool.memory.owners import warn_of
from pagepool.memory.explain import invalid_slot, unwritable_slot
from pagepool.memory.quantisation import read_channel_scale

__all__ = ["KvCachePool"]

cdef dict KINDS = {"float32": PP_F32, "float16": PP_F16, "bfloat16": PP_BF16, "int8": PP_INT8, "int4": PP_INT4}
cdef dict NAMES = {kind: name for name, kind in KINDS.items()}
# Dtypes of flat pools. Pools of quantised elements also have pages of bytes.
cdef dict ELEMENTS = {"float32": PP_F32, "float16": PP_F16, "bfloat16": PP_BF16, "uint8": PP_INT8}
cdef dict FORMATS = {PP_F32: "f", PP_F16: "e", PP_BF16: "H", PP_INT8: "B"}
# The dtypes of NumPy views of a page. NumPy itself has no bfloat16.
cdef dict VIEWS = {kind: np.dtype(format) for kind, format in FORMATS.items()}
cdef dict DLPACK_CODES = {PP_F32: PP_DL_FLOAT, PP_F16: PP_DL_FLOAT, PP_BF16: PP_DL_BFLOAT, PP_INT8: PP_DL_UINT}
cdef Py_ssize_t MAX_PAGE_SIZE = <Py_ssize_t>1 << 40
# Upper bound per madvise call. The allocator lock is held, so no thread can take one of these pages meanwhile.
cdef int64_t MOST_BYTES = <int64_t>64 << 20


@cython.auto_pickle(False)
@cython.final
@cython.no_gc_clear
cdef class KvCachePool:
    """KvCachePool(page_size, initial_pages, dtype="float32", checked=None)\n--\n
    Pages of K and V in one buffer. The buffer never moves; its memory is committed when it is first touched.

    The constructor makes a flat pool of plain pages (`alloc`, `free`, `page`); `from_layout` makes one that knows
    layers, heads and tokens. `memoryview(pool)` and DLPack export all elements in one dimension (`memoryview` shows
    bfloat16 as uint16). A view keeps the memory alive, not the pool. Any number of threads may append to disjoint
    slots. Raises `ValueError` for sizes out of range or another dtype, `MemoryError` when the system has no room.

    Parameters
    ----------
    page_size
        Elements per page.
    initial_pages
        The number of pages.
    dtype
        "float32", "float16", "bfloat16" or "uint8", or these dtypes of NumPy, ml_dtypes or torch.
    checked
        Finds misuse of blocks, for tests of an engine: see `checked`. None: if PAGEPOOL_CHECK is set.

    Examples
    --------
    >>> pool = KvCachePool(page_size=8, initial_pages=2)
    >>> i = pool.alloc()
    >>> pool.page(i)[:] = 1
    >>> memoryview(pool).tolist()[:9]
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    """

    def __cinit__(self, page_size, initial_pages, dtype="float32", checked=None):
        cdef const char *asked = getenv("PAGEPOOL_CHECK")  # os.environ would need memory
        name = dtype_name("dtype", dtype)
        if name not in ELEMENTS:
            raise ValueError(f"dtype must be one of {', '.join(ELEMENTS)}, not {name!r}")
        elements, pages = integer("page_size", page_size), integer("initial_pages", initial_pages)
        if not 1 <= elements <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size must be from 1 to {MAX_PAGE_SIZE}, not {elements}")
        if not 0 <= pages <= INT32_MAX:
            raise ValueError(f"the number of pages must be from 0 to {INT32_MAX}, not {pages}")
        self.kind = ELEMENTS[name]
        item = VIEWS[self.kind].itemsize
        if elements * pages * item >= 1 << 62:
            raise MemoryError(f"the system has no room for {pages} pages of {elements * item} bytes")
        if checked is None:
            checked = asked != NULL and asked[0] != 0 and strcmp(asked, "0") != 0
        cdef BlockAllocator allocator = BlockAllocator(pages)
        allocator.checked = bool(checked)
        self.buffer = PageBuffer(elements * pages, FORMATS[self.kind], True)
        self.page_size = elements
        self.c_pool.base = self.buffer.base
        self.c_pool.num_blocks = pages
        self.c_pool.layout.dtype = self.c_pool.layout.v_dtype = self.kind
        self.c_pool.layout.item_bytes = item
        self.c_pool.layout.block_bytes = self.page_size * item
        self.adopt(None, allocator)

    def __dealloc__(self):
        if self.allocator is not None:
            self.allocator.c_detach(&self.c_pool)

    cdef int pin(self) except -1:
        if not self.buffer.c_export():
            raise ValueError("the pool is closed")
        if self.allocator.shared != NULL and pp_shared_is_stale(<pp_shared_view *>self.allocator.shared):
            self.buffer.c_return()
            raise (<SharedPages>self.allocator.shared_pages).stale()
        return 0

    cdef void unpin(self) noexcept:
        self.buffer.c_return()

    cdef int check_open(self) except -1:
        if self.buffer.base == NULL:
            raise ValueError("the pool is closed")
        if self.allocator.shared != NULL and pp_shared_is_stale(<pp_shared_view *>self.allocator.shared):
            raise (<SharedPages>self.allocator.shared_pages).stale()
        return 0

    cdef int adopt(self, object layout, BlockAllocator allocator) except -1:
        """Detaches from the previous allocator and attaches to `allocator`."""
        if allocator.max_capacity > self.c_pool.num_blocks:
            raise ValueError(
                f"the allocator has {allocator.max_capacity} blocks, the pool only {self.c_pool.num_blocks} pages"
            )
        if allocator.shared != NULL and allocator.c_num_pools():
            raise ValueError(f"the allocator of a shared pool cannot have a second pool: {self!r}")
        status = allocator.c_attach(&self.c_pool)
        if status == PP_INVALID_ARGUMENT:
            raise ValueError(
                f"block_size must be {allocator.c_block_size()}, that of the allocator's other pools, "
                f"not {self.c_pool.layout.block_size}"
            )
        if status != PP_OK:
            raise MemoryError("no memory to attach the pool to its allocator")
        for holder in allocator.holders() if layout is not None else ():  # they may have been made before any pool
            if getattr(holder, "block_size", layout.block_size) != layout.block_size:
                allocator.c_detach(&self.c_pool)
                wanted = f"{holder.block_size}, that of a {holder.kind} of the allocator"
                raise ValueError(f"block_size must be {wanted}, not {layout.block_size}")
        if self.allocator is not None:
            if self.allocator.checked:  # written only in that case, because other threads may be reading it
                allocator.checked = True
            self.allocator.c_detach(&self.c_pool)
        self.allocator = allocator
        self.layout = layout
        return 0

    @staticmethod
    def from_layout(layout, num_blocks, allocator=None, max_blocks=None, k_channel_scale=None, checked=None, *,
                    shared=None, fingerprint="", budget=None):
        """Makes a pool of `num_blocks` pages, one for each block id; a `KvLayout` says what they hold.

        A pool with quantised elements, or keys and values of different dtypes, shows its pages as bytes (uint8).
        Raises `ValueError` when the allocator may have more blocks than the pool has pages, when a sequence, a prefix
        cache or an open pool of the allocator has another block size, or `max_blocks` is below `num_blocks`.

        Parameters
        ----------
        allocator
            The `BlockAllocator` of the ids of the pages, by default a new one; several pools may share one.
        max_blocks
            How far the pool may grow, by itself or by `grow`; by default it does not. The address space is reserved
            at once, so that pages never move; memory is committed as pages are touched.
        k_channel_scale
            Of quantised keys: float32 (num_layers, num_kv_heads, head_dim), from 1e-15 to 1e15. A key is divided by
            it before it is quantised, a query multiplied; `calibrate_channels` makes it. It is copied. Needed for
            keys of int4, None for those that are not quantised.
        checked
            Finds misuse of blocks, for tests of an engine: see `checked`. None: if PAGEPOOL_CHECK is set. The mode
            is one of the allocator, so all pools that share it are checked. A shared pool cannot be checked.
        shared : str, int or None
            Attach to the pool of this name, or make it: a file in /dev/shm that up to 30 processes of one user share.
            It outlives its processes. An int is the descriptor of a memfd that allows seals. See the guide.
        fingerprint : str or bytes
            What the keys and values of a shared pool depend on, up to 3,584 bytes: a digest of the weights, the
            parameters of RoPE and quantisation, the arithmetic. Processes with another one are refused.
        budget : MemoryBudget or None
            For a pool with a name: a limit in bytes for several pools together. `num_blocks` are allocated when the
            pool is made. A `Scheduler` raises the number to at most `max_blocks`, within the budget.

        Raises
        ------
        ValueError
            Also if a shared pool has another layout, number of blocks, scale, fingerprint or budget. Names the first.
        PoolError
            The file is damaged, belongs to another user, or has 30 processes.
        OSError
            /dev/shm or the budget has too little room (ENOSPC).

        Examples
        --------
        >>> from pagepool import KvLayout
        >>> pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8), num_blocks=4)
        >>> pool.allocator.free_count, pool.page_size
        (4, 256)
        """
        cdef KvCachePool pool
        cdef pp_kv_layout c_layout
        if not isinstance(layout, KvLayout):
            raise TypeError(f"layout must be a KvLayout, not {type(layout).__name__}")
        if allocator is not None and not isinstance(allocator, BlockAllocator):
            raise TypeError(f"allocator must be a BlockAllocator, not {type(allocator).__name__}")
        cdef pp_status status
        if layout.is_quantised:
            status = pp_kv_layout_init_dtypes(
                &c_layout, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.v_head_dim,
                layout.block_size, <pp_dtype><int>KINDS[layout.dtype],
                <pp_dtype><int>KINDS[layout.v_dtype or layout.dtype],
            )
        else:
            status = pp_kv_layout_init_v(
                &c_layout, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.v_head_dim, layout.v_in_k,
                layout.block_size, <pp_dtype><int>KINDS[layout.dtype],
            )
        if status != PP_OK:
            raise ValueError(f"a pool cannot have this layout: {layout}")
        scale = read_channel_scale(k_channel_scale, layout)
        number = integer("num_blocks", num_blocks)
        most = number if max_blocks is None else integer("max_blocks", max_blocks, number, INT32_MAX)
        cdef SharedPages pages = None
        if shared is not None:
            if allocator is not None or checked:
                raise ValueError("a shared pool has an allocator of its own and cannot be checked")
            checked = False
            integer("num_blocks", most, 0, INT32_MAX)
            if budget is not None:
                from pagepool.memory.budget import MemoryBudget
                if not isinstance(budget, MemoryBudget):
                    raise wrong("budget", "a MemoryBudget or None", budget)
                if not isinstance(shared, str):
                    raise ValueError(f"a pool with a memory budget must have a name, not {shared!r}")
            pages = attach_shared(shared, &c_layout, scale, most, number, fingerprint, budget)
        elif fingerprint or budget is not None:
            raise ValueError("a pool that is not shared can have no fingerprint and no budget")
        if allocator is None:
            allocator = BlockAllocator(most if shared is not None else num_blocks, max_blocks)
        own_pages = most if pages is None else 0
        if layout.is_quantised:
            pool = KvCachePool(layout.block_bytes, own_pages, "uint8", checked)
        else:
            pool = KvCachePool(layout.page_size, own_pages, layout.dtype, checked)
        if pages is not None:
            (<BlockAllocator>allocator).join(pages)
            pool.buffer.look_into(pages, pages.view.pages, most * layout.block_bytes // pool.buffer.item_bytes())
            pool.c_pool.base = pool.buffer.base
            pool.c_pool.num_blocks = most
        pool.c_pool.layout = c_layout
        if scale is not None:
            pool.k_channel_scale = scale
            pool.c_pool.k_channel_scale = <const float *><size_t>scale.ctypes.data
        pool.elastic = max_blocks is not None or shared is not None
        pool.adopt(layout, allocator)
        return pool

    cdef int64_t c_first_unwritable(self, const int64_t *slots, int64_t num_tokens) noexcept nogil:
        cdef int64_t i, size = self.c_pool.layout.block_size, end = self.c_pool.num_blocks * size
        if self.allocator.checked:
            for i in range(num_tokens):
                if 0 <= slots[i] < end and self.allocator.c_ref_count(<int32_t>(slots[i] // size)) != 1:
                    return i
        return -1

    cdef pp_status c_append(self, int32_t layer, const int64_t *slots, int64_t num_tokens, const float *k,
                            const float *v, int64_t token_stride, int64_t head_stride) noexcept nogil:
        cdef pp_kv_rows k_rows = pp_kv_rows(k, token_stride, head_stride)
        cdef pp_kv_rows v_rows = pp_kv_rows(v, token_stride, head_stride)
        if self.c_first_unwritable(slots, num_tokens) >= 0:
            return PP_INVALID_SLOT
        return c_kv_append_rows(&self.c_pool, layer, slots, num_tokens, k_rows, v_rows, PP_F32)

    cdef pp_status c_gather(self, int32_t layer, const int32_t *blocks, int64_t num_blocks, int64_t seq_len, float *k,
                            float *v) noexcept nogil:
        return c_kv_gather(&self.c_pool, layer, blocks, num_blocks, seq_len, k, v)

    cdef int32_t read_layer(self, object layer) except -1:
        self.check_open()
        if self.layout is None:
            raise ValueError("a flat pool has no layers: make the pool with KvCachePool.from_layout")
        cdef int64_t number = read_number("layer", layer)
        if not 0 <= number < self.c_pool.layout.num_layers:
            raise ValueError(f"layer must be from 0 to {self.c_pool.layout.num_layers - 1}, not {layer}")
        return <int32_t>number

    def append(self, layer, slot_mapping, k, v=None):
        """Writes the K and V of tokens of one layer into their slots.

        Arrays are read by the buffer protocol or DLPack, for example tensors of torch.

        Checks slots for range, and in checked mode that each is in a block with one reference. Raises `TypeError` for
        another dtype, `ValueError` for a wrong shape, stride or layer and for arrays that overlap the pages of the
        pool, `InvalidSlot` for a refused slot; then nothing was written. Releases the GIL while it copies.

        Parameters
        ----------
        layer
            The number of the layer, from 0.
        slot_mapping : int64 (n_tokens,), contiguous
            `block * block_size + offset`; -1 skips the token. int32 is copied.
        k, v
            (n_tokens, num_kv_heads, head_dim), v with v_head_dim, last axis contiguous: float32 (rounded to nearest
            even) or the pool's dtype, and float16 for bfloat16 pages (rounded). Quantised pages take all three
            dtypes. bfloat16 comes as uint16 bits, ml_dtypes.bfloat16 or by DLPack. Leave v out if the layout has V
            in K.

        Examples
        --------
        >>> import numpy as np
        >>> from pagepool import KvLayout
        >>> pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8), num_blocks=4)
        >>> k = np.ones((2, 1, 8), np.float32)
        >>> pool.append(0, np.array([16, 17]), k, 2 * k)
        >>> pool.gather(0, [1], 2)[1][:, 0, 0]
        array([2., 2.], dtype=float32)
        """
        cdef int32_t number = self.read_layer(layer)
        cdef TokenRows rows = TokenRows.__new__(TokenRows)
        cdef pp_status status = PP_OK
        cdef int64_t unwritable
        rows.read(slot_mapping, k, v, &self.c_pool)
        self.pin()
        with nogil:
            unwritable = self.c_first_unwritable(rows.slots, rows.num_tokens)
            if unwritable < 0:
                status = c_kv_append_rows(
                    &self.c_pool, number, rows.slots, rows.num_tokens, rows.k_rows, rows.v_rows, rows.dtype
                )
        self.unpin()
        if unwritable >= 0:
            slot = rows.slots[unwritable]
            block = slot // self.c_pool.layout.block_size
            raise unwritable_slot(slot, unwritable, block, self.allocator.c_ref_count(block))
        if status == PP_INVALID_SLOT:
            slots = np.asarray(<const int64_t[:rows.num_tokens]>rows.slots)
            raise invalid_slot(slots, self.c_pool.num_blocks * self.c_pool.layout.block_size)
        if status != PP_OK:
            raise ValueError(f"cannot append to layer {number}: status {status}")

    def gather(self, layer, blocks, seq_len):
        """Reads `seq_len` tokens of a sequence; returns (k, v), float32 (seq_len, num_kv_heads, head_dim).

        v has `v_head_dim` instead of `head_dim`.

        `blocks` are the sequence's block ids, a sequence of ints or an array, at least ceil(seq_len / block_size). The
        arrays are new and C-contiguous; 16-bit elements are widened exactly. Raises `InvalidBlock` for an id out of
        range, `ValueError` for too few `blocks`, a layer out of range or a `seq_len` below 0.
        """
        cdef int32_t number = self.read_layer(layer)
        cdef int64_t length = read_number("seq_len", seq_len)
        cdef int64_t needed = (length + self.c_pool.layout.block_size - 1) // self.c_pool.layout.block_size
        cdef IdArray array
        cdef float *k_rows
        cdef float *v_rows
        cdef pp_status status
        if length < 0:
            raise ValueError(f"seq_len cannot be {seq_len}")
        read_ids(blocks, &array)
        try:
            if needed > array.count:
                raise ValueError(f"{length} tokens are in {needed} blocks, {array.count} were given")
            k = new_float32(length, self.c_pool.layout.num_kv_heads, self.c_pool.layout.head_dim, &k_rows)
            v = new_float32(length, self.c_pool.layout.num_kv_heads, self.c_pool.layout.v_head_dim, &v_rows)
            self.pin()
            with nogil:
                status = self.c_gather(number, array.ids, array.count, length, k_rows, v_rows)
            self.unpin()
            if status == PP_INVALID_BLOCK:
                bad = next(b for b in list_ids(array.ids, needed) if not 0 <= b < self.c_pool.num_blocks)
                raise InvalidBlock(f"block {bad} is out of range: the pool has {self.c_pool.num_blocks} blocks")
            if status != PP_OK:
                raise ValueError(f"cannot gather {length} tokens of layer {number}: status {status}")
        finally:
            release_ids(&array)
        return k, v

    def alloc(self):
        """Takes a page; returns its number. Raises `PoolExhausted` when none is free. The page is not cleared."""
        self.check_open()
        return self.allocator.allocate()

    def free(self, i):
        """Frees page i; its content does not change. Raises `InvalidBlock` when it is out of range or free already."""
        self.allocator.free(i)

    def page(self, i):
        """Returns a writable view of page i: `page_size` elements. It keeps the memory.

        bfloat16 comes as uint16, its bits; DLPack shows it as bfloat16 (`torch.from_dlpack`). Any page may be viewed,
        free or not. Raises `InvalidBlock` when i is out of range.
        """
        cdef int32_t number
        self.check_open()
        read_id(i, &number)
        if not 0 <= number < self.c_pool.num_blocks:
            raise InvalidBlock(f"page {number} is out of range: the pool has {self.c_pool.num_blocks} pages")
        offset = number * self.c_pool.layout.block_bytes
        elements = np.frombuffer(self.buffer, VIEWS[self.kind], self.page_size, offset)
        return elements.view(BFloat16Bits) if self.kind == PP_BF16 else elements

    def numpy(self):
        """Returns a writable view (max_blocks, page_size) of all pages. It keeps the memory.

        bfloat16 comes as uint16, its bits; DLPack shows it as bfloat16 (`torch.from_dlpack`), and so does
        `pool.numpy().view(ml_dtypes.bfloat16)`.
        """
        self.check_open()
        # np.asarray would read a MemoryError as "no buffer", and frombuffer refuses an empty buffer.
        dtype = VIEWS[self.kind]
        flat = np.frombuffer(self.buffer, dtype) if self.c_pool.num_blocks else np.empty(0, dtype)
        pages = flat.reshape(self.c_pool.num_blocks, self.page_size)
        return pages.view(BFloat16Bits) if self.kind == PP_BF16 else pages

    def grow(self, num_blocks):
        """Raises the number of blocks to `num_blocks`. Nothing moves; memory is committed when pages are touched.

        Raises `ValueError` when that is below the present number or above `max_blocks`. A pool also grows by itself
        when no block is free.

        >>> from pagepool import KvLayout
        >>> layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8)
        >>> pool = KvCachePool.from_layout(layout, num_blocks=4, max_blocks=16)
        >>> pool.grow(8)
        >>> len(pool.allocator.allocate_n(12)), pool.num_blocks
        (12, 12)
        """
        self.check_open()
        self.allocator.grow(num_blocks)

    def shrink(self, num_blocks=0):
        """Lowers the number of blocks to `num_blocks`, but not below a block in use; returns the new number.

        A block in use keeps its page, so the highest id in use limits the result. Frees memory as `trim` does. Views
        stay valid. Raises `ValueError` when `num_blocks` is below 0 or above the present number.
        """
        self.check_open()
        left = self.allocator.shrink(num_blocks)
        self.trim()
        return left

    def trim(self):
        """Returns the memory of free pages to the operating system; returns how many bytes. Their contents are lost.

        Returns only whole pages of the system, and from a pool of 2 MiB or more only whole huge pages. They are zero
        when they are touched again. Other threads can use the pool meanwhile. A thread that takes or frees blocks waits
        for one call of at most 64 MiB. Does nothing in checked mode, so that free pages stay filled with NaN, and in a
        shared pool, whose memory is allocated up to its capacity: lower that with `shrink`.
        """
        cdef int64_t page = self.c_pool.layout.block_bytes, given = 0, done = 0, begin, end
        cdef int64_t granule = <int64_t>self.buffer.c_granule()
        cdef int32_t first = 0, limit = <int32_t>self.c_pool.num_blocks, length
        cdef int32_t most = <int32_t>min(max(MOST_BYTES // page, 1), INT32_MAX)
        cdef BlockAllocator allocator = self.allocator
        cdef PageBuffer buffer = self.buffer
        self.pin()
        with nogil:
            while not allocator.checked and allocator.shared == NULL:
                pp_lock_acquire(&allocator.lock)
                length = allocator.c_free_run(&first, limit, most)
                begin = max(done, (first * page + granule - 1) // granule * granule)
                end = (first + length) * page // granule * granule
                if end > begin:
                    given += <int64_t>buffer.c_discard(<size_t>begin, <size_t>(end - begin))
                    done = end
                pp_lock_release(&allocator.lock)
                if length == 0:
                    break
                # A long run may end inside a granule. The rest of the granule is checked with the next run.
                first = <int32_t>(done // page) if length == most and end > begin else first + length
        self.unpin()
        return given

    def reap(self):
        """Frees the blocks of processes that died while they were attached to a shared pool; returns their number.

        `allocate` does it by itself when no block is free, and each process when it attaches. Returns 0 for a pool that
        is not shared. O(max_blocks) for each dead process.
        """
        self.check_open()
        if self.allocator.shared == NULL:
            return 0
        return (<SharedPages>self.allocator.shared_pages).reap(&self.allocator.lock)

    def stats(self):
        """Returns `BlockAllocator.stats` with the `bytes` of blocks in use and `capacity_bytes` added.

        A shared pool also has `processes`, the number of attached ones.
        """
        figures = self.allocator.stats()
        size = self.c_pool.layout.block_bytes
        figures["bytes"] = (figures["capacity"] - figures["free"]) * size
        figures["capacity_bytes"] = figures["capacity"] * size
        if self.allocator.shared != NULL:
            figures["processes"] = pp_shared_processes(<pp_shared_view *>self.allocator.shared)
        return figures

    def close(self):
        """Frees the memory now. Raises `BufferError` while views exist; then nothing has changed.

        When the last pool of an allocator is closed, each sequence that still has blocks gets a `ResourceWarning`, as
        from `BlockAllocator.warn_of_leaks`. Pages from `alloc` cause no warning, and dropping a pool without `close`
        warns of nothing. A second call does nothing.
        """
        if not self.buffer.end_exports():
            return
        self.allocator.c_detach(&self.c_pool)  # waits for a thread that copies pages
        self.buffer.give_back()
        self.c_pool.base = NULL
        self.c_pool.num_blocks = 0
        if not self.allocator.c_num_pools():
            if self.allocator.shared != NULL:
                (<SharedPages>self.allocator.shared_pages).close()
            warn_of([leak for leak in self.allocator.leaks() if leak.kind != "other"], "the pool is closed")

    def __enter__(self):
        """Returns the pool; the end of the `with` block closes it. Raises `ValueError` when it is closed."""
        self.check_open()
        return self

    def __exit__(self, *error):
        self.close()

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        if self.buffer.base == NULL:
            return f"<{type(self).__name__}: closed>"
        return (
            f"<{type(self).__name__}: {self.used_pages} of {self.max_blocks} pages in use, "
            f"{self.c_pool.layout.block_bytes} bytes each>"
        )

    @property
    def total_pages(self):
        """The number of pages now; a pool may grow to `max_blocks`."""
        return self.allocator.capacity if self.elastic and self.c_pool.num_blocks else self.c_pool.num_blocks

    @property
    def num_blocks(self):
        """The same as `total_pages`."""
        return self.total_pages

    @property
    def max_blocks(self):
        """The maximum number of pages of the pool."""
        return self.c_pool.num_blocks

    @property
    def free_pages(self):
        """Blocks that the allocator has free."""
        return self.allocator.free_count

    @property
    def used_pages(self):
        """Blocks of the allocator that are in use."""
        return self.allocator.in_use

    @property
    def shared(self):
        """The name or descriptor of a shared pool, None for a pool that is not shared."""
        return None if self.allocator.shared == NULL else (<SharedPages>self.allocator.shared_pages).shared

    @property
    def checked(self):
        """Whether the pool is in checked mode, which finds misuse of blocks.

        `append` refuses slots in blocks that are free or have several references, `decode` and `prefill` refuse tables
        with free blocks, and pages of freed blocks are filled with bits that are NaN in every float dtype, the scales
        of quantised pages among them.
        """
        return bool(self.allocator.checked)

    @property
    def nbytes(self):
        """Bytes of `max_blocks` pages, committed or not."""
        return self.c_pool.num_blocks * self.c_pool.layout.block_bytes

    @property
    def num_layers(self):
        """Layers of the layout. A flat pool has 0 here and in `num_kv_heads`, `head_dim` and `block_size`."""
        return self.c_pool.layout.num_layers

    @property
    def num_kv_heads(self):
        """KV heads of a layer."""
        return self.c_pool.layout.num_kv_heads

    @property
    def head_dim(self):
        """Dims of a key and of a query."""
        return self.c_pool.layout.head_dim

    @property
    def v_head_dim(self):
        """Dims of a value and of a result."""
        return self.c_pool.layout.v_head_dim

    @property
    def block_size(self):
        """Tokens of a block."""
        return self.c_pool.layout.block_size

    @property
    def dtype(self):
        """The dtype of keys, or of the elements of a flat pool."""
        return NAMES[self.c_pool.layout.dtype] if self.layout is not None or self.kind != PP_INT8 else "uint8"

    @property
    def v_dtype(self):
        """The dtype of values."""
        return self.layout.v_dtype or self.dtype if self.layout is not None else self.dtype

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.buffer.fill_view(view, flags)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule of all elements in one dimension: versioned from `max_version` (1, 0) on, else legacy.

        `stream` must be None; `copy=True` gives a copy. Raises `BufferError` for a device that is not this CPU.
        """
        cdef int kind = self.kind
        cdef PageBuffer shown = self.buffer
        self.check_open()
        if stream is not None:
            raise ValueError(f"memory of the CPU has no streams: stream must be None, not {stream}")
        if dl_device is not None and tuple(dl_device) != (PP_DL_CPU, 0):
            raise BufferError(f"the pool is on DLPack device {(PP_DL_CPU, 0)}, not on {tuple(dl_device)}")
        if copy:
            self.pin()
            try:
                shown = PageBuffer(self.buffer.count(), FORMATS[kind], True)
                memcpy(shown.base, self.buffer.base, <size_t>self.nbytes)
            finally:
                self.unpin()
        return export_capsule(
            shown, DLPACK_CODES[kind], max_version is not None and max_version[0] >= 1,
            PP_DL_IS_COPIED if copy else 0,
        )

    def __dlpack_device__(self):
        """DLPack's name of the CPU."""
        return PP_DL_CPU, 0
