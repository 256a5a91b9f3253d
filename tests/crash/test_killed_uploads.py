"""A trainer that is killed in the middle of an upload: the mirror shows nothing half, and the next start completes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import engines_of, is_gone

import holdfast
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.protocol import Storage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")
JOB = Path(__file__).with_name("mirror_job.py")
WAIT_S = 120.0
SLOW = 1 << 20


@pytest.fixture(params=["directory", "bucket"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Storage]]:
    """The mirror's path or URL, and its storage."""
    if request.param == "directory":
        yield str(tmp_path / "mirror"), LocalStorage(tmp_path / "mirror")
        return
    server = request.getfixturevalue("object_server")
    options = server.options
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", options["region"])
    url = f"s3://{server.bucket()}/run"
    yield url, ObjectStorage(ObjectStore(url, options))


def begin(root: Path, mirror: str, steps: int, limit: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOB), str(root), mirror, str(steps), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(root: Path, mirror: str, steps: int) -> str:
    job = begin(root, mirror, steps, 0)
    said, _ = job.communicate(timeout=WAIT_S)
    assert job.returncode == 0, said
    return said


def read_until(job: subprocess.Popen[str], line: str) -> None:
    assert job.stdout is not None
    seen = []
    for found in job.stdout:
        seen.append(found)
        if found.strip() == line:
            return
    raise AssertionError(f"it ended without {line!r}: {''.join(seen)}")


@pytest.mark.parametrize("engine_too", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_next_start_completes_an_upload_whose_trainer_was_killed(
    tmp_path: Path, place: tuple[str, Storage], *, engine_too: bool
) -> None:
    """Uploads at 1 MiB/s take 4 s. With its engine dead the next start copies again; else what the engine finishes."""
    mirror, storage = place
    root = tmp_path / "root"
    job = begin(root, mirror, 2, SLOW)
    read_until(job, "saved 1")
    deadline = time.monotonic() + WAIT_S
    while not storage.unsettled():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engines = engines_of(job.pid)
    job.send_signal(signal.SIGKILL)
    job.wait()
    if engine_too:
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while not all(map(is_gone, engines)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    if engine_too and isinstance(storage, LocalStorage):  # in a bucket one request may have been all of it
        assert read_manifest(storage, "step-1") is None, "nothing half is visible"
    assert job.stdout is not None
    job.stdout.close()

    said = run(root, mirror, 2)
    assert "restored 1 1" in said or (not engine_too and "restored 2 2" in said), said
    assert storage.unsettled() == []
    for step in (1, 2):
        manifest = read_manifest(storage, f"step-{step}")
        assert manifest is not None
        assert manifest.step == step
    shutil.rmtree(root)
    assert "restored 2 2" in run(root, mirror, 2), json.dumps(said)
    if isinstance(storage, LocalStorage):
        assert holdfast.open(Path(mirror) / "step-1").verify().ok
