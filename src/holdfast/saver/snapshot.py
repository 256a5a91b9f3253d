"""Take a snapshot of the state on the training thread: references if values can't change, copies otherwise.

Parameters and optimizer state change only in an update, and updates wait for the copies: a reference is enough.
Buffers, the user's own tensors and plain objects may change any moment: they are copied before `save` returns.

If these are many bytes, they are copied only once: into their final places in the image of a free buffer, if it was
made for the same structure; or not by the snapshot at all, if `save` waits for the copies anyway.

Guarantees: taking a snapshot leaves the state unchanged. While the state keeps its structure, only eager values are
copied and objects pickled; names, shapes and the structure's digest are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import _torch_compat as compat
from holdfast.format.objects import ObjectPayload, dump_object, object_capacity
from holdfast.format.structure import Structure, digest_of, encode_structure
from holdfast.staging.change_detection import WatchedTensors
from holdfast.staging.small_copies import (
    CAN_SCATTER,
    GATHER_MIN,
    SCATTER_BYTES_MAX,
    GatherList,
    can_gather,
    is_scattered_as_it_is,
)
from holdfast.state.entries import TensorAddresses, TensorGuard
from holdfast.state.gc_pause import gc_paused
from holdfast.state.structure import structure_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from holdfast.staging.buffer import CaptureBuffer
    from holdfast.staging.change_detection import TensorVersions
    from holdfast.staging.copies import Copies
    from holdfast.staging.small_copies import Gathered
    from holdfast.state.entries import Addresses, Collected, Collector, ObjectEntry, TensorEntry

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
AT_ONCE_BYTES_MIN: Final = 1 << 20
"""Minimum bytes of eager values to copy only once: for fewer, copying twice is as fast as the bookkeeping."""

ClaimBuffer = Callable[[str], "CaptureBuffer | None"]
"""Returns a free buffer made for the structure of this digest, if there is one."""


@dataclass(frozen=True, slots=True)
class EagerValues:
    """Values that may change as soon as `save` has returned, as they are now.

    held: copies that belong to the capture, still on their devices. gathered: copies of many small tensors. plain:
    plain host tensors that are many bytes together; the same mapping for the same objects. placed: values of ``plain``
    are in the claimed buffer. standing: the addresses of ``plain``, which is copied before `save` returns. If neither
    is set, the values of ``plain`` are in ``held`` and ``gathered``.
    """

    held: Mapping[str, torch.Tensor]
    gathered: Gathered | None = None
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: bool = False
    standing: Addresses | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one step. Mappings are keyed by names of its ``structure``; ``encoded`` is that as bytes.

    lazy, watched: the live outer tensors. marks: their versions. eager: values copied from the other tensors.
    """

    structure: Structure
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchedTensors
    marks: TensorVersions
    eager: EagerValues
    objects: Mapping[str, ObjectPayload]
    update_ids: frozenset[int]
    """ids of the captured parameters: an optimizer that holds none of them need not wait."""
    devices: frozenset[torch.device]
    """CUDA devices that tensors are copied from."""

    @property
    def from_device(self) -> bool:
        return bool(self.devices)

    def release(self) -> None:
        """Let the next capture reuse the memory of eager values: nobody reads them any more."""
        if self.eager.gathered is not None:
            self.eager.gathered.give_back()


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts that hold as long as the state keeps its structure."""

    tree: Collector
    fingerprint: int
    dtype: str | None
    capacities: Mapping[str, int]
    converted: frozenset[str]
    """Names of tensors that may be stored as another dtype."""
    structure: Structure
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchedTensors
    update_ids: frozenset[int]
    devices: frozenset[torch.device]

    def snapshot(self, marks: TensorVersions, eager: EagerValues, objects: Mapping[str, ObjectPayload]) -> Snapshot:
        """Return the snapshot of one step, from what differs between steps."""
        return Snapshot(
            structure=self.structure,
            encoded=self.encoded,
            digest=self.digest,
            lazy=self.lazy,
            watched=self.watched,
            marks=marks,
            eager=eager,
            objects=objects,
            update_ids=self.update_ids,
            devices=self.devices,
        )


class _Apart:
    """Eager tensors whose values are copied to the capture's own memory, gathered if that is faster."""

    def __init__(self, entries: Sequence[TensorEntry], *, converted: frozenset[str]) -> None:
        small = {
            entry.name: entry.tensor for entry in entries if entry.name not in converted and can_gather(entry.tensor)
        }
        self._together = GatherList(small) if len(small) >= GATHER_MIN else None
        self._others = [entry for entry in entries if self._together is None or entry.name not in small]
        self._guard = TensorGuard([entry.tensor for entry in self._others])

    def take(self) -> EagerValues | None:
        """Return the current values; None if a tensor's kind has changed."""
        if not self._guard.stands():
            return None
        gathered = None
        if self._together is not None:
            gathered = self._together.gather()
            if gathered is None:
                return None
        return EagerValues({entry.name: _clone(entry) for entry in self._others}, gathered)


