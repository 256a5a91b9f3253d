"""Receiving versions from where they are kept: looks, waits, reads, verifies, and has the destination commit.

A version is whatever ``name_template`` makes a directory of that Holdfast has published, or stock DCP has finished:
neither is there before it is whole. The newest is the newest in the run's own course, as for `CheckpointManager`: what
a run left behind when it went back to an older step is not.

Guarantees: every byte that has a checksum is matched with it before the version is committed; what is being received
is not deleted by the publisher's retention; the root is only read.
Assumes: waiting is looking: a new version is noticed up to ``LAST_LOOK_S`` late.
Does not: convert dtypes, watch directories of other writers that have no moment at which they are whole, or bound by
its deadline what the file system itself takes to answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import nn

from holdfast import events
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, StateMismatch
from holdfast.hf_fitting import fit
from holdfast.hf_source import HFSource
from holdfast.keeping import oldest_first
from holdfast.loader import fill_tensors
from holdfast.opening import open_source
from holdfast.optimizer_hook import before_any_load
from holdfast.root import foreign_steps, published
from holdfast.source import HoldfastSource
from holdfast.state.loading import TensorDestination
from holdfast.state.structure import LayoutTable
from holdfast.state.tree import StateTree
from holdfast.storage.reader_lease import being_read
from holdfast.sync.seam import TensorInfo
from holdfast.sync.waiting import Leaving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from holdfast.source import Source
    from holdfast.storage.local import LocalStorage
    from holdfast.storage.object_storage import ObjectStorage
    from holdfast.sync.deadline import Deadline
    from holdfast.sync.seam import Destination

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.5
"""The pause between two looks at the directory doubles from the first to the last."""
BATCH_BYTES: Final = 64 << 20
"""What is read at a time while streaming, unless one tensor is larger: whole tensors for a function take that much."""
_MODEL: Final = "model"
"""A key of our own for the module that a Hugging Face directory is fitted to."""


class DirectoryReceiving:
    """The receiving half of a directory; and of what is like one, but for the methods below "Where"."""

    first_look_s = FIRST_LOOK_S

    def __init__(
        self, storage: LocalStorage | ObjectStorage, name_template: str, prefix: str | None, key_map: Any
    ) -> None:
        self._storage = storage
        self._template = name_template
        self._prefix = prefix
        self._key_map = key_map
        self._leaving = Leaving()

    def receive(self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline) -> int:
        """As `Receiving.receive`; the directory is looked at once even if no time is left."""
        try:
            while True:
                step, name = self._wait_for(version, newer_than, deadline)
                try:
                    self._take(destination, step, name)
                    break
                except CheckpointNotFound:
                    # Taken away between look and lease: by now a newer one is there, unless it was this one.
                    if version is not None:
                        raise
                    newer_than = step
                    destination.abandon()
            destination.commit(step)
        except BaseException:
            destination.abandon()
            raise
        events.emit("version.received", step=step, path=self._storage.path(name))
        return step

    def leave(self) -> None:
        self._leaving.say()

    def close(self) -> None:
        """Nothing is held between two calls."""

    # Which. ------------------------------------------------------------------------------------------------------

    def _wait_for(self, version: int | None, newer_than: int | None, deadline: Deadline) -> tuple[int, str]:
        pause_s = self.first_look_s
        while True:
            found = self._newest(newer_than) if version is None else self._exactly(version)
            if found is not None:
                return found
            if deadline.passed():
                which = f"version {version}" if version is not None else "a version"
                newer = "" if version is not None or newer_than is None else f" newer than {newer_than}"
                have = ", ".join(str(step) for step, _ in self._rows()[-8:]) or "none"
                raise deadline.exceeded(
                    f"{which}{newer} under {self._storage.root}",
                    f"published there now as {self._template}: {have}{self._unfinished()}. See whether the publisher "
                    "lives and writes there, or allow more time",
                )
            self._leaving.sleep(min(pause_s, max(deadline.left_s(), 0.001)))
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    def _newest(self, newer_than: int | None) -> tuple[int, str] | None:
        rows = self._rows(newer_than)
        # One that can't be read is taken, too: it is to be missed aloud.
        found = oldest_first(self._storage, rows, kind=None) if rows else []
        return (found[-1].step, found[-1].name) if found else None

    def _exactly(self, version: int) -> tuple[int, str] | None:
        """Version ``version``, None while it may still come; `CheckpointNotFound` once it won't."""
        name = self._name_of(version)
        if name is not None:
            return version, name
        # A run that went back may publish it yet: only what is of its own course is newer.
        newest = self._newest(None) if self._rows(version) else None
        if newest is not None and newest[0] > version:
            have = ", ".join(str(step) for step, _ in self._rows())
            raise CheckpointNotFound(
                f"version {version} is not kept under {self._storage.root} (any more): newer ones are published; "
                f"there are {have}. Take one of these, or have the publisher pin a version that is to stay",
                path=self._storage.root,
                step=version,
            )
        return None

    # Where. ------------------------------------------------------------------------------------------------------

    def _rows(self, above: int | None = None) -> list[tuple[int, str]]:
        """(version, name) of all that is whole, by version; only of versions greater than ``above``."""
        rows = sorted(published(self._storage, self._template) + foreign_steps(self._storage, self._template))
        return [row for row in rows if above is None or row[0] > above]

    def _name_of(self, version: int) -> str | None:
        """Its name, if it is there and whole."""
        return dict(self._rows()).get(version)

    def _unfinished(self) -> str:
        """What else is there that might be waited for, as words to go on with."""
        return ""

    def _held(self, name: str) -> AbstractContextManager[None]:
        """What keeps it from being deleted; `CheckpointNotFound` if that has happened."""
        return being_read(self._storage.path(name))

    def _open(self, name: str) -> Source:
        return open_source(self._storage.path(name))

    # How. --------------------------------------------------------------------------------------------------------

    def _take(self, destination: Destination, version: int, name: str) -> None:
        """Bring the version in ``name`` to where the destination has its bytes, all verified."""
        before_any_load()
        with self._held(name):
            source = self._opened(name, version)
            if isinstance(source, HFSource) and isinstance(destination.into, nn.Module):
                tree = StateTree({_MODEL: destination.into}, rank=0, world=1)
                source = fit(source, tree.holders(), key_map=self._key_map)
                prefix: str | None = _MODEL
            else:
                prefix = None if isinstance(source, HFSource) else self._prefix
            stored = _below(source, prefix)
            names = self._selected(destination, source, stored)
            layouts, rank = LayoutTable(), dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            for batch in _batches(names, source, stored, bounded=destination.streaming):
                entries = [TensorDestination(stored[key], destination.memory(key)) for key in batch]
                # Several receivers of a host want the same bytes: they share its page cache.
                fill_tensors(entries, source, layouts, rank, among_ranks=True, verify=True)
                for key in batch:
                    destination.complete(key)

    def _opened(self, name: str, version: int) -> Source:
        source, directory = self._open(name), self._storage.path(name)
        if isinstance(source, HoldfastSource | HFSource):
            source.raise_for_listing(verify=True)
        if source.step not in (None, version):
            raise CheckpointCorrupt(
                f"{directory} holds step {source.step}, not {version}: it was copied or renamed since it was "
                "published; take it away, or give it its own name back",
                path=directory,
            )
        if self._key_map is not None and not isinstance(source, HFSource):
            raise ConfigError(
                f"key_map says how Hugging Face exports name tensors, but {directory} is a checkpoint: leave it out",
                field="key_map",
            )
        return source

    def _selected(self, destination: Destination, source: Source, stored: dict[str, str]) -> tuple[str, ...]:
        infos = {name: TensorInfo(source.tensors[at].shape, source.tensors[at].dtype) for name, at in stored.items()}
        try:
            return destination.select(infos)
        except StateMismatch as error:
            hint = _hint(source, self._prefix, error)
            raise StateMismatch(
                f"{source.directory}: {error}{hint}",
                missing=error.missing,
                unexpected=error.unexpected,
                mismatched=error.mismatched,
            ) from error


