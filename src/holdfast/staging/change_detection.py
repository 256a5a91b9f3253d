"""Detect changes of captured tensors between capture and copy.

Four things are recorded when the state is captured, and compared when it has been copied:

    version of the outer tensor        incremented by in-place writes through torch; writes to a DTensor only here
    version of a DTensor's local part  writes through ``to_local()`` increment only this
    address of the (local) memory      changed by ``tensor.data = other``, ``set_``, ``swap_tensors``, not by versions
    a few words of the memory          writes that no counter sees: ``tensor.data.add_()``, raw pointers, other kernels

A version is incremented *after* the kernel that writes. So versions must be read by the thread that trains, or long
after the copy; addresses and words may be compared by any thread as soon as the copies are complete.

Guarantees: changes nothing and keeps no memory alive. Words are read from contiguous tensors in host memory only,
through addresses that were fetched just before.
Does not: prove anything. A write that increments no counter is found only if it changes a recorded word.
"""

from __future__ import annotations

import ctypes
from operator import add, attrgetter, is_
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import TOGETHER, LayoutGuard, addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.state.entries import Addresses

WORD_BYTES: Final = 8
SPOT_EVERY_BYTES: Final = 32 << 20
"""Length of the stretches of a large tensor that have one spot each."""
SPOTS_MAX: Final = 4096
"""Limit on spots, if there are more tensors: reading one takes a fraction of a microsecond."""

_version = attrgetter("_version")
_nbytes = attrgetter("nbytes")
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_word_at: Callable[[int], ctypes.c_uint64] = ctypes.c_uint64.from_address
_value = attrgetter("value")


