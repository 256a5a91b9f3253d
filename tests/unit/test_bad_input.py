"""Bad input and bad luck on one process: each a specific error, nothing lost, and the next save works.

What every case must hold is in `survives`: the error names step, rank and path, the checkpoint before is intact and the
newest, nothing partial is visible, and training and saving go on.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    EngineDied,
    HoldfastError,
    SaveFailed,
    StateMismatch,
    StorageError,
)
from holdfast.testing.staging import held_copies


class Colour(enum.Enum):
    RED = 1


class Own:
    pass


class Run:
    """A model whose weight is its step, and a manager."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.model = nn.Linear(256, 256, bias=False)
        self.state: dict[str, Any] = {"model": self.model, "train": {"log": [1, 2]}}
        config = holdfast.CheckpointConfig(**{"every": 1, "keep": None, "persist_timeout": 60.0, **options})
        self.manager = holdfast.CheckpointManager(root, self.state, config=config)

    def save(self, step: int) -> holdfast.SaveHandle:
        with torch.no_grad():
            self.manager.before_update()
            self.model.weight.fill_(step)
        return self.manager.save(step)

    def survives(self, error: BaseException, step: int, *, told: bool = False) -> None:
        """After the save of ``step`` failed with ``error``: step 1 is there and right, and the next step is saved."""
        assert isinstance(error, HoldfastError)
        text = str(error)
        assert f"step {step}" in text or f"step-{step}" in text, text
        if not told:
            with pytest.raises(type(error)):
                self.manager.wait()
        assert self.manager.steps() == [1]
        before = holdfast.open(self.root)
        assert before.verify().ok
        assert before.read("model.weight").unique().tolist() == [1]
        checkpoint = self.save(step + 1).result()
        assert checkpoint.read("model.weight").unique().tolist() == [step + 1]
        assert self.manager.steps() == [1, step + 1]
        self.manager.close()
        left = [name for name in os.listdir(self.root) if name not in (".holdfast", "step-1", f"step-{step + 1}")]
        assert [name for name in left if not name.endswith(".trash")] == []
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "root")
    run.save(1).result()
    yield run
    with contextlib.suppress(HoldfastError):
        run.manager.close()


# the state -------------------------------------------------------------------------------------------------------

LEAVES: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: lambda: 0,
    "a function": lambda: time.sleep,
    "an open file": lambda: sys.stderr,
    "a class of the user's": Own,
    "a class": lambda: Own,
    "an enumeration": lambda: Colour.RED,
    "a module": lambda: os,
    "a generator": lambda: iter([1]),
    "a thread lock": lambda: __import__("threading").Lock(),
    "an object inside a tuple": lambda: (1, {"deep": [Own()]}),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a tensor on the meta device": lambda: torch.empty(2, device="meta"),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a lazy module": lambda: nn.LazyLinear(3),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|deprecated|LazyModule|Lazy modules).*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*:DeprecationWarning")
@pytest.mark.parametrize("leaf", LEAVES)
def test_what_cannot_be_stored_is_refused_by_name_before_anything_is_written(leaf: str, run: Run) -> None:
    run.state["train"]["extra"] = {"inner": LEAVES[leaf]()}
    before = sorted(os.listdir(run.root))
    with pytest.raises(ConfigError, match=r"train\.extra\.inner") as caught:
        run.save(2)
    assert caught.value.field is not None
    assert caught.value.field.startswith("train.extra.inner")
    assert sorted(os.listdir(run.root)) == before
    with pytest.raises(ConfigError, match=r"train\.extra\.inner"):
        holdfast.save(run.state, run.root / "other")
    assert sorted(os.listdir(run.root)) == before
    del run.state["train"]["extra"]
    assert run.save(3).result().step == 3
    assert run.manager.steps() == [1, 3]


def test_two_values_of_one_name_are_refused(run: Run) -> None:
    run.state["train.log"] = 3
    with pytest.raises(ConfigError, match=r"train\.log"):
        run.save(2)


def test_a_state_that_holds_itself_is_refused(run: Run) -> None:
    run.state["train"]["again"] = run.state["train"]
    with pytest.raises(ConfigError, match="does the state hold itself"):
        run.save(2)


def test_an_object_that_fails_while_it_is_asked_fails_that_save_only(run: Run) -> None:
    class Moody:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("the tokenizer is not ready")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    run.state["loader"] = Moody()
    with pytest.raises(RuntimeError, match="the tokenizer is not ready"):
        run.save(2)
    del run.state["loader"]
    assert run.save(3).result().step == 3


# the path --------------------------------------------------------------------------------------------------------


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for call in (
        lambda: holdfast.save({"a": 1}, tmp_path / "file"),
        lambda: holdfast.load({"a": 1}, tmp_path / "file"),
        lambda: holdfast.open(tmp_path / "file"),
        lambda: holdfast.CheckpointManager(tmp_path / "file", {"a": 1}),
    ):
        with pytest.raises(ConfigError, match=rf"{tmp_path}/file is a file"):
            call()
    for call in (
        lambda: holdfast.save({"a": 1}, tmp_path / "file" / "below"),
        lambda: holdfast.CheckpointManager(tmp_path / "file" / "below", {"a": 1}),
    ):
        with pytest.raises((ConfigError, StorageError), match=rf"{tmp_path}/file"):
            call()
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


