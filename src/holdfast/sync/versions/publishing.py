"""Publish versions into blocks of memory, on one publisher rank.

    agree (``weights.agreed``) -> tiles -> begin a block -> fill and hash it -> all ranks have? -> record -> news

Guarantees: `publish` returns when the version exists: all ranks have staged it, and rank 0 has put its record into the
rendezvous. If one rank fails before, none has it, and all raise that cause. No receiver is waited for: one that hangs
costs at most one block (``versions.books``). Memory: ``keep_versions`` + 2 blocks of this rank's bytes, and one for
each older version that is pinned.
Assumes: all ranks make their half, and publish, in the same order; one thread each. The weights don't change while
`publish` runs.
Does not: answer receivers (``versions.serving``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import events
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import open_group, ranks_of
from holdfast.coordination.round import Round, Rounds
from holdfast.errors import ConfigError, HoldfastError, RootLocked
from holdfast.sync.lineage import tell_published
from holdfast.sync.protocol import Published
from holdfast.sync.session.links import listener
from holdfast.sync.session.rendezvous import PLACES, hosts_here, open_rendezvous, this_machine
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import BlockLayout
from holdfast.sync.versions.books import Books
from holdfast.sync.versions.deltas import BlockDeltas
from holdfast.sync.versions.serving import BlockServer, Served, boot_id, connect_to, listen_at, unlink_quietly
from holdfast.sync.weights.agreed import CutWeights, WeightsAgreement
from holdfast.sync.weights.pieces import copy_threads
from holdfast.sync.weights.tiles import ColumnTiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.coordination.deadline import Deadline
    from holdfast.format import sparse
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.rendezvous import Rendezvous
    from holdfast.sync.versions.block import BlockMemory
    from holdfast.sync.versions.reads import MemoryReads
    from holdfast.sync.weights.pieces import Weights

_log = logging.getLogger("holdfast")
_MEET_S: Final = 120.0
"""Seconds until all ranks of a group must have made their publisher."""
_CLOSE_S: Final = 10.0
_NEWEST: Final = "newest"
"""Name under which rank 0 stores the incarnation and the record of the newest version."""
_SPARE_BLOCKS: Final = 2


class BlockPublishing:
    """See the module; implements `Publishing`."""

    def __init__(
        self,
        options: PublisherOptions,
        *,
        rendezvous: Any,
        process_group: Any | None,
        peer_timeout_s: float,
        directory: str | None = None,
        network: bool = False,
        host: str | None = None,
        memory_reads: Callable[[], MemoryReads] | None = None,
    ) -> None:
        """directory: where this rank's socket lies. network: receivers may be on other hosts, which know ``host``.

        memory_reads: makes what lets them read blocks without this process.
        """
        max_blocks = _max_blocks(options)
        self._rewind = options.rewind
        self._captures = options.captures
        if self._captures is not None and self._captures.ranks != (ranks := ranks_of(process_group)):
            raise ConfigError(
                f"manager: ranks {list(self._captures.ranks)} save, but ranks {list(ranks)} publish; give "
                "both the same process_group, or leave the manager out",
                field="manager",
            )
        self._group = open_group(process_group, purpose="sync")
        self._rendezvous = open_rendezvous(rendezvous, hosting=True) if self._group.rank == 0 else None
        where = f"publisher rank {self._group.rank}"
        self._served = Served(Books(keep=options.keep_versions, max_blocks=max_blocks, where=where))
        self._path = ""
        self._is_bound = True
        self._served.memory_reads = None if memory_reads is None else memory_reads()
        if network:
            sock = listener("")
            place = messages.RankPlace("", boot_id(), hosts_here(host), sock.getsockname()[1], this_machine())
        else:
            self._path = os.path.join(_directory(rendezvous, directory), f"holdfast-{secrets.token_hex(6)}")
            sock = listen_at(self._path)
            place = messages.RankPlace(self._path, boot_id())
        try:
            self._places = self._meet(place)
        except BaseException:
            sock.close()
            unlink_quietly(self._path)
            if self._served.memory_reads is not None:
                self._served.memory_reads.close()
            raise
        self._server = BlockServer(
            self._group.rank, sock, self._places.token, self._served, peer_timeout_s=peer_timeout_s
        )
        if network and options.delta is not None:
            kind: sparse.Kind = "steps" if options.delta == "steps" else "values"
            self._served.deltas = BlockDeltas(
                self._served, kind=kind, delta_bytes=options.delta_bytes, rank=self._group.rank
            )
        self._is_replaced = False
        self._agreement = WeightsAgreement(self._group, self._captures)
        self._tiles = ColumnTiles(options.column_tiles)
        self._staged = Rounds(self._group.board, "staged", had_not="staged this version")
        self._layout: tuple[str, BlockLayout] | None = None
        self._unsettled: tuple[messages.VersionRecord, BlockLayout] | None = None
        """A version that exists, until all of this half knows."""
        self._preparing: threading.Thread | None = None
        self._records: dict[int, messages.VersionRecord] = {}
        if self._captures is not None:
            self._captures.join()

    def publish(
        self,
        weights: Callable[[], Weights],
        version: int,
        deadline: Deadline,
        meta: Mapping[str, Any],
    ) -> Published:
        began = time.monotonic()
        self._settle()
        try:
            look = self._agreement.agree(lambda: self._checked(weights, version), version, deadline)
        except RootLocked:
            self._server.close(_CLOSE_S)  # who follows this one looks for a publisher then, and finds the other
            raise
        round_ = self._staged.next()
        try:
            cut = self._tiles.cut(self._agreement.cut(look), lambda: self._agreement.names_of(look))
            layout = self._layout_of(cut)
            round_.say(_encode(self._stage(version, layout, cut)))
            self._unsettled = self._wait_all(round_, version, meta, deadline), layout
        except BaseException as error:
            with contextlib.suppress(HoldfastError):
                round_.announce(RankFailure.of(error, rank=self._group.rank))
            if self._unsettled is None:
                with self._served.lock:
                    self._served.books.abort(version)
                    self._served.layouts.pop(version, None)
                    self._served.forget_but(self._served.layouts.keys())
            raise
        self._settle()
        self._prepare_blocks(layout.block_bytes)
        seconds = time.monotonic() - began
        tell_published(version, meta, rank=self._group.rank, seconds=seconds)
        return Published(version=version, receivers=0, lost=0, bytes_sent=0, seconds=seconds)

    def _settle(self) -> None:
        """Keep a version that exists, and tell of it; if that is interrupted, the next `publish` does it first."""
        if self._unsettled is None:
            return
        record, layout = self._unsettled
        with self._served.lock:
            self._served.books.publish(record.version)
            self._served.layouts[record.version] = layout
            self._records[record.version] = record
            self._forget_evicted()
            self._renew_news()
            self._agreement.newest_out = record.version
            self._unsettled = None
            if self._served.deltas is not None:  # once: without a delta, receivers bring it whole
                self._served.deltas.published(record.version, record.digests[self._group.rank], layout)

    def pin(self, version: int) -> None:
        with self._served.lock:
            self._served.books.pin(version)

    def unpin(self, version: int) -> None:
        with self._served.lock:
            self._served.books.unpin(version)
            self._forget_evicted()
            self._renew_news()

    @property
    def versions(self) -> tuple[int, ...]:
        with self._served.lock:
            return self._served.books.versions

    def close(self) -> None:
        if self._captures is not None:
            self._captures.leave()
            self._captures = None
        if self._rendezvous is not None:
            with contextlib.suppress(HoldfastError):  # a record that stays behind is of a path where nobody answers
                found = self._rendezvous.get(PLACES)
                if found is not None and found == msgspec.msgpack.encode(self._places):
                    self._rendezvous.delete(PLACES)
        unlink_quietly(self._path)
        self._server.close(_CLOSE_S)
        if self._served.deltas is not None:
            self._served.deltas.close(_CLOSE_S)
        with self._served.lock:
            self._served.closed.set()
            for memory in self._served.memory.values():
                self._served.end_block(memory)
            self._served.memory.clear()
        if self._preparing is not None and self._preparing.ident is not None:
            self._preparing.join(_CLOSE_S)
        if self._served.memory_reads is not None:
            self._served.memory_reads.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._group.board.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _checked(self, weights: Callable[[], Weights], version: int) -> Weights:
        """Return the weights, unless a later publisher is here, or an earlier one went further than this version.

        Raises what keeps receivers from being served.
        """
        self._server.check()
        self._let_in()
        if self._rendezvous is None:
            return weights()
        self._check_not_replaced(self._rendezvous)
        if self._agreement.newest_out < 0 and not self._rewind:
            found = self._rendezvous.get(_NEWEST)
            newest = None if found is None else msgspec.msgpack.decode(found, type=tuple[str, int])
            if newest is not None and newest[0] != self._places.incarnation and version <= newest[1]:
                raise ConfigError(
                    f"version {version} isn't greater than {newest[1]}, of an earlier publisher at "
                    f"{self._rendezvous.shown}; go on from {newest[1] + 1}, or let receivers go back "
                    "by rewind=True",
                    field="version",
                )
        return weights()

    def _let_in(self) -> None:
        """See to it that receivers find the socket: bind it again if its path is gone. Raises `StorageError`."""
        if self._path and not (self._is_bound and os.path.exists(self._path)):
            self._is_bound = False  # until it is done: an interrupt may leave a path that leads nowhere
            unlink_quietly(self._path)
            self._server.move_to(listen_at(self._path))
            self._is_bound = True

    def _check_not_replaced(self, rendezvous: Rendezvous) -> None:
        """Raise `RootLocked` if another publisher has taken this one's place; without a record of any, renew ours."""
        own, found = _encode(self._places), rendezvous.get(PLACES)
        self._is_replaced = self._is_replaced or found not in (None, own)
        if found is None and not self._is_replaced:
            rendezvous.put(PLACES, own)
        if self._is_replaced:
            raise RootLocked(
                f"another publisher has taken the place of this one at {rendezvous.shown}, and is who new receivers "
                "find: close this one, or give each publisher a rendezvous of its own",
                path=rendezvous.shown,
                by="a later publisher",
            )

    def _layout_of(self, cut: CutWeights) -> BlockLayout:
        if self._layout is None or self._layout[0] != cut.digest:
            self._layout = cut.digest, BlockLayout(cut.table)
        return self._layout[1]

    def _stage(self, version: int, layout: BlockLayout, cut: CutWeights) -> bytes:
        """Copy the pieces into a block; return the digest of what it has now."""
        held = contextlib.nullcontext() if cut.captured is None else _released(cut.captured.keep())
        with held:
            memory = self._begin(version, layout)
            digest = memory.fill(layout, cut.pieces, threads=copy_threads())
        self._server.check()
        copied = sum(layout.nbytes(number) for number, own in enumerate(layout.own) if own and number not in cut.lying)
        events.count("sync_bytes_staged", copied)
        with self._served.lock:
            self._served.books.staged(version, digest)
            self._served.layouts[version] = layout
        return digest

    def _begin(self, version: int, layout: BlockLayout) -> BlockMemory:
        """Return the memory to fill with a version."""
        served = self._served
        if self._preparing is not None and self._preparing.ident is not None:
            self._preparing.join()  # it makes what is needed now; two at once would be more than ``max_blocks``
        with served.lock:
            filling = served.books.begin(version, layout.block_bytes)
            gone = [number for number in served.memory if served.books.epoch_of(number) is None]
        for number in gone:
            served.end_block(served.memory[number], frees=True)
            with served.lock:
                del served.memory[number]
        if filling.revoked:
            _log.warning(
                "publisher rank %d takes back the memory of an older version from %d receiver(s) that held it: they "
                "have not committed or given up what they fetched",
                self._group.rank,
                len(filling.revoked),
            )
        block = filling.block
        if block.number not in served.memory:
            try:
                made = served.make_block(block.nbytes)
            except BaseException:
                with served.lock:
                    served.books.discard(block)
                raise
            with served.lock:
                served.memory[block.number] = made
        memory = served.memory[block.number]
        memory.begin(block.epoch)
        return memory

    def _prepare_blocks(self, nbytes: int) -> None:
        """Make the blocks of the next versions, on another thread: fresh memory is many times slower than warm."""
        with self._served.lock:
            is_lacking = self._served.books.lacks_blocks
        if is_lacking and (self._preparing is None or not self._preparing.is_alive()):
            self._preparing = threading.Thread(
                target=_prepare, args=(self._served, nbytes), name="holdfast-versions-blocks", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no more threads: the next publish makes its own
                self._preparing.start()

    def _wait_all(
        self, round_: Round, version: int, meta: Mapping[str, Any], deadline: Deadline
    ) -> messages.VersionRecord:
        """Return the record of the version once all ranks have staged it; raise the failure of any."""

        def decide(digests: list[bytes]) -> bytes | RankFailure:
            assert self._rendezvous is not None
            try:
                self._rendezvous.put(_NEWEST, _encode((self._places.incarnation, version)))
            except HoldfastError as error:
                return RankFailure.of(error, rank=self._group.rank)
            record = messages.VersionRecord(version, tuple(map(_DIGEST.decode, digests)), _encode(dict(meta)))
            return _encode(record)

        found = round_.wait(decide, timeout_s=deadline.left_s(), watch=True)
        if isinstance(found, RankFailure):
            raise found.cause()
        return _RECORD.decode(found)

    def _forget_evicted(self) -> None:
        kept = self._served.books.versions
        self._served.forget_but(kept)
        self._records = {version: record for version, record in self._records.items() if version in kept}

    def _renew_news(self) -> None:
        if self._rendezvous is not None:
            self._served.records = tuple(self._records[version] for version in sorted(self._records))
            self._server.tell()

    def _meet(self, place: messages.RankPlace) -> messages.PublisherPlaces:
        """Tell the other ranks where this one listens, learn of all of them, and let receivers find them."""
        board = self._group.board
        round_ = Round(board, "places", had_not="made its publisher")

        def gathered(words: list[bytes]) -> bytes:
            board.delete_list("places")
            ranks = tuple(msgspec.msgpack.decode(word, type=messages.RankPlace) for word in words)
            made = messages.PublisherPlaces(secrets.token_hex(8), secrets.token_hex(16), ranks)
            assert self._rendezvous is not None
            _unlink_dead(self._rendezvous.get(PLACES))
            self._rendezvous.put(PLACES, _encode(made))
            return _encode(made)

        round_.say(_encode(place))
        found = round_.wait(gathered, timeout_s=_MEET_S)
        if isinstance(found, RankFailure):
            raise found.cause()
        return msgspec.msgpack.decode(found, type=messages.PublisherPlaces)


def _max_blocks(options: PublisherOptions) -> int:
    found = options.keep_versions + _SPARE_BLOCKS if options.max_blocks is None else options.max_blocks
    if found <= options.keep_versions:
        raise ConfigError(
            f"max_blocks is {found}; expected more than keep_versions ({options.keep_versions}): another version is "
            "filled while these are kept",
            field="max_blocks",
        )
    return found


_encode: Final = msgspec.msgpack.encode
_DIGEST: Final = msgspec.msgpack.Decoder(bytes)
_RECORD: Final = msgspec.msgpack.Decoder(messages.VersionRecord)


def _prepare(served: Served, nbytes: int) -> None:
    """Add free blocks until a publish needs no new one."""
    while True:
        with served.lock:
            if served.closed.is_set() or not served.books.lacks_blocks:
                return
        try:
            made = served.make_block(nbytes)
        except (HoldfastError, RuntimeError) as error:  # publish says it, if it lacks it
            _log.info("a block for the next version can't be made yet: %s", error)
            return
        with served.lock:
            block = None if served.closed.is_set() else served.books.add(nbytes)
            if block is not None:
                served.memory[block.number] = made
        if block is None:
            served.end_block(made)
            return


@contextlib.contextmanager
def _released(lease: Any) -> Any:
    try:
        yield
    finally:
        lease.release()


def _directory(rendezvous: Any, directory: str | None) -> str:
    """Return where this rank's socket lies: given, that of the rendezvous, or this user's own temporary one."""
    if directory is not None:
        return directory
    if isinstance(rendezvous, (str, os.PathLike)) and not str(rendezvous).startswith("tcp://"):
        return os.path.abspath(rendezvous)
    return os.path.join(tempfile.gettempdir(), f"holdfast-{os.geteuid()}")


def _unlink_dead(places: bytes | None) -> None:
    """Remove the sockets of an earlier publisher that has died."""
    if places is None:
        return
    with contextlib.suppress(msgspec.MsgspecError):  # of another transport
        for place in msgspec.msgpack.decode(places, type=messages.PublisherPlaces).ranks:
            try:
                connect_to(place, 1.0).close()
            except ConnectionRefusedError:
                unlink_quietly(place.path)
            except (OSError, HoldfastError):
                pass
