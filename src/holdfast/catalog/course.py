"""Which checkpoints come from which, over any number of roots: pure functions of what manifests say. Torch-free.

A run goes on from a checkpoint, saves others, ends, and is gone on from again; or goes back. What it publishes from one
restore to the next is a *stretch* and has an id that no other stretch has. Each manifest names its parent, which is the
attempt of the checkpoint saved before it or restored, and its *course*: its own stretch, and those it comes from.

    course of 250:  [["a", 200, 400], "b"]     it goes on from step 200 of stretch a, of which 400 was there already

So of two checkpoints it can be told whether one comes from the other, whatever lies between or has been deleted;
whether one was *left behind* by the run of the other, when that went back; or whether they have *diverged*: two runs
went on from one checkpoint. The order within a root is that of ``retention``.

Guarantees: nothing that a run hasn't seen when it went back counts as left behind by it.
Assumes: checkpoints of a local root are all of one run, since it is locked. Of checkpoints that Holdfast before this
has made, and of others, neither can be told; they are stretches of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PARENT: Final = "parent"
"""Key of `Manifest.extra`: id of the attempt that this one goes on from; absent if from none."""
_KEY: Final = "course"
STRETCHES_MAX: Final = 1000
"""How many stretches before its own a manifest names; the oldest are forgotten."""
_NEVER: Final = -1


class Stretch(NamedTuple):
    """A stretch before a run's own: it goes on from step ``at`` of that, and has left those up to ``seen`` behind."""

    id: str
    at: int
    seen: int


@dataclass(frozen=True, slots=True)
class Course:
    """Where a checkpoint comes from. ``told``: False if its manifest doesn't say."""

    own: str = ""
    before: tuple[Stretch, ...] = ()
    told: bool = False

    def encode(self) -> dict[str, Any]:
        """Encode as a member of `Manifest.extra`."""
        return {_KEY: [*map(list, self.before), self.own]}

    def holds(self, other: Course, step: int) -> bool:
        """Return True if the checkpoint of ``step`` and that course is of this stretch, or what it comes from."""
        return self.own == other.own or any(found.id == other.own and step <= found.at for found in self.before)

    def left(self, other: Course, step: int) -> bool:
        """Return True if the checkpoint of ``step`` and that course was left behind on this one."""
        return any(found.id == other.own and found.at < step <= found.seen for found in self.before)


class OnCourse(Protocol):
    """A checkpoint with its course."""

    @property
    def step(self) -> int: ...
    @property
    def origin(self) -> str: ...
    @property
    def course(self) -> Course: ...


_P = TypeVar("_P", bound=OnCourse)


def decode_course(extra: Mapping[str, Any], origin: str) -> Course:
    """Decode the output of `Course.encode` in ``extra``; anything else is a stretch for itself, named ``origin``."""
    match extra.get(_KEY):
        case [*before, str(own)] if own and all(map(_is_stretch, before)):
            return Course(own, tuple(Stretch(*row) for row in before), told=True)
        case _:
            return Course(origin)


def _is_stretch(row: object) -> bool:
    match row:
        case [str(), int(), int()]:
            return True
        case _:
            return False


def has_left(one: OnCourse, other: OnCourse) -> bool:
    """Return True if the run of ``one`` has left ``other`` behind."""
    return one.course.left(other.course, other.step)


def has_diverged(one: OnCourse, other: OnCourse) -> bool:
    """Return True if both are known to be of different runs: neither comes from the other, or was left behind by it."""
    if not (one.course.told and other.course.told):
        return False
    return not any(
        first.course.holds(second.course, second.step) or has_left(first, second)
        for first, second in ((one, other), (other, one))
    )


def newest_told(rows: Sequence[_P]) -> _P | None:
    """Return the last of ``rows`` whose course is known."""
    return next((row for row in reversed(rows) if row.course.told), None)


def course_from(
    own: str, start: OnCourse | None, step: int, local: Sequence[OnCourse], elsewhere: Iterable[OnCourse]
) -> Course:
    """Return the course of a run that goes on from ``start`` (None: from nothing that is there) at ``step``.

    own: id of its stretch. local: what its root has, the newest last: all of it is of this run, or of what it was
    before it went back. elsewhere: what a mirror has, which may be of others.
    """
    tip = newest_told(local)
    seen: dict[str, int] = {}
    for row in [*local, *(row for row in elsewhere if tip is None or not has_diverged(row, tip))]:
        if row.course.own and (row.course.told or row.step > step):
            seen[row.course.own] = max(row.step, seen.get(row.course.own, row.step))
    before: dict[str, Stretch] = {}
    if start is not None and start.course.own:
        own_past = [*start.course.before, Stretch(start.course.own, start.step, start.step)]
        before = {row.id: row._replace(seen=max(row.seen, seen.get(row.id, row.seen))) for row in own_past}
    left = {found: Stretch(found, _NEVER, most) for found, most in seen.items() if found not in before}
    rows = [*left.values(), *before.values()]
    return Course(own, tuple(rows[max(0, len(rows) - STRETCHES_MAX) :]), told=True)
