"""What somebody who means harm could put into a checkpoint, or beside it; each case once was, or nearly was, a way in.

The fuzzer (tests/fuzz) looks for more of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import stat
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

import holdfast
from holdfast.errors import CheckpointCorrupt, HoldfastError, StorageError
from holdfast.format import manifest as m
from holdfast.format.dcp_metadata_reader import read_metadata
from holdfast.format.objects import ObjectPayload, load_object, object_capacity, render_object
from holdfast.format.sealed import seal, xxh3_128
from holdfast.storage.locks import RootLock

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_pickle(opcodes: bytes) -> Any:
    payload = ObjectPayload(opcodes, ())
    return load_object(render_object(payload, object_capacity(payload)), name="x", path="p")


# pickles ---------------------------------------------------------------------------------------------------------


def test_slices_are_not_nested() -> None:
    """A million of them, one in the other, would overflow the stack as they are released."""
    nested = b"\x80\x02" + b"cbuiltins\nslice\nq\x00" + b"h\x00" * 50 + b"N" + b"NN\x87R" * 50 + b"0."
    with pytest.raises(CheckpointCorrupt, match="a slice is"):
        load_pickle(nested)
    assert load_pickle(pickle.dumps(slice(1, None, 2), 2)) == slice(1, None, 2)


DEEP = """
import sys
from collections import defaultdict, deque
from holdfast.format.pickles import PickleRefused, Vocabulary, read_pickle

names = {"collections.deque": deque, "collections.defaultdict": defaultdict}
vocabulary = Vocabulary(names, {deque: deque, defaultdict: defaultdict})
deep, number = 300_000, 0
for end in (b".", b"\\xff"):
    for kind, put in ((b"deque", (b"", b"a")), (b"defaultdict", (b"K\\x00", b"s"))):
        made = b"h\\x00)R" + put[0]
        stream = b"\\x80\\x02ccollections\\n" + kind + b"\\nq\\x000" + made * deep + b"N" + put[1] * deep + end
        try:
            read_pickle(stream, vocabulary)
        except PickleRefused as error:
            number += 1
print(number)
"""


def test_containers_that_python_releases_one_inside_the_other_are_not_nested() -> None:
    """A deque in a deque, and so on, would overflow the stack as they are released, also by an error further on."""
    ended = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stdout) == (0, "4\n"), ended.stderr[-1000:]
    cyclic: deque[Any] = deque(range(3000))
    cyclic.append(deque([cyclic]))
    assert load_pickle(pickle.dumps(cyclic, 2))[-1][0][0] == 0


def test_sets_that_are_equal_only_after_ages_are_no_keys() -> None:
    """Two frozensets of one structure, not shared: comparing them doubles with each level."""

    def nested(first: int) -> bytes:
        stream = b"(K\x00\x91\x94"
        for level in range(first, first + 60):
            known = b"h%c" % level
            stream += b"0(" + known + b"(" + known + b"\x91\x91\x94"
        return stream

    began = time.monotonic()
    for end in (b"N%bNu.", b"N%bN\x91."):
        with pytest.raises(CheckpointCorrupt, match="more than 4096 members"):
            load_pickle(b"\x80\x04}(" + nested(0) + end % nested(61))
    assert time.monotonic() - began < 10


def colliding_tuples(count: int) -> list[tuple[int, int]]:
    """Pairs that all have one hash: Python's for tuples has no secret, and can be solved for the second member."""
    mask, one, two, five = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse_one, inverse_two = pow(one, -1, 1 << 64), pow(two, -1, 1 << 64)

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & mask

    def add(state: int, lane: int) -> int:
        return rotate((state + lane * two) & mask, 31) * one & mask

    wanted = add(add(five, 1), 1)
    found: list[tuple[int, int]] = []
    first = 0
    while len(found) < count:
        first += 1
        lane = (rotate(wanted * inverse_one & mask, 33) - add(five, first)) * inverse_two & mask
        second = lane - (1 << 64) if lane >> 63 else lane
        if abs(second) < (1 << 61) - 1 and second != -1:
            found.append((first, second))
    return found


