"""A report written in parts is the one that is encoded at once, whatever the length of its index."""

import msgspec
import pytest
import xxhash

from holdfast.format.manifest import Report, ReportFile, decode_report, encode_report, report_parts


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 65535, 65536, 70_000])
def test_parts_are_the_encoding(nbytes):
    index = bytes(range(256)) * (nbytes // 256 + 1)
    report = Report("t1", None, 3, 4, (ReportFile("f", 4096, b"\1" * 8),), b"\2" * 24, index[:nbytes])
    parts = report_parts(report)
    data = b"".join(parts)
    assert parts[1] is report.index
    assert data == encode_report(report)
    plain = msgspec.structs.replace(report, files=(("f", 4096, b"\1" * 8),))
    assert msgspec.msgpack.encode(plain) == data[8:-16]  # the seal is 8 bytes before and 16 behind
    assert data[-16:] == xxhash.xxh3_128_digest(data[:-16])
    assert decode_report(data, path="p") == report
