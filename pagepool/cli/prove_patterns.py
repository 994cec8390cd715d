"""The traffic of `pagepool prove`, and the conclusions from each answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pagepool.cli.prove_endpoint import Endpoint, Gone
from pagepool.cli.prove_oracle import (
    NEAR,
    NUM_SEGMENTS,
    SMALLEST,
    Answer,
    Prompt,
    Separation,
    distance,
    new_group,
    spliced,
    tells_own,
    told_secret,
)
from pagepool.cli.usage import UsageError

__all__ = ["PATTERNS", "Alarm", "Prover", "Tally"]

KEPT = 64  # most recent prompts, which may be owners
SPLICED = 4  # owners of which parts are tried
NEARER = 4.0  # the owner's answer must be 4 times nearer than the prompt's own
BEYOND_NOISE = 30.0  # an answer without an owner is suspect if it is 30 times farther than right answers
UNEXPLAINED = 3  # suspect answers that are an alarm
TIMED = 12  # by chance 1 of 2.7 million: 12 times with another salt all faster than 12 times without a cache


class Alarm(Exception):
    """Keys of another prompt or salt were used. `about` has the figures."""

    def __init__(self, sentence: str, **about: Any) -> None:
        super().__init__(sentence)
        self.about = about


@dataclass
class Tally:
    """What one pattern has seen."""

    answers: int = 0
    told: int = 0  # answers that told the secret of their own prompt
    unexplained: int = 0
    largest: float = 0.0
    seconds: float = 0.0


@dataclass
class Prover:
    """Asks an endpoint in patterns that have made servers mix up prompts, and checks every answer.

    The first answer of a prompt is its reference if the server has no way to answer without its cache.
    """

    endpoint: Endpoint
    source: random.Random
    num_words: int = 480
    num_pressed: int = 24
    wait: float = 300.0
    say: Callable[[str], None] = print
    separation: Separation = field(default_factory=Separation)
    tallies: dict[str, Tally] = field(default_factory=dict)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    references: dict[int, Answer] = field(default_factory=dict)
    restarts: int = 0
    suspects: int = 0  # answers far beyond the noise, without an owner
    _asked: int = 0
    _pattern: str = "repeat"
    _times: dict[str, list[float]] = field(default_factory=dict)

    def fit(self) -> None:
        """Shorten the prompts until the server takes them. Raises `UsageError` if it takes none."""
        while not self.endpoint.fits(new_group(self.source, 0, 1, self.num_words)[0].text):
            self.num_words //= 2
            if self.num_words < 32:
                raise UsageError("the server refuses prompts of 64 words")

    def calibrate(self) -> None:
        """Measure how far apart the answers to two prompts are, and answers to one. Raises `Alarm` and `Gone`."""
        prompts = self.group(4)
        for prompt in prompts:
            found = self._cold(prompt)
            if found is not None:
                self.references[prompt.number] = found
        self.compare(prompts)
        asked = [(prompt, self.endpoint.ask(prompt.text)) for prompt in prompts for _ in range(2)]
        known = [(prompt, answer) for prompt, answer in asked if answer and prompt.number in self.references]
        if known:
            self.separation.calibrate([distance(answer, self.references[prompt.number]) for prompt, answer in known])
        for prompt, answer in known:
            self.check(prompt, answer)

    def run(self, name: str) -> None:
        """Run one pattern. Raises `Alarm`. If the server goes away, wait for it, and ask the last prompts again."""
        began = time.monotonic()
        self._pattern = name
        try:
            self._through_restarts(PATTERNS[name])
        finally:
            self.tallies.setdefault(name, Tally()).seconds += time.monotonic() - began

    def _through_restarts(self, step: Callable[[Prover], None]) -> None:
        """Run a step. Each time the server goes away, wait for it and ask the last prompts again.

        Raises `UsageError` if the server lists its models for `wait` seconds without an answer to a prompt.
        """
        answers, end = -1, 0.0
        while True:
            try:
                return step(self)
            except Gone as gone:
                if self.endpoint.answers == answers:
                    if time.monotonic() > end:
                        raise UsageError(
                            f"the server lists its models, but answered no prompt for {self.wait:.0f} seconds: {gone}"
                        ) from None
                    time.sleep(1.0)
                self.say(f"the server does not answer ({gone}): waiting up to {self.wait:.0f} seconds until it is back")
                self._wait_until_back()
                if self.endpoint.answers > answers:
                    answers, end = self.endpoint.answers, time.monotonic() + self.wait
                step = Prover._after_restart

    def ask_for_restart(self) -> None:
        """Wait until the user has restarted the server, and ask the last prompts again. Raises `Alarm`."""
        self.say("now kill and restart the server, also with another model: waiting for it to go away")
        end = time.monotonic() + self.wait
        while self.endpoint.is_there():
            if time.monotonic() > end:
                self.say("the server was not restarted")
                return
            time.sleep(0.05)
        self._wait_until_back()
        self._through_restarts(Prover._after_restart)

    def _wait_until_back(self) -> None:
        end = time.monotonic() + self.wait
        while not self.endpoint.is_there():
            if time.monotonic() > end:
                raise UsageError(f"the server did not come back within {self.wait:.0f} seconds")
            time.sleep(0.2)
        self.endpoint.read_model()
        self.restarts += 1
        self.say("the server is back")

    def _after_restart(self) -> None:
        """Ask the last prompts again. Their references are new too, since the model may be another one."""
        self._pattern = "restart"
        last = [prompt for prompt in self.prompts.values() if prompt.number in self.references][-8:]
        if self.endpoint.cold:
            self.references.clear()
            self.separation = Separation()
            self.calibrate()
        for prompt in last:
            self.check(prompt, self.endpoint.ask(prompt.text))

    def group(self, size: int) -> list[Prompt]:
        """Return new prompts that share a beginning which the server has not seen."""
        made = new_group(self.source, self._asked, size, self.num_words)
        self._asked += size
        for prompt in made:
            self.prompts[prompt.number] = prompt
        for number in list(self.prompts)[:-KEPT]:
            del self.prompts[number]
            self.references.pop(number, None)
        return made

    def at_once(self, prompts: Iterable[Prompt], num_tokens: int | None = None) -> list[tuple[Prompt, Answer | None]]:
        """Ask prompts at the same time. Raises `Gone` if one of them gets no answer."""
        asked = list(prompts)
        with ThreadPoolExecutor(len(asked)) as threads:
            texts = [prompt.text for prompt in asked]
            return list(
                zip(asked, threads.map(lambda t: self.endpoint.ask(t, num_tokens=num_tokens), texts), strict=True)
            )

    def compare(self, prompts: list[Prompt]) -> None:
        """Note how far apart the answers to a group are. Without cold answers, equal ones are an alarm.

        Raises `Alarm`.
        """
        known = [prompt for prompt in prompts if prompt.number in self.references]
        self.separation.add([self.references[prompt.number] for prompt in known])
        if self.endpoint.cold or not self.endpoint.top or not self.separation.sees:
            return
        for one, other in combinations(known, 2):
            apart = distance(self.references[one.number], self.references[other.number])
            if apart <= max(SMALLEST, self.separation.noise) and apart <= self.separation.between / NEAR**2:
                raise self._alarm(other, one, apart, 0.0, NUM_SEGMENTS + 1)

    def check(self, prompt: Prompt, answer: Answer | None) -> None:
        """Compare an answer with its reference. Raises `Alarm`."""
        if answer is None:
            return
        tally = self.tallies.setdefault(self._pattern, Tally())
        tally.answers += 1
        tally.told += tells_own(answer, prompt)
        others = [other for other in self.prompts.values() if other.number != prompt.number]
        if (owner := told_secret(answer, prompt, others)) is not None:
            raise self._alarm(prompt, owner, 1.0, 0.0, NUM_SEGMENTS + 1)
        reference = self._reference(prompt, answer)
        if reference is None:
            return
        far = distance(answer, reference)
        if far > self.separation.between / NEAR and self.separation.between:
            far = self._explain(prompt, answer, reference, far, others)
        tally.largest = max(tally.largest, far)
        if far <= self.separation.limit:
            self.separation.noise = max(self.separation.noise, far)

    def _reference(self, prompt: Prompt, answer: Answer) -> Answer | None:
        found = self.references.get(prompt.number)
        if found is None:
            found = self.endpoint.ask(prompt.text, cold=True) if self.endpoint.cold else answer
            if found is not None:
                self.references[prompt.number] = found
        return found

    def _explain(self, prompt: Prompt, answer: Answer, reference: Answer, far: float, others: list[Prompt]) -> float:
        """Look for the owner of an answer that is far from its reference. Return the distance. Raises `Alarm`."""
        if not self.endpoint.top:
            return far
        known = [other for other in others if other.number in self.references]
        known.sort(key=lambda other: distance(answer, self.references[other.number]))
        if known and (near := distance(answer, self.references[known[0].number])) <= far / NEARER:
            raise self._alarm(prompt, known[0], far, near, NUM_SEGMENTS + 1)
        if far <= self.separation.limit:
            return far
        if not self.tallies[self._pattern].unexplained:
            self.say(f"{self._pattern}: an answer differs by {far:.3g} from its reference: looking for an owner")
        again = self._cold_again(prompt, others)
        far = min([far, *(distance(answer, found) for found in again)])
        if far <= self.separation.limit:
            return far
        noise = max([SMALLEST, self.separation.noise, *(distance(found, reference) for found in again)])
        if again and far > 2 * NEARER * noise:
            self._explain_in_part(prompt, answer, far, known[:SPLICED])
        self.tallies[self._pattern].unexplained += 1
        self.suspects += bool(again) and far > BEYOND_NOISE * noise
        if self.suspects >= UNEXPLAINED:
            raise self._alarm(prompt, None, far, noise, 0)
        return far

    def _cold(self, prompt: Prompt) -> Answer | None:
        return self.endpoint.ask(prompt.text, cold=True)

    def _cold_again(self, prompt: Prompt, others: list[Prompt]) -> list[Answer]:
        """Ask without the cache, alone and together with other prompts: arithmetic may depend on the batch."""
        if not self.endpoint.cold:
            return []
        found = [self._cold(prompt)]
        for beside in (1, 3):
            texts = [prompt.text, *(other.text for other in others[-beside:])]
            with ThreadPoolExecutor(len(texts)) as threads:
                found.append(next(threads.map(lambda text: self.endpoint.ask(text, cold=True), texts)))
        return [one for one in found if one is not None]

    def _explain_in_part(self, prompt: Prompt, answer: Answer, far: float, owners: list[Prompt]) -> None:
        """Compare with the answers to prompts that begin as one prompt and end as the other. Raises `Alarm`."""
        for owner in owners:
            shares = owner.parts[0] == prompt.parts[0]
            for parts in range(1 + shares, NUM_SEGMENTS + 1):
                found = self._cold(spliced(owner, prompt, parts))
                if found is not None and (near := distance(answer, found)) <= far / NEARER:
                    raise self._alarm(prompt, owner, far, near, parts)

    def _alarm(self, prompt: Prompt, owner: Prompt | None, far: float, near: float, parts: int) -> Alarm:
        where = f"pattern {self._pattern}, prompt {prompt.number}"
        about = {"pattern": self._pattern, "prompt": prompt.text, "distance": far}
        if owner is None:
            sentence = (
                f"{where}: the answer is {far:.3g} from the one without the cache, right answers up to {near:.3g}; "
                f"two prompts are {self.separation.between:.3g} apart. No prompt explains it"
            )
            return Alarm(sentence, **about, owner=None)
        words = len(" ".join(owner.parts[:parts]).split())
        sentence = (
            f"{where}: the answer used the keys of prompt {owner.number}, words 1 to {words} "
            f"(distance {near:.3g} from that, {far:.3g} from its own)"
        )
        return Alarm(
            sentence, **about, owner=owner.text, owner_number=owner.number, owner_words=words, owner_distance=near
        )

    # Patterns.

    def _repeat(self) -> None:
        """A, B, A, C, A: each answer alone."""
        prompts = self.group(4)
        first = prompts[0]
        for prompt in [first, prompts[1], first, prompts[2], first, prompts[3], *prompts]:
            self.check(prompt, self.endpoint.ask(prompt.text))
        self.compare(prompts)

    def _concurrent(self) -> None:
        prompts = self.group(6)
        for _ in range(2):  # the second time from the cache
            for prompt, answer in self.at_once(prompts):
                self.check(prompt, answer)
        self.compare(prompts)

    def _cancelled(self) -> None:
        prompts = self.group(6)
        usual = max(0.01, min((found.seconds for found in self.references.values()), default=0.2))
        with ThreadPoolExecutor(3) as threads:
            left = [threads.submit(self.endpoint.cancel, p.text, self.source.uniform(0, usual)) for p in prompts[:3]]
            for prompt, answer in self.at_once(prompts[3:]):
                self.check(prompt, answer)
            for future in left:
                future.result()
        for prompt in prompts:
            self.check(prompt, self.endpoint.ask(prompt.text))
        self.compare(prompts)

    def _pressed(self) -> None:
        """Requests with long answers, until the server evicts and preempts. Then earlier prompts again."""
        earlier = [prompt for prompt in self.prompts.values() if prompt.number in self.references][-6:]
        prompts = [prompt for _ in range(0, self.num_pressed, 4) for prompt in self.group(4)]
        for prompt, answer in self.at_once(prompts, num_tokens=8 * self.endpoint.num_tokens):
            self.check(prompt, answer)
        for prompt in earlier:
            if prompt.number in self.prompts:
                self.check(prompt, self.endpoint.ask(prompt.text))
        self.compare(prompts[:4])

    def _salted(self) -> None:
        """The same prompt under two salts. Its keys are equal, so `cached_tokens` or the time shows the fault."""
        if not self.endpoint.has_salts:
            return
        for prompt in self.group(2):
            other = self.group(1)[0]
            salts = [self.endpoint.new_salt() for _ in range(3)]
            asked = [("cold", prompt, salts[0]), ("same salt", prompt, salts[0]), ("other salt", prompt, salts[1])]
            asked.insert(self.source.choice([0, 3]), ("cold", other, salts[2]))
            for kind, one, salt in asked:
                found = self.endpoint.ask(one.text, salt=salt)
                self.check(one, found)
                if found is None:
                    continue
                self._times.setdefault(kind, []).append(found.seconds)
                if kind == "other salt" and found.cached:
                    sentence = f"pattern salts: {found.cached} tokens were found under another cache_salt"
                    raise Alarm(sentence, pattern="salts", prompt=one.text, owner=one.text, cached_tokens=found.cached)
        self._compare_times()

    def _compare_times(self) -> None:
        cold, same, other = (self._times.get(kind, []) for kind in ("cold", "same salt", "other salt"))
        if len(other) >= TIMED and max(same) < min(cold) and max(other) < min(cold):
            sentence = (
                f"pattern salts: prompts of another cache_salt took {max(other):.3f} s at most, as cached ones "
                f"({max(same):.3f} s); prompts that nobody has asked took {min(cold):.3f} s at least"
            )
            raise Alarm(sentence, pattern="salts", owner=None)


PATTERNS: dict[str, Callable[[Prover], None]] = {
    "repeat": Prover._repeat,
    "concurrent": Prover._concurrent,
    "cancelled": Prover._cancelled,
    "pressed": Prover._pressed,
    "salts": Prover._salted,
}
