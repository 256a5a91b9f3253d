"""Decide from whom a receiver brings the next part of a version: from the publisher rank, or from another receiver.

    ask (what it lacks) -> a run of extents and its source -> brought (what it has now)        again, until it has all

A publisher rank has one of these for each version that receivers share, and one for each delta. An extent that nobody
was sent comes from the publisher, at most `PUBLISHER_READS` runs at a time; one that a receiver has comes from there,
at most `HOLDER_READS` at a time from each. Else who asks waits a moment, and asks again. So each receiver that has
something passes it on while it still brings the rest, and the publisher's link carries each byte about once: parts
spread as in a tree that nobody has to keep, and a receiver that dies, comes late or wants slices only is no special
case.

Guarantees: a run that isn't brought in time counts as given up, and a source from which two receivers brought nothing
good isn't named any more: what it alone has the publisher sends again. Who has waited too long is sent to the
publisher: no receiver can keep another from its version. What is named is a hint: receivers verify what they bring.
Pure: no clock, no threads, no connections; the caller holds a lock. Same calls, same answers.
Does not: move bytes (``versions.peers``), or know what is in memory (``versions.books``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from holdfast.format.manifest import EXTENT_BYTES

PUBLISHER_READS: Final = 4
"""Runs that the publisher rank sends at a time while receivers can help one another; two fill a link."""
PUBLISHER_READS_MAX: Final = 64
"""The same for receivers that have waited too long."""
HOLDER_READS: Final = 4
_RUNS: Final = 256
"""A version is brought in at least about so many runs, unless they would be smaller than `_RUN_MIN`."""
_RUN_MIN: Final = 4
_RUN_MAX: Final = 64
_LOOKED_AT: Final = 16
"""Holders that are considered for one answer."""
_PATIENCE_S: Final = 1.0
_PATIENCE_MAX_S: Final = 4.0
"""Who has waited so long is sent what the publisher is sending to others, too."""
_LOOK_S: Final = 0.1
"""How often runs that have taken too long are looked for."""
_BYTES_A_SECOND_MIN: Final = 16e6
"""A run that comes more slowly than that counts as given up, `_PATIENCE_S` after it should have been there."""
_STRIKES: Final = 2


class RunOutcome(IntEnum):
    """What came of bringing a run: it is here; its source doesn't have it any more; its source is of no use."""

    HERE = 0
    GONE = 1
    FAILED = 2


class RunSource(NamedTuple):
    """Extents ``start`` to ``end`` to bring. holder: the receiver that has them; empty for the publisher rank."""

    number: int
    start: int
    end: int
    holder: str


def patience_s(extents: int) -> float:
    """Return how long bringing so many extents may take."""
    return _PATIENCE_S + extents * EXTENT_BYTES / _BYTES_A_SECOND_MIN


def bits_between(start: int, end: int) -> int:
    """Return a set of the extents from ``start`` to ``end``, as bits."""
    return (1 << end) - (1 << start)


@dataclass(slots=True)
class _Holder:
    """A receiver; ``here``: extents that it has verified, as bits. reads: how many runs are brought from it."""

    here: int = 0
    reads: int = 0
    is_known: bool = False
    is_impatient: bool = False
    """It has waited too long, and hasn't brought anything from another receiver since."""
    shuns: set[str] = field(default_factory=set)
    """Holders from which it brought nothing good."""
    shunned_by: set[str] = field(default_factory=set)

    @property
    def is_named(self) -> bool:
        """Return True if it has something that others may bring."""
        return bool(self.here) and len(self.shunned_by) < _STRIKES


@dataclass(slots=True)
class _Reading:
    asker: str
    source: RunSource
    until_s: float


