"""Plan how a checkpoint fills a state: which stored tensor goes where, and what remains to be set after.

Everything is decided before a byte is read, so that a mismatch is an error before anything has been changed. Tensors
are then filled in place by the reader; `Loading.finish` sets the rest: options, plain values, the states of stateful
objects, random number generators last, since the others may draw from them.

Missing and unexpected names are found per rank. With pipeline stages a name that one rank doesn't know belongs to
another: a name is unexpected only if it is so on *every* rank, missing or mismatched if it is on *any*.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
from torch import nn

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, StateMismatch, listed
from holdfast.format.structure import PER_RANK, name_on_rank, rank_label
from holdfast.state.entries import Path, WholePlace, joined, memory_of, shares_memory, torch_dtype
from holdfast.state.flatten import KEYS_NOTE, Keys, flatten_exactly, rebuild
from holdfast.state.shards import LocalPart, clipped, is_sharded, parts_of, shape_of
from holdfast.state.subclasses import rows_of, unfolds

if TYPE_CHECKING:
    from collections.abc import Iterator


# Map this state's names to other names that stock directories may use for them:
#
#     model.layers.0.weight               layers.0.weight                       torchtitan: the model without a key
#     optimizer.state.<fqn>.exp_avg       state.<fqn>.exp_avg                   an optimizer directory without a key
#                                         optimizer.state.7.exp_avg             a plain ``optimizer.state_dict()``
#     optimizer.param_groups.0.lr         optimizer.param_groups.<fqn>.lr       ``flatten_optimizer_state_dict=True``
#
# A layout is recognized for a whole part only, and only if none of the part's own names is stored, so a checkpoint of
# Holdfast's is never mistaken. Directories split into ``model/`` and ``optimizer/`` (older XTuner) are merged by the
# caller, which adds prefixes to names without a key.


class StoredNames:
    """The names of a checkpoint, searchable by prefix."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sorted = sorted(names)
        self._all = frozenset(self._sorted)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._sorted)

    def below(self, prefix: str) -> list[str]:
        """Names that are ``prefix`` itself or start with ``prefix.``; all names for an empty prefix."""
        if not prefix:
            return self._sorted
        start = f"{prefix}."
        first = bisect_left(self._sorted, start)
        found = [prefix] if prefix in self._all else []
        for at in range(first, len(self._sorted)):
            if not self._sorted[at].startswith(start):
                break
            found.append(self._sorted[at])
        return found

    def any_below(self, prefix: str) -> bool:
        start = f"{prefix}."
        at = bisect_left(self._sorted, start)
        return at < len(self._sorted) and self._sorted[at].startswith(start)


_SCALES_BEHIND = ("_scale", "_scale_inv", "_scales", "_scale_2", "_absmax", "_zero_point")
_SCALES_BESIDE = ("scale", "scales", "scale_inv", "SCB", "absmax", "weight_scale", "weight_scale_inv", "weight_scales")


def scales_beside(name: str, stored: StoredNames) -> list[str]:
    """Stored names that hold the scales of ``name``, by how quantizing tools name them; none where it has none."""
    above, dot, _ = name.rpartition(".")
    candidates = [name + behind for behind in _SCALES_BEHIND] + [above + dot + beside for beside in _SCALES_BESIDE]
    found = [candidate for candidate in candidates if candidate in stored and candidate != name]
    return list(dict.fromkeys([*found, *(below for below in stored.below(name) if below != name)]))


def model_prefix(key: str, fqns: Sequence[str], stored: StoredNames) -> str:
    """Return the prefix of a module's names in the checkpoint: ``key + "."``, or "" if the module was saved alone."""
    prefixed = f"{key}."
    if any(prefixed + fqn in stored for fqn in fqns) or not any(fqn in stored for fqn in fqns):
        return prefixed
    return ""


class OptimizerNames(msgspec.Struct, frozen=True):
    """Names of an optimizer's values in a checkpoint."""

    state: str
    """Prefix of its state, with the dot."""
    groups: str
    """Prefix of its groups, with the dot."""
    label_of: Mapping[str, str]
    """fqn → what stands for the parameter after ``state``."""
    by_parameter: bool
    """Options are noted under each parameter, not under a group's number."""


