"""Ray Serve deployments of the workers and the front end. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from ctypes import CDLL, c_int, c_void_p
from importlib import import_module
from threading import Event, Thread
from time import monotonic
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from pagepool.cluster.messages import Call, Limits, News, WorkerLost

__all__ = ["APPLICATION", "FRONT_END", "FrontEndReplica", "WorkerReplica"]

APPLICATION, FRONT_END = "pagepool", "front_end"
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
NEWS_SECONDS = 0.2
ANSWER_SECONDS = 10.0
TRANSFER_SECONDS = 5.0
DRAIN_POLL = 0.05  # seconds between two checks whether all requests have been answered
GRACE = 2.0  # seconds for clients to read the error of an aborted request
PREFIX_EVENTS = 65_536


def die_of_sigterm() -> None:
    """Make SIGTERM end this process immediately, as SIGKILL does.

    With Ray's own handler the process runs for another half minute. During that time it answers no calls but still
    sends news. An exited process is detected within a second, and its requests continue on other workers. This uses
    libc because Python can set signal handlers only in the main thread, which belongs to Ray.
    """
    libc = CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (c_int, c_void_p), c_void_p
    libc.signal(signal.SIGTERM, None)  # SIG_DFL


def write_log(file: int, access_log: bool) -> None:
    """Write the lines of pagepool's loggers to a file descriptor, as `pagepool serve` does."""
    handler = logging.StreamHandler(os.fdopen(file, "w", encoding="utf-8", errors="replace"))
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger = logging.getLogger("pagepool")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not access_log:
        logging.getLogger("pagepool.access").setLevel(logging.WARNING)


