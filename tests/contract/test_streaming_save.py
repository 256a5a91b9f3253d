"""A blocking save streams: the bytes of an image without one, of a state that held still, which nobody reads later."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import DeadlineExceeded, SaveFailed, StateChangedWhileStaging
from holdfast.api import _SaveSession
from holdfast.engine.client import EngineClient
from holdfast.format.manifest import decode_report
from holdfast.saver.handle import SaveHandle
from holdfast.staging import image
from holdfast.staging.stream import SLOT_BYTES, SLOTS, StreamedStaging, parts_of

MB = 1 << 20
RING_BYTES = SLOT_BYTES * SLOTS


def odd_state() -> dict[str, Any]:
    """Kinds of tensors that are no plain run of memory, some of them across several slots; and everything small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(900, 1700), nn.BatchNorm1d(1700), nn.Linear(1700, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 900)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "large": [torch.randn(3_000_000 + at) for at in range(2)],
        "small": {str(at): torch.randn(at) for at in range(1500)},
        "transposed": torch.randn(1500, 1700).t(),
        "permuted": torch.randn(50, 60, 70, 10).permute(2, 0, 3, 1),
        "conjugate": torch.randn(1500, 900, dtype=torch.complex64).conj().t(),
        "negative": torch.randn(1_500_000, dtype=torch.complex64).conj().imag,
        "expanded": torch.randn(3, 1).expand(3, 700_000),
        "bytes": torch.randint(0, 255, (7_000_001,), dtype=torch.uint8),
        "float8": torch.randn(2_000_000).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "step": 5,
        "nested": [1, 2, {"a": "b" * 3000}],
    }


def test_files_and_sums_are_those_of_a_save_with_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed: list[StreamedStaging] = []
    complete = StreamedStaging.complete

    def noting(stream: StreamedStaging) -> None:
        streamed.append(stream)
        complete(stream)

    monkeypatch.setattr(StreamedStaging, "complete", noting)
    state = odd_state()
    holdfast.save(state, tmp_path / "streamed")
    assert len(streamed) == 1
    holdfast.async_save(state, tmp_path / "staged", staging="eager").result(60)
    assert len(streamed) == 1
    names = sorted(os.listdir(tmp_path / "streamed"))
    assert names == sorted(os.listdir(tmp_path / "staged"))
    for name in names:
        if name.endswith((".distcp", ".metadata")):
            assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "staged" / name).read_bytes(), name
    one, other = (
        decode_report((tmp_path / root / "rank-00000.report").read_bytes(), path=root)
        for root in ("streamed", "staged")
    )
    assert (one.files, one.tensor_sums, one.index) == (other.files, other.tensor_sums, other.index)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 3, 5), (2, 3, 4, 5)])
def test_parts_of_a_view_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    view = torch.arange(torch.Size(shape).numel()).view(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    flat = view.reshape(-1)
    for start in range(flat.numel() + 1):
        for stop in range(start, flat.numel() + 1):
            parts = [part.reshape(-1) for part in parts_of(view, start, stop)]
            assert torch.equal(torch.cat([flat[:0], *parts]), flat[start:stop])


def test_no_image_is_larger_than_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    anonymous_file = image._anonymous_file

    def noting(nbytes: int) -> int:
        taken.append(nbytes)
        return anonymous_file(nbytes)

    finished: list[SaveHandle] = []
    finish = SaveHandle.finish

    def ended(handle: SaveHandle, *args: Any, **options: Any) -> None:
        finished.append(handle)
        finish(handle, *args, **options)

    monkeypatch.setattr(image, "_anonymous_file", noting)
    monkeypatch.setattr(SaveHandle, "finish", ended)
    holdfast.save({"w": torch.ones(40 * MB)}, tmp_path / "large")
    assert taken == [RING_BYTES]
    holdfast.save({"w": torch.ones(10)}, tmp_path / "small")
    assert taken == [RING_BYTES, 2 * SLOT_BYTES] or taken == [RING_BYTES, SLOT_BYTES]
    assert [handle.stats.host_bytes for handle in finished] == taken


MEASURED = """
import sys, torch, holdfast
def hwm():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) << 10
holdfast.save({"warm": torch.zeros(10)}, sys.argv[1] + "/warm")
state = {str(at): torch.full((8 << 20,), float(at)) for at in range(8)}
before = hwm()
holdfast.save(state, sys.argv[1] + "/measured")
print(hwm() - before)
"""


def test_a_save_of_a_quarter_of_a_gigabyte_takes_no_second_copy_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) < 64 * MB


