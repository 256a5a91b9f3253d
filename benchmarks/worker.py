"""A contender's process: does what the runner says, one line of JSON at a time, and says what it measured.

    python -m benchmarks.worker '{"where": "dcp:Sync", "read_fd": 5, "write_fd": 6, ...}'

With several ranks each is such a process; RANK, WORLD_SIZE and the rest are set as torchrun sets them. Whatever an
operation raises is answered, with its traceback; the process then goes on with the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks import training
from benchmarks.busy import Busy, make_busy
from benchmarks.cpu import PeakMemory, resources, tree_cpu_s, tree_memory, tree_of
from benchmarks.files import files_of, remove
from benchmarks.measure import Watch, timed_load, timed_save
from benchmarks.state import BenchState, Shared, file_nbytes, layout, payload_nbytes, same

if TYPE_CHECKING:
    from benchmarks.contender import Contender


class Worker:
    """One rank of a contender. Its public methods are the operations."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(spec["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.world))
        # Before anything else computes: it finds out which threads are the training thread's team.
        self.busy: dict[str, Busy] = {"compute": make_busy("compute")}
        self.mesh = None
        if self.world > 1 or spec["group"]:
            dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh("cpu", (self.world,))
        self.kind = kind_of(spec["where"])
        self.contender: Contender | None = None
        self.others: dict[str, Contender] = {}
        self.source: Shared | None = None
        self.target: BenchState | None = None
        self.scratch: Shared | None = None
        self.trainer: training.Trainer | None = None
        self.besides: Any = None
        self.saves = 0

    # What is saved and loaded. -----------------------------------------------------------------------------------

    def fill(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make the shared file, with random tensors in it, and a second one to load into."""
        entries = layout(state)
        Shared(state["file"], file_nbytes(entries), create=True).fill(entries)
        Shared(state["file"] + ".target", file_nbytes(entries), create=True)  # takes memory once it is loaded into
        return {"nbytes": payload_nbytes(entries), "tensors": len(entries)}

    def adopt(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take up this state; what was there before is let go."""
        self.close()
        self.source = Shared(state["file"], file_nbytes(layout(state)))
        self.source.bytes.view(torch.int64).sum()  # its pages are mapped before anything is timed
        view = BenchState(self.source, state, rank=self.rank, world=self.world, mesh=self.mesh)
        self.spec = state
        before = tree_memory(os.getpid())
        began = time.perf_counter()
        self.contender = self.kind(view, self.folder, rank=self.rank, world=self.world)
        self.contender.start()
        return {"nbytes": view.nbytes, "start_s": time.perf_counter() - began, "others_before": before.others}

    def close(self) -> dict[str, Any]:
        """Let go of state and contender."""
        contenders = [*self.others.values(), *([] if self.contender is None else [self.contender])]
        self.contender, self.others = None, {}
        if self.besides is not None:
            contenders.append(self.besides)
        for contender in contenders:
            contender.close()
        self.besides = None
        self.trainer = self.target = self.source = self.scratch = None
        gc.collect()
        return {}

    @property
    def ready(self) -> Contender:
        if self.contender is None:
            raise RuntimeError("no state was adopted")
        return self.contender

    # Saves and loads. --------------------------------------------------------------------------------------------

    def warm_up(self) -> dict[str, Any]:
        self.ready.warm_up()
        return {}

    def save(self, path: str, busy: str, interval_s: float) -> dict[str, float]:
        if busy not in self.busy:
            self.busy[busy] = make_busy(busy)
        contender = self.ready
        self._together()
        pending, figures = timed_save(contender, Path(path), self.busy[busy], interval_s)
        self._together()
        contender.hand_over(pending, Path(path))
        return figures

    def load(self, path: str, *, check: bool) -> dict[str, float]:
        return self._timed_load(Path(path), check=check)

    def _timed_load(self, place: Any, *, check: bool) -> dict[str, float]:
        if self.target is None:
            shared = Shared(self.spec["file"] + ".target", file_nbytes(layout(self.spec)))
            self.target = BenchState(shared, self.spec, rank=self.rank, world=self.world, mesh=self.mesh)
            shared.bytes.view(torch.int64).sum()
        if check and self.rank == 0:
            self.target.shared.bytes.zero_()
        contender = self.ready
        self._together()
        figures = timed_load(contender, self.target, place)
        self._together()
        if check and self.rank == 0 and self.source is not None:
            wrong = same(self.source, self.target.shared, self.target.entries)
            if wrong is not None:
                raise AssertionError(f"{wrong} was not loaded as it was saved")
        return figures

    def store_memory(self) -> dict[str, int]:
        """Bytes that are held beside the state and images."""
        return {"others": tree_memory(os.getpid(), self.spec["file"]).others}

    def store_save(self, place: str, *, prepared: bool = True) -> dict[str, float]:
        """Save to the URL ``place``; all of it is there at the end.

        prepared: what is done once for each bucket is done before.
        """
        contender: Any = self.ready
        if prepared:
            contender.prepare(place)
        cpu_before, began = tree_cpu_s(os.getpid()), time.perf_counter()
        contender.save(place)
        save_s = time.perf_counter() - began
        return {"save_s": save_s, "save_cpu_s": tree_cpu_s(os.getpid()) - cpu_before}

    def store_load(self, place: str, *, check: bool) -> dict[str, float]:
        """Load from the URL ``place``; ``check``: and compare that."""
        figures = self._timed_load(place, check=check)
        return {"load_s": figures["load_s"], "load_cpu_s": figures["cpu_s"]}

    def read_part(self, path: str, tensor: str, rows: list[int], *, check: bool) -> dict[str, float]:
        began = time.perf_counter()
        part = self.ready.read_part(tensor, (rows[0], rows[1]), Path(path))
        took = time.perf_counter() - began
        if check:
            whole = self.ready.held_state.flat[tensor]
            if not torch.equal(torch.as_tensor(part), whole[rows[0] : rows[0] + rows[1]]):
                raise AssertionError(f"rows {rows} of {tensor} were not read as they were saved")
        return {"load_s": took}

    def prepare_export(self, name: str, where: str) -> dict[str, Any]:
        """Make another contender than this worker's own, for `export`."""
        self._other(name, where).start()
        return {}

    def _other(self, name: str, where: str) -> Any:
        assert self.source is not None, "adopt comes first"
        view = BenchState(self.source, self.spec, rank=self.rank, world=self.world, mesh=self.mesh)
        found = self.others[name] = kind_of(where)(view, self.folder / name, rank=self.rank, world=self.world)
        return found

    def drop(self, name: str) -> dict[str, Any]:
        """Let go of such a contender."""
        self.others.pop(name).close()
        gc.collect()
        return {}

    def export(self, name: str, path: str, interval_s: float, *, check: bool) -> dict[str, Any]:
        """Have it export what was adopted; ``check``: and compare that."""
        assert self.source is not None, "adopt comes first"
        contender = self.others[name]
        self._together()
        with PeakMemory(keeps=contender.keeps) as peak:
            pending, figures = timed_save(
                contender, Path(path), self.busy.setdefault("idle", make_busy("idle")), interval_s
            )
        self._together()
        contender.hand_over(pending, Path(path))
        if check and self.rank == 0:
            from benchmarks.peers.exports_ import differing

            wrong = differing(Path(path), self.source, layout(self.spec))
            if wrong is not None:
                raise AssertionError(f"{wrong} was not exported as it is")
        return figures | ({} if peak.nbytes is None else {"peak_bytes": float(peak.nbytes)})

    def prepare_sync(self, name: str, where: str) -> dict[str, Any]:
        """Make another contender, for `sync`, and have it bring the weights once, which may be slower than later."""
        contender = self._other(name, where)
        with PeakMemory(keeps=False) as peak:
            contender.start()
            contender.bring()
        return {} if peak.nbytes is None else {"peak_bytes": float(peak.nbytes)}

    def sync(self, name: str, share: float, *, check: bool) -> dict[str, Any]:
        """Have it bring to rank 1 what was adopted, changed by so much; ``check``: and compare that."""
        contender: Any = self.others[name]
        contender.change(share)
        if check and self.rank == 1:
            contender.target.bytes.zero_()
        self._together()
        cpu_before, began = tree_cpu_s(os.getpid()), time.perf_counter()
        figures = contender.bring()
        sync_s = time.perf_counter() - began
        figures |= {"sync_s": sync_s, "cpu_s": tree_cpu_s(os.getpid()) - cpu_before}
        self._together()
        if check and self.rank == 1:
            wrong = same(contender.source, contender.target, layout(self.spec))
            if wrong is not None:
                raise AssertionError(f"{wrong} was not brought as it is")
        return figures

    def memcpy(self) -> dict[str, float]:
        """Raw only: copy the state's bytes to warm memory, the file that loads go to."""
        contender: Any = self.ready
        if self.scratch is None:
            self.scratch = Shared(self.spec["file"] + ".target", file_nbytes(layout(self.spec)))
            contender.memcpy(self.scratch)  # touches it
        self._together()
        return {"held_s": contender.memcpy(self.scratch)}

    # A training loop, and many saves. ----------------------------------------------------------------------------

    def prepare_training(self, shape: dict[str, int]) -> dict[str, Any]:
        self.close()
        self.trainer = training.Trainer(**shape)
        self.contender = training.contender_for(self.kind, self.trainer, self.folder)
        return {"parameters": self.trainer.parameters, "state_nbytes": self.trainer.state_nbytes}

    def train(self, iterations: int, every: int, path: str) -> dict[str, Any]:
        assert self.trainer is not None, "prepare_training comes first"
        cpu_before = tree_cpu_s(os.getpid())
        figures = self.trainer.block(self.ready if every else None, iterations, every, Path(path))
        return figures | {"cpu_s": tree_cpu_s(os.getpid()) - cpu_before}

    def save_many(self, count: int, path: str, look_every: int) -> dict[str, Any]:
        """Saves one after the other, each removed; memory and descriptors from time to time."""
        looks = []
        idle = make_busy("idle")
        for number in range(count):
            target = Path(f"{path}-{number}")
            pending = self.ready.save(target)
            self.ready.before_update()
            Watch(pending).wait(idle, time.perf_counter() + 60.0)
            self.ready.hand_over(pending, target)
            remove(target)
            self.saves += 1
            if number % look_every == 0 or number == count - 1:
                memory = tree_memory(os.getpid())
                files = len(files_of(self.folder))
                looks.append(
                    {"save": self.saves, "images": memory.images, "others": memory.others, "files": files}
                    | resources(os.getpid())
                )
        return {"looks": looks}

    def engine(self) -> dict[str, float]:
        """Holdfast only: start an engine as a manager does, and end it."""
        from holdfast.engine.client import EngineClient

        began = time.perf_counter()
        client = EngineClient(0)
        client.start()
        client.wait_ready(30.0)
        ready_s = time.perf_counter() - began
        pid = client.pid
        assert pid is not None, "a ready engine has a pid"
        memory = tree_memory(pid)
        client.close(10.0)
        return {"ready_s": ready_s, "resident": float(memory.others)}

    def prepare_beside(self, kind: str, count: int, nbytes: int) -> dict[str, Any]:
        """Holdfast only: a manager and exports, for `beside`."""
        from benchmarks.beside import Beside

        self.close()
        self.besides = Beside(self.folder / f"beside-{kind}", kind, count, nbytes)
        facts: dict[str, Any] = self.besides.facts
        return facts

    def beside(self, engines: str) -> dict[str, float]:
        figures: dict[str, float] = self.besides.turn(engines)
        return figures

    def facts(self) -> dict[str, Any]:
        facts = {} if self.contender is None else self.contender.facts()
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), **facts}

    def _together(self) -> None:
        if self.world > 1:
            dist.barrier()


