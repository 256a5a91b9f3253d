"""Versions of a publisher rank's pieces in host memory, from which they are served while training continues.

Staging a version copies the bytes of the rank's pieces into one block of host memory; blocks of deleted versions are
reused. A version that is in host memory already (a checkpoint's capture) is added without a copy. Versions are served
under `reading`, which keeps a version's memory until the reader is done.

Guarantees: thread-safe; a version is complete or absent; failed staging leaves kept versions unchanged, except one that
had to make room. The newest `keep_versions` versions are kept, and the pinned ones; the newest and pinned ones are
never evicted. Peak memory: as many blocks as the larger of 2 and ``keep_versions``, plus one for each older version
that is pinned or being read. A block has the bytes of the rank's pieces, each rounded up to 256.
Assumes: one thread stages at a time; the caller of `stage` ensures that tensors aren't written to meanwhile.
Does not: talk to anyone, write files, or wait for a version that isn't there yet.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from holdfast import events
from holdfast.cores import usable_cores
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.format.manifest import PAGE_BYTES
from holdfast.plan.write import round_up
from holdfast.staging.image import Image
from holdfast.state.entries import torch_dtype
from holdfast.sync.weights.buckets import Piece, PieceBox, plan_buckets
from holdfast.sync.weights.pieces import Local, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_WHERE: Final = "the publisher's version store"


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version: its table, and the host memory of each piece. Read it only under `reading`."""

    version: int
    table: tuple[Piece, ...]
    locals: tuple[Local, ...]


@dataclass(slots=True, eq=False)
class _KeptVersion:
    """A version that is kept, or still being read."""

    stored: StoredVersion
    let_go: Callable[[], None]
    readers: int = 0
    evicted: bool = False


class VersionStore:
    """The versions that one publisher rank has in host memory."""

    def __init__(self, keep_versions: int = 2) -> None:
        if keep_versions < 1:
            raise ConfigError(f"keep_versions is {keep_versions}; expected at least 1", field="keep_versions")
        self._keep = keep_versions
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        self._versions: dict[int, _KeptVersion] = {}
        self._newest: int | None = None
        self._pins: set[int] = set()
        self._idle: Image | None = None
        self._block: _VersionBlock | None = None
        self._closed = False

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the kept versions, ascending."""
        with self._lock:
            return tuple(sorted(self._versions))

    # Adding versions -----------------------------------------------------------------------------------------------

    def stage(
        self,
        version: int,
        table: Sequence[Piece],
        pieces: Sequence[Local],
        *,
        lying: frozenset[int] = frozenset(),
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """Copy the pieces and keep them as ``version``; return when the bytes are in host memory.

        pieces: the memory of each piece of ``table``, on any device. lying: numbers of the pieces that are in host
        memory already and are used without a copy; let_go: as for `add`, for these.

        Raises:
            ConfigError: the version isn't greater than the newest; nothing was changed.
        """
        with self._staging:
            self._check_new(version)
            if self._block is None or self._block.table is not table or self._block.lying != lying:
                self._block = _VersionBlock(table, lying)
            block = self._block
            image = self._take_image(block.nbytes)
            try:
                copies = block.fill(image, pieces)
            except BaseException:
                self._give_back(image)
                raise

            def let_all_go() -> None:
                self._give_back(image)
                if let_go is not None:
                    let_go()

            self._add(version, table, copies, let_all_go)

    def add(self, version: int, table: Sequence[Piece], pieces: Sequence[Local], let_go: Callable[[], None]) -> None:
        """Keep what is in host memory already as ``version``, without a copy.

        let_go: called once, on any thread, when the version is evicted and no longer read; not called if this raises.

        Raises:
            ConfigError: the version isn't greater than the newest.
        """
        with self._staging:
            self._check_new(version)
            self._make_room()
            self._add(version, table, pieces, let_go)

    def _check_new(self, version: int) -> None:
        with self._lock:
            if self._closed:
                raise ConfigError("the publisher is closed; make a new one", field="version")
            if self._newest is not None and version <= self._newest:
                raise ConfigError(
                    f"version {version} isn't greater than {self._newest}, which was published before; versions only "
                    "go up",
                    field="version",
                )

    def _add(self, version: int, table: Sequence[Piece], pieces: Sequence[Local], let_go: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._versions[version] = _KeptVersion(StoredVersion(version, tuple(table), tuple(pieces)), let_go)
                self._newest = version
                let_go = _nothing
        let_go()  # the store was closed meanwhile
        self._evict(self._keep)

    # Memory ----------------------------------------------------------------------------------------------------

    def _take_image(self, nbytes: int) -> Image:
        """Return a block of that size: the idle one if it fits, else a new one."""
        self._make_room()
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            if idle.nbytes == nbytes:
                return idle
            idle.close()
        made = Image(nbytes)
        made.warm_up(usable_cores("auto"))
        return made

    def _give_back(self, image: Image) -> None:
        """Keep a block for the next version; one is enough."""
        with self._lock:
            if self._idle is None and not self._closed:
                self._idle = image
                return
        image.close()

    # Eviction ------------------------------------------------------------------------------------------------------

    def pin(self, version: int) -> None:
        """Keep ``version`` until `unpin`. Raises `CheckpointNotFound` if it isn't kept."""
        with self._lock:
            if version not in self._versions:
                raise self._unknown(version)
            self._pins.add(version)

    def unpin(self, version: int) -> None:
        """Make ``version`` evictable again, if it was pinned."""
        with self._lock:
            self._pins.discard(version)
        self._evict(self._keep)

    def _make_room(self) -> None:
        """Before adding a version: evict all but one less than are kept, so that its memory can be reused."""
        self._evict(self._keep - 1)

    def _evict(self, keep: int) -> None:
        """Evict all but the newest ``keep``; never the newest of all, or a pinned one."""
        with self._lock:
            older = sorted(self._versions)[: -max(1, keep)]
            gone = self._remove([version for version in older if version not in self._pins])
        for kept in gone:
            kept.let_go()

    def _remove(self, versions: Sequence[int]) -> list[_KeptVersion]:
        """Remove ``versions``, under the lock; return those that nobody reads. Readers release the others."""
        going = [self._versions.pop(version) for version in versions]
        for kept in going:
            kept.evicted = True
        return [kept for kept in going if not kept.readers]

    # Serving ---------------------------------------------------------------------------------------------------

    def find(self, version: int | None = None, *, newer_than: int | None = None) -> int | None:
        """Return the version to serve for a request of ``version``, or of the newest that is newer than ``newer_than``.

        None if there is none yet. Raises `CheckpointNotFound` for one that was evicted, or skipped by a newer one.
        """
        with self._lock:
            newest = self._newest
            if version is None:
                return None if newest is None or (newer_than is not None and newest <= newer_than) else newest
            if version in self._versions:
                return version
            if newest is None or version > newest:
                return None
            raise self._unknown(version)

    @contextmanager
    def reading(self, version: int) -> Iterator[StoredVersion]:
        """Yield the version; its memory is kept during the context even if it is evicted meanwhile.

        Raises `CheckpointNotFound` if it isn't kept.
        """
        with self._lock:
            kept = self._versions.get(version)
            if kept is None:
                raise self._unknown(version)
            kept.readers += 1
        try:
            yield kept.stored
        finally:
            with self._lock:
                kept.readers -= 1
                is_over = kept.evicted and not kept.readers
            if is_over:
                kept.let_go()

    def close(self) -> None:
        """Release everything, as soon as it isn't read any more; idempotent."""
        with self._lock:
            self._closed = True
            self._pins.clear()
            gone = self._remove(list(self._versions))
            idle, self._idle = self._idle, None
        for kept in gone:
            kept.let_go()
        if idle is not None:
            idle.close()

    def _unknown(self, version: int) -> CheckpointNotFound:
        kept = ", ".join(map(str, sorted(self._versions))) or "none"
        return CheckpointNotFound(
            f"version {version} is not kept: {_WHERE} has {kept}, of the newest {self._keep} and those that are "
            "pinned. Ask for one of these, pin what is still needed, or raise keep_versions",
            path=_WHERE,
            step=version,
        )


