"""Decide which block of memory holds which version on one publisher rank, who reads it, and what is overwritten.

    begin -> (filled) -> staged -> published                a version's way; `abort` at any point before the last
    lease -> release                                        a reader's

A block is *free*, is being *filled*, *holds* a version that is kept, or *lingers*: its version is no longer kept, but a
reader has a lease on it. A version is kept while it is one of the newest ``keep`` or pinned. `begin` takes a free
block, else a new one while there are fewer than ``max_blocks`` beside the pinned ones, else the lingering one whose
oldest lease is oldest: that lease is revoked. So a reader that hangs costs one block, once.

Guarantees: a block's epoch goes up each time it begins to be filled, before the first byte. Whoever reads a block and
finds the epoch of its lease unchanged after its last byte has read that version and no other: this doesn't depend on
leases, which only say what is overwritten last. A version that is kept is never overwritten. Lookups find a version
once it is published, or staged for who proves by its digest that it is.
An interrupt (Ctrl-C) may end any call anywhere, and the version that it was of may never be aborted: the next `begin`
gives back what that one had. `publish` may be called again.
Pure: no memory, no clock, no threads; the caller holds a lock. Same calls, same answers.
Does not: know readers of other ranks; a reader takes a lease of every rank, or gives back those that it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import CheckpointNotFound, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Hashable

_ROOM: Final = 2
"""A block is used for a version that takes at least this fraction of it; a smaller one gets its own."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of memory. ``number``: never used again; ``version``: what it holds, or is being filled with."""

    number: int
    nbytes: int
    epoch: int = 0
    version: int | None = None
    leases: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    """By reader: when each of its leases was taken, as numbers that go up."""

    def fits(self, nbytes: int) -> bool:
        return nbytes <= self.nbytes <= max(_ROOM * nbytes, nbytes)


class Filling(NamedTuple):
    """A block to fill. ``revoked``: readers that had a lease on what is overwritten."""

    block: Block
    revoked: tuple[Hashable, ...] = ()


class VersionKey(NamedTuple):
    """A version on one rank, and the digest that its record has for that."""

    version: int
    digest: bytes


class BlockLease(NamedTuple):
    """A reader's lease: ``block`` held ``version`` while its epoch was ``epoch``."""

    block: Block
    version: int
    epoch: int


