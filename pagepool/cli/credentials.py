"""API keys and the certificate of a server, which are read again when their files change."""

from __future__ import annotations

import argparse
import logging
import os
import ssl
from hashlib import sha256
from pathlib import Path

from pagepool.cli.usage import UsageError

__all__ = ["Credentials", "read_keys"]

logger = logging.getLogger("pagepool")


class Credentials:
    """The API keys and the certificate of the options of `pagepool serve`. Raises `UsageError` if they are unusable.

    Attributes
    ----------
    api_keys : dict of str to str
        The tenant of each key.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.api_keys = read_keys(options.api_key, options.api_key_file)
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
        self._keys = Watched([options.api_key_file])
        self._certificate = Watched([options.ssl_certfile, options.ssl_keyfile])

    def changes(self) -> tuple[bool, bool]:
        """Return whether there are new keys, and whether there is a new certificate, since the last call.

        An error in a file is logged, and its keys or certificate stay as they are.
        """
        options = self._options
        keys_changed, certificate_changed = self._keys.has_changed(), self._certificate.has_changed()
        try:
            if keys_changed:
                self.api_keys = read_keys(options.api_key, options.api_key_file)
                logger.info("%s: read again, %d API keys", options.api_key_file, len(self.api_keys))
        except UsageError as error:
            logger.error("the earlier API keys stay: %s", error)
            keys_changed = False
        try:
            if certificate_changed:
                check_certificate(options.ssl_certfile, options.ssl_keyfile)
                logger.info("%s: read again", options.ssl_certfile)
        except UsageError as error:
            logger.error("the earlier certificate stays: %s", error)
            certificate_changed = False
        return keys_changed, certificate_changed


class Watched:
    """Files that are used together."""

    def __init__(self, files: list[str | None]) -> None:
        self._files = [file for file in files if file is not None]
        self._known = self._stamps()

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last call. If one is missing, nothing has changed."""
        stamps = self._stamps()
        if None in stamps or stamps == self._known:
            return False
        self._known = stamps
        return True

    def _stamps(self) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = []
        for path in self._files:
            try:
                stat = os.stat(path)
                found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


def read_keys(given: list[str], file: str | None) -> dict[str, str]:
    """Return the tenant of each API key. A key without a tenant gets a tenant of its own.

    Raises `UsageError`. Its message never contains a key.
    """
    lines = [("--api-key", key) for key in given]
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: cannot be read: {error}") from None
        lines += [(f"{file}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    found: dict[str, str] = {}
    for place, line in lines:
        words = line.split()
        if place != "--api-key" and (not words or words[0].startswith("#")):
            continue
        if not 1 <= len(words) <= (1 if place == "--api-key" else 2) or not (
            words[-1].isascii() and words[-1].isprintable()
        ):
            raise UsageError(
                f"{place}: an API key must be one word of printable ASCII characters, after its tenant or alone"
            )
        key = words[-1]
        tenant = words[0] if len(words) == 2 else "key " + sha256(key.encode()).hexdigest()[:16]
        if found.setdefault(key, tenant) != tenant:
            raise UsageError(f"{place}: the key has two tenants, {found[key]!r} and {tenant!r}")
    if file is not None and not found:
        raise UsageError(f"{file}: the file has no API keys")
    return found


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise `UsageError` if the files cannot be used for TLS."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(f"{certificate}: cannot be used for TLS: {error}") from None
