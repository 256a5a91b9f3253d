"""Recognize the values of Megatron-core's sharded state dicts, by what they have: its package isn't imported.

    ShardedTensor            a part of the tensor ``key``, at ``global_offset`` of ``global_shape``
    ShardedObject            one value of an array of them, named by its place: ``<key>/shard_<offset>_<shape>``
    ShardedTensorFactory     what its ``build()`` gives, if that is made of views of its tensor
    LocalNonpersistentObject nothing: it is neither stored nor loaded

Names in a checkpoint are the top-level key of the state and the ``key`` that Megatron gives, which is one for all
layers where it puts them into one tensor (``prepend_axis_num``): parts on one rank may have the same. Parts with a
``replica_id`` other than zero are loaded and not written; somebody else has to hold the same with zero.

Guarantees: parts are the memory of ``data``, and filled in place; objects are replaced in ``data``. What isn't sound
(flattened ranges, parts without data or of another shape than they say, factories that copy) is a `ConfigError` that
names it.
Does not: write or read Megatron's own directory (its ``common.pt``); ask a module for its ``sharded_state_dict()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

import torch

from holdfast.boxes import Box
from holdfast.errors import ConfigError
from holdfast.state.entries import LeafPart, Path, WholePlace, joined
from holdfast.state.shards import LocalPart

_OBJECT: Final = frozenset({"key", "data", "global_shape", "global_offset", "replica_id"})
_TENSOR: Final = _OBJECT | {"local_shape", "prepend_axis_num"}
_FACTORY: Final = frozenset({"key", "data", "build_fn", "merge_fn", "replica_id"})

Kind = Literal["tensor", "object", "factory", "local"]


def kind_of(value: object) -> Kind | None:
    """Return what ``value`` is to Megatron; None for anything else."""
    return _kind_of_class(type(value))  # type: ignore[arg-type]


@cache
def _kind_of_class(kind: type[Any]) -> Kind | None:
    names = set(getattr(kind, "__dataclass_fields__", ()))
    if names >= _TENSOR:
        return "tensor"
    if names >= _OBJECT:
        return "object"
    if names >= _FACTORY:
        return "factory"
    is_local = hasattr(kind, "unwrap") and any(one.__name__ == "LocalNonpersistentObject" for one in kind.__mro__)
    return "local" if is_local else None


def path_of(path: Path, value: Any) -> Path:
    """Return the path in a checkpoint of an object at ``path`` of the state."""
    place, shape = (".".join(map(str, numbers)) for numbers in (value.global_offset, value.global_shape))
    return path[0], f"{value.key}/shard_{place}_{shape}"


def has_tensors(value: Any) -> bool:
    """Return True for a container that has tensors in it, which are stored one by one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and any(isinstance(item, torch.Tensor) or has_tensors(item) for item in value)


def object_leaf(path: Path, value: Any) -> LeafPart:
    """Return the leaf for an object at ``path`` of the state: one value, whatever it is, None too."""
    replica, whole = is_replica(value), not isinstance(value.data, torch.Tensor)
    return LeafPart(path_of(path, value), vars(value), "data", value.data, is_replica=replica, is_whole=whole)


def tensor_leaf(path: Path, value: Any) -> LeafPart:
    """Return the leaf for a part of a tensor at ``path`` of the state. Raises `ConfigError`."""
    data = value.data
    if not isinstance(data, torch.Tensor):
        raise _refused(path, value, "it has no data", "call its init_data(), or give it the tensor to fill")
    if getattr(value, "flattened_range", None) is not None:
        raise _refused(path, value, "it is a range of a flattened tensor", "use a format without flattened_range")
    ahead = int(value.prepend_axis_num)
    shape, offset = tuple(map(int, value.global_shape)), tuple(map(int, value.global_offset))
    if tuple(data.shape) != tuple(value.local_shape) or len(shape) != len(offset) or len(shape) != data.dim() + ahead:
        said = f"{list(value.local_shape)} at {list(offset)} of {list(shape)}"
        raise _refused(path, value, f"it says {said}, and its data is {list(data.shape)}", "make it anew")
    sizes = (*(1,) * ahead, *data.shape)
    box = Box(offset, sizes)
    may_differ = bool(getattr(value, "allow_shape_mismatch", False))
    with torch.no_grad():
        tensor = data.detach()
        for _ in range(ahead):
            tensor = tensor.unsqueeze(0)
    part = LocalPart(tensor, WholePlace(shape, box), may_differ=may_differ)
    return LeafPart((path[0], str(value.key)), None, None, part, is_replica=is_replica(value))


def built(path: Path, value: Any) -> Any:
    """Return the sharded state dict that a factory makes of its tensor. Raises `ConfigError` unless of views of it."""
    found = value.build()
    memory = value.data.untyped_storage().data_ptr() if isinstance(value.data, torch.Tensor) else None
    for part in _tensors_in(found):
        if not isinstance(part.data, torch.Tensor) or part.data.untyped_storage().data_ptr() != memory:
            raise _refused(path, value, "it makes copies of its tensor, which a load can't fill", "put build() there")
    return found


def _tensors_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [part for item in value for part in _tensors_in(item)]
    return [value] if kind_of(value) == "tensor" else []


def is_replica(value: Any) -> bool:
    """Return True if another rank stores it."""
    number = value.replica_id
    return any(number) if isinstance(number, (tuple, list)) else bool(number)


def _refused(path: Path, value: Any, why: str, instead: str) -> ConfigError:
    name = joined((path[0], str(value.key)))
    return ConfigError(f"{name}: a {type(value).__name__} at {joined(path)}: {why}; {instead}", field=name)
