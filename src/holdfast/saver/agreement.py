"""Agreement of all ranks on step, structure and files of each save, in the background. Torch-free.

Every rank posts one `PlanProposal` per save: its step, its path and the digest of its structure. The coordinator
compares them and posts one `PlanDecision`:

    same      nothing changed since the current plan was made, or all ranks have the same plan of an earlier session
    replan    digests differ from those of the current plan: every rank makes a new plan from the listed structures
    skip      a rank has no free capture and its configuration says to skip
    refused   a rank can't take part, or ranks disagree on step or path: every rank gets the same refusal

Structures are sent only in a replan: compressed, each distinct structure once, and only to ranks that lack it. In the
steady state a save costs each rank one short write without waiting and one short read; the coordinator reads the
proposals of all ranks as one value, and deletes them as one.

A rank that closes its session announces it (`Agreement.leave`): a later save by other ranks is refused at once instead
of waiting for that rank.

A plan of all ranks has a row for each tensor of each rank: minutes and gigabytes at 16,384 ranks. So every rank plans
its own part (``plan.write.plan_rank``) and posts the names and sizes of its files once per plan; commit and recovery
compare the reports with them. Stock DCP's ``.metadata`` lists every tensor of every rank: it is rendered up to
`METADATA_ROWS_MAX` rows, outside the stager thread; above that it is left out, and `Checkpoint.write_dcp_metadata`
makes it from the reports.

Guarantees: every rank of the group gets the same decision, or `DeadlineExceeded` naming what was missing. When all
ranks have left, the board holds nothing of the session's agreements. Runs on the stager thread with its own board
client. `WorldPlan.complete` costs nothing in the steady state: its result is kept as long as the plan. A rank that
could not plan fails the save on all ranks, with its own error.
Does not: make plans (``plan.write``), or decide about publication (``commit.attempt``).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.coordination.board import BoardLost
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Round, Rounds, pack, unpack
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.format.dcp_metadata import render_metadata
from holdfast.format.manifest import FilePart
from holdfast.format.structure import Structure, decode_structure, digest_of
from holdfast.plan.write import plan_save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.coordination.board import Board
    from holdfast.plan.write import RankPlan


_log = logging.getLogger("holdfast")


class PlanProposal(msgspec.Struct, frozen=True, array_like=True):
    step: int | None
    target: str
    digest: str
    busy: bool = False
    replan: bool = False
    """This rank has no plan to continue with, even if the agreed structure is its own."""
    refusal: RankFailure | None = None
    leaves: bool = False
    """This is the rank's last proposal."""
    plan: str = ""
    """Name of the plan that this rank has from an earlier session and can continue with."""


