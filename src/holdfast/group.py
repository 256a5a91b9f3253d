"""Which ranks save and load together, and the board they talk over.

Without a process group there is one rank and a board in its own memory. With one, the board is that group's own
Store: no collective is ever issued, so a background thread can use it while training uses the group.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from holdfast import _torch_compat as compat
from holdfast.coordination import CALL_TIMEOUT_S, LocalBoard, StoreBoard
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.coordination import Board

_CALL_TIMEOUT_S_MIN: Final = 8.0
"""The host of a Store looks up the name of who connects; where names are slow that takes it 5 s."""

# Sessions of a group are numbered, so that a second manager never sees the keys of a first. All ranks open their
# sessions in the same order, as they run the same program.
_session_numbers: defaultdict[tuple[tuple[int, ...], str], Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, slots=True)
class Group:
    """``rank`` of ``world``; ``ranks`` are the global ranks in group order; ``board`` is this session's."""

    rank: int
    world: int
    ranks: tuple[int, ...]
    board: Board
    store: Any | None = None
    """The group's own Store; None for a single rank."""
    prefix: str = ""
    """Of this session's keys there."""


def open_group(process_group: Any | None, *, purpose: str, timeout: object = None) -> Group:
    """This process's place in ``process_group`` (None: the default one, or a single rank where there is none).

    Every rank of the group must call it, in the same order for the same ``purpose``. Waits for the Store alone.
    timeout: seconds that the caller has, not checked yet; a Store that doesn't answer is given up in about as many.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ConfigError(
                "process_group was given but torch.distributed is not initialized; call init_process_group first",
                field="process_group",
            )
        return Group(0, 1, (0,), LocalBoard())
    group = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process_group it was given; call this on the group's members only",
            field="process_group",
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    prefix = f"holdfast/{purpose}/{next(_session_numbers[ranks, purpose])}"
    store = compat.store_of(group)
    board = StoreBoard(store, rank, len(ranks), prefix, call_timeout_s=_call_timeout_s(timeout))
    return Group(rank, len(ranks), ranks, board, store, prefix)


def _call_timeout_s(timeout: object) -> float:
    if not isinstance(timeout, (int, float)):
        return CALL_TIMEOUT_S
    return min(CALL_TIMEOUT_S, max(_CALL_TIMEOUT_S_MIN, timeout))
