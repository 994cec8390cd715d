"""KV events: what vLLM's decoder reads is what the cache has, also after lost events and lost messages."""

import random

import pytest

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

from pagepool import BlockAllocator, PrefixCache  # noqa: E402
from pagepool.integrations import kv_events  # noqa: E402
from pagepool.integrations.kv_events import END, KvEventPublisher  # noqa: E402


class Consumer:
    """A router's index, fed with the messages of a publisher."""

    def __init__(self):
        self.blocks, self.next, self.groups = {}, 0, set()

    def take(self, number, payload, decode=msgspec.msgpack.decode):
        assert number == self.next
        self.next += 1
        _, events, rank = decode(payload)
        assert rank == 3
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            self.groups.add((event["group_idx"], event["medium"]))
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[name]
                continue
            size, parent = event["block_size"], event["parent_block_hash"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for i, name in enumerate(event["block_hashes"]):
                self.blocks[name] = parent, tuple(event["token_ids"][i * size : (i + 1) * size])
                parent = name

    def prefix(self, name):
        """Return all tokens up to the end of a block."""
        parent, tokens = self.blocks[name]
        return (*(() if parent is None else self.prefix(parent)), *tokens)


def asked(publisher, first):
    """Return the messages from number `first` on, as (number, payload)."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(10_000), "no answer within 10 s"
            _, topic, number, payload = socket.recv_multipart()
            if number == END:
                return found
            assert topic == b"kv"
            found.append((int.from_bytes(number, "big"), payload))


def opened(cache, **options):
    return KvEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", rank=3, **options)


def prefixes_of(cache):
    """Return the tokens of each cached prefix, read from a snapshot."""
    size, found = cache.block_size, {}
    for event in cache.snapshot().stored:
        found[event.name] = event.parent, memoryview(event.tokens).cast("i").tolist()

    def tokens(name):
        parent, own = found[name]
        return (*(tokens(parent) if parent in found else ()), *own)

    assert all(len(own) == size for _, own in found.values())
    return sorted(map(tokens, found))


@pytest.mark.parametrize("max_events", [4096, 8])
def test_a_consumer_has_the_blocks_of_the_cache(max_events):
    numbers = random.Random(0)
    allocator = BlockAllocator(64)
    cache = PrefixCache(allocator, block_size=2, max_events=max_events)
    prompts = [[numbers.randrange(3) for _ in range(2 * numbers.randrange(1, 9))] for _ in range(40)]

    def insert(prompt):
        held, tokens = cache.match_prefix(prompt), len(prompt) // 2
        blocks = [*held, *(allocator.allocate() for _ in range(tokens - len(held)))]
        cache.cache_blocks(prompt, blocks)
        allocator.free(blocks)

    insert(prompts[0])
    with opened(cache, medium="CPU") as publisher:
        consumer = Consumer()
        for step in range(200):
            if numbers.random() < 0.2:
                cache.evict(min(cache.evictable, numbers.randrange(6)))
            elif numbers.random() < 0.02:
                cache.reset_prefix_cache()
            elif allocator.available > 10:
                insert(numbers.choice(prompts))
            if step % 20 == 19:
                for message in asked(publisher, consumer.next):
                    consumer.take(*message)
        for _ in range(2):  # the second answer comes after a look at the cache
            for message in asked(publisher, consumer.next):
                consumer.take(*message)
        assert sorted(map(consumer.prefix, consumer.blocks)) == prefixes_of(cache)
        assert consumer.groups == {(0, "CPU")}
    assert cache.drain_events() == []


def test_prompts_with_a_salt_have_a_parent_that_no_block_has():
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, block_size=2, max_events=64)
    for salt in (None, "tenant"):
        cache.cache_blocks([1, 2, 3, 4], [allocator.allocate(), allocator.allocate()], cache_salt=salt)
    with opened(cache) as publisher:
        asked(publisher, 0)
        [(number, payload), *_] = asked(publisher, 0)
    _, [cleared, *stored], _ = msgspec.msgpack.decode(payload)
    assert number == 0 and cleared == {"type": "AllBlocksCleared"}
    assert [event["token_ids"] for event in stored] == [[1, 2, 3, 4]] * 2
    parents = {event["parent_block_hash"] for event in stored}
    assert None in parents and not parents & {name for event in stored for name in event["block_hashes"]}
    assert b"tenant" not in payload


def test_wrong_arguments_and_requests_are_refused(caplog):
    with pytest.raises(ValueError, match="max_events=0"):
        opened(PrefixCache(BlockAllocator(8)))
    cache = PrefixCache(BlockAllocator(8), max_events=8)
    with pytest.raises(TypeError, match="topic must be a str, not bytes"):
        KvEventPublisher(cache, "tcp://127.0.0.1:*", topic=b"kv")
    with opened(cache) as publisher:
        with pytest.raises(zmq.ZMQError):
            KvEventPublisher(cache, publisher.endpoint)
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(publisher.replay_endpoint)
            socket.send_multipart([b"", b"all"])
            assert not socket.poll(200)
        assert asked(publisher, 0)  # the thread goes on
    publisher.close()
    assert "must have 8 bytes" in caplog.text


def test_kept_messages_are_bounded(monkeypatch):
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 1000)
    allocator = BlockAllocator(64)
    cache = PrefixCache(allocator, block_size=2, max_events=512)
    with opened(cache) as publisher:
        for first in range(60):
            cache.cache_blocks([first, first], [allocator.allocate()])
            asked(publisher, 1 << 60)
        asked(publisher, 1 << 60)
        found = asked(publisher, 0)
        assert sum(len(payload) for _, payload in found) <= 1000 and found[0][0] > 0


def test_a_replay_has_all_kept_messages(monkeypatch):
    monkeypatch.setattr(kv_events, "MOST_BLOCKS", 1)
    allocator = BlockAllocator(20_000)
    cache = PrefixCache(allocator, block_size=2, max_events=8)
    cache.cache_blocks(range(40_000), allocator.allocate_n(20_000))
    with opened(cache) as publisher:
        found = []
        while not found:
            found = asked(publisher, 0)
        while len(more := asked(publisher, 0)) > len(found):
            found = more
        assert [number for number, _ in found] == list(range(20_001))


def test_vllm_reads_a_million_events():
    events = pytest.importorskip("vllm.distributed.kv_events", reason="vllm is not installed: make test-vllm")
    decode = msgspec.msgpack.Decoder(events.KVEventBatch).decode
    allocator = BlockAllocator(4096)
    cache = PrefixCache(allocator, block_size=2, max_events=1 << 17)
    count, number, prompt = 0, 0, 0
    with opened(cache) as publisher:
        while count < 1_000_000:
            for _ in range(4):
                blocks = [allocator.allocate() for _ in range(4096)]
                cache.cache_blocks([prompt, *range(1, 8192)], blocks)
                allocator.free(blocks)
                cache.evict(4096)
                prompt += 1
            for number_of_it, payload in asked(publisher, number):
                assert number_of_it == number
                number += 1
                for event in decode(payload).events:
                    count += 1 if isinstance(event, events.AllBlocksCleared) else len(event.block_hashes)
                    if isinstance(event, events.BlockStored):
                        assert (event.group_idx, event.block_size, event.medium) == (0, 2, "GPU")