# what is noticed -------------------------------------------------------------------------------------------------


@pytest.fixture
def meddling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Called, once, in the middle of a stream: with the state's pieces half copied."""
    to_call: list[Any] = []
    slot_filled = EngineClient.slot_filled

    def meddle(client: EngineClient, attempt: str, pieces: int) -> None:
        slot_filled(client, attempt, pieces)
        if pieces == 3 and to_call:
            thread = threading.Thread(target=to_call.pop())
            thread.start()
            thread.join()

    monkeypatch.setattr(EngineClient, "slot_filled", meddle)
    return to_call


def swap(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor[:5].zero_(),
        lambda tensor: tensor.detach().numpy().fill(7),  # which no counter sees
        swap,
    ],
    ids=["all", "some that were copied", "by numpy", "its memory"],
)
@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_a_thread_that_writes_into_the_state_fails_the_save(
    tmp_path: Path, meddling: list[Any], write: Any, kind: str
) -> None:
    module = nn.Linear(1000, 10_000, bias=False)
    plain = torch.randn(10_000_000)
    state = {"w": plain} if kind == "tensor" else {"m": module}
    target, name = (plain, "w") if kind == "tensor" else (module.weight, "m.weight")

    def meddle() -> None:
        with torch.no_grad():
            write(target)

    meddling.append(meddle)
    with pytest.raises(StateChangedWhileStaging, match=name):
        holdfast.save(state, tmp_path / "one")
    assert os.listdir(tmp_path) == []
    holdfast.save(state, tmp_path / "one")
    assert torch.equal(holdfast.open(tmp_path / "one").read(name), target)


