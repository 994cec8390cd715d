"""serve: starts workers and a front end as a Ray Serve application."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pagepool._arguments import integer, wrong
from pagepool.cluster.door import Door, Service
from pagepool.integrations.transformers.pretrained import DTYPES, ModelError

__all__ = ["Cluster", "serve"]

DECODE, PREFILL = "decode", "prefill"
MAX_WORKERS = 64  # workers per side
MANY = 10_000  # concurrent calls per replica; requests wait in the engine's scheduler and not in Serve
# Serve restarts a replica after three health checks without an answer.
HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}
BACKLOG = 1024
# Serve's default limit of 20 failed starts is kept. With a small limit, replicas that fail while a new controller takes
# over are never restarted.
LIFE = {"graceful_shutdown_wait_loop_s": 0.1, "graceful_shutdown_timeout_s": 10.0}


class Cluster:
    """A model that is being served by several engines. Also a context manager, whose end is `close`.

    Attributes
    ----------
    front_end : ray.serve.handle.DeploymentHandle
        Serve's handle of the front end, a `FrontEndReplica`.
    door : Door
        Gives the socket to the front end.
    """

    def __init__(self, front_end: Any, door: Door, opened: ExitStack) -> None:
        self.front_end, self.door, self._opened = front_end, door, opened

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the port and stop the front end and the workers, and Ray if `serve` has started it."""
        self._opened.close()