class Books:
    """See the module. ``where``: names this publisher in messages."""

    def __init__(self, *, keep: int, max_blocks: int, where: str = "the publisher") -> None:
        if not 0 < keep < max_blocks:
            raise AssertionError(f"{max_blocks} blocks can't keep {keep} versions and fill another")
        self._keep = keep
        self._max_blocks = max_blocks
        self._where = where
        self._blocks: dict[int, Block] = {}
        self._held: dict[int, Block] = {}
        self._staged: dict[int, tuple[Block, bytes]] = {}
        """Versions whose bytes are here, and that not all ranks are known to have, with their digests."""
        self._filling: Block | None = None
        self._pins: set[int] = set()
        self._newest: int | None = None
        self._numbers = 0
        self._leases = 0

    # filling ------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are kept, ascending."""
        return tuple(sorted(self._held))

    @property
    def newest(self) -> int | None:
        """The version that was published last."""
        return self._newest

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def epoch_of(self, block: int) -> int | None:
        """Return the epoch of a block; None if there is none of that number (any more: its memory is to be freed)."""
        found = self._blocks.get(block)
        return None if found is None else found.epoch

    def begin(self, version: int, nbytes: int) -> Filling:
        """Return the block to fill with ``version``, of at least ``nbytes``; its epoch has gone up.

        One version at a time: one that was begun before and is not published is forgotten. Raises `HoldfastError` if
        there is nothing to take.
        """
        self._forget_unfinished()
        free = [block for block in self._blocks.values() if self._is_free(block)]
        found = next((block for block in free if block.fits(nbytes)), None)
        revoked: tuple[Hashable, ...] = ()
        if found is None:
            for block in free:
                del self._blocks[block.number]
            if self._counted() >= self._max_blocks:
                found = self._held_longest(version)
                revoked = tuple(found.leases)
                if not found.fits(nbytes):
                    del self._blocks[found.number]
                    found = None
        if found is None:
            self._numbers += 1
            found = self._blocks[self._numbers] = Block(self._numbers, nbytes)
        found.epoch += 1
        found.leases.clear()
        found.version = version
        self._filling = found
        return Filling(found, revoked)

    def add(self, nbytes: int) -> Block | None:
        """Add a free block, whose memory is there, unless as many as are needed without readers are there already."""
        if self._counted() > self._keep:
            return None
        self._numbers += 1
        made = self._blocks[self._numbers] = Block(self._numbers, nbytes)
        return made

    @property
    def lacks_blocks(self) -> bool:
        """Return True if the next `begin` would need a new block, with no reader."""
        return self._counted() <= self._keep

    def staged(self, version: int, digest: bytes) -> None:
        """Note that the bytes of ``version`` are in its block, with this digest."""
        block = self._filling
        assert block is not None
        assert block.version == version
        self._staged[version] = block, digest
        self._filling = None

    def publish(self, version: int) -> None:
        """Note that all ranks have staged ``version``: it exists. Older ones than are kept may be overwritten."""
        if version in self._staged:  # else an interrupted call did this
            self._held[version], _ = self._staged[version]
            del self._staged[version]
        self._newest = version
        self._evict()

    def abort(self, version: int) -> None:
        """Forget ``version``, which not all ranks have; nothing happens if it is not known here."""
        block, _ = self._staged.pop(version, (self._filling, b""))
        if block is None or block.version != version:
            return
        if block is self._filling:
            self._filling = None
        block.version = None
        block.epoch += 1
        block.leases.clear()

    def discard(self, block: Block) -> None:
        """Forget a block that can't be made, and the version that it was to have."""
        if self._filling is block:
            self._filling = None
        self._blocks.pop(block.number, None)

    def pin(self, version: int) -> None:
        """Keep ``version`` until `unpin`. Raises `CheckpointNotFound` if it isn't kept."""
        if version not in self._held:
            raise self.unknown(version)
        self._pins.add(version)

    def unpin(self, version: int) -> None:
        self._pins.discard(version)
        self._evict()

    # reading ------------------------------------------------------------------------------------------------------

    def lease(self, reader: Hashable, version: int, digest: bytes) -> BlockLease:
        """Give ``reader`` a lease on ``version``. Who takes several on a block, by several fetches, gives back as many.

        digest: what the record of the version says of this rank. Raises `CheckpointNotFound` if it isn't here.
        """
        block = self._held.get(version)
        if block is None:
            block, known = self._staged.get(version, (None, b""))
            if block is None or known != digest:
                raise self.unknown(version)
        self._leases += 1
        block.leases[reader] = *block.leases.get(reader, ()), self._leases
        return BlockLease(block, version, block.epoch)

    def release(self, reader: Hashable, block: int, epoch: int) -> None:
        """End one lease of ``reader`` on that block, unless it has ended already."""
        found = self._blocks.get(block)
        if found is None or found.epoch != epoch or reader not in found.leases:
            return
        if left := found.leases[reader][1:]:
            found.leases[reader] = left
        else:
            del found.leases[reader]

    def forget(self, reader: Hashable) -> None:
        """End all leases of ``reader``."""
        for block in self._blocks.values():
            block.leases.pop(reader, None)

    def unknown(self, version: int) -> CheckpointNotFound:
        """Return the error for a version that isn't kept."""
        kept = ", ".join(map(str, self.versions)) or "none"
        return CheckpointNotFound(
            f"version {version} is not kept: {self._where} has {kept}, of the newest {self._keep} and those that are "
            "pinned. Ask for one of these, pin what is still needed, or raise keep_versions",
            path=self._where,
            step=version,
        )

    # ----------------------------------------------------------------------------------------------------------------

    def _forget_unfinished(self) -> None:
        """Give back what interrupted calls have left: only a version that is kept has a block."""
        self._filling = None
        self._staged.clear()
        self._evict()
        held = set(self._held.values())
        for block in self._blocks.values():
            if block not in held:
                block.version = None

    def _held_longest(self, version: int) -> Block:
        """Return the lingering block whose oldest lease is oldest, to fill with ``version``."""
        lingering = [block for block in self._blocks.values() if block.version is None and block.leases]
        if not lingering:
            raise HoldfastError(
                f"{self._where} has no memory for version {version}: all of its {self.blocks} blocks hold versions "
                "that are kept. Make a new publisher, and report this: it should never come to that"
            )
        return min(lingering, key=lambda block: min(map(min, block.leases.values())))

    def _evict(self) -> None:
        """Stop keeping all but the newest versions and the pinned ones."""
        for version in sorted(self._held)[: -self._keep]:
            if version not in self._pins:
                self._held.pop(version).version = None

    def _is_free(self, block: Block) -> bool:
        return block.version is None and not block.leases

    def _counted(self) -> int:
        """Count the blocks that ``max_blocks`` limits: a pin keeps its own, beyond the newest versions."""
        newest = sorted(self._held)[-self._keep :]
        return len(self._blocks) - sum(version in self._held and version not in newest for version in self._pins)
