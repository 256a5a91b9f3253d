"""How far an engine has come with one attempt, as its messages tell the trainer. Torch-free data.

Guarded by the client's condition; does no waiting of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engine import messages
from holdfast.errors import StorageError

if TYPE_CHECKING:
    from holdfast.engine.link import Link
    from holdfast.errors import EngineDied


class AttemptProgress:
    """What is known of one attempt; one for each attempt."""

    __slots__ = (
        "cancelled",
        "failure",
        "link",
        "name",
        "nbytes",
        "persisted",
        "report_left",
        "reported",
        "waiting",
        "written",
    )

    def __init__(self, name: str, nbytes: int, link: Link) -> None:
        self.name, self.nbytes, self.link = name, nbytes, link
        self.written = 0
        self.waiting = ""
        self.persisted: messages.Persisted | None = None
        self.reported: messages.Reported | None = None
        self.cancelled = self.report_left = False
        self.failure: StorageError | None = None

    @property
    def error(self) -> EngineDied | StorageError | None:
        """What ended it, if anything but a report or a cancel did."""
        if self.failure is not None or self.reported is not None or self.cancelled:
            return self.failure
        return self.link.death

    @property
    def in_work(self) -> bool:
        return self.error is None and self.reported is None and not self.cancelled

    @property
    def may_leave_report(self) -> bool:
        """Of one that has ended: whether its report may be there, or come back after a power loss."""
        answered = self.failure is not None or self.cancelled
        return self.report_left or self.reported is not None or not answered

    def note(
        self,
        rank: int,
        message: messages.Beat | messages.Persisted | messages.Reported | messages.Cancelled | messages.Failed,
    ) -> None:
        match message:
            case messages.Beat():
                self.written, self.waiting = message.written, message.waiting
            case messages.Persisted():
                self.persisted = message
                self.written = message.nbytes
            case messages.Reported():
                self.reported = message
            case messages.Cancelled():
                self.cancelled, self.report_left = True, self.report_left or message.report_left
            case messages.Failed():
                text = f"rank {rank}, attempt {self.name}: {message.detail}"
                self.failure = StorageError(text, path=message.path, errno=message.errno)
                self.report_left = message.report_left
