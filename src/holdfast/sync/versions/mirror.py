"""Read a publisher rank's block over a network: a receiver's own block, into which what it wants is brought.

    bring(from, to) -> a free connection -> ReadRanges -> bytes, and a byte: the block was of that epoch all the time

Guarantees: only what is asked for takes memory. Bytes of a block that was taken back while they were sent are told
apart (`VersionRevoked`), and nobody can take back what has arrived. Several threads may bring parts, each on a
connection of its own. A rank that sends nothing for `peer_timeout_s` is a `PeerLost`; a transfer in which bytes come
has no deadline.
Assumes: who asks verifies the bytes.
Does not: decide what to bring (``versions.receiving``).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from holdfast import _torch_compat as compat
from holdfast.engine.wire import encode
from holdfast.errors import HoldfastError, PeerLost, VersionRevoked
from holdfast.staging.image import Image
from holdfast.sync.versions import messages
from holdfast.sync.versions.serving import connect_to, send_all

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_CONNECT_S: Final = 5.0
_SLICE_S: Final = 0.2
_KEPT: Final = 2
"""Mirrors of a rank that are kept warm: one with what was fetched, one for what is being fetched."""


class RankReader:
    """Connections to one publisher rank, on which ranges are read; thread-safe."""

    def __init__(
        self, rank: int, place: messages.RankPlace, introduce: messages.Introduce, *, peer_timeout_s: float
    ) -> None:
        self._rank = rank
        self._place = place
        self._introduce = introduce
        self._peer_timeout_s = peer_timeout_s
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._mirrors: list[Image] = []
        self._closed = False

    def image(self, nbytes: int) -> Image:
        """Return memory for a mirror of so many bytes; warm, if there is any."""
        with self._lock:
            found = next((image for image in self._mirrors if image.nbytes == nbytes), None)
            if found is not None:
                self._mirrors.remove(found)
                return found
        return Image(nbytes)

    def keep(self, image: Image) -> None:
        """Take back the memory of a mirror."""
        with self._lock:
            self._mirrors.append(image)
            gone = self._mirrors[:-_KEPT]
            del self._mirrors[:-_KEPT]
        for old in gone:
            old.close()

    def read(self, asked: messages.ReadRanges, into: list[memoryview], check: Callable[[], None], version: int) -> bool:
        """Read the ranges; return False if the block was not of that epoch. check: may raise, to end it."""
        sock = self._connection(version)
        try:
            send_all(sock, bytes(encode(asked)), self._peer_timeout_s)
            for memory in into:
                self._receive(sock, memory, check, version)
            said = bytearray(1)
            self._receive(sock, memoryview(said), check, version)
        except BaseException as error:
            self._drop(sock)
            if isinstance(error, OSError) and not isinstance(error, HoldfastError):
                raise self._lost(f"its connection broke ({error.strerror or error})", version) from error
            raise
        with self._lock:
            self._free.append(sock)
        return bool(said[0])

    def close(self) -> None:
        """End all connections, and all reads; idempotent."""
        with self._lock:
            self._closed = True
            socks = list(self._all)
            mirrors, self._mirrors = self._mirrors, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if sock in self._free:
                sock.close()
        for image in mirrors:
            image.close()

    def _connection(self, version: int) -> socket.socket:
        with self._lock:
            if self._free:
                return self._free.pop()
        try:
            sock = connect_to(self._place, _CONNECT_S)
        except OSError as error:
            raise self._lost(f"it can't be reached ({error.strerror or error})", version) from error
        sock.settimeout(0.0)
        with self._lock:
            self._all.add(sock)
        try:
            send_all(sock, bytes(encode(self._introduce)), self._peer_timeout_s)
        except OSError as error:
            self._drop(sock)
            raise self._lost(f"its connection broke ({error.strerror or error})", version) from error
        return sock

    def _receive(self, sock: socket.socket, memory: memoryview, check: Callable[[], None], version: int) -> None:
        waiter, silent_s = select.poll(), time.monotonic()
        waiter.register(sock, select.POLLIN)
        while memory:
            try:
                count = sock.recv_into(memory)
            except (BlockingIOError, InterruptedError):
                check()
                if not waiter.poll(_SLICE_S * 1000) and time.monotonic() - silent_s > self._peer_timeout_s:
                    raise self._lost(f"it sent nothing for {self._peer_timeout_s:g} s", version) from None
                continue
            if not count:
                raise self._lost("its connection ended", version)
            memory, silent_s = memory[count:], time.monotonic()

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._all.discard(sock)
        sock.close()

    def _lost(self, why: str, version: int) -> PeerLost:
        return PeerLost(
            f"publisher rank {self._rank} was lost while it sent version {version}: {why}. Receive again when a "
            "publisher is there",
            peer=f"publisher rank {self._rank}",
            phase="transfer",
            version=version,
        )


class MirrorBlock:
    """What a receiver has of a block on another host; implements `ReadableBlock`."""

    is_here = True

    def __init__(self, reader: RankReader, granted: messages.Granted, version: int, check: Callable[[], None]) -> None:
        self.nbytes = granted.nbytes
        self.epoch = granted.epoch
        self._reader = reader
        self._granted = granted
        self._version = version
        self._check = check
        self._image: Image | None = reader.image(granted.nbytes)
        self.view: torch.Tensor = self._image.bytes_view
        self._memory = compat.host_memory(self.view)

    def bytes_between(self, start: int, end: int) -> memoryview:
        return self._memory[start:end]

    def bring(self, start: int, end: int) -> None:
        asked = messages.ReadRanges(self._granted.block, self._granted.epoch, ((start, end),))
        if not self._reader.read(asked, [self._memory[start:end]], self._check, self._version):
            raise VersionRevoked(
                f"version {self._version} is gone: the publisher needed its memory while it was read. Fetch a version "
                "again; raise keep_versions if that happens often",
                version=self._version,
            )

    def refresh(self) -> None:
        """Ask the publisher if the block is as it was; set `epoch` to none of its epochs if not."""
        asked = messages.ReadRanges(self._granted.block, self._granted.epoch, ())
        if not self._reader.read(asked, [], self._check, self._version):
            self.epoch = -1

    def let_go(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            self._reader.keep(image)
