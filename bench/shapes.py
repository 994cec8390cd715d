"""Attention shapes of limit.py and peers.py. Imports the standard library only, so that every peer can load it."""

from math import ceil

# query heads, kv heads, head_dim, sequences, context
SHAPES = {
    "S1": (32, 8, 128, 16, 4096),
    "S2": (14, 2, 64, 32, 2048),
    "S3": (32, 32, 128, 4, 2048),
    "S4": (32, 8, 128, 1, 32768),
    "S5": (32, 4, 64, 1, 512),
    "tiny": (8, 2, 64, 2, 128),
}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}  # without scales
COLD = 400e6  # bytes of K and V to rotate over, so that the next call's K and V are in no CPU cache

# Target share of the speed at which K and V can be read from memory, with 1 and 2 threads, by bytes per element.
TARGETS = {
    "S1": {2: (0.70, 0.80), 4: (0.70, 0.80)},
    "S2": {2: (0.58, 0.65), 4: (0.70, 0.80)},
    "S3": {2: (0.70, 0.80), 4: (0.70, 0.80)},
    "S4": {2: (0.70, 0.80), 4: (0.70, 0.80)},
    "S5": {2: (0.45, 0.45), 4: (0.65, 0.65)},
}
# Target speed of AVX2 relative to AVX-512, by bytes per element.
AVX2_TARGETS = {
    "S1": {2: 0.65, 4: 0.80},
    "S2": {2: 0.50, 4: 0.80},
    "S3": {2: 0.80, 4: 0.80},
    "S4": {2: 0.65, 4: 0.80},
    "S5": {4: 0.80},
}
FMA_TARGET = 0.75  # target share of the FMA rate in compute-bound cells


def kv_bytes(shape, dtype):
    """Return the bytes of K and V that one call reads."""
    _, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    return int(2 * num_seqs * context * num_kv_heads * head_dim * ITEM_BYTES[dtype])


def page_bytes(shape, dtype):
    """Return the bytes of K and V of one 16-token block in one layer, the contiguous unit of shuffled blocks."""
    _, num_kv_heads, head_dim, _, _ = SHAPES[shape]
    return int(2 * 16 * num_kv_heads * head_dim * ITEM_BYTES[dtype])


def flops(shape):
    """Count a multiplication and an addition per query head and element of K, and the same for V."""
    num_qo_heads, _, head_dim, num_seqs, context = SHAPES[shape]
    return 4 * num_seqs * context * num_qo_heads * head_dim


def copies_of(shape, dtype):
    return max(1, min(512, ceil(COLD / kv_bytes(shape, dtype))))


def target(shape, dtype, threads, binds):
    """Return the target share of the limit for a cell, or None if it has no target."""
    if dtype.startswith("int"):  # quantised.py has goals relative to bfloat16
        return None
    if binds == "fma":
        return FMA_TARGET
    if shape not in TARGETS or threads not in (1, 2):
        return None
    wanted = TARGETS[shape].get(ITEM_BYTES[dtype])
    return wanted and wanted[threads - 1]
