"""Holder: what has references to blocks and is in its allocator's list of them."""

cimport cython

__all__ = ["Holder"]


@cython.no_gc
cdef class Holder:
    """Something with references to blocks that its allocator knows. Internal: the base of `PagedSeqState`."""

    kind = "sequence"

    cdef void c_enlist(self, Link *head) noexcept:
        self.link.holder = <void *>self
        self.link.previous = head.previous
        self.link.next = head
        head.previous.next = &self.link
        head.previous = &self.link

    cdef void c_delist(self) noexcept:
        if self.link.next != NULL:
            self.link.next.previous = self.link.previous
            self.link.previous.next = self.link.next
            self.link.next = NULL

    cdef list references(self):
        return []

    @property
    def label(self):
        """Whose it is, for `owners` and `leaks`: a request id, a name or None. May be set at any time.

        Of a subclass of int or str only the number or the text is kept.
        """
        return self._label

    @label.setter
    def label(self, value):
        if value is not None and not isinstance(value, (int, str)):
            raise TypeError(f"a label must be an int, a str or None, not {type(value).__name__}")
        if isinstance(value, str):  # exactly: what a subclass refers to could make a cycle that nobody collects
            value = str.__str__(value)
        elif value is not None:
            value = int.__int__(value)
        self._label = value
