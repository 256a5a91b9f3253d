"""Ctrl-C while a command works, and stores that don't answer: a status, no traceback, nothing half-written.

As processes of their own on a terminal, and with real sockets.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _object_server import Server
from test_cli_terminal import command, environment, run

import holdfast
from holdfast.storage.object_store import FIRST_ANSWER_S

MADE = Path(__file__).parents[1] / "view" / "large_root.py"


def reads(pid: int, directory: Path) -> bool:
    """Return True while the process has a file of data below ``directory`` open."""
    with contextlib.suppress(OSError):
        return any(
            os.readlink(fd).startswith(f"{directory.resolve()}/") and os.readlink(fd).endswith(".distcp")
            for fd in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


def interrupted(directory: Path, *arguments: object, after_s: float | None) -> tuple[int, str]:
    """Run on a terminal, press Ctrl-C after so long, unless it has ended; return the status and what it printed.

    Not before Python has come to a package of ours: what it prints when it is interrupted by itself isn't ours.
    after_s: None: once it reads the data of ``directory / "root"``.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=directory,
        env=environment(),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            if after_s is None:
                while process.poll() is None and not reads(process.pid, directory / "root"):
                    time.sleep(0.001)
            process.wait(after_s or 0.0)
        except subprocess.TimeoutExpired:
            while process.poll() is None and b"msgspec" not in Path(f"/proc/{process.pid}/maps").read_bytes():
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # EIO: nobody has it open any more
                break
        os.close(ours)
        return process.wait(60), seen.decode()


def files_of(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of 128 MiB: one takes longer than any of the times at which it is interrupted."""
    path = tmp_path_factory.mktemp("large") / "root"
    state = {"model": {f"layers.{number}.weight": torch.randn(4096, 1024) for number in range(8)}}
    holdfast.save(state, path / "step-1", step=1)
    holdfast.save({"model": {name: tensor + 1 for name, tensor in state["model"].items()}}, path / "step-2", step=2)
    return path


_WRITERS = {
    "dcp": ("convert", "root", "out", "--to", "dcp"),
    "torch": ("convert", "root", "out", "--to", "torch"),
    "export": ("export", "root", "out"),
    "report": ("report", "root", "-o", "out", "--stats"),
    "verify": ("verify", "root"),
    "diff": ("diff", "root/step-1", "root/step-2"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("dcp", "verify", "diff") else []) for name in _WRITERS],
)
def test_an_interrupted_command_leaves_nothing(name: str, root: Path, tmp_path: Path) -> None:
    """At several moments, from the imports on; where it was done before, the target is whole."""
    (tmp_path / "root").symlink_to(root)
    before, statuses = files_of(root), set()
    began = time.monotonic()
    whole = run(*[tmp_path / word if word[:4] in ("root", "out") else word for word in _WRITERS[name]])
    took_s = time.monotonic() - began
    assert whole.returncode == int(name == "diff"), whole.stderr
    for path in tmp_path.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # On a busy machine it may have ended before it is seen to read.
    for share in (0.05, 0.4, 0.6, 0.8, *[None] * 5):
        if share is None and 130 in statuses:
            break
        after_s = None if share is None else share * took_s
        status, seen = interrupted(tmp_path, *_WRITERS[name], after_s=after_s)
        statuses.add(status)
        assert "Traceback" not in seen, seen
        assert status in (130, -signal.SIGINT, whole.returncode), seen
        assert files_of(root) == before
        left = sorted(path.name for path in tmp_path.iterdir() if path.name != "root")
        assert left in ([], ["out"]), left
        if left:  # whole, though perhaps nobody was told
            out = tmp_path / "out"
            if out.is_dir():
                assert run("verify", out).returncode == 0
                shutil.rmtree(out)
            else:
                assert name == "report" or len(torch.load(out)["model"]) == 8
                out.unlink()
    assert 130 in statuses


def test_what_an_interrupted_overwrite_would_have_replaced_is_there(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before")
    words = ("convert", root, "out", "--to", "torch", "--overwrite")
    began = time.monotonic()
    assert run("convert", root, tmp_path / "other", "--to", "torch").returncode == 0
    took_s = time.monotonic() - began
    (tmp_path / "other").unlink()
    for share in (0.5, 0.7):
        status, seen = interrupted(tmp_path, *words, after_s=share * took_s)
        assert "Traceback" not in seen, seen
        assert os.listdir(tmp_path) == ["out"]
        assert (tmp_path / "out").read_bytes() == b"before" or len(torch.load(tmp_path / "out")["model"]) == 8
        assert status in (130, -signal.SIGINT, 0)  # a shell sees 130 for both of the first


def test_an_interrupt_while_the_interpreter_is_taken_apart_prints_nothing(root: Path) -> None:
    program = (
        "import atexit, os, signal, sys; from holdfast.__main__ import main; sys.argv[0] = 'holdfast'\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "ls", root], capture_output=True, timeout=100, check=False, env=environment()
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")
    assert b"step" in ended.stdout


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_file_that_can_not_grow_is_a_message(root: Path, tmp_path: Path, to: str) -> None:
    """torch ends its file although a write has failed, and says something else then."""
    limited = "trap '' XFSZ; ulimit -f 20000; exec \"$@\""
    ended = subprocess.run(
        ["bash", "-c", limited, "bash", *command("convert", root, tmp_path / "out", "--to", to)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment(),
    )
    assert ended.returncode == 1
    if to == "torch":
        assert ended.stderr == f"holdfast: {tmp_path}/out can't be written: File too large\n"
    else:
        assert ended.stderr.startswith("holdfast: ")
        assert f"can't write {tmp_path}/" in ended.stderr
        assert ended.stderr.endswith("File too large\n")
    assert not [path for path in tmp_path.iterdir() if path.name != ".holdfast"]


def test_the_next_prune_removes_what_an_interrupted_one_has_hidden(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sizes = ["--steps", "300", "--whole", "300", "--tensors", "20", "--ranks", "4"]
    subprocess.run([sys.executable, str(MADE), str(root), *sizes], timeout=100, check=True, env=environment())
    with subprocess.Popen(command("prune", root, "--last", "3"), env=environment(), stdout=subprocess.PIPE) as process:
        ends_s = time.monotonic() + 60
        while not list(root.glob(".*.trash")) and time.monotonic() < ends_s:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 130
    assert list(root.glob(".*.trash")), "it was still at it"
    assert run("ls", root).returncode == 0
    assert run("prune", root, "--last", "3").returncode == 0
    assert sorted(path.name for path in root.iterdir()) == [".holdfast", "step-149000", "step-149500", "step-150000"]


# Stores that don't answer ------------------------------------------------------------------------------------------


@pytest.fixture(params=["nobody listens", "nobody answers"])
def dead(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "nobody answers":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


@pytest.mark.parametrize("name", ["ls", *(pytest.param(name, marks=pytest.mark.slow) for name in ("show", "verify"))])
def test_a_store_that_does_not_answer_is_given_up_soon(name: str, dead: str) -> None:
    began = time.monotonic()
    ended = run(name, "s3://bucket/runs", AWS_ENDPOINT_URL=dead, **KEYS)
    assert time.monotonic() - began < 2.5 * FIRST_ANSWER_S
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    for words in ("can't ", "s3://bucket/runs", dead, "check "):
        assert words in ended.stderr


def test_a_bucket_that_is_not_there_is_told_at_once(object_server: Server) -> None:
    ended = run("ls", "s3://no-such-bucket/runs", AWS_ENDPOINT_URL=object_server.endpoint, **KEYS)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "make the bucket, or correct the URL" in ended.stderr
