"""A rank dies at every point of a save: the other is told soon, by name, and never anything that turns out untrue."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from lost_ranks import COMMIT_S, PERSIST_S, STAGE_S
from nursery import Child, Nursery
from processes import Log, engines_of, free_port, is_gone
from test_endings import UGLY, check_next_start

WORLD = 2
MARGIN_S = 15.0
"""For a busy machine; what is waited for in vain is bounded by the deadlines."""
AT_ONCE = 5


@dataclass(frozen=True)
class Loss:
    """``victim`` dies at ``point`` (see lost_ranks.py); what the other rank is told, and what the next start finds."""

    victim: int
    point: str
    told: tuple[str | None, ...]
    """Names of errors, None for published."""
    steps: tuple[int, ...] = ()
    limit_s: float = PERSIST_S + 2 * COMMIT_S

    def __str__(self) -> str:
        return f"rank {self.victim} dies {self.point}"


BALLOT_S = STAGE_S + 5 + 2 * COMMIT_S
LOSSES = [
    Loss(0, "before its ballot", ("SaveFailed",), limit_s=BALLOT_S),
    Loss(0, "when it has begun", ("SaveFailed",)),
    Loss(0, "before its report", ("OutcomeUnknown",)),
    Loss(0, "before it tells of its report", ("OutcomeUnknown",), steps=(1,)),
    Loss(0, "before the rename", ("OutcomeUnknown",), steps=(1,)),
    Loss(0, "after the rename", (None,), steps=(1,)),
    Loss(1, "before its ballot", ("SaveFailed",), limit_s=BALLOT_S),
    Loss(1, "before its report", ("SaveFailed",)),
    # Every report is there, and yet: what was announced as failed is never rolled forward.
    Loss(1, "before it tells of its report", ("SaveFailed",)),
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("lost_ranks") as found:
        yield found


class Job:
    def __init__(self, nursery: Nursery, loss: Loss, home: Path, *, store_elsewhere: bool) -> None:
        self.loss, self.home = loss, home
        self.store: dist.TCPStore | None = None
        env = {"MASTER_PORT": str(free_port())}
        if store_elsewhere:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env = {"MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        arguments = {
            "root": str(home / "root"),
            "log": str(home / "events"),
            "victim": loss.victim,
            "point": loss.point,
        }
        place = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", **env}
        self.ranks: list[Child] = [
            nursery.start("lost_ranks", "main", arguments, log=home / f"rank-{rank}", env={**place, "RANK": str(rank)})
            for rank in range(WORLD)
        ]

    def check(self) -> None:
        loss, survivor = self.loss, 1 - self.loss.victim
        victim, other = self.ranks[loss.victim], self.ranks[survivor]
        assert victim.wait(60) == -signal.SIGKILL, victim.stderr()
        engines = engines_of(other.pid)
        assert other.wait(60) == 0, other.stderr()
        log = Log(self.home / "events", survivor)
        told, took, closed = (log.events(kind)[0] for kind in ("told", "took", "closed"))
        # Without the store nothing can be learnt, and a rank that hadn't written its part yet is sure to have failed.
        allowed = loss.told if self.store is not None else {*loss.told, "SaveFailed"}
        assert told["error"] in allowed, told
        assert took["seconds"] < loss.limit_s + MARGIN_S
        assert closed["seconds"] < MARGIN_S
        assert not UGLY.search(other.stderr()), other.stderr()
        deadline = time.monotonic() + MARGIN_S
        while not all(map(is_gone, engines)):
            assert time.monotonic() < deadline, "an engine has outlived its trainer"
            time.sleep(0.01)
        steps, _ = check_next_start(self.home / "root")
        if told["error"] in loss.told:
            assert tuple(steps) == loss.steps
        else:
            assert steps == []


@pytest.mark.slow  # a minute of waiting for deadlines; on a loaded machine a rank may be lost before the other is up
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store_elsewhere", [False, True], ids=["store on rank 0", "store elsewhere"])
def test_the_other_rank_is_told(nursery: Nursery, tmp_path: Path, *, store_elsewhere: bool) -> None:
    """With the store on rank 0, as without `torchrun`, it goes with that rank: nothing can be asked any more."""
    losses = [loss for loss in LOSSES if store_elsewhere or loss.victim == 0]
    for start in range(0, len(losses), AT_ONCE):  # they mostly wait
        jobs = [
            Job(nursery, loss, tmp_path / str(number), store_elsewhere=store_elsewhere)
            for number, loss in enumerate(losses[start : start + AT_ONCE], start)
        ]
        for job in jobs:
            print(job.loss)
            job.check()
