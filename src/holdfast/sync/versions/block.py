"""A block of memory with one version of one publisher rank: what lies where, filling it, mapping and verifying it.

    header (a page) | pieces, each from a multiple of 256 | layout: the table, encoded | checksums, one a MiB of pieces

The header has the block's epoch (``versions.books``). A version is known by the digest of layout and checksums, which
its record has, so whoever reads a block verifies it from the record down to the byte.

Guarantees: filling raises the epoch before it changes a byte, and the other threads and processes of the host see it in
that order. Blocks are memfds of fixed size: a reader can't fault on a page that went away, and sees zeros in one that
was freed. Readers map them read-only, once.
Assumes: one thread fills a block at a time; a reader that finds the epoch as before after its last byte.
Does not: decide which version goes where (``versions.books``), or move pieces to a destination
(``versions.receiving``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash

from holdfast import _torch_compat as compat
from holdfast.boxes import runs
from holdfast.cores import usable_cores
from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import EXTENT_BYTES, PAGE_BYTES
from holdfast.plan.write import round_up
from holdfast.staging.copier import ByteMemory
from holdfast.staging.image import Image, tensor_over
from holdfast.state.entries import torch_dtype
from holdfast.sync.versions.filling import BlockFilling
from holdfast.sync.weights.buckets import BUCKET_ALIGN_BYTES, Piece, itemsize_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    from holdfast.boxes import Box
    from holdfast.sync.versions.books import VersionKey
    from holdfast.sync.weights.pieces import Local
    from holdfast.sync.weights.scatter import Changes

    Sums = npt.NDArray[np.uint64]

HEADER_BYTES: Final = PAGE_BYTES
_MADV_REMOVE: Final = 9
_JOB_EXTENTS: Final = 4
_TABLE: Final = msgspec.msgpack.Decoder(tuple[Piece, ...])


class BlockLayout:
    """Where the pieces of a table lie in a block; made once per table.

    Attributes:
        starts: for each piece its first byte, counted from the first piece's; names of one memory have one place.
        own: for each piece whether it is the first at its place.
        data_bytes: the end of the last piece.
        gaps: ranges between pieces, which are zero.
        encoded, digest: the table, as it lies in the block.
    """

    __slots__ = ("data_bytes", "digest", "encoded", "gaps", "own", "starts", "table")

    def __init__(self, table: tuple[Piece, ...], encoded: bytes | None = None) -> None:
        self.table = table
        self.starts: list[int] = []
        self.own: list[bool] = []
        self.gaps: list[tuple[int, int]] = []
        known: dict[tuple[str, object], int] = {}
        at = 0
        for piece in table:
            size = piece.box.volume * itemsize_of(piece)
            look = piece.dtype, piece.shape, piece.offsets, piece.sizes
            same = known.get((piece.same_as, look)) if piece.same_as else None
            known[piece.name, look] = at if same is None else same
            self.starts.append(at if same is None else same)
            self.own.append(same is None)
            if same is None:
                end, at = at + size, round_up(at + size, BUCKET_ALIGN_BYTES)
                if end < at:
                    self.gaps.append((end, at))
        self.data_bytes = at
        self.encoded = encoded or msgspec.msgpack.encode(table)
        self.digest = xxhash.xxh3_128_digest(self.encoded)

    @classmethod
    def decode(cls, encoded: bytes) -> BlockLayout:
        """Return the layout that was encoded; it has been verified by a digest."""
        return cls(_TABLE.decode(encoded), encoded)

    @property
    def extents(self) -> int:
        return -(-self.data_bytes // EXTENT_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block for it, whole pages."""
        return round_up(sums_at(self.data_bytes, len(self.encoded)) + 8 * self.extents, PAGE_BYTES)

    def digest_with(self, sums: Sums) -> bytes:
        """Return the digest of a version of this layout, of which the pieces have these checksums."""
        return xxhash.xxh3_128_digest(self.digest + sums.tobytes())

    def nbytes(self, number: int) -> int:
        """Return the bytes of piece ``number``."""
        piece = self.table[number]
        return piece.box.volume * itemsize_of(piece)