def optimizer_names(key: str, fqns: Sequence[str], stored: StoredNames, *, bare: bool = True) -> OptimizerNames:
    """The layout in which the checkpoint has the optimizer at ``key``, whose parameters are ``fqns`` in order.

    bare: it may have been saved without a key.
    """
    prefix = f"{key}."
    if (
        bare
        and not any(stored.any_below(prefix + part) for part in ("state", "param_groups"))
        and any(stored.any_below(part) for part in ("state", "param_groups"))
    ):
        prefix = ""
    state, groups = f"{prefix}state.", f"{prefix}param_groups."
    labels = {fqn: fqn for fqn in fqns}
    if not any(stored.any_below(state + fqn) for fqn in fqns):
        numbered = {fqn: str(index) for index, fqn in enumerate(fqns)}
        if any(stored.any_below(state + number) for number in numbered.values()):
            labels = numbered
    # Only numbered groups list their members; "param_groups.0.weight.lr" alone may be parameter 0.weight's.
    by_parameter = f"{groups}0.params" not in stored and any(stored.any_below(groups + fqn) for fqn in fqns)
    return OptimizerNames(state, groups, labels, by_parameter)


def relative_path(path: Path | None, below: str) -> Path:
    """The last items of a stored ``path`` that spell ``below``; where the writer noted none, ``below`` cut at dots."""
    if path is not None:
        for length in range(1, len(path) + 1):
            tail = path[-length:]
            if ".".join(map(str, tail)) == below:
                return tail
    return tuple(below.split(".")) if below else ()


_LABEL: Final = re.compile(r"(?:^|\.)rank-(\d{5,})(?=\.|$)")
NOTES, VALUES, STATEFULS, GENERATORS = range(4)
"""The order of `Loading.finish`: schedulers after the optimizers they steer, random number generators after all."""

Objects = Mapping[str, Any]
Step = Callable[[Objects], None]
Wanted = Callable[[Objects], Any]
"""Returns a stored value once it has been read."""


class StoredInfo(msgspec.Struct, frozen=True):
    """Global shape, and dtype by name, of one stored tensor."""

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


@dataclass(frozen=True, slots=True)
class Selection:
    """Names to load: those at or below one of ``include`` (None: all), without those at or below one of ``exclude``."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return True if the value ``name`` is to be loaded."""
        included = self.include is None or any(_is_at_or_below(name, prefix) for prefix in self.include)
        return included and not any(_is_at_or_below(name, prefix) for prefix in self.exclude)

    def takes_none_of(self, name: str) -> bool:
        """Return True if nothing at or below ``name`` is to be loaded."""
        touched = self.include is None or any(_overlap(name, prefix) for prefix in self.include)
        return not touched or any(_is_at_or_below(name, prefix) for prefix in self.exclude)

    def takes_a_part_of(self, name: str) -> bool:
        """Return True if some of what is below ``name`` may be loaded, and some not."""
        if self.takes_none_of(name):
            return False
        return not self.takes(name) or any(_is_at_or_below(prefix, name) for prefix in self.exclude)

    def unknown(self, names: StoredNames, known: Collection[str]) -> list[str]:
        """Return the prefixes that are neither of stored ``names`` nor of ``known``, those of the state."""
        return [
            prefix
            for prefix in (*(self.include or ()), *self.exclude)
            if prefix not in names
            and not names.any_below(prefix)
            and not any(_is_at_or_below(name, prefix) for name in known)
        ]


def _is_at_or_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _overlap(one: str, other: str) -> bool:
    return _is_at_or_below(one, other) or _is_at_or_below(other, one)


class TensorDestination(msgspec.Struct, frozen=True, eq=False):
    """Stored tensor ``name`` is to be copied into ``tensor``: same global shape, maybe another dtype or placement."""

    name: str
    tensor: torch.Tensor
    place: WholePlace | None = None
    """``tensor`` is the part of it that lies there."""


