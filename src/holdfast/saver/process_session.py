"""What one-call saves and exports of a process share: its engine, plans, and warm images of what was saved before.

    `process_session`   of this process; made by the first one-call save or export, gone with `release` or a fork
    `take_ring`         the slots of a save that streams: warm from the third on
    `SharedPlans`       its plans and images for one group of ranks: what a call takes from it, and leaves to it

Each call still has its own session, with its own lock, votes, deadline and failure. Shared is only what is costly to
make and refers to no state. A call that finds no image makes one instead of waiting for another call. A plan is named
by the digests of all ranks' structures: ranks reuse a plan only if all of them have the same one.

Guarantees: between calls no tensor, module or storage is referenced. An image is kept only if its structure was
published before in this process, and while all kept images fit into `IMAGE_BYTES_MAX` and `IMAGE_SHARE_MAX` of the
memory left. An image used by a failed save is never kept. A forked child inherits nothing. What belongs to a group
whose Store is gone is dropped at the next call. `release` interrupts no work in progress.
Does not: run a thread or a timer. Idle and excess images are found when a call opens or ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.engine.client import EngineClient
from holdfast.engine.shared import process_engine
from holdfast.errors import EngineDied
from holdfast.staging.image import unmap_unused
from holdfast.staging.stream import SLOTS, SlotRing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.coordination.group import Group
    from holdfast.staging.image import Image

IMAGE_BYTES_MAX: Final = 2 << 30
"""Limit for all images that are kept between calls."""
IMAGE_SHARE_MAX: Final = 0.1
"""Limit as a share of the memory that the process would have left without the images."""
PLANS_MAX: Final = 8
IDLE_S: Final = 1800.0
"""The next call drops a plan, with its images, that was not used for this long."""
_RELEASE_S: Final = 10.0


class ImageHolder(Protocol):
    """What is made once for a plan, around an image: it refers to no tensor of a state while it is kept."""

    @property
    def image(self) -> Image: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    """A plan, of whatever kind, and the images made for it that no call uses."""

    plan: Any
    store: weakref.ref[Any] | None
    """The group's; None for a single rank."""
    buffers: list[ImageHolder] = field(default_factory=list)
    saves: int = 0
    used_at: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(buffer.image.nbytes for buffer in self.buffers)

    @property
    def is_stale(self) -> bool:
        gone = self.store is not None and self.store() is None
        return gone or time.monotonic() - self.used_at > IDLE_S

    def close(self) -> None:
        while self.buffers:
            self.buffers.pop().close()


class ProcessSession:
    """Engine, plans and images shared by one-call saves of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may call `release` at any point
        self._keeper: EngineClient | None = None
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        """Least recently used first."""
        self._ring: SlotRing | None = None
        self._streamed = 0
        """How many saves have streamed."""
        self._is_closed = False

    def keep_engine(self, rank: int) -> None:
        """Keep the engine of the process running for the next call; start it if there is none."""
        with self._lock:
            if self._is_closed:
                return
            if self._keeper is None:
                self._keeper = EngineClient(rank, host=process_engine())
            keeper = self._keeper
        with contextlib.suppress(EngineDied):  # whoever needs the engine meets the error again, and reports it
            keeper.start()

    def plans_of(self, group: Group) -> SharedPlans:
        """Return the plans for the ranks of ``group``, after dropping stale and excess ones."""
        self._trim()
        return SharedPlans(self, group)

    def find(self, key: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """Return the plan under ``key``, with an image, or None, that is the caller's from now on."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None:
                return None
            kept.used_at = time.monotonic()
            self._kept[key] = kept  # the most recently used now
            return kept.plan, kept.buffers.pop() if kept.buffers else None

    def note_published(self, key: tuple[Any, ...], plan: Any, store: weakref.ref[Any] | None) -> None:
        """Keep ``plan``, by which a save was published, as that of ``key``."""
        with self._lock:
            if self._is_closed:
                return
            kept = self._kept.pop(key, None)
            if kept is None or kept.plan is not plan:
                saves = 0 if kept is None else kept.saves
                if kept is not None:
                    kept.close()
                kept = _Kept(plan, store, saves=saves)
            kept.saves += 1
            kept.used_at = time.monotonic()
            self._kept[key] = kept
        self._trim()

    def keep(self, key: tuple[Any, ...], plan: Any, buffer: ImageHolder) -> bool:
        """Keep ``buffer``, which nobody uses, for the next save of ``key``; False if it is the caller's to free."""
        with self._lock:
            kept = self._kept.get(key)
            if self._is_closed or kept is None or kept.plan is not plan or kept.saves < 2:
                return False
            held = self._held + buffer.image.nbytes
            if held > _allowance(held):
                return False
            kept.buffers.append(buffer)
            return True

    def take_ring(self, pieces: int) -> SlotRing:
        """Return slots for a save of so many pieces, of which a few are enough; the caller's until they are given back.

        A save that finds none makes its own: several may stream at once.
        """
        slots = max(1, min(pieces, SLOTS))
        with self._lock:
            ring, self._ring = self._ring, None
        if ring is not None and ring.slots >= slots:
            return ring
        if ring is not None:
            ring.image.close()
        return SlotRing(slots)

    def give_ring_back(self, ring: SlotRing, *, reuse: bool) -> None:
        """End the use of ``ring``, which is kept or freed. reuse: all was written, so no engine reads it any more."""
        with self._lock:
            self._streamed += reuse
            if reuse and self._streamed > 1 and self._ring is None and not self._is_closed:
                held = self._held + ring.image.nbytes
                if held <= _allowance(held):
                    self._ring = ring
                    return
        ring.image.close()

    @property
    def _held(self) -> int:
        """Bytes of all that is kept."""
        ring = 0 if self._ring is None else self._ring.image.nbytes
        return ring + sum(kept.nbytes for kept in self._kept.values())

    def _drop_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.image.close()

    def _trim(self) -> None:
        """Drop stale and excess plans and images."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.is_stale]:
                self._kept.pop(key).close()
            while len(self._kept) > PLANS_MAX:
                self._kept.pop(next(iter(self._kept))).close()
            held = self._held
            allowance = _allowance(held) if held else 0
            for kept in self._kept.values():
                if held <= allowance:
                    break
                held -= kept.nbytes
                kept.close()
            if held > allowance:
                self._drop_ring()

    def close(self) -> None:
        """Release everything; idempotent. Calls in flight keep what they use, and leave nothing here."""
        with self._lock:
            self._is_closed = True
            keeper, self._keeper = self._keeper, None
            while self._kept:
                self._kept.popitem()[1].close()
            self._drop_ring()
        unmap_unused()
        if keeper is not None:
            keeper.close(_RELEASE_S)

    def forget(self) -> None:
        """In a forked child: drop what was inherited, without locking: the lock's holder may not exist here."""
        self._is_closed = True
        for kept in self._kept.values():
            for buffer in kept.buffers:
                if buffer.image.pinned:
                    _inherited.append(buffer)  # its destructor would call CUDA
                else:
                    buffer.close()
        self._kept = {}
        self._drop_ring()


