"""Messages between a trainer and its engine: length-prefixed msgpack frames on a Unix stream socket. Torch-free.

Every frame is a 4-byte little-endian length and a tagged struct of this module. A frame that passes a file descriptor
(`AddImage`; `Persist` and `Remove` where the place is a directory) carries it as SCM_RIGHTS ancillary data with the
first byte of the frame. Places that aren't directories are named by a writer instead: ``module``, ``args`` and
``paths`` of `holdfast.storage.protocol.WriterTarget`.

One engine serves all sessions of its trainer. Images and plans have numbers that are unique in the engine; attempts and
removals are identified by session number and name. Order within each session:

    AddImage* -> AddPlan -> Persist -> (StagingVerified | Cancel) -> next Persist     one attempt per session at a time

An attempt whose bytes come through a ring (``ring``) gets `SlotFilled` between `Persist` and `StagingVerified`, and
answers with `SlotFree`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.format.decoding import prepare_decoding


class EngineMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    descriptors: ClassVar[int] = 0
    """How many descriptors it comes with, unless its fields say so (`engine.wire.fd_count`)."""


# trainer -> engine ---------------------------------------------------------------------------------------------


class AttemptLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one attempt on its host. They apply to the threads of that attempt only."""

    writers: int = 2
    """Number of threads that write and hash; 1 to 16."""
    io_limit_bytes_per_s: int | None = None
    nice: int = 10
    orphan_grace_s: float = 60.0
    """How long the engine may take to finish a staged and verified attempt after its trainer has died."""
    direct: bool = True
    """Use O_DIRECT if the file system allows it."""
    io_class: str = "none"
    """One of ``process.CLASSES``."""
    io_level: int | None = None
    host_writers: int | None = None
    """How many attempts that set this may write on this host at a time; None: no limit."""
    slots: str = ""
    """Directory of the slots for that (``storage.locks``)."""
    cores: tuple[int, ...] = ()
    """Cores to run on; empty: those that the engine was started with."""


class AddImage(EngineMessage, frozen=True):
    """Comes with one descriptor: a memfd of ``nbytes`` bytes (multiple of 4096)."""

    descriptors: ClassVar[int] = 1

    image: int
    nbytes: int


class DropImage(EngineMessage, frozen=True):
    image: int


class FileRow(msgspec.Struct, frozen=True, array_like=True):
    """``size`` bytes of the image from ``image_offset`` are the whole content of file ``name``.

    If ``total`` isn't None they are a part of it: its bytes from ``offset`` on, of ``total`` in all,
    and other ranks write the other parts. ``image_offset`` is a multiple of 4096, and so is ``size``, unless the part
    ends with its file.
    """

    name: str
    size: int
    image_offset: int
    offset: int = 0
    total: int | None = None


class AddPlan(EngineMessage, frozen=True):
    """A write plan, sent once and used by every `Persist` that names it."""

    plan: int
    files: tuple[FileRow, ...]
    tensor_offsets: bytes
    """Image offset of each tensor payload in index order, 8 bytes little-endian each."""
    tensor_sizes: bytes
    """Bytes of each tensor payload, 8 bytes little-endian each."""
    index: bytes
    """Copied into the report unchanged."""


class UseCores(EngineMessage, frozen=True):
    """Have the engine's own threads run on these from now on: those that answer, compile plans and remove trees."""

    cores: tuple[int, ...]


class DropPlan(EngineMessage, frozen=True):
    plan: int


class CopySource(msgspec.Struct, frozen=True, array_like=True):
    """The report in a published directory whose files are to be copied, with its digest by the manifest."""

    report: str
    digest: str


class Persist(EngineMessage, frozen=True):
    """Write the plan's files from the image to the attempt's place, durably.

    Comes with one descriptor, the attempt directory, unless ``module`` names a writer; with ``source``, the directory
    that is copied. If ``slot_bytes`` isn't 0, the image is a ring of slots of that size, filled later (`SlotFilled`):
    for directories only.
    """

    attempt: str
    plan: int
    image: int
    step: int | None
    rank: int
    world: int
    report_name: str
    lease_name: str
    limits: AttemptLimits = AttemptLimits()
    session: int = 0
    umask: int = 0
    """The trainer's current umask: files are created as the trainer would create them."""
    slot_bytes: int = 0
    module: str = ""
    """Of the writer; empty: the place is the directory."""
    args: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    source: CopySource | None = None
    """Copy the files of this report instead, which are in the directory of the descriptor, to the writer's place;
    ``plan`` and ``image`` are not used."""