class WatchedTensors:
    """The tensors of one structure that are staged while live, by name; made once and used for every save."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(tensors)
        self.tensors = tuple(tensors.values())
        # A tensor made in inference mode never counts versions.
        self._counted = [index for index, tensor in enumerate(self.tensors) if not tensor.is_inference()]
        self._all_counted = len(self._counted) == len(self.tensors)
        self._dtensors = [index for index, tensor in enumerate(self.tensors) if compat.is_dtensor(tensor)]
        self._specs = [compat.dtensor_spec(self.tensors[index]) for index in self._dtensors]
        held = self._locals()
        self._kinds = [(start, LayoutGuard(held[start : start + TOGETHER])) for start in range(0, len(held), TOGETHER)]
        self._spots = Spots((), ())
        self._spotted: list[int] = []
        self._choose_spots(held)

    @property
    def is_quick(self) -> bool:
        """Return True if torch can check the layout of many of these tensors in one call."""
        return all(kind.is_quick for _, kind in self._kinds)

    def mark(self) -> TensorVersions:
        """Record versions and addresses, on the training thread. Raises `ConfigError` for a tensor without memory."""
        marks = self._mark(self._locals(), of_known_kinds=False)
        assert marks is not None
        return marks

    def mark_known(self) -> TensorVersions | None:
        """`mark`; but None if a tensor's shape, dtype, device, placement or strides changed since this was made."""
        if not all(map(is_, map(compat.dtensor_spec, map(self.tensors.__getitem__, self._dtensors)), self._specs)):
            return None
        return self._mark(self._locals(), of_known_kinds=True)

    def _mark(self, held: Sequence[torch.Tensor], *, of_known_kinds: bool) -> TensorVersions | None:
        addresses = np.empty(len(held), dtype=np.uint64)
        versions: list[int] = []
        at_once = self._all_counted and not self._dtensors
        # Fetching each tensor from memory dominates the time: do it only once.
        for start, kind in self._kinds:
            few = held[start : start + TOGETHER]
            if of_known_kinds and not kind.stands(few):
                return None
            addresses[start : start + len(few)] = addresses_of(few)
            if at_once:
                versions += map(_version, few)
        if not at_once:
            versions = self.versions(held)
        if not addresses.all():
            self._refuse_freed(held, addresses)
        if not all(map(_is_contiguous, map(held.__getitem__, self._spotted))):
            self._choose_spots(held)
        return TensorVersions(self, versions, addresses, self._spots, self._spots.words(addresses))

    def versions(self, held: Sequence[torch.Tensor] | None = None) -> list[int]:
        """Return the counters of all tensors, then of the local parts of DTensors."""
        outer = self.tensors if self._all_counted else [self.tensors[index] for index in self._counted]
        found = list(map(_version, outer))
        if self._dtensors:
            held = self._locals() if held is None else held
            found += [compat.version_of(held[index]) for index in self._dtensors]
        return found

    def addresses(self) -> Addresses:
        return addresses_of(self._locals())

    def name_of_version(self, place: int) -> str:
        """Return the name of the tensor whose counter is at ``place`` of `versions`."""
        outer = len(self._counted)
        return self.names[self._counted[place] if place < outer else self._dtensors[place - outer]]

    def _locals(self) -> Sequence[torch.Tensor]:
        if not self._dtensors:
            return self.tensors
        return list(map(compat.local_tensor, self.tensors))

    def _refuse_freed(self, held: Sequence[torch.Tensor], addresses: Addresses) -> None:
        for name, tensor, address in zip(self.names, held, addresses, strict=True):
            if address == 0 and tensor.numel():
                raise ConfigError(
                    f"{name}: its memory was freed (a storage of {tensor.untyped_storage().nbytes()} bytes for "
                    f"{tensor.nbytes}); allocate it again before saving",
                    field=name,
                )

    def _choose_spots(self, held: Sequence[torch.Tensor]) -> None:
        large_enough = [index for index, nbytes in enumerate(map(_nbytes, held)) if nbytes >= WORD_BYTES]
        stride = -(-len(large_enough) // SPOTS_MAX) or 1
        self._spotted = [index for index in large_enough[::stride] if _can_read(held[index])]
        places = [(index, offset) for index in self._spotted for offset in _offsets(held[index].nbytes)]
        self._spots = Spots([index for index, _ in places], [offset for _, offset in places])


class Spots:
    """Places of words to read: ``offsets[i]`` is a byte offset into the tensor number ``indexes[i]``."""

    __slots__ = ("_at", "indexes", "offsets")

    def __init__(self, indexes: Sequence[int], offsets: Sequence[int]) -> None:
        self.indexes, self.offsets = indexes, offsets
        self._at = np.array(indexes, dtype=np.intp)

    def words(self, addresses: Addresses) -> list[int]:
        """Read the words now; ``addresses`` are those of all tensors."""
        return _words(addresses[self._at].tolist(), self.offsets)


class TensorVersions:
    """Versions and memory ``addresses`` of the tensors of a `WatchedTensors` at one moment, in the same order."""

    __slots__ = ("_list", "_spots", "_versions", "_words", "addresses")

    def __init__(
        self,
        watch_list: WatchedTensors,
        versions: list[int],
        addresses: Addresses,
        spots: Spots,
        words: list[int],
    ) -> None:
        self._list = watch_list
        self._versions, self.addresses, self._spots, self._words = versions, addresses, spots, words

    def written(self) -> str | None:
        """Return the first tensor whose version has changed, or None. The module says which thread may call this."""
        now = self._list.versions()
        if now == self._versions:
            return None
        place = next(at for at, (left, right) in enumerate(zip(now, self._versions, strict=True)) if left != right)
        return self._list.name_of_version(place)

    def moved(self) -> str | None:
        """Return the first tensor whose memory has moved, or None."""
        now = self._list.addresses()
        moved = np.flatnonzero(now != self.addresses)
        return self._list.names[moved[0]] if len(moved) else None

    def changed(self) -> str | None:
        """Return the first tensor found to differ now from what was recorded, or None; on the training thread."""
        return self.written() or self.moved() or self.differing(self.by_name())

    def by_name(self) -> dict[str, int]:
        """Return the addresses by name, so that `differing` can compare the tensors themselves."""
        return dict(zip(self._list.names, self.addresses.tolist(), strict=True))

    def words_by_name(self) -> dict[str, list[tuple[int, int]]]:
        """Return the recorded words of each tensor, with their offsets in it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for index, offset, word in zip(self._spots.indexes, self._spots.offsets, self._words, strict=True):
            found.setdefault(self._list.names[index], []).append((offset, word))
        return found

    def differing(self, copies: Mapping[str, int]) -> str | None:
        """Return the first tensor whose copy differs from a recorded word, or None.

        copies: the address of the complete, contiguous copy of each tensor that has one with equal dtype.
        """
        names, spots = self._list.names, self._spots
        places = list(map(copies.get, map(names.__getitem__, spots.indexes)))
        known = [place for place in places if place is not None]
        if len(known) == len(places) and _words(known, spots.offsets) == self._words:
            return None
        for index, place, offset, word in zip(spots.indexes, places, spots.offsets, self._words, strict=True):
            if place is not None and _word_at(place + offset).value != word:
                return names[index]
        return None


def _words(addresses: Iterable[int], offsets: Sequence[int]) -> list[int]:
    """Return the words at these places, without a Python loop: there are thousands."""
    return list(map(_value, map(_word_at, map(add, addresses, offsets))))


def _can_read(tensor: torch.Tensor) -> bool:
    """Return True if the memory equals, byte for byte, what a contiguous copy will contain."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.dtype.is_complex  # may be a conjugate view, whose copy has other bits
        and not tensor.is_neg()
    )


def _offsets(nbytes: int) -> list[int]:
    """Choose one offset per stretch, spread by the golden ratio so that no state is needed to find it again."""
    spots = []
    for start in range(0, nbytes, SPOT_EVERY_BYTES):
        room = min(SPOT_EVERY_BYTES, nbytes - start) - WORD_BYTES + 1
        if room > 0:
            spots.append(start + (((start + nbytes) * 0x9E3779B97F4A7C15 >> 13) % room & ~(WORD_BYTES - 1)))
    return spots
