"""`pagepool serve`: load a model and serve it until a signal arrives."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from threading import Event, Thread
from typing import Any

from pagepool._version import __version__
from pagepool.cli import workers
from pagepool.cli.credentials import Credentials
from pagepool.cli.model_options import add_model_arguments, model_directory, open_engine, require, summary_of
from pagepool.cli.supervise import GRACE, Drain, watch
from pagepool.cli.usage import UsageError, between, file_name
from pagepool.config import CHOICES, SchedulerConfig

__all__ = ["add_arguments", "run"]

MAX_PORT = 65_535
MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_SECONDS = 86_400
BACKLOG = 1024
MAX_PRIORITY = 1 << 30
MAX_CONNECTIONS = 1 << 20
MAX_WORKERS = 64
SPARE_FILES = 64  # file descriptors for purposes other than connections
logger = logging.getLogger("pagepool")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pagepool serve`."""
    add = parser.add_argument
    add("--config", type=file_name, metavar="FILE", help="read options from this TOML file, such as max-requests = 64")
    add("--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1")
    add("--port", type=between(0, MAX_PORT), default=8000, metavar="N", help="default: 8000; 0: any free port")
    add("--name", metavar="NAME", help="name of the model for clients; default: the name of its directory")
    add(
        "--max-prompt-tokens",
        type=between(1, MAX_TOKENS),
        metavar="N",
        help="maximum number of tokens of a prompt, longer prompts get status 400; default: the limit of the model",
    )
    add(
        "--max-requests",
        type=between(1, MAX_REQUESTS),
        default=256,
        metavar="N",
        help="maximum number of requests that run or wait, others get status 429; default: 256",
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
        help="seconds to wait for running requests after SIGTERM or Ctrl-C; default: 60",
    )
    add(
        "--step-timeout",
        type=between(1, MAX_SECONDS),
        default=600,
        metavar="S",
        help="the process exits if one step of the model takes more seconds; default: 600",
    )
    add(
        "--max-connections",
        type=between(1, MAX_CONNECTIONS),
        default=1000,
        metavar="N",
        help="maximum number of open connections, others get status 503; default: 1000",
    )
    add("--no-access-log", action="store_true", help="do not log a line for each request")
    add(
        "--workers",
        type=between(1, MAX_WORKERS),
        metavar="N",
        help="serve with N engines, each in a process that Ray starts and restarts; needs the extra ray",
    )
    add(
        "--prefill-workers",
        type=between(0, MAX_WORKERS),
        default=0,
        metavar="N",
        help="with --workers: N more engines that only compute prompts; needs the extra transfer",
    )
    _add_security_arguments(parser)
    add_model_arguments(parser)
    parser.epilog = (
        "SIGTERM, SIGHUP and Ctrl-C let running requests end, refuse others, and then close the port; a second signal "
        "aborts them. An option such as --max-requests can also be set by PAGEPOOL_SERVE_MAX_REQUESTS or in --config."
    )


def _add_security_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("security").add_argument
    add("--api-key", action="append", default=[], metavar="KEY", help="a key that clients must send; may be repeated")
    add(
        "--api-key-file",
        type=file_name,
        metavar="FILE",
        help="a file with one key per line, or a tenant and its key; tenants share no cached prefixes",
    )
    add(
        "--admin-key",
        metavar="KEY",
        help="the key for POST /reset_prefix_cache; default: only clients on this machine may use that path",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept this name in the Host header, in addition to IP addresses, localhost and --host; *: any name",
    )
    add(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="URL",
        help="accept requests from the pages of this site, such as https://chat.example; *: any site",
    )
    add(
        "--priorities",
        type=_priorities,
        default=(0, 0),
        metavar="LOW:HIGH",
        help="lowest and highest priority that requests may have; default: only 0",
    )
    add(
        "--policy",
        choices=CHOICES["policy"],
        default=SchedulerConfig.policy,
        help="which request is next: priority (lower number first, then first come), fcfs (first come) or fair (the "
        "tenant that was served the fewest tokens); default: %(default)s",
    )
    add(
        "--kv-events-config",
        type=_kv_events,
        metavar="JSON",
        help="publish what the prefix cache stores and removes over ZMQ, as vLLM does with this option: endpoint, "
        "replay_endpoint, topic",
    )
    add("--show-cached-tokens", action="store_true", help="tell clients how many tokens of a prompt were cached")
    add(
        "--show-misses",
        action="store_true",
        help="log why tokens of each prompt were not cached, and tell clients; shows tokens of prompts with equal salt",
    )
    add("--uds", type=file_name, metavar="PATH", help="listen at a Unix socket that only its owner can use")
    add("--ssl-certfile", type=file_name, metavar="FILE", help="certificate for TLS")
    add("--ssl-keyfile", type=file_name, metavar="FILE", help="key of the certificate; default: in --ssl-certfile")


