"""Versions as deltas by element, packed into tensors that any transport carries: for frameworks that load patches.

    DeltaSender     on each trainer rank: keeps its share of the last version, and encodes the next against it
    read            on a worker: the records of a packed version, whose base is the version that the worker has

A version is named by a digest of all its tensors' contents. A packed delta names the digest of its base and of its
result, and every record in it the digests of its own tensor before and after (``format.sparse``).

Guarantees: `read` raises unless every record fits the base that the worker says it has, and together they make the
result: so a delta is never applied to another base. All ranks agree whether a version is whole or a delta. A version is
whole if a delta would not be much smaller, or can't say it.
Assumes: every trainer rank gets all tensors, in the same order.
Does not: apply anything.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from holdfast import _torch_compat as compat
from holdfast.errors import CheckpointCorrupt, ConfigError, StateMismatch
from holdfast.format import sparse
from holdfast.state.entries import known_dtype, torch_dtype
from holdfast.sync.adapters.host_share import HostShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

PREFIX: Final = "holdfast-delta/"
"""Of the names of packed records."""
_PAYS: Final = 0.6
"""A delta of more than this share of the whole is not worth it."""
_POSITIONS: Final = 1 << 31
"""Elements of a tensor whose positions are int32, as the frameworks take them."""


class PreparedVersion(NamedTuple):
    """A version that is ready to be published. ``base``: digest of what it is a delta of, None: it is whole."""

    payload: Mapping[str, torch.Tensor]
    share: Mapping[str, torch.Tensor]
    base: str | None
    digest: str
    dense_bytes: int
    sent_bytes: int
    hashes: Mapping[str, npt.NDArray[np.uint64]]

    @property
    def meta(self) -> dict[str, Any]:
        """What travels with it."""
        return {"holdfast": {"base": self.base, "digest": self.digest}}

    @property
    def whole(self) -> PreparedVersion:
        """The same version, whole."""
        return self._replace(payload=self.share, base=None, sent_bytes=self.dense_bytes)


class Patch(NamedTuple):
    """What changed in one tensor: flat positions and new values; the record, to apply elsewhere."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    record: sparse.Record

    def positions_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int32 positions, ascending, and values of the tensor's dtype."""
        head = self.record.head
        found = [self.record.block(number) for number in range(head.blocks)]
        places = [part + number * head.block_units for number, (part, _) in enumerate(found)]
        values = np.concatenate([part for _, part in found]) if found else np.empty(0, f"<u{head.unit_bytes}")
        positions = np.concatenate(places) if places else np.empty(0, np.int64)
        return (
            torch.from_numpy(positions.astype(np.int32)),
            torch.from_numpy(values.view(np.uint8).copy()).view(self.dtype),
        )


class DeltaSender:
    """See the module. ``dtype``: floating point weights are cast to it first; None: to nothing."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._spare, self._last = HostShare(dtype), HostShare(dtype)
        self._base: Mapping[str, torch.Tensor] = {}
        self._hashes: Mapping[str, npt.NDArray[np.uint64]] = {}
        self.digest: str | None = None
        """Of the version that was sent last; None: the next is whole."""

    def prepare(self, weights: Iterable[tuple[str, torch.Tensor]], base: str | None) -> PreparedVersion:
        """Copy this rank's share, and encode it against the last version if that is ``base``. All ranks call it."""
        share, dense_bytes = self._spare.copy(weights)
        records = self._encode(share) if base is not None and base == self.digest else None
        hashes = (
            {name: sparse.block_hashes(_bytes(tensor), known_dtype(tensor, name)) for name, tensor in share.items()}
            if records is None
            else {name: encoded.hashes for name, encoded in records.items()}
        )
        mine = {name: sparse.digest_of_hashes(found) for name, found in hashes.items()}
        encoded_bytes = None if records is None else sum(len(encoded.record) for encoded in records.values())
        told = _gathered((mine, encoded_bytes, base))
        digest = _digest({name: one for digests, _, _ in told for name, one in digests.items()})
        sent_bytes = sum(nbytes or 0 for _, nbytes, _ in told)
        can = all(nbytes is not None and one == base for _, nbytes, one in told)
        if records is None or not can or sent_bytes > _PAYS * dense_bytes:
            return PreparedVersion(share, share, None, digest, dense_bytes, dense_bytes, hashes)
        payload = {PREFIX + name: _packed(name, share[name], encoded.record) for name, encoded in records.items()}
        return PreparedVersion(payload, share, base, digest, dense_bytes, sent_bytes, hashes)

    def sent(self, outgoing: PreparedVersion) -> None:
        """Note that all receivers have ``outgoing``: the next delta starts from it."""
        self._spare, self._last = self._last, self._spare
        self._base, self._hashes, self.digest = outgoing.share, outgoing.hashes, outgoing.digest

    def forget(self) -> None:
        """Send the next version whole."""
        self.digest = None

    def _encode(self, share: Mapping[str, torch.Tensor]) -> dict[str, sparse.Encoded] | None:
        """Return records, or None if deltas can't say it."""
        records = {}
        for name, tensor in share.items():
            before = self._base.get(name)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                return None
            dtype = known_dtype(tensor, name)
            encoded = sparse.encode(_bytes(before), _bytes(tensor), dtype, base_hashes=self._hashes[name])
            changed = sparse.read_head(encoded.record).changed
            if tensor.numel() >= _POSITIONS or (changed and not tensor.is_floating_point()):
                return None
            records[name] = encoded
        return records if len(records) == len(self._base) else None


