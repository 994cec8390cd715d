"""`pagepool prove`: does an OpenAI endpoint serve keys of another prompt?"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from pagepool.cli.output import STDOUT, check_writable, printable, show, written_to
from pagepool.cli.prove_endpoint import Endpoint, Gone
from pagepool.cli.prove_patterns import PATTERNS, Alarm, Prover
from pagepool.cli.usage import UsageError, between, file_name

__all__ = ["add_arguments", "run"]

FOUND, BLIND = 1, 2
PROGRESS_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool prove`."""
    add = parser.add_argument
    add("url", metavar="URL", help="address of the API, such as http://127.0.0.1:8000/v1")
    add("--minutes", type=float, default=10.0, metavar="N", help="how long to ask, at least one round; default: 10")
    add("--model", metavar="NAME", help="default: the first model that the server lists")
    add("--api-key", metavar="KEY", help="sent as bearer token; default: the environment's OPENAI_API_KEY")
    add("--words", type=between(64, 100_000), default=480, metavar="N", help="words of a prompt; default: 480")
    add(
        "--pressure",
        type=between(4, 1024),
        default=24,
        metavar="N",
        help="requests at once under pressure: together more tokens than the server's cache; default: 24",
    )
    add("--restart", action="store_true", help="wait for you to restart or kill the server, once")
    add("--wait", type=between(1, 86_400), default=300, metavar="SECONDS", help="for the server to come back; 300")
    add("--seed", type=between(0, 2**63), metavar="N", help="of the prompts; default: random")
    add("--json", type=file_name, metavar="FILE", help="write the result as JSON; -: standard output")
    parser.epilog = (
        "Exit status: 0 if no fault was found, 1 if one was, 2 if the command could not tell. If the server goes away, "
        "the command waits until it is back and asks the last prompts again."
    )


def run(options: argparse.Namespace) -> int:
    """Ask the server and print what was found. Return the exit status. Raises `UsageError`."""
    try:
        import httpx
    except ImportError:
        raise UsageError("pagepool prove needs httpx: pip install 'pagepool[prove]'") from None
    if not 0 < options.minutes <= 100_000:
        raise UsageError(f"--minutes must be above 0 and at most 100000, not {options.minutes:g}")
    if options.json:
        check_writable(options.json)
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    limits = httpx.Limits(max_connections=None)
    url = options.url.rstrip("/") + "/"
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=600.0, limits=limits, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"{options.url}: {error}") from None
    with client:
        prover = Prover(
            Endpoint(client, options.model), random.Random(seed), options.words, options.pressure, options.wait, _say
        )
        began = time.monotonic()
        alarm = _ask(prover, options.minutes * 60, options.restart)
    result = _result(prover, alarm, seed, time.monotonic() - began)
    if options.json:
        with written_to(options.json):
            text = json.dumps(result, indent=2) + "\n"
            sys.stdout.write(text) if options.json == STDOUT else Path(options.json).write_text(text, encoding="utf-8")
    if options.json != STDOUT:
        with written_to(STDOUT):
            _print(prover, result)
    return {"right": 0, "wrong": FOUND, "unknown": BLIND}[result["verdict"]]


def _ask(prover: Prover, seconds: float, restarts: bool) -> Alarm | None:
    endpoint = prover.endpoint
    try:
        endpoint.probe()
        prover.fit()
        prover.calibrate()
    except Alarm as alarm:
        return alarm
    except Gone as gone:
        raise UsageError(f"the server does not answer: {gone}") from None
    answers = f"{endpoint.top} log probabilities" if endpoint.top else "texts without log probabilities"
    cold = f"{endpoint.cold} skips the cache" if endpoint.cold else "no field skips the cache"
    _say(f"{printable(endpoint.model)}, {endpoint.path}: {answers}, {cold}; {prover.num_words} words")
    end = time.monotonic() + seconds
    reported = time.monotonic()
    done: set[str] = set()
    try:
        while time.monotonic() < end or len(done) < len(PATTERNS):
            for name in PATTERNS:
                prover.run(name)
                if name not in done or time.monotonic() > reported + PROGRESS_SECONDS:
                    reported = time.monotonic()
                    _say(f"{name}: {_line(prover)}, {max(0.0, end - reported):.0f} seconds left")
                done.add(name)
                if time.monotonic() > end and len(done) == len(PATTERNS):
                    break
            if restarts:
                restarts = False
                prover.ask_for_restart()
    except Alarm as alarm:
        return alarm
    return None


