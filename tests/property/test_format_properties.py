"""Of all formats: what is written comes back, and a flipped bit, a cut or noise is an error that names the file."""

import pickle
from contextlib import suppress

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import (
    EXPORT_FORMAT,
    EXTENT_BYTES,
    FORMAT,
    AttemptPlan,
    FilePart,
    IndexTensor,
    Manifest,
    ManifestFile,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    decode_attempt_plan,
    decode_index,
    decode_manifest,
    decode_report,
    encode_attempt_plan,
    encode_index,
    encode_manifest,
    encode_report,
    may_hold_data,
    report_name,
)
from holdfast.format.objects import dump_object, load_object, object_capacity, render_object
from holdfast.format.pickles import PickleRefused, Vocabulary, read_pickle
from holdfast.format.sealed import xxh3_128
from holdfast.format.torch_record import MalformedRecord, measure, payload_bytes, read_entries, render

names = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..")
)
digests = st.binary(max_size=8).map(xxh3_128)
counts = st.integers(0, 1 << 62)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)  # wider ones are a ConfigError: an attempt's plan is msgpack
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def manifests(draw, *, reported=True):
    world = draw(st.integers(1, 4))
    reports = [ManifestReport(n, report_name(n), draw(counts), draw(digests), draw(counts)) for n in range(world)]
    files = draw(st.lists(names.filter(lambda name: not name.endswith(".report")), max_size=3, unique=True))
    return Manifest(
        format=FORMAT,
        name=draw(names),
        attempt=draw(names),
        step=draw(st.none() | counts),
        world=world,
        created=draw(st.text()),
        metrics=draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=4)),
        resumable=draw(st.booleans()),
        versions=draw(st.dictionaries(st.text(), st.text(), max_size=3)),
        reports=tuple(reports) if reported else (),
        files=tuple(ManifestFile(name, draw(counts), draw(digests)) for name in files),
        extra=draw(st.dictionaries(st.text(), json_values, max_size=3)),
    )


