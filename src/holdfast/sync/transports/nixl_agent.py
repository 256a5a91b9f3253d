"""One NIXL agent of this process: memory that is registered with it, and reads from memory of other agents.

    Agent.register(memory), metadata    what others need to read that memory
    Agent.join(metadata, memory)        a `Port`: reads from there into ``memory``, polled by who has begun them

NIXL's own progress thread stays off, since it takes a core all the time, between versions too. Reads make progress when
they are polled; on the side that is read from, a thread gives some turns to the library while it `serve`s.

Guarantees: calls reach the library one at a time; what it raises is a `NixlFailed`. Nothing here waits for a peer. A
read that was cut off may still write to its memory: that lives on, with its agent, until the read has ended or the
agent is gone, a few seconds later at most; nothing else uses either.
Assumes NIXL with its UCX plugin, which chooses devices and protocols as its environment variables say.
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
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.sync.waiting import Aside

if TYPE_CHECKING:
    import torch

_BACKEND: Final = "UCX"
_MAKE_S: Final = 60.0
"""An agent looks at every device of the host; half a second is usual."""
_TURN_S: Final = 0.0002
_SETTLE_S: Final = 5.0
"""Reads that were cut off mostly end when their peer does, or goes on."""
_LOOK_S: Final = 0.02
_EXIT_S: Final = 1.0
_exiting = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class NixlFailed(HoldfastError):
    """The library couldn't do what it was told to; the message has its words."""


class _Library(NamedTuple):
    api: Any
    errors: tuple[type[Exception], ...]


@cache
def imported() -> _Library:
    """NIXL's Python API and the errors that it raises. Raises `ConfigError` where it isn't installed."""
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
        logging.raiseExceptions = raises  # its import changes that for the whole process
    if is_first and "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else each agent is announced on standard output
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return _Library(api, (*kinds, RuntimeError, ValueError))


def make_agent() -> Agent:
    """An agent; returns within a minute. Raises `ConfigError`, `DeadlineExceeded`."""
    imported()
    made = threading.Event()
    call = Aside(Agent, made.set)
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


class _Call:
    """One call of the library, as a context manager.

    Written out, since the frames of one made from a generator keep what was raised in the library, and with it the
    library's agent, until somebody collects garbage.
    """

    def __init__(self, owner: Agent, what: str) -> None:
        self._owner = owner
        self._what = what

    def __enter__(self) -> None:
        self._owner.lock.acquire()
        if self._owner.is_ended:
            self._owner.lock.release()
            raise NixlFailed(f"NIXL can't {self._what}: its agent was ended")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._owner.lock.release()
        del trace
        if isinstance(error, imported().errors):
            raise NixlFailed(f"NIXL could not {self._what}: {error}") from error.with_traceback(None)


class Agent:
    """See the module. Any thread may call."""

    def __init__(self) -> None:
        made = imported()
        self.is_spoilt = False
        """A read of it was cut off, or has failed: for no new ports."""
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
        """Others may read from ``memory``, and this agent into it, until `deregister`. Raises `ConfigError`."""
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
        """What others need to read from the memory that is registered now."""
        with self._call("describe its memory"):
            return bytes(self._agent.get_agent_metadata())

    def serve(self, what: object) -> None:
        """Give the library turns, so that others can read, until `served` of ``what``."""
        with self.lock:
            self._serving.add(what)
            if self._turns is None:
                self._turns = _started("holdfast-sync-nixl", self._take_turns)

    def served(self, what: object) -> None:
        with self.lock:
            self._serving.discard(what)

    def join(self, metadata: bytes, memory: torch.Tensor) -> Port:
        """A way to read from the agent that ``metadata`` is of, into ``memory``, which is registered for that."""
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
        """Let go of everything; idempotent. Reads that are under way get some seconds to end, on another thread."""
        with self.lock:
            agent, self._agent = self._agent, None
            reads, self._reads = self._reads, []
            memory, self._memory = self._memory, []
            self._serving.clear()
        if agent is None:
            return
        if reads:
            _started("holdfast-sync-nixl-end", _settle, [agent, memory], reads, self._errors)
            del agent  # the thread is to let go of it last
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
                with contextlib.suppress(*self._errors):  # who reads is told
                    self._agent.get_new_notifs()

    def _call(self, what: str) -> _Call:
        return _Call(self, what)

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
        """Begin to bring as many bytes as ``local``, a part of `memory`, has, from ``address`` of the peer's."""
        read = self._agent.begin(self.peer, local, (address, local.numel(), device), kind)
        self._reads = [other for other in self._reads if not other.is_over]
        self._reads.append(read)
        return read

    def close(self, *, failed: bool) -> None:
        """Let go of it, and of its memory. failed: a read of it has. Idempotent."""
        if not self._closed:
            self._closed = True
            self._agent.leave(self, spoilt=failed or any(not read.is_over for read in self._reads))


class Read:
    """Bytes that are on their way."""

    __slots__ = ("_agent", "handle", "is_over")

    def __init__(self, agent: Agent, handle: Any) -> None:
        self.handle = handle
        self.is_over = False
        self._agent = agent

    def poll(self) -> bool:
        """Whether they are there; doesn't wait. Raises `NixlFailed` if they won't come."""
        return self._agent.poll(self)


def _settle(kept: list[Any], reads: list[Read], errors: tuple[type[Exception], ...]) -> None:
    """Let go of an agent, then of its memory (``kept``), when nothing of ``reads`` will be written there any more."""
    ends_s = time.monotonic() + _SETTLE_S
    agent = kept.pop(0)
    while reads and not _exiting.wait(_LOOK_S):
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
    """A thread that is in the library while the interpreter ends comes back to nothing, and takes the process down."""
    _exiting.set()
    for thread in list(_threads):
        thread.join(_EXIT_S)