class FanOut:
    """See the module; of one version on one publisher rank, of so many extents."""

    def __init__(self, extents: int) -> None:
        self._extents = extents
        self._run = max(_RUN_MIN, min(_RUN_MAX, extents // _RUNS))
        self._holders: dict[str, _Holder] = {}
        self._names: list[str] = []
        """Of receivers that have had something."""
        self._readings: dict[int, _Reading] = {}
        """By number, oldest first."""
        self._sent = 0
        """Extents that the publisher has sent to a receiver that is there, or is sending."""
        self._reads = 0
        """How many runs the publisher is sending."""
        self._look_s = 0.0
        self._numbers = 0
        self._random = random.Random(extents)  # noqa: S311 - to spread load

    def ask(self, asker: str, lacking: int, waited_s: float, now_s: float) -> RunSource | None:
        """Return what ``asker`` may bring now of what it lacks, for it to say `brought`; None: ask again in a moment.

        lacking: as bits, without what it is bringing. waited_s: since it last got an answer to bring something.
        """
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._expire(now_s)
        fresh = lacking & ~self._sent
        if fresh and self._reads < PUBLISHER_READS:
            found = self._first(fresh, 0)
            self._sent |= bits_between(*found)
            return self._begin(asker, found, "", now_s)
        name = self._find(asker, lacking)
        if name is not None:
            have = lacking & self._holders[name].here
            return self._begin(asker, self._first(have, self._anywhere()), name, now_s)
        mine = self._holder(asker)
        mine.is_impatient = mine.is_impatient or waited_s > _PATIENCE_S
        if mine.is_impatient and self._reads < PUBLISHER_READS_MAX:
            again = lacking if waited_s > _PATIENCE_MAX_S else lacking & ~self._being_sent()
            if again:
                return self._begin(asker, self._first(again, self._anywhere()), "", now_s)
        return None

    def brought(self, asker: str, number: int, here: int, outcome: RunOutcome) -> None:
        """Note what came of a run, and what ``asker`` has verified, as bits; number 0: of none."""
        mine = self._holder(asker)
        if here and not mine.is_known:
            mine.is_known = True
            self._names.append(asker)
        mine.here = here
        reading = self._readings.get(number)
        if reading is None or reading.asker != asker:
            return
        self._end(number)
        holder = self._holders.get(reading.source.holder)
        if holder is None:
            return
        if outcome == RunOutcome.HERE:
            mine.is_impatient = False
            return
        had = holder.here
        if outcome == RunOutcome.GONE:
            holder.here = 0
        else:
            mine.shuns.add(reading.source.holder)
            holder.shunned_by.add(asker)
        if not holder.is_named:
            self._unsend(had)

    def forget(self, asker: str) -> None:
        """Forget a receiver that has gone, and what it was bringing."""
        for number in [number for number, reading in self._readings.items() if reading.asker == asker]:
            self._end(number)
        gone = self._holders.pop(asker, None)
        if gone is not None:
            if gone.is_known:
                self._names.remove(asker)
            self._unsend(gone.here)

    # ------------------------------------------------------------------------------------------------------------------

    def _find(self, asker: str, lacking: int) -> str | None:
        """Return a receiver that has some of what ``asker`` lacks: of a few, one from which least is being brought."""
        mine = self._holders.get(asker)
        shunned: set[str] = set() if mine is None else mine.shuns
        names = self._names
        if len(names) > _LOOKED_AT:
            names = self._random.sample(names, _LOOKED_AT)
        best: tuple[int, str] | None = None
        for name in names:
            holder = self._holders[name]
            if name == asker or name in shunned or holder.reads >= HOLDER_READS:
                continue
            if holder.here & lacking and holder.is_named and (best is None or holder.reads < best[0]):
                best = holder.reads, name
        return None if best is None else best[1]

    def _first(self, bits: int, start: int) -> tuple[int, int]:
        """Return the first run of ``bits`` from extent ``start`` on, or from the first one; not longer than a run."""
        rest = bits >> start
        if not rest:
            start, rest = 0, bits
        begin = (rest & -rest).bit_length() - 1
        rest >>= begin
        ones = (~rest & (rest + 1)).bit_length() - 1
        return start + begin, start + begin + min(ones, self._run)

    def _anywhere(self) -> int:
        """Return an extent at which a run may begin."""
        return self._random.randrange(-(-self._extents // self._run)) * self._run

    def _begin(self, asker: str, run: tuple[int, int], holder: str, now_s: float) -> RunSource:
        self._numbers += 1
        source = RunSource(self._numbers, *run, holder)
        self._holder(asker)
        self._readings[source.number] = _Reading(asker, source, now_s + patience_s(run[1] - run[0]))
        if holder:
            self._holders[holder].reads += 1
        else:
            self._reads += 1
        return source

    def _end(self, number: int) -> None:
        source = self._readings.pop(number).source
        if not source.holder:
            self._reads -= 1
            self._unsend(bits_between(source.start, source.end))
        elif source.holder in self._holders:
            self._holders[source.holder].reads -= 1

    def _expire(self, now_s: float) -> None:
        for number in [number for number, reading in self._readings.items() if reading.until_s < now_s]:
            self._end(number)

    def _unsend(self, bits: int) -> None:
        """Let the publisher send these again, but for those that it is sending, or that a receiver has."""
        if bits & self._sent:
            found = self._being_sent()
            for holder in self._holders.values():
                if holder.is_named:
                    found |= holder.here
            self._sent &= ~bits | found

    def _being_sent(self) -> int:
        found = 0
        for reading in self._readings.values():
            if not reading.source.holder:
                found |= bits_between(reading.source.start, reading.source.end)
        return found

    def _holder(self, name: str) -> _Holder:
        if name not in self._holders:
            self._holders[name] = _Holder()
        return self._holders[name]
