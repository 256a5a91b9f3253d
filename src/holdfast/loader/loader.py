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
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import row_blocks
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced, ConfigError, StorageError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.loader.checkpoint import Checkpoint, object_reads, read_objects
from holdfast.loader.read import SPAN_BYTES_MAX, ReadTarget, read_boxes, read_into, read_moved
from holdfast.loader.read_once import ReadOnce, SharingOffer, offer_of
from holdfast.loader.shared_reads import SharedReads
from holdfast.loader.sources.chain import ChainSource
from holdfast.loader.sources.hf_match import fit
from holdfast.loader.sources.holdfast import CheckpointSource, HoldfastSource, members_of, telling_apart
from holdfast.loader.sources.huggingface import HFSource
from holdfast.loader.sources.open import open_source
from holdfast.plan.read import Want, plan_reads
from holdfast.staging.optimizer_hook import before_any_load
from holdfast.state.entries import torch_dtype
from holdfast.state.flatten import ImplausibleList
from holdfast.state.gc_pause import gc_paused
from holdfast.state.load_plan import Loading, Selection, StoredInfo, mismatch_error
from holdfast.state.structure import LayoutTable
from holdfast.storage.files import told_apart
from holdfast.storage.leases import being_read
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from holdfast.boxes import Box
    from holdfast.coordination.group import Group
    from holdfast.coordination.votes import Votes
    from holdfast.keymap.moves import MovedTensor
    from holdfast.plan.read import ReadPlan
    from holdfast.state.load_plan import TensorDestination, Twins
    from holdfast.state.tree import AllAsked, StateTree
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")

LARGE_BYTES: Final = 1 << 20
TRIES: Final = 5
"""How often a load begins anew because what it reads was replaced, or ranks have opened it before and after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Parts of a checkpoint to load, and strictness. `CheckpointConfig` explains the fields."""

    strict: bool = True
    verify: bool = True
    model_only: bool = False
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    key_map: Any = None
    """How a Hugging Face directory has the state's tensors; None for the model's own way."""
    timeout_s: float = 600.0


class _Choice(msgspec.Struct, frozen=True):
    """The coordinator's choice: where, and which attempt wrote what it sees there."""

    directory: str
    attempt: str | None
    sharing: SharingOffer | None


def load_state(
    tree: StateTree,
    choose: Callable[[], str],
    group: Group,
    votes: Votes,
    options: LoadOptions,
    *,
    storage: Storage | None = None,
) -> Checkpoint:
    """Fill ``tree``'s state from the place that ``choose`` names on the coordinator; returns when all ranks have.

    storage: one that the place may be in, with its own options: see `open_source`.

    What another save replaces meanwhile is loaded as it was; where it can't be any more, what has taken its place is.
    Every rank calls it. Raises, the same on every rank: `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`,
    `StorageError`, `DeadlineExceeded`.
    """
    before_any_load()
    for left in reversed(range(TRIES)):
        try:
            with gc_paused(), ExitStack() as leases:
                source, offer = _open_together(choose, group, votes, options, leases, storage, again=left > 0)
                once = None if offer is None else ReadOnce(group, offer, timeout_s=options.timeout_s)
                try:
                    return _load(tree, source, group, votes, options, once)
                finally:
                    if once is not None:
                        once.end()
        except CheckpointReplaced as error:
            if not left:
                raise
            _log.info("loading once more: %s", error)
    raise AssertionError("the loop above returns or raises")


def _load(
    tree: StateTree,
    source: CheckpointSource,
    group: Group,
    votes: Votes,
    options: LoadOptions,
    once: ReadOnce | None,
) -> Checkpoint:
    error: BaseException | None = None
    loading: Loading | None = None
    opened, began = source, time.perf_counter()
    try:
        if once is not None:
            once.share_reports(source)
        # First of all: hooks that gather what ranks share have them all here, whatever comes next on any of them.
        asked = tree.ask_for_load(exclude=_left_out(tree, options))
        source = _fitted(tree, source, options, asked)
        loading = _fit(tree, source, options, asked)
        if options.strict and (loading.missing or loading.mismatched):
            error = _mismatch(tree, source, loading, loading.unexpected)
        elif loading.twins:
            _compare_twins(loading.twins, source, group)
        del asked
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = told_apart(opened.what_became, failed)
    unexpected = votes.raise_together(
        error, unexpected=loading.unexpected if loading is not None else (), timeout_s=options.timeout_s
    )
    if loading is None:
        raise AssertionError("settled without an error and without a plan")
    if unexpected and options.strict:
        raise _mismatch(tree, source, loading, unexpected)
    objects: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    try:
        objects = _fill(loading, source, group, options, once)
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = told_apart(opened.what_became, failed)
        if once is not None:
            once.refuse()
    votes.raise_together(error, timeout_s=options.timeout_s)
    if once is not None:
        figures = once.end()
    try:
        loading.finish(objects)
    except ImplausibleList as failed:
        error = CheckpointCorrupt(f"{source.directory} can't be loaded: {failed}", path=source.directory)
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    votes.raise_together(error, timeout_s=options.timeout_s)
    figures["load_s"] = time.perf_counter() - began
    events.emit("load.finished", step=source.step, rank=group.rank, path=source.directory, **figures)
    return Checkpoint(opened)


