"""``holdfast view`` as a process: what it answers, and whom."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.storage.locks import RootLock

pytest.importorskip("starlette", reason="the extra `view` isn't installed")
pytest.importorskip("uvicorn", reason="the extra `view` isn't installed")


@contextlib.contextmanager
def serving(root: Path) -> Iterator[int]:
    """Run ``holdfast view`` at a free port; return that."""
    command = [sys.executable, "-m", "holdfast", "view", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
        assert found is not None
        yield int(found[1])
    finally:
        server.terminate()
        server.wait(20)
        assert server.stdout is not None
        server.stdout.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served") / "root"
    weight = torch.zeros(4, 4)
    with holdfast.CheckpointManager(path, {"model": {"weight": weight}}) as manager:
        for step in (1, 2):
            weight += 1
            manager.save(step).result()
    (path.parent / "secret").mkdir()
    (path.parent / "secret" / "holdfast.json").write_text("secret")
    return path


@pytest.fixture(scope="module")
def port(root) -> Iterator[int]:
    with serving(root) as found:
        yield found


def ask(port: int, place: str, method: str = "GET", **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, place, headers={"Host": f"127.0.0.1:{port}", **given})
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers
    finally:
        connection.close()


def test_the_page_and_its_documents(port, root):
    status, page, headers = ask(port, "/")
    assert status == 200
    assert b'data-mode="live"' in page
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, body, _ = ask(port, "/api/summary")
    assert [row["step"] for row in json.loads(body)["steps"]] == [1, 2]
    status, body, _ = ask(port, "/api/checkpoint?name=step-2")
    assert "model.weight" in json.loads(gzip.decompress(body))["tensors"]["name"]
    status, body, _ = ask(port, "/api/tensor?name=step-2&tensor=model.weight")
    assert json.loads(body)["mean"] == 2
    status, body, _ = ask(port, "/api/difference?a=step-1&b=step-2&tensor=model.weight")
    assert json.loads(body)["max_abs"] == 1


def test_an_unchanged_root_isnt_sent_again(port):
    _, _, headers = ask(port, "/api/summary")
    status, body, _ = ask(port, "/api/summary", If_None_Match=headers["ETag"])
    assert (status, body) == (304, b"")


def test_a_new_step_is_another_summary(tmp_path):
    with holdfast.CheckpointManager(tmp_path, {"w": torch.zeros(2)}) as manager:
        manager.save(1).result()
        with serving(tmp_path) as port:
            _, _, headers = ask(port, "/api/summary")
            manager.save(2).result()
            status, body, _ = ask(port, "/api/summary", If_None_Match=headers["ETag"])
            assert status == 200
            assert [row["step"] for row in json.loads(body)["steps"]] == [1, 2]
            manager.pin(1)
            _, body, _ = ask(port, "/api/summary")
            assert [row["pinned"] for row in json.loads(body)["steps"]] == [True, False]


def test_a_holder_that_ends_is_another_summary(tmp_path):
    """Nothing in the directory changes when a process is killed, but its saves are no longer in work."""
    lock = RootLock.acquire(str(tmp_path))
    line = {"v": 1, "t": 1.0, "run": "a", "kind": "save.started", "step": 3, "name": "step-3"}
    (tmp_path / ".holdfast" / "journal.jsonl").write_text(json.dumps(line) + "\n")
    with serving(tmp_path) as port:
        found = json.loads(ask(port, "/api/summary")[1])
        assert found["held_by"]
        assert [save["outcome"] for save in found["saves"]] == ["started"]
        lock.release()
        found = json.loads(ask(port, "/api/summary")[1])
        assert found["held_by"] is None
        assert [save["outcome"] for save in found["saves"]] == ["cut off"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "[::1]:{port}"]
)
def test_another_name_of_this_host_gets_nothing(port, host):
    for place in ("/", "/api/summary"):
        status, body, _ = ask(port, place, Host=host.format(port=port))
        assert status in (400, 403)
        assert b"step" not in body


def test_localhost_is_this_host(port):
    assert ask(port, "/api/summary", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_cant_ask(port, site):
    assert ask(port, "/api/summary", Sec_Fetch_Site=site)[0] == 403
    assert ask(port, "/api/summary", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("place", ["/", "/api/summary", "/api/checkpoint?name=step-1"])
def test_nothing_can_be_written(port, method, place):
    assert ask(port, place, method)[0] == 405


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "..%2Fsecret",
        "step-1/../../secret",
        "%2Fetc",
        ".holdfast",
        ".",
        "..",
        "step-1%00",
        "step-3",
        "a" * 5000,
    ],
)
def test_only_entries_of_the_root_can_be_asked_for(port, name):
    for place in (f"/api/checkpoint?name={name}", f"/api/tensor?name={name}&tensor=model.weight"):
        status, body, _ = ask(port, place)
        assert status == 404
        assert b"secret" not in body.replace(b"'../secret'", b"").replace(b"'step-1/../../secret'", b"")
    assert ask(port, f"/{name}")[0] == 404


def test_a_request_that_lacks_something_says_so(port):
    for place in ("/api/checkpoint", "/api/tensor?name=step-1", "/api/difference?a=step-1&tensor=x"):
        status, body, _ = ask(port, place)
        assert status == 400
        assert json.loads(body)["error"] == "ConfigError"
    assert ask(port, "/api/tensor?name=step-1&tensor=none")[0] == 404


def test_it_listens_on_loopback_alone(port):
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((address, port), timeout=5):
            pass


def test_a_port_that_is_taken_is_an_error(port, root):
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "view", str(root), "--port", str(port)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "choose another with --port" in done.stderr
