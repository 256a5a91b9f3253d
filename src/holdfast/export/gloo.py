"""gloo, as an exchange uses it: groups that torch keeps no list of, and their end at any moment.

All of it is public in torch, if hardly documented.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNUSED_TAG: Final = 1 << 30


def is_gloo_available() -> bool:
    return dist.is_available() and dist.is_gloo_available()


def prefix_store(prefix: str, store: Any) -> Any:
    """``store`` with a key space of its own."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def gloo_group(store: Any, rank: int, world: int, timeout_s: float) -> Any:
    """A gloo group that torch keeps no list of, so that it may be made on any thread and is gone when dropped.

    Waits for all ranks to make theirs, at most ``timeout_s``. Raises `RuntimeError`. The class is public, but hardly
    documented; its methods are those of every backend. ``dist.new_group`` would do, on the training thread.
    """
    return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))


def wait_work(work: Any, timeout_s: float) -> bool:
    """Wait for one operation of a group, without the GIL. Raises `RuntimeError`; then all its links are cut."""
    return bool(work.wait(timedelta(seconds=max(timeout_s, 0.001))))


def close_gloo_links(group: Any, peers: Sequence[int]) -> None:
    """End all operations under way, here at once, and for the peers as their connections are closed.

    gloo has no call for this that would leave other groups of the process alone. But it cuts all links when a wait has
    passed its deadline, and says so to other waits: so wait for what nobody sends, for a millisecond.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + interfaces):  # each of which has links of its own
        for peer in peers:
            with contextlib.suppress(RuntimeError):  # that it is closed already, or just has been
                group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
