"""The prompts of `pagepool prove`, the distance between two answers, and the rule that names another prompt's keys."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["NEAR", "Answer", "Prompt", "Separation", "distance", "new_group", "spliced", "tells_own", "told_secret"]

# Four letters each: one token in nearly every vocabulary, five bytes in a vocabulary of bytes. Prompts with the same
# number of words then have the same number of tokens, and their blocks begin at the same words.
WORDS = (
    "able acid aged also area army away baby back ball band bank base bath bear beat been bell best bill bird blow "
    "blue boat body bond bone book boot born boss both bowl bulk burn bush busy call calm came camp card care case "
    "cash cast cell chat chip city club coal coat code cold come cook cool cope copy core cost crew crop dark data"
).split()
MARK = "The code is"
NUM_SEGMENTS = 4
NEAR = 16.0  # an answer is right if it is within 1/16 of the distance between two prompts
SMALLEST = 1e-4  # servers round log probabilities
LOWEST = -20.0  # log probabilities below it are equal: some servers write -9999 for the logarithm of 0
SECRET_WORDS = 5  # in a row of another prompt; by chance 1 of 10^9 for each place


@dataclass(frozen=True)
class Prompt:
    """A prompt in parts: a beginning that its group shares, segments of secret words, and an end that all share."""

    number: int
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole prompt."""
        return " ".join(self.parts)


@dataclass(frozen=True)
class Answer:
    """An answer of a server: tokens with the log probabilities of the most likely ones, if it has them."""

    text: str
    tokens: tuple[str, ...] = ()
    tops: tuple[dict[str, float], ...] = ()
    cached: int | None = None
    prompt_tokens: int | None = None
    seconds: float = 0.0


def new_group(source: random.Random, first_number: int, size: int, num_words: int) -> list[Prompt]:
    """Return prompts with the same random beginning and different secrets. `num_words` is the length of each."""
    ends = max(4, num_words * 3 // 10)
    beginning = " ".join([*source.choices(WORDS, k=ends), MARK])
    end = " ".join([".", *(WORDS[i * 7 % len(WORDS)] for i in range(ends)), ".", MARK])
    in_segment = max(SECRET_WORDS, (num_words - 2 * ends) // NUM_SEGMENTS)
    return [
        Prompt(
            first_number + i,
            (beginning, *(" ".join(source.choices(WORDS, k=in_segment)) for _ in range(NUM_SEGMENTS)), end),
        )
        for i in range(size)
    ]


def spliced(owner: Prompt, asked: Prompt, parts: int) -> Prompt:
    """Return `asked` with its first `parts` parts replaced by parts of `owner`."""
    return Prompt(-1, owner.parts[:parts] + asked.parts[parts:])


def distance(one: Answer, other: Answer) -> float:
    """Return how far apart two answers are: 0 for equal ones.

    With log probabilities: the mean absolute difference over the likely tokens of a position, at the position where
    it is largest. Positions after the first different token follow different texts and are not compared. Without: the
    share of the text after the first different character.

    >>> distance(Answer("ab", ("a",), ({"a": -1.0, "b": -2.0},)), Answer("ac", ("a",), ({"a": -1.5, "b": -2.0},)))
    0.25
    >>> distance(Answer("abcd"), Answer("abxx"))
    0.5
    """
    if not (one.tops and other.tops):
        longest = max(len(one.text), len(other.text))
        same = next((i for i, pair in enumerate(zip(one.text, other.text, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(one.text), len(other.text)) if same is None else same
        return 1 - same / longest if longest else 0.0
    worst = 0.0
    for i, (a, b) in enumerate(zip(one.tops, other.tops, strict=False)):
        least_a, least_b = (max(LOWEST, min(top.values(), default=0.0)) for top in (a, b))
        tokens = a.keys() | b.keys()
        # A token that is missing is at most as likely as the least likely one that is named.
        apart = (abs(max(LOWEST, a.get(t, least_a)) - max(LOWEST, b.get(t, least_b))) for t in tokens)
        worst = max(worst, sum(apart) / max(1, len(tokens)))
        if one.tokens[i : i + 1] != other.tokens[i : i + 1]:
            break
    return worst


def told_secret(answer: Answer, asked: Prompt, others: Iterable[Prompt]) -> Prompt | None:
    """Return another prompt if the answer tells its secret words, or None. Needs no log probabilities."""
    runs, own = _runs(answer.text), _runs(_secret(asked))
    return next((other for other in others if (runs & _runs(_secret(other))) - own), None) if runs else None


def tells_own(answer: Answer, asked: Prompt) -> bool:
    """Return true if the answer tells the secret of its own prompt: then it would tell another one's too."""
    return bool(_runs(answer.text) & _runs(_secret(asked)))


def _secret(prompt: Prompt) -> str:
    return " ".join(prompt.parts[1:-1])


def _runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + SECRET_WORDS]) for i in range(len(words) - SECRET_WORDS + 1)}


class Separation:
    """How far answers to different prompts, and right answers to one prompt, are apart."""

    def __init__(self) -> None:
        self._between: list[float] = []
        self.noise = 0.0  # largest distance of a right answer from its reference
        self._usual = 0.0  # distance of an answer from the cache, with the same keys

    def add(self, references: Sequence[Answer]) -> None:
        """Note the distances between the answers to the prompts of one group."""
        for i, one in enumerate(references):
            self._between += [distance(one, other) for other in references[:i]]

    @property
    def between(self) -> float:
        """Median distance between the answers to two prompts."""
        return median(self._between) if self._between else 0.0

    def calibrate(self, distances: Sequence[float]) -> None:
        """Note the distances of answers from the cache to the ones without it, when nothing else was asked between.

        Some kernels round differently when only the end of a prompt is computed. The median is used, so that a server
        which mixes up some of these answers too does not raise the limit.
        """
        self._usual = median(distances)
        self.noise = max(distances)

    @property
    def limit(self) -> float:
        """Largest distance of an answer that needs no explanation."""
        return max(self.between / NEAR, min(self.between / 4, 3 * self._usual))

    @property
    def sees(self) -> bool:
        """Whether a foreign prefix would be noticed: answers to two prompts are apart."""
        return self.between >= NEAR * SMALLEST

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {"between_prompts": self.between, "noise": self.noise, "limit": self.limit, "sees": self.sees}
