"""Two roots that hold one run: the local one, and a mirror with copies. Torch-free, reads only.

    outlook(keeper, remote)  what a run may resume from, best first: each checkpoint once, with the places of its copies
    missing(local, remote)   what the mirror lacks, and what it may not be given

A copy names the attempt that saved what it is a copy of (`origin_of`), and what that comes from (``course``): it is the
same checkpoint, one of the same run, or has *diverged*: another run went on from what this one comes from. Which run
this is, the newest local checkpoint tells. What an own run left behind when it went back, or replaced by a last save,
has not diverged: its successor may replace it.

Guarantees: pure functions of what was found; what has diverged is never a substitute, is resumed from only where its
step was asked for, is not replaced, and nothing is put beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from holdfast.catalog.catalog import Catalog, Found
from holdfast.catalog.course import has_diverged, has_left, newest_told
from holdfast.catalog.retention import CheckpointEntry, Keep, in_order, newest_of, select_deletions
from holdfast.errors import CheckpointNotFound
from holdfast.format.decoding import prepare_decoding

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.storage.protocol import Storage


class CopyAt(NamedTuple):
    """A copy of a checkpoint: as ``name`` in the local root, or in the mirror."""

    in_mirror: bool
    name: str


_Row: TypeAlias = "tuple[Found, tuple[CopyAt, ...]]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One checkpoint to resume from; ``places``: its copies, the nearest first."""

    step: int
    resumable: bool
    places: tuple[CopyAt, ...]
    origin: str = ""
    """Attempt that saved it, if that is known."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a run may resume from, best first; ``models``, ``exports``, ``unusable``: as of `Outlook`."""

    choices: list[Choice]
    models: list[int] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)
    """Steps that the mirror has of another run than the local root."""
    rivalry: str = ""
    """Why it can't be told what to go on from, if another run has saved what would be the newest."""


class Tier(Protocol):
    """The checkpoints of a mirror, as a run that resumes asks for them."""

    @property
    def storage(self) -> Storage: ...

    def found(self) -> list[Found]:
        """Return what is there, the newest last. Raises `StorageError` if the mirror can't be asked."""
        ...


class MirrorTier:
    """The checkpoints of a mirror that is only read."""

    def __init__(self, storage: Storage, name_template: str, keep: Keep | None = None) -> None:
        self._storage = storage
        self.keeper = Catalog(storage, name_template, keep)

    @property
    def storage(self) -> Storage:
        return self._storage

    def found(self) -> list[Found]:
        return self.keeper.found()


@dataclass(frozen=True, slots=True)
class _Union:
    """The checkpoints of both roots. ``rows``: those to resume from, the newest last, each with its places."""

    rows: list[_Row]
    others: list[Found]
    """What the mirror has of other runs, the newest last."""
    collided: list[Found]
    """Those of them whose step the local root has too."""
    rivals: list[Found]
    """The newest of ``others`` and of ``rows``, if it can't be told which of them to go on from."""


def _union(local: Sequence[Found], remote: Sequence[Found]) -> _Union:
    """Tell the checkpoints of the run that the newest local one is of from those of others; both with the newest last.

    Without a local one, the newest of the mirror stands for it.
    """
    there = {row.step: row for row in remote}
    tip = newest_told(local) or newest_told(remote)
    rows: list[_Row] = []
    collided: list[Found] = []
    done: set[int] = set()
    for row in local:
        places: tuple[CopyAt, ...] = (CopyAt(False, row.name),)  # noqa: FBT003 - a named tuple
        copy = there.get(row.step)
        if copy is not None and row.origin and copy.origin == row.origin:
            places = (*places, CopyAt(True, copy.name))  # noqa: FBT003
            done.add(row.step)
        elif copy is not None and not (has_left(copy, row) or (tip is not None and has_left(tip, row))):
            done.add(row.step)
            told = copy.course.told and row.course.told
            collided += [copy] if has_diverged(copy, row) or not told else []
        rows.append((row, places))
    rest = [row for row in remote if row.step not in done]
    others = [row for row in rest if tip is not None and has_diverged(row, tip)]
    rows += [(row, (CopyAt(True, row.name),)) for row in rest if row not in others]  # noqa: FBT003
    ours = [row for row, _ in rows if row.resumable]
    every = _in_order([(row, ()) for row in (*ours, *(row for row in others if row.resumable))])
    rows = _in_order(rows)
    others = [row for row, _ in _in_order([(row, ()) for row in others])]
    rivals: list[Found] = []
    if others and every and (every[-1][0] in others or not local):
        rivals = [next(row for row, _ in reversed(every) if row in others)]
        rivals += [row for row, _ in reversed(rows) if row.resumable][:1]
    return _Union(rows, others, collided, rivals)


