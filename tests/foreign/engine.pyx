"""An engine's inner loop outside of pagepool, compiled against the installed package.

A `Worker` runs whole sequences on one pool. It appends the prompt, then for each token appends K and V of every layer
and decodes. At the end it frees the blocks. `run` releases the GIL once and takes it again when all rounds are done.
Workers share only the pool, so any number of them may run at the same time.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free
from posix.stdlib cimport posix_memalign

from pagepool.attention.decode cimport c_decode
from pagepool.csrc cimport (
    PP_EXHAUSTED,
    PP_INVALID_BLOCK,
    PP_INVALID_SLOT,
    PP_NO_MEMORY,
    PP_OK,
    pp_decode_args,
    pp_decode_plan,
    pp_decode_plan_init,
    pp_decode_run,
    pp_decode_workspace,
    pp_status,
)
from pagepool.memory.kv_pool cimport KvCachePool
from pagepool.memory.block_table cimport PagedSeqState

import numpy as np

OK, EXHAUSTED, INVALID_BLOCK, INVALID_SLOT = PP_OK, PP_EXHAUSTED, PP_INVALID_BLOCK, PP_INVALID_SLOT


def append_one(KvCachePool pool not None, int64_t slot, const float[:, ::1] row not None):
    """Write `row`, (num_kv_heads, head_dim), as K and V of layer 0 to a slot; return the status of `c_append`."""
    cdef pp_status status
    with nogil:
        status = pool.c_append(0, &slot, 1, &row[0, 0], &row[0, 0], row.shape[0] * row.shape[1], row.shape[1])
    return status


def decode_one(KvCachePool pool not None, int32_t block, int32_t seq_len, float[:, ::1] out not None):
    """Decode one sequence of one block in layer 0; `out` is both query and result. Return the status of `c_decode`."""
    cdef const float[:, ::1] q = np.array(out)
    cdef pp_status status
    with nogil:
        status = c_decode(
            pool, 0, &q[0, 0], 1, <int32_t>q.shape[0], &block, 1, &seq_len, 1.0, &out[0, 0], NULL, 1
        )
    return status


cdef class Worker:
    """The sequence of one thread.

    pool        the `KvCachePool` that all workers share
    k, v        float32 (num_layers, max_len, num_kv_heads, head_dim): keys and values of each token, as from a model
    q           float32 (num_layers, max_len, num_qo_heads, head_dim): query of each token

    After `run`, `out` is float32 (num_layers, max_len, num_qo_heads, head_dim): the output of every layer for each
    decode step, at the position of its token. `status` is OK or the first error, `tokens` counts the tokens of all
    rounds.
    """

    cdef KvCachePool pool
    cdef PagedSeqState state
    cdef const float[:, :, :, ::1] k, v, q
    cdef float[:, :, :, ::1] outputs
    cdef pp_decode_args args
    cdef int32_t length
    cdef readonly object out
    cdef readonly int status
    cdef readonly int64_t tokens

    def __init__(self, KvCachePool pool not None, k, v, q):
        self.pool = pool
        self.k, self.v, self.q = k, v, q
        self.out = np.full(q.shape, np.nan, np.float32)
        self.outputs = self.out
        block_size = pool.c_pool.layout.block_size
        self.state = PagedSeqState(pool.allocator, block_size, -(-self.k.shape[1] // block_size))
        self.args.pool = &pool.c_pool
        self.args.num_seqs = 1
        self.args.num_qo_heads = <int32_t>self.q.shape[2]
        self.args.q_stride_head = self.q.shape[3]
        self.args.q_stride_seq = self.q.shape[2] * self.q.shape[3]
        self.args.block_tables = self.state.c_blocks
        self.args.block_tables_stride = self.args.block_tables_width = self.state.max_blocks_per_seq
        self.args.seq_lens = &self.length
        self.args.sm_scale = <float>(1.0 / self.q.shape[3] ** 0.5)

    def run(self, int32_t prompt_len, int32_t max_len, int32_t rounds):
        """Run `rounds` sequences: a prompt of `prompt_len` tokens, then decode steps up to `max_len` tokens."""
        if not 0 < prompt_len <= max_len <= self.k.shape[1]:
            raise ValueError(f"prompt_len {prompt_len} and max_len {max_len} must not exceed {self.k.shape[1]} tokens")
        cdef int32_t _
        with nogil:
            for _ in range(rounds):
                self.status = self.sequence(prompt_len, max_len)
                if self.status != PP_OK:
                    break
                self.tokens += max_len

    cdef pp_status sequence(self, int32_t prompt_len, int32_t max_len) noexcept nogil:
        cdef size_t num_bytes
        cdef void *workspace = NULL
        cdef pp_status status, released
        self.length = max_len
        status = pp_decode_workspace(&self.args, &num_bytes)
        if status != PP_OK:
            return status
        if posix_memalign(&workspace, 64, num_bytes) != 0:
            return PP_NO_MEMORY
        self.length = 0
        status = self.append(prompt_len)
        while status == PP_OK and self.length < max_len:
            status = self.append(1)
            if status == PP_OK:
                status = self.decode(workspace, num_bytes)
        free(workspace)
        released = self.state.c_release()
        return released if status == PP_OK else status

    cdef pp_status append(self, int32_t n) noexcept nogil:
        """Reserve n slots and write K and V of every layer into them, a few tokens per call."""
        cdef int64_t slots[16]
        cdef int32_t layer, count
        cdef int64_t heads = self.k.shape[2], dims = self.k.shape[3]
        cdef pp_status status
        while n > 0:
            count = n if n < 16 else 16
            status = self.state.c_append(count, slots)
            for layer in range(<int32_t>self.k.shape[0]):
                if status == PP_OK:
                    status = self.pool.c_append(
                        layer, slots, count, &self.k[layer, self.length, 0, 0], &self.v[layer, self.length, 0, 0],
                        heads * dims, dims)
            if status != PP_OK:
                return status
            self.length += count
            n -= count
        return PP_OK

    cdef pp_status decode(self, void *workspace, size_t num_bytes) noexcept nogil:
        """Attend with the query of the last token, layer by layer."""
        cdef pp_decode_plan plan
        cdef pp_status status
        cdef int32_t layer
        for layer in range(<int32_t>self.k.shape[0]):
            self.args.layer = layer
            self.args.q = &self.q[layer, self.length - 1, 0, 0]
            self.args.out = &self.outputs[layer, self.length - 1, 0, 0]
            status = pp_decode_plan_init(&plan, &self.args, workspace, num_bytes)
            if status != PP_OK:
                return status
            pp_decode_run(&plan, 0, plan.num_units)
        return PP_OK
