"""What is fuzzed, and what must hold: a process that reads made-up bytes again and again, guided by coverage.

    python targets.py RUNS SEED DIRECTORY [--only KIND] [--plain]

An input is a byte that chooses what is read, and the content of a file; seals and digests are made right again around
that, since anybody can make them. Guided by atheris where it is installed, else (``--plain``) by chance.

Of each input: only errors of Holdfast's (of the low-level readers: theirs), nothing run, imported or written, nothing
opened outside the checkpoint, no more memory than there is in reserve, an end within seconds. An input that breaks this
is left in DIRECTORY as ``crash-...`` and ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["holdfast"]) if atheris else contextlib.nullcontext():
    import holdfast
    from holdfast.catalog.retention import decode_lineage
    from holdfast.commit.publish import find_gap
    from holdfast.errors import HoldfastError
    from holdfast.format import manifest as m
    from holdfast.format.dcp_metadata_reader import parse_metadata
    from holdfast.format.manifest import FilePart, gap_in, join
    from holdfast.format.objects import dump_object, object_capacity, read_object, render_object
    from holdfast.format.pickles import PickleRefused
    from holdfast.format.sealed import seal, xxh3_128
    from holdfast.format.torch_record import MalformedRecord
    from holdfast.loader.checkpoint import Checkpoint, verify_source
    from holdfast.loader.sources.open import open_source
    from holdfast.loader.sources.stock_dcp import find_foreign

import msgspec
import numpy as np
import torch
import xxhash

RESERVE_BYTES = 1 << 30
INPUT_BYTES_MAX = 1 << 16
INPUT_S_MAX = 20
READ_BYTES_MAX = 1 << 20
NOTED_EVERY = 50
BY_CHANCE = 24  # inputs of each kind before guidance, which may find one kind dull


class Broken(BaseException):
    """A property does not hold. Not an `Exception`: nothing on the way may take it for its own."""


# nothing is run ---------------------------------------------------------------------------------------------------

FORBIDDEN = ("exec", "compile", "import", "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pickle.find_class")
HARMLESS = {"os.listdir", "os.scandir"}
_armed = False
_breach: list[str] = []
_inside = ""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _armed:
        return
    if event == "open":
        path, _, flags = arguments
        written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        outside = isinstance(path, (str, bytes)) and os.path.isabs(path) and not os.fsdecode(path).startswith(_inside)
        if written or outside:
            _breach.append(f"{event} {arguments!r:.300}")
    elif event.startswith(FORBIDDEN) and event not in HARMLESS:
        _breach.append(f"{event} {arguments!r:.300}")


@contextlib.contextmanager
def watched() -> Any:
    """Inside, whatever runs, imports, writes, or opens something elsewhere is noted, and raised at the end."""
    global _armed
    _breach.clear()
    _armed = True
    try:
        yield
    finally:
        _armed = False
    if _breach:
        raise Broken(_breach[0])


# the kinds of bytes -----------------------------------------------------------------------------------------------


def sealed_json(body: bytes) -> bytes:
    """A manifest whose digest is right, whatever it says."""
    body = body + b',\n  "digest": "'
    return body + xxh3_128(body).encode() + b'"\n}\n'


def body_of(manifest: bytes) -> bytes:
    return manifest[: manifest.rindex(b',\n  "digest"')]


def read_manifest(data: bytes) -> None:
    manifest = m.decode_manifest(sealed_json(data), path="x")
    decode_lineage(manifest.extra)
    m.attempt_in(data)


def read_report(data: bytes) -> None:
    report = m.decode_report(seal(m._REPORT_MAGIC, m.FORMAT, data), path="x")
    m.read_index(report, path="x")


def read_export_report(data: bytes) -> None:
    report = m.decode_report(seal(m._REPORT_MAGIC, m.EXPORT_FORMAT, data), path="x")
    m.read_index(report, path="x")
    with contextlib.suppress(ValueError):
        gap_in(join(report.files))


def read_index(data: bytes) -> None:
    m.decode_index(data, file_sizes=[1 << 20, 1 << 12], path="x")


def read_plan(data: bytes) -> None:
    m.decode_attempt_plan(seal(m._PLAN_MAGIC, m.FORMAT, data), path="x")


def read_export_plan(data: bytes) -> None:
    plan = m.decode_attempt_plan(seal(m._PLAN_MAGIC, m.EXPORT_FORMAT, data), path="x")
    find_gap(plan, [m.ManifestReport(rank, m.report_name(rank), 0, "", 0) for rank in range(plan.world)])


def read_metadata(data: bytes) -> None:
    with contextlib.suppress(PickleRefused):
        parse_metadata(data)


def read_record(data: bytes) -> None:
    with contextlib.suppress(PickleRefused, MalformedRecord):
        read_object(memoryview(data))


def read_unsealed(data: bytes) -> None:
    for decode in (m.decode_manifest, m.decode_report, m.decode_attempt_plan):
        with contextlib.suppress(HoldfastError):
            decode(data, path="x")


class Directory:
    """A checkpoint whose one small file is the input, with everything else adjusted to it; opened and read whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        state = {"w": torch.arange(64.0), "deep": {"e": torch.empty(0, 3)}, "n": {"epoch": 3, "a": np.arange(3)}}
        holdfast.save(state, path, step=1)
        self.manifest = (path / "holdfast.json").read_bytes()
        self.report = (path / "rank-00000.report").read_bytes()
        (path.parent / "outside").write_bytes(bytes(8192))
        (path / "way-out").symlink_to(path.parent)

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def with_report(self, data: bytes) -> None:
        report = seal(m._REPORT_MAGIC, m.FORMAT, data)
        document = json.loads(self.manifest)
        document["reports"][0].update(size=len(report), digest=xxh3_128(report))
        del document["digest"]
        lines = ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in document.items())
        self.put("rank-00000.report", report)
        self.put("holdfast.json", sealed_json(f"{{\n{lines}".encode()))
        with watched():
            self.read_all()

    def with_manifest(self, data: bytes) -> None:
        self.put("rank-00000.report", self.report)
        self.put("holdfast.json", sealed_json(data))
        with watched():
            self.read_all()

    def read_all(self) -> None:
        source = open_source(str(self.path))
        Checkpoint(source).verify()
        read_parts(Checkpoint(source))


