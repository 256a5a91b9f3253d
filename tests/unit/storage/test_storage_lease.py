"""A lease tells life from death: by its lock on this host, by its counter from elsewhere."""

import errno
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StorageError
from holdfast.storage import leases as lease
from holdfast.storage.leases import RECORD_BYTES, LeaseRecord, decode_record, encode_record, hold, lease_name, observe


@pytest.fixture
def directory(tmp_path, descriptors):
    fd = os.open(tmp_path, os.O_RDONLY)
    before = descriptors()
    yield fd
    assert not descriptors() - before
    os.close(fd)


@given(
    st.builds(
        LeaseRecord,
        pid=st.integers(0, 2**31),
        host=st.text("abcdefgh.-0123", max_size=255),
        boot_id=st.just("0" * 36),
        rank=st.integers(0, 2**31),
        counter=st.integers(0, 2**62),
    )
)
def test_records_come_back_and_keep_their_size(record):
    data = encode_record(record)
    assert len(data) == RECORD_BYTES
    assert decode_record(data) == record


@given(st.binary(max_size=RECORD_BYTES))
def test_noise_is_no_record(data):
    assert decode_record(b"\xff" + data) is None


def test_a_held_lease_is_seen_and_beats(directory, tmp_path):
    held = hold(directory, lease_name(7), lease.new_record(7))
    assert os.listdir(tmp_path) == ["lease-00007"]
    state = observe(directory, lease_name(7))
    assert state.flock_free is False
    assert state.record == lease.new_record(7)
    held.beat()
    assert observe(str(tmp_path), lease_name(7)).record.counter == 1
    held.release()
    held.release()
    assert os.listdir(tmp_path) == []
    assert observe(directory, lease_name(7)) is None


def test_a_lease_left_behind_is_free(tmp_path):
    script = (
        "import os, sys; from holdfast.storage import leases as lease\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "held = lease.hold(fd, 'lease-00000', lease.new_record(0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=False, env={**os.environ, **_path()})
    state = observe(str(tmp_path), "lease-00000")
    assert state.flock_free is True
    assert state.record.rank == 0


def test_a_free_lock_of_another_host_says_nothing(directory, tmp_path):
    record = msgspec.structs.replace(lease.new_record(0), boot_id="another")
    (tmp_path / "lease-00000").write_bytes(encode_record(record))
    assert observe(directory, "lease-00000").flock_free is None
    (tmp_path / "lease-00000").write_bytes(b"torn")
    state = observe(directory, "lease-00000")
    assert state.flock_free is None
    assert state.record is None


def test_a_lease_that_can_not_be_made_or_read_names_its_path(directory, tmp_path):
    (tmp_path / ".lease-00000.new").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        hold(directory, "lease-00000", lease.new_record(0))
    assert caught.value.errno == errno.EEXIST
    assert caught.value.path == str(tmp_path / "lease-00000")
    (tmp_path / "lease-00001").symlink_to("x")
    with pytest.raises(StorageError) as caught:
        observe(directory, "lease-00001")
    assert caught.value.errno == errno.ELOOP


def test_a_link_is_not_followed_and_a_pipe_does_not_block(directory, tmp_path):
    os.mkfifo(tmp_path / "lease-00000")
    with pytest.raises(StorageError):
        observe(directory, "lease-00000")


def test_releasing_never_raises(directory, tmp_path):
    held = hold(directory, "lease-00000", lease.new_record(0))
    os.unlink(tmp_path / "lease-00000")
    held.release()


def _path():
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_lease_outlives_the_descriptor_it_was_made_through(tmp_path):
    """Its number may mean another directory by the time of a late release: that one's entries are not touched."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / lease_name(7)).write_text("precious")
    fd = os.open(tmp_path / "mine", os.O_RDONLY)
    held = hold(fd, lease_name(7), lease.new_record(7))
    os.close(fd)
    reused = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(reused, fd)
    held.beat()
    held.release()
    assert os.listdir(tmp_path / "mine") == []
    assert os.listdir(tmp_path / "other") == [lease_name(7)]
    for number in {fd, reused}:
        os.close(number)