def layout_at(data_bytes: int) -> int:
    """Return where in a block the layout begins."""
    return HEADER_BYTES + round_up(data_bytes, BUCKET_ALIGN_BYTES)


def sums_at(data_bytes: int, layout_bytes: int) -> int:
    """Return where in a block the checksums begin."""
    return layout_at(data_bytes) + round_up(layout_bytes, 8)


_fence: Final = threading.Lock()


def _ordered() -> None:
    """Let no later access to memory overtake an earlier one: a lock is let go before it is taken again."""
    for _ in range(2):
        with _fence:
            pass


# The publisher's side ---------------------------------------------------------------------------------------------


class BlockMemory:
    """The memory of a block on the rank that fills it.

    Raises `StorageError` if there is not so much, or no descriptor; passing it on to readers needs no more of these.
    """

    _reading: int | None = None

    def __init__(self, nbytes: int) -> None:
        self.image = Image(nbytes)
        self._reading = _read_only(self.image.fd)
        self.image.warm_up(usable_cores("auto"))
        self._words = self.image.bytes_view[:8].numpy().view(np.uint64)

    def __del__(self) -> None:
        self._close_reading()

    @property
    def read_only_fd(self) -> int:
        """A descriptor by which others can map the block, but not write to it; closed by `close`."""
        assert self._reading is not None
        return self._reading

    def begin(self, epoch: int) -> None:
        """Let readers know that what follows is another version."""
        self._words[0] = epoch
        _ordered()

    def fill(self, layout: BlockLayout, pieces: Sequence[Local], *, threads: int) -> bytes:
        """Copy the pieces, of any device, into the block (``filling``); return the digest of the version.

        The pieces must not change meanwhile.
        """
        view = self.image.bytes_view
        data = view[HEADER_BYTES : HEADER_BYTES + layout.data_bytes]
        filling = BlockFilling(layout, pieces, data)
        if any(local.source.is_cuda for local in pieces):
            self.image.pin()
        filling.copy_from_devices(non_blocking=self.image.pinned)
        data_view = compat.host_memory(data)
        for start, end in layout.gaps:
            data_view[start:end] = bytes(end - start)
        filling.run(threads)
        sums = filling.sums
        tail = compat.host_memory(view)
        at = layout_at(layout.data_bytes)
        tail[at : at + len(layout.encoded)] = layout.encoded
        at = sums_at(layout.data_bytes, len(layout.encoded))
        tail[at : at + sums.nbytes] = sums.tobytes()
        return layout.digest_with(sums)

    def close(self, *, frees: bool = False) -> None:
        """Let go of the memory; idempotent. frees: also while readers have it mapped, who then find another epoch."""
        self._close_reading()
        if frees:
            self.begin(int(self._words[0]) + 1)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            address = self.image.bytes_view.data_ptr()
            libc.madvise(address + HEADER_BYTES, self.image.nbytes - HEADER_BYTES, _MADV_REMOVE)
        self.image.close()

    def _close_reading(self) -> None:
        fd, self._reading = self._reading, None
        if fd is not None:
            os.close(fd)


def _read_only(fd: int) -> int:
    """Return another descriptor of a block's memory, by which it can't be written to."""
    try:
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc: they could write, as this user's processes can anyway
            return os.dup(fd)
    except OSError as error:
        raise StorageError(
            f"the system refused a descriptor of a block of memory: {error.strerror}; raise `ulimit -n`",
            path="memfd:holdfast-image",
            errno=error.errno,
        ) from error


# A receiver's side ------------------------------------------------------------------------------------------------


