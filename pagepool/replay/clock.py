"""Virtual time: whole microseconds that follow from the work of each step, so that every run gives the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CostModel"]

MAX_COST = 10**12


@dataclass(frozen=True)
class CostModel:
    """What a step costs: `step` microseconds, and `prefill` or `decode` more for each token of the kind.

    >>> CostModel.parse("10000,60,150").of(prefill_tokens=100, decode_tokens=8)
    17200
    """

    step: int = 10_000
    prefill: int = 60
    decode: int = 150

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """From "step,prefill,decode". Raises ValueError."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise ValueError(f"a cost is three whole numbers of microseconds, step,prefill,decode, not {text!r}")
        costs = [int(part) if len(part) < 20 else MAX_COST + 1 for part in parts]
        if max(costs) > MAX_COST:
            raise ValueError(f"a cost of {max(costs)} microseconds is above the limit of {MAX_COST}")
        return cls(*costs)

    def of(self, prefill_tokens: int, decode_tokens: int) -> int:
        """Microseconds of a step with these tokens."""
        return self.step + self.prefill * prefill_tokens + self.decode * decode_tokens
