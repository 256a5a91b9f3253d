"""What a save takes of the state on the training thread: references where the state stands still, copies elsewhere.

Parameters and optimizer state change only in an update, and updates wait for the copies: a reference is enough.
Buffers, the user's own tensors and plain objects may change any moment: they are copied before `save` returns.

Where these are many bytes they are copied once only: straight to their places in the image of a buffer that is free, if
the structure is the one it was made for; or not by the snapshot at all, where `save` waits for the copies anyway.

Guarantees: taking a snapshot changes nothing of the state. While the state keeps its structure, only eager values
are copied and objects pickled; names, shapes and the structure's digest are those of the time before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import _torch_compat as compat
from holdfast.format.objects import ObjectPayload, dump_object, object_capacity
from holdfast.gc_pause import gc_paused
from holdfast.plan.structure import Structure, digest_of, encode_structure
from holdfast.staging.gathering import GATHER_MIN, GatherList, can_gather
from holdfast.staging.scatter import CAN_SCATTER, SCATTER_BYTES_MAX, is_scattered_as_it_is
from holdfast.staging.tripwire import WatchList
from holdfast.state.entries import TensorGuard
from holdfast.state.structure import structure_of
from holdfast.tensor_kinds import Places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from holdfast.staging.copies import Copies
    from holdfast.staging.gathering import Gathered
    from holdfast.staging.layout import CaptureBuffer
    from holdfast.staging.tripwire import Marks
    from holdfast.state.entries import Collected, Collector, ObjectEntry, TensorEntry
    from holdfast.tensor_kinds import Addresses

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
AT_ONCE_BYTES_MIN: Final = 1 << 20
"""Of eager values: fewer bytes are copied twice as quickly as looked after."""

ClaimBuffer = Callable[[str], "CaptureBuffer | None"]
"""Gives a buffer that is free and made for the structure of this digest, if there is one."""


@dataclass(frozen=True, slots=True)
class EagerValues:
    """What may change as soon as `save` has returned, as it was before.

    ``held`` has the capture's own copies, still on their devices, ``gathered`` those of many small ones. ``plain`` are
    plain tensors of the host that are many bytes together, the same mapping for the same objects. If they are
    ``placed``, the buffer that was claimed has their values; if they are ``standing``, at these addresses, they are to
    be copied before `save` returns; else they are among the others.
    """

    held: Mapping[str, torch.Tensor]
    gathered: Gathered | None = None
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: bool = False
    standing: Addresses | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one step: the keys below are names of its structure, which ``encoded`` is as bytes.

    ``lazy`` refers to the live outer tensors, ``watched`` to the same, ``marks`` says how they are; ``eager`` is what
    was taken of the others.
    """

    structure: Structure
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    marks: Marks
    eager: EagerValues
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
        if self.eager.gathered is not None:
            self.eager.gathered.give_back()


@dataclass(frozen=True, slots=True)
class _Known:
    """What stays true as long as the state keeps its structure."""

    tree: Collector
    fingerprint: int
    dtype: str | None
    capacities: Mapping[str, int]
    converted: frozenset[str]
    """Tensors that may be stored as another dtype than they have."""
    structure: Structure
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    update_ids: frozenset[int]
    devices: frozenset[torch.device]


class _Apart:
    """Eager tensors whose values are copied to memory of the capture's own: together where that is quicker."""

    def __init__(self, entries: Sequence[TensorEntry], *, converted: frozenset[str]) -> None:
        small = {
            entry.name: entry.tensor for entry in entries if entry.name not in converted and can_gather(entry.tensor)
        }
        self._together = GatherList(small) if len(small) >= GATHER_MIN else None
        self._others = [entry for entry in entries if self._together is None or entry.name not in small]
        self._guard = TensorGuard([entry.tensor for entry in self._others])

    def take(self) -> EagerValues | None:
        """The values as they are now; None if a tensor is of another kind than it was."""
        if not self._guard.stands():
            return None
        gathered = None
        if self._together is not None:
            gathered = self._together.gather()
            if gathered is None:
                return None
        return EagerValues({entry.name: _clone(entry) for entry in self._others}, gathered)


