"""Exports in a job: attempts at one file that all ranks write parts of, delivered as ``export.exporter`` does it.

Every rank owns a block of 1 MiB, the first rank also what comes behind the last of them. What lies beside the file is
there before anybody writes.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast.coordination.failure import AttemptAborted
from holdfast.engine.messages import FileRow
from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.format.manifest import BLOCK_BYTES, FilePart, RankIndex, encode_index
from holdfast.saver.agreement import Whole
from holdfast.saver.delivery import plan_attempt
from simulator.engine import new_image, sim_close

TEMPLATE = "hf-{step}"
SHARED = "model.safetensors"
BESIDE = {"config.json": b"{}", "templates/tool.jinja": b"{{ tools }}"}
TAIL_BYTES = 4096 + 300
WORLD_MOST = 3
_FIRST = 1000
"""Exports are numbered from here on, checkpoints from 0."""


def export_after(save):
    """The number of the export that is made after a save."""
    return save[0], save[1] + _FIRST


def is_export(save):
    return save is not None and save[1] >= _FIRST


def parts_of(rank, world):
    total = world * BLOCK_BYTES + TAIL_BYTES
    parts = [FilePart(SHARED, (world - 1 - rank) * BLOCK_BYTES, BLOCK_BYTES, total)]
    if rank == 0:
        parts.append(FilePart(SHARED, world * BLOCK_BYTES, TAIL_BYTES, total))
    return parts


@lru_cache(maxsize=16)
def _written(save, rank, at, nbytes):
    mark = b"%d.%d.%d.%d|" % (*save, rank, at)
    return (mark * (4096 // len(mark) + 1))[:4096] * (nbytes // 4096) + mark[:1] * (nbytes % 4096)


@lru_cache(maxsize=4)
def shared_file(save, world):
    """What all ranks of ``world`` together put into export ``save``."""
    pieces = {
        part.offset: _written(save, rank, part.offset, part.size)
        for rank in range(world)
        for part in parts_of(rank, world)
    }
    return b"".join(data for _, data in sorted(pieces.items()))


def contents_of(save, world):
    """All that lies in an export but manifest and reports, as a tree."""
    tree = {SHARED: shared_file(save, world)}
    for name, data in BESIDE.items():
        below, _, file = name.rpartition("/")
        (tree.setdefault(below, {}) if below else tree)[file] = data
    return tree


class ExportRank:
    """One rank's part in the exports of a session; its image and plan go to the engine with the first."""

    def __init__(self, trainer, delivery, engine):
        self.trainer, self.engine = trainer, engine
        self.carrier = delivery.runner
        self.rows, at = [], 0
        for part in parts_of(trainer.rank, trainer.world):
            self.rows.append(FileRow(part.name, part.size, at, part.offset, part.total))
            at += -(-part.size // 4096) * 4096
        self.image_bytes, self.image = at, None
        self.fd = None
        self.numbers = None

    def close(self):
        if self.fd is not None:
            sim_close(self.fd)

    def export(self, save, step):
        trainer, checker = self.trainer, self.trainer.job.checker
        rank, world = trainer.rank, trainer.world
        trainer.process.save = save
        name = TEMPLATE.format(step=step)
        checker.saving(save, step, name, False, world)
        started, attempt = trainer.sim.now, None
        if self.image is None:
            self.image = bytearray(self.image_bytes)

        def persist():
            for row in self.rows:
                data = _written(save, rank, row.offset, row.size)
                self.image[row.image_offset : row.image_offset + row.size] = data
            image, plan = self._in_engine()
            self.carrier.persist(attempt, plan=plan, image=image)
            self.engine.staging_verified(attempt.id)
            return self.carrier.wait_reported(attempt)

        try:
            attempt = self.carrier.begin(f"export/{save[1]}", lambda _timeout_s: self._planned(name, step), step=step)
            outcome, _ = self.carrier.carry(attempt, persist)
            if isinstance(outcome, AttemptAborted):
                raise outcome.reason.error(step=step)
        except OutcomeUnknown as unknown:
            said = "unknown", str(unknown)
        except HoldfastError as failed:
            said = "failed", str(failed)
        else:
            said = "published", ""
        trainer.sim.log(f"export {said[0]}", said[1])
        checker.told(save, rank, said[0], "" if attempt is None else attempt.id, said[1], world)
        checker.took(save, rank, trainer.sim.now - started)

    def _planned(self, name, step):
        world = self.trainer.world
        whole = Whole.in_parts([parts_of(rank, world) for rank in range(world)])
        return plan_attempt(
            name, whole, BESIDE, step=step, metrics={}, resumable=False, extra={}, overwrite=True, kind="export"
        )

    def _in_engine(self):
        if self.numbers is None:
            self.fd = new_image(self.image)
            image = self.engine.add_image(self.fd, len(self.image))
            index = encode_index(RankIndex((), ()))
            self.numbers = image, self.engine.add_plan(self.rows, tensor_offsets=b"", tensor_sizes=b"", index=index)
        return self.numbers
