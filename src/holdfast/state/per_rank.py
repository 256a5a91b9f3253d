"""`PerRank`: a value that is each rank's own."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class PerRank(Generic[T]):
    """Wraps a value of the state that differs from rank to rank: each rank's is stored, under names of its own.

    Without it, equal names on several ranks are taken for copies of one value, and one rank's is kept. RNG state and
    dataloaders are wrapped by themselves. ``value`` may be anything a state may hold. On load, a plain value is
    replaced: read it back from ``value``; containers, tensors and stateful objects are filled in place.

    On another world size there is no value that is plainly this rank's: where ``value`` has a method
    ``reshard_state_dict(states, rank, world)``, it gets all ranks' states in rank order and returns the one to load
    (None if it has loaded what it wants by itself); otherwise loading it is a `StateMismatch`, unless it is excluded.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
