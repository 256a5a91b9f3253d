"""Keep the contract with DCP's planners: how their items are handled, and what they leave in stock's metadata.

DCP's contract is one item at a time: resolve, copy, commit. A planner may hand out the same staging buffer for every
item, or remember between ``resolve_tensor`` and ``commit_tensor`` what it is at. Stock's default planners run no code
of their own there: they look values up (`looked_up`), so many of them can be copied, or read, in one go.

A planner may put anything into ``Metadata.planner_data``, and a tensor may require grad. `EXTRAS_NAME` holds that, as a
plain object of the kinds that any checkpoint may hold; it is committed like ``.metadata``. Nearly all saves have none
of it: what stock's own planners put there is which keys a flat name stands for, and reports say that.

Guarantees: `read_extras` runs nothing that the record names, and gives what `render_extras` was given.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast import _torch_compat as compat
from holdfast.errors import CheckpointCorrupt
from holdfast.format.dcp_metadata import STOCK_VERSION
from holdfast.format.dcp_metadata_reader import StockExtras
from holdfast.format.objects import dump_object, load_object, object_capacity, render_object
from holdfast.format.sealed import xxh3_128
from holdfast.loader.sources.holdfast import HoldfastSource
from holdfast.loader.sources.stock_dcp import ForeignSource
from holdfast.storage.object_storage import without_attempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from holdfast.format.structure import PathItem
    from holdfast.loader.sources.holdfast import CheckpointSource


_LOOK_UP_ONLY: Final[tuple[tuple[type, tuple[str, ...]], ...]] = (
    (DefaultSavePlanner, ("resolve_data", "lookup_object", "transform_object")),
    (DefaultLoadPlanner, ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")),
)
"""Methods that a subclass or an object must not have replaced."""
EXTRAS_NAME: Final = ".planner"
SAVE_ID: Final = "save_id"
"""Key of `Manifest.extra`: the ``save_id`` of the `Writer` that saved it."""
_KEYS: Final = frozenset({"planner_data", "requires_grad", "pin_memory"})


def looked_up(planner: object) -> Mapping[str, Any] | None:
    """Return the mapping in which ``planner`` looks items up by name; None if it runs its own code per item."""
    for base, methods in _LOOK_UP_ONLY:
        if isinstance(planner, base):
            kind, own = type(planner), vars(planner)
            if any(getattr(kind, name) is not getattr(base, name) or name in own for name in methods):
                return None
            values = own.get("state_dict")
            return values if type(values) in (dict, OrderedDict) else None
    return None


def is_live(value: torch.Tensor, known: object) -> bool:
    """Return True if ``value``, as resolved, is the memory of ``known`` itself, not a temporary made from it."""
    if value is known:
        return compat.is_plain(value)
    if not compat.is_dtensor(known):
        return False
    local = compat.dtensor_local(known)  # type: ignore[arg-type]
    return compat.is_plain(local) and value.data_ptr() == local.data_ptr() and value.shape == local.shape


def merged_paths(plans: Iterable[SavePlan]) -> dict[str, Any] | None:
    """Collect the keys that each flat name stands for, from all ranks' plans; None if missing or inconsistent."""
    merged: dict[str, Any] = {}
    for plan in plans:
        if not getattr(plan, "usable", True):
            return None  # a planner that caches plans doesn't send them again
        for name, path in plan.planner_data.items() if isinstance(plan.planner_data, dict) else ():
            if merged.setdefault(name, path) != path:
                return None
    return merged


def render_extras(metadata: Metadata, paths: Mapping[str, Any] | None) -> bytes | None:
    """Build the record of what ``metadata`` holds beyond ``paths`` and the tensors; None if that is nothing.

    Raises `ConfigError`, naming what it is, if the planner's data can't be loaded back without running code.
    """
    found: dict[str, Any] = {}
    if paths is None or not _is_known(metadata, paths):
        found["planner_data"] = metadata.planner_data
    for key in ("requires_grad", "pin_memory"):
        names = [
            name
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and getattr(entry.properties, key)
        ]
        if names:
            found[key] = names
    if not found:
        return None
    payload = dump_object(found, name="Metadata")
    return render_object(payload, object_capacity(payload))


def _is_known(metadata: Metadata, paths: Mapping[str, Any]) -> bool:
    data = metadata.planner_data
    return type(data) is dict and data == {
        name: stored_path(paths.get(name), name) for name in metadata.state_dict_metadata
    }


def read_extras(source: CheckpointSource) -> StockExtras:
    """Read what stock's metadata of ``source`` holds beside tensors and their places. Raises `CheckpointCorrupt`."""
    if isinstance(source, ForeignSource) and source.extras is not None:
        return source.extras
    extras = StockExtras(dict(source.paths), version=STOCK_VERSION)
    if not isinstance(source, HoldfastSource):
        return extras
    save_id = source.manifest.extra.get(SAVE_ID)
    if isinstance(save_id, str):
        extras = extras._replace(save_id=save_id)
    for file in source.manifest.files:
        if without_attempt(file.name, source.manifest.attempt) == EXTRAS_NAME:
            path = os.path.join(source.directory, file.name)
            data = source.read_committed(file.name, file.size)
            if len(data) != file.size or xxh3_128(data) != file.digest:
                raise CheckpointCorrupt(
                    f"{path} doesn't match the digest it was committed with", path=path, byte_range=(0, len(data))
                )
            return _decoded(load_object(data, name="Metadata", path=path), extras, path)
    return extras


def _decoded(found: Any, extras: StockExtras, path: str) -> StockExtras:
    names = [found.get(key, []) for key in ("requires_grad", "pin_memory")] if type(found) is dict else []
    if (
        not names
        or not found.keys() <= _KEYS
        or not all(type(row) is list and set(map(type, row)) <= {str} for row in names)
    ):
        raise CheckpointCorrupt(f"{path} isn't a valid record of planner data", path=path)
    return extras._replace(
        planner_data=found.get("planner_data", extras.planner_data),
        requires_grad=frozenset(names[0]),
        pin_memory=frozenset(names[1]),
    )


def stored_path(path: Any, name: str) -> tuple[PathItem, ...]:
    """Return the value's path in the state dict, if the planner gives one of keys and indices only."""
    if isinstance(path, tuple) and path and all(type(item) in (str, int) for item in path):
        return path
    return (name,)
