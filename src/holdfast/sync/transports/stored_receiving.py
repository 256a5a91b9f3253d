"""Versions in a directory, received; and the parts shared with object stores.

A version is a directory named by ``name_template`` that Holdfast has published or stock DCP has finished, so it is
complete. The newest is the newest of the current run, as for `CheckpointManager`: versions left behind when the run
went back to an older step don't count.

Guarantees: a receiver verifies every byte that has a checksum before a fetch returns, and only reads the root; of a
delta version it reads what is newer than what it holds. Nobody deletes a version, or what it is a delta to, that is
being read.
Assumes: receivers poll: a new version is noticed up to ``LAST_LOOK_S`` late, by `poll` on a directory too.
Does not: convert dtypes; limit the time of file system calls.
"""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch.distributed as dist
from torch import nn

from holdfast.catalog.catalog import oldest_first
from holdfast.catalog.root import foreign_steps, published
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    StateMismatch,
)
from holdfast.loader.loader import fill_tensors
from holdfast.loader.sources.chain import ChainSource
from holdfast.loader.sources.hf_match import fit
from holdfast.loader.sources.holdfast import HoldfastSource
from holdfast.loader.sources.huggingface import HFSource
from holdfast.loader.sources.open import open_source
from holdfast.staging.optimizer_hook import before_any_load
from holdfast.state.load_plan import TensorDestination
from holdfast.state.structure import LayoutTable
from holdfast.state.tree import StateTree
from holdfast.storage.entries import published_attempt
from holdfast.sync.lineage import receiver_name, tell_received
from holdfast.sync.protocol import TensorInfo
from holdfast.sync.session.futures import CloseSignal
from holdfast.sync.transports.deltas import bring_forward
from holdfast.sync.watcher import Sighting, Watcher
from holdfast.sync.weights.apply import FetchedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from holdfast.coordination.deadline import Deadline
    from holdfast.format.manifest import Manifest
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.storage.protocol import Storage
    from holdfast.sync.protocol import Destination, FetchedVersion


FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.5
"""Longest pause between two polls of the directory; pauses double up to it."""
BATCH_BYTES: Final = 64 << 20
"""Bytes read at a time while streaming, unless one tensor is larger: the memory for whole tensors for a function."""
SHADOW_BATCH_BYTES: Final = 1 << 30
"""Bytes read at a time otherwise: `cancel` and `close` wait for one batch at most."""
META: Final = "weights_meta"
"""Key of `Manifest.extra`: what was given to `publish` as ``meta``, as msgpack in base64."""
_MODEL: Final = "model"
"""Our own key for the module that a Hugging Face directory is fitted to."""


