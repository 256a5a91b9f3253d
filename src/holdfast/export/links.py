"""Connections between the ranks of an export: messages with deadlines, over gloo.

The gloo group is one that nothing else uses, made with a Store of Holdfast's and registered nowhere in torch: training
may make and use groups of its own meanwhile, in any order.

Guarantees: no wait is longer than it was told; links that are aborted end all waits on them, on both sides, at once.
Does not: know what is sent (``export.exchange``), or find out who is to blame (``export.roll_call``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.errors import HoldfastError
from holdfast.export import gloo

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch

_LATE_S: Final = 0.01
"""A wait that ends so close to its deadline has passed it."""


class Transfer(Protocol):
    """One message under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when it is complete. Raises `PeerLost` or `PeerLate`; the links are of no use then."""
        ...


class Links(Protocol):
    """Connections to all other ranks of the group. One thread sends and receives; any may `abort`."""

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer: ...
    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer: ...

    def abort(self) -> None:
        """End all transfers, everywhere: theirs and ours. Doesn't wait for anyone."""
        ...


class PeerLost(HoldfastError):
    """The connection to a peer ended."""


class PeerLate(HoldfastError):
    """A peer did not answer in time."""


class GlooLinks:
    """Links over gloo. Making them waits for all ranks, at most ``timeout_s``."""

    def __init__(self, store: Any, rank: int, world: int, *, timeout_s: float) -> None:
        self._peers = [peer for peer in range(world) if peer != rank]
        self._group = gloo.gloo_group(store, rank, world, timeout_s)

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer:
        return _GlooTransfer(lambda: self._group.send([memory], peer, tag), peer)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer:
        return _GlooTransfer(lambda: self._group.recv([memory], peer, tag), peer)

    def broadcast(self, root: int, memory: torch.Tensor) -> Transfer:
        """From ``root`` to all ranks; each takes part, and in broadcasts in the same order."""
        return _GlooTransfer(lambda: self._group.broadcast(memory, root), root)

    def abort(self) -> None:
        gloo.close_gloo_links(self._group, self._peers)


class _GlooTransfer:
    def __init__(self, start: Callable[[], Any], peer: int) -> None:
        self._peer = peer
        try:
            self._work = start()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error

    def wait(self, timeout_s: float) -> None:
        began = time.monotonic()
        try:
            done = gloo.wait_work(self._work, timeout_s)
        except RuntimeError as error:
            kind = PeerLate if time.monotonic() - began >= timeout_s - _LATE_S else PeerLost
            raise kind(_first_line(error)) from error
        if not done:
            raise PeerLost("it was ended from outside")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
