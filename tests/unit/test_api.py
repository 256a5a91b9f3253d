"""One call each: `save`, `async_save`, `load`, `open`; and what `import holdfast` costs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.boxes import Box
from holdfast.engine.client import EngineClient
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    StateMismatch,
)
from holdfast.loader.checkpoint import source_of
from holdfast.loader.read import read_boxes
from holdfast.saver import startup as starting
from holdfast.testing.staging import held_copies


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "step": 3,
        "nested": {"a": [1, {"b": (2, 3.5)}], "t": torch.arange(5)},
    }


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    pairs = zip(left["model"].parameters(), right["model"].parameters(), strict=True)
    return (
        all(torch.equal(a, b) for a, b in pairs)
        and all(
            torch.equal(a["exp_avg"], b["exp_avg"])
            for a, b in zip(left["optimizer"].state.values(), right["optimizer"].state.values(), strict=True)
        )
        and left["step"] == right["step"]
        and left["nested"]["a"] == right["nested"]["a"]
        and torch.equal(left["nested"]["t"], right["nested"]["t"])
    )


def test_there_and_back(tmp_path: Path) -> None:
    state = state_of()
    saved = holdfast.save(state, tmp_path / "a" / "b" / "ckpt", step=12, metrics={"loss": 0.25})
    assert (saved.step, saved.path, saved.metrics) == (12, str(tmp_path / "a/b/ckpt"), {"loss": 0.25})
    other = state_of(1)
    other["step"], other["nested"] = 0, {"a": [0, {"b": (0, 0.0)}], "t": torch.zeros(5, dtype=torch.int64)}
    loaded = holdfast.load(other, tmp_path / "a" / "b" / "ckpt")
    assert loaded.step == 12
    assert equal(state, other)
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["ckpt"]


class TestParts:
    """`Checkpoint.read` takes what indexes a tensor by slices and integers, and names the dimension of what doesn't."""

    whole = torch.arange(24.0).reshape(2, 3, 4)

    @pytest.fixture
    def stored(self, tmp_path: Path) -> holdfast.Checkpoint:
        return holdfast.save({"t": self.whole}, tmp_path / "ckpt")

    @pytest.mark.parametrize(
        "index",
        [
            ...,
            (..., 1),
            (1, ..., slice(1, 3)),
            (0, 1, 2, ...),
            np.int64(-1),
            (torch.tensor(1), slice(2)),
            slice(5, 1),
        ],
        ids=str,
    )
    def test_as_the_tensor_itself(self, stored: holdfast.Checkpoint, index: Any) -> None:
        assert torch.equal(stored.read("t", index), self.whole[index])

    @pytest.mark.parametrize(
        "part", ["a", 1.5, True, [0], None, 3, slice("a"), slice(0, 1.5), slice(None, None, 0)], ids=str
    )
    def test_else_an_error(self, stored: holdfast.Checkpoint, part: Any) -> None:
        for index in ((0, part), (..., part, 0)):
            with pytest.raises(ConfigError, match=r"t: .* dimension 1"):
                stored.read("t", index)

    @pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., ...), (0, 0, 0, ..., 0), slice(None, None, -1)], ids=str)
    def test_as_is_what_no_part_is(self, stored: holdfast.Checkpoint, index: Any) -> None:
        with pytest.raises(ConfigError, match="t"):
            stored.read("t", index)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'m\.a\\udc80', which UTF-8 can't encode"):
        holdfast.save({"m": {os.fsdecode(b"a\x80"): torch.ones(2)}}, tmp_path / "ckpt")
    assert not os.listdir(tmp_path)


def test_open_reads_any_part(tmp_path: Path) -> None:
    state = state_of()
    holdfast.save(state, tmp_path / "ckpt", step=1)
    checkpoint = holdfast.open(tmp_path / "ckpt")
    weight = state["model"].weight.detach()
    assert torch.equal(checkpoint.read("model.weight"), weight)
    assert torch.equal(checkpoint.read("model.weight", (slice(1, 3), 2)), weight[1:3, 2])
    info = checkpoint.tensors["model.weight"]
    assert (info.shape, info.dtype, info.nbytes, len(info.shards)) == ((4, 6), torch.float32, 96, 1)
    assert checkpoint.objects["step"] == 3
    assert (checkpoint.objects["nested.a.0"], checkpoint.objects["nested.a.1.b"]) == (1, (2, 3.5))
    assert checkpoint.verify().ok
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.world == 1
    for call in (lambda: checkpoint.read("model.missing"), lambda: holdfast.open(tmp_path / "nowhere")):
        with pytest.raises(CheckpointNotFound):
            call()


