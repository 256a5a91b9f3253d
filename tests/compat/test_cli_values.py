"""``holdfast diff | cat | export | convert | prune | watch``, in this process, on checkpoints that were saved."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.catalog.journal import FileSink, render
from holdfast.cli.app import main
from holdfast.storage.locks import RootLock

METRICS = {100: 0.5, 200: 0.25, 300: 0.125, 400: 0.0625}


class Shell:
    """Runs commands, and returns their exit status; what they print is in ``out`` and ``err``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""

    def run(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return status

    def document(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        assert self.run(*arguments, "--json") == status, self.out + self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(monkeypatch, capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "root"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "train": {"epoch": 0}}
    config = holdfast.CheckpointConfig(every=1, keep=None)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        for step, loss in METRICS.items():
            model(torch.randn(3, 8)).square().sum().backward()
            optimizer.step()
            state["train"]["epoch"] = step
            manager.save(step, metrics={"loss": loss}, files={"notes.txt": b"of step %d\n" % step}).result()
    return root


# diff ------------------------------------------------------------------------------------------------------------


def saved(path: Path, **state: Any) -> Path:
    holdfast.save({"model": state}, path)
    return path


def test_diff_tells_by_how_much(shell: Shell, tmp_path: Path) -> None:
    base = torch.arange(1.0, 9.0).reshape(2, 4)
    moved = base.clone()
    moved[0, 0] = 3.0
    one = saved(tmp_path / "one", moved=base, equal=base, gone=base, shape=base, dtype=base, **{"h.0.w": base})
    two = saved(
        tmp_path / "two",
        moved=moved,
        equal=base,
        new=base[0],
        shape=base.T.contiguous(),
        dtype=base.half(),
        **{"h.0.w": -base},
    )
    found = shell.document("diff", one, two, status=1)
    assert not found["same"]
    assert [row["name"] for row in found["added"]] == ["model.new"]
    assert [row["name"] for row in found["removed"]] == ["model.gone"]
    assert [row["name"] for row in found["reshaped"]] == ["model.dtype", "model.shape"]
    changed = {row["name"]: row for row in found["changed"]}
    assert set(changed) == {"model.h.0.w", "model.moved"}
    row = changed["model.moved"]
    assert (row["elements"], row["changed"], row["max_abs"]) == (8, 1, 2.0)
    assert row["relative"] == pytest.approx(2.0 / float(base.norm()))
    cosine = nn.functional.cosine_similarity(base.flatten().double(), moved.flatten().double(), dim=0)
    assert row["cosine"] == pytest.approx(float(cosine))
    assert changed["model.h.0.w"]["cosine"] == pytest.approx(-1.0)
    assert {layer["name"] for layer in found["layers"]} == {"model", "model.h.0"}
    assert found["equal"] == 1
    assert shell.run("diff", one, two) == 1
    assert "12.5 %" in shell.out
    assert shell.run("diff", one, one) == 0
    assert "6 tensors" in shell.out


def test_diff_compares_bits_whatever_they_mean(shell: Shell, tmp_path: Path) -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.zeros(2)
    one = saved(tmp_path / "one", same=nan, sign=zero, became=torch.ones(2), whole=torch.tensor([2**53, 1]))
    two = saved(tmp_path / "two", same=nan, sign=-zero, became=nan, whole=torch.tensor([2**53 + 1, 1]))
    rows = {row["name"]: row for row in shell.document("diff", one, two, status=1)["changed"]}
    assert set(rows) == {"model.sign", "model.became", "model.whole"}
    assert (rows["model.sign"]["changed"], rows["model.sign"]["max_abs"]) == (2, 0.0)
    assert rows["model.sign"]["cosine"] is None
    assert (rows["model.became"]["changed"], rows["model.became"]["non_finite"]) == (1, [0, 1])
    assert rows["model.whole"]["changed"] == 1


def test_diff_reads_large_tensors_by_parts(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.loader.comparison.PART_BYTES", 64)
    base = torch.randn(7, 30)
    other = base + torch.randn(7, 30) / 100
    dtypes = (torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn)
    one = saved(tmp_path / "one", **{str(index): base.to(dtype) for index, dtype in enumerate(dtypes)})
    two = saved(tmp_path / "two", **{str(index): other.to(dtype) for index, dtype in enumerate(dtypes)})
    rows = {row["name"]: row for row in shell.document("diff", one, two, status=1)["changed"]}
    for index, dtype in enumerate(dtypes):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        a, b = base.to(dtype).to(wide), other.to(dtype).to(wide)
        row = rows[f"model.{index}"]
        bits = [tensor.to(dtype).view(torch.uint8).reshape(210, -1) for tensor in (base, other)]
        assert row["changed"] == int((bits[0] != bits[1]).any(1).sum())
        assert row["relative"] == pytest.approx(float((b - a).norm() / a.norm()))


def test_diff_of_structure_reads_no_values(shell: Shell, made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "root"))
    for file in root.glob("step-*/*.distcp"):
        with file.open("r+b") as opened:  # whoever reads values would tell
            opened.write(bytes(64))
    found = shell.document("diff", root, root, "--step", 100, "--other-step", 200, "--structure", status=1)
    assert "model.0.weight" in found["moved"]
    assert found["unknown"] == []
    assert found["objects"]["unknown"]
    assert shell.document("diff", root, root, "--structure")["same"]


def test_resume_check_names_what_would_go_on_otherwise(shell: Shell, made: Path, tmp_path: Path) -> None:
    found = shell.document("diff", made, made, "--resume-check")
    assert found["resume"] == {"alike": True, "findings": []}
    found = shell.document("diff", made, made, "--step", 100, "--other-step", 200, "--resume-check", status=1)
    said = "\n".join(found["resume"]["findings"])
    for word in ("model", "optimizer", "train.epoch is 100 in the first, 200 in the second", "notes.txt"):
        assert word in said
    state = holdfast.open(made).state()
    del state["optimizer"]
    holdfast.save(state, tmp_path / "lacking")
    said = shell.document("diff", made, tmp_path / "lacking", "--resume-check", status=1)["resume"]["findings"]
    assert any("the second lacks" in line and "optimizer" in line for line in said)
    for option in ("--structure", "--filter=model.*"):
        assert shell.run("diff", made, made, "--resume-check", option) == 2


def test_resume_check_tells_steps_apart(shell: Shell, tmp_path: Path) -> None:
    """A run goes on from the number that restore() returns, whatever the values."""
    state = {"model": nn.Linear(2, 2), "train": {"epoch": 1}}
    for name, step in (("five", 5), ("again", 5), ("six", 6), ("none", None)):
        holdfast.save(state, tmp_path / name, step=step)
    five = tmp_path / "five"
    assert shell.document("diff", five, tmp_path / "again", "--resume-check")["resume"]["alike"]
    for other, says in (
        ("six", "step is 5 in the first, 6 in the second"),
        ("none", "step is 5 in the first, none in the second"),
    ):
        found = shell.document("diff", five, tmp_path / other, "--resume-check", status=1)
        assert found["same"]
        (line,) = found["resume"]["findings"]
        assert says in line
    assert shell.run("diff", five, tmp_path / "six", "--resume-check") == 1
    assert "do not go on alike" in shell.out
    assert shell.document("diff", five, tmp_path / "six")["same"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_resume_check_knows_no_step_of_stock_dcp(shell: Shell, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.ones(2)}}
    holdfast.save(state, tmp_path / "ours", step=5)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    for pair in (("ours", "stock"), ("stock", "ours")):
        found = shell.document("diff", *(tmp_path / name for name in pair), "--resume-check")
        assert found["resume"] == {"alike": True, "findings": []}


def test_diff_of_a_filter_that_matches_nothing_is_wrong_usage(shell: Shell, made: Path) -> None:
    for extra in ((), ("--structure",)):
        assert shell.run("diff", made, made, "--filter", "modle.*", *extra) == 2
        assert "'modle.*' matches no tensor and no object" in shell.err
        assert shell.out == ""
    assert shell.document("diff", made, made, "--filter", "modle.*", status=2)["error"]["kind"] == "ConfigError"
    for pattern in ("model.0.*", "train.epoch"):
        assert shell.run("diff", made, made, "--filter", pattern) == 0
        assert shell.run("diff", made, made, "--filter", pattern, "--structure") == 0


def test_diff_of_a_filter_that_matches_on_one_side(shell: Shell, tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(1)}, tmp_path / "one")
    holdfast.save({"w": torch.ones(1), "new": 1}, tmp_path / "two")
    assert shell.document("diff", tmp_path / "one", tmp_path / "two", "--filter", "new", status=1)["objects"]["added"]


def test_diff_of_objects_of_any_kind(shell: Shell, tmp_path: Path) -> None:
    def state(last: float, number: int) -> dict[str, Any]:
        recent = deque([torch.ones(2), np.array([math.nan, last])], maxlen=3)
        return {"recent": recent, "stream": io.BytesIO(b"a"), "number": number, "counts": (Counter("ab"),)}

    holdfast.save(state(1.0, 10**5000), tmp_path / "one")
    holdfast.save(state(1.0, 10**5000), tmp_path / "same")
    holdfast.save(state(2.0, 10**5000 + 1), tmp_path / "other")
    found = shell.document("diff", tmp_path / "one", tmp_path / "same", "--resume-check")
    assert (found["same"], found["objects"]["equal"], found["resume"]["alike"]) == (True, 4, True)
    found = shell.document("diff", tmp_path / "one", tmp_path / "other", "--resume-check", status=1)
    changed = {row["name"]: row["first"] for row in found["objects"]["changed"]}
    assert set(changed) == {"number", "recent"}
    assert changed["number"] == "<int>"


def test_diff_of_numbers_that_float64_has_no_room_for(shell: Shell, tmp_path: Path) -> None:
    large = torch.tensor([1e200, 2e200], dtype=torch.float64)
    one = saved(tmp_path / "one", large=large, whole=torch.tensor([2**62]))
    two = saved(tmp_path / "two", large=large * torch.tensor([1.0, 1.5]), whole=torch.tensor([2**62 + 1]))
    found = shell.document("diff", one, two, status=1)
    rows = {row["name"]: row for row in found["changed"]}
    assert rows["model.large"]["relative"] == pytest.approx(1 / math.sqrt(5))
    assert rows["model.whole"]["max_abs"] == 1.0
    assert found["layers"][0]["relative"] == pytest.approx(1 / math.sqrt(5))
    facts = shell.document("cat", one, "model.large")["statistics"]
    assert (facts["std"], facts["norm"]) == (pytest.approx(5e199), pytest.approx(math.sqrt(5) * 1e200))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_diff_of_other_shardings_and_formats(shell: Shell, made: Path, tmp_path: Path) -> None:
    """The same values, stored by stock DCP and as a Hugging Face directory: nothing differs but what isn't there."""
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.randn(5, 3)}, "train": {"epoch": 1}}
    holdfast.save(state, tmp_path / "ours")
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    found = shell.document("diff", tmp_path / "ours", tmp_path / "stock")
    assert (found["same"], found["equal"], found["objects"]["equal"]) == (True, 1, 1)
    found = shell.document("diff", tmp_path / "ours", tmp_path / "stock", "--structure", "--filter", "model.*")
    assert found["unknown"] == ["model.w"]