def test_keys_that_all_have_one_hash_are_refused_in_time() -> None:
    keys = colliding_tuples(100_000)
    assert len({hash(key) for key in keys}) == 1
    pair = b"\x8a\x08%b\x8a\x08%b\x86"
    packed = [pair % tuple(part.to_bytes(8, "little", signed=True) for part in key) for key in keys]
    began = time.monotonic()
    for stream in (
        b"\x80\x02}(" + b"".join(key + b"N" for key in packed) + b"u.",
        b"\x80\x02}" + b"".join(key + b"Ns" for key in packed) + b".",
        b"\x80\x04\x8f(" + b"".join(packed) + b"\x90.",
        b"\x80\x04(" + b"".join(packed) + b"\x91.",
        b"\x80\x02cbuiltins\nset\n](" + b"".join(packed) + b"e\x85R.",
    ):
        with pytest.raises(CheckpointCorrupt, match="same hash"):
            load_pickle(stream)
    assert time.monotonic() - began < 20, "compared with one another"
    whole = b"".join(b"\x8a\x0b" + (n * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for n in range(1000))
    with pytest.raises(CheckpointCorrupt, match="same hash"):
        load_pickle(b"\x80\x02}(" + whole + b"u.")
    plain: dict[Any, Any] = dict.fromkeys(range(5000)) | {float(n) + 0.5: 1 for n in range(5000)}
    plain |= {(n, str(n)): 0 for n in range(5000)}
    assert load_pickle(pickle.dumps(plain, 2)) == plain


def stock(tmp_path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def edited(path: Path, edit: Any) -> None:
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place(metadata: Metadata, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize("number", [1 << 63, 1 << 20_000], ids=["64 bits", "six thousand digits"])
def test_offsets_past_any_file_are_refused(number: int, tmp_path: Path) -> None:
    """Python refuses to print a number of so many digits, with an error that is not ours."""
    path = stock(tmp_path, {"w": torch.ones(4)})
    edited(path, lambda metadata: setattr(place(metadata, "w"), "offset", number))
    with pytest.raises(CheckpointCorrupt):
        holdfast.open(path)
    edited(path, lambda metadata: setattr(place(metadata, "w"), "offset", -number))
    with pytest.raises(CheckpointCorrupt):
        holdfast.open(path)


def test_a_claimed_shape_takes_no_memory(tmp_path: Path) -> None:
    path = stock(tmp_path, {"w": torch.ones(4)})
    for size in (1 << 31, 1 << 40, 1 << 62):

        def claim(metadata: Metadata, size: int = size) -> None:
            entry = metadata.state_dict_metadata["w"]
            entry.size = torch.Size([size])
            entry.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))]

        edited(path, claim)
        with pytest.raises(CheckpointCorrupt, match="w"):
            holdfast.open(path).read("w")