class Twins(msgspec.Struct, frozen=True, eq=False):
    """Stored tensors ``name`` and ``other`` are both to be ``tensor``, by which the state has two names."""

    name: str
    other: str
    tensor: torch.Tensor

    def differ(self, where: str) -> StateMismatch:
        """The error where they do in ``where``."""
        names = (self.name, self.other)
        return StateMismatch(
            f"{where} has different values under {self.name} and {self.other}, which are one "
            "tensor in the state (tied weights): only one could be loaded. Load into a state "
            "where they are not tied, or save them tied",
            mismatched=tuple(sorted(names)),
        )


@dataclass(frozen=True, slots=True)
class Loading:
    """One rank's plan. ``tensors`` first, then `finish` with the value of every name in ``objects``."""

    tensors: tuple[TensorDestination, ...]
    objects: tuple[str, ...]
    missing: tuple[str, ...]
    """Wanted and not stored."""
    unexpected: tuple[str, ...]
    """Stored under a top-level key of the state, or among the names of a flat one, and wanted by nobody on this rank.

    Of a source that was fitted to the state: anything that nobody wants.
    """
    mismatched: tuple[str, ...]
    details: Mapping[str, str]
    """Reason for each mismatched name."""
    hints: tuple[str, ...]
    """Sentences on what may be the reason for all that."""
    twins: tuple[Twins, ...]
    """Stored tensors for which the state has one and the same: only the first is among ``tensors``."""
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
        quantized: Mapping[str, str] | None = None,
        strict: bool = True,
        selection: Selection | None = None,
        stored_keys: Mapping[Path, Sequence[Any]] | None = None,
    ) -> None:
        self.strict = strict
        self._stored_keys = stored_keys or {}
        self.selection = selection or Selection()
        self._met: set[str] = set()
        """The state's own names that `takes` was asked about."""
        self.fitted = fitted
        self._quantized = quantized or {}
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
        self._spaces: set[str] = set()
        self._excused: set[str] = set()
        self._widened: list[tuple[TensorDestination, str]] = []
        self._first: dict[Hashable, str] = {}
        self._twins: list[Twins] = []
        self._hints: dict[str, None] = {}

    # words for parts -----------------------------------------------------------------------------------------

    def know_key(self, top: str) -> None:
        self._keys.add(top)

    def know_flat(self, names: Iterable[str]) -> None:
        """Names that stand at the top of the checkpoint: others that begin with the same item belong with them."""
        self._spaces.update(name.partition(".")[0] for name in names if "." in name)

    def excuse(self, top: str) -> None:
        """Ignore names under this top-level key: they are neither wanted nor unexpected."""
        self._excused.add(top)

    def takes(self, shown: str) -> bool:
        """Return True if the value of this name in the state is to be loaded."""
        self._met.add(shown)
        return self.selection.takes(shown)

    def check_selection(self, keys: Sequence[str]) -> None:
        """Raise `ConfigError` for prefixes that select nothing, once all parts are planned. keys: of the state."""
        unknown = self.selection.unknown(self.names, [*keys, *self._met])
        if unknown:
            raise ConfigError(
                f"include, exclude: {', '.join(map(repr, unknown))} is neither in the state nor in the checkpoint; "
                f"give top-level keys ({', '.join(keys)}) or dotted prefixes of names",
                field="include",
            )

    def use(self, names: Iterable[str]) -> None:
        """Mark these names as used, so that they aren't unexpected."""
        self._used.update(names)

    def missing(self, name: str) -> None:
        self._missing.append(name)

    def mismatch(self, name: str, detail: str) -> None:
        self._details[name] = detail

    def then(self, step: Step, *, order: int = VALUES) -> None:
        self._steps.append((order, step))

    def fill(self, stored: str, tensor: Any, shown: str | None = None) -> bool:
        """Want ``stored`` in ``tensor``, in place; ``shown`` is the state's own name for it. True if it will be.

        One that is not selected keeps its value, and counts as filled.
        """
        if not self.takes(shown or stored):
            self._used.add(stored)
            return True
        if unfolds(tensor):
            shown = shown or stored
            rows = rows_of(tensor, shown)
            filled = [self.fill(f"{stored}.{below}", inner, f"{shown}.{below}") for below, inner in rows]
            return all(filled)
        if stored in self.tensors:
            self._used.add(stored)
            shape = tuple(self.tensors[stored].shape)
            here = shape_of(tensor)
            parts = parts_of(tensor, shown or stored) if is_sharded(tensor) else []
            if shape != here and parts and all(part.may_differ for part in parts):
                parts = [part for whole in parts if (part := clipped(whole, shape)) is not None]
                here = shape if parts else here
            if shape != here:
                self.mismatch(shown or stored, f"stored as {list(shape)}, the state has {list(here)}")
                return False
            if is_sharded(tensor):
                return self._fill_parts(stored, parts, shown or stored)
            if shares_memory(tensor):
                self.mismatch(shown or stored, "its elements share memory here (expand() does that): clone() it")
                return False
            first = self._first.setdefault(memory_of(tensor), stored)
            if first != stored:
                self._twins.append(Twins(first, stored, tensor))
                return True
            self._destinations.append(TensorDestination(stored, tensor))
            if _is_widened(self.tensors[stored].dtype, tensor.dtype):
                self._widened.append((self._destinations[-1], shown or stored))
            return True
        if stored in self.objects and not is_sharded(tensor) and tensor.numel() == 1:
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

    def _fill_parts(self, stored: str, parts: Sequence[LocalPart], shown: str) -> bool:
        for tensor, place, _ in parts:
            if shares_memory(tensor):
                self.mismatch(shown, "its elements share memory here (expand() does that): clone() it")
                return False
            self._destinations.append(TensorDestination(stored, tensor, place))
            if _is_widened(self.tensors[stored].dtype, tensor.dtype):
                self._widened.append((self._destinations[-1], shown))
        return True

    def value(self, stored: str, like: Any = None) -> Wanted:
        """Want ``stored``, tensor or object, as a value of its own; ``like`` is what the state has in its place.

        A tensor goes into ``like`` where that is a tensor of its shape and dtype, else into new host memory.
        """
        self._used.add(stored)
        if stored in self.objects:
            self._wanted[stored] = None
            return lambda objects: objects[stored]
        info = self.tensors[stored]
        if is_sharded(like):
            self.fill(stored, like)
            return lambda _: like
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

    def item_below(self, stored: str, prefix: str) -> str | None:
        """The item of a stored path after ``prefix``, dots included; None where the writer noted no paths."""
        path = self._paths.get(stored)
        for length in range(len(path or ())):
            if path is not None and joined(path[:length]) == prefix:
                return str(path[length])
        return None

    def hint(self, text: str) -> None:
        """Say what may be the reason, should something not fit."""
        self._hints[text] = None

    def relative(self, stored: str, prefix: str) -> Path:
        """The path of a stored name below ``prefix`` (which ends without a dot)."""
        return relative_path(self._paths.get(stored), stored[len(prefix) + 1 :])

    def subtree(self, prefix: str, like: Any, *, in_place: bool = True) -> Wanted | None:
        """Want everything stored at or below ``prefix`` as one nested value; None if there is nothing.

        ``like`` is the state's present value: its containers say what kinds and keys the stored ones had, and with
        ``in_place`` its tensors are filled where they fit.
        """
        stored = self.names.below(prefix)
        return self.gather(prefix, stored, like, in_place=in_place) if stored else None

    def gather(self, prefix: str, stored: Iterable[str], like: Any, *, in_place: bool) -> Wanted:
        """`subtree` of these names only. Tensors not filled in place go where ``like`` has such, into new memory."""
        present: dict[Path, Any] = {}
        flatten_exactly((), like, present.__setitem__)
        by_text = {joined(path): value for path, value in present.items()}
        wanted = {}
        for name in stored:
            path = self.relative(name, prefix) if name != prefix else ()
            present_leaf = by_text.get(joined(path))
            if isinstance(present_leaf, torch.Tensor) and not in_place and not is_sharded(present_leaf):
                present_leaf = torch.empty_like(present_leaf, requires_grad=False)
            wanted[path] = self.value(name, present_leaf)
        noted = self._keys_below(prefix) if isinstance(like, Mapping) and not like else {}
        return lambda objects: rebuild(
            like, {**noted, **{path: value(objects) for path, value in wanted.items()}}, guessed=not self._paths
        )

    def _keys_below(self, prefix: str) -> dict[Path, Keys]:
        """Keys of the stored mappings at or below ``prefix``, by their paths relative to it."""
        found = {path: joined(path) for path in self._stored_keys}
        return {
            relative_path(path, name[len(prefix) + 1 :]) if name != prefix else (): Keys(self._stored_keys[path])
            for path, name in found.items()
            if name == prefix or name.startswith(f"{prefix}.")
        }

    def has_below(self, path: Path, below: Path) -> bool:
        """Return True if anything under ``path`` is stored at or below ``below``."""
        home = self.home_of(path)
        return home is not None and bool(self.names.below(joined((home[0], *below))))

    # values that are each rank's own -------------------------------------------------------------------------

    def home_of(self, path: Path) -> tuple[str, list[str]] | None:
        """Find where the value at ``path`` is stored: its name, and all ranks' names if no stored rank is this rank.

        Returns (name, []) for a plain name, for this rank's own, and if stock DCP stored one value for all ranks; None
        if nothing is stored.
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
        self._refuse_quantized()
        return Loading(
            tensors=tuple(self._destinations),
            objects=tuple(self._wanted),
            missing=tuple(sorted(self._missing)),
            unexpected=tuple(name for name in self.names if name not in self._used and self._is_ours(name)),
            mismatched=tuple(sorted(self._details)),
            details=dict(self._details),
            twins=tuple(self._twins),
            hints=tuple(self._hints),
            _steps=tuple(self._steps),
        )

    def _is_ours(self, name: str) -> bool:
        """Return True if an unused stored name is unexpected; other names are ignored, as usual for partial loads."""
        path = self._paths.get(name)
        first = name.partition(".")[0]
        top = str(path[0]) if path else first
        below = [name[:at] for at, letter in enumerate(name) if letter == "."]
        if name.endswith(f".{KEYS_NOTE}") or not self.selection.takes(name):
            return False
        if {top, name, *below} & self._excused or (top == "rng" and _LABEL.search(name)):
            return False
        is_flat = path is None or len(path) == 1
        in_space = first in self._spaces and (is_flat or top == first)
        return self.fitted or in_space or not self._keys.isdisjoint({top, *below})

    def _refuse_quantized(self) -> None:
        """Refuse to load 8-bit values whose scales are stored beside them and not wanted."""
        for destination, shown in self._widened:
            stored = destination.name
            scales = [scale for scale in scales_beside(stored, self.names) if scale not in self._used]
            said = f"with scales ({listed(scales)})" if scales else self._quantized.get(stored)
            if said:
                self._destinations = [item for item in self._destinations if item is not destination]
                here = str(destination.tensor.dtype).removeprefix("torch.")
                self.mismatch(
                    shown,
                    f"stored quantized, as {self.tensors[stored].dtype} {said}, which a load doesn't apply; the state "
                    f"has {here}: dequantize it first",
                )


def _is_widened(stored: str, kept: torch.dtype) -> bool:
    """Return True if a load would convert values of at most 8 bits to a wider floating-point dtype."""
    return ITEMSIZE.get(stored) == 1 and stored != "bool" and kept.is_floating_point and kept.itemsize > 1


def fill_number(name: str, tensor: torch.Tensor, value: Any) -> None:
    """Store a plain number in a tensor of one element; `StateMismatch` for anything else."""
    if not isinstance(value, (bool, int, float, complex)):
        raise mismatch_error(name, mismatched=[name], details={name: f"a {type(value).__name__}, not a number"})
    with torch.no_grad():
        tensor.fill_(value)
