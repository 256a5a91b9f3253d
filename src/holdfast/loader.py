"""Loading: one readable pipeline, from a path to a state filled in place.

    coordinator picks the checkpoint -> every rank opens it -> what goes where -> all ranks agree that it fits
      -> plan reads -> read and verify -> all ranks agree that it is right -> set what is not a tensor

Guarantees: a checkpoint that doesn't fit is an error on every rank before anything has been changed. Any old world
size and placement loads into any new one; each rank reads what it needs. If any rank finds corruption, all know; what
a failed load leaves in the destination is undefined until one succeeds.
Runs on the calling thread; talks over the group's Store only, every wait with a deadline.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import events
from holdfast.checkpoint import Checkpoint, read_objects
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, StorageError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.gc_pause import gc_paused
from holdfast.hf_fitting import fit
from holdfast.hf_source import HFSource
from holdfast.opening import open_source
from holdfast.optimizer_hook import before_any_load
from holdfast.plan.read import Want, plan_reads
from holdfast.reading import Destination, read_into, read_moved
from holdfast.source import HoldfastSource, Source
from holdfast.state.flatten import ImplausibleList
from holdfast.state.loading import Loading, StoredInfo, mismatch_error
from holdfast.state.structure import LayoutTable
from holdfast.storage.reader_lease import being_read

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import torch

    from holdfast.agreement import Votes
    from holdfast.boxes import Box
    from holdfast.export.refill import MovedTensor
    from holdfast.group import Group
    from holdfast.state.loading import TensorDestination
    from holdfast.state.tree import StateTree

_log = logging.getLogger("holdfast")

LARGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What of a checkpoint to load, and how strictly. See `CheckpointConfig` for the words."""

    strict: bool = True
    verify: bool = True
    model_only: bool = False
    exclude: Collection[str] = ()
    key_map: Any = None
    """How a Hugging Face directory has the state's tensors; None for the model's own way."""
    timeout_s: float = 600.0


class _Choice(msgspec.Struct, frozen=True):
    """The coordinator's choice: where, and which attempt wrote what it sees there."""

    directory: str
    attempt: str | None


def load_state(
    tree: StateTree, choose: Callable[[], str], group: Group, votes: Votes, options: LoadOptions
) -> Checkpoint:
    """Fill ``tree``'s state from the directory that ``choose`` names on the coordinator; returns when all ranks have.

    Every rank calls it. Raises, the same on every rank: `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`,
    `StorageError`, `DeadlineExceeded`.
    """
    before_any_load()
    with gc_paused(), ExitStack() as leases:
        source = _open_together(choose, group, votes, options, leases)
        return _load(tree, source, group, votes, options)


def _load(tree: StateTree, source: Source, group: Group, votes: Votes, options: LoadOptions) -> Checkpoint:
    error: BaseException | None = None
    loading: Loading | None = None
    opened = source
    try:
        source = _fitted(tree, source, options)
        loading = _fit(tree, source, options)
        if options.strict and (loading.missing or loading.mismatched):
            error = _mismatch(tree, source, loading, loading.unexpected)
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    unexpected = votes.settle(
        error, unexpected=loading.unexpected if loading is not None else (), timeout_s=options.timeout_s
    )
    if loading is None:
        raise AssertionError("settled without an error and without a plan")
    if unexpected and options.strict:
        raise _mismatch(tree, source, loading, unexpected)
    objects = {}
    try:
        _fill(loading, source, group, options)
        objects = read_objects(source, loading.objects, verify=options.verify)
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    votes.settle(error, timeout_s=options.timeout_s)
    try:
        loading.finish(objects)
    except ImplausibleList as failed:
        error = CheckpointCorrupt(f"{source.directory} can't be loaded: {failed}", path=source.directory)
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    votes.settle(error, timeout_s=options.timeout_s)
    events.emit("load.finished", step=source.step, rank=group.rank, path=source.directory)
    return Checkpoint(opened)


def _open_together(
    choose: Callable[[], str], group: Group, votes: Votes, options: LoadOptions, leases: ExitStack
) -> Source:
    """The same checkpoint, opened by every rank through its own file system; kept there until ``leases`` are closed."""
    timeout_s = options.timeout_s
    if group.rank != 0:
        choice = msgspec.msgpack.decode(votes.share(None, None, timeout_s=timeout_s), type=_Choice)
        return _open_chosen(choice, votes, timeout_s)
    try:
        source = open_source(choose())
        # Rank 0's is enough: it has its own before anybody else looks, and gives it up when all have loaded.
        leases.enter_context(being_read(source.directory))
        if isinstance(source, HoldfastSource | HFSource):
            source.raise_for_listing(verify=options.verify)
    except Exception as error:
        votes.share(None, error, timeout_s=timeout_s)
        raise
    manifest = source.manifest
    choice = _Choice(source.directory, None if manifest is None else manifest.attempt)
    votes.share(msgspec.msgpack.encode(choice), None, timeout_s=timeout_s)
    votes.settle(timeout_s=timeout_s)
    return source