@contextlib.contextmanager
def mounted(target: Path, *options: str) -> Iterator[Path]:
    """A file system of its own in memory; skips where this process may not mount one."""
    target.mkdir(exist_ok=True)
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(target)], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode != 0:
        pytest.skip(f"may not mount: {done.stderr.decode().strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path / "mnt", "-o", "size=16m") as disk:
        holdfast.save({"a": torch.ones(4)}, disk / "there", step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for call in (
            lambda: holdfast.save({"a": 1}, disk / "x"),
            lambda: holdfast.CheckpointManager(disk / "runs", {"a": 1}),
            lambda: holdfast.CheckpointManager(disk, {"a": 1}),
        ):
            with pytest.raises(StorageError, match=str(disk)) as caught:
                call()
            assert caught.value.errno == errno.EROFS
            assert str(disk) in caught.value.path
        target = {"a": torch.zeros(4)}
        assert holdfast.load(target, disk / "there").step == 1  # reading needs no writing
        with (
            holdfast.CheckpointManager(disk, target, config=holdfast.CheckpointConfig(load_only=True)) as manager,
            pytest.warns(UserWarning, match=r"there.*not named by"),
        ):
            assert manager.restore() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="locked") as caught:
        holdfast.save({"a": 1}, tmp_path / "locked" / "x")
    assert caught.value.errno == errno.EACCES


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "mnt", "-o", "size=2m") as disk:
        run = Run(disk / "root")
        run.save(1).result()
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - (100 << 10)))
        error = run.save(2).exception()
        assert isinstance(error, SaveFailed)
        assert (error.step, error.rank, error.errno) == (2, 0, errno.ENOSPC)
        assert error.path is not None
        assert error.path in str(error)
        assert "No space left" in str(error)
        assert isinstance(error.__cause__, StorageError)
        (disk / "filler").unlink()
        run.survives(error, 2)


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """As a full disk, for those who may not mount: the engine inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, hard))
        run = Run(tmp_path / "root")
        with pytest.raises(SaveFailed) as caught:
            run.save(1).result()
        assert caught.value.errno == errno.EFBIG
        assert (caught.value.step, caught.value.rank) == (1, 0)
        with contextlib.suppress(SaveFailed):
            run.manager.close()
        assert [name for name in os.listdir(tmp_path / "root") if name.startswith("step")] == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def test_what_is_there_is_not_replaced(run: Run) -> None:
    with pytest.raises(CheckpointExists, match=r"step 1: .*root/step-1 exists already") as caught:
        run.manager.save(1)
    assert caught.value.path == str(run.root / "step-1")
    run.survives(caught.value, 1, told=True)


def test_what_comes_to_be_there_meanwhile_is_not_replaced(run: Run) -> None:
    with held_copies(opens_for_updates=False):
        handle = run.save(2)
        (run.root / "step-2").mkdir()
        (run.root / "step-2" / "in the way").write_text("x")
    error = handle.exception()
    assert isinstance(error, CheckpointExists)
    assert os.listdir(run.root / "step-2") == ["in the way"]
    shutil.rmtree(run.root / "step-2")
    run.survives(error, 2)


def test_the_root_vanishes(run: Run) -> None:
    shutil.move(run.root, run.root.with_name("moved"))
    error = run.save(2).exception()
    assert isinstance(error, (SaveFailed, StorageError))
    assert str(run.root) in str(error)
    shutil.move(run.root.with_name("moved"), run.root)
    run.survives(error, 2)


# the engine ------------------------------------------------------------------------------------------------------


def engine_pid(run: Run) -> int:
    saver = run.manager._saver
    assert saver is not None
    saver._engine.wait_ready()
    pid = saver._engine.pid
    assert pid is not None
    return pid


def test_an_engine_that_is_killed_in_the_middle_of_a_save(run: Run) -> None:
    pid = engine_pid(run)
    os.kill(pid, signal.SIGSTOP)  # it must not get to the end of its work before it is killed
    handle = run.save(2)
    run.manager.wait_staged()
    while handle.stage not in ("persisting", "failed"):
        time.sleep(0.001)
    time.sleep(0.5)  # until it was given the save: one that dies before is replaced, and the save succeeds
    os.kill(pid, signal.SIGKILL)
    error = handle.exception()
    assert isinstance(error, SaveFailed), f"{handle.stats}; stopped: {pid}; the engine is {engine_pid(run)} now"
    assert (error.step, error.rank) == (2, 0)
    assert isinstance(error.__cause__, EngineDied)
    assert f"pid {pid}" in str(error)
    assert "SIGKILL" in str(error)
    run.survives(error, 2)


def test_an_engine_that_was_killed_between_saves_is_replaced(run: Run) -> None:
    os.kill(engine_pid(run), signal.SIGKILL)
    try:
        checkpoint = run.save(2).result()
    except SaveFailed as error:  # the kill was noticed only in the middle; `result` has told of it
        run.survives(error, 2, told=True)
    else:
        assert checkpoint.read("model.weight").unique().tolist() == [2]


def test_an_engine_that_stops_answering(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = run.manager._saver
    assert saver is not None
    pid = engine_pid(run)
    assert saver._engine._link is not None
    monkeypatch.setattr(saver._engine._link, "_silence_s_max", 0.5)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    error = run.save(2).exception()
    assert time.monotonic() - began < 30
    assert isinstance(error, SaveFailed)
    assert isinstance(error.__cause__, EngineDied)
    assert "stopped answering" in str(error)
    run.survives(error, 2)


def test_storage_that_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "root", persist_timeout=1.0)
    run.save(1).result()
    pid = engine_pid(run)
    assert run.manager._saver is not None
    engine = run.manager._saver._engine
    cancel = engine.cancel
    monkeypatch.setattr(engine, "cancel", lambda attempt, timeout_s: cancel(attempt, timeout_s=min(timeout_s, 0.5)))
    os.kill(pid, signal.SIGSTOP)
    error = run.save(2).exception()
    assert isinstance(error, SaveFailed)
    assert isinstance(error.__cause__, (holdfast.DeadlineExceeded, EngineDied))
    assert (error.step, error.rank) == (2, 0)
    run.survives(error, 2)


# what is loaded --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    holdfast.save({"model": {"w": torch.ones(64, 64), "b": torch.ones(3)}, "n": 5}, tmp_path / "ckpt", step=4)
    return tmp_path / "ckpt"


def target() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(64, 64), "b": torch.zeros(3)}, "n": 0}


def data_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a data file is missing": lambda path: data_file(path).unlink(),
    "a data file is short": lambda path: truncate(data_file(path)),
    "a data file is empty": lambda path: data_file(path).write_bytes(b""),
    "a data file is all zeros": lambda path: data_file(path).write_bytes(bytes(data_file(path).stat().st_size)),
    "the manifest is empty": lambda path: (path / "holdfast.json").write_bytes(b""),
    "the manifest is garbage": lambda path: (path / "holdfast.json").write_bytes(os.urandom(500)),
    "the manifest is other JSON": lambda path: (path / "holdfast.json").write_text('{"hello": "world"}'),
    "a report is missing": lambda path: next(path.glob("*.report")).unlink(),
    "a report is garbage": lambda path: next(path.glob("*.report")).write_bytes(os.urandom(64)),
    "the metadata is garbage": lambda path: (path / ".metadata").write_bytes(os.urandom(64)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_nothing_is_loaded_from_it(how: str, checkpoint: Path) -> None:
    DAMAGE[how](checkpoint)
    with pytest.raises(CheckpointCorrupt, match=str(checkpoint)) as caught:
        holdfast.load(target(), checkpoint)
    assert caught.value.path.startswith(str(checkpoint))
    with contextlib.suppress(CheckpointCorrupt):  # or it can't even be opened
        report = holdfast.open(checkpoint).verify()
        assert not report.ok
        assert report.problems[0].path.startswith(str(checkpoint))


@pytest.mark.parametrize("kind", ["empty", "garbage", "garbage for a model", "absent", "text", "pickle"])
def test_a_directory_that_is_no_checkpoint(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind != "absent":
        path.mkdir()
    if kind == "garbage":
        (path / "model.dat").write_bytes(os.urandom(100))
    if kind == "garbage for a model":
        (path / "model.safetensors").write_bytes(os.urandom(100))
    if kind == "text":
        (path / "holdfast.json.bak").write_text("{}")
    if kind == "pickle":
        (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises((CheckpointNotFound, CheckpointCorrupt), match=str(path)) as caught:
        holdfast.load(target(), path)
    corrupt = kind in ("pickle", "garbage for a model")
    assert isinstance(caught.value, CheckpointCorrupt if corrupt else CheckpointNotFound)
    with pytest.raises((CheckpointNotFound, CheckpointCorrupt), match=str(path)):
        holdfast.open(path)


def test_a_state_of_another_shape_is_not_touched(checkpoint: Path) -> None:
    other = target()
    other["model"]["w"] = torch.zeros(64, 32)
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(other, checkpoint)
    assert caught.value.mismatched == ("model.w",)
    for part in ("model.w", "[64, 64]", "[64, 32]", str(checkpoint)):
        assert part in str(caught.value), part
    assert other["model"]["b"].sum() == 0
    assert other["n"] == 0


def test_a_step_that_is_published_but_damaged_does_not_stop_the_run(run: Run) -> None:
    run.save(2).result()
    truncate(data_file(run.root / "step-2"))
    run.manager.close()
    again = Run(run.root)
    with pytest.warns(UserWarning, match="step 2 can't be loaded, falling back to step 1"):
        assert again.manager.restore() == 1
    assert again.model.weight.unique().tolist() == [1]
    assert again.save(2).result().read("model.weight").unique().tolist() == [2]
    again.manager.close()
