"""vLLM's CPU kernels over its own paged cache of shuffled blocks. int8 uses its fp8 cache with bfloat16 queries.

vLLM itself chooses the instruction set for each block size: AMX for bfloat16 if the CPU has it.
"""

import math

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from sides.common import Call
from sides.torch_attention import TorchSide, tensor

BLOCK_SIZES = (32, 128)

current_platform.import_kernels()
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # asks the system for permission


class Side(TorchSide):
    def __init__(self, case):
        super().__init__(case)
        num_seqs, context = case.k.shape[:2]
        self.kind = getattr(torch, "bfloat16" if case.dtype == "int8" else case.dtype)
        self.cache = "fp8_e4m3" if case.dtype == "int8" else "auto"
        self.q = torch.from_numpy(case.q).to(self.kind)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32)
        self.lens = torch.full((num_seqs,), context, dtype=torch.int32)
        self.caches = {size: self.filled(size) for size in BLOCK_SIZES if context % size == 0}

    def filled(self, size):
        """Return the block table and `copies` caches, each as two views, K and V."""
        case = self.case
        num_seqs, _, num_kv_heads, head_dim = case.k.shape
        tables = torch.from_numpy(case.tables(size))
        stored = torch.uint8 if self.cache != "auto" else self.kind
        first = torch.zeros(tables.numel(), num_kv_heads, 2 * size, head_dim, dtype=stored)
        for row in range(num_seqs):
            k, v = (tensor(x[row], case.UNIT, self.kind) for x in (case.k, case.v))
            slots = (tables[row].long()[:, None] * size + torch.arange(size)).reshape(-1)
            isa = self.isa(size)
            ops.cpu_attn_reshape_and_cache(k, v, *first.chunk(2, dim=2), slots, isa, kv_cache_dtype=self.cache)
        caches = [first, *(first.clone() for _ in range(case.copies - 1))]
        return tables, [cache.chunk(2, dim=2) for cache in caches]

    def isa(self, size):
        return _get_attn_isa(self.kind, size, self.case.k.shape[3], self.cache)

    def plan(self, size):
        num_seqs, _, num_kv_heads, head_dim = self.case.k.shape
        return ops.cpu_attn_get_scheduler_metadata(
            num_seqs, self.q.shape[1], num_kv_heads, head_dim, self.lens, self.kind, self.starts, True, -1,
            self.isa(size), True, None, self.cache,
        )  # fmt: skip

    def calls(self, threads):
        return {
            f"blocks of {size}, {self.isa(size)}": Call(self.call(self.plan(size), *made), self.output)
            for size, made in self.caches.items()
        }

    def call(self, plan, tables, caches):
        scale, copies, cache = 1 / math.sqrt(self.q.shape[2]), self.case.copies, self.cache

        def run(i):
            ops.cpu_attention_with_kv_cache(
                self.q, *caches[i % copies], self.out, self.starts, self.lens, scale, True, None, -1, tables, 0.0,
                plan, None, None, 1.0, 1.0, cache,
            )  # fmt: skip
            return self.out

        return run
