"""The session of a save: resources opened in order and closed in reverse, with equal errors on all ranks.

    group -> votes -> whatever must be held (a lock, a path) -> saver -> vote

    with Session(process_group, purpose="save", timeout=timeout) as session:
        with session.settling():        # a failure on any rank raises the same error on all
            session.target = checked_target(path, field="path")
            session.hold(claim_path(session.target, ...).release)
            session.start_saver(storage, config)
        session.saver.start(...)

Guarantees: `close` runs all of its steps even if some fail; after an interrupt, calling it again continues where it
stopped. Held resources are released only once no thread of the session can still publish.
Assumes: every rank opens one for the same purpose, and enters the same `settling` blocks in the same order.
Does not: know what is saved. A session that outlives one call is kept by its owner: it refers to no state.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.group import MEETING_S, open_group
from holdfast.coordination.votes import Votes
from holdfast.engine.at_exit import end_at_exit
from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.saver.saver import Saver
from holdfast.staging.optimizer_hook import guard_updates, unguard_updates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.saver.handle import SaveHandle
    from holdfast.saver.process_session import SharedPlans
    from holdfast.staging.optimizer_hook import Guard
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")
OUTCOME_GRACE_S: Final = 1.0
"""How long saves in flight may take to end once the time is up."""
_LEAST_S: Final = 0.001


class Session:
    """This rank's session. Every rank makes one before anything else, so that errors can be told to the others.

    purpose, timeout, patience_s: as for `open_group`.

    Attributes:
        target: the path that must be the same on every rank, checked at the next vote.
        deadline: of the whole session, if it is for one call.
    """

    def __init__(
        self, process_group: Any | None, *, purpose: str, timeout: object = None, patience_s: object = None
    ) -> None:
        self.group: Group = open_group(process_group, purpose=purpose, timeout=timeout, patience_s=patience_s)
        self.votes = Votes(self.group.board)
        self.target = ""
        self.deadline = Deadline.after(MEETING_S)
        self._saver: Saver | None = None
        self._guard: Guard | None = None
        self._held = ExitStack()
        self._letting_go = threading.RLock()  # reentrant: a signal handler may close at any point
        self._call_off_exit: Callable[[], None] = lambda: None
        self.hold(self.group.board.close)
        self.hold(self.votes.leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(max(self.left_s(), OUTCOME_GRACE_S))

    # Opening. ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def settling(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run a block that may fail on this rank alone, then vote: all ranks raise the same error, or none does.

        timeout_s: for the vote; None for the rest of `deadline`. An interrupt isn't voted on.
        """
        error: BaseException | None = None
        try:
            yield
        except Exception as failed:  # noqa: BLE001 - raised by the vote, once the other ranks know
            error = failed
        limit_s = self.left_s() if timeout_s is None else timeout_s
        self.votes.raise_together(error, target=self.target, timeout_s=limit_s)

    def hold(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the session is over; what was held last is released first."""
        self._held.callback(release)

    def start_saver(
        self,
        storage: Storage,
        config: CheckpointConfig,
        *,
        overlaps: bool = True,
        shared: SharedPlans | None = None,
    ) -> Saver:
        """The saver of the session. Before a vote: a rank that can't have one can't take part.

        overlaps, shared: as for `Saver`.
        """
        self._saver = Saver(storage, self.group, config, overlaps=overlaps, shared=shared)
        return self._saver

    def guard(self, guard: Guard) -> None:
        """Make optimizer steps wait for ``guard`` until the session is closed."""
        self._guard = guard
        guard_updates(guard)

    def at_exit(self, call_off: Callable[[], None]) -> None:
        """Call ``call_off``, returned by `end_at_exit`, once the session is closed."""
        self._call_off_exit = call_off

    @property
    def saver(self) -> Saver:
        if self._saver is None:
            raise AssertionError("the session is open once `start_saver` has returned")
        return self._saver

    def left_s(self) -> float:
        """Return the seconds left of `deadline`; at least 1 ms, as a wait of 0 s would not even check."""
        return max(_LEAST_S, self.deadline.left_s())

    # Closing. ----------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True if no thread of the session can still publish."""
        return self._saver is None or self._saver.has_ended

    @property
    def is_ours(self) -> bool:
        """False in a forked child, whose parent owns the session."""
        return self._saver is None or self._saver.is_ours

    def close(self, timeout_s: float | None, *, exiting: bool = False, first: Callable[[], None] | None = None) -> None:
        """Finish saves in flight within ``timeout_s``, then close everything in reverse order; idempotent.

        first: called before the saver is closed, to close what runs on it. exiting: as for `Saver.close`. Raises the
        error of the last step that failed; does nothing in a forked child.
        """
        if not self.is_ours:
            return
        with ExitStack() as closing:  # in reverse order
            closing.callback(self._call_off_exit)
            closing.callback(self.let_go)
            if self._saver is not None:
                closing.callback(self._saver.close, timeout_s, exiting=exiting)
            if first is not None:
                closing.callback(first)
            if self._guard is not None:
                unguard_updates(self._guard)

    def let_go(self) -> None:
        """Release what is held, unless a thread may still publish: then nobody else may write there."""
        if self.has_ended:
            with self._letting_go:
                self._held.close()


class OneCallSession(Session):
    """The session of one call that saves or exports, and may return before that has ended.

    Define `close_deliveries` for deliverers of its own.
    """

    _closer: threading.Thread | None = None

    def close_deliveries(self) -> None:
        """End what must end before the saver is closed."""

    def end(self) -> None:
        """Let the save finish in the time it has left, then close everything; idempotent."""
        self.close(max(self.left_s(), OUTCOME_GRACE_S), first=self.close_deliveries)

    def end_in_background(self, handle: SaveHandle) -> None:
        """Close on a separate thread once the save has ended: the saver waits for threads that run callbacks."""
        self._closer = threading.Thread(target=self._end_after, args=(handle,), name="holdfast-closer", daemon=True)
        self.at_exit(end_at_exit(self, OneCallSession._end_at_exit, OneCallSession._join))
        try:
            self._closer.start()
        except RuntimeError:
            self._closer = None
            self.end()
            raise

    def _join(self, timeout_s: float) -> None:
        if self._closer is not None:
            self._closer.join(timeout_s)

    def _end_at_exit(self, timeout_s: float) -> None:
        """Let the closing thread finish; give up what it has not closed by then."""
        self._join(timeout_s)
        self.close(0.0, exiting=True, first=self.close_deliveries)

    def _end_after(self, handle: SaveHandle) -> None:
        """Wait for the save to end, then close everything; give up what is late."""
        with contextlib.suppress(DeadlineExceeded):
            handle.exception(max(self.left_s(), OUTCOME_GRACE_S))
        try:
            self.end()
        except HoldfastError as error:
            _log.warning("the save to %s was given up: %s", handle.path, error)
