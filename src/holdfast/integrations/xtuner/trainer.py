"""What XTuner's trainer does around its engine: which step is saved where, the record, what is deleted, resuming.

    run = TrainerCheckpoints(work_dir, engine, checkpoint_interval=500, checkpoint_maxkeep=3, snapshot_interval=100,
                             async_checkpoint=True, hf_interval=1000, hf_max_keep=2, async_hf_export=True,
                             total_step=total, auto_resume=True)
    train_state = run.resume(dataloader=loader, lr_scheduler=scheduler)
    for step in ...:
        run.maybe_save(step, dataloader=loader, lr_scheduler=scheduler)
    run.close()

Order of a save: files beside the weights -> weights published -> record written -> older checkpoints deleted. Each is
durable before the next begins.

Guarantees: the record names whole checkpoints only; the newest is never deleted. A checkpoint that was published
before a crash, and isn't in the record yet, is added by the next start; hidden leftovers of a crash are removed. What
fails in the background is raised, on every rank, by the next save that is due or by `wait` or `close`. No wait is
without a deadline.
Assumes: every rank calls everything, in the same order, on the thread that trains. One run at a time in ``work_dir``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, DeadlineExceeded, SaveFailed
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.integrations.xtuner.engine import TellingFuture, TrainEngineMixin
from holdfast.integrations.xtuner.meta import ExpInfo, XTunerMeta, step_of_path, write_file
from holdfast.saver.startup import claim_path
from holdfast.validation import checked_directory

if TYPE_CHECKING:
    from typing_extensions import Self

    from holdfast.loader.checkpoint import Checkpoint

WEIGHTS: Final = "weights"
DATALOADER: Final = "dataloader"
SCHEDULER: Final = "lr_scheduler"
TRAIN_STATE: Final = "train_state.json"
CHECKPOINTS: Final = "checkpoints"
LATEST: Final = "hf-latest"
_NAME: Final = re.compile(r"(ckpt|snapshot)-step-(\d+)")
_DELETED: Final = ".deleted"
_SETTLE_S: Final = 60.0
_log = logging.getLogger("holdfast")


class TrainerCheckpoints:
    """The checkpoints and exports of one run of XTuner, below ``work_dir``."""

    def __init__(
        self,
        work_dir: str | os.PathLike[str],
        engine: TrainEngineMixin,
        *,
        total_step: int | None = None,
        checkpoint_interval: int | None = -1,
        checkpoint_maxkeep: int | None = -1,
        snapshot_interval: int | None = None,
        async_checkpoint: bool = False,
        hf_interval: int | None = None,
        hf_max_keep: int | None = None,
        async_hf_export: bool = False,
        auto_resume: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """Begin a run, or with ``auto_resume`` go on with the last one; every rank makes one.

        total_step: the last step, at which a checkpoint and an export are made in any case. checkpoint_interval:
        steps between checkpoints; -1 for the last step only, None for none. checkpoint_maxkeep: how many are kept, -1
        or None for all. snapshot_interval: steps between snapshots, of which the last is kept; None for none.
        hf_interval: steps between exports, None for none. hf_max_keep: how many are kept; None for all.
        async_checkpoint, async_hf_export: training goes on meanwhile. tokenizer: saved with each export.

        Raises `ConfigError`, `CheckpointCorrupt` for a record that can't be read.
        """
        if not isinstance(engine, TrainEngineMixin):
            raise ConfigError(
                f"engine must be a TrainEngine of holdfast.integrations.xtuner, or be derived from its "
                f"TrainEngineMixin, not {type(engine).__name__}",
                field="engine",
            )
        self._check_options(locals())
        self.work_dir, self.engine = Path(checked_directory(work_dir, field="work_dir")), engine
        self.total_step, self.tokenizer = total_step, tokenizer
        self.checkpoint_interval, self.checkpoint_maxkeep = checkpoint_interval, checkpoint_maxkeep
        self.snapshot_interval, self.async_checkpoint = snapshot_interval, async_checkpoint
        self.hf_interval, self.hf_max_keep, self.async_hf_export = hf_interval, hf_max_keep, async_hf_export
        self._auto_resume = auto_resume
        self._lock = threading.RLock()
        self._pending: dict[str, Future[Path]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self.meta = XTunerMeta.decode(self._from_first(self._begin))

    @property
    def exp_dir(self) -> Path:
        """Directory of the run."""
        return Path(self.meta.latest_exp.exp_dir)

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of its checkpoints and snapshots."""
        return self.exp_dir / CHECKPOINTS

    # Saving. -----------------------------------------------------------------------------------------------------

    def maybe_save(self, step: int, **parts: Any) -> list[Future[Path]]:
        """Save and export what is due after ``step``; returns the futures of what was begun.

        parts: as for `save`. Raises what has failed in the background since the last call that found something due.
        """
        begun = [self.save_hf(step)] if self._is_due(step, self.hf_interval, at_end=True) else []
        if self._is_due(step, self.checkpoint_interval, at_end=True):
            begun.append(self.save(step, **parts))
        elif self._is_due(step, self.snapshot_interval, at_end=False):
            begun.append(self.save(step, is_snapshot=True, **parts))
        return begun

    def save(
        self,
        step: int,
        *,
        is_snapshot: bool = False,
        epoch: int = 0,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        train_state: Mapping[str, Any] | None = None,
        trainer_config: Any = None,
    ) -> Future[Path]:
        """Save ``ckpt-step-N`` or ``snapshot-step-N``; the future ends once it is recorded and older ones are deleted.

        dataloader: XTuner's, whose ``get_state_dict()`` is the same for all ranks; on a single rank anything with
        ``state_dict()``, or its state. (A position of each rank belongs in the engine's ``extra_state``.) lr_scheduler:
        a scheduler or its state. train_state: further plain members of ``train_state.json``, such as
        ``total_consumed_tokens``. trainer_config: stored as JSON and pickled where it is pydantic's, for XTuner's use.
        Waits for a save in flight. Without ``async_checkpoint`` returns when all is done, and raises what failed.
        """
        self._before_next("checkpoint")
        path = self.checkpoint_dir / f"{'snapshot' if is_snapshot else 'ckpt'}-step-{step}"
        progress = {
            "cur_step": step,
            "cur_epoch": epoch,
            "total_consumed_tokens": 0,
            "train_time_offset": 0.0,
            **(train_state or {}),
        }
        files = _files_of(progress, dataloader, lr_scheduler)
        self._from_first(lambda: _write_beside(path, files, trainer_config))

        def record() -> None:
            exp = self.meta.latest_exp
            kept = exp.snap_checkpoint_list if is_snapshot else exp.checkpoint_list
            limit = 1 if is_snapshot else self.checkpoint_maxkeep
            old = _add(kept, str(path), limit)
            exp.cur_step, exp.cur_epoch = step, epoch
            exp.consumed_tokens = int(progress["total_consumed_tokens"])
            exp.history[-1]["end"] = step
            self._write(old)

        weights = path / WEIGHTS
        if self.async_checkpoint:
            return self._follow("checkpoint", self.engine.async_save_dcp(weights, files=files), path, record)
        self.engine.save_dcp(weights, files=files)
        return self._now(path, record)

    def save_hf(self, step: int) -> Future[Path]:
        """Export to ``hf-N``; the future ends once it is recorded, ``hf-latest`` names it, and older ones are deleted.

        Without ``async_hf_export`` returns when all is done, and raises what failed.
        """
        self._before_next("export")
        path = self.exp_dir / f"hf-{step}"

        def record() -> None:
            old = _add(self.meta.latest_exp.hf_checkpoint_list, str(path), self.hf_max_keep)
            self._write(old, link=path)

        if self.async_hf_export:
            export = self.engine.async_save_hf(path, tokenizer=self.tokenizer)
            return self._follow("export", export, path, record)
        self.engine.save_hf(path, tokenizer=self.tokenizer)
        return self._now(path, record)

    # Resuming. ---------------------------------------------------------------------------------------------------

    def resume(
        self,
        checkpoint_path: str | os.PathLike[str] | None = None,
        *,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        load_optimizer_states: bool = True,
        load_optimizer_args: bool = True,
        load_dataset: bool = True,
        load_scheduler: bool = True,
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint of the run if it goes on, else ``checkpoint_path``; return its ``train_state``.

        None if there is nothing to load. The newest one that can be read is taken, with a warning for each that can't;
        ``checkpoint_path`` itself must be readable. The other options are those of XTuner's ``LoadCheckpointConfig``;
        with ``auto_resume`` everything is loaded. Raises as `TrainEngineMixin.load_dcp`.
        """
        found = self.meta.latest_exp.checkpoints if self._auto_resume else []
        if found:
            load_optimizer_states = load_optimizer_args = load_dataset = load_scheduler = True
        elif checkpoint_path is not None:
            found = [checked_directory(checkpoint_path, field="checkpoint_path")]
        for number, path in enumerate(found):
            try:
                checkpoint = self.engine.load_dcp(Path(path) / WEIGHTS, load_optimizer_states, load_optimizer_args)
                files = self._from_first(lambda: _read_beside(Path(path), checkpoint))  # noqa: B023 - called at once
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                if number + 1 == len(found):
                    raise
                _log.warning("%s can't be read, the one before is taken: %s", path, error)
                continue
            state: dict[str, Any] = json.loads(files[TRAIN_STATE])
            if dataloader is not None and load_dataset:
                dataloader.load_state_dict(_unpacked(files, DATALOADER, path))
            if lr_scheduler is not None and load_scheduler:
                lr_scheduler.load_state_dict(_unpacked(files, SCHEDULER, path))
            return state
        return None

    # Ending. -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until what is in flight has ended and is recorded; raise, on every rank, what failed."""
        self.engine.before_update()
        for kind in list(self._pending):
            self._wait_for(kind)
        self._raise_together()

    def close(self, *, failed: bool = False) -> None:
        """`wait`, once. failed: training failed, other ranks may not come: wait for nobody, and raise nothing.

        What is in flight then ends in the background, or at the interpreter's exit.
        """
        if not self._closed:
            self._closed = True
            if not failed:
                self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    # Internal. ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_options(given: Mapping[str, Any]) -> None:
        for name, least in (("checkpoint_interval", -1), ("checkpoint_maxkeep", -1), ("snapshot_interval", 1)):
            _check_number(name, given[name], least)
        for name in ("hf_interval", "hf_max_keep", "total_step"):
            _check_number(name, given[name], 1)

    def _is_due(self, step: int, interval: int | None, *, at_end: bool) -> bool:
        if interval is None:
            return False
        ends = at_end and step == self.total_step
        return ends if interval == -1 else ends or step % interval == 0

    def _begin(self) -> bytes:
        """On rank 0: read the record, settle what a crash left, add this run; return the record."""
        os.makedirs(self.work_dir, exist_ok=True)
        meta = XTunerMeta.read(self.work_dir)
        timestamp = time.strftime("%Y%m%d%H%M%S")
        while (self.work_dir / timestamp).exists():
            timestamp = str(int(timestamp) + 1)
        history: dict[str, Any] = {
            "begin": 0,
            "timestamp": timestamp,
            "git_info": {"commit": None, "staged": "", "unstaged": ""},
        }
        if self._auto_resume and meta.exps:
            exp = meta.latest_exp
            _settle(exp)
            last = exp.history[-1] if exp.history else {"begin": 0}
            exp.history.append({**history, "begin": last.get("end") or last["begin"]})
        else:
            exp = ExpInfo([history], str(self.work_dir / timestamp))
            meta.exps.append(exp)
        os.makedirs(Path(exp.exp_dir) / CHECKPOINTS, exist_ok=True)
        meta.write(self.work_dir)
        return meta.encode()

    def _before_next(self, kind: str) -> None:
        """Wait for the last of the same kind, and raise what has failed since."""
        if self._closed:
            raise ConfigError("these TrainerCheckpoints are closed; make new ones to save again")
        self._wait_for(kind)
        self._raise_together()

    def _wait_for(self, kind: str) -> None:
        pending = self._pending.pop(kind, None)
        if pending is None:
            return
        self.engine.before_update()
        limit_s = self.engine.export_timeout if kind == "export" else self.engine.save_timeout
        try:
            pending.exception(limit_s + 60.0)  # its own deadline is earlier: this one is for writing the record
        except FutureTimeout:
            self._note(
                DeadlineExceeded(
                    f"the {kind} before this one has not ended and been recorded within {limit_s + 60:g} s; look at "
                    f"the storage of {self.work_dir}",
                    waited_for=kind,
                    timeout_s=limit_s + 60.0,
                )
            )

    def _follow(self, kind: str, future: Future[Path], path: Path, record: Callable[[], None]) -> Future[Path]:
        """Return a future that ends once ``record``, called after ``future``, has."""
        recorded = TellingFuture(self._note)

        def ended(done: Future[Path]) -> None:
            try:
                done.result()
                record()
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._note(error)
                recorded.set_exception(error)
            else:
                recorded.set_result(path)

        self._pending[kind] = recorded
        future.add_done_callback(ended)
        return recorded

    def _now(self, path: Path, record: Callable[[], None]) -> Future[Path]:
        try:
            record()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            self._note(error)
        self._raise_together()
        recorded = TellingFuture(self._note)
        recorded.set_result(path)
        return recorded

    def _write(self, old: list[str], *, link: Path | None = None) -> None:
        """On rank 0: make the record durable, then point ``hf-latest``, then delete ``old``."""
        if _rank() != 0:
            return
        with self._lock:
            self.meta.write(self.work_dir)
            if link is not None:
                fresh = link.with_name(f".{LATEST}.{secrets.token_hex(6)}")
                os.symlink(link.name, fresh)
                os.replace(fresh, link.with_name(LATEST))
            for path in old:
                _delete(Path(path))

    def _note(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
        _log.error("%s", error, exc_info=error)

    def _raise_together(self) -> None:
        """Raise what failed on this rank; else what failed on another: one that leaves would strand the others."""
        with self._lock:
            failure, self._failure = self._failure, None
        told = _told(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if told is not None:
            raise SaveFailed(f"rank {told[0]}: {told[1]}", step=None, rank=told[0])

    def _from_first(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns on rank 0, or raise its error, on every rank."""
        value: Any = None
        error: BaseException | None = None
        if _rank() == 0:
            try:
                value = make()
            except Exception as failed:  # noqa: BLE001 - raised once the other ranks know
                error = failed
        if _world() > 1:
            box = [value, error]
            dist.broadcast_object_list(box, src=0)
            value, error = box[0], error or box[1]
        if error is not None:
            raise error
        return value


def _check_number(name: str, value: Any, least: int) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least and value != 0):
        return
    also = ", -1" if least == -1 else ""
    raise ConfigError(f"{name} must be a whole number >= 1{also} or None, not {value!r}", field=name)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _told(failure: str | None) -> tuple[int, str] | None:
    """Return the first rank with a failure, and which; all ranks call it."""
    if _world() == 1:
        return None if failure is None else (0, failure)
    found: list[str | None] = [None] * _world()
    dist.all_gather_object(found, failure)
    return next(((rank, text) for rank, text in enumerate(found) if text is not None), None)


def _files_of(progress: Mapping[str, Any], dataloader: Any, lr_scheduler: Any) -> dict[str, bytes]:
    """Return the files beside the weights, as XTuner names and packs them."""
    files = {TRAIN_STATE: json.dumps(progress).encode()}
    if dataloader is not None:
        files[DATALOADER] = _packed(_dataloader_state(dataloader))
    if lr_scheduler is not None:
        files[SCHEDULER] = _packed(lr_scheduler if isinstance(lr_scheduler, Mapping) else lr_scheduler.state_dict())
    return files


def _dataloader_state(dataloader: Any) -> Any:
    if hasattr(dataloader, "get_state_dict"):
        return dataloader.get_state_dict()  # XTuner's: gathers
    if _world() > 1:
        raise ConfigError(
            f"dataloader: {type(dataloader).__name__} has no get_state_dict() that gathers the positions of all ranks, "
            "and XTuner's layout has one file for them; put it in the engine's extra_state as holdfast.PerRank(loader)",
            field="dataloader",
        )
    return dataloader if isinstance(dataloader, Mapping) else dataloader.state_dict()


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(files: Mapping[str, bytes], name: str, path: str) -> Any:
    if name not in files:
        raise CheckpointNotFound(f"{path} has no {name}; leave it out, or load another checkpoint", path=path)
    return torch.load(io.BytesIO(files[name]), map_location="cpu", weights_only=True)


def _write_beside(path: Path, files: Mapping[str, bytes], trainer_config: Any) -> None:
    os.makedirs(path, exist_ok=True)
    more: dict[str, bytes] = {}
    if hasattr(trainer_config, "model_dump_json"):
        more["trainer_config.json"] = trainer_config.model_dump_json(indent=2).encode()
        more["trainer_config.bin"] = pickle.dumps(trainer_config)
    elif trainer_config is not None:
        more["trainer_config.json"] = json.dumps(trainer_config, indent=2).encode()
    for name, data in {**files, **more}.items():
        write_file(path / name, data)


def _read_beside(path: Path, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files beside the weights: those that were published with them, or as XTuner wrote them."""
    found: dict[str, bytes] = {}
    for name in (TRAIN_STATE, DATALOADER, SCHEDULER):
        if name in checkpoint.files:
            found[name] = checkpoint.read_file(name)
        elif (path / name).is_file():
            found[name] = (path / name).read_bytes()
    if TRAIN_STATE not in found:
        raise CheckpointNotFound(f"{path} has no {TRAIN_STATE}: it is not whole", path=str(path))
    return found


def _add(kept: list[str], path: str, limit: int | None) -> list[str]:
    """Add ``path`` to a list of the record; take out, and return, those beyond ``limit``."""
    if path in kept:
        kept.remove(path)
    kept.append(path)
    old = kept[:-limit] if limit is not None and limit > 0 else []
    del kept[: len(old)]
    return old


def _delete(path: Path) -> None:
    """Delete a checkpoint or export that is no longer in the record; half of it is never found under its name."""
    gone = path.with_name(f".{path.name}{_DELETED}")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def _settle(exp: ExpInfo) -> None:
    """Add what was published before a crash to the record; remove what is no checkpoint and never becomes one."""
    root = Path(exp.exp_dir)
    for gone in (*root.glob(f".*{_DELETED}"), *(root / CHECKPOINTS).glob(f".*{_DELETED}")):
        shutil.rmtree(gone, ignore_errors=True)
    for path in sorted((root / CHECKPOINTS).glob("*-step-*"), key=lambda path: step_of_path(path.name)):
        match = _NAME.fullmatch(path.name)
        kept = exp.snap_checkpoint_list if match and match[1] == "snapshot" else exp.checkpoint_list
        if match is None or str(path) in kept or int(match[2]) <= exp.cur_step:
            continue
        # Engines of the last run may still be writing: this waits for them, and publishes what was complete.
        claim_path(str(path / WEIGHTS), step=None, overwrite=True, timeout_s=_SETTLE_S).release()
        if (path / WEIGHTS / MANIFEST_NAME).exists() and (path / TRAIN_STATE).exists():
            _log.warning("%s was published and not recorded before the last run ended: it is now", path)
            _add(kept, str(path), None)
            exp.cur_step = int(match[2])
            exp.history[-1]["end"] = exp.cur_step
        elif not (path / WEIGHTS).exists():
            _log.warning("%s was not published before the last run ended: it is removed", path)
            _delete(path)
