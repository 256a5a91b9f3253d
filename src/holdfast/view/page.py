"""Put a document and the assets together into one HTML file that asks nobody for anything. Torch-free.

    page.html   the skeleton, with comments where style, script and data go
    page.css, *.js   one idea a file; `SCRIPTS` are joined, in this order, into one function

Guarantees: the page runs under a policy that allows this style and this script, by their digests, and no request; a
live page may ask the server that it came from. Text from a checkpoint can't become markup: data is JSON with ``<``,
``>`` and ``&`` escaped, or base64, and the script sets text, never HTML.
Does not: read a root (`model`, `tensors` and `statistics` make the documents).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPTS: Final = (
    *("dom", "format", "data", "grid", "scale", "timeline", "steps", "names", "treemap", "shards", "checkpoint"),
    *("tensor", "diff", "lineage", "page"),
)
_ESCAPES: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render_page(
    summary: dict[str, Any],
    *,
    checkpoints: Mapping[str, dict[str, Any]] | None = None,
    statistics: Mapping[str, Any] | None = None,
    live: bool = False,
) -> str:
    """Return the page. checkpoints: columns of those whose tensors it shows, by name; a live page asks for them.

    statistics: by tensor, of the first of ``checkpoints``.
    """
    packed = [("checkpoint", name, columns) for name, columns in (checkpoints or {}).items()]
    packed += [("statistics", "", dict(statistics))] if statistics else []
    data = [f'<script type="application/json" id="summary">{_json(summary)}</script>']
    data += [
        f'<script type="text/plain" data-kind="{kind}" data-name="{html.escape(name)}">{_packed(value)}</script>'
        for kind, name, value in packed
    ]
    parts = {
        "<!--policy-->": policy(live=live),
        "<!--mode-->": "live" if live else "report",
        "<!--style-->": style(),
        "<!--data-->": "\n".join(data),
        "<!--script-->": script(),
    }
    found = _asset("page.html")
    for mark, part in parts.items():
        before, _, after = found.partition(mark)
        assert after, f"page.html has no {mark}"
        found = f"{before}{part}{after}"
    return found.encode(errors="replace").decode()


def policy(*, live: bool) -> str:
    """Return the content security policy of a page: its own style and script, and no request but to its server."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src {_digest(style())}; script-src {_digest(script())}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def style() -> str:
    """Return the style sheet."""
    return _asset("page.css")


@cache
def script() -> str:
    """Return all scripts as one function, so that their names are nobody else's."""
    body = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


def encode_json(value: object) -> bytes:
    """Return ``value`` as JSON, compact; names that aren't Unicode, of files or in a manifest of anybody's, too."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json(value: object) -> str:
    return encode_json(value).decode().translate(_ESCAPES)


def _packed(value: object) -> str:
    return base64.b64encode(gzip.compress(encode_json(value), 6, mtime=0)).decode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files("holdfast.view") / "assets" / name).read_text(encoding="utf-8")
