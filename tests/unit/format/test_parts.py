"""Parts of files: which there can be, whether they make up whole files, and how they lie in reports and plans."""

import random

import msgspec
import pytest

from holdfast.commit.publish import find_gap
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.manifest import (
    BLOCK_BYTES,
    EXPORT_FORMAT,
    EXTENT_BYTES,
    FORMAT,
    AttemptPlan,
    FilePart,
    Manifest,
    ManifestFile,
    ManifestReport,
    Report,
    ReportFile,
    decode_attempt_plan,
    decode_manifest,
    decode_report,
    encode_attempt_plan,
    encode_manifest,
    encode_report,
    gap_in,
    join,
    part_fault,
    parts_digest,
    parts_in,
    report_name,
    tiling_fault,
)
from holdfast.format.sealed import seal, xxh3_128
from holdfast.testing.parts import random_parts

MB = 1 << 20
SIZES = {"a": 5 * MB + 123, "b": 17, "c": 3 * MB, "d": MB, "e": 4095, "f": 0}
replace = msgspec.structs.replace


def every(parts):
    return [part for own in parts for part in own]


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (FilePart("a", 0, 10, 10), None),
        (FilePart("a", 0, 0, 0), None),
        (FilePart("a", MB, 2 * MB, 4 * MB), None),
        (FilePart("a", 3 * MB, 5, 3 * MB + 5), None),
        (FilePart("a", 0, 0, MB), "empty"),
        (FilePart("a", 4096, MB, 2 * MB), "multiple"),
        (FilePart("a", 0, 4096, 2 * MB), "multiple"),
        (FilePart("a", MB, 2 * MB, 2 * MB), "don't lie in"),
        (FilePart("a", -MB, MB, 2 * MB), "don't lie in"),
        (FilePart("a", 0, -1, 2 * MB), "don't lie in"),
    ],
)
def test_which_parts_there_can_be(part, fault):
    found = part_fault(part)
    assert found is None if fault is None else fault in found


@pytest.mark.parametrize("seed", range(20))
def test_parts_that_make_up_files_do(seed):
    parts = every(random_parts(SIZES, 4, seed=seed))
    assert {part.name for part in parts} == set(SIZES) - {"f"}
    assert tiling_fault(parts) is None
    assert tiling_fault([]) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_missing_or_there_twice_is_found(seed):
    chance = random.Random(seed)
    parts = every(random_parts(SIZES, 3, seed=seed))
    chosen = chance.choice(parts)
    rest = [part for part in parts if part != chosen]
    if chosen.is_whole:
        assert tiling_fault(rest) is None  # a file that nobody has heard of
    else:
        assert f"bytes {chosen.offset} to {chosen.end} of {chosen.name} are in no part" == tiling_fault(rest)
    assert "two parts" in tiling_fault([*parts, chosen])
    assert "said to have" in tiling_fault([*rest, replace(chosen, total=chosen.total + MB)]) or chosen.is_whole


def test_an_overlap_is_found_wherever_it_begins():
    first, second = FilePart("a", 0, 2 * MB, 3 * MB), FilePart("a", MB, 2 * MB, 3 * MB)
    assert tiling_fault([second, first]) == f"bytes {MB} to {2 * MB} of a are in two parts"
    assert "in two parts" in tiling_fault([first, FilePart("a", 0, MB, 3 * MB), FilePart("a", 2 * MB, MB, 3 * MB)])
    assert "twice" in tiling_fault([FilePart("f", 0, 0, 0)] * 2)


def test_a_digest_stands_for_parts_in_any_order():
    parts = every(random_parts(SIZES, 2))
    assert parts_digest(parts) == parts_digest(reversed(parts))
    assert parts_digest(parts) != parts_digest(parts[1:])
    assert parts_digest([]) == ""


