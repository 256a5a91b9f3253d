"""Weights through NIXL: receivers read buckets from the memory of publisher ranks, by RDMA where the network has it.

A publisher rank packs into two slots of registered memory. A member of its sessions is told of a bucket on its link,
and reads it into a slot of its own, the next one while it unpacks this one. Whatever is between them UCX finds:
InfiniBand or RoCE, NVLink, shared memory within a host, TCP.

Reads, since these survive a death on either side: nobody ever writes to the memory of another process. A receiver that
was given up, and goes on later, reads what is none of its business, and is told that it was lost; had the publisher
written to it, the bytes might be in what has become something else's memory.

Guarantees: reads are polled, so no wait is longer than its deadline. A slot is filled again when those who are in the
session have read it. What a read failed on is not used again (``nixl_agent``).
Assumes: the hosts reach one another by what UCX takes. ``device="cuda"`` has been written without a GPU at hand.
Does not: register the weights themselves; they pass through the slots.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast.errors import ConfigError, PeerLost
from holdfast.plan.write import round_up
from holdfast.sync.transports.base import SLOTS
from holdfast.sync.transports.linked import LinkedTransport
from holdfast.sync.transports.nixl_agent import NixlFailed, imported, make_agent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sync.deadline import Deadline
    from holdfast.sync.transports.base import Channels
    from holdfast.sync.transports.nixl_agent import Agent, Port, Read

_ALIGN_BYTES: Final = 4096
_LOOK_S: Final = 0.0002
_KINDS: Final = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlTransport(LinkedTransport):
    """Versions through NIXL (``pip install 'holdfast[nixl]'``), between processes on any hosts.

    Args:
        rendezvous: where both sides find one another: a directory, ``"tcp://host:port"``, or a torch Store.
        device: where buckets are packed and received: ``"cpu"``, or a CUDA device.
        process_group: the publisher ranks; the default group where there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
        host: the address of this host by which the other side reaches it, where it isn't found by itself.

    Raises `ConfigError` where NIXL can't be imported.
    """

    def __init__(
        self,
        rendezvous: Any,
        device: torch.device | str = "cpu",
        process_group: Any | None = None,
        *,
        peer_timeout_s: float = 30.0,
        host: str | None = None,
    ) -> None:
        super().__init__(rendezvous, process_group=process_group, peer_timeout_s=peer_timeout_s, host=host)
        given = torch.device(device)
        if given.type not in _KINDS:
            raise ConfigError(f"device must be 'cpu' or a CUDA device, not {device!r}", field="device")
        if given.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is {device!r}, but torch finds no CUDA device in this process", field="device")
        imported()
        self._device = torch.device("cuda", torch.cuda.current_device()) if str(given) == "cuda" else given

    def make_channels(self) -> Channels:
        return NixlChannels(self._device)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where two slots lie, one behind the other; ``device``: number of the GPU they are on."""

    agent: bytes
    address: int
    slot_bytes: int
    kind: str
    device: int


class NixlChannels:
    """See the module; implements `Channels`. One agent for all channels of a rank or a receiver, while it is sound."""

    host = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._closed = False
        self._agent: Agent | None = make_agent()
        self._slots: torch.Tensor | None = None

    def address(self) -> bytes:
        return b""

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendNixl:
        """Every epoch has the same slots: they are packed again when the members of the next have left the last."""
        del addresses  # whoever is told of the memory can read it
        agent, slot_bytes = self.agent(), round_up(bucket_bytes, _ALIGN_BYTES)
        if self._slots is None or self._slots.numel() != SLOTS * slot_bytes:
            slots = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=self._device)
            agent.register(slots)
            self._slots = slots
        return SendNixl(agent, self._slots, slot_bytes, bucket_bytes)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveNixl:
        told = msgspec.msgpack.decode(offer, type=_Offer)
        if told.slot_bytes != round_up(bucket_bytes, _ALIGN_BYTES):
            raise ConfigError(
                f"the publisher offers slots of {told.slot_bytes} bytes for buckets of {bucket_bytes}; run the same "
                "version of Holdfast on both sides",
                field="transport",
            )
        return ReceiveNixl(self, told, self._device)

    def agent(self) -> Agent:
        """One that is sound. Raises as `make_agent`, and `PeerLost` once this was closed."""
        with self._lock:
            agent = self._agent
        if agent is not None and not agent.is_spoilt:
            return agent
        made = make_agent()
        with self._lock:
            if not self._closed:
                self._agent = made
                return made
        made.end()
        raise PeerLost("this side was closed meanwhile", peer="this side", phase="channels")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()
        self._slots = None


