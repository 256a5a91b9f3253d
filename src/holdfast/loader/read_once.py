"""Agree, once in a load, on who reads what several ranks want, so that it is read from storage once.

    offer_of     rank 0        offer to share, where it may pay: it goes to the others with the choice of the checkpoint
    ReadOnce     every rank    its part in one load that offers to

Every rank says which extents it wants, in one round of the group's board; rank 0 plans (``plan.sharing``) and says
whether that pays; ranks that want the same look up the same part of the plan. Bytes go from rank to rank over a gloo
group of Holdfast's own (``coordination.links``), made once the plan says that there is something to send.

Sharing is offered for object stores, and for network file systems. There it is done only among several hosts: on one
host its page cache is faster. `VARIABLE` in the environment of rank 0 overrides this: "1" always, "0" never.

Guarantees: a load that doesn't offer to share makes no request for it. If a rank can't take part, if the group can't be
made, or if it ends early, each rank reads for itself what it lacks; the load fails no more for it. A rank that is
silent in the round is named, as in every round.
Reports are shared before, over the board, where they are small enough for it.
Does not: share manifests, which each rank reads; or anything among more than `WORLD_MAX` ranks: each has connections to
all others.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast import events
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.links import GlooLinks, is_gloo_available, prefix_store
from holdfast.coordination.round import Round, pack, unpack
from holdfast.coordination.store import BoardLost, board_lost_told, clone_store
from holdfast.cores import take_turns
from holdfast.errors import HoldfastError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.sealed import xxh3_128
from holdfast.loader.shared_reads import RankUnit
from holdfast.loader.sources.holdfast import HoldfastSource, members_of
from holdfast.plan.sharing import ExtentRun, bounds, deltas, plan_sharing
from holdfast.storage.files import is_on_network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.coordination.group import Group
    from holdfast.coordination.links import Links
    from holdfast.loader.shared_reads import SharedReads
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.plan.sharing import SharedUnit, SharingPlan

_log = logging.getLogger("holdfast")

VARIABLE: Final = "HOLDFAST_READ_ONCE"
WORLD_MAX: Final = 1024
SAVED_BYTES_MIN: Final = 4 << 20
"""Connecting the ranks takes longer than reading less than this."""
WORD_BYTES_MAX: Final = 1 << 20
REPORT_BYTES_MAX: Final = 256 << 20
"""Limit of what the Store sends of reports to all ranks together; each reads them itself otherwise."""
LINKS_S: Final = 30.0
"""Timeout of making the links."""
STALL_S: Final = 30.0
"""How long a rank waits for one unit, at most; then it reads for itself."""


class SharingOffer(msgspec.Struct, frozen=True):
    """Rank 0's offer to share the reading of one load; ``key`` is never used again."""

    key: str
    reason: Literal["store", "network", "forced"]