@pytest.mark.parametrize("verify", [False, True])
def test_a_map_shows_what_the_file_holds(tmp_path: Path, verify: bool) -> None:
    state = {
        "large": torch.randn(700, 800),
        "row": torch.randn(1, 7).to(torch.bfloat16),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
    }
    checkpoint = holdfast.save(state, tmp_path / "ckpt")
    for name, tensor in state.items():
        view = checkpoint.map(name, verify=verify)
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(view.to(torch.float64), tensor.to(torch.float64))


def test_writing_to_a_map_changes_no_file(tmp_path: Path) -> None:
    checkpoint = holdfast.save({"w": torch.ones(2000)}, tmp_path / "ckpt")
    view = checkpoint.map("w")
    view.zero_()
    assert checkpoint.read("w").eq(1).all()
    assert holdfast.open(tmp_path / "ckpt").map("w").eq(1).all()
    assert checkpoint.verify().ok


def test_a_map_outlives_its_checkpoint(tmp_path: Path) -> None:
    holdfast.save({"w": torch.arange(300_000)}, tmp_path / "ckpt")
    view = holdfast.open(tmp_path / "ckpt").map("w")
    shutil.rmtree(tmp_path / "ckpt")
    assert torch.equal(view, torch.arange(300_000))


def test_a_map_is_verified_when_asked(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(500_000), "v": torch.ones(900_000)}, tmp_path / "ckpt")
    (path,) = (tmp_path / "ckpt").glob("*_0.distcp")
    data = bytearray(path.read_bytes())
    data[300_000] ^= 1
    path.write_bytes(data)
    checkpoint = holdfast.open(tmp_path / "ckpt")
    damaged = [name for name in ("w", "v") if not checkpoint.map(name).eq(1).all()]
    assert len(damaged) == 1
    with pytest.raises(CheckpointCorrupt) as caught:
        checkpoint.map(damaged[0], verify=True)
    assert caught.value.tensor == damaged[0]


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(ConfigError, match="Holdfast didn't write it"):
        holdfast.open(tmp_path / "stock").map("w")
    with pytest.raises(CheckpointNotFound, match="no tensor 'missing'"):
        holdfast.save({"w": torch.ones(4)}, tmp_path / "ckpt").map("missing")


def test_a_part_of_a_tensor_reads_only_its_extents(tmp_path: Path) -> None:
    tensor = torch.randn(4096, 2048)
    holdfast.save({"w": tensor}, tmp_path / "ckpt")
    read_before = holdfast.statistics()["bytes_read"]
    part = holdfast.open(tmp_path / "ckpt").read("w", slice(1000, 1041))  # 1% of it: 328 KiB in one extent or two
    assert torch.equal(part, tensor[1000:1041])
    assert 0 < holdfast.statistics()["bytes_read"] - read_before <= 2 << 20


def test_boxes_are_read_together(tmp_path: Path) -> None:
    weight = torch.randn(64, 256)
    checkpoint = holdfast.save({"w": weight, "none": torch.zeros(0, 3)}, tmp_path / "ckpt")
    before = holdfast.statistics()["bytes_read"]
    quarters = [("w", Box((16 * n, 0), (16, 256))) for n in range(4)]
    *parts, none = read_boxes(source_of(checkpoint), [*quarters, ("none", Box((0, 0), (0, 3)))])
    together = holdfast.statistics()["bytes_read"] - before
    assert torch.equal(torch.cat(parts), weight)
    assert none.shape == (0, 3)
    assert torch.equal(checkpoint.read("w"), weight)
    assert holdfast.statistics()["bytes_read"] - before == 2 * together  # their extent once, for all of them


def test_the_root_of_a_manager_means_its_newest_step(tmp_path: Path) -> None:
    state = state_of()
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        manager.save(2)
        manager.save(10)
    assert holdfast.open(tmp_path).step == 10
    other = state_of(1)
    assert holdfast.load(other, tmp_path).step == 10
    assert equal(state, other)


