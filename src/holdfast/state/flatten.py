"""Nested values ↔ named leaves, by the rules stock DCP names things with (torch 2.13, ``checkpoint/_traverse.py``).

Any mapping is entered, its keys made strings; a list is entered only if it holds a tensor, a mapping, or a list that
is entered; everything else, tuples included, is one leaf. Names are path items joined by dots.

Stock forgets two things, which an object that gets its own state back must not lose: mappings that are empty, and
keys that aren't strings. `flatten_exactly` notes them as extra plain objects (``{}`` under the mapping's own name, and
the original keys under ``<name>.__keys__``), which `rebuild` takes in and stock readers, asking by name, never see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import torch

from holdfast.errors import ConfigError
from holdfast.plan.structure import PER_RANK
from holdfast.state.entries import Path, joined

KEYS_NOTE: Final = "__keys__"
MAX_DEPTH: Final = 64
ABSENT_MAX: Final = 4096
"""Most items of a stored list that may be neither stored nor in the present one: stock keeps nothing of empty ones."""
_DIGITS_MAX: Final = 18

Leaf = Callable[[Path, Any], None]
IsLive = Callable[[Any], bool]


class ImplausibleList(ValueError):
    """Stored names tell of a list that can't be."""


def _never(_: Any) -> bool:
    return False


def is_entered(value: Any, is_live: IsLive = _never) -> bool:
    """Whether traversal goes into the list ``value``; ``is_live`` names further items that make it (modules, say)."""
    return any(
        isinstance(item, (torch.Tensor, Mapping))
        or is_live(item)
        or (isinstance(item, list) and is_entered(item, is_live))
        for item in value
    )


def item_path(path: Path, key: object) -> Path:
    """``path`` extended by a mapping's key; refuses what would be taken for the per-rank marker."""
    text = str(key)
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
    else:
        leaf(path, value)


def flatten_exactly(path: Path, value: Any, leaf: Leaf) -> None:
    """`flatten`, and the notes `rebuild` needs to give the very same mapping back."""
    if isinstance(value, Mapping):
        check_depth(path)
        if not value:
            leaf(path, {})
        elif any(type(key) is not str for key in value):
            leaf((*path, KEYS_NOTE), list(value))
        for key, item in value.items():
            flatten_exactly(item_path(path, key), item, leaf)
    elif isinstance(value, list) and is_entered(value):
        check_depth(path)
        for index, item in enumerate(value):
            flatten_exactly((*path, index), item, leaf)
    else:
        leaf(path, value)


def rebuild(like: Any, leaves: Mapping[Path, Any], *, guessed: bool = False) -> Any:
    """The nested value whose leaves are ``leaves``, by paths relative to it.

    ``like`` is a present value of the same kind, or None: where the paths leave it open, it says what a container is
    (a `Counter`, a list) and what its keys were before they became strings. Its own leaves are not taken over, only
    containers of it that hold none. With ``guessed`` paths, names cut at dots, it also says what is a list.
    Raises `ImplausibleList`.
    """
    if () in leaves and len(leaves) == 1:
        bare = leaves[()]
        # Noted as empty, it is empty: of what is there now only the kind of mapping stays.
        return _empty_like(like) if isinstance(bare, dict) and not bare and isinstance(like, Mapping) else bare
    branches: dict[Any, dict[Path, Any]] = {}
    note: list[Any] = []
    for path, value in leaves.items():
        if path == (KEYS_NOTE,):
            note = list(value)
        elif path:
            branches.setdefault(path[0], {})[path[1:]] = value
    maybe_list = guessed and isinstance(like, list)
    if branches and all(type(item) is int or (maybe_list and _is_index(item)) for item in branches):
        return _rebuild_list(like, {int(item): branch for item, branch in branches.items()}, guessed=guessed)
    return _rebuild_mapping(like, branches, note, guessed=guessed)


def _is_index(item: str) -> bool:
    return item.isdecimal() and len(item) <= _DIGITS_MAX


def _rebuild_list(like: Any, branches: Mapping[int, Mapping[Path, Any]], *, guessed: bool) -> list[Any]:
    present = like if isinstance(like, list) else []
    least, most = min(branches), max(branches)
    if least < 0 or most >= len(present) + len(branches) + ABSENT_MAX:  # no list is made by what a name claims
        odd = least if least < 0 else most
        raise ImplausibleList(f"the names in it make a list with item {odd} of {len(branches)}")
    result: list[Any] = [None] * (most + 1)
    for index, branch in branches.items():
        result[index] = rebuild(present[index] if index < len(present) else None, branch, guessed=guessed)
    for index, value in enumerate(present):
        if index not in branches and holds_nothing(value) and index <= len(result):
            result[index : index + 1] = [copy.copy(value)]
    return result


def _rebuild_mapping(like: Any, branches: Mapping[Any, Mapping[Path, Any]], note: list[Any], *, guessed: bool) -> Any:
    present = like if isinstance(like, Mapping) else {}
    keys = {str(key): key for key in [*present, *note]}
    result = _empty_like(like)
    for key, value in present.items():
        if str(key) in branches:
            result[key] = rebuild(value, branches[str(key)], guessed=guessed)
        elif holds_nothing(value):
            result[key] = copy.copy(value)
    for item, branch in branches.items():
        key = keys.get(str(item), item)
        if key not in result:
            result[key] = rebuild(None, branch, guessed=guessed)
    return result


def _empty_like(like: Any) -> MutableMapping[Any, Any]:
    if not isinstance(like, MutableMapping) or type(like) is dict:
        return {}
    empty = copy.copy(like)
    empty.clear()
    return empty


def holds_nothing(value: Any) -> bool:
    """Whether ``value`` is a container that is entered and has no leaf: stock stores nothing of it."""
    if isinstance(value, list):
        return is_entered(value) and all(map(holds_nothing, value))
    return isinstance(value, Mapping) and all(map(holds_nothing, value.values()))
