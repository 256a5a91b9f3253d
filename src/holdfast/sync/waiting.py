"""What threads of a weight sync wait for one another with: an offered version, its outcome, calls that block.

Guarantees: a call that doesn't come back keeps nobody waiting: who called it is told, or leaves it behind on its
daemon thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.errors import HoldfastError
    from holdfast.outcome import AbortReason
    from holdfast.sync.deadline import Deadline
    from holdfast.sync.sending import Source

BEATS_A_SILENCE: Final = 5
"""How often a peer speaks in the time after which it would be given up."""
BEAT_S_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Offered:
    """A version that this rank has to send; ``direct``: as long as `publish` waits, until ``deadline``.

    ``unfit``: why buckets can't carry it, which is what receivers will be told.
    """

    source: Source
    direct: bool
    deadline: Deadline
    unfit: HoldfastError | None = None

    @property
    def version(self) -> int:
        return self.source.version


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a version that was published directly; ``reason``: why `publish` fails, if it does."""

    receivers: int
    lost: int
    reason: AbortReason | None


class Awaited:
    """An outcome that another thread will know."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._outcome: Outcome | None = None

    def settle(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome
        self._known.set()

    def wait(self, timeout_s: float) -> Outcome | None:
        """None if it isn't known in time."""
        self._known.wait(timeout_s)
        return self._outcome


class Leaving:
    """Whether a receiver is being closed: any thread says so, and the one that receives looks whenever it waits."""

    def __init__(self) -> None:
        self._said = threading.Event()

    def say(self) -> None:
        self._said.set()

    def check(self) -> None:
        """Raise `ConfigError` if it is."""
        if self._said.is_set():
            raise ConfigError("this receiver was closed while it received; make a new one", field="receiver")

    def sleep(self, seconds: float) -> None:
        """For so long, unless it is closed: then raise at once."""
        self._said.wait(seconds)
        self.check()


class Aside:
    """A call on a thread of its own; ``ring`` is called when it has come back."""

    def __init__(self, function: Callable[[], Any], ring: Callable[[], None]) -> None:
        self.done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._function = function
        self._ring = ring
        threading.Thread(target=self._run, name="holdfast-sync-aside", daemon=True).start()

    def result(self) -> Any:
        """What it returned or raised, once it is done."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - it belongs to who asked for the result
            self._error = error
        self.done = True
        self._ring()


def beat_interval_s(peer_timeout_s: float) -> float:
    """Seconds between beats."""
    return min(BEAT_S_MAX, peer_timeout_s / BEATS_A_SILENCE)
