"""Give receivers leases on one rank's blocks, and rank 0's news: a thread that answers and never waits for one of them.

Guarantees: a receiver that doesn't read what it is sent, or that can't be answered, loses its connection, and with it
its leases; nobody else notices. If the thread ends all the same, `BlockServer.check` says so. What receivers ask is
answered by the books alone: no receiver can make the publisher wait.
Assumes: `Served.lock` is held around each look into the books, by all threads.
Receivers of other hosts read ranges of blocks, each on a thread of its own, straight from the blocks' memory; those
that serve one another are told from whom to bring what (``versions.fanout``).
Does not: write to blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import events
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import RankFailure
from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.sync.lineage import tell_left, tell_received
from holdfast.sync.session.links import Ended, EventLoop, Link, connect
from holdfast.sync.session.rendezvous import this_machine
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import HEADER_BYTES, BlockMemory
from holdfast.sync.versions.books import VersionKey
from holdfast.sync.versions.fanout import FanOut, RunOutcome
from holdfast.sync.versions.reads import ReadThreads, send_all, send_range, send_sized

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.versions.block import BlockLayout
    from holdfast.sync.versions.books import Books
    from holdfast.sync.versions.deltas import BlockDeltas
    from holdfast.sync.versions.reads import MemoryReads

_log = logging.getLogger("holdfast")
_INTRODUCTION_S: Final = 10.0
_LOOK_S: Final = 1.0
_QUEUED_MAX: Final = 4096
"""Messages of a receiver that are answered before those of others get their turn."""
_BACKLOG: Final = 1024
_FAN_OUTS_LEFT: Final = 8
_NAME_BYTES_MAX: Final = 100
"""Length of a socket's path, for which Linux has 108 bytes."""
_PEER: Final = struct.Struct("3i")
"""pid, uid and gid of a peer."""


@dataclass(slots=True, eq=False)
class Served:
    """What a rank has to serve; shared by the thread that publishes and the one that answers."""

    books: Books
    lock: threading.Lock = field(default_factory=threading.Lock)
    memory: dict[int, BlockMemory] = field(default_factory=dict)
    """By number of the block."""
    layouts: dict[int, BlockLayout] = field(default_factory=dict)
    """By version."""
    records: tuple[messages.VersionRecord, ...] = ()
    """On rank 0: the versions that exist, ascending."""
    closed: threading.Event = field(default_factory=threading.Event)
    deltas: BlockDeltas | None = None
    fan_outs: dict[VersionKey, FanOut] = field(default_factory=dict)
    """Of versions that receivers have asked for, and deltas to these: of versions that are kept, and a few others."""
    places: dict[str, messages.RankPlace] = field(default_factory=dict)
    """Where receivers that serve others listen."""
    memory_reads: MemoryReads | None = None
    """Lets receivers read the blocks without this process."""

    def make_block(self, nbytes: int) -> BlockMemory:
        """Return memory for a block, which receivers may read. Raises `StorageError`, `ConfigError`."""
        made = BlockMemory(nbytes)
        if self.memory_reads is not None:
            try:
                self.memory_reads.register(made.image.bytes_view)
            except BaseException:
                made.close()
                raise
        return made

    def end_block(self, memory: BlockMemory, *, frees: bool = False) -> None:
        """Let go of a block's memory, as `BlockMemory.close` does."""
        if self.memory_reads is not None:
            self.memory_reads.deregister(memory.image.bytes_view)
        memory.close(frees=frees)

    def fan_out_of(self, key: VersionKey) -> FanOut:
        """Return who brings what of a version; of a forgotten one all comes from here. The caller holds the lock."""
        found, layout = self.fan_outs.get(key), self.layouts.get(key.version)
        if found is None:
            found = FanOut(1 if layout is None else layout.extents)
            if layout is not None:
                self.fan_outs[key] = found
        return found

    def forget_but(self, versions: Collection[int]) -> None:
        """Forget what is known of other versions than these, but for who brings the last ones. See `fan_out_of`."""
        self.layouts = {version: layout for version, layout in self.layouts.items() if version in versions}
        for key in [key for key in self.fan_outs if key.version not in versions][:-_FAN_OUTS_LEFT]:
            del self.fan_outs[key]

    def has(self, block: int, epoch: int) -> bool:
        """Return True if that block still is of that epoch."""
        with self.lock:
            return self.books.epoch_of(block) == epoch

    def memory_of(self, block: int, epoch: int) -> int | None:
        """Return a descriptor of a block's memory, for the caller to close; None if it isn't of that epoch any more."""
        with self.lock:
            memory = self.memory.get(block)
            if memory is None or self.books.epoch_of(block) != epoch:
                return None
            return os.dup(memory.read_only_fd)