class Export:
    """An export of two ranks, with the input for the report of the first; opened and verified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "a").write_bytes(bytes(EXPORTED[0].total))
        self.reports = [
            m.Report("a1b2", 1, rank, 2, (exported(part),), b"", m.encode_index(m.RankIndex((), ())))
            for rank, part in enumerate(EXPORTED)
        ]
        self.with_report(m.encode_report(self.reports[0])[8:-16])

    def with_report(self, data: bytes) -> None:
        reports = [seal(m._REPORT_MAGIC, m.EXPORT_FORMAT, data), m.encode_report(self.reports[1])]
        lines = []
        for rank, report in enumerate(reports):
            (self.path / m.report_name(rank)).write_bytes(report)
            lines.append(m.ManifestReport(rank, m.report_name(rank), len(report), xxh3_128(report), 0))
        manifest = m.Manifest(2, "x", "a1b2", 1, 2, "now", {}, False, {}, tuple(lines), (), kind="export")
        (self.path / "holdfast.json").write_bytes(m.encode_manifest(manifest))
        with watched():
            verify_source(open_source(str(self.path), exports=True))


EXPORTED = [FilePart("a", 0, 1 << 20, (1 << 20) + 5), FilePart("a", 1 << 20, 5, (1 << 20) + 5)]


def exported(part: FilePart) -> m.ReportFile:
    sums = xxhash.xxh3_64_digest(bytes(part.size))[::-1]
    return m.ReportFile(part.name, part.size, sums, part.offset, part.total)


class StockDirectory:
    """What stock DCP would have written, with the input for its ``.metadata``."""

    def __init__(self, path: Path) -> None:
        import warnings

        import torch.distributed.checkpoint as dcp

        self.path = path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": torch.arange(64.0), "n": {"epoch": 3}}, checkpoint_id=path, no_dist=True)
        self.metadata = (path / ".metadata").read_bytes()
        (path / "way-out").symlink_to(path.parent)
        (path.parent / "outside").write_bytes(bytes(8192))

    def with_metadata(self, data: bytes) -> None:
        (self.path / ".metadata").write_bytes(data)
        with watched():
            source = find_foreign(str(self.path))
            assert source is not None
            Checkpoint(source).verify()
            read_parts(Checkpoint(source))


def read_parts(checkpoint: Checkpoint) -> None:
    for name, info in checkpoint.tensors.items():
        with contextlib.suppress(HoldfastError):
            read = checkpoint.read(name)
            if read.numel() * read.element_size() > READ_BYTES_MAX:
                raise Broken(f"{name} of {info} was read from a checkpoint of some kilobytes")
    for name in checkpoint.objects:
        with contextlib.suppress(HoldfastError):
            checkpoint.objects[name]


# corpora ----------------------------------------------------------------------------------------------------------


def objects() -> list[bytes]:
    values = [
        {"epoch": 3, "names": ["a", (1, 2.5, None)], "b": b"xy", "s": {1, 2}, "f": frozenset({(1, 2)})},
        {"a": np.arange(5, dtype="<f4"), "u": np.array(["x", "yz"]), "n": np.float32(2)},
        [torch.arange(6).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.Size([1, 2]), torch.float16],
        [slice(1, None, 2), range(3), complex(1, 2), 1 << 70, bytearray(b"z"), torch.device("cpu")],
    ]
    found = []
    for value in values:
        payload = dump_object(value, name="x")
        found.append(render_object(payload, object_capacity(payload)))
        stream = io.BytesIO()
        torch.save(value, stream)
        found.append(stream.getvalue())
    return found


class Evil:
    """What a hostile pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/holdfast-was-owned",)