def _kv_events(text: str) -> dict[str, str] | None:
    """Parse vLLM's option of this name; None: no events.

    >>> _kv_events('{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}')
    {'endpoint': 'tcp://127.0.0.1:5557'}
    """
    known = {"endpoint", "replay_endpoint", "topic"}
    try:
        given: dict[str, str] = json.loads(text)
        is_wanted, publisher = given.pop("enable_kv_cache_events", True), given.pop("publisher", "zmq")
    except (ValueError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text[:40]!r}") from None
    if publisher == "null" or is_wanted is False:
        return None
    if publisher != "zmq" or is_wanted is not True or not given.keys() <= known or "endpoint" not in given:
        allowed = 'publisher "zmq", an endpoint, and perhaps a replay_endpoint and a topic'
        raise argparse.ArgumentTypeError(f"must have {allowed}, not {text[:200]!r}")
    if wrong := [name for name, value in given.items() if not isinstance(value, str)]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} must be a text, not {given[wrong[0]]!r}")
    return given


def _priorities(text: str) -> tuple[int, int]:
    """Parse two whole numbers, the lower one first.

    >>> _priorities("-1:2")
    (-1, 2)
    """
    match = re.fullmatch("(-?[0-9]{1,10}):(-?[0-9]{1,10})", text)
    if match is None or not -MAX_PRIORITY <= int(match[1]) <= int(match[2]) <= MAX_PRIORITY:
        sentence = f"must be LOW:HIGH, two whole numbers from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {text[:40]!r}"
        raise argparse.ArgumentTypeError(sentence)
    return int(match[1]), int(match[2])


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns 0, or 1 if the engine has failed.

    Raises `UsageError` if the model, the address, a file or a package cannot be used.
    """
    model_directory(options.model)
    workers.check(options)
    require("pagepool serve", "serve", "starlette", "uvicorn", "prometheus_client", "jinja2")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("pagepool").setLevel(logging.INFO)
    if options.no_access_log:
        logging.getLogger("pagepool.access").setLevel(logging.WARNING)
    if options.kv_events_config is not None:
        if options.no_prefix_cache:
            raise UsageError("--kv-events-config cannot be used with --no-prefix-cache")
        require("pagepool serve --kv-events-config", "kv-events", "zmq", "msgspec")
    credentials = Credentials(options)
    with listening(options) as (sock, url):
        most = allowed_connections(options.max_connections)
        if options.workers is not None:
            app = app_options(options, credentials)
            service = import_module("pagepool.cluster.door").Service(
                app, most, options.ssl_certfile, options.ssl_keyfile, access_log=not options.no_access_log
            )
            return workers.run(options, service, credentials, sock, url)
        loading = import_module("pagepool.serve.loading").Loading()
        server = import_module("pagepool.serve.connections").http_server(
            loading,
            most,
            certificate=options.ssl_certfile,
            key=options.ssl_keyfile,
            grace=GRACE,
        )
        serving = Serving(options, server, loading, credentials, url)
        before = signal.getsignal(signal.SIGHUP)
        if before is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, serving.drain)
        try:
            return serving.run(sock)
        finally:
            signal.signal(signal.SIGHUP, before)


class Serving:
    """A server that answers while a thread loads its model. The event loop runs in the main thread."""

    def __init__(
        self, options: argparse.Namespace, server: Any, loading: Any, credentials: Credentials, url: str
    ) -> None:
        self._options, self._server, self._loading, self._url = options, server, loading, url
        self._credentials = credentials
        self._name = options.name or model_directory(options.model).resolve().name
        self.drain = server.handle_exit = Drain(server, options.drain)
        self._ended = Event()
        self._error: BaseException | None = None  # the exception that ended the thread
        self._status = 0

    def run(self, sock: Any) -> int:
        """Serve until a signal arrives or the engine fails. Returns the exit status.

        If the thread that loads the model raised an exception, this method raises it.
        """
        say(f"pagepool {__version__}: loading {self._name}; {self._url}/health says when it is loaded")
        thread = Thread(target=self._run_engine, name="pagepool-serve")
        thread.start()
        try:
            self._server.run(sockets=[sock])
        finally:
            self._ended.set()
            thread.join()
        if self._error is not None:
            raise self._error
        return self._status

    def _run_engine(self) -> None:
        try:
            with open_engine(self._options, "pagepool serve") as engine, self._published(engine):
                self._loading.app = app = self._app(engine)
                self.drain.begin(engine, app.state)
                for line in summary_of(engine, self._options):
                    say(f"  {line}")
                say(f"pagepool: {self._name} at {self._url}/v1")
                watch(engine, self._server, self._options.step_timeout, self._ended, self._reload)
                self._ended.wait()  # the server uses the engine until it has ended
                self._status = 0 if engine.failure is None else 1
        except BaseException as error:
            self._error = error
            self._server.should_exit = True

    def _published(self, engine: Any) -> Any:
        """Return a context in which the events of the engine's prefix cache are published, if they are wanted."""
        about = self._options.kv_events_config
        if about is None:
            return nullcontext()
        publisher = import_module("pagepool.integrations.kv_events").KvEventPublisher
        try:
            return publisher(engine.prefix_cache, **about)
        except import_module("zmq").ZMQError as error:
            raise UsageError(f"--kv-events-config: {about}: {error}") from error

    def _reload(self) -> None:
        """Use new API keys and a new certificate if their files have changed."""
        keys_changed, certificate_changed = self._credentials.changes()
        if keys_changed:
            self._loading.app.state.set_api_keys(self._credentials.api_keys)
        if certificate_changed:
            self._server.config.ssl.load_cert_chain(self._options.ssl_certfile, self._options.ssl_keyfile)

    def _app(self, engine: Any) -> Any:
        create_app = import_module("pagepool.serve.app").create_app
        return create_app(engine, self._name, **app_options(self._options, self._credentials))


