"""serve: starts workers and a front end as an application of Ray Serve."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from pagepool._arguments import integer, wrong
from pagepool.integrations.transformers.pretrained import DTYPES, ModelError

__all__ = ["serve"]

DECODE, PREFILL = "decode", "prefill"
MAX_WORKERS = 64  # of a side
MANY = 10_000  # calls of one replica at a time: the engine's scheduler decides who waits
# Serve gives a process up that has not answered three times.
HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 10.0}
# Serve's own limit of failed starts stays, 20: with a small one, replicas that fail while a new controller takes over
# are never started again.
LIFE = {"graceful_shutdown_wait_loop_s": 0.1, "graceful_shutdown_timeout_s": 10.0}


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
) -> Any:
    """Serve a model with several engines, each in a process of its own; returns Serve's handle of the front end.

    Starts Ray on this machine, without dashboard and usage reports, unless it runs, and Serve. Waits until requests
    are answered. What was served before is replaced. `ray.serve.shutdown()` ends workers and front end,
    `ray.shutdown()` ends a Ray that this call has started.

    Raises ImportError without the extra `ray` (and with `prefill` without `transfer`), ValueError and TypeError for
    arguments that cannot be, `ModelError` for a directory without a model; then nothing was started. RuntimeError when
    workers or front end cannot start: then a Ray that this has started is ended.

        front_end = serve("models/Qwen3-0.6B", workers=4, prefill=2, engine={"pool_bytes": 4 << 30})
        print(front_end.stats.remote().result()["routers"])

    Parameters
    ----------
    model
        A directory in transformers' format, which every machine of the Ray cluster has at the same place.
    workers
        How many engines decode, up to 64; or (fewest, most): Serve starts and ends them by the tokens that wait.
    prefill
        How many engines compute prompts for them, up to 64, whose pages move by NIXL; 0: each computes its own.
    name
        Of the model for clients; None: that of the directory.
    dtype
        Of the weights, as in `load_pretrained`.
    host, port
        Where OpenAI's interface is; those of Serve, if that runs already.
    threads
        Of each worker; None: all.
    engine
        Arguments of each `Engine`, such as `pool_bytes`.
    app
        Arguments of `create_app`, such as `timeout`.
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
    ray, ray_serve, config = import_module("ray"), import_module("ray.serve"), import_module("ray.serve.config")
    if prefill:
        import_module("pagepool.transfer.nixl").load_nixl()
    parts = import_module("pagepool.cluster.ray.deployments")
    starts = not ray.is_initialized()
    if starts:
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    given: dict[str, Any] = {"model": str(folder), "name": name or folder.name, "dtype": dtype, "threads": threads}
    given |= {"engine": engine or {}, "app": app or {}}
    router = config.RequestRouterConfig(request_router_class="pagepool.cluster.ray.routing.NamedReplicaRouter")
    common = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": MANY, **HEALTH, **LIFE}
    worker = ray_serve.deployment(parts.WorkerReplica).options(request_router_config=router, **common)
    front_end = ray_serve.deployment(parts.FrontEndReplica).options(name=parts.FRONT_END, num_replicas=1, **common)
    handles = [worker.options(name=DECODE, **_scale(fewest, most)).bind(given, False, prefill > 0)]
    if prefill:
        handles.append(worker.options(name=PREFILL, num_replicas=prefill).bind(given, True, True))
    try:
        ray_serve.start(http_options={"host": host, "port": port})
        return ray_serve.run(front_end.bind(given, *handles), name=parts.APPLICATION, route_prefix="/")
    except Exception as error:
        reason = _reason(ray_serve.status(), parts.APPLICATION) or str(error)
        if starts:
            ray_serve.shutdown()
            ray.shutdown()
        raise RuntimeError(f"the workers or the front end did not start: {reason}") from error


def _reason(status: Any, application: str) -> str:
    """The last line of the traceback that Serve has of a deployment that could not start, or ""."""
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
