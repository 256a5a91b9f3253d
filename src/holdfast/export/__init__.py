"""Hugging Face exports: which tensors a directory of them has, where their bytes come from, and who writes which.

What users need by name are the rules of key maps. Importing this loads no torch: each name is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.export.hf_default import HFDefault
    from holdfast.export.reshaping import Fuse, Narrow, Split, SplitExperts, StackExperts, Transpose
    from holdfast.export.rules import AddPrefix, Cast, Drop, DropTied, Fp8, Rename, StripPrefix

_HOME = {
    "holdfast.export.hf_default": ("HFDefault",),
    "holdfast.export.reshaping": ("Fuse", "Narrow", "Split", "SplitExperts", "StackExperts", "Transpose"),
    "holdfast.export.rules": ("AddPrefix", "Cast", "Drop", "DropTied", "Fp8", "Rename", "StripPrefix"),
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
