"""Export a state or checkpoint as a Hugging Face directory.

The names exported here for users are the rules of key maps. Importing this loads no torch: names are loaded on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.keymap.hf_default import HFDefault
    from holdfast.keymap.rules import (
        AddPrefix,
        Cast,
        Drop,
        DropTied,
        Fp8,
        Fuse,
        Narrow,
        Rename,
        Split,
        SplitExperts,
        StackExperts,
        StripPrefix,
        Transpose,
    )

_HOME = {
    "holdfast.keymap.hf_default": ("HFDefault",),
    "holdfast.keymap.rules": (
        "AddPrefix",
        "Cast",
        "Drop",
        "DropTied",
        "Fp8",
        "Fuse",
        "Narrow",
        "Rename",
        "Split",
        "SplitExperts",
        "StackExperts",
        "StripPrefix",
        "Transpose",
    ),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AddPrefix",
    "Cast",
    "Drop",
    "DropTied",
    "Fp8",
    "Fuse",
    "HFDefault",
    "Narrow",
    "Rename",
    "Split",
    "SplitExperts",
    "StackExperts",
    "StripPrefix",
    "Transpose",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.export' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