class DirectoryReceiving:
    """The receiving half of a directory; subclasses for similar places override the methods below "Locating"."""

    first_look_s = FIRST_LOOK_S
    watch_every_s = LAST_LOOK_S

    def __init__(self, storage: Storage, name_template: str, prefix: str | None, key_map: Any) -> None:
        self._name = receiver_name()
        self._storage = storage
        self._template = name_template
        self._prefix = prefix
        self._key_map = key_map
        self._leaving = CloseSignal()
        self._watcher = Watcher(lambda: NewestStored(self._apart()), every_s=self.watch_every_s)
        self._fetched: Sighting | None = None
        self._attempts: dict[int, str] = {}
        """Who has published the versions that were fetched."""

    def newest(self, newer_than: int | None) -> int | None:
        found = self._watcher.newest()
        if found is None:
            return None
        # The newest of the current run: after going back, its number may be smaller, or equal.
        is_news = newer_than is None or found.version > newer_than or found != self._fetched
        return found.version if is_news else None

    def await_version(self, version: int | None, newer_than: int | None, deadline: Deadline) -> None:
        """Return at once: `fetch` waits."""

    def fetch(
        self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> FetchedVersion:
        """Fetch as `Receiving.fetch`; reads the directory once even if no time is left."""
        began = time.monotonic()
        try:
            self._leaving.check()
            while True:
                step, name = self._wait_for(version, newer_than, deadline)
                found = time.monotonic()
                try:
                    meta, attempt = self._take(destination, step, name)
                    break
                except CheckpointNotFound:
                    # Deleted between listing and lease: now a newer one is there, unless it was requested by number.
                    if version is not None:
                        raise
                    newer_than = step
                    destination.abandon()
        except BaseException:
            destination.abandon()
            raise
        self._fetched = Sighting(step, attempt)
        path = self._storage.path(name)
        seconds = {"wait": found - began, "transfer": time.monotonic() - found}
        tell = partial(tell_received, step, meta, receiver=self._name, path=path)
        return FetchedMemory(destination, step, meta, seconds, lambda seconds: tell(seconds=seconds))

    def cancel(self) -> None:
        self._leaving.cancel()

    def leave(self) -> None:
        self._leaving.say()

    def close(self) -> None:
        self._watcher.close()

    # Choosing. ---------------------------------------------------------------------------------------------------

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
        # Includes unreadable ones: reading them must raise.
        return self.newest_of(self._rows(newer_than))

    def _exactly(self, version: int) -> tuple[int, str] | None:
        """Return version ``version``, None while it may still come; `CheckpointNotFound` once it can't."""
        name = self._name_of(version)
        if name is not None:
            return version, name
        # A run that went back may still publish it: only versions of its own history are newer.
        newest = self._newest(None) if self._rows(version) else None
        if newest is not None and newest[0] > version:
            have = ", ".join(str(step) for step, _ in self._rows())
            raise CheckpointNotFound(
                f"version {version} is not kept under {self._storage.root} (any more): newer ones are published; "
                f"there are {have}. Use one of these, or let the publisher pin versions that must stay",
                path=self._storage.root,
                step=version,
            )
        return None

    # Locating. ---------------------------------------------------------------------------------------------------

    def _apart(self) -> DirectoryReceiving:
        """Return one of its own for the thread that looks for versions."""
        return DirectoryReceiving(self._storage, self._template, self._prefix, self._key_map)

    def begin_look(self) -> None:
        """Prepare for a look of the thread that looks for versions."""

    def rows(self) -> list[tuple[int, str]]:
        """Return (version, name) of all complete versions, by version."""
        return self._rows()

    def newest_of(self, rows: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        """Return the newest version of the current run among ``rows``."""
        found = oldest_first(self._storage, rows, kind=None) if rows else []
        return (found[-1].step, found[-1].name) if found else None

    def attempt_at(self, name: str) -> str:
        """Return who has published ``name``; empty if that can't be told."""
        return published_attempt(self._storage, name) or ""

    def _rows(self, above: int | None = None) -> list[tuple[int, str]]:
        """Return (version, name) of all complete versions, by version; only those greater than ``above``."""
        rows = sorted(published(self._storage, self._template) + foreign_steps(self._storage, self._template))
        return [row for row in rows if above is None or row[0] > above]

    def _name_of(self, version: int) -> str | None:
        """Return the version's name if it is there and complete."""
        return dict(self._rows()).get(version)

    def _unfinished(self) -> str:
        """Describe unfinished entries that might be waited for, for a message."""
        return ""

    def _held(self, name: str) -> AbstractContextManager[None]:
        """Return a context that protects it from deletion; `CheckpointNotFound` if it was deleted."""
        return self._storage.being_read(name)

    def _open(self, name: str) -> CheckpointSource:
        return open_source(self._storage.path(name))

    # Reading. ----------------------------------------------------------------------------------------------------

    def _take(self, destination: Destination, version: int, name: str) -> tuple[dict[str, Any], str]:
        """Read the version in ``name`` into the destination's memory, all verified; return its meta and attempt."""
        before_any_load()
        with self._held(name):
            source = self._opened(name, version)
            manifest = source.manifest
            meta = {} if manifest is None else _meta_of(manifest, source.directory)
            if isinstance(source, HFSource) and isinstance(destination.into, nn.Module):
                tree = StateTree({_MODEL: destination.into}, rank=0, world=1)
                source = fit(source, tree.holders(), key_map=self._key_map)
                prefix: str | None = _MODEL
            else:
                prefix = None if isinstance(source, HFSource) else self._prefix
            stored = _below(source, prefix)
            attempt = "" if manifest is None else manifest.attempt
            names: Sequence[str] = self._selected(destination, source, stored)
            base = self._base_of(destination, source, names, Sighting(version, attempt))
            if isinstance(source, ChainSource) and base is not None:
                left = bring_forward(destination, source, stored, names, base)
                for key in set(names) - set(left):
                    destination.complete(key)
                names = left
            layouts, rank = LayoutTable(), dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            most = BATCH_BYTES if destination.streaming else SHADOW_BATCH_BYTES
            for batch in _batches(names, source, stored, most):
                self._leaving.check()
                entries = [
                    TensorDestination(stored[key], destination.memory(key), destination.place(key)) for key in batch
                ]
                # Several receivers of a host read the same bytes: they share its page cache.
                fill_tensors(entries, source, layouts, rank, among_ranks=True, verify=True)
                for key in batch:
                    destination.complete(key)
            self._attempts[version] = attempt
            return meta, attempt

    def _base_of(
        self, destination: Destination, source: CheckpointSource, names: Sequence[str], fetched: Sighting
    ) -> int | None:
        """Return the member of the chain that the destination's memory holds, if it holds one."""
        if self._attempts.get(fetched.version, fetched.origin) != fetched.origin:  # another publisher's: no base
            destination.forget()
            self._attempts.clear()
        held = destination.base
        if not isinstance(source, ChainSource) or held is None:
            return None
        for name in names:
            destination.memory(name)
        held = destination.base  # none, if memory was made anew
        return None if held is None else source.number_of(self._attempts.get(held, "none"))

    def _opened(self, name: str, version: int) -> CheckpointSource:
        source, directory = self._open(name), self._storage.path(name)
        if isinstance(source, HoldfastSource | ChainSource | HFSource):
            source.raise_for_listing(verify=True)
        if source.step not in (None, version):
            raise CheckpointCorrupt(
                f"{directory} holds step {source.step}, not {version}: it was copied or renamed after "
                "it was published; move it away, or restore its name",
                path=directory,
            )
        if self._key_map is not None and not isinstance(source, HFSource):
            raise ConfigError(
                f"key_map says how Hugging Face exports name tensors, but {directory} is a checkpoint: leave it out",
                field="key_map",
            )
        return source

    def _selected(self, destination: Destination, source: CheckpointSource, stored: dict[str, str]) -> tuple[str, ...]:
        try:
            return destination.select(_infos(source, stored))
        except StateMismatch as error:
            hint = _hint(source, self._prefix, error)
            raise StateMismatch(
                f"{source.directory}: {error}{hint}",
                missing=error.missing,
                unexpected=error.unexpected,
                mismatched=error.mismatched,
            ) from error


def _below(source: CheckpointSource, prefix: str | None) -> dict[str, str]:
    """Return what is stored below ``prefix``, by its name there."""
    if prefix is None:
        return {name: name for name in source.tensors}
    above = prefix + "."
    return {name[len(above) :]: name for name in source.tensors if name.startswith(above)}


def _infos(source: CheckpointSource, stored: dict[str, str]) -> dict[str, TensorInfo]:
    """Describe the stored tensors by name, with ``same_as`` where checksums are equal."""
    found: dict[str, TensorInfo] = {}
    first: dict[object, str] = {}
    for name, at in stored.items():
        tensor = source.tensors[at]
        key = source.sums[at] if isinstance(source, HoldfastSource | ChainSource) else name
        same = first.setdefault((tensor.shape, tensor.dtype, key), name)
        found[name] = TensorInfo(tensor.shape, tensor.dtype, "" if same == name else same)
    return found


def _hint(source: CheckpointSource, prefix: str | None, error: StateMismatch) -> str:
    if isinstance(source, HFSource):
        return f" {source.hint}" if source.hint else ""
    tops = sorted({name.split(".", 1)[0] for name in source.tensors})
    if prefix is not None:
        return "" if prefix in tops else f" Nothing there is below {prefix!r}; top-level keys: {', '.join(tops[:8])}"
    under = [top for top in tops if error.missing and f"{top}.{error.missing[0]}" in source.tensors]
    return f" The weights are below {under[0]!r} there: give the transport prefix={under[0]!r}" if under else ""


class NewestStored:
    """Looks for the newest version in a directory, or another place that ``at`` knows; implements `Lookout`."""

    def __init__(self, at: DirectoryReceiving) -> None:
        self._at = at
        self._rows: list[tuple[int, str]] = []
        self._newest: tuple[int, str] | None = None

    def look(self) -> Sighting | None:
        self._at.begin_look()
        rows = self._at.rows()
        if rows != self._rows:  # else the order stands, and no manifests are read
            self._newest = self._at.newest_of(rows)
            self._rows = rows
        return None if self._newest is None else Sighting(self._newest[0], self._at.attempt_at(self._newest[1]))

    def wake(self) -> None:
        """Do nothing: a look doesn't wait."""

    def close(self) -> None:
        self._at.close()


def encoded_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a manifest that hold ``meta``; none if it is empty."""
    return {META: base64.b64encode(msgspec.msgpack.encode(meta)).decode("ascii")} if meta else {}


def _meta_of(manifest: Manifest, directory: str) -> dict[str, Any]:
    told = manifest.extra.get(META)
    if told is None:
        return {}
    try:
        return msgspec.msgpack.decode(base64.b64decode(told), type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        message = f"{directory}: {META!r} in the manifest is no msgpack ({error}); publish the version again"
        raise CheckpointCorrupt(message, path=directory) from error


def _batches(names: Sequence[str], source: CheckpointSource, stored: dict[str, str], most: int) -> Iterator[list[str]]:
    """Yield ``names`` in groups of at most ``most`` bytes or one tensor."""
    batch: list[str] = []
    nbytes = 0
    for name in names:
        tensor = source.tensors[stored[name]]
        size = tensor.itemsize
        for length in tensor.shape:
            size *= length
        if batch and nbytes + size > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += size
    yield batch
