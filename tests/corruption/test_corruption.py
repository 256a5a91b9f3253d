"""Damage anywhere in a checkpoint is found by `load`, `restore` and `verify`, and named: file, tensor, byte range.

Of a checkpoint of one rank and one of two every region of every file is damaged in every way that `damage` knows. A
load may miss only what it has no need to read, and must then give exactly what was saved. With
``HOLDFAST_CORRUPTIONS=all`` many more places are tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import CheckpointCorrupt, HoldfastError

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from damage import MANIFEST, Damage, applied, flip, flips, regions_of, swaps, whole_file_damage
from launch import run_job

DENSE = os.environ.get("HOLDFAST_CORRUPTIONS") == "all"
LIMIT_S = 1800.0 if DENSE else 120.0


def state_of(fill: bool) -> dict[str, Any]:
    """Tensors of several extents and of none, of unusual dtypes, an optimizer that has stepped, and objects."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(400, 900), nn.Linear(3, 5), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model[1:].parameters())
    for parameter in model[1:].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    extra = {
        "bf16": torch.randn(300).to(torch.bfloat16),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.5),
        "twins": [torch.arange(16.0), torch.arange(16.0) * 2],
    }
    objects = {"epoch": 3, "names": ["a", "b"], "seen": np.arange(9)}
    if not fill:
        with torch.no_grad():
            for tensor in (*model.state_dict().values(), *tensors_of(extra).values()):
                tensor.zero_()
        objects = {"epoch": 0, "names": [], "seen": np.zeros(1)}
    return {"model": model, "optimizer": optimizer, "extra": extra, "train": objects}


