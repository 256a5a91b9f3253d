"""Restoring beside saves in flight, models that a run ended with, roots with nothing to resume from, saving twice."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from typing_extensions import Self

import holdfast
import holdfast.dcp
from holdfast import CheckpointConfig, CheckpointManager, Keep
from holdfast.catalog.catalog import Catalog
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    OutcomeUnknown,
    StateChangedWhileStaging,
    StorageError,
)
from holdfast.format.manifest import MANIFEST_NAME, decode_manifest, encode_manifest
from holdfast.storage.local import LocalStorage
from holdfast.testing.staging import held_copies

SIZE = 1000


class Run:
    """A state of one value, and a manager of it that saves when it is told to."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = torch.nn.Linear(SIZE, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager(
            root,
            {"model": self.model, "optimizer": self.optimizer},
            config=CheckpointConfig(**{"every": None, "keep": None, **options}),
        )

    def __enter__(self) -> Self:
        self.manager.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.__exit__(*error)

    def save(self, step: int, **options: Any) -> holdfast.SaveHandle:
        """The state of step 7 is 7 everywhere."""
        self.manager.before_update()
        with torch.no_grad():
            self.model.weight.fill_(step)
        return self.manager.save(step, **options)

    @property
    def value(self) -> list[float]:
        return self.model.weight.detach().unique().tolist()


def made(root: Path, *steps: int, final: int | None = None, **options: Any) -> None:
    """A run that saves ``steps`` and ends with a model alone at ``final``."""
    with Run(root, last_model_only=final is not None, **options) as run:
        for step in steps:
            run.save(step).result()
        if final is not None:
            assert not run.save(final, final=True).result().manifest.resumable


# saves in flight -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["lazy", "eager"])
def test_what_is_in_flight_is_the_newest_once_the_state_is_restored(staging: str, tmp_path: Path) -> None:
    with Run(tmp_path, staging=staging) as run:
        run.save(100).result()
        with held_copies(opens_for_updates=staging == "eager") as gate:
            handles = [run.save(200)] if staging == "eager" else [run.manager.save(200)]
            threading.Timer(0.3, gate.open).start()
            assert run.manager.restore() == 200
        assert handles[0].done()
        assert handles[0].result().step == 200 == run.manager.latest()


def test_a_run_that_goes_back_from_saves_in_flight_is_the_newest_all_the_same(tmp_path: Path) -> None:
    with Run(tmp_path, in_flight=3, keep=Keep(last=2)) as run:
        run.save(100).result()
        with held_copies(opens_for_updates=False) as gate:
            handles = [run.manager.save(step) for step in (200, 300)]
            threading.Timer(0.3, gate.open).start()
            assert run.manager.restore(100) == 100  # retention would have deleted it after step 300
        assert all(handle.done() and handle.exception() is None for handle in handles)
        assert run.value == [100.0]
        run.save(150).result()
        assert run.manager.latest() == 150
    assert holdfast.open(tmp_path).step == 150
    with Run(tmp_path) as run:
        assert run.manager.restore() == 150


def test_exports_in_flight_end_before_the_state_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    config = CheckpointConfig(every=1, keep=None)
    export = holdfast.HFExport(tmp_path / "hf", every=1)
    with CheckpointManager(tmp_path / "root", {"model": model}, config=config, exports=[export]) as manager:
        handles = [*manager.step(1), *manager.step(2)]
        assert manager.restore(1) == 1
        assert all(handle.done() for handle in handles)
        assert [handle.result().step for handle in handles] == [1, 1, 2, 2]
        manager.step(2)
        manager.wait()
        assert manager.latest() == 2


def test_a_save_that_does_not_end_keeps_the_state_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(tmp_path) as run:
        run.save(1).result()
        late = run.save(2)
        with monkeypatch.context() as patched:
            patched.setattr(type(late), "exception", _never)
            with pytest.raises(DeadlineExceeded, match="forever"):
                run.manager.restore(1)
        assert run.value == [2.0]
        assert run.manager.restore(1) == 1
        assert late.result().step == 2


