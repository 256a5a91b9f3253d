"""Wait for results of other threads of a weight sync: an offered version, its outcome, blocking calls.

Guarantees: a call that doesn't return blocks nobody: the caller gets an error, or abandons it on its daemon thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, FetchCancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordination.deadline import Deadline
    from holdfast.coordination.failure import RankFailure
    from holdfast.errors import HoldfastError
    from holdfast.sync.session.sender import VersionSource

BEATS_A_SILENCE: Final = 5
"""Number of heartbeats within the silence timeout."""
BEAT_S_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Offered:
    """A version that this rank has to send. direct: only while `publish` waits, until ``deadline``.

    unfit: why buckets can't carry it, reported to receivers. meta: what receivers get with it, encoded; that of rank 0.
    """

    source: VersionSource
    direct: bool
    deadline: Deadline
    unfit: HoldfastError | None = None
    meta: bytes = b""

    @property
    def version(self) -> int:
        return self.source.version


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a version that was published directly; ``reason``: why `publish` fails, if it does."""

    receivers: int
    lost: int
    reason: RankFailure | None


class PublishFuture:
    """An outcome that another thread will set."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._outcome: Outcome | None = None

    def settle(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome
        self._known.set()

    def wait(self, timeout_s: float) -> Outcome | None:
        """Return the outcome, or None on timeout."""
        self._known.wait(timeout_s)
        return self._outcome


class CloseSignal:
    """Tells a receiving thread to stop: for good, or what it does now. It checks this whenever it waits."""

    def __init__(self) -> None:
        self._said = threading.Event()
        self._lock = threading.Lock()
        self._closed = self._cancelled = False

    def say(self) -> None:
        """Stop for good."""
        with self._lock:
            self._closed = True
            self._said.set()

    def cancel(self) -> None:
        """Stop what is done now, or next."""
        with self._lock:
            self._cancelled = True
            self._said.set()

    def check(self) -> None:
        """Raise `ConfigError` if the receiver is being closed, `FetchCancelled`, once, if the fetch was cancelled."""
        if not self._said.is_set():
            return
        with self._lock:
            if self._closed:
                raise ConfigError("this receiver was closed while it received; make a new one", field="receiver")
            if self._cancelled:
                self._cancelled = False
                self._said.clear()
                raise FetchCancelled("this fetch was cancelled; nothing was committed. Fetch again when it is wanted")

    def sleep(self, seconds: float) -> None:
        """Sleep; raises at once if the receiver is closed, or the fetch cancelled, meanwhile."""
        self._said.wait(seconds)
        self.check()


class BlockingCall:
    """A call on its own thread; ``wake`` is called when it has returned."""

    def __init__(self, function: Callable[[], Any], wake: Callable[[], None]) -> None:
        self.done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._function = function
        self._wake = wake
        threading.Thread(target=self._run, name="holdfast-sync-aside", daemon=True).start()

    def result(self) -> Any:
        """Return the result of the finished call, or raise its error."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised where the result is requested
            self._error = error
        self.done = True
        self._wake()


def beat_interval_s(peer_timeout_s: float) -> float:
    """Return the seconds between beats."""
    return min(BEAT_S_MAX, peer_timeout_s / BEATS_A_SILENCE)
