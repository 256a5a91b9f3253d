"""What every case works with: the size of the run, the contenders' workers, turns, and where samples go. Torch-free.

Guarantees: in a case all contenders take turns, round by round; while one has its turn all others sleep, and nothing is
left over on the disk from the one before. A contender that can't be installed, fails or hangs is dropped from the case
and named in the report, with its reason; the run goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu import available_bytes, private_bytes, stopped, tree_cpu_s, tree_of
from benchmarks.files import remove
from benchmarks.peers import DELTA_SHARES, PEERS, Peer
from benchmarks.protocol import Broken, Worker, WorkerFailed
from benchmarks.samples import Problem, Results, Sample
from benchmarks.venvs import NotInstalled, python_of, version_of

if TYPE_CHECKING:
    from benchmarks.sizes import Size

OURS = (
    "raw",
    "holdfast",
    "holdfast-eager",
    "holdfast-unverified",
    "raw-export",
    "holdfast-export",
    "holdfast-export-hf",
    *(name for name, peer in PEERS.items() if peer.syncs),
    *(f"holdfast-sync-delta-{share}" for share in DELTA_SHARES),
    *(f"holdfast-{how}" for how in ("one-engine", "two-engines", "no-export")),
    "raw-store",
    "holdfast-store",
)
ONLY_THOROUGH = (
    "dcp-process",
    "nvrx",
    "torchsnapshot",
    "holdfast-sync-gloo-streaming",
    "holdfast-sync-memory-streaming",
)
"""Not in a quick run, unless asked for."""
KEPT_BYTES_MOST = 640 << 20
"""Of a rank between two cases, its libraries included."""
SHARED_FOLDER = Path("/dev/shm")
INTERVAL_S_PER_GB = 0.5
"""Of a state, from a save to the update; the training loop (d), whose batches are small, takes 0.7 to 0.8."""
QUIET_LOOK_S, QUIET_WAIT_S = 0.1, 5.0
QUIET_SHARE = 0.2
"""Of one core, between two looks: a tick of the clock that the kernel counts by, twice."""

Turn = Callable[[Worker], "dict[str, Any] | None"]


@dataclass
class Bench:
    """One run. ``source``: where the package is found, for workers of the runner's own environment."""

    size: Size
    out: Path
    only_peers: tuple[str, ...] = ()
    source: str = ""
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        self.work = self.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self._pythons: dict[str, str | None] = {}
        self._kept: dict[tuple[str, int], Worker] = {}

    # Who takes part. ---------------------------------------------------------------------------------------------

    def peers(self, wanted: Callable[[Peer], bool]) -> list[Peer]:
        """Contenders for a case, raw limit first."""
        left_out = () if self.size.thorough else ONLY_THOROUGH
        return [
            peer
            for peer in PEERS.values()
            if wanted(peer) and (peer.name in self.only_peers if self.only_peers else peer.name not in left_out)
        ]

    def leave_out(self, case: str, reasons: Mapping[str, str]) -> None:
        """Note of the peers that would take part why they don't."""
        for name, reason in reasons.items():
            if self.peers(lambda peer, name=name: peer.name == name):  # type: ignore[misc]
                self.problem(case, name, f"left out: {reason}")

    def python(self, case: str, peer: Peer) -> str | None:
        """Its interpreter; None, with the reason noted, where its environment can't be made."""
        if peer.name not in self._pythons:
            try:
                python = python_of(peer, self.out / "venvs")
                version = version_of(python, peer)
                if version is not None:
                    self.results.meta.setdefault("versions", {})[peer.name] = version
                self._pythons[peer.name] = python
            except NotInstalled as error:
                self.problem(case, peer.name, f"could not be installed: {error}")
                self._pythons[peer.name] = None
        return self._pythons[peer.name]

    def worker(self, case: str, peer: Peer, world: int = 1) -> Worker | None:
        """Start one of its own, for the caller to stop; None, with the reason noted, where it doesn't start."""
        started = self._launch(case, [peer], world)
        return started[0] if started else None

    def kept_workers(self, case: str, peers: Iterable[Peer], world: int = 1) -> list[Worker]:
        """One each, started at most once in a run: most of a start is reading the same libraries."""
        wanted = list(peers)
        missing = [peer for peer in wanted if not self._is_kept(peer.name, world)]
        for worker in self._launch(case, missing, world):
            self._kept[worker.name, world] = worker
        return [self._kept[peer.name, world] for peer in wanted if self._is_kept(peer.name, world)]

    def _is_kept(self, name: str, world: int) -> bool:
        return (name, world) in self._kept and self._kept[name, world].alive

    def make_room(self) -> None:
        """Before a case that needs much memory, end who never gave back what it staged; a start takes its time, too."""
        for key, worker in list(self._kept.items()):
            if sum(private_bytes(pid) for pid in worker.pids) > KEPT_BYTES_MOST * worker.world:
                self.say(f"{worker.name}: ended, for the memory it keeps")
                worker.stop()
                del self._kept[key]

    def end(self, workers: Iterable[Worker]) -> None:
        """End workers that are of no use to other cases."""
        for worker in workers:
            worker.stop()
            self._kept.pop((worker.name, worker.world), None)

    def close(self) -> None:
        """End all that was kept."""
        for worker in self._kept.values():
            worker.stop()

    def _launch(self, case: str, peers: Iterable[Peer], world: int) -> list[Worker]:
        """Start all at once."""
        launched = []
        for peer in peers:
            python = self.python(case, peer)
            if python is not None:
                folder = self.work / f"{peer.name}-{world}-{os.urandom(3).hex()}"
                launched.append(
                    Worker(
                        peer.name,
                        python,
                        where=peer.where,
                        group=peer.group,
                        world=world,
                        folder=folder,
                        logs=self.out / "logs",
                        source="" if peer.own_environment else self.source,
                    )
                )
        ready = []
        for worker in launched:
            try:
                worker.wait_ready()
                ready.append(worker)
            except (Broken, WorkerFailed) as error:
                self.problem(case, worker.name, f"did not start: {error}")
                worker.stop()
        return ready

    @contextmanager
    def workers(
        self, case: str, peers: Iterable[Peer], state: dict[str, Any], world: int = 1
    ) -> Iterator[list[Worker]]:
        """Workers that have taken up ``state``, made here once, in shared memory; they let go of it at the end."""
        started = self.kept_workers(case, peers, world)
        try:
            if started:
                facts = started[0].call("fill", state=state)[0]
                self.results.cases.setdefault(case, {}).update(facts, world=world)
            yield [worker for worker in started if self.attempt(case, worker, "adopt", state=state) is not None]
            for worker in started:
                if worker.alive:
                    self.attempt(case, worker, "close")
        except BaseException:
            for worker in started:  # in the middle of something, perhaps
                worker.kill()
            raise
        finally:
            self._forget(state)

    @contextmanager
    def fresh_workers(self, case: str, peers: Iterable[Peer], world: int = 1) -> Iterator[list[Worker]]:
        """Workers that have done nothing yet, and are ended with the case."""
        started = self._launch(case, peers, world)
        try:
            yield started
        finally:
            for worker in started:
                worker.stop()

    def state(self, **layout: Any) -> dict[str, Any]:
        """A state's description, with a shared file of its own."""
        folder = SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else self.work
        return {"file": str(folder / f"holdfast-bench-{os.getpid()}-{time.monotonic_ns()}"), **layout}

    def language_model(self, *, layers: int | None = None) -> dict[str, Any]:
        """Case (a)'s state; smaller where memory is short, which the report shows."""
        size = self.size
        fit = size.layers_that_fit(available_bytes())
        if fit < size.layers:
            self.say(f"memory is short: {fit} layers of {size.layers}")
        return self.state(kind="lm", layers=min(fit, layers or fit), hidden=size.hidden, vocab=size.vocab)

    @staticmethod
    def _forget(state: dict[str, Any]) -> None:
        for name in (state["file"], state["file"] + ".target"):
            remove(Path(name))

    # Taking turns. -----------------------------------------------------------------------------------------------

    def interval_s(self, case: str) -> float:
        """Between a save and the update: a step's forward and backward grow with the state, too."""
        return INTERVAL_S_PER_GB * self.results.cases[case]["nbytes"] / 1e9

    def rounds(
        self,
        case: str,
        workers: list[Worker],
        turn: Turn,
        *,
        counted: int,
        first: int = 0,
        fewer_of_slow: bool = True,
    ) -> None:
        """Let all take turns, ``counted`` rounds after round 0, which is not; ``first=1`` leaves that one out.

        Who keeps nothing from one turn to the next has no use for round 0. Where they take longer than a case may, slow
        peers have fewer, as `Size` says, unless the case is to have all of them.
        """
        left = list(workers)
        spent_s: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for number in range(first, counted + 1):
            if number > 1 and fewer_of_slow:
                for name in self._slow(spent_s, number - 1):
                    self.say(f"{case}: {name}: enough rounds for the time they take")
                    left = [worker for worker in left if worker.name != name]
                    del spent_s[name]
            for worker in list(left):
                if number == 0 and worker.name in PEERS and not PEERS[worker.name].keeps:
                    continue
                began = time.monotonic()
                figures = self._turn(case, worker, turn)
                spent_s[worker.name].append(time.monotonic() - began)
                if figures is None:
                    left.remove(worker)
                    del spent_s[worker.name]
                else:
                    self.record(case, worker.name, number, figures, counted=number > 0)
            self.say(f"{case}: round {number} of {counted}" + ("" if number else " (not counted)"))

    def _slow(self, spent_s: dict[str, list[float]], counted: int) -> list[str]:
        """Of those still in the case, who has had enough turns, ``counted`` of them, for the time they take."""
        if sum(map(sum, spent_s.values())) <= self.size.rounds_budget_s:
            return []
        peers = sorted((sum(turns) / len(turns), name) for name, turns in spent_s.items() if name not in OURS)
        return [
            name
            for turn_s, name in peers[1:]  # the fastest is whom the targets speak of
            if counted >= self.size.rounds_least or turn_s > self.size.slow_turn_s
        ]

    def _turn(self, case: str, worker: Worker, turn: Turn) -> dict[str, Any] | None:
        with self.alone(worker):
            try:
                return turn(worker)
            except (Broken, WorkerFailed) as error:
                self.problem(case, worker.name, str(error))
                return None

    @contextmanager
    def alone(self, worker: Worker) -> Iterator[None]:
        """All others sleep, and what they have left is done."""
        os.sync()  # what the one before has left is not this one's to write
        with stopped(self._others(worker)):
            self._wait_quiet()
            yield

    def _others(self, worker: Any) -> list[int]:
        """The processes of all kept workers but this one: some compute even where there is nothing to do."""
        mine = getattr(worker, "worker", worker).pids
        roots = [pid for kept in self._kept.values() if kept.alive for pid in kept.pids if pid not in mine]
        return [pid for root in roots for pid in tree_of(root)]

    def _wait_quiet(self) -> None:
        """What the one before still computes is not this one's to wait for; who never ends it is not waited for."""
        deadline = time.monotonic() + QUIET_WAIT_S
        before = tree_cpu_s(os.getpid())
        while time.monotonic() < deadline:
            time.sleep(QUIET_LOOK_S)
            now = tree_cpu_s(os.getpid())
            if now - before <= QUIET_LOOK_S * QUIET_SHARE:
                return
            before = now

    def attempt(self, case: str, worker: Worker, op: str, **args: Any) -> dict[str, float] | None:
        """An operation that may fail; None, with the reason noted, if it did."""
        try:
            return worker.measure(op, **args)
        except (Broken, WorkerFailed) as error:
            self.problem(case, worker.name, f"{op}: {error}")
            return None

    def target(self, worker: Worker | str) -> Path:
        """A path to save to, which doesn't exist."""
        name = worker if isinstance(worker, str) else f"{worker.name}-{worker.world}"
        path = self.work / f"save-{name}"
        remove(path)
        return path

    # What came of it. --------------------------------------------------------------------------------------------

    def record(self, case: str, contender: str, number: int, figures: dict[str, Any], *, counted: bool) -> None:
        self.results.samples.append(Sample(case, contender, number, counted, figures))

    def problem(self, case: str, contender: str, reason: str) -> None:
        ours = contender in OURS
        first, *rest = reason.strip().splitlines() or [""]
        reason = f"{first} ... {rest[-1].strip()}" if rest else first  # what lies between is in the log
        self.results.problems.append(Problem(case, contender, reason, ours))
        self.say(f"{case}: {contender}: {reason}")

    @staticmethod
    def say(message: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
