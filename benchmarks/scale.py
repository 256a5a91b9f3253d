"""What a save costs at 64 to 16,384 ranks: the real planner, agreement and commit, simulated ranks, one core.

    python benchmarks/scale.py --out out/scale            (--quick: up to 1,024 ranks)

Every rank of a simulated job goes through the calls that its stager and finalizer threads make (ballot, verdict, plan,
begin, report, settle), one after the other in this process, over a `StoreBoard` on a Store in memory that counts
requests and bytes by who asks. The coordinator's share, and that of one rank, are timed apart. What persists (engine,
disk) and what copies is left out. The attempt directory is in memory, so file systems with many files are, too.

Times are CPU seconds of one thread, except over the real TCPStore. Ranks plan themselves; of large worlds eight are
really planned, and the others tell the same sizes under their names. No world has a ``.metadata`` here: rendering it is
measured by itself, and extrapolated from 64 ranks for a larger world, as is what it takes to open every report; both
are marked. The Store's requests are priced by a real TCPStore in a process of its own on this machine, and the
coordinator's half of a save is run against it.

The model: FSDP on dimension 0 over ranks/8 by tensor parallelism of 8; a quarter of the tensors each are weights and
their two Adam moments (four in five in two dimensions, the rest replicated over the tensor-parallel ranks), a quarter
step counters, replicated on every rank; 12 objects.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import holdfast
from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.commit.attempt import Attempt, Deadlines
from holdfast.commit.messages import AttemptChannel
from holdfast.commit.recovery import recover
from holdfast.coordination.board import StoreBoard
from holdfast.format.dcp_metadata import render_metadata
from holdfast.format.manifest import (
    AttemptPlan,
    Manifest,
    ManifestReport,
    Report,
    ReportFile,
    decode_report,
    encode_attempt_plan,
    encode_index,
    encode_report,
    read_index,
    report_name,
)
from holdfast.format.structure import (
    PER_RANK,
    MeshLayout,
    ObjectSpec,
    Placement,
    Structure,
    TensorSpec,
    digest_of,
    encode_structure,
)
from holdfast.plan.write import RankPlan, SavePlan, _Planner, index_of, plan_rank
from holdfast.saver import agreement as world_plan
from holdfast.saver.agreement import Agreement, PlanDecision, PlanProposal, Whole, WorldPlan, tell_planned
from holdfast.testing.memory_storage import MemoryStorage
from scale_report import draw, laws, render
from scale_store import CountedStore, Inline, measure_tcp_store

if TYPE_CHECKING:
    from collections.abc import Iterator

TENSOR_PARALLEL = 8
SAMPLED_RANKS = 8
METADATA_RANKS = 64
SAVES = 5
LIVE_SAVES = 3
LONG_S = 600.0
ROOT = "/shared/runs/llm-405b/checkpoints"


# the model -----------------------------------------------------------------------------------------------------


def structure_of(world: int, tensors: int) -> Structure:
    mesh = (world // TENSOR_PARALLEL, TENSOR_PARALLEL)
    ranks = tuple(range(world))
    layouts = (
        MeshLayout(mesh, ranks, (Placement("shard", 0), Placement("shard", 1))),
        MeshLayout(mesh, ranks, (Placement("strided", 0, TENSOR_PARALLEL), Placement("shard", 0))),
        MeshLayout(mesh, ranks, (Placement("shard", 0), Placement("replicate"))),
    )
    specs = []
    for number in range(tensors // 4):
        name = f"layers.{number // 9}.attention.w{number % 9}.weight"
        layout = 2 if number % 5 == 0 else number % 2
        shape = (max(world, 8192),) if layout == 2 else (max(2 * world, 8192), 4096)
        kinds = [("model", name), *(("optimizer", "state", name, kind) for kind in ("exp_avg", "exp_avg_sq"))]
        specs += [TensorSpec(".".join(path), path, shape, "float32", layout) for path in kinds]
        path = ("optimizer", "state", name, "step")
        specs.append(TensorSpec(".".join(path), path, (), "float32"))
    objects = [ObjectSpec(f"optimizer.param_groups.{n}", ("optimizer", "param_groups", n), 1024) for n in range(10)]
    by_name = attrgetter("name")
    objects += [ObjectSpec(f"{kind}.{PER_RANK}", (kind, PER_RANK), 8192) for kind in ("rng", "dataloader")]
    return Structure(layouts, tuple(sorted(specs, key=by_name)), tuple(sorted(objects, key=by_name)))


def on_rank(plan: RankPlan, rank: int) -> RankPlan:
    """``plan`` as that of another rank: its files have the rank in their names."""
    files = [dataclasses.replace(file, name=file.name.replace(f"__{plan.rank}_", f"__{rank}_")) for file in plan.files]
    return dataclasses.replace(plan, rank=rank, files=tuple(files))


# one world -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class World:
    """A simulated job: all of its ranks, and what was measured of them, in seconds by phase and who."""

    ranks: int
    tensors: int
    real_store: Any = None
    """To be used instead of one in memory."""

    def __post_init__(self) -> None:
        self.store = CountedStore()
        client = Inline(self.real_store or self.store)
        self.boards = [
            StoreBoard(None, rank, self.ranks, "holdfast/save/0", _client=client)  # type: ignore[arg-type]
            for rank in range(self.ranks)
        ]
        self.agreements = [Agreement(board) for board in self.boards]
        self.structure = structure_of(self.ranks, self.tensors)
        self.encoded = encode_structure(self.structure)
        self.digest = digest_of(self.encoded)
        self.storage = MemoryStorage()
        self.keeper = Catalog(self.storage, "step-{step}", Keep(last=3))
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.figures: dict[str, float] = {}

    @contextmanager
    def timed(self, what: str, who: str, *, shared_by: int = 1) -> Iterator[None]:
        with self.store.asked_by(who):
            clock = time.thread_time if self.real_store is None else time.perf_counter
            began = clock()
            yield
            self.seconds[f"{who}: {what}"].append((clock() - began) / shared_by)

    def agree(self, step: int, *, replan: bool) -> tuple[int, PlanDecision]:
        """Every rank's ballot and verdict."""
        ballot = PlanProposal(step, f"{ROOT}/step-{step}", self.digest, replan=replan)
        first, last = self.agreements[0], self.agreements[-1]
        others = self.agreements[1:]
        with self.timed("cast", "coordinator"):
            number = first.cast(ballot, self.encoded)
        with self.timed("cast", "rank", shared_by=len(others)):
            for agreement in others:
                agreement.cast(ballot, self.encoded)
        with self.timed("judge", "coordinator"):
            first.wait_verdict(timeout_s=LONG_S)
        with self.timed("verdict", "rank", shared_by=len(others)):
            for agreement in others[:-1]:
                agreement.wait_verdict(timeout_s=LONG_S)
            verdict = last.wait_verdict(timeout_s=LONG_S)
        assert verdict.kind == ("replan" if replan else "same")
        return number, verdict

    def plan(self, number: int, verdict: PlanDecision) -> WorldPlan:
        """What ``stage`` does with a replan: every rank plans itself, and tells."""
        world = WorldPlan(number, {}, ())
        sampled = sorted({round(n * (self.ranks - 1) / (SAMPLED_RANKS - 1)) for n in range(SAMPLED_RANKS)})
        plans: list[RankPlan] = []
        for rank in sampled:
            who = "rank" if rank else "coordinator"
            with self.timed("structures", who):
                structures = self.agreements[rank].wait_structures(verdict, own=self.encoded, timeout_s=LONG_S)
            with self.timed("plan", who):
                digests = verdict.rank_digests()
                plans.append(plan_rank(structures, digests, rank))
            if not rank:
                world = WorldPlan(number, structures, digests)
        self.rank_plan = plans[0]
        self.whole_sizes = {}
        with self.timed("tell plan", "rank", shared_by=self.ranks):
            for rank, board in enumerate(self.boards):
                told = on_rank(plans[rank % len(plans)], rank)
                tell_planned(board, number, told)
                self.whole_sizes[rank] = told.nbytes
        return world

    def deliver(self, key: str, step: int, world: WorldPlan, *, first: bool) -> None:
        """What ``delivery`` does, on every rank; the engine's reports are made up."""
        kind = "collect plans" if first else "plan known"
        with self.timed(kind, "coordinator"):
            whole = world.complete(self.boards[0], timeout_s=LONG_S)
        assert isinstance(whole, Whole)
        attempts: list[Attempt] = []
        with self.timed("begin", "coordinator"):
            plan = self.attempt_plan(step, whole)
            attempts.append(self.begin(0, key, plan))
        with self.timed("begin", "rank", shared_by=self.ranks - 1):
            attempts += [self.begin(rank, key) for rank in range(1, self.ranks)]
        size = len(self.encoded_report())
        with self.timed("report", "rank", shared_by=self.ranks):
            for rank, attempt in enumerate(attempts):
                nbytes = self.whole_sizes[rank]
                attempt.report(ManifestReport(rank, report_name(rank), size, f"{rank:032x}", nbytes))
        with self.timed("commit", "coordinator"):
            attempts[0].settle()
        with self.timed("learn", "rank", shared_by=self.ranks - 1):
            for attempt in attempts[1:]:
                attempt.settle()
        with self.timed("retention", "coordinator"):
            self.keeper.apply_retention(step, self.storage.remove_tree)
        self.figures["manifest_bytes"] = self.storage.size(f"step-{step}/holdfast.json") or 0
        self.figures["attempt_plan_bytes"] = len(encode_attempt_plan(plan))

    def attempt_plan(self, step: int, whole: Whole) -> AttemptPlan:
        manifest = Manifest(
            format=1,
            name=f"step-{step}",
            attempt=f"{step:012x}",
            step=step,
            world=self.ranks,
            created=datetime.now(timezone.utc).isoformat(),
            metrics={"loss": 1.0},
            resumable=True,
            versions={"holdfast": holdfast.__version__},
            reports=(),
            files=(),
        )
        return AttemptPlan(f"{step:012x}", f"step-{step}", step, self.ranks, whole.planned, manifest)

    def begin(self, rank: int, key: str, plan: AttemptPlan | None = None) -> Attempt:
        return Attempt.begin(
            storage=self.storage,
            board=self.boards[rank],
            clock=time.monotonic,
            key=key,
            deadlines=Deadlines(LONG_S, LONG_S, LONG_S),
            plan=plan,
            prewritten={},
        )

    def encoded_report(self) -> bytes:
        if not hasattr(self, "_report"):
            plan = self.rank_plan
            files = tuple(
                ReportFile(file.name, file.size, bytes(8 * -(-file.size // (1 << 20)))) for file in plan.files
            )
            index = encode_index(index_of(plan))
            self._report = encode_report(Report("0" * 12, 1, 0, self.ranks, files, bytes(8 * len(plan.tensors)), index))
        return self._report

    def take_requests(self, name: str) -> None:
        """Book the requests since the last call under ``name``; those of a rank are the mean over all."""
        for who, ranks in (("coordinator", 1), ("rank", self.ranks - 1)):
            self.figures[f"{name}_{who}_answered"] = self.store.answered[who] / ranks
            self.figures[f"{name}_{who}_unanswered"] = self.store.unanswered[who] / ranks
            self.figures[f"{name}_{who}_bytes"] = self.store.nbytes[who] / ranks
        for counter in (self.store.answered, self.store.unanswered, self.store.nbytes):
            counter.clear()


def measure_world(ranks: int, tensors: int) -> dict[str, Any]:
    """A first save, and `SAVES` like it; ``.metadata`` is measured by itself."""
    world_plan.METADATA_ROWS_MAX = 0
    world = World(ranks, tensors)
    number, verdict = world.agree(0, replan=True)
    plan = world.plan(number, verdict)
    world.deliver("attempt/0", 0, plan, first=True)
    world.take_requests("first")
    first = {what: statistics.median(times) for what, times in world.seconds.items()}
    plan_s = {who: statistics.median(world.seconds[f"{who}: plan"]) for who in ("rank", "coordinator")}
    world.seconds.clear()
    for step in range(1, SAVES + 1):
        world.agree(step, replan=False)
        world.deliver(f"attempt/{step}", step, plan, first=False)
        world.take_requests("steady")
    steady = {what: statistics.median(times) for what, times in world.seconds.items()}
    for agreement in world.agreements:
        agreement.leave()
    assert len(world.store) == 0, "something was left in the Store"
    row: dict[str, Any] = {
        "ranks": ranks,
        "tensors": tensors,
        "first_coordinator_s": sum(s for what, s in first.items() if what.startswith("coordinator")),
        "first_rank_s": sum(s for what, s in first.items() if what.startswith("rank")),
        "steady_coordinator_s": sum(s for what, s in steady.items() if what.startswith("coordinator")),
        "steady_rank_s": sum(s for what, s in steady.items() if what.startswith("rank")),
        "plan_rank_s": plan_s["rank"],
        "structure_bytes": len(world.encoded),
        "report_bytes": len(world.encoded_report()),
        **world.figures,
        "first": first,
        "steady": steady,
    }
    row.update(measure_metadata(world, plan))
    row.update(measure_recovery(world))
    return row


def measure_metadata(world: World, plan: WorldPlan) -> dict[str, Any]:
    """A plan of all ranks and the stock ``.metadata``: of up to `METADATA_RANKS` ranks, the rest extrapolated."""
    ranks = min(world.ranks, METADATA_RANKS, max(1, METADATA_RANKS * 2000 // world.tensors))
    share = world.ranks / ranks
    began = time.thread_time()
    planner = _Planner(plan.structures, plan.digests)
    shared_s = time.thread_time() - began
    plans = tuple(planner.rank_plan(round(n * (world.ranks - 1) / max(1, ranks - 1))) for n in range(ranks))
    plan_s = time.thread_time() - began - shared_s
    began = time.thread_time()
    nbytes = len(render_metadata(SavePlan(ranks, plans)))
    render_s = time.thread_time() - began
    return {
        "metadata_rows": (len(world.structure.tensors) + len(world.structure.objects)) * world.ranks,
        "metadata_plan_s": shared_s + plan_s * share,
        "metadata_render_s": render_s * share,
        "metadata_bytes": nbytes * share,
        "metadata_extrapolated": share > 1,
    }


class Reports(MemoryStorage):
    """An attempt that a crash left, every report of it there: made when read, as all of them would not fit."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._ranks = world.ranks
        index = encode_index(index_of(world.rank_plan))
        sums = bytes(8 * len(world.rank_plan.tensors))
        self._template = Report("0" * 12, 1, 0, world.ranks, (), sums, index)
        self.nbytes = 0
        directory = f".step-1.{'0' * 12}.incomplete"
        manifest = world.attempt_plan(0, Whole((), None)).manifest
        manifest = msgspec.structs.replace(manifest, name="step-1", attempt="0" * 12, step=1)
        plan = AttemptPlan("0" * 12, "step-1", 1, world.ranks, ((),) * world.ranks, manifest)
        self.make_dir(directory)
        self.write_file(f"{directory}/.plan", encode_attempt_plan(plan))
        self.sync_dir(directory)
        self.sync_dir("")

    def size(self, name: str) -> int | None:
        return 1 if name.endswith(".report") else super().size(name)

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        if not name.endswith(".report"):
            return super().read_file(name, max_bytes=max_bytes)
        data = encode_report(msgspec.structs.replace(self._template, rank=int(name[-12:-7])))
        self.nbytes += len(data)
        return data


def measure_recovery(world: World) -> dict[str, Any]:
    """Roll an attempt of all ranks forward (its data files left out), and open the reports of a few as a load does."""
    storage = Reports(world)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    report = recover(storage, clock=time.monotonic, sleep=time.sleep)
    recovery_s = time.thread_time() - began
    assert report.rolled_forward == ("step-1",)
    data = world.encoded_report()
    began = time.thread_time()
    for _ in range(3):
        read_index(decode_report(data, path="report"), path="report")
    return {
        "recovery_s": recovery_s,
        "recovery_bytes_read": storage.nbytes,
        "recovery_rss_growth_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "open_all_reports_s": (time.thread_time() - began) / 3 * world.ranks,
        "open_all_reports_bytes": len(data) * world.ranks,
    }


def coordinator_over(store: Any, ranks: int) -> dict[str, float]:
    """The coordinator's half of a save over a real Store, the messages of ``ranks`` ranks in it; medians."""
    world = World(ranks, 8, store)
    whole = Whole(tuple(((f"__{rank}_0.distcp", 4096),) for rank in range(ranks)), None)
    lines = [ManifestReport(rank, report_name(rank), 1, f"{rank:032x}", 4096) for rank in range(ranks)]
    for step in range(LIVE_SAVES + 1):
        world.agree(step, replan=step == 0)
        with world.timed("begin", "coordinator"):
            attempt = world.begin(0, f"attempt/{step}", world.attempt_plan(step, whole))
        for board, line in zip(world.boards[1:], lines[1:], strict=True):
            AttemptChannel(board, f"attempt/{step}").tell_report(line)
        world.boards[0].try_get("all of that is in")  # requests of one connection are served in order
        with world.timed("commit", "coordinator"):
            attempt.report(lines[0])
            attempt.settle()
    return {
        what.partition(": ")[2]: statistics.median(times[1:])
        for what, times in world.seconds.items()
        if what.startswith("coordinator")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for scale.md, scale.json and scale.png")
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks")
    arguments = parser.parse_args()
    began = time.perf_counter()
    limit = world_plan.METADATA_ROWS_MAX
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})
    sizes = (64, 256, 1024) if arguments.quick else (64, 256, 1024, 4096, 16384)
    by_ranks = []
    for ranks in sizes:
        by_ranks.append(measure_world(ranks, 2000))
        print(f"{ranks} ranks x 2000 tensors: {by_ranks[-1]['steady_coordinator_s']:.3f} s a save on the coordinator")
    by_tensors = [measure_world(1024, tensors) for tensors in ((200, 2000) if arguments.quick else (200, 2000, 20000))]
    os.sched_setaffinity(0, all_cores)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": f"Holdfast {holdfast.__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "by_ranks": by_ranks,
        "by_tensors": by_tensors,
        "laws": laws(by_ranks, by_tensors),
        "saves": SAVES,
        "metadata_rows_max": limit,
        "live_ranks": sizes[-1],
        "tcp_store": measure_tcp_store(lambda store: coordinator_over(store, sizes[-1])),
        "seconds": time.perf_counter() - began,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "scale.md").write_text(render(result), encoding="utf-8")
    draw(result, arguments.out / "scale.png")
    print(render(result))


if __name__ == "__main__":
    main()
