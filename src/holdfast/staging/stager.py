"""Copies of one capture: from live tensors into their final place in the image, and the proof that they held still.

A `Staging` is made on the training thread by ``save`` and ends in one of three ways: *verified* (every copy is
complete and no source changed meanwhile), *changed* (a source did change: the save fails and names it), or
*abandoned* (the save failed for another reason).

How the threads share the work. Copies are cut into batches of about 32 MiB. A background thread takes them one by
one while the training thread runs forward and backward; a training thread that reaches its optimizer step before
all are done does not just wait, it takes batches too. Copying releases the GIL. On CUDA all copies are enqueued on a
side stream before ``save`` returns, and the optimizer step is ordered behind them by an event: no thread waits.

The race that shaped this module: a tensor's version counter is bumped *after* the kernel that writes it. So a check
from another thread can fall between the write and the bump. Versions are therefore compared on the training thread,
where no write of its own is in progress; only if that thread doesn't come by for `VERIFY_GRACE_S` does the
finalizer compare them itself, at a time when any write that overlapped the copy has long been counted.

Guarantees: `verify` says "unchanged" only if no version moved since the capture and no sample differs. Writes that
bump no version (fused kernels outside an optimizer step, raw pointers) are found only where a sample lies: a
tripwire, not a proof.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import DeadlineExceeded, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_BYTES: Final = 32 << 20
BATCH_TENSORS: Final = 1024
MEMMOVE_BYTES_MIN: Final = 32 << 10
VERIFY_GRACE_S: Final = 1.0


@dataclass(slots=True)
class CopyItem:
    """One box of one tensor: ``target`` is its payload view in the image.

    ``box`` is (local offsets, sizes) where the box is not the whole local tensor, else None.
    """

    name: str
    tensor: torch.Tensor
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    target: torch.Tensor
    rows: tuple[int, int] | None = None

    def source(self) -> torch.Tensor:
        """The live source as a plain tensor of ``target``'s shape; looked up at copy time, since storage may move."""
        local = compat.local_tensor(self.tensor)
        if self.box is not None:
            for dim, (offset, size) in enumerate(zip(*self.box, strict=True)):
                if size != local.shape[dim]:
                    local = local.narrow(dim, offset, size)
        if self.rows is not None:
            local = local.narrow(0, self.rows[0], self.rows[1])
        return local


def split_rows(item: CopyItem, max_bytes: int) -> list[CopyItem]:
    """Cut a large item along its first dimension, so that two threads can share it."""
    nbytes = item.target.numel() * item.target.element_size()
    if nbytes <= max_bytes or item.target.dim() == 0 or item.target.shape[0] < 2:
        return [item]
    count = item.target.shape[0]
    step = max(1, count * max_bytes // nbytes)
    return [
        CopyItem(
            item.name,
            item.tensor,
            item.box,
            item.target.narrow(0, start, min(step, count - start)),
            (start, min(step, count - start)),
        )
        for start in range(0, count, step)
    ]


def copy_batch(items: Sequence[CopyItem], *, non_blocking: bool = False) -> None:
    """Copy every item's source into its place, bit for bit (or converted, where the plan asks for another dtype)."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for item in items:
        source, target = item.source(), item.target
        if target.numel() == 0:
            continue
        if source.shape != target.shape:
            # A swapped `.data` or a hand-made DTensor: what is held isn't what was planned.
            raise StateMismatch(
                f"{item.name}: this rank holds {tuple(source.shape)} of it where its placement says "
                f"{tuple(target.shape)}; it was changed while it was being saved, or its DTensor contradicts itself",
                mismatched=(item.name,),
            )
        if _move(target, source):
            continue
        if source.dtype == target.dtype:
            # Some dtypes have no copy kernel on some devices and versions; their bits are all that matters.
            source, target = compat.bits(source), compat.bits(target)
        targets.append(target)
        sources.append(source)
    if targets:
        with torch.no_grad():
            compat.foreach_copy_(targets, sources, non_blocking=non_blocking)


def _move(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy a large plain block of host memory with one memmove; False if this isn't one.

    torch would copy it with a team of threads. A second team beside the one that training computes with makes both
    wait at each other's barriers, which costs far more than it brings; and how many threads torch uses is not ours
    to change.
    """
    nbytes = target.numel() * target.element_size()
    if nbytes < MEMMOVE_BYTES_MIN or source.dtype != target.dtype or source.device.type != "cpu":
        return False
    if not (source.is_contiguous() and target.is_contiguous()) or source.is_conj() or source.is_neg():
        return False
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)  # releases the GIL
    return True


@dataclass(slots=True)
class _DeviceCopies:
    """Copies in flight from one CUDA device: done when ``event`` is."""

    device: torch.device
    event: Any
    samples: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)


# torch's CUDA classes are untyped; they are reached through these two.
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


def _enqueue(device: torch.device, items: list[CopyItem], ready: Any | None) -> _DeviceCopies:
    stream = _side_stream(device)
    if ready is not None:
        stream.wait_event(ready)
    else:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy_batch(items, non_blocking=True)
        samples = [(name, source.to("cpu", non_blocking=True), target) for name, source, target in _sample_views(items)]
        event = _record_event(stream)
    return _DeviceCopies(device, event, samples)


