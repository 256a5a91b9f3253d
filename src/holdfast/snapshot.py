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
from holdfast.plan.structure import Structure, digest_of, encode_structure
from holdfast.staging.tripwire import WatchList
from holdfast.state.structure import structure_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from holdfast.state.entries import ObjectEntry
    from holdfast.state.tree import StateTree

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one step: ``encoded`` is its structure, the keys below are names of that structure.

    ``lazy`` refers to the live outer tensors, ``watched`` to the same; ``held`` has the capture's own copies of the
    eager ones, still on their devices.
    """

    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    held: Mapping[str, torch.Tensor]
    objects: Mapping[str, ObjectPayload]
    update_ids: frozenset[int]
    """ids of the parameters captured: an optimizer that holds none of them need not wait."""
    devices: frozenset[torch.device]
    """The CUDA devices that tensors are copied from."""

    @property
    def from_device(self) -> bool:
        return bool(self.devices)


@dataclass(frozen=True, slots=True)
class _Known:
    """What stays true as long as the state keeps its structure."""

    tree: StateTree
    fingerprint: int
    dtype: str | None
    capacities: Mapping[str, int]
    encoded: bytes
    digest: str
    lazy: Mapping[str, torch.Tensor]
    watched: WatchList
    update_ids: frozenset[int]
    devices: frozenset[torch.device]


class SnapshotTaker:
    """Takes one snapshot after the other of states that mostly keep their structure. Used by the training thread."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._capacities: dict[str, int] = {}
        self._plain: dict[str, tuple[str, ObjectPayload]] = {}
        """Plain values, most of which never change, as they were last: by name, with what they look like."""

    def take(self, tree: StateTree, dtype: str | None) -> Snapshot:
        """The state as it is now. dtype: what floats of modules are to be stored as. Raises `ConfigError`."""
        collected = tree.collect()
        dumped: dict[int, ObjectPayload] = {}  # options of a group under each of its parameters are one object
        for entry in collected.objects:
            if id(entry.value) not in dumped:
                dumped[id(entry.value)] = self._dump(entry)
        objects = {entry.name: dumped[id(entry.value)] for entry in collected.objects}
        capacities = {
            name: object_capacity(payload, self._capacities.get(name, 0)) for name, payload in objects.items()
        }
        self._capacities |= capacities
        known = self._known
        # Not by `unchanged`: that compares with the collection before, which may be one that didn't get here.
        known_as = None if known is None else (known.tree, known.fingerprint, known.dtype, known.capacities)
        if known is None or known_as != (tree, collected.fingerprint, dtype, capacities):
            structure = structure_of(collected, capacities)
            if dtype is not None:
                structure = _with_dtype(structure, dtype, tree.module_tensors())
            encoded = encode_structure(structure)
            lazy = {entry.name: entry.tensor for entry in collected.tensors if entry.lazy}
            known = self._known = _Known(
                tree=tree,
                fingerprint=collected.fingerprint,
                dtype=dtype,
                capacities=capacities,
                encoded=encoded,
                digest=digest_of(encoded),
                lazy=lazy,
                watched=WatchList(lazy),
                update_ids=tree.update_targets(collected),
                devices=frozenset(
                    device for entry in collected.tensors if (device := entry.tensor.device).type == "cuda"
                ),
            )
        # Clones stay where they are: fetching one from a device would wait for all the work enqueued there.
        held = {
            entry.name: compat.clone(compat.local_tensor(entry.tensor)) for entry in collected.tensors if not entry.lazy
        }
        return Snapshot(
            encoded=known.encoded,
            digest=known.digest,
            lazy=known.lazy,
            watched=known.watched,
            held=held,
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