def _below(source: Source, prefix: str | None) -> dict[str, str]:
    """What is stored below ``prefix``, by the name that it has there."""
    if prefix is None:
        return {name: name for name in source.tensors}
    above = prefix + "."
    return {name[len(above) :]: name for name in source.tensors if name.startswith(above)}


def _hint(source: Source, prefix: str | None, error: StateMismatch) -> str:
    if isinstance(source, HFSource):
        return f" {source.hint}" if source.hint else ""
    tops = sorted({name.split(".", 1)[0] for name in source.tensors})
    if prefix is not None:
        return "" if prefix in tops else f" Nothing there is below {prefix!r}; top-level keys: {', '.join(tops[:8])}"
    under = [top for top in tops if error.missing and f"{top}.{error.missing[0]}" in source.tensors]
    return f" The weights are below {under[0]!r} there: give the transport prefix={under[0]!r}" if under else ""


def _batches(names: Sequence[str], source: Source, stored: dict[str, str], *, bounded: bool) -> Iterator[list[str]]:
    """All of ``names``, or so few at a time that they have no more than `BATCH_BYTES`, or one tensor."""
    if not bounded:
        yield list(names)
        return
    batch: list[str] = []
    nbytes = 0
    for name in names:
        tensor = source.tensors[stored[name]]
        size = tensor.itemsize
        for length in tensor.shape:
            size *= length
        if batch and nbytes + size > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += size
    yield batch
