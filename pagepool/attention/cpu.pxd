# Nothing to cimport: C callers have pagepool/cpu.h.
