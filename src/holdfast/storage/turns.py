"""Jobs on a few threads, the caller's among them, that take turns. Torch-free.

Guarantees: returns when every job that was begun has ended, also after an error or an interrupt; of errors the first is
raised, and no job is begun after it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def take_turns(work: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the jobs of ``work`` on the caller's thread and up to ``threads - 1`` others."""
    jobs = list(work)
    queue = iter(jobs)  # of a list: safe to share
    errors: list[BaseException] = []
    ended: list[threading.Event] = []

    def take() -> None:
        try:
            for job in queue:
                if not errors:
                    job()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    def join_in(end: threading.Event) -> None:
        take()
        end.set()

    try:
        for number in range(1, min(threads, len(jobs))):
            end = threading.Event()
            threading.Thread(target=join_in, args=(end,), name=f"holdfast-read-{number}", daemon=True).start()
            ended.append(end)
        take()
        for end in ended:
            end.wait()
    finally:  # an interrupt as well waits for the jobs that have begun, and for no other
        for _ in queue:
            pass
        # Not by `Thread.join`: once interrupted it takes the thread for ended (seen with Python 3.11).
        for end in ended:
            end.wait()
    if errors:
        raise errors[0]
