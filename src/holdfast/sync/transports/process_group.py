"""Transfer weights between hosts: in host memory over TCP, or over the backend of an accelerator.

In host memory (``backend="gloo"``) versions lie in the publisher's blocks, of which each receiver reads what it wants,
at its own pace (``sync.versions``). Over a backend such as NCCL, experimental, a version goes straight from the weights
in sessions: each publisher rank makes a group of itself and the session's members, not registered with torch, so
training, and receivers that are jobs of their own, may have and make any groups. They meet over a TCPStore that the
publisher rank hosts. A bucket that all members want is broadcast; others are sent to each member that wants them.

Guarantees: groups are made again when the members change or an operation failed; nothing of a failed group is reused.
Their buckets take two slots on each side, on ``device``.
Assumes: torch has the backend; one that torch doesn't include must be registered with ``torch.distributed.Backend``.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.coordination import links
from holdfast.coordination.links import LinkLost, PeerLate, prefix_store
from holdfast.errors import ConfigError, DeadlineExceeded, PeerLost
from holdfast.format.decoding import prepare_decoding
from holdfast.sync.session.channel import SLOTS, bucket_memory
from holdfast.sync.session.rendezvous import hosts_here, this_machine
from holdfast.sync.transports.linked import LinkedTransport
from holdfast.sync.versions.publishing import BlockPublishing
from holdfast.sync.versions.receiving import BlockReceiving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.coordination.deadline import Deadline
    from holdfast.coordination.links import TransferHandle
    from holdfast.sync.protocol import PublisherOptions, Publishing, Receiving
    from holdfast.sync.session.channel import Channels


# Connections over the backend of an accelerator (NCCL, HCCL, ...), with deadlines. Operations run on a separate stream;
# waits poll the device. Both ends issue the operations of a group in the same order, from one thread.

_LOOK_S: Final = 0.0002


class DeviceLinks:
    """Links to all other ranks of a group of ``backend``. Making them doesn't wait: the first operations do."""

    def __init__(
        self, backend: str, device: torch.device, store: Any, rank: int, world: int, *, timeout_s: float
    ) -> None:
        self._group = compat.make_backend(backend, store, rank, world, timedelta(seconds=timeout_s))
        self._device = device
        self._stream = torch.get_device_module(device).Stream(device=device)
        self._aborted = threading.Event()

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        return self._start(lambda: self._group.send([memory], peer, tag))

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        return self._start(lambda: self._group.recv([memory], peer, tag))

    def broadcast(self, root: int, memory: torch.Tensor) -> TransferHandle:
        return self._start(lambda: self._group.broadcast(memory, root))

    def abort(self) -> None:
        self._aborted.set()
        for name in ("abort", "shutdown"):
            if hasattr(self._group, name):
                with contextlib.suppress(RuntimeError):
                    getattr(self._group, name)()
                return

    def _start(self, start: Callable[[], Any]) -> TransferHandle:
        module = torch.get_device_module(self._device)
        packed = module.current_stream(self._device).record_event()
        with module.stream(self._stream):
            self._stream.wait_event(packed)
            try:
                work = start()
                work.wait()  # blocks the stream, not this thread
            except RuntimeError as error:
                raise LinkLost(str(error).splitlines()[0][:200]) from error
            return _DeviceTransfer(self._stream.record_event(), self._aborted)


