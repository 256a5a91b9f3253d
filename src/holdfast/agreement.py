"""How the ranks of a group agree, per save, on step and structure, without the training thread knowing.

Every rank casts one `Ballot` a save: its step, where it saves to, and the digest of its structure. The coordinator
compares them and posts one `Verdict`:

    same      nothing has changed since the plan in use was made: go on with it
    replan    digests differ from those of the plan in use: everyone plans anew from the structures named
    skip      a rank has no capture free and its configuration says to skip
    refused   a rank can't take part, or ranks disagree on step or path: the same refusal for everyone

Structures travel only in a replan, compressed, each distinct one once, and only to ranks that have another. In the
steady state a save costs each rank a few bytes written, for which no answer is waited, and one short value read;
the coordinator reads the ballots of all ranks as one value, and deletes them as one.

A rank that has closed its session says so (`Agreement.leave`): a save that others call all the same is refused at once
rather than waited for.

Guarantees: every rank of the group gets the same verdict, or `DeadlineExceeded` naming what was missing. When all have
left, nothing of a session's agreements is on the board. Runs on the stager thread with a board client of its own.
Does not: make plans (``plan.write``), or decide about publication (``commit``).
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.coordination import BoardLost
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed
from holdfast.outcome import AbortReason
from holdfast.plan.structure import Structure, decode_structure, digest_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.coordination import Board


_log = logging.getLogger("holdfast")
VERDICT_GRACE_S: Final = 5.0
"""How much longer than rank 0 the others wait: it waits for the slowest rank as long as it may, and then says which."""


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    step: int | None
    target: str
    digest: str
    busy: bool = False
    replan: bool = False
    """This rank has no plan to go on with, though its structure may be the agreed one."""
    refusal: AbortReason | None = None
    leaves: bool = False
    """This rank casts no other ballot."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["same", "replan", "skip", "refused"]
    digests: tuple[str, ...] = ()
    """Distinct digests, in the order of the first rank that has each."""
    of_rank: tuple[int, ...] = ()
    """For each rank the index of its digest in ``digests``."""
    refusal: AbortReason | None = None
    over: bool = False
    """A rank has left: this is the verdict on all later saves too."""

    def rank_digests(self) -> list[str]:
        return [self.digests[index] for index in self.of_rank]


PACK_FROM_BYTES: Final = 256
"""Longer messages are compressed: names and rank numbers shrink to a fifth, and one Store serves every rank."""
PLANS_KEPT: Final = 8
"""How many plans back a delivery may still collect what its ranks will write; captures in flight are fewer."""

_CastBallot = tuple[int, Ballot]
"""Rank, and its ballot."""
_KNOWN: Final = msgspec.msgpack.Decoder(tuple[int, list[str]])
_BALLOT: Final = msgspec.msgpack.Decoder(_CastBallot)


def pack(data: bytes) -> bytes:
    """``data``, compressed if it is long; the first byte says whether."""
    return b"z" + zlib.compress(data, 1) if len(data) >= PACK_FROM_BYTES else b"=" + data


def unpack(data: bytes) -> bytes:
    return zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:]


def planned_key(number: int) -> str:
    """The list on which ranks say what they will write by the plan that was agreed with save ``number``."""
    return f"planned/{number}"


