"""What engines send each other before pages move: who a peer is and how its pages lie, and tickets for blocks."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from pagepool._arguments import integer
from pagepool._version import __version__

if TYPE_CHECKING:
    from pagepool.memory.block_refs import BlockRefs
    from pagepool.memory.kv_pool import KvCachePool

__all__ = ["Lease", "PeerDescription", "ReadResult", "Ticket", "fingerprint"]


@dataclass(frozen=True)
class Ticket:
    """Says where pages were when the ticket was made, and how a reader sees whether they are still there.

    It is plain data and can be pickled. It holds nothing: the `Lease` that comes with it does. A ticket is for pages
    that are final. Raises `TypeError` for what is no integer, `ValueError` for no blocks or another number of names.

    Attributes
    ----------
    peer
        Name of the `Transfer` that made it.
    epoch
        Of that transfer's pool: another number each time that a pool is registered.
    blocks
        (block, generation) of each page, in the order of the tokens; see `BlockGenerations`.
    names
        What the engine calls the blocks, one for each or none, for example the names of a `PrefixEvent`.

    Examples
    --------
    >>> Ticket("engine-1", 77, [(3, 1), (8, 2)]).blocks
    ((3, 1), (8, 2))
    """

    peer: str
    epoch: int
    blocks: tuple[tuple[int, int], ...]
    names: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        pairs = ((integer("a block", block, 0), integer("a generation", times, 0)) for block, times in self.blocks)
        object.__setattr__(self, "blocks", tuple(pairs))
        object.__setattr__(self, "names", tuple(self.names))
        if not self.blocks:
            raise ValueError("a ticket needs at least 1 block, not 0")
        if self.names and len(self.names) != len(self.blocks):
            raise ValueError(f"a ticket of {len(self.blocks)} blocks has as many names or none, not {len(self.names)}")


@dataclass(eq=False)
class Lease:
    """Holds the blocks of a ticket at their source until it is withdrawn or expires.

    Attributes
    ----------
    ticket
        What the reader gets.
    expires
        `time.monotonic()` of the source at which `Transfer.poll` withdraws it.
    """

    ticket: Ticket
    expires: float
    refs: BlockRefs


@dataclass(frozen=True)
class PeerDescription:
    """All that another `Transfer` needs to meet this one. It is plain data and can be pickled.

    Attributes
    ----------
    name
        Of the transfer.
    transport
        "local" or "nixl".
    epoch
        Of its pool.
    fingerprint
        How its pages lie, see `fingerprint`.
    num_blocks
        Blocks that its pool may have.
    pages
        Address of the first page.
    words
        Address of the words of `BlockGenerations`.
    epoch_word
        Address of the epoch.
    connection
        What the transport needs besides.
    """

    name: str
    transport: str
    epoch: int
    fingerprint: str
    num_blocks: int
    pages: int
    words: int
    epoch_word: int
    connection: bytes


class ReadResult(NamedTuple):
    """How a read has ended. Each of its blocks is in one of the two lists, in the order of the ticket.

    Attributes
    ----------
    read
        The number that `Transfer.read` returned.
    loaded
        Blocks whose pages are those of the ticket.
    failed
        Blocks that must be computed: free them and take others.
    error
        One sentence on why, "" when none failed.
    """

    read: int
    loaded: list[int]
    failed: list[int]
    error: str


def fingerprint(pool: KvCachePool, model: str = "") -> str:
    """Returns a line that two pools share if and only if a page of one can be used as a page of the other.

    Parameters
    ----------
    pool
        Its layout and the channel scales of quantised keys count, not its size.
    model
        A name of the model and its weights, which pages do not show.

    Examples
    --------
    >>> from pagepool import KvCachePool, KvLayout
    >>> pool = KvCachePool.from_layout(KvLayout(num_layers=2, num_kv_heads=1, head_dim=8), num_blocks=4)
    >>> fingerprint(pool, "llama").split(", ")[:2]
    ['KvLayout(num_layers=2', 'num_kv_heads=1']
    """
    if pool.layout is None:
        pages = f"pages of {pool.page_size} elements of {pool.dtype}"
    else:
        pages = repr(pool.layout)
    scale = pool.k_channel_scale
    scales = "" if scale is None else f", channel scales {sha256(scale.tobytes()).hexdigest()[:16]}"
    return f"{pages}{scales}, model {model!r}, pagepool {__version__}"
