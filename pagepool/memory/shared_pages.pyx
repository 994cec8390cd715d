"""SharedPages: the view of a process into a pool that several processes share."""

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset, strcmp

from pagepool.csrc cimport pp_kv_layout, pp_lock, pp_lock_acquire, pp_lock_release
from pagepool.memory.token_rows cimport NAMES

import os
from contextlib import nullcontext

from pagepool._arguments import wrong
from pagepool.errors import PoolError, StaleHandle

__all__ = ["GRAIN", "change_limit", "cost_of", "read_pool", "reclaim"]

cdef extern from "errno.h" nogil:
    enum:
        EBADMSG
        EEXIST
        ENOSPC
        ETIMEDOUT
        EUSERS


cdef extern from "os/os.h" nogil:
    enum:
        PP_OS_HUGE_PAGE


# Waits for the lock of another process, in ns: for growth in a step of an engine, and in a pool that has idle memory.
cdef int64_t SHORT_WAIT = 100000000, PROBE = 5000000

GRAIN = PP_OS_HUGE_PAGE  # bytes of a huge page: what a pool may allocate is counted in these


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


cdef int64_t round_up(int64_t num_bytes) noexcept:
    return (num_bytes + PP_OS_HUGE_PAGE - 1) // PP_OS_HUGE_PAGE * PP_OS_HUGE_PAGE


def cost_of(int fd):
    """Returns the name of the memory budget of a file, "" without one, and how many bytes the file takes of it."""
    cdef char[PP_SHARED_BUDGET] budget
    cdef int64_t num_bytes = 0
    cdef int error = pp_shared_read_cost(fd, budget, &num_bytes)
    if error:
        raise OSError(error, f"cannot read the file of a shared pool: {os.strerror(error)}")
    return (<bytes>budget).decode(errors="replace"), num_bytes


