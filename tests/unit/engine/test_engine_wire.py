"""Frames and descriptors: however the stream is cut, messages keep their descriptors, and none leaks."""

import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import messages
from holdfast.engine.wire import (
    MAX_FRAME_BYTES,
    FrameError,
    Inbox,
    Outbox,
    ToEngine,
    ToTrainer,
    close_fds,
    encode,
    send,
)

PLAN = messages.AddPlan(3, (messages.FileRow("a", 4096, 0),), b"\1" * 80, b"\2" * 80, b"index" * 1000)
TO_ENGINE = [
    PLAN,
    messages.StagingVerified("t1"),
    messages.StagingVerified("t1", 2),
    messages.Cancel("t1", 2),
    messages.DropPlan(3),
    messages.DropImage(1),
    messages.Shutdown(),
]


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    left.settimeout(0)
    right.settimeout(0)
    yield left, right
    left.close()
    right.close()


def drain(inbox):
    got = []
    while True:
        received = inbox.receive()
        if not received:
            return got, received is None
        got += received


def test_every_message_comes_back_equal(pair):
    left, right = pair
    inbox = Inbox(right, ToEngine)
    for message in TO_ENGINE:
        send(left, message, timeout_s=1)
    assert [item.message for item in drain(inbox)[0]] == TO_ENGINE
    answers = [
        messages.EngineReady(1, "0"),
        messages.EngineBeat((messages.AttemptBeat("t", 5),)),
        messages.EngineBeat((messages.AttemptBeat("t", 5, "a turn"), messages.AttemptBeat("t", 6, "", 2))),
        messages.Persisted("t", 5, 0.5, True),
        messages.Reported("t", 5, "ab", 6),
        messages.Cancelled("t"),
        messages.AttemptFailed("t", None, "/p", "why"),
        messages.Removed("x", 13),
        messages.Notice("no such class"),
    ]
    outbox = Outbox(right)
    for message in answers:
        outbox.put(message)
    outbox.flush()
    assert len(outbox) == 0
    assert [item.message for item in drain(Inbox(left, ToTrainer))[0]] == answers


@given(st.lists(st.integers(min_value=1, max_value=400), min_size=1, max_size=60))
def test_frames_survive_any_cut(cuts):
    stream = b"".join(encode(message) for message in TO_ENGINE)
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(0)
        inbox = Inbox(right, ToEngine)
        got = []
        at = 0
        for cut in [*cuts, len(stream)]:
            left.sendall(stream[at : at + cut])
            at += cut
            got += drain(inbox)[0]
        assert [item.message for item in got] == TO_ENGINE
        left.shutdown(socket.SHUT_WR)
        assert inbox.receive() is None


def test_descriptors_go_to_their_frames(pair, tmp_path, descriptors):
    left, right = pair
    inbox = Inbox(right, ToEngine)
    before = descriptors()
    expected = []
    for number in range(5):
        fd = os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR)
        send(left, messages.Cancel("between"), timeout_s=1)
        send(left, messages.AddImage(number, 4096), [fd], timeout_s=1)
        os.close(fd)
        expected.append(os.stat(tmp_path / str(number)).st_ino)
    got, _ = drain(inbox)
    inodes = []
    for item in got:
        if isinstance(item.message, messages.AddImage):
            inodes.append(os.fstat(item.fds[0]).st_ino)
            assert not os.get_inheritable(item.fds[0])
        else:
            assert item.fds == ()
        close_fds(item.fds)
    assert inodes == expected
    assert not descriptors() - before


def test_a_large_frame_with_a_descriptor_arrives_in_parts(pair, tmp_path):
    left, right = pair
    frame = encode(messages.Remove("x" * 200_000))
    with open(tmp_path / "f", "w") as file:
        socket.send_fds(left, [frame[:1]], [file.fileno()])
    inbox = Inbox(right, ToEngine)
    assert inbox.receive() == []
    left.sendall(frame[1:])
    got, _ = drain(inbox)
    assert len(got) == 1
    assert os.fstat(got[0].fds[0]).st_ino == os.stat(tmp_path / "f").st_ino
    close_fds(got[0].fds)