# cat -------------------------------------------------------------------------------------------------------------


def test_cat_prints_tensors_objects_and_files(shell: Shell, made: Path) -> None:
    checkpoint = holdfast.open(made)
    weight = checkpoint.read("model.0.weight")
    found = shell.document("cat", made, "model.0.weight", "--slice", "1:3,-1")
    assert found["values"] == weight[1:3, -1].tolist()
    assert (found["shape"], found["dtype"]) == ([2], "float32")
    assert shell.document("cat", made, "model.0.weight", "--slice", "..., 0")["shape"] == [4]
    assert shell.run("cat", made, "model.0.weight") == 0
    assert f"norm {float(weight.double().norm()):.6g}" in shell.out
    assert shell.document("cat", made, "train.epoch", "--step", 200)["value"] == 200
    assert shell.document("cat", made, "notes.txt")["text"] == "of step 400\n"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("model.0.weigh",), 2, "has no 'model.0.weigh'"),
        (("model.0.weight", "--slice", "a:b"), 2, "is no index"),
        (("model.0.weight", "--slice", "9"), 2, "outside"),
        (("model.0.weight", "--slice", "::2"), 2, "step 1"),
        (("train.epoch", "--slice", "0"), 2, "is no tensor"),
    ],
)
def test_cat_says_what_is_wrong(shell: Shell, made: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    assert shell.run("cat", made, *arguments) == status
    assert says in shell.err
    assert "Traceback" not in shell.err


def test_cat_of_damaged_bytes_prints_none(shell: Shell, made: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "root"))
    for file in (root / "step-400").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), 64):
            data[at] ^= 1
        file.write_bytes(data)
    assert shell.run("cat", root, "model.0.weight") == 1
    assert shell.out == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.int8])