def app_options(options: argparse.Namespace, credentials: Credentials) -> dict[str, Any]:
    """Return the arguments of `create_app`."""
    return {
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_requests": options.max_requests,
        "timeout": options.timeout,
        "api_keys": credentials.api_keys,
        "admin_key": options.admin_key,
        "allowed_hosts": ["*"] if options.uds else [options.host, *options.allowed_host],
        "allowed_origins": options.allowed_origin,
        "priorities": options.priorities,
        "shows_cached_tokens": options.show_cached_tokens,
        "shows_misses": options.show_misses,
        "special_tokens_in_texts": options.special_tokens_in_texts,
    }


def say(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def allowed_connections(asked: int) -> int:
    """Return the maximum number of connections that the process can open: each one needs a file descriptor.

    Changes the soft limit of file descriptors if it is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = asked + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(1, min(asked, soft - SPARE_FILES))
    return asked


@contextmanager
def listening(options: argparse.Namespace) -> Iterator[tuple[Any, str]]:
    """Open a listening socket and return it with its URL. Raises `UsageError` if the address cannot be used."""
    if options.uds is not None:
        with listen_at_path(options.uds) as sock:
            yield sock, f"http+unix://{options.uds}"
        return
    with listen(options.host, options.port) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        yield sock, f"{'http' if options.ssl_certfile is None else 'https'}://{shown}:{port}"


@contextmanager
def listen_at_path(path: str) -> Iterator[Any]:
    """Listen at a Unix socket that only its owner can use. Replaces the socket of a server that has ended."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise UsageError(f"{path}: cannot listen: the path is a file, not a socket")
            with socket.socket(socket.AF_UNIX) as other:
                try:
                    other.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                else:
                    raise UsageError(f"{path}: cannot listen: another server uses this socket")
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        made = os.lstat(path).st_ino
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(f"{path}: cannot listen: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
    try:
        yield sock
    finally:
        sock.close()
        with suppress(FileNotFoundError):
            if os.lstat(path).st_ino == made:
                os.unlink(path)


def listen(host: str, port: int) -> Any:
    """Open a listening TCP socket. Raises `UsageError` if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{host}:{port}: cannot listen: {error.strerror}") from None
