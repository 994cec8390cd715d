"""`pagepool serve`: loads a model and serves it until a signal asks to stop."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from importlib import import_module
from typing import Any

from pagepool.cli.model_options import add_model_arguments, model_directory, open_engine, require
from pagepool.cli.usage import UsageError, between

__all__ = ["add_arguments", "run"]

MAX_PORT = 65_535
MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_SECONDS = 86_400
BACKLOG = 1024


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
        help="seconds that requests have to end after SIGTERM; default: 60",
    )
    add_model_arguments(parser)
    parser.epilog = "SIGTERM and Ctrl-C close the port and let running requests end."


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; returns 0. Raises `UsageError` for a model, an address or a package that cannot be used."""
    model_directory(options.model)
    require("pagepool serve", "serve", "starlette", "uvicorn", "prometheus_client", "jinja2")
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
            app, log_level="warning", timeout_graceful_shutdown=options.drain, access_log=False, lifespan="off"
        )
        # uvicorn raises the signal once more when it has shut down: the process is to end in its own way.
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"pagepool: {name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
            uvicorn.Server(config).run(sockets=[sock])
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def listen(host: str, port: int) -> Any:
    """A socket that listens. Raises `UsageError` for an address that cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{host}:{port}: cannot be served: {error.strerror}") from None
