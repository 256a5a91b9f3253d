"""Publisher rank 0: which versions all ranks have to send, and what becomes of one that is published directly.

    Offer of every rank -> available -> ... -> Finished, to every rank, with what its `publish` returns or raises

Guarantees: a version is available only while every rank has it. A direct publish that is late ends on all of them with
the same error.
Does not: know who asks (``sync.coordinating``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.outcome import AbortReason
from holdfast.sync import messages
from holdfast.sync.waiting import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.engine.messages import Message
    from holdfast.errors import HoldfastError
    from holdfast.sync.links import Link
    from holdfast.sync.waiting import Offered


@dataclass(slots=True)
class _Rank:
    """Another publisher rank, as rank 0 knows it."""

    link: Link
    versions: set[int] = field(default_factory=set)
    newest: int = -1


@dataclass(slots=True)
class Tally:
    """What has become of a version that is published directly."""

    committed: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    mistakes: dict[str, HoldfastError] = field(default_factory=dict)
    """What receivers had to say that `publish` raises too, by their names."""
    sessions: int = 0
    again_until: float = 0.0
    """Somebody to whom it didn't come as it was sent may ask again."""

    @property
    def mistake(self) -> HoldfastError | None:
        """The first of them."""
        return next(iter(self.mistakes.values()), None)

    def got(self, name: str) -> None:
        """A receiver has committed it, if not at once."""
        self.committed.add(name)
        self.lost.pop(name, None)
        self.mistakes.pop(name, None)


class Offers:
    """See the module. ``sources``: what this rank has; ``finish``: tells this rank's `publish`."""

    def __init__(self, sources: Mapping[int, Offered], finish: Callable[[int, Outcome], None], *, world: int) -> None:
        self._sources = sources
        self._finish_here = finish
        self._world = world
        self._ranks: dict[int, _Rank] = {}
        self._newest = -1
        self.tally = Tally()

    def rank_joined(self, rank: int, link: Link) -> None:
        self._ranks[rank] = _Rank(link)

    def offered(self, offered: Offered) -> None:
        """This rank has a version to send."""
        self._newest = max(self._newest, offered.version)
        if offered.direct:
            self.tally = Tally()

    def withdrawn(self, version: int, reason: AbortReason | None) -> None:
        """This rank has ``version`` no more; with a reason, its `publish` failed: so does everyone's."""
        if reason is not None:
            self.tell(messages.Finished(version, 0, 0, reason))

    def heard(self, rank: int, message: Message) -> None:
        told = self._ranks[rank]
        if isinstance(message, messages.Offer):
            told.versions.add(message.version)
            told.newest = max(told.newest, message.version)
        elif isinstance(message, messages.Withdraw):
            told.versions.discard(message.version)
            if message.reason is not None and message.version in self._sources:
                self.finish(message.version, message.reason.cause())

    def tell(self, message: Message) -> None:
        """All other ranks."""
        for rank in self._ranks.values():
            rank.link.send(message)

    def begin(self, message: messages.Begin) -> None:
        """Tell all other ranks of a session; from now on their silence counts."""
        for rank in self._ranks.values():
            rank.link.expect()
        self.tell(message)

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have said nothing for so long."""
        return [rank for rank, told in self._ranks.items() if told.link.silent_s > seconds]

    def available(self) -> set[int]:
        """The versions that every rank has."""
        if len(self._ranks) < self._world - 1:
            return set()
        return set(self._sources).intersection(*(rank.versions for rank in self._ranks.values()))

    def is_gone(self, version: int) -> bool:
        """Whether some rank had it, or went on without it."""
        if version <= self._newest and version not in self._sources:
            return True
        return any(version <= rank.newest and version not in rank.versions for rank in self._ranks.values())

    def direct(self) -> Offered | None:
        """What is published directly now."""
        return next((offered for offered in self._sources.values() if offered.direct), None)

    def finish(self, version: int, error: HoldfastError | None) -> None:
        """The direct publish of ``version`` is over, on all ranks."""
        committed, lost = len(self.tally.committed), len(self.tally.lost)
        reason = None if error is None else AbortReason.of(error, rank=0)
        self.tell(messages.Finished(version, committed, lost, reason))
        for rank in self._ranks.values():
            rank.versions.discard(version)
        self._finish_here(version, Outcome(committed, lost, reason))

    def end_late(self, waited_for: str) -> None:
        """End a direct publish whose deadline has passed."""
        direct = self.direct()
        if direct is not None and direct.deadline.passed():
            self.finish(direct.version, self.late(direct, waited_for))

    def late(self, direct: Offered, waited_for: str) -> HoldfastError:
        """What a direct publish fails with when its deadline has passed."""
        if direct.unfit is not None:
            return direct.unfit
        absent = [rank for rank in range(1, self._world) if rank not in self._ranks]
        absent += [rank for rank, told in self._ranks.items() if direct.version not in told.versions]
        if absent:
            waited_for = f"publisher rank {absent[0]} to publish version {direct.version} too"
        return direct.deadline.exceeded(waited_for, "look at its log, or raise the timeout of publish")
