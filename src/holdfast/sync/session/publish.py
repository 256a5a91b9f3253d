r"""Implement publishing for transports over links: what one rank's `publish` does before and after its server sends.

    tensors -> look (does the structure stand?) -> looks of all ranks -> pieces -> (staged, and) offered
                \-> in the capture of a checkpoint? (``weights.from_capture``)

Guarantees: a structure that stands is not planned again. Where one rank's publish fails before it has offered anything,
those of all ranks fail with the same cause.
Assumes: all ranks of the group make their half, and publish, in the same order.
Does not: send (``session.server``).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import Group, open_group, ranks_of
from holdfast.coordination.round import Round
from holdfast.errors import ConfigError, HoldfastError
from holdfast.sync.lineage import tell_published
from holdfast.sync.protocol import Published
from holdfast.sync.session.futures import Offered
from holdfast.sync.session.links import listener
from holdfast.sync.session.rendezvous import PLACES, ListenAddress, Places, hosts_here, open_rendezvous, this_machine
from holdfast.sync.session.sender import VersionSource
from holdfast.sync.session.server import Server
from holdfast.sync.weights.agreed import CutWeights, WeightsAgreement
from holdfast.sync.weights.version_store import VersionStore

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.channel import Channels
    from holdfast.sync.weights.pieces import Local, Weights


_MEET_S: Final = 120.0
"""Seconds until all ranks of a group must have made their publisher."""
_CLOSE_S: Final = 10.0
_NEWS_S: Final = 5.0
"""Rank 0 knows that a deadline has passed; its word takes a moment."""


class LinkedPublishing:
    """See the module; implements `Publishing`."""

    def __init__(
        self,
        channels: Channels,
        options: PublisherOptions,
        *,
        rendezvous: Any,
        process_group: Any | None,
        host: str | None,
        peer_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._options = options
        self._captures = options.captures
        if self._captures is not None and self._captures.ranks != (ranks := ranks_of(process_group)):
            raise ConfigError(
                f"manager: ranks {list(self._captures.ranks)} save, but ranks {list(ranks)} publish; give "
                "both the same process_group, or leave the manager out",
                field="manager",
            )
        self._group = open_group(process_group, purpose="sync")
        self._rendezvous = open_rendezvous(rendezvous, hosting=True) if self._group.rank == 0 else None
        self._store = None if options.bypass_cpu else VersionStore(options.keep_versions)
        sock = listener(channels.host)
        try:
            self._places = _meet(self._group, sock, channels, host)
            if self._rendezvous is not None:
                self._rendezvous.put(PLACES, msgspec.msgpack.encode(self._places))
        except BaseException:
            sock.close()
            raise
        self._server = Server(
            self._group.rank, self._places, sock, channels, options, self._rendezvous, peer_timeout_s=peer_timeout_s
        )
        self._server.start()
        self._agreement = WeightsAgreement(
            self._group, self._captures, bucket_bytes=options.bucket_bytes, refuses_unfit=not options.bypass_cpu
        )
        self._offered: set[int] = set()
        if self._captures is not None:
            self._captures.join()

    def publish(
        self,
        weights: Callable[[], Weights],
        version: int,
        deadline: Deadline,
        meta: Mapping[str, Any],
    ) -> Published:
        began, before = time.monotonic(), self._server.bytes_sent
        if self._server.fatal is not None:
            raise self._server.fatal
        look = self._agreement.agree(weights, version, deadline)
        try:
            cut = self._agreement.cut(look)
        except HoldfastError as error:
            self._server.withdraw(version, RankFailure.of(error, rank=self._group.rank))
            raise
        receivers = lost = 0
        encoded = msgspec.msgpack.encode(meta)
        if self._store is None:
            _finish_writes(cut.pieces)
            source = VersionSource(version, cut.table, cut.digest, lambda: contextlib.nullcontext(cut.pieces))
            offered = Offered(source, direct=True, deadline=deadline, unfit=cut.unfit, meta=encoded)
            receivers, lost = self._send(offered)
        else:
            self._stage(self._store, version, cut, deadline, encoded)
        seconds = time.monotonic() - began
        tell_published(version, meta, rank=self._group.rank, seconds=seconds)
        sent = self._server.bytes_sent - before if self._store is None else 0
        return Published(version=version, receivers=receivers, lost=lost, bytes_sent=sent, seconds=seconds)

    def pin(self, version: int) -> None:
        self._kept().pin(version)

    def unpin(self, version: int) -> None:
        store = self._kept()
        store.unpin(version)
        self._withdraw_evicted(store)

    @property
    def versions(self) -> tuple[int, ...]:
        return () if self._store is None else self._store.versions

    def close(self) -> None:
        if self._captures is not None:
            self._captures.leave()
            self._captures = None
        self._server.close(_CLOSE_S)
        self._channels.close()
        if self._store is not None:
            self._store.close()
        if self._rendezvous is not None:
            with contextlib.suppress(HoldfastError):  # a record that stays behind is of a port where nobody answers
                found = self._rendezvous.get(PLACES)
                if found and msgspec.msgpack.decode(found, type=Places).incarnation == self._places.incarnation:
                    self._rendezvous.delete(PLACES)
            self._rendezvous.close()
        self._group.board.close()

    # after --------------------------------------------------------------------------------------------------------

    def _send(self, offered: Offered) -> tuple[int, int]:
        source, deadline = offered.source, offered.deadline
        awaited = self._server.offer(offered)
        outcome = awaited.wait(deadline.left_s() + _NEWS_S)
        if outcome is None:
            error = deadline.exceeded(
                f"publisher rank 0 to say what became of version {source.version}", "look at the log of rank 0"
            )
            self._server.withdraw(source.version, RankFailure.of(error, rank=self._group.rank))
            raise error
        if outcome.receivers:
            self._agreement.newest_out = source.version
        if outcome.reason is not None:
            raise outcome.reason.cause()
        return outcome.receivers, outcome.lost

    def _stage(self, store: VersionStore, version: int, cut: CutWeights, deadline: Deadline, meta: bytes) -> None:
        try:
            if cut.captured is None or not cut.lying:
                store.stage(version, cut.table, cut.pieces)
            else:
                _take_in(store, version, cut, cut.captured.keep().release)
        except HoldfastError as error:
            self._server.withdraw(version, RankFailure.of(error, rank=self._group.rank))
            raise
        self._agreement.newest_out = version

        @contextlib.contextmanager
        def lease() -> Iterator[tuple[Local, ...]]:
            with store.reading(version) as stored:
                yield stored.locals

        self._withdraw_evicted(store)
        self._offered.add(version)
        source = VersionSource(version, cut.table, cut.digest, lease)
        self._server.offer(Offered(source, direct=False, deadline=deadline, meta=meta))

    def _withdraw_evicted(self, store: VersionStore) -> None:
        for version in self._offered.difference(store.versions):
            self._offered.discard(version)
            self._server.withdraw(version)

    def _kept(self) -> VersionStore:
        if self._store is None:
            raise ConfigError("this publisher keeps no versions; make it with bypass_cpu=False", field="bypass_cpu")
        return self._store


def _take_in(store: VersionStore, version: int, cut: CutWeights, let_go: Callable[[], None]) -> None:
    """Keep a version that lies in a capture, or in part; what doesn't is copied."""
    try:
        if len(cut.lying) == len(cut.table):
            store.add(version, cut.table, cut.pieces, let_go)
        else:
            store.stage(version, cut.table, cut.pieces, lying=cut.lying, let_go=let_go)
    except BaseException:
        let_go()
        raise


def _meet(group: Group, sock: socket.socket, channels: Channels, host: str | None) -> Places:
    """Tell the other ranks where this one listens, and learn of all of them."""
    hosts = (channels.host,) if channels.host else hosts_here(host)
    mine = ListenAddress(hosts, sock.getsockname()[1], this_machine())
    round_ = Round(group.board, "places", had_not="made its publisher")

    def gathered(words: list[bytes]) -> bytes:
        group.board.delete_list("places")
        places = tuple(msgspec.msgpack.decode(word, type=ListenAddress) for word in words)
        return msgspec.msgpack.encode(Places(secrets.token_hex(8), secrets.token_hex(16), places))

    round_.say(msgspec.msgpack.encode(mine))
    found = round_.wait(gathered, timeout_s=_MEET_S)
    if isinstance(found, RankFailure):
        raise found.cause()
    return msgspec.msgpack.decode(found, type=Places)


def _finish_writes(pieces: list[Local]) -> None:
    """Wait for what was enqueued on devices before: the server packs on a stream of its own."""
    for device in {local.source.device for local in pieces if local.source.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
