"""Directories of Hugging Face's form: opened, read in part, and refused where they are damaged or lie."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

import holdfast
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError
from holdfast.format import manifest as m
from holdfast.format.manifest import parts_digest, parts_in
from holdfast.format.sealed import xxh3_128
from holdfast.loader.sources.huggingface import open_hf

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(12, 5),
        "layers.0.weight": torch.randn(7, 6).to(torch.bfloat16),
        "layers.0.bias": torch.arange(7),
        "norm.eps": torch.tensor(0.5),
        "none": torch.empty(0, 3),
    }


def write_sharded(directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    all_of_it = tensors()
    names = list(all_of_it)
    weight_map = {}
    for file, part in zip(FILES, (names[:2], names[2:]), strict=True):
        save_file({name: all_of_it[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return all_of_it


def write_single(directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    save_file(tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return tensors()


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_open_and_read(tmp_path: Path, write: object) -> None:
    expected = write(tmp_path)  # type: ignore[operator]
    checkpoint = holdfast.open(tmp_path)
    assert set(checkpoint.tensors) == set(expected)
    assert checkpoint.step is None
    assert checkpoint.manifest is None
    assert not checkpoint.objects
    for name, tensor in expected.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(checkpoint.map(name), tensor)
    assert torch.equal(checkpoint.read("embed.weight", (slice(2, 5), 1)), expected["embed.weight"][2:5, 1])
    report = checkpoint.verify()
    assert report.ok
    assert not report.checksummed


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    checkpoint = holdfast.open(tmp_path)
    before = holdfast.statistics()["bytes_read"]
    checkpoint.read("embed.weight", (slice(2, 5),))
    checkpoint.read("layers.0.weight", (slice(None), slice(1, 3)))
    assert holdfast.statistics()["bytes_read"] - before == 3 * 5 * 4 + 7 * 2 * 2


def test_of_a_file_and_an_index_the_file_counts(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"alone": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(holdfast.open(tmp_path).tensors) == {"alone"}


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of huggingface_hub keeps links to files that are named by their digests."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "0123"
    expected = write_sharded(tmp_path / "made")
    snapshot.mkdir(parents=True)
    for number, file in enumerate((*FILES, INDEX)):
        (tmp_path / "made" / file).rename(tmp_path / "blobs" / str(number))
        (snapshot / file).symlink_to(Path("../../blobs") / str(number))
    checkpoint = holdfast.open(snapshot)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_a_link_to_the_directory_is_fine(tmp_path: Path) -> None:
    expected = write_single(tmp_path / "hf-2000")
    (tmp_path / "hf-latest").symlink_to("hf-2000")
    assert torch.equal(holdfast.open(tmp_path / "hf-latest").read("embed.weight"), expected["embed.weight"])


# what Holdfast published -----------------------------------------------------------------------------------------


def commit(directory: Path, *, step: int = 7) -> None:
    """Reports and a manifest of what is in the directory, as one rank would have published it."""
    files = []
    rest = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            extents = [data[at : at + m.EXTENT_BYTES] for at in range(0, len(data), m.EXTENT_BYTES)]
            sums = b"".join(xxhash.xxh3_64_intdigest(extent).to_bytes(8, "little") for extent in extents)
            files.append(m.ReportFile(path.name, len(data), sums, 0, len(data)))
        else:
            rest.append(m.ManifestFile(path.name, len(data), xxh3_128(data)))
    attempt = "step-7.0123456789abcdef"
    index = m.encode_index(m.RankIndex((), ()))
    report = m.encode_report(
        m.Report(attempt=attempt, step=step, rank=0, world=1, files=tuple(files), tensor_sums=b"", index=index)
    )
    (directory / m.report_name(0)).write_bytes(report)
    nbytes = sum(file.size for file in files)
    parts = parts_digest(parts_in(files))
    line = m.ManifestReport(0, m.report_name(0), len(report), xxh3_128(report), nbytes, parts)
    manifest = m.Manifest(
        format=m.EXPORT_FORMAT,
        name=directory.name,
        attempt=attempt,
        step=step,
        world=1,
        created="2026-01-01T00:00:00Z",
        metrics={},
        resumable=False,
        versions={},
        reports=(line,),
        files=tuple(rest),
        kind="export",
    )
    (directory / m.MANIFEST_NAME).write_bytes(m.encode_manifest(manifest))


def test_an_export_of_holdfasts_is_verified(tmp_path: Path) -> None:
    expected = write_sharded(tmp_path)
    commit(tmp_path)
    checkpoint = holdfast.open(tmp_path)
    assert checkpoint.step == 7
    assert checkpoint.manifest is not None
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
    report = checkpoint.verify()
    assert report.ok
    assert report.checksummed
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    holdfast.load(into, tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(into[name], tensor)


def test_a_flipped_bit_of_an_export_is_found_by_reading_it(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    commit(tmp_path)
    checkpoint = holdfast.open(tmp_path)
    into = {"embed.weight": torch.zeros(12, 5)}
    for file in FILES:
        path = tmp_path / file
        data = path.read_bytes()
        for at in (9, len(data) // 3, len(data) - 1):  # in the header, and behind it
            damaged = bytearray(data)
            damaged[at] ^= 16
            path.write_bytes(damaged)
            assert not checkpoint.verify().ok
            with pytest.raises(CheckpointCorrupt, match=file):
                holdfast.open(tmp_path)
        path.write_bytes(data)
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(index.replace(b'"total_size": 1', b'"total_size": 2'))
    assert not checkpoint.verify().ok
    with pytest.raises(CheckpointCorrupt, match=INDEX):
        holdfast.load(into, tmp_path)


def test_a_file_that_was_not_committed_is_not_read(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    commit(tmp_path)
    save_file({"embed.weight": torch.zeros(12, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match="was not committed with its export"):
        holdfast.open(tmp_path)


# what is not right -----------------------------------------------------------------------------------------------


def test_a_directory_without_a_model_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors or model\.safetensors\.index\.json"):
        holdfast.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointNotFound, match="it has a pickled one"):
        holdfast.open(tmp_path)
    with pytest.raises(CheckpointNotFound, match="has neither"):
        open_hf(str(tmp_path))


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / FILES[1]).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{FILES[1]} is missing; {INDEX} names it"):
        holdfast.open(tmp_path)


def test_a_shard_of_another_model(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"other": torch.ones(3)}, tmp_path / FILES[1])
    with pytest.raises(CheckpointCorrupt, match=f"{FILES[1]} has no tensor 'layers.0.bias', but {INDEX} says so"):
        holdfast.open(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    everything = tensors()
    save_file({**{name: everything[name] for name in list(everything)[2:]}, "more": torch.ones(2)}, tmp_path / FILES[1])
    assert "more" in holdfast.open(tmp_path).tensors, "as from_pretrained has it"
    save_file({**{name: everything[name] for name in list(everything)[:2]}, "more": torch.ones(2)}, tmp_path / FILES[0])
    with pytest.raises(CheckpointCorrupt, match="doesn't say which one to use"):
        holdfast.open(tmp_path)
    # Where the index says which counts, the other is a leftover.
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["more"] = FILES[0]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert torch.equal(holdfast.open(tmp_path).read("more"), torch.ones(2))


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_a_file_cut_short(tmp_path: Path, size: int) -> None:
    write_single(tmp_path)
    path = tmp_path / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointCorrupt, match="cut short") as caught:
        holdfast.open(tmp_path)
    assert caught.value.path == str(path)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    write_single(tmp_path)
    checkpoint = holdfast.open(tmp_path)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.read("embed.weight")
    assert not checkpoint.verify().ok


def test_every_flipped_bit_of_a_header_is_noticed_or_harmless(tmp_path: Path) -> None:
    """No crash, no other error, whatever the bytes; what still opens is a model of the same size."""
    write_single(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    refused = 0
    for at in range(8 + length):
        for bit in (0, 5, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                holdfast.open(tmp_path).read("embed.weight")
            except (CheckpointCorrupt, CheckpointNotFound):
                refused += 1
    assert refused > length


@pytest.mark.parametrize("file", ["../secret", "/etc/hostname", "sub/x.safetensors"])
def test_an_index_does_not_lead_out_of_the_directory(tmp_path: Path, file: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointCorrupt, match="isn't the name of a file in the same directory"):
        holdfast.open(tmp_path / "m")


def test_what_is_no_plain_file_is_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    os.mkfifo(tmp_path / "x")
    (tmp_path / "y").mkdir()
    ended = threading.Event()

    def check() -> None:
        with pytest.raises(CheckpointCorrupt, match=r"plain file|a directory"):
            holdfast.open(tmp_path)
        ended.set()

    threading.Thread(target=check, daemon=True).start()
    assert ended.wait(20)


def test_an_index_of_no_sense(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"[" * 1_000_000)
    with pytest.raises(CheckpointCorrupt, match="is not an index"):
        holdfast.open(tmp_path)


def test_stock_metadata_is_not_written_beside_it(tmp_path: Path) -> None:
    write_single(tmp_path)
    with pytest.raises(ConfigError, match="is a Hugging Face directory"):
        holdfast.open(tmp_path).write_dcp_metadata()
