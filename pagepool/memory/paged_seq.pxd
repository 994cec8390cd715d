from libc.stdint cimport int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.paged_table cimport PagedTable


cdef class PagedSeqState(PagedTable):
    # Fields, equations and c_ methods are those of PagedTable.
    cdef object failed(self, pp_status status, object number, object wanted)


cdef class SequenceHandle:
    cdef PagedSeqState lent
    cdef readonly int64_t generation
