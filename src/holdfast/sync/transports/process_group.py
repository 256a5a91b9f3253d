"""Weights over ``torch.distributed``: gloo between hosts, or the backend of an accelerator.

Each publisher rank makes a group of itself and the members of its sessions, off torch's lists: training, and receivers
that are a job of their own, may have and make groups as they like. They meet over a TCPStore that the publisher rank
hosts. A bucket that all members want is broadcast; others are sent to each that wants them. gloo takes what is large
straight from the publisher's tensors, and puts it straight into the memory it is for.

Guarantees: groups are made anew when the members change, or an operation failed; nothing of a group that failed is used
again. Buckets take two slots on each side, on ``device``.
Assumes: torch has the backend. One that torch doesn't bring must be registered with ``torch.distributed.Backend``.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, DeadlineExceeded, PeerLost
from holdfast.export import links
from holdfast.export.gloo import is_gloo_available, prefix_store
from holdfast.sync.rendezvous import hosts_here, this_machine
from holdfast.sync.transports.base import SLOTS, bucket_memory
from holdfast.sync.transports.device_links import DeviceLinks
from holdfast.sync.transports.linked import LinkedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.export.links import Transfer
    from holdfast.sync.deadline import Deadline
    from holdfast.sync.transports.base import Channels

_STORE_TIMEOUT: Final = timedelta(seconds=30)
_OPEN_S: Final = 30.0
"""All have said that they are there: who isn't by then is lost, and a session with the others begins."""
_GLOO: Final = "gloo"
_PUBLISHER: Final = 0
"""Its rank in the groups; member number ``n`` has ``n + 1``."""
_PARTS: Final = 1 << 14
"""Of a bucket, and many more than there are."""
_TAGS: Final = 1 << 29
"""gloo's are 32 bits, of which the upper ones are for its own and for what ends links."""


