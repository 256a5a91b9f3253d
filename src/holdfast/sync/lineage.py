"""Tell which training step a version is of, and who has it: the events that a journal and the page keep. Torch-free.

    Publishing.publish -> version.published    on each publisher rank
    a commit -> version.received               on publisher rank 0, which receivers tell; of a directory or a bucket
                                               in the receiver's process
    a connection ends -> receiver.left         on publisher rank 0, of a receiver that had a version

Does not: tell who has a version that came over a session (NCCL, CUDA IPC).
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, Final

from holdfast import events

if TYPE_CHECKING:
    from collections.abc import Mapping

STEP_KEYS: Final = ("step", "train_step", "global_step", "global_steps")
"""Keys of a version's ``meta`` that say its training step; the first that has an integer counts."""

_numbers = iter(range(1, 1 << 62))


def receiver_name() -> str:
    """Return a name for a receiver that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"


def train_step_of(meta: Mapping[str, Any]) -> int | None:
    """Return the training step that ``meta`` tells, None if it tells none."""
    found = (meta.get(key) for key in STEP_KEYS)
    return next((step for step in found if isinstance(step, int) and not isinstance(step, bool)), None)


def tell_published(
    version: int, meta: Mapping[str, Any], *, rank: int, seconds: float, path: str | None = None
) -> None:
    """Emit ``version.published``. seconds: how long `publish` took; path: where the version lies, if in a storage."""
    events.emit(
        "version.published", step=version, rank=rank, path=path, train_step=train_step_of(meta), seconds=seconds
    )


def tell_received(
    version: int, meta: Mapping[str, Any], *, receiver: str, seconds: float, path: str | None = None
) -> None:
    """Emit ``version.received``. seconds: of bringing and committing it, without the wait for it."""
    step = train_step_of(meta)
    events.emit("version.received", step=version, path=path, train_step=step, receiver=receiver, seconds=seconds)


def tell_left(receiver: str) -> None:
    """Emit ``receiver.left``: it has ended, or lost its connection."""
    events.emit("receiver.left", receiver=receiver)
