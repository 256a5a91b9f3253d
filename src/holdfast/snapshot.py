"""What a save takes of the state on the training thread: references where the state stands still, copies elsewhere.

Parameters and optimizer state change only in an update, and updates wait for the copies: a reference is enough.
Buffers, the user's own tensors and plain objects may change any moment: they are copied before `save` returns.

Guarantees: taking a snapshot changes nothing of the state. While the state keeps its structure, only eager values
are copied and objects pickled; names, shapes and the structure's digest are those of the time before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import _torch_compat as compat
from holdfast.format.objects import ObjectPayload, dump_object, object_capacity
from holdfast.gc_pause import gc_paused
from holdfast.plan.structure import Structure, digest_of, encode_structure
from holdfast.staging.gathering import GATHER_MIN, GatherList, can_gather
from holdfast.staging.tripwire import WatchList
from holdfast.state.entries import TensorGuard
from holdfast.state.structure import structure_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from holdfast.staging.gathering import Gathered
    from holdfast.staging.tripwire import Marks
    from holdfast.state.entries import Collected, Collector, ObjectEntry, TensorEntry

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one step: ``encoded`` is its structure, the keys below are names of that structure.

    ``lazy`` refers to the live outer tensors, ``watched`` to the same, ``marks`` says how they are; ``held`` has the
    capture's own copies of the eager ones, still on their devices, ``gathered`` those of many small ones.
    """

    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    marks: Marks
    held: Mapping[str, torch.Tensor]
    gathered: Gathered | None
    objects: Mapping[str, ObjectPayload]
    update_ids: frozenset[int]
    """ids of the parameters captured: an optimizer that holds none of them need not wait."""
    devices: frozenset[torch.device]
    """The CUDA devices that tensors are copied from."""

    @property
    def from_device(self) -> bool:
        return bool(self.devices)

    def release(self) -> None:
        """Let the next capture have the memory of eager values: nobody reads them any more."""
        if self.gathered is not None:
            self.gathered.give_back()


@dataclass(frozen=True, slots=True)
class _Known:
    """What stays true as long as the state keeps its structure."""

    tree: Collector
    fingerprint: int
    dtype: str | None
    capacities: Mapping[str, int]
    converted: frozenset[str]
    """Tensors that may be stored as another dtype than they have."""
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    update_ids: frozenset[int]
    devices: frozenset[torch.device]


class _Settled:
    """Eager tensors that are the same objects as in the collection before: taken together where that is quicker."""

    def __init__(self, known: _Known, collected: Collected) -> None:
        self._known = known
        self._number = collected.number
        small = {
            entry.name: entry.tensor
            for entry in collected.settled
            if entry.name not in known.converted and can_gather(entry.tensor)
        }
        self._together = GatherList(small) if len(small) >= GATHER_MIN else None
        self._others = [entry for entry in collected.settled if self._together is None or entry.name not in small]
        self._guard = TensorGuard([entry.tensor for entry in self._others])

    def is_of(self, known: _Known, collected: Collected) -> bool:
        return self._known is known and self._number == collected.number

    def take(self) -> tuple[Gathered | None, dict[str, torch.Tensor]] | None:
        """The values as they are now; None if a tensor is of another kind than it was."""
        if not self._guard.stands():
            return None
        gathered = None
        if self._together is not None:
            gathered = self._together.gather()
            if gathered is None:
                return None
        return gathered, {entry.name: _clone(entry) for entry in self._others}


