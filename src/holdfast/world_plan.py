"""What all ranks together are about to write, as the coordinator learns it: told by them, not planned for them.

A plan of all ranks has a row for each tensor of each rank: minutes and gigabytes at 16,384 ranks. So every rank plans
its own part (``plan.write.plan_rank``) and tells the coordinator the names and sizes of its files, once a plan: what
the commit and a recovery compare reports with. Of an export it tells the parts that are its own: as many, by all ranks
together, as there are blocks of 1 MiB at most.

Stock DCP's ``.metadata`` does list every tensor of every rank. It is rendered where that is cheap, off the thread that
staging waits for; above `METADATA_ROWS_MAX` rows it is left out, and `Checkpoint.write_dcp_metadata` makes it from the
reports whenever somebody wants it.

Guarantees: `WorldPlan.complete` costs the steady state nothing: what it found is kept as long as the plan. A rank that
could not plan fails the save on all ranks, with its own error. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.agreement import planned_key
from holdfast.errors import DeadlineExceeded
from holdfast.format.dcp import render_metadata
from holdfast.format.parts import FilePart
from holdfast.outcome import AbortReason
from holdfast.plan.write import plan_save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.coordination import Board
    from holdfast.plan.structure import Structure
    from holdfast.plan.write import RankPlan

METADATA_ROWS_MAX: Final = 1 << 18
"""Up to so many tensors and objects, counted on each rank that holds them, a checkpoint has a ``.metadata``."""

PlannedFiles = tuple[tuple[str, int], ...]
"""Name and size in bytes of each data file of a rank."""
PlannedParts = tuple[FilePart, ...]
"""The parts of files that a rank writes."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a plan, or why it has none."""

    rank: int
    files: PlannedFiles
    refusal: AbortReason | None = None
    parts: PlannedParts = ()


_ROW: Final = msgspec.msgpack.Decoder(_Row)


def tell_planned(board: Board, number: int, plan: RankPlan | BaseException) -> None:
    """Say what this rank will write by the plan agreed with save ``number``, or why it can't; doesn't wait."""
    if isinstance(plan, BaseException):
        row = _Row(board.rank, (), AbortReason.of(plan, rank=board.rank))
    else:
        row = _Row(board.rank, tuple((file.name, file.size) for file in plan.files))
    board.append(planned_key(number), msgspec.msgpack.encode(row))


def tell_parts(board: Board, key: str, parts: Sequence[FilePart] | BaseException) -> None:
    """Say which parts of which files this rank will write to an export, or why it can't; doesn't wait.

    ``key`` is the same on all ranks, new for each plan, and that of their coordinator's `WorldParts`.
    """
    refusal = AbortReason.of(parts, rank=board.rank) if isinstance(parts, BaseException) else None
    own = () if isinstance(parts, BaseException) else tuple(parts)
    board.append(key, msgspec.msgpack.encode(_Row(board.rank, (), refusal, own)))


@dataclass(frozen=True, slots=True)
class Whole:
    """What a coordinator needs of a plan: each rank's data files, and the ``.metadata``, None where it is left out.

    Of an export: the parts of files that each rank writes, its ``planned`` files being none.
    """

    planned: tuple[PlannedFiles, ...]
    metadata: bytes | None
    parts: tuple[PlannedParts, ...] = ()

    @classmethod
    def in_parts(cls, parts: Sequence[Sequence[FilePart]]) -> Whole:
        """What the ranks of an export write: ``parts`` by rank."""
        return cls(((),) * len(parts), None, tuple(map(tuple, parts)))


@dataclass(slots=True, eq=False)
class WorldParts:
    """What all ranks have told of an export's plan under ``key``, on the coordinator; used by one thread at a time."""

    key: str
    _whole: Whole | AbortReason | None = field(default=None, init=False)

    def complete(self, board: Board, *, timeout_s: float) -> Whole | AbortReason:
        """What all ranks have told, as soon as all have, or the reason for which there is no plan.

        Waits the first time only.
        """
        if self._whole is None:
            rows = _collect(board, self.key, timeout_s)
            if isinstance(rows, AbortReason):
                return rows  # asked for again: a rank that was late may have told by then
            board.delete_list(self.key)
            refused = next((row.refusal for row in rows if row.refusal is not None), None)
            self._whole = refused or Whole.in_parts([row.parts for row in rows])
        return self._whole


@dataclass(slots=True, eq=False)
class WorldPlan:
    """The plan agreed with save ``number``, on the coordinator; used by one thread at a time."""

    number: int
    structures: Mapping[str, Structure]
    digests: Sequence[str]
    known: Mapping[int, RankPlan] = field(default_factory=dict)
    """Plans of ranks that were made already: the coordinator's own."""
    _rows: list[_Row] | None = field(default=None, init=False)
    _whole: Whole | None = field(default=None, init=False)

    def complete(self, board: Board, *, timeout_s: float) -> Whole | AbortReason:
        """What all ranks have told, as soon as all have, or the reason for which there is no plan.

        Waits and renders the first time only.
        """
        if self._rows is None:
            key = planned_key(self.number)
            found = _collect(board, key, timeout_s)
            if isinstance(found, AbortReason):
                return found  # asked for again by the next save: a rank that was late may have told by then
            self._rows = found
            board.delete_list(key)
        for row in self._rows:
            if row.refusal is not None:
                return row.refusal
        if self._whole is None:
            self._whole = Whole(tuple(row.files for row in self._rows), self._metadata())
        return self._whole

    def _metadata(self) -> bytes | None:
        if count_rows(self.structures, self.digests) > METADATA_ROWS_MAX:
            return None
        return render_metadata(plan_save(self.structures, self.digests, known=self.known))


def _collect(board: Board, key: str, timeout_s: float) -> list[_Row] | AbortReason:
    try:
        told = board.wait_entries(key, board.world, timeout_s=timeout_s, waiting_for="what each rank will write")
    except DeadlineExceeded as late:
        there = {_ROW.decode(data).rank for data in board.try_entries(key)}
        missing = [rank for rank in range(board.world) if rank not in there]
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        message = f"rank(s) {shown} of {board.world} had not planned what to write after {timeout_s:g} s"
        error = DeadlineExceeded(message, waited_for=f"rank(s) {shown}", timeout_s=timeout_s)
        error.__cause__ = late
        return AbortReason.of(error, rank=0, unreported=True)
    return sorted(map(_ROW.decode, told or ()), key=attrgetter("rank"))


def count_rows(structures: Mapping[str, Structure], digests: Sequence[str]) -> int:
    """How many tensors and objects the ranks hold together, a replica counted on each rank that has it."""
    held = {digest: len(found.tensors) + len(found.objects) for digest, found in structures.items()}
    return sum(held[digest] * ranks for digest, ranks in Counter(digests).items())
