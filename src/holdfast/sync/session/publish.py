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
import functools
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import Group, open_group, ranks_of
from holdfast.coordination.round import Round, Rounds
from holdfast.errors import ConfigError, HoldfastError
from holdfast.format.structure import Structure, decode_structure
from holdfast.state.entries import known_dtype, local_tensor
from holdfast.sync.protocol import Published
from holdfast.sync.session.futures import Offered
from holdfast.sync.session.links import listener
from holdfast.sync.session.rendezvous import PLACES, ListenAddress, Places, hosts_here, open_rendezvous, this_machine
from holdfast.sync.session.sender import VersionSource, digest_of
from holdfast.sync.session.server import Server
from holdfast.sync.weights.buckets import row_bytes, unfit
from holdfast.sync.weights.delta import History, extent_sums
from holdfast.sync.weights.from_capture import Captured, Shared, captured_of
from holdfast.sync.weights.pieces import Outgoing, WeightsSpec
from holdfast.sync.weights.version_store import VersionStore

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.boxes import Box
    from holdfast.coordination.board import Board
    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.channel import Channels
    from holdfast.sync.weights.buckets import Piece
    from holdfast.sync.weights.pieces import Local


# What publisher ranks tell one another before each version: what their weights look like, or why there are none.
#
# Guarantees: all ranks get the same, in the order of the ranks, or all fail. A structure that stands travels once, and
# once more when some rank may have missed it. Torch-free.
# All ranks are in the same rounds, whatever went wrong on one of them before: who comes to a round that was given up
# goes on to the next.
# Does not: make plans of it (``sync.weights.pieces``).


class RankSpec(msgspec.Struct, frozen=True, array_like=True):
    """Structure that a rank would publish, encoded if it is new; or why it can't publish."""

    rank: int
    version: int
    digest: str
    encoded: bytes | None = None
    failure: RankFailure | None = None
    unfit: RankFailure | None = None
    """Why these buckets can't carry it, whoever takes it."""
    capture: int | None = None
    """Of which save this rank has a capture of the same moment; None if of none."""
    apart: tuple[str, ...] = ()
    """Which of its weights that one lacks."""
    anew: bool = False
    """This rank hasn't heard all that was said: every one has to say all of it once more."""


class SpecExchange:
    """Exchange specs between ranks. ``structures``: all received ones by digest, and those that the caller adds."""

    def __init__(self, board: Board) -> None:
        self.structures: dict[str, Structure] = {}
        self._board = board
        self._rounds = Rounds(
            board,
            "looks",
            had_not="published this version",
            advice="every rank must call publish, with the same version; look at their logs, or raise the timeout",
        )
        self._told: set[str] = set()
        self._missed = False
        """Something that was said may not have been heard here."""

    def exchange(self, mine: RankSpec, deadline: Deadline) -> list[RankSpec]:
        """Return the specs of all ranks, including ``mine``; the structures that they name are in `structures`.

        Raises the error of any rank that failed, `ConfigError` if versions differ, and `DeadlineExceeded` if a rank
        doesn't answer, which it names.
        """
        while self._board.world > 1:
            is_known = mine.digest in self._told and not self._missed
            said = msgspec.structs.replace(mine, encoded=None if is_known else mine.encoded, anew=self._missed)
            self._missed = True
            self._rounds.skip_failed()
            round_ = self._rounds.next()
            round_.say(_encode(said))
            silent = functools.partial(_silent, round_, deadline)
            found = round_.wait(_encode, timeout_s=deadline.left_s(), grace_s=0.0, silent=silent, watch=True)
            if isinstance(found, RankFailure):
                raise found.cause()
            heard = list(map(_SPEC.decode, _WORDS.decode(found)))
            for said in heard:
                if said.encoded is not None and said.digest not in self.structures:
                    self.structures[said.digest] = decode_structure(said.encoded)
            self._told.add(mine.digest)
            is_anew = any(said.anew for said in heard)
            self._missed = is_anew or len(heard) < self._board.world
            _check_alike(heard)
            if not is_anew:
                return heard
            self._told.clear()
            self._missed = False
        return [mine]

    def fail(self, mine: RankSpec) -> None:
        """Tell the others why this rank can't publish; doesn't wait for them. Where all know already, say nothing."""
        self._missed = True
        with contextlib.suppress(HoldfastError):  # they will give up
            if self._board.world == 1 or self._rounds.skip_failed():
                return
            round_ = self._rounds.next()
            if self._board.rank:
                round_.say(_encode(mine))
            else:
                round_.announce(_encode([_encode(mine)]))  # nobody else would


_encode: Final = msgspec.msgpack.encode
_WORDS: Final = msgspec.msgpack.Decoder(list[bytes])
_SPEC: Final = msgspec.msgpack.Decoder(RankSpec)


