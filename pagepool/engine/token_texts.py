"""The text and the bytes of single tokens.

Decoding a single token is not enough: some decoders strip a leading space.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["TokenTexts"]

SPACE = "\u2581"  # SentencePiece writes this character instead of a space
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts and bytes of the tokens of a tokenizer, by id. The result of each look-up is kept.

    Parameters
    ----------
    tokenizer : object
        A tokenizer of transformers, or an object with `decode([id])`, which returns the text of a token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, bytes]] = {}
        self._added = {token: str(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = _strings(json.loads(decoder.__getstate__())) if decoder is not None else {SPACE, "ByteFallback"}
        self._has_spaces, self._has_bytes = SPACE in kinds, "ByteFallback" in kinds
        self._bytes: dict[str, int] | None = getattr(tokenizer, "byte_decoder", None)
        if "ByteLevel" in kinds:
            self._bytes = _byte_level()

    def text_of(self, token: int) -> str:
        """Return the text of a token. A part of a character is not valid UTF-8; it becomes OpenAI's "bytes:" form."""
        return self._look_up(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._look_up(token)[1]

    def all_bytes(self, count: int) -> list[bytes]:
        """Return the bytes of the tokens below `count`. They are not kept."""
        return [self._read(token) for token in range(count)]

    def _look_up(self, token: int) -> tuple[str, bytes]:
        found = self._found.get(token)
        if found is None:
            data = self._read(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            found = self._found[token] = (text, data)
        return found

    def _read(self, token: int) -> bytes:
        piece = self._added.get(token)
        if piece is not None or not hasattr(self._tokenizer, "convert_ids_to_tokens"):
            text: str = self._tokenizer.decode([token]) if piece is None else piece
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a model may have more tokens than its tokenizer
            return b""
        if self._bytes is not None and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if self._has_bytes and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte.group(1), 16)])
        if self._has_spaces:
            return str(piece).replace(SPACE, " ").encode()
        alone: str = self._tokenizer.decode([token])
        return alone.encode()


def _strings(value: Any) -> set[str]:
    """Return all strings in a JSON value."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set[str]().union(*map(_strings, inner))


def _byte_level() -> dict[str, int]:
    """Map each character of GPT-2's byte-level alphabet to its byte. Printable characters map to their own code."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
