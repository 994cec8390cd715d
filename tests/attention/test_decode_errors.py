"""Bad input to decode and prefill: a clear error, and `out` is unchanged."""

import mmap

import ml_dtypes
import numpy as np
import pytest
from paged_cases import make_case
from refusals import refuses

from pagepool import InvalidBlock, KvCachePool, KvLayout, decode, prefill

SENTINEL = np.float32(12345.0)
NARROW = [np.float16, ml_dtypes.bfloat16, np.uint16]
LAYOUT = KvLayout(2, 2, 16, dtype="float32")
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, in mmap since Python 3.13


@pytest.fixture(params=[decode, prefill], ids=["decode", "prefill"])
def call(request):
    """Call decode or prefill with valid arguments, except the given ones: values, or functions of the valid value."""
    case = make_case(LAYOUT, 2, [40, 0, 17])
    good = dict(zip(("q", "pool", "layer", "block_tables", "seq_lens"), case.args, strict=True))

    def call(**changed):
        out = np.full(case.q.shape, SENTINEL, np.float32)
        args = {**good, "out": out}
        for name, value in changed.items():
            args[name] = value(args[name]) if callable(value) else value
        positional = [args.pop(name) for name in good]
        if request.param is prefill:
            if "query_start_loc" not in args:
                args["query_start_loc"] = np.arange(len(positional[-1]) + 1, dtype=np.int32)
        try:
            return request.param(*positional, **args)
        finally:
            call.untouched = bool((out == SENTINEL).all())

    return call


def changed(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


def refused(call, error, words, **arguments):
    with refuses(error, *(words if isinstance(words, tuple) else (words,))):
        call(**arguments)
    assert call.untouched


def test_good_arguments_are_taken(call):
    call(window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None)
    assert not call.untouched


SHAPES = {
    "q": [(3, 64), (2, 4, 16), (3, 4, 8), (3, 4, 24), (3, 0, 16), (1, 3, 4, 16)],
    "block_tables": [(15,), (2, 5), (3, 1)],
    "seq_lens": [(2,), (3, 1)],
    "out": [(3, 4, 8), (3, 4), (4, 3, 16)],
}
OUT = ("out", "float32", "float16", "bfloat16")
SCALE = ("sm_scale", "-2e38", "2e38")
NUMBERS = ("window_left", "num_threads", "layer")
FACTORS = ("sm_scale", "logits_soft_cap")
# Arguments, the error and what it names.
REFUSED = [
    *(
        ({"block_tables": changed(place, block)}, InvalidBlock, str(block))
        for block in (-1, 6, 2**31 - 1, -(2**31))
        for place in ((0, 0), (0, 2), (2, 1))
    ),
    ({"block_tables": changed((0, 1), -1)}, InvalidBlock, ("block_tables", -1, "query")),  # was given back
    ({"seq_lens": changed(2, -3)}, ValueError, "-3"),
    ({"pool": KvCachePool(64, 4)}, ValueError, "layout"),
    ({"pool": [1, 2, 3]}, TypeError, "pool"),
    *(
        ({name: lambda array, dtype=dtype: np.zeros(array.shape, dtype)}, TypeError, name)
        for name in ("block_tables", "seq_lens")
        for dtype in (np.uint64, np.uint32, np.int16, np.float32, np.float64, ">i8", "M8[s]")
    ),
    *(
        ({"q": lambda q, dtype=dtype: q.astype(dtype)}, TypeError, "q")
        for dtype in (np.float64, np.int32, np.complex64, np.uint8)
    ),
    *(
        ({"out": np.zeros((3, 4, 16), dtype)}, TypeError, OUT)
        for dtype in (np.float64, np.int32, np.uint32, np.int16, np.uint8, bool, ">f4", ">f2", ">u2", "S2", "M8[s]")
    ),
    *(({"out": value}, TypeError, (*OUT, type(value).__name__)) for value in ([0.0], "out", 1.0)),
    ({"out": np.broadcast_to(np.float32(0), (3, 2, 16))}, ValueError, ("out", "read-only")),
    *(
        ({name: lambda array, shape=shape: np.ones(shape, array.dtype)}, ValueError, name)
        for name, shapes in SHAPES.items()
        for shape in shapes
    ),
    ({"seq_lens": np.zeros((3, 1), np.int32)}, ValueError, ("seq_lens", 1, 2)),
    *(({"custom_mask": np.ones(shape, bool)}, ValueError, (1, 2, 3, len(shape))) for shape in ((), (3, 1, 1, 1))),
    *(({"q": np.zeros((3, n, 16), np.float32), "out": None}, ValueError, str(n)) for n in (1, 3, 5)),  # query heads
    *(({"sm_scale": x}, ValueError, (*SCALE, x)) for x in (float("nan"), float("inf"), 1e39, 2.4e38, -2.4e38)),
    *(({"layer": layer}, ValueError, "layer") for layer in (-1, 2, 2**40)),
    *(({"num_threads": n}, ValueError, "num_threads") for n in (0, -1)),
    ({"window_left": -2}, ValueError, "window_left"),
    ({"window_left": 1.5}, TypeError, "window_left"),
    *(({"logits_soft_cap": x}, ValueError, "logits_soft_cap") for x in (-1.0, float("nan"), 1e31, 1e-31)),
    *(({"alibi_slopes": np.ones(shape, np.float32)}, ValueError, "alibi_slopes") for shape in (3, (4, 1))),
    ({"alibi_slopes": np.ones(4)}, TypeError, "alibi_slopes"),
    ({"sinks": np.zeros(5, np.float32)}, ValueError, "sinks"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks"),
    *(({name: "1"}, TypeError, (name, "integer", "str")) for name in NUMBERS),
    *(({name: np.zeros(3, np.int32)}, TypeError, (name, "integer", "ndarray")) for name in NUMBERS),
    *(({name: n}, ValueError, (name, n)) for name, n in zip(NUMBERS, (-(2**70), 10**30, 2**70), strict=True)),
    *(({name: []}, TypeError, (name, "number", "list")) for name in FACTORS),
    *(({name: 10**400}, ValueError, (name, "float")) for name in FACTORS),
    *(
        ({"arithmetic": value}, ValueError, ("arithmetic", "exact", "bf16", repr(value)))
        for value in (None, 1, np.array(["exact", "bf16"]))
    ),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED)
def test_a_wrong_argument_is_named_and_nothing_is_written(call, changes, error, words):
    refused(call, error, words, **changes)


def test_a_length_beyond_the_table(call):
    width = 5  # blocks of 16 tokens
    call(seq_lens=changed(1, 0), block_tables=changed(np.s_[1], 0))
    refused(call, ValueError, str(width * 16 + 1), seq_lens=changed(1, width * 16 + 1))


def test_strides_that_kernels_cannot_walk(call):
    refused(call, ValueError, "q", q=np.zeros((3, 4, 32), np.float32)[:, :, ::2])
    refused(call, ValueError, "q", q=np.zeros((3, 4, 16), np.float32)[:, :, ::-1])
    refused(call, ValueError, "block_tables", block_tables=lambda t: np.repeat(t, 2, axis=1)[:, ::2])
    refused(call, ValueError, "block_tables", block_tables=np.asfortranarray)
    refused(call, ValueError, "seq_lens", seq_lens=lambda lens: np.repeat(lens, 2)[::2])
    refused(call, ValueError, "out", out=np.zeros((3, 4, 32), np.float32)[:, :, ::2])
    refused(call, ValueError, "out", out=np.zeros((3, 8, 16), np.float32)[:, ::2])


def test_an_out_that_cannot_be_written(call):
    out = np.zeros((3, 4, 16), np.float32)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError, TypeError), match=r"read-only|writ"):
        call(out=out)
    assert not out.any()


