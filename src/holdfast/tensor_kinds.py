"""Whether many tensors are still of the kinds they were: shape, dtype, device, and where torch can tell, strides.

Identity says nothing of that: ``tensor.data = other`` leaves the object and replaces what it is. Fetching a tensor's
parts from memory is what looking costs, so tensors are looked at `TOGETHER` at a time: whoever looks at the same ones
for something else right after finds them in a core's cache.

Guarantees: changes nothing; a guard holds no tensor. Does not look at values or versions (``staging.tripwire``).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from holdfast import _torch_compat as compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOGETHER: Final = 512
"""That many tensors are still in a core's cache when they are looked at a second time."""

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
Look = tuple[Any, ...]
look: Callable[[torch.Tensor], Look] = attrgetter("shape", "dtype", "device")
"""What kind of thing a plain tensor is, as far as its place in a checkpoint goes."""
_by_size = attrgetter("nbytes", "dtype", "device")
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_is_neg: Callable[[torch.Tensor], bool] = torch.Tensor.is_neg
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class KindGuard:
    """The kinds of at most `TOGETHER` tensors. The tensors themselves are given again with each question."""

    __slots__ = ("_check", "_look", "_looks")

    def __init__(self, tensors: Sequence[torch.Tensor], *, thorough: bool, looks: Sequence[Look] | None = None) -> None:
        """thorough: compare shapes even where torch has no quick way to; else sizes in bytes stand in for them.

        looks: what `look` has given for each a moment ago.
        """
        self._check = compat.same_kind_check(tensors)
        self._look: Callable[[torch.Tensor], Any] = look if thorough or self._check is not None else _by_size
        known = looks if self._look is look else None
        self._looks: list[Any] = interned(list(map(self._look, tensors))) if known is None else list(known)

    @property
    def is_quick(self) -> bool:
        """Whether torch compares them at once, strides included."""
        return self._check is not None

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether each is of the kind it was."""
        if self._check is not None and self._check(*tensors):
            return True
        if list(map(self._look, tensors)) != self._looks:
            return False
        if self._check is not None:
            # Their `requires_grad` is another, say, or the mode that autograd is in.
            self._check = compat.same_kind_check(tensors)
        return True


class LayoutGuard(KindGuard):
    """`KindGuard` that also knows which tensors' memory is, byte for byte, what a contiguous copy of them is."""

    __slots__ = ("_plain",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors, thorough=True)
        self._plain = _plain(tensors)

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        check = self._check
        return super().stands(tensors) and (
            (check is not None and self._check is check) or _plain(tensors) == self._plain
        )


class Places:
    """Where the memory of plain tensors is, asked again and again: as long as each is the kind of thing that it was."""

    __slots__ = ("_kinds", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._kinds = [
            (start, LayoutGuard(self._tensors[start : start + TOGETHER]))
            for start in range(0, len(self._tensors), TOGETHER)
        ]

    def addresses(self) -> Addresses | None:
        """One for each tensor; None if one is another kind of thing by now, or has given up its memory."""
        addresses = np.empty(len(self._tensors), dtype=np.uint64)
        for start, kind in self._kinds:
            few = self._tensors[start : start + TOGETHER]
            if not kind.stands(few):
                return None
            addresses[start : start + len(few)] = addresses_of(few)
        return addresses if addresses.all() else None


def addresses_of(tensors: Sequence[torch.Tensor]) -> Addresses:
    """Where the memory of each is; 0 where there is none."""
    return np.fromiter(map(_address, tensors), np.uint64, len(tensors))


def _plain(tensors: Sequence[torch.Tensor]) -> bytes:
    return bytes(map(_is_contiguous, tensors)) + bytes(map(_is_neg, tensors))


def interned(looks: list[Any]) -> list[Any]:
    """Equal ones as one object: most tensors are of few kinds, and what there is less of, nobody has to look after."""
    try:
        known: dict[Any, Any] = {}
        return [known.setdefault(look, look) for look in looks]
    except TypeError:
        return looks