@dataclass(slots=True)
class Agreement:
    """The agreements of one session, save after save; one per rank, used by one thread.

    ``board`` is this thread's own client; ``what`` is called a save here, as messages are to have it.
    """

    board: Board
    what: str = "save"
    _number: int = 0
    _swept: int = 0
    _posted: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)
    """Digests of all structures that this rank knows to be on the board."""
    _agreed: tuple[str, ...] | None = None
    _plans: list[int] = field(default_factory=list)
    """Numbers of the saves that made the latest plans."""
    _over: Verdict | None = None

    @property
    def number(self) -> int:
        """Of the next save to cast a ballot for, or to read the verdict on."""
        return self._number

    def cast(self, ballot: Ballot, encoded_structure: bytes) -> int:
        """Post this rank's ballot for the next save; doesn't wait. Returns the save's number, equal on every rank.

        `wait_verdict` must follow, whatever became of the ballot: one that could not be posted is told of there.
        """
        if self._over is None:
            try:
                self._cast(self._number, ballot, encoded_structure)
            except BoardLost as error:
                _log.warning("rank %d could not cast its ballot for the %s: %s", self.board.rank, self.what, error)
        return self._number

    def _cast(self, number: int, ballot: Ballot, encoded_structure: bytes) -> None:
        board = self.board
        if ballot.digest and ballot.digest not in self._posted:
            # The first rank to claim a digest posts the structure; for the others it is only a number.
            board.try_get(f"structure/{ballot.digest}")  # may be repeated: finds a connection that idled to its end
            claimed = ballot.digest in self._known  # perhaps by this rank, which could not post it then
            self._known.add(ballot.digest)
            if board.add(f"structure/{ballot.digest}/claims") == 1 or claimed:
                board.set(f"structure/{ballot.digest}", pack(encoded_structure))
            self._posted.add(ballot.digest)
        board.append(f"ballot/{number}", msgspec.msgpack.encode((board.rank, ballot)))

    def wait_verdict(self, *, timeout_s: float) -> Verdict:
        """The verdict on the ballots cast, once all have been; raises `DeadlineExceeded` naming the ranks missing."""
        if self._over is not None:
            return self._over
        board, number = self.board, self._number
        self._number += 1
        if board.rank == 0:
            verdict = self._judge(number, timeout_s)
            board.set(f"verdict/{number}", pack(msgspec.msgpack.encode(verdict)))
        else:
            data = board.get(
                f"verdict/{number}",
                timeout_s=timeout_s + VERDICT_GRACE_S,
                waiting_for="the coordinator's verdict on the plan",
            )
            verdict = msgspec.msgpack.decode(unpack(data), type=Verdict)
        if verdict.kind == "replan":
            self._plans.append(number)
            if len(self._plans) > PLANS_KEPT:
                forgotten = self._plans.pop(0)
                if board.rank == 0:
                    board.delete_list(planned_key(forgotten))
            self._agreed = tuple(verdict.rank_digests())
            self._known.update(verdict.digests)
        elif verdict.over:
            self._over = verdict
        return verdict

    def leave(self) -> None:
        """Take part in no further save: one that other ranks call all the same is refused there, at once.

        Doesn't wait and never raises: if the board is lost, so is whoever would read this.
        """
        board, number = self.board, self._number
        message = f"rank {board.rank} has closed its session and takes part in no further {self.what}"
        reason = AbortReason.of(SaveFailed(message, step=None, rank=board.rank), rank=board.rank)
        try:
            if self._over is None and board.rank == 0:
                # Nobody else would judge.
                verdict = Verdict("refused", refusal=reason, over=True)
                board.set(f"verdict/{number}", pack(msgspec.msgpack.encode(verdict)))
            self.cast(Ballot(None, "", "", refusal=reason, leaves=True), b"")
            board.append("gone", msgspec.msgpack.encode((board.rank, sorted(self._known))))
            if board.add("left") == board.world:
                self._forget_all()
        except HoldfastError:
            return

    def _forget_all(self) -> None:
        """Delete what the session has left on the board; every rank has left. Earlier saves have been swept."""
        board = self.board
        for number in range(max(0, self._number - 2), self._number + 1):
            self._forget(number)
        known = [_KNOWN.decode(data)[1] for data in board.try_entries("gone")]
        for digest in set().union(*known):
            board.delete(f"structure/{digest}")
            board.delete(f"structure/{digest}/claims")
        board.delete_list("gone")
        board.delete("left")

    def forget_plans(self) -> None:
        """Delete what ranks have told and nobody has collected; when no delivery is left that could. Never raises."""
        try:
            for number in self._plans if self.board.rank == 0 else ():
                self.board.delete_list(planned_key(number))
        except HoldfastError:
            return

    def wait_structures(
        self,
        verdict: Verdict,
        *,
        own: bytes | None = None,
        known: Mapping[str, Structure] | None = None,
        timeout_s: float,
    ) -> dict[str, Structure]:
        """The structures a replan needs, by digest; those that are ``known`` needn't be fetched.

        Nor need ``own``: this rank's, encoded.
        """
        known = known or {}
        here = {} if own is None else {digest_of(own): own}
        others = [digest for digest in verdict.digests if digest not in here and digest not in known]
        found = self.board.gather(
            [f"structure/{digest}" for digest in others],
            timeout_s=timeout_s,
            waiting_for="the structures of ranks whose state changed",
        )
        here.update((digest, unpack(data)) for digest, data in zip(others, found, strict=True))
        return {
            digest: known[digest] if digest in known else decode_structure(here[digest]) for digest in verdict.digests
        }

    def _judge(self, number: int, timeout_s: float) -> Verdict:
        board, key = self.board, f"ballot/{number}"
        try:
            data = board.wait_entries(key, board.world, timeout_s=timeout_s, waiting_for="every rank's ballot")
        except DeadlineExceeded as late:
            cast = {rank for rank, _ in map(_BALLOT.decode, board.try_entries(key))}
            missing = [rank for rank in range(board.world) if rank not in cast]
            shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
            message = (
                f"after {timeout_s:g} s rank(s) {shown} of {board.world} had not called this {self.what}; "
                "every rank of the group must call it, in the same order"
            )
            error = DeadlineExceeded(message, waited_for=f"rank(s) {shown}", timeout_s=timeout_s)
            error.__cause__ = late
            return Verdict("refused", refusal=AbortReason.of(error, rank=0))
        self._sweep(number)
        ballots: list[_CastBallot] = sorted(map(_BALLOT.decode, data or ()), key=itemgetter(0))
        return judge([ballot for _, ballot in ballots], self._agreed, what=self.what)

    def _sweep(self, number: int) -> None:
        """Delete the keys of earlier saves: every rank has left them behind, as all have cast ballot ``number``."""
        for left in range(self._swept, number):
            self._forget(left)
        self._swept = number

    def _forget(self, number: int) -> None:
        self.board.delete_list(f"ballot/{number}")
        self.board.delete(f"verdict/{number}")


