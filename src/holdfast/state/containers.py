"""Tensors in the user's own containers, remembered: a dict or list whose tensors are the same needs no second walk.

What is remembered is revalidated by identity each time: a key or a tensor that was added, removed, renamed or replaced
is noticed, and so is a tensor that has become another kind of thing. A tensor replaced by one like it changes nothing
of the structure. Only plain dicts and lists are remembered, and
only such as have nothing but strings for keys: any other mapping may give its items anew each time.

Guarantees: costs some tens of nanoseconds a tensor where nothing has changed. Values that are no tensors are not
remembered: who walks the state looks into them each time.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import compress, repeat
from operator import not_
from typing import TYPE_CHECKING, Any

import torch

from holdfast.plan.structure import PER_RANK
from holdfast.state.entries import Described, Path, TensorEntry, TensorGuard, check_tensor, describe, same_objects
from holdfast.state.flatten import item_path
from holdfast.state.values import LeafPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ContainerSource:
    """The tensors that lie directly in the dict or list at one path of the state.

    Those that were the same objects whenever it looked are *settled*; a place whose tensor was ever replaced is not.
    """

    def __init__(self, path: Path, holder: dict[Any, Any] | list[Any]) -> None:
        self.path = path
        self.holder = holder
        self.described = Described([], [])
        """What each of `tensors` looks like; the tensors of two containers described alike need the same place."""
        self.number = 0
        """Another one whenever `settled` is another list."""
        self._keys: list[Any] = []
        self._is_tensor: list[bool] = []
        self._is_other: list[bool] = []
        self._has_others = True
        self._tensors: list[torch.Tensor] = []
        self._entries: list[TensorEntry] = []
        self._settled: list[TensorEntry] | None = None
        self._restless: set[int] = set()
        self._replaced: set[int] = set()
        self._guard: TensorGuard | None = None

    def look(self) -> bool:
        """Note what the container holds now; False if it isn't one to remember."""
        if type(self.holder) is list:
            keys: list[Any] = list(range(len(self.holder)))
            values = list(self.holder)
        else:
            keys, values = list(self.holder), list(self.holder.values())  # type: ignore[union-attr]
        if not self._has_others and same_objects(values, self._tensors) and keys == self._keys:
            return True  # as nearly always
        if type(self.holder) is not list and set(map(type, keys)) != {str}:
            return False
        tensors = list(compress(values, self._is_tensor))
        others = compress(values, self._is_other) if self._has_others else ()
        if keys == self._keys and not any(map(_is_tensor, others)):
            if same_objects(tensors, self._tensors):
                return True
            if all(map(_is_tensor, tensors)):
                self._replace(tensors)
                return True
        self._keys = keys
        self._is_tensor = list(map(_is_tensor, values))
        self._is_other = list(map(not_, self._is_tensor))
        self._tensors = list(compress(values, self._is_tensor))
        self._has_others = any(self._is_other)
        self._restless = set()
        self._forget()
        return True

    def _replace(self, tensors: list[torch.Tensor]) -> None:
        pairs = zip(tensors, self._tensors, strict=True)
        replaced = {at for at, (new, old) in enumerate(pairs) if new is not old}
        self._replaced |= replaced
        if not replaced <= self._restless:
            self._restless |= replaced
            self._settled = self._guard = None
        self._tensors = tensors

    def _forget(self) -> None:
        self._entries, self._replaced = [], set()
        self._settled = self._guard = None

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensors)

    def others(self) -> Iterator[tuple[Any, Any]]:
        """Keys and values of what isn't a tensor, as it is now."""
        if not self._has_others:
            return iter(())
        items = enumerate(self.holder) if isinstance(self.holder, list) else self.holder.items()
        return compress(items, self._is_other)

    def refresh(self, *, look_closer: bool) -> None:
        """Bring entries up to date with what was noted. Raises `ConfigError` for a tensor that can't be stored.

        look_closer: whether settled tensors have stayed of their kinds, too; the others are always looked at.
        """
        if look_closer and self._guard is not None and not self._guard.stands():
            self._forget()
        if len(self._entries) != len(self._tensors):
            self._forget()
            self._entries = self._new_entries()
            self.described = Described.of(self._entries)
        elif self._restless:
            self._refresh_restless()
        if self._settled is None:
            stays = [at not in self._restless for at in range(len(self._entries))]
            self._settled = list(compress(self._entries, stays))
            self._guard = TensorGuard(list(compress(self._tensors, stays)), list(compress(self.described.looks, stays)))
            self.number += 1

    def _refresh_restless(self) -> None:
        for at in self._replaced:
            old = self._entries[at]
            check_tensor(old.name, self._tensors[at])
            self._entries[at] = TensorEntry(old.name, old.path, self._tensors[at], lazy=False)
        self._replaced = set()
        names, known = self.described
        looks = {at: describe(self._entries[at].tensor) for at in self._restless}
        if any(known[at] != look for at, look in looks.items()):
            self.described = Described(names, [looks.get(at, look) for at, look in enumerate(known)])

    def _new_entries(self) -> list[TensorEntry]:
        path, prefix = self.path, "".join(f"{item}." for item in self.path)
        keys = list(compress(self._keys, self._is_tensor))
        if not isinstance(self.holder, list) and PER_RANK in keys:
            item_path(path, PER_RANK)  # says so
        names = [f"{prefix}{key}" for key in keys]
        for name, tensor in zip(names, self._tensors, strict=True):
            check_tensor(name, tensor)
        paths, lazy = [(*path, key) for key in keys], repeat(False)  # noqa: FBT003
        return list(map(TensorEntry, names, paths, self._tensors, lazy))

    @property
    def tensors(self) -> Sequence[TensorEntry]:
        """All of them, as of the last `refresh`."""
        return self._entries

    @property
    def settled(self) -> Sequence[TensorEntry]:
        """Those that are the same objects as long as `number` is the same."""
        assert self._settled is not None
        return self._settled

    @property
    def restless(self) -> Iterator[TensorEntry]:
        """The others."""
        return (self._entries[at] for at in sorted(self._restless))

    def leaves(self) -> Iterator[LeafPart]:
        """The tensors as single values, each with its place in the container."""
        for key, tensor in zip(compress(self._keys, self._is_tensor), self._tensors, strict=True):
            path = (*self.path, key) if isinstance(self.holder, list) else item_path(self.path, key)
            yield LeafPart(path, self.holder, key, tensor)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_remembered(value: object) -> bool:
    """Whether a container is of a type that gives the same items as long as nobody changes it."""
    return type(value) in (dict, OrderedDict, list)
