"""``holdfast ls | show | verify | recover`` as processes of their own, on roots that managers have made.

They are forked from one that has imported torch; that looking at a root imports none is a test of its own. The page on
the command line is run as it stands, output included.
"""

from __future__ import annotations

import doctest
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.crash.nursery import Nursery
from torch import nn

import holdfast
from holdfast.catalog.listing import size_text
from holdfast.cli.output import age_text, shown
from holdfast.storage.locks import RootLock
from holdfast.view.model import summary_of

SOURCE = str(Path(holdfast.__file__).parents[1])
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
ATTEMPT = "0123456789ab"


@functools.cache
def nursery() -> Nursery:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(commands.__file__).parent), prepend=os.pathsep)
        patch.setenv("PYTHONIOENCODING", "utf-8")
        return Nursery("torch", commands.__name__)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    if nursery.cache_info().currsize:
        nursery().__exit__(None, None, None)
        nursery.cache_clear()


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    call = {"arguments": list(map(str, arguments)), "directory": None if cwd is None else str(cwd)}
    with tempfile.TemporaryDirectory() as place:
        child = nursery().start(commands.__name__, "run", call, log=Path(place) / "log")
        return subprocess.CompletedProcess(call["arguments"], child.wait(600), child.stdout(), child.stderr())


def document(*arguments: object, status: int = 0) -> dict[str, Any]:
    ended = run(*arguments, "--json")
    assert ended.returncode == status, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["schema"] == 1
    assert found["command"] == (arguments[0] if "error" not in found else "error")
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "root"
    state = {"model": nn.Linear(8, 4), "train": {"epoch": 3}}
    config = holdfast.CheckpointConfig(every=1, keep=None, last_model_only=True)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        manager.save(1, metrics={"loss": float("inf")}).result()
        manager.save(2, metrics={"loss": 0.25}).result()
        manager.pin(1)
        manager.save(3, final=True)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy to do as one likes with."""
    return Path(shutil.copytree(made, tmp_path / "root", symlinks=True))


def leave(root: Path, step: int, kind: str = "incomplete", *, as_attempt: bool = True) -> str:
    """Make a published step look as if its save had died just before it was published."""
    source = root / f"step-{step}"
    attempt = json.loads((source / "holdfast.json").read_bytes())["attempt"] if as_attempt else ATTEMPT
    name = f".step-{step}.{attempt}.{kind}"
    source.rename(root / name)
    return name


def tree_of(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(root)): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}


# ls --------------------------------------------------------------------------------------------------------------


def test_what_a_file_system_has_at_its_top_is_no_finding(root: Path) -> None:
    """Where the root is a mount, ``lost+found`` is in it, into which only the administrator may look."""
    (root / "lost+found").mkdir(mode=0)
    (root / "lost+found" / "holdfast.json").write_text("can't be read as a manifest, even by an administrator")
    names = [row["name"] for row in document("ls", root)["entries"]]
    assert names == ["step-1", "step-2", "step-3"]
    assert document("verify", root)["ok"]
    assert holdfast.open(root).step == 3


def test_ls_tells_states(root: Path) -> None:
    (root / "newest").symlink_to("step-3")
    shutil.copytree(root / "step-2", root / ".step-4.0123456789ab.incomplete")
    shutil.copytree(root / "step-2", root / ".step-5.0123456789ab.trash")
    shutil.copytree(root / "step-2", root / "step-6")
    (root / "step-6" / "holdfast.json").write_text("{}")
    shutil.copytree(root / "step-2", root / "step-7")
    (root / "step-7" / "holdfast.json").unlink()
    before = tree_of(root)
    found = document("ls", root, status=1)
    assert tree_of(root) == before
    rows = {row["name"]: row for row in found["entries"]}
    assert {name: (row["state"], row["step"]) for name, row in rows.items()} == {
        ".step-4.0123456789ab.incomplete": ("left-behind", 4),
        ".step-5.0123456789ab.trash": ("trash", 5),
        "step-1": ("published", 1),
        "step-2": ("published", 2),
        "step-3": ("published", 3),
        "step-6": ("corrupt", 6),
        "step-7": ("corrupt", 7),
    }
    assert [name for name, row in rows.items() if row["pinned"]] == ["step-1"]
    assert [name for name, row in rows.items() if row["latest"]] == ["step-2"]
    assert [name for name, row in rows.items() if not row["resumable"]] == ["step-3"]
    assert found["links"] == {"newest": "step-3"}
    assert found["held_by"] is None
    assert "holdfast.json" in rows["step-6"]["error"]
    assert "missing" in rows["step-7"]["error"]
    one = rows["step-1"]
    held = sum(file.stat().st_size for file in (root / "step-1").iterdir() if file.name != "holdfast.json")
    assert (one["nbytes"], one["world"]) == (held, 1)
    assert 0 < one["age_s"] < 1000
    text = run("ls", root).stdout
    assert re.search(r"^ +1 +published, pinned +.* KiB .* step-1$", text, re.MULTILINE), text
    assert re.search(r"^ +2 +published, latest +.* step-2$", text, re.MULTILINE), text
    assert "published, model only, <- newest" in text
    assert document("show", root)["step"] == 3, "the newest, as `holdfast.open` has it"


def resumed_from(root: Path, **options: Any) -> int | None:
    state = {"model": nn.Linear(8, 4), "train": {"epoch": 0}}
    config = holdfast.CheckpointConfig(load_only=True, **options)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        return manager.restore()


def test_the_latest_is_what_a_run_would_resume_from(tmp_path: Path) -> None:
    """With the default name template; in a root without such names, a run of any."""
    root, state = tmp_path / "root", {"model": nn.Linear(8, 4), "train": {"epoch": 3}}
    for template, step in (("ck_{step}", 50), ("step-{step}", 7)):
        config = holdfast.CheckpointConfig(name_template=template)
        with holdfast.CheckpointManager(root, state, config=config) as manager:
            manager.save(step).result()
        found = document("ls", root)["entries"]
        assert [(row["step"], row["name"]) for row in found if row["latest"]] == [(step, template.format(step=step))]
        assert resumed_from(root, name_template=template) == step
    assert resumed_from(root) == 7


def test_a_step_on_another_disk_is_a_step_like_others(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for step, target in ((2, "../disk/step-2"), (3, str(tmp_path / "disk" / "step-3"))):
        (root / f"step-{step}").rename(tmp_path / "disk" / f"step-{step}")
        (root / f"step-{step}").symlink_to(target)
    (root / "newest").symlink_to("step-3")
    (root / "same").symlink_to(root / "step-3")
    (tmp_path / "back").symlink_to(root / "step-1")
    (root / "first").symlink_to(tmp_path / "back")
    found = document("ls", root)
    assert [(row["name"], row["state"]) for row in found["entries"]] == [(f"step-{n}", "published") for n in (1, 2, 3)]
    assert [row["name"] for row in found["entries"] if row["latest"]] == ["step-2"]
    assert resumed_from(root) == 2
    assert found["links"] == {"newest": "step-3", "same": "step-3", "first": "step-1"}
    (one,) = document("ls", root / "step-2")["entries"]
    assert (one["path"], one["latest"]) == (str(root / "step-2"), True)
    assert document("show", root)["path"] == str(root / "step-3")
    assert document("show", root, "--step", 2)["step"] == 2
    assert [row["step"] for row in document("verify", root)["checkpoints"]] == [1, 2, 3]
    assert document("report", root, "-o", tmp_path / "page.html")["included"] == ["step-3", "step-2"]
    for path in (tmp_path / "disk" / "step-2").glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    assert not document("verify", root, "--step", 2, status=1)["ok"]


def test_a_link_of_a_step_that_leads_nowhere_is_a_finding(root: Path) -> None:
    """As where the disk isn't mounted. Other links, such as one to the last of a job, may lead nowhere."""
    (root / "step-5").symlink_to("../disk/step-5")
    (root / "newest").symlink_to("step-4")
    rows = document("ls", root, status=1)["entries"]
    assert [(row["name"], row["state"]) for row in rows if row["error"]] == [("step-5", "corrupt")]
    assert [row["name"] for row in rows if row["latest"]] == ["step-2"]
    for options in ((), ("--newest",), ("--step", 5)):
        (bad,) = [row for row in document("verify", root, *options, status=1)["checkpoints"] if not row["ok"]]
        assert bad["problems"][0]["message"].startswith(f"{root / 'step-5'} is a link to ../disk/step-5, which doesn't")