@st.composite
def reports(draw):
    world = draw(st.integers(1, 100_000))
    files = []
    for name in draw(st.lists(names, max_size=3, unique=True)):
        size = draw(st.integers(0, 3 * EXTENT_BYTES))
        files.append(ReportFile(name, size, b"s" * (8 * -(-size // EXTENT_BYTES))))
    return Report(
        attempt=draw(names),
        step=draw(st.none() | counts),
        rank=draw(st.integers(0, world - 1)),
        world=world,
        files=tuple(files),
        tensor_sums=bytes(8 * draw(st.integers(0, 3))),
        index=draw(st.binary(max_size=20)),
    )


@st.composite
def attempt_plans(draw):
    skeleton = draw(manifests(reported=False))
    files = draw(st.lists(names, max_size=4, unique=True))
    planned = tuple(tuple((name, draw(counts)) for name in files[n :: skeleton.world]) for n in range(skeleton.world))
    return AttemptPlan(
        skeleton.attempt, skeleton.name, skeleton.step, skeleton.world, planned, skeleton, draw(st.booleans())
    )


@st.composite
def parts(draw):
    """Any that there can be, whether or not they make up files."""
    total = draw(st.integers(1, 5 * EXTENT_BYTES))
    start = draw(st.integers(0, (total - 1) // EXTENT_BYTES)) * EXTENT_BYTES
    end = draw(st.integers(start // EXTENT_BYTES + 1, -(-total // EXTENT_BYTES))) * EXTENT_BYTES
    name = draw(names.filter(may_hold_data))
    return FilePart(name, start, min(end, total) - start, total)


@st.composite
def export_reports(draw):
    own = draw(st.lists(parts(), max_size=4))
    files = [
        ReportFile(
            part.name,
            part.size,
            draw(st.binary(min_size=8, max_size=8)) * -(-part.size // EXTENT_BYTES),
            part.offset,
            part.total,
        )
        for part in own
    ]
    return msgspec.structs.replace(draw(reports()), files=tuple(files))


@st.composite
def export_plans(draw):
    plan = draw(attempt_plans())
    files = tuple(file for file in plan.manifest.files if may_hold_data(file.name))
    manifest = msgspec.structs.replace(plan.manifest, kind="export", format=EXPORT_FORMAT, files=files)
    small = {file.name for file in files}
    own = st.lists(parts().filter(lambda part: part.name not in small), max_size=3).map(tuple)
    every = tuple(draw(own) for _ in range(plan.world))
    return msgspec.structs.replace(plan, planned=((),) * plan.world, manifest=manifest, parts=every)


KINDS = {
    "report of parts": (export_reports(), encode_report, decode_report),
    "plan of an export": (export_plans(), encode_attempt_plan, decode_attempt_plan),
    "manifest": (manifests(), encode_manifest, decode_manifest),
    "report": (reports(), encode_report, decode_report),
    "plan": (attempt_plans(), encode_attempt_plan, decode_attempt_plan),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_files_come_back_and_are_deterministic(kind, data):
    strategy, encode, decode = KINDS[kind]
    value = data.draw(strategy)
    encoded = encode(value)
    assert decode(encoded, path="p") == value
    assert encode(decode(encoded, path="p")) == encoded


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_flipped_bit_is_detected(kind, data):
    strategy, encode, decode = KINDS[kind]
    encoded = bytearray(encode(data.draw(strategy)))
    for position in range(len(encoded)):
        bit = 1 << data.draw(st.integers(0, 7)) if position % 16 == 0 else 1 << position % 8
        encoded[position] ^= bit
        with pytest.raises(CheckpointCorrupt):
            decode(bytes(encoded), path="p")
        encoded[position] ^= bit


@pytest.mark.parametrize("kind", KINDS)
@given(noise=st.binary(max_size=300), cut=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_noise_is_refused(kind, noise, cut):
    _, _, decode = KINDS[kind]
    for magic in (b"", b"HFrport\1", b"HFplan\0\1", b'{\n  "format": 1,'):
        body = magic + noise
        for candidate in (body, body + xxhash.xxh3_128_digest(body), body[:cut]):
            with pytest.raises(CheckpointCorrupt):
                decode(candidate, path="p")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(ITEMSIZE)),
            *(st.lists(st.integers(-2, 5), max_size=3) for _ in range(3)),
            *(st.integers(-100, 5000) for _ in range(5)),
        ),
        max_size=3,
    )
)
@settings(max_examples=200, deadline=None)
def test_an_index_is_either_refused_or_inside_its_files(rows):
    index = RankIndex(
        tuple(IndexTensor("n", ("n",), d, tuple(a), tuple(b), tuple(c), *rest) for d, a, b, c, *rest in rows), ()
    )
    sizes = [4096, 100]
    try:
        found = decode_index(encode_index(index), file_sizes=sizes, path="p")
    except CheckpointCorrupt:
        return
    assert found == index
    for tensor in found.tensors:
        assert 0 <= tensor.payload_offset <= tensor.payload_offset + tensor.nbytes <= sizes[tensor.file]
        assert all(o + s <= n for o, s, n in zip(tensor.offsets, tensor.sizes, tensor.shape, strict=True))


# records and objects -------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 70_000), max_size=4).map(tuple), st.integers(0, 1 << 50)
)
@settings(max_examples=200, deadline=None)
def test_records_measure_as_they_render(dtype, sizes, offset):
    assume(payload_bytes(dtype, sizes) < 1 << 60)  # no machine can hold more, and zip64 can't say 2**64
    header, trailer = render(dtype, sizes, record_offset=offset)
    shape = measure(dtype, sizes, record_offset=offset)
    assert (len(header), len(trailer)) == (shape.header_bytes, shape.trailer_bytes)
    assert (offset + len(header)) % (4096 if payload_bytes(dtype, sizes) >= 1 << 20 else 64) == 0


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.text(st.characters()) | st.binary(max_size=40)
)  # fmt: skip
keys = st.recursive(st.integers() | st.text() | st.binary(), lambda inner: st.tuples(inner, inner), max_leaves=3)
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=3)
    ),
    max_leaves=20,
)


@given(objects, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_objects_come_back_whatever_room_is_left(value, extra):
    payload = dump_object(value, name="x")
    record = render_object(payload, object_capacity(payload) + 64 * extra)
    found = load_object(record, name="x", path="p")
    assert found == value
    assert repr(type(found)) == repr(type(value))
    for protocol in (4, 5):
        assert (
            read_pickle(pickle.dumps(value, protocol), Vocabulary({"builtins.complex": complex}, {complex: complex}))
            == value
        )


BASE = bytes(
    render_object(
        dump_object(
            {"a": [1, (2.5, "x")], "b": {b"k", 3}, "c": __import__("numpy").arange(4), "d": range(3)}, name="x"
        ),
        1024,
    )
)


@given(st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_a_damaged_record_loads_as_something_or_is_refused(edits):
    record = bytearray(BASE)
    for position, value in edits:
        record[position] = value
    with suppress(CheckpointCorrupt):
        load_object(record, name="x", path="p")


@given(st.binary(max_size=60))
@settings(max_examples=400, deadline=None)
def test_noise_is_no_pickle_and_no_archive(noise):
    for action, refusal in (
        (lambda: read_pickle(noise, Vocabulary({}, {})), PickleRefused),
        (lambda: read_entries(memoryview(noise)), MalformedRecord),
    ):
        with suppress(refusal):
            action()
