"""Manifest, report, index and attempt plan: round trips, limits, and contents that make no sense."""

import enum
import json
import math
import pickle

import msgspec
import numpy as np
import pytest

from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.manifest import (
    EXTENT_BYTES,
    FORMAT,
    MANIFEST_HEAD_BYTES,
    AttemptPlan,
    IndexObject,
    IndexTensor,
    Manifest,
    ManifestFile,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    attempt_in,
    decode_attempt_plan,
    decode_index,
    decode_manifest,
    decode_report,
    encode_attempt_plan,
    encode_index,
    encode_manifest,
    encode_report,
    read_index,
    report_name,
)
from holdfast.format.sealed import seal, xxh3_128
from holdfast.format.structure import KeysSpec, noted_key
from holdfast.plan.write import PlacedObject, PlacedTensor, PlannedFile, RankPlan, index_of

DIGEST = xxh3_128(b"")
replace = msgspec.structs.replace


def manifest(**changes):
    base = Manifest(
        format=FORMAT,
        name="step-10",
        attempt="a1b2",
        step=10,
        world=2,
        created="2026-01-02T03:04:05Z",
        metrics={"loss": 0.1, "é": 3.0},
        resumable=True,
        versions={"holdfast": "0.1"},
        reports=tuple(ManifestReport(rank, report_name(rank), 100, DIGEST, 4096) for rank in range(2)),
        files=(ManifestFile(".metadata", 5, DIGEST),),
        extra={"note": [1, None, {"x": "y"}]},
    )
    return replace(base, **changes)


def report(**changes):
    base = Report(
        attempt="a1b2",
        step=10,
        rank=1,
        world=2,
        files=(ReportFile("__1_0.distcp", EXTENT_BYTES + 4096, bytes(16)), ReportFile("__1_1.distcp", 4096, bytes(8))),
        tensor_sums=bytes(8),
        index=encode_index(index()),
    )
    return replace(base, **changes)


def tensor(**changes):
    base = IndexTensor(
        name="model.w",
        path=("model", "w"),
        dtype="bfloat16",
        shape=(8, 3),
        offsets=(4, 0),
        sizes=(4, 3),
        file=0,
        record_offset=64,
        payload_offset=512,
        nbytes=24,
        record_end=700,
    )
    return replace(base, **changes)


def index(*tensors):
    objects = (IndexObject("train.step", ("train", "step"), 1, 0, 1024),)
    return RankIndex(tensors or (tensor(),), objects)


def plan(**changes):
    base = AttemptPlan(
        attempt="a1b2",
        name="step-10",
        step=10,
        world=2,
        planned=((("__0_0.distcp", 4096),), ()),
        manifest=manifest(reports=(), metrics={"loss": math.inf}),
    )
    return replace(base, **changes)


def decode(data):
    return decode_manifest(data, path="root/step-10/holdfast.json")


# manifest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": None, "metrics": {}, "files": (), "extra": {}, "resumable": False},
        {"world": 1, "reports": (ManifestReport(0, report_name(0), 0, DIGEST, 0),)},
        {"metrics": {"a": math.inf, "b": -math.inf, "c": 5e-324, "d": -0.0, "e": 1e308, "inf": 1.0}},
        {"name": "step-é\udc80 \u2028"},
    ],
)
def test_a_manifest_comes_back(changes):
    expected = manifest(**changes)
    data = encode_manifest(expected)
    assert decode(data) == expected
    assert encode_manifest(decode(data)) == data


@pytest.mark.parametrize("name", ["step-1", 'a"\\b", "attempt": "no', "\u2028" * 255, "é\udc80"])
def test_the_start_of_a_manifest_tells_its_attempt(name):
    data = encode_manifest(manifest(name=name, attempt="0123456789ab"))
    assert attempt_in(data[:MANIFEST_HEAD_BYTES]) == "0123456789ab"
    assert attempt_in(data[:30]) is None
    assert attempt_in(b"[" + data) is None


def test_nan_comes_back():
    assert math.isnan(decode(encode_manifest(manifest(metrics={"loss": math.nan}))).metrics["loss"])


def test_a_manifest_is_json_for_people():
    text = encode_manifest(manifest(metrics={"loss": math.nan})).decode("ascii")
    document = json.loads(text, parse_constant=pytest.fail)
    assert document["metrics"] == {"loss": "nan"}
    assert list(document)[-1] == "digest"
    assert all(len(line) < 200 for line in text.splitlines())
    assert sum("report" in line for line in text.splitlines()) == 3


@pytest.mark.parametrize("changes", [{"metrics": {"loss": "low"}}, {"extra": {"x": math.nan}}, {"extra": {"x": {1}}}])
def test_what_json_does_not_hold_is_a_clear_error(changes):
    with pytest.raises(ConfigError):
        encode_manifest(manifest(**changes))


@pytest.mark.parametrize("value", [3, True])
def test_whole_metrics_come_back_as_floats(value):
    found = decode(encode_manifest(manifest(metrics={"n": value}))).metrics["n"]
    assert type(found) is float
    assert found == value