def _open_chosen(choice: _Choice, votes: Votes, timeout_s: float) -> Source:
    error: BaseException | None = None
    source: Source | None = None
    try:
        source = open_source(choice.directory)
        seen = None if source.manifest is None else source.manifest.attempt
        if seen != choice.attempt:
            path = os.path.join(choice.directory, MANIFEST_NAME)
            error = _unshared(path, f"is of attempt {seen} here, but rank 0 sees attempt {choice.attempt}")
    except CheckpointNotFound as failed:
        error = _unshared(choice.directory, f"isn't there, but rank 0 reads it ({failed})")
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    votes.settle(error, timeout_s=timeout_s)
    if source is None:
        raise AssertionError("settled without an error and without a source")
    return source


def _unshared(path: str, seen: str) -> StorageError:
    message = f"{path} {seen}: load from a path on a file system that all ranks share"
    return StorageError(message, path=path, errno=None)


def _fitted(tree: StateTree, source: Source, options: LoadOptions) -> Source:
    """A Hugging Face directory under the names of the state; any other source as it is."""
    if isinstance(source, HFSource):
        return fit(source, tree.holders(exclude=options.exclude), key_map=options.key_map)
    if options.key_map is not None:
        raise ConfigError(
            f"key_map says how a Hugging Face directory names and shapes tensors; {source.directory} is a checkpoint, "
            "which has the state's own names: leave it out",
            field="key_map",
        )
    return source


def _fit(tree: StateTree, source: Source, options: LoadOptions) -> Loading:
    stored = {name: StoredInfo(tensor.shape, tensor.dtype) for name, tensor in source.tensors.items()}
    return tree.destinations(
        stored,
        source.objects,
        source.paths,
        stored_world=source.world,
        exclude=options.exclude,
        model_only=options.model_only,
        fitted=isinstance(source, HFSource),
        optional=source.optional if isinstance(source, HFSource) else (),
    )


def _mismatch(tree: StateTree, source: Source, loading: Loading, unexpected: Collection[str]) -> BaseException:
    hints = []
    if isinstance(source, HFSource):
        models = {holder.key.split(".", 1)[0] for holder in tree.holders()}
        others = dict.fromkeys(top for name in loading.missing if (top := name.split(".", 1)[0]) not in models)
        if others:
            hints.append(f"A Hugging Face directory holds a model and nothing else; the state has {', '.join(others)}.")
        hints.append(source.hint)
    return mismatch_error(
        source.directory,
        missing=loading.missing,
        unexpected=tuple(unexpected),
        mismatched=loading.mismatched,
        details=loading.details,
        hint=" ".join(filter(None, hints)),
    )


def _fill(loading: Loading, source: Source, group: Group, options: LoadOptions) -> None:
    """Read every wanted box of every destination tensor into its place."""
    layouts = LayoutTable(group.ranks)
    fill_tensors(loading.tensors, source, layouts, group.rank, among_ranks=group.world > 1, verify=options.verify)


def fill_tensors(
    entries: Iterable[TensorDestination],
    source: Source,
    layouts: LayoutTable,
    rank: int,
    *,
    among_ranks: bool,
    verify: bool,
) -> None:
    """Read from ``source`` what this process holds of each of ``entries``, into its place; returns when all is there.

    rank: this process's, as ``layouts`` numbers them. among_ranks: other processes read the same source now. Raises
    `CheckpointCorrupt`, `StorageError`; what is in the destination then is undefined.
    """
    moved = source.moved if isinstance(source, HFSource) else {}
    wants: list[Want] = []
    destinations: list[Destination] = []
    gathered: list[tuple[MovedTensor, Box, torch.Tensor]] = []
    for entry in entries:
        for box, view in layouts.views_of(entry.tensor, entry.name, rank):
            if entry.name in moved:
                gathered.append((moved[entry.name], box, view))
            else:
                wants.append(Want(entry.name, box, len(destinations), box))
                destinations.append(Destination(entry.name, view))
    plan = plan_reads(wants, source.tensors)
    # What every rank wants is read from the disk once, and then from the page cache of the host.
    shared = among_ranks and any(
        want.box.volume * source.tensors[want.name].itemsize > LARGE_BYTES
        for want in wants
        if want.box.sizes == source.tensors[want.name].shape
    )
    with source.open_files(verify=verify, direct=not shared) as files:
        read_into(files, plan, destinations, source)
        read_moved(files, gathered)
    events.count("bytes_read", files.bytes_read)


def is_corrupt(error: BaseException) -> bool:
    """Whether another checkpoint may load where this one didn't: what it holds is damaged, or its device says so.

    Anything else that the system refuses (permissions, limits, a mount that is gone) says nothing of the checkpoint: to
    go back for it would have good ones written over.
    """
    return isinstance(error, CheckpointCorrupt) or (isinstance(error, StorageError) and error.errno == errno.EIO)
