"""Messages that engines exchange before pages are copied: descriptions of peers, and tickets for blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from pagepool._arguments import integer
from pagepool._version import __version__
from pagepool.errors import TransferError

if TYPE_CHECKING:
    from pagepool.memory.block_refs import BlockRefs
    from pagepool.memory.kv_pool import KvCachePool

__all__ = ["Lease", "PeerDescription", "ReadResult", "Ticket", "fingerprint"]


MAX_BLOCK = 2**31 - 1  # as in `BlockAllocator`
MAX_GENERATION = 2**32 - 1
MAX_EPOCH = 2**63 - 1
MAX_ADDRESS = 2**63 - 1
MAX_TICKET_BLOCKS = 2**20
MAX_TEXT = 4096  # characters in the name of a peer or in a fingerprint; bytes in the name of a block
MAX_CONNECTION = 2**20  # bytes


@dataclass(frozen=True)
class Ticket:
    """Block ids and generations of pages. A reader uses them to find the pages and to detect changes.

    A ticket is plain data and can be pickled. Unpickling checks the fields again. The ticket itself holds no
    references: its `Lease` holds them. The pages must be final.

    Attributes
    ----------
    peer : str
        Name of the `Transfer` that made the ticket.
    epoch : int
        Epoch of the pool: a random number, drawn when the pool is registered.
    blocks : tuple of (int, int)
        (block, generation) of each page, in the order of the tokens, at most 2**20; see `BlockGenerations`.
    names : tuple of bytes
        The engine's names of the blocks, such as the names in a `PrefixEvent`: one name per block, or empty.

    Raises
    ------
    TransferError
        A field has a wrong type or is out of range.

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
        _check_text("the peer of a ticket", self.peer)
        _set(self, "epoch", _number("the epoch of a ticket", self.epoch, MAX_EPOCH))
        pairs = _row("the blocks of a ticket", self.blocks)
        if not pairs:
            raise TransferError("a ticket needs at least 1 block, not 0")
        _set(self, "blocks", tuple(_pair(pair) for pair in pairs))
        _set(self, "names", _row("the names of a ticket", self.names))
        if self.names and len(self.names) != len(self.blocks):
            raise TransferError(
                f"a ticket of {len(self.blocks)} blocks must have {len(self.blocks)} names or 0, not {len(self.names)}"
            )
        for name in self.names:
            _check_bytes("a name of a ticket", name, MAX_TEXT)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ticket, (self.peer, self.epoch, self.blocks, self.names)


@dataclass(eq=False)
class Lease:
    """Holds the blocks of a ticket at their source until it is withdrawn or expires.

    Attributes
    ----------
    ticket : Ticket
        The ticket to send to the reader.
    expires : float
        Time at which `Transfer.poll` withdraws the lease, as `time.monotonic()` of the source.
    refs : BlockRefs
        The references to the blocks.
    """

    ticket: Ticket
    expires: float
    refs: BlockRefs


@dataclass(frozen=True)
class PeerDescription:
    """The data that another `Transfer` needs to connect to this one. It is plain data and can be pickled.

    Attributes
    ----------
    name : str
        Name of the transfer.
    transport : str
        "local" or "nixl".
    epoch : int
        Epoch of the registered pool.
    fingerprint : str
        Page layout and model, see `fingerprint`.
    num_blocks : int
        Largest number of blocks of the pool.
    pages : int
        Address of the first page.
    words : int
        Address of the words of `BlockGenerations`.
    epoch_word : int
        Address of the epoch.
    connection : bytes
        Connection data of the transport.

    Raises
    ------
    TransferError
        A field has a wrong type or is out of range.
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

    def __post_init__(self) -> None:
        for name in ("name", "transport", "fingerprint"):
            _check_text(f"the {name} of a peer", getattr(self, name))
        most = {"epoch": MAX_EPOCH, "num_blocks": MAX_BLOCK}
        for name in ("epoch", "num_blocks", "pages", "words", "epoch_word"):
            _set(self, name, _number(f"{name} of a peer", getattr(self, name), most.get(name, MAX_ADDRESS)))
        _check_bytes("the connection of a peer", self.connection, MAX_CONNECTION)

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerDescription, astuple(self)


class ReadResult(NamedTuple):
    """Result of a read. Each destination block is in `loaded` or in `failed`, in the order of the ticket.

    Attributes
    ----------
    read : int
        The number that `Transfer.read` returned.
    loaded : list of int
        Blocks with pages that match the ticket.
    failed : list of int
        Blocks without valid pages. Free them, and compute their tokens in newly allocated blocks.
    error : str
        Reason for the failure in one sentence, or "" if no block failed.
    """

    read: int
    loaded: list[int]
    failed: list[int]
    error: str


def fingerprint(pool: KvCachePool, model: str = "") -> str:
    """Return a line that is equal for two pools if and only if their pages are interchangeable.

    Parameters
    ----------
    pool : KvCachePool
        The pool. Its layout and the channel scales of quantised keys are included, its size is not.
    model : str
        Name of the model and its weights. It cannot be derived from the pages.

    Returns
    -------
    str
        Layout, channel scales, model and version of pagepool.

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


def _set(holder: object, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass."""
    object.__setattr__(holder, name, value)


def _number(what: str, value: Any, most: int) -> int:
    try:
        return integer(what, value, 0, most)
    except (TypeError, ValueError) as error:
        raise TransferError(str(error)) from None


def _row(what: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TransferError(f"{what} must be a sequence, not {type(value).__name__}")
    row = tuple(value)
    if len(row) > MAX_TICKET_BLOCKS:
        raise TransferError(f"{what} must have at most {MAX_TICKET_BLOCKS} entries, not {len(row)}")
    return row


def _pair(value: Any) -> tuple[int, int]:
    pair = _row("a block of a ticket", value)
    if len(pair) != 2:
        raise TransferError(f"a block of a ticket must be 2 numbers, its id and its generation, not {len(pair)}")
    return _number("a block", pair[0], MAX_BLOCK), _number("a generation", pair[1], MAX_GENERATION)


def _check_text(what: str, value: Any) -> None:
    if type(value) is not str or not 0 < len(value) <= MAX_TEXT:
        found = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise TransferError(f"{what} must be a str of 1 to {MAX_TEXT} characters, not {found}")


def _check_bytes(what: str, value: Any, most: int) -> None:
    if type(value) is not bytes or len(value) > most:
        found = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise TransferError(f"{what} must be at most {most} bytes, not {found}")
