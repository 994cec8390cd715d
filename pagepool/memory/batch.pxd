# Nothing to cimport: without the GIL an engine calls c_append and c_release of each sequence.
