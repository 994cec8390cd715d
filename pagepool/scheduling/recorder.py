"""TraceRecorder: an engine records its requests as a `ptrace-1` trace that `pagepool replay` reads.

The file is JSON lines: a header, then `[arrival, prompt tokens, output tokens, [start, length, ...]]` for each request.
It contains no tokens. Block ids show which prefixes prompts share: an id identifies the tokens of a block and all
tokens before them. It is looked up by

    id of a block = ids[digest of (id of the previous block, or salt and keys; tokens of the block)]

Equal ids mean equal prefixes, except for collisions of a 128-bit BLAKE2b digest. Its key is random and never written.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterable, Iterator
from time import monotonic_ns
from typing import Any

from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import token_row

__all__ = ["TraceRecorder"]

MAX_REQUESTS = 5_000_000
MAX_TOKENS = 1 << 24
MAX_TIME_US = 10**15
MAX_LINE = 16 << 20
MAX_BLOCK = 1 << 20


class TraceRecorder:
    """Writes a line for each request to a new file.

    All threads of a process may record. A line is written completely or not at all, so the trace can be read up to its
    last line whenever the process ends. `close`, or the end of a `with` block, writes the number of requests into the
    header.

    Parameters
    ----------
    path : str or path-like
        The file. It must not exist.
    block : int
        Tokens per prefix block, usually the engine's block size. 0: record no prefix blocks.
    name : str
        Name of the trace, up to 200 printable characters.
    licence : str
        Licence of the trace, up to 200 printable characters.
    max_blocks : int
        Maximum number of ids to remember, about 180 bytes each. If there are more, all are forgotten, and later prompts
        get new ids.

    Examples
    --------
    >>> import tempfile
    >>> with TraceRecorder(tempfile.mkdtemp() + "/engine.ptrace", block=4) as recorder:
    ...     recorder.record([1, 2, 3, 4, 5, 6], output_tokens=10, arrival=0.25)
    ...     recorder.record([1, 2, 3, 4, 9], output_tokens=3, arrival=0.5)
    >>> print(recorder.path.read_text(), end="")
    {"fmt":"ptrace-1","name":"recorded","block":4,"unit":"us","licence":"unknown","n":2      }
    [250000,6,10,[0,2]]
    [500000,5,3,[0,1,2,1]]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block: int = 16,
        *,
        name: str = "recorded",
        licence: str = "unknown",
        max_blocks: int = 4_000_000,
    ) -> None:
        from pathlib import Path  # imported late, like json and hashlib below: they load slowly and are rarely needed

        self.block = operator.index(block)
        if not 0 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block must be from 0 to {MAX_BLOCK}, not {self.block}")
        for what, text in (("name", name), ("licence", licence)):
            if len(text) > 200 or not text.isprintable():
                raise ValueError(f"{what} must be a printable text of at most 200 characters")
        self.path = Path(path)
        self.num_requests = 0
        self._max_blocks = operator.index(max_blocks)
        self._ids: dict[bytes, int] = {}
        self._next_id = 0
        self._key = os.urandom(32)
        self._lock = threading.Lock()
        self._start = monotonic_ns()
        about = {"fmt": "ptrace-1", "name": name, "block": self.block, "unit": "us", "licence": licence}
        header = _as_json(about)[:-1] + ',"n":'
        # "null   " leaves room for the number of requests, which `close` writes over it.
        self._count_at = len(header.encode())
        self._end = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._write(f"{header}null   }}\n")
        except OSError:
            os.close(self._file)
            os.unlink(path)
            raise

    def record(
        self,
        prompt: Any,
        output_tokens: int,
        arrival: float | None = None,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> None:
        """Record a request that has ended.

        Parameters
        ----------
        prompt : sequence of int or ndarray, shape (n,)
            Its token ids, at least one.
        output_tokens : int
            Number of generated tokens.
        arrival : float, optional
            Seconds since the recorder was made, or since another start that all requests share. Default: now.
        cache_salt, extra_keys
            As in `PrefixCache.match_prefix`. Prompts with different keys share no blocks.

        Raises
        ------
        ValueError
            If a number is too large for a trace, or the recorder is closed. A failed call does not change the file.
        TypeError
            If the prompt does not consist of integers.
        OSError
            If the line cannot be written.
        """
        row = token_row(prompt)
        output = operator.index(output_tokens)
        if not 1 <= len(row) <= MAX_TOKENS or not 0 <= output <= MAX_TOKENS:
            raise ValueError(
                f"a request must have from 1 to {MAX_TOKENS} prompt tokens, not {len(row)}, "
                f"and from 0 to {MAX_TOKENS} output tokens, not {output}"
            )
        time = (monotonic_ns() - self._start) / 1e3 if arrival is None else arrival * 1e6
        if not 0 <= time <= MAX_TIME_US:
            raise ValueError(f"arrival must be from 0 to {MAX_TIME_US // 10**6} seconds, not {arrival}")
        data = row.tobytes()
        root = root_key(cache_salt, extra_keys)
        with self._lock:
            if self._file < 0:
                raise ValueError(f"{self.path} is closed")
            if self.num_requests == MAX_REQUESTS:
                raise ValueError(f"the trace is full: it has {MAX_REQUESTS} requests, which is the maximum")
            runs: list[int] = []
            for number in self._numbers(data, root):
                if runs and runs[-2] + runs[-1] == number:
                    runs[-1] += 1
                else:
                    runs += (number, 1)
            self._write(_as_json([round(time), len(row), output, runs]) + "\n")
            self.num_requests += 1

    def close(self) -> None:
        """Write the number of requests into the header and flush the file to disk. A second call does nothing."""
        with self._lock:
            if self._file < 0:
                return
            file, self._file = self._file, -1
            self._ids.clear()
            try:
                _write_all(file, f"{self.num_requests:<7}".encode(), self._count_at)
                os.fsync(file)
            finally:
                os.close(file)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _numbers(self, data: bytes, root: bytes) -> Iterator[int]:
        """Yield the ids of the blocks of a prompt, including a partial last block."""
        if not self.block:
            return
        from hashlib import blake2b

        if len(self._ids) + len(data) // (4 * self.block) >= self._max_blocks:
            self._ids.clear()
        size, ids, key = 4 * self.block, self._ids, self._key
        before = root
        for at in range(0, len(data), size):
            # The salt is the length of `before`. Without it, the same bytes could be split differently into tokens and
            # `before`.
            name = blake2b(data[at : at + size] + before, digest_size=16, key=key, salt=b"%d" % len(before)).digest()
            number = ids.get(name)
            if number is None:
                number = ids[name] = self._next_id
                self._next_id += 1
            yield number
            before = number.to_bytes(8, "little")

    def _write(self, line: str) -> None:
        """Append a line. If this raises, the file is unchanged."""
        data = line.encode()
        if len(data) > MAX_LINE:
            raise ValueError(f"a line must have at most {MAX_LINE} bytes, not {len(data)}")
        try:
            _write_all(self._file, data, self._end)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)


def _as_json(value: Any) -> str:
    import json

    return json.dumps(value, separators=(",", ":"))


def _write_all(file: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
