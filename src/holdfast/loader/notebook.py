"""Show checkpoints, saves and managers in a notebook: small tables of HTML, without scripts. Torch-free.

Guarantees: text that comes from a checkpoint is escaped; colours follow those of the notebook, light or dark. Of a
checkpoint only manifest and reports are read, and what can't be read is said instead of raised.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from holdfast.boxes import whole
from holdfast.catalog.listing import committed_bytes, list_root, size_text
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.catalog.listing import RootEntry
    from holdfast.loader.sources.holdfast import CheckpointSource

_GROUPS_MAX: Final = 8
_STEPS_MAX: Final = 12
_CELL: Final = "text-align:left;padding:2px 12px 2px 0;border:0;background:none"
_FAINT: Final = "opacity:.65"


def facts_html(title: str, facts: Mapping[str, str], extra: str = "") -> str:
    """Return a titled table of facts, each with its name; ``extra``: HTML that follows. Empty facts are left out."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};{_FAINT}">{html.escape(name)}</td>'
        f'<td style="{_CELL}">{html.escape(text)}</td></tr>'
        for name, text in facts.items()
        if text
    )
    return (
        f'<div style="font-size:13px;line-height:1.4"><div style="font-weight:600;padding:2px 0">{html.escape(title)}'
        f'</div><table style="border-collapse:collapse">{rows}</table>{extra}</div>'
    )


def table_html(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table under its titles."""
    head = "".join(f'<th style="{_CELL};{_FAINT};font-weight:400">{html.escape(title)}</th>' for title in titles)
    body = "".join(
        '<tr style="background:none">'
        + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse"><tr style="background:none">{head}</tr>{body}</table>'


def bars_html(sizes: Mapping[str, int]) -> str:
    """Return bars, the longest for the largest; of many names the largest ones, the rest as one."""
    rows = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    if len(rows) > _GROUPS_MAX:
        rest = rows[_GROUPS_MAX - 1 :]
        rows = [*rows[: _GROUPS_MAX - 1], (f"{len(rest)} more", sum(size for _, size in rest))]
    most = max((size for _, size in rows), default=0) or 1
    return "".join(
        f'<div style="display:flex;align-items:center;gap:8px"><span style="width:14em;overflow:hidden;'
        f'text-overflow:ellipsis;white-space:nowrap">{html.escape(name)}</span><span style="display:inline-block;'
        f'height:9px;border-radius:2px;background:currentColor;opacity:.35;width:{max(0.3, 16 * size / most):.1f}em">'
        f'</span><span style="{_FAINT}">{size_text(size)}</span></div>'
        for name, size in rows
    )


def checkpoint_html(source: CheckpointSource) -> str:
    """Return what a checkpoint is: when it was saved and by whom, its metrics, and what takes its bytes."""
    manifest = source.manifest
    facts = {"path": source.directory, "step": "" if source.step is None else str(source.step)}
    if manifest is None:
        facts["written by"] = "another tool: no checksums"
    else:
        kind = "" if manifest.kind == "export" or manifest.resumable else ", a model only"
        facts |= {
            "saved": f"{manifest.created} by {_ranks(manifest.world)}{kind}",
            "metrics": ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items()),
            "delta to": manifest.chain[-1].name if manifest.chain else "",
            "size": size_text(committed_bytes(manifest)),
            "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        }
    try:
        tensors = source.tensors
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            key = name.split(".", 1)[0]
            sizes[key] = sizes.get(key, 0) + whole(tensor.shape).volume * tensor.itemsize
        facts["holds"] = f"{len(tensors)} tensors, {size_text(sum(sizes.values()))}; {len(source.objects)} objects"
    except HoldfastError as error:
        sizes, facts["damaged"] = {}, str(error)
    return facts_html(
        "Checkpoint" if manifest is None or manifest.kind == "checkpoint" else "Export", facts, bars_html(sizes)
    )


def root_html(root: str, facts: Mapping[str, str]) -> str:
    """Return what a root holds, the newest steps first, under the facts of its manager."""
    try:
        entries = [row for row in list_root(root).entries if row.step is not None]
    except HoldfastError as error:
        return facts_html("CheckpointManager", {"root": root, **facts, "unreadable": str(error)})
    rows = [[str(row.step), _state(row), size_text(row.nbytes), row.name] for row in entries]
    rows.reverse()
    more = {"": f"and {len(rows) - _STEPS_MAX} older ones"} if len(rows) > _STEPS_MAX else {}
    table = table_html(("step", "state", "size", "name"), rows[:_STEPS_MAX]) if rows else ""
    return facts_html("CheckpointManager", {"root": root, **facts}, table) + (facts_html("", more) if more else "")


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _state(row: RootEntry) -> str:
    marks = [row.state, *(["latest"] if row.latest else []), *(["pinned"] if row.pinned else [])]
    return ", ".join(marks)
