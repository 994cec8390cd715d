"""Random calls of decode and prefill: layouts, lengths, query tokens, masks, variants and special values combined."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from paged_cases import DTYPES, Case, assert_same, channels, make_case, random_kv, stored
from share import examples

from pagepool import KvLayout, cpu_info, prefill
from pagepool.reference.canonical import attend
from pagepool.reference.views import masks_of, views

BORDERS = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 511, 513, 545, 600]
BLOCK_SIZES = [1, 3, 5, 16, 17, 32, 48, 100, 500, 512, 1024]
TILED = [size for size in BLOCK_SIZES if size % 16 == 0]
DIMS = [8, 16, 24, 40, 64, 72]
SPECIAL = np.array([np.nan, np.inf, -np.inf, -np.inf, -0.0, 3e38, -3e38, 1e-40], np.float32)


@dataclass
class Call:
    """A case, its K and V, the number of query tokens of each sequence, and the options of the call."""

    case: Case
    kv: list
    counts: list
    masks: list | None
    options: dict

    def decode(self, case=None, chosen=None, heads=slice(None), **others):
        """Return out and lse, for the `chosen` sequences and `heads` only."""
        case = self.case if case is None else case
        chosen = range(len(self.counts)) if chosen is None else chosen
        rows = np.array([row for seq in chosen for row in range(*np.cumsum([0, *self.counts])[seq : seq + 2])], int)
        per_head = {"alibi_slopes", "sinks"} & self.options.keys()
        options = self.options | {name: self.options[name][heads] for name in per_head}
        options["query_start_loc"] = np.cumsum([0, *(self.counts[seq] for seq in chosen)]).astype(np.int32)
        options["custom_mask"] = self.masks and [self.masks[seq] for seq in chosen]
        order, q = np.array(chosen, int), np.ascontiguousarray(self.case.q[rows][:, heads])
        part = replace(case, block_tables=case.block_tables[order], seq_lens=case.seq_lens[order], q=q)
        return part.decode(return_lse=True, **options, **others), rows

    def prefill(self, **others):
        """Return out and lse of all sequences by `prefill`."""
        starts = np.cumsum([0, *self.counts]).astype(np.int32)
        return prefill(*self.case.args, starts, custom_mask=self.masks, return_lse=True, **self.options, **others)


def one_of(draw, *choices):
    return draw(st.sampled_from(choices))


def sprinkle(draw, rng, array):
    """Put special values at some random places."""
    if array.size and draw(st.booleans()):
        places = rng.integers(array.size, size=draw(st.integers(0, 3)))
        array.reshape(-1)[places] = rng.choice(SPECIAL, len(places))
    return array


@st.composite
def calls(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    head_dim, v_head_dim, v_in_k = one_of(draw, *DIMS), one_of(draw, *DIMS), draw(st.booleans())
    v_head_dim = min(head_dim, v_head_dim) if v_in_k else v_head_dim
    size, dtype, v_dtype = one_of(draw, *BLOCK_SIZES), one_of(draw, *DTYPES), None
    if draw(st.booleans()):
        size, v_in_k = one_of(draw, *TILED), False
        dtype, v_dtype = one_of(draw, ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
    options = {"v_head_dim": v_head_dim, "v_in_k": v_in_k, "v_dtype": v_dtype}
    layout = KvLayout(1, one_of(draw, 1, 2, 3), head_dim, size, dtype, **options)
    scales = channels(layout, seed) if dtype == "int4" or draw(st.booleans()) else None
    lengths = draw(st.lists(st.sampled_from(BORDERS), max_size=3))
    counts = [one_of(draw, 1, 1, 2, 5, 0, 9, 40, 90) for _ in lengths]
    scale = np.float32(one_of(draw, 1, 1, 1, 0, 1e-39, 50))
    kv = [tuple(sprinkle(draw, rng, x * scale) for x in both) for both in random_kv(layout, lengths, seed)]
    case = make_case(layout, draw(st.integers(1, 13)), lengths, kv=kv, seed=seed, k_channel_scale=scales)
    case, _ = case.with_queries(counts, seed)
    sprinkle(draw, rng, case.q)
    masks = None
    if draw(st.booleans()):
        shapes = [(n, draw(st.integers(0, max(n, length)))) for n, length in zip(counts, lengths, strict=True)]
        share = one_of(draw, 0.02, 0.5, 0.9)
        masks = [None if draw(st.booleans()) else rng.random(shape) < share for shape in shapes]
    options = {"window_left": one_of(draw, -1, -1, 0, 1, 15, 16, 40, 511, 530, 2**63 - 1)}
    options["logits_soft_cap"] = one_of(draw, 0.0, 0.0, 0.5, 30.0, 1e-30, 1e30)
    options["sm_scale"] = one_of(draw, None, None, 0.0, -0.3, 2e38)
    for name in ("alibi_slopes", "sinks"):
        if draw(st.booleans()):
            numbers = rng.standard_normal(case.q.shape[1]).astype(np.float32) * np.float32(one_of(draw, 0.01, 1, 30))
            options[name] = sprinkle(draw, rng, numbers)
    if dtype in ("bfloat16", "float16") and not layout.is_quantised:
        options["arithmetic"] = one_of(draw, "exact", "bf16", "bf16x2")
    return Call(case, kv, counts, masks, options)


def assert_canonical(call, got, row, head):
    layout, options = call.case.pool.layout, dict(call.options)
    starts, lengths = np.cumsum([0, *call.counts]), call.case.seq_lens.tolist()
    view = list(views(starts, lengths, -1, None))[row]
    masks = masks_of(call.masks, call.counts, lengths)[view.sequence]
    k, v = stored(call.case, view.sequence, head // (call.case.q.shape[1] // layout.num_kv_heads))
    scale, slopes, sinks = options.pop("sm_scale"), options.pop("alibi_slopes", None), options.pop("sinks", None)
    out, lse = attend(
        call.case.q[row, head].tolist(),
        k,
        v,
        1 / np.sqrt(layout.head_dim) if scale is None else scale,
        position=view.position,
        mask=masks and masks[row - starts[view.sequence]],
        alibi_slope=None if slopes is None else float(slopes[head]),
        sink=None if sinks is None else float(sinks[head]),
        fused=cpu_info()["isa"] != "baseline",
        page_dtype=layout.dtype if layout.dtype in DTYPES else "float32",
        **options,
    )
    out = out or [0.0] * layout.v_head_dim  # without tokens the result has no dims
    assert_same([got[0][row, head]], [np.array(out, np.float32)])
    np.testing.assert_allclose(got[1][row, head], lse, rtol=3e-7, atol=1e-7)


@examples(80, suppress_health_check=[HealthCheck.too_slow])
@given(calls(), st.data())
def test_bits_are_canonical_and_depend_only_on_attended_tokens(call, data):
    expected, rows = call.decode(num_threads=1)
    assert_same(call.decode(num_threads=data.draw(st.integers(2, 8)))[0], expected)
    assert_same(call.prefill(num_threads=data.draw(st.integers(1, 8))), expected)
    pool = call.case.pool
    sizes = TILED if pool.layout.is_quantised else BLOCK_SIZES
    other = replace(pool.layout, block_size=one_of(data.draw, *sizes))
    case = make_case(other, 1, call.case.seq_lens.tolist(), kv=call.kv, k_channel_scale=pool.k_channel_scale)
    assert_same(call.decode(case)[0], expected)
    group = call.case.q.shape[1] // other.num_kv_heads
    some = data.draw(st.sets(st.integers(0, group - 1), min_size=1))
    heads = [kv_head * group + h for kv_head in range(other.num_kv_heads) for h in sorted(some)]
    assert_same(call.decode(heads=heads)[0], [x[:, heads] for x in expected])
    if call.counts:
        chosen = data.draw(st.lists(st.integers(0, len(call.counts) - 1), max_size=4))
        got, part = call.decode(chosen=chosen, num_threads=data.draw(st.integers(1, 3)))
        assert_same(got, [x[part] for x in expected])
    if len(rows):
        head = data.draw(st.integers(0, call.case.q.shape[1] - 1))
        assert_canonical(call, expected, data.draw(st.integers(0, len(rows) - 1)), head)
