from collections.abc import Iterable
from typing import TypeAlias, final

from pagepool.prefix.cache import PrefixCache

__all__ = ["PrefixNamespace"]

_Key: TypeAlias = str | bytes | bool | int | None

@final
class PrefixNamespace:
    def __new__(
        cls, cache: PrefixCache, *, cache_salt: _Key = None, extra_keys: Iterable[_Key] = ()
    ) -> PrefixNamespace: ...
    @property
    def cache(self) -> PrefixCache: ...
