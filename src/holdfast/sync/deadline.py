"""A moment by which something must have happened, handed down through all the waits that it bounds. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """``timeout_s`` seconds from when it was made by `after`; on this process's monotonic clock."""

    timeout_s: float
    ends_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """One that passes in ``timeout_s`` seconds (0 or more, already checked)."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    def left_s(self) -> float:
        """Seconds that are left; 0.0 once it has passed."""
        return max(0.0, self.ends_s - time.monotonic())

    def passed(self) -> bool:
        """Whether nothing is left."""
        return self.left_s() <= 0.0

    def exceeded(self, waited_for: str, advice: str) -> DeadlineExceeded:
        """The error to raise once it has passed. ``advice``: what the user may do."""
        message = f"{waited_for} did not happen within {self.timeout_s:g} s; {advice}"
        return DeadlineExceeded(message, waited_for=waited_for, timeout_s=self.timeout_s)
