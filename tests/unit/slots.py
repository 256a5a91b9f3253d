"""A transport over sessions that runs anywhere: two slots of memory that both sides have mapped.

Sessions carry versions between devices (NCCL, CUDA IPC); this carries them the same way in host memory, for tests.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import PAGE_BYTES
from holdfast.plan.write import round_up
from holdfast.staging.image import Image, tensor_over
from holdfast.sync.session.channel import SLOTS
from holdfast.sync.transports.linked import LinkedTransport, MappedSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.session.channel import Channels

_COOKIE_BYTES = 16


class SlotTransport(LinkedTransport):
    """Transfers versions through shared memory, within one host.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
    """

    def __init__(self, rendezvous: Any, *, process_group: Any | None = None, peer_timeout_s: float = 30.0) -> None:
        super().__init__(rendezvous, process_group=process_group, peer_timeout_s=peer_timeout_s)

    def make_channels(self) -> Channels:
        return SlotChannels()


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    cookie: bytes
    path: str
    nbytes: int


class SlotChannels:
    """See the module; implements `Channels`."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._mailbox: _Mailbox | None = None

    def address(self) -> bytes:
        if self._mailbox is None:
            self._mailbox = _Mailbox()
        return self._mailbox.address

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendSlots:
        return SendSlots(addresses, bucket_bytes)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveSlots:
        assert self._mailbox is not None
        told = msgspec.msgpack.decode(offer, type=_Offer)
        fd = self._mailbox.take(told.cookie)
        if fd is None:
            try:
                fd = os.open(told.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(
                    f"the publisher's memory can't be opened ({told.path}: {error.strerror}); SharedMemoryTransport "
                    "needs both sides on one host, in one container, as one user",
                    field="transport",
                ) from error
        try:
            return ReceiveSlots(fd, told.nbytes, bucket_bytes)
        finally:
            os.close(fd)

    def close(self) -> None:
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()


class SendSlots:
    """The two slots of a publisher rank; implements `SendChannel`."""

    blocks = False

    def __init__(self, addresses: Sequence[bytes], bucket_bytes: int) -> None:
        self._addresses = addresses
        self._slot_bytes = round_up(bucket_bytes, PAGE_BYTES)
        self._bucket_bytes = bucket_bytes
        # Not warmed up: small models never touch most of it, and others fault it in once.
        self._image = Image(SLOTS * self._slot_bytes)

    def offer(self, member: int) -> bytes:
        cookie = secrets.token_bytes(_COOKIE_BYTES)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._image.fd]))]
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.0)
            sock.sendmsg([cookie], rights, 0, self._addresses[member])
        path = f"/proc/{os.getpid()}/fd/{self._image.fd}"
        return msgspec.msgpack.encode(_Offer(cookie, path, self._image.nbytes))

    def open(self, deadline: Deadline) -> None:
        pass

    def slot(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes
        return self._image.bytes_view[start : start + self._bucket_bytes]

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        pass

    def wait_sent(self, seq: int, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        self._image.close()


class ReceiveSlots(MappedSlots):
    """A publisher rank's slots, mapped to be read; implements `ReceiveChannel`."""

    def __init__(self, fd: int, nbytes: int, bucket_bytes: int) -> None:
        slot_bytes = round_up(bucket_bytes, PAGE_BYTES)
        if nbytes != SLOTS * slot_bytes or os.fstat(fd).st_size != nbytes:
            raise ConfigError(
                f"the publisher offers {nbytes} bytes of memory for buckets of {bucket_bytes}; run the same version "
                "of Holdfast on both sides",
                field="transport",
            )
        super().__init__(tensor_over(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)), slot_bytes)


class _Mailbox:
    """Socket on which publisher ranks pass descriptors, each with a cookie that is also sent on the link."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.settimeout(0.0)
        self._sock.bind(b"\0holdfast-sync-" + secrets.token_hex(16).encode())
        self.address: bytes = self._sock.getsockname()
        self._fds: dict[bytes, int] = {}

    def take(self, cookie: bytes) -> int | None:
        """Return the descriptor that came with ``cookie``; the caller closes it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self._sock, _COOKIE_BYTES, 1)
                for fd in fds:
                    self._put(data, fd)
        return self._fds.pop(cookie, None)

    def _put(self, cookie: bytes, fd: int) -> None:
        old = self._fds.pop(cookie, None)
        if old is not None:
            os.close(old)
        self._fds[cookie] = fd

    def close(self) -> None:
        self._sock.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


prepare_decoding(_Offer)
