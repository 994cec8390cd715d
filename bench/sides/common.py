"""Input and interface of every side."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SHAPES, copies_of


@dataclass
class Case:
    """One cell of the table. K and V are multiples of 1/64 from -2 to 2, exact in every floating-point dtype."""

    shape: str
    dtype: str
    folder: str

    UNIT = np.float32(1 / 64)

    @property
    def copies(self) -> int:
        """Number of K and V copies to rotate over, so that the next call's copy is in no CPU cache."""
        return copies_of(self.shape, self.dtype)

    @cached_property
    def q(self) -> np.ndarray:
        """float32 (num_seqs, num_qo_heads, head_dim)"""
        return self._load("q").astype(np.float32) * self.UNIT

    @cached_property
    def k(self) -> np.ndarray:
        """int8 (num_seqs, context, num_kv_heads, head_dim), to be multiplied by UNIT; v the same"""
        return self._load("k")

    @cached_property
    def v(self) -> np.ndarray:
        return self._load("v")

    @cached_property
    def right(self) -> np.ndarray:
        """float64 (num_seqs, num_qo_heads, head_dim): the exact result of attention."""
        return self._load("right")

    def _load(self, name: str) -> np.ndarray:
        return np.load(Path(self.folder) / f"{name}.npy", mmap_mode="r")

    def tables(self, block_size: int) -> np.ndarray:
        """int32 (num_seqs, context / block_size): every block of a pool once, shuffled."""
        num_seqs, context = self.k.shape[:2]
        blocks = np.random.default_rng(1).permutation(num_seqs * context // block_size)
        return blocks.astype(np.int32).reshape(num_seqs, -1)


def write_case(shape: str, folder: Path) -> None:
    """Write the files that every `Case` of a shape reads."""
    num_qo_heads, num_kv_heads, head_dim, num_seqs, context = SHAPES[shape]
    rng = np.random.default_rng(7)

    def draw(*size):
        return rng.integers(-128, 128, size, np.int8)

    q = draw(num_seqs, num_qo_heads, head_dim)
    k, v = (draw(num_seqs, context, num_kv_heads, head_dim) for _ in range(2))
    right = np.empty(q.shape)
    group = num_qo_heads // num_kv_heads
    for seq in range(num_seqs):
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            keys, values = (x[seq, :, head].astype(np.float64) / 64 for x in (k, v))
            scores = (q[seq, heads] / 64) @ keys.T / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            right[seq, heads] = weights @ values / weights.sum(axis=1, keepdims=True)
    for name, array in {"q": q, "k": k, "v": v, "right": right}.items():
        np.save(folder / f"{name}.npy", array)


def error_of(out: np.ndarray, right: np.ndarray) -> float:
    """Return the largest error of a query head relative to its largest value; infinite for results with NaN."""
    error = np.abs(out.astype(np.float64) - right).max(axis=-1) / np.abs(right).max(axis=-1)
    return float(np.where(np.isfinite(error), error, np.inf).max())


@dataclass
class Call:
    """One method to compute the case: `run(i)` on copy i; `output(result)` is float32 in the shape of `Case.right`."""

    run: Callable[[int], Any]
    output: Callable[[Any], np.ndarray] = np.asarray


class Side:
    """One implementation ("side") of a comparison. Its constructor fills the memory. If it has several methods of
    computing, the fastest counts."""

    def __init__(self, case: Case):
        self.case = case

    def use(self, threads: int) -> None:
        """Set the number of threads of the next calls."""

    def calls(self, threads: int) -> dict[str, Call]:
        """Return the methods by name."""
        raise NotImplementedError


def times_of(call, turn, seconds, least=3, most=300):
    """Time `call(turn)` until `seconds` are spent, at least `least` and at most `most` times, after one untimed call.

    Returns the seconds of each call and the turn of the last.
    """
    call(turn)
    times, spent = [], 0.0  # a running sum: summing the list after each call would disturb the CPU caches
    while len(times) < least or (spent < seconds and len(times) < most):
        turn += 1
        begin = time.perf_counter()
        call(turn)
        times.append(time.perf_counter() - begin)
        spent += times[-1]
    return times, turn
