"""One rank that exchanges columns for rows; something happens to it in the middle. For test_export_lost_ranks.py.

    python exchange_job.py RANK WORLD PORT ROUND ACT

The store is another process's. ACT, at the start of round ROUND: ``dies``, ``stops``, or ``goes on``. What it ends with
is its last line of output: the error's kind, who is named, the seconds since round ROUND, and the message.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_files import columns_of, file_of

from holdfast import _torch_compat as compat
from holdfast.coordination.board import StoreBoard
from holdfast.coordination.links import GlooLinks, TransferHandle, prefix_store
from holdfast.coordination.store import clone_store
from holdfast.coordination.votes import meet
from holdfast.errors import HoldfastError
from holdfast.export.plan import plan_export
from holdfast.export.rank_plan import SourceTensor
from holdfast.export.transfer import Exchange, fill_local
from holdfast.keymap.moves import KeyMapping, MappedTensor, run

ROWS, COLUMNS = 1024, 64
BUCKET_BYTES = 8192
DEADLINE_S, GRACE_S = 6.0, 2.0


class WatchedLinks(GlooLinks):
    """Does what is to be done when a message of the chosen round is to be sent."""

    at: int
    act: str
    begun: float = 0.0

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        if tag == self.at and not self.begun:
            WatchedLinks.begun = time.monotonic()
            if self.act != "goes on":
                os.kill(os.getpid(), signal.SIGKILL if self.act == "dies" else signal.SIGSTOP)
        return super().send(peer, memory, tag)


def main() -> None:
    rank, world, port, WatchedLinks.at = map(int, sys.argv[1:5])
    WatchedLinks.act = sys.argv[5]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    board = StoreBoard(store, rank, world, "job")
    shape = (ROWS, COLUMNS * world)
    tensor = MappedTensor("w", shape, "float32", (run("w", ROWS * COLUMNS * world),))
    plan = plan_export(
        [file_of([tensor])],
        KeyMapping((tensor,), {}),
        {"w": SourceTensor("w", shape, "float32", columns_of(shape, world))},
        world=world,
        bucket_bytes=BUCKET_BYTES,
        block_bytes=4096,
    ).rank(rank)
    assert len(plan.rounds) > WatchedLinks.at
    whole = torch.arange(ROWS * COLUMNS * world, dtype=torch.float32).view(shape)
    memory = compat.as_bytes(whole[:, COLUMNS * rank : COLUMNS * (rank + 1)].contiguous())
    image = torch.zeros(plan.image_bytes, dtype=torch.uint8)
    fill_local(plan, [memory], image)
    places = clone_store(store)

    def make_links(name: str, timeout_s: float) -> WatchedLinks:
        return WatchedLinks(prefix_store(name, places), rank, world, timeout_s=timeout_s)

    exchange = Exchange(board, make_links, grace_s=GRACE_S)
    try:
        exchange.run(plan, [memory], image, key="a", timeout_s=DEADLINE_S)
    except HoldfastError as error:
        named = getattr(error, "rank", None), getattr(error, "waited_for", None)
        kind: Any = type(error).__name__
        message = str(error)
    else:
        named, kind, message = (None, None), None, ""
        for part in plan.parts:
            mine = image[part.image_offset : part.image_offset + part.size].view(torch.float32)
            assert torch.equal(mine, whole.view(-1)[part.offset // 4 : (part.offset + part.size) // 4])
    took_s = time.monotonic() - WatchedLinks.begun
    if kind is None:  # others may not have read all that was sent them
        meet(board, "end", timeout_s=DEADLINE_S)
    exchange.close()
    board.close()
    print(json.dumps([kind, *named, took_s, message]), flush=True)


if __name__ == "__main__":
    main()