def test_what_exists_is_replaced_only_when_asked_for_and_as_a_whole(tmp_path: Path) -> None:
    holdfast.save({"a": torch.zeros(3), "b": 1}, tmp_path / "x", step=1)
    with pytest.raises(CheckpointExists, match=r"x exists already.*overwrite=True"):
        holdfast.save({"a": torch.ones(3)}, tmp_path / "x", step=2)
    assert holdfast.open(tmp_path / "x").step == 1
    for step in range(2, 8):  # one right after the other, into the lock of the one before
        holdfast.save({"a": torch.full((3,), float(step))}, tmp_path / "x", step=step, overwrite=True)
        found = holdfast.open(tmp_path / "x")
        assert (found.step, found.read("a").tolist(), sorted(found.objects)) == (step, [step] * 3, [])
    assert os.listdir(tmp_path) == ["x"]


def test_a_directory_of_somebody_else_is_not_saved_into(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointExists, match="x exists already"):
        holdfast.save({"a": 1}, tmp_path / "x")
    assert (tmp_path / "x" / "thesis.tex").read_text() == "years of work"


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert holdfast.save({"a": 1}, tmp_path / "x").objects["a"] == 1


def test_an_async_save_goes_on_by_itself(tmp_path: Path) -> None:
    state = state_of()
    weight = state["model"].weight.detach().clone()
    with held_copies():
        handle = holdfast.async_save(state, tmp_path / "x", step=5)
        assert not handle.done()
        state["model"](torch.randn(2, 6)).sum().backward()
        state["optimizer"].step()
    assert not torch.equal(state["model"].weight, weight)
    assert torch.equal(handle.result().read("model.weight"), weight)
    assert handle.stage == "published"
    deadline = time.monotonic() + 20
    while os.listdir(tmp_path) != ["x"] and time.monotonic() < deadline:
        time.sleep(0.01)  # the lock beside it goes on a thread of its own
    assert os.listdir(tmp_path) == ["x"]


def test_two_async_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    with held_copies(opens_for_updates=False) as gate:
        first = holdfast.async_save({"a": torch.zeros(1 << 20)}, tmp_path / "x", timeout=30)
        threading.Timer(0.2, gate.open).start()
        with pytest.raises((CheckpointExists, holdfast.RootLocked)):
            holdfast.async_save({"a": torch.ones(1 << 20)}, tmp_path / "x", timeout=30).result()
    assert first.result().read("a").sum() == 0


def test_an_async_save_can_be_awaited(tmp_path: Path) -> None:
    async def main() -> int | None:
        checkpoint = await holdfast.async_save(state_of(), tmp_path / "x", step=4, staging="eager")
        return checkpoint.step

    assert asyncio.run(main()) == 4


def test_saving_from_a_thread_while_another_trains_elsewhere(tmp_path: Path) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(holdfast.save({"n": n}, tmp_path / str(n), step=n).step))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"metrics": {"loss": "low"}}, "metrics.loss"),
        ({"process_group": object()}, "process_group"),
    ],
)
def test_arguments_are_checked_before_anything_is_made(options: dict[str, Any], field: str, tmp_path: Path) -> None:
    for call in (holdfast.save, holdfast.async_save):
        with pytest.raises(ConfigError) as caught:
            call({"a": 1}, tmp_path / "new" / "x", **options)
        assert caught.value.field == field
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "path", ["", "s3://", "gs:///k", "az://c/../k", "s3://b/k?x", "ftp://b/k", "file://host/x", 7, None]
)
def test_a_path_is_a_directory(path: Any) -> None:
    for call in (
        lambda: holdfast.save({"a": 1}, path),
        lambda: holdfast.load({"a": 1}, path),
        lambda: holdfast.open(path),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.field == "path"


def test_the_root_of_the_file_system_is_no_checkpoint() -> None:
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="path") as caught:
            holdfast.save({"a": 1}, "/", overwrite=overwrite)
        assert caught.value.field == "path"


