"""Hand a whole state from one process to others that ask for it: over TCP, in buckets with checksums.

    server = HandoverServer()                              # in the process that has the state
    server.offer(step, state, timeout_s=60)                # copied: it may change from now on
    fetch_state(server.address, step, timeout_s=60)        # in each process that lacks it
    server.withdraw()                                      # nobody else is served

    receiver                                     server, one thread for each receiver
    AskState(step)            ->
                              <-                 StateHead(description), once there is an offer; NoState(why)
                              <-                 for each bucket, once it is copied: BucketHead(checksum), its bytes

Both ends cut the state into buckets by its description. A bucket is copied and hashed in one pass when it is offered,
and sent as it lies; the receiver checks it before anything of it is put into place.

Guarantees: what is fetched is the state that was offered, bit for bit, or an error is raised; it names the damaged
bucket. Every wait ends at a deadline, which is the receiver's for what is sent to it. Receivers don't wait for one
another, and the server waits for none of them: one that hangs costs its thread and the copy until its deadline. A
sender that dies is an error at the receiver at once, one that vanishes at the deadline. Only who knows the address,
with its token, is served; a description runs nothing that it names (``state.nested``).
Assumes: nobody writes to the state within `offer`, and to memory received into within `fetch_state`.
Does not: find the peers, try again, encrypt. Weight sync (`Publisher`, `Receiver`) is for named tensors, and a fleet
that commits together; here each receiver is alone, and gets everything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch
import xxhash

from holdfast import _torch_compat as compat
from holdfast.boxes import Box
from holdfast.coordination.deadline import Deadline
from holdfast.cores import take_turns
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    PeerLost,
)
from holdfast.format.decoding import prepare_decoding
from holdfast.state.nested import Description, Landing, Memory, take_apart
from holdfast.sync.session.links import connect
from holdfast.sync.session.rendezvous import hosts_here, this_machine
from holdfast.sync.weights.buckets import BucketPlan, Piece, PieceBox, plan_buckets
from holdfast.sync.weights.copy import BucketCopy
from holdfast.sync.weights.pieces import Local, target_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger("holdfast.sync")

BUCKET_BYTES: Final = 8 << 20
"""Small enough to stay in a processor's cache between being received, checked and put into place."""
BUCKET_BYTES_MIN: Final = 4096
_PROTOCOL: Final = 1
_FRAME: Final = struct.Struct("<4sQQ")
"""Magic number, bytes and xxh3 of a message; the xxh3 of these follows."""
_FRAME_BYTES: Final = _FRAME.size + 8
_MAGIC: Final = b"HFho"
_FRAME_BYTES_MAX: Final = 4 << 30
_OWN_BYTES: Final = 64 << 10
"""Entries of this size are received where they belong; copying smaller ones costs less than another call."""
_COPY_THREADS: Final = 4
_INTRODUCTION_S: Final = 10.0
_GRACE_S: Final = 1.0
"""How much longer than a receiver its server waits: the receiver knows best what it waited for."""
_BACKLOG: Final = 128
_JOIN_S: Final = 5.0


class Address(msgspec.Struct, frozen=True):
    """Where a server listens. ``token``: what must be sent to it."""

    hosts: tuple[str, ...]
    port: int
    machine: str
    token: str