def judge(ballots: Sequence[Ballot], agreed: tuple[str, ...] | None, *, what: str = "save") -> Verdict:
    """The verdict on one save's ballots, in rank order; ``agreed`` are the digests of the plan in use. Pure."""
    for ballot in ballots:
        if ballot.refusal is not None:
            return Verdict("refused", refusal=ballot.refusal, over=any(ballot.leaves for ballot in ballots))
    first = ballots[0]
    for rank, ballot in enumerate(ballots):
        if (ballot.step, ballot.target) != (first.step, first.target):
            message = (
                f"ranks disagree on what to {what}: rank 0 said {_said(first)}, rank {rank} said {_said(ballot)}; "
                f"call {what} with equal arguments on every rank"
            )
            return Verdict("refused", refusal=AbortReason(rank, "ConfigError", message, fields={"field": None}))
    if any(ballot.busy for ballot in ballots):
        return Verdict("skip")
    digests = tuple(ballot.digest for ballot in ballots)
    if digests == agreed and not any(ballot.replan for ballot in ballots):
        return Verdict("same")
    distinct = tuple(dict.fromkeys(digests))
    place = {digest: index for index, digest in enumerate(distinct)}
    return Verdict("replan", digests=distinct, of_rank=tuple(place[digest] for digest in digests))


def _said(ballot: Ballot) -> str:
    return ballot.target if ballot.step is None else f"step {ballot.step} to {ballot.target}"


class _Vote(msgspec.Struct, frozen=True):
    """One rank's, or all ranks', view of what they are about."""

    reason: AbortReason | None = None
    unexpected: tuple[str, ...] = ()
    target: str = ""


_VOTE: Final = msgspec.msgpack.Decoder(tuple[int, _Vote])


