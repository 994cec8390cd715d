"""Fingerprints identify everything that pages on disk depend on. A page is used only with an equal fingerprint."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from pathlib import Path
from tempfile import mkstemp
from time import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE

if TYPE_CHECKING:
    from pagepool.config import StateLayout
    from pagepool.memory.kv_pool import KvCachePool

__all__ = ["Fingerprint", "fingerprint_of", "is_private", "weights_digest"]

FORMAT = 2  # version of the page, index and session files
WEIGHTS = ("*.safetensors", "*.bin")
ADAPTER = "adapter_config.json"
READ_BYTES = 1 << 20
SETTLED_SECONDS = 5  # the digest of a file that changed less than this before is not remembered
MOST_HEADER = 16 << 20  # bytes of the header of a safetensors file
SAMPLES = 256
SAMPLE_BYTES = 4096


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
        Tokens per block; 0 for pages that do not belong to tokens.
    state_bytes : int
        Bytes of one recurrent state; 0 for a model without recurrent states.
    """

    text: str
    page_bytes: int
    block_size: int = 0
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
    """Return a digest of all bytes of the weights in a directory, of their index, and of config.json; or of a file.

    Parameters
    ----------
    folder : path
        Has config.json and weights (`*.safetensors`, `*.bin`, and the shards that an `*.index.json` names, also in
        other directories), as `save_pretrained` writes them. Or a GGUF file.
    known : path or None
        A file that remembers the digests of large files, so that only new files are read. It is used only if nobody but
        this user can change it or its directory. None: every file is read.

    Raises
    ------
    ValueError
        The directory has no weights, or an adapter, whose base model is in another place.
    OSError
        A file cannot be read.

    Notes
    -----
    A file is unchanged if its device, inode, size, times of modification and of change, header and 256 samples of its
    bytes are unchanged. Archives and copies can restore every one of these but the time of change and the bytes. A file
    that changed less than 5 s ago is not remembered: it can change again within the resolution of its times.
    """
    place = Path(folder)
    is_file = place.is_file()
    names = [place.name] if is_file else _names_of_weights(place)
    place = place.parent if is_file else place
    memory = _Memory(None if known is None else Path(known))
    whole = blake2b(digest_size=16)
    for name in names:
        whole.update(f"{name} {memory.digest_of(place / name)}\n".encode())
    memory.write()
    return whole.hexdigest()


def _names_of_weights(place: Path) -> list[str]:
    """Return the paths below `place` of all files that determine the weights of a model."""
    if (place / ADAPTER).is_file():
        raise ValueError(f"{place}: it has an adapter ({ADAPTER}): merge it into its base model first")
    names = {path.name for pattern in WEIGHTS for path in place.glob(pattern)}
    indexes = {path.name for path in place.glob("*.index.json")}
    for index in indexes:
        names |= _shards_of(place / index)
    names = {name for name in names if (place / name).is_file()}
    if not names:
        raise ValueError(f"{place}: it has no weights ({' or '.join(WEIGHTS)})")
    return sorted(names | indexes | ({"config.json"} if (place / "config.json").is_file() else set()))


def _shards_of(index: Path) -> set[str]:
    """Return the names in an index of shards; none if it cannot be read, because no model can be loaded by it then."""
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        return {os.path.normpath(name) for name in shards if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


class _Memory:
    """The digests of large files, in a JSON object: path to [times and sizes, digest of samples, digest of all bytes].

    Without a file, or if another user can change it, nothing is known and nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path if path is not None and is_private(path.parent) else None
        self._known = {} if self._path is None else _read_json(self._path)
        self._fresh: dict[str, list[str]] = {}

    def digest_of(self, path: Path) -> str:
        """Return the digest of all bytes of a file, which may be known."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size <= READ_BYTES or self._path is None:
                return _digest_of(file)
            place = str(path.resolve())
            stamp = [_stamp_of(status), _samples_of(file.fileno(), place, status.st_size)]
            known = self._known.get(place)
            if isinstance(known, list) and known[:2] == stamp and len(known) == 3 and isinstance(known[2], str):
                return known[2]
            found = _digest_of(file)
            is_settled = status.st_ctime < time() - SETTLED_SECONDS
            if is_settled and _stamp_of(os.fstat(file.fileno())) == stamp[0]:
                self._fresh[place] = [*stamp, found]
            return found

    def write(self) -> None:
        """Replace the file in one step, if there is anything new: a reader sees the old or the new one."""
        if self._path is None or not self._fresh:
            return
        with suppress(OSError):  # read-only or full: the next start reads the weights again
            handle, beside = mkstemp(prefix=f"{self._path.name}.", dir=self._path.parent)  # new, with mode 0600
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump({**self._known, **self._fresh}, file)
                os.replace(beside, self._path)
            except BaseException:
                os.unlink(beside)
                raise


def is_private(folder: Path) -> bool:
    """Whether a path is a directory of this user in which no other user can change files."""
    status = os.stat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of this user that no other user can write to. Without one, an empty object."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return {}
            found = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp_of(status: os.stat_result) -> str:
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _samples_of(file: int, place: str, size: int) -> str:
    """Return a digest of the header of a file and of `SAMPLES` places that its path and size choose, in order.

    A fine-tune that changes a tenth of the bytes changes none of them with a probability of 2e-12.
    """
    found = blake2b(digest_size=16)
    header = int.from_bytes(os.pread(file, 8, 0), "little")  # of safetensors; any number in other files
    found.update(os.pread(file, min(8 + header, MOST_HEADER), 0))
    draws, part = shake_256(f"{place} {size}".encode()).digest(8 * SAMPLES), size // SAMPLES
    for i in range(SAMPLES):
        draw = int.from_bytes(draws[8 * i : 8 * i + 8], "little")
        found.update(os.pread(file, SAMPLE_BYTES, i * part + draw % part))
    return found.hexdigest()


def _digest_of(file: Any) -> str:
    found = blake2b(digest_size=16)
    buffer = memoryview(bytearray(READ_BYTES))
    while count := file.readinto(buffer):
        found.update(buffer[:count])
    return found.hexdigest()