@dataclass(slots=True, eq=False)
class _LeaseHolder:
    """A connected receiver; ``files``: numbers of the blocks whose memory it has been given."""

    name: str
    files: set[int] = field(default_factory=set)
    watches: bool = False
    told: tuple[messages.VersionRecord, ...] | None = None
    committed: str = ""
    """The name of the receiver, once it has told that a version is live."""


class BlockServer:
    """Answers receivers of one publisher rank, on a thread of its own, until `close`."""

    def __init__(self, rank: int, sock: socket.socket, token: str, served: Served, *, peer_timeout_s: float) -> None:
        self._rank = rank
        self._sock = sock
        self._token = token
        self._served = served
        self._peer_timeout_s = peer_timeout_s
        self._reads = ReadThreads(messages.Read, self._answer_read, f"publisher rank {rank}")
        self._loop = EventLoop()
        self._loop.listen(sock)
        self._strangers: dict[Link, float] = {}
        self._readers: dict[Link, _LeaseHolder] = {}
        self._stopping = False
        self._moving: deque[socket.socket] = deque()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name=f"holdfast-versions-{rank}", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Send the news to all who watch, soon. Any thread."""
        self._loop.wake()

    def check(self) -> None:
        """Raise `HoldfastError` if nobody is answered any more."""
        if self._failure is not None:
            raise HoldfastError(
                f"publisher rank {self._rank} no longer serves its versions, since {self._failure!r} ended the thread "
                "that does: close this publisher and make a new one; report this, with the trace in the log"
            ) from self._failure

    def move_to(self, sock: socket.socket) -> None:
        """Let receivers in at ``sock``, soon, in place of the socket before, whose path is gone. Any thread."""
        self._moving.append(sock)
        self._loop.wake()

    def close(self, timeout_s: float) -> None:
        """End all connections; idempotent."""
        self._stopping = True
        self._loop.wake()
        self._reads.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # the thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while not self._stopping:
                for found in self._loop.hear(_LOOK_S):
                    try:
                        if isinstance(found, socket.socket):
                            self._accept(found)
                        else:
                            self._answer(*found)
                    except Exception as error:  # noqa: BLE001 - what one asks for must not end the service of all
                        self._give_up(found if isinstance(found, socket.socket) else found[0], error)
                self._move()
                self._tell_news()
                self._turn_away_silent()
        except BaseException as error:
            self._failure = error
            _log.exception("publisher rank %d no longer serves its versions", self._rank)
            raise
        finally:
            self._loop.close()
            for sock in (self._sock, *self._moving):
                sock.close()

    def _give_up(self, who: Link | socket.socket, error: Exception) -> None:
        """End the connection of a receiver that could not be answered, and its leases: it connects again."""
        name = self._readers[who].name if isinstance(who, Link) and who in self._readers else "a receiver"
        _log.warning("publisher rank %d ends its connection to %s: %r", self._rank, name, error, exc_info=error)
        if isinstance(who, Link):
            self._drop(who)
        else:
            who.close()

    def _move(self) -> None:
        while self._moving:
            self._loop.stop_listening(self._sock)
            self._sock = self._moving.popleft()
            self._loop.listen(self._sock)

    def _accept(self, sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX and not _is_same_user(sock):
            sock.close()
            return
        link = Link(sock, "a receiver", messages.ToRank)
        self._strangers[link] = time.monotonic()
        self._loop.add(link)

    def _answer(self, link: Link, message: EngineMessage | Ended) -> None:
        reader = self._readers.get(link)
        if isinstance(message, Ended):
            self._drop(link)
        elif isinstance(message, messages.Introduce) and reader is None and message.token == self._token:
            self._strangers.pop(link, None)
            self._readers[link] = _LeaseHolder(message.receiver)
            if message.serves is not None:
                with self._served.lock:
                    self._served.places[message.receiver] = message.serves
        elif reader is None:
            self._drop(link)
        elif isinstance(message, messages.AskNews):
            if message.once:
                link.send(messages.News(self._served.records, message.number))
            else:
                reader.watches = True
        elif isinstance(message, messages.TakeLease):
            self._grant(link, reader, message)
        elif isinstance(message, messages.Read):
            self._readers.pop(link)
            self._reads.start(self._loop.hand_over(link), reader.name, message)
        elif isinstance(message, messages.GiveBack):
            with self._served.lock:
                self._served.books.release(link, message.block, message.epoch)
        elif isinstance(message, messages.HasCommitted):
            reader.committed = message.receiver
            told = next((record.meta for record in self._served.records if record.version == message.version), b"")
            meta = msgspec.msgpack.decode(told) if told else {}
            tell_received(message.version, meta, receiver=message.receiver, seconds=message.seconds)

    def _grant(self, link: Link, reader: _LeaseHolder, asked: messages.TakeLease) -> None:
        served = self._served
        with served.lock:
            try:
                block, version, epoch = served.books.lease(link, asked.version, asked.digest)
            except HoldfastError as error:
                link.send(messages.LeaseRefused(asked.number, RankFailure.of(error, rank=self._rank)))
                return
            memory, layout = served.memory[block.number], served.layouts[version]
            if link.sock.family == socket.AF_UNIX and block.number not in reader.files:
                alive = tuple(served.memory)
                link.pass_on(messages.BlockFile(block.number, block.nbytes, alive), memory.read_only_fd)
                reader.files.add(block.number)
        reads = served.memory_reads
        link.send(
            messages.Granted(
                asked.number,
                block.number,
                epoch,
                layout.data_bytes,
                len(layout.encoded),
                layout.extents,
                block.nbytes,
                served.deltas is not None,
                b"" if reads is None else reads.offer(memory.image.bytes_view),
            )
        )

    def _answer_read(self, sock: socket.socket, receiver: str, asked: messages.Read) -> None:
        """Answer what is asked on a connection for reads, on its thread."""
        if self._served.memory_reads is not None:
            self._served.memory_reads.drive()
        match asked:
            case messages.ReadRanges():
                self._send_ranges(sock, asked)
            case messages.ReadDelta():
                self._send_delta(sock, asked)
            case messages.ReadHeld():
                self._send_held(sock, asked)
            case messages.AskSource():
                self._send_source(sock, receiver, asked)
            case messages.Brought():
                key = VersionKey(asked.version, asked.digest)
                with self._served.lock:
                    here = int.from_bytes(asked.here, "little")
                    self._served.fan_out_of(key).brought(receiver, asked.number, here, RunOutcome(asked.outcome))
                send_all(sock, b"\x01", self._peer_timeout_s)

    def _send_ranges(self, sock: socket.socket, asked: messages.ReadRanges) -> None:
        memory = self._served.memory_of(asked.block, asked.epoch)
        fd = -1 if memory is None else memory
        try:
            for start, end in asked.ranges:
                if fd >= 0 and start < end:
                    send_range(sock, fd, start, end, self._peer_timeout_s)
                elif start < end:
                    send_all(sock, bytes(end - start), self._peer_timeout_s)  # it waits for as many bytes
                events.count("sync_bytes_sent", end - start)
            is_same = self._served.has(asked.block, asked.epoch)
            send_all(sock, b"\x01" if fd >= 0 and is_same else b"\x00", self._peer_timeout_s)
        finally:
            if fd >= 0:
                os.close(fd)

    def _send_delta(self, sock: socket.socket, asked: messages.ReadDelta) -> None:
        deltas, encoded = self._served.deltas, b""
        with self._served.lock:
            layout = self._served.layouts.get(asked.version)
        if deltas is not None and layout is not None:
            base, wanted = VersionKey(asked.base, asked.base_digest), VersionKey(asked.version, asked.digest)
            if not asked.shares:
                encoded = deltas.find(base, wanted, layout.data_bytes, lambda: self._stopping)
            elif (found := deltas.offer(base, wanted, layout.data_bytes, lambda: self._stopping)) is not None:
                key, offer = found
                with self._served.lock:
                    self._served.fan_outs.setdefault(key, FanOut(offer.extents))
                encoded = msgspec.msgpack.encode(offer)
        send_sized(sock, encoded, self._peer_timeout_s)
        events.count("sync_bytes_sent", len(encoded))

    def _send_held(self, sock: socket.socket, asked: messages.ReadHeld) -> None:
        """Send bytes of a delta that was offered."""
        deltas, start, end = self._served.deltas, asked.start - HEADER_BYTES, asked.end - HEADER_BYTES
        encoded = b"" if deltas is None else deltas.read(asked.digest, start, end)
        send_all(sock, b"\x01" if encoded else b"\x00", self._peer_timeout_s)
        send_all(sock, encoded, self._peer_timeout_s)
        events.count("sync_bytes_sent", len(encoded))

    def _send_source(self, sock: socket.socket, receiver: str, asked: messages.AskSource) -> None:
        lacking, now_s = int.from_bytes(asked.lacking, "little"), time.monotonic()
        with self._served.lock:
            fan_out = self._served.fan_out_of(VersionKey(asked.version, asked.digest))
            found = fan_out.ask(receiver, lacking, asked.waited_s, now_s)
            place = None if found is None else self._served.places.get(found.holder)
        encoded = b"" if found is None else msgspec.msgpack.encode(messages.HeldRun(*found, place))
        send_sized(sock, encoded, self._peer_timeout_s)

    def _tell_news(self) -> None:
        records = self._served.records
        for link, reader in self._readers.items():
            if reader.watches and reader.told is not records and not link.has_more:
                reader.told = records
                link.send(messages.News(records))

    def _turn_away_silent(self) -> None:
        now = time.monotonic()
        for link in [link for link, since in self._strangers.items() if now - since > _INTRODUCTION_S]:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._loop.drop(link)
        self._strangers.pop(link, None)
        reader = self._readers.pop(link, None)
        if reader is not None:
            with self._served.lock:
                self._served.books.forget(link)
                self._served.places.pop(reader.name, None)
                for fan_out in self._served.fan_outs.values():
                    fan_out.forget(reader.name)
            if reader.committed:
                tell_left(reader.committed)


def _is_same_user(sock: socket.socket) -> bool:
    """Return True for a process of this user (or of root), which could read this one's memory anyway."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (0, os.geteuid())


