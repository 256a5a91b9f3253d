"""Connections over the backend of an accelerator (NCCL, HCCL, ...), with deadlines. Needs such a device.

Operations are enqueued on a stream of their own; a wait is for what the device has done, and polls.

Guarantees: no wait is longer than it was told. Links that are aborted end all waits on them.
Assumes: both ends issue operations of a group in the same order, from one thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.export.links import PeerLate, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.export.links import Transfer

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

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer:
        return self._start(lambda: self._group.send([memory], peer, tag))

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> Transfer:
        return self._start(lambda: self._group.recv([memory], peer, tag))

    def broadcast(self, root: int, memory: torch.Tensor) -> Transfer:
        return self._start(lambda: self._group.broadcast(memory, root))

    def abort(self) -> None:
        self._aborted.set()
        for name in ("abort", "shutdown"):
            if hasattr(self._group, name):
                with contextlib.suppress(RuntimeError):
                    getattr(self._group, name)()
                return

    def _start(self, start: Callable[[], Any]) -> Transfer:
        module = torch.get_device_module(self._device)
        packed = module.current_stream(self._device).record_event()
        with module.stream(self._stream):
            self._stream.wait_event(packed)
            try:
                work = start()
                work.wait()  # the stream's, not this thread's
            except RuntimeError as error:
                raise PeerLost(str(error).splitlines()[0][:200]) from error
            return _DeviceTransfer(self._stream.record_event(), self._aborted)


class _DeviceTransfer:
    def __init__(self, done: Any, aborted: threading.Event) -> None:
        self._done = done
        self._aborted = aborted

    def wait(self, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while not self._done.query():
            if self._aborted.is_set():
                raise PeerLost("it was ended from outside")
            if time.monotonic() > ends_s:
                raise PeerLate(f"the device was not done after {timeout_s:.3g} s")
            time.sleep(_LOOK_S)