class Votes:
    """Votes on the training thread, of a load or a start: everyone is fine, or everyone gets the first rank's error.

    Every rank calls the same methods in the same order, and then `leave`.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._number = 0
        self._swept = 1
        self._settled = 1
        """The number of the last `settle`: when it was counted, all earlier votes were swept."""

    def share(self, value: bytes | None, error: BaseException | None, *, timeout_s: float) -> bytes:
        """The coordinator's ``value`` on every rank, or its error; other ranks pass None for both."""
        board, key = self._board, self._next_key()
        if board.rank == 0:
            refusal = None if error is None else AbortReason.of(error, rank=0)
            board.set(key, msgspec.msgpack.encode((refusal, value or b"")))
            if error is not None:
                raise error
            return value or b""
        data = board.get(key, timeout_s=timeout_s, waiting_for="the coordinator's choice of a checkpoint")
        refusal, shared = msgspec.msgpack.decode(data, type=tuple[AbortReason | None, bytes])
        if refusal is not None:
            raise refusal.cause()
        return shared

    def settle(
        self,
        error: BaseException | None = None,
        *,
        unexpected: Collection[str] = (),
        target: str = "",
        timeout_s: float,
    ) -> tuple[str, ...]:
        """Return if no rank has an error; else raise the first rank's, the same on every rank: callers act on it.

        ``target``: a path that must be equal on every rank; `ConfigError` otherwise. Returns the names that are in
        ``unexpected`` on every rank: with pipeline stages, what one rank doesn't know belongs to another.
        """
        board, key = self._board, self._next_key()
        self._settled = self._number
        mine = _Vote(None if error is None else AbortReason.of(error, rank=board.rank), tuple(unexpected), target)
        try:
            board.append(f"{key}/votes", msgspec.msgpack.encode((board.rank, mine)))
            verdict = self._wait_counted(key, timeout_s)
        except HoldfastError as silence:
            if error is not None:
                raise error from silence
            raise
        reason = verdict.reason
        if reason is None:
            return verdict.unexpected
        if error is not None and reason.rank == board.rank:
            raise error
        raise reason.cause() from error

    def _wait_counted(self, key: str, timeout_s: float) -> _Vote:
        board = self._board
        if board.rank == 0:
            verdict = self._count(key, timeout_s)
            board.set(f"{key}/verdict", msgspec.msgpack.encode(verdict))
            return verdict
        data = board.get(
            f"{key}/verdict",
            timeout_s=timeout_s + VERDICT_GRACE_S,
            waiting_for="rank 0 to count the votes of all ranks",
        )
        return msgspec.msgpack.decode(data, type=_Vote)

    def _count(self, key: str, timeout_s: float) -> _Vote:
        board = self._board
        try:
            waiting_for = "every rank's vote"
            data = board.wait_entries(f"{key}/votes", board.world, timeout_s=timeout_s, waiting_for=waiting_for)
            self._sweep()
        except DeadlineExceeded as late:
            return _Vote(AbortReason.of(late, rank=0))
        votes = [vote for _, vote in sorted(map(_VOTE.decode, data or ()), key=itemgetter(0))]
        first = next((_told(vote.reason) for vote in votes if vote.reason is not None), None) or _first_astray(votes)
        common = set(votes[0].unexpected).intersection(*(vote.unexpected for vote in votes[1:]))
        return _Vote(first, tuple(sorted(common)))

    def _sweep(self) -> None:
        """Delete the keys of earlier votes: every rank has left them behind, as all have voted now."""
        for left in range(self._swept, self._number):
            self._forget(left)
        self._swept = self._number

    def leave(self) -> None:
        """Vote no more; the last rank to leave deletes what is left of the votes. Doesn't wait and never raises."""
        board = self._board
        try:
            if board.add("votes/left") < board.world:
                return
            for left in range(self._settled, self._number + 1):
                self._forget(left)
            board.delete("votes/left")
        except HoldfastError:
            return

    def _forget(self, number: int) -> None:
        key = f"vote/{number}"
        self._board.delete_list(f"{key}/votes")
        for name in (key, f"{key}/verdict"):
            self._board.delete(name)

    def _next_key(self) -> str:
        self._number += 1
        return f"vote/{self._number}"


def _told(reason: AbortReason) -> AbortReason:
    """An error as the other ranks raise it."""
    return msgspec.structs.replace(reason, message=f"on rank {reason.rank}: {reason.message}")


def _first_astray(votes: Sequence[_Vote]) -> AbortReason | None:
    """The first rank whose target isn't rank 0's."""
    for rank, vote in enumerate(votes):
        if vote.target != votes[0].target:
            message = (
                f"ranks disagree on the path: rank 0 was given {votes[0].target}, rank {rank} {vote.target}; "
                "a checkpoint has one path, on a file system that all ranks share"
            )
            return AbortReason(rank, "ConfigError", message, fields={"field": "path"})
    return None