def kind_of(where: str) -> type[Contender]:
    """The contender at ``module:class`` below `benchmarks.peers`."""
    module, _, name = where.partition(":")
    kind: type[Contender] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
    return kind


def serve(worker: Worker, reader: Any, writer: Any) -> None:
    """Answer lines until there are no more."""
    for line in reader:
        call = json.loads(line)
        if call["op"] == "stop":
            return  # the end of the pipe is the answer
        try:
            answer = {"result": getattr(worker, call["op"])(**call["args"])}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".strip()[:2000]}
        writer.write(json.dumps(answer) + "\n")
        writer.flush()


def main() -> None:
    spec = json.loads(sys.argv[1])
    for fd in (spec["read_fd"], spec["write_fd"]):
        os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    warnings.filterwarnings("ignore")  # peers' own; Holdfast's tests make errors of them
    reader, writer = os.fdopen(spec["read_fd"], encoding="utf-8"), os.fdopen(spec["write_fd"], "w", encoding="utf-8")
    try:
        worker = Worker(spec)
    except BaseException as error:
        traceback.print_exc()
        writer.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}) + "\n")
        writer.flush()
        sys.exit(1)
    writer.write(json.dumps({"result": worker.facts()}) + "\n")
    writer.flush()
    serve(worker, reader, writer)
    end()


def end() -> None:
    """End now, with all that was started: peers leave threads and processes that would hold up an orderly end."""
    sys.stdout.flush()
    for pid in tree_of(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