def pickles() -> list[bytes]:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    nested = b"\x80\x02" + b"]" * 2000 + b"a" * 1999 + b"."
    return [
        pickle.dumps(Evil(), 2),
        pickle.dumps(Evil(), 4),
        pickle.dumps(cyclic, 2),
        nested,
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of 8 EiB
        b"\x80\x02}(K\x01K\x02u.",
        b"\x80\x02cbuiltins\nslice\n(K\x01K\x02K\x03tR.",
    ]


def inside_record(data: bytes) -> bytes:
    """The pickle as a record."""
    from holdfast.format.objects import ObjectPayload

    payload = ObjectPayload(data, ())
    return render_object(payload, object_capacity(payload))


def kinds(place: Path) -> dict[str, tuple[Callable[[bytes], None], list[bytes]]]:
    """By name what reads an input, and inputs to begin with."""
    ours = Directory(place / "ours")
    stock = StockDirectory(place / "stock")
    whole = ours.report[8:-16]
    report = m.decode_report(ours.report, path="x")
    document = json.loads(ours.manifest)
    export = Export(place / "export")
    parts = [m.encode_report(report)[8:-16] for report in export.reports]
    plan = m.AttemptPlan(
        attempt=document["attempt"],
        name="x",
        step=1,
        world=1,
        planned=((("__0_0.distcp", 4096),),),
        manifest=m.Manifest(m.FORMAT, "x", document["attempt"], 1, 1, "now", {}, True, {}, (), ()),
    )
    skeleton = msgspec.structs.replace(plan.manifest, kind="export", format=m.EXPORT_FORMAT)
    export_plan = msgspec.structs.replace(plan, planned=((),), manifest=skeleton, parts=(tuple(EXPORTED),))
    paths = ("../outside", "/etc/passwd", "way-out/outside", "a\0b", "..\\outside", "x" * 300, "holdfast.json", ".", "")
    named = [
        whole.replace(b"\xac__0_0.distcp", bytes((0xA0 + len(path),)) + path.encode())
        for path in paths
        if len(path) < 32
    ]
    moved = [stock.metadata.replace(b"__0_0.distcp", path.encode()[:12].ljust(12, b"x")) for path in paths]
    metadata = [stock.metadata, (ours.path / ".metadata").read_bytes(), *moved]
    bodies = [body_of(ours.manifest), *(body_of(ours.manifest).replace(b".metadata", p.encode()) for p in paths)]
    return {
        "manifest": (read_manifest, bodies),
        "report": (read_report, [whole, *named]),
        "index": (read_index, [report.index]),
        "plan": (read_plan, [m.encode_attempt_plan(plan)[7:-16]]),
        "export-report": (read_export_report, parts),
        "export-plan": (read_export_plan, [m.encode_attempt_plan(export_plan)[8:-16]]),
        "export": (export.with_report, parts),
        "metadata": (read_metadata, [*metadata, *pickles()]),
        "object": (read_record, [*objects(), *map(inside_record, pickles())]),
        "unsealed": (read_unsealed, [ours.manifest, ours.report]),
        "directory-report": (ours.with_report, [whole, *named]),
        "directory-manifest": (ours.with_manifest, bodies),
        "stock-directory": (stock.with_metadata, [*metadata, *pickles()]),
    }


