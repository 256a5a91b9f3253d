"""A job as a launcher runs it: ranks that resume, save and keep house; killed, cut off, and started again.

The glue here does what ``manager`` and ``saver`` do around the parts under test, and no more: start (lock, recovery,
votes), agree on each save, deliver it, apply retention, close. In place of a capture it hands `Checkpointer`
bytes that say which save and rank they are of. Exports (``exports``) follow the saves that they are drawn for.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.coordination.board import StoreBoard
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import Group
from holdfast.coordination.votes import Votes
from holdfast.engine.client import EngineClient
from holdfast.errors import HoldfastError, OutcomeUnknown, StateChangedWhileStaging
from holdfast.plan.write import PlannedFile, RankPlan
from holdfast.saver.agreement import Agreement, PlanProposal, Whole
from holdfast.saver.capture import DeliveryPlan
from holdfast.saver.checkpointer import Checkpointer, SaveRequest
from holdfast.saver.handle import SaveStats
from holdfast.saver.startup import settle_root
from holdfast.staging.copy_job import VERIFY_GRACE_S
from holdfast.storage.files import create_root
from holdfast.storage.local import LocalStorage
from holdfast.storage.locks import RootLock
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from simulator import scheduler
from simulator.engine import new_image, sim_close
from simulator.exports import WORLD_MOST, ExportRank, export_after
from simulator.objects import URL
from simulator.store import Server

ROOT = "/jobs/root"
TEMPLATE = "step-{step}"
FOREIGN = "trainer_state.json"
METADATA = b"what DCP would say" * 40
CONFIG = SimpleNamespace(stage_timeout=4.0, persist_timeout=4.0, commit_timeout=3.0, on_suspicious="warn")
SAVE_LIMIT_S = 90.0
"""A save that takes longer, slow storage calls apart, has hung: every deadline on its way is far shorter."""


def file_bytes(rank):
    return 4096 * (2 + (rank == 0))


def file_name(rank):
    return f"__{rank}_0.distcp"


@lru_cache(maxsize=16)
def payload(save, rank):
    """What ``rank`` puts into ``save``: other bytes than any other save and rank, on every page."""
    mark = b"%d.%d.%d|" % (*save, rank)
    return (mark * (4096 // len(mark) + 1))[:4096] * (file_bytes(rank) // 4096)


class Handle:
    """What a `SaveHandle` is to a delivery."""

    attempt = ""
    stats = SaveStats()
    began_s = 0.0

    def advance(self, _stage):
        pass

    def add_stats(self, **_):
        pass


class SimCapture:
    """What a `Capture` is to a delivery: bytes in an image, and the word whether they held still."""

    def __init__(self, step, number, plan, buffer, *, changed, error=None):
        self.step, self.number, self.plan, self.buffer, self.error = step, number, plan, buffer, error
        # Until then a delivery lets the training thread say whether the state held still.
        now = scheduler.Current.sim.now
        self.staging = SimpleNamespace(copied_at=now - VERIFY_GRACE_S + scheduler.Current.sim.faults.verify_delay())
        self.stream = self.look = None
        self.confirmed = scheduler.Event()
        self._changed = changed

    def verify(self):
        if self._changed:
            message = f"step {self.step}: w was changed before its copy was complete"
            self.error = StateChangedWhileStaging(message, tensor="w")
        self.confirmed.set()


class SimDelivery:
    """What a `CheckpointDelivery` is once it was offered its capture."""

    def __init__(self, request, capture):
        self.request, self.capture, self.handle = request, capture, Handle()


class SimWorldPlan:
    """What a `WorldPlan` is to a delivery, once all ranks have told."""

    def __init__(self, world):
        planned = tuple(((file_name(rank), file_bytes(rank)),) for rank in range(world))
        self.whole = Whole(planned, METADATA)

    def complete(self, _board, *, timeout_s):
        return self.whole


class Trainer:
    """One rank of one incarnation."""

    def __init__(self, job, process, incarnation, rank, world, server):
        self.job, self.process, self.sim = job, process, job.sim
        self.incarnation, self.rank, self.world, self.server = incarnation, rank, world, server
        self.number = 0

    def main(self):
        try:
            self._session()
        except HoldfastError as error:
            self.sim.log("session ends", repr(error))
        self.sim.end(self.process, 0)

    def _session(self):
        rank, world = self.rank, self.world
        board = StoreBoard(self.server.connect(), rank, world, "holdfast/manager/0", call_timeout_s=1.0)
        bucket = self.job.bucket
        storage = LocalStorage(ROOT) if bucket is None else ObjectStorage(ObjectStore(URL))
        keeper = Catalog(storage, TEMPLATE, Keep(last=self.job.faults.keep_last))
        votes = Votes(board)
        lock, trash, error = None, [], None
        if rank == 0:
            try:
                if bucket is None:
                    create_root(ROOT)
                    lock = RootLock.acquire(ROOT)
                else:
                    storage.make_root()
                    lock = storage.lock()
                began_at = self.sim.now
                hasty = self.incarnation in self.job.faults.hasty_starts
                trash = settle_root(storage, timeout_s=0.001 if hasty else CONFIG.persist_timeout)[1]
                self.job.checker.recovered(began_at)
            except HoldfastError as failed:
                error = failed
        votes.raise_together(error, target=ROOT, timeout_s=CONFIG.stage_timeout + CONFIG.persist_timeout)
        step = self._resume(votes, keeper)
        engine = EngineClient(rank, writers=1, orphan_grace_s=6.0, silence_s_max=3.0)
        engine.start()
        delivery = Checkpointer(storage, Group(rank, world, tuple(range(world)), board), engine, CONFIG)
        for name in trash:
            delivery.remove(name)
        agreement = Agreement(board.clone())
        plan = DeliveryPlan("same", RankPlan(rank, (PlannedFile(file_name(rank), file_bytes(rank)),), (), ()), None)
        if rank == 0:
            plan = DeliveryPlan("same", plan.rank_plan, SimWorldPlan(world))
        image = bytearray(file_bytes(rank))
        buffer = SimpleNamespace(
            image=SimpleNamespace(fd=new_image(image), nbytes=len(image)),
            engine_image=None,
            file_offsets=[0],
            plan=plan.rank_plan,
        )
        exporter = ExportRank(self, delivery, engine)
        again = False
        for save in range(self.job.saves_of(self.incarnation)):
            again = again or self.job.choices[self.incarnation, save, "overwrite"]
            if not again or save == 0:
                step += 1
            self._save(
                (self.incarnation, save), step, again and save > 0, agreement, delivery, keeper, plan, buffer, image
            )
            again = False
            if self.job.choices[self.incarnation, save, "export"]:
                exporter.export(export_after((self.incarnation, save)), step)
        agreement.leave()
        delivery.runner.close(2.0)
        engine.close(3.0)
        sim_close(buffer.image.fd)
        exporter.close()
        agreement.board.close()
        votes.leave()
        board.close()
        if lock is not None:
            lock.release()

    def _resume(self, votes, keeper):
        """The step to go on from; the newest by rank 0's word, as `CheckpointManager.restore` takes it."""

        def look():
            found = keeper.candidates(None)
            # With only models there a run starts from scratch, and collides with them: this one goes on behind.
            newest = found[:1] or [(keeper.latest() or 0, "")]
            keeper.resumed_from(found[0][0] if found else None)
            self.job.checker.resumed([step for step, _ in found])
            return b"%d" % newest[0][0]

        return int(votes.decide(look, timeout_s=CONFIG.stage_timeout))

    def _save(self, save, step, again, agreement, delivery, keeper, plan, buffer, image):
        job, rank = self.job, self.rank
        self.process.save = save
        name = TEMPLATE.format(step=step)
        resumable = not job.choices[(*save, "model only")]
        request = SaveRequest(step, name, {}, resumable=resumable, overwrite=again)
        started = self.sim.now
        error = None
        number = -1
        try:
            refusal = None
            if rank == 0:
                extra, replaces = keeper.place(step, name, ())
                request = SaveRequest(step, name, {}, resumable, again or replaces, extra)
                delivery.check_target(request)
        except HoldfastError as failed:
            refusal = RankFailure.of(failed, rank=rank)
        ahead = job.faults.active and save in job.faults.diverged and rank > 0 and rank == self.world - 1
        cast = (step + 1, TEMPLATE.format(step=step + 1)) if ahead else (step, name)
        number = agreement.cast(PlanProposal(*cast, "same", refusal=refusal), b"s")
        try:
            verdict = agreement.wait_verdict(timeout_s=CONFIG.stage_timeout)
            if verdict.kind == "refused":
                self.sim.log("refused", verdict.refusal.message)
                job.checker.told(save, rank, "failed", "", verdict.refusal.message, self.world)
                return
        except HoldfastError as failed:
            error = failed
        image[:] = payload(save, rank)
        changed = (*save, rank) in job.faults.staging and job.faults.active
        if changed:
            image[100] ^= 1
        made = SimDelivery(request, SimCapture(step, number, plan, buffer, changed=changed, error=error))
        made.keeper = keeper if rank == 0 else None
        job.checker.saving(save, step, name, resumable, self.world)
        try:
            delivery.deliver(made)
        except OutcomeUnknown as unknown:
            self.sim.log("outcome unknown", str(unknown))
            job.checker.told(save, rank, "unknown", made.handle.attempt, str(unknown), self.world)
        except HoldfastError as failed:
            self.sim.log("save failed", f"{failed!r}")
            job.checker.told(save, rank, "failed", made.handle.attempt, str(failed), self.world)
        else:
            self.sim.log("save published", made.handle.attempt)
            job.checker.told(save, rank, "published", made.handle.attempt, "", self.world)
            if rank == 0:
                keeper.note_published(step, name, request.extra, resumable=resumable)
                keeper.apply_retention(step, delivery.remove)
                self._put_beside(name)
        job.checker.took(save, rank, self.sim.now - started)

    def _put_beside(self, name):
        """What a user keeps with a checkpoint; an overwrite must leave it alone."""
        storage = LocalStorage(ROOT)
        if self.job.bucket is not None or not self.job.faults.foreign or storage.size(f"{name}/{FOREIGN}") is not None:
            return
        try:
            storage.write_file(f"{name}/{FOREIGN}", name.encode())
            storage.sync_dir(name)
        except HoldfastError as failed:
            self.sim.log("nothing put beside", repr(failed))
        else:
            self.job.checker.put_beside(name)


