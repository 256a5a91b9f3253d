"""Which checkpoints of a root belong to the run as it stands, and which to a course it has given up. Torch-free, pure.

A run that goes back to an older step and saves again starts a *branch*: what lies above that step is abandoned. Each
checkpoint notes its branch in its manifest, with those it comes from and the step at which each was left; a root that
no run ever went back in has one branch, 0, of which nothing is noted.

    branch 0:  100  200  300  400          300 and 400 are abandoned from the moment 250 is published
    branch 1:         +- 250  350          oldest to newest: 300 400 | 100 200 250 350

Guarantees: the order depends on what is published only, so every reader sees the same; the newest is what the last run
has published, whatever the numbers of the steps it left behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_KEY: Final = "lineage"
"""Of `Manifest.extra`: the branches gone through, each [branch, step at which it was left], and then the own one."""
_BRANCH_LIMIT: Final = 1 << 62
"""No run goes back as often; and one more still fits into what ranks tell each other."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Lineage:
    """The branch of a checkpoint, and how it came to be."""

    branch: int = 0
    left: tuple[tuple[int, int], ...] = ()
    """(branch, step at which it was left), oldest first."""

    def holds(self, branch: int, step: int) -> bool:
        """Whether what ``branch`` published at ``step`` is part of this course."""
        return branch == self.branch or any(known == branch and step <= at for known, at in self.left)

    def encode(self) -> dict[str, Any]:
        """As members of `Manifest.extra`; none for a run that never went back."""
        return {_KEY: [*map(list, self.left), self.branch]} if self != Lineage() else {}


def decode_lineage(extra: Mapping[str, Any]) -> Lineage:
    """What `Lineage.encode` put into ``extra``; anything else is branch 0."""
    match extra.get(_KEY):
        case [*left, branch] if _is_branch(branch) and all(map(_is_left, left)):
            return Lineage(branch, tuple((known, at) for known, at in left))
        case _:
            return Lineage()


def _is_branch(value: object) -> bool:
    return type(value) is int and 0 <= value < _BRANCH_LIMIT


def _is_left(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and _is_branch(row[0]) and type(row[1]) is int and row[1] < 1 << 63


def in_order(rows: Iterable[_T], place: Callable[[_T], tuple[int, Lineage]]) -> list[_T]:
    """``rows`` from oldest to newest: first what was abandoned. place: the step of a row and its lineage."""
    found = [(*place(row), row) for row in rows]
    standing = max((lineage for _, lineage, _ in found), key=lambda lineage: lineage.branch, default=Lineage())
    found.sort(key=lambda item: (standing.holds(item[1].branch, item[0]), item[1].branch, item[0]))
    return [row for _, _, row in found]


def lineage_from(published: Collection[tuple[int, Lineage]], origin: int, in_flight: Collection[int] = ()) -> Lineage:
    """The lineage of what a run publishes that goes on from step ``origin``, given what is published or about to be.

    A branch of its own where anything newer than ``origin`` is there, else that of ``origin``.
    """
    newest = max((lineage for _, lineage in published), key=lambda lineage: lineage.branch, default=Lineage())
    at_origin = [lineage for step, lineage in published if step == origin]
    own = at_origin[0] if at_origin else newest
    newer = any(newest.holds(lineage.branch, step) and step > origin for step, lineage in published)
    if own.branch == newest.branch and not newer and all(step <= origin for step in in_flight):
        return own
    left = tuple((branch, min(at, origin)) for branch, at in own.left)
    return Lineage(newest.branch + 1, (*left, (own.branch, origin)))