def test_an_out_that_overlaps_q():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    memory = np.full((5, 4, 16), SENTINEL, np.float32)
    for out in (memory[:3], memory[1:4], memory[2:]):
        memory[:3] = case.q
        before = memory.copy()
        with refuses(ValueError, "out", "q"):
            decode(memory[:3], *case.args[1:], out=out)
        np.testing.assert_array_equal(memory, before)
    memory[:2] = case.q[:2]
    two = case.rows(np.array([0, 1]))
    decode(memory[:2], *two.args[1:], out=memory[2:4])  # adjacent arrays do not overlap


@pytest.mark.parametrize("narrow", NARROW)
def test_an_out_of_16_bit_is_as_long_as_its_elements(narrow):
    case = make_case(LAYOUT, 2, [40, 0, 17])
    expected = case.decode().astype(ml_dtypes.bfloat16 if narrow is np.uint16 else narrow).view(narrow)
    memory = np.zeros(2 * case.q.size, np.float32)
    q = memory[: case.q.size].reshape(case.q.shape)
    q[:] = case.q
    halves = memory.view(narrow)
    for first, overlaps in ((0, True), (2 * q.size - 1, True), (2 * q.size, False)):
        out = halves[first : first + q.size].reshape(q.shape)
        for call in (decode, prefill):
            before = memory.copy()
            starts = {"query_start_loc": np.arange(4, dtype=np.int32)} if call is prefill else {}
            if overlaps:
                with refuses(ValueError, "out", "q"):
                    call(q, *case.args[1:], out=out, **starts)
                np.testing.assert_array_equal(memory.view(np.uint32), before.view(np.uint32))
            else:
                np.testing.assert_array_equal(call(q, *case.args[1:], out=out, **starts), expected)