def _nothing() -> None:
    """Do nothing."""


class _VersionBlock:
    """Layout of a table's pieces in a block of host memory, as in one large bucket. Made once per table.

    lying: numbers of the pieces that are elsewhere.
    """

    def __init__(self, table: Sequence[Piece], lying: frozenset[int]) -> None:
        self.table = table
        self.lying = lying
        parts = [
            PieceBox(number, piece.offsets, piece.sizes) for number, piece in enumerate(table) if number not in lying
        ]
        self._plans = plan_buckets(table, [parts], sys.maxsize)
        self.nbytes = round_up(max([plan.nbytes for plan in self._plans], default=0) or 1, PAGE_BYTES)
        self._starts = {entry.piece: entry.at for plan in self._plans for entry in plan.entries}

    def fill(self, image: Image, pieces: Sequence[Local]) -> list[Local]:
        """Copy the pieces, wait for that, and return their new memory."""
        events.count("sync_bytes_staged", sum(entry.nbytes for plan in self._plans for entry in plan.entries))
        devices = {local.source.device for local in pieces if local.source.device.type != "cpu"}
        if any(device.type == "cuda" for device in devices):
            image.pin()
        try:
            for plan in self._plans:
                pack(plan, pieces, image.bytes_view, non_blocking=image.pinned)
        finally:
            for device in devices:
                torch.accelerator.current_stream(device).synchronize()
        return [
            pieces[number] if number in self.lying else self._copy_of(number, piece, image.bytes_view)
            for number, piece in enumerate(self.table)
        ]

    def _copy_of(self, number: int, piece: Piece, memory: torch.Tensor) -> Local:
        dtype = torch_dtype(piece.dtype)
        start = self._starts[number]
        copied = memory[start : start + piece.box.volume * dtype.itemsize]
        return Local(piece.box, copied.view(dtype).view(piece.sizes))
