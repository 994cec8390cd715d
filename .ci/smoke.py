"""Uses an installed pagepool a little, on any Python: imports all of it, appends, gathers, decodes, schedules."""

import importlib
import importlib.util
import pkgutil
import sys

import numpy as np

import pagepool

# Modules that are imported by those alone who have what they need.
NEEDS = {
    "pagepool.integrations.transformers": "transformers",
    "pagepool.integrations.kv_events": "zmq",
    "pagepool.integrations.vllm": "vllm",
    "pagepool.cluster.ray.deployments": "ray",
    "pagepool.cluster.ray.routing": "ray",
    "pagepool.serve.access": "starlette",
    "pagepool.serve.app": "starlette",
    "pagepool.serve.connections": "uvicorn",
    "pagepool.serve.http": "starlette",
    "pagepool.serve.loading": "starlette",
    "pagepool.serve.metrics": "prometheus_client",
    "pagepool.serve.places": "starlette",
    "pagepool.serve.runs": "starlette",
}

for module in pkgutil.walk_packages(pagepool.__path__, "pagepool."):
    need = next((NEEDS[part] for part in NEEDS if module.name.startswith(part)), None)
    if not module.name.endswith("__main__") and (need is None or importlib.util.find_spec(need) is not None):
        importlib.import_module(module.name)
for name in pagepool.__all__:
    getattr(pagepool, name)

pool = pagepool.KvCachePool.from_layout(pagepool.KvLayout(1, 2, 64), num_blocks=8)
state = pagepool.PagedSeqState(pool.allocator)
k = np.full((20, 2, 64), 0.5, np.float32)
pool.append(0, state.append(20), k, k * 2)
gathered_k, gathered_v = pool.gather(0, state.blocks, 20)
assert (gathered_k == k).all() and (gathered_v == 2 * k).all()
tables = pagepool.BlockTables(4, 8).fill([state])
out = pagepool.decode(np.ones((1, 4, 64), np.float32), pool, 0, tables.block_tables, tables.seq_lens)
assert np.allclose(out, 1.0, rtol=1e-6)

scheduler = pagepool.Scheduler(pagepool.SchedulerConfig(), pool.allocator)
scheduler.add_request([1, 2, 3], 8)
while scheduler.has_work:
    batch = scheduler.schedule()
    scheduler.commit(batch, [7] * len(batch.seq_ids))
    scheduler.drain_finished()
state.release()
pool.allocator.check()
assert pool.allocator.in_use == 0
print(f"pagepool {pagepool.__version__} works on Python {sys.version.split()[0]}, {pagepool.cpu_info()}")
