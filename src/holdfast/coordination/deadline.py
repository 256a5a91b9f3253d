"""A deadline, passed down to all the waits that it limits. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline on this process's monotonic clock; made by `after`."""

    timeout_s: float
    ends_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return a deadline ``timeout_s`` seconds from now (0 or more, already checked)."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    def left_s(self) -> float:
        """Return the seconds left; 0.0 once it has passed."""
        return max(0.0, self.ends_s - time.monotonic())

    def passed(self) -> bool:
        """Return True if no time is left."""
        return self.left_s() <= 0.0

    def exceeded(self, waited_for: str, advice: str) -> DeadlineExceeded:
        """Return the error to raise once it has passed. ``advice``: what the user can do."""
        message = f"{waited_for} did not happen within {self.timeout_s:g} s; {advice}"
        return DeadlineExceeded(message, waited_for=waited_for, timeout_s=self.timeout_s)