class Staging:
    """The copies of one capture.

    `start` on the training thread; `run` on a background thread; `before_update` on the training thread before any
    write; `verify` as described in the module's docstring. ``watched`` are the outer tensors whose versions count.
    """

    def __init__(self, watched: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._watched = watched
        self._versions = [compat.version_of(tensor) for _, tensor in watched]
        # Copies of a replan are enqueued by another thread: this is the point of the training stream they follow.
        self._ready = {
            device: _record_event(torch.cuda.current_stream(device))
            for device in {tensor.device for _, tensor in watched}
            if device.type == "cuda"
        }
        self._condition = threading.Condition()
        self._batches: list[list[CopyItem]] = []
        self._next = 0
        self._finished = 0
        self._device_copies: list[_DeviceCopies] = []
        self._samples: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self.is_loaded = False
        self.copied_at: float | None = None
        self.copy_s = 0.0

    def load(self, items: Sequence[CopyItem]) -> None:
        """Take the copies to make, and enqueue those from CUDA; on the training thread, or in a replan off it."""
        started = time.perf_counter()
        batches: list[list[CopyItem]] = []
        batch: list[CopyItem] = []
        size = 0
        by_device: dict[torch.device, list[CopyItem]] = {}
        for whole in items:
            device = whole.tensor.device
            if device.type == "cuda":
                by_device.setdefault(device, []).append(whole)
                continue
            for item in split_rows(whole, BATCH_BYTES):
                batch.append(item)
                size += item.target.numel() * item.target.element_size()
                if size >= BATCH_BYTES or len(batch) >= BATCH_TENSORS:
                    batches.append(batch)
                    batch, size = [], 0
        if batch:
            batches.append(batch)
        device_copies = [_enqueue(device, group, self._ready.get(device)) for device, group in by_device.items()]
        with self._condition:
            self._batches, self._next, self._finished = batches, 0, 0
            self._device_copies, self._samples = device_copies, []
            self.is_loaded, self.copied_at = True, None
            self.copy_s += time.perf_counter() - started
            self._condition.notify_all()

    def help_copy(self) -> None:
        """Make copies until none is left to begin; those begun by other threads may still run. Any thread."""
        while self._copy_next():
            pass

    def run(self, *, timeout_s: float) -> None:
        """Make the copies that are left, and return when all are complete, whoever made them. Any thread."""
        deadline = time.monotonic() + timeout_s
        self.help_copy()
        with self._condition:
            while self._finished < len(self._batches) and self._error is None and not self._abandoned:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"copies out of the training state were not complete after {timeout_s:g} s "
                        f"({self._finished} of {len(self._batches)} batches); raise `stage_timeout` or find what holds "
                        "the copying thread",
                        waited_for="staging copies",
                        timeout_s=timeout_s,
                    )
                self._condition.wait(left)
            if self._error is not None:
                raise self._error
        for copies in self._device_copies:
            _wait_event(copies.event, deadline, timeout_s)
        if self.copied_at is None:
            self.copied_at = time.monotonic()

    def _copy_next(self) -> bool:
        with self._condition:
            if self._next >= len(self._batches) or self._error is not None or self._abandoned:
                return False
            batch = self._batches[self._next]
            self._next += 1
        started = time.perf_counter()
        try:
            copy_batch(batch)
            samples = _sample_views(batch)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the copies
            with self._condition:
                self._error = error
                self._condition.notify_all()
            return False
        with self._condition:
            self._finished += 1
            self._samples.extend(samples)
            self.copy_s += time.perf_counter() - started
            self._condition.notify_all()
        return True

    def order_device_updates(self) -> None:
        """Make the current CUDA streams wait for the copies; the calling thread does not."""
        for copies in self._device_copies:
            torch.cuda.current_stream(copies.device).wait_event(copies.event)

    @property
    def only_on_device(self) -> bool:
        """Every copy comes from CUDA: ordering streams is enough, no thread need wait."""
        return bool(self._device_copies) and not self._batches

    def moved_version(self) -> str | None:
        """The first watched tensor whose version moved since the capture, or None."""
        for (name, tensor), version in zip(self._watched, self._versions, strict=True):
            if compat.version_of(tensor) != version:
                return name
        return None

    def changed_sample(self) -> str | None:
        """The first host tensor whose live value differs from the image where sampled, or None; before any update."""
        return _first_difference(self._samples)

    def changed_device_sample(self) -> str | None:
        """The same for device tensors, sampled in stream order when they were copied; any time after `run`."""
        for copies in self._device_copies:
            if name := _first_difference(copies.samples):
                return name
        return None

    def abandon(self) -> None:
        """Stop copying; whoever waits returns at once. Batches in progress end on their own."""
        with self._condition:
            self._abandoned = True
            self._condition.notify_all()

    def release(self) -> None:
        """Let go of every tensor."""
        with self._condition:
            self._batches, self._samples, self._device_copies = [], [], []
            self._watched, self._versions = (), []


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


def _sample_views(items: Sequence[CopyItem]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """One element of each item, as one-element integer views of the live source and of the image."""
    samples = []
    for item in items:
        source, target = item.source(), item.target
        count = target.numel()
        if count == 0 or source.dtype != target.dtype or source.is_conj() or source.is_neg():
            continue
        if not source.is_contiguous() or source.element_size() not in compat.SAME_SIZE_INT:
            continue
        # A position that differs from item to item but needs no state: spread by the golden ratio.
        at = (count * 0x9E3779B9 >> 32) % count
        as_int = compat.SAME_SIZE_INT[source.element_size()]
        live = source.detach().view(as_int).reshape(-1)[at : at + 1]
        samples.append((item.name, live, target.view(as_int).reshape(-1)[at : at + 1]))
    return samples


def _first_difference(samples: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> str | None:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for sample in samples:
        by_dtype.setdefault(sample[1].dtype, []).append(sample)
    for group in by_dtype.values():
        live = torch.cat([sample[1] for sample in group])
        kept = torch.cat([sample[2] for sample in group])
        if not torch.equal(live, kept):
            return group[int((live != kept).nonzero()[0])][0]
    return None
