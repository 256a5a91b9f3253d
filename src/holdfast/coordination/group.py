"""The group of ranks that save and load together, and its board.

Without a process group there is one rank and a board in its own memory. With one, the board is that group's own
Store: no collective is ever issued, so a background thread can use it while training uses the group.

    rank 0     names a new session, and invites the others by one key
    others     accept the invitation once; the last one removes it
    rank 0     withdraws it when it closes a session that not all have joined

Guarantees: ranks that open a session together get the same one, whatever each of them opened before: in another process
group, before a restart, or alone. A session's name is never reused, so no two share a key.
Assumes: every session begins with a vote of all ranks (`Votes.raise_together`), so that rank 0 doesn't open the next
before all have joined, unless this one has failed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from holdfast import _torch_compat as compat
from holdfast.coordination.board import CALL_TIMEOUT_S, BoardLost, LocalBoard, StoreBoard
from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.coordination.board import Board

_CALL_TIMEOUT_S_MIN: Final = 8.0
"""A Store's host resolves the names of its clients, which takes 5 s with slow DNS."""

MEETING_S: Final = 120.0
"""Timeout for rank 0 to open a session, unless the caller gives one."""
MEETING_S_MAX: Final = 7 * 86_400.0
_INVITATION: Final = "session"
_JOINED_MAX: Final = 256

_joined: deque[bytes] = deque(maxlen=_JOINED_MAX)
"""Sessions that this process has joined: it ignores their invitations, which others have yet to accept."""
_joining = threading.Lock()


ALONE: Final = "alone"
"""As a process group: the calling rank by itself, as if there were no others."""

_warned: list[str] = []


@dataclass(frozen=True, slots=True)
class Group:
    """``rank`` of ``world``; ``ranks``: global ranks in group order; ``board``: the session's."""

    rank: int
    world: int
    ranks: tuple[int, ...]
    board: Board
    store: Any | None = None
    """The group's own Store; None for a single rank."""
    prefix: str = ""
    """Prefix of this session's keys in the Store."""


def ranks_of(process_group: Any | None) -> tuple[int, ...]:
    """Return the global ranks of ``process_group``, in group order; `open_group` raises for an invalid one."""
    if process_group == ALONE:
        return (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    return tuple(dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD))


def open_group(process_group: Any | None, *, purpose: str, timeout: object = None, patience_s: object = None) -> Group:
    """Open a session of ``process_group`` (None: the default one, or a single rank if there is none).

    Every rank of the group must call it, for the same ``purpose``. Waits for the Store, and for rank 0 to call it.
    `ALONE`: this rank and no other, which talks to nobody.
    timeout: the caller's timeout in seconds, not checked yet; bounds requests to a Store that doesn't answer.
    patience_s: how long to wait for rank 0, if different. Raises `DeadlineExceeded`.
    """
    if process_group == ALONE:
        return Group(0, 1, ranks_of(ALONE), LocalBoard())
    if isinstance(process_group, str):
        raise ConfigError(
            f"process_group must be a torch.distributed group, None for the default one, or {ALONE!r} for this rank by "
            f"itself, not {process_group!r}",
            field="process_group",
        )
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ConfigError(
                "process_group was given but torch.distributed is not initialized; call init_process_group first",
                field="process_group",
            )
        _warn_if_one_of_many(purpose)
        return Group(0, 1, (0,), LocalBoard())
    group = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process_group it was given; call this on the group's members only",
            field="process_group",
        )
    ranks = ranks_of(group)
    store = compat.store_of(group)
    home = StoreBoard(store, rank, len(ranks), f"holdfast/{purpose}", call_timeout_s=_call_timeout_s(timeout))
    try:
        board = _SessionBoard(home, _meet(home, purpose, _seconds(patience_s) or _seconds(timeout) or MEETING_S))
    except BaseException:
        home.close()
        raise
    return Group(rank, len(ranks), ranks, board, store, board.prefix)


class _SessionBoard(StoreBoard):
    """The board of one session. On rank 0, closing it withdraws the invitation."""

    def __init__(self, home: StoreBoard, name: bytes) -> None:
        super().__init__(
            None, home.rank, home.world, f"{home.prefix}/{name.decode()}", call_timeout_s=0.0, _client=home.client
        )
        self._home = home
        self._name = name

    def close(self) -> None:
        if self.rank == 0 and self.world > 1:
            with contextlib.suppress(HoldfastError):  # already closed, or lost: then no rank reads it
                _take_back(self._home, self._name)
        self._home.close()
        super().close()


def _meet(home: StoreBoard, purpose: str, patience_s: float) -> bytes:
    """Return the name of the session that all ranks are about to open."""
    name = secrets.token_hex(8).encode()
    try:
        if home.rank == 0:
            if home.world > 1:
                home.set(_INVITATION, name)
            return name
        waiting_for = f"rank 0 to begin the {_CALLS.get(purpose, purpose)} that this rank has begun"
        name = home.get(_INVITATION, timeout_s=patience_s, waiting_for=waiting_for, accept=_join)
        if home.add(_joined_key(name)) == home.world - 1:
            _take_back(home, name)
    except BoardLost:
        pass  # reported by the vote that comes next
    return name


def _take_back(home: StoreBoard, name: bytes) -> None:
    if home.try_get(_INVITATION) == name:
        home.delete(_INVITATION)
        home.delete(_joined_key(name))


_CALLS: Final = {"manager": "CheckpointManager", "sync": "weight sync"}


def _joined_key(name: bytes) -> str:
    return f"{name.decode()}/joined"


def _join(name: bytes) -> bool:
    with _joining:
        if name in _joined:
            return False
        _joined.append(name)
        return True


def _seconds(value: object) -> float | None:
    return min(value, MEETING_S_MAX) if isinstance(value, (int, float)) and value > 0 else None


def _warn_if_one_of_many(purpose: str) -> None:
    """Warn once if a launcher has started several processes that would each save alone."""
    world = os.environ.get("WORLD_SIZE", "")
    if purpose == "load" or "RANK" not in os.environ or not world.isdecimal() or int(world) < 2 or _warned:
        return
    _warned.append(purpose)
    warnings.warn(
        f"WORLD_SIZE is {world}, but torch.distributed is not initialized: rank {os.environ['RANK']} acts as the "
        "only rank, and ranks that use the same path get in conflict. Call init_process_group first; if only one "
        "process is meant to write, unset WORLD_SIZE there",
        stacklevel=4,
    )


def _call_timeout_s(timeout: object) -> float:
    if not isinstance(timeout, (int, float)):
        return CALL_TIMEOUT_S
    return min(CALL_TIMEOUT_S, max(_CALL_TIMEOUT_S_MIN, timeout))