@dataclass(slots=True)
class SharedPlans:
    """Plans and images of the process for one group of ranks, as used by the session of one call."""

    _session: ProcessSession
    _group: Group

    def take(self, digest: str) -> tuple[Any, Any] | None:
        """Return the plan that was left for ``digest``, and a warm image, which is the caller's then, or None."""
        return self._session.find(self._key(digest))

    def note_published(self, digest: str, plan: Any) -> None:
        """Leave ``plan`` to the next call: a save by it was published, so it is whole."""
        store = None if self._group.store is None else weakref.ref(self._group.store)
        self._session.note_published(self._key(digest), plan, store)

    def keep(self, digest: str, plan: Any, buffer: ImageHolder) -> bool:
        """Leave ``buffer``, made for ``plan``, to the next call; False if it is the caller's to free."""
        return self._session.keep(self._key(digest), plan, buffer)

    def _key(self, digest: str) -> tuple[Any, ...]:
        return id(self._group.store), self._group.ranks, self._group.rank, digest


def _allowance(held: int) -> float:
    """Return how many bytes of images may be kept, counting the ``held`` bytes already in use."""
    left = _memory_left()
    return IMAGE_BYTES_MAX if left is None else min(IMAGE_BYTES_MAX, IMAGE_SHARE_MAX * (left + held))


def _memory_left(root: str = "/") -> int | None:
    """Return the bytes left on the machine and in every cgroup around this process; None if unknown."""
    proc, groups = Path(root, "proc"), Path(root, "sys/fs/cgroup")
    found: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        found.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines())
        paths = {controllers: path.strip("/") for _, controllers, path in lines}
        if "memory" in paths:  # version 1: the limit covers all nested groups
            found += _left_in(groups / "memory", paths["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes")
        if "" in paths:
            found += _left_in(groups, paths[""], "memory.max", "memory.current")
    return min(found, default=None)


def _left_in(groups: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    """Yield the bytes left in the cgroup at ``path`` and in those around it, as far as they are limited."""
    inner = groups / path
    for place in (inner, *(each for each in inner.parents if each == groups or groups in each.parents)):
        with contextlib.suppress(OSError, ValueError):  # "max", or not visible from inside
            total = int((place / limit).read_text())
            used = int((place / usage).read_text())
            reclaimable = 0
            with contextlib.suppress(OSError, ValueError):
                reclaimable = _numbers(place / "memory.stat").get("inactive_file", 0)
            yield max(0, total - used + reclaimable)


def _numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line of ``file``, by the line's first word."""
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}


_of_process: dict[int, ProcessSession] = {}
"""The session of this process, by its pid."""
_inherited: list[ImageHolder] = []
"""Pinned images of the process that this one was forked from."""


def process_session() -> ProcessSession:
    """Return the state shared by one-call saves of this process; make it if there is none."""
    return _of_process.get(os.getpid()) or _of_process.setdefault(os.getpid(), ProcessSession())


def release() -> None:
    """Give back what one-call saves and exports keep: the engine process, plans, and warm images.

    Saves and exports in flight continue with what they use, and keep nothing afterwards. The next call starts afresh.
    Idempotent; may be called at any time, on any thread.
    """
    session = _of_process.pop(os.getpid(), None)
    if session is not None:
        session.close()


def _after_fork_in_child() -> None:
    for session in list(_of_process.values()):
        session.forget()
    _of_process.clear()
    unmap_unused()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