class _DeviceTransfer:
    def __init__(self, done: Any, aborted: threading.Event) -> None:
        self._done = done
        self._aborted = aborted

    def wait(self, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while not self._done.query():
            if self._aborted.is_set():
                raise LinkLost("it was ended from outside")
            if time.monotonic() > ends_s:
                raise PeerLate(f"the device was not done after {timeout_s:.3g} s")
            time.sleep(_LOOK_S)


_STORE_TIMEOUT: Final = timedelta(seconds=30)
_OPEN_S: Final = 30.0
"""Timeout for opening a group whose members have all reported; missing ones are lost and the session starts
without them.
"""
_GLOO: Final = "gloo"
_PUBLISHER: Final = 0
"""Rank of the publisher in the groups; member number ``n`` has rank ``n + 1``."""
_TAGS: Final = 1 << 29


class ProcessGroupTransport(LinkedTransport):
    """Transfers versions between processes on any hosts: over TCP, or over a backend of ``torch.distributed``.

    With gloo, the default, the bytes go over TCP connections of our own, and no group is made; the name says only that
    they come from host memory. Other backends are experimental: they have not run on their devices yet.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        backend: ``"gloo"``, ``"nccl"``, or another that torch has (``"hccl"`` with torch_npu).
        device: where buckets are packed and received: ``"cpu"`` for gloo, otherwise a device of the backend.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
        host: the address by which the other side reaches this host, if it isn't found automatically.
        fan_out: for receivers: serve to others what was fetched, and bring from others what they have, so that the
            publisher's link carries a version about once. Only with gloo.
    """

    def __init__(
        self,
        rendezvous: Any,
        backend: str = _GLOO,
        device: torch.device | str = "cpu",
        process_group: Any | None = None,
        *,
        peer_timeout_s: float = 30.0,
        host: str | None = None,
        fan_out: bool = False,
    ) -> None:
        super().__init__(rendezvous, process_group=process_group, peer_timeout_s=peer_timeout_s, host=host)
        self._device = torch.device(device)
        self._backend = backend
        self._fan_out = fan_out
        if fan_out and backend != _GLOO:
            raise ConfigError(f"receivers can't serve one another over {backend!r}; use gloo", field="fan_out")
        if backend == _GLOO:
            if self._device.type != "cpu":
                raise ConfigError(f"gloo sends from host memory, not from {device}; give device='cpu'", field="device")
        elif self._device.type == "cpu":
            raise ConfigError(f"backend {backend!r} needs its own device, not 'cpu'", field="device")

    def publishing(self, options: PublisherOptions) -> Publishing:
        if self._backend != _GLOO:
            return super().publishing(options)
        return BlockPublishing(
            options,
            rendezvous=self._rendezvous,
            process_group=self.process_group,
            peer_timeout_s=self._peer_timeout_s,
            network=True,
            host=self._host,
        )

    def receiving(self) -> Receiving:
        if self._backend != _GLOO:
            return super().receiving()
        return BlockReceiving(
            rendezvous=self._rendezvous, peer_timeout_s=self._peer_timeout_s, fan_out=self._fan_out, host=self._host
        )

    def make_channels(self) -> Channels:
        return GroupChannels(self._backend, self._device, self._host)


class _GroupOffer(msgspec.Struct, frozen=True, array_like=True):
    hosts: tuple[str, ...]
    port: int
    machine: str
    name: str
    rank: int
    world: int


class GroupChannels:
    """See the module; implements `Channels`."""

    host = ""

    def __init__(self, backend: str, device: torch.device, host: str | None) -> None:
        self._backend = backend
        self._device = device
        self._host = host
        self._hosted: Any | None = None

    def address(self) -> bytes:
        return b""

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendGroup:
        if self._hosted is None:
            self._hosted = compat.tcp_store("0.0.0.0", 0, hosting=True, timeout=_STORE_TIMEOUT)  # noqa: S104
        name = secrets.token_hex(8)
        world = len(addresses) + 1
        offers = [
            _GroupOffer(hosts_here(self._host), self._hosted.port, this_machine(), name, member + 1, world)
            for member in range(len(addresses))
        ]
        store = prefix_store(name, self._hosted)
        return SendGroup(self._links(lambda: store, _PUBLISHER, world), offers, bucket_bytes, self._device)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveGroup:
        told = msgspec.msgpack.decode(offer, type=_GroupOffer)
        host = "127.0.0.1" if told.machine == this_machine() else told.hosts[0]

        def connect() -> Any:
            store = compat.tcp_store(host, told.port, hosting=False, timeout=_STORE_TIMEOUT)
            return prefix_store(told.name, store)

        return ReceiveGroup(self._links(connect, told.rank, told.world), told.world - 1, bucket_bytes, self._device)

    def close(self) -> None:
        self._hosted = None

    def _links(self, store: Callable[[], Any], rank: int, world: int) -> Callable[[float], DeviceLinks]:
        def make(timeout_s: float) -> DeviceLinks:
            return DeviceLinks(self._backend, self._device, store(), rank, world, timeout_s=timeout_s)

        return make


class _Group:
    """State shared by both ends: links that are made by `open` and ended once."""

    blocks = True

    def __init__(self, make_links: Callable[[float], DeviceLinks], bucket_bytes: int, device: torch.device) -> None:
        self._make_links = make_links
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._links: DeviceLinks | None = None
        self._closed = False
        self._slots: list[torch.Tensor] = []

    def open(self, deadline: Deadline) -> None:
        try:
            made = self._make_links(min(max(deadline.left_s(), 0.001), _OPEN_S))
        except (RuntimeError, OSError) as error:
            raise PeerLost(
                f"the group for buckets could not be made: {_first_line(error)}", peer="a member", phase="channels"
            ) from error
        self._links = made
        with bucket_memory(self._bucket_bytes):
            self._slots = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)
            ]
        if self._closed:
            made.abort()

    def close(self) -> None:
        self._closed = True
        if self._links is not None:
            self._links.abort()

    def slot(self, slot: int) -> torch.Tensor:
        return self._slots[slot]

    def _wait(self, transfer: TransferHandle, deadline: Deadline, seq: int) -> None:
        try:
            transfer.wait(max(deadline.left_s(), 0.001))
        except links.LinkLost as error:
            raise PeerLost(f"bucket {seq} was cut off: {error}", peer="a member", phase=f"bucket {seq}") from error
        except links.PeerLate as error:
            raise DeadlineExceeded(
                f"bucket {seq} was not sent within {deadline.timeout_s:g} s: {error}",
                waited_for=f"bucket {seq}",
                timeout_s=deadline.timeout_s,
            ) from error

    def _started(self, start: Callable[[], TransferHandle], seq: int) -> TransferHandle:
        try:
            return start()
        except links.LinkLost as error:
            raise PeerLost(f"bucket {seq} was cut off: {error}", peer="a member", phase=f"bucket {seq}") from error

    @property
    def _open_links(self) -> DeviceLinks:
        assert self._links is not None
        return self._links


