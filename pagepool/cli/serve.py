"""`pagepool serve`: load a model and serve it until a signal arrives."""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pagepool._version import __version__
from pagepool.cli.model_options import add_model_arguments, model_directory, open_engine, require, summary_of
from pagepool.cli.supervise import GRACE, Drain, Watched, watch
from pagepool.cli.usage import UsageError, between, file_name

__all__ = ["add_arguments", "run"]

MAX_PORT = 65_535
MAX_REQUESTS = 1 << 20
MAX_TOKENS = 1 << 31
MAX_SECONDS = 86_400
BACKLOG = 1024
MAX_PRIORITY = 1 << 30
MAX_CONNECTIONS = 1 << 20
# Seconds until an idle connection is closed. Many clients drop theirs after 5 seconds. The server must wait longer:
# otherwise it could close a connection while a client sends a request on it.
KEEP_ALIVE = 30
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
    add("--show-cached-tokens", action="store_true", help="tell clients how many tokens of a prompt were cached")
    add("--uds", type=file_name, metavar="PATH", help="listen at a Unix socket that only its owner can use")
    add("--ssl-certfile", type=file_name, metavar="FILE", help="certificate for TLS")
    add("--ssl-keyfile", type=file_name, metavar="FILE", help="key of the certificate; default: in --ssl-certfile")


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
    require("pagepool serve", "serve", "starlette", "uvicorn", "prometheus_client", "jinja2")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("pagepool").setLevel(logging.INFO)
    if options.no_access_log:
        logging.getLogger("pagepool.access").setLevel(logging.WARNING)
    uvicorn = import_module("uvicorn")
    keys = read_keys(options.api_key, options.api_key_file)
    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    with listening(options) as (sock, url):
        loading = import_module("pagepool.serve.loading").Loading()
        most = allowed_connections(options.max_connections)
        connection = partial(import_module("pagepool.serve.connections").Connection, most=most)
        config = uvicorn.Config(
            loading,
            http=connection,
            log_level="warning",
            timeout_graceful_shutdown=GRACE,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        serving = Serving(options, uvicorn.Server(config), loading, keys, url)
        before = signal.getsignal(signal.SIGHUP)
        if before is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, serving.drain)
        try:
            return serving.run(sock)
        finally:
            signal.signal(signal.SIGHUP, before)


class Serving:
    """A server that answers while a thread loads its model. The event loop runs in the main thread."""

    def __init__(self, options: argparse.Namespace, server: Any, loading: Any, keys: dict[str, str], url: str) -> None:
        self._options, self._server, self._loading, self._keys, self._url = options, server, loading, keys, url
        self._name = options.name or model_directory(options.model).resolve().name
        self.drain = server.handle_exit = Drain(server, options.drain)
        self._files = Watched([options.api_key_file], [options.ssl_certfile, options.ssl_keyfile])
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
            with open_engine(self._options, "pagepool serve") as engine:
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

    def _reload(self) -> None:
        """Read API keys and certificate again if their files have changed. A file with an error changes nothing."""
        options = self._options
        keys_changed, certificate_changed = self._files.changes()
        try:
            if keys_changed:
                keys = read_keys(options.api_key, options.api_key_file)
                self._loading.app.state.set_api_keys(keys)
                logger.info("%s: read again, %d API keys", options.api_key_file, len(keys))
            if certificate_changed:
                check_certificate(options.ssl_certfile, options.ssl_keyfile)
                self._server.config.ssl.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
                logger.info("%s: read again", options.ssl_certfile)
        except (UsageError, OSError) as error:
            logger.error("the earlier API keys and certificate stay: %s", error)

    def _app(self, engine: Any) -> Any:
        options = self._options
        return import_module("pagepool.serve.app").create_app(
            engine,
            self._name,
            max_prompt_tokens=options.max_prompt_tokens,
            max_requests=options.max_requests,
            timeout=options.timeout,
            api_keys=self._keys,
            admin_key=options.admin_key,
            allowed_hosts=["*"] if options.uds else [options.host, *options.allowed_host],
            allowed_origins=options.allowed_origin,
            priorities=options.priorities,
            shows_cached_tokens=options.show_cached_tokens,
            special_tokens_in_texts=options.special_tokens_in_texts,
        )


def say(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def read_keys(given: list[str], file: str | None) -> dict[str, str]:
    """Return the tenant of each API key. A key without a tenant gets a tenant of its own.

    Raises `UsageError`. Its message never contains a key.
    """
    lines = [("--api-key", key) for key in given]
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: cannot be read: {error}") from None
        lines += [(f"{file}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    found: dict[str, str] = {}
    for place, line in lines:
        words = line.split()
        if place != "--api-key" and (not words or words[0].startswith("#")):
            continue
        if not 1 <= len(words) <= (1 if place == "--api-key" else 2) or not (
            words[-1].isascii() and words[-1].isprintable()
        ):
            raise UsageError(
                f"{place}: an API key must be one word of printable ASCII characters, after its tenant or alone"
            )
        key = words[-1]
        tenant = words[0] if len(words) == 2 else "key " + sha256(key.encode()).hexdigest()[:16]
        if found.setdefault(key, tenant) != tenant:
            raise UsageError(f"{place}: the key has two tenants, {found[key]!r} and {tenant!r}")
    if file is not None and not found:
        raise UsageError(f"{file}: the file has no API keys")
    return found


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise `UsageError` if the files cannot be used for TLS."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(f"{certificate}: cannot be used for TLS: {error}") from None


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