def test_another_format_is_not_called_corrupt():
    with pytest.raises(ConfigError, match=r"format 99.*written by Holdfast 0\.1, and nothing is wrong with it"):
        decode(encode_manifest(manifest(format=99)))


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00" * 500, b'{\n  "digest": "' + b"0" * 32 + b'"\n}\n'])
def test_what_is_not_a_manifest_is_foreign(data):
    with pytest.raises(CheckpointCorrupt, match=r"root/step-10/holdfast\.json"):
        decode(data)


def test_an_edit_is_detected():
    data = encode_manifest(manifest()).replace(b'"step": 10', b'"step": 11')
    with pytest.raises(CheckpointCorrupt, match="edited"):
        decode(data)


def test_added_and_missing_bytes_are_detected():
    data = encode_manifest(manifest())
    for length in range(len(data)):
        with pytest.raises(CheckpointCorrupt):
            decode(data[:length])
    for extra in (b"\n", b" ", data):
        with pytest.raises(CheckpointCorrupt):
            decode(data + extra)


LINE = ManifestReport(0, report_name(0), 100, DIGEST, 4096)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": ".."},
        {"name": "a/b"},
        {"name": "a\\b"},
        {"name": "a\0b"},
        {"name": "x" * 300},
        {"attempt": "../x"},
        {"world": 0, "reports": ()},
        {"world": 3},
        {"reports": ()},
        {"reports": (LINE, LINE)},
        {"reports": (LINE, ManifestReport(1, report_name(0), 100, DIGEST, 1))},
        {"reports": (LINE, ManifestReport(1, "../" + report_name(1), 100, DIGEST, 1))},
        {"reports": (LINE, ManifestReport(1, report_name(1), -1, DIGEST, 1))},
        {"reports": (LINE, ManifestReport(1, report_name(1), 1, DIGEST, -1))},
        {"reports": (LINE, ManifestReport(1, report_name(1), 1, "00", 1))},
        {"files": (ManifestFile("../x", 1, DIGEST),)},
        {"files": (ManifestFile("x", -1, DIGEST),)},
        {"files": (ManifestFile("x", 1, DIGEST.upper().replace("0", "G")),)},
        {"files": (ManifestFile("x", 1, DIGEST), ManifestFile("x", 1, DIGEST))},
        {"files": (ManifestFile(report_name(1), 1, DIGEST),)},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(changes):
    with pytest.raises(CheckpointCorrupt):
        decode(encode_manifest(manifest(**changes)))


# reports and indexes -------------------------------------------------------------------------------------------


def test_a_report_and_its_index_come_back():
    found = decode_report(encode_report(report()), path="p")
    assert found == report()
    assert read_index(found, path="p") == index()


def test_report_names():
    assert report_name(7) == "rank-00007.report"
    assert report_name(123_456) == "rank-123456.report"


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 2},
        {"rank": -1},
        {"attempt": "a/b"},
        {"tensor_sums": bytes(7)},
        {"files": (ReportFile("a", 4096, bytes(7)),)},
        {"files": (ReportFile("a", 4096, bytes(16)),)},
        {"files": (ReportFile("a", 0, bytes(8)),)},
        {"files": (ReportFile("a", -1, b""),)},
        {"files": (ReportFile("a", 1 << 60, bytes(8)),)},
        {"files": (ReportFile("../a", 0, b""),)},
        {"files": (ReportFile("a", 0, b""), ReportFile("a", 0, b""))},
    ],
)
def test_a_report_that_makes_no_sense_is_refused(changes):
    with pytest.raises(CheckpointCorrupt):
        decode_report(encode_report(report(**changes)), path="p")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HFrport",
        bytes(100),
        encode_attempt_plan(plan()),
        encode_report(report())[:-1],
        encode_manifest(manifest()),
    ],
)
def test_what_is_not_a_report_is_refused(data):
    with pytest.raises(CheckpointCorrupt):
        decode_report(data, path="p")


def test_a_report_of_another_format_is_not_called_corrupt():
    with pytest.raises(ConfigError, match="format 9"):
        decode_report(seal(b"HFrport", 9, b"whatever"), path="p")


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, msgspec.msgpack.encode({"rank": 1})]
)
def test_a_sealed_report_with_other_contents_is_refused(content):
    with pytest.raises(CheckpointCorrupt):
        decode_report(seal(b"HFrport", FORMAT, content), path="p")


def test_sums_must_match_the_index():
    with pytest.raises(CheckpointCorrupt, match="checksums"):
        read_index(report(tensor_sums=bytes(16)), path="p")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float31"},
        {"shape": (8,)},
        {"offsets": (5, 0)},
        {"offsets": (-1, 0)},
        {"sizes": (-4, 3)},
        {"sizes": (4, 3, 1)},
        {"nbytes": 25},
        {"nbytes": -24},
        {"file": 2},
        {"file": -1},
        {"record_offset": -1},
        {"record_offset": 600},
        {"payload_offset": 1 << 50},
        {"record_end": 520},
        {"record_end": 5000},
        {"shape": (1 << 40, 1 << 40), "sizes": (1 << 40, 1 << 40), "offsets": (0, 0)},
    ],
)
def test_an_index_that_points_elsewhere_is_refused(changes):
    data = encode_index(index(tensor(**changes)))
    with pytest.raises(CheckpointCorrupt, match=r"model\.w") as error:
        decode_index(data, file_sizes=[4096, 4096], path="p")
    assert error.value.tensor == "model.w"


