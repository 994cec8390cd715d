"""torch tensors of every kind as arguments of every call. `make test-torch` creates an environment with torch.

tests/memory/test_dlpack_import.py has these tests for objects like tensors, where torch is not installed.
"""

import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    BlockTables,
    InvalidBlock,
    InvalidSlot,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    SsmStatePool,
    StateLayout,
    decode,
    prefill,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own warnings at import
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int32, torch.int64]


class Batch:
    """Return three sequences in a pool, one of them empty, and queries for them."""

    def __init__(self, dtype="bfloat16"):
        random = torch.Generator().manual_seed(3)
        self.pool = KvCachePool.from_layout(KvLayout(2, 4, 64, dtype=dtype), 12)
        self.states = [PagedSeqState(self.pool.allocator) for _ in range(3)]
        for state, length in zip(self.states, (20, 33, 0), strict=True):
            k, v = torch.randn(2, length, 4, 64, generator=random)
            self.pool.append(1, state.append(length), k, v)
        tables = BlockTables(3, 4).fill(self.states)
        self.tables, self.lens = torch.from_numpy(tables.block_tables.copy()), torch.tensor([20, 33, 0]).int()
        self.starts = torch.tensor([0, 2, 3, 4]).int()
        self.q = torch.randn(4, 8, 64, generator=random)

    def attend(self, **changed):
        options = {
            "q": self.q, "pool": self.pool, "layer": 1, "block_tables": self.tables, "seq_lens": self.lens,
            "query_start_loc": self.starts,
        } | changed  # fmt: skip
        return prefill(**options)


@pytest.fixture
def batch():
    return Batch()


@pytest.fixture
def expected(batch):
    return batch.attend(
        q=batch.q.numpy(), block_tables=batch.tables.numpy(), seq_lens=batch.lens.numpy(),
        query_start_loc=batch.starts.numpy(),
    )  # fmt: skip


