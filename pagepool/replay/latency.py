"""Times to the first token and between tokens, exact, in virtual microseconds."""

from __future__ import annotations

from collections import Counter

__all__ = ["LatencyLog", "percentile"]


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least `share` of all values do not exceed (nearest rank); 0 without values.

    >>> percentile(Counter({10: 99, 500: 1}), 0.99), percentile(Counter({10: 98, 500: 2}), 0.99)
    (10, 500)
    """
    # An integer rank: a float product could land just above or below a whole number.
    total = sum(counts.values())
    rank = -(-total * round(share * 1000) // 1000)
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    return 0


class LatencyLog:
    """Turns "these sequences got a token at this time" into histograms.

    Most steps give tokens to the same sequences as the step before; their gaps are equal, and one addition counts all
    of them. So the last token's time is stored once for all sequences of the last step (`_ids`, `_time`), and one by
    one in `_earlier` only for those that have missed a step since.
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
        """A request has arrived at `time`, which may be before the current step."""
        self._arrival[seq_id] = time

    def tokens(self, seq_ids: list[int], time: int) -> None:
        """Each of `seq_ids` got one token at `time`."""
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
        """The sequence will get no more tokens."""
        self._earlier.pop(seq_id, None)
        self._done.add(seq_id)
