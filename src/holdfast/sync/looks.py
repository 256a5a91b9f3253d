"""What publisher ranks tell one another before each version: what their weights look like, or why there are none.

Guarantees: all ranks get the same, in the order of the ranks, or all fail. A structure that stands travels once, and
once more when some rank may have missed it. Torch-free.
Does not: make plans of it (``sync.pieces``), or keep ranks in step (``sync.rounds``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ConfigError, HoldfastError
from holdfast.outcome import AbortReason  # noqa: TC001 - msgspec reads the annotations
from holdfast.plan.structure import Structure, decode_structure
from holdfast.sync.rounds import Rounds

if TYPE_CHECKING:
    from holdfast.coordination import Board
    from holdfast.sync.deadline import Deadline


class Looks(msgspec.Struct, frozen=True, array_like=True):
    """What a rank would publish: a structure, encoded where that is new; or why it can't."""

    rank: int
    version: int
    digest: str
    encoded: bytes | None = None
    failure: AbortReason | None = None
    unfit: AbortReason | None = None
    """Why these buckets can't carry it, whoever takes it."""
    capture: int | None = None
    """Of which save this rank has a capture of the same moment; None if of none."""
    apart: tuple[str, ...] = ()
    """Which of its weights that one lacks."""
    anew: bool = False
    """This rank hasn't heard all that was said: every one has to say all of it once more."""


class Exchange:
    """Of one rank. ``structures``: by digest, all that were told, and those that the caller adds."""

    def __init__(self, board: Board) -> None:
        self.structures: dict[str, Structure] = {}
        self._rounds = Rounds(board)
        self._is_alone = board.world == 1
        self._told: set[str] = set()
        self._missed = False
        """Something that was said may not have been heard here."""

    def exchange(self, mine: Looks, deadline: Deadline) -> list[Looks]:
        """What all ranks say, ``mine`` too; the structures that they name are in `structures`.

        Raises what any rank has failed with, `ConfigError` where versions differ, and as `Rounds.hear_all`.
        """
        while not self._is_alone:
            is_known = mine.digest in self._told and not self._missed
            said = msgspec.structs.replace(mine, encoded=None if is_known else mine.encoded, anew=self._missed)
            self._missed = True
            words = self._rounds.hear_all(msgspec.msgpack.encode(said), deadline)
            heard = sorted((msgspec.msgpack.decode(word, type=Looks) for word in words), key=lambda it: it.rank)
            for said in heard:
                if said.encoded is not None and said.digest not in self.structures:
                    self.structures[said.digest] = decode_structure(said.encoded)
            self._told.add(mine.digest)
            anew = any(said.anew for said in heard)
            if not anew:
                self._missed = False
            _check_alike(heard)
            if not anew:
                return heard
            self._told.clear()
            self._missed = False
        return [mine]

    def fail(self, mine: Looks) -> None:
        """Tell the others why this rank can't publish; doesn't wait for them."""
        if not self._is_alone:
            with contextlib.suppress(HoldfastError):  # they will give up
                self._rounds.fail(msgspec.msgpack.encode(mine))


def _check_alike(found: list[Looks]) -> None:
    """Raise unless all ranks would publish, and the same version."""
    for said in found:
        if said.failure is not None:
            raise said.failure.cause()
    first = found[0]
    for said in found:
        if said.version != first.version:
            raise ConfigError(
                f"publisher rank {first.rank} publishes version {first.version}, but rank {said.rank} version "
                f"{said.version}; all ranks publish alike",
                field="version",
            )
