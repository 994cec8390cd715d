from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["DecoderLayers", "QuantisedWeights", "has_linear_few", "linear_few", "lookup_mul", "rms_norm", "rotate"]

class DecoderLayers:
    def __init__(
        self,
        hidden_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layers: list[tuple[Any, ...]],
        norm: tuple[int, float],
    ) -> None: ...
    def run(
        self,
        rows: int,
        memory: Sequence[int],
        cos: int,
        sin: int,
        pools: Sequence[Any],
        tables: Sequence[tuple[Any, ...]],
        windows: Sequence[int | None],
        arithmetic: str,
        num_threads: int,
        function: Callable[[int, int], Any] | None,
    ) -> None: ...

class QuantisedWeights:
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    def __init__(self, inputs: int, weights: list[tuple[int, int, int, int]]) -> None: ...
    def run(self, x: int, dtype: int, rows: int, out: int, num_threads: int) -> None: ...

def has_linear_few() -> bool: ...
def linear_few(
    x: int, rows: int, inputs: int, weight: int, bias: int, outputs: int, out: int, num_threads: int
) -> None: ...
def rms_norm(
    x: int, delta: int, weight: int, eps: float, rows: int, n: int, sum: int, out: int, num_threads: int
) -> None: ...
def rotate(x: int, stride: int, cos: int, sin: int, rows: int, heads: int, dim: int, num_threads: int) -> None: ...
def lookup_mul(gate: int, up: int, stride: int, table: int, rows: int, n: int, out: int, num_threads: int) -> None: ...
