# C callers have pagepool/cpu.h and pagepool/threads.h.

# The default of `decode`. Warns once for each invalid value of PAGEPOOL_NUM_THREADS.
cdef int c_num_threads() except -1
