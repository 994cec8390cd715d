"""Events of a prefix cache in vLLM's form, for routers that read vLLM's events, such as llm-d and NVIDIA Dynamo.

Needs the extra `kv-events`: pyzmq and msgspec.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from threading import Thread
from time import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pagepool._arguments import integer, wrong
from pagepool.errors import refuse_copy
from pagepool.prefix.keys import root_key, root_name

if TYPE_CHECKING:
    from pagepool.prefix.cache import PrefixCache
    from pagepool.prefix.events import PrefixEvent

__all__ = ["KvEventPublisher"]

INTERVAL = 0.02  # seconds between two looks at the cache
MOST_BLOCKS = 1024  # blocks of a message
KEPT_BYTES = 64 << 20  # of messages that can be sent again
END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends a replay

logger = logging.getLogger("pagepool")


class KvEventPublisher:
    """Publishes what a prefix cache stores and removes, over ZMQ in the form of vLLM 0.32, in a thread of its own.

    Parameters
    ----------
    cache : PrefixCache
        A cache with `max_events`. Nobody else may call its `drain_events`.
    endpoint : str
        Where a PUB socket binds, such as "tcp://127.0.0.1:5557".
    replay_endpoint : str or None
        Where a ROUTER socket binds, from which subscribers get messages again that they have missed.
    topic : str
        The first part of each message.
    rank : int
        The number of this engine if several engines run one model: vLLM's `data_parallel_rank`.
    medium : str
        The memory with the blocks. vLLM calls the memory that its engine computes from "GPU" also on a CPU, and
        routers prefer such blocks.

    Raises
    ------
    ValueError
        The cache notes no events.
    zmq.ZMQError
        An endpoint is wrong or in use.

    Notes
    -----
    A message has three parts: the topic, its number in 8 bytes, and a msgpack array of time, events and rank. A block
    is named by the first 8 bytes of its name in `PrefixEvent`, as an unsigned integer. The parent of a prompt's first
    block is None. If the prompt has a salt or keys, it is a number that no block has: routers do not find these blocks,
    and the salt is never sent. The tokens of all prompts are sent: bind to an address that only routers reach.

    The first message lists all cached blocks after `AllBlocksCleared`. So does a message after events of the cache
    were lost, because more than `max_events` came between two looks at the cache.

    To get messages again, a subscriber sends the first number in 8 bytes to `replay_endpoint`. The last 64 MiB of
    messages are kept. The end is marked by the number -1.

    Examples
    --------
    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(8), block_size=2, max_events=64)
    >>> with KvEventPublisher(cache, "inproc://events") as publisher:
    ...     publisher.endpoint
    'inproc://events'
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        cache: PrefixCache,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
        medium: str = "GPU",
    ) -> None:
        for name, value in {"endpoint": endpoint, "topic": topic, "medium": medium}.items():
            if not isinstance(value, str):
                raise wrong(name, "a str", value)
        if replay_endpoint is not None and not isinstance(replay_endpoint, str):
            raise wrong("replay_endpoint", "a str or None", replay_endpoint)
        self.rank = integer("rank", rank, 0)
        cache.drain_events()  # raises if it has none; the first message lists all blocks
        self._cache, self._topic, self._medium = cache, topic.encode(), medium
        self._root = root_name(root_key(None, ()))
        self._next_event = 0  # no event has this number, so the first look takes a snapshot
        self._number, self._kept_bytes = 0, 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_closed = False
        context = zmq.Context.instance()
        self._publish, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._replay.set_hwm(0)  # a ROUTER socket drops what exceeds its limit, 1,000 messages by default
        try:
            self._publish.bind(endpoint)
            self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay.bind(replay_endpoint)
                self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = Thread(target=self._run, name="pagepool-kv-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}: {self._number} messages>"

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Publish the last events, and close the sockets."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.join()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._publish.close(linger=1000)
        self._replay.close(linger=1000)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed
            is_asked = self._replay.poll(0 if is_last else INTERVAL * 1000)
            try:
                for batch in batches(self._events()):
                    self._send(list(map(self._event_of, batch)))
                if is_asked:
                    self._send_again(self._replay.recv_multipart())
            except Exception:
                logger.exception("KV events were lost; the next message lists all blocks")
                self._next_event = 0

    def _events(self) -> list[PrefixEvent | None]:
        """Return the events since the last call. None: the cache was cleared, and its blocks are next."""
        found = self._cache.drain_events()
        if not self._next_event or (found and found[0].sequence != self._next_event):
            snapshot = self._cache.snapshot()
            later = [event for event in self._cache.drain_events() if event.sequence >= snapshot.next_sequence]
            if later and later[0].sequence != snapshot.next_sequence:  # events were lost again: look again
                self._next_event = 0
                return [None, *snapshot.stored]
            self._next_event = snapshot.next_sequence + len(later)
            return [None, *snapshot.stored, *later]
        self._next_event += len(found)
        return [*found]

    def _event_of(self, run: list[Any]) -> dict[str, Any]:
        """Return the event of vLLM for a run of events of one kind. A stored block is the parent of the next one."""
        first = run[0]
        if first is None or first.kind == "cleared":
            return {"type": "AllBlocksCleared"}
        event: dict[str, Any] = {
            "type": "BlockStored" if first.kind == "stored" else "BlockRemoved",
            "block_hashes": [number_of(one.name) for one in run],
            "medium": self._medium,
            "group_idx": 0,
        }
        if first.kind == "stored":
            event |= {
                "parent_block_hash": None if first.parent == self._root else number_of(first.parent),
                "token_ids": memoryview(b"".join(one.tokens for one in run)).cast("i").tolist(),
                "block_size": self._cache.block_size,
                "lora_id": None,
                "lora_name": None,
                "kv_cache_spec_kind": "full_attention",
            }
        return event

    def _send(self, events: list[dict[str, Any]]) -> None:
        payload = self._encode([time(), events, self.rank])
        self._publish.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._number += 1

    def _send_again(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for KV events must have 8 bytes after an empty part, not %d parts", len(frames))
            return
        first = int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((frames[0], b"", self._topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((frames[0], b"", b"", END, b""))


def number_of(name: bytes) -> int:
    """Return the name of a block or of a root as vLLM's consumers take it: 64 bits."""
    return int.from_bytes(name[:8], "little")


def batches(events: Iterable[PrefixEvent | None]) -> Iterator[list[list[Any]]]:
    """Split events into messages of at most `MOST_BLOCKS` events, and these into runs that one event of vLLM holds."""
    batch: list[list[Any]] = []
    count = 0
    last: PrefixEvent | None = None
    for event in events:
        if count == MOST_BLOCKS:
            yield batch
            batch, count, last = [], 0, None
        if (
            last is not None
            and event is not None
            and event.kind == last.kind != "cleared"
            and (event.kind == "removed" or event.parent == last.name)
        ):
            batch[-1].append(event)
        else:
            batch.append([event])
        count, last = count + 1, event
    if batch:
        yield batch