def _open_together(
    choose: Callable[[], str],
    group: Group,
    votes: Votes,
    options: LoadOptions,
    leases: ExitStack,
    storage: Storage | None,
    *,
    again: bool,
) -> tuple[CheckpointSource, SharingOffer | None]:
    """The same checkpoint, opened by every rank for itself; kept there until ``leases`` are closed.

    With rank 0's offer to read it together, if it has one.

    again: ranks that see different ones have seen it being replaced; else they see different directories.
    """
    source: CheckpointSource | None = None

    def open_first() -> bytes:
        nonlocal source
        source = open_source(choose(), storage=storage)
        with telling_apart(source):
            # Rank 0's is enough: it has its own before anybody else looks, and gives it up when all have loaded.
            if not is_store(source.directory):
                leases.enter_context(being_read(source.opened or source.directory))
            if isinstance(source, HoldfastSource | ChainSource | HFSource):
                source.raise_for_listing(verify=options.verify)
        attempt = None if source.manifest is None else source.manifest.attempt
        return msgspec.msgpack.encode(_Choice(source.directory, attempt, offer_of(source, group)))

    timeout_s = options.timeout_s
    choice = msgspec.msgpack.decode(votes.decide(open_first, timeout_s=timeout_s), type=_Choice)
    if source is None:
        return _open_chosen(choice, votes, timeout_s, storage, again=again), choice.sharing
    votes.raise_together(timeout_s=timeout_s)
    return source, choice.sharing


def _open_chosen(
    choice: _Choice, votes: Votes, timeout_s: float, storage: Storage | None, *, again: bool
) -> CheckpointSource:
    error: BaseException | None = None
    source: CheckpointSource | None = None
    try:
        source = open_source(choice.directory, storage=storage)
        seen = None if source.manifest is None else source.manifest.attempt
        if seen != choice.attempt:
            path = os.path.join(choice.directory, MANIFEST_NAME)
            error = _unshared(path, f"is of attempt {seen} here, but rank 0 sees attempt {choice.attempt}")
            if again:
                error = CheckpointReplaced(str(error), path=path)
    except CheckpointNotFound as failed:
        error = _unshared(choice.directory, f"isn't there, but rank 0 reads it ({failed})")
    except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
        error = failed
    votes.raise_together(error, timeout_s=timeout_s)
    if source is None:
        raise AssertionError("settled without an error and without a source")
    return source


def _unshared(path: str, seen: str) -> StorageError:
    message = f"{path} {seen}: load from a path on a file system that all ranks share"
    return StorageError(message, path=path, errno=None)


def _fitted(tree: StateTree, source: CheckpointSource, options: LoadOptions, asked: AllAsked) -> CheckpointSource:
    """A Hugging Face directory under the names of the state; any other source as it is."""
    if isinstance(source, HFSource):
        return fit(source, tree.holders(exclude=_left_out(tree, options), asked=asked), key_map=options.key_map)
    if options.key_map is not None:
        raise ConfigError(
            f"key_map says how a Hugging Face directory names and shapes tensors; {source.directory} is a checkpoint, "
            "which uses the state's own names: don't pass key_map",
            field="key_map",
        )
    return source


def _fit(tree: StateTree, source: CheckpointSource, options: LoadOptions, asked: AllAsked) -> Loading:
    stored = {name: StoredInfo(tensor.shape, tensor.dtype) for name, tensor in source.tensors.items()}
    return tree.destinations(
        stored,
        source.objects,
        source.paths,
        stored_world=source.world,
        exclude=_left_out(tree, options),
        model_only=options.model_only,
        fitted=isinstance(source, HFSource),
        optional=source.optional if isinstance(source, HFSource) else (),
        quantized=source.quantized if isinstance(source, HFSource) else None,
        strict=options.strict,
        asked=asked,
        selection=Selection(options.include, options.exclude),
        stored_keys=whole.mappings if isinstance(whole := members_of(source)[0], HoldfastSource) else None,
    )


def _left_out(tree: StateTree, options: LoadOptions) -> list[str]:
    """Return the top-level keys of which nothing is loaded."""
    selection = Selection(options.include, options.exclude)
    return [key for key in tree.keys if selection.takes_none_of(key)]


def _mismatch(
    tree: StateTree, source: CheckpointSource, loading: Loading, unexpected: Collection[str]
) -> BaseException:
    hints = list(loading.hints)
    if isinstance(source, HFSource):
        models = {key.split(".", 1)[0] for key in tree.holder_keys()}
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


