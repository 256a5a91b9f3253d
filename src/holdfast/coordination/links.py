"""Connections between the ranks of a group: messages with deadlines, over gloo.

The gloo group is one that nothing else uses, made with a Store of Holdfast's, registered nowhere in torch: training may
make and use groups of its own meanwhile, in any order.

Guarantees: no wait is longer than it was told; links that are aborted end all waits on them, on both sides, at once.
Does not: know what is sent (``export.transfer``, ``loader.read_once``), or find out who is to blame
(``coordination.votes``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

_UNUSED_TAG: Final = 1 << 30
"""Tag of the messages that are waited for to end the links; below, that of looks at them; tags of users are lower."""
_LATE_S: Final = 0.01
"""A wait that ends this close to its deadline counts as late."""
_LOOK_S: Final = 0.25
"""How often a wait looks whether its link is still there."""


class TransferHandle(Protocol):
    """One message under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when it is complete. Raises `LinkLost` or `PeerLate`; the links are of no use then."""
        ...


class Links(Protocol):
    """Connections to all other ranks of the group. One thread sends and receives; any may `abort`."""

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle: ...
    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle: ...

    def abort(self) -> None:
        """End all transfers, everywhere: theirs and ours. Doesn't wait for anyone."""
        ...


class LinkLost(HoldfastError):
    """The connection to a peer ended."""


class PeerLate(HoldfastError):
    """A peer did not answer in time."""


class GlooLinks:
    """Links over gloo. Making them waits for all ranks, at most ``timeout_s``; raises `RuntimeError`."""

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float) -> None:
        self._peers = [peer for peer in range(world) if peer != rank]
        # A group that torch keeps no list of, so that it may be made on any thread and is gone when dropped. The class
        # is public, but hardly documented; its methods are those of every backend.
        self._group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
        self.told = threading.Condition()
        """Told of each transfer that has ended, and of the end of the links."""
        self.is_aborted = False
        self._looks: list[Any] = []

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        return _GlooTransfer(lambda: self._group.send([memory], peer, tag), self, peer)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        return _GlooTransfer(lambda: self._group.recv([memory], peer, tag), self, peer)

    def broadcast(self, root: int, memory: torch.Tensor) -> TransferHandle:
        """Broadcast from ``root`` to all ranks; each takes part, and in broadcasts in the same order."""
        return _GlooTransfer(lambda: self._group.broadcast(memory, root), self, root)

    def abort(self) -> None:
        """End all operations under way, here at once, and for the peers as their connections are closed.

        gloo has no call for this that would leave other groups of the process alone. But it cuts all links when a wait
        has passed its deadline, and says so to other waits: so wait for what nobody sends, for a millisecond.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        for tag in range(_UNUSED_TAG, _UNUSED_TAG + interfaces):  # each of which has links of its own
            for peer in self._peers:
                with contextlib.suppress(RuntimeError):  # that it is closed already, or just has been
                    self._group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
        with self.told:
            self.is_aborted = True
            self.told.notify_all()

    def look(self, peer: int) -> None:
        """Raise `LinkLost` if the link to ``peer`` has been cut: gloo refuses to begin with anything then."""
        if peer not in self._peers:  # a broadcast of this rank's own
            return
        try:
            self._looks.append(self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG - 1))
        except RuntimeError as error:
            raise LinkLost(_first_line(error)) from error


class _GlooTransfer:
    """One message with a peer. gloo waits for it on a thread of its own, which may be left behind.

    For gloo forgets a message that has gone in half when the link is cut, on both sides: its wait lasts until its
    deadline (torch 2.13). Nothing is written to its memory any more, and that thread keeps it alive.
    """

    def __init__(self, start: Callable[[], Any], links: GlooLinks, peer: int) -> None:
        self._links = links
        self._peer = peer
        self._ended: list[BaseException | None] = []
        try:
            self._work = start()
        except RuntimeError as error:
            raise LinkLost(_first_line(error)) from error

    def wait(self, timeout_s: float) -> None:
        waiter = threading.Thread(target=self._wait_gloo, args=(timeout_s,), name="holdfast-link", daemon=True)
        try:
            waiter.start()
        except RuntimeError:  # no thread can be started
            self._wait_gloo(timeout_s)
        told = self._links.told
        while True:
            with told:
                is_known = told.wait_for(lambda: self._ended or self._links.is_aborted, _LOOK_S)
            if self._ended:
                break
            if is_known:
                raise LinkLost("the links were ended here")
            try:
                self._links.look(self._peer)
            except LinkLost:  # after it has come, perhaps: a peer that is through may leave
                with told:
                    if not told.wait_for(lambda: self._ended, _LOOK_S):
                        raise
                break
        failed = self._ended.pop()
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # this frame is in its traceback: they would keep one another alive

    def _wait_gloo(self, timeout_s: float) -> None:
        """Note how the message ended; gloo ends the wait at its deadline, at the latest."""
        began = time.monotonic()
        ended: BaseException | None = None
        try:
            if not self._work.wait(timedelta(seconds=max(timeout_s, 0.001))):  # without the GIL
                ended = LinkLost("it was ended from outside")
        except RuntimeError as error:
            kind = PeerLate if time.monotonic() - began >= timeout_s - _LATE_S else LinkLost
            ended = kind(_first_line(error))
            ended.__cause__ = error
        with self._links.told:
            self._ended.append(ended)
            self._links.told.notify_all()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def is_gloo_available() -> bool:
    return dist.is_available() and dist.is_gloo_available()


def prefix_store(prefix: str, store: Any) -> Any:
    """``store`` with a key space of its own."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
