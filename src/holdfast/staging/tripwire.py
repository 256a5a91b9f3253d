"""What a capture remembers of the live tensors it refers to, to tell afterwards whether they held still.

Four things are noted when the state is captured, and looked at again when it was copied:

    version of the outer tensor        every in-place write through torch bumps it; a DTensor's own writes only here
    version of a DTensor's local part  what is written through ``to_local()`` bumps only this
    address of the (local) memory      moved by ``tensor.data = other``, ``set_``, ``swap_tensors``: no version says so
    a few words of the memory          writes that no counter sees: ``tensor.data.add_()``, raw pointers, other kernels

A version is bumped *after* the kernel that writes. So versions are to be read by the thread that trains, or long after
the copy; addresses and words may be compared by any thread as soon as the copies are complete.

Guarantees: changes nothing and keeps no memory alive. Words are read in host memory only, through addresses that were
asked for in the same breath, of contiguous tensors.
Does not: prove anything. A write that bumps no counter is found only where a word was noted, and only if it differs.
"""

from __future__ import annotations

import ctypes
from operator import add, attrgetter, is_
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.tensor_kinds import TOGETHER, LayoutGuard, addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.tensor_kinds import Addresses

WORD_BYTES: Final = 8
SPOT_EVERY_BYTES: Final = 32 << 20
"""A large tensor has one spot in each stretch of this length."""
SPOTS_MAX: Final = 4096
"""With more tensors than this only some have a spot: reading one takes a fraction of a microsecond."""

_version = attrgetter("_version")
_nbytes = attrgetter("nbytes")
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_word_at: Callable[[int], ctypes.c_uint64] = ctypes.c_uint64.from_address
_value = attrgetter("value")


class WatchList:
    """The tensors of one structure that are staged while they are live, by name; made once and used for every save."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(tensors)
        self.tensors = tuple(tensors.values())
        # A tensor made in inference mode counts no versions, for its whole life.
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
        """Whether torch can tell of many of these tensors at once that each is still laid out as it was."""
        return all(kind.is_quick for _, kind in self._kinds)

    def mark(self) -> Marks:
        """Note how the tensors are now. On the training thread. Raises `ConfigError` for one without memory."""
        marks = self._mark(self._locals(), of_known_kinds=False)
        assert marks is not None
        return marks

    def mark_known(self) -> Marks | None:
        """`mark`, unless a tensor has another shape, dtype, device, placement or strides than when this was made."""
        if not all(map(is_, map(compat.dtensor_spec, map(self.tensors.__getitem__, self._dtensors)), self._specs)):
            return None
        return self._mark(self._locals(), of_known_kinds=True)

    def _mark(self, held: Sequence[torch.Tensor], *, of_known_kinds: bool) -> Marks | None:
        addresses = np.empty(len(held), dtype=np.uint64)
        versions: list[int] = []
        at_once = self._all_counted and not self._dtensors
        # What takes the time is fetching each tensor from memory: once is enough.
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
        return Marks(self, versions, addresses, self._spots, self._spots.words(addresses))

    def versions(self, held: Sequence[torch.Tensor] | None = None) -> list[int]:
        """The counters of all tensors, then of the local parts of DTensors."""
        outer = self.tensors if self._all_counted else [self.tensors[index] for index in self._counted]
        found = list(map(_version, outer))
        if self._dtensors:
            held = self._locals() if held is None else held
            found += [compat.version_of(held[index]) for index in self._dtensors]
        return found

    def addresses(self) -> Addresses:
        return addresses_of(self._locals())

    def name_of_version(self, place: int) -> str:
        """Whose counter is at ``place`` of `versions`."""
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
                    f"{name}: its memory was given up (a storage of {tensor.untyped_storage().nbytes()} bytes for "
                    f"{tensor.nbytes}); bring it back before saving",
                    field=name,
                )

    def _choose_spots(self, held: Sequence[torch.Tensor]) -> None:
        large_enough = [index for index, nbytes in enumerate(map(_nbytes, held)) if nbytes >= WORD_BYTES]
        stride = -(-len(large_enough) // SPOTS_MAX) or 1
        self._spotted = [index for index in large_enough[::stride] if _can_read(held[index])]
        places = [(index, offset) for index in self._spotted for offset in _offsets(held[index].nbytes)]
        self._spots = Spots([index for index, _ in places], [offset for _, offset in places])


class Spots:
    """Places to read a word of: ``offsets`` in bytes into the tensors ``indexes``, one by one."""

    __slots__ = ("_at", "indexes", "offsets")

    def __init__(self, indexes: Sequence[int], offsets: Sequence[int]) -> None:
        self.indexes, self.offsets = indexes, offsets
        self._at = np.array(indexes, dtype=np.intp)

    def words(self, addresses: Addresses) -> list[int]:
        """What is there now; ``addresses`` are those of all tensors."""
        return _words(addresses[self._at].tolist(), self.offsets)


class Marks:
    """How the tensors of a `WatchList` were at one moment. ``addresses`` are those of their memory, one by one."""

    __slots__ = ("_list", "_spots", "_versions", "_words", "addresses")

    def __init__(
        self,
        watch_list: WatchList,
        versions: list[int],
        addresses: Addresses,
        spots: Spots,
        words: list[int],
    ) -> None:
        self._list = watch_list
        self._versions, self.addresses, self._spots, self._words = versions, addresses, spots, words

    def written(self) -> str | None:
        """The first tensor whose version has moved, or None. See the module about which thread may ask."""
        now = self._list.versions()
        if now == self._versions:
            return None
        place = next(at for at, (left, right) in enumerate(zip(now, self._versions, strict=True)) if left != right)
        return self._list.name_of_version(place)

    def moved(self) -> str | None:
        """The first tensor that has its memory elsewhere now, or None."""
        now = self._list.addresses()
        moved = np.flatnonzero(now != self.addresses)
        return self._list.names[moved[0]] if len(moved) else None

    def by_name(self) -> dict[str, int]:
        """The addresses, by name: for `differing` to compare the tensors themselves with how they were."""
        return dict(zip(self._list.names, self.addresses.tolist(), strict=True))

    def differing(self, copies: Mapping[str, int]) -> str | None:
        """The first tensor whose copy differs from what it was where a word was noted, or None.

        ``copies`` gives the address of the complete, contiguous copy for each tensor that has one of equal dtype.
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
    """The words at these places. No step of it runs in the interpreter: there are thousands."""
    return list(map(_value, map(_word_at, map(add, addresses, offsets))))


def _can_read(tensor: torch.Tensor) -> bool:
    """Whether the memory is, byte for byte, what a contiguous copy will be."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.dtype.is_complex  # may be a conjugate view, whose copy has other bits
        and not tensor.is_neg()
    )


def _offsets(nbytes: int) -> list[int]:
    """Where to read: a place in each stretch that needs no state to find again, spread by the golden ratio."""
    spots = []
    for start in range(0, nbytes, SPOT_EVERY_BYTES):
        room = min(SPOT_EVERY_BYTES, nbytes - start) - WORD_BYTES + 1
        if room > 0:
            spots.append(start + (((start + nbytes) * 0x9E3779B97F4A7C15 >> 13) % room & ~(WORD_BYTES - 1)))
    return spots
