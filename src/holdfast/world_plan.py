"""What all ranks together are about to write, as the coordinator learns it: told by them, not planned for them.

A plan of all ranks has a row for each tensor of each rank: minutes and gigabytes at 16,384 ranks. So every rank plans
its own part (``plan.write.plan_rank``) and tells the coordinator the names and sizes of its files, once a plan: what
the commit and a recovery compare reports with.

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


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a plan, or why it has none."""

    rank: int
    files: PlannedFiles
    refusal: AbortReason | None = None


_ROW: Final = msgspec.msgpack.Decoder(_Row)


def tell_planned(board: Board, number: int, plan: RankPlan | BaseException) -> None:
    """Say what this rank will write by the plan agreed with save ``number``, or why it can't; doesn't wait."""
    if isinstance(plan, BaseException):
        row = _Row(board.rank, (), AbortReason.of(plan, rank=board.rank))
    else:
        row = _Row(board.rank, tuple((file.name, file.size) for file in plan.files))
    board.append(planned_key(number), msgspec.msgpack.encode(row))


@dataclass(frozen=True, slots=True)
class Whole:
    """What a coordinator needs of a plan: each rank's data files, and the ``.metadata``, None where it is left out."""

    planned: tuple[PlannedFiles, ...]
    metadata: bytes | None


@dataclass(slots=True, eq=False)
class WorldPlan:
    """The plan agreed with save ``number``, on the coordinator; used by one thread at a time."""

    number: int
    structures: Mapping[str, Structure]
    digests: Sequence[str]
    _rows: list[_Row] | None = field(default=None, init=False)
    _whole: Whole | None = field(default=None, init=False)

    def complete(self, board: Board, *, timeout_s: float) -> Whole | AbortReason:
        """What all ranks have told, as soon as all have, or the reason for which there is no plan.

        Waits and renders the first time only.
        """
        if self._rows is None:
            key = planned_key(self.number)
            found = self._collect(board, key, timeout_s)
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

    def _collect(self, board: Board, key: str, timeout_s: float) -> list[_Row] | AbortReason:
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

    def _metadata(self) -> bytes | None:
        if count_rows(self.structures, self.digests) > METADATA_ROWS_MAX:
            return None
        return render_metadata(plan_save(self.structures, self.digests))


def count_rows(structures: Mapping[str, Structure], digests: Sequence[str]) -> int:
    """How many tensors and objects the ranks hold together, a replica counted on each rank that has it."""
    held = {digest: len(found.tensors) + len(found.objects) for digest, found in structures.items()}
    return sum(held[digest] * ranks for digest, ranks in Counter(digests).items())