def serve(
    model: str | Path,
    workers: int | tuple[int, int] = 2,
    prefill: int = 0,
    *,
    name: str | None = None,
    dtype: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    threads: int | None = None,
    engine: dict[str, Any] | None = None,
    app: dict[str, Any] | None = None,
    sock: socket.socket | None = None,
    service: Service | None = None,
    log: Any = None,
) -> Cluster:
    """Serve a model with several engines, each in a separate process.

    Starts Ray and Serve on this machine unless they are running. Ray is started without dashboard and usage reports,
    and Serve without its HTTP proxy. The call returns when the application answers requests. The front end runs on this
    machine. While Ray restarts it, a thread of this process answers with status 503 and Retry-After.

    Parameters
    ----------
    model : path
        Directory of a model in transformers' format. It must have the same path on every machine of the Ray cluster.
    workers : int or tuple of (int, int)
        Number of decode workers, at most 64; or (fewest, most), and Serve scales the number by the queued tokens.
    prefill : int
        Number of prefill workers, at most 64. They move pages with NIXL. 0: each worker computes its own prompts.
    name : str or None
        Name of the model for clients. None: the name of the directory.
    dtype : str
        Dtype of the weights, as in `load_pretrained`.
    host : str
        Address of the HTTP server.
    port : int
        Port of the HTTP server.
    threads : int or None
        Number of threads per worker. None: all cores.
    engine : dict or None
        Arguments of each `Engine`, such as `pool_bytes`.
    app : dict or None
        Arguments of `create_app`, such as `timeout`, `api_keys` and `allowed_hosts`. By default, a request is refused
        if its Host is not `host`, "localhost" or an IP address, or if it has an Origin, as by `pagepool serve`.
    sock : socket.socket or None
        A listening socket instead of `host` and `port`. The caller closes it.
    service : Service or None
        The number of connections and TLS. `app` is added to its `app`.
    log : file or None
        The front end writes its log there, such as `sys.stderr`. None: it writes no log.

    Returns
    -------
    Cluster
        `close`, or the end of a `with` block, ends it.

    Raises
    ------
    ImportError
        The extra `ray` is not installed, or `prefill` is given without the extra `transfer`. Nothing was started.
    TypeError, ValueError
        An argument has a wrong type or is out of range. Nothing was started.
    ModelError
        The directory has no model. Nothing was started.
    OSError
        The server cannot listen at the address. Nothing was started.
    RuntimeError
        The application is served already, or the workers or the front end cannot start. If this call has started Ray,
        Ray is ended.

    Examples
    --------
    Four decode workers and two prefill workers, with 4 GiB of pages each::

        with serve("models/Qwen3-0.6B", workers=4, prefill=2, engine={"pool_bytes": 4 << 30}) as cluster:
            print(cluster.front_end.stats.remote().result()["routers"])
    """
    fewest, most = workers if isinstance(workers, tuple) else (workers, workers)
    integer("the most workers", most, integer("workers", fewest, 1, MAX_WORKERS), MAX_WORKERS)
    integer("prefill", prefill, 0, MAX_WORKERS)
    integer("port", port, 0, 65_535)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    for what, options in (("engine", engine), ("app", app)):
        if options is not None and not isinstance(options, dict):
            raise wrong(what, "a dict or None", options)
    folder = Path(model).resolve()
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: it has no config.json, so it holds no model")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    service = service or Service()
    service = replace(service, app=app_options(host, {**service.app, **(app or {})}))
    with ExitStack() as stack:
        if sock is None:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            sock = stack.enter_context(socket.create_server((host, port), family=family, backlog=BACKLOG))
        door = Door(sock, service, log)  # before Ray, which takes seconds to start
        stack.callback(door.close)
        ray, ray_serve, config = import_module("ray"), import_module("ray.serve"), import_module("ray.serve.config")
        if prefill:
            import_module("pagepool.transfer.nixl").load_nixl()
        parts = import_module("pagepool.cluster.ray.deployments")
        given: dict[str, Any] = {"model": str(folder), "name": name or folder.name, "dtype": dtype, "threads": threads}
        given |= {"engine": engine or {}, "door": door.path}
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
            stack.callback(ray_serve.shutdown)
        ray_serve.start(proxy_location="Disabled")
        if parts.APPLICATION in ray_serve.status().applications:
            raise RuntimeError("this Ray cluster serves a model already: end it first")
        stack.callback(ray_serve.delete, parts.APPLICATION)
        router = config.RequestRouterConfig(request_router_class="pagepool.cluster.ray.routing.NamedReplicaRouter")
        common = {"max_ongoing_requests": MANY, **HEALTH, **LIFE}
        actor = {"num_cpus": 0}
        worker = ray_serve.deployment(parts.WorkerReplica).options(
            request_router_config=router, ray_actor_options=actor, **common
        )
        front_end = ray_serve.deployment(parts.FrontEndReplica).options(
            name=parts.FRONT_END,
            num_replicas=1,
            ray_actor_options={**actor, "resources": {_this_machine(ray): 0.001}},
            **common,
        )
        handles = [worker.options(name=DECODE, **_scale(fewest, most)).bind(given, False, prefill > 0)]
        if prefill:
            handles.append(worker.options(name=PREFILL, num_replicas=prefill).bind(given, True, True))
        try:
            handle = ray_serve.run(front_end.bind(given, *handles), name=parts.APPLICATION, route_prefix=None)
        except Exception as error:
            reason = _reason(ray_serve.status(), parts.APPLICATION) or str(error)
            raise RuntimeError(f"the workers or the front end did not start: {reason}") from error
        return Cluster(handle, door, stack.pop_all())


def app_options(host: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `create_app` for a cluster that listens on `host`.

    >>> app_options("127.0.0.1", {"timeout": 5.0})
    {'allowed_hosts': ['127.0.0.1'], 'allowed_origins': [], 'timeout': 5.0}
    """
    return {"allowed_hosts": [host], "allowed_origins": [], **given}


def _this_machine(ray: Any) -> str:
    """Return Ray's resource that only this machine has."""
    here = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    return next(name for name in resources if name.startswith("node:") and not name.startswith("node:__"))


def _reason(status: Any, application: str) -> str:
    """Return the last line of Serve's traceback for a deployment that could not start, or ""."""
    found = status.applications.get(application)
    for deployment in found.deployments.values() if found is not None else ():
        if "FAILED" in str(deployment.status) and deployment.message.strip():
            line: str = deployment.message.strip().splitlines()[-1]
            return line
    return ""


def _scale(fewest: int, most: int) -> dict[str, Any]:
    if fewest == most:
        return {"num_replicas": fewest}
    policy = {"policy_function": "pagepool.cluster.ray.autoscaling:workers_for_load"}
    return {"autoscaling_config": {"min_replicas": fewest, "max_replicas": most, "policy": policy}}
