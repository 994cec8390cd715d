"""Uninterrupted: a part of a compiled function within which no other thread runs, though it makes objects."""

cimport cython

__all__ = ["Uninterrupted"]


cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class Uninterrupted:
    """Held in a local variable from where nothing may come between until the function returns. Internal.

    Compiled code that holds the GIL keeps it, but where it makes an object the collector may run, and with it whatever
    Python code ends the garbage that it finds: there, another thread may begin.
    """

    def __cinit__(self):
        self.collects = PyGC_Disable()

    def __dealloc__(self):
        if self.collects:
            PyGC_Enable()
