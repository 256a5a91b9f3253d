"""Transfer weights between processes on the GPUs of one host, through device memory that both have mapped (CUDA IPC).

A publisher rank packs into two slots in the memory of its GPU; each member of its sessions maps them, and copies what
it wants from there: nothing passes through the host, and only messages are sent. Checksums are computed on the GPU. A
member on another GPU of the host reads over the link between them, if the driver allows that.

Guarantees: a bucket is announced when it is packed, and its slot given back when it has been copied: each side waits
for its own stream. A member that was given up keeps its mapping, which nobody writes to any more.
Assumes Linux, one host, and that both sides see the publisher's GPU, under any number. Written without access to a GPU:
``tests/gpu`` has its tests.
Does not: synchronize other streams than the current ones of the threads that publish and receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.multiprocessing import reductions

from holdfast.errors import ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.plan.write import round_up
from holdfast.sync.session.channel import SLOTS
from holdfast.sync.transports.linked import LinkedTransport, MappedSlots
from holdfast.sync.weights.buckets import BUCKET_ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.session.channel import Channels

_cuda: Any = torch.cuda
_reductions: Any = reductions
"""Neither is typed."""


class CudaIpcTransport(LinkedTransport):
    """Transfers versions through device memory, within one host.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        device: device of this process for a publisher's slots; None for the current CUDA device.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.

    Raises `ConfigError` if torch finds no CUDA device.
    """

    def __init__(
        self,
        rendezvous: Any,
        *,
        device: torch.device | str | None = None,
        process_group: Any | None = None,
        peer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(rendezvous, process_group=process_group, peer_timeout_s=peer_timeout_s)
        if not _cuda.is_available():
            raise ConfigError(
                "CudaIpcTransport needs a CUDA device, and torch finds none in this process. Use "
                "SharedMemoryTransport on one host, or ProcessGroupTransport between hosts",
                field="transport",
            )
        given = torch.device("cuda" if device is None else device)
        if given.type != "cuda":
            raise ConfigError(f"device must be a CUDA device, not {device!r}", field="device")
        self._device = torch.device("cuda", _cuda.current_device() if str(given) == "cuda" else given.index)

    def make_channels(self) -> Channels:
        return CudaIpcChannels(self._device)


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    """What torch needs to map memory of another process; ``gpu``: the device's UUID, since numbers differ."""

    gpu: str
    nbytes: int
    memory: bytes
    storage_bytes: int
    storage_at: int
    counter: bytes
    counter_at: int
    event: bytes
    waits_for_event: bool


class CudaIpcChannels:
    """See the module; implements `Channels`."""

    host = "127.0.0.1"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def address(self) -> bytes:
        return b""

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendDeviceSlots:
        del addresses  # whoever knows the handle can map the memory
        return SendDeviceSlots(self._device, bucket_bytes)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveDeviceSlots:
        return ReceiveDeviceSlots(msgspec.msgpack.decode(offer, type=_Handle), bucket_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class SendDeviceSlots:
    """The two slots of a publisher rank; implements `SendChannel`."""

    blocks = False

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._slot_bytes = round_up(bucket_bytes, BUCKET_ALIGN_BYTES)
        self._memory = torch.empty(SLOTS * self._slot_bytes, dtype=torch.uint8, device=device)

    def offer(self, member: int) -> bytes:
        del member  # each gets a handle, and with it its own count
        try:
            told = _reductions.reduce_tensor(self._memory)[1]
        except RuntimeError as error:
            raise ConfigError(
                f"this process can't share memory of {self._memory.device} ({str(error).splitlines()[0][:200]}): "
                "another allocator may be in use (PYTORCH_CUDA_ALLOC_CONF), or the container forbids it. Use "
                "SharedMemoryTransport",
                field="transport",
            ) from error
        _, memory, storage_bytes, storage_at, _, counter, counter_at, event, waits = told[6:]
        gpu = _name_of(self._memory.device.index)
        handle = _Handle(
            gpu, self._memory.numel(), memory, storage_bytes, storage_at, counter, counter_at, event, waits
        )
        return msgspec.msgpack.encode(handle)

    def open(self, deadline: Deadline) -> None:
        pass

    def slot(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes
        return self._memory[start : start + self._bucket_bytes]

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Complete the bucket before members are told of it."""
        del seq, nbytes, lane
        _cuda.current_stream(self._memory.device).synchronize()

    def wait_sent(self, seq: int, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        # Torch keeps the memory until members have released theirs.
        self._memory = torch.empty(0, dtype=torch.uint8)


class ReceiveDeviceSlots(MappedSlots):
    """A publisher rank's slots, mapped; implements `ReceiveChannel`."""

    def __init__(self, handle: _Handle, bucket_bytes: int) -> None:
        slot_bytes = round_up(bucket_bytes, BUCKET_ALIGN_BYTES)
        if handle.nbytes != SLOTS * slot_bytes:
            raise ConfigError(
                f"the publisher offers {handle.nbytes} bytes of memory for buckets of {bucket_bytes}; run the same "
                "version of Holdfast on both sides",
                field="transport",
            )
        device = _number_of(handle.gpu)
        try:
            memory: torch.Tensor = _reductions.rebuild_cuda_tensor(
                *(torch.Tensor, (handle.nbytes,), (1,), 0, torch.UntypedStorage, torch.uint8, device),
                *(handle.memory, handle.storage_bytes, handle.storage_at, False),
                *(handle.counter, handle.counter_at, handle.event, handle.waits_for_event),
            )
        except RuntimeError as error:
            raise ConfigError(
                f"the publisher's memory on GPU {handle.gpu} can't be mapped: {str(error).splitlines()[0][:200]}. "
                "Publisher and receiver must be two processes of one host, in containers that share IPC",
                field="transport",
            ) from error
        super().__init__(memory, slot_bytes)

    def release(self, seq: int) -> None:
        """Wait for copies out of the slot, on its device's stream: the publisher is told next, and refills it."""
        super().release(seq)
        _cuda.current_stream(self._memory.device).synchronize()


def _name_of(device: int) -> str:
    return str(_cuda.get_device_properties(device).uuid)


def _number_of(gpu: str) -> int:
    found = {_name_of(device): device for device in range(torch.cuda.device_count())}
    if gpu not in found:
        raise ConfigError(
            f"the publisher's GPU {gpu} isn't visible to this receiver, which sees {', '.join(found) or 'none'}: widen "
            "its CUDA_VISIBLE_DEVICES, or use SharedMemoryTransport",
            field="transport",
        )
    return found[gpu]


prepare_decoding(_Handle)