def _silent(round_: Round, deadline: Deadline, words: Mapping[int, bytes], _: float) -> RankFailure:
    return round_.silence(words, deadline.timeout_s)


def _check_alike(found: list[RankSpec]) -> None:
    """Raise unless all ranks would publish, and the same version."""
    for said in found:
        if said.failure is not None:
            raise said.failure.cause()
    first = found[0]
    for said in found:
        if said.version != first.version:
            raise ConfigError(
                f"publisher rank {first.rank} publishes version {first.version}, but rank {said.rank} version "
                f"{said.version}; all ranks must publish the same version",
                field="version",
            )


_MEET_S: Final = 120.0
"""Seconds until all ranks of a group must have made their publisher."""
_CLOSE_S: Final = 10.0
_NEWS_S: Final = 5.0
"""Rank 0 knows that a deadline has passed; its word takes a moment."""


class _Cut(NamedTuple):
    """Pieces of one version that this rank sends. ``lying``: numbers of the pieces in ``captured``."""

    table: tuple[Piece, ...]
    digest: str
    pieces: list[Local]
    lying: frozenset[int] = frozenset()
    captured: Captured | None = None
    unfit: HoldfastError | None = None


class _Agreed(NamedTuple):
    """Tensors that this rank publishes, and the combined specs of all ranks.

    ``apart``: the names that aren't taken from the capture; None if none are.
    """

    weights: Mapping[str, torch.Tensor]
    look: WeightsSpec
    captured: Captured | None
    digests: tuple[str, ...]
    apart: frozenset[str] | None
    unfit: HoldfastError | None


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
        self._look: WeightsSpec | None = None
        self._unfit: HoldfastError | None = None
        self._looks = SpecExchange(self._group.board)
        self._outgoing: tuple[WeightsSpec, tuple[str, ...], Outgoing, str] | None = None
        self._shared: tuple[Shared, str] | None = None
        self._history = History(full_every=options.full_every) if options.delta else None
        self._history_lock = threading.Lock()
        self._newest_out = -1
        self._offered: set[int] = set()
        if self._captures is not None:
            self._captures.join()

    def publish(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int, deadline: Deadline) -> Published:
        began, before = time.monotonic(), self._server.bytes_sent
        if self._server.fatal is not None:
            raise self._server.fatal
        look = self._agreed_look(weights, version, deadline)
        try:
            cut = self._cut(look)
        except HoldfastError as error:
            self._server.withdraw(version, RankFailure.of(error, rank=self._group.rank))
            raise
        receivers = lost = 0
        self._note_sums(version, cut)
        if self._store is None:
            _finish_writes(cut.pieces)
            source = VersionSource(
                version, cut.table, cut.digest, lambda: contextlib.nullcontext(cut.pieces), self._changes(version)
            )
            receivers, lost = self._send(source, cut.unfit, deadline)
        else:
            self._stage(self._store, version, cut, deadline)
        return Published(
            version=version,
            receivers=receivers,
            lost=lost,
            bytes_sent=self._server.bytes_sent - before if self._store is None else 0,
            seconds=time.monotonic() - began,
        )

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

    # before -------------------------------------------------------------------------------------------------------

    def _agreed_look(
        self, given: Callable[[], Mapping[str, torch.Tensor]], version: int, deadline: Deadline
    ) -> _Agreed:
        """Describe this rank's weights, if all ranks would publish this version."""
        rank, structures = self._group.rank, self._looks.structures
        try:
            weights, look, captured = self._look_at(given, version, deadline)
        except BaseException as error:
            self._looks.fail(RankSpec(rank, version, "", failure=RankFailure.of(error, rank=rank)))
            raise
        if look is not self._look:
            self._unfit = _unfit(weights, self._options.bucket_bytes)
        number = None if captured is None else captured.number
        apart = () if captured is None else tuple(set(look.names).difference(captured.names))
        reason = None if self._unfit is None else RankFailure.of(self._unfit, rank=rank)
        mine = RankSpec(rank, version, look.digest, look.encoded, unfit=reason, capture=number, apart=apart)
        structures[look.digest] = look.structure
        found = self._looks.exchange(mine, deadline)
        digests = tuple(said.digest for said in found)
        if not any(structures[digest].tensors for digest in digests):
            raise ConfigError(
                "weights is empty: there is nothing to publish; an iterator gives its tensors once", field="weights"
            )
        misfit = next((said.unfit.cause() for said in found if said.unfit is not None), None)
        if misfit is not None and self._store is not None:
            raise misfit
        self._look = look
        is_shared = number is not None and all(said.capture == number for said in found)
        names = frozenset(name for said in found for name in said.apart) if is_shared else None
        return _Agreed(weights, look, captured, digests, names, misfit)

    def _look_at(
        self, given: Callable[[], Mapping[str, torch.Tensor]], version: int, deadline: Deadline
    ) -> tuple[Mapping[str, torch.Tensor], WeightsSpec, Captured | None]:
        weights, look = given(), self._look
        if version <= self._newest_out:
            raise ConfigError(
                f"version {version} isn't greater than {self._newest_out}, which receivers already have",
                field="version",
            )
        if look is None or not look.stands(weights):
            look = WeightsSpec(weights, rank=self._group.rank, group_ranks=self._group.ranks)
        held = None if self._captures is None else self._captures.held
        return weights, look, None if held is None else captured_of(held, look, weights, timeout_s=deadline.left_s())

    def _cut(self, agreed: _Agreed) -> _Cut:
        """Cut the tensors into the pieces that this rank sends."""
        look, captured = agreed.look, agreed.captured
        made = self._outgoing
        if made is None or made[0] is not look or made[1] != agreed.digests:
            outgoing = Outgoing(look, self._looks.structures, agreed.digests)
            made = self._outgoing = look, agreed.digests, outgoing, digest_of(outgoing.table)
        pieces = made[2].locals(agreed.weights)
        if captured is None or agreed.apart is None:
            return _Cut(made[2].table, made[3], pieces, unfit=agreed.unfit)
        if self._shared is None or not self._shared[0].is_for(captured, made[2], agreed.apart):
            shared = Shared(captured, made[2], look, agreed.apart)
            self._shared = shared, made[3] if shared.table is made[2].table else digest_of(shared.table)
        shared, digest = self._shared
        return _Cut(shared.table, digest, shared.locals(captured, pieces), shared.lying, captured, agreed.unfit)

    def _note_sums(self, version: int, cut: _Cut) -> None:
        if self._history is not None:
            with self._history_lock:
                extents = self._history.extents(cut.table)
            sums = extent_sums(extents, cut.pieces)
            with self._history_lock:
                self._history.record(version, cut.table, sums)

    def _changes(self, version: int) -> Callable[[int | None], list[list[Box]] | None]:
        history = self._history

        def changed(base: int | None) -> list[list[Box]] | None:
            if history is None or base is None:
                return None
            with self._history_lock:
                return history.changed(version, base)

        return changed

    # after --------------------------------------------------------------------------------------------------------

    def _send(self, source: VersionSource, unfit: HoldfastError | None, deadline: Deadline) -> tuple[int, int]:
        awaited = self._server.offer(Offered(source, direct=True, deadline=deadline, unfit=unfit))
        outcome = awaited.wait(deadline.left_s() + _NEWS_S)
        if outcome is None:
            error = deadline.exceeded(
                f"publisher rank 0 to say what became of version {source.version}", "look at the log of rank 0"
            )
            self._server.withdraw(source.version, RankFailure.of(error, rank=self._group.rank))
            raise error
        if outcome.receivers:
            self._newest_out = source.version
        if outcome.reason is not None:
            raise outcome.reason.cause()
        return outcome.receivers, outcome.lost

    def _stage(self, store: VersionStore, version: int, cut: _Cut, deadline: Deadline) -> None:
        try:
            if cut.captured is None or not cut.lying:
                store.stage(version, cut.table, cut.pieces)
            else:
                _take_in(store, version, cut, cut.captured.keep().release)
        except HoldfastError as error:
            self._server.withdraw(version, RankFailure.of(error, rank=self._group.rank))
            raise
        self._newest_out = version

        @contextlib.contextmanager
        def lease() -> Iterator[tuple[Local, ...]]:
            with store.reading(version) as stored:
                yield stored.locals

        self._withdraw_evicted(store)
        self._offered.add(version)
        source = VersionSource(version, cut.table, cut.digest, lease, self._changes(version))
        self._server.offer(Offered(source, direct=False, deadline=deadline))

    def _withdraw_evicted(self, store: VersionStore) -> None:
        for version in self._offered.difference(store.versions):
            self._offered.discard(version)
            self._server.withdraw(version)

    def _kept(self) -> VersionStore:
        if self._store is None:
            raise ConfigError("this publisher keeps no versions; make it with bypass_cpu=False", field="bypass_cpu")
        return self._store


def _unfit(weights: Mapping[str, torch.Tensor], bucket_bytes: int) -> HoldfastError | None:
    """Why this rank's tensors can't be sent in buckets of so many bytes, if they can't."""
    for name, tensor in weights.items():
        local = local_tensor(tensor)
        row = row_bytes(local.shape, local.itemsize)
        if row > bucket_bytes and local.numel():
            return unfit(name, known_dtype(tensor, name), tensor.shape, row, bucket_bytes)
    return None


def _take_in(store: VersionStore, version: int, cut: _Cut, let_go: Callable[[], None]) -> None:
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
    for device in {local.tensor.device for local in pieces if local.tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
