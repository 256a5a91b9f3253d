"""Weights through NIXL: receivers read buckets from the memory of publisher ranks, by RDMA if the network has it.

A publisher rank packs into two slots of registered memory. A member of its sessions is told of a bucket on its link,
and reads it into a slot of its own, while it unpacks the previous one. UCX chooses the connection: InfiniBand or RoCE,
NVLink, shared memory within a host, TCP.

Reads survive a death on either side: nobody writes to the memory of another process. A receiver that was given up, but
continues later, reads stale data and is told that it was lost; if the publisher wrote to it instead, the bytes could
end up in memory that has been reused.

Guarantees: reads are polled, so no wait is longer than its deadline. A slot is refilled when all members of the session
have read it. What a read failed on is not used again.
Assumes: the hosts reach one another by a transport of UCX. ``device="cuda"`` was written without access to a GPU.
Does not: register the weights themselves; they pass through the slots.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch

from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError, PeerLost
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import PAGE_BYTES
from holdfast.plan.write import round_up
from holdfast.sync.session.channel import SLOTS
from holdfast.sync.session.futures import BlockingCall
from holdfast.sync.transports.linked import LinkedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.session.channel import Channels


# One NIXL agent of this process: registered memory, and reads from memory of other agents.
#
#     Agent.register(memory), metadata    what others need to read that memory
#     Agent.join(metadata, memory)        a `Port`: reads from there into ``memory``, polled by the caller
#
# NIXL's own progress thread stays off, since it occupies a core. Reads progress when they are polled; on the other
# side, a thread drives the library while it `serve`s. Calls to the library are serialized; its errors become
# `NixlFailed`. A read that was cut off may still write to its memory, so the memory and its agent are kept until the
# read has ended.
_BACKEND: Final = "UCX"
_MAKE_S: Final = 60.0
"""Timeout of making an agent, which examines every device of the host; half a second is usual."""
_TURN_S: Final = 0.0002
_SETTLE_S: Final = 5.0
"""How long to wait for reads that were cut off: most end when their peer ends or continues."""
_AGENT_LOOK_S: Final = 0.02
_EXIT_S: Final = 1.0
_exiting = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class NixlFailed(HoldfastError):
    """A call of the library failed; contains its message."""


class _Library(NamedTuple):
    api: Any
    errors: tuple[type[Exception], ...]


@cache
def imported() -> _Library:
    """Return NIXL's Python API and its error types. Raises `ConfigError` if it isn't installed."""
    is_first = "nixl" not in sys.modules
    raises = logging.raiseExceptions
    try:
        api, bindings = import_module("nixl._api"), import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"NixlTransport needs NIXL, which can't be imported here ({error}): pip install 'holdfast[nixl]', or use "
            "SharedMemoryTransport on one host, ProcessGroupTransport between hosts",
            field="transport",
        ) from error
    finally:
        logging.raiseExceptions = raises  # the import changes that for the whole process
    if is_first and "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # otherwise each agent is announced on standard output
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return _Library(api, (*kinds, RuntimeError, ValueError))


def make_agent() -> Agent:
    """Return an agent, within a minute. Raises `ConfigError`, `DeadlineExceeded`."""
    imported()
    made = threading.Event()
    call = BlockingCall(Agent, made.set)
    if not made.wait(_MAKE_S):
        raise DeadlineExceeded(
            f"NIXL did not make an agent within {_MAKE_S:g} s; look at the devices of this host, or leave out those "
            "that aren't needed (UCX_NET_DEVICES, UCX_TLS)",
            waited_for="a NIXL agent",
            timeout_s=_MAKE_S,
        )
    try:
        agent: Agent = call.result()
    except NixlFailed as error:
        raise ConfigError(f"{error}; look at its log (NIXL_LOG_LEVEL, UCX_LOG_LEVEL)", field="transport") from error
    return agent


class _NixlCall:
    """One call of the library, as a context manager.

    Not made from a generator, whose frames would keep the library's exception, and with it the library's agent, until
    garbage collection.
    """

    def __init__(self, owner: Agent, what: str) -> None:
        self._owner = owner
        self._what = what

    def __enter__(self) -> None:
        self._owner.lock.acquire()
        if self._owner.is_ended:
            self._owner.lock.release()
            raise NixlFailed(f"NIXL can't {self._what}: its agent was closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._owner.lock.release()
        del trace
        if isinstance(error, imported().errors):
            raise NixlFailed(f"NIXL could not {self._what}: {error}") from error.with_traceback(None)


class Agent:
    """See the module. Thread-safe."""

    def __init__(self) -> None:
        made = imported()
        self.is_spoilt = False
        """A read was cut off or has failed: no new ports."""
        self._errors = made.errors
        self.lock = threading.Lock()
        self._reads: list[Read] = []
        self._memory: list[tuple[Any, torch.Tensor]] = []
        self._ports = 0
        self._serving: set[object] = set()
        self._turns: threading.Thread | None = None
        self._agent: Any = None
        try:
            config = made.api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = made.api.nixl_agent(f"holdfast-{secrets.token_hex(8)}", config)
        except self._errors as error:
            raise NixlFailed(f"NIXL could not make an agent: {error}") from error
        if _BACKEND not in self._agent.backends:
            raise NixlFailed(f"this NIXL has no {_BACKEND} plugin")

    @property
    def is_ended(self) -> bool:
        return self._agent is None

    def register(self, memory: torch.Tensor) -> None:
        """Let others read from ``memory``, and this agent into it, until `deregister`. Raises `ConfigError`."""
        try:
            with self._call(f"register {memory.numel()} bytes of {memory.device}"):
                self._memory.append((self._agent.register_memory(memory), memory))
        except NixlFailed as error:
            raise ConfigError(
                f"{error}. Locked memory may be limited (ulimit -l), or bucket_bytes too large", field="bucket_bytes"
            ) from error

    def deregister(self, memory: torch.Tensor) -> None:
        with self._call("deregister memory"):
            gone = [entry for entry in self._memory if entry[1] is memory]
            self._memory = [entry for entry in self._memory if entry[1] is not memory]
            for registered, _ in gone:
                self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """Return what peers need to read the memory that is registered now."""
        with self._call("describe its memory"):
            return bytes(self._agent.get_agent_metadata())

    def serve(self, what: object) -> None:
        """Drive the library, so that others can read, until `served` is called for ``what``."""
        with self.lock:
            self._serving.add(what)
            if self._turns is None:
                self._turns = _started("holdfast-sync-nixl", self._take_turns)

    def served(self, what: object) -> None:
        with self.lock:
            self._serving.discard(what)

    def join(self, metadata: bytes, memory: torch.Tensor) -> Port:
        """Return a port that reads from the agent of ``metadata`` into ``memory``, which is registered for that."""
        self.register(memory)
        try:
            with self._call("use what its peer has told of itself"):
                said = self._agent.add_remote_agent(metadata)
                self._ports += 1
        except NixlFailed:
            self.deregister(memory)
            raise
        return Port(self, said.decode() if isinstance(said, bytes) else said, memory)

    def end(self) -> None:
        """Release everything; idempotent. Reads in progress get some seconds to end, on another thread."""
        with self.lock:
            agent, self._agent = self._agent, None
            reads, self._reads = self._reads, []
            memory, self._memory = self._memory, []
            self._serving.clear()
        if agent is None:
            return
        if reads:
            _started("holdfast-sync-nixl-end", _settle, [agent, memory], reads, self._errors)
            del agent  # the thread has to release it last
            return
        for registered, _ in memory:
            with contextlib.suppress(*self._errors):
                agent.deregister_memory(registered)

    def _take_turns(self) -> None:
        while not _exiting.wait(_TURN_S):
            with self.lock:
                if not self._serving or self._agent is None:
                    self._turns = None
                    return
                with contextlib.suppress(*self._errors):  # the reading side reports it
                    self._agent.get_new_notifs()

    def _call(self, what: str) -> _NixlCall:
        return _NixlCall(self, what)

    # for ports and reads --------------------------------------------------------------------------------------------

    def begin(self, peer: str, local: torch.Tensor, remote: tuple[int, int, int], kind: str) -> Read:
        with self._call("begin a read"):
            found, there = self._agent.get_xfer_descs(local), self._agent.get_xfer_descs([remote], kind)
            read = Read(self, self._agent.initialize_xfer("READ", found, there, peer))
            self._reads.append(read)
            state = self._agent.transfer(read.handle)
            self._note(read, state)
        return read

    def poll(self, read: Read) -> bool:
        if not read.is_over:
            with self._call("read"):
                self._note(read, self._agent.check_xfer_state(read.handle))
        return read.is_over

    def _note(self, read: Read, state: str) -> None:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"its state is {state}")
        if state == "DONE":
            read.is_over = True
            self._reads.remove(read)
            self._agent.release_xfer_handle(read.handle)
            read.handle = None  # it would keep the library's agent

    def leave(self, port: Port, *, spoilt: bool) -> None:
        with contextlib.suppress(NixlFailed), self._call("let go of a peer"):
            self._ports -= 1
            self.is_spoilt = self.is_spoilt or spoilt
            if not spoilt:
                self._agent.remove_remote_agent(port.peer)
        if not spoilt:
            with contextlib.suppress(NixlFailed):
                self.deregister(port.memory)
        if self.is_spoilt and not self._ports:
            self.end()


class Port:
    """Reads from the memory of one other agent into ``memory``."""

    def __init__(self, agent: Agent, peer: str, memory: torch.Tensor) -> None:
        self.peer = peer
        self.memory = memory
        self._agent = agent
        self._reads: list[Read] = []
        self._closed = False

    def read(self, local: torch.Tensor, address: int, device: int, kind: str) -> Read:
        """Begin to read ``local.nbytes`` bytes, into ``local``, a part of `memory`, from ``address`` of the peer."""
        read = self._agent.begin(self.peer, local, (address, local.numel(), device), kind)
        self._reads = [other for other in self._reads if not other.is_over]
        self._reads.append(read)
        return read

    def close(self, *, failed: bool) -> None:
        """Release the port and its memory; idempotent. failed: a read of it has failed."""
        if not self._closed:
            self._closed = True
            self._agent.leave(self, spoilt=failed or any(not read.is_over for read in self._reads))


class Read:
    """A read in progress."""

    __slots__ = ("_agent", "handle", "is_over")

    def __init__(self, agent: Agent, handle: Any) -> None:
        self.handle = handle
        self.is_over = False
        self._agent = agent

    def poll(self) -> bool:
        """Return True if the data has arrived; doesn't wait. Raises `NixlFailed` if it won't."""
        return self._agent.poll(self)


def _settle(kept: list[Any], reads: list[Read], errors: tuple[type[Exception], ...]) -> None:
    """Release an agent, then its memory (``kept``), once none of ``reads`` can write there any more."""
    ends_s = time.monotonic() + _SETTLE_S
    agent = kept.pop(0)
    while reads and not _exiting.wait(_AGENT_LOOK_S):
        for read in list(reads):
            try:
                is_under_way = agent.check_xfer_state(read.handle) == "PROC"
            except errors:
                is_under_way = False
            if not is_under_way or time.monotonic() > ends_s:
                reads.remove(read)
                with contextlib.suppress(*errors):
                    agent.release_xfer_handle(read.handle)
                read.handle = None
    reads.clear()
    del agent
    kept.clear()


def _started(name: str, function: Callable[..., None], *given: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=given, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _stop_threads() -> None:
    """Stop threads before the interpreter ends: one that returns from the library then would crash the process."""
    _exiting.set()
    for thread in list(_threads):
        thread.join(_EXIT_S)


_LOOK_S: Final = 0.0002
_KINDS: Final = {"cpu": "DRAM", "cuda": "VRAM"}


class NixlTransport(LinkedTransport):
    """Transfers versions through NIXL (``pip install 'holdfast[nixl]'``), between processes on any hosts.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        device: where buckets are packed and received: ``"cpu"``, or a CUDA device.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
        host: the address by which the other side reaches this host, if it isn't found automatically.

    Raises `ConfigError` if NIXL can't be imported.
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


