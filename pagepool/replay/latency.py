"""Times to the first token and between tokens, exact, in virtual microseconds."""

from __future__ import annotations

from collections import Counter

__all__ = ["LatencyLog", "percentile"]


def percentile(counts: Counter[int], share: float) -> int:
    """Return the nearest-rank percentile: the smallest value v with at least `share` of all values <= v. 0 if empty.

    >>> percentile(Counter({10: 99, 500: 1}), 0.99), percentile(Counter({10: 98, 500: 2}), 0.99)
    (10, 500)
    """
    # Integer arithmetic: a float product could be slightly above or below a whole number.
    total = sum(counts.values())
    rank = -(-total * round(share * 1000) // 1000)
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    return 0


class LatencyLog:
    """Histograms of the times to the first token and between tokens.

    Most steps give tokens to the same sequences as the previous step. Their gaps are equal, so one addition counts all
    of them. For this reason the time of the last token is stored once for all sequences of the last step (`_ids`,
    `_time`). `_earlier` has the time of each sequence that has missed a step since.
    """

    def __init__(self) -> None:
        self.ttft: Counter[int] = Counter()
        self.tbt: Counter[int] = Counter()
        self.fresh: list[int] = []  # times to the first tokens of the last step
        self._arrival: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        self._ids: list[int] = []
        self._done: set[int] = set()
        self._time = 0

    def arrive(self, seq_id: int, time: int) -> None:
        """Note the arrival of a request at `time`, which may be before the current step."""
        self._arrival[seq_id] = time

    def tokens(self, seq_ids: list[int], time: int) -> None:
        """Count one token at `time` for each of `seq_ids`."""
        if self.fresh:
            self.fresh = []
        if seq_ids == self._ids:
            self.tbt[time - self._time] += len(seq_ids)
            self._time = time
            return
        previous = set(self._ids)
        same = 0
        for seq_id in seq_ids:
            if seq_id in previous:
                same += 1
                previous.discard(seq_id)
            elif seq_id in self._earlier:
                self.tbt[time - self._earlier.pop(seq_id)] += 1
            else:
                waited = time - self._arrival.pop(seq_id)
                self.ttft[waited] += 1
                self.fresh.append(waited)
        if same:
            self.tbt[time - self._time] += same
        for seq_id in previous - self._done:
            self._earlier[seq_id] = self._time
        self._done.clear()
        self._ids, self._time = seq_ids, time

    def finish(self, seq_id: int) -> None:
        """Note that the sequence gets no more tokens."""
        self._earlier.pop(seq_id, None)
        self._done.add(seq_id)
