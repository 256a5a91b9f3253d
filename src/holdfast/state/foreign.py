"""Where stock directories keep what this state calls something else.

Stock DCP writes whatever dictionary it is given, so the same model and optimizer come under several names:

    model.layers.0.weight               layers.0.weight                       torchtitan: the model without a key
    optimizer.state.<fqn>.exp_avg       state.<fqn>.exp_avg                   an optimizer directory without a key
                                        optimizer.state.7.exp_avg             a plain ``optimizer.state_dict()``
    optimizer.param_groups.0.lr         optimizer.param_groups.<fqn>.lr       ``flatten_optimizer_state_dict=True``

A layout is recognized for a whole part, never for single names, and only where the part's own names are all absent:
a checkpoint of Holdfast's is never taken for something else. Directories split into ``model/`` and ``optimizer/``
(older XTuner) are merged by the caller, which prefixes names where they carry no key.

Pure functions over names; no torch, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from holdfast.plan.structure import PathItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Path = tuple[PathItem, ...]


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


def model_prefix(key: str, fqns: Sequence[str], stored: StoredNames) -> str:
    """What stands before a module's own names in the checkpoint: ``key + "."``, or nothing where it was saved bare."""
    prefixed = f"{key}."
    if any(prefixed + fqn in stored for fqn in fqns) or not any(fqn in stored for fqn in fqns):
        return prefixed
    return ""


class OptimizerNames(msgspec.Struct, frozen=True):
    """How an optimizer's values are named in a checkpoint."""

    state: str
    """Prefix of its state, with the dot."""
    groups: str
    """Prefix of its groups, with the dot."""
    label_of: Mapping[str, str]
    """fqn → what stands for the parameter after ``state``."""
    by_parameter: bool
    """Options are noted under each parameter, not under a group's number."""


def optimizer_names(key: str, fqns: Sequence[str], stored: StoredNames) -> OptimizerNames:
    """The layout in which the checkpoint has the optimizer at ``key``, whose parameters are ``fqns`` in order."""
    prefix = f"{key}."
    if not any(stored.any_below(prefix + part) for part in ("state", "param_groups")) and any(
        stored.any_below(part) for part in ("state", "param_groups")
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
