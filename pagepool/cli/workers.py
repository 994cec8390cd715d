"""`pagepool serve --workers`: several engines in separate processes, which Ray starts and restarts."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from pagepool._version import __version__
from pagepool.cli.credentials import Credentials
from pagepool.cli.model_options import model_directory, require, scheduler_config
from pagepool.cli.supervise import POLL
from pagepool.cli.usage import UsageError

__all__ = ["check", "run"]

ALONE = ("store", "store_bytes", "shared_pool", "memory_budget", "kv_events_config")  # options for one engine
STOP_SECONDS = 10.0  # for the front end, after the time of --drain


def check(options: argparse.Namespace) -> None:
    """Raise `UsageError` if `--workers` cannot be used with the other options, or Ray is not installed."""
    if options.workers is None:
        if options.prefill_workers:
            raise UsageError("--prefill-workers needs --workers")
        return
    if options.show_misses:
        raise UsageError("--workers cannot be used with --show-misses: the front end does not see the caches")
    given = [name for name in ALONE if getattr(options, name) is not None]
    if given:
        raise UsageError(
            f"--workers cannot be used with --{given[0].replace('_', '-')}: each engine has a pool of its own"
        )
    require("pagepool serve --workers", "ray", "ray", "ray.serve", "torch", "transformers")


def run(options: argparse.Namespace, service: Any, credentials: Credentials, sock: Any, url: str) -> int:
    """Serve the listening socket `sock` until a signal arrives. Returns 0.

    Raises `UsageError` if the workers or the front end cannot start.
    """
    serving = import_module("pagepool.cluster.ray").serve
    folder = model_directory(options.model)
    name = options.name or folder.resolve().name
    say(f"pagepool {__version__}: loading {name} for {options.workers} workers; {url}/health says when they serve")
    engine: dict[str, Any] = {
        "pool_bytes": options.pool_bytes,
        "dtype": options.kv_dtype,
        "config": scheduler_config(options),
        "prefix_cache": not options.no_prefix_cache,
        "openmp": options.openmp,
        "weights": options.weights,
    }
    levels = {name: logging.getLogger(name).level for name in ("ray", "ray.serve")}
    for logger in levels:
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        with (
            serving(
                folder,
                options.workers,
                options.prefill_workers,
                name=name,
                dtype=options.dtype,
                threads=options.threads,
                engine=engine,
                sock=sock,
                service=service,
                log=sys.stderr,
            ) as cluster,
            caught_signals() as signals,
        ):
            say(f"pagepool: {name} at {url}/v1")
            while not has_item(signals, POLL):
                reload(options, credentials, cluster)
            drain(cluster, options.drain, signals)
    except (RuntimeError, ImportError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return 0


def reload(options: argparse.Namespace, credentials: Credentials, cluster: Any) -> None:
    """Give new API keys and a new certificate to the front end, and to those that Ray starts later."""
    keys_changed, certificate_changed = credentials.changes()
    if keys_changed:
        cluster.door.service.app["api_keys"] = credentials.api_keys
        cluster.front_end.set_api_keys.remote(credentials.api_keys)
    if certificate_changed:
        cluster.front_end.load_certificate.remote(options.ssl_certfile, options.ssl_keyfile)


def drain(cluster: Any, seconds: int, signals: SimpleQueue[int]) -> None:
    """Let requests end. The next signal aborts them."""
    draining = cluster.front_end.drain.remote(seconds)
    for _ in range(int((seconds + STOP_SECONDS) / POLL)):
        if has_item(signals, 0.0):
            draining = cluster.front_end.drain.remote(0)
        try:
            draining.result(timeout_s=POLL)
        except TimeoutError:
            continue
        except Exception as error:  # the front end died: its requests have ended
            say(f"pagepool: the front end has ended: {type(error).__name__}")
        return


@contextmanager
def caught_signals() -> Iterator[SimpleQueue[int]]:
    """Put SIGTERM, SIGHUP and SIGINT into a queue instead of handling them. SIGHUP stays ignored if it is (nohup)."""
    found: SimpleQueue[int] = SimpleQueue()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: found.put(number)) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_item(queue: SimpleQueue[int], seconds: float) -> bool:
    """Wait for an item and remove it. Return false if none has come in time."""
    try:
        queue.get(timeout=seconds) if seconds else queue.get_nowait()
    except Empty:
        return False
    return True


def say(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)
