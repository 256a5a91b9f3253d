"""The capture of the last save, for who wants the same moment of the state: a weight version that is due with it.

    save -> `Shares.ticket`: a `Held` takes the capture -> `Held.wait`, `Held.keep` -> the next update: let go of

A capture is held, once anybody has said that he may want it, until the state may change, or the next save begins. Its
buffer can be kept beyond that: the session makes another for its next capture, and gets it back some day.

Guarantees: what `Held.wait` gives is what the watched tensors hold now, as far as a change can be noticed; a capture
that is held keeps no save waiting.
Assumes: `Held.wait` and `Held.keep` are called on the training thread, where updates are announced.
Does not: copy, or know what the captures are wanted for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.capture import Capture

    Keep = Callable[[Capture], Callable[[], None]]


class Holding:
    """A `Taker` that holds a capture until it is dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._dropped = False
        self._capture: Capture | None = None
        self._let_go: Callable[[], None] | None = None

    def offer(self, capture: Capture, let_go: Callable[[], None]) -> None:
        with self._lock:
            is_late = self._dropped
            if not is_late:
                self._capture, self._let_go = capture, let_go
        self._answered.set()
        if is_late:
            let_go()

    def refuse(self, error: BaseException) -> None:
        del error  # whose save it is is told
        self._answered.set()

    def drop(self) -> None:
        """Let go of it, or of one that is yet to come; idempotent."""
        with self._lock:
            self._dropped, self._capture = True, None
            let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Held(Holding):
    """The capture of the last save."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep

    def is_changed_by(self, parameters: Callable[[frozenset[int]], bool] | None) -> bool:
        """Whether an update may change what was captured."""
        capture = self._capture
        return parameters is None or capture is None or parameters(capture.snapshot.update_ids)

    def wait(self, timeout_s: float) -> Capture | None:
        """The capture, staged, if the state is still what was captured; None otherwise, or if it takes too long."""
        self._answered.wait(timeout_s)
        capture = self._capture
        if capture is None or capture.error is not None or capture.plan is None or capture.number is None:
            return None
        return capture if capture.staging.changed() is None else None

    def keep(self) -> Callable[[], None]:
        """Keep the buffer of the capture that `wait` gave; returns what ends that, to be called once, by any thread."""
        assert self._capture is not None
        return self._keep(self._capture)


class Shares:
    """Of one session of saving. ``ranks``: the global ranks that save together, in their order."""

    def __init__(self, ranks: tuple[int, ...], keep: Keep) -> None:
        self.ranks = ranks
        self._keep = keep
        self._users = 0
        self._held: Held | None = None

    def join(self) -> None:
        """From now on captures are held for one more user."""
        self._users += 1

    def leave(self) -> None:
        """One user less."""
        self._users -= 1
        if not self._users:
            self.drop()

    @property
    def held(self) -> Held | None:
        """The last capture, if it is held."""
        return self._held

    def ticket(self, *, wanted: bool) -> tuple[Held, ...]:
        """For the save that begins now: what is to take its capture, where that is ``wanted`` and somebody may use it.

        The last one is let go of, whose place the new one may need.
        """
        self.drop()
        self._held = Held(self._keep) if wanted and self._users else None
        return () if self._held is None else (self._held,)

    def drop(self) -> None:
        """Let go of what is held."""
        held, self._held = self._held, None
        if held is not None:
            held.drop()

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None) -> None:
        """The state may change now; parameters: as for `Saver.before_update`."""
        held = self._held
        if held is not None and held.is_changed_by(parameters):
            self.drop()
