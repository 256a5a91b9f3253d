"""Reading zip archives that claim what isn't there."""

import io
import struct
import zipfile

import pytest

from holdfast.format.torch_record import MalformedRecord, padding_bytes, read_entries


def archive(compression=zipfile.ZIP_STORED, names=("a/data.pkl", "a/data/0")):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name in names:
            file.writestr(name, name.encode() * 10)
    return bytearray(buffer.getvalue())


def test_entries_are_views_by_their_names_without_the_root():
    data = archive()
    entries = read_entries(memoryview(data))
    assert {name: bytes(view) for name, view in entries.items()} == {
        "data.pkl": b"a/data.pkl" * 10,
        "data/0": b"a/data/0" * 10,
    }


def test_every_cut_is_refused():
    data = bytes(archive())
    for length in range(len(data)):
        with pytest.raises(MalformedRecord):
            read_entries(memoryview(data[:length]))


def test_compressed_entries_are_refused():
    with pytest.raises(MalformedRecord, match="compressed"):
        read_entries(memoryview(archive(zipfile.ZIP_DEFLATED)))


def test_an_entry_that_is_there_twice_is_refused():
    with pytest.warns(UserWarning, match="Duplicate"):
        data = archive(names=("a/x", "a/x"))
    with pytest.raises(MalformedRecord, match="twice"):
        read_entries(memoryview(data))


def test_a_size_past_the_record_is_refused():
    data = archive()
    central = data.index(b"PK\1\2")
    data[central + 20 : central + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    with pytest.raises(MalformedRecord, match="past the record"):
        read_entries(memoryview(data))


def test_a_saturated_size_without_a_wide_one_is_refused():
    data = archive()
    central = data.index(b"PK\1\2")
    data[central + 20 : central + 28] = b"\xff" * 8
    with pytest.raises(MalformedRecord, match="zip64"):
        read_entries(memoryview(data))


def test_a_directory_of_more_entries_than_bytes_is_refused():
    data = archive()
    data[-14:-10] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(MalformedRecord, match="after 2 of 60000"):
        read_entries(memoryview(data))


def test_padding_reaches_the_alignment_and_holds_an_extra_field():
    for end in range(200):
        pad = padding_bytes(end, 64)
        assert (end + pad) % 64 == 0
        assert pad == 0 or 4 <= pad < 68