@pytest.mark.parametrize(
    ("frame", "nfds", "says"),
    [
        (encode(messages.Cancel("t")), 1, "came with 1 descriptors"),
        (encode(messages.AddImage(1, 4096)), 0, "came with 0 descriptors"),
        (encode(messages.AddImage(1, 4096)), 3, "more than 1 descriptors"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", 1, "does not decode"),
        (struct.pack("<I", MAX_FRAME_BYTES + 1), 1, "the limit is"),
        (encode(messages.EngineBeat((messages.AttemptBeat("wrong way", 1),))), 1, "does not decode"),
    ],
)
def test_a_bad_frame_breaks_the_stream_and_leaks_nothing(pair, tmp_path, frame, nfds, says, descriptors):
    left, right = pair
    inbox = Inbox(right, ToEngine)
    with open(tmp_path / "f", "w") as file:
        if nfds:
            socket.send_fds(left, [frame], [file.fileno()] * nfds)
        else:
            left.sendall(frame)
    before = descriptors()
    with pytest.raises(FrameError, match=says):
        drain(inbox)
    assert not descriptors() - before
    with pytest.raises(FrameError):
        inbox.receive()


def test_a_descriptor_in_the_middle_of_a_frame_is_refused_and_closed(pair, tmp_path, descriptors):
    left, right = pair
    inbox = Inbox(right, ToEngine)
    frame = encode(messages.AddImage(1, 4096))
    left.sendall(frame[:3])
    assert inbox.receive() == []
    with open(tmp_path / "f", "w") as file:
        socket.send_fds(left, [frame[3:]], [file.fileno()])
    before = descriptors()
    with pytest.raises(FrameError, match="middle"):
        inbox.receive()
    assert not descriptors() - before


def test_a_descriptor_of_a_frame_that_never_ends_is_closed(pair, tmp_path, descriptors):
    left, right = pair
    inbox = Inbox(right, ToEngine)
    with open(tmp_path / "f", "w") as file:
        socket.send_fds(left, [encode(messages.AddImage(1, 4096))[:6]], [file.fileno()])
    before = descriptors()
    assert inbox.receive() == []
    assert len(descriptors() - before) == 1
    left.shutdown(socket.SHUT_WR)
    assert inbox.receive() is None
    assert not descriptors() - before


@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused_or_waits_for_more(descriptors, data, with_fd):
    before = descriptors(collects=False)  # a collection for each of many inputs takes most of a minute
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(0)
        if data and with_fd:
            socket.send_fds(left, [data], [0])
        else:
            left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        inbox = Inbox(right, ToEngine)
        with suppress(FrameError):
            got, _ = drain(inbox)
            for item in got:
                close_fds(item.fds)
        inbox.close()
    assert not descriptors(collects=False) - before


def test_sending_has_a_deadline_if_the_other_end_does_not_read(pair):
    left, _ = pair
    with pytest.raises(TimeoutError, match="AddPlan was not received within"):
        send(left, messages.AddPlan(1, (), b"", b"", bytes(4 << 20)), timeout_s=0.05)


def test_an_outbox_never_blocks_and_keeps_order(pair):
    left, right = pair
    outbox = Outbox(left)
    sent = [messages.AttemptFailed("t", None, "/p", str(number) * 50_000) for number in range(10)]
    for message in sent:
        outbox.put(message)
    outbox.flush()
    assert len(outbox) > 0
    inbox = Inbox(right, ToTrainer)
    got = []
    while len(outbox) or len(got) < len(sent):
        got += drain(inbox)[0]
        outbox.flush()
    assert [item.message for item in got] == sent


@pytest.mark.parametrize("through", ["send", "outbox"])
def test_writing_to_a_dead_engine_does_not_kill_the_trainer(through):
    """Jobs that set SIGPIPE to its default, for example for `head` in a pipe, survive their engine's death."""
    code = (
        "import signal, socket\n"
        "from holdfast.engine import messages, wire\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "ours, theirs = socket.socketpair(); ours.settimeout(0); theirs.close()\n"
        "outbox = wire.Outbox(ours); outbox.put(messages.Shutdown())\n"
        f"call = outbox.flush if {through == 'outbox'} else lambda: wire.send(ours, messages.Shutdown(), timeout_s=1)\n"
        "try: call()\n"
        "except BrokenPipeError: print('told')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr
