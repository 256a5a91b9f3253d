"""Convert nested values to named leaves and back, by stock DCP's rules (torch 2.13, ``checkpoint/_traverse.py``).

Any mapping is entered, its keys made strings; a list is entered only if it holds a tensor, a mapping, or a list that is
entered; everything else, tuples included, is one leaf. Names are path items joined by dots.

Stock loses two things that an object needs to restore its own state: empty mappings, and keys that aren't strings.
`flatten_exactly` stores them as extra plain objects (``{}`` under the mapping's own name, and the original keys under
``<name>.__keys__``), which `rebuild` uses and stock readers, asking by name, never see. Of the user's own mappings they
are noted in the index (`keys_to_note`), and names stay those of stock.

`ContainerSource` remembers the tensors of the user's own dicts and lists, so that unchanged ones need no second walk.
They are revalidated by identity each time: a key or a tensor that was added, removed, renamed or replaced is noticed,
and so is a tensor that has changed its kind. A tensor replaced by one of the same kind changes nothing of the
structure. Only plain dicts with string keys and plain lists are remembered, since other mappings may create their items
on each access.

Guarantees: a remembered container costs some tens of nanoseconds per tensor if nothing has changed. Values other than
tensors are not remembered: the walk reads them each time.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from itertools import compress, repeat
from operator import not_
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.errors import ConfigError
from holdfast.format.structure import PER_RANK, PathItem, noted_key
from holdfast.state.entries import (
    Described,
    LeafPart,
    Path,
    TensorEntry,
    TensorGuard,
    check_tensor,
    describe,
    joined,
    same_objects,
)
from holdfast.state.shards import is_sharded
from holdfast.state.subclasses import NOTE, parts_of, refold, unfolds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEYS_NOTE: Final = "__keys__"
MAX_DEPTH: Final = 64
ABSENT_MAX: Final = 4096
"""Most items of a stored list that may be neither stored nor in the present one: stock keeps nothing of empty ones."""
_DIGITS_MAX: Final = 18
_SMALL: Final = 1 << 63
"""Integers that are less need no more than 64 bits."""


Leaf = Callable[[Path, Any], None]
IsLive = Callable[[Any], bool]


class Keys(tuple[Any, ...]):
    """Keys of a mapping, as the leaf at its own path: exactly those that it had."""

    __slots__ = ()


class ImplausibleList(ValueError):
    """Stored names tell of a list that can't be."""


def _never(_: Any) -> bool:
    return False


def is_entered(value: Any, is_live: IsLive = _never) -> bool:
    """Return True if traversal enters the list ``value``; ``is_live`` names further item types (modules, say)."""
    pending, seen = [value], {id(value)}
    while pending:  # not by calling itself: lists may be nested as deep as anybody likes, or hold themselves
        for item in pending.pop():
            if isinstance(item, (torch.Tensor, Mapping)) or is_sharded(item) or is_live(item):
                return True
            if isinstance(item, list) and id(item) not in seen:
                seen.add(id(item))
                pending.append(item)
    return False


def item_path(path: Path, key: object) -> Path:
    """``path`` extended by a mapping's key; refuses what would be taken for the per-rank marker."""
    try:
        text = str(key)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a tuple nested as deep
        raise ConfigError(f"{joined(path)}: a key of type {type(key).__name__} can't be a name: {error}") from error
    if text == PER_RANK:
        raise ConfigError(f"{joined((*path, text))}: the key {PER_RANK!r} is reserved; rename it", field=joined(path))
    return (*path, text)


def check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        name = joined(path[:4])
        raise ConfigError(f"{name}...: nested deeper than {MAX_DEPTH} levels: does the state hold itself?", field=name)


def flatten(path: Path, value: Any, leaf: Leaf) -> None:
    """Call ``leaf(path, value)`` for every leaf of ``value``, as stock names them."""
    if isinstance(value, Mapping):
        check_depth(path)
        for key, item in value.items():
            flatten(item_path(path, key), item, leaf)
    elif isinstance(value, list) and is_entered(value):
        check_depth(path)
        for index, item in enumerate(value):
            flatten((*path, index), item, leaf)
    elif unfolds(value):
        _unfold(path, value, leaf)
    else:
        leaf(path, value)


def _unfold(path: Path, value: torch.Tensor, leaf: Leaf) -> None:
    for below, part in parts_of(value, joined(path)):
        leaf((*path, *below), part)


def flatten_exactly(path: Path, value: Any, leaf: Leaf) -> None:
    """`flatten`, and the notes `rebuild` needs to give the very same mapping back."""
    if isinstance(value, Mapping):
        check_depth(path)
        if not value:
            leaf(path, {})
        elif keys_to_note(path, value) is not None:
            leaf((*path, KEYS_NOTE), list(value))
        for key, item in value.items():
            flatten_exactly(item_path(path, key), item, leaf)
    elif isinstance(value, list) and is_entered(value):
        check_depth(path)
        for index, item in enumerate(value):
            flatten_exactly((*path, index), item, leaf)
    elif unfolds(value):
        _unfold(path, value, leaf)
    else:
        leaf(path, value)