class _NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    """Location of two adjacent slots; ``device``: number of their GPU."""

    agent: bytes
    address: int
    slot_bytes: int
    kind: str
    device: int


class NixlChannels:
    """See the module; implements `Channels`. One agent for all channels of a rank or a receiver, until it fails."""

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
        """Return the same slots for every epoch: they are refilled when the members of the last one have left."""
        del addresses  # whoever knows the memory can read it
        agent, slot_bytes = self.agent(), round_up(bucket_bytes, PAGE_BYTES)
        if self._slots is None or self._slots.numel() != SLOTS * slot_bytes:
            slots = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, device=self._device)
            agent.register(slots)
            self._slots = slots
        return SendNixl(agent, self._slots, slot_bytes, bucket_bytes)

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveNixl:
        told = msgspec.msgpack.decode(offer, type=_NixlOffer)
        if told.slot_bytes != round_up(bucket_bytes, PAGE_BYTES):
            raise ConfigError(
                f"the publisher offers slots of {told.slot_bytes} bytes for buckets of {bucket_bytes}; run the same "
                "version of Holdfast on both sides",
                field="transport",
            )
        return ReceiveNixl(self, told, self._device)

    def agent(self) -> Agent:
        """Return a working agent. Raises as `make_agent`, and `PeerLost` after `close`."""
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
        self._offer = _NixlOffer(agent.metadata(), slots.data_ptr(), slot_bytes, _KINDS[device.type], device.index or 0)

    def offer(self, member: int) -> bytes:
        del member  # each reads the same
        return msgspec.msgpack.encode(self._offer)

    def open(self, deadline: Deadline) -> None:
        pass

    def slot(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes
        return self._slots[start : start + self._bucket_bytes]

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Complete the bucket before members are told of it."""
        del nbytes, lane
        _finish(self._slots.device)
        self._read_from.add(seq)
        self._agent.serve(self)

    def wait_sent(self, seq: int, deadline: Deadline) -> None:  # noqa: ARG002 - it is over already
        """Return at once: a member that has taken a bucket has read it."""
        self._read_from.discard(seq)
        if not self._read_from:
            self._agent.served(self)

    def close(self) -> None:
        self._agent.served(self)


class ReceiveNixl:
    """Two slots of a member, filled from those of a publisher rank; implements `ReceiveChannel` and `Fetches`."""

    blocks = True

    def __init__(self, channels: NixlChannels, told: _NixlOffer, device: torch.device) -> None:
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
        """Allow the slot to be read into again: copies out of it, on its device's stream, must be complete."""
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


prepare_decoding(_NixlOffer)
