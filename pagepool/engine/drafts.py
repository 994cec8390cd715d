"""Drafts: predict the next tokens of requests from earlier tokens, for the model to verify several in one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pagepool.config import EQUAL_ROWS
from pagepool.engine.logits import Logits
from pagepool.engine.sampling import Sampler
from pagepool.errors import RequestRejected

__all__ = ["KINDS", "MAX_DRAFTS", "Acceptance", "Drafter", "Drafts", "Drawn", "StepCosts", "verify"]

KINDS = ("ngram",)
MAX_DRAFTS = 15  # per sequence and step: with the last token one tile of AMX
MAX_FOLLOWING = 256  # cached tokens that are read at once
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


Following = Callable[[list[int], int], list[int]]
Drawn = tuple[int, tuple[float | None, Any]]  # a token and its log probabilities


class Acceptance:
    """How often predictions are right, measured for each length of the match before them.

    Every prediction is compared with the token that follows, also if it was not fed to the model. So this costs no row
    of a step, and drafts begin only after predictions were right.

    Attributes
    ----------
    rates : list of float
        The probability that a prediction is right, by `place_of` the length of its match.

    Examples
    --------
    >>> acceptance = Acceptance()
    >>> for _ in range(8):
    ...     acceptance.note(length=3, is_right=True)
    >>> acceptance.note(length=9, is_right=False)
    >>> acceptance.measure()
    >>> [round(rate, 2) for rate in acceptance.rates]
    [0.0, 0.0, 0.79, 0.79, 0.53, 0.53, 0.53, 0.53]
    """

    def __init__(self) -> None:
        self.rates = [0.0] * NUM_LENGTHS
        self._right = [0.0] * NUM_LENGTHS
        self._all = [0.0] * NUM_LENGTHS

    def note(self, length: int, is_right: bool) -> None:
        """Count a prediction after `length` equal tokens."""
        place = place_of(length)
        self._right[place] = self._right[place] * FORGET + is_right
        self._all[place] = self._all[place] * FORGET + 1.0

    def measure(self) -> None:
        """Set `rates`. Until there are predictions, a rate is 0, or the rate of shorter matches."""
        rate = 0.0
        for place, (right, count) in enumerate(zip(self._right, self._all, strict=True)):
            self.rates[place] = rate = (right + NEW * rate) / (count + NEW)


def place_of(length: int) -> int:
    """Return the place of a length of a match in the tables of `Acceptance`: one for each power of 2."""
    return min(length.bit_length(), NUM_LENGTHS - 1)


class StepCosts:
    """Seconds of the model for steps of decodes, by their number of tokens. A cost is the least of the last few steps.

    Costs between two measured ones are interpolated, and measurements expire. Before any step with drafts was measured,
    drafts cost nothing: so they are tried.

    Examples
    --------
    >>> costs = StepCosts()
    >>> for _ in range(2):
    ...     costs.note(rows=1, seconds=1.0)
    ...     costs.note(rows=3, seconds=2.0)
    >>> costs.costs(1, 5)
    [1.0, 1.5, 2.0, 2.5, 3.0]
    """

    def __init__(self) -> None:
        self._samples = [deque[float](maxlen=NUM_SAMPLES) for _ in range(EQUAL_ROWS + 1)]
        self._measured_at = [0] * (EQUAL_ROWS + 1)
        self._now = 0

    def note(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` tokens."""
        self._now += 1
        if rows <= EQUAL_ROWS:
            self._samples[rows].append(seconds)
            self._measured_at[rows] = self._now

    def costs(self, first: int, last: int) -> list[float]:
        """Return the costs of steps of `first` to `last` tokens; zeros if `first` was not measured.

        A step that took longer than one with more tokens was disturbed: it gets the cost of the larger one.
        """
        count = last - first + 1
        known = [(place, cost) for place in range(count) if (cost := self._cost(first + place))]
        if not known or known[0][0]:
            return [0.0] * count
        for at in reversed(range(len(known) - 1)):
            known[at] = known[at][0], min(known[at][1], known[at + 1][1])
        found = [known[0][1]]
        for (left, low), (right, high) in pairwise(known):
            slope = (high - low) / (right - left)
            found += [low + slope * step for step in range(1, right - left + 1)]
        slope = (known[-1][1] - known[0][1]) / max(1, known[-1][0])
        found += [known[-1][1] + slope * step for step in range(1, count - len(found) + 1)]
        return found

    def _cost(self, rows: int) -> float:
        samples = self._samples[rows]
        if samples and self._now - self._measured_at[rows] > MAX_AGE:
            samples.clear()
        return min(samples) if len(samples) >= MIN_SAMPLES else 0.0