class Kept:
    """Has a state of its own, with a list in it."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"items": [{"x": 1}, {"x": 2}]}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.value = value


@pytest.mark.parametrize("index", [10**8, 10**15, -1])
def test_a_list_is_not_made_as_long_as_a_name_claims(index: int, tmp_path: Path) -> None:
    path = stock(tmp_path, {"kept": Kept()})
    before, after = "kept.items.1.x", f"kept.items.{index}.x"

    def rename(metadata: Metadata) -> None:
        metadata.planner_data[after] = ("kept", "items", index, "x")
        metadata.state_dict_metadata[after] = metadata.state_dict_metadata.pop(before)
        metadata.storage_data = {
            dataclasses.replace(place, fqn=after if place.fqn == before else place.fqn): info
            for place, info in metadata.storage_data.items()
        }

    edited(path, rename)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt, match=f"a list with item {index}"):
            holdfast.load({"kept": Kept()}, path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_record_is_not_unpacked(tmp_path: Path) -> None:
    """Half a gigabyte of zeros in half a megabyte."""
    path = stock(tmp_path, {"w": torch.ones(300_000)})
    (file,) = path.glob("*.distcp")
    record = path / "unpacked"
    file.rename(record)
    with zipfile.ZipFile(record) as before, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in before.infolist():
            packed.writestr(entry.filename, before.read(entry))
        packed.writestr("archive/filler", os.urandom(1 << 21))
    record.unlink()
    edited(path, lambda metadata: setattr(place(metadata, "w"), "length", file.stat().st_size))
    with pytest.raises(CheckpointCorrupt, match="compressed"):
        holdfast.open(path).read("w")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "a\0b", "..\\outside", "c:x", ""])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    path = stock(tmp_path, {"w": torch.ones(4)})
    (tmp_path / "outside").write_bytes(bytes(4096))
    edited(path, lambda metadata: setattr(place(metadata, "w"), "relative_path", name))
    with pytest.raises(CheckpointCorrupt, match="isn't a file inside"):
        read_metadata((path / ".metadata").read_bytes(), path="x")
    with pytest.raises(CheckpointCorrupt):
        holdfast.open(path)


def test_links_are_not_followed_in_the_middle_of_a_name(tmp_path: Path) -> None:
    path = stock(tmp_path, {"w": torch.ones(4)})
    (file,) = path.glob("*.distcp")
    (tmp_path / "elsewhere").mkdir()
    file.rename(tmp_path / "elsewhere" / file.name)
    (path / "way-out").symlink_to(tmp_path / "elsewhere")
    edited(path, lambda metadata: setattr(place(metadata, "w"), "relative_path", f"way-out/{file.name}"))
    with pytest.raises(CheckpointCorrupt, match="link"):
        holdfast.open(path).read("w")


# manifests and reports -------------------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.arange(1000.0), "n": 5}, tmp_path / "ours", step=1)
    return tmp_path / "ours"


def put_report(path: Path, **changes: Any) -> None:
    """A report that says something else, with every digest right."""
    report = m.decode_report((path / "rank-00000.report").read_bytes(), path="x")
    data = m.encode_report(m.msgspec.structs.replace(report, **changes))
    manifest = m.decode_manifest((path / "holdfast.json").read_bytes(), path="x")
    line = m.msgspec.structs.replace(manifest.reports[0], size=len(data), digest=xxh3_128(data))
    (path / "rank-00000.report").write_bytes(data)
    (path / "holdfast.json").write_bytes(m.encode_manifest(m.msgspec.structs.replace(manifest, reports=(line,))))


@pytest.mark.parametrize(
    "name", ["holdfast.json", ".metadata", ".plan", "rank-00000.report", "../x", "x/y", "\ud800", "é" * 200, "x" * 256]
)
def test_a_report_covers_data_files_of_its_own_only(name: str, ours: Path) -> None:
    report = m.decode_report((ours / "rank-00000.report").read_bytes(), path="x")
    try:
        put_report(ours, files=(m.msgspec.structs.replace(report.files[0], name=name), *report.files[1:]))
    except HoldfastError:
        return  # can't even be written
    checkpoint = holdfast.open(ours)
    with pytest.raises(CheckpointCorrupt, match="report"):
        checkpoint.read("w")
    assert not checkpoint.verify().ok


def test_a_report_of_another_attempt_is_refused(ours: Path) -> None:
    put_report(ours, attempt="0123456789ab")
    with pytest.raises(CheckpointCorrupt, match="0123456789ab"):
        holdfast.open(ours).read("w")


def test_sizes_that_are_only_claimed_take_no_memory(ours: Path) -> None:
    """A report that says terabytes, of files that have some kilobytes."""
    claimed = 1 << 42
    report = m.decode_report((ours / "rank-00000.report").read_bytes(), path="x")
    index = m.read_index(report, path="x")
    tensor = index.tensors[0]
    large = m.msgspec.structs.replace(
        tensor,
        shape=(claimed // 8,),
        sizes=(claimed // 8,),
        offsets=(0,),
        nbytes=claimed // 2,
        record_end=tensor.payload_offset + claimed // 2,
    )
    kept = m.msgspec.structs.replace(index.objects[0], offset=0, capacity=claimed)
    files = tuple(
        m.msgspec.structs.replace(file, size=claimed, extents=bytes(8 * (claimed >> 20))) for file in report.files
    )
    put_report(
        ours, files=files, index=m.encode_index(m.msgspec.structs.replace(index, tensors=(large,), objects=(kept,)))
    )
    checkpoint = holdfast.open(ours)
    tracemalloc.start()
    try:
        for read in (
            lambda: checkpoint.read("w"),
            lambda: checkpoint.read("w", slice(0, 10)),
            lambda: checkpoint.objects[kept.name],
            lambda: checkpoint.map("w"),
        ):
            with pytest.raises(CheckpointCorrupt, match=re.escape(f"committed as a file of {claimed}")):
                read()
        assert not checkpoint.verify().ok
        assert tracemalloc.get_traced_memory()[1] < 400 << 20  # the report itself is 64 MiB of checksums
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(1 << 62, 1 << 62, 0), (0, 1 << 63), (1,) * 5000], ids=["product", "int64", "many"])
def test_shapes_that_nothing_has_are_refused(shape: tuple[int, ...], ours: Path) -> None:
    report = m.decode_report((ours / "rank-00000.report").read_bytes(), path="x")
    index = m.read_index(report, path="x")
    nothing = m.msgspec.structs.replace(
        index.tensors[0], shape=shape, sizes=(0,) * len(shape), offsets=(0,) * len(shape), nbytes=0
    )
    put_report(ours, index=m.encode_index(m.msgspec.structs.replace(index, tensors=(nothing,))))
    with pytest.raises(CheckpointCorrupt, match="no tensor has the shape"):
        holdfast.open(ours).tensors["w"]


def test_a_seal_says_nothing_of_what_is_inside() -> None:
    for content in (b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(CheckpointCorrupt):
            m.decode_report(seal(m._REPORT_MAGIC, m.FORMAT, content), path="x")


# a shared machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "file_mode", "dir_mode"), [(0o077, 0o600, 0o700), (0o027, 0o640, 0o750)])
def test_what_is_written_follows_the_umask(umask: int, file_mode: int, dir_mode: int, tmp_path: Path) -> None:
    elsewhere, tmp_path = tmp_path / "elsewhere", tmp_path / "here"
    tmp_path.mkdir()
    before = os.umask(0o022)
    other = holdfast.CheckpointManager(elsewhere, {"w": torch.ones(4)})  # starts the engine of the process
    other.save(1).result()
    os.umask(umask)
    try:
        with other, holdfast.CheckpointManager(tmp_path / "root", {"w": torch.ones(4), "n": 1}) as manager:
            handle = manager.save(1)
            modes = {}
            while not handle.done():  # what is hidden and on its way as well
                with contextlib.suppress(FileNotFoundError):  # renamed, or removed, as one looks
                    for path in tmp_path.rglob("*"):
                        modes[path.name] = path.lstat().st_mode
            handle.result()
            manager.pin(1)
    finally:
        os.umask(before)
    modes |= {str(path): path.lstat().st_mode for path in tmp_path.rglob("*")}
    assert {stat.S_IMODE(mode) for mode in modes.values() if stat.S_ISREG(mode)} == {file_mode}
    assert {stat.S_IMODE(mode) for mode in modes.values() if stat.S_ISDIR(mode)} == {dir_mode}


def named_sockets() -> set[str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7}


def test_a_save_leaves_nothing_where_others_look(tmp_path: Path) -> None:
    """No socket with a name, no file in a temporary directory or in /dev/shm; attempts have names nobody can guess."""
    places = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    before = [{path.name for path in place.iterdir()} for place in places if place.is_dir()]
    named = named_sockets()  # of other jobs
    attempts = set()
    with holdfast.CheckpointManager(tmp_path / "root", {"w": torch.ones(4)}) as manager:
        for step in (1, 2, 3):
            handle = manager.save(step)
            handle.result()
            attempts.add(handle.attempt)
        assert not [name for name in named_sockets() - named if "holdfast" in name]
    after = [{path.name for path in place.iterdir()} for place in places if place.is_dir()]
    assert not [name for was, now in zip(before, after, strict=True) for name in now - was if "holdfast" in name]
    assert len(attempts) == 3
    assert all(re.fullmatch("[0-9a-f]{12}", attempt or "") for attempt in attempts)


def test_a_lock_file_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "root" / ".holdfast").mkdir(parents=True)
    for put in (os.link, os.symlink):
        put(mine, tmp_path / "root" / ".holdfast" / "lock")
        with pytest.raises(StorageError, match="lock"):
            RootLock.acquire(str(tmp_path / "root"))
        put(mine, tmp_path / ".x.lock")
        with pytest.raises(StorageError, match="lock"):
            holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
        assert mine.read_text() == "precious"
        (tmp_path / "root" / ".holdfast" / "lock").unlink()
        (tmp_path / ".x.lock").unlink()
    (tmp_path / "root" / ".holdfast").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / ".holdfast").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"\.holdfast"):
        RootLock.acquire(str(tmp_path / "root"))
    assert not list((tmp_path / "elsewhere").iterdir())
