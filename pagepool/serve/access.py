"""Accept or refuse HTTP requests by Host, Origin, media type and API key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from pagepool.serve.errors import RequestError
from pagepool.serve.fields import PATHS
from pagepool.serve.http import on_refusal

__all__ = ["Access", "Keys", "salt_of"]

PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class Keys:
    """The API keys with their tenants, and the admin key. They may be replaced while the server runs."""

    def __init__(self, api_keys: Mapping[str, str], admin_key: str | None = None) -> None:
        self.admin = None if admin_key is None else digest_of(admin_key)
        self.set(api_keys)

    def set(self, api_keys: Mapping[str, str]) -> None:
        """Replace the API keys. Requests that have been accepted go on."""
        self.api = [(digest_of(key), tenant) for key, tenant in api_keys.items()]


def digest_of(key: str) -> bytes:
    """Return what is kept and compared of a key."""
    return sha256(key.encode("latin-1", "replace")).digest()


class Access:
    """ASGI middleware that refuses a request before its body is read.

    Parameters
    ----------
    app : ASGI application
        Gets the accepted requests. Their `state.tenant` is the tenant of the API key, or None.
    keys : Keys
        The keys. Without API keys, requests need none.
    hosts : iterable of str or None
        Accepted names in the Host header, in addition to "localhost" and IP addresses. None or "*": any name.
        The check stops DNS rebinding: another site can resolve its name to this machine, but the browser still sends
        that name in Host.
    origins : iterable of str or None
        Accepted values of the Origin header, which browsers send with requests from other sites. None or "*": any.
    """

    def __init__(
        self,
        app: Any,
        keys: Keys,
        hosts: Iterable[str] | None,
        origins: Iterable[str] | None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = None if hosts is None else {"localhost", *(host.lower() for host in hosts)}
        self._origins = None if origins is None else set(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["tenant"] = self._check(scope)
            except RequestError as error:
                response = await on_refusal(HttpRequest(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Any) -> str | None:
        """Return the tenant of a request, or None. Raises `RequestError` if the request is refused."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_allowed(name_of(host)):
            raise RequestError(403, f"the Host {host[:100]!a} is not allowed: see --allowed-host", "host_not_allowed")
        if origin is not None and self._origins is not None and not self._origins & {origin, "*"}:
            sentence = f"the Origin {origin[:100]!a} is not allowed: see --allowed-origin"
            raise RequestError(403, sentence, "origin_not_allowed")
        tenant, path = None, PATHS.get(scope["path"])
        if path is not None and path.access == "admin":
            self._check_admin(scope, headers)
        elif path is None or path.access != "open":  # probes have no key
            tenant = self._tenant(headers.get("authorization", ""), headers.get("x-api-key"))
        if scope["method"] == "POST":
            kind = headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise RequestError(415, f"Content-Type must be application/json, not {kind[:100]!a}")
        return tenant

    def _is_allowed(self, name: str) -> bool:
        if self._hosts is None or self._hosts & {name, "*"}:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _tenant(self, authorization: str, api_key: str | None = None) -> str | None:
        """Return the tenant of the key in the Authorization header, or else of `api_key`.

        Takes the same time for every key.
        """
        if not self._keys.api:
            return None
        given = bearer(authorization) if authorization or api_key is None else digest_of(api_key)
        found = [tenant for known, tenant in self._keys.api if compare_digest(known, given)]
        if not found:
            raise RequestError(
                401, "missing or unknown API key: send Authorization: Bearer KEY, or X-Api-Key: KEY", "invalid_api_key"
            )
        return found[0]

    def _check_admin(self, scope: Any, headers: Headers) -> None:
        """Raise `RequestError` unless the client has the admin key, or there is none and the client is on this machine.

        A proxy on this machine passes on requests of other machines, so requests with its headers are refused.
        """
        if self._keys.admin is not None:
            if not compare_digest(self._keys.admin, bearer(headers.get("authorization", ""))):
                raise RequestError(
                    401, "this path needs the admin key: send Authorization: Bearer KEY", "invalid_api_key"
                )
            return
        self._tenant(headers.get("authorization", ""))
        if not is_local(scope.get("client")) or any(name in headers for name in PROXY_HEADERS):
            raise RequestError(403, "this path is for clients on this machine: see --admin-key", "admin_only")


def is_local(client: tuple[str, int] | None) -> bool:
    """Return true if the client of a request is on this machine. It is None at a Unix socket."""
    try:
        return client is None or ip_address(client[0]).is_loopback
    except ValueError:
        return False


def bearer(authorization: str) -> bytes:
    """Return the digest of the key in an Authorization header."""
    kind, _, key = authorization.partition(" ")
    return digest_of(key.strip()) if kind.lower() == "bearer" else b""


def name_of(host: str) -> str:
    """Return the name or address in a Host header, without the port.

    >>> name_of("Example.org.:8000"), name_of("[::1]:8000"), name_of("127.0.0.1")
    ('example.org', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower().rstrip(".") if ":" in host else host.lower().rstrip(".")


def salt_of(tenant: str | None, salt: str | None) -> str | None:
    """Return the cache salt of a request. Different tenants get different salts, so they never share prefixes."""
    if tenant is None:
        return salt
    return sha256(f"{len(tenant)} {tenant} {'' if salt is None else 'salt ' + salt}".encode()).hexdigest()