def keys_to_note(path: Path, mapping: Mapping[Any, Any]) -> tuple[Any, ...] | None:
    """Return the keys of the mapping at ``path`` as `noted_key` gives them; None if names tell them: all are strings.

    Raises `ConfigError` for two keys of one name, such as 1 and "1".
    """
    kinds = set(map(type, mapping))
    if kinds == {str} and KEYS_NOTE not in mapping:
        return None
    if kinds == {int} and min(mapping) > -_SMALL and max(mapping) < _SMALL:  # there may be very many
        return tuple(sorted(mapping))
    known: dict[PathItem, Any] = {}
    for key in mapping:
        text = item_path(path, key)[-1]
        if text in known:
            where = joined(path)
            raise ConfigError(
                f"{where}: the keys {known[text]!r} and {key!r} would both be named {text!r}; rename one", field=where
            )
        known[text] = key
    return tuple(noted_key(known[text]) for text in sorted(known, key=str))


def rebuild(like: Any, leaves: Mapping[Path, Any], *, guessed: bool = False, refolds: bool = True) -> Any:
    """The nested value whose leaves are ``leaves``, by paths relative to it.

    ``like`` is a present value of the same kind, or None: where the paths leave it open, it says what a container is
    (a `Counter`, a list) and what its keys were before they became strings. Its own leaves are not taken over, only
    containers of it that hold none. With ``guessed`` paths, names cut at dots, it also says what is a list.
    `Keys` at the path of a mapping are the keys that it had, whatever ``like`` has.
    refolds: make tensor subclasses of their inner tensors again; otherwise they stay mappings.
    Raises `ImplausibleList`, and what ``subclasses.refold`` does.
    """
    bare = leaves.get(())
    note: Sequence[Any] = bare if isinstance(bare, Keys) else []
    if () in leaves and len(leaves) == 1 and note is not bare:
        # Noted as empty, it is empty: of what is there now only the kind of mapping stays.
        return _empty_like(like) if isinstance(bare, dict) and not bare and isinstance(like, Mapping) else bare
    branches: dict[Any, dict[Path, Any]] = {}
    for path, value in leaves.items():
        if path == (KEYS_NOTE,) and not isinstance(note, Keys):
            note = list(value)
        elif path:
            branches.setdefault(path[0], {})[path[1:]] = value
    if refolds and (NOTE,) in leaves:
        inner = {
            str(item): rebuild(getattr(like, str(item), None), branch, guessed=guessed)
            for item, branch in branches.items()
            if item != NOTE
        }
        return refold(like, inner, leaves[(NOTE,)])
    maybe_list = guessed and isinstance(like, list)
    if branches and all(type(item) is int or (maybe_list and _is_index(item)) for item in branches):
        numbered = {int(item): branch for item, branch in branches.items()}
        return _rebuild_list(like, numbered, guessed=guessed, refolds=refolds)
    return _rebuild_mapping(like, branches, note, guessed=guessed, refolds=refolds)


def _is_index(item: str) -> bool:
    return item.isdecimal() and len(item) <= _DIGITS_MAX


def _is_integer(item: object) -> bool:
    return isinstance(item, str) and _is_index(item.removeprefix("-")) and str(int(item)) == item


def _rebuild_list(like: Any, branches: Mapping[int, Mapping[Path, Any]], *, guessed: bool, refolds: bool) -> list[Any]:
    present = like if isinstance(like, list) else []
    least, most = min(branches), max(branches)
    if least < 0 or most >= len(present) + len(branches) + ABSENT_MAX:  # no list is made by what a name claims
        odd = least if least < 0 else most
        raise ImplausibleList(f"the names in it make a list with item {odd} of {len(branches)}")
    result: list[Any] = [None] * (most + 1)
    for index, branch in branches.items():
        there = present[index] if index < len(present) else None
        result[index] = rebuild(there, branch, guessed=guessed, refolds=refolds)
    for index, value in enumerate(present):
        if index not in branches and holds_nothing(value) and index <= len(result):
            result[index : index + 1] = [copy.copy(value)]
    return result


def _rebuild_mapping(
    like: Any, branches: Mapping[Any, Mapping[Path, Any]], note: Sequence[Any], *, guessed: bool, refolds: bool
) -> Any:
    present = like if isinstance(like, Mapping) else {}
    keys = {str(key): key for key in [*present, *note]}
    if note and not isinstance(note, Keys) and all(type(key) is int for key in note):
        # Of one rank, whose others have keys of their own.
        keys |= {item: int(item) for item in branches if item not in keys and _is_integer(item)}
    result = _empty_like(like)
    for key, value in present.items():
        if str(key) in branches:
            result[key] = rebuild(value, branches[str(key)], guessed=guessed, refolds=refolds)
        elif holds_nothing(value):
            result[key] = copy.copy(value)
    for item, branch in branches.items():
        key = keys.get(str(item), item)
        if key not in result:
            result[key] = rebuild(None, branch, guessed=guessed, refolds=refolds)
    return result


def _empty_like(like: Any) -> MutableMapping[Any, Any]:
    if not isinstance(like, MutableMapping) or type(like) is dict:
        return {}
    empty = copy.copy(like)
    empty.clear()
    return empty


def holds_nothing(value: Any) -> bool:
    """Return True if ``value`` is a container without leaves: stock stores nothing for it."""
    if isinstance(value, list):
        return is_entered(value) and all(map(holds_nothing, value))
    return isinstance(value, Mapping) and all(map(holds_nothing, value.values()))


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
        """Return the entries that stay the same objects as long as `number` is the same."""
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
    """Return True for what is remembered: a subclass may get other inner tensors any time, and so may a part."""
    return isinstance(value, torch.Tensor) and not unfolds(value) and not is_sharded(value)


def is_remembered(value: object) -> bool:
    """Return True if the container's type yields the same items until it is modified."""
    return type(value) in (dict, OrderedDict, list)