def digest_in(meta: Mapping[str, Any]) -> str | None:
    """Return the digest of a version whose sender gives one."""
    told = meta.get("holdfast")
    return told.get("digest") if isinstance(told, dict) else None


def is_delta(names: Iterable[str]) -> bool:
    """Return True if tensors of these names are a packed delta."""
    return any(name.startswith(PREFIX) for name in names)


def read(packed: Mapping[str, torch.Tensor], meta: Mapping[str, Any], base: str | None) -> dict[str, Patch]:
    """Return the patches of a packed delta for a worker that holds exactly ``base``.

    Raises `StateMismatch` if it is of another base; `CheckpointCorrupt` if records are damaged or don't fit.
    """
    told = meta.get("holdfast")
    told = told if isinstance(told, dict) else {}
    if base is None or told.get("base") != base:
        raise StateMismatch(
            f"the version is a delta of {told.get('base')}, but this worker holds {base or 'nothing that is known'}; "
            "nothing was changed. Send it a whole version"
        )
    patches: dict[str, Patch] = {}
    for name, tensor in packed.items():
        own = name.removeprefix(PREFIX)
        patches[own] = _unpacked(own, _bytes(tensor))
    heads = {name: patch.record.head for name, patch in patches.items()}
    if _digest({name: head.base for name, head in heads.items()}) != base:
        raise CheckpointCorrupt(f"the records of the delta are not of {base}; send a whole version", path="a delta")
    if _digest({name: head.result for name, head in heads.items()}) != told.get("digest"):
        raise CheckpointCorrupt("the records don't make the version that the delta names", path="a delta")
    return patches


def _packed(name: str, tensor: torch.Tensor, record: bytes) -> torch.Tensor:
    about = json.dumps({"dtype": known_dtype(tensor, name), "shape": list(tensor.shape)}).encode()
    return torch.frombuffer(bytearray(len(about).to_bytes(4, "little") + about + record), dtype=torch.uint8)


def _unpacked(name: str, packed: npt.NDArray[np.uint8]) -> Patch:
    end = 4 + int.from_bytes(packed[:4].tobytes(), "little")
    try:
        about = json.loads(packed[4:end].tobytes())
        dtype, shape = about["dtype"], tuple(int(size) for size in about["shape"])
        unit = sparse.unit_of(dtype)
        found = torch_dtype(dtype)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"the delta of {name} can't be read: {error}", path=name) from error
    record = sparse.Record(packed[end:], what=f"the delta of {name}")
    head = record.head
    if head.kind != "values" or (head.units, head.unit_bytes) != (math.prod(shape) * unit.per_element, unit.nbytes):
        raise CheckpointCorrupt(f"the delta of {name} is for another tensor than {dtype} {shape}", path=name)
    return Patch(found, shape, record)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = compat.as_bytes(tensor.detach().contiguous()).numpy()
    return found


def _digest(digests: Mapping[str, int]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]:016x}\n".encode())
    return str(state.hexdigest())


def _gathered(mine: Any) -> list[Any]:
    """Return what every trainer rank gave."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def checked_delta(delta: object) -> bool:
    """Return whether deltas are asked for; raise `ConfigError` for what is neither None nor ``"sparse"``."""
    if delta not in (None, "sparse"):
        raise ConfigError(f"delta must be None or 'sparse', not {delta!r}", field="delta")
    return delta is not None
