"""Run one session on a receiver: receive tables, send wants, receive buckets, verify and apply each.

    Table of every rank -> select -> Wants -> per rank: Plan -> per bucket: Bucket -> take -> verify -> unpack -> Taken

Guarantees: no tensor is complete before its buckets have matched the checksums sent with them. Nothing is planned twice
for the same tables and destination.
Assumes: the destination's memory is not changed by others until the session is over.
Does not: commit (``session.receive``).
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch.distributed as dist
import xxhash

from holdfast import events
from holdfast.coordination.failure import RankFailure
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import (
    CheckpointCorrupt,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    PeerLost,
    StateMismatch,
    listed,
)
from holdfast.sync.protocol import TensorInfo
from holdfast.sync.session import messages
from holdfast.sync.session.channel import SLOTS, Fetches, bucket_memory
from holdfast.sync.weights.buckets import Piece, PieceBox, Wanted, select
from holdfast.sync.weights.copy import BucketCopy
from holdfast.sync.weights.pieces import destinations_of, places_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from holdfast.coordination.deadline import Deadline
    from holdfast.state.entries import WholePlace
    from holdfast.sync.protocol import Destination
    from holdfast.sync.session.channel import Channels, ReceiveChannel
    from holdfast.sync.session.connection import Connection
    from holdfast.sync.weights.pieces import Local


class _Break(NamedTuple):
    """Why a channel has become unusable."""

    error: HoldfastError


class _Selection(NamedTuple):
    """Pieces to receive from each rank, and their destinations."""

    tensors: dict[str, torch.Tensor]
    at: dict[str, WholePlace | None]
    wanted: list[Wanted]
    parts: list[list[PieceBox]]
    digests: list[str]
    places: Mapping[str, Sequence[Local]]
    nbytes: dict[str, int]
    """Expected bytes by name."""


class VersionFetcher:
    """Fetches versions over one connection; keeps the channels of its ranks, and what these need not send again."""

    def __init__(self, connection: Connection, channels: Channels) -> None:
        ranks = len(connection.links)
        self.connection = connection
        self._channels_of = channels
        self._tables = connection.tables
        self._channels: list[tuple[int, ReceiveChannel] | None] = [None] * ranks
        self._wanted = [""] * ranks
        self._walks: list[tuple[str, list[BucketCopy]]] = [("", [])] * ranks
        self._published: tuple[tuple[str, ...], dict[str, TensorInfo]] = ((), {})
        self._selected: tuple[tuple[str, ...], _Selection] | None = None

    def drop_channels(self) -> None:
        """Drop the channels; the next session makes new ones. Idempotent."""
        for rank, known in enumerate(self._channels):
            self._channels[rank] = None
            if known is not None:
                known[1].close()

    def take(self, begin: messages.Begin, destination: Destination, deadline: Deadline, *, own: bool) -> None:
        """Bring the version to ``destination``; returns when all of it is there and verified.

        own: a version in the destination comes from this same publisher.

        Raises `StateMismatch`, `CheckpointCorrupt`, and as `Connection.next`.
        """
        connection = self.connection
        connection.phase = "tables"
        told = [connection.next(rank, messages.Table, deadline, what="the table") for rank in range(len(self._tables))]
        for rank, table in enumerate(told):
            if self._tables[rank].digest != table.digest:
                raise HoldfastError(f"publisher rank {rank} refers to a table that it has not sent")
        selection = self._select(destination)
        if not own:
            destination.forget()
        for rank, digest in enumerate(selection.digests):
            parts = None if digest == self._wanted[rank] else tuple(selection.parts[rank])
            connection.send(rank, messages.Wants(begin.session, digest, parts))
            self._wanted[rank] = digest
        connection.phase = "channels"
        channels = [self._channel(rank, table, deadline) for rank, table in enumerate(told)]
        left = dict(selection.nbytes)
        for name in [name for name, nbytes in left.items() if not nbytes]:
            destination.complete(name)
        for rank, table in enumerate(told):
            taking = _Taking(rank, table, channels[rank], self._tables[rank].items, selection.places)
            self._take_rank(begin, taking, destination, left, deadline)
        lacking = [name for name, nbytes in left.items() if nbytes]
        if lacking:
            raise HoldfastError(f"publisher ranks left out parts of {listed(lacking)}, although they offered them")

    # selecting ------------------------------------------------------------------------------------------------------

    def _select(self, destination: Destination) -> _Selection:
        digests = tuple(table.digest for table in self._tables)
        if self._published[0] != digests:
            self._published = digests, infos_of(table.items for table in self._tables)
        names = destination.select(self._published[1])
        tensors = {name: destination.memory(name) for name in names}
        at = {name: destination.place(name) for name in names}
        known = self._selected[1] if self._selected is not None and self._selected[0] == digests else None
        if known is not None and not destination.streaming:
            before = known.tensors
            is_same = len(before) == len(tensors) and at == known.at
            if is_same and all(before.get(name) is tensor for name, tensor in tensors.items()):
                return known
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        wanted, places = places_of(tensors, at, rank=rank)
        if known is not None and known.wanted == wanted:
            return known._replace(tensors=tensors, at=at, places=places)
        parts = parts_of([table.items for table in self._tables], wanted, set(names))
        nbytes = dict.fromkeys(names, 0)
        for table, of_rank in zip(self._tables, parts, strict=True):
            for part in of_rank:
                piece = table.items[part.piece]
                nbytes[piece.name] += part.box.volume * ITEMSIZE[piece.dtype]
        said = [xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(of_rank)) for of_rank in parts]
        selection = _Selection(tensors, at, wanted, parts, said, places, nbytes)
        self._selected = digests, selection
        return selection

    def _channel(self, rank: int, table: messages.Table, deadline: Deadline) -> ReceiveChannel:
        known = self._channels[rank]
        if known is not None and known[0] == table.epoch:
            return known[1]
        if known is not None:
            known[1].close()
        try:
            with bucket_memory(table.bucket_bytes):
                channel = self._channels_of.receive_channel(table.channel, table.bucket_bytes)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"publisher rank {rank} uses another transport than this receiver ({error}); use the "
                "same on both sides",
                field="transport",
            ) from error
        self._channels[rank] = table.epoch, channel
        limit = self.connection.at_least(deadline)
        self._carry(rank, channel, lambda: channel.open(limit), deadline, "the channel")
        return channel

    def _carry(
        self,
        rank: int,
        channel: ReceiveChannel,
        function: Callable[[], Any],
        deadline: Deadline,
        what: str,
        *,
        blocks: bool = True,
    ) -> Any:
        """Run ``function`` of a channel and return its result. If the channel breaks, wait for another session."""
        connection = self.connection

        def carried() -> Any:
            try:
                return function()
            except (PeerLost, DeadlineExceeded) as error:
                return _Break(error)

        result = connection.aside(rank, carried, deadline, what=what) if blocks and channel.blocks else carried()
        if isinstance(result, _Break):
            connection.send(0, messages.Broke(connection.session, RankFailure.of(result.error, rank=0)))
            while True:
                connection.wait(deadline, 0, "another session")
        return result

    # buckets ------------------------------------------------------------------------------------------------------

    def _take_rank(
        self, begin: messages.Begin, taking: _Taking, destination: Destination, left: dict[str, int], deadline: Deadline
    ) -> None:
        """Take all buckets of a rank."""
        connection, rank = self.connection, taking.rank
        connection.phase = "plan"
        plan = connection.next(rank, messages.Plan, deadline, what="the plan")
        buckets = connection.plans[rank].items
        if connection.plans[rank].digest != plan.digest:
            raise HoldfastError(f"publisher rank {rank} refers to a plan that it has not sent")
        if self._walks[rank][0] != plan.digest:
            self._walks[rank] = plan.digest, [BucketCopy(planned.plan) for planned in buckets]
        walks = self._walks[rank][1]
        posted = 0
        for number, planned in enumerate(buckets):
            while posted < min(len(buckets), number + SLOTS):
                self._post(taking, buckets[posted], deadline)
                posted += 1
            connection.phase = f"bucket {planned.seq}"
            said = connection.next(rank, messages.Bucket, deadline, what=f"bucket {planned.seq}")
            if said.seq != planned.seq or said.nbytes != planned.plan.nbytes:
                raise HoldfastError(f"publisher rank {rank} sent bucket {said.seq}, expected {planned.seq}")
            if said.nbytes:
                self._apply(begin, taking, planned, walks[number], said, deadline)
            connection.send(rank, messages.Taken(begin.session, planned.seq))
            for name, nbytes in taking.counts(planned):
                left[name] -= nbytes
                if nbytes and not left[name]:
                    destination.complete(name)
            connection.beat()

    def _post(self, taking: _Taking, planned: messages.PlannedBucket, deadline: Deadline) -> None:
        plan, seq, channel = planned.plan, taking.table.first + planned.seq, taking.channel
        if not plan.nbytes:
            return

        def post() -> None:
            channel.post(seq, plan.nbytes, plan.lane)

        self._carry(taking.rank, channel, post, deadline, f"bucket {planned.seq}", blocks=False)

    def _apply(
        self,
        begin: messages.Begin,
        taking: _Taking,
        planned: messages.PlannedBucket,
        walk: BucketCopy,
        said: messages.Bucket,
        deadline: Deadline,
    ) -> None:
        channel, seq = taking.channel, taking.table.first + planned.seq
        limit = self.connection.at_least(deadline)
        memory = self._carry(taking.rank, channel, lambda: channel.take(seq, limit), deadline, f"bucket {planned.seq}")
        self._fetch_next(taking, deadline)
        found = walk.take(memory, taking.destinations, said.kind)
        if found != said.checksum:
            self.connection.check(taking.rank)  # a member that was given up may have read newer data
            names = list(dict.fromkeys(name for name, _ in taking.counts(planned)))
            raise CheckpointCorrupt(
                f"bucket {planned.seq} of version {begin.version} from publisher rank {taking.rank} did not arrive as "
                f"it was sent: {said.nbytes} bytes with checksum {found:016x}, expected {said.checksum:016x} (tensors "
                f"{', '.join(names[:5])}). Nothing was committed; receive again",
                path=f"publisher rank {taking.rank}, version {begin.version}, bucket {planned.seq}",
                tensor=names[0] if names else None,
                byte_range=(0, said.nbytes),
            )
        channel.release(seq)
        events.count("sync_bytes_received", said.nbytes)

    def _fetch_next(self, taking: _Taking, deadline: Deadline) -> None:
        """Start receiving the next bucket, if it is ready, while this one is unpacked."""
        channel, rank, first = taking.channel, taking.rank, taking.table.first
        if not isinstance(channel, Fetches):
            return
        for said in self.connection.heard(rank, messages.Bucket):
            fetch = partial(channel.fetch, first + said.seq)
            self._carry(rank, channel, fetch, deadline, f"bucket {said.seq}", blocks=False)


class _Taking:
    """Data received from one rank in one session."""

    def __init__(
        self,
        rank: int,
        table: messages.Table,
        channel: ReceiveChannel,
        pieces: tuple[Piece, ...],
        places: Mapping[str, Sequence[Local]],
    ) -> None:
        self.rank = rank
        self.table = table
        self.channel = channel
        self.destinations = destinations_of(pieces, places)
        self._pieces = pieces

    def counts(self, planned: messages.PlannedBucket) -> list[tuple[str, int]]:
        """Return the names in a bucket, with their bytes."""
        return [(self._pieces[entry.piece].name, entry.nbytes) for entry in planned.plan.entries]


def infos_of(tables: Iterable[Sequence[Piece]]) -> dict[str, TensorInfo]:
    """Return the published tensors by name; two names are aliases only if all ranks that send them say so."""
    found: dict[str, TensorInfo] = {}
    for piece in chain.from_iterable(tables):
        info = TensorInfo(piece.shape, piece.dtype, piece.same_as)
        known = found.setdefault(piece.name, info)
        if known.same_as != info.same_as:
            found[piece.name] = known._replace(same_as="")
    return found


def parts_of(tables: Sequence[Sequence[Piece]], wanted: Any, names: set[str]) -> list[list[PieceBox]]:
    """Return `select` of the tensors in ``names`` alone: leaves out other names of a tied parameter."""
    numbers = [[number for number, piece in enumerate(table) if piece.name in names] for table in tables]
    kept = [[table[number] for number in of_rank] for table, of_rank in zip(tables, numbers, strict=True)]
    if not any(kept) and wanted:
        raise StateMismatch("none of the wanted names is published", missing=tuple(sorted(names)))
    return [
        [PieceBox(of_rank[part.piece], part.offsets, part.sizes) for part in parts]
        for of_rank, parts in zip(numbers, select(kept, wanted), strict=True)
    ]