class _Settled:
    """Eager tensors that are the same objects as in the collection before."""

    def __init__(self, known: _Known, collected: Collected) -> None:
        self._known = known
        self._number = collected.number
        self._entries = collected.settled
        plain = {
            entry.name: entry.tensor
            for entry in self._entries
            if entry.name not in known.converted and entry.tensor.numel() and is_scattered_as_it_is(entry.tensor)
        }
        sizes = [tensor.nbytes for tensor in plain.values()]
        at_once = sum(sizes) >= AT_ONCE_BYTES_MIN
        self._plain = plain if at_once else {}
        small = CAN_SCATTER and max(sizes, default=0) <= SCATTER_BYTES_MAX
        self._together = GatherList(self._plain) if at_once and small else None
        self._places = Places(list(self._plain.values())) if self._together is None else self._together.places
        self._all: _Apart | None = None
        self._rest: _Apart | None = None

    def is_of(self, known: _Known, collected: Collected) -> bool:
        return self._known is known and self._number == collected.number

    def take(self, claim: ClaimBuffer | None, *, standing: bool) -> EagerValues | None:
        """The values as they are now; None if a tensor is of another kind than it was. See `SnapshotTaker.take`."""
        if self._plain:
            buffer = None if claim is None else claim(self._known.digest)
            copies = None if buffer is None else buffer.eager_copies(self._plain)
            if copies is not None or standing:
                return self._take_at_once(copies)
        if self._together is not None:
            gathered, taken = self._together.gather(), self._take_rest()
            if gathered is None or taken is None:
                return None
            return replace(taken, gathered=gathered, plain=self._plain)
        if self._all is None:
            self._all = self._apart(self._entries)
        taken = self._all.take()
        return None if taken is None else replace(taken, plain=self._plain)

    def _apart(self, entries: Sequence[TensorEntry]) -> _Apart:
        with gc_paused():
            return _Apart(entries, converted=self._known.converted)

    def _take_rest(self) -> EagerValues | None:
        if self._rest is None:
            self._rest = self._apart([entry for entry in self._entries if entry.name not in self._plain])
        return self._rest.take()

    def _take_at_once(self, copies: Copies | None) -> EagerValues | None:
        addresses = self._places.addresses()
        taken = None if addresses is None else self._take_rest()
        if addresses is None or taken is None:
            return None
        if copies is None:
            return replace(taken, plain=self._plain, standing=addresses)
        copies.locate(addresses)
        for batch in copies.from_host:
            batch.copy()
        return replace(taken, plain=self._plain, placed=True)


class SnapshotTaker:
    """Takes one snapshot after the other of states that mostly keep their structure. Used by the training thread."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._settled: _Settled | None = None
        self._capacities: dict[str, int] = {}
        self._plain: dict[str, tuple[str, ObjectPayload]] = {}
        """Plain values, most of which never change, as they were last: by name, with what they look like."""

    def take(
        self, tree: Collector, dtype: str | None, *, claim: ClaimBuffer | None = None, standing: bool = False
    ) -> Snapshot:
        """The state as it is now. dtype: what floats of modules are to be stored as. Raises `ConfigError`.

        claim: gives a buffer whose image may take eager values, the same one each time; it stays the caller's.
        standing: eager values, too, stand still until they are copied: the caller waits for that.
        """
        known = self._known
        if known is not None and (known.tree, known.dtype) == (tree, dtype):
            # Kinds of tensors are looked at in the same breath as their versions: fetching them is what costs.
            collected = tree.collect(look_closer=False)
            objects, capacities = self._dump_all(collected)
            # Not by `unchanged`: that compares with the collection before, which may be one that didn't get here.
            if (known.fingerprint, known.capacities) == (collected.fingerprint, capacities):
                marks = known.watched.mark_known()
                if marks is not None:
                    snapshot = self._snapshot(known, collected, objects, marks, claim, standing=standing)
                    if snapshot is not None:
                        return snapshot
        collected = tree.collect()
        objects, capacities = self._dump_all(collected)
        with gc_paused():
            known = self._known = _know(tree, collected, capacities, dtype)
        self._settled = None
        snapshot = self._snapshot(known, collected, objects, known.watched.mark(), claim, standing=standing)
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
        self,
        known: _Known,
        collected: Collected,
        objects: Mapping[str, ObjectPayload],
        marks: Marks,
        claim: ClaimBuffer | None,
        *,
        standing: bool,
    ) -> Snapshot | None:
        """What was collected, with eager values taken; None if one of them is of another kind than was known."""
        if self._settled is None or not self._settled.is_of(known, collected):
            with gc_paused():
                self._settled = _Settled(known, collected)
        eager = self._settled.take(claim, standing=standing)
        if eager is None:
            return None
        # Clones stay where they are: fetching one from a device would wait for all the work enqueued there.
        fleeting = {entry.name: _clone(entry) for entry in collected.fleeting}
        return Snapshot(
            structure=known.structure,
            encoded=known.encoded,
            digest=known.digest,
            lazy=known.lazy,
            watched=known.watched,
            marks=marks,
            eager=replace(eager, held={**eager.held, **fleeting}) if fleeting else eager,
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
        structure=structure,
        encoded=encoded,
        digest=digest_of(encoded),
        lazy=lazy,
        watched=WatchList(lazy),
        update_ids=tree.update_targets(collected),
        devices=frozenset(entry.tensor.device for entry in collected.tensors if entry.tensor.is_cuda),
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