class _Wants(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants: runs, their numbers one after the other as `deltas`; None where it doesn't take part."""

    host: str
    files: str
    """Digest of the names and sizes of the files that the numbers mean."""
    runs: list[int] | None


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    """``alone``: why every rank reads for itself; empty if the plan is carried out."""

    alone: str
    unique_bytes: int = 0
    planned_bytes: int = 0


class _ClassPart(msgspec.Struct, frozen=True, array_like=True):
    """The units of a class, column by column as `deltas`. ``sets``: first and last of consecutive ranks, by number."""

    numbers: list[int]
    files: list[int]
    firsts: list[int]
    stops: list[int]
    owners: list[int]
    wanted_by: list[int]
    sets: dict[int, list[int]]


def offer_of(source: CheckpointSource, group: Group) -> SharingOffer | None:
    """Return rank 0's offer to share the reading of ``source``; None where it is known not to pay."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0" or not 1 < group.world <= WORLD_MAX or group.store is None or source.records is not None:
        return None
    if len(members_of(source)) > 1:  # what is read isn't what is used
        return None
    if not is_gloo_available():
        return None
    reason: Literal["store", "network", "forced"]
    if asked == "1":
        reason = "forced"
    elif "://" in source.directory:
        reason = "store"
    elif os.environ.get("LOCAL_WORLD_SIZE") != str(group.world) and is_on_network(source.directory):
        reason = "network"
    else:
        return None
    return SharingOffer(f"once/{secrets.token_hex(4)}", reason)


class ReadOnce:
    """One rank's part in the sharing of one load: `read`, the load's vote, then `end`, on one thread."""

    def __init__(self, group: Group, offer: SharingOffer, *, timeout_s: float) -> None:
        self._group = group
        self._offer = offer
        self._timeout_s = timeout_s
        self._round = Round(group.board, offer.key)
        self._has_spoken = False
        self._is_over = False
        self._links: Links | None = None
        self._keys: list[str] = []
        """Keys on the board that rank 0 deletes in the end."""
        self._figures: dict[str, Any] = {}

    def share_reports(self, source: CheckpointSource) -> None:
        """Read this rank's share of the reports of ``source``, and give it those that others have read.

        Every rank calls this, or the others wait, for at most `STALL_S`. What doesn't come is read by each rank, and
        raises what it has to there: this raises nothing.
        """
        group, waits_s = self._group, min(STALL_S, self._timeout_s / 4)
        if not isinstance(source, HoldfastSource) or source.manifest is None:
            return
        lines = source.manifest.reports
        if sum(line.size for line in lines) * group.world > REPORT_BYTES_MAX:
            return
        keys = [f"{self._offer.key}/report/{at}" for at in range(len(lines))]
        self._keys.extend(keys)
        given: dict[str, bytes] = {}

        def read(at: int) -> None:
            try:
                data = source.read_committed(lines[at].name, lines[at].size)
            except HoldfastError:
                group.board.set(keys[at], b"")
                return
            given[lines[at].name] = data
            group.board.set(keys[at], pack(data))

        try:
            mine = range(group.rank, len(lines), group.world)
            take_turns([partial(read, at) for at in mine], source.small_reads_at_a_time)
            others = [at for at in range(len(lines)) if at % group.world != group.rank]
            told = group.board.gather([keys[at] for at in others], timeout_s=waits_s, waiting_for="reports")
            given.update((lines[at].name, unpack(data)) for at, data in zip(others, told, strict=True) if data)
        except Exception as error:  # noqa: BLE001 - whatever it is: without this, the load does as it did before
            _log.warning("this rank reads reports itself: %s", error)
        source.give_reports(given)

    def read(self, reads: SharedReads) -> None:
        """Read what ``reads`` has gathered, together with the other ranks, which all call this or `refuse`.

        Raises `CheckpointCorrupt`, `StorageError`; `DeadlineExceeded` if a rank has done neither.
        """
        with board_lost_told("agreeing on who reads what", self._timeout_s):
            runs = reads.wanted()
            answer = self._agree(reads, runs)
            units = () if answer.alone else self._units(_digest(runs))
        alone = answer.alone
        if not alone:
            alone = self._connect()
        stall_s = min(STALL_S, self._timeout_s / 4)
        before = reads.bytes_read
        try:
            broken = reads.read_all(units, self._links, self._group.rank, stall_s=stall_s)
        finally:
            read = reads.bytes_read - before
            events.count("bytes_received", reads.bytes_received)
            self._figures = {"bytes_read": read, "bytes_received": reads.bytes_received, "read_alone": alone}
        if not answer.alone:
            self._figures["unique_bytes"] = answer.unique_bytes
            if broken or alone:
                self._figures["read_alone"] = alone or broken
                events.count("loads_read_alone")
                _log.warning("this rank reads for itself what others would have sent it: %s", broken or alone)
            self._tell(read, is_alone=bool(broken or alone))

    def refuse(self) -> None:
        """Take no part, unless this rank has already: the others needn't wait for it. Never raises."""
        if self._has_spoken:
            return
        self._has_spoken = True
        try:
            if self._group.rank == 0:
                self._round.announce(msgspec.msgpack.encode(_Verdict("rank 0 has failed")))
            else:
                self._round.say(pack(msgspec.msgpack.encode(_Wants("", "", None))))
        except HoldfastError as error:
            _log.warning("can't tell the other ranks that this one reads nothing: %s", error)

    def end(self) -> dict[str, Any]:
        """Close the connections, after all ranks have voted on what they read; returns the figures of the load.

        On rank 0 with the bytes that all ranks have read, and how many have read for themselves; never raises, and does
        nothing the second time.
        """
        if self._is_over:
            return self._figures
        self._is_over = True
        links, self._links = self._links, None
        if links is not None:
            links.abort()
        if self._group.rank != 0:
            return self._figures
        board, key = self._group.board, self._offer.key
        try:
            if "unique_bytes" in self._figures:
                self._figures["bytes_read_by_all"] = board.add(f"{key}/read", 0)
                self._figures["ranks_read_alone"] = board.add(f"{key}/alone", 0)
                self._keys.extend([f"{key}/read", f"{key}/alone"])
                # What gloo has left, for each interface that it uses; all ranks have been connected, or have given up.
                self._keys.extend(f"{key}/links/0/{rank}" for rank in range(self._group.world))
            for name in self._keys:
                board.delete(name)
            self._round.forget()
        except HoldfastError as error:
            _log.warning("can't remove what ranks have told one another of a load: %s", error)
        return self._figures

    def _tell(self, read: int, *, is_alone: bool) -> None:
        key = self._offer.key
        try:
            self._group.board.add(f"{key}/read", read)
            if is_alone:
                self._group.board.add(f"{key}/alone", 1)
        except BoardLost as error:  # the vote that comes next says so
            _log.warning("can't tell how much was read: %s", error)

    def _agree(self, reads: SharedReads, runs: Sequence[ExtentRun]) -> _Verdict:
        flat = [number for column in zip(*runs, strict=True) for number in deltas(column)]
        known = xxh3_128(msgspec.msgpack.encode([list(reads.names), reads.sizes]))
        word = pack(msgspec.msgpack.encode(_Wants(socket.gethostname(), known, flat)))
        if len(word) > WORD_BYTES_MAX:
            word = pack(msgspec.msgpack.encode(_Wants("", "", None)))
        self._has_spoken = True
        self._round.say(word)

        def decide(words: list[bytes]) -> bytes:
            return msgspec.msgpack.encode(self._decide(words, reads.sizes))

        found = self._round.wait(decide, timeout_s=self._timeout_s)
        if isinstance(found, RankFailure):
            raise found.cause()
        return msgspec.msgpack.decode(found, type=_Verdict)

    def _decide(self, packed: Sequence[bytes], sizes: Sequence[int]) -> _Verdict:
        """Plan, on rank 0, and put the parts of the plan on the board."""
        words = [msgspec.msgpack.decode(unpack(word), type=_Wants) for word in packed]
        if any(word.runs is None for word in words):
            return _Verdict("a rank takes no part")
        if len({word.files for word in words}) > 1:
            return _Verdict("ranks see different files")
        if self._offer.reason == "network" and len({word.host for word in words}) == 1:
            return _Verdict("all ranks are on one host, which reads each byte once")
        known: dict[tuple[int, ...], tuple[ExtentRun, ...]] = {}
        wants = [known.setdefault(flat, _runs_of(flat)) for flat in (tuple(word.runs or ()) for word in words)]
        plan = plan_sharing(wants, sizes)
        if plan.saved_bytes < (1 if self._offer.reason == "forced" else SAVED_BYTES_MIN):
            return _Verdict("ranks want little in common", plan.unique_bytes, plan.wanted_bytes)
        for number, ranks in enumerate(plan.classes):
            key = self._key_of(_digest(wants[ranks[0]]))
            self._group.board.set(key, pack(msgspec.msgpack.encode(_part(plan, plan.units_of(number)))))
            self._keys.append(key)
        return _Verdict("", plan.unique_bytes, sum(plan.read_bytes))

    def _key_of(self, digest: str) -> str:
        return f"{self._offer.key}/part/{digest}"

    def _units(self, digest: str) -> list[RankUnit]:
        told = self._group.board.get(self._key_of(digest), timeout_s=self._timeout_s, waiting_for="rank 0's plan")
        part = msgspec.msgpack.decode(unpack(told), type=_ClassPart)
        me = self._group.rank
        peers = {
            number: tuple(rank for first, last in _pairs(ends) for rank in range(first, last + 1) if rank != me)
            for number, ends in part.sets.items()
        }
        columns = (part.numbers, part.files, part.firsts, part.stops, part.owners, part.wanted_by)
        return [
            RankUnit(number, ExtentRun(file, first, stop), owner, peers[wanted_by] if owner == me else ())
            for number, file, first, stop, owner, wanted_by in zip(*map(bounds, columns), strict=True)
        ]

    def _connect(self) -> str:
        """Make the links; returns why there are none."""
        group, timeout_s = self._group, min(LINKS_S, self._timeout_s)
        try:
            store = prefix_store(f"{group.prefix}/{self._offer.key}/links", clone_store(group.store))
            self._links = make_links(store, group.rank, group.world, timeout_s)
        except (RuntimeError, OSError) as error:
            return f"the ranks could not be connected: {(str(error).splitlines() or [''])[0][:200]}"
        return ""


def make_links(store: Any, rank: int, world: int, timeout_s: float) -> Links:
    """Connect this rank to all others; raises `RuntimeError`."""
    return GlooLinks(store, rank, world, timeout_s=timeout_s)


def _digest(runs: Sequence[ExtentRun]) -> str:
    return xxh3_128(msgspec.msgpack.encode(runs))


def _runs_of(flat: Sequence[int]) -> tuple[ExtentRun, ...]:
    count = len(flat) // 3
    columns = (bounds(flat[at : at + count]) for at in range(0, 3 * count, count)) if count else ()
    return tuple(ExtentRun(*row) for row in zip(*columns, strict=True))


def _part(plan: SharingPlan, units: Sequence[SharedUnit]) -> _ClassPart:
    sets = {number: _ends(plan.ranks_of(number)) for number in {unit.wanted_by for unit in units}}
    return _ClassPart(
        deltas([unit.number for unit in units]),
        deltas([unit.run.file for unit in units]),
        deltas([unit.run.first for unit in units]),
        deltas([unit.run.stop for unit in units]),
        deltas([unit.owner for unit in units]),
        deltas([unit.wanted_by for unit in units]),
        sets,
    )


def _ends(ranks: Sequence[int]) -> list[int]:
    """Return first and last of each run of consecutive ``ranks``."""
    ends = [ranks[0]]
    for before, rank in pairwise(ranks):
        if rank != before + 1:
            ends.extend((before, rank))
    return [*ends, ranks[-1]]


def _pairs(ends: Sequence[int]) -> zip[tuple[int, int]]:
    return zip(ends[::2], ends[1::2], strict=True)


prepare_decoding(SharingOffer, _Wants, _Verdict, _ClassPart)