class Match:
    """Earlier tokens that are equal to the last tokens of a request: the ones after them are its predictions.

    Attributes
    ----------
    tokens : list of int
        The earlier text, which may be the text of the request itself and grow.
    place : int
        Place of the predicted next token in `tokens`; -1 without a prediction.
    length : int
        Number of equal tokens.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self.tokens: list[int] = []
        self.place = -1
        self.length = 0

    def begin(self, tokens: list[int], place: int, length: int) -> None:
        """Predict the tokens from `place` on."""
        self.tokens, self.place, self.length = tokens, place, length

    def check(self, token: int) -> None:
        """Compare the prediction with the next token. It ends if they differ, or at the end of the earlier text."""
        if self.place >= 0:
            is_right = self.tokens[self.place] == token
            self._acceptance.note(self.length, is_right)
            self.length = self.length + 1 if is_right else 0
            self.place = self.place + 1 if is_right and self.place + 1 < len(self.tokens) else -1

    def rate(self) -> float:
        """Return the probability that the prediction is right, 0 without one."""
        return self._acceptance.rates[place_of(self.length)] if self.place >= 0 else 0.0

    def gains(self, most: int) -> list[float]:
        """Return the probability of each of the next `most` predictions that it and all before it are right."""
        found: list[float] = []
        gain = 1.0
        if self.place >= 0:
            for length in range(self.length, self.length + most):
                gain *= self._acceptance.rates[place_of(length)]
                if gain < LEAST:
                    break
                found.append(gain)
        return found

    def predict(self, count: int) -> list[int]:
        """Return the next `count` tokens. A text that repeats itself is predicted to go on so."""
        period = len(self.tokens) - self.place
        return [self.tokens[self.place + step % period] for step in range(count)]


class Drafter:
    """Predicts the next tokens of one request.

    Predictions are the tokens that followed the last three tokens in the request's own text. If all tokens of the
    request begin a cached text, the tokens of that text are predicted instead while they are right more often.

    Parameters
    ----------
    tokens : iterable of int
        The prompt.
    own, cached : Acceptance
        Count the predictions of both kinds.
    following : callable, optional
        Called with a list of tokens and a maximum number: returns the tokens that followed them in a cached text.

    Examples
    --------
    >>> drafter = Drafter([1, 2, 3, 4, 5, 9, 1, 2], Acceptance(), Acceptance())
    >>> drafter.add(3)
    >>> drafter.match.predict(4)
    [4, 5, 9, 1]
    """

    def __init__(
        self, tokens: Iterable[int], own: Acceptance, cached: Acceptance, following: Following | None = None
    ) -> None:
        self._own, self._cached = Match(own), Match(cached)
        self._following = following  # None after a text that no cached text begins with
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # the place after the last occurrence of each n-gram
        self._key = 0
        self.num_new = 0  # tokens that were added
        for token in tokens:
            self._note(token)

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        self.num_new += 1
        earlier = self._note(token)
        self._own.check(token)
        if self._own.place < 0:
            self._own.begin(self._tokens, earlier, N)
        self._cached.check(token)
        if self._cached.place < 0 and self._following is not None:
            tokens = self._following(self._tokens, MAX_FOLLOWING)
            self._cached.begin(tokens, 0 if tokens else -1, self._cached.length)
            self._following = self._following if tokens else None

    @property
    def match(self) -> Match:
        """The match with the more reliable predictions."""
        return self._cached if self._cached.rate() > self._own.rate() else self._own

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


class Drafts:
    """Chooses the drafts of a step: as many as raise the expected number of tokens per second of all requests."""

    def __init__(self, most: int = MAX_DRAFTS) -> None:
        self.most = most
        self.own, self.cached = Acceptance(), Acceptance()
        self.costs = StepCosts()

    def drafter(self, prompt: Iterable[int], following: Following | None = None) -> Drafter:
        """Return the drafter of a new request."""
        return Drafter(prompt, self.own, self.cached, following)

    def choose(self, drafters: Mapping[int, Drafter], most: int = EQUAL_ROWS) -> dict[int, list[int]]:
        """Return the drafts of the next step.

        Parameters
        ----------
        drafters : mapping
            The drafters of the requests that decode, by sequence id.
        most : int
            Maximum number of drafts of all requests.

        Returns
        -------
        dict
            Tokens by sequence id, for sequences with drafts.
        """
        decodes = len(drafters)
        room = min(EQUAL_ROWS - decodes, most)
        if room <= 0:
            return {}
        self.own.measure()
        self.cached.measure()
        matches = {seq_id: drafter.match for seq_id, drafter in drafters.items()}
        gains = [(gain, seq_id) for seq_id, match in matches.items() for gain in match.gains(self.most)]
        if not gains:
            return {}
        gains.sort(key=_gain, reverse=True)  # stable: the first drafts of a sequence stay before its later ones
        costs = self.costs.costs(decodes, EQUAL_ROWS)
        count = best_count(decodes, [gain for gain, _ in gains[:room]], costs)
        counts: dict[int, int] = {}
        for _, seq_id in gains[:count]:
            counts[seq_id] = counts.get(seq_id, 0) + 1
        return {seq_id: matches[seq_id].predict(number) for seq_id, number in counts.items()}


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
        `rows.largest()`, or empty if the sampler did not take the largest before this step.
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
        if largest and sampler.takes_largest and largest[row] >= 0:
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