def _line(prover: Prover) -> str:
    answers = sum(tally.answers for tally in prover.tallies.values())
    separation = prover.separation
    return f"{answers:,} answers, two prompts {separation.between:.3g} apart, one prompt {separation.noise:.3g}"


def _say(text: str) -> None:
    print(f"pagepool: {text}", file=sys.stderr, flush=True)


def _result(prover: Prover, alarm: Alarm | None, seed: int, seconds: float) -> dict[str, Any]:
    separation, endpoint = prover.separation, prover.endpoint
    answers, told = (sum(getattr(tally, name) for tally in prover.tallies.values()) for name in ("answers", "told"))
    largest = max((tally.largest for tally in prover.tallies.values()), default=0.0)
    is_near = largest <= separation.between / 2 and not prover.suspects
    tells = separation.sees and is_near if endpoint.top else told > answers / 2
    return {
        "verdict": "wrong" if alarm else "right" if tells and not _unanswered(prover) else "unknown",
        "sentence": str(alarm) if alarm else None,
        "fault": alarm.about if alarm else None,
        "url": endpoint.url,
        "model": endpoint.model,
        "path": endpoint.path,
        "log_probabilities": endpoint.top,
        "skips_cache_by": endpoint.cold or None,
        "has_salts": endpoint.has_salts,
        "words": prover.num_words,
        "seed": seed,
        "seconds": round(seconds, 1),
        "restarts": prover.restarts,
        "errors": endpoint.errors,
        "separation": separation.as_dict(),
        "patterns": {name: vars(tally) for name, tally in prover.tallies.items()},
    }


def _print(prover: Prover, result: dict[str, Any]) -> None:
    rows = [
        [name, f"{tally.answers:,}", f"{tally.unexplained:,}", f"{tally.largest:.2g}", f"{tally.seconds:.0f}"]
        for name, tally in prover.tallies.items()
    ]
    header = ["pattern", "answers", "unexplained", "largest difference", "seconds"]
    separation = prover.separation
    below = (
        f"two prompts are {separation.between:.3g} apart (median), right answers to one up to "
        f"{separation.noise:.3g}; failed requests: {result['errors']:,}"
    )
    show(f"{result['url']} serves {printable(result['model'])}", header, rows, below)
    if result["verdict"] == "wrong":
        print(f"WRONG: {result['sentence']}")
    elif result["verdict"] == "right":
        print(f"no answer used the keys of another prompt, in {result['seconds'] / 60:.1f} minutes")
        if unexplained := sum(tally.unexplained for tally in prover.tallies.values()):
            largest = max(tally.largest for tally in prover.tallies.values())
            print(f"{unexplained} answers differ without an owner, by up to {largest:.2g}: smaller faults are not seen")
    else:
        print(f"UNKNOWN: {_reason(prover)}")


def _unanswered(prover: Prover) -> list[str]:
    """Return the patterns that got no answer."""
    asked = [name for name in PATTERNS if name != "salts" or prover.endpoint.has_salts]
    return [name for name in asked if name not in prover.tallies or not prover.tallies[name].answers]


def _reason(prover: Prover) -> str:
    separation = prover.separation
    if names := _unanswered(prover):
        return f"no request of these patterns was answered: {', '.join(names)}"
    if not prover.endpoint.top:
        return (
            "without log probabilities only told secrets are seen, and most answers told no secret, not even their own"
        )
    if not separation.sees:
        return "answers to different prompts are equal, so a foreign prefix would not be noticed"
    return "some answers differ from their own without the cache, and no other prompt explains them"