class _Settled:
    """Eager tensors that are the same objects as in the previous collection."""

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
        self._places = TensorAddresses(list(self._plain.values())) if self._together is None else self._together.places
        self._all: _Apart | None = None
        self._rest: _Apart | None = None

    def is_of(self, known: _Known, collected: Collected) -> bool:
        return self._known is known and self._number == collected.number

    def take(self, claim: ClaimBuffer | None, *, standing: bool) -> EagerValues | None:
        """Return the current values; None if a tensor's kind has changed. See `SnapshotTaker.take`."""
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
    """Takes snapshots of a state that mostly keeps its structure. Used by the training thread."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._settled: _Settled | None = None
        self._capacities: dict[str, int] = {}
        self._plain: dict[str, tuple[str, ObjectPayload]] = {}
        """The latest plain values by name, each with its representation; most of them never change."""

    def take(
        self, tree: Collector, dtype: str | None, *, claim: ClaimBuffer | None = None, standing: bool = False
    ) -> Snapshot:
        """Return the current state. dtype: what floating-point tensors of modules are stored as. Raises `ConfigError`.

        claim: returns a buffer whose image may take eager values, the same one at each call; the caller owns it.
        standing: eager values won't change until they are copied: the caller waits for that.
        """
        known, asked = self._known, None
        if known is not None and (known.tree, known.dtype) == (tree, dtype):
            # Kinds of tensors are checked together with their versions: fetching them is the expensive part.
            collected = tree.collect(look_closer=False)
            asked = collected.asked
            objects, capacities = self._dump_all(collected)
            # Not by `unchanged`: it compares with the previous collection, which may not have got this far.
            if (known.fingerprint, known.capacities) == (collected.fingerprint, capacities):
                marks = known.watched.mark_known()
                if marks is not None:
                    snapshot = self._snapshot(known, collected, objects, marks, claim, standing=standing)
                    if snapshot is not None:
                        return snapshot
        collected = tree.collect(asked=asked)
        objects, capacities = self._dump_all(collected)
        with gc_paused():
            known = self._known = _know(tree, collected, capacities, dtype)
        self._settled = None
        snapshot = self._snapshot(known, collected, objects, known.watched.mark(), claim, standing=standing)
        if snapshot is None:
            raise AssertionError("tensors changed on the way from their structure to their values")
        return snapshot

    def take_live(self, tree: Collector) -> Snapshot:
        """Return references to the whole current state, for a save whose caller waits until everything is written.

        Watches every tensor that others may write to; holds the values that nobody else refers to. Raises
        `ConfigError`.
        """
        collected = tree.collect()
        objects, capacities = self._dump_all(collected)
        with gc_paused():
            known = _know(tree, collected, capacities, None, live=True)
        held = {entry.name: entry.tensor for entry in collected.tensors if entry.fresh}
        return known.snapshot(known.watched.mark(), EagerValues(held), objects)

    def _dump_all(self, collected: Collected) -> tuple[dict[str, ObjectPayload], dict[str, int]]:
        """Return all objects, and how much room each gets."""
        dumped: dict[int, ObjectPayload] = {}  # a group's options, listed under each of its parameters, are one object
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
        marks: TensorVersions,
        claim: ClaimBuffer | None,
        *,
        standing: bool,
    ) -> Snapshot | None:
        """Build the snapshot of a collection, taking eager values; None if a tensor's kind has changed."""
        if self._settled is None or not self._settled.is_of(known, collected):
            with gc_paused():
                self._settled = _Settled(known, collected)
        eager = self._settled.take(claim, standing=standing)
        if eager is None:
            return None
        # Clones stay on their devices: fetching one would wait for all work enqueued there.
        fleeting = {entry.name: _clone(entry) for entry in collected.fleeting}
        if fleeting:
            eager = replace(eager, held={**eager.held, **fleeting})
        return known.snapshot(marks, eager, objects)

    def _dump(self, entry: ObjectEntry) -> ObjectPayload:
        try:
            looks = repr(entry.value) if _is_plain(entry.value) else None
        except ValueError:  # an integer with too many digits for Python to print
            looks = None
        if looks is None:
            return dump_object(entry.value, name=entry.name)
        known = self._plain.get(entry.name)
        if known is not None and known[0] == looks:
            return known[1]
        payload = dump_object(entry.value, name=entry.name)
        self._plain[entry.name] = (looks, payload)
        return payload


def _know(
    tree: Collector, collected: Collected, capacities: Mapping[str, int], dtype: str | None, *, live: bool = False
) -> _Known:
    """live: refer to all tensors that others may write to, not only to the lazy ones."""
    structure = structure_of(collected, capacities)
    converted: frozenset[str] = frozenset()
    if dtype is not None:
        converted = tree.module_tensors()
        structure = _with_dtype(structure, dtype, converted)
    encoded = encode_structure(structure)
    lazy = {entry.name: entry.tensor for entry in collected.tensors if (not entry.fresh if live else entry.lazy)}
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
        watched=WatchedTensors(lazy),
        update_ids=tree.update_targets(collected),
        devices=frozenset(entry.tensor.device for entry in collected.tensors if entry.tensor.is_cuda),
    )


def _clone(entry: TensorEntry) -> torch.Tensor:
    tensor = compat.local_tensor(entry.tensor)
    return tensor.detach() if entry.fresh and tensor.is_contiguous() else compat.clone(tensor)


def _is_plain(value: object) -> bool:
    """Return True if two values of this kind are equal when their representations are."""
    if type(value) is tuple:
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _with_dtype(structure: Structure, dtype: str, names: frozenset[str]) -> Structure:
    """Return ``structure`` with the ordinary floating-point tensors in ``names`` stored as ``dtype``; not fp8 and such.

    Never optimizer state: Adam counts its steps in a float, and float16 has no 100001.
    """
    converted = ("float16", "bfloat16", "float32", "float64")
    return msgspec.structs.replace(
        structure,
        tensors=tuple(
            msgspec.structs.replace(spec, dtype=dtype) if spec.dtype in converted and spec.name in names else spec
            for spec in structure.tensors
        ),
    )
