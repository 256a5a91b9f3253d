"""One rank of a load that is read once, to be run as a program: prints its outcome as JSON, or is lost on its way.

    python read_once_job.py RANK WORLD PORT CHECKPOINT AT ACT

ACT: "goes on", or what the rank does to itself when it is to send its unit number AT: "dies", "stops".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.coordination.links import GlooLinks, TransferHandle
from holdfast.errors import HoldfastError
from holdfast.loader import read_once

STALL_S, TIMEOUT_S = 2.0, 12.0
ROWS, COLUMNS = 256, 4096
WEIGHTS = 12


def state_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{at}": torch.randn(ROWS, COLUMNS, generator=generator) for at in range(WEIGHTS)}


class WatchedLinks(GlooLinks):
    """Does what is to be done when the chosen unit is to be sent."""

    at: int
    act: str
    sent = 0

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> TransferHandle:
        WatchedLinks.sent += 1
        if self.sent == self.at and self.act != "goes on":
            os.kill(os.getpid(), signal.SIGKILL if self.act == "dies" else signal.SIGSTOP)
        return super().send(peer, memory, tag)


def make_links(store: Any, rank: int, world: int, timeout_s: float) -> WatchedLinks:
    return WatchedLinks(store, rank, world, timeout_s=timeout_s)


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    WatchedLinks.at, WatchedLinks.act = int(sys.argv[5]), sys.argv[6]
    read_once.make_links = make_links
    read_once.STALL_S = STALL_S
    os.environ[read_once.VARIABLE] = "1"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {"rank": rank, "error": ""}
    holdfast.add_hook(lambda event: found.update(event.fields) if event.kind == "load.finished" else None)
    state = state_of(2)
    dist.barrier()
    began = time.monotonic()
    try:
        holdfast.load(state, sys.argv[4], timeout=TIMEOUT_S)
        expected = state_of(1)
        found["is_right"] = all(torch.equal(state[name], expected[name]) for name in expected)
    except HoldfastError as error:
        found["error"], found["message"] = type(error).__name__, str(error)
    found["took_s"] = time.monotonic() - began
    found["counted"] = holdfast.statistics()["loads_read_alone"]
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group of which a member is lost can't be left in order


if __name__ == "__main__":
    main()