def _in_order(rows: list[_Row]) -> list[_Row]:
    newest = newest_of(row.lineage for row, _ in rows if row.lineage)
    return in_order(rows, lambda item: (item[0].step, item[0].lineage or newest))


def outlook(keeper: Catalog, mirror: Sequence[Found], root: str, step: int | None, *, besides: str | None) -> Choices:
    """Return the choices over both roots; only ``step`` if it is given.

    mirror: what was found there. root: of the mirror, for messages. besides: as for `Catalog.outlook`. Raises
    `CheckpointNotFound` for an absent step, and `StorageError`.
    """
    local, exports = keeper.found_beside_exports()
    union = _union(local, mirror)
    if step is not None:
        strange: list[_Row] = [(row, (CopyAt(True, row.name),)) for row in union.others]  # noqa: FBT003
        wanted = [item for item in reversed(union.rows) if item[0].step == step]
        wanted = wanted or [item for item in strange if item[0].step == step]
        if not wanted:
            have = ", ".join(map(str, sorted({row.step for row, _ in [*union.rows, *strange]}))) or "none"
            message = (
                f"step {step} is not published under {keeper.root}, nor under its mirror {root}; published: {have}"
            )
            raise CheckpointNotFound(message, path=keeper.root, step=step)
    else:
        wanted = [item for item in reversed(union.rows) if item[0].resumable]
    found = [Choice(row.step, row.resumable, places, row.origin) for row, places in wanted]
    models = [row.step for row in local if not row.resumable]
    unusable = [] if found else keeper.unusable(besides=besides)
    diverged = sorted({row.step for row in (*union.collided, *union.others)})
    rivalry = _rivalry(union.rivals, keeper.root, root) if step is None else ""
    return Choices(found, models, exports, unusable, diverged, rivalry)


def _rivalry(rivals: list[Found], local: str, root: str) -> str:
    """Say between which checkpoints somebody has to choose; empty if between none."""
    if not rivals:
        return ""
    told = [
        f"step {row.step} (attempt {row.origin}" + (f", which follows {row.parent})" if row.parent else ")")
        for row in rivals
    ]
    against = f" is no successor of {told[1]}, the newest of this run" if len(told) > 1 else " is not of this run"
    choose = " or ".join(f"restore(step={row.step})" for row in rivals)
    return (
        f"{root} has {told[0]}, which{against}: another run has saved it, or this one before it went back without "
        f"seeing it. Choose by {choose}; on_corrupt='local' goes on with what is under {local}; two runs need two "
        "mirrors"
    )


@dataclass(frozen=True, slots=True)
class Missing:
    """What a mirror lacks. ``wanted``: names to upload, the newest first. ``passed``: those that it needn't have."""

    wanted: tuple[str, ...]
    passed: tuple[str, ...]
    diverged: tuple[int, ...]
    """Steps that it may not be given: it has them of another run, or others of another run."""


def missing(
    local: Mapping[str, CheckpointEntry],
    remote: Mapping[str, CheckpointEntry],
    keep: Keep | None,
    unfit: Collection[str] = (),
) -> Missing:
    """Compare what is published here and there, by name. keep: what the mirror keeps. unfit: attempts left out."""
    there = {entry.step: entry for entry in remote.values()}
    tip, tip_there = _newest(local), _newest(remote)
    lacking: dict[str, CheckpointEntry] = {}
    diverged = []
    for name, entry in local.items():
        other = there.get(entry.step)
        if entry.origin in unfit or (other is not None and other.origin == entry.origin):
            continue
        strange = other is None and tip_there is not None and has_diverged(entry, tip_there)
        if not strange and (other is None or may_replace(entry, other)):
            lacking[name] = entry
        elif tip is None or not has_left(tip, entry):
            diverged.append(entry.step)
    together = {**there, **{entry.step: entry for entry in lacking.values()}}
    doomed = set() if keep is None else set(select_deletions(list(together.values()), keep))
    newest_first = in_order(list(lacking.items()), lambda item: (item[1].step, item[1].lineage))[::-1]
    return Missing(
        tuple(name for name, entry in newest_first if entry.step not in doomed),
        tuple(name for name, entry in newest_first if entry.step in doomed),
        tuple(diverged),
    )


def _newest(entries: Mapping[str, CheckpointEntry]) -> CheckpointEntry | None:
    return newest_told(in_order(entries.values(), lambda entry: (entry.step, entry.lineage)))


def may_replace(entry: CheckpointEntry, other: CheckpointEntry) -> bool:
    """Return True if ``entry`` is of the run that has left ``other``, of the same step, behind, or replaced it."""
    if entry.replaced and entry.replaced == other.origin:
        return True
    if entry.course.told and other.course.told:
        return has_left(entry, other)
    return any(known == other.lineage.branch and other.step > at for known, at in entry.lineage.left)


prepare_decoding(Choices)
