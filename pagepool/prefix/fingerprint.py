"""Fingerprints identify everything that pages on disk depend on. A page is used only with an equal fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE

if TYPE_CHECKING:
    from pagepool.config import StateLayout
    from pagepool.memory.kv_pool import KvCachePool

__all__ = ["Fingerprint", "fingerprint_of", "weights_digest"]

FORMAT = 1  # version of the page, index and session files
WEIGHTS = ("*.safetensors", "*.bin")
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the layout, weights and parameters that determine the bytes of a page. Made by `fingerprint_of`.

    Attributes
    ----------
    text : str
        One line of JSON: page layout, weights and parameters.
    page_bytes : int
        Bytes of one block's pages in all pools together.
    block_size : int
        Tokens per block.
    state_bytes : int
        Bytes of one recurrent state; 0 for a model without recurrent states.
    """

    text: str
    page_bytes: int
    block_size: int
    state_bytes: int = 0

    @property
    def digest(self) -> bytes:
        """A 128-bit hash of the attributes."""
        data = f"{self.page_bytes} {self.block_size} {self.state_bytes} {self.text}".encode()
        return blake2b(data, digest_size=16).digest()


def fingerprint_of(
    pools: KvCachePool | Iterable[KvCachePool],
    weights: str,
    *,
    block_size: int | None = None,
    states: StateLayout | None = None,
    **parameters: Any,
) -> Fingerprint:
    """Return the fingerprint of a model's pages.

    Parameters
    ----------
    pools : KvCachePool or sequence of KvCachePool
        Every pool of the allocator, in the order in which the pools were made.
    weights : str
        A digest of the bytes of all weights, such as `weights_digest` returns. Two fine-tunes of one model must
        have different ones.
    block_size : int or None
        Tokens per block. None: the block size of the first pool. Required without pools.
    states : StateLayout or None
        The recurrent states of a sequence, for a model that has some.
    **parameters : JSON values
        Other parameters that keys and values depend on: RoPE, quantisation, adapters, the arithmetic of the kernels.

    Raises
    ------
    TypeError
        If `weights` is not a str, or a parameter is not a JSON value.
    ValueError
        If `weights` is empty, or the block size is unknown.

    Examples
    --------
    >>> from pagepool import KvCachePool, KvLayout
    >>> pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32"), 4)
    >>> found = fingerprint_of(pool, "sha256:1234", rope_theta=10_000.0)
    >>> found.page_bytes, found.block_size, found == fingerprint_of(pool, "sha256:9999", rope_theta=10_000.0)
    (1024, 16, False)
    """
    if not isinstance(weights, str):
        raise wrong("weights", "a str", weights)
    if not weights:
        raise ValueError("weights must be a digest of the model's weights; it must not be empty")
    found = list(pools) if isinstance(pools, Iterable) else [pools]
    if block_size is None and not found:
        raise ValueError("block_size is required if there are no pools")
    size = integer("block_size", found[0].block_size if block_size is None else block_size, 1, MAX_BLOCK_SIZE)
    pages = []
    for pool in found:
        scale = pool.k_channel_scale
        scales = None if scale is None else blake2b(scale.tobytes(), digest_size=16).hexdigest()
        layout = f"{pool.page_size} x {pool.dtype}" if pool.layout is None else repr(pool.layout)
        pages.append([layout, scales])
    described = {"format": FORMAT, "pages": pages, "weights": weights, "parameters": parameters}
    if states is not None:
        described["states"] = [
            [[name, shape, _dtype_name(dtype)] for name, (shape, dtype) in layer.items()] for layer in states.layers
        ]
    text = json.dumps(described, sort_keys=True, allow_nan=False)
    page_bytes = sum(pool.nbytes // pool.max_blocks if pool.max_blocks else 0 for pool in found)
    return Fingerprint(text, page_bytes, size, 0 if states is None else states.num_bytes)


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype).str


def weights_digest(folder: str | Path, known: str | Path | None = None) -> str:
    """Return a digest of all bytes of the weights in a directory, and of its config.json.

    Parameters
    ----------
    folder : path
        Has config.json and weights (`*.safetensors`, `*.bin`), as `save_pretrained` writes them.
    known : path or None
        A file that remembers the digests of files by inode, size and time of the last change, so that only new files
        are read. It is written again when it does not have them all. None: every file is read.

    Raises
    ------
    ValueError
        The directory has no weights.
    OSError
        A file cannot be read.
    """
    place = Path(folder)
    files = sorted({path for pattern in WEIGHTS for path in place.glob(pattern)})
    if not files:
        raise ValueError(f"{place}: it has no weights ({' or '.join(WEIGHTS)})")
    config = place / "config.json"
    files += [config] if config.is_file() else []
    before = {} if known is None else _read_known(Path(known))
    after = {}
    for path in files:
        status = path.stat()
        key = f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
        digest = before.get(key)
        after[key] = digest if isinstance(digest, str) else _digest_of(path)
    if known is not None and any(key not in before for key in after):
        _write_known(Path(known), {**before, **after})
    whole = blake2b(digest_size=16)
    for path, digest in zip(files, after.values(), strict=True):
        whole.update(f"{path.name} {digest}\n".encode())
    return whole.hexdigest()


def _digest_of(path: Path) -> str:
    found = blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(file):
            found.update(piece)
    return found.hexdigest()


def _pieces(file: Any) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(READ_BYTES))
    while count := file.readinto(buffer):
        yield buffer[:count]


def _read_known(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # every file is read then
    return found if isinstance(found, dict) else {}


def _write_known(path: Path, digests: dict[str, Any]) -> None:
    """Replace the file in one step: a reader sees the old or the new one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(digests), encoding="utf-8")
    beside.replace(path)
