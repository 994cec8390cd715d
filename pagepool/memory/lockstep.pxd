# Nothing to cimport: without the GIL an engine calls c_drop_before and c_append of each sequence.
