# C callers have pagepool/cpu.h and pagepool/threads.h.

# The default of `decode`; once for each value of PAGEPOOL_NUM_THREADS that is none, a RuntimeWarning says so.
cdef int c_num_threads() except -1
