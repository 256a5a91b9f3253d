"""Copies of one capture from live tensors to their final place in the image, and the check that they didn't change.

A `Staging` is made on the training thread by ``save``. It ends *complete*, and is then checked for changes meanwhile
(`Staging.changed`), or *abandoned* (the save failed for another reason).

Threads share the work: copies are cut into batches of about 32 MiB. A background thread takes them one by one while the
training thread runs forward and backward; a training thread that reaches its optimizer step early doesn't just wait, it
takes batches too. Copying releases the GIL. On CUDA all copies are enqueued on a side stream before ``save`` returns,
and the optimizer step is ordered behind them by an event: no thread waits.

The race behind this design: a tensor's version counter is incremented *after* the kernel that writes it. So a check by
another thread can fall between the write and the increment. Versions are therefore compared on the training thread,
which is then not writing; only if that thread doesn't come by for `VERIFY_GRACE_S` does the delivering thread compare
them, when any write that overlapped the copy has long been counted.

Guarantees: no byte of the image is written any more once `wait_idle` has returned True; `changed` is None only if
nothing that ``staging.change_detection`` notes has moved between capture and copy.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.staging.change_detection import TensorVersions, WatchedTensors
    from holdfast.staging.copies import Copies, CopyBatch
    from holdfast.staging.small_copies import ScatterBatch

VERIFY_GRACE_S: Final = 1.0


@dataclass(slots=True)
class _DeviceCopies:
    """Copies in flight from one CUDA device: complete when ``event`` is."""

    device: torch.device
    event: Any


# torch's CUDA classes are untyped; use them through these two.
_new_stream: Any = torch.cuda.Stream
_new_event: Any = torch.cuda.Event
_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = _new_stream(device=device)
    return _side_streams[device]


def _record_event(stream: Any) -> Any:
    event = _new_event()
    event.record(stream)
    return event


def copy_batch(batch: CopyBatch | ScatterBatch, *, non_blocking: bool = False) -> None:
    """Make the copies; the only place that copies bytes of the state."""
    batch.copy(non_blocking=non_blocking)


class Staging:
    """The copies of one capture.

    Make it on the training thread when the state is as it is to be saved; call `load` there too, or elsewhere in a
    replan; `run` on a background thread; `help_copy` on any. watched: the live tensors. devices: the CUDA devices to
    copy from. Raises `ConfigError` for a tensor that can't be copied.
    """

    def __init__(
        self, watched: WatchedTensors, devices: Iterable[torch.device] = (), *, marks: TensorVersions | None = None
    ) -> None:
        """marks: versions of ``watched``, if just recorded."""
        self._marks = watched.mark() if marks is None else marks
        # A replan enqueues its copies on another thread: they follow this point of the training stream.
        self._ready = {device: _record_event(torch.cuda.current_stream(device)) for device in devices}
        self._condition = threading.Condition()
        self._batches: list[CopyBatch | ScatterBatch] = []
        self._whole: Mapping[str, int] = {}
        self._next = 0
        self._copying = 0
        self._device_copies: list[_DeviceCopies] = []
        self._error: BaseException | None = None
        self._found: str | None = None
        self._compared = False
        self._abandoned = False
        self.is_loaded = False
        self.copied_at: float | None = None
        self.copy_s = 0.0

    def load(self, live: Copies, *held: Copies) -> None:
        """Set the copies to make, and enqueue those from CUDA.

        live: copies of watched tensors. held: copies of values that belong to the capture; no update waits for those.
        """
        started = time.perf_counter()
        live.locate(self._marks.addresses)
        every = (live, *held)
        device_copies = self._device_copies = []
        for device in {device: None for copies in every for device in copies.from_device}:
            batches = [copies.from_device[device] for copies in every if device in copies.from_device]
            self._enqueue(device, batches, device_copies)
        with self._condition:
            self._batches, self._next = [batch for copies in every for batch in copies.from_host], 0
            self._whole = live.whole
            self.is_loaded, self.copied_at, self._compared = True, None, False
            # Enqueued copies read from the tensors' current addresses, whatever happens to them later.
            self._found = self._marks.moved() if device_copies else None
            self.copy_s += time.perf_counter() - started
            self._condition.notify_all()

    def _enqueue(self, device: torch.device, batches: list[CopyBatch], enqueued: list[_DeviceCopies]) -> None:
        stream = _side_stream(device)
        ready = self._ready.get(device)
        if ready is not None:
            stream.wait_event(ready)
        else:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            try:
                for batch in batches:
                    copy_batch(batch, non_blocking=True)
            finally:  # if this fails, some copies may be in progress
                enqueued.append(_DeviceCopies(device, _record_event(stream)))

    def help_copy(self, timeout_s: float | None = None) -> None:
        """Make copies until none is left to begin, or ``timeout_s`` has passed. Any thread.

        Waits until there are copies to make: a thread that arrives early has nothing better to do. On return, copies
        begun by other threads may still run.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            self._condition.wait_for(lambda: self.is_loaded or self._abandoned, timeout_s)
        while (deadline is None or time.monotonic() < deadline) and self._copy_next():
            pass

    def run(self, *, timeout_s: float) -> None:
        """Make the remaining copies, and return when all are complete. Any thread."""
        deadline = time.monotonic() + timeout_s
        self.run_on_host(timeout_s=timeout_s)
        if self._error is not None:
            raise self._error
        if self._abandoned:
            return
        for copies in self._device_copies:
            _wait_event(copies.event, deadline, timeout_s)
        self.copied_at = time.monotonic()

    def run_on_host(self, *, timeout_s: float) -> None:
        """Make the remaining copies from host memory; return when all are complete or abandoned."""
        deadline = time.monotonic() + timeout_s
        self.help_copy(timeout_s)
        with self._condition:
            while not self._abandoned and self._error is None and not self._host_complete():
                left = deadline - time.monotonic()
                if left <= 0:
                    begun = self._next - self._copying
                    raise DeadlineExceeded(
                        f"copies out of the training state were not complete after {timeout_s:g} s ({begun} of "
                        f"{len(self._batches)} batches); raise `stage_timeout` or find what holds the copying thread",
                        waited_for="staging copies",
                        timeout_s=timeout_s,
                    )
                self._condition.wait(left)
            if self._compared or self._abandoned or self._error is not None:
                return
            # Once, and before anything may change the state: later moves are no changes during staging.
            self._compared = True
            self._found = self._found or self._marks.moved() or self._marks.differing(self._whole)

    def _host_complete(self) -> bool:
        return self._next >= len(self._batches) and not self._copying

    def _copy_next(self) -> bool:
        with self._condition:
            if self._next >= len(self._batches) or self._error is not None or self._abandoned:
                return False
            batch = self._batches[self._next]
            self._next += 1
            self._copying += 1
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            copy_batch(batch)
        except BaseException as failed:
            error = failed
            if not isinstance(failed, Exception):
                raise  # an interrupt is meant for this thread; waiters get the recorded error
        finally:
            self._end_batch(error, time.perf_counter() - started)
        return error is None

    def _end_batch(self, error: BaseException | None, copy_s: float) -> None:
        with self._condition:
            self._copying -= 1
            if error is not None:
                self._error = error
            self.copy_s += copy_s
            self._condition.notify_all()

    def order_device_updates(self) -> None:
        """Make the current CUDA streams wait for the copies; the calling thread does not."""
        for copies in self._device_copies:
            torch.cuda.current_stream(copies.device).wait_event(copies.event)

    def changed(self) -> str | None:
        """Return the first watched tensor found to have changed between capture and copy, or None.

        Call it on the training thread before that changes anything, or elsewhere after the grace; see the module.
        """
        return self._marks.written() or self._found

    def outdated(self) -> str | None:
        """Return the first watched tensor found to have changed since the capture, also after the copy, or None.

        Call it on the training thread.
        """
        return self._found or self._marks.changed()

    def lost(self) -> str | None:
        """Return the tensor whose change explains why copying failed, or None."""
        return None if self._error is None else self._marks.moved() or self._marks.written()

    def abandon(self) -> None:
        """Stop copying; waiters return at once. Batches in progress end on their own."""
        with self._condition:
            self._abandoned = True
            self._condition.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no thread writes to the image any more; return False on timeout."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._abandoned |= not self._host_complete()
            if not self._condition.wait_for(lambda: not self._copying, timeout_s):
                return False
        return self.wait_device_idle(max(0.0, deadline - time.monotonic()))

    def wait_device_idle(self, timeout_s: float) -> bool:
        """Wait until the copies enqueued on devices are complete; return False on timeout."""
        deadline = time.monotonic() + timeout_s
        try:
            for copies in self._device_copies:
                _wait_event(copies.event, deadline, timeout_s)
        except DeadlineExceeded:
            return False
        return True

    def release(self) -> None:
        """Release every tensor."""
        with self._condition:
            self._batches, self._next, self._device_copies, self._whole = [], 0, [], {}


def _wait_event(event: Any, deadline: float, timeout_s: float) -> None:
    pause = 20e-6
    while not event.query():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"copies off the device were not complete after {timeout_s:g} s; raise `stage_timeout` or look for a "
                "kernel that never ends",
                waited_for="device copies",
                timeout_s=timeout_s,
            )
        time.sleep(pause)
        pause = min(pause * 2, 2e-3)