def tensors_of(tree: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {key: value for part, below in parts for key, value in tensors_of(below, f"{name}.{part}").items()}


def content_of(state: dict[str, Any]) -> dict[str, Any]:
    trees = {
        "model": state["model"].state_dict(),
        "optimizer": state["optimizer"].state_dict(),
        "extra": state["extra"],
    }
    found: dict[str, Any] = {
        name: bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        for name, tensor in tensors_of(trees).items()
    }
    return {
        **found,
        "train": {key: getattr(value, "tolist", lambda v=value: v)() for key, value in state["train"].items()},
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "checkpoint"
    holdfast.save(state_of(fill=True), path, step=1)
    return path


def full(rank_free: bool = False) -> torch.Tensor:
    return torch.arange(700_000, dtype=torch.float32).reshape(1000, 700)


def sharded_state(fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = distribute_tensor(full() if fill else torch.zeros(1000, 700), mesh, [Shard(0)])
    same = distribute_tensor(torch.full((50,), 2.0 if fill else 0.0), mesh, [Replicate()])
    narrow = distribute_tensor(torch.arange(6.0) if fill else torch.zeros(6), mesh, [Shard(0)])
    return {"wide": wide, "same": same, "narrow": narrow, "note": "two ranks" if fill else ""}


def save_on_two(path: str) -> None:
    holdfast.save(sharded_state(fill=True), path, step=1)


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("double") / "checkpoint"
    run_job(save_on_two, nproc=2, args=[path])
    return path


def plain_state() -> dict[str, Any]:
    """What was saved on two ranks, to be loaded on one."""
    return {"wide": torch.zeros(1000, 700), "same": torch.zeros(50), "narrow": torch.zeros(6), "note": ""}


# what must be said -----------------------------------------------------------------------------------------------


def names_it(
    damage: Damage, directory: Path, path: str, byte_range: tuple[int, int] | None, tensor: str | None
) -> bool:
    if Path(path).parent != directory or Path(path).name not in damage.files:
        return False
    if damage.at is not None and byte_range is not None:
        return byte_range[0] <= damage.at < byte_range[1] and damage.tensor in (None, tensor)
    return True


def check_verify(damage: Damage, directory: Path, opened: holdfast.Checkpoint) -> None:
    """Every damage is found, also by a checkpoint that was opened before, and by name."""
    report = opened.verify()
    assert not report.ok, f"verify missed {damage}"
    assert any(
        names_it(damage, directory, problem.path, problem.byte_range, problem.tensor) for problem in report.problems
    ), (str(damage), report.problems)
    in_data = damage.at is not None and damage.files[0].endswith(".distcp")
    if in_data:
        (problem,) = report.problems if len(report.problems) == 1 else report.problems[:1]
        assert problem.byte_range is not None, (str(damage), problem)
        assert str(directory / damage.files[0]) in problem.message
        if damage.tensor is not None:
            assert problem.tensor == damage.tensor, (str(damage), problem)


def check_load(damage: Damage, directory: Path, saved: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Raised, and named; or what was read is what was saved, and the damage where nobody reads."""
    error = corruption_in(lambda: holdfast.load(fresh, directory))
    if error is not None:
        assert names_it(damage, directory, error.path, error.byte_range, error.tensor), (str(damage), str(error))
        assert error.path in str(error)
    else:
        assert not damage.read, f"load missed {damage}"
        found = content_of(fresh) if "model" in fresh else fresh
        assert all(equal(found[name], saved[name]) for name in saved), f"wrong values loaded: {damage}"


def corruption_in(load: Callable[[], object]) -> CheckpointCorrupt | None:
    try:
        load()
    except CheckpointCorrupt as error:
        return error
    return None


def equal(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


def all_damage(directory: Path, spare: Path) -> list[Damage]:
    return [*flips(directory, dense=DENSE), *whole_file_damage(directory, spare), *swaps(directory)]


def kind_of(damage: Damage) -> str:
    word = damage.what.split()
    return {"bit": "flips", "truncation": "truncations", "extension": "extensions", "removal": "removals"}.get(
        word[1] if word[0] == "a" else word[0], "exchanges" if "exchange" in word else "replacements"
    )


def test_the_checkpoints_have_every_kind_of_region(single: Path, double: Path) -> None:
    kinds = Counter(region.kind for region in regions_of(single))
    assert {"header", "payload", "trailer", "padding", "object", "tail"} <= set(kinds)
    assert sum(region.end - region.start for region in regions_of(single)) == sum(
        path.stat().st_size for path in single.glob("*.distcp")
    )
    assert {path.name for path in double.glob("*.report")} == {"rank-00000.report", "rank-00001.report"}
    assert (single / ".metadata").exists()


@pytest.mark.timeout(LIMIT_S)
def test_damage_of_one_rank_is_found_by_verify_and_load(single: Path, tmp_path: Path, tried: Counter[str]) -> None:
    state = state_of(fill=True)
    saved = content_of(state)
    opened = holdfast.open(single)
    for damage in all_damage(single, tmp_path):
        with applied(damage, single, tmp_path):
            check_verify(damage, single, opened)
            check_load(damage, single, saved, state_of(fill=False) if not damage.read else state)
            tried[f"corruptions found: {kind_of(damage)}"] += 1
    assert opened.verify().ok
    fresh = state_of(fill=False)
    holdfast.load(fresh, single)
    assert content_of(fresh) == saved


@pytest.mark.timeout(LIMIT_S)
def test_damage_of_two_ranks_is_found_by_verify_and_by_a_load_on_one(
    double: Path, tmp_path: Path, tried: Counter[str]
) -> None:
    saved = {"wide": full(), "same": torch.full((50,), 2.0), "narrow": torch.arange(6.0), "note": "two ranks"}
    opened = holdfast.open(double)
    for damage in all_damage(double, tmp_path):
        with applied(damage, double, tmp_path):
            check_verify(damage, double, opened)
            check_load(damage, double, saved, plain_state())
            tried[f"corruptions found: {kind_of(damage)}"] += 1
    assert opened.verify().ok


def load_on_two(path: str, spare: str) -> None:
    """Each rank reads a half: whichever of them meets the damage, both learn of it."""
    directory, rank = Path(path), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    for damage in all_damage(directory, Path(spare) / str(0))[:: 1 if DENSE else 9]:
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(applied(damage, directory, Path(spare)))
            dist.barrier()
            state: dict[str, Any] = {
                "model": {
                    "0.weight": distribute_tensor(torch.zeros(900, 400), mesh, [Shard(0)]),
                    "1.bias": torch.zeros(5),
                },
                "extra": {"bf16": distribute_tensor(torch.zeros(300, dtype=torch.bfloat16), mesh, [Shard(0)])},
                "train": {"epoch": 0},
            }
            error = corruption_in(lambda state=state: holdfast.load(state, directory, strict=False))
            told = None if error is None else str(error)
            if error is not None:
                assert names_it(damage, directory, error.path, error.byte_range, error.tensor), (str(damage), told)
            else:
                want = state_of(fill=True)
                weight = state["model"]["0.weight"]
                assert isinstance(weight, DTensor)
                assert torch.equal(weight.full_tensor(), want["model"][0].weight), str(damage)
                assert torch.equal(state["model"]["1.bias"], want["model"][1].bias), str(damage)
                assert state["train"]["epoch"] == 3, str(damage)
            heard: list[Any] = [None, None]
            dist.all_gather_object(heard, told)
            assert (heard[0] is None) == (heard[1] is None), (str(damage), heard)
            # What this load reads: all but parts of small files' neighbours.
            if damage.files[0] in (MANIFEST, ".metadata") or damage.files[0].endswith(".report"):
                assert told is not None, str(damage)
            dist.barrier()
    if rank == 0:
        (Path(spare) / "count").write_text(str(len(all_damage(directory, Path(spare))[:: 1 if DENSE else 9])))


@pytest.mark.timeout(LIMIT_S)
def test_damage_of_one_rank_is_found_by_a_load_on_two(single: Path, tmp_path: Path, tried: Counter[str]) -> None:
    copy = Path(shutil.copytree(single, tmp_path / "copy"))
    (tmp_path / "spare").mkdir()
    run_job(load_on_two, nproc=2, args=[copy, tmp_path / "spare"], timeout_s=LIMIT_S - 20)
    tried["corruptions found: resharded onto two ranks"] += int((tmp_path / "spare" / "count").read_text())


def test_a_part_is_verified_and_only_it(single: Path, tmp_path: Path, tried: Counter[str]) -> None:
    """`read` of rows and `map(verify=True)`: damage in what they read is found, elsewhere it doesn't disturb them."""
    name = "model.0.weight"
    checkpoint = holdfast.open(single)
    whole = checkpoint.read(name)
    region = next(region for region in regions_of(single) if (region.owner, region.kind) == (name, "payload"))
    row_bytes = 400 * 4
    extent = 1 << 20
    for row in range(0, 900, 100):
        at = region.start + row * row_bytes + 5
        damage = Damage("a bit", (region.file,), flip(region.file, at), at=at, tensor=name)
        with applied(damage, single, tmp_path):
            with pytest.raises(CheckpointCorrupt) as caught:
                checkpoint.read(name, (slice(row, row + 1),))
            assert caught.value.tensor == name
            assert caught.value.byte_range is not None
            assert caught.value.byte_range[0] <= at < caught.value.byte_range[1]
            with pytest.raises(CheckpointCorrupt, match=name):
                checkpoint.map(name, verify=True)
            with pytest.raises(CheckpointCorrupt, match=name):
                checkpoint.read(name, (slice(None), slice(0, 1)))
            for other in range(0, 900, 50):
                start = region.start + other * row_bytes
                if start // extent != at // extent and (start + row_bytes - 1) // extent != at // extent:
                    assert torch.equal(checkpoint.read(name, (other,)), whole[other])
            tried["corruptions found: by partial reads"] += 1


SAMPLES = ("bit", "truncation", "extension", "removal", "zeros", "directory", "link", "pipe", "socket", "exchange")


def samples(directory: Path, spare: Path) -> list[Damage]:
    """Of each way to damage each file one, that a load must see."""
    seen: set[tuple[tuple[str, ...], str]] = set()
    found = []
    for damage in all_damage(directory, spare):
        word = next(word for word in SAMPLES if word in damage.what)
        if damage.read and (DENSE or (damage.files, word) not in seen):
            seen.add((damage.files, word))
            found.append(damage)
    return found


@pytest.mark.timeout(LIMIT_S)
def test_restore_falls_back_to_the_older_step_and_says_so(single: Path, tmp_path: Path, tried: Counter[str]) -> None:
    root = tmp_path / "root"
    config = holdfast.CheckpointConfig(every=1, keep=None)
    with holdfast.CheckpointManager(root, {"a": torch.full((300, 300), 1.0), "n": {"x": 1}}, config=config) as manager:
        manager.save(1).result()
        manager.wait_staged()
    with holdfast.CheckpointManager(root, {"a": torch.full((300, 300), 2.0), "n": {"x": 2}}, config=config) as manager:
        manager.save(2).result()
    newest = root / "step-2"
    told: list[tuple[str, int | None]] = []
    remove = holdfast.add_hook(lambda event: told.append((event.kind, event.step)))
    state = {"a": torch.zeros(300, 300), "n": {"x": 0}}
    loading = {
        choice: holdfast.CheckpointManager(
            root, state, config=holdfast.CheckpointConfig(load_only=True, on_corrupt=choice)
        )
        for choice in ("fallback", "raise")
    }
    try:
        for damage in samples(newest, tmp_path):
            with applied(damage, newest, tmp_path):
                told.clear()
                with pytest.warns(UserWarning, match="step 2 can't be loaded, falling back to step 1"):
                    assert loading["fallback"].restore() == 1, str(damage)
                assert ("load.fallback", 2) in told
                assert (state["a"].unique().tolist(), state["n"]) == ([1.0], {"x": 1}), str(damage)
                with pytest.raises(CheckpointCorrupt) as caught:
                    loading["raise"].restore()
                error = caught.value
                assert names_it(damage, newest, error.path, error.byte_range, error.tensor), str(error)
                with pytest.raises(HoldfastError):
                    loading["fallback"].restore(2)  # this one was asked for: nothing else will do
                tried["corruptions restored around"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert loading["fallback"].restore() == 2
    finally:
        remove()
        for manager in loading.values():
            manager.close()


def test_a_run_goes_on_where_the_manifest_of_a_newer_step_is_gone(tmp_path: Path) -> None:
    """What can't be loaded any more is replaced as the run comes by it, and not taken for stock DCP's."""
    root = tmp_path / "root"
    state = {"a": torch.zeros(3)}
    config = holdfast.CheckpointConfig(every=1, keep=None)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        for step in (1, 2):
            manager.before_update()
            state["a"].fill_(step)
            manager.save(step).result()
    (root / "step-2" / MANIFEST).unlink()
    with pytest.raises(CheckpointCorrupt, match=MANIFEST):
        holdfast.open(root / "step-2")
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        with pytest.warns(UserWarning, match="falling back to step 1"):
            assert manager.restore() == 1
        assert state["a"].tolist() == [1, 1, 1]
        state["a"].fill_(5)
        assert manager.save(2).result().read("a").tolist() == [5, 5, 5]
    assert holdfast.open(root / "step-2").verify().ok