@pytest.mark.parametrize("changes", [{"file": 2}, {"file": -1}, {"offset": -1}, {"capacity": -1}, {"capacity": 4097}])
def test_an_object_outside_its_file_is_refused(changes):
    item = replace(index().objects[0], **changes)
    with pytest.raises(CheckpointCorrupt, match=r"train\.step"):
        decode_index(encode_index(RankIndex((), (item,))), file_sizes=[4096, 4096], path="p")


def test_the_index_of_a_plan_says_what_the_plan_says():
    placed = PlacedTensor(
        name="rng.rank-00001.torch",
        path=("rng", "rank-00001", "torch"),
        source="rng.rank-*.torch",
        dtype="uint8",
        shape=(4,),
        offsets=(0,),
        sizes=(4,),
        local_offsets=(0,),
        file=0,
        record_offset=0,
        payload_offset=512,
        nbytes=4,
        record_end=700,
    )
    item = PlacedObject("a.0", ("a", 0), "a.0", 1, 0, 1024)
    files = (PlannedFile("__1_0.distcp", 4096), PlannedFile("__1_1.distcp", 4096))
    made = index_of(RankPlan(1, files, (placed,), (item,)))
    assert decode_index(encode_index(made), file_sizes=[4096, 4096], path="p") == made
    assert made.tensors[0] == IndexTensor(placed.name, placed.path, "uint8", (4,), (0,), (4,), 0, 0, 512, 4, 700)
    assert made.objects[0] == IndexObject("a.0", ("a", 0), 1, 0, 1024)


# plans of attempts ---------------------------------------------------------------------------------------------


def test_an_attempt_plan_comes_back():
    assert decode_attempt_plan(encode_attempt_plan(plan()), path="p") == plan()


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 3},
        {"name": "../x"},
        {"name": "other"},
        {"attempt": "other"},
        {"step": 11},
        {"planned": ((),)},
        {"planned": ((("a", -1),), ())},
        {"planned": ((("a/b", 1),), ())},
        {"planned": ((("a", 1),), (("a", 1),))},
        {"manifest": manifest()},
    ],
)
def test_an_attempt_plan_that_makes_no_sense_is_refused(changes):
    with pytest.raises(CheckpointCorrupt):
        decode_attempt_plan(encode_attempt_plan(plan(**changes)), path="p")


def test_errors_travel_between_processes():
    with pytest.raises(CheckpointCorrupt) as error:
        decode(b"")
    copy = pickle.loads(pickle.dumps(error.value))
    assert (str(copy), copy.path) == (str(error.value), error.value.path)


def test_a_name_that_is_not_text_is_a_clear_error():
    with pytest.raises(ConfigError):
        encode_index(index(tensor(name="w\udc80")))


class IndexBefore(msgspec.Struct, frozen=True, array_like=True):
    """`RankIndex` as it was before it had keys of mappings."""

    tensors: tuple[IndexTensor, ...]
    objects: tuple[IndexObject, ...]


KEYS = (1, -1, 2**63, 10**30, True, None, 2.5, "a", b"b", (1, ("x", None)))


def test_readers_of_before_read_an_index_with_keys_of_mappings():
    noted = tuple(map(noted_key, KEYS))
    data = encode_index(replace(index(), mappings=(KeysSpec(("x", 0), noted),)))
    before = msgspec.msgpack.decode(data, type=IndexBefore)
    assert (before.tensors, before.objects) == (index().tensors, index().objects)
    found = decode_index(data, file_sizes=[1 << 20, 4096], path="p")
    assert found.mappings == (KeysSpec(("x", 0), KEYS),)
    assert list(map(type, found.mappings[0].keys)) == list(map(type, KEYS))
    assert encode_index(index()) == msgspec.msgpack.encode(IndexBefore(index().tensors, index().objects))


@pytest.mark.parametrize("key", [{}, {1: 2}, [[{}]], msgspec.msgpack.Ext(7, b"1"), msgspec.msgpack.Ext(1, b"x")])
def test_keys_that_can_not_be_are_refused(key):
    data = encode_index(replace(index(), mappings=(KeysSpec(("x",), (key,)),)))
    with pytest.raises(CheckpointCorrupt, match="a mapping's keys"):
        decode_index(data, file_sizes=[1 << 20, 4096], path="p")


class Colour(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    A = "a"


@pytest.mark.parametrize(
    ("key", "noted"),
    [
        (Colour.RED, "Colour.RED"),
        (Word.A, str(Word.A)),
        (frozenset({1}), "frozenset({1})"),
        (((((((((((1,),),),),),),),),),), "((((((((((1,),),),),),),),),),)"),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
    ],
)
def test_keys_of_other_kinds_are_noted_as_the_text_that_names_have(key, noted):
    assert noted_key(key) == noted
    assert type(noted_key(key)) is type(noted)
