"""Rendering of torch records, without torch: lengths, alignment, zip64, and what can't be rendered."""

import struct
import subprocess
import sys
import time

import pytest

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.torch_record import measure, payload_bytes, read_entries, render

SHAPES = [(), (0,), (3, 0, 2), (5,), (3, 7), (1024, 1024)]
OFFSETS = [0, 1, 63, 64, 777, 4096, 123_457, (1 << 40) + 13]


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("sizes", SHAPES)
def test_header_and_trailer_have_the_measured_lengths_and_align_the_payload(dtype, sizes):
    nbytes = payload_bytes(dtype, sizes)
    for offset in OFFSETS:
        header, trailer = render(dtype, sizes, record_offset=offset)
        shape = measure(dtype, sizes, record_offset=offset)
        assert (len(header), len(trailer)) == (shape.header_bytes, shape.trailer_bytes)
        assert (offset + len(header)) % (4096 if nbytes >= 1 << 20 else 64) == 0


def test_the_payload_is_the_entry_between_header_and_trailer():
    header, trailer = render("int16", (3,), record_offset=5)
    entries = read_entries(memoryview(header + b"abcdef" + trailer))
    assert sorted(entries) == ["data.pkl", "data/0", "version"]
    assert bytes(entries["data/0"]) == b"abcdef"
    assert bytes(entries["version"]) == b"3\n"


@pytest.mark.parametrize("sizes", [((1 << 32) - 1 + extra,) for extra in (-9000, -4000, -500, -1, 0, 1, 5000)])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_lengths_hold_on_both_sides_of_the_zip64_limit(sizes, offset):
    header, trailer = render("uint8", sizes, record_offset=offset)
    shape = measure("uint8", sizes, record_offset=offset)
    assert (len(header), len(trailer)) == (shape.header_bytes, shape.trailer_bytes)
    entries, directory_bytes, start = struct.unpack("<HII", trailer[-12:-2])
    assert entries == 3
    if start == 0xFFFFFFFF:
        end64 = trailer[directory_bytes:]
        assert end64[:4] == b"PK\6\6"
        directory_bytes, start = struct.unpack("<QQ", end64[40:56])
        (end64_at,) = struct.unpack("<Q", trailer[-34:-26])
        assert end64_at == start + directory_bytes
    assert start == len(header) + sizes[0]
    assert trailer[:4] == b"PK\1\2"


def test_an_unknown_dtype_is_named():
    with pytest.raises(ConfigError, match="'float31'"):
        render("float31", (1,), record_offset=0)


def test_a_negative_size_is_refused():
    with pytest.raises(ConfigError, match="-1"):
        measure("uint8", (-1, 2), record_offset=0)


def test_twenty_thousand_records_render_in_well_under_a_second():
    start = time.process_time()
    for number in range(20_000):
        render("float32", (1024, number % 50), record_offset=number * 5000)
    assert time.process_time() - start < 0.8


def test_rendering_imports_no_torch():
    modules = ("torch_record", "manifest", "safetensors", "sealed", "pickles", "structure")
    code = "import sys, holdfast.plan.write" + "".join(f", holdfast.format.{name}" for name in modules)
    code += "; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
