"""A module whose weights may be a mix of versions refuses to be called.

Guarantees: a module that is refused raises `WeightsDirty` from each call until it is allowed again, whichever receiver
says so; nothing is left on one that is allowed.
Assumes: it is served by calling it. What is inside it, or a compiled graph, can still be called: who does that looks at
`Receiver.dirty`, as does who receives into a dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from holdfast.errors import WeightsDirty

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_refused: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def refuse_calls(into: Any) -> None:
    """If ``into`` is a module, calls of it fail from now on."""
    if isinstance(into, nn.Module) and into not in _refused:
        _refused[into] = into.register_forward_pre_hook(_refuse, prepend=True)


def allow_calls(into: Any) -> None:
    """Its weights are a whole version again; fine if it wasn't refused."""
    if isinstance(into, nn.Module):
        handle = _refused.pop(into, None)
        if handle is not None:
            handle.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    del args
    raise WeightsDirty(
        f"this {type(module).__name__} may hold parts of two versions: a receive with streaming=True is under way, or "
        "has failed half way. Wait for it, or receive a whole version, before it is called"
    )
