"""What a contender must be able to do: the seam between the worker and each of ``peers``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from benchmarks.files import sync_below

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.state import BenchState


class Pending:
    """A save that goes on in the background.

    stats: what the contender itself says it took. ask_every_s: how often the training loop asks; a step takes longer.
    ends_when_asked: what there is to do in the end is done while it is asked, so the training thread is held by that.
    """

    ask_every_s = 0.01
    ends_when_asked = False

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}

    def done(self) -> bool:
        """Whether it is durable; called by the training thread, whose time it takes. Raises if it failed."""
        return True


class Waiting(Pending):
    """Done when ``wait`` has returned on a thread of its own: for what knows how to wait, and not how to tell."""

    def __init__(self, wait: Callable[[], Any], then_sync: Path | None = None) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._error: BaseException | None = None

        def run() -> None:
            try:
                wait()
                if then_sync is not None:
                    sync_below(then_sync)
            except BaseException as error:
                self._error = error
            self._ended.set()

        self._thread = threading.Thread(target=run, name="bench-waiting", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return self._ended.is_set()


class Contender:
    """One way to save and load. Made once in each rank of a worker; all calls come from the training thread.

    keeps: whether it has memory and processes of its own from one save to the next.
    """

    keeps = False

    def __init__(self, state: BenchState | None, folder: Path, *, rank: int, world: int) -> None:
        self.state, self.folder, self.rank, self.world = state, folder, rank, world

    @property
    def held_state(self) -> BenchState:
        assert self.state is not None, "this contender was set up without a state"
        return self.state

    def start(self) -> None:
        """What a user does once, before training."""

    def warm_up(self) -> None:
        """What a user may do ahead of the first save; returns at once or when done."""

    def save(self, path: Path) -> Pending:
        """Save to ``path``, which doesn't exist; returns when the caller may go on with forward and backward."""
        raise NotImplementedError

    def hand_over(self, pending: Pending, path: Path) -> None:
        """See to it that the save is at ``path``: outside of all measuring, when it is done on every rank."""

    def before_update(self) -> None:
        """Returns when the state may be changed."""

    def load(self, state: BenchState, path: Path) -> None:
        """Load into ``state``, in place."""
        raise NotImplementedError

    def read_part(self, name: str, rows: tuple[int, int], path: Path) -> Any:
        """Some rows of one tensor, as little read as it can; returns the tensor."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Whatever else is worth telling, at the end."""
        return {}

    def close(self) -> None:
        """Let go of everything."""
