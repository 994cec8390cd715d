"""The deployments of Ray Serve: workers and the front end. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from ctypes import CDLL, c_int, c_void_p
from importlib import import_module
from threading import Event, Thread
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from pagepool.cluster.messages import Call, Limits, News, WorkerLost

__all__ = ["APPLICATION", "FRONT_END", "FrontEndReplica", "WorkerReplica"]

APPLICATION, FRONT_END = "pagepool", "front_end"
NEWS_SECONDS = 0.2
ANSWER_SECONDS = 10.0
TRANSFER_SECONDS = 5.0
PREFIX_EVENTS = 65_536


def die_of_sigterm() -> None:
    """Let SIGTERM end this process at once, as SIGKILL does.

    Ray's own handler lets the process go on for half a minute, in which it answers no call and still tells its news. A
    process that is gone is noticed within a second, and its requests go on elsewhere. Python sets signals only in the
    main thread, which is Ray's.
    """
    libc = CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (c_int, c_void_p), c_void_p
    libc.signal(signal.SIGTERM, None)  # SIG_DFL


class WorkerReplica:
    """A `Worker` in a process of its own, which tells the front end its news.

    options  `model`, a directory; `dtype`, `engine`: the arguments of `Engine`; `threads` or None
    """

    def __init__(self, options: dict[str, Any], is_prefill: bool, moves_pages: bool) -> None:
        from pagepool.cluster.worker import Worker
        from pagepool.engine import Engine
        from pagepool.engine.tokenizing import stop_token_ids_of
        from pagepool.integrations.transformers.pretrained import load_pretrained

        die_of_sigterm()
        if options["threads"] is not None:
            import_module("torch").set_num_threads(options["threads"])
            os.environ["PAGEPOOL_NUM_THREADS"] = str(options["threads"])
        model, tokenizer = load_pretrained(options["model"], options["dtype"])
        engine = Engine(model, prefix_events=PREFIX_EVENTS, **options["engine"])
        name = serve.get_replica_context().replica_id.unique_id
        transfer, identity = None, options["name"]
        if moves_pages:
            from pagepool.prefix.fingerprint import weights_digest
            from pagepool.transfer.nixl import NixlTransfer

            identity += f", weights {weights_digest(options['model'])} as {options['dtype']}"
            transfer = NixlTransfer(name, TRANSFER_SECONDS, serves=is_prefill)
        stops = stop_token_ids_of(model, tokenizer)
        self._worker = Worker(
            engine, name, is_prefill=is_prefill, transfer=transfer, model=identity, stop_token_ids=stops
        )
        self._ends = Event()
        self._thread = Thread(target=self._tell, name="pagepool-news", daemon=True)
        self._thread.start()

    async def generate(self, worker: str | None, call: Call) -> AsyncGenerator[Any, None]:
        """`Worker.generate`"""
        async for message in self._worker.generate(call):
            yield message

    def release(self, worker: str | None, number: int) -> None:
        """`Worker.release`"""
        if worker == self._worker.name:  # else that one is gone, and the number is a lease of its own
            self._worker.release(number)

    def limits(self, worker: str | None) -> Limits:
        """`Worker.limits`"""
        return self._worker.limits()

    def pid(self, worker: str | None) -> int:
        """The number of the process."""
        return os.getpid()

    def check_empty(self, worker: str | None) -> tuple[str, int]:
        """The worker's name, and `Worker.check_empty`."""
        return self._worker.name, self._worker.check_empty()

    def check_health(self) -> None:
        """Serve calls it, and restarts the replica when it raises."""
        if not self._worker.engine.is_accepting:
            raise RuntimeError("the engine takes no more requests")
        if not self._thread.is_alive():
            raise RuntimeError("the front end gets no more news of this worker")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it for autoscaling policies."""
        stats = self._worker.engine.stats()
        return {"load": float(self._worker.load()), "requests": float(stats["requests"])}

    def __del__(self) -> None:
        self._ends.set()
        self._thread.join(ANSWER_SECONDS)
        self._worker.close()

    def _tell(self) -> None:
        """The thread that tells the front end the news, and hears which front end there is."""
        wants_snapshot, handle = False, None
        while not self._ends.wait(NEWS_SECONDS):
            news = self._worker.news(wants_snapshot)
            try:
                handle = handle or serve.get_deployment_handle(FRONT_END, APPLICATION)
                front_end, wants_snapshot = handle.news.remote(news).result(timeout_s=ANSWER_SECONDS)
                self._worker.follow(front_end)
            except (Exception, CancelledError):
                # There is no front end, or it is starting. What it has missed it asks for, when this worker follows it.
                wants_snapshot = False


class ReplicasOf:
    """How the front end reaches the replicas of a deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def generate(self, worker: str, call: Call) -> AsyncGenerator[Any, None]:
        """The messages of a worker; leaving it early cancels the call."""
        response = self._handle.options(stream=True).generate.remote(worker, call)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            raise WorkerLost(str(error)) from error
        finally:
            response.cancel()

    async def release(self, worker: str, number: int) -> None:
        """`Worker.release`"""
        await self._handle.release.remote(worker, number)


@serve.ingress()
class FrontEndReplica:
    """A `FrontEnd` behind OpenAI's interface.

    options  as those of `WorkerReplica`, and `app`: the arguments of `create_app`
    workers, prefill  handles of the deployments
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: dict[str, Any], workers: Any, prefill: Any = None
    ) -> None:
        from transformers import AutoTokenizer

        from pagepool.cluster.front_end import FrontEnd

        die_of_sigterm()
        limits = await workers.limits.remote(None)
        tokenizer = AutoTokenizer.from_pretrained(options["model"], local_files_only=True)
        sides = [ReplicasOf(handle) for handle in (workers, prefill) if handle is not None]
        self.cluster = FrontEnd(limits, tokenizer, *sides, loop=asyncio.get_running_loop())
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        from pagepool.serve.app import create_app

        return create_app(self.cluster, self._options["name"], **self._options["app"])

    def news(self, news: News) -> tuple[int, bool]:
        """`FrontEnd.news`, with the epoch of the front end."""
        return self.cluster.epoch, self.cluster.news(news)

    def stats(self) -> dict[str, Any]:
        """`FrontEnd.stats`"""
        return self.cluster.stats()

    def pid(self) -> int:
        """The number of the process."""
        return os.getpid()