class Job:
    """All incarnations of a job, and the launcher that starts them."""

    def __init__(self, sim, faults, checker):
        self.sim, self.faults, self.checker = sim, faults, checker
        self.bucket = sim.bucket
        self.worlds, self.saves = list(faults.worlds), list(faults.saves)
        rng = sim.rng
        self.choices = {}
        for incarnation, saves in enumerate(self.saves):
            for save in range(saves):
                self.choices[incarnation, save, "overwrite"] = rng.random() < faults.overwrites
                self.choices[incarnation, save, "model only"] = rng.random() < faults.model_only
                exports = faults.exports if self.worlds[incarnation] <= WORLD_MOST else 0.0
                self.choices[incarnation, save, "export"] = exports > 0 and rng.random() < exports
        self.last = len(self.worlds)
        self.worlds.append(rng.choice((1, 1, 1, 2, 3)))
        self.saves.append(1)
        for choice in ("overwrite", "model only", "export"):
            self.choices[self.last, 0, choice] = False
        self.done = False
        self.started = set()
        self.servers = []

    def saves_of(self, incarnation):
        return self.saves[incarnation]

    def launcher(self):
        faults, sim = self.faults, self.sim
        for incarnation in range(self.last):
            if incarnation not in self.started:
                self._incarnation(incarnation)
                sim.sleep(sim.random())
        if faults.final_cut:
            self.power_cut()
        faults.active = False
        for process in sim.processes:
            process.paused_until = min(process.paused_until, sim.now)
        self._incarnation(self.last)
        self.done = self.sim.stop = True

    def power_cut(self):
        sim = self.sim
        sim.log("power cut")
        for process in list(sim.processes):
            if process.name != "launcher":
                sim.end(process, -9)
        sim.system.files.power_cut(sim.rng)

    def _incarnation(self, number):
        sim, faults = self.sim, self.faults
        trainers, first_death = self._start(number), None
        while any(not process.dead for process in trainers):
            sim.sleep(0.05)
            if faults.active and any(process.dead and process.exitcode for process in trainers):
                first_death = sim.now if first_death is None else first_death
                if sim.now - first_death >= faults.launcher_waits_s:
                    self._kill(trainers)

    def _start(self, number):
        """Start all ranks of an incarnation; returns their processes."""
        sim, faults = self.sim, self.faults
        self.started.add(number)
        world = self.worlds[number]
        sim.log("incarnation", f"{number} of {world} ranks")
        server = self.new_server()
        trainers = []
        for rank in range(world):
            process = sim.process(f"rank{rank}.{number}", f"host{rank % faults.hosts}")
            process.key = (number, rank)
            process.clock_ahead_s = faults.clocks_ahead_s.get(number, 0.0)
            process.save = None
            process.on_death.append(sim.system.drop_process)
            trainers.append(process)
        if faults.active:
            self._doom(number, trainers, server)
        self.trainers = trainers
        for rank, process in enumerate(trainers):
            process.spawn(Trainer(self, process, number, rank, world, server).main, name="main")
        return trainers

    def _kill(self, trainers):
        for process in trainers:
            self.sim.kill(process)

    def new_server(self):
        return Server(self.faults, extended=self.faults.extended_store)

    def _doom(self, number, trainers, server):
        sim, faults = self.sim, self.faults
        for rank, process in enumerate(trainers):
            if (number, rank) in faults.trainer_kills:
                process.kill_at, process.kill_after = faults.trainer_kills[number, rank]
        if number in faults.stores_gone:
            after, server.vanishes = faults.stores_gone[number]
            server.gone_at = sim.now + after
        if number in faults.power_cuts:
            sim.later(faults.power_cuts[number], lambda: self._while_running(trainers, self.power_cut))
        if number in faults.job_kills:
            sim.later(faults.job_kills[number], lambda: self._kill(trainers))
        if number in faults.overlaps and number + 1 < self.last:
            sim.later(faults.overlaps[number], lambda: self._while_running(trainers, self._second_manager, trainers))
        for at, rank, after, for_s in faults.cuts:
            if at == number and rank < len(trainers):
                sim.later(after, lambda rank=rank, for_s=for_s: self._cut(trainers[rank], for_s))
        for at, rank, engine, after, for_s in faults.pauses:
            if at == number and rank < len(trainers):
                sim.later(
                    after, lambda rank=rank, engine=engine, for_s=for_s: self._pause(trainers[rank], engine, for_s)
                )

    def _while_running(self, trainers, act, *args):
        if self.faults.active and any(not process.dead for process in trainers):
            act(*args)

    def _second_manager(self, trainers):
        """Started while the first is at work, on the same root."""
        number = trainers[0].key[0] + 1
        if number not in self.started:
            trainers += self._start(number)

    def _cut(self, process, for_s):
        process.cut_until = self.sim.now + for_s

    def _pause(self, trainer, engine, for_s):
        sim = self.sim
        for process in sim.engines if engine else [trainer]:
            if not process.dead and (not engine or process.trainer_key == trainer.key):
                sim.log("paused", f"{process.name} for {for_s} s")
                process.paused_until = sim.now + for_s
