"""`Publisher`, the publisher's public class: checks arguments and keeps the last version."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import board_lost_told
from holdfast.engine.at_exit import close_later, end_at_exit
from holdfast.errors import ConfigError
from holdfast.sync.protocol import Published, PublisherOptions
from holdfast.sync.weights.quantized import Quantizer
from holdfast.sync.weights.tiles import checked_tiles
from holdfast.sync.weights.transform import MadeWeights, WeightTransform
from holdfast.validation import STEP_MAX, checked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from holdfast.manager import CheckpointManager
    from holdfast.saver.capture import SharedCaptures
    from holdfast.sync.protocol import Transport
    from holdfast.sync.weights.pieces import Weights

__all__ = ["Published", "Publisher"]

_BYTES_MAX: Final = (1 << 63) - 1
"""Messages between the sides store it in 64 bits."""
_START_S: Final = 120.0
"""Approximate timeout for all ranks to make a publisher."""
META_BYTES_MAX: Final = 64 << 10
"""Size of a version's ``meta``, encoded: it travels with messages, and lies in manifests."""


class Publisher:
    """Sends weights from the trainer to receivers, one complete version at a time.

    Made on every rank that has a part of the weights, with the same arguments; a context manager. For one thread at a
    time, and not for forked children.

    Args:
        transport: how versions are transferred.
        bucket_bytes: tensors are sent in buckets of at most this many bytes (1 and more), two of which are in flight at
            a time. In host memory buckets are smaller if larger ones gain nothing.
        bypass_cpu: True: `publish` sends from the tensors themselves, stages nothing in host memory, and returns when
            receivers have the version. False: it copies them into host memory and returns; receivers fetch them at any
            time. Where versions lie in blocks of memory it is always the latter; directories keep versions anyway.
        keep_versions: number of versions kept in host memory (1 and more), besides pinned ones.
        atomic_fleet: refused (`ConfigError`): receivers are independent; let each fetch, and commit when all have.
        receivers: how many must have joined before the first version is sent directly (1 and more).
        delta: ``"sparse"`` (or True): publish what has changed by element, without loss; ``"steps"``: the same, with
            changes as steps between the numbers that a dtype has, which zstd (``holdfast[zstd]``, on both sides)
            makes half as large. In a directory or a bucket such a version is small, needs those before it back to
            the last whole one, and takes one more copy of this rank's weights in host memory. Over
            `ProcessGroupTransport` in host memory it is encoded beside training, for receivers that hold an earlier
            version. Of no effect with other transports, which bring whole versions.
        full_every: deprecated for ``anchor_every``.
        anchor_every: with ``delta``, one of this many versions in a directory is whole (1 and more); sooner if tensors
            or their placements change.
        delta_bytes: with ``delta``, a version in a directory is whole if it and the deltas before it, of all ranks,
            took more bytes together; over a network a rank keeps so many bytes of deltas. None: half of a version.
        max_blocks: blocks of memory at most, each with one version of this rank's bytes, besides pinned ones (more than
            ``keep_versions``; None: two more). A receiver that holds an older version longer than they suffice gets
            `VersionRevoked`. Where versions lie in blocks of memory only.
        rewind: versions may begin below those of an earlier publisher at the same rendezvous; receivers then go back.
            Where versions lie in blocks of memory only.
        manager: the `CheckpointManager` that saves these weights, on the same ranks (``bypass_cpu=False`` only). A
            version published between a save and the next update is not copied off the device again: it keeps the whole
            memory of the save's capture until it is evicted. Publish on the training thread.
        include, exclude: publish only, or leave out, what is at or below these dotted prefixes of published names, or
            matches these patterns (``"*.lora_*"``); scales go with their values. A word that matches nothing is a
            `ConfigError`.
        key_map: what is published instead of the trainer's names and layout, as for `HFExport`; None changes nothing,
            ``holdfast.export.HFDefault()`` is what `save_pretrained` of the model would write.
        dtype: floating-point tensors are published in it, as for `HFExport`: ``torch.bfloat16``, ``"float8_e4m3fn"``
            (with block scales as tensors of their own), …; None leaves each as it is.
        fp32_keys: regular expressions; published names that one matches are float32, whatever ``dtype``.
        column_tiles: lay out matrices as so many tiles of columns (of the last dimension), which receivers of columns
            then bring and hold alone: the number of parts that they take, as ``{"*.o_proj.weight": 8}`` by names or
            patterns, of which the first that matches counts, or one number for all. Receivers of rows bring somewhat
            more of what is cut. Where versions lie in blocks of memory only; small tensors stay whole.
    """

    def __init__(
        self,
        transport: Transport,
        bucket_bytes: int = 256 * 2**20,
        bypass_cpu: bool = True,  # noqa: FBT001, FBT002
        keep_versions: int = 2,
        atomic_fleet: bool = False,  # noqa: FBT001, FBT002
        receivers: int = 1,
        delta: Literal["sparse", "steps"] | bool | None = None,  # noqa: FBT001
        full_every: int | None = None,
        manager: CheckpointManager | None = None,
        *,
        anchor_every: int = 10,
        delta_bytes: int | None = None,
        max_blocks: int | None = None,
        rewind: bool = False,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        key_map: Any = None,
        dtype: torch.dtype | str | None = None,
        fp32_keys: Sequence[str] = (),
        column_tiles: int | Mapping[str, int] = 1,
    ) -> None:
        self._transform = WeightTransform(
            include=include, exclude=exclude, key_map=key_map, dtype=dtype, fp32_keys=fp32_keys
        )
        if checked_flag("atomic_fleet", atomic_fleet):
            raise ConfigError(
                "atomic_fleet=True: receivers are independent of one another, so that none can hold up the rest; let "
                "each fetch the version (`Receiver.fetch`), and commit (`Receiver.commit`) when all have",
                field="atomic_fleet",
            )
        options = PublisherOptions(
            bucket_bytes=_positive("bucket_bytes", bucket_bytes, most=_BYTES_MAX),
            bypass_cpu=checked_flag("bypass_cpu", bypass_cpu),
            keep_versions=_positive("keep_versions", keep_versions),
            receivers=_positive("receivers", receivers),
            delta=_checked_delta(delta),
            anchor_every=_positive("anchor_every", _anchor_every(anchor_every, full_every)),
            delta_bytes=None if delta_bytes is None else _positive("delta_bytes", delta_bytes, most=_BYTES_MAX),
            max_blocks=None if max_blocks is None else _positive("max_blocks", max_blocks),
            rewind=checked_flag("rewind", rewind),
            captures=None if manager is None else _captures_of(manager, bypass_cpu=bypass_cpu),
            column_tiles=checked_tiles(column_tiles),
        )
        with board_lost_told("making a publisher", _START_S):
            self._half = checked_transport(transport).publishing(options)
            try:
                group = getattr(transport, "process_group", None)
                self._quantizer = Quantizer(group) if self._transform.quantizes else None
            except BaseException:
                self._half.close()
                raise
        self._newest: int | None = None
        self._closed = False
        self._owner = os.getpid()
        self._stay_at_exit = end_at_exit(self, lambda publisher, _: publisher.close())

    def __del__(self) -> None:
        """Close a forgotten publisher on another thread, since a finalizer may run at any point of the program."""
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            close_later("a Publisher", self._half.close)

    def publish(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | torch.nn.Module,
        version: int,
        timeout: float = 600.0,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> Published:
        """Publish ``weights`` as ``version``. All ranks call it alike.

        With ``bypass_cpu`` returns when every receiver that takes part has fetched the version, verified, or was given
        up; until then the tensors must not change. It doesn't wait for their commits. Otherwise returns when the
        tensors are copied.

        Args:
            weights: tensors and DTensors by name, or `holdfast.Shard` for parts without DTensor; or a module, whose
                parameters and saved buffers are meant. Equal plain names on several ranks are replicas of one value;
                names that only some ranks have are sent by those.
            version: an integer >= 0, greater than that of any earlier publish.
            timeout: seconds, for all of it.
            meta: small plain values that receivers get with the version, such as the training step: None, bool, int,
                float, str, bytes, and lists and dictionaries of these, with strings as keys; at most 64 KiB. Those of
                rank 0 count. Tuples arrive as lists.

        Raises:
            ConfigError: an invalid argument; a version not greater than the last one, or than what a receiver has from
                an earlier publisher; a row longer than a bucket.
            StateMismatch: a receiver has other tensors, or ranks disagree on one.
            RootLocked: another publisher has taken the place of this one at its rendezvous.
            CheckpointCorrupt: a receiver got other bytes than were sent. PeerLost: a publisher rank ended.
            DeadlineExceeded: no receiver, or not all ranks, in time.
            StorageError: no memory, descriptor, or place in the rendezvous. HoldfastError: nobody is served any more.
        """
        self._check_open()
        deadline = Deadline.after(checked_seconds("timeout", timeout))
        version = checked_version(version)
        told: dict[str, Any] = {}
        refusal: ConfigError | None = None
        try:
            told = checked_meta(meta)
        except ConfigError as error:
            refusal = error  # raised where the other ranks learn of it

        def made() -> Weights | MadeWeights:
            if refusal is not None:
                raise refusal
            return self._made(weights, version)

        with board_lost_told(f"publishing version {version}", timeout):
            published = self._half.publish(lambda: self._ready(made, version, deadline), version, deadline, told)
        self._newest = version
        return published

    def _ready(self, make: Callable[[], Weights | MadeWeights], version: int, deadline: Deadline) -> Weights:
        """Return what travels. Raises what is wrong with it, here or on a rank that it is quantized with."""
        quantizer = self._quantizer
        try:
            made = make()
        except BaseException as error:
            if quantizer is not None:
                quantizer.fail(error, version)
            raise
        if not isinstance(made, MadeWeights):
            return made
        assert quantizer is not None, "there is one if anything is to be quantized"
        return quantizer.quantized(made, version, deadline)

    def _made(self, weights: Any, version: int) -> Weights | MadeWeights:
        if self._newest is not None and version <= self._newest:
            raise ConfigError(
                f"version {version} isn't greater than {self._newest}, which was published before; versions only go up",
                field="version",
            )
        made = self._transform.of(weights)
        if self._quantizer is not None and not isinstance(made, MadeWeights):
            raise ConfigError("weights is empty on this rank, but fp8 needs all names on all ranks", field="weights")
        return made

    def pin(self, version: int) -> None:
        """Keep ``version`` until it is unpinned. Raises `CheckpointNotFound` if it isn't kept."""
        self._check_open()
        self._half.pin(checked_version(version))

    def unpin(self, version: int) -> None:
        """Make ``version`` evictable again, if it was pinned."""
        self._check_open()
        self._half.unpin(checked_version(version))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that receivers can request, ascending."""
        return tuple(self._half.versions)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this publisher is closed; make a new one", field="publisher")
        if os.getpid() != self._owner:
            raise of_parent("publisher")

    def close(self) -> None:
        """End all connections; waiting receivers are told. Idempotent; does nothing in a forked child."""
        if os.getpid() == self._owner and not self._closed:
            self._closed = True
            self._half.close()
            self._transform.forget()
            if self._quantizer is not None:
                self._quantizer.close()
            self._stay_at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def of_parent(what: str) -> ConfigError:
    """Return the error for the use of a publisher or a receiver in a forked child: it has none of the threads."""
    return ConfigError(f"this {what} belongs to the parent of this forked process; make a new one here", field=what)


def checked_version(version: object) -> int:
    """Return ``version``; raise `ConfigError` unless it is an integer from 0 to 2**63 - 1."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= STEP_MAX:
        raise ConfigError(f"version must be an integer from 0 to 2**63 - 1, not {version!r}", field="version")
    return version


def checked_meta(meta: object) -> dict[str, Any]:
    """Return ``meta`` as receivers get it; raise `ConfigError` for what isn't small or plain, naming it."""
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise ConfigError(f"meta must be a mapping of names to plain values, not {meta!r:.200}", field="meta")
    try:
        plain: dict[str, Any] = _plain(meta, "meta")
        nbytes = len(msgspec.msgpack.encode(plain))
    except (OverflowError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"meta can't be encoded: {error}", field="meta") from error
    if nbytes > META_BYTES_MAX:
        raise ConfigError(
            f"meta takes {nbytes:,} bytes, at most {META_BYTES_MAX:,} travel with a version: publish tensors among the "
            "weights, and keep the rest elsewhere",
            field="meta",
        )
    return plain


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ConfigError(f"{where} has the key {key!r:.80}; keys must be strings", field="meta")
        return {key: _plain(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{where}[{place}]") for place, one in enumerate(value)]
    raise ConfigError(
        f"{where} is a {type(value).__name__}; expected None, bool, int, float, str, bytes, or lists and dictionaries "
        "of these (`.item()` makes a number of a tensor or an array element)",
        field="meta",
    )


def checked_transport(transport: Any) -> Transport:
    """Return ``transport``; raise `ConfigError` unless it is one."""
    if isinstance(transport, type) or not hasattr(transport, "publishing") or not hasattr(transport, "receiving"):
        raise ConfigError(
            f"transport is {transport!r}; expected one of holdfast.sync, such as SharedMemoryTransport(rendezvous)",
            field="transport",
        )
    found: Transport = transport
    return found


def _captures_of(manager: Any, *, bypass_cpu: bool) -> SharedCaptures:
    if bypass_cpu:
        raise ConfigError(
            "manager: nothing is staged in host memory with bypass_cpu=True, so there is no capture to share; make the "
            "publisher with bypass_cpu=False, or without the manager",
            field="manager",
        )
    found = getattr(manager, "captures", None)
    if found is None:
        raise ConfigError(
            f"manager must be a CheckpointManager that saves (load_only=False), not {manager!r:.200}", field="manager"
        )
    captures: SharedCaptures = found
    return captures


def _positive(name: str, value: object, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        bounds = ">= 1" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name} must be an integer {bounds}, not {value!r}", field=name)
    return value


def _checked_delta(delta: object) -> str | None:
    if delta is None or delta is False:
        return None
    if delta is True:
        return "sparse"
    if delta in ("sparse", "steps"):
        return str(delta)
    raise ConfigError(f"delta must be 'sparse', 'steps' or None, not {delta!r:.80}", field="delta")


def _anchor_every(anchor_every: int, full_every: int | None) -> int:
    if full_every is None:
        return anchor_every
    warnings.warn("full_every is now called anchor_every", FutureWarning, stacklevel=3)
    return full_every


def checked_flag(name: str, value: object) -> bool:
    """Return ``value``; raise `ConfigError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}", field=name)
    return value
