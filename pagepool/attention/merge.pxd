# Nothing to cimport: callers without the GIL have pp_merge_states (pagepool/attention.h).