def test_an_interrupt_in_the_middle_leaves_nobody_who_reads(tmp_path: Path, meddling: list[Any]) -> None:
    meddling.append(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        holdfast.save({"w": torch.zeros(20 * MB)}, tmp_path / "one")
    assert os.listdir(tmp_path) == []


def test_a_deadline_in_the_middle_leaves_nobody_who_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    monkeypatch.setattr(EngineClient, "slot_filled", lambda _client, _attempt, pieces: filled.append(pieces))
    began = time.monotonic()
    with pytest.raises((DeadlineExceeded, SaveFailed)) as raised:
        holdfast.save({"w": torch.zeros(20 * MB)}, tmp_path / "one", timeout=2)
    assert time.monotonic() - began < 20
    assert "storage" in str(raised.value)
    assert filled == list(range(1, SLOTS + 1))
    monkeypatch.undo()
    holdfast.save({"w": torch.zeros(20 * MB)}, tmp_path / "one")
    assert os.listdir(tmp_path) == ["one"]


def test_slots_and_report_have_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s, pieces = 3.0, 20
    fill = StreamedStaging.fill

    def slowly(stream: StreamedStaging, *args: Any) -> None:
        time.sleep(0.7 * limit_s / pieces)
        fill(stream, *args)

    monkeypatch.setattr(StreamedStaging, "fill", slowly)
    monkeypatch.setattr(EngineClient, "staging_verified", lambda _client, _attempt: None)  # so it reports nothing
    state = {"w": torch.zeros(pieces * MB)}
    options = {"staging": "eager", "overwrite": False, "waits": True}
    with _SaveSession(state, tmp_path / "one", None, limit_s, None, None, None, **options) as session:
        began = time.monotonic()
        error = session.start().exception(60)
        assert isinstance(error, SaveFailed)
        assert "persist_timeout" in str(error)
        assert time.monotonic() - began < 1.4 * limit_s
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import os, signal, sys, time, torch, holdfast
from holdfast.staging.stream import PieceRenderer
inside = [False]
def interrupt(*_):
    if inside[0]:
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
reading = [0]
fill = PieceRenderer.fill
def noting(*args):
    reading[0] += 1
    try:
        return fill(*args)
    finally:
        reading[0] -= 1
        filled.append(time.monotonic())
filled = []
PieceRenderer.fill = noting
state = {"w": torch.full((12 << 20,), 1.0), "v": [torch.full((1 << 18,), 1.0) for _ in range(40)]}
root = sys.argv[1]
holdfast.save(state, root + "/warm")
for number in range(int(sys.argv[2])):
    target = f"{root}/{number}"
    print("begin", flush=True)
    try:
        try:
            inside[0] = True
            holdfast.save(state, target)
            outcome = "saved"
        finally:
            inside[0] = False
    except KeyboardInterrupt:
        outcome = "interrupted"
    left = time.monotonic()
    assert reading == [0]
    state["w"].add_(1)
    time.sleep(0.05)
    assert not filled or filled[-1] <= left, "the state was read after save was left"
    state["w"].sub_(1)
    sys.stdin.readline()
    whole = os.path.isdir(target)
    if whole:
        assert torch.equal(holdfast.open(target).read("w"), state["w"])
    assert whole or outcome == "interrupted"
    print(outcome, whole, flush=True)
"""


def test_an_interrupt_at_any_moment_leaves_nobody_who_reads(tmp_path: Path) -> None:
    times, chance = int(os.environ.get("HOLDFAST_INTERRUPTS", "20")), random.Random(3)
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    outcomes = []
    try:
        for _ in range(times):
            line = child.stdout.readline()
            assert line == "begin\n", line + child.stderr.read()
            time.sleep(chance.random() * 0.3)
            child.send_signal(signal.SIGINT)
            time.sleep(0.02)
            child.stdin.write("\n")
            child.stdin.flush()
            outcomes.append(child.stdout.readline().strip())
            assert outcomes[-1], child.stderr.read()
    finally:
        child.kill()
        child.communicate()
    assert any(outcome.startswith("interrupted") for outcome in outcomes), outcomes
    hidden = [name for name in os.listdir(tmp_path) if name.startswith(".") and name.endswith(".incomplete")]
    assert not hidden


# kills at slot messages ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch, holdfast, holdfast.api
from holdfast.engine.client import EngineClient
slot_filled, verified = EngineClient.slot_filled, EngineClient.staging_verified

def save(root, who, kind, at):
    def kill(client):
        os.kill(os.getpid() if who == "trainer" else client.pid, signal.SIGKILL)

    def filled(client, attempt, pieces):
        if kind == "before" and pieces == at:
            kill(client)
        slot_filled(client, attempt, pieces)
        if kind == "after" and pieces == at:
            kill(client)

    def say_verified(client, attempt):
        if kind == "unverified":
            kill(client)
        verified(client, attempt)
        if kind == "verified":
            kill(client)

    EngineClient.slot_filled, EngineClient.staging_verified = filled, say_verified
    state = {"w": torch.arange(11 << 20, dtype=torch.float32)}
    try:
        holdfast.save(state, root + "/one")
    except holdfast.HoldfastError as error:
        assert "EngineDied" in repr(error) + repr(error.__cause__), repr(error)
        EngineClient.slot_filled, EngineClient.staging_verified = slot_filled, verified
        holdfast.save(state, root + "/two")

root, who, *cases = sys.argv[1:]
for case in cases:  # each in a child of its own, that need not import torch again
    home = f"{root}/{case}"
    os.mkdir(home)
    if (child := os.fork()) == 0:
        try:
            save(home, who, case.partition("-")[0], int(case.partition("-")[2]))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    print(case, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
CASES = ("before-1", "after-1", "before-10", "after-11", "after-12", "unverified-0", "verified-0")


@pytest.mark.parametrize("who", ["trainer", "engine"])
def test_a_kill_at_a_slot_message_leaves_nothing_visible_or_all_of_it(tmp_path: Path, who: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), who, *CASES], capture_output=True, text=True, timeout=110
    )
    status = -signal.SIGKILL if who == "trainer" else 0
    assert done.stdout.splitlines() == [f"{case} {status}" for case in CASES], done.stderr
    expected = torch.arange(11 << 20, dtype=torch.float32)
    for case in CASES:
        root = tmp_path / case
        is_verified = case == "verified-0"
        assert not (root / "one").exists() or is_verified
        if who == "trainer" and not is_verified:
            assert not list(root.glob(".one.*/rank-*.report")), "what was not verified is never rolled forward"
        if who == "engine" and not is_verified:
            assert (root / "two").exists()
        for name in ("one", "two"):
            if (root / name).exists():
                assert torch.equal(holdfast.open(root / name).read("w"), expected)