class SendGroup(_Group):
    """`SendChannel` of a publisher rank."""

    def __init__(
        self,
        make_links: Callable[[float], DeviceLinks],
        offers: Sequence[_GroupOffer],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(make_links, bucket_bytes, device)
        self._offers = offers
        self._under_way: dict[int, list[TransferHandle]] = {}

    def offer(self, member: int) -> bytes:
        return msgspec.msgpack.encode(self._offers[member])

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        self._under_way[seq] = []
        self._start(seq, self._slots[seq % SLOTS][:nbytes], lane, _tag(seq))

    def _start(self, seq: int, memory: torch.Tensor, lane: Sequence[int], tag: int) -> None:
        ends, under_way = self._open_links, self._under_way[seq]
        if _is_broadcast(lane, len(self._offers)):
            under_way.append(self._started(lambda: ends.broadcast(_PUBLISHER, memory), seq))
            return
        for member in lane:
            under_way.append(self._started(lambda to=member + 1: ends.send(to, memory, tag), seq))  # type: ignore[misc]

    def wait_sent(self, seq: int, deadline: Deadline) -> None:
        for transfer in self._under_way.pop(seq):
            self._wait(transfer, deadline, seq)


class ReceiveGroup(_Group):
    """`ReceiveChannel` of a member."""

    def __init__(
        self, make_links: Callable[[float], DeviceLinks], members: int, bucket_bytes: int, device: torch.device
    ) -> None:
        super().__init__(make_links, bucket_bytes, device)
        self._members = members
        self._posted: dict[int, tuple[torch.Tensor, list[TransferHandle]]] = {}
        self._free = list(range(SLOTS))
        self._slot_of: dict[int, int] = {}

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        memory = self._free_slot(seq, nbytes)
        self._posted[seq] = memory, [self._start(seq, memory, lane, _tag(seq))]

    def _free_slot(self, seq: int, nbytes: int) -> torch.Tensor:
        slot = self._slot_of[seq] = self._free.pop()
        return self._slots[slot][:nbytes]

    def _start(self, seq: int, memory: torch.Tensor, lane: Sequence[int], tag: int) -> TransferHandle:
        ends = self._open_links
        if _is_broadcast(lane, self._members):
            return self._started(lambda: ends.broadcast(_PUBLISHER, memory), seq)
        return self._started(lambda: ends.receive(_PUBLISHER, memory, tag), seq)

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:
        memory, transfers = self._posted[seq]
        for transfer in transfers:
            self._wait(transfer, deadline, seq)
        return memory

    def release(self, seq: int) -> None:
        del self._posted[seq]
        self._free.append(self._slot_of.pop(seq))


def _tag(seq: int) -> int:
    """Return the tag of a message; it repeats only when the earlier message was received long ago."""
    return seq % _TAGS


def _is_broadcast(lane: Sequence[int], members: int) -> bool:
    return len(lane) == members > 1


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


prepare_decoding(_GroupOffer)
