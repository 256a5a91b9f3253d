"""Weights through NIXL: receivers read the blocks of publisher ranks, by RDMA if the network has it.

Versions lie in blocks, as for the other transports in host memory (``sync.versions``). What differs is how their bytes
come to a receiver: a rank registers its blocks, a receiver its mirrors, and reads are posted by the receiver alone. UCX
chooses the connection: InfiniBand or RoCE, shared memory within a host, TCP. Leases, deltas and the rest go over TCP.

Guarantees: nobody writes to the memory of another process. Reads are polled, so no wait is longer than its deadline.
Memory that a read may still write to is not used for anything else, and outlives it.
Assumes: the hosts reach one another by a transport of UCX, and by TCP. Who reads verifies the bytes.
Does not: register the weights themselves, or memory of a device.
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

from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.format.decoding import prepare_decoding
from holdfast.sync.session.futures import BlockingCall
from holdfast.sync.versions.publishing import BlockPublishing
from holdfast.sync.versions.reads import MemoryReadFailed
from holdfast.sync.versions.receiving import BlockReceiving
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.sync.protocol import PublisherOptions, Publishing, Receiving

# One NIXL agent of a publisher rank or a receiver: registered memory, and reads from memory of other agents.
#
# NIXL's own progress thread stays off, since it occupies a core. Reads progress when they are polled; on the other
# side, a thread drives the library for a while after each request. Calls to the library are serialized; its errors
# become `MemoryReadFailed`.
_BACKEND: Final = "UCX"
_MAKE_S: Final = 60.0
"""Timeout of making an agent, which examines every device of the host; half a second is usual."""
_TURN_S: Final = 0.0002
_DRIVEN_S: Final = 5.0
"""How long the library is driven after a request; who reads for longer asks again meanwhile."""
_SETTLE_S: Final = 5.0
"""How long to wait for reads that were cut off, once their agent ends: most end when their peer ends or continues."""
_CUT_OFF_S: Final = 0.5
"""How long to wait for one that is being cut off."""
_AGENT_LOOK_S: Final = 0.02
_EXIT_S: Final = 1.0
_exiting = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


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


def make_agent() -> NixlAgent:
    """Return an agent, within a minute. Raises `ConfigError`, `DeadlineExceeded`."""
    imported()
    made = threading.Event()
    call = BlockingCall(NixlAgent, made.set)
    if not made.wait(_MAKE_S):
        raise DeadlineExceeded(
            f"NIXL did not make an agent within {_MAKE_S:g} s; look at the devices of this host, or leave out those "
            "that aren't needed (UCX_NET_DEVICES, UCX_TLS)",
            waited_for="a NIXL agent",
            timeout_s=_MAKE_S,
        )
    try:
        agent: NixlAgent = call.result()
    except MemoryReadFailed as error:
        raise ConfigError(f"{error}; look at its log (NIXL_LOG_LEVEL, UCX_LOG_LEVEL)", field="transport") from error
    return agent


class NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    """Memory that others may read. metadata: of its agent, with all that it has registered now."""

    agent: str
    metadata: bytes
    address: int
    nbytes: int


class _NixlCall:
    """One call of the library, as a context manager.

    Not made from a generator, whose frames would keep the library's exception, and with it the library's agent, until
    garbage collection.
    """

    def __init__(self, owner: NixlAgent, what: str) -> None:
        self._owner = owner
        self._what = what

    def __enter__(self) -> None:
        self._owner.lock.acquire()
        if self._owner.is_ended:
            self._owner.lock.release()
            raise MemoryReadFailed(f"NIXL can't {self._what}: its agent was closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._owner.lock.release()
        del trace
        if isinstance(error, imported().errors):
            raise MemoryReadFailed(f"NIXL could not {self._what}: {error}") from error.with_traceback(None)


class NixlAgent:
    """See the module; implements `MemoryReads`. Thread-safe."""

    def __init__(self) -> None:
        made = imported()
        self._errors = made.errors
        self.lock = threading.Lock()
        self._reads: list[_NixlRead] = []
        self._memory: dict[int, tuple[Any, torch.Tensor]] = {}
        """What is registered, by address."""
        self._metadata = b""
        self._peers: dict[str, bytes] = {}
        """What is known of other agents."""
        self._silent: set[str] = set()
        """Agents of which a read was cut off: nothing more is read from them."""
        self._driven_until_s = 0.0
        self._turns: threading.Thread | None = None
        self._name = f"holdfast-{secrets.token_hex(8)}"
        self._agent: Any = None
        try:
            config = made.api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = made.api.nixl_agent(self._name, config)
        except self._errors as error:
            raise MemoryReadFailed(f"NIXL could not make an agent: {error}") from error
        if _BACKEND not in self._agent.backends:
            raise MemoryReadFailed(f"this NIXL has no {_BACKEND} plugin")

    @property
    def is_ended(self) -> bool:
        return self._agent is None

    def register(self, memory: torch.Tensor) -> None:
        try:
            with _NixlCall(self, f"register {memory.numel()} bytes"):
                self._memory[memory.data_ptr()] = self._agent.register_memory(memory), memory
                self._metadata = b""
        except MemoryReadFailed as error:
            raise ConfigError(
                f"{error}. Locked memory may be limited: raise `ulimit -l`, or use ProcessGroupTransport",
                field="transport",
            ) from error

    def deregister(self, memory: torch.Tensor) -> None:
        with contextlib.suppress(MemoryReadFailed), _NixlCall(self, "deregister memory"):
            if memory.data_ptr() in self._memory and not self._is_read_into(memory):
                registered, _ = self._memory.pop(memory.data_ptr())
                self._metadata = b""
                self._agent.deregister_memory(registered)

    def is_quiet(self, memory: torch.Tensor) -> bool:
        with self.lock:
            return not self._is_read_into(memory)

    def offer(self, memory: torch.Tensor) -> bytes:
        with _NixlCall(self, "describe its memory"):
            if not self._metadata:
                self._metadata = bytes(self._agent.get_agent_metadata())
            told = NixlOffer(self._name, self._metadata, memory.data_ptr(), memory.numel())
        self.drive()
        return msgspec.msgpack.encode(told)

    def drive(self) -> None:
        with self.lock:
            self._driven_until_s = time.monotonic() + _DRIVEN_S
            if self._turns is None and self._agent is not None:
                self._turns = _started("holdfast-sync-nixl", self._take_turns)

    def read(self, offered: bytes, start: int, into: torch.Tensor, check: Callable[[], None]) -> None:
        try:
            told = msgspec.msgpack.decode(offered, type=NixlOffer)
        except msgspec.MsgspecError as error:
            raise MemoryReadFailed(f"what its peer has told of its memory can't be read ({error})") from error
        if not 0 <= start <= start + into.numel() <= told.nbytes:
            raise MemoryReadFailed(f"its peer offers {told.nbytes} bytes; {start + into.numel()} were needed")
        while not self._knows(told):
            check()
            time.sleep(_TURN_S)
        read = self._begin(told, start, into)
        try:
            while not self._poll(read):
                check()
                time.sleep(_TURN_S)
        except BaseException:
            self._cut_off(read)
            raise

    def close(self) -> None:
        with self.lock:
            agent, self._agent = self._agent, None
            reads, self._reads = self._reads, []
            memory, self._memory = list(self._memory.values()), {}
        if agent is None:
            return
        if reads:
            _started("holdfast-sync-nixl-end", _settle, [agent, memory], reads, self._errors)
            del agent  # the thread has to release it last
            return
        for registered, _ in memory:
            with contextlib.suppress(*self._errors):
                agent.deregister_memory(registered)

    # ------------------------------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        while not _exiting.wait(_TURN_S):
            with self.lock:
                if self._agent is None or time.monotonic() > self._driven_until_s:
                    self._turns = None
                    return
                with contextlib.suppress(*self._errors):  # the reading side reports it
                    self._agent.get_new_notifs()

    def _is_read_into(self, memory: torch.Tensor) -> bool:
        start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        return any(start <= read.address < end for read in self._reads)

    def _knows(self, told: NixlOffer) -> bool:
        """Learn of an agent's memory; return False if that has to wait: it is being read."""
        with _NixlCall(self, "use what its peer has told of its memory"):
            if told.agent in self._silent:
                raise MemoryReadFailed("an earlier read of it was cut off")
            if self._peers.get(told.agent) != told.metadata:
                if any(read.peer == told.agent for read in self._reads):
                    return False
                self._agent.add_remote_agent(told.metadata)
                self._peers[told.agent] = told.metadata
        return True

    def _begin(self, told: NixlOffer, start: int, into: torch.Tensor) -> _NixlRead:
        with _NixlCall(self, "begin a read"):
            local = self._agent.get_xfer_descs(into)
            there = self._agent.get_xfer_descs([(told.address + start, into.numel(), 0)], "DRAM")
            read = _NixlRead(self._agent.initialize_xfer("READ", local, there, told.agent), told.agent, into.data_ptr())
            self._reads.append(read)
            try:
                self._note(read, self._agent.transfer(read.handle))
            except self._errors:
                self._over(read)
                raise
        return read

    def _poll(self, read: _NixlRead) -> bool:
        if not read.is_over:
            with _NixlCall(self, "read"):
                try:
                    self._note(read, self._agent.check_xfer_state(read.handle))
                except self._errors:  # nothing is written any more
                    self._over(read)
                    raise
        return read.is_over

    def _note(self, read: _NixlRead, state: str) -> None:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"its state is {state}")
        if state == "DONE":
            self._over(read)

    def _over(self, read: _NixlRead) -> None:
        read.is_over = True
        if read in self._reads:
            self._reads.remove(read)
            with contextlib.suppress(*self._errors):
                self._agent.release_xfer_handle(read.handle)
        read.handle = None  # it would keep the library's agent

    def _cut_off(self, read: _NixlRead) -> None:
        """Let a read end that nobody waits for; one that doesn't stays, and its peer is not read from any more."""
        until_s = time.monotonic() + _CUT_OFF_S
        with contextlib.suppress(MemoryReadFailed):
            while not self._poll(read) and time.monotonic() < until_s:
                time.sleep(_TURN_S)
        if not read.is_over:
            with self.lock:
                self._silent.add(read.peer)