class ProcessGroupTransport(LinkedTransport):
    """Versions over groups of ``torch.distributed``, between processes on any hosts.

    Args:
        rendezvous: where both sides find one another: a directory, ``"tcp://host:port"``, or a torch Store.
        backend: ``"gloo"``, ``"nccl"``, or another that torch has (``"hccl"`` with torch_npu).
        device: where buckets are packed and received: ``"cpu"`` for gloo, a device of the backend otherwise.
        process_group: the publisher ranks; the default group where there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
        host: the address of this host by which the other side reaches it, where it isn't found by itself.
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
    ) -> None:
        super().__init__(rendezvous, process_group=process_group, peer_timeout_s=peer_timeout_s, host=host)
        self._device = torch.device(device)
        self._backend = backend
        if backend == _GLOO:
            if not is_gloo_available():
                raise ConfigError("this torch has no gloo", field="backend")
            if self._device.type != "cpu":
                raise ConfigError(f"gloo sends from host memory, not from {device}; give device='cpu'", field="device")
        elif self._device.type == "cpu":
            raise ConfigError(f"backend {backend!r} needs a device of its own, not 'cpu'", field="device")

    def make_channels(self) -> Channels:
        return GroupChannels(self._backend, self._device, self._host)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
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
            _Offer(hosts_here(self._host), self._hosted.port, this_machine(), name, member + 1, world)
            for member in range(len(addresses))
        ]
        store = prefix_store(name, self._hosted)
        kind = SendApart if self._backend == _GLOO else SendGroup
        return kind(self._links(lambda: store, _PUBLISHER, world), offers, bucket_bytes, self._device)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveGroup:
        told = msgspec.msgpack.decode(offer, type=_Offer)
        host = "127.0.0.1" if told.machine == this_machine() else told.hosts[0]

        def connect() -> Any:
            store = compat.tcp_store(host, told.port, hosting=False, timeout=_STORE_TIMEOUT)
            return prefix_store(told.name, store)

        kind = ReceiveApart if self._backend == _GLOO else ReceiveGroup
        return kind(self._links(connect, told.rank, told.world), told.world - 1, bucket_bytes, self._device)

    def close(self) -> None:
        self._hosted = None

    def _links(self, store: Callable[[], Any], rank: int, world: int) -> Callable[[float], GroupLinks]:
        def make(timeout_s: float) -> GroupLinks:
            if self._backend == _GLOO:
                return links.GlooLinks(store(), rank, world, timeout_s=timeout_s)
            return DeviceLinks(self._backend, self._device, store(), rank, world, timeout_s=timeout_s)

        return make


GroupLinks = links.GlooLinks | DeviceLinks


class _Group:
    """What both ends share: links that are made by `open`, and end once."""

    blocks = True

    def __init__(self, make_links: Callable[[float], GroupLinks], bucket_bytes: int, device: torch.device) -> None:
        self._make_links = make_links
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._links: GroupLinks | None = None
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

    def _wait(self, transfer: Transfer, deadline: Deadline, seq: int) -> None:
        try:
            transfer.wait(max(deadline.left_s(), 0.001))
        except links.PeerLost as error:
            raise PeerLost(f"bucket {seq} was cut off: {error}", peer="a member", phase=f"bucket {seq}") from error
        except links.PeerLate as error:
            raise DeadlineExceeded(
                f"bucket {seq} was not sent within {deadline.timeout_s:g} s: {error}",
                waited_for=f"bucket {seq}",
                timeout_s=deadline.timeout_s,
            ) from error

    def _started(self, start: Callable[[], Transfer], seq: int) -> Transfer:
        try:
            return start()
        except links.PeerLost as error:
            raise PeerLost(f"bucket {seq} was cut off: {error}", peer="a member", phase=f"bucket {seq}") from error

    @property
    def _open_links(self) -> GroupLinks:
        assert self._links is not None
        return self._links


class SendGroup(_Group):
    """Of a publisher rank; implements `SendChannel`."""

    def __init__(
        self,
        make_links: Callable[[float], GroupLinks],
        offers: Sequence[_Offer],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(make_links, bucket_bytes, device)
        self._offers = offers
        self._under_way: dict[int, list[Transfer]] = {}

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


class SendApart(SendGroup):
    """Of a publisher rank, by gloo; implements `SendsApart` too."""

    def start_apart(self, seq: int, parts: Sequence[torch.Tensor], lane: Sequence[int]) -> None:
        self._under_way[seq] = []
        for number, part in enumerate(parts):
            self._start(seq, part, lane, _tag(seq, number))


class ReceiveGroup(_Group):
    """Of a member; implements `ReceiveChannel`."""

    def __init__(
        self, make_links: Callable[[float], GroupLinks], members: int, bucket_bytes: int, device: torch.device
    ) -> None:
        super().__init__(make_links, bucket_bytes, device)
        self._members = members
        self._posted: dict[int, tuple[torch.Tensor, list[Transfer]]] = {}
        self._free = list(range(SLOTS))
        self._slot_of: dict[int, int] = {}

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        memory = self._free_slot(seq, nbytes)
        self._posted[seq] = memory, [self._start(seq, memory, lane, _tag(seq))]

    def _free_slot(self, seq: int, nbytes: int) -> torch.Tensor:
        slot = self._slot_of[seq] = self._free.pop()
        return self._slots[slot][:nbytes]

    def _start(self, seq: int, memory: torch.Tensor, lane: Sequence[int], tag: int) -> Transfer:
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


class ReceiveApart(ReceiveGroup):
    """Of a member, by gloo; implements `ReceivesApart` too."""

    def post_apart(
        self, seq: int, nbytes: int, lane: Sequence[int], place: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> None:
        memory = self._free_slot(seq, nbytes)
        transfers: list[Transfer] = []
        self._posted[seq] = memory, transfers
        for number, part in enumerate(place(memory)):
            transfers.append(self._start(seq, part, lane, _tag(seq, number)))


def _tag(seq: int, part: int = 0) -> int:
    """Of a message; the same again only when the first one was long received."""
    return (seq * _PARTS + part) % _TAGS


def _is_broadcast(lane: Sequence[int], members: int) -> bool:
    return len(lane) == members > 1


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
