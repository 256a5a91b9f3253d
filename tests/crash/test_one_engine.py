"""All saves, exports and publishes of a trainer use one engine: what its failures mean for each of them."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from processes import engines_of, is_gone
from test_shared_engine import HANGING

import holdfast
from holdfast.engine import supervisor
from holdfast.engine.client import EngineClient
from holdfast.errors import EngineDied
from holdfast.export import exporter

MB = 1 << 20
WAIT_S = 60
PERSIST_S = 6.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert engines_of(os.getpid()) == [], "left by an earlier test"
    yield
    assert engines_of(os.getpid()) == []


@pytest.fixture
def state():
    return {"model": torch.nn.Linear(1000, 500), "step": 0}


@pytest.fixture
def make(tmp_path, state):
    """Make managers with exports; close all of them at the end."""
    made = []
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')

    def start(name="run", exports=0, export=None, **config):
        config = {"every": 1, "keep": None, "on_error": "warn", "nice": 0, **config}
        wanted = [
            holdfast.HFExport(
                tmp_path / f"{name}-hf{number}",
                every=1,
                assets=tmp_path / "source",
                latest_link=False,
                **{"nice": 0, **(export or {})},
            )
            for number in range(exports)
        ]
        made.append(
            holdfast.CheckpointManager(
                tmp_path / name, state, config=holdfast.CheckpointConfig(**config), exports=wanted
            )
        )
        return made[-1]

    yield start
    for manager in made:
        manager.close()


def engine():
    (pid,) = engines_of(os.getpid())
    return pid


def wait_for_bytes(place, nbytes=1):
    """Wait until some were written below ``place``."""
    deadline = time.monotonic() + WAIT_S
    while sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file() and path.suffix) < nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def published(manager, step):
    return step in manager.steps()


def test_a_manager_with_exports_and_a_publisher_runs_one_engine(make, state, tmp_path):
    threads = threading.active_count()
    manager = make(exports=2)
    with holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(tmp_path / "versions")) as publisher:
        handles = manager.step(1)
        publisher.publish(state["model"].state_dict(), 1)
        for handle in handles:
            handle.result(WAIT_S)
        assert len(engines_of(os.getpid())) == 1
        links = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-engine")]
        assert len(links) == 1
        until = time.monotonic() + WAIT_S
        while threading.active_count() - threads > 6:  # the journal's ends when it has written what just happened
            assert time.monotonic() < until, sorted(t.name for t in threading.enumerate())
            time.sleep(0.01)
    assert len(handles) == 3
    pid = engine()
    manager.close()
    assert is_gone(pid)
    assert threading.active_count() == threads


@pytest.mark.parametrize("when", ["before", "after", "late"])
def test_ctrl_c_while_an_engine_starts_stays_ctrl_c_leaves_nothing_and_the_next_call_works(tmp_path, monkeypatch, when):
    """late: the thread begins once the exception is on its way."""
    start, late = threading.Thread.start, []

    def interrupted(thread):
        if not thread.name.startswith("holdfast-engine"):
            return start(thread)
        if when == "late":
            late.append(threading.Timer(0.3, start, (thread,)))
            late[0].start()
        elif when == "after":
            start(thread)
        raise KeyboardInterrupt

    weights = {"w": torch.ones(10)}
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(tmp_path))
    assert engines_of(os.getpid()) == []
    for timer in late:
        timer.join(WAIT_S)
    with holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(tmp_path)) as publisher:
        publisher.publish(weights, 1)
        assert holdfast.sync.Receiver(holdfast.sync.DirectoryTransport(tmp_path), {"w": torch.zeros(10)}).receive() == 1


def test_an_export_that_hangs_once_the_checkpoint_of_its_step_stands_leaves_the_next_alone(make, monkeypatch, tmp_path):
    start = "from holdfast.engine.process import main\n"
    monkeypatch.setattr(supervisor, "_BOOT", supervisor._BOOT.replace(start, HANGING + start))
    manager = make(exports=1, export={"io_limit_bytes_per_s": MB}, persist_timeout=PERSIST_S)
    (tmp_path / "run-hf0" / "hang-report-fsync").touch()
    saved, exported = manager.step(1)
    saved.result(WAIT_S)
    assert not list((tmp_path / "run-hf0").glob(".*.incomplete/.*.report.new"))
    manager.save(2).result(WAIT_S)
    assert isinstance(exported.exception(WAIT_S), holdfast.SaveFailed)
    with pytest.warns(UserWarning, match="export"):
        manager.save(3).result(WAIT_S)
    assert manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("call", [pytest.param("fsync", marks=pytest.mark.slow), "rename"])
def test_an_export_whose_root_hangs_in_its_report_leaves_checkpoints_alone(make, monkeypatch, tmp_path, call):
    """A report that hangs in its fsync is given up at once; in its rename only with the engine, which is retired."""
    start = "from holdfast.engine.process import main\n"
    monkeypatch.setattr(supervisor, "_BOOT", supervisor._BOOT.replace(start, HANGING + start))
    cancel = EngineClient.cancel
    monkeypatch.setattr(EngineClient, "cancel", lambda *args, timeout_s: cancel(*args, timeout_s=min(timeout_s, 0.5)))
    manager = make(exports=1, io_limit_bytes_per_s=MB, persist_timeout=PERSIST_S)
    hang = tmp_path / "run-hf0" / f"hang-report-{call}"
    hang.touch()
    saved, exported = manager.step(1)
    pid = engine()
    try:
        saved.result(WAIT_S)
        time.sleep(max(0.0, PERSIST_S - 2.5))
        during = manager.save(2)  # is being written when the export is given up
        error = exported.exception(WAIT_S)
        assert isinstance(error, (holdfast.SaveFailed, holdfast.OutcomeUnknown)), error
        assert not during.done()
        assert not is_gone(pid)
        during.result(WAIT_S)
        with pytest.warns(UserWarning, match="export"):
            following = manager.save(3)
        following.result(WAIT_S)
        assert manager.steps() == [1, 2, 3]
        assert is_gone(pid) is (call == "rename"), "it was the last thing in it"
    finally:
        hang.unlink()
    for handle in manager.step(4):
        handle.result(WAIT_S)


def test_copies_and_report_of_an_export_have_one_deadline(make, monkeypatch):
    limit_s, make_image = 3.0, exporter.make_image

    def slowly(*args, **options):
        time.sleep(0.7 * limit_s)
        make_image(*args, **options)

    monkeypatch.setattr(exporter, "make_image", slowly)
    manager = make(exports=1, persist_timeout=limit_s, every=None)
    monkeypatch.setattr(EngineClient, "staging_verified", lambda _client, _attempt: None)  # so it reports nothing
    began = time.monotonic()
    (exported,) = manager.step(1)
    error = exported.exception(WAIT_S)
    assert "persist_timeout" in str(error)
    assert time.monotonic() - began < 1.4 * limit_s
    with pytest.warns(UserWarning, match="export"):
        manager.close()


def test_a_killed_engine_fails_the_checkpoint_and_the_export_and_the_next_succeed(make, state, tmp_path):
    state["model"] = torch.nn.Linear(3000, 1000)  # takes 12 s at this limit: nothing is written whole before the kill
    manager = make(exports=1, export={"io_limit_bytes_per_s": MB}, io_limit_bytes_per_s=MB)
    handles = manager.step(1)
    clients = manager._saver._engine, manager._deliverers.all[0].place.engine
    deadline = time.monotonic() + WAIT_S
    for client, handle in zip(clients, handles, strict=True):
        while handle.attempt not in client._attempts or not client.progress(handle.attempt)[0]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    os.kill(engine(), signal.SIGKILL)
    for handle in handles:
        error = handle.exception(WAIT_S)
        assert isinstance(error, holdfast.SaveFailed), error
        assert isinstance(error.__cause__, EngineDied), error.__cause__
    with pytest.warns(UserWarning, match="EngineDied|engine"):
        handles = manager.step(2)
    for handle in handles:
        handle.result(WAIT_S)
    assert manager.steps() == [2]


def test_closing_one_manager_leaves_the_save_of_the_other_alone(make, tmp_path):
    kept, other = make("kept", io_limit_bytes_per_s=MB), make("other")
    saved = kept.save(1)
    other.save(1).result(WAIT_S)
    pid = engine()
    wait_for_bytes(tmp_path / "kept", 4096)
    other.close()
    assert not saved.done()
    assert engine() == pid
    saved.result(WAIT_S)
    assert published(kept, 1)
    again = make("again")
    again.save(1).result(WAIT_S)
    assert engine() == pid
    kept.close()
    again.close()
    assert is_gone(pid)


def test_a_child_forked_during_a_save_is_independent(make, state, tmp_path):
    """The child holds no descriptor of the engine, saves with its own, and its end doesn't affect the parent's save."""
    manager = make(io_limit_bytes_per_s=MB)
    saved = manager.save(1)
    wait_for_bytes(tmp_path / "run", 4096)
    pid = engine()
    sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in _engine_descriptors()}
    assert sockets
    child = os.fork()
    if child == 0:
        status = 1
        try:
            inherited = {_link(fd) for fd in os.listdir("/proc/self/fd")}
            manager.close()
            holdfast.save({"w": torch.ones(8)}, tmp_path / "by-child")
            status = 0 if not sockets & inherited else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine() == pid
    saved.result(WAIT_S)
    assert published(manager, 1)
    loaded = {"w": torch.zeros(8)}
    holdfast.load(loaded, tmp_path / "by-child")
    assert loaded["w"].eq(1).all()


def _engine_descriptors():
    from holdfast.engine.shared import process_engine

    link = process_engine().current
    return [link._process.sock.fileno(), link._process._stderr_fd]


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
