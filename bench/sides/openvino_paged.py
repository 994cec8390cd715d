"""OpenVINO's paged attention on CPU: a model with a single operation, over its own caches of shuffled 32-token blocks.

The operation appends the step's K and V before it attends, so a call writes the last token of every sequence again.
"""

import math

import numpy as np
import openvino
from openvino import opset13
from openvino.op import Parameter, _PagedAttentionExtension

from sides.common import Call
from sides.common import Side as Base

BLOCK_SIZE = 32
FILL_BLOCKS = 64  # blocks per call that fills the caches
PRECISIONS = {
    "float32": ("f32", "f32"),
    "float16": ("f16", "f32"),
    "bfloat16": ("bf16", "bf16"),
    "int8": ("u8", "f32"),
}  # cache, arithmetic


def model(num_qo_heads, num_kv_heads, head_dim):
    """Build the paged attention operation with all optional features off."""
    parameters = []

    def parameter(name, kind, shape):
        made = Parameter(kind, openvino.PartialShape(shape))
        made.set_friendly_name(name)
        made.output(0).get_tensor().set_names({name})
        parameters.append(made)
        return made.output(0)

    def constant(value, kind):
        return opset13.constant(np.array(value, dtype=kind)).output(0)

    real, whole, any_type = openvino.Type.f32, openvino.Type.i32, openvino.Type.dynamic
    any_cache = openvino.PartialShape.dynamic(4)
    operation = _PagedAttentionExtension(
        [
            parameter("q", real, [-1, num_qo_heads * head_dim]),
            parameter("k", real, [-1, num_kv_heads * head_dim]),
            parameter("v", real, [-1, num_kv_heads * head_dim]),
            parameter("key_cache.0", any_type, any_cache),
            parameter("value_cache.0", any_type, any_cache),
            parameter("past_lens", whole, [-1]),
            parameter("subsequence_begins", whole, [-1]),
            parameter("block_indices", whole, [-1]),
            parameter("block_indices_begins", whole, [-1]),
            constant(1 / math.sqrt(head_dim), np.float32),
            constant(0, np.int32),  # sliding window
            constant([], np.float32),  # ALiBi slopes
            parameter("max_context_len", whole, []),
            *(constant([], np.int32) for _ in range(3)),  # scores, rotated blocks and their deltas
            *(constant([], np.float32) for _ in range(2)),  # rotation table, sparse attention's threshold
            constant(64, np.int32),  # and its block
            constant(8, np.int32),  # and stride
            constant([], np.float32),  # sinks
            constant(0, np.int32),  # from here on: eviction by diversity, token types, a mask among queries
            *(constant([], np.int32) for _ in range(4)),
            constant([], np.uint8),
            constant([], np.int32),
        ]
    )
    information = operation.get_rt_info()
    information["num_k_heads"] = information["num_v_heads"] = num_kv_heads
    information["k_head_size"] = information["v_head_size"] = head_dim
    return openvino.Model([opset13.result(operation.output(0))], parameters, "attention")


def bytes_of(tensor):
    return np.asarray(tensor.data).view(np.uint8)


class Side(Base):
    def __init__(self, case):
        super().__init__(case)
        self.num_seqs, self.context, self.num_kv_heads, self.head_dim = case.k.shape
        self.tables = case.tables(BLOCK_SIZE)
        self.requests = {}
        request = self.request(1)
        first = self.caches(request)
        self.fill(request, first)
        self.pairs = [first]
        for _ in range(case.copies - 1):
            pair = self.caches(request)
            for copy, original in zip(pair, first, strict=True):
                np.copyto(bytes_of(copy), bytes_of(original))
            self.pairs.append(pair)

    def request(self, threads):
        if threads not in self.requests:
            cache, arithmetic = PRECISIONS[self.case.dtype]
            settings = {
                "INFERENCE_NUM_THREADS": threads,
                "KV_CACHE_PRECISION": cache,
                "INFERENCE_PRECISION_HINT": arithmetic,
                "ENABLE_CPU_PINNING": False,
                "PERFORMANCE_HINT": "LATENCY",
            }
            whole = model(self.case.q.shape[1], self.num_kv_heads, self.head_dim)
            self.requests[threads] = openvino.Core().compile_model(whole, "CPU", settings).create_infer_request()
        return self.requests[threads]

    def caches(self, request):
        """Return empty caches for K and V, in the type and shape that the compiled operation expects."""
        pair = []
        for name in ("key_cache.0", "value_cache.0"):
            wanted = request.get_compiled_model().input(name)
            dims = [self.tables.size if dim.is_dynamic else dim.get_length() for dim in wanted.get_partial_shape()]
            pair.append(openvino.Tensor(wanted.get_element_type(), openvino.Shape(dims)))
        return pair

    def give(self, request, pair, **arrays):
        for name, array in arrays.items():
            request.set_tensor(name, openvino.Tensor(array if array.ndim == 0 else np.ascontiguousarray(array)))
        self.point(request, pair)

    def point(self, request, pair):
        request.set_tensor("key_cache.0", pair[0])
        request.set_tensor("value_cache.0", pair[1])

    def tokens(self, values, tokens):
        """float32 (len(tokens), num_kv_heads * head_dim) of int8 K or V"""
        flat = values.reshape(-1, self.num_kv_heads * self.head_dim)
        return flat[tokens].astype(np.float32) * self.case.UNIT

    def fill(self, request, pair):
        """Fill the caches by prefill, each block as a separate sequence."""
        blocks = self.tables.reshape(-1)
        for begin in range(0, blocks.size, FILL_BLOCKS):
            count = min(FILL_BLOCKS, blocks.size - begin)
            tokens = slice(begin * BLOCK_SIZE, (begin + count) * BLOCK_SIZE)
            self.give(
                request,
                pair,
                q=np.zeros((count * BLOCK_SIZE, self.case.q.shape[1] * self.head_dim), np.float32),
                k=self.tokens(self.case.k, tokens),
                v=self.tokens(self.case.v, tokens),
                past_lens=np.zeros(count, np.int32),
                subsequence_begins=np.arange(count + 1, dtype=np.int32) * BLOCK_SIZE,
                block_indices=blocks[begin : begin + count],
                block_indices_begins=np.arange(count + 1, dtype=np.int32),
                max_context_len=np.array(BLOCK_SIZE, np.int32),
            )
            request.infer()

    def calls(self, threads):
        request, copies = self.request(threads), self.case.copies
        last = np.arange(1, self.num_seqs + 1) * self.context - 1
        self.give(
            request,
            self.pairs[0],
            q=self.case.q.reshape(self.num_seqs, -1),
            k=self.tokens(self.case.k, last),
            v=self.tokens(self.case.v, last),
            past_lens=np.full(self.num_seqs, self.context - 1, np.int32),
            subsequence_begins=np.arange(self.num_seqs + 1, dtype=np.int32),
            block_indices=self.tables.reshape(-1),
            block_indices_begins=np.arange(self.num_seqs + 1, dtype=np.int32) * self.tables.shape[1],
            max_context_len=np.array(self.context, np.int32),
        )

        def run(i):
            if copies > 1:
                self.point(request, self.pairs[i % copies])
            request.infer()
            return request

        def output(request):
            return np.array(request.get_output_tensor(0).data, np.float32).reshape(self.case.q.shape)

        return {f"blocks of {BLOCK_SIZE}": Call(run, output)}