@pytest.mark.parametrize("narrow", NARROW)
def test_a_16_bit_out_that_overlaps_an_input_is_refused(narrow):
    case = make_case(LAYOUT, 2, [40, 0, 17])
    page = case.pool.page(int(case.block_tables[0, 0])).reshape(-1).view(np.uint8)
    memory = np.zeros(3 * 4 * 16 * 2, np.uint8)
    lens, starts = memory.view(np.int32)[:3], memory.view(np.int32)[4:8]
    lens[:], starts[:] = case.seq_lens, range(4)
    for name, place in (("the pool's pages", page), ("seq_lens", memory), ("query_start_loc", memory)):
        out = place[: memory.size].view(narrow).reshape(case.q.shape)
        before = out.view(np.uint16).copy()
        with refuses(ValueError, "out", name):
            if name == "seq_lens":
                decode(*case.args[:4], lens, out=out)
            else:
                prefill(*case.args, starts, out=out)
        np.testing.assert_array_equal(out.view(np.uint16), before)


def test_an_out_that_overlaps_the_pages():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    page = case.pool.page(int(case.block_tables[0, 0]))
    before = page.copy()
    with refuses(ValueError, "out"):
        case.decode(out=page[: 3 * 4 * 16].reshape(3, 4, 16))
    np.testing.assert_array_equal(page, before)


def test_an_out_that_overlaps_a_packed_mask():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    out = np.full(case.q.shape, SENTINEL, np.float32)
    mask = out.view(np.uint8).reshape(-1)[: 5 + 0 + 3]  # a bit for each token: one query token each
    before = out.copy()
    with refuses(ValueError, "out", "custom_mask"):
        case.decode(out=out, custom_mask=mask)
    np.testing.assert_array_equal(out, before)
    case.decode(out=out, custom_mask=mask.copy())


def test_an_out_that_overlaps_tables_read_backwards():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    width = case.block_tables.shape[1]
    memory = np.zeros(3 * 4 * 16 + 3 * width, np.int32)
    tables = memory[-3 * width :].reshape(3, width)
    tables[:] = case.block_tables[::-1]
    right = case.decode()
    q, pool, layer, _, lens = case.args
    for first, overlaps in ((0, False), (1, True), (3 * width, True)):
        out = memory[first : first + right.size].view(np.float32).reshape(right.shape)
        before = memory.copy()
        if overlaps:
            with refuses(ValueError, "out", "block_tables"):
                decode(q, pool, layer, tables[::-1], lens, out=out)
            np.testing.assert_array_equal(memory, before)
        else:
            np.testing.assert_array_equal(decode(q, pool, layer, tables[::-1], lens, out=out), right)


def test_strides_below_zero_are_walked_where_elements_lie_whole():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    q, pool, layer, tables, lens = case.args
    right = case.decode()
    turned = np.ascontiguousarray(q[::-1, ::-1])
    got = decode(turned[::-1, ::-1], pool, layer, np.ascontiguousarray(tables[::-1])[::-1], lens)
    np.testing.assert_array_equal(got, right)
    tables_of_one = np.lib.stride_tricks.as_strided(tables[:1], (3, tables.shape[1]), (0, 4))
    same = decode(np.repeat(q[:1], 3, axis=0), pool, layer, tables_of_one, np.repeat(lens[:1], 3))
    for row in same:
        np.testing.assert_array_equal(row, right[0])


@pytest.mark.parametrize("dtype", [np.float32, *NARROW])
def test_an_out_between_two_addresses_of_its_elements(call, dtype):
    item = np.dtype(dtype).itemsize
    memory = np.zeros(3 * 4 * 16 * item + item, np.uint8)
    for behind in range(1, item):
        out = memory[behind : behind - item].view(dtype).reshape(3, 4, 16)
        refused(call, ValueError, ("out", item), out=out)
        assert not memory.any()


@pytest.mark.parametrize("narrow", NARROW)
def test_an_out_of_16_bit_that_cannot_be_written_so(call, narrow):
    out = np.zeros((3, 4, 16), narrow)
    wide = np.zeros((3, 4, 32), narrow)
    for turned in (out[::-1], out[:, ::-1], out[:, :, ::-1], wide[:, :, ::2], wide[:, :, :16]):
        refused(call, ValueError, ("out", "C-contiguous"), out=turned)
    for shape in ((3, 4, 8), (4, 3, 16), (3, 4)):
        refused(call, ValueError, ("out", (3, 4, 16), shape), out=np.zeros(shape, narrow))
    refused(call, ValueError, ("out", "read-only"), out=np.broadcast_to(narrow(0), (3, 4, 16)))
    assert not out.any() and not wide.any()


