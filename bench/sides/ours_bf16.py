"""pagepool in arithmetic of bf16: dot products, for pages of bfloat16."""

from sides.ours import Side as Exact


class Side(Exact):
    arithmetic = "bf16"
