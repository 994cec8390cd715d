"""ggml's flash attention, the kernel of llama.cpp, through the shared library of llama-cpp-python.

K and V are contiguous per head, (n, kv heads, context, dim), the fastest order for ggml. int8 and int4 use its q8_0 and
q4_0. Its thread pool is OpenMP.
"""

import ctypes
import importlib.util
import math
from pathlib import Path

import numpy as np

from sides.common import Call
from sides.common import Side as Base

TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8, "int4": 2}
BLOCK_BYTES = {"int8": 34, "int4": 18}  # 32 elements: a 16-bit scale, then the elements
SUCCESS = 0


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Plan(ctypes.Structure):
    """ggml_cplan, which is passed by address and returned by value."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


def library():
    """Load libggml and declare the types of the functions in use."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise ImportError("llama_cpp is not installed")
    folder = Path(package.origin).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    functions = {}
    for lib, name, result, arguments in (
        (base, "ggml_init", pointer, [InitParams]),
        (base, "ggml_free", None, [pointer]),
        (base, "ggml_new_tensor_4d", pointer, [pointer, whole, *[ctypes.c_int64] * 4]),
        (base, "ggml_get_data", pointer, [pointer]),
        (base, "ggml_quantize_chunk", ctypes.c_size_t, [whole, pointer, pointer, *[ctypes.c_int64] * 3, pointer]),
        (base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [real] * 3),
        (base, "ggml_new_graph_custom", pointer, [pointer, ctypes.c_size_t, ctypes.c_bool]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (base, "ggml_graph_overhead_custom", ctypes.c_size_t, [ctypes.c_size_t, ctypes.c_bool]),
        (base, "ggml_tensor_overhead", ctypes.c_size_t, []),
        (cpu, "ggml_cpu_init", None, []),
        (cpu, "ggml_graph_plan", Plan, [pointer, whole, pointer]),
        (cpu, "ggml_graph_compute", whole, [pointer, ctypes.POINTER(Plan)]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        functions[name.removeprefix("ggml_")] = function
    return functions


class Side(Base):
    NODES = 8

    def __init__(self, case):
        super().__init__(case)
        self.ggml = library()
        self.ggml["cpu_init"]()
        num_seqs, context, num_kv_heads, head_dim = case.k.shape
        k, v = (self.stored(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (case.k, case.v))
        out_bytes = case.q.nbytes
        each = k.nbytes + v.nbytes + out_bytes + self.ggml["graph_overhead_custom"](self.NODES, False)
        each += 8 * (self.ggml["tensor_overhead"]() + 256)
        self.context = self.ggml["init"](InitParams(case.copies * each + out_bytes + (1 << 20), None, False))
        if not self.context:
            raise MemoryError(f"ggml has no memory for {case.copies} copies of {each} bytes")
        kind, dims = TYPES[case.dtype], (head_dim, context, num_kv_heads, num_seqs)
        self.q = self.tensor(TYPES["float32"], (head_dim, 1, case.q.shape[1], num_seqs), case.q)
        self.graphs = [self.graph(self.tensor(kind, dims, k), self.tensor(kind, dims, v)) for _ in range(case.copies)]
        self.work = None

    def stored(self, values):
        """Convert int8 values times a power of two to the dtype's bytes: exact, except for quantised dtypes."""
        exact, dtype = values.astype(np.float32) * self.case.UNIT, self.case.dtype
        if dtype == "bfloat16":
            return (exact.view(np.uint32) >> 16).astype(np.uint16)
        if dtype not in BLOCK_BYTES:
            return exact.astype(dtype)
        quantised = np.empty(exact.size // 32 * BLOCK_BYTES[dtype], np.uint8)
        rows, dims = exact.size // exact.shape[-1], exact.shape[-1]
        ends = exact.ctypes.data, quantised.ctypes.data
        written = self.ggml["quantize_chunk"](TYPES[dtype], *ends, 0, rows, dims, None)
        if written != quantised.nbytes:
            raise RuntimeError(f"ggml wrote {written} bytes for {dtype}, expected {quantised.nbytes}")
        return quantised

    def tensor(self, kind, dims, values):
        made = self.ggml["new_tensor_4d"](self.context, kind, *dims)
        ctypes.memmove(self.ggml["get_data"](made), values.ctypes.data, values.nbytes)
        return made

    def graph(self, k, v):
        scale = 1 / math.sqrt(self.case.q.shape[2])
        out = self.ggml["flash_attn_ext"](self.context, self.q, k, v, None, scale, 0.0, 0.0)
        graph = self.ggml["new_graph_custom"](self.context, self.NODES, False)
        self.ggml["build_forward_expand"](graph, out)
        return graph, self.ggml["get_data"](out)

    def calls(self, threads):
        plans = [self.ggml["graph_plan"](graph, threads, None) for graph, _ in self.graphs]
        work = ctypes.create_string_buffer(max(plan.work_size for plan in plans) + 64)
        for plan in plans:
            plan.work_data = ctypes.addressof(work)
        compute, graphs, copies = self.ggml["graph_compute"], self.graphs, self.case.copies

        def run(i, work=work):  # keeps the work buffer alive as long as its plans
            graph, out = graphs[i % copies]
            if compute(graph, plans[i % copies]) != SUCCESS:
                raise RuntimeError("ggml_graph_compute failed")
            return out

        def output(out):
            shape = self.case.q.shape
            flat = (ctypes.c_float * math.prod(shape)).from_address(out)
            return np.array(flat, np.float32).reshape(shape)

        return {"contiguous": Call(run, output)}

    def __del__(self):
        if getattr(self, "context", None):
            self.ggml["free"](self.context)
