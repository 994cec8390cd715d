"""`pagepool serve`: loads a model and serves it until a signal asks to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from importlib import import_module
from threading import Event, Thread
from typing import Any

from pagepool.cli.model_options import add_model_arguments, model_directory, open_engine, require
from pagepool.cli.usage import UsageError, between

__all__ = ["add_arguments", "run"]

MAX_PORT = 65_535
MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_SECONDS = 86_400
BACKLOG = 1024
POLL = 0.25  # seconds between two looks at the engine
GRACE = 2.0  # seconds that clients have to read that they were aborted
logger = logging.getLogger("pagepool")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool serve`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1")
    add("--port", type=between(0, MAX_PORT), default=8000, metavar="N", help="default: 8000; 0: any free one")
    add("--name", metavar="NAME", help="the model's name for clients; default: the name of its directory")
    add(
        "--max-prompt-tokens",
        type=between(1, MAX_TOKENS),
        metavar="N",
        help="longer prompts get status 400; default: what the model has room for",
    )
    add(
        "--max-requests",
        type=between(1, MAX_REQUESTS),
        default=256,
        metavar="N",
        help="requests that run and wait; more get status 429; default: 256",
    )
    add(
        "--timeout",
        type=between(1, MAX_SECONDS),
        default=600,
        metavar="S",
        help="seconds after which a request gets status 503; default: 600",
    )
    add(
        "--drain",
        type=between(0, MAX_SECONDS),
        default=60,
        metavar="S",
        help="seconds that requests have to end after SIGTERM or Ctrl-C; default: 60",
    )
    add(
        "--step-timeout",
        type=between(1, MAX_SECONDS),
        default=600,
        metavar="S",
        help="seconds after which a step of the model counts as hung and the process exits; default: 600",
    )
    add_model_arguments(parser)
    parser.epilog = "SIGTERM and Ctrl-C close the port and let running requests end; a second signal aborts them."


def run(options: argparse.Namespace) -> int:
    """Serve until a signal and return 0; return 1 when the engine has failed.

    Raises `UsageError` for a model, an address or a package that cannot be used.
    """
    model_directory(options.model)
    require("pagepool serve", "serve", "starlette", "uvicorn", "prometheus_client", "jinja2")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    uvicorn = import_module("uvicorn")
    with listen(options.host, options.port) as sock, open_engine(options, "pagepool serve") as engine:
        name = options.name or model_directory(options.model).resolve().name
        app = import_module("pagepool.serve.app").create_app(
            engine,
            name,
            max_prompt_tokens=options.max_prompt_tokens,
            max_requests=options.max_requests,
            timeout=options.timeout,
        )
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=options.drain + GRACE, access_log=False, lifespan="off"
        )
        server = uvicorn.Server(config)
        server.handle_exit = Drain(server, app.state.stop, engine, options.drain)
        # A signal that comes before the server takes signals, or after it, ends the process.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        ended = Event()
        watching = Thread(target=watch, args=(engine, server, options.step_timeout, ended), name="pagepool-watch")
        watching.start()
        try:
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"pagepool: {name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
            server.run(sockets=[sock])
        finally:
            ended.set()
            watching.join()
            signal.signal(signal.SIGTERM, before)
        return 0 if engine.failure is None else 1


class Drain:
    """What signals do: the first waits `seconds` for the requests and aborts them then, a second aborts them at once.

    Python calls it in the main thread, which runs the event loop.
    """

    def __init__(self, server: Any, stop: Any, engine: Any, seconds: float) -> None:
        self._server, self._stop, self._engine, self._seconds = server, stop, engine, seconds

    def __call__(self, number: int, frame: Any) -> None:
        loop = asyncio.get_running_loop()
        if self._server.should_exit:
            loop.call_soon_threadsafe(self._stop)
            loop.call_soon_threadsafe(loop.call_later, GRACE, setattr, self._server, "force_exit", True)
            return
        self._server.should_exit = True
        if count := self._engine.num_requests:
            noun = "1 request runs" if count == 1 else f"{count} requests run"
            sentence = f"pagepool: {noun}, waiting up to {self._seconds} s; a second signal aborts at once"
            print(sentence, file=sys.stderr, flush=True)
        loop.call_soon_threadsafe(loop.call_later, self._seconds, self._stop)


def watch(engine: Any, server: Any, step_timeout: float, ended: Event) -> None:
    """Stop the server when the engine has failed, and end the process when a step hangs."""
    while not ended.wait(POLL):
        if engine.failure is not None:
            server.should_exit = True
            return
        if engine.seconds_in_step > step_timeout:
            engine.is_accepting = False
            logger.critical("a step has not ended within %g s (--step-timeout): the process exits", step_timeout)
            ended.wait(GRACE)  # `/health` says so meanwhile
            logging.shutdown()
            os._exit(1)  # the stepping thread cannot be stopped


def listen(host: str, port: int) -> Any:
    """A socket that listens. Raises `UsageError` for an address that cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{host}:{port}: cannot be served: {error.strerror}") from None