class SnapshotTaker:
    """Takes one snapshot after the other of states that mostly keep their structure. Used by the training thread."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._settled: _Settled | None = None
        self._capacities: dict[str, int] = {}
        self._plain: dict[str, tuple[str, ObjectPayload]] = {}
        """Plain values, most of which never change, as they were last: by name, with what they look like."""

    def take(self, tree: Collector, dtype: str | None) -> Snapshot:
        """The state as it is now. dtype: what floats of modules are to be stored as. Raises `ConfigError`."""
        known = self._known
        if known is not None and (known.tree, known.dtype) == (tree, dtype):
            # Kinds of tensors are looked at in the same breath as their versions: fetching them is what costs.
            collected = tree.collect(look_closer=False)
            objects, capacities = self._dump_all(collected)
            # Not by `unchanged`: that compares with the collection before, which may be one that didn't get here.
            if (known.fingerprint, known.capacities) == (collected.fingerprint, capacities):
                marks = known.watched.mark_known()
                snapshot = None if marks is None else self._snapshot(known, collected, objects, marks)
                if snapshot is not None:
                    return snapshot
        collected = tree.collect()
        objects, capacities = self._dump_all(collected)
        with gc_paused():
            known = self._known = _know(tree, collected, capacities, dtype)
        self._settled = None
        snapshot = self._snapshot(known, collected, objects, known.watched.mark())
        if snapshot is None:
            raise AssertionError("tensors changed on the way from their structure to their values")
        return snapshot

    def _dump_all(self, collected: Collected) -> tuple[dict[str, ObjectPayload], dict[str, int]]:
        """All objects, and how much room each is to have."""
        dumped: dict[int, ObjectPayload] = {}  # options of a group under each of its parameters are one object
        for entry in collected.objects:
            if id(entry.value) not in dumped:
                dumped[id(entry.value)] = self._dump(entry)
        objects = {entry.name: dumped[id(entry.value)] for entry in collected.objects}
        capacities = {
            name: object_capacity(payload, self._capacities.get(name, 0)) for name, payload in objects.items()
        }
        self._capacities |= capacities
        return objects, capacities

    def _snapshot(
        self, known: _Known, collected: Collected, objects: Mapping[str, ObjectPayload], marks: Marks
    ) -> Snapshot | None:
        """What was collected, with eager values taken; None if one of them is of another kind than was known."""
        if self._settled is None or not self._settled.is_of(known, collected):
            with gc_paused():
                self._settled = _Settled(known, collected)
        taken = self._settled.take()
        if taken is None:
            return None
        gathered, held = taken
        # Clones stay where they are: fetching one from a device would wait for all the work enqueued there.
        held |= {entry.name: _clone(entry) for entry in collected.fleeting}
        return Snapshot(
            encoded=known.encoded,
            digest=known.digest,
            lazy=known.lazy,
            watched=known.watched,
            marks=marks,
            held=held,
            gathered=gathered,
            objects=objects,
            update_ids=known.update_ids,
            devices=known.devices,
        )

    def _dump(self, entry: ObjectEntry) -> ObjectPayload:
        if not _is_plain(entry.value):
            return dump_object(entry.value, name=entry.name)
        looks = repr(entry.value)
        known = self._plain.get(entry.name)
        if known is not None and known[0] == looks:
            return known[1]
        payload = dump_object(entry.value, name=entry.name)
        self._plain[entry.name] = (looks, payload)
        return payload


def _know(tree: Collector, collected: Collected, capacities: Mapping[str, int], dtype: str | None) -> _Known:
    structure = structure_of(collected, capacities)
    converted: frozenset[str] = frozenset()
    if dtype is not None:
        converted = tree.module_tensors()
        structure = _with_dtype(structure, dtype, converted)
    encoded = encode_structure(structure)
    lazy = {entry.name: entry.tensor for entry in collected.tensors if entry.lazy}
    return _Known(
        tree=tree,
        fingerprint=collected.fingerprint,
        dtype=dtype,
        capacities=capacities,
        converted=converted,
        encoded=encoded,
        digest=digest_of(encoded),
        lazy=lazy,
        watched=WatchList(lazy),
        update_ids=tree.update_targets(collected),
        devices=frozenset(device for entry in collected.tensors if (device := entry.tensor.device).type == "cuda"),
    )


def _clone(entry: TensorEntry) -> torch.Tensor:
    return compat.clone(compat.local_tensor(entry.tensor))


def _is_plain(value: object) -> bool:
    """Whether two values of this kind are the same if they look the same."""
    if type(value) is tuple:
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _with_dtype(structure: Structure, dtype: str, names: frozenset[str]) -> Structure:
    """``structure`` with the ordinary floating-point tensors in ``names`` stored as ``dtype``; fp8 and the like stay.

    Never optimizer state: Adam counts its steps in a float, and step 100001 has no float16.
    """
    converted = ("float16", "bfloat16", "float32", "float64")
    return msgspec.structs.replace(
        structure,
        tensors=tuple(
            msgspec.structs.replace(spec, dtype=dtype) if spec.dtype in converted and spec.name in names else spec
            for spec in structure.tensors
        ),
    )
