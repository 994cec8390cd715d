# Nothing to cimport: Cython uses pagepool.memory.allocator, C the capsule of pagepool/allocator_api.h.
