"""Holdfast behind stock DCP: a storage writer and a storage reader for ``dcp.save``, ``async_save`` and ``load``.

dcp.save(state_dict, storage_writer=holdfast.dcp.Writer(path))
dcp.load(state_dict, storage_reader=holdfast.dcp.Reader(path))
"""

from __future__ import annotations

from holdfast.dcp.reader import Reader
from holdfast.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
