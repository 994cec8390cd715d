"""SharedPages: the view of a process into a pool that several processes share."""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from pagepool.csrc cimport pp_kv_layout, pp_lock, pp_lock_acquire, pp_lock_release
from pagepool.memory.token_rows cimport NAMES

import os

from pagepool._arguments import wrong
from pagepool.errors import PoolError, StaleHandle

__all__ = []

cdef extern from "errno.h" nogil:
    enum:
        EBADMSG
        EEXIST
        EUSERS


cdef list numbers_of(const pp_kv_layout *layout):
    return [
        ("num_layers", layout.num_layers),
        ("num_kv_heads", layout.num_kv_heads),
        ("head_dim", layout.head_dim),
        ("v_head_dim", layout.v_head_dim),
        ("v_in_k", bool(layout.v_in_k)),
        ("block_size", layout.block_size),
        ("dtype", NAMES.get(layout.dtype, layout.dtype)),
        ("v_dtype", NAMES.get(layout.v_dtype, layout.v_dtype)),
        ("bytes per block", layout.block_bytes),
    ]


# The numbers that follow from the others. Compared field by field, because the bytes between two fields may differ.
cdef tuple order_of(const pp_kv_layout *layout):
    return (
        layout.tiled, layout.item_bytes, layout.k_bytes, layout.v_bytes, layout.head_bytes, layout.group_bytes,
        layout.layer_bytes,
    )


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class SharedPages:
    """Owns the mapping of a shared pool and this process's slot. Internal: `KvCachePool.from_layout` makes it."""

    def __dealloc__(self):
        pp_shared_free(&self.view)

    cdef void close(self, pp_lock *lock) noexcept:
        self.is_closed = True
        pp_lock_acquire(lock)
        pp_shared_leave(&self.view)
        pp_lock_release(lock)
        pp_shared_close(&self.view)

    cdef int set_limit(self, int32_t limit) except -1:
        cdef int error
        from pagepool.memory import shared_files as files
        more = (limit - pp_shared_limit(&self.view)) * self.view.block_bytes
        if more > 0:
            files.check_room(self.view.fd, more, f"a limit of {limit} blocks for the shared pool {self.shared!r}")
        with nogil:
            error = pp_index_set_limit(&self.view, limit)
        if pp_shared_is_stale(&self.view):
            raise self.stale()
        if error:
            reason = os.strerror(error)
            raise OSError(error, f"no memory for {limit} blocks of the shared pool {self.shared!r}: {reason}")
        return 0

    cdef int64_t allocated(self) except -1:
        cdef int64_t size = pp_shared_allocated(self.view.fd)
        if size < 0:
            raise OSError(errno, f"cannot read the size of the shared pool {self.shared!r}: {os.strerror(errno)}")
        return size

    cdef int reap(self, pp_lock *lock) except -1:
        cdef int found
        with nogil:
            pp_lock_acquire(lock)
            found = pp_shared_reap(&self.view)
            pp_lock_release(lock)
        if pp_shared_is_stale(&self.view):
            raise self.stale()
        return found

    cdef object stale(self):
        which = f"the shared pool {self.shared!r}"
        if self.is_closed:
            return StaleHandle(f"{which} is closed")
        if os.getpid() != self.pid:
            return StaleHandle(f"{which} was attached by process {self.pid}, not by {os.getpid()}: attach again")
        return StaleHandle(f"{which} took process {self.pid} for dead and freed its blocks: attach again")

    cdef int attach(self, object shared, const pp_shared_shape *shape, int64_t limit) except -1:
        """Attaches to the pool, or makes it."""
        cdef int fd, error
        cdef bint is_new = False
        cdef uint64_t seed = int.from_bytes(os.urandom(8), "little")
        from pagepool.memory import shared_files as files
        self.shared = shared
        self.pid = os.getpid()
        is_named = isinstance(shared, str)
        while True:
            opened = files.open_named(shared) if is_named else files.open_memfd(shared)
            is_new = opened is None
            fd = files.unnamed_file() if is_new else opened
            try:
                if is_new or not is_named:
                    size = limit * shape.layout.block_bytes
                    if is_new or not os.fstat(fd).st_size:
                        files.check_room(fd, size, f"the shared pool {shared!r}")
                    error = pp_shared_create(fd, shape, limit, seed)
                    if error and error != EEXIST:
                        reason = os.strerror(error)
                        raise OSError(error, f"no room for {size} bytes of the shared pool {shared!r}: {reason}")
                    if not is_named and not error:
                        os.close(files.open_memfd(fd))  # seals it
                    if is_new and not files.publish(fd, shared):
                        os.close(fd)
                        continue
                self.open(fd, shape)
                return 0
            except BaseException:
                os.close(fd)
                raise

    cdef int open(self, int fd, const pp_shared_shape *shape) except -1:
        cdef pp_shared_shape *found = <pp_shared_shape *>malloc(sizeof(pp_shared_shape))
        if found == NULL:
            raise MemoryError("no memory for the header of a shared pool")
        try:
            error = pp_shared_read(fd, found)
            if error == EBADMSG:
                raise PoolError(
                    f"{self.shared!r} is not a shared pool of this version of pagepool, or it is damaged"
                )
            if error:
                raise OSError(error, f"cannot read the shared pool {self.shared!r}: {os.strerror(error)}")
            self.compare(found, shape)
            error = pp_shared_open(&self.view, fd, found)
        finally:
            free(found)
        if error == EUSERS:
            raise PoolError(f"the shared pool {self.shared!r} has {PP_SHARED_PROCESSES} processes, the most possible")
        if error:
            raise OSError(error, f"cannot attach to the shared pool {self.shared!r}: {os.strerror(error)}")
        return 0

    cdef int compare(self, const pp_shared_shape *found, const pp_shared_shape *shape) except -1:
        """Raises ValueError that names the first difference."""
        from pagepool.memory import shared_files as files
        which = f"the shared pool {self.shared!r}"
        for (name, there), (_, here) in zip(numbers_of(&found.layout), numbers_of(&shape.layout)):
            if there != here:
                raise ValueError(f"{which} has {name} {there}, the layout has {here}")
        if found.num_blocks != shape.num_blocks:
            raise ValueError(f"{which} has room for {found.num_blocks} blocks, not {shape.num_blocks}")
        if order_of(&found.layout) != order_of(&shape.layout):
            raise PoolError(f"{which} has another page order: its header is damaged")
        if memcmp(found.channel_scale, shape.channel_scale, sizeof(shape.channel_scale)) != 0:
            there, here = found.channel_scale[:16].hex(), shape.channel_scale[:16].hex()
            raise ValueError(f"{which} has a k_channel_scale with digest {there}, not {here}")
        known = (<const char *>found.fingerprint)[: found.fingerprint_bytes]
        given = (<const char *>shape.fingerprint)[: shape.fingerprint_bytes]
        if known != given:
            name, there, here = files.differing(known, given)
            raise ValueError(f"{which} has {name} {there!r}, not {here!r}")
        return 0


