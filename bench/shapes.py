"""The shapes of attention that limit.py and peers.py measure; imports nothing, so that any environment can."""

# query heads, kv heads, head_dim, sequences, context
SHAPES = {
    "S1": (32, 8, 128, 16, 4096),
    "S2": (14, 2, 64, 32, 2048),
    "S3": (32, 32, 128, 4, 2048),
    "S4": (32, 8, 128, 1, 32768),
    "S5": (32, 4, 64, 1, 512),
    "tiny": (8, 2, 64, 2, 128),
}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
