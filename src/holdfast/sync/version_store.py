"""Versions of a publisher rank's pieces in host memory, from which they are served while training goes on.

Staging a version copies the bytes of the rank's pieces into one block of host memory; blocks of versions that are gone
are used again. A version that lies in memory already (a checkpoint's capture) is taken in without a copy. What is
served is read under `reading`, which keeps a version's memory until the reader is done.

Guarantees: thread-safe; a version is there whole or not at all; staging that fails leaves what is kept as it is, but
for the one version that had to make room. The newest `keep_versions` versions are kept, and the pinned ones; the
newest and pinned ones are never evicted. Peak memory: as many blocks as the larger of 2 and ``keep_versions``, and one
for each older version that is pinned or being read. A block has the bytes of the rank's pieces, each rounded up to 256.
Assumes: one thread stages at a time; tensors aren't written to while they are copied (that is `stage`'s caller to see
to). Does not: talk to anyone, write files, or wait for a version that isn't there yet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from holdfast import events
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.plan.write import round_up
from holdfast.staging.image import PAGE_BYTES, Image
from holdfast.state.entries import torch_dtype
from holdfast.sync.layout import Part, Piece, plan_buckets
from holdfast.sync.pieces import Local, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WHERE: Final = "the publisher's version store"


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version: its table, and for each piece the host memory that holds it. To be read under `reading` only."""

    version: int
    table: tuple[Piece, ...]
    locals: tuple[Local, ...]


@dataclass(slots=True, eq=False)
class _Kept:
    """A version that is kept, or still read."""

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
        self._versions: dict[int, _Kept] = {}
        self._newest: int | None = None
        self._pins: set[int] = set()
        self._idle: Image | None = None
        self._block: _Block | None = None
        self._closed = False

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are kept, ascending."""
        with self._lock:
            return tuple(sorted(self._versions))

    # Taking versions in ----------------------------------------------------------------------------------------

    def stage(
        self,
        version: int,
        table: Sequence[Piece],
        pieces: Sequence[Local],
        *,
        lying: frozenset[int] = frozenset(),
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """Copy the pieces and keep them as ``version``; returns when the bytes are in host memory.

        pieces: for each piece of ``table`` the memory that holds it, on any device. lying: numbers of those that lie in
        host memory already, and are taken as they are; let_go: as for `add`, of these.

        Raises:
            ConfigError: the version isn't greater than the newest; nothing was changed.
        """
        with self._staging:
            self._check_new(version)
            if self._block is None or self._block.table is not table or self._block.lying != lying:
                self._block = _Block(table, lying)
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
        """Keep what lies in host memory already as ``version``, without a copy.

        let_go: called once, on any thread, when the version is evicted and nobody reads it any more; where this raises
            it isn't called.

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
                self._versions[version] = _Kept(StoredVersion(version, tuple(table), tuple(pieces)), let_go)
                self._newest = version
                let_go = _nothing
        let_go()  # the store was closed meanwhile
        self._evict(self._keep)

    # Memory ----------------------------------------------------------------------------------------------------

    def _take_image(self, nbytes: int) -> Image:
        """A block of that size: the one that is idle, else a new one."""
        self._make_room()
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            if idle.nbytes == nbytes:
                return idle
            idle.close()
        made = Image(nbytes)
        made.warm_up()
        return made

    def _give_back(self, image: Image) -> None:
        """Keep a block for the next version; one is enough."""
        with self._lock:
            if self._idle is None and not self._closed:
                self._idle = image
                return
        image.close()

    # Who stays -------------------------------------------------------------------------------------------------

    def pin(self, version: int) -> None:
        """Keep ``version`` until `unpin`. Raises `CheckpointNotFound` where it isn't kept any more, or not yet."""
        with self._lock:
            if version not in self._versions:
                raise self._unknown(version)
            self._pins.add(version)

    def unpin(self, version: int) -> None:
        """Let ``version`` go when its turn comes; nothing happens where it wasn't pinned."""
        with self._lock:
            self._pins.discard(version)
        self._evict(self._keep)

    def _make_room(self) -> None:
        """Before a version comes: one less than are to be kept, so that its memory may be one of theirs."""
        self._evict(self._keep - 1)

    def _evict(self, keep: int) -> None:
        """Evict all but the newest ``keep``; never the newest of all, or a pinned one."""
        with self._lock:
            older = sorted(self._versions)[: -max(1, keep)]
            gone = self._remove([version for version in older if version not in self._pins])
        for kept in gone:
            kept.let_go()

    def _remove(self, versions: Sequence[int]) -> list[_Kept]:
        """Under the lock: those of ``versions`` that nobody reads, to be let go of; readers let go of the others."""
        going = [self._versions.pop(version) for version in versions]
        for kept in going:
            kept.evicted = True
        return [kept for kept in going if not kept.readers]

    # Serving ---------------------------------------------------------------------------------------------------

    def find(self, version: int | None = None, *, newer_than: int | None = None) -> int | None:
        """The version to serve to who asks for ``version``, or for the newest that is newer than ``newer_than``.

        None where there is none yet. Raises `CheckpointNotFound` for one that was evicted or never published, now that
        a newer one was.
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
        """The version, kept in memory for the time of the context even where it is evicted meanwhile.

        Raises `CheckpointNotFound` where it isn't kept.
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
        """Let go of everything, as soon as it isn't read any more (idempotent)."""
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
    """There is nothing to let go of."""


class _Block:
    """Where pieces of a table lie in a block of host memory: as in one large bucket. Made once a table.

    lying: numbers of those that lie elsewhere.
    """

    def __init__(self, table: Sequence[Piece], lying: frozenset[int]) -> None:
        self.table = table
        self.lying = lying
        parts = [Part(number, piece.offsets, piece.sizes) for number, piece in enumerate(table) if number not in lying]
        self._plans = plan_buckets(table, [parts], sys.maxsize)
        self.nbytes = round_up(max([plan.nbytes for plan in self._plans], default=0) or 1, PAGE_BYTES)
        self._starts = {entry.piece: entry.at for plan in self._plans for entry in plan.entries}

    def fill(self, image: Image, pieces: Sequence[Local]) -> list[Local]:
        """Copy the pieces, and wait for that; gives back where they lie."""
        events.count("sync_bytes_staged", sum(entry.nbytes for plan in self._plans for entry in plan.entries))
        devices = {local.tensor.device for local in pieces if local.tensor.device.type != "cpu"}
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
