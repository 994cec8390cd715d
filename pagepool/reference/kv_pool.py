"""Pages in plain Python: a flat pool, and a pool of pages with the K and V of a layout.

Pages store float32 elements as float and 16-bit elements as int. `place` computes the position of one element in its
page, as `include/pagepool/layout.h` defines it.
"""

from __future__ import annotations

from array import array
from itertools import product
from typing import Any

import numpy as np

from pagepool._arguments import integer
from pagepool.config import KV_DTYPES, KvLayout
from pagepool.errors import InvalidBlock, InvalidSlot, PoolError
from pagepool.reference.allocator import BlockAllocator
from pagepool.reference.rounding import bf16_bits, f16_bits, float_of

__all__ = ["KvCachePool", "place"]

GROUP = 16  # tokens per group in tiled layouts
V_RUN = 64  # dims of V that are stored contiguously


def place(layout: KvLayout, layer: int, head: int, token: int, dim: int, is_v: bool) -> int:
    """Return the index in a page of one element of K or V of a block's `token`. V in K has the index of K."""
    tiled = layout.block_size % GROUP == 0
    group_tokens = GROUP if tiled else layout.block_size
    groups = layout.block_size // group_tokens
    group, token = divmod(token, group_tokens)
    is_v = is_v and not layout.v_in_k
    start = (layer * groups + group) * layout.token_size + head * (layout.token_size // layout.num_kv_heads)
    if is_v:
        start += layout.head_dim
    return start * group_tokens + _within_head(layout, tiled, token, dim, is_v)


def _within_head(layout: KvLayout, tiled: bool, token: int, dim: int, is_v: bool) -> int:
    pairs = layout.dtype == "bfloat16"  # 32-bit words hold pairs: two dims of K, or two tokens of V
    if not tiled:
        return token * (layout.v_head_dim if is_v else layout.head_dim) + dim
    if not is_v:
        return dim // 2 * (2 * GROUP) + token * 2 + dim % 2 if pairs else dim * GROUP + token
    run, column = divmod(dim, V_RUN)
    width = min(V_RUN, layout.v_head_dim - run * V_RUN)
    start = run * V_RUN * GROUP
    if pairs:
        return start + token // 2 * (2 * width) + column * 2 + token % 2
    return start + token * width + column


class KvCachePool:
    """Pages of `page_size` elements. The memory of a page is made, and zeroed, at its first use.

    >>> pool = KvCachePool(page_size=4, initial_pages=2)
    >>> page = pool.page(pool.alloc())
    >>> page[:] = 1
    >>> pool.page(0).tolist(), pool.free_pages
    ([1.0, 1.0, 1.0, 1.0], 1)
    """

    def __init__(self, page_size: int, initial_pages: int, dtype: str = "float32") -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(KV_DTYPES)}, not {dtype!r}")
        self._init(integer("page_size", page_size, 0), dtype, BlockAllocator(initial_pages), None, initial_pages)

    def _init(self, page_size: int, dtype: str, allocator: Any, layout: KvLayout | None, pages: int) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.allocator = allocator
        self.layout = layout
        self.total_pages = pages
        self._pages: dict[int, array[Any]] = {}

    @classmethod
    def from_layout(
        cls, layout: KvLayout, num_blocks: int, allocator: Any = None, max_blocks: int | None = None
    ) -> KvCachePool:
        """Make a pool with one page of `layout` for each block of `allocator` (None: a new one of `num_blocks`).

        With `max_blocks` the pool may grow to that number.

        >>> pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 4)
        >>> pool.append(0, [3], [[[0.5] * 8]], [[[2.0] * 8]])
        >>> k, v = pool.gather(0, [1], 2)
        >>> k[1, 0, 0], v[1, 0, 0], k.shape
        (np.float32(0.5), np.float32(2.0), (2, 1, 8))
        """
        if layout.is_quantised:
            raise ValueError(f"dtype of K and V must be equal and not quantised in the reference, not {layout.dtype}")
        pool = cls.__new__(cls)
        allocator = BlockAllocator(num_blocks, max_blocks) if allocator is None else allocator
        pages = integer("num_blocks", num_blocks if max_blocks is None else max_blocks, 0)
        pool._init(layout.page_size, layout.dtype, allocator, layout, pages)
        if allocator.max_capacity > pages:
            raise ValueError(f"the allocator has {allocator.max_capacity} blocks, the pool has {pages} pages")
        allocator.read_block_size(layout.block_size)
        for owner in allocator._owners:  # owners that are older than the pool chose their own block size
            if owner.block_size != layout.block_size:
                raise ValueError(f"block_size must be {owner.block_size}, not {layout.block_size}")
        allocator.attached.add(pool)
        return pool

    @property
    def num_blocks(self) -> int:
        """Number of pages: one for each block."""
        return self.total_pages

    @property
    def free_pages(self) -> int:
        """Number of pages that `alloc` can return."""
        return int(self.allocator.free_count)

    @property
    def used_pages(self) -> int:
        """Number of pages in use."""
        return int(self.allocator.in_use)

    def alloc(self) -> int:
        """Take a page. It keeps its old contents. Raises `PoolExhausted` if no page is free."""
        return int(self.allocator.allocate())

    def free(self, i: int) -> None:
        """Free page `i` without zeroing it. Raises `InvalidBlock` if it is out of range or free."""
        self.allocator.free(i)

    def page(self, i: int) -> np.ndarray:
        """Return a writable 1-D view of page `i`, uint16 for bfloat16. Raises `InvalidBlock` if it is out of range."""
        dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.dtype]
        return np.frombuffer(self._elements(i), dtype=dtype)

    def copy_page(self, dst: int, src: int) -> None:
        """Copy all layers of page `src` to page `dst`."""
        self._elements(dst)[:] = self._elements(src)

    def append(self, layer: int, slot_mapping: Any, k: Any, v: Any = None) -> None:
        """Write the K and V of tokens, `(n_tokens, num_kv_heads, head_dim or v_head_dim)`, into slots of `layer`.

        Values are float32, rounded to the pool's dtype, or have that dtype (bfloat16 as uint16 bits). Omit `v` if the
        layout stores V in K. A slot of -1 is skipped. Raises `InvalidSlot` for a slot out of range, `ValueError` for a
        wrong shape or layer, `TypeError` for a wrong dtype; then nothing is written.
        """
        layout = self._layout(layer)
        slots = [int(slot) for slot in slot_mapping]
        given = [("k", k, layout.head_dim), ("v", v, layout.v_head_dim)]
        if layout.v_in_k:
            if v is not None:
                raise ValueError(f"v must be None: V is {layout.v_head_dim} of the {layout.head_dim} dims of k")
            given.pop()
        rows = [self._stored(name, values, (len(slots), layout.num_kv_heads, dim)) for name, values, dim in given]
        last = self.total_pages * layout.block_size
        for slot in slots:
            if not -1 <= slot < last:
                raise InvalidSlot(f"slot {slot} is out of range: there are {last} slots")
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            page, offset = self._elements(slot // layout.block_size), slot % layout.block_size
            for is_v, tokens in enumerate(rows):
                for head, elements in enumerate(tokens[token]):
                    for dim, element in enumerate(elements):
                        page[place(layout, layer, head, offset, dim, bool(is_v))] = element

    def gather(self, layer: int, blocks: Any, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of the first `seq_len` tokens of a sequence in `blocks`.

        k is float32 `(seq_len, num_kv_heads, head_dim)`, v has `v_head_dim` dims. Raises `InvalidBlock` if a needed id
        is out of range, `ValueError` for too few blocks.
        """
        layout = self._layout(layer)
        seq_len = integer("seq_len", seq_len, 0)
        needed = [int(block) for block in blocks][: -(-seq_len // layout.block_size)]
        if len(needed) * layout.block_size < seq_len:
            raise ValueError(f"{seq_len} tokens do not fit into {len(needed)} blocks of {layout.block_size}")
        pages = [self._elements(block) for block in needed]
        dims = (layout.head_dim, layout.v_head_dim)
        both = [np.empty((seq_len, layout.num_kv_heads, dim), dtype=np.float32) for dim in dims]
        for is_v, values in enumerate(both):
            for token, head, dim in product(*map(range, values.shape)):
                page, offset = divmod(token, layout.block_size)
                values[token, head, dim] = self._value(pages[page][place(layout, layer, head, offset, dim, bool(is_v))])
        return both[0], both[1]

    def check(self) -> None:
        """Raise `PoolError` if the allocator or the pages are inconsistent."""
        self.allocator.check()
        for i, page in self._pages.items():
            if not 0 <= i < self.total_pages or len(page) != self.page_size:
                raise PoolError(f"page {i} of {self.total_pages} has {len(page)} elements, not {self.page_size}")

    def _elements(self, i: int) -> array[Any]:
        if not 0 <= i < self.total_pages:
            raise InvalidBlock(f"page {i} is out of range: there are {self.total_pages} pages")
        if i not in self._pages:
            code = "f" if self.dtype == "float32" else "H"
            self._pages[i] = array(code, bytes(self.page_size * KV_DTYPES[self.dtype]))
        return self._pages[i]

    def _layout(self, layer: int) -> KvLayout:
        if self.layout is None:
            raise ValueError("a flat pool has no layers: make the pool with from_layout")
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer {layer} is out of range: there are {self.layout.num_layers} layers")
        return self.layout

    def _stored(self, name: str, values: Any, shape: tuple[int, ...]) -> list[Any]:
        """Return `values` as nested lists of stored elements."""
        given = np.asarray(values)
        given = given.astype(np.float32) if isinstance(values, list) else given
        if given.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {given.shape}")
        own = {"float32": ("float32",), "float16": ("float16",), "bfloat16": ("uint16", "bfloat16")}[self.dtype]
        if given.dtype.name not in ("float32", *own):
            raise TypeError(f"{name} must be float32 or {self.dtype}, not {given.dtype.name}")
        if given.dtype.name != "float32":
            return list(given.view(np.uint16).tolist())
        if self.dtype == "float32":
            return list(given.tolist())
        bits = bf16_bits if self.dtype == "bfloat16" else f16_bits
        return [[[bits(value) for value in head] for head in token] for token in given.tolist()]

    def _value(self, element: Any) -> float:
        return float(element) if self.dtype == "float32" else float_of(element, self.dtype)
