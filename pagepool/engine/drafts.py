"""Drafts: predict the next tokens of requests from earlier tokens, for the model to verify several in one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from pagepool.engine.logits import Logits
from pagepool.engine.sampling import Sampler
from pagepool.errors import RequestRejected

__all__ = ["KINDS", "MAX_DRAFTS", "Acceptance", "Drafter", "Drafts", "Drawn", "StepCosts", "verify"]

KINDS = ("ngram",)
MAX_DRAFTS = 15  # per sequence and step: with the last token one tile of AMX
MAX_ROWS = 64  # tokens of a step with drafts
N = 3  # tokens that must be equal before a prediction
KEY_BITS = 32  # of a token in the key of an n-gram
KEY_MASK = (1 << N * KEY_BITS) - 1
LEAST = 0.05  # a draft that is right less often is never worth its place
MARGIN = 1.02  # least gain in tokens per second
FORGET = 0.99  # weight of a prediction, for each later one of the same length of match
NEW = 2.0  # predictions that are assumed before the measured ones
NUM_LENGTHS = 8  # lengths of matches that are told apart: 1, 2, 4 to 64
NUM_SAMPLES = 8  # steps that a cost is the least of
MIN_SAMPLES = 2  # the first step of a size can take longer
MAX_AGE = 512  # steps after which a cost is measured again


Drawn = tuple[int, tuple[float | None, Any]]  # a token and its log probabilities


class Acceptance:
    """How often predictions are right, measured for each length of the match before them.

    Every prediction is compared with the token that follows, also if it was not fed to the model. So this costs no row
    of a step, and drafts begin only after predictions were right.

    Examples
    --------
    >>> acceptance = Acceptance()
    >>> for _ in range(8):
    ...     acceptance.note(length=3, is_right=True)
    >>> acceptance.note(length=9, is_right=False)
    >>> [round(rate, 2) for rate in acceptance.rates()]
    [0.0, 0.0, 0.79, 0.79, 0.53, 0.53, 0.53, 0.53]
    """

    def __init__(self) -> None:
        self._right = [0.0] * NUM_LENGTHS
        self._all = [0.0] * NUM_LENGTHS

    def note(self, length: int, is_right: bool) -> None:
        """Count a prediction after `length` equal tokens."""
        place = place_of(length)
        self._right[place] = self._right[place] * FORGET + is_right
        self._all[place] = self._all[place] * FORGET + 1.0

    def rates(self) -> list[float]:
        """Return the probability that a prediction is right, by `place_of` the length of its match.

        Until there are predictions, it is 0, or that of shorter matches.
        """
        found, rate = [], 0.0
        for right, count in zip(self._right, self._all, strict=True):
            rate = (right + NEW * rate) / (count + NEW)
            found.append(rate)
        return found


def place_of(length: int) -> int:
    """Return the place of a length of a match in the tables of `Acceptance`: one for each power of 2."""
    return min(length.bit_length(), NUM_LENGTHS - 1)


class StepCosts:
    """Seconds of the model for steps of decodes, by their number of tokens. A cost is the least of the last few steps.

    A number of tokens that was not measured yet, or not recently, costs as little as the next lower one: so it is
    tried.

    Examples
    --------
    >>> costs = StepCosts()
    >>> for _ in range(2):
    ...     costs.note(rows=1, seconds=0.010)
    ...     costs.note(rows=3, seconds=0.012)
    >>> costs.costs(1, 4)
    [0.01, 0.01, 0.012, 0.012]
    """

    def __init__(self) -> None:
        self._samples = [deque[float](maxlen=NUM_SAMPLES) for _ in range(MAX_ROWS + 1)]
        self._measured_at = [0] * (MAX_ROWS + 1)
        self._now = 0

    def note(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` tokens."""
        self._now += 1
        if rows <= MAX_ROWS:
            self._samples[rows].append(seconds)
            self._measured_at[rows] = self._now

    def costs(self, first: int, last: int) -> list[float]:
        """Return the costs of steps of `first` to `last` tokens, 0 if no such small step was measured.

        A step that took longer than one with more tokens was disturbed: it gets the cost of the larger one.
        """
        found = [self._cost(rows) for rows in range(first, last + 1)]
        least = inf
        for place in reversed(range(len(found))):
            if found[place]:
                found[place] = least = min(found[place], least)
        for place in range(1, len(found)):
            found[place] = found[place] or found[place - 1]
        return found

    def _cost(self, rows: int) -> float:
        samples = self._samples[rows]
        if samples and self._now - self._measured_at[rows] > MAX_AGE:
            samples.clear()
        return min(samples) if len(samples) >= MIN_SAMPLES else 0.0