class SlotFilled(EngineMessage, frozen=True):
    """The first ``pieces`` pieces of the plan's files are in their slots of the ring."""

    attempt: str
    pieces: int
    session: int = 0


class StagingVerified(EngineMessage, frozen=True):
    """Staging is verified: the report of ``attempt`` may be written."""

    attempt: str
    session: int = 0


class Cancel(EngineMessage, frozen=True):
    """Stop working on ``attempt``: no report is written from now on. Answered by `Cancelled`."""

    attempt: str
    session: int = 0


class Remove(EngineMessage, frozen=True):
    """Remove the entry ``name`` and everything below it: trash.

    Comes with one descriptor, the directory that has the entry, unless ``module`` names a writer of the root.
    """

    name: str
    session: int = 0
    device: int = 0
    """``st_dev`` of the directory: removals on one file system are done one after the other."""
    module: str = ""
    args: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


class Shutdown(EngineMessage, frozen=True):
    pass


# engine -> trainer ---------------------------------------------------------------------------------------------


class EngineReady(EngineMessage, frozen=True):
    pid: int
    version: str


class AttemptBeat(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one attempt."""

    attempt: str
    written: int
    """Bytes written so far: if this doesn't change, the storage hangs."""
    waiting: str = ""
    """What writing waits for other than storage: a slot, and who holds it."""
    session: int = 0


class EngineBeat(EngineMessage, frozen=True):
    """Sent every `BEAT_S` while attempts are in progress, advancing or not; names all of them."""

    attempts: tuple[AttemptBeat, ...]


class Persisted(EngineMessage, frozen=True):
    """All files of the attempt are durable; the report waits for `StagingVerified`."""

    attempt: str
    nbytes: int
    seconds: float
    direct: bool
    session: int = 0


class SlotFree(EngineMessage, frozen=True):
    """The first ``pieces`` pieces were written and hashed: their slots may be refilled."""

    attempt: str
    pieces: int
    session: int = 0


class Reported(EngineMessage, frozen=True):
    """The report is durable: this rank votes to publish."""

    attempt: str
    size: int
    digest: str
    """xxh3_128 of the report file, hexadecimal."""
    nbytes: int
    parts: str = ""
    """``format.manifest.parts_digest`` of the parts of files that were written."""
    session: int = 0
    same: bytes = b""
    """One byte a tensor of the plan, 1 if its checksum is that of the attempt before; empty if there was none."""


class Cancelled(EngineMessage, frozen=True):
    attempt: str
    report_left: bool = False
    """See `AttemptFailed`."""
    session: int = 0


class AttemptFailed(EngineMessage, frozen=True):
    """Work on ``attempt`` ended in an error; nothing more is done for it."""

    attempt: str
    errno: int | None
    path: str
    detail: str
    report_left: bool = False
    """The report had its name and may still have it, or again after a power loss: its removal isn't durable."""
    session: int = 0


class Removed(EngineMessage, frozen=True):
    name: str
    errno: int | None
    session: int = 0


class Notice(EngineMessage, frozen=True):
    """A requested feature is unavailable, and the engine continues without it: for the log."""

    text: str


OfSession = AttemptBeat | SlotFree | Persisted | Reported | Cancelled | AttemptFailed | Removed
"""Messages that concern one session."""
BEAT_S = 0.25


prepare_decoding(
    AddImage,
    DropImage,
    AddPlan,
    UseCores,
    DropPlan,
    Persist,
    SlotFilled,
    StagingVerified,
    Cancel,
    Remove,
    Shutdown,
    EngineReady,
    EngineBeat,
    Persisted,
    SlotFree,
    Reported,
    Cancelled,
    AttemptFailed,
    Removed,
    Notice,
)
