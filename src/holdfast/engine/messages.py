"""The words between a trainer and its engine: length-prefixed msgpack frames on a Unix stream socket. Torch-free.

Every frame is a 4-byte little-endian length and a tagged struct of this module. A frame that hands over a file
descriptor (`AddImage`, `Persist`) carries it as SCM_RIGHTS ancillary data with the first byte of the frame.

Order the trainer keeps:  Configure, then any of
    AddImage* -> AddPlan -> Persist -> (StagingVerified | Cancel) -> next Persist     one attempt at a time
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# trainer -> engine ---------------------------------------------------------------------------------------------


class Configure(Message, frozen=True):
    writers: int
    """Threads that write and hash; 1 to 16."""
    io_limit_bytes_per_s: int | None
    nice: int
    orphan_grace_s: float
    """How long an engine whose trainer has died may take to finish what is staged and verified."""
    direct: bool = True
    """Use O_DIRECT where the file system allows it."""
    io_class: str = "none"
    """Of ``io_priority.CLASSES``."""
    io_level: int | None = None
    host_writers: int | None = None
    """How many engines of the host may write at a time, where each says so; None for any number."""
    slots: str = ""
    """The directory of their turns (``storage.slots``)."""


class AddImage(Message, frozen=True):
    """With one descriptor: a memfd of ``nbytes`` bytes (multiple of 4096)."""

    image: int
    nbytes: int


class DropImage(Message, frozen=True):
    image: int


class FileRow(msgspec.Struct, frozen=True, array_like=True):
    """``size`` bytes of the image from ``image_offset`` are the whole content of file ``name``.

    If ``total`` isn't None they are a part of it (``format.parts``): its bytes from ``offset`` on, of ``total`` in all,
    and other ranks write the other parts. ``image_offset`` is a multiple of 4096, and so is ``size``, unless the part
    ends with its file.
    """

    name: str
    size: int
    image_offset: int
    offset: int = 0
    total: int | None = None


class AddPlan(Message, frozen=True):
    """A write plan, sent once and used by every `Persist` that names it."""

    plan: int
    files: tuple[FileRow, ...]
    tensor_offsets: bytes
    """Image offset of each tensor payload in index order, 8 bytes little-endian each."""
    tensor_sizes: bytes
    """Bytes of each tensor payload, 8 bytes little-endian each."""
    index: bytes
    """Goes into the report as it is."""


class DropPlan(Message, frozen=True):
    plan: int


class Persist(Message, frozen=True):
    """With one descriptor: the attempt directory. Write the plan's files there from the image, and fsync them."""

    attempt: str
    plan: int
    image: int
    step: int | None
    rank: int
    world: int
    report_name: str
    lease_name: str


class StagingVerified(Message, frozen=True):
    """The image held still and is right: the report of ``attempt`` may be written."""

    attempt: str


class Cancel(Message, frozen=True):
    """Stop working on ``attempt``: no report is written from here on. Answered by `Cancelled`."""

    attempt: str


class Remove(Message, frozen=True):
    """With one descriptor: a directory. Remove its entry ``name`` with everything below it (a trash directory)."""

    name: str


class Shutdown(Message, frozen=True):
    pass


# engine -> trainer ---------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    pid: int
    version: str


class Beat(Message, frozen=True):
    """Sent every `BEAT_S` while an attempt is in work, whether or not it moves on."""

    attempt: str
    written: int
    """Bytes written so far: a figure that stands still is a hang of the storage."""
    waiting: str = ""
    """What writing waits for, if it isn't the storage: a turn, and who has it."""


class Persisted(Message, frozen=True):
    """All files of the attempt are written and fsynced; the report waits for `StagingVerified`."""

    attempt: str
    nbytes: int
    seconds: float
    direct: bool


class Reported(Message, frozen=True):
    """The report is durable: this rank's yes."""

    attempt: str
    size: int
    digest: str
    """xxh3_128 of the report file, hexadecimal."""
    nbytes: int
    parts: str = ""
    """``format.parts.parts_digest`` of the parts of files that were written."""


class Cancelled(Message, frozen=True):
    attempt: str
    report_left: bool = False
    """As in `Failed`."""


class Failed(Message, frozen=True):
    """Work on ``attempt`` ended in an error; nothing more is done for it."""

    attempt: str
    errno: int | None
    path: str
    detail: str
    report_left: bool = False
    """The report had its name, and may have it yet, or again after a power loss: taking it away isn't durable."""


class Removed(Message, frozen=True):
    name: str
    errno: int | None


class Notice(Message, frozen=True):
    """Something that was asked for can't be had, and is done without: for the log."""

    text: str


BEAT_S = 0.25
