"""Framing of messages and descriptors over a Unix stream socket, independent of their meaning. Torch-free.

Guarantees:
- a frame is at most `MAX_FRAME_BYTES`; a longer one, one that doesn't decode, one with the wrong number of
  descriptors, and a descriptor that belongs to no frame are each a `FrameError`;
- no descriptor leaks: one that arrives with a bad frame, or after one, is closed;
- neither reading nor `Outbox.flush` blocks; `send` blocks no longer than its deadline.

Assumes: both ends are the same program on one host (this is no trust boundary; the checks find bugs and dying
processes).

Which frame a descriptor belongs to: it comes with the first byte of its frame, and the kernel never lets one `recvmsg`
read past the data that the descriptor came with. So it belongs to the last frame that begins in what `recvmsg`
returned.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from holdfast.engine import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FRAME_BYTES: Final = 256 << 20
MAX_FDS: Final = 1
_HEADER: Final = struct.Struct("<I")
_READ_BYTES: Final = 256 << 10
_FD_BYTES: Final = array.array("i").itemsize
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""A job may have SIGPIPE at its default: writing to a dead engine must not kill the trainer."""
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

ToEngine = (
    messages.AddImage
    | messages.DropImage
    | messages.AddPlan
    | messages.DropPlan
    | messages.UseCores
    | messages.Persist
    | messages.SlotFilled
    | messages.StagingVerified
    | messages.Cancel
    | messages.Remove
    | messages.Shutdown
)
ToTrainer = (
    messages.EngineReady
    | messages.EngineBeat
    | messages.SlotFree
    | messages.Persisted
    | messages.Reported
    | messages.Cancelled
    | messages.AttemptFailed
    | messages.Removed
    | messages.Notice
)
M = TypeVar("M")


def fd_count(message: object) -> int:
    """Return the number of descriptors that ``message`` comes with."""
    match message:
        case messages.Persist():
            return 0 if message.module and message.source is None else 1
        case messages.Remove():
            return 0 if message.module else 1
        case _:
            return getattr(message, "descriptors", 0)


_encoder: Final = msgspec.msgpack.Encoder()


class FrameError(ConnectionError):
    """The data is no frame of this protocol: the stream is unusable."""


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    message: M
    fds: tuple[int, ...]
    """The receiver owns and closes them."""


def encode(message: messages.EngineMessage) -> bytes | bytearray:
    """Return the frame of ``message``. Raises `FrameError` if it is larger than `MAX_FRAME_BYTES`."""
    frame = bytearray(_HEADER.size)
    _encoder.encode_into(message, frame, _HEADER.size)
    nbytes = len(frame) - _HEADER.size
    if nbytes > MAX_FRAME_BYTES:
        raise FrameError(f"{type(message).__name__} takes {nbytes} bytes; a frame holds {MAX_FRAME_BYTES}")
    _HEADER.pack_into(frame, 0, nbytes)
    return frame