# running ----------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """What is claimed beyond the reserve can't be had: whoever asks for it fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + RESERVE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def check(read: Callable[[bytes], None], data: bytes) -> None:
    try:
        if getattr(read, "__self__", None) is None:
            with watched():
                read(data)
        else:
            read(data)
    except HoldfastError as error:
        str(error)


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """Without guidance: some bytes flipped, cut, doubled, or taken from another input."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                data[at : at + 8] = rng.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"\x80" + bytes(7)))
            case _:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                data[at:at] = other[start : start + rng.randrange(64)]
    return bytes(data)


class Run:
    """Inputs to check, each counted by its kind."""

    def __init__(self, place: Path, only: str | None) -> None:
        self.place = place
        self.kinds = {name: kind for name, kind in kinds(place).items() if only in (None, name)}
        self.names = sorted(self.kinds)
        self.counts = dict.fromkeys(self.names, 0)

    def corpus(self) -> list[bytes]:
        return [bytes((number,)) + data for number, name in enumerate(self.names) for data in self.kinds[name][1]]

    def one(self, data: bytes) -> None:
        if not data:
            return
        name = self.names[data[0] % len(self.names)]
        self.counts[name] += 1
        check(self.kinds[name][0], data[1:])
        if sum(self.counts.values()) % NOTED_EVERY == 0:  # the guided run ends without a word
            self.note()

    def checked(self, data: bytes) -> None:
        """`one` outside the guided run: what ends the process is left as ``crash-last``."""
        left = self.place / "crash-last"
        left.write_bytes(data)
        signal.alarm(INPUT_S_MAX)  # ends the process
        self.one(data)
        signal.alarm(0)
        left.unlink()

    def note(self) -> None:
        (self.place / "counts.json").write_text(json.dumps(self.counts))


def main(runs: int, seed: int, place: Path, *, only: str | None, guided: bool) -> None:
    global _inside
    _inside = str(place)
    run = Run(place, only)
    corpus = run.corpus()
    for data in corpus:  # what is imported on first use is imported now
        with contextlib.suppress(Broken):
            run.one(data)
    for data in corpus:
        run.checked(data)
    limit_memory()
    rng = random.Random(seed)
    for number, name in enumerate(run.names):
        for _ in range(BY_CHANCE):
            run.checked(bytes((number,)) + mutated(rng, run.kinds[name][1]))
    if guided:
        seeds = place / "corpus"
        seeds.mkdir()
        for number, data in enumerate(corpus):
            (seeds / str(number)).write_bytes(data)
        options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}"]
        options += ["-verbosity=0", f"-artifact_prefix={place}/", "-rss_limit_mb=4096", str(seeds)]
        atheris.Setup([sys.argv[0], *options], run.one)
        atheris.Fuzz()
    for _ in range(runs):
        run.checked(mutated(rng, corpus))
    run.note()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        only=sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else None,
        guided=atheris is not None and "--plain" not in sys.argv,
    )