class PlanDecision(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["same", "replan", "skip", "refused"]
    digests: tuple[str, ...] = ()
    """Distinct digests, ordered by the first rank that has each."""
    of_rank: tuple[int, ...] = ()
    """Index into ``digests`` of each rank's digest."""
    refusal: RankFailure | None = None
    over: bool = False
    """A rank has left: this decision also applies to all later saves."""

    def rank_digests(self) -> list[str]:
        return [self.digests[index] for index in self.of_rank]


PLANS_KEPT: Final = 8
"""How many of the latest plans keep their ranks' rows on the board; more than there are captures in flight."""

_KNOWN: Final = msgspec.msgpack.Decoder(tuple[int, list[str]])
_PROPOSAL: Final = msgspec.msgpack.Decoder(PlanProposal)
_DECISION: Final = msgspec.msgpack.Decoder(PlanDecision)


def planned_key(number: int) -> str:
    """Return the key of the list to which ranks post their rows of the plan agreed with save ``number``."""
    return f"planned/{number}"


@dataclass(slots=True)
class Agreement:
    """The agreement protocol of one session, save after save; one per rank, used by one thread.

    ``board`` is this thread's own client; ``what`` is the word for a save in messages.
    """

    board: Board
    what: str = "save"
    _rounds: Rounds = field(init=False)
    _round: Round = field(init=False)
    """The round of the next save."""
    _posted: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)
    """Digests of the structures that this rank knows to be on the board."""
    _agreed: tuple[str, ...] | None = None
    _plans: list[int] = field(default_factory=list)
    """Numbers of the saves that made the latest plans, oldest first."""
    _over: PlanDecision | None = None

    def __post_init__(self) -> None:
        advice = "every rank of the group must call it, in the same order"
        self._rounds = Rounds(self.board, "plan", had_not=f"called this {self.what}", advice=advice)
        self._round = self._rounds.next()

    @property
    def number(self) -> int:
        """Number of the next save in the agreement protocol."""
        return self._rounds.number - 1

    def cast(self, proposal: PlanProposal, encoded_structure: bytes) -> int:
        """Post this rank's proposal for the next save; doesn't wait. Returns the save's number, equal on every rank.

        Call `wait_verdict` next, whatever happened here: it reports a proposal that could not be posted.
        """
        if self._over is None:
            try:
                self._cast(proposal, encoded_structure)
            except BoardLost as error:
                _log.warning("rank %d could not post its proposal for the %s: %s", self.board.rank, self.what, error)
        return self.number

    def _cast(self, proposal: PlanProposal, encoded_structure: bytes) -> None:
        board = self.board
        if proposal.digest and proposal.digest not in self._posted:
            # The first rank to claim a digest posts the structure; the other ranks only increment the counter.
            board.try_get(f"structure/{proposal.digest}")  # reconnects if idle too long: reads are retried
            claimed = proposal.digest in self._known  # perhaps by this rank, if its post failed
            self._known.add(proposal.digest)
            if board.add(f"structure/{proposal.digest}/claims") == 1 or claimed:
                board.set(f"structure/{proposal.digest}", pack(encoded_structure))
            self._posted.add(proposal.digest)
        self._round.say(msgspec.msgpack.encode(proposal))

    def wait_verdict(self, *, timeout_s: float) -> PlanDecision:
        """Return the decision on the proposals of all ranks, equal on every rank; a refusal names silent ranks."""
        if self._over is not None:
            return self._over
        board, number, asked = self.board, self.number, self._round
        self._round = self._rounds.next()
        found = asked.wait(self._judge, timeout_s=timeout_s)
        decision = PlanDecision("refused", refusal=found) if isinstance(found, RankFailure) else _DECISION.decode(found)
        if decision.kind == "replan":
            self._plans.append(number)
            if len(self._plans) > PLANS_KEPT:
                forgotten = self._plans.pop(0)
                if board.rank == 0:
                    board.delete_list(planned_key(forgotten))
            self._agreed = tuple(decision.rank_digests())
            self._known.update(decision.digests)
        elif decision.over:
            self._over = decision
        return decision

    def leave(self) -> None:
        """Take part in no further save: if other ranks start one, it is refused there at once.

        Doesn't wait and never raises: if the board is lost, no rank can read this anyway.
        """
        board = self.board
        message = f"rank {board.rank} has closed its session and takes part in no further {self.what}"
        reason = RankFailure.of(SaveFailed(message, step=None, rank=board.rank), rank=board.rank)
        try:
            if self._over is None and board.rank == 0:
                # No other rank would decide.
                self._round.announce(msgspec.msgpack.encode(PlanDecision("refused", refusal=reason, over=True)))
            self.cast(PlanProposal(None, "", "", refusal=reason, leaves=True), b"")
            board.append("gone", msgspec.msgpack.encode((board.rank, sorted(self._known))))
            if self._rounds.leave():
                self._forget_structures()
        except HoldfastError:
            return

    def _forget_structures(self) -> None:
        """Delete the structures that the session left on the board; every rank has left."""
        board = self.board
        known = [_KNOWN.decode(data)[1] for data in board.try_entries("gone")]
        for digest in set().union(*known):
            board.delete(f"structure/{digest}")
            board.delete(f"structure/{digest}/claims")
        board.delete_list("gone")

    def forget_plans(self) -> None:
        """Delete the plan rows that nobody collected, once no delivery can collect them. Never raises."""
        try:
            for number in self._plans if self.board.rank == 0 else ():
                self.board.delete_list(planned_key(number))
        except HoldfastError:
            return

    def wait_structures(
        self,
        decision: PlanDecision,
        *,
        own: bytes | None = None,
        known: Mapping[str, Structure] | None = None,
        timeout_s: float,
    ) -> dict[str, Structure]:
        """Return the structures that a replan needs, by digest; fetches those that aren't ``known``.

        own: this rank's structure, encoded; it isn't fetched either.
        """
        known = known or {}
        here = {} if own is None else {digest_of(own): own}
        others = [digest for digest in decision.digests if digest not in here and digest not in known]
        found = self.board.gather(
            [f"structure/{digest}" for digest in others],
            timeout_s=timeout_s,
            waiting_for="the structures of ranks whose state changed",
        )
        here.update((digest, unpack(data)) for digest, data in zip(others, found, strict=True))
        return {
            digest: known[digest] if digest in known else decode_structure(here[digest]) for digest in decision.digests
        }

    def _judge(self, words: list[bytes]) -> bytes:
        return msgspec.msgpack.encode(judge(list(map(_PROPOSAL.decode, words)), self._agreed, what=self.what))