class SendNixl:
    """The two slots of a publisher rank; implements `SendChannel`."""

    blocks = False

    def __init__(self, agent: Agent, slots: torch.Tensor, slot_bytes: int, bucket_bytes: int) -> None:
        self._agent = agent
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._bucket_bytes = bucket_bytes
        self._read_from: set[int] = set()
        device = slots.device
        self._offer = _Offer(agent.metadata(), slots.data_ptr(), slot_bytes, _KINDS[device.type], device.index or 0)

    def offer(self, member: int) -> bytes:
        del member  # each reads the same
        return msgspec.msgpack.encode(self._offer)

    def open(self, deadline: Deadline) -> None:
        pass

    def slot(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes
        return self._slots[start : start + self._bucket_bytes]

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Members are told of the bucket next: it has to be there."""
        del nbytes, lane
        _finish(self._slots.device)
        self._read_from.add(seq)
        self._agent.serve(self)

    def wait_sent(self, seq: int, deadline: Deadline) -> None:  # noqa: ARG002 - it is over already
        """Who has taken it has read it."""
        self._read_from.discard(seq)
        if not self._read_from:
            self._agent.served(self)

    def close(self) -> None:
        self._agent.served(self)


class ReceiveNixl:
    """Two slots of a member, filled from those of a publisher rank; implements `ReceiveChannel` and `Fetches`."""

    blocks = True

    def __init__(self, channels: NixlChannels, told: _Offer, device: torch.device) -> None:
        self._channels = channels
        self._told = told
        self._device = device
        self._lock = threading.Lock()
        self._port: Port | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._posted: dict[int, int] = {}
        self._reads: dict[int, Read] = {}
        self._closed = self._failed = False

    def open(self, deadline: Deadline) -> None:  # noqa: ARG002 - nobody is waited for
        memory = torch.empty(SLOTS * self._told.slot_bytes, dtype=torch.uint8, device=self._device)
        with self._named("channels"):
            port = self._channels.agent().join(self._told.agent, memory)
        with self._lock:
            if not self._closed:
                self._port, self._memory = port, memory
                return
        port.close(failed=False)

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        assert lane
        self._posted[seq] = nbytes

    def fetch(self, seq: int) -> None:
        if seq in self._posted and seq not in self._reads:
            self._read(seq)

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:
        self.fetch(seq)
        read = self._reads[seq]
        while True:
            with self._named(f"bucket {seq}"):
                if read.poll():
                    return self._slot(seq)
            if deadline.passed():
                raise deadline.exceeded(f"bucket {seq} to be read", "raise the timeout of receive")
            time.sleep(_LOOK_S)

    def release(self, seq: int) -> None:
        """It is read into again: copies out of it, on its device's stream, have to be over."""
        del self._posted[seq], self._reads[seq]
        _finish(self._device)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            port, self._port = self._port, None
        if port is not None:
            port.close(failed=self._failed)

    def _read(self, seq: int) -> None:
        told = self._told
        with self._named(f"bucket {seq}"):
            port = self._port
            if port is None:
                raise NixlFailed("nothing is open")
            address = told.address + seq % SLOTS * told.slot_bytes
            self._reads[seq] = port.read(self._slot(seq), address, told.device, told.kind)

    def _slot(self, seq: int) -> torch.Tensor:
        start = seq % SLOTS * self._told.slot_bytes
        return self._memory[start : start + self._posted[seq]]

    @contextlib.contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        if self._closed:
            raise _cut_off(phase, "this side has let go of the channel")
        try:
            yield
        except NixlFailed as error:
            self._failed = True
            raise _cut_off(phase, str(error)) from error


def _cut_off(phase: str, why: str) -> PeerLost:
    return PeerLost(f"{phase} cut off: {why}", peer="the publisher", phase=phase)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
