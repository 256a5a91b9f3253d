"""The plan for filling a state from a checkpoint: which stored tensor goes where, and what remains to be set after.

Everything is decided before a byte is read, so that a mismatch is an error before anything has been changed. Tensors
are then filled in place by the reader; `Loading.finish` puts in the rest: options, plain values, the states of
stateful objects, random number generators last, since what comes before may draw from them.

What is missing and what is unexpected is said of one rank. With pipeline stages a name that one rank doesn't know
belongs to another: a name is unexpected only if it is so on *every* rank, missing or mismatched if it is on *any*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import nn

from holdfast.errors import StateMismatch
from holdfast.plan.structure import PER_RANK, name_on_rank, rank_label
from holdfast.state.entries import Path, joined, shares_memory, torch_dtype
from holdfast.state.flatten import flatten_exactly, rebuild
from holdfast.state.foreign import StoredNames, relative_path

_LABEL: Final = re.compile(r"(?:^|\.)rank-(\d{5,})(?=\.|$)")
VALUES, STATEFULS, GENERATORS = range(3)
"""The order of `Loading.finish`: schedulers after the optimizers they steer, random number generators after all."""

Objects = Mapping[str, Any]
Step = Callable[[Objects], None]
Wanted = Callable[[Objects], Any]
"""Gives a stored value once it has been read."""


class StoredInfo(msgspec.Struct, frozen=True):
    """What a checkpoint says of one tensor: global shape, and dtype by name."""

    shape: tuple[int, ...]
    dtype: str


class TensorHolder(NamedTuple):
    """Tensors of the state that are under one key, each as (name below the key, tensor, whether it must be stored)."""

    key: str
    """Without a dot behind; empty for tensors that stand at the top of the state."""
    modules: tuple[nn.Module, ...]
    """Whose these are; none for those of plain containers."""
    tensors: list[tuple[str, torch.Tensor, bool]]
    extra_states: list[str]


class TensorDestination(msgspec.Struct, frozen=True, eq=False):
    """Stored tensor ``name`` is to be copied into ``tensor``: same global shape, maybe another dtype or placement."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Loading:
    """One rank's plan. ``tensors`` first, then `finish` with the value of every name in ``objects``."""

    tensors: tuple[TensorDestination, ...]
    objects: tuple[str, ...]
    missing: tuple[str, ...]
    """Wanted and not stored."""
    unexpected: tuple[str, ...]
    """Stored under a top-level key of the state, and wanted by nobody on this rank."""
    mismatched: tuple[str, ...]
    details: Mapping[str, str]
    """What is wrong with each mismatched name."""
    _steps: tuple[tuple[int, Step], ...]

    def finish(self, objects: Objects) -> None:
        """Set everything that isn't a tensor to be filled in place; call once, after all tensors have been filled.

        Raises what a ``load_state_dict`` of the user's raises, and `StateMismatch` for a value of the wrong kind.
        """
        for _, step in sorted(self._steps, key=lambda step: step[0]):
            step(objects)