# Sockets with a path ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Yield a path of the same file that is short enough for a socket's address."""
    if len(os.fsencode(path)) <= _NAME_BYTES_MAX:
        yield path
        return
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def listen_at(path: str) -> socket.socket:
    """Return a socket that listens at ``path``, for this user only; the directory is made. Raises `StorageError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _short(path) as short:
            sock.bind(short)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StorageError(
            f"receivers can't be let in at {path}: {error.strerror or error}; give the transport a directory of a "
            "local file system that both sides see (directory=)",
            path=path,
            errno=error.errno,
        ) from error
    return sock


def connect_to(place: messages.RankPlace, timeout_s: float) -> socket.socket:
    """Return a connection to a publisher rank. Raises `OSError`; `ConfigError` for one of another host."""
    if not place.path:
        hosts = ("127.0.0.1", *place.hosts) if place.machine == this_machine() else place.hosts
        return connect(tuple(dict.fromkeys(hosts)), place.port, Deadline.after(timeout_s))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(timeout_s, 0.01))
        with _short(place.path) as short:
            sock.connect(short)
    except OSError as error:
        sock.close()
        if place.boot != boot_id():
            raise ConfigError(
                f"the publisher's versions are in the memory of another host ({place.path} isn't here: "
                f"{error.strerror or error}); use a transport that has a network, or a directory",
                field="transport",
            ) from error
        raise
    return sock


def boot_id() -> str:
    """Return an id of this host, until it starts anew."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def unlink_quietly(path: str) -> None:
    """Remove a socket's path, if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def is_gone(error: OSError) -> bool:
    """Return True if nobody listens at a path any more."""
    return error.errno in (errno.ENOENT, errno.ECONNREFUSED)