def _compare_twins(twins: Sequence[Twins], source: CheckpointSource, group: Group) -> None:
    """Raise `StateMismatch` unless twins have the same values, as far as this rank holds them, in the state's dtype."""
    layouts = LayoutTable(group.ranks)
    for twin in twins:
        if _are_same(twin, source):
            continue
        for box, view in layouts.views_of(twin.tensor, twin.name, group.rank):
            itemsize = max(view.itemsize, source.tensors[twin.name].itemsize)
            for part in row_blocks(box, SPAN_BYTES_MAX // itemsize):
                values = (_read_part(source, name, part) for name in (twin.name, twin.other))
                one, other = (value.to(view.dtype).contiguous() for value in values)
                if not torch.equal(compat.as_bytes(one), compat.as_bytes(other)):
                    raise twin.differ(source.directory)


def _read_part(source: CheckpointSource, name: str, box: Box) -> torch.Tensor:
    if not isinstance(source, HFSource) or name not in source.moved:
        return read_boxes(source, [(name, box)])[0]
    value = torch.zeros(box.sizes, dtype=torch_dtype(source.tensors[name].dtype))
    with source.open_files(verify=True) as files:
        read_moved(files, [(source.moved[name], box, value)])
    return value


def _are_same(twin: Twins, source: CheckpointSource) -> bool:
    """Return True if twins are known to be equal without reading: by checksums, or because they share one location."""
    one, other = source.tensors[twin.name], source.tensors[twin.other]
    if one.dtype != other.dtype:
        return False
    if isinstance(source, HoldfastSource | ChainSource):
        return source.sums[twin.name] == source.sums[twin.other]
    moved = source.moved if isinstance(source, HFSource) else {}
    return one.shards == other.shards and twin.name not in moved and twin.other not in moved


def _fill(
    loading: Loading, source: CheckpointSource, group: Group, options: LoadOptions, once: ReadOnce | None
) -> dict[str, Any]:
    """Read every wanted box of every destination tensor into its place; returns the wanted objects."""
    layouts = LayoutTable(group.ranks)
    among_ranks = group.world > 1
    if once is None:
        fill_tensors(loading.tensors, source, layouts, group.rank, among_ranks=among_ranks, verify=options.verify)
        return read_objects(source, loading.objects, verify=options.verify)
    wanted = _Wanted.of(loading.tensors, source, layouts, group.rank)
    with source.open_files(verify=options.verify, direct=not wanted.is_shared) as files:
        reads = SharedReads(files, source.files)
        read_into(reads, wanted.plan, wanted.destinations, source)
        read_moved(reads, wanted.moved)
        objects = object_reads(source, loading.objects, reads)
        reads.read(objects.values())
        once.read(reads)
    events.count("bytes_read", files.bytes_read)
    return {name: job.decoded() for name, job in objects.items()}


def fill_tensors(
    entries: Iterable[TensorDestination],
    source: CheckpointSource,
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
    wanted = _Wanted.of(entries, source, layouts, rank)
    # What every rank wants is read from the disk once, and then from the page cache of the host.
    with source.open_files(verify=verify, direct=not (among_ranks and wanted.is_shared)) as files:
        read_into(files, wanted.plan, wanted.destinations, source)
        read_moved(files, wanted.moved)
    events.count("bytes_read", files.bytes_read)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a rank reads: by a plan, and what a key map puts together."""

    plan: ReadPlan
    destinations: list[ReadTarget]
    moved: list[tuple[MovedTensor, Box, torch.Tensor]]
    is_shared: bool
    """True if it has a large tensor as a whole, as other ranks are likely to have."""

    @classmethod
    def of(
        cls, entries: Iterable[TensorDestination], source: CheckpointSource, layouts: LayoutTable, rank: int
    ) -> _Wanted:
        moved = source.moved if isinstance(source, HFSource) else {}
        wants: list[Want] = []
        destinations: list[ReadTarget] = []
        gathered: list[tuple[MovedTensor, Box, torch.Tensor]] = []
        for entry in entries:
            for box, view in layouts.views_of(entry.tensor, entry.name, rank, entry.place):
                if entry.name in moved:
                    gathered.append((moved[entry.name], box, view))
                else:
                    wants.append(Want(entry.name, box, len(destinations), box))
                    destinations.append(ReadTarget(entry.name, view))
        shared = any(
            want.box.volume * source.tensors[want.name].itemsize > LARGE_BYTES
            for want in wants
            if want.box.sizes == source.tensors[want.name].shape
        )
        return cls(plan_reads(wants, source.tensors), destinations, gathered, shared)


def is_corrupt(error: BaseException) -> bool:
    """Return True if falling back to another checkpoint makes sense: the content is damaged, or the device reports an
    error.

    Any other refusal by the system (permissions, limits, a missing mount) says nothing about the checkpoint: falling
    back would lead to good checkpoints being overwritten.
    """
    return isinstance(error, CheckpointCorrupt) or (isinstance(error, StorageError) and error.errno == errno.EIO)


prepare_decoding(_Choice)