def test_cat_prints_any_dtype(shell: Shell, tmp_path: Path, dtype: torch.dtype) -> None:
    saved(tmp_path / "one", w=torch.ones(2000).to(dtype), none=torch.ones(0, 3).to(dtype))
    for name in ("model.w", "model.none"):
        assert shell.run("cat", tmp_path / "one", name) == 0, shell.err
    assert shell.document("cat", tmp_path / "one", "model.w", "--slice", ":3")["shape"] == [3]


def test_cat_prints_packed_elements_as_their_bytes(shell: Shell, tmp_path: Path) -> None:
    saved(tmp_path / "one", w=torch.tensor([1, 255], dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert shell.run("cat", tmp_path / "one", "model.w") == 0, shell.err
    assert "255" in shell.out
    found = shell.document("cat", tmp_path / "one", "model.w")
    assert (found["dtype"], found["values"]) == ("float4_e2m1fn_x2", [1, 255])
    assert shell.document("cat", tmp_path / "one", "model.w", "--slice", "1")["values"] == 255


def test_cat_describes_values(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.show._PIECE", 64)
    torch.manual_seed(1)
    values = torch.randn(30, 7) * 3 + 100
    odd = values.clone()
    odd[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    tensors = {
        "float": values,
        "odd": odd,
        "half": values.bfloat16(),
        "fp8": values.to(torch.float8_e4m3fn),
        "ids": torch.arange(210) % 2 + 10**9,
        "bool": values > 100,
    }
    one = saved(tmp_path / "one", **tensors, empty=torch.ones(0), none=odd[0, :3], complex=values + 1j)
    for name, tensor in tensors.items():
        found = shell.document("cat", one, f"model.{name}")["statistics"]
        wide = tensor.reshape(-1).double()
        finite = wide[wide.isfinite()]
        assert found == {
            "elements": 210,
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": pytest.approx(float(finite.mean()), rel=1e-14),
            "std": pytest.approx(float(finite.std(correction=0)), rel=1e-12),
            "norm": pytest.approx(float(finite.norm()), rel=1e-14),
            **({"nan": 1, "inf": 2} if name == "odd" else {}),
            "zeros": int((wide == 0).sum()),
        }
    facts = {name: shell.document("cat", one, f"model.{name}")["statistics"] for name in ("empty", "none", "complex")}
    assert facts == {
        "empty": {"elements": 0},
        "none": {"elements": 3, "nan": 1, "inf": 2, "zeros": 0},
        "complex": {"elements": 210},
    }


# export and convert ------------------------------------------------------------------------------------------------


def test_convert_goes_round_without_loss(shell: Shell, made: Path, tmp_path: Path) -> None:
    file, again = tmp_path / "state.pt", tmp_path / "again"
    assert shell.run("convert", made, file, "--to", "torch") == 0, shell.err
    assert shell.run("convert", file, again, "--to", "dcp") == 0, shell.err
    found = shell.document("diff", made, again, status=1)  # a file of torch.save has no files beside it
    assert (found["same"], found["files"]) == (False, ["notes.txt"])
    assert not any(found[key] for key in ("added", "removed", "reshaped", "changed"))
    assert shell.run("convert", made, tmp_path / "copy", "--to", "dcp") == 0
    assert shell.document("diff", made, tmp_path / "copy", "--resume-check")["resume"]["alike"]
    copy = holdfast.open(tmp_path / "copy")
    assert (copy.step, copy.metrics) == (400, {"loss": METRICS[400]})


def test_convert_to_hugging_face_from_each_source(shell: Shell, made: Path, tmp_path: Path) -> None:
    assert shell.run("convert", made, tmp_path / "hf", "--to", "hf") == 0, shell.err
    weights = tmp_path / "hf" / "model.safetensors"
    torch.save(holdfast.open(made).state()["model"], tmp_path / "flat.pt")
    for source, target in ((weights, "of file"), (tmp_path / "hf", "of directory"), (tmp_path / "flat.pt", "of torch")):
        assert shell.run("convert", source, tmp_path / target, "--to", "hf") == 0, shell.err
        assert shell.document("diff", tmp_path / "hf", tmp_path / target)["same"]
    assert not list(tmp_path.glob(".holdfast-convert-*"))


def test_export_has_the_options_of_exports(shell: Shell, made: Path, tmp_path: Path) -> None:
    arguments = ("--dtype", "bfloat16", "--fp32-key", "^1\\.")
    assert shell.run("export", made, tmp_path / "hf", *arguments) == 0, shell.err
    found = holdfast.open(tmp_path / "hf").tensors
    assert found["0.weight"].dtype == torch.bfloat16
    assert found["1.weight"].dtype == torch.float32
    assert shell.run("export", made, tmp_path / "hf") == 1
    assert "give --overwrite" in shell.err
    assert shell.run("export", made, tmp_path / "hf", "--overwrite") == 0, shell.err
    assert shell.run("export", made, tmp_path / "odd", "--dtype", "nonsense") == 2
    assert not (tmp_path / "odd").exists()


def test_convert_writes_whole_files_or_none(shell: Shell, made: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(b"mine")
    assert shell.run("convert", made, file, "--to", "torch") == 1
    assert file.read_bytes() == b"mine"
    assert shell.run("convert", made, file, "--to", "torch", "--overwrite") == 0
    assert torch.load(file, weights_only=False)["train"]["epoch"] == 400
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    assert shell.run("convert", made, tmp_path / "no" / "where.pt", "--to", "torch") == 1
    assert "can't be written" in shell.err


def test_convert_runs_nothing_that_a_file_names(shell: Shell, tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "object.pt")
    (tmp_path / "garbage.pt").write_bytes(b"PK garbage")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    for name, status in (("object", 1), ("garbage", 1), ("list", 2)):
        assert shell.run("convert", tmp_path / f"{name}.pt", tmp_path / "out", "--to", "dcp") == status, name
        assert "Traceback" not in shell.err
    assert not (tmp_path / "out").exists()


# what this user may not look at ------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """For root, whom no permission keeps out."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_step_that_may_not_be_looked_into_hides_no_other(shell: Shell, made: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        root = Path(shutil.copytree(made, Path(place, "root")))
        for name in ("ls", "verify", "show", "diff"):  # imports what another user may not read
            shell.run(name, root, *([root] if name == "diff" else []))
        (root / "step-400").chmod(0)
        with as_another_user():
            rows = shell.document("ls", root, status=1)["entries"]
            verified = shell.document("verify", root, status=1)["checkpoints"]
            shown = shell.document("show", root)
            same = shell.document("diff", root, root / "step-300")["same"]
            assert shell.run("ls", root / "step-400" / "below") == 1
            assert "Permission denied" in shell.err
            assert "doesn't exist" not in shell.err
        (root / "step-400").chmod(0o755)
    states = {row["step"]: (row["state"], row["error"]) for row in rows}
    assert [step for step, (state, _) in states.items() if state == "published"] == [100, 200, 300]
    assert "Permission denied" in states[400][1]
    assert {row["step"]: row["ok"] for row in verified} == {400: False, 100: True, 200: True, 300: True}
    assert (shown["step"], same) == (300, True)


@pytest.mark.parametrize("name", ["show", "verify", "diff", "cat", "export", "convert"])
def test_a_directory_without_checkpoints_is_told_what_to_give(shell: Shell, tmp_path: Path, name: str) -> None:
    rest = {"diff": [tmp_path], "cat": ["x"], "export": [tmp_path / "out"], "convert": [tmp_path / "out", "--to", "hf"]}
    assert shell.run(name, tmp_path, *rest.get(name, [])) == 2
    assert shell.err.startswith(f"holdfast: {tmp_path} holds no checkpoints")
    assert shell.err.endswith("; give a checkpoint, or a directory that holds some\n")
    assert shell.err.count("\n") == 1


# prune -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


def test_a_dry_run_says_why_each_step_stays_or_goes(shell: Shell, root: Path) -> None:
    with holdfast.CheckpointManager(root, {"x": 1}, config=holdfast.CheckpointConfig(keep=None)) as manager:
        manager.pin(100)
    found = shell.document("prune", root, "--last", 1, "--best", "loss:max:2", "--dry-run")
    assert {row["step"]: (row["outcome"], row["reasons"]) for row in found["steps"]} == {
        100: ("kept", ["pinned", "best loss"]),
        200: ("kept", ["best loss"]),
        300: ("goes", []),
        400: ("kept", ["the newest", "the newest to resume from", "last 1"]),
    }
    assert len(list(root.glob("step-*"))) == 4
    assert shell.run("prune", root, "--last", 1, "--best", "loss:max:2") == 0
    assert sorted(path.name for path in root.glob("*step*")) == ["step-100", "step-200", "step-400"]
    assert shell.document("prune", root, "--last", 0, "--every", 200, "--dry-run")["steps"][1]["reasons"] == [
        "every 200"
    ]


def test_prune_needs_a_rule_and_leaves_running_jobs_alone(shell: Shell, root: Path) -> None:
    assert shell.run("prune", root) == 2
    assert "--last" in shell.err
    assert shell.run("prune", root, "--last", 1, "--best", "loss:most") == 2
    with RootLock.acquire(str(root)):
        assert shell.run("prune", root, "--last", 1) == 1
        assert shell.document("prune", root, "--last", 1, "--dry-run")["steps"][0]["outcome"] == "goes"
    assert len(list(root.glob("step-*"))) == 4


@pytest.mark.parametrize("how", ["linked", "copied", "renamed"])
def test_nothing_goes_for_the_sake_of_a_step_that_is_another(shell: Shell, root: Path, how: str) -> None:
    """`restore` refuses it: what it falls back to must not go because this one is the newest by its name."""
    strange = root / "step-700"
    if how == "linked":
        strange.symlink_to("step-400")
    elif how == "copied":
        shutil.copytree(root / "step-300", strange)
    else:
        (root / "step-300").rename(strange)
    assert shell.run("prune", root, "--last", 1) == 0
    assert (root / "step-400" / "holdfast.json").exists()
    assert os.path.lexists(strange), "nobody else's is deleted"
    assert shell.document("prune", root, "--last", 1)["steps"][-1]["reasons"][0] == "the newest"
    state: dict[str, Any] = {"train": {"epoch": 0}}
    with (
        holdfast.CheckpointManager(root, state, config=holdfast.CheckpointConfig(load_only=True)) as manager,
        pytest.warns(UserWarning, match=r"falling back to step 400: .* holds step [34]00, expected step 700"),
    ):
        assert manager.restore() == 400
    assert state["train"]["epoch"] == 400


def test_a_metric_that_no_step_has_deletes_nothing(shell: Shell, root: Path) -> None:
    assert shell.run("prune", root, "--last", 1, "--best", "lss:min:1") == 2
    assert "no step under" in shell.err
    assert "there are: loss" in shell.err
    assert len(list(root.glob("step-*"))) == 4


# watch -------------------------------------------------------------------------------------------------------------


def test_watch_tells_what_a_job_does(shell: Shell, root: Path) -> None:
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=1))

    def work() -> None:
        with holdfast.CheckpointManager(root, {"x": torch.ones(3)}, config=config) as manager:
            manager.save(500).result()

    job = threading.Timer(0.5, work)
    job.start()
    assert shell.run("watch", root, "--interval", 0.05, "--for", 6, "--json") == 0
    job.join()
    lines = [json.loads(line) for line in io.StringIO(shell.out)]
    told = [(line["change"], line.get("step")) for line in lines]
    assert told[0] == ("watching", None)
    assert ("published", 500) in told
    assert ("deleted", 300) in told


def changes(shell: Shell, root: Path, work: Callable[[], object], *, interval: float, seconds: float) -> list[dict]:
    """Return what ``watch`` tells while ``work`` is done."""
    job = threading.Timer(0.5, work)
    job.start()
    assert shell.run("watch", root, "--interval", interval, "--for", seconds, "--json") == 0
    job.join()
    return [json.loads(line) for line in io.StringIO(shell.out)]


@pytest.mark.parametrize("interval", [1.0, 0.05])
def test_watch_tells_each_save_once_also_those_between_two_looks(shell: Shell, tmp_path: Path, interval: float) -> None:
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=1))
    with holdfast.CheckpointManager(tmp_path, {"x": torch.ones(3)}, config=config) as manager:
        manager.save(1).result()

        def work() -> None:
            for step in range(2, 22):
                manager.save(step).result()
                time.sleep(0.05)

        told = changes(shell, tmp_path, work, interval=interval, seconds=8)
    for change, steps in {"published": range(2, 22), "deleted": range(1, 21)}.items():
        rows = [line for line in told if line["change"] == change]
        assert [(line["step"], line["name"]) for line in rows] == [(step, f"step-{step}") for step in steps]
        assert {line["kind"] for line in rows} == {"checkpoint"}
    assert all(line["nbytes"] > 0 for line in told if line["change"] == "published")
    at = {(line["change"], line.get("step")): number for number, line in enumerate(told)}
    assert all(at["published", step] < at["deleted", step] for step in range(2, 21))
    assert all(number < at["published", step] for (change, step), number in at.items() if change == "saving")


def test_watch_tells_what_a_root_without_a_journal_has(shell: Shell, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    def work() -> None:
        for _ in range(2):
            holdfast.save({"x": torch.ones(3)}, root / "step-1", step=1, overwrite=True)
            time.sleep(0.5)
        shutil.rmtree(root / "step-1")

    told = changes(shell, root, work, interval=0.05, seconds=4)
    assert not (root / ".holdfast" / "journal.jsonl").exists()
    told = [line for line in told if line["change"] in ("published", "deleted")]
    assert [line["change"] for line in told] == ["published", "published", "deleted"], "the second replaces the first"


def test_watch_tells_of_failures_whatever_the_clock_says(shell: Shell, tmp_path: Path) -> None:
    """As after a clock was set back, or from a host whose clock is behind."""
    (tmp_path / ".holdfast").mkdir()

    def fail(step: int, t: float) -> None:
        row = {"t": t, "run": "a", "kind": "save.failed", "step": step, "name": f"step-{step}", "message": "no room"}
        sink = FileSink(str(tmp_path))
        sink.add(render(row))
        sink.flush(last=True)

    fail(1, 5000.0)

    def work() -> None:
        for step, t in ((2, 100.0), (3, 5000.0), (4, 9000.0)):
            fail(step, t)

    told = changes(shell, tmp_path, work, interval=0.05, seconds=2)
    failed = [line for line in told if line["change"] == "failed"]
    assert [(line["step"], line["name"], line["message"]) for line in failed] == [
        (step, f"step-{step}", "no room") for step in (2, 3, 4)
    ]


@pytest.mark.parametrize("arguments", [("nowhere",), (), ("--no-such",)], ids=" ".join)
def test_errors_of_watch_are_one_a_line_too(shell: Shell, arguments: tuple[str, ...]) -> None:
    assert shell.run("watch", *arguments, "--json") == 2
    (line,) = shell.out.splitlines()
    assert json.loads(line)["error"]["kind"] == "ConfigError"