class WorkerReplica:
    """A `Worker` in a separate process. It sends its news to the front end.

    Parameters
    ----------
    options : dict
        `model`, a directory; `name`, the name of the model; `dtype`; `engine`, a dict with arguments of `Engine`; and
        `threads`, an int or None.
    is_prefill : bool
        Whether this is a prefill worker.
    moves_pages : bool
        Whether pages are moved between workers.
    """

    def __init__(self, options: dict[str, Any], is_prefill: bool, moves_pages: bool) -> None:
        from pagepool.cluster.worker import Worker
        from pagepool.engine import Engine
        from pagepool.engine.structured import Grammars
        from pagepool.engine.tokenizing import stop_token_ids_of
        from pagepool.integrations.transformers.pretrained import load_pretrained

        die_of_sigterm()
        if options["threads"] is not None:
            import_module("torch").set_num_threads(options["threads"])
            os.environ["PAGEPOOL_NUM_THREADS"] = str(options["threads"])
        model, tokenizer = load_pretrained(options["model"], options["dtype"])
        engine = Engine(model, prefix_events=PREFIX_EVENTS, **options["engine"])
        name = serve.get_replica_context().replica_id.unique_id
        transfer, identity = None, ""
        if moves_pages:
            from pagepool.cluster.pages import model_identity
            from pagepool.transfer.nixl import NixlTransfer

            arithmetic = engine.runner.arithmetic
            identity = model_identity(options["name"], options["model"], options["dtype"], arithmetic)
            transfer = NixlTransfer(name, TRANSFER_SECONDS, serves=is_prefill)
        stops = stop_token_ids_of(model, tokenizer)
        engine.grammars = Grammars(tokenizer, engine.encoder.vocab_size, stops)  # the engine itself makes no texts
        self._worker = Worker(
            engine, name, is_prefill=is_prefill, transfer=transfer, model=identity, stop_token_ids=stops
        )
        self._ends = Event()
        self._thread = Thread(target=self._tell, name="pagepool-news", daemon=True)
        self._thread.start()

    async def generate(self, worker: str | None, call: Call) -> AsyncGenerator[Any, None]:
        """Call `Worker.generate`."""
        async for message in self._worker.generate(call):
            yield message

    def release(self, worker: str | None, number: int) -> None:
        """Call `Worker.release`."""
        if worker == self._worker.name:  # a lease number of another worker must not end a lease of this worker
            self._worker.release(number)

    async def reset_prefix_cache(self, worker: str | None) -> None:
        """Call `Worker.reset_prefix_cache`."""
        if worker == self._worker.name:  # otherwise the worker has exited
            await self._worker.reset_prefix_cache()

    def limits(self, worker: str | None) -> Limits:
        """Call `Worker.limits`."""
        return self._worker.limits()

    def pid(self, worker: str | None) -> int:
        """Return the process id."""
        return os.getpid()

    def check_empty(self, worker: str | None) -> tuple[str, int]:
        """Return the worker's name and the result of `Worker.check_empty`."""
        return self._worker.name, self._worker.check_empty()

    def check_health(self) -> None:
        """Raise if this replica cannot serve requests. Serve calls this regularly, and restarts a failed replica."""
        if not self._worker.engine.is_accepting:
            raise RuntimeError("the engine takes no more requests")
        if not self._thread.is_alive():
            raise RuntimeError("the front end gets no more news of this worker")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for autoscaling policies. Serve calls this."""
        stats = self._worker.engine.stats()
        return {"load": float(self._worker.load()), "requests": float(stats["requests"])}

    def __del__(self) -> None:
        self._ends.set()
        self._thread.join(ANSWER_SECONDS)
        self._worker.close()

    def _tell(self) -> None:
        """Send news to the front end until the replica ends, and follow the front end that answers.

        `broadcast` because `remote` makes a streaming call. At its end the front end would wait on its event loop until
        this process has confirmed the messages: a worker that is stopped in a call would stop the front end.
        """
        wants_snapshot, handle = False, None
        while not self._ends.wait(NEWS_SECONDS):
            news = self._worker.news(wants_snapshot)
            try:
                handle = handle or serve.get_deployment_handle(FRONT_END, APPLICATION)
                answers = handle.broadcast("news", news).results(timeout_s=ANSWER_SECONDS)
                front_end, wants_snapshot = answers[-1]  # the newest front end, while Serve replaces it
                self._worker.follow(front_end)
            except (Exception, CancelledError):
                # The front end is starting or has exited. It will request a snapshot when it gets this worker's news.
                wants_snapshot = False


class ReplicasOf:
    """Implements `Workers` for the replicas of a deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def generate(self, worker: str, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the messages of a worker. Closing the generator cancels the call."""
        response = self._handle.options(stream=True).generate.remote(worker, call)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            raise WorkerLost(str(error)) from error
        finally:
            response.cancel()

    async def release(self, worker: str, number: int) -> None:
        """Call `Worker.release`."""
        await self._handle.release.remote(worker, number)

    async def reset_prefix_cache(self, worker: str) -> None:
        """Call `Worker.reset_prefix_cache`."""
        try:
            await self._handle.reset_prefix_cache.remote(worker)
        except RayActorError as error:
            raise WorkerLost(str(error)) from error


class FrontEndReplica:
    """A `FrontEnd` with OpenAI's HTTP interface, on the socket of a `Door`.

    Serve's own HTTP proxy is not used: it reads bodies of any size into its memory, and headers without a limit.

    Parameters
    ----------
    options : dict
        As for `WorkerReplica`, and `door`, the path of a `Door`.
    workers : DeploymentHandle
        Handle of the decode workers.
    prefill : DeploymentHandle or None
        Handle of the prefill workers.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: dict[str, Any], workers: Any, prefill: Any = None
    ) -> None:
        from transformers import AutoTokenizer

        from pagepool.cluster.door import enter
        from pagepool.cluster.front_end import FrontEnd
        from pagepool.serve.app import create_app

        die_of_sigterm()
        limits = await workers.limits.remote(None)
        tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
        sides = [ReplicasOf(handle) for handle in (workers, prefill) if handle is not None]
        self.cluster = FrontEnd(limits, tokenizer, *sides, loop=asyncio.get_running_loop())
        self._entered = entered = await asyncio.to_thread(enter, options["door"])
        if entered.log is not None:
            write_log(entered.log, entered.service.access_log)
        app = create_app(self.cluster, options["name"], **entered.service.app)
        self._app = app.state
        self._server = entered.service.server(app)
        self._serving = asyncio.create_task(self._server.serve(sockets=[entered.sock]))

    def check_health(self) -> None:
        """Raise if this replica does not answer requests. Serve calls this regularly, and restarts a failed replica."""
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    def set_api_keys(self, api_keys: dict[str, str]) -> None:
        """Replace the API keys of the app."""
        self._app.set_api_keys(api_keys)

    def load_certificate(self, certificate: str, key: str | None) -> None:
        """Use another certificate for new connections."""
        self._server.config.ssl.load_cert_chain(certificate, key)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` until the others have been answered, and end those that are left.

        The port stays open.
        """
        self._app.drain()
        end = monotonic() + seconds
        while self._server.server_state.tasks and monotonic() < end:
            await asyncio.sleep(DRAIN_POLL)
        self._app.stop()
        while self._server.server_state.tasks and monotonic() < end + GRACE:
            await asyncio.sleep(DRAIN_POLL)

    def news(self, news: News) -> tuple[int, bool]:
        """Return the epoch of the front end and the result of `FrontEnd.news`."""
        return self.cluster.epoch, self.cluster.news(news)

    def stats(self) -> dict[str, Any]:
        """Call `FrontEnd.stats`."""
        return self.cluster.stats()

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()