@pytest.mark.parametrize(
    ("starts", "error", "words"),
    [
        (None, TypeError, ("query_start_loc", "q")),
        (3, TypeError, ("query_start_loc",)),
        ([0, 1, 2, 3], TypeError, ("query_start_loc",)),
        (np.arange(4.0), TypeError, ("query_start_loc", "int32", "int64", "float64")),
        (np.arange(4, dtype=np.int32)[::-1], ValueError, ("query_start_loc",)),
        (np.zeros((4, 1), np.int32), ValueError, ("query_start_loc", 1, 2)),
        (np.arange(3, dtype=np.int32), ValueError, (4, 3)),
        (np.array([0, 1, 2, 4], np.int32), ValueError, (3, "q", 0, 4)),
        (np.array([1, 1, 2, 3], np.int32), ValueError, (1, 3)),
        (np.array([0, 2, 1, 3], np.int32), ValueError, ("query_start_loc", 2, 1)),
        (np.array([0, -1, 2, 3], np.int32), ValueError, ("query_start_loc", 0, -1, 1)),
    ],
)
def test_prefill_names_a_bad_query_start_loc(starts, error, words):
    case = make_case(LAYOUT, 2, [40, 0, 17])
    out = np.full(case.q.shape, SENTINEL, np.float32)
    with refuses(error, *words):
        prefill(*case.args, starts, out=out)
    assert (out == SENTINEL).all()


def test_prefill_needs_query_start_loc():
    case = make_case(LAYOUT, 2, [40, 0, 17])
    with pytest.raises(TypeError, match="query_start_loc"):
        prefill(*case.args)
    with pytest.raises(TypeError, match="positional"):
        prefill(*case.args, np.arange(4, dtype=np.int32), None)


@pytest.mark.parametrize("block", [-1, 100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 2])
def test_a_block_out_of_range_of_a_long_prompt(place, block):
    case, starts = make_case(LAYOUT, 2, [40, 1]).with_queries([40, 1])
    case.block_tables[0, place] = block
    out = np.full(case.q.shape, SENTINEL, np.float32)
    with refuses(InvalidBlock, "block_tables", place, block):
        prefill(*case.args, starts, out=out)
    assert (out == SENTINEL).all()


def test_results_step_forwards_only(call):
    out = np.zeros((3, 4, 16), np.float32)
    for turned in (out[::-1], out[:, ::-1], out[:, :, ::-1], np.broadcast_to(out[:1], out.shape)):
        refused(call, ValueError, "out", out=turned)
    refused(call, ValueError, "seq_lens", seq_lens=lambda lens: lens[::-1])
    refused(call, ValueError, "block_tables", block_tables=lambda tables: tables[:, ::-1])


def test_nothing_to_do_takes_arrays_without_elements(call):
    empty, lens = np.zeros((0, 5), np.int32), np.zeros(0, np.int32)
    q, out = np.zeros((0, 4, 16), np.float32), np.zeros((0, 4, 16), np.float32)[::-1]
    for options in ({}, {"return_lse": True}, {"custom_mask": np.zeros(0, np.uint8)}):
        got = call(q=q, block_tables=empty, seq_lens=lens, out=out, **options)
        assert (got[0] if options.get("return_lse") else got) is out
    no_width = np.zeros((3, 0), np.int32)
    assert not call(block_tables=no_width, seq_lens=np.zeros(3, np.int32), out=None).any()
    refused(call, ValueError, ("block_tables", 0), block_tables=no_width)


def test_options_are_keywords_only(call):
    case = make_case(LAYOUT, 2, [1])
    with pytest.raises(TypeError):
        decode(*case.args, 1.0)


def test_queries_that_no_memory_holds(call):
    for dtype in (np.float32, np.float16):
        q = np.broadcast_to(dtype(0), (1 << 21, 1 << 20, 16))
        tables, lens = np.zeros((1, 5), np.int32), np.ones(1, np.int32)
        starts = np.array([0, len(q)], np.int32)
        words = ("q", 2097152, 1048576, 1099511627776)
        refused(call, ValueError, words, q=q, block_tables=tables, seq_lens=lens, query_start_loc=starts)


def test_more_sequences_than_are_counted(call):
    """Reserve address space without touching it."""
    count = 1 << 31
    many = np.frombuffer(
        mmap.mmap(-1, 4 * (count + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE), np.int32
    )
    words = ("block_tables", count, count - 1)
    empty = {"q": np.zeros((0, 4, 16), np.float32), "block_tables": np.zeros((count, 0), np.int32)}
    refused(call, ValueError, words, **empty, seq_lens=many[:-1], query_start_loc=many, out=None)