class Inbox(Generic[M]):
    """Frames from a non-blocking socket; ``kind`` is the union of the expected messages."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._buffer = bytearray()
        self._fds: list[int] = []
        """Descriptors of the first frame in the buffer."""
        self._broken = False

    def receive(self) -> list[Received[M]] | None:
        """Return whole messages available without waiting; empty if there are none, None at end of file.

        Makes one system call. Raises `FrameError` (and closes received descriptors) if the stream is broken, and
        `OSError` as the socket does.
        """
        if self._broken:
            raise FrameError("the stream was broken before")
        try:
            nbytes, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._chunk], socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), _CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return []
        fds = _descriptors(ancillary)
        ready: list[Received[M]] = []
        try:
            if nbytes == 0:
                self.close()
                return None
            self._take(nbytes, fds, ready, truncated=bool(flags & socket.MSG_CTRUNC))
        except (FrameError, msgspec.MsgspecError) as error:
            self._broken = True
            close_fds(fds)
            for received in ready:
                close_fds(received.fds)
            self.close()
            if isinstance(error, FrameError):
                raise
            raise FrameError(f"a frame does not decode: {error}") from error
        return ready

    def close(self) -> None:
        """Close descriptors of an incomplete frame; the socket belongs to its owner."""
        close_fds(self._fds)
        self._buffer.clear()

    def _take(self, nbytes: int, fds: list[int], ready: list[Received[M]], *, truncated: bool) -> None:
        if truncated:
            raise FrameError(f"more than {MAX_FDS} descriptors came with one frame")
        old_end = len(self._buffer)
        self._buffer += self._chunk[:nbytes]
        at = 0
        starts: list[tuple[int, int | None]] = []  # where each frame begins, and where it ends if complete
        while at < len(self._buffer):
            end = self._frame_end(at)
            starts.append((at, end))
            if end is None:
                break
            at = end
        owner = starts[-1][0]
        if fds and owner < old_end:
            raise FrameError("a descriptor came in the middle of a frame")
        for start, end in starts:
            mine, self._fds = self._fds, []
            if start == owner:
                mine += fds
                fds.clear()
            if end is None:
                self._fds = mine
                break
            ready.append(self._decode(start, end, mine))
        whole_end = starts[-1][1] if starts[-1][1] is not None else starts[-1][0]
        del self._buffer[:whole_end]

    def _frame_end(self, start: int) -> int | None:
        if len(self._buffer) - start < _HEADER.size:
            return None
        (nbytes,) = _HEADER.unpack_from(self._buffer, start)
        if nbytes > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {nbytes} bytes is announced; the limit is {MAX_FRAME_BYTES}")
        end: int = start + _HEADER.size + nbytes
        return end if end <= len(self._buffer) else None

    def _decode(self, start: int, end: int, fds: list[int]) -> Received[M]:
        try:
            with memoryview(self._buffer) as whole, whole[start + _HEADER.size : end] as body:
                message = self._decoder.decode(body)
        except BaseException:
            close_fds(fds)
            raise
        expected = fd_count(message)
        if len(fds) != expected:
            came = len(fds)
            close_fds(fds)
            raise FrameError(f"{type(message).__name__} came with {came} descriptors, not {expected}")
        return Received(message, tuple(fds))


class Outbox:
    """Outgoing messages of a thread that must not block. For one thread; see `Engine.post` for others."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[memoryview] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: messages.EngineMessage) -> None:
        self._queue.append(memoryview(encode(message)))

    def flush(self) -> None:
        """Send what the socket accepts now. Raises `OSError` if the other end is gone."""
        while self._queue:
            try:
                sent = self._sock.send(self._queue[0], _NO_SIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            rest = self._queue[0][sent:]
            if rest:
                self._queue[0] = rest
            else:
                self._queue.popleft()


def send(sock: socket.socket, message: messages.EngineMessage, fds: Sequence[int] = (), *, timeout_s: float) -> None:
    """Send one message with its descriptors on a non-blocking socket; the caller keeps (and closes) ``fds``.

    Returns when the kernel has all of it. Raises `TimeoutError` if the other end did not read it in time (the stream is
    then unusable), `FrameError` if the message is too large (nothing was sent), `OSError` otherwise. One sender at a
    time.
    """
    assert len(fds) == fd_count(message)
    rest = memoryview(encode(message))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    deadline = time.monotonic() + timeout_s
    waiter = select.poll()
    waiter.register(sock, select.POLLOUT)
    while rest:
        try:
            sent = sock.sendmsg([rest], ancillary, _NO_SIGNAL)
        except (BlockingIOError, InterruptedError):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{type(message).__name__} was not received within {timeout_s:g} s") from None
            waiter.poll(left * 1000)
            continue
        rest = rest[sent:]
        ancillary = []


def close_fds(fds: list[int] | tuple[int, ...]) -> None:
    """Close descriptors; empty a list, so that none is closed twice."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    if isinstance(fds, list):
        fds.clear()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return found.tolist()
