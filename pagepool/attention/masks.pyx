"""MaskBits: converts custom masks in all accepted forms to the bits that the library reads."""

cimport cython
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t

import numpy as np

__all__ = []


cdef void pack_row(uint8_t *bits, int64_t at, const uint8_t *row, Py_ssize_t stride, Py_ssize_t count) noexcept nogil:
    """Sets bits at, at + 1, ... for the elements of the row that are not 0. All bits must be 0 before."""
    cdef Py_ssize_t i
    for i in range(count):
        bits[(at + i) >> 3] |= <uint8_t>((row[i * stride] != 0) << ((at + i) & 7))


@cython.final
cdef class MaskBits:
    """Internal: a custom mask, read and checked."""

    def __dealloc__(self):
        PyMem_Free(self.packed)
        PyMem_Free(self.indptr)
        PyMem_Free(self.widths)
        PyMem_Free(self.seq_lens)
        PyMem_Free(self.query_starts)

    cdef int read(self, object mask, const int32_t *query_starts, const int32_t *seq_lens,
                  Py_ssize_t num_seqs) except -1:
        """Raises TypeError for a dtype, ValueError for a shape that does not go with the counts.

        query_starts (num_seqs + 1,) or NULL, one each, has been checked; seq_lens has not.
        """
        self.num_seqs = num_seqs
        self.copy_counts(query_starts, seq_lens)
        if isinstance(mask, (list, tuple)):
            masks = list(mask)
        else:
            array = np.asarray(mask)
            if array.dtype == np.uint8 and array.ndim == 1:
                return self.take_packed(array)
            if array.dtype != np.bool_:
                raise TypeError(f"custom_mask must be bool, or uint8 in one dimension for bits, not {array.dtype}")
            if not 1 <= array.ndim <= 3:
                raise ValueError(f"custom_mask must have 1, 2 or 3 dimensions, not {array.ndim}")
            if array.ndim == 1:
                masks = self.split(array)
            elif array.ndim == 2:
                masks = [array] * num_seqs
            else:
                masks = list(array)
        if len(masks) != num_seqs:
            raise ValueError(f"custom_mask has masks for {len(masks)} sequences, there are {num_seqs}")
        return self.pack(masks)

    cdef int copy_counts(self, const int32_t *query_starts, const int32_t *seq_lens) except -1:
        """Copies the counts: the size of the mask was checked with them, so the library must read the same counts."""
        cdef size_t count = <size_t>self.num_seqs + 1
        cdef Py_ssize_t s
        self.indptr = <int64_t *>PyMem_Malloc(count * sizeof(int64_t))
        self.widths = <int32_t *>PyMem_Malloc(count * sizeof(int32_t))
        self.seq_lens = <int32_t *>PyMem_Malloc(count * sizeof(int32_t))
        self.query_starts = <int32_t *>PyMem_Malloc(count * sizeof(int32_t))
        if self.indptr == NULL or self.widths == NULL or self.seq_lens == NULL or self.query_starts == NULL:
            raise MemoryError(f"no memory for the masks of {self.num_seqs} sequences")
        for s in range(self.num_seqs + 1):
            self.query_starts[s] = <int32_t>s if query_starts == NULL else query_starts[s]
        for s in range(self.num_seqs):
            self.seq_lens[s] = seq_lens[s]
            if self.seq_lens[s] < 0:
                raise ValueError(f"seq_lens[{s}] is {self.seq_lens[s]}, below 0")
        return 0

    cdef int32_t queries(self, Py_ssize_t seq) noexcept:
        return self.query_starts[seq + 1] - self.query_starts[seq]

    def split(self, array):
        """Splits a flat array into masks of (query tokens, seq_len) or (query tokens, query tokens) each."""
        full = [(self.queries(s), self.seq_lens[s]) for s in range(self.num_seqs)]
        trees = [(rows, rows) for rows, _ in full]
        for shapes in (full, trees):
            if array.size == sum([rows * columns for rows, columns in shapes]):
                ends = np.cumsum([rows * columns for rows, columns in shapes], dtype=np.int64)
                return [array[end - rows * columns:end].reshape(rows, columns)
                        for (rows, columns), end in zip(shapes, ends.tolist(), strict=True)]
        raise ValueError(
            f"custom_mask has {array.size} elements: over the whole sequences it takes "
            f"{sum([a * b for a, b in full])}, over the query tokens alone {sum([a * b for a, b in trees])}"
        )

    cdef int pack(self, list masks) except -1:
        """Packs the bits of each sequence, beginning a new byte. An array that is given several times is packed
        once."""
        cdef int64_t at = 0
        cdef Py_ssize_t s, row, rows, width
        cdef const uint8_t[:, :] view
        arrays, places = [], {}
        for s in range(self.num_seqs):
            if masks[s] is None:
                self.indptr[s], self.widths[s] = -1, 0
                continue
            array = np.asarray(masks[s])
            if array.dtype != np.bool_:
                raise TypeError(f"custom_mask of sequence {s} must be bool, not {array.dtype}")
            most = max(self.seq_lens[s], self.queries(s))
            if array.ndim != 2 or array.shape[0] != self.queries(s) or array.shape[1] > most:
                raise ValueError(
                    f"custom_mask of sequence {s} must have a row for each of its {self.queries(s)} query tokens and "
                    f"columns for at most {most} tokens, not the shape {array.shape}"
                )
            self.widths[s] = <int32_t>array.shape[1]
            if id(masks[s]) not in places:
                places[id(masks[s])] = at
                arrays.append((at, array))
                at += (array.size + 7) // 8
            self.indptr[s] = places[id(masks[s])]
        self.packed = <uint8_t *>PyMem_Calloc(<size_t>at + 1, 1)
        if self.packed == NULL:
            raise MemoryError(f"no memory for masks of {at} bytes")
        self.bits, self.num_bytes = self.packed, at
        for first, array in arrays:
            if not array.size:
                continue
            view = array.view(np.uint8)
            rows, width, at = view.shape[0], view.shape[1], first
            for row in range(rows):
                pack_row(self.packed + at, row * width, &view[row, 0], view.strides[1], width)
        return 0

    cdef int take_packed(self, object array) except -1:
        """Use packed bits without a copy: (query tokens, seq_len) per sequence, little-endian, each beginning a new
        byte."""
        cdef int64_t at = 0
        cdef Py_ssize_t s
        cdef const uint8_t[::1] view
        for s in range(self.num_seqs):
            self.indptr[s] = at
            self.widths[s] = self.seq_lens[s]
            at += (<int64_t>self.queries(s) * self.seq_lens[s] + 7) // 8
        if array.shape[0] != at:
            raise ValueError(f"custom_mask must have {at} bytes for the bits of these sequences, not {array.shape[0]}")
        if at == 0:
            return self.pack([None] * self.num_seqs)
        self.owner = view = np.ascontiguousarray(array)
        self.bits, self.num_bytes = &view[0], at
        return 0