@pytest.mark.parametrize("ints", INTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_takes_tensors_and_writes_to_one(batch, expected, ints, dtype):
    out = torch.full((4, 8, 64), 5.0).to(dtype)
    tables = {"block_tables": batch.tables, "seq_lens": batch.lens, "query_start_loc": batch.starts}
    assert batch.attend(out=out, **{name: tensor.to(ints) for name, tensor in tables.items()}) is out
    assert torch.equal(out, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_of_one_token_each(batch, dtype):
    out = torch.empty((3, 8, 64), dtype=dtype)
    q = torch.randn(3, 8, 64).to(dtype)
    per_head = torch.randn(8).to(dtype)
    options = {"sinks": per_head, "alibi_slopes": per_head}
    got = decode(q, batch.pool, 1, batch.tables, batch.lens, out=out, window_left=None, logits_soft_cap=None, **options)
    options = {name: array.float().numpy() for name, array in options.items()}
    right = decode(q.float().numpy(), batch.pool, 1, batch.tables.numpy(), batch.lens.numpy(), **options)
    assert got is out and torch.equal(out, torch.from_numpy(right).to(dtype))


def test_tensors_as_models_have_them(batch, expected):
    heads_first = batch.q.transpose(0, 1).contiguous()
    fused = torch.zeros(4, 3, 8, 64)
    fused[:, 1] = batch.q
    wide_tables = torch.zeros(6, 9, dtype=torch.int64)
    wide_tables[::2, 2:6] = batch.tables
    with torch.inference_mode():
        inference = batch.q.clone()
        inference_out = torch.empty_like(inference)
    forms = [
        {"q": heads_first.transpose(0, 1)},
        {"q": fused[:, 1]},
        {"q": torch.nn.Parameter(batch.q)},
        {"q": inference},
        {"block_tables": wide_tables[::2, 2:6]},
        {"q": torch.nn.Parameter(batch.q) * 1},  # part of an autograd graph
    ]
    for form in forms:
        np.testing.assert_array_equal(batch.attend(**form), expected)
    assert batch.attend(out=inference_out) is inference_out
    np.testing.assert_array_equal(inference_out.numpy(), expected)
    out = torch.zeros(5, 8, 64)
    batch.attend(out=out[1:])
    np.testing.assert_array_equal(out[1:].numpy(), expected)
    assert not out[0].any()


def test_an_out_that_cannot_be_written_to(batch):
    for out, error, words in (
        (torch.zeros(4, 8, 64, dtype=torch.float64), TypeError, ("out", "float32")),
        (torch.zeros(4, 8, 32), ValueError, ("out", "(4, 8, 64)", "(4, 8, 32)")),
        (torch.zeros(8, 4, 64).transpose(0, 1), ValueError, ("out",)),
        (batch.q, ValueError, ("out", "q")),
    ):
        before = out.clone()
        with refuses(error, *words):
            batch.attend(out=out)
        assert torch.equal(out, before)


def test_wrong_tensors_are_named(batch):
    sparse = torch.eye(4).to_sparse()
    for changed, error, words in (
        ({"q": batch.q.double()}, TypeError, ("q", "float32", "float16", "bfloat16")),
        ({"block_tables": batch.tables.float()}, TypeError, ("block_tables", "int32", "int64")),
        ({"seq_lens": batch.lens.bool()}, TypeError, ("seq_lens", "int32", "int64")),
        ({"seq_lens": batch.lens[:, None]}, ValueError, ("seq_lens", 1, 2)),
        ({"seq_lens": batch.lens.long() + 2**40}, ValueError, ("seq_lens[0]", 1099511627796)),
        ({"block_tables": batch.tables.long() + 2**40}, InvalidBlock, ("block_tables[0, 0]", 2147483647)),
        ({"q": batch.q.to("meta")}, ValueError, ("read",)),
        ({"q": sparse}, ValueError, ("read",)),
        ({"q": torch.zeros(1, 1, 1, 1, 1)}, ValueError, (4, 5)),
    ):
        with refuses(error, *words):
            batch.attend(**changed)


def test_lazy_bits_are_refused(batch):
    values = torch.randn(4, 4, 64, dtype=torch.complex64)
    negated = torch.complex(values.real, values.imag).conj().imag  # a view with the lazy negative bit
    assert negated.is_neg()
    slots = torch.tensor([0, 1, 2, 3])
    before = memoryview(batch.pool).tobytes()
    plain = values.real.contiguous()
    for name, arguments in {"k": (negated, plain), "v": (plain, negated)}.items():
        with refuses(ValueError, name, "resolve_neg"):
            batch.pool.append(1, slots, *arguments)
    with pytest.raises((TypeError, ValueError)):  # a lazily conjugated tensor is complex
        batch.pool.append(1, slots, values.conj(), values.conj())
    assert memoryview(batch.pool).tobytes() == before
    with refuses(ValueError, "q"):
        batch.attend(q=torch._neg_view(batch.q))
    out = torch.zeros(4, 8, 64)
    with refuses(ValueError, "out"):
        batch.attend(out=torch._neg_view(out))
    batch.attend(q=torch._neg_view(batch.q).resolve_neg())


def test_tensors_without_memory_are_refused(batch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):
        """A subclass without its own memory, like many quantised and distributed tensors."""

        @staticmethod
        def __new__(cls, tensor):
            return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(batch.q)
    for tensor in (fake, Wrapper(batch.q)):
        with pytest.raises(ValueError, match=r"^q: this (FakeTensor|Wrapper) (has no memory|cannot be read: )"):
            batch.attend(q=tensor)


@pytest.mark.parametrize("ints", INTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_append(ints, dtype):
    pool = KvCachePool.from_layout(KvLayout(1, 2, 16), 4)
    k, v = torch.randn(2, 5, 2, 16).to(dtype)
    slots = torch.tensor([3, -1, 20, 17, 0]).to(ints)
    pool.append(0, slots, torch.nn.Parameter(k), v.transpose(0, 1).contiguous().transpose(0, 1))
    got = pool.gather(0, torch.tensor([0, 1]), 32)
    for rows, given in zip(got, (k, v), strict=True):
        assert torch.equal(torch.from_numpy(rows)[slots[slots >= 0].long()], given[slots >= 0].bfloat16().float())
    with refuses(InvalidSlot, "slot", 64, 1):
        pool.append(0, torch.tensor([0, 64, 1, 2, 3]).to(ints), k, v)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_take_dtypes_of_torch(dtype):
    name = str(dtype).removeprefix("torch.")
    layout = KvLayout(1, 2, 16, dtype=dtype)
    assert layout == KvLayout(1, 2, 16, dtype=name) and layout.dtype == KvCachePool(4, 1, dtype).dtype == name
    assert torch.from_dlpack(KvCachePool.from_layout(layout, 2)).dtype == dtype
    states = StateLayout(layers=[{"s": ((2,), dtype)}])
    assert states == StateLayout(layers=[{"s": ((2,), name)}])
    with refuses(ValueError, "dtype", "float32", "float16", "bfloat16", "int16"):
        KvLayout(1, 2, 16, dtype=torch.int16)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.float64])
def test_views_become_tensors_of_their_dtype(dtype):
    states = SsmStatePool.from_layout(StateLayout(layers=[{"s": ((2, 3), dtype)}]), 4)
    tensor = torch.from_dlpack(states.view(0, "s"))
    assert tensor.dtype == dtype and tensor.shape == (4, 2, 3)
    tensor[2] = 3
    row = torch.from_dlpack(states.slot(2).state.view(0, "s"))
    assert row.dtype == dtype and (row == 3).all()
    if dtype in FLOATS:
        pool = KvCachePool(8, 2, dtype)
        torch.from_dlpack(pool.page(1)).fill_(2)
        pages = torch.from_dlpack(pool.numpy())
        assert pages.dtype == dtype and pages[1].eq(2).all() and not pages[0].any()
    torch.from_numpy(states.view(0, "s"))  # the uint16 bits: from_numpy does not support bfloat16


def test_views_are_the_same_with_ml_dtypes_and_without():
    look = (
        "import sys; sys.modules['ml_dtypes'] = None if sys.argv[1] == 'without' else __import__('ml_dtypes')\n"
        "import torch\n"
        "from pagepool import *\n"
        "states = SsmStatePool.from_layout(StateLayout(layers=[{'conv': ((6, 4), 'bfloat16')}]), 4)\n"
        "pool = KvCachePool.from_layout(KvLayout(1, 1, 8), 2)\n"
        "for view in states.view(0, 'conv'), pool.numpy(), pool.page(0):\n"
        "    print(view.dtype, torch.from_numpy(view).dtype, torch.from_dlpack(view).dtype)\n"
    )
    pytest.importorskip("ml_dtypes", reason="the test needs ml_dtypes")
    with_it, without = (
        subprocess.run([sys.executable, "-c", look, word], capture_output=True, text=True, check=True)
        for word in ("with", "without")
    )
    assert with_it.stdout == without.stdout == "uint16 torch.uint16 torch.bfloat16\n" * 3


def test_ids_of_blocks():
    allocator = BlockAllocator(8)
    ids = torch.from_numpy(allocator.allocate_n(6))
    allocator.share(ids.long())
    allocator.free(ids)
    allocator.free(ids[::2])
    assert allocator.ref_count(ids[1]) == 1 and allocator.free_count == 5
    with refuses(InvalidBlock, "block", 99):
        allocator.free(torch.tensor([1, 99]))
    with pytest.raises(TypeError, match="a block id must be an integer"):
        allocator.free(torch.tensor([1.0]))


def test_the_cost_of_a_tensor(batch):
    """With torch's exchange API, an argument costs less than 1 us more than a NumPy array."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no __dlpack_c_exchange_api__")
    tensors = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4, 64), torch.zeros(1, 4, 64))

    def seconds(arguments):
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(500):
                batch.pool.append(0, *arguments)
            best = min(best, time.perf_counter() - begin)
        return best / 500

    assert seconds(tensors) - seconds([tensor.numpy() for tensor in tensors]) < 3e-6


def test_the_package_does_not_import_torch():
    look = "import sys, pagepool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