class MappedBlock:
    """A publisher rank's block, mapped by a receiver; the mapping lives while tensors refer to it."""

    is_here = False
    steps: tuple[BlockStep, ...] = ()

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the block and close ``fd``. Raises `StorageError`."""
        try:
            if os.fstat(fd).st_size < nbytes:
                raise StorageError("a block is smaller than it was announced", path="memfd:holdfast-image", errno=None)
            mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise StorageError(
                f"the system refused to map a block of {nbytes} bytes: {error.strerror or error}; raise the limit of "
                "the container, or `ulimit -v`",
                path="memfd:holdfast-image",
                errno=error.errno,
            ) from error
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.view = tensor_over(mapped)
        self._memory = compat.host_memory(self.view)
        self._words = np.frombuffer(self._memory, np.uint64, 1)

    @property
    def epoch(self) -> int:
        """The epoch now; what was read before this is of that one, if it was it before that, too."""
        _ordered()
        return int(self._words[0])

    def bytes_between(self, start: int, end: int) -> memoryview:
        return self._memory[start:end]

    def bring(self, start: int, end: int, arrived: Callable[[int], None] | None = None) -> None:
        """See to it that these bytes are here: they are."""
        for number in range(-(-(end - start) // EXTENT_BYTES) if arrived is not None else 0):
            assert arrived is not None
            arrived(number)

    def refresh(self) -> None:
        """See to it that `epoch` is what it is at the publisher: it is."""

    def bring_forward(self, layout: BlockLayout, key: VersionKey, extents: Sequence[int], *, notes: bool) -> None:
        """Make what is here of an earlier version this one, as far as that goes: all of it is here."""

    def has(self, extent: int) -> bool:
        """Return True: every extent is here."""
        del extent
        return True

    def let_go(self, holds: HeldExtents | None) -> None:
        """Note that what was fetched is no longer needed: the mapping stays."""


class HeldExtents(NamedTuple):
    """What a block is known to have: extents of a version that were verified."""

    key: VersionKey
    layout: bytes
    """Its digest."""
    extents: frozenset[int]
    steps: tuple[BlockStep, ...] = ()


class BlockStep(NamedTuple):
    """How a block was brought forward from the version ``base``: by changes in these extents, which were verified."""

    base: VersionKey
    changes: Changes
    extents: set[int]


class ReadableBlock(Protocol):
    """A publisher rank's block as a receiver sees it: mapped, or brought over a network (``versions.mirror``)."""

    nbytes: int
    view: torch.Tensor
    is_here: bool
    """What was brought is this process's own: no lease is needed any more."""
    steps: tuple[BlockStep, ...]
    """How it came to hold its version, as far back as that is known; the extents count once it was verified."""

    @property
    def epoch(self) -> int: ...

    def bytes_between(self, start: int, end: int) -> memoryview: ...

    def bring(self, start: int, end: int, arrived: Callable[[int], None] | None = None) -> None:
        """See to it that these bytes are here. arrived: called for each MiB of them, by its number, once it is here."""

    def refresh(self) -> None: ...

    def bring_forward(self, layout: BlockLayout, key: VersionKey, extents: Sequence[int], *, notes: bool) -> None: ...

    def has(self, extent: int) -> bool: ...

    def let_go(self, holds: HeldExtents | None) -> None: ...


