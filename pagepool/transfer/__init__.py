"""Copies pages from one engine's pool to another, checked by block generation. See docs/guide/transfer.md."""

from pagepool.errors import TransferError
from pagepool.transfer.local import LocalTransfer
from pagepool.transfer.protocol import Transfer
from pagepool.transfer.tickets import Lease, PeerDescription, ReadResult, Ticket, fingerprint

__all__ = [
    "Lease",
    "LocalTransfer",
    "PeerDescription",
    "ReadResult",
    "Ticket",
    "Transfer",
    "TransferError",
    "fingerprint",
]