def row(part, value=None):
    """A report's row of ``part``; its checksums say where in the file they belong."""
    first = part.offset // BLOCK_BYTES
    sums = b"".join((first + extent).to_bytes(8, "little") for extent in range(-(-part.size // BLOCK_BYTES)))
    return ReportFile(part.name, part.size, sums if value is None else value, part.offset, part.total)


@pytest.mark.parametrize("seed", range(10))
def test_reports_together_say_what_a_file_is(seed):
    rows = [row(part) for part in every(random_parts(SIZES, 4, seed=seed))]
    joined = join(rows)
    assert [(file.name, file.size) for file in sorted(joined, key=lambda file: file.name)] == [
        (name, size) for name, size in SIZES.items() if size
    ]
    assert gap_in(joined) is None
    for file in joined:
        assert file.extents == row(FilePart(file.name, 0, file.size, file.size)).extents
    lost = random.Random(seed).choice([found for found in rows if found.size < found.total])
    gapped = join([found for found in rows if found != lost])
    assert gap_in(gapped) == f"bytes {lost.offset} to {lost.offset + lost.size} of {lost.name} are in no part"
    for file in gapped:
        expected = row(FilePart(file.name, 0, file.size, file.size)).extents
        for at in range(0, file.size, BLOCK_BYTES):
            first = at // BLOCK_BYTES * 8
            known = not any(start <= at < end for start, end in file.gaps)
            assert file.extents[first : first + 8] == (expected[first : first + 8] if known else b"")


def test_no_memory_is_taken_by_what_a_report_says_of_a_size():
    part = row(FilePart("a", 1 << 60, MB, 1 << 62), bytes(range(8)))
    (joined,) = join([part])
    assert joined.gaps == ((0, 1 << 60), ((1 << 60) + MB, 1 << 62))
    first = (1 << 60) // BLOCK_BYTES * 8
    assert joined.extents[first : first + 8] == bytes(range(8))
    assert joined.extents[0:8] == b""


def test_reports_that_contradict_each_other_are_refused():
    whole, part = ReportFile("a", 5, bytes(8)), row(FilePart("a", 0, MB, 2 * MB))
    for rows in ([whole, whole], [part, part], [whole, part], [part, row(FilePart("a", MB, MB, 3 * MB))]):
        with pytest.raises(ValueError, match="a "):
            join(rows)
    assert join([whole])[0].extents == bytes(8)


# as they are written ---------------------------------------------------------------------------------------------


def report(parts, **changes):
    base = Report("a1b2", 7, 0, 2, tuple(map(row, parts)), b"", b"index")
    return replace(base, **changes)


def plan(parts, prewritten=None, **changes):
    small = prewritten or {"config.json": b"{}", "additional_chat_templates/x.jinja": b"x"}
    manifest = Manifest(
        format=EXPORT_FORMAT,
        name="hf-7",
        attempt="a1b2",
        step=7,
        world=len(parts),
        created="2026-01-02T03:04:05Z",
        metrics={},
        resumable=False,
        versions={},
        reports=(),
        files=tuple(ManifestFile(name, len(data), xxh3_128(data)) for name, data in small.items()),
        kind="export",
    )
    base = AttemptPlan(
        "a1b2", "hf-7", 7, len(parts), ((),) * len(parts), manifest, parts=tuple(tuple(own) for own in parts)
    )
    return replace(base, **changes)


def lines(parts):
    return [
        ManifestReport(rank, report_name(rank), 10, "0" * 32, sum(part.size for part in own), parts_digest(own))
        for rank, own in enumerate(parts)
    ]


def test_what_is_written_of_a_checkpoint_is_what_it_always_was():
    files = (ReportFile("__1_0.distcp", 4096, bytes(range(8))), ReportFile("b", 0, b""))
    assert encode_report(Report("0123456789ab", 7, 1, 2, files, b"\2" * 8, b"idx")).hex() == (
        "484672706f72740187a7617474656d7074ac303132333435363738396162a47374657007a472616e6b01a5776f726c6402a566696c6573"
        "9293ac5f5f315f302e646973746370cd1000c408000102030405060793a16200c400ab74656e736f725f73756d73c4080202020202020202"
        "a5696e646578c4036964780e0d5ebcb7a24afb8441de2150a2c8a6"
    )
    manifest = Manifest(
        format=FORMAT,
        name="step-7",
        attempt="0123456789ab",
        step=7,
        world=1,
        created="2026-01-02T03:04:05+00:00",
        metrics={"loss": 0.5},
        resumable=True,
        versions={"holdfast": "0.1"},
        reports=(ManifestReport(0, report_name(0), 100, "0" * 32, 4096),),
        files=(ManifestFile(".metadata", 5, "1" * 32),),
        extra={"a": 1},
    )
    assert encode_manifest(manifest).endswith(
        b'"extra": {"a": 1},\n  "digest": "0f22ba64d32e9ae1c93ba2628bc1f20e"\n}\n'
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_report_of_parts_comes_back(seed):
    for own in random_parts(SIZES, 3, seed=seed):
        found = decode_report(encode_report(report(own)), path="p")
        assert found == report(own)
        assert sorted(parts_in(found.files)) == sorted(own)


def test_who_knows_only_checkpoints_reads_nothing_of_an_export():
    parts = random_parts(SIZES, 2)
    whole = plan(parts)
    assert encode_report(report(parts[0]))[7] == encode_attempt_plan(whole)[7] == EXPORT_FORMAT != FORMAT
    published = replace(whole.manifest, reports=tuple(lines(parts)))
    data = encode_manifest(published)
    assert f'"format": {EXPORT_FORMAT}'.encode() in data
    assert decode_manifest(data, path="p") == published
    assert decode_attempt_plan(encode_attempt_plan(whole), path="p") == whole
    for changes in ({"kind": "checkpoint"}, {"format": FORMAT}):
        with pytest.raises(CheckpointCorrupt, match="format"):
            decode_manifest(encode_manifest(replace(published, **changes)), path="p")


@pytest.mark.parametrize(
    "files",
    [
        (row(FilePart("a", 4096, MB, 2 * MB)),),
        (row(FilePart("a", 0, 3 * MB, 2 * MB)),),
        (row(FilePart("a", 0, MB, 2 * MB), bytes(16)),),
        (row(FilePart("../a", 0, MB, 2 * MB)),),
        (row(FilePart("b/a", 0, MB, 2 * MB)),),
        (row(FilePart(".a", 0, MB, 2 * MB)),),
        (row(FilePart("holdfast.json", 0, MB, 2 * MB)),),
        (row(FilePart("a", 0, MB, 2 * MB)), ReportFile("b", 4096, bytes(8))),
    ],
)
def test_a_report_of_impossible_parts_is_refused(files):
    with pytest.raises(CheckpointCorrupt):
        decode_report(encode_report(report((), files=files)), path="p")


def test_parts_in_a_report_of_a_checkpoint_are_refused():
    content = msgspec.msgpack.encode(report([FilePart("a", 0, MB, 2 * MB)]))
    with pytest.raises(CheckpointCorrupt, match="number of parts"):
        decode_report(seal(b"HFrport", FORMAT, content), path="p")
    assert decode_report(seal(b"HFrport", EXPORT_FORMAT, content), path="p").files[0].total == 2 * MB


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": ()},
        {"parts": ((FilePart("a", 4096, MB, 2 * MB),), ())},
        {"parts": ((FilePart("a/b", 0, MB, MB),), ())},
        {"parts": ((FilePart("config.json", 0, MB, MB),), ())},
        {"parts": ((FilePart("x.report", 0, MB, MB),), ())},
        {"planned": ((("a", 4096),), ())},
        {"manifest": {"kind": "checkpoint", "format": FORMAT}},
        {"manifest": {"files": (ManifestFile("a/b/c", 0, "0" * 32),)}},
        {"manifest": {"files": (ManifestFile("../c", 0, "0" * 32),)}},
        {"manifest": {"files": (ManifestFile(".env", 0, "0" * 32),)}},
        {"manifest": {"files": (ManifestFile("x/.env", 0, "0" * 32),)}},
        {"manifest": {"files": (ManifestFile("rank-00000.report", 0, "0" * 32),)}},
    ],
)
def test_a_plan_of_an_export_that_makes_no_sense_is_refused(changes):
    whole = plan(random_parts(SIZES, 2))
    if "manifest" in changes:
        changes = {"manifest": replace(whole.manifest, **changes["manifest"])}
    with pytest.raises(CheckpointCorrupt):
        decode_attempt_plan(encode_attempt_plan(replace(whole, **changes)), path="p")


def test_a_checkpoint_has_no_directories_and_no_parts():
    base = plan(random_parts(SIZES, 2))
    manifest = replace(base.manifest, kind="checkpoint", format=FORMAT)
    with pytest.raises(CheckpointCorrupt, match="plain file name"):
        decode_attempt_plan(encode_attempt_plan(replace(base, manifest=manifest, parts=())), path="p")
    manifest = replace(manifest, files=())
    with pytest.raises(CheckpointCorrupt, match="ranks with parts"):
        decode_attempt_plan(encode_attempt_plan(replace(base, manifest=manifest)), path="p")


# what the commit decides by --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_published_that_a_part_lacks_or_two_write(seed):
    chance = random.Random(seed)
    parts = random_parts(SIZES, 3, seed=seed)
    assert find_gap(plan(parts), lines(parts)) is None
    rank = chance.choice([rank for rank, own in enumerate(parts) if any(not part.is_whole for part in own)])
    lost = chance.choice([part for part in parts[rank] if not part.is_whole])
    less = [[part for part in own if part != lost] for own in parts]
    assert "in no part" in find_gap(plan(less), lines(less))
    assert f"rank {rank} reported" in find_gap(plan(parts), lines(less))
    more = [*parts[:2], [*parts[2], lost]]
    assert "two parts" in find_gap(plan(more), lines(more))
    other = chance.choice([other for other in range(3) if other != rank])
    moved = [list(own) for own in less]
    moved[other].append(lost)
    assert find_gap(plan(moved), lines(moved)) is None
    assert "reported" in find_gap(plan(parts), lines(moved))


def test_as_many_bytes_of_other_parts_are_not_what_was_planned():
    one, other = FilePart("a", 0, MB, 2 * MB), FilePart("a", MB, MB, 2 * MB)
    assert find_gap(plan([[one], [other]]), lines([[one], [other]])) is None
    assert "other parts" in find_gap(plan([[one], [other]]), lines([[other], [one]]))
    assert EXTENT_BYTES == BLOCK_BYTES


def test_a_manifest_that_can_not_be_written_says_so():
    with pytest.raises(ConfigError, match="JSON"):
        encode_manifest(replace(plan([[]]).manifest, extra={"a": object()}))
