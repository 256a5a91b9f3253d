"""Write-plan bytes that pass through a small ring of slots, piece by piece. Torch-free.

A plan is written either from an image that holds all of it, or from a `Ring`: its files, in image order, are cut into
pieces of one slot. The trainer fills the slots in turn: piece ``n`` goes to slot ``n % slots``. The engine writes and
hashes each piece, then frees its slot.

    trainer  SlotFilled(n): the first n pieces were filled        engine  SlotFree(n): the first n pieces are done

Guarantees: a slot is reported free only when nothing reads it any more; a thread that waits for a piece returns within
`_LOOK_S` once waiting is pointless. Pieces begin at extents, so the checksums equal those of an image.
Assumes: one thread hashes, in order; any number of threads write.
Does not: write, hash, or interpret the bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.engine.ranges import Range
from holdfast.format.manifest import EXTENT_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.engine.messages import FileRow

_LOOK_S: Final = 0.05
"""How often a thread that waits for a piece checks for `halt`."""


class StreamedPiece(NamedTuple):
    """The bytes ``[start, end)`` of the image, all in the file of that index; at most one slot."""

    file: int
    start: int
    end: int


class RingHalted(Exception):
    """The awaited piece will not come."""


def pieces_of(rows: Sequence[FileRow], slot_bytes: int) -> list[StreamedPiece]:
    """Cut whole files into pieces, in order. Raises `ValueError` for what a ring can't carry."""
    if slot_bytes <= 0 or slot_bytes % EXTENT_BYTES:
        raise ValueError(f"slots of {slot_bytes} bytes: a slot takes whole extents of {EXTENT_BYTES} bytes")
    pieces: list[StreamedPiece] = []
    done = 0
    for file, row in enumerate(rows):
        if row.total is not None or row.size % PAGE_BYTES or row.image_offset < done:
            raise ValueError(
                f"file {row.name} can't come through a ring: it is a part, ends within a page, or is out of order"
            )
        done = row.image_offset + row.size
        pieces += [
            StreamedPiece(file, start, min(start + slot_bytes, done))
            for start in range(row.image_offset, done, slot_bytes)
        ]
    return pieces


class Ring:
    """The slots of one attempt. `filled` is called by the control thread; the rest by the attempt's threads."""

    def __init__(self, memory: memoryview, slot_bytes: int, freed: Callable[[int], None]) -> None:
        """freed: called with the growing number of pieces whose slots are free; must not block."""
        self.memory, self.slot_bytes = memory, slot_bytes
        self.slots = len(memory) // slot_bytes if slot_bytes > 0 else 0
        self._tell_freed = freed
        self._changed = threading.Condition()
        self._halt = threading.Event()
        self._rows: Sequence[FileRow] = ()
        self._pieces: list[StreamedPiece] = []
        self._left: list[int] = []
        """Bytes of each piece that are not written yet."""
        self._filled = self._hashed = self._freed = 0
        self._writing, self._taken = 0, 0
        """Number of the piece being written, and how many bytes of it were given to writers."""

    def begin(self, rows: Sequence[FileRow], halt: threading.Event) -> None:
        """Set the files to come, and what ends all waiting; called before other threads start. Raises `ValueError`."""
        if self.slots < 1 or len(self.memory) % self.slot_bytes:
            raise ValueError(f"a ring of {len(self.memory)} bytes has no whole slots of {self.slot_bytes}")
        self._rows, self._halt = rows, halt
        self._pieces = pieces_of(rows, self.slot_bytes)
        self._left = [piece.end - piece.start for piece in self._pieces]

    def filled(self, pieces: int) -> None:
        """Note that the first ``pieces`` pieces are in their slots."""
        with self._changed:
            self._filled = max(self._filled, pieces)
            self._changed.notify_all()

    def next_chunk(self, nbytes_max: int) -> tuple[int, int, Range] | None:
        """Return a piece's number, its file's index and the next range of it to write, in ring coordinates.

        Waits until the piece is filled; None if nothing is left to write, or `halt` is set.
        """
        with self._changed:
            while self._writing < len(self._pieces):
                number = self._writing
                if self._filled <= number:
                    if self._halt.is_set():
                        return None
                    self._changed.wait(_LOOK_S)  # meanwhile another writer may take it
                    continue
                piece = self._pieces[number]
                start = piece.start + self._taken
                nbytes = min(nbytes_max, piece.end - start)
                self._taken += nbytes
                if self._taken == piece.end - piece.start:
                    self._writing, self._taken = number + 1, 0
                offset = start - self._rows[piece.file].image_offset
                return number, piece.file, Range(offset, self._place(number, start), nbytes)
        return None

    def wrote(self, number: int, nbytes: int) -> None:
        """Note that ``nbytes`` bytes of a piece were written."""
        with self._changed:
            self._left[number] -= nbytes
            self._free()

    def __getitem__(self, where: slice) -> memoryview:
        """Return bytes in image coordinates, all of one piece, once that is filled; for the hashing thread.

        Requesting a piece means that those before it are hashed. Raises `RingHalted`.
        """
        start, stop = where.start, where.stop
        with self._changed:
            number = self._hashed
            while self._pieces[number].end <= start:
                number += 1
            if number > self._hashed:
                self._hashed = number
                self._free()
            while self._filled <= number:
                if self._halt.is_set():
                    raise RingHalted
                self._changed.wait(_LOOK_S)
            place = self._place(number, start)
        return self.memory[place : place + stop - start]

    def hashed_all(self) -> None:
        """Note that every piece was hashed."""
        with self._changed:
            self._hashed = len(self._pieces)
            self._free()

    def _place(self, number: int, at: int) -> int:
        return number % self.slots * self.slot_bytes + at - self._pieces[number].start

    def _free(self) -> None:
        freed = self._freed
        while freed < self._hashed and not self._left[freed]:
            freed += 1
        if freed > self._freed:
            self._freed = freed
            self._tell_freed(freed)
