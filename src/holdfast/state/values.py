"""Parts of a state that are no modules or optimizers: leaves of the user's containers, and stateful objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from holdfast.state.entries import Path


class Stateful(Protocol):
    """DCP's convention: an object that gives its state as a mapping and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class LeafPart(msgspec.Struct, frozen=True, eq=False):
    """One value, and where in the user's containers it sits. ``holder`` is a mapping, a list or a `PerRank`."""

    path: Path
    holder: Any
    key: Any
    value: Any


class StatefulPart(msgspec.Struct, frozen=True, eq=False):
    path: Path
    stateful: Stateful
    optional: bool = False
    """Nobody asked for it: a checkpoint without it is no mismatch."""
