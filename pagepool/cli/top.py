"""`pagepool top`: requests, tokens and memory of a running server, from its `/metrics`; pagepool's or vLLM's."""

from __future__ import annotations

import argparse
import http.client
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagepool.cli.output import STDOUT, printable, written_to
from pagepool.cli.usage import UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Metrics", "add_arguments", "rendered", "run"]

SECONDS = 10.0  # to wait for an answer
MOST_BYTES = 1 << 24
SAMPLE = re.compile(r"(\w+):(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SYSTEMS = ("pagepool", "vllm")
BAR = 24  # characters
NAME = 19  # characters of the longest name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool top`."""
    add = parser.add_argument
    default = "http://127.0.0.1:8000"
    add("url", nargs="?", default=default, metavar="URL", help=f"address of the server; default: {default}")
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="between two pictures; default: 1")
    add("--once", action="store_true", help="print one picture, of one interval, and end")
    add("--api-key", metavar="KEY", help="sent as bearer token; default: the environment's OPENAI_API_KEY")


@dataclass(frozen=True)
class Metrics:
    """The samples of one scrape: the system that wrote them, and values by name and labels."""

    system: str
    samples: tuple[tuple[str, dict[str, str], float], ...]
    time: float

    @classmethod
    def parse(cls, text: str, now: float) -> Metrics:
        """Read Prometheus' text format. Raises `ValueError` if it has no metrics of pagepool or vLLM.

        >>> found = Metrics.parse('pagepool:kv_blocks{pool="kv",state="free"} 3.0', 0.0)
        >>> found.total("kv_blocks", state="free"), found.total("kv_blocks", state="used")
        (3.0, None)
        """
        samples, system = [], ""
        for line in text.splitlines():
            match = SAMPLE.fullmatch(line)
            if match is None or match[1] not in SYSTEMS or match[2].endswith(("_bucket", "_created")):
                continue
            try:
                value = float(match[4])
            except ValueError:
                raise ValueError(f"{match[1]}:{match[2]} has the value {match[4][:24]!r}") from None
            system = system or match[1]
            samples.append((match[2].removesuffix("_total"), dict(LABEL.findall(match[3] or "")), value))
        if not system:
            raise ValueError("the answer has no metrics of pagepool or vLLM")
        return cls(system, tuple(samples), now)

    def values(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of the samples with this name and these labels."""
        return [
            (found, value)
            for sample, found, value in self.samples
            if sample == name and labels.items() <= found.items()
        ]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over all engines, pools and caches, or None if there is no such sample."""
        found = self.values(name, **labels)
        return sum(value for _, value in found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the value of a label."""
        sums: dict[str, float] = {}
        for labels, value in self.values(name):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums


class Change:
    """Two scrapes of one server: what happened between them."""

    def __init__(self, before: Metrics, now: Metrics) -> None:
        self.before, self.now = before, now
        self.seconds = max(now.time - before.time, 1e-9)

    def grown(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter. After a restart of the server it is the new value."""
        new, old = self.now.total(name, **labels), self.before.total(name, **labels)
        return None if new is None else new - (old or 0.0) if new >= (old or 0.0) else new

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the growth per second."""
        grown = self.grown(name, **labels)
        return None if grown is None else grown / self.seconds

    def mean(self, name: str) -> float | None:
        """Return the mean of the samples that a histogram got, or None if it got none."""
        count, total = self.grown(f"{name}_count"), self.grown(f"{name}_sum")
        return total / count if count and total is not None else None

    def share(self, part: str, whole: str) -> float | None:
        """Return the share of two counters in the interval, or since the start if nothing happened."""
        grown, all_grown = self.grown(part), self.grown(whole)
        if not all_grown:
            grown, all_grown = self.now.total(part), self.now.total(whole)
        return grown / all_grown if all_grown and grown is not None else None


def _count(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.0f}{unit}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:,.1f} ms"


def _bar(share: float | None) -> str:
    """Return a share as a bar and a number.

    >>> _bar(0.5)
    '############............  50.0%'
    """
    if share is None or math.isnan(share):
        return "-"
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return f"{'#' * full}{'.' * (BAR - full)} {share:6.1%}"


def rows(change: Change) -> Iterator[tuple[str, str, str]]:
    """Yield a name, a value and a remark for each line of the picture."""
    now = change.now
    waiting = now.total("num_requests_waiting")
    yield "requests", f"{_count(now.total('num_requests_running'))} running, {_count(waiting)} waiting", ""
    ended = change.rate("requests") if now.system == "pagepool" else change.rate("request_success")
    first = _milliseconds(change.mean("time_to_first_token_seconds"))
    yield "ended", "-" if ended is None else f"{ended:,.1f}/s", f"{first} to the first token"
    computed = change.rate("prompt_tokens")
    yield "prompt tokens", _count(computed, "/s"), f"{_count(now.total('prompt_tokens'))} in all"
    yield "generated tokens", _count(change.rate("generation_tokens"), "/s"), f"{_between_tokens(change)} for each"
    usage = now.values("kv_cache_usage_perc")
    yield "KV in use", _bar(max((value for _, value in usage), default=None)), _blocks(now)
    yield "prefix hits", _bar(change.share("prefix_cache_hits", "prefix_cache_queries")), _cached(change)
    evictions = change.rate("prefix_cache_evictions")
    if evictions is not None:
        yield "evictions", _count(evictions, "/s"), f"{_count(now.total('prefix_cache_evictions'))} in all"
    preempted = now.total("num_preemptions")
    yield "preemptions", _count(change.rate("num_preemptions"), "/s"), f"{_count(preempted)} in all"
    yield from _tiers(change)
    yield from _misses(change)


def _between_tokens(change: Change) -> str:
    ours = change.mean("time_per_output_token_seconds")
    return _milliseconds(change.mean("inter_token_latency_seconds") if ours is None else ours)


def _blocks(now: Metrics) -> str:
    states = now.by("kv_blocks", "state")
    return ", ".join(f"{_count(count)} {state}" for state, count in states.items())


def _cached(change: Change) -> str:
    cached = change.rate("prompt_tokens_cached")
    return "" if cached is None else f"{_count(cached)} tokens/s found"


def _tiers(change: Change) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of a store, and of vLLM's external caches."""
    now = change.now
    tiers = now.by("prefix_cache_tier_hits", "tier")
    if tiers:
        found = ", ".join(f"{_count(change.rate('prefix_cache_tier_hits', tier=t), '/s')} from {t}" for t in tiers)
        yield "blocks found", found, ""
        pages = now.by("store_pages", "event")
        read, written = (change.rate("store_bytes", direction=way) for way in ("read", "written"))
        moved = f"{(read or 0) / 1e6:,.1f} MB/s read, {(written or 0) / 1e6:,.1f} written"
        size = (now.total("store_disk_bytes") or 0) / 1e6
        yield "store", moved, f"{size:,.0f} MB; " + ", ".join(f"{_count(n)} {event}" for event, n in pages.items())
    external = change.share("external_prefix_cache_hits", "external_prefix_cache_queries")
    if external is not None:
        yield "external hits", _bar(external), ""


def _misses(change: Change) -> Iterator[tuple[str, str, str]]:
    missed = change.now.by("prompt_tokens_missed", "reason")
    for reason, count in sorted(missed.items(), key=lambda one: -one[1]):
        rate = change.rate("prompt_tokens_missed", reason=reason)
        yield f"missed: {reason}", _count(rate, " tokens/s"), f"{_count(count)} in all"


def rendered(before: Metrics, now: Metrics, url: str) -> Table:
    """Return the picture of the time between two scrapes, for a console of rich."""
    from rich.table import Table
    from rich.text import Text

    title = f"pagepool top: {now.system} at {printable(url)}, last {now.time - before.time:.1f} s"
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True, min_width=NAME)
    table.add_column(no_wrap=True, min_width=BAR + 8)
    table.add_column(style="dim", no_wrap=True)
    for row in rows(Change(before, now)):
        table.add_row(*(Text(printable(cell)) for cell in row))  # labels of the server are among the cells
    return table


def _scrape(url: str, headers: dict[str, str]) -> Metrics:
    """Raises `UsageError` if the server does not answer with metrics."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SECONDS) as answer:
            text = answer.read(MOST_BYTES).decode("utf-8", "replace")
        return Metrics.parse(text, time.monotonic())
    except urllib.error.URLError as error:
        raise UsageError(printable(f"{url}: {getattr(error, 'reason', error)}")) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(printable(f"{url}: {error}")) from None


def run(options: argparse.Namespace) -> None:
    """Show the server until Ctrl-C, or one picture. Raises `UsageError`."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise UsageError("pagepool top needs rich: pip install 'pagepool[top]'") from None
    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval must be from 0.1 to 3600, not {options.interval:g}")
    url = re.sub(r"(/v1)?(/metrics)?/*$", "", options.url)
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    key: Any = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    before = _scrape(f"{url}/metrics", headers)
    console = Console()
    with written_to(STDOUT):
        if options.once:
            time.sleep(options.interval)
            console.print(rendered(before, _scrape(f"{url}/metrics", headers), url))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                try:
                    now = _scrape(f"{url}/metrics", headers)
                except UsageError as error:
                    live.update(Text(f"pagepool top: {error}: trying again"), refresh=True)
                    continue
                live.update(rendered(before, now, url), refresh=True)
                before = now