class Drafter:
    """Predicts the next tokens of one request: those that followed its last tokens earlier in its own text.

    Parameters
    ----------
    tokens : iterable of int
        The prompt.
    acceptance : Acceptance
        Counts the predictions.

    Examples
    --------
    >>> drafter = Drafter([1, 2, 3, 4, 5, 9, 1, 2], Acceptance())
    >>> drafter.add(3)
    >>> drafter.predict(4)
    [4, 5, 9, 1]
    """

    def __init__(self, tokens: Iterable[int], acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # the place after the last occurrence of each n-gram
        self._key = 0
        self._next = -1  # place of the predicted token, which is equal to the next one if the match goes on
        self._length = 0  # of the match
        self.num_new = 0  # tokens that were added
        for token in tokens:
            self._note(token)

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        self.num_new += 1
        if self._next >= 0:
            is_right = self._tokens[self._next] == token
            self._acceptance.note(self._length, is_right)
            self._next = self._next + 1 if is_right else -1
            self._length += 1
        earlier = self._note(token)
        if self._next < 0:
            self._next, self._length = earlier, N

    def _note(self, token: int) -> int:
        """Append a token. Return the place after the earlier occurrence of the last n tokens, -1 without one."""
        self._tokens.append(token)
        self._key = (self._key << KEY_BITS | token) & KEY_MASK
        count = len(self._tokens)
        if count < N:
            return -1
        earlier = self._places.get(self._key, -1)
        self._places[self._key] = count
        return earlier

    def gains(self, most: int, rates: Sequence[float]) -> list[float]:
        """Return the probability of each of the next `most` predictions that it and all before it are right.

        `rates` is `Acceptance.rates()`.
        """
        found: list[float] = []
        gain = 1.0
        if self._next >= 0:
            for length in range(self._length, self._length + most):
                gain *= rates[place_of(length)]
                if gain < LEAST:
                    break
                found.append(gain)
        return found

    def predict(self, count: int) -> list[int]:
        """Return the next `count` tokens. A text that repeats itself is predicted to go on so."""
        period = len(self._tokens) - self._next
        return [self._tokens[self._next + place % period] for place in range(count)]


class Drafts:
    """Chooses the drafts of a step: as many as raise the expected number of tokens per second of all requests."""

    def __init__(self, most: int = MAX_DRAFTS) -> None:
        self.most = most
        self.acceptance = Acceptance()
        self.costs = StepCosts()

    def drafter(self, prompt: Iterable[int]) -> Drafter:
        """Return the drafter of a new request."""
        return Drafter(prompt, self.acceptance)

    def choose(self, drafters: Mapping[int, Drafter]) -> dict[int, list[int]]:
        """Return the drafts of the next step.

        Parameters
        ----------
        drafters : mapping
            The drafters of the requests that decode, by sequence id.

        Returns
        -------
        dict
            Tokens by sequence id, for sequences with drafts.
        """
        decodes = len(drafters)
        room = MAX_ROWS - decodes
        if room <= 0:
            return {}
        rates = self.acceptance.rates()
        gains = [(gain, seq_id) for seq_id, drafter in drafters.items() for gain in drafter.gains(self.most, rates)]
        if not gains:
            return {}
        gains.sort(key=_gain, reverse=True)  # stable: the first drafts of a sequence stay before its later ones
        costs = self.costs.costs(decodes, MAX_ROWS)
        count = best_count(decodes, [gain for gain, _ in gains[:room]], costs)
        counts: dict[int, int] = {}
        for _, seq_id in gains[:count]:
            counts[seq_id] = counts.get(seq_id, 0) + 1
        return {seq_id: drafters[seq_id].predict(number) for seq_id, number in counts.items()}


def verify(
    sampler: Sampler, rows: Logits, largest: list[int], first: int, drafts: list[int], stops: Container[int]
) -> list[Drawn]:
    """Choose the next tokens of a request: one, and one more after each draft that is equal to the token before it.

    Each token is chosen as without drafts, with the next random number of the request. So drafts change no token, and
    no distribution.

    Parameters
    ----------
    sampler : Sampler
        The sampler of the request.
    rows : Logits
        The logits of a step. Row `first` follows the last token of the request, and the next ones follow the drafts.
    largest : list of int
        `rows.largest()`.
    first : int
        A row.
    drafts : list of int
        The drafts, at most all later rows.
    stops : container of int
        Tokens that end the text.

    Returns
    -------
    list
        Pairs of a token and the result of `Sampler.logprobs`. At least one.

    Raises
    ------
    ValueError, RequestRejected
        As `Sampler.sample`.
    """
    drawn: list[Drawn] = []
    for row in range(first, first + len(drafts) + 1):
        if sampler.takes_largest and largest[row] >= 0:
            token = sampler.take(largest[row])
            drawn.append((token, (None, {})))
        else:
            logits = rows[row]
            try:
                token = sampler.sample(logits)
            except RequestRejected:
                if drawn:  # the next step raises it again, after these tokens have reached the caller
                    return drawn
                raise
            drawn.append((token, sampler.logprobs(logits, token)))
        if row == first + len(drafts) or token != drafts[row - first] or token in stops:
            break
    return drawn


def best_count(decodes: int, gains: Sequence[float], costs: Sequence[float]) -> int:
    """Return the number of drafts with the most tokens per second; 0 before a step without drafts was measured.

    Parameters
    ----------
    decodes : int
        Tokens of a step without drafts.
    gains : sequence of float
        The probability that each draft gives a token more, the largest first.
    costs : sequence of float
        Seconds of a step without drafts, with one, and so on.

    Examples
    --------
    >>> best_count(1, [0.9, 0.8, 0.7, 0.2], [1.0, 1.1, 1.2, 1.3, 1.4])
    3
    >>> best_count(1, [0.9, 0.8, 0.7, 0.2], [1.0, 2.0, 3.0, 4.0, 5.0])
    0
    """
    best, tokens = 0, float(decodes)
    if costs[0]:
        most = MARGIN * decodes / costs[0]
        for count, gain in enumerate(gains, 1):
            tokens += gain
            if tokens / costs[count] > most:
                best, most = count, tokens / costs[count]
    return best


def _gain(item: tuple[float, int]) -> float:
    return item[0]