def test_a_save_that_fails_keeps_nothing_from_being_restored(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1).result()
        with held_copies(opens_for_updates=False), torch.no_grad():
            late = run.manager.save(2)
            run.model.weight.add_(1)
        assert run.manager.restore() == 1
        assert run.value == [1.0]
        assert isinstance(late.exception(), StateChangedWhileStaging)
        with pytest.raises(StateChangedWhileStaging):
            run.manager.wait()


def _never(handle: holdfast.SaveHandle, timeout: float | None = None) -> None:
    raise DeadlineExceeded("waited forever", waited_for="a save", timeout_s=1.0)


def test_a_save_in_doubt_is_settled_before_anything_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later start would publish it over what the run has gone on to."""
    rename = LocalStorage.rename

    def refusing(storage: LocalStorage, source: str, target: str) -> None:
        if "step-200" in source:
            raise StorageError("the file server is away", path=source, errno=116)
        rename(storage, source, target)

    with Run(tmp_path) as run:
        run.save(100).result()
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "rename", refusing)
            assert isinstance(run.save(200).exception(), OutcomeUnknown)
        with pytest.raises(OutcomeUnknown):
            run.manager.wait()
        assert run.manager.restore() == 200
        assert run.manager.restore(100) == 100
        run.save(150).result()
    with Run(tmp_path) as run:
        assert (run.manager.restore(), run.manager.latest()) == (150, 150)


def test_an_attempt_that_no_start_could_settle_never_becomes_the_newest_of_a_run_that_went_on(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(100).result()
        run.save(200).result()
    aside = tmp_path / ".step-200.0123456789ab.incomplete"
    with Run(tmp_path) as run:
        (tmp_path / "step-200").rename(aside)  # as one that came to be seen after the start
        assert run.manager._resumer.restore(None, run.manager._group, run.manager._votes) == 100
        run.save(150).result()
        aside.rename(tmp_path / "step-200")  # rolled forward
        assert run.manager.latest() == 150
    with Run(tmp_path) as run:
        assert run.manager.restore() == 150


def test_a_last_save_after_going_back_is_a_save(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1).result()
        before = run.save(2)
        before.result()
        assert run.manager.restore(1) == 1
        run.model.weight.data.fill_(5)
        after = run.manager.save(2, final=True)
        assert after is not before
        assert after.result().read("model.weight").unique().tolist() == [5.0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("how", ["load", "reader"])
def test_a_load_into_what_is_being_copied_waits_for_the_copies(how: str, tmp_path: Path) -> None:
    state = {"w": torch.zeros(SIZE)}
    holdfast.save(state, tmp_path / "zeros")
    model = torch.nn.Linear(SIZE, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    other = {"model": model}
    holdfast.save(other, tmp_path / "ones")
    torch.nn.init.constant_(model.weight, 2.0)
    with held_copies(opens_for_updates=False) as gate:
        handle = holdfast.async_save(other, tmp_path / "twos")
        opened = threading.Timer(0.3, gate.open)
        opened.start()
        if how == "load":
            holdfast.load(other, tmp_path / "ones")
        else:
            flat = {"model": {"weight": model.weight.detach()}}
            dcp.load(flat, storage_reader=holdfast.dcp.Reader(tmp_path / "ones"), no_dist=True)
        opened.join()
    assert model.weight.unique().tolist() == [1.0]
    assert handle.result().read("model.weight").unique().tolist() == [2.0]


# models that an earlier run ended with -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [Keep(last=1), Keep(last=0), Keep(last=3, every=1000)], ids=str)
def test_the_model_a_run_ended_with_stays_when_it_is_extended(keep: Keep, tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3, final=4, keep=keep)
    with Run(tmp_path, keep=keep, last_model_only=True) as run:
        assert run.manager.restore() == 3
        for step in (5, 6, 7, 8):
            run.save(step).result()
            assert holdfast.open(tmp_path / "step-4").read("model.weight").unique().tolist() == [4.0]
            assert run.manager.latest() == step
        run.save(9, final=True)
        assert {4, 8, 9} <= set(run.manager.steps())
        assert run.manager.latest() == 9
    with Run(tmp_path, keep=keep) as run:
        assert run.manager.restore() == 8
        run.save(10).result()
        assert {4, 9, 10} <= set(run.manager.steps())


def test_the_model_a_run_went_on_from_stays_until_it_saves_its_own_last(tmp_path: Path) -> None:
    made(tmp_path, 1, final=4)
    with Run(tmp_path, keep=Keep(last=1), last_model_only=True) as run:
        assert run.manager.restore(4) == 4
        for step in (5, 6, 7):
            run.save(step).result()
        assert run.manager.steps() == [4, 7]
        run.save(8, final=True)
        run.save(9).result()
        assert run.manager.steps() == [8, 9]


def test_a_run_that_comes_by_the_model_of_an_earlier_one_goes_on_and_leaves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, 1, 2, 3, final=4)
    with Run(tmp_path, every=1, last_model_only=True) as run:
        assert run.manager.restore() == 3
        with caplog.at_level(logging.WARNING, "holdfast"):
            assert run.manager.step(4) == []
        assert "step 4 is not saved" in caplog.text
        assert [handle.step for handle in run.manager.step(5)] == [5]
        with pytest.raises(CheckpointExists, match=r"step 4 is not saved: .*step-4 holds only a model.*final=True"):
            run.manager.save(4)
        run.manager.wait()
        assert run.manager.steps() == [1, 2, 3, 4, 5]
        assert holdfast.open(tmp_path / "step-4").read("model.weight").unique().tolist() == [4.0]


def test_a_run_that_comes_by_an_export_of_an_earlier_one_goes_on_and_leaves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, 1, 2, 3)
    holdfast.export_hf(torch.nn.Linear(2, 2), tmp_path / "step-4")
    before = (tmp_path / "step-4" / "model.safetensors").read_bytes()
    for again in ("restored", "started over"):
        with Run(tmp_path, every=1) as run:
            if again == "restored":
                assert run.manager.restore(3) == 3
            else:
                run.manager.start_over()
            caplog.clear()
            with caplog.at_level(logging.WARNING, "holdfast"):
                assert run.manager.step(4) == []
            assert "step 4 is not saved" in caplog.text
            with pytest.raises(CheckpointExists, match=r"step 4 is not saved: .*step-4 holds only a model"):
                run.manager.save(4)
            with pytest.raises(CheckpointExists, match="step-4 exists already"):
                run.save(4, final=True)
            assert [handle.step for handle in run.manager.step(5)] == [5]
            run.manager.wait()
            assert holdfast.open(tmp_path / "step-5").step == 5
    assert (tmp_path / "step-4" / "model.safetensors").read_bytes() == before


def test_the_last_save_of_a_run_takes_the_place_of_that_of_an_earlier_one(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3, final=4)
    with Run(tmp_path, last_model_only=True) as run:
        assert run.manager.restore() == 3
        run.model.weight.data.fill_(44)
        checkpoint = run.manager.save(4, final=True).result()
        assert checkpoint.read("model.weight").unique().tolist() == [44.0]
        assert run.manager.steps() == [1, 2, 3, 4]
    with Run(tmp_path, last_model_only=True) as run:
        assert run.manager.restore() == 3
        run.manager.pin(4)
        with pytest.raises(CheckpointExists, match="it is pinned"):
            run.save(4, final=True)


def test_a_signal_at_the_step_of_an_earlier_model_saves_at_the_next(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3, final=4)
    ended: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))
    try:
        with Run(tmp_path, every=100, last_model_only=True, save_on_signal="SIGUSR1") as run:
            assert run.manager.restore() == 3
            signal.raise_signal(signal.SIGUSR1)
            for _ in range(100):
                if run.manager._preemption is not None and run.manager._preemption._bid is not None:
                    break
                threading.Event().wait(0.05)
            assert run.manager.step(4) == []
            assert not ended
            saved = [handle.step for step in (5, 6) for handle in run.manager.step(step)]
            assert saved in ([5], [6])
            assert ended == [1]
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_exports_and_versions_are_kept_as_before(tmp_path: Path) -> None:
    """They are models too, but replaced by the next; what a run left behind of them goes first."""
    model = torch.nn.Linear(3, 2)
    export = holdfast.HFExport(tmp_path / "hf", every=1, keep=Keep(last=2))
    config = CheckpointConfig(every=1, keep=None)
    for first, back_to in ((1, None), (3, 2)):
        with CheckpointManager(tmp_path / "root", {"model": model}, config=config, exports=[export]) as manager:
            if back_to is not None:
                assert manager.restore(back_to) == back_to
            for step in range(first, first + 4):
                manager.step(step)
            manager.wait()
    assert sorted(name for name in os.listdir(tmp_path / "hf") if name[:3] == "hf-") == ["hf-5", "hf-6", "hf-latest"]


# nothing to resume from --------------------------------------------------------------------------------------------


def leave_another_template(root: Path) -> None:
    made(root, 5, name_template="ckpt-{step}")


def leave_a_copy(root: Path) -> None:
    made(root, 5)
    (root / "step-5").rename(root / "step-05")


def leave_a_single_save(root: Path) -> None:
    holdfast.save({"w": torch.ones(2)}, root / "before", step=3)


def leave_a_checkpoint_in_place_of_the_root(root: Path) -> None:
    holdfast.save({"w": torch.ones(2)}, root, step=3)


def leave_what_can_not_be_read(root: Path) -> None:
    made(root, 5, name_template="ckpt-{step}")
    (root / "ckpt-5" / MANIFEST_NAME).write_bytes(b"{")


def leave_what_has_lost_its_manifest(root: Path) -> None:
    made(root, 5, name_template="ckpt-{step}")
    (root / "ckpt-5" / MANIFEST_NAME).unlink()


def leave_what_an_old_version_published_under_a_backslash(root: Path) -> None:
    made(root, 5)
    manifest = root / "step-5" / MANIFEST_NAME
    found = decode_manifest(manifest.read_bytes(), path="")
    manifest.write_bytes(encode_manifest(type(found)(**{**_fields(found), "name": "a\\b-5"})))
    (root / "step-5").rename(root / "a\\b-5")


def _fields(manifest: Any) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


def leave_a_stock_checkpoint(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=root / "iter_5", no_dist=True)


def leave_half_of_a_stock_checkpoint(root: Path) -> None:
    leave_a_stock_checkpoint(root)
    (root / "iter_5").rename(root / "step-5")
    (root / "step-5" / ".metadata").unlink()


def leave_an_interrupted_overwrite(root: Path) -> None:
    made(root, 5)
    (root / "step-5").rename(root / ".step-5.0123456789ab.replaced")


LEFT = [
    (leave_another_template, r"ckpt-5 \(of step 5, but not named by 'step-\{step\}'\)"),
    (leave_a_copy, r"step-05 \(of step 5"),
    (leave_a_single_save, r"before \(of step 3"),
    (leave_a_checkpoint_in_place_of_the_root, r"it is a checkpoint itself"),
    (leave_what_can_not_be_read, r"ckpt-5 \(.*isn't a manifest"),
    (leave_what_has_lost_its_manifest, r"ckpt-5 \(.*is missing or not a plain file"),
    (leave_what_an_old_version_published_under_a_backslash, r"isn't a plain file name: it has a backslash"),
    (leave_a_stock_checkpoint, r"iter_5 \(written by stock DCP"),
    (leave_half_of_a_stock_checkpoint, r"step-5 \(it has neither a manifest"),
]


@pytest.mark.parametrize(("leave", "told"), LEFT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_that_resumes_from_nothing_tells_what_looks_like_a_checkpoint(
    leave: Any, told: str, tmp_path: Path
) -> None:
    leave(tmp_path)
    with Run(tmp_path) as run, pytest.warns(UserWarning, match=told):
        assert run.manager.restore() is None
    with Run(tmp_path, on_corrupt="raise", load_only=True) as run, pytest.raises(CheckpointCorrupt, match=told):
        run.manager.restore()
    with Run(tmp_path, load_only=True) as run, pytest.raises(CheckpointNotFound, match=told):
        run.manager.restore(77)


def test_an_overwrite_that_was_interrupted_is_told_by_who_may_not_settle_it(tmp_path: Path) -> None:
    leave_an_interrupted_overwrite(tmp_path)
    with Run(tmp_path, load_only=True) as run, pytest.warns(UserWarning, match="interrupted overwrite"):
        assert run.manager.restore() is None
    with Run(tmp_path) as run:
        assert run.manager.restore() == 5


def test_what_a_newer_version_wrote_and_what_may_not_be_read_is_raised(tmp_path: Path) -> None:
    made(tmp_path, 5)
    manifest = tmp_path / "step-5" / MANIFEST_NAME
    found = decode_manifest(manifest.read_bytes(), path="")
    manifest.write_bytes(encode_manifest(type(found)(**{**_fields(found), "format": 9})))
    with Run(tmp_path) as run, pytest.raises(ConfigError, match="format 9"):
        run.manager.restore()


@pytest.mark.parametrize("leave", ["nothing", "notes", "export", "initial", "trash"])
def test_a_run_that_starts_says_nothing_of_what_is_no_checkpoint(leave: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if leave == "notes":
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "a.txt").write_text("mine")
        (tmp_path / "step-1").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "nowhere").symlink_to("away")
    elif leave == "export":
        holdfast.export_hf({"model": torch.nn.Linear(2, 2)}, tmp_path / "hf-1")
    elif leave == "initial":
        holdfast.save({"model": torch.nn.Linear(SIZE, 1, bias=False)}, tmp_path / "init", step=3)
        options["initial_load_path"] = tmp_path / "init"
    elif leave == "trash":
        made(tmp_path, 5)
        (tmp_path / "step-5").rename(tmp_path / ".step-5.0123456789ab.trash")
    with Run(tmp_path, on_corrupt="raise", **options) as run:
        assert run.manager.restore() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_steps_in_other_layouts_of_stock_are_resumed_from(tmp_path: Path) -> None:
    model = torch.nn.Linear(SIZE, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-5" / "weights", no_dist=True)
    torch.nn.init.zeros_(model.weight)
    with CheckpointManager(tmp_path, {"model": model}, config=CheckpointConfig(load_model_only=True)) as manager:
        assert manager.restore() == 5
    assert model.weight.unique().tolist() == [3.0]


def test_a_root_of_which_nothing_can_be_read_is_corrupt_not_absent(tmp_path: Path) -> None:
    made(tmp_path, 5, 6)
    for step in (5, 6):
        (tmp_path / f"step-{step}" / MANIFEST_NAME).write_bytes(b"{")
    with pytest.raises(CheckpointCorrupt, match="step-6"):
        holdfast.open(tmp_path)


def test_a_run_that_finds_only_exports_in_the_places_of_steps_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        holdfast.export_hf({"model": torch.nn.Linear(SIZE, 1, bias=False)}, tmp_path / f"step-{step}")
    with Run(tmp_path) as run, caplog.at_level(logging.WARNING, "holdfast"):
        assert run.manager.restore() is None
        assert "holds only exports (newest: step 4), which a run can't resume from" in caplog.text
    caplog.clear()
    with Run(tmp_path, initial_load_path=tmp_path / "step-4") as run, caplog.at_level(logging.WARNING, "holdfast"):
        assert run.manager.restore() is None
        assert "exports" not in caplog.text


# saving what is there -----------------------------------------------------------------------------------------------


def test_a_step_that_an_earlier_run_published_is_refused_at_the_call(tmp_path: Path) -> None:
    made(tmp_path, 1, 2)
    with Run(tmp_path) as run:
        with pytest.raises(CheckpointExists, match=r"step 2: .*save another step, or go back before it") as error:
            run.manager.save(2)
        assert "overwrite" not in str(error.value)  # a manager has no such argument
        run.save(3).result()
        for _ in range(2):
            with pytest.raises(CheckpointExists, match="step 3"):
                run.manager.save(3)
        shutil.rmtree(tmp_path / "step-3")
        run.save(3).result()


def test_a_step_in_flight_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    with Run(tmp_path, every=1) as run, held_copies(opens_for_updates=False) as gate:
        handle = run.manager.save(1)
        threading.Timer(0.3, gate.open).start()
        with pytest.raises(CheckpointExists, match="step 1"):
            run.manager.step(1)
        assert handle.done()


def test_a_save_that_failed_is_tried_again_where_nothing_is(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with held_copies(opens_for_updates=False), torch.no_grad():
            handle = run.manager.save(1)
            run.model.weight.add_(1)
        assert isinstance(handle.exception(), StateChangedWhileStaging)
        with pytest.raises(StateChangedWhileStaging):
            run.manager.wait()
        assert run.save(1, final=True).result().step == 1


def test_a_last_save_after_one_that_failed_replaces_nothing_of_others(tmp_path: Path) -> None:
    with Run(tmp_path, last_dtype="bfloat16") as run:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / "notes.txt").write_text("mine")
        assert isinstance(run.save(1).exception(), CheckpointExists)
        with pytest.raises(CheckpointExists):
            run.manager.wait()
        with pytest.raises(CheckpointExists, match="step 1"):
            run.save(1, final=True)
        assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"


def test_exports_of_a_step_that_is_refused_are_not_begun(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    export = holdfast.HFExport(tmp_path / "hf", every=1)
    config = CheckpointConfig(every=1, keep=None)
    with CheckpointManager(tmp_path / "root", {"model": model}, config=config, exports=[export]) as manager:
        manager.step(1)
        with pytest.raises(CheckpointExists):
            manager.step(1)
        assert [handle.result().step for handle in manager.step(2)] == [2, 2]


def test_a_step_is_held_while_it_is_about_to_be_resumed_from(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, 3)
    keeper = Catalog(LocalStorage(tmp_path), "step-{step}", Keep(last=1))
    with keeper.holding(1):
        keeper.apply_retention(3, lambda _trash: None)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-3"]
    keeper.apply_retention(3, lambda _trash: None)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3"]


def test_a_run_that_starts_over_leaves_all_behind_and_takes_their_places(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for step in (2, 4, 6):
            run.save(step).result(60)
    with Run(tmp_path) as run:
        run.manager.start_over()
        run.save(2).result(60)
        run.save(3).result(60)
        assert (run.manager.latest(), run.manager.steps()) == (3, [2, 3, 4, 6])
        run.manager.start_over()  # also in the middle
        run.save(1).result(60)
    with Run(tmp_path) as run:
        assert run.manager.restore() == 1
        run.manager.pin(4)
        run.manager.start_over()
        with pytest.raises(CheckpointExists, match="pinned"):
            run.save(4).result(60)


def test_a_model_that_a_run_ended_with_stays_when_the_next_starts_over(tmp_path: Path) -> None:
    with Run(tmp_path, last_model_only=True) as run:
        run.save(1)
        run.save(2, final=True)
    with Run(tmp_path) as run:
        run.manager.start_over()
        with pytest.raises(CheckpointExists, match="holds only a model"):
            run.save(2)