def reclaim(int fd, int64_t num_bytes):
    """Lowers the limit of a pool to free `num_bytes` of idle blocks, or all if they have fewer. Closes `fd`.

    Evicts cached blocks that no process holds. Does nothing if the pool is damaged, has 30 processes, or if another
    process keeps its locks for 5 ms.
    """
    cdef SharedPages pages = SharedPages.__new__(SharedPages)
    cdef pp_shared_shape shape
    cdef int64_t limit
    if pp_shared_read(fd, &shape) or pp_shared_open(&pages.view, fd, &shape):
        os.close(fd)
        return
    if num_bytes > 0:
        with nogil:
            limit = pp_index_limit_without(&pages.view, num_bytes)
            pp_index_set_limit(&pages.view, limit, PROBE)


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class SharedPages:
    """Owns the mapping of a shared pool and this process's slot. Internal: `KvCachePool.from_layout` makes it."""

    def __dealloc__(self):
        self.view.lock = NULL  # its allocator is gone
        pp_shared_free(&self.view)

    cdef void close(self) noexcept:
        self.is_closed = True
        with nogil:
            pp_shared_close(&self.view)

    cdef int set_limit(self, int32_t limit) except -1:
        cdef int64_t reached = 0
        if self.budget is None or limit <= pp_shared_limit(&self.view):
            return self.apply_limit(limit, PP_SHARED_PATIENCE)
        with self.budget.grant(self.view.fd, self.missing(limit)) as room:
            reached = self.reach(limit, room)
            if reached < limit:
                raise OSError(
                    ENOSPC,
                    f"{limit} blocks of the shared pool {self.shared!r}: the memory budget {self.budget.name!r} of "
                    f"{self.budget.bytes} bytes has room for {reached}",
                )
            return self.apply_limit(limit, PP_SHARED_PATIENCE)

    def extend(self, n, takes):
        """Raises the limit by `n` blocks or more, or by fewer if the budget is full; returns by how many.

        With `takes`, takes idle blocks of other pools if the budget has too little left. Returns 0 as well if the file
        system is full, or if another process does not release a lock within 0.1 s.
        """
        cdef int64_t limit, wanted, reached = 0, size = self.view.block_bytes
        if self.budget is None:
            return 0
        limit = pp_shared_limit(&self.view)
        wanted = min(limit + (max(n * size, self.budget.step) + size - 1) // size, self.view.num_blocks)
        with self.budget.grant(self.view.fd, self.missing(wanted), takes, SHORT_WAIT / 1e9) as room:
            reached = self.reach(wanted, room)
            limit = pp_shared_limit(&self.view)
            if reached > limit:
                try:
                    self.apply_limit(reached, SHORT_WAIT)
                except (OSError, PoolError):
                    reached = 0
        return max(0, reached - limit)

    cdef int64_t missing(self, int64_t limit) except -1:
        cdef int64_t size = self.view.block_bytes
        if pp_shared_is_stale(&self.view):
            raise self.stale()
        return max(0, round_up(limit * size) - round_up(pp_shared_limit(&self.view) * size))

    cdef int64_t reach(self, int64_t wanted, int64_t room) except -1:
        cdef int64_t size = self.view.block_bytes
        if room < 0:
            return pp_shared_limit(&self.view)
        # The limit is at most the one that the budget has counted: `shrink` needs no lock of the budget.
        return min(wanted, (round_up(pp_shared_limit(&self.view) * size) + room) // size)

    cdef int apply_limit(self, int32_t limit, int64_t patience) except -1:
        cdef int error
        from pagepool.memory import shared_files as files
        more = (limit - pp_shared_limit(&self.view)) * self.view.block_bytes
        if more > 0:
            files.check_room(self.view.fd, more, f"a limit of {limit} blocks for the shared pool {self.shared!r}")
        with nogil:
            error = pp_index_set_limit(&self.view, limit, patience)
        if pp_shared_is_stale(&self.view):
            raise self.stale()
        if error == ETIMEDOUT:
            raise self.refuse_wait("the limit")
        if error:
            reason = os.strerror(error)
            raise OSError(error, f"no memory for {limit} blocks of the shared pool {self.shared!r}: {reason}")
        return 0

    cdef int reap(self, pp_lock *lock) except -1:
        cdef int found
        with nogil:
            pp_lock_acquire(lock)
            found = pp_shared_reap(&self.view)
            pp_lock_release(lock)
            pp_shared_return_pending(&self.view)
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

    cdef object refuse_wait(self, str what):
        who = f"process {self.view.blocker}" if self.view.blocker else "another process"
        return PoolError(f"{who} has locked {what} of the shared pool {self.shared!r} for 2 s: is it stopped?")

    cdef int attach(self, object shared, const pp_shared_shape *shape, int64_t limit) except -1:
        """Attaches to the pool, or makes it."""
        from pagepool.memory import shared_files as files
        self.shared = shared
        self.pid = os.getpid()
        fd = None
        while fd is None:
            if not isinstance(shared, str):
                fd = files.open_memfd(shared)
            else:
                fd = files.open_named(shared)
                if fd is None:
                    fd = self.make(shape, limit)
        try:
            if not isinstance(shared, str):
                self.fill(fd, shape, limit)
            self.open(fd, shape)
        except BaseException:
            os.close(fd)
            raise
        return 0

    cdef object make(self, const pp_shared_shape *shape, int64_t limit):
        """Makes the named pool. Returns its descriptor, or None if another process was first.

        The file has no name until it is finished, so it vanishes if this process is killed.
        """
        cdef int64_t needed = pp_shared_cost(shape.num_blocks, &shape.layout, limit)
        from pagepool.memory import shared_files as files
        with nullcontext(needed) if self.budget is None else self.budget.grant(None, needed) as room:
            if room < needed:
                has = f"the memory budget {self.budget.name!r} of {self.budget.bytes} bytes has {room} left"
                raise OSError(ENOSPC, f"the shared pool {self.shared!r} needs {needed} bytes, {has}")
            fd, is_first = files.unnamed_file(), False
            try:
                self.fill(fd, shape, limit)
                is_first = files.publish(fd, files.path_of(self.shared))
            finally:
                if not is_first:
                    os.close(fd)
            return fd if is_first else None

    cdef int fill(self, int fd, const pp_shared_shape *shape, int64_t limit) except -1:
        """Makes a pool in a file, unless the file has one."""
        cdef uint64_t seed = int.from_bytes(os.urandom(8), "little")
        cdef int error
        from pagepool.memory import shared_files as files
        size = limit * shape.layout.block_bytes
        if not os.fstat(fd).st_size:
            files.check_room(fd, size, f"the shared pool {self.shared!r}")
        with nogil:
            error = pp_shared_create(fd, shape, limit, seed)
        if error == ETIMEDOUT:
            raise PoolError(f"another process has begun to make the shared pool {self.shared!r} and is stopped")
        if error and error != EEXIST:
            reason = os.strerror(error)
            raise OSError(error, f"no room for {size} bytes of the shared pool {self.shared!r}: {reason}")
        if not error and not isinstance(self.shared, str):
            os.close(files.open_memfd(fd))  # seals it
        return 0

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
            if shape != NULL:
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
        if strcmp(found.budget, shape.budget) != 0:
            names = [(<bytes>budget).decode(errors="replace") or None for budget in (found.budget, shape.budget)]
            raise ValueError(f"{which} has memory budget {names[0]!r}, not {names[1]!r}")
        return 0


cdef SharedPages attach_shared(
    object shared, const pp_kv_layout *layout, object channel_scale, int64_t num_blocks, int64_t limit,
    object fingerprint, object budget
):
    cdef pp_shared_shape *shape
    cdef SharedPages pages = SharedPages.__new__(SharedPages)
    if isinstance(shared, bool) or not isinstance(shared, (str, int)):
        raise wrong("shared", "a name, a descriptor of a memfd or None", shared)
    from pagepool.memory import shared_files as files  # here: JSON and paths, which only shared pools need
    text = files.read_fingerprint(fingerprint)
    assert files.MOST_FINGERPRINT == PP_SHARED_FINGERPRINT
    pages.budget = budget
    name = b"" if budget is None else budget.name.encode()
    assert len(name) < PP_SHARED_BUDGET
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
        memcpy(shape.budget, <const char *>name, len(name))
        if budget is None:
            pages.attach(shared, shape, limit)
            return pages
        cost = pp_shared_cost(num_blocks, layout, num_blocks) if pp_shared_bytes(num_blocks, layout) else INT64_MAX
        if cost > budget.bytes:
            raise ValueError(
                f"{num_blocks} blocks need {cost} bytes, the memory budget {budget.name!r} has {budget.bytes}"
            )
        pages.attach(shared, shape, limit)
    finally:
        free(shape)
    return pages


def read_pool(int fd):
    """Returns a dict that describes the pool in a file, without attaching to it. Raises `OSError`.

    EBADMSG: the file is not a pool of this version.
    """
    cdef pp_shared_census *census = <pp_shared_census *>malloc(sizeof(pp_shared_census))
    cdef int error, i
    cdef int64_t allocated
    if census == NULL:
        raise MemoryError("no memory for the header of a shared pool")
    try:
        with nogil:
            error = pp_shared_take_census(fd, census)
            allocated = pp_shared_allocated(fd)
        if error:
            raise OSError(error, os.strerror(error))
        shape = &census.header.shape
        return {
            "layout": dict(numbers_of(&shape.layout)),
            "fingerprint": (<const char *>shape.fingerprint)[: shape.fingerprint_bytes],
            "max_blocks": shape.num_blocks,
            "limit": census.limit,
            "in_use": census.in_use,
            "above_limit": census.above_limit,
            "cached": census.cached,
            "evictable": census.idle,
            "allocated_bytes": allocated,
            "inserted": census.header.inserted,
            "evicted": census.header.evicted,
            "cleared": census.header.forgotten,
            "processes": [
                {"pid": census.header.slots[i].pid, "alive": bool(census.is_live[i]), "blocks": census.held[i]}
                for i in range(PP_SHARED_PROCESSES)
                if census.header.slots[i].state
            ],
        }
    finally:
        free(census)


def change_limit(str name, int32_t limit):
    """Sets the limit of a named pool; takes a slot meanwhile. Raises `PoolError` and `OSError`.

    The limit of a pool with a memory budget can only be lowered.
    """
    cdef SharedPages pages = SharedPages.__new__(SharedPages)
    from pagepool.memory import shared_files as files
    fd = files.open_named(name)
    if fd is None:
        raise PoolError(f"there is no shared pool {name!r}")
    pages.shared = name
    pages.pid = os.getpid()
    try:
        budget = cost_of(fd)[0]
        pages.open(fd, NULL)
    except BaseException:
        os.close(fd)
        raise
    now = pp_shared_limit(&pages.view)
    if budget and limit > now:
        raise PoolError(
            f"the shared pool {name!r} has the memory budget {budget!r} and grows by itself: its limit of {now} blocks "
            f"can only be lowered, not raised to {limit}"
        )
    pages.apply_limit(limit, PP_SHARED_PATIENCE)