def mismatch_error(
    where: str,
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    mismatched: Sequence[str] = (),
    details: Mapping[str, str] | None = None,
    hint: str = "",
) -> StateMismatch:
    """A `StateMismatch` that shows the first few names of each kind; ``where`` names the checkpoint.

    ``hint``: sentences on what may be the reason, if anything is known.
    """
    parts = []
    for title, names in (("missing in it", missing), ("in it but not in the state", unexpected)):
        if names:
            parts.append(f"{len(names)} {title}: {_some(names)}")
    if mismatched:
        told = [f"{name} ({details[name]})" if details and name in details else name for name in mismatched]
        parts.append(f"{len(mismatched)} that don't fit: {_some(told)}")
    advice = "Fix the state, exclude top-level keys from loading, or pass strict=False to load what fits"
    return StateMismatch(
        f"{where} doesn't fit the state: {'; '.join(parts)}. {hint}{' ' if hint else ''}{advice}",
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


class LoadBuilder:
    """Gathers the plan part by part."""

    def __init__(
        self,
        stored_tensors: Mapping[str, StoredInfo],
        stored_objects: Collection[str],
        stored_paths: Mapping[str, Path],
        *,
        rank: int,
        world: int,
        stored_world: int | None,
        fitted: bool = False,
        optional: Collection[str] = (),
    ) -> None:
        self.fitted = fitted
        self.optional = frozenset(optional)
        self.tensors = stored_tensors
        self.objects = frozenset(stored_objects)
        self.names = StoredNames([*stored_tensors, *self.objects])
        self.rank = rank
        self.world = world
        self._paths = stored_paths
        self._stored_world = stored_world
        self._destinations: list[TensorDestination] = []
        self._wanted: dict[str, None] = {}
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._details: dict[str, str] = {}
        self._steps: list[tuple[int, Step]] = []
        self._keys: set[str] = set()
        self._excused: set[str] = set()

    # words for parts -----------------------------------------------------------------------------------------

    def know_key(self, top: str) -> None:
        self._keys.add(top)

    def excuse(self, top: str) -> None:
        """Nothing under this top-level key is wanted or unexpected."""
        self._excused.add(top)

    def use(self, names: Iterable[str]) -> None:
        """These names aren't unexpected."""
        self._used.update(names)

    def missing(self, name: str) -> None:
        self._missing.append(name)

    def mismatch(self, name: str, detail: str) -> None:
        self._details[name] = detail

    def then(self, step: Step, *, order: int = VALUES) -> None:
        self._steps.append((order, step))

    def fill(self, stored: str, tensor: torch.Tensor, shown: str | None = None) -> bool:
        """Want ``stored`` in ``tensor``, in place; ``shown`` is the state's own name for it. True if it will be."""
        if stored in self.tensors:
            self._used.add(stored)
            shape = tuple(self.tensors[stored].shape)
            if shape != tuple(tensor.shape):
                self.mismatch(shown or stored, f"stored as {list(shape)}, the state has {list(tensor.shape)}")
                return False
            if shares_memory(tensor):
                self.mismatch(shown or stored, "its elements share memory here (expand() does that): clone() it")
                return False
            self._destinations.append(TensorDestination(stored, tensor))
            return True
        if stored in self.objects and tensor.numel() == 1:
            # torch turned plain step counts into tensors at some point: either may be stored.
            value = self.value(stored)
            self.then(lambda objects: fill_number(stored, tensor, value(objects)))
            return True
        self._used.add(stored)
        if stored in self.objects:
            self.mismatch(shown or stored, "stored as a plain value, the state has a tensor")
        else:
            self.missing(shown or stored)
        return False

    def value(self, stored: str, like: Any = None) -> Wanted:
        """Want ``stored``, tensor or object, as a value of its own; ``like`` is what the state has in its place.

        A tensor goes into ``like`` where that is a tensor of its shape and dtype, else into new host memory.
        """
        self._used.add(stored)
        if stored in self.objects:
            self._wanted[stored] = None
            return lambda objects: objects[stored]
        info = self.tensors[stored]
        dtype = torch_dtype(info.dtype)
        fits = isinstance(like, torch.Tensor) and tuple(like.shape) == tuple(info.shape) and like.dtype == dtype
        tensor = like if fits and not shares_memory(like) else torch.empty(info.shape, dtype=dtype)
        self._destinations.append(TensorDestination(stored, tensor))
        if isinstance(like, (bool, int, float)) and tensor.numel() == 1:
            return lambda _: tensor.item()
        return lambda _: tensor

    def new_tensor(self, stored: str, tensor: torch.Tensor) -> None:
        self._used.add(stored)
        self._destinations.append(TensorDestination(stored, tensor))

    def relative(self, stored: str, prefix: str) -> Path:
        """The path of a stored name below ``prefix`` (which ends without a dot)."""
        return relative_path(self._paths.get(stored), stored[len(prefix) + 1 :])

    def subtree(self, prefix: str, like: Any, *, in_place: bool = True) -> Wanted | None:
        """Want everything stored at or below ``prefix`` as one nested value; None if there is nothing.

        ``like`` is the state's present value: its containers say what kinds and keys the stored ones had, and with
        ``in_place`` its tensors are filled where they fit.
        """
        stored = self.names.below(prefix)
        if not stored:
            return None
        present: dict[Path, Any] = {}
        flatten_exactly((), like, present.__setitem__)
        by_text = {joined(path): value for path, value in present.items()}
        wanted = {}
        for name in stored:
            path = self.relative(name, prefix) if name != prefix else ()
            present_leaf = by_text.get(joined(path))
            keep = in_place or not isinstance(present_leaf, torch.Tensor)
            wanted[path] = self.value(name, present_leaf if keep else None)
        return lambda objects: rebuild(
            like, {path: value(objects) for path, value in wanted.items()}, guessed=not self._paths
        )

    # values that are each rank's own -------------------------------------------------------------------------

    def home_of(self, path: Path) -> tuple[str, list[str]] | None:
        """Where the value at ``path`` is stored: its name, and, if no stored rank's is this rank's, all ranks' names.

        Returns (name, []) for a plain name, for this rank's own, and where a foreign writer kept one value for all;
        None where nothing is stored.
        """
        if PER_RANK not in path:
            return joined(path), []
        at = path.index(PER_RANK)
        base = joined(path[:at])
        labels = sorted(
            {int(found[1]) for name in self.names.below(base) if (found := _LABEL.match(name[len(base) :]))}
        )
        if not labels:
            plain = joined((*path[:at], *path[at + 1 :]))
            return (plain, []) if self.names.below(plain) else None
        every = [name_on_rank(path, label) for label in labels]
        self.use(name for label in labels for name in self.names.below(f"{base}.{rank_label(label)}"))
        if self._saved_by() == self.world:
            own = name_on_rank(path, self.rank)
            return (own, []) if self.names.below(own) else None
        return base, every

    def _saved_by(self) -> int:
        if self._stored_world is None:
            found = (_LABEL.search(name) for name in self.names)
            self._stored_world = max((int(label[1]) + 1 for label in found if label), default=0)
        return self._stored_world

    def other_world(self, path: Path) -> None:
        """Note that a rank's own value at ``path`` has no successor on this world size."""
        self.mismatch(
            joined(path),
            f"each rank's own, saved by {self._saved_by()} ranks, and this is a run of {self.world}: give the object a "
            "reshard_state_dict(states, rank, world) method, or exclude the key from loading",
        )

    # the whole -----------------------------------------------------------------------------------------------

    def build(self) -> Loading:
        unexpected: list[str] = []
        for name in self.names:
            if name in self._used:
                continue
            top = str(path[0]) if (path := self._paths.get(name)) else name.split(".", 1)[0]
            excused = top in self._excused or any(name.startswith(f"{key}.") for key in self._excused)
            if excused or (top == "rng" and _LABEL.search(name)):
                continue
            known = top in self._keys or any(name.startswith(f"{key}.") for key in self._keys)
            if known:
                unexpected.append(name)  # what isn't: the usual thing when loading a part of a checkpoint
        return Loading(
            tensors=tuple(self._destinations),
            objects=tuple(self._wanted),
            missing=tuple(sorted(self._missing)),
            unexpected=tuple(unexpected),
            mismatched=tuple(sorted(self._details)),
            details=dict(self._details),
            _steps=tuple(self._steps),
        )


def fill_number(name: str, tensor: torch.Tensor, value: Any) -> None:
    """Put a plain number into a tensor of one element; `StateMismatch` for anything else."""
    if not isinstance(value, (bool, int, float, complex)):
        raise mismatch_error(name, mismatched=[name], details={name: f"a {type(value).__name__}, not a number"})
    with torch.no_grad():
        tensor.fill_(value)
