from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from pagepool.memory.kv_pool import KvCachePool

__all__ = ["auto_arithmetic", "decode", "prefill"]

def auto_arithmetic(q_dtype: Any, page_dtype: Any) -> Literal["exact", "bf16x2"]: ...
@overload
def decode(
    q: Any,
    pool: KvCachePool,
    layer: int,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    query_start_loc: Any = None,
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: Literal[False] = False,
    arithmetic: Literal["exact", "bf16x2", "bf16", "auto"] = "exact",
    cascade: bool = True,
    num_threads: int | None = None,
) -> NDArray[Any]: ...
@overload
def decode(
    q: Any,
    pool: KvCachePool,
    layer: int,
    block_tables: Any,
    seq_lens: Any = None,
    *,
    query_start_loc: Any = None,
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: Literal[True],
    arithmetic: Literal["exact", "bf16x2", "bf16", "auto"] = "exact",
    cascade: bool = True,
    num_threads: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32]]: ...
@overload
def prefill(
    q: Any,
    pool: KvCachePool,
    layer: int,
    block_tables: Any,
    seq_lens: Any = None,
    query_start_loc: Any = None,
    *,
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: Literal[False] = False,
    arithmetic: Literal["exact", "bf16x2", "bf16", "auto"] = "exact",
    cascade: bool = True,
    num_threads: int | None = None,
) -> NDArray[Any]: ...
@overload
def prefill(
    q: Any,
    pool: KvCachePool,
    layer: int,
    block_tables: Any,
    seq_lens: Any = None,
    query_start_loc: Any = None,
    *,
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: Literal[True],
    arithmetic: Literal["exact", "bf16x2", "bf16", "auto"] = "exact",
    cascade: bool = True,
    num_threads: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.float32]]: ...