@pytest.mark.parametrize("state", [{}, [], None, {1: 2}, {"": 1}, "state"])
def test_a_state_is_a_mapping_of_names(state: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        holdfast.save(state, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_load_is_strict_unless_told_otherwise(tmp_path: Path) -> None:
    holdfast.save({"a": {"x": torch.ones(2), "y": torch.ones(3)}, "b": 1}, tmp_path / "c")
    target = {"a": {"x": torch.zeros(2), "z": torch.zeros(4)}}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(target, tmp_path / "c")
    assert (caught.value.missing, caught.value.unexpected) == (("a.z",), ("a.y",))
    assert target["a"]["x"].sum() == 0
    holdfast.load(target, tmp_path / "c", strict=False)
    assert target["a"]["x"].sum() == 2
    assert target["a"]["z"].sum() == 0


def test_load_verifies_unless_told_otherwise(tmp_path: Path) -> None:
    path = holdfast.save({"a": torch.ones(1000)}, tmp_path / "c").path
    (file,) = [file for file in Path(path).glob("*.distcp") if file.stat().st_size > 4000]
    data = bytearray(file.read_bytes())
    place = data.index(torch.ones(1000).numpy().tobytes())
    data[place + 40] ^= 0xFF
    file.write_bytes(data)
    target = {"a": torch.zeros(1000)}
    with pytest.raises(CheckpointCorrupt, match="a") as caught:
        holdfast.load(target, path)
    assert caught.value.path == str(file)
    assert caught.value.tensor == "a"
    assert caught.value.byte_range is not None
    holdfast.load(target, path, verify=False)
    assert (target["a"] != 1).sum() == 1
    report = holdfast.open(path).verify()
    assert not report.ok
    assert [(problem.path, problem.tensor) for problem in report.problems] == [(str(file), "a")]


@pytest.mark.parametrize("how", ["absent", "short", "long"])
def test_verify_looks_at_everything_and_names_each_thing_once(tmp_path: Path, how: str) -> None:
    path = Path(holdfast.save({"a": torch.ones(24 << 18), "b": {"c": {1}}}, tmp_path / "c").path)
    large, small = sorted(path.glob("*.distcp"), key=lambda file: -file.stat().st_size)
    with large.open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"!")
    (path / "README").write_text("what is this doing here?")
    if how == "absent":
        small.unlink()
    else:
        os.truncate(small, small.stat().st_size + (-1 if how == "short" else 5 << 20))
    told: list[tuple[int, int]] = []
    report = holdfast.open(path).verify(lambda done, total: told.append((done, total)))
    found = sorted((Path(problem.path).name, problem.tensor) for problem in report.problems)
    assert found == sorted([(large.name, "a"), (small.name, None)])
    assert [Path(warning.path).name for warning in report.warnings] == ["README"]
    assert told[-1] == (report.nbytes, report.nbytes)


def test_load_waits_for_a_lazy_save_of_what_it_overwrites(tmp_path: Path) -> None:
    state = state_of()
    holdfast.save(state_of(5), tmp_path / "other")
    weight = state["model"].weight.detach().clone()
    with held_copies():
        handle = holdfast.async_save(state, tmp_path / "x")
        holdfast.load(state, tmp_path / "other")
    assert not torch.equal(state["model"].weight, weight)
    assert torch.equal(handle.result().read("model.weight"), weight)


def test_a_save_that_is_late_says_so(tmp_path: Path) -> None:
    with held_copies(opens_for_updates=False) as gate:
        opener = threading.Timer(1.0, gate.open)
        opener.start()
        with pytest.raises((DeadlineExceeded, holdfast.SaveFailed), match=r"0\.3 s"):
            holdfast.save({"a": torch.ones(9)}, tmp_path / "x", timeout=0.3)
        opener.join()
    assert not (tmp_path / "x").exists()


def test_the_time_of_a_save_is_that_of_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "recover_one", lambda *_, **__: time.sleep(0.8))
    with held_copies(opens_for_updates=False) as gate:
        opener = threading.Timer(3.0, gate.open)
        opener.start()
        with pytest.raises((DeadlineExceeded, holdfast.SaveFailed), match=r"0\.[1-3] s|within 1 s"):
            holdfast.save({"a": torch.ones(9)}, tmp_path / "x", timeout=1.0)
        opener.join()
    assert not (tmp_path / "x").exists()