class RankVersion:
    """One rank's part of a version in a mapped block: its layout, and checks of what lies there.

    what: names it in messages. layouts: those known already, by their encoded bytes' digest.
    """

    def __init__(
        self,
        block: ReadableBlock,
        sizes: tuple[int, int, int],
        digest: bytes,
        layouts: dict[bytes, BlockLayout],
        *,
        what: str,
    ) -> None:
        """sizes: bytes of the pieces and of the layout, and how many checksums.

        Raises `CheckpointCorrupt` if layout and checksums are not those that the record has.
        """
        self.block = block
        self.what = what
        data_bytes, layout_bytes, count = sizes
        start = sums_at(data_bytes, layout_bytes)
        if min(sizes) < 0 or start + 8 * count > block.nbytes:
            raise self._corrupt("its sizes don't fit its block", 0, 0)
        block.bring(layout_at(data_bytes), start + 8 * count)
        # Both are copied before they are verified: the publisher may take the block back at any moment.
        encoded = bytes(block.bytes_between(layout_at(data_bytes), layout_at(data_bytes) + layout_bytes))
        self.sums: Sums = np.frombuffer(block.bytes_between(start, start + 8 * count), np.uint64).copy()
        key = xxhash.xxh3_128_digest(encoded)
        if xxhash.xxh3_128_digest(key + self.sums.tobytes()) != digest:
            raise self._corrupt("its layout and checksums are not those of its record", layout_at(data_bytes), start)
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = BlockLayout.decode(encoded)
        self.layout = layout
        self.data_bytes = layout.data_bytes
        self.data = block.view[HEADER_BYTES : HEADER_BYTES + layout.data_bytes]
        self._typed = ByteMemory(self.data)

    def piece(self, number: int) -> torch.Tensor:
        """Return piece ``number`` where it lies. Not to be written to."""
        piece = self.layout.table[number]
        return self._typed.block(self.layout.starts[number], piece.sizes, torch_dtype(piece.dtype))

    def extents_of(self, parts: Iterable[tuple[int, Box]]) -> list[int]:
        """Return the numbers of the extents that hold these parts of pieces, ascending."""
        found: set[int] = set()
        for number, box in parts:
            piece = self.layout.table[number]
            if not box.volume:
                continue
            start, itemsize = self.layout.starts[number], itemsize_of(piece)
            for first, length in runs(box, piece.box, bridge=(EXTENT_BYTES - 1) // itemsize):
                at, end = start + first * itemsize, start + (first + length) * itemsize
                found.update(range(at // EXTENT_BYTES, (end - 1) // EXTENT_BYTES + 1))
        return sorted(found)

    def check(self, extent: int) -> None:
        """Raise `CheckpointCorrupt` unless the bytes of an extent have their checksum."""
        if not self.is_right(extent):
            start = HEADER_BYTES + extent * EXTENT_BYTES
            end = min(start + EXTENT_BYTES, HEADER_BYTES + self.layout.data_bytes)
            raise self._corrupt("bytes have another checksum than when they were published", start, end)

    def is_right(self, extent: int) -> bool:
        """Return True if the bytes of an extent have their checksum."""
        start = HEADER_BYTES + extent * EXTENT_BYTES
        end = min(start + EXTENT_BYTES, HEADER_BYTES + self.layout.data_bytes)
        return xxhash.xxh3_64_intdigest(self.block.bytes_between(start, end)) == int(self.sums[extent])

    def bring_extents(self, first: int, last: int) -> None:
        """Bring these extents, and check each as it arrives, while it is in a core's cache.

        Raises `CheckpointCorrupt`, once all are here.
        """
        wrong: list[int] = []

        def look(number: int) -> None:
            if not self.is_right(first + number):
                wrong.append(first + number)

        end = min((last + 1) * EXTENT_BYTES, self.layout.data_bytes)
        self.block.bring(HEADER_BYTES + first * EXTENT_BYTES, HEADER_BYTES + end, look)
        for extent in wrong:
            self.check(extent)

    def checks(self, extents: Sequence[int]) -> list[Callable[[], None]]:
        """Return jobs that check these extents, and bring those that aren't here."""

        def check(some: Sequence[int]) -> None:
            lacking = [extent for extent in some if not (self.block.has(extent) and self.is_right(extent))]
            for first, last in _runs(lacking):
                self.bring_extents(first, last)

        return [partial(check, extents[at : at + _JOB_EXTENTS]) for at in range(0, len(extents), _JOB_EXTENTS)]

    def _corrupt(self, why: str, start: int, end: int) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self.what}: {why} (bytes {start} to {end}). Nothing was changed; fetch it again, or look for a process "
            "of this user that writes to the publisher's memory, or for faulty memory",
            path=self.what,
            byte_range=(start, end),
        )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of successive numbers."""
    first = last = None
    for number in numbers:
        if last is not None and first is not None and number != last + 1:
            yield first, last
            first = None
        first, last = number if first is None else first, number
    if first is not None and last is not None:
        yield first, last


prepare_decoding(tuple[Piece, ...])