def judge(proposals: Sequence[PlanProposal], agreed: tuple[str, ...] | None, *, what: str = "save") -> PlanDecision:
    """Return the decision on one save's proposals, in rank order; ``agreed``: digests of the current plan. Pure."""
    for proposal in proposals:
        if proposal.refusal is not None:
            return PlanDecision(
                "refused", refusal=proposal.refusal, over=any(proposal.leaves for proposal in proposals)
            )
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if (proposal.step, proposal.target) != (first.step, first.target):
            message = (
                f"ranks disagree on what to {what}: rank 0 said {_said(first)}, rank {rank} said {_said(proposal)}; "
                f"call {what} with equal arguments on every rank"
            )
            return PlanDecision("refused", refusal=RankFailure(rank, "ConfigError", message, fields={"field": None}))
    if any(proposal.busy for proposal in proposals):
        return PlanDecision("skip")
    digests = tuple(proposal.digest for proposal in proposals)
    if digests == agreed and not any(proposal.replan for proposal in proposals):
        return PlanDecision("same")
    if first.plan and all(proposal.plan == first.plan for proposal in proposals):
        return PlanDecision("same")
    distinct = tuple(dict.fromkeys(digests))
    place = {digest: index for index, digest in enumerate(distinct)}
    return PlanDecision("replan", digests=distinct, of_rank=tuple(place[digest] for digest in digests))


def _said(proposal: PlanProposal) -> str:
    return proposal.target if proposal.step is None else f"step {proposal.step} to {proposal.target}"


# The ranks' files, as the coordinator learns them.

METADATA_ROWS_MAX: Final = 1 << 18
"""Most rows for which ``.metadata`` is rendered: tensors and objects, counted on each rank that holds them."""

PlannedFiles = tuple[tuple[str, int], ...]
"""Name and size in bytes of each data file of a rank."""
PlannedParts = tuple[FilePart, ...]
"""Parts of files that a rank writes."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a plan, or the reason why it has none."""

    files: PlannedFiles
    refusal: RankFailure | None = None


_ROW: Final = msgspec.msgpack.Decoder(_Row)


def _planning(board: Board, key: str) -> Round:
    return Round(board, key, had_not="planned what to write")


def tell_planned(board: Board, number: int, plan: RankPlan | BaseException) -> None:
    """Post what this rank will write under the plan of save ``number``, or why it can't; doesn't wait."""
    if isinstance(plan, BaseException):
        row = _Row((), RankFailure.of(plan, rank=board.rank))
    else:
        row = _Row(tuple((file.name, file.size) for file in plan.files))
    _planning(board, planned_key(number)).say(msgspec.msgpack.encode(row))


@dataclass(frozen=True, slots=True)
class Whole:
    """The plan of all ranks: each rank's data files, and ``.metadata``, None if it is left out.

    For an export: the file parts that each rank writes; ``planned`` is empty.
    """

    planned: tuple[PlannedFiles, ...]
    metadata: bytes | None
    parts: tuple[PlannedParts, ...] = ()

    @classmethod
    def in_parts(cls, parts: Sequence[Sequence[FilePart]]) -> Whole:
        """Return the plan of an export; ``parts``: what each rank writes."""
        return cls(((),) * len(parts), None, tuple(map(tuple, parts)))


@dataclass(slots=True, eq=False)
class WorldPlan:
    """The plan agreed with save ``number``, completed on the coordinator; one thread at a time."""

    number: int
    structures: Mapping[str, Structure]
    digests: Sequence[str]
    known: Mapping[int, RankPlan] = field(default_factory=dict)
    """Plans by rank that exist already: the coordinator's own."""
    _rows: list[_Row] | None = field(default=None, init=False)
    _whole: Whole | None = field(default=None, init=False)

    def complete(self, board: Board, *, timeout_s: float) -> Whole | RankFailure:
        """Wait until all ranks have posted and return the plan, or the reason why there is none.

        Waits and renders only the first time.
        """
        if self._rows is None:
            found = _collect(board, planned_key(self.number), timeout_s)
            if isinstance(found, RankFailure):
                return found  # not kept: a late rank may have posted when the next save calls this
            self._rows = found
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


def _collect(board: Board, key: str, timeout_s: float) -> list[_Row] | RankFailure:
    """Read and delete what all ranks posted under ``key``; or return the failure that names silent ranks."""
    told = _planning(board, key).gather(timeout_s=timeout_s)
    if isinstance(told, RankFailure):
        return msgspec.structs.replace(told, unreported=True)
    board.delete_list(key)
    return list(map(_ROW.decode, told))


def count_rows(structures: Mapping[str, Structure], digests: Sequence[str]) -> int:
    """Return the number of tensors and objects of all ranks, counting a replica on each rank that has it."""
    held = {digest: len(found.tensors) + len(found.objects) for digest, found in structures.items()}
    return sum(held[digest] * ranks for digest, ranks in Counter(digests).items())