def report_late(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """The engine reports when it is told that staging was verified: not for a while."""
    verified = EngineClient.staging_verified
    monkeypatch.setattr(EngineClient, "staging_verified", lambda *args: (time.sleep(by_s), verified(*args))[1])


def test_a_save_is_given_up_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        report_late(patch, 4.0)
        with pytest.raises((DeadlineExceeded, holdfast.SaveFailed)):
            holdfast.save({"a": torch.ones(9)}, tmp_path / "x", timeout=0.5)
    holdfast.save({"a": torch.ones(9)}, tmp_path / "x")


def test_an_async_save_is_given_up_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        report_late(patch, 4.0)
        handle = holdfast.async_save({"a": torch.ones(9)}, tmp_path / "x", timeout=0.5)
        assert isinstance(handle.exception(30.0), holdfast.SaveFailed)
    assert not (tmp_path / "x").exists()
    holdfast.save({"a": torch.ones(9)}, tmp_path / "x")


# the package -----------------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    source = os.path.dirname(os.path.dirname(os.path.abspath(holdfast.__file__)))
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap_and_starts_nothing() -> None:
    run_python(
        """
        import sys, threading, os
        before = len(os.listdir("/proc/self/fd"))
        import holdfast
        assert "torch" not in sys.modules and "numpy" not in sys.modules, "imports too much"
        assert threading.active_count() == 1
        assert len(os.listdir("/proc/self/fd")) == before
        dir(holdfast)
        holdfast.HoldfastError, holdfast.Keep(last=2), holdfast.statistics()
        assert "torch" not in sys.modules
        holdfast.CheckpointManager, holdfast.PerRank
        assert threading.active_count() == 1
        """
    )


def test_no_compiler_is_imported_for_a_program_that_has_none(tmp_path: Path) -> None:
    run_python(
        f"""
        import sys, torch, holdfast
        from holdfast import manager
        from holdfast.staging import optimizer_hook
        assert "torch._dynamo" not in sys.modules, "importing"
        path = holdfast.save({{"a": torch.ones(9)}}, {str(tmp_path / "a")!r}).path
        holdfast.load({{"a": torch.zeros(9)}}, path)
        assert holdfast.open(path).read("a").sum() == 9
        assert "torch._dynamo" not in sys.modules, "saving or loading"
        """
    )


def test_every_public_name_is_there() -> None:
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        holdfast.nothing  # noqa: B018


def test_a_program_that_ends_without_close_finishes_what_it_began(tmp_path: Path) -> None:
    out = run_python(
        f"""
        import torch, holdfast
        manager = holdfast.CheckpointManager({str(tmp_path)!r}, {{"a": torch.ones(1 << 20)}})
        manager.save(1)
        holdfast.async_save({{"b": torch.ones(1 << 20)}}, {str(tmp_path / "single")!r})
        print("end of program")
        """
    )
    assert out == "end of program\n"
    assert holdfast.open(tmp_path / "step-1").verify().ok
    assert holdfast.open(tmp_path / "single").verify().ok


@pytest.mark.parametrize("held", [True, False], ids=["held", "left"])
@pytest.mark.parametrize("how", ["save", "async_save", "dcp"])
def test_overwriting_never_takes_a_whole_root_away(tmp_path: Path, how: str, held: bool) -> None:
    """One path too short, and all checkpoints of a run would be gone."""
    root = tmp_path / "root"
    manager = holdfast.CheckpointManager(root, {"a": torch.ones(4)})
    manager.save(1).result()
    if not held:
        manager.close()
    expected = holdfast.RootLocked if held else holdfast.ConfigError

    def overwrite() -> None:
        if how != "dcp":
            getattr(holdfast, how)({"a": torch.zeros(4)}, root, overwrite=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of torch's: that there is one process, as was asked for
                dcp.save({"a": torch.zeros(4)}, storage_writer=holdfast.dcp.Writer(root, overwrite=True), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None

    with pytest.raises(expected, match=str(root)) as caught:
        overwrite()
    if held:
        assert isinstance(caught.value, holdfast.RootLocked)
        assert str(os.getpid()) in caught.value.by
        manager.close()
    assert holdfast.open(root).read("a").tolist() == [1] * 4
    assert sorted(os.listdir(tmp_path)) == ["root"]
    assert holdfast.save({"a": torch.zeros(4)}, root / "other", overwrite=True).path == str(root / "other")