cdef SharedPages attach_shared(
    object shared, const pp_kv_layout *layout, object channel_scale, int64_t num_blocks, int64_t limit,
    object fingerprint
):
    cdef pp_shared_shape *shape
    cdef SharedPages pages = SharedPages.__new__(SharedPages)
    if isinstance(shared, bool) or not isinstance(shared, (str, int)):
        raise wrong("shared", "a name, a descriptor of a memfd or None", shared)
    from pagepool.memory import shared_files as files  # here: JSON and paths, which only shared pools need
    text = files.read_fingerprint(fingerprint)
    assert files.MOST_FINGERPRINT == PP_SHARED_FINGERPRINT
    shape = <pp_shared_shape *>malloc(sizeof(pp_shared_shape))
    if shape == NULL:
        raise MemoryError("no memory for the header of a shared pool")
    try:
        memset(shape, 0, sizeof(pp_shared_shape))
        shape.layout = layout[0]
        shape.num_blocks = num_blocks
        if channel_scale is not None:
            from hashlib import blake2b
            digest = blake2b(channel_scale.tobytes(), digest_size=16).digest()
            memcpy(shape.channel_scale, <const char *>digest, sizeof(shape.channel_scale))
        shape.fingerprint_bytes = len(text)
        memcpy(shape.fingerprint, <const char *>text, len(text))
        pages.attach(shared, shape, limit)
    finally:
        free(shape)
    return pages