class AskState(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for the state at a step, within ``timeout_s``."""

    protocol: int
    token: str
    step: int
    timeout_s: float


class NoState(msgspec.Struct, frozen=True, tag="refused"):
    """There is no such state, and there will not be one."""

    why: str


class StateHead(msgspec.Struct, frozen=True, tag="offered"):
    """What follows, in buckets of ``bucket_bytes``."""

    bucket_bytes: int
    description: Description


class BucketHead(msgspec.Struct, frozen=True, tag="bucket"):
    """Announce the bytes of a bucket, which follow."""

    number: int
    nbytes: int
    kind: str
    checksum: int


_Message = AskState | NoState | StateHead | BucketHead
_decoder: Final = msgspec.msgpack.Decoder(_Message)
_encoder: Final = msgspec.msgpack.Encoder()


class _Wire:
    """A connection of which every wait has a deadline. ``peer``: the other end, for messages."""

    def __init__(self, sock: socket.socket, deadline: Deadline, peer: str, phase: str) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.deadline = deadline
        self.peer = peer
        self.phase = phase

    def say(self, message: _Message) -> None:
        body = _encoder.encode(message)
        head = _FRAME.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        self.send(head + xxhash.xxh3_64_digest(head) + body)

    def hear(self, *kinds: type[Any]) -> Any:
        """Return the next message. Raises `CheckpointCorrupt` for one that is damaged, or of another kind."""
        head = bytearray(_FRAME_BYTES)
        self.receive(memoryview(head))
        magic, nbytes, expected = _FRAME.unpack_from(head)
        is_whole = xxhash.xxh3_64_digest(bytes(head[: _FRAME.size])) == head[_FRAME.size :]
        if magic != _MAGIC or not is_whole or nbytes > _FRAME_BYTES_MAX:
            raise self._damaged("what it sent is no message of ours")
        body = bytearray(nbytes)
        self.receive(memoryview(body))
        if xxhash.xxh3_64_intdigest(body) != expected:
            raise self._damaged(f"a message of {nbytes} bytes did not arrive as it was sent")
        try:
            said = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"a message does not decode: {error}") from error
        if not isinstance(said, kinds):
            raise self._damaged(f"it sent {type(said).__name__}")
        return said

    def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has all of it."""
        try:
            self._limit()
            self.sock.sendall(data)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._lost(f"its connection broke ({error.strerror or error})") from error

    def receive(self, into: memoryview) -> None:
        """Fill ``into``."""
        done = 0
        while done < len(into):
            try:
                self._limit()
                received = self.sock.recv_into(into[done:])
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise self._lost(f"its connection broke ({error.strerror or error})") from error
            if not received:
                raise self._lost("its connection ended")
            done += received

    def _limit(self) -> None:
        if self.deadline.passed():
            raise TimeoutError
        self.sock.settimeout(self.deadline.left_s())

    def _late(self) -> DeadlineExceeded:
        return self.deadline.exceeded(
            f"the answer of {self.peer} (phase: {self.phase})",
            "is it at the same step, and alive? Else raise the timeout",
        )

    def _lost(self, why: str) -> PeerLost:
        message = f"{self.peer} was lost (phase: {self.phase}): {why}. Nothing of its state is used; ask again"
        return PeerLost(message, peer=self.peer, phase=self.phase)

    def _damaged(self, why: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.peer} (phase: {self.phase}): {why}", path=self.peer)


def plans_of(memories: Sequence[Memory], bucket_bytes: int) -> list[BucketPlan]:
    """Return the buckets of a description: the same at both ends."""
    table = [Piece(each.name, each.dtype, (each.elements,), (0,), (each.elements,)) for each in memories]
    parts = [PieceBox(number, (0,), piece.sizes) for number, piece in enumerate(table) if piece.sizes[0]]
    return plan_buckets(table, [parts], bucket_bytes)


def _local(flat: torch.Tensor) -> Local:
    return Local(Box((0,), (flat.numel(),)), flat)


def _finish_work_on(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for accelerators: other streams may still write what is read here, or read what is written."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


# The process that has the state ----------------------------------------------------------------------------------


class _CopiedBucket(NamedTuple):
    """A copied bucket."""

    memory: torch.Tensor
    head: BucketHead


class _StagedState:
    """A state at one step, while it is copied and from then on."""

    def __init__(self, step: int, timeout_s: float, bucket_bytes: int) -> None:
        self.step = step
        self.timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._offered: StateHead | None = None
        self._buckets: dict[int, _CopiedBucket] = {}
        self.count = 0

    def stage(self, state: Any) -> None:
        """Copy ``state``; receivers are sent what is copied already. Raises as `take_apart`."""
        try:
            apart = take_apart(state)
            plans = plans_of(apart.description.memories, self._bucket_bytes)
            with self._changed:
                self._offered = StateHead(self._bucket_bytes, apart.description)
                self.count = len(plans)
                self._changed.notify_all()
            _finish_work_on(apart.flat)
            sources = [_local(flat) for flat in apart.flat]
            threads = min(_COPY_THREADS, len(os.sched_getaffinity(0)))
            take_turns([partial(self._copy, number, plan, sources) for number, plan in enumerate(plans)], threads)
        except BaseException as error:
            with self._changed:
                self._failure = f"{type(error).__name__}: {error}"
                self._changed.notify_all()
            raise

    def _copy(self, number: int, plan: BucketPlan, sources: Sequence[Local]) -> None:
        memory = torch.empty(plan.nbytes, dtype=torch.uint8)
        kind, value = BucketCopy(plan).give(sources, memory)
        with self._changed:
            self._buckets[number] = _CopiedBucket(memory, BucketHead(number, plan.nbytes, kind, value))
            self._changed.notify_all()

    def described(self, deadline: Deadline) -> StateHead | NoState:
        """Return what is offered, once it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._offered, deadline.left_s())
            if self._offered is None or self._failure is not None:
                return NoState(
                    f"the sender could not copy its state at step {self.step}: {self._failure or 'too slow'}"
                )
            return self._offered

    def bucket(self, number: int, deadline: Deadline) -> _CopiedBucket | None:
        """Return a bucket once it is copied; None if it won't be, or not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or number in self._buckets, deadline.left_s())
            return self._buckets.get(number)


class HandoverServer:
    """Serves one state at a time to those who ask for it. All methods are for any thread."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, host: str | None = None) -> None:
        """Listen on all addresses. host: how others reach this one; None finds it out. Raises `OSError`."""
        if type(bucket_bytes) is not int or bucket_bytes < BUCKET_BYTES_MIN:
            raise ConfigError(
                f"bucket_bytes is {bucket_bytes!r}; expected at least {BUCKET_BYTES_MIN}", field="bucket_bytes"
            )
        self._bucket_bytes = bucket_bytes
        self._token = secrets.token_hex(16)
        self._sock = _listener()
        names = (*hosts_here(host), socket.gethostname()) if host is None else (host,)
        place = Address(tuple(dict.fromkeys(names)), self._sock.getsockname()[1], this_machine(), self._token)
        self.address = msgspec.json.encode(place).decode()
        """What `fetch_state` is given: text."""
        self._staging = threading.Lock()
        self._changed = threading.Condition()
        self._offer: _StagedState | None = None
        self._closing = threading.Event()
        self._receivers: dict[socket.socket, _StagedState | None] = {}
        self._threads: set[threading.Thread] = set()
        _servers.add(self)
        self._thread = threading.Thread(target=self._accept, name="holdfast-handover", daemon=True)
        self._thread.start()

    def offer(self, step: int, state: Any, *, timeout_s: float) -> None:
        """Copy ``state`` to host memory and serve it; return when it is copied, and may change.

        Replaces what was offered before; who was still being sent that has to ask again. Transfers end after
        ``timeout_s`` at the latest.

        Raises:
            ConfigError: the state has a value that can't be sent; names its position. Who asks is told.
        """
        with self._staging:
            made = _StagedState(step, timeout_s, self._bucket_bytes)
            with self._changed:
                if self._closing.is_set():
                    raise ConfigError("the server is closed; make a new one", field="state")
                self._offer = made
                overtaken = [sock for sock, offer in self._receivers.items() if offer is not None]
                self._changed.notify_all()
            for sock in overtaken:
                _end(sock)
            began = time.perf_counter()
            made.stage(state)
            _log.info("offered the state at step %d after %.3f s", step, time.perf_counter() - began)

    def withdraw(self) -> None:
        """Serve nobody else: who asks waits for the next offer. Transfers that have begun go on, from the copy.

        Waits for `offer` to return, if another thread is in it.
        """
        with self._staging, self._changed:
            self._offer = None

    def close(self, *, wait: bool = True) -> None:
        """End the server and all transfers; idempotent. wait: also wait for its threads, for some seconds."""
        with self._changed:
            self._closing.set()
            self._offer = None
            receivers, threads = list(self._receivers), [self._thread, *self._threads]
            self._changed.notify_all()
        _end(self._sock)
        self._sock.close()
        for sock in receivers:
            _end(sock)
        deadline = Deadline.after(_JOIN_S if wait else 0.0)
        for thread in threads:
            if wait and thread is not threading.current_thread():
                thread.join(deadline.left_s())

    def forget(self) -> None:
        """Close the sockets in a forked child: connections end with this process, whatever it has started."""
        for sock in (self._sock, *self._receivers):
            sock.close()

    # threads -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, place = self._sock.accept()
            except OSError:
                self._closing.wait(0.1)  # no descriptor is left, or the connection is gone already
                continue
            thread = threading.Thread(
                target=self._serve,
                args=(sock, f"receiver {place[0].removeprefix('::ffff:')}"),
                name="holdfast-handover-to",
                daemon=True,
            )
            with self._changed:
                try:
                    thread.start()
                except RuntimeError:
                    _log.exception("no thread can be started to send the state to %s", place[0])
                    sock.close()
                    continue
                self._receivers[sock] = None
                self._threads.add(thread)
                if self._closing.is_set():
                    _end(sock)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            self._answer(_Wire(sock, Deadline.after(_INTRODUCTION_S), peer, "introduction"))
        except HoldfastError as error:
            _log.warning("%s", error)
        except Exception:  # noqa: BLE001 - it is the error of one receiver
            _log.exception("sending the state to %s failed", peer)
        finally:
            with self._changed:
                self._receivers.pop(sock, None)
                self._threads.discard(threading.current_thread())
            sock.close()

    def _answer(self, wire: _Wire) -> None:
        ask = wire.hear(AskState)
        if not secrets.compare_digest(ask.token, self._token):
            return
        wire.deadline, wire.phase = Deadline.after(max(0.0, ask.timeout_s) + _GRACE_S), f"asked for step {ask.step}"
        if ask.protocol != _PROTOCOL:
            wire.say(NoState("it has another version of Holdfast; run the same on both sides"))
            return
        offer = self._find(wire, ask.step)
        if offer is None:
            return
        wire.deadline = Deadline.after(min(max(0.0, offer.timeout_s), wire.deadline.left_s()))
        offered = offer.described(wire.deadline)
        wire.say(offered)
        for number in range(offer.count if isinstance(offered, StateHead) else 0):
            wire.phase = f"sending bucket {number} of {offer.count} of step {ask.step}"
            bucket = offer.bucket(number, wire.deadline)
            if bucket is None:
                return
            wire.say(bucket.head)
            wire.send(compat.host_memory(bucket.memory))

    def _has(self, step: int) -> bool:
        """Return False if ``step`` may be offered yet: a receiver may be ahead of its sender."""
        return self._offer is not None and self._offer.step >= step

    def _find(self, wire: _Wire, step: int) -> _StagedState | None:
        """Wait for an offer; None if there is none for this receiver, who then has been told."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(step) or self._closing.is_set(), wire.deadline.left_s())
            offer = self._offer
            if offer is None or not self._has(step):
                return None
            if offer.step == step:
                self._receivers[wire.sock] = offer
                return offer
        wire.say(NoState(f"it is serving step {offer.step}, and was asked for step {step}"))
        return None


_servers: Final[weakref.WeakSet[HandoverServer]] = weakref.WeakSet()


def _forget_in_child() -> None:
    for server in list(_servers):
        with contextlib.suppress(OSError, RuntimeError):  # a connection was just being added
            server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be compiled in and switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True, reuse_port=False
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _end(sock: socket.socket) -> None:
    """Make every call on ``sock`` return, on whatever thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# The process that lacks it ---------------------------------------------------------------------------------------


def fetch_state(
    address: str,
    step: int,
    *,
    timeout_s: float,
    own: Any = None,
    before_write: Callable[[], None] | None = None,
) -> Any:
    """Return the state that the server at ``address`` offers at ``step``; waits for an offer.

    own: this process's state; what is there of the same kind in the same place is received into, and is in the result.
    Other tensors are new ones, in host memory. before_write: called before anything of ``own`` is written to.

    Raises:
        DeadlineExceeded, PeerLost: no answer in time; the sender has ended.
        CheckpointNotFound: it offers a later step, or could not copy its state.
        CheckpointCorrupt: a bucket was damaged on the way; of ``own``, buckets before it may have been written.
        ConfigError: ``address`` is not one, or the state has a tensor subclass that may not be made here.
    """
    deadline = Deadline.after(timeout_s)
    try:
        place = msgspec.json.decode(address, type=Address)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{address!r:.200} is not the address of a state ({error}); use the same transport on both sides",
            field="metadata",
        ) from error
    hosts = ("127.0.0.1", *place.hosts) if place.machine == this_machine() else place.hosts
    peer = f"the sender at {place.hosts[0]}:{place.port}"
    try:
        sock = connect(tuple(dict.fromkeys(hosts)), place.port, deadline)
    except TimeoutError as error:
        raise deadline.exceeded(
            f"a connection to {peer}", "is it alive, and reachable? Else raise the timeout"
        ) from error
    except OSError as error:
        message = f"{peer} can't be reached: {error}"
        raise PeerLost(message, peer=peer, phase="connecting") from error
    with contextlib.closing(sock):
        wire = _Wire(sock, deadline, peer, f"waiting for the state at step {step}")
        wire.say(AskState(_PROTOCOL, place.token, step, deadline.left_s()))
        said = wire.hear(StateHead, NoState)
        if isinstance(said, NoState):
            raise CheckpointNotFound(f"{peer} has no state at step {step} to send: {said.why}", path=peer, step=step)
        landing = Landing(said.description, None if own is None else take_apart(own))
        if landing.in_place and before_write is not None:
            before_write()
        _receive(wire, said, landing)
    return landing.put_together(path=peer)


def _receive(wire: _Wire, offered: StateHead, landing: Landing) -> None:
    began, memories = time.perf_counter(), offered.description.memories
    plans = plans_of(memories, offered.bucket_bytes)
    slot = torch.empty(max((plan.nbytes for plan in plans), default=0), dtype=torch.uint8)
    destinations = [[_local(flat) for flat in targets] for targets in landing.flat]
    targets = [flat for each in landing.flat for flat in each]
    _finish_work_on(targets)
    for number, plan in enumerate(plans):
        wire.phase = f"receiving bucket {number} of {len(plans)}"
        head = wire.hear(BucketHead)
        names = list(dict.fromkeys(memories[entry.piece].name for entry in plan.entries))
        said = f"bucket {number} of {len(plans)} from {wire.peer}, of {plan.nbytes} bytes ({', '.join(names[:5])})"
        if (head.number, head.nbytes, head.kind) != (number, plan.nbytes, "xxh3"):
            message = f"{said} was announced as bucket {head.number} of {head.nbytes} bytes; run the same version"
            raise CheckpointCorrupt(message, path=wire.peer, tensor=names[0])
        parts, rest = _split(plan, [[]] * len(destinations) if landing.in_place else destinations, slot)
        state = xxhash.xxh3_64()
        for part in parts:
            wire.receive(part)
            state.update(part)
        if state.intdigest() != head.checksum:
            found = f"checksum {state.intdigest():016x}, expected {head.checksum:016x}"
            message = f"{said} did not arrive as it was sent: {found}"
            raise CheckpointCorrupt(message, path=wire.peer, tensor=names[0], byte_range=(0, plan.nbytes))
        unpack(rest, slot, destinations)
    _finish_work_on(targets)
    nbytes, seconds = sum(plan.nbytes for plan in plans), time.perf_counter() - began
    _log.info("received %d bytes from %s in %.3f s", nbytes, wire.peer, seconds)


def _split(
    plan: BucketPlan, destinations: Sequence[Sequence[Local]], slot: torch.Tensor
) -> tuple[list[memoryview], BucketPlan]:
    """Return where a bucket's bytes go to, in order, and the entries that are to be unpacked from ``slot``.

    Large entries go straight to new tensors, which nobody sees if anything is damaged.
    """
    memory = compat.host_memory(slot)
    parts, rest, at = [], [], 0
    for entry in plan.entries:
        target = target_of(entry, destinations) if entry.nbytes >= _OWN_BYTES else None
        if target is None:
            rest.append(entry)
            continue
        parts += [memory[at : entry.at]] if at < entry.at else []
        parts.append(compat.host_memory(target))
        at = entry.at + entry.nbytes
    parts += [memory[at : plan.nbytes]] if at < plan.nbytes else []
    return parts, BucketPlan(plan.lane, plan.nbytes, tuple(rest))


prepare_decoding(Address)