class _NixlRead:
    """A read in progress, into memory from ``address`` on."""

    __slots__ = ("address", "handle", "is_over", "peer")

    def __init__(self, handle: Any, peer: str, address: int) -> None:
        self.handle = handle
        self.peer = peer
        self.address = address
        self.is_over = False


def _settle(kept: list[Any], reads: list[_NixlRead], errors: tuple[type[Exception], ...]) -> None:
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


class NixlTransport:
    """Transfers versions through NIXL (``pip install 'holdfast[nixl]'``), between processes on any hosts.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        device: where versions lie: ``"cpu"``, host memory. Weights may be on any device.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds of silence after which a peer is given up.
        host: the address by which the other side reaches this host over TCP, if it isn't found automatically.
        fan_out: for receivers: serve to others what was fetched, and bring from others what they have, so that the
            publisher's link carries a version about once.

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
        fan_out: bool = False,
    ) -> None:
        if rendezvous is None:
            raise ConfigError(
                "rendezvous must be the path of a shared directory, 'tcp://host:port' or a Store", field="rendezvous"
            )
        self._rendezvous = rendezvous
        self.process_group = process_group
        self._peer_timeout_s = checked_seconds("peer_timeout_s", peer_timeout_s)
        self._host = host
        self._fan_out = fan_out
        if torch.device(device).type != "cpu":
            raise ConfigError(
                f"versions lie in host memory, not on {device}; give device='cpu'. The weights may be on any device",
                field="device",
            )
        imported()

    def publishing(self, options: PublisherOptions) -> Publishing:
        return BlockPublishing(
            options,
            rendezvous=self._rendezvous,
            process_group=self.process_group,
            peer_timeout_s=self._peer_timeout_s,
            network=True,
            host=self._host,
            memory_reads=make_agent,
        )

    def receiving(self) -> Receiving:
        return BlockReceiving(
            rendezvous=self._rendezvous,
            peer_timeout_s=self._peer_timeout_s,
            fan_out=self._fan_out,
            host=self._host,
            memory_reads=make_agent,
        )


prepare_decoding(NixlOffer)