@pytest.mark.parametrize("how", ["copied", "renamed"])
def test_a_step_under_the_name_of_another_is_a_finding(how: str, root: Path) -> None:
    """A run takes it for damaged, and falls back."""
    if how == "copied":
        shutil.copytree(root / "step-1", root / "step-7")
    else:
        (root / "step-1").rename(root / "step-7")
    with pytest.warns(UserWarning, match="holds step 1, expected step 7"):
        assert resumed_from(root) == 2
    rows = {row["name"]: row for row in document("ls", root, status=1)["entries"]}
    assert [name for name, row in rows.items() if row["latest"]] == ["step-2"]
    assert [name for name, row in rows.items() if row["error"]] == ["step-7"]
    assert (rows["step-7"]["state"], rows["step-7"]["step"]) == ("corrupt", 7)
    for target in ((root,), (root, "--newest"), (root, "--step", 7), (root / "step-7",)):
        (bad,) = [row for row in document("verify", *target, status=1)["checkpoints"] if not row["ok"]]
        assert bad["path"] == str(root / "step-7")
        assert "holds step 1, expected step 7" in bad["problems"][0]["message"]
    (root / "step-7").rename(root / "best")  # a name of no step, which nobody resumes from by its number
    assert document("verify", root)["ok"]


def test_ls_tells_a_live_save(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with holdfast.CheckpointManager(root, {"a": torch.ones(3)}) as manager:
        manager.save(1).result()
        (root / ".step-2.0123456789ab.incomplete").mkdir()
        found = document("ls", root)
        assert f"process {os.getpid()} " in found["held_by"]
        row = found["entries"][0]
        assert (row["state"], row["step"]) == ("in-work", 2)
        assert f"process {os.getpid()} " in row["held_by"]
        refused = document("recover", root, status=1)
        assert refused["error"]["kind"] == "RootLocked"
        assert f"process {os.getpid()} " in refused["error"]["message"]
        assert document("recover", root, "--dry-run", status=1)["error"]["kind"] == "RootLocked"
        assert (root / ".step-2.0123456789ab.incomplete").exists()
        manager.save(3).result()  # nobody has taken its lock away


def test_asking_who_holds_a_root_keeps_nobody_from_it(tmp_path: Path) -> None:
    """`ls` asks by a shared lock: a writer that comes at that very moment waits for it, not at all for others."""
    import fcntl
    import threading

    with RootLock.acquire(str(tmp_path)):
        pass
    asking = os.open(tmp_path / ".holdfast" / "lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    timer = threading.Timer(0.2, os.close, (asking,))
    timer.start()
    with RootLock.acquire(str(tmp_path), timeout_s=0.0):
        pass
    timer.join()


# show ------------------------------------------------------------------------------------------------------------


def test_show_tells_what_a_checkpoint_holds(made: Path) -> None:
    found = document("show", made, "--step", 1)
    checkpoint = holdfast.open(made / "step-1")
    tensors = {row["name"]: row for row in found["tensors"]}
    assert {name: (tuple(row["shape"]), row["dtype"], row["nbytes"]) for name, row in tensors.items()} == {
        name: (info.shape, str(info.dtype).removeprefix("torch."), info.nbytes)
        for name, info in checkpoint.tensors.items()
    }
    assert [row["name"] for row in found["objects"]] == list(checkpoint.objects)
    assert (found["step"], found["world"], found["metrics"]) == (1, 1, {"loss": "inf"})
    assert found["versions"]["torch"] == torch.__version__
    (shard,) = tensors["model.weight"]["shards"]
    data = (made / "step-1" / shard["file"]).read_bytes()
    payload = data[shard["file_offset"] : shard["file_offset"] + shard["nbytes"]]
    assert payload == checkpoint.read("model.weight").numpy().tobytes()
    assert document("show", made)["step"] == 3
    only = document("show", made / "step-1", "--filter", "model.b*")
    assert ([row["name"] for row in only["tensors"]], only["objects"]) == (["model.bias"], [])
    lines = run("show", made / "step-1", "--tree", "--filter", "model.*").stdout.splitlines()
    assert [line.split() for line in lines[-3:]] == [["model", "144", "B"], ["bias", "16", "B"], ["weight", "128", "B"]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_show_reads_what_stock_dcp_wrote(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4, 2), "n": 5}, checkpoint_id=tmp_path / "stock", no_dist=True)
    found = document("show", tmp_path / "stock")
    assert (found["writer"], found["checksummed"]) == ("stock", False)
    assert [(row["name"], row["shape"], row["dtype"]) for row in found["tensors"]] == [("w", [4, 2], "float32")]
    assert [row["name"] for row in found["objects"]] == ["n"]
    next((tmp_path / "stock").glob("*.distcp")).unlink()
    verified = document("verify", tmp_path / "stock", status=1)
    assert (verified["ok"], verified["checkpoints"][0]["checksummed"]) == (False, False)


def test_show_lists_the_tensors_of_an_export(made: Path, tmp_path: Path) -> None:
    """By the headers of its files, as of any directory of Hugging Face's form."""
    assert run("export", made / "step-1", tmp_path / "hf-1").returncode == 0
    found = document("show", tmp_path / "hf-1")
    plain = Path(shutil.copytree(tmp_path / "hf-1", tmp_path / "plain"))
    (plain / "holdfast.json").unlink()
    for report in plain.glob("*.report"):
        report.unlink()
    assert found["tensors"] == document("show", plain)["tensors"]
    assert [(row["name"], row["shape"]) for row in found["tensors"]] == [("bias", [4]), ("weight", [4, 8])]
    assert (found["kind"], found["world"], found["nbytes"]) == ("export", 1, 144)
    assert "model.safetensors" in [row["name"] for row in found["files"]]
    text = run("show", tmp_path / "hf-1", "--tree").stdout
    assert re.search(r"^holds +2 tensors, 144 B; 1 files, .* B$", text, re.MULTILINE), text
    assert text.splitlines()[-1].split() == ["weight", "128", "B"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_report_includes_any_step_that_is_asked_for(root: Path, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=root / "step-9", no_dist=True)
    page = tmp_path / "page.html"
    assert document("report", root, "-o", page)["included"] == ["step-3", "step-2"]
    assert document("report", root, "-o", page, "--step", 9, "--step", 1)["included"] == ["step-9", "step-1"]
    refused = document("report", root, "-o", page, "--step", 8, status=2)["error"]["message"]
    assert refused.endswith("steps: 1, 2, 3, 9")
    (root / "step-2" / "holdfast.json").write_text("{}")
    assert document("report", root, "-o", page, "--step", 2, status=1)["error"]["kind"] == "CheckpointCorrupt"


# verify ----------------------------------------------------------------------------------------------------------


def test_verify_names_every_bad_file(root: Path) -> None:
    assert document("verify", root)["ok"]
    for path, at in ((root / "step-1" / "__0_0.distcp", 300), (root / "step-1" / "__0_1.distcp", 50)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    (root / "step-2" / "rank-00000.report").unlink()
    (root / "step-3" / "holdfast.json").write_bytes(b"")
    found = document("verify", root, status=1)
    wrong = {row["path"]: {problem["path"] for problem in row["problems"]} for row in found["checkpoints"]}
    assert wrong == {
        str(root / "step-1"): {str(root / "step-1" / "__0_0.distcp"), str(root / "step-1" / "__0_1.distcp")},
        str(root / "step-2"): {str(root / "step-2" / "rank-00000.report")},
        str(root / "step-3"): {str(root / "step-3" / "holdfast.json")},
    }
    text = run("verify", root)
    assert text.returncode == 1
    assert all(path in text.stdout for paths in wrong.values() for path in paths)
    assert document("verify", root, "--step", 2, status=1)["checkpoints"][0]["step"] == 2
    assert [row["path"] for row in document("verify", root / "step-1", status=1)["checkpoints"]] == [
        str(root / "step-1")
    ]
    newest = document("verify", root, "--newest", status=1)["checkpoints"]
    assert [Path(row["path"]).name for row in newest] == ["step-3", "step-2"]


def test_verify_of_the_newest_does_not_pass_over_one_that_can_not_be_read(root: Path) -> None:
    (root / "step-3" / "holdfast.json").unlink()
    found = document("verify", root, "--newest", status=1)
    assert {row["step"]: row["ok"] for row in found["checkpoints"]} == {3: False, 2: True}


# recover ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", ["whole", "damaged", "replaced"])
def test_recover_does_what_its_dry_run_says(interrupted: str, root: Path) -> None:
    if interrupted == "replaced":
        name = leave(root, 2, "replaced")
        expected = ([], ["step-2"], [])
    else:
        name = leave(root, 2)
        expected = (["step-2"], [], [])
    if interrupted == "damaged":
        os.truncate(root / name / "__0_0.distcp", 4096)
        expected = ([], [], [name])
    trash = ".step-9.0123456789ab.trash"
    (root / trash).mkdir()
    expected[2].append(trash)
    before = tree_of(root)
    said = document("recover", root, "--dry-run")
    assert tree_of(root) == before
    done = document("recover", root)
    assert (said.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert said == done
    assert (done["rolled_forward"], done["restored"]) == expected[:2]
    assert sorted(done["removed"]) == sorted(expected[2])
    assert [entry for entry in os.listdir(root) if entry.startswith(".")] == [".holdfast"]
    assert (root / "step-2").exists() == (interrupted != "damaged")
    assert document("verify", root)["ok"]
    assert run("recover", root).stdout == f"{root}: nothing was left behind\n"


def test_recover_of_one_path_leaves_the_others(root: Path) -> None:
    one, other = leave(root, 1), leave(root, 2)
    assert document("recover", root / "step-1")["rolled_forward"] == ["step-1"]
    assert not (root / one).exists()
    assert (root / other).exists()


def test_recover_leaves_what_a_live_save_to_one_path_holds(root: Path) -> None:
    name = leave(root, 2)
    with RootLock.acquire_beside(str(root / "step-2")):
        for options in (["--dry-run"], []):
            found = document("recover", root, *options, status=1)
            (left,) = found["left"]
            assert left["name"] == name
            assert f"process {os.getpid()} " in left["why"]
    assert document("recover", root)["rolled_forward"] == ["step-2"]


def test_recover_says_what_kept_it_from_settling_an_entry(root: Path) -> None:
    """A trial run logs nothing, and a script reads no log."""
    name = ".step-9.0123456789ab.incomplete"
    (root / name).write_text("no directory")
    for options in (["--dry-run"], []):
        (left,) = document("recover", root, *options, status=1)["left"]
        assert left["name"] == name
        assert "Not a directory" in left["why"]


# what all share --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "/nowhere/at/all"),
        ("show", "/nowhere/at/all"),
        ("verify", "/nowhere/at/all"),
        ("recover", "/nowhere/at/all"),
        ("verify", "ROOT", "--step", "99"),
        ("show", "ROOT", "--step", "99"),
        ("verify", "ROOT", "--step", "1", "--newest"),
        ("show", "ftp://bucket/x"),
        ("ls", "ROOT/step-1/holdfast.json"),
    ],
)
def test_misuse_is_exit_status_2_and_one_document(arguments: tuple[str, ...], made: Path) -> None:
    ended = run(*(part.replace("ROOT", str(made)) for part in arguments), "--json")
    assert ended.returncode == 2, ended.stderr
    assert json.loads(ended.stdout)["command"] == "error"
    assert ended.stderr.startswith("holdfast: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("ls", "ROOT", "--nope"), "--nope"),
        (("ls",), "PATH"),
        (("verify", "ROOT", "--step", "many"), "--step"),
        (("sl", "ROOT"), "sl"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_document_too(arguments: tuple[str, ...], why: str, made: Path) -> None:
    ended = run(*(part.replace("ROOT", str(made)) for part in arguments), "--json")
    assert ended.returncode == 2
    found = json.loads(ended.stdout)
    assert (found["command"], found["error"]["kind"]) == ("error", "ConfigError")
    assert why in found["error"]["message"]
    assert why in ended.stderr


def test_a_working_directory_that_is_gone_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = (
        f"import os, sys; os.rmdir({str(tmp_path / 'gone')!r}); sys.argv = ['holdfast', 'ls', '.', '--json']\n"
        "from holdfast.cli.app import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "gone",
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ended.returncode, json.loads(ended.stdout)["error"]["kind"]) == (1, "StorageError")
    assert "Traceback" not in ended.stderr


def test_ls_of_a_link_shows_what_it_points_to(root: Path) -> None:
    (root / "newest").symlink_to("step-3")
    assert [row["name"] for row in document("ls", root / "newest")["entries"]] == ["step-3"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ls_of_one_checkpoint_shows_it_whoever_wrote_it_and_whatever_became_of_it(root: Path, tmp_path: Path) -> None:
    (root / "step-3" / "holdfast.json").unlink()
    assert [row["state"] for row in document("ls", root / "step-3", status=1)["entries"]] == ["corrupt"]
    for name in ("step-9", "mine"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "stock" / name, no_dist=True)
        (row,) = document("ls", tmp_path / "stock" / name)["entries"]
        assert (row["name"], row["state"]) == (name, "stock")
        assert row["nbytes"] > 0


def test_a_directory_above_a_root_leads_to_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "lab" / "a run").mkdir(parents=True)
    (tmp_path / "lab" / "empty").mkdir()
    root.rename(tmp_path / "lab" / "a run" / "checkpoints")
    lab, below = tmp_path / "lab", f"these below it do: {Path('a run', 'checkpoints')}\n"
    assert run("ls", lab).stdout == f"{lab} holds no checkpoints; {below}"
    assert run("ls", lab / "empty").stdout == f"{lab / 'empty'} holds no checkpoints\n"
    shown_there = run("show", lab)
    assert (shown_there.returncode, shown_there.stderr.endswith(below)) == (2, True), shown_there.stderr
    assert run("verify", lab).stderr.endswith(below)
    assert run("prune", lab, "--last", 1, "--dry-run").stdout.endswith(below)
    reported = run("report", lab, "-o", tmp_path / "page.html")
    assert (reported.returncode, reported.stderr.endswith(below)) == (0, True), reported.stderr


def test_the_page_tells_what_was_verified(root: Path, tmp_path: Path) -> None:
    data = next(path for path in (root / "step-1").iterdir() if path.suffix == ".distcp")
    data.write_bytes(bytes(data.stat().st_size))
    assert run("verify", root).returncode == 1
    assert run("verify", root / "step-2").returncode == 0
    noted = {row["name"]: row.get("verified") for row in summary_of(str(root))["steps"]}
    assert {name: found["problems"] for name, found in noted.items()} == {"step-1": 1, "step-2": 0, "step-3": 0}


def test_looking_imports_no_torch(made: Path) -> None:
    code = (
        "import sys; from holdfast.cli.app import app\n"
        "for arguments in sys.argv[1:]: app(arguments.split('|'), standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'rich.progress') if name in sys.modules], file=sys.stderr)"
    )
    calls = [f"{name}|{made}" for name in ("ls", "show", "verify", "recover")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *calls],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "[]")


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    holdfast.save({"evil\x1b]0;owned\x07\n": torch.ones(2)}, tmp_path / "x")
    ended = run("show", tmp_path / "x")
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout
    assert r"evil\x1b]0;owned\x07\n" in ended.stdout
    assert shown("a\ud800b") == r"a\ud800b"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "cat"])
def test_a_message_is_one_line_whatever_the_path(command: str, tmp_path: Path) -> None:
    ended = run(command, tmp_path / "x\n\r\x1b[31m", *(["w"] if command == "cat" else []))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert r"x\n\r\x1b[31m" in ended.stderr


def test_words_for_sizes_and_ages() -> None:
    assert [size_text(n) for n in (None, 0, 1023, 1024, 5 << 30)] == ["-", "0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert age_text(None) == age_text("yesterday") == "-"
    assert age_text("1970-01-01T00:00:00+00:00").endswith(" d")


BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)  # some twenty processes, several of which import torch
def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """Its Python blocks make a root, its console blocks look at it; ``...`` stands for what differs."""
    checker = doctest.OutputChecker()
    tried = 0
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            ended = subprocess.run(
                [sys.executable, "-c", text],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": SOURCE},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            continue
        for command, _, expected in (part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]):
            program, *arguments = shlex.split(command, comments=True)
            if program != "holdfast":
                subprocess.run([program, *arguments], cwd=tmp_path, check=True)
                continue
            ended = run(*arguments, cwd=tmp_path)
            got = ended.stdout + (f"[exit status {ended.returncode}]\n" if ended.returncode else "")
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert checker.check_output(expected, got, flags), f"{command}:\n{got}\n{ended.stderr}"
            tried += 1
    assert tried >= 7
