"""`--html FILE`: the picture of a replay as one page that needs nothing else, neither a network nor a server."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["page"]

TEMPLATE = Path(__file__).parent.parent / "data" / "replay.html"


def page(picture: dict[str, Any]) -> str:
    """The page as text: the template, with the title and the data in it.

    The data is JSON within a script element, where no "<" may begin a tag, so each is written as an escape.
    """
    data = json.dumps(picture, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # Cut before anything is put in, as a trace may be called like a place of the template.
    head, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("{{title}}")
    body, _, tail = rest.partition("{{data}}")
    return f"{head}{escape(picture['title'])}{body}{data}{tail}"
