"""What of a model's directory goes into an export, and what never does."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StorageError
from holdfast.export import assets as source_files
from holdfast.export.assets import read_file, scan_directory, why_no_path

TAKEN = [
    "README.md",
    "LICENSE",
    "added_tokens.json",
    "additional_chat_templates/rag.jinja",
    "bpe_simple_vocab_16e6.txt.gz",
    "chat_template.jinja",
    "config.json",
    "configuration_mine.py",
    "figures/plot.png",
    "generation_config.json",
    "merges.txt",
    "modeling_mine.py",
    "modeling_secret.py",
    "original/params.json",
    "params.json",
    "preprocessor_config.json",
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tokens.txt",
    "vocab.json",
]
WEIGHTS = [
    "consolidated.00.pth",
    "consolidated.safetensors",
    "diffusion_pytorch_model.safetensors",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
    "ggml-model.ggml",
    "mel.npy",
    "mel.npz",
    "model-00001-of-00002.safetensors",
    "model-Q4_K_M.GGUF",
    "model.ckpt",
    "model.ckpt-100.data-00000-of-00001",
    "model.ckpt-100.index",
    "model.ckpt-100.meta",
    "model.keras",
    "model.mlpackage/Data/weights",
    "model.onnx",
    "model.onnx.data",
    "model.onnx_data",
    "model.onnx_data_1",
    "model.pt",
    "model.safetensors",
    "model.safetensors.index.fp16.json",
    "model.safetensors.index.json",
    "model.safetensors.part",
    "model.safetensors~",
    "model.tflite",
    "onnx/model_quantized.onnx",
    "openvino_model.bin",
    "openvino_model.xml",
    "optimizer.bin",
    "optimizer.pt",
    "original/consolidated.01.pth",
    "pytorch_model.bin",
    "pytorch_model.bin.gz",
    "pytorch_model.fp16.bin",
    "pytorch_model.bin.index.json",
    "rng_state_0.pth",
    "rust_model.ot",
    "saved_model.pb",
    "scheduler.pt",
    "tf_model.h5",
    "training_args.bin",
    "variables.index",
    "weights.tar.gz",
    "weights.zip",
]
SECRETS = [
    ".env",
    ".env.local",
    ".git/config",
    ".gitattributes",
    ".netrc",
    ".ssh/id_ed25519",
    "api_key.txt",
    "aws_credentials",
    "client_secret_1.json",
    "credentials.json",
    "deploy.pem",
    "hf_token",
    "id_rsa",
    "id_rsa.pub",
    "keys/server.key",
    "passwords.txt",
    "prod.env",
    "secrets/api.txt",
    "service-account.json",
    "token",
]
JUNK = [
    ".DS_Store",
    ".cache/huggingface/download/config.json.metadata",
    ".ipynb_checkpoints/a.json",
    "Thumbs.db",
    "__pycache__/modeling_mine.cpython-311.pyc",
    "checkpoint-500/config.json",
    "config.json.lock",
    "config.json~",
    "global_step10/latest",
    "holdfast.json",
    "rank-00000.report",
    "runs/events.out.tfevents.1.host",
    "stray.tmp",
    "wandb/run-1/config.json",
]


def put(directory: Path, names: list[str], content: bytes = b"{}") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def taken(directory: Path) -> list[str]:
    return [file.path for file in scan_directory(str(directory))[0]]


def reasons(directory: Path) -> dict[str, str]:
    return {item.path: item.why for item in scan_directory(str(directory))[1]}


def test_everything_but_weights_secrets_and_leavings_is_taken(tmp_path: Path) -> None:
    put(tmp_path, TAKEN + WEIGHTS + SECRETS + JUNK)
    found, left = scan_directory(str(tmp_path))
    assert [file.path for file in found] == sorted(TAKEN)
    for file in found:
        assert (file.source, file.size) == (str(tmp_path.resolve() / file.path), 2)
    for name in WEIGHTS + SECRETS + JUNK:
        assert any(name == item.path or name.startswith(f"{item.path}/") for item in left), name


def test_weights_under_another_name_are_known_by_how_they_begin(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    begins = {
        "gguf": b"GGUF\x03\0\0\0" + bytes(100),
        "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
        "zip": b"PK\x03\x04" + bytes(100),
        "numpy": b"\x93NUMPY\x01\0" + bytes(100),
        "pickle": pickle.dumps({"w": [1.0]}, protocol=4),
        "safetensors": struct.pack("<Q", len(header)) + header + b"\0",
        "tar": bytes(257) + b"ustar" + bytes(300),
    }
    for name, data in begins.items():
        put(tmp_path, [f"hidden_{name}.dat"], data)
    put(tmp_path, ["data.dat", "vocab.model"], b"\x0a\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    assert taken(tmp_path) == ["data.dat", "vocab.model"]


def test_private_keys_are_known_by_how_they_begin(tmp_path: Path) -> None:
    put(tmp_path, ["notes.txt"], b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    put(tmp_path, ["more.txt"], b"-----BEGIN some text-----\n")
    assert taken(tmp_path) == ["more.txt"]
    assert reasons(tmp_path) == {"notes.txt": "it may be a secret"}


def test_a_snapshot_of_the_hugging_face_cache(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "huggingface" / "hub" / "models--a--b"
    put(cache / "blobs", ["0a1b", "2c3d"], b'{"model_type": "llama"}')
    put(cache / "blobs", ["4e5f"], struct.pack("<Q", 2) + b"{}")
    snapshot = cache / "snapshots" / "abc"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    (snapshot / "additional_chat_templates" / "tool.jinja").symlink_to("../../../blobs/2c3d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4e5f")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/gone")
    (tmp_path / "link").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "link"):
        found, _ = scan_directory(str(directory))
        assert [file.path for file in found] == ["additional_chat_templates/tool.jinja", "config.json"]
        assert all(read_file(file.source, file.size) == b'{"model_type": "llama"}' for file in found)


def test_links_are_taken_for_plain_files_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    put(
        elsewhere,
        [
            "fine.txt",
            ".env",
            ".notes.txt",
            "model.safetensors",
            "weights.bin",
            "server.pem",
            "dir/a.txt",
            ".ssh/config",
        ],
    )
    model = tmp_path / "model"
    put(model, ["config.json"])
    links = {
        "fine.txt": elsewhere / "fine.txt",
        "inside.txt": Path("config.json"),
        "dangling.json": elsewhere / "none",
        "around.json": Path("around.json"),
        "dir": elsewhere / "dir",
        "up": Path(".."),
        "a.txt": elsewhere / ".env",
        "b.txt": elsewhere / "server.pem",
        "c.txt": elsewhere / ".ssh" / "config",
        "d.txt": elsewhere / "weights.bin",
        "e.txt": Path("/proc/self/environ"),
        "f.txt": Path("/dev/zero"),
        "g.txt": elsewhere / ".notes.txt",
    }
    for name, target in links.items():
        (model / name).symlink_to(target)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert taken(model) == ["config.json", "fine.txt", "inside.txt"]
    assert set(reasons(model)) == set(links) - {"fine.txt", "inside.txt"}
    assert "dangling.json is left out of the export: it is a link that leads nowhere" in caplog.text


def test_pipes_sockets_and_devices_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ["config.json"])
    os.mkfifo(tmp_path / "pipe.json")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.json")
        (tmp_path / "to_pipe.json").symlink_to("pipe.json")
        assert taken(tmp_path) == ["config.json"]
    assert set(reasons(tmp_path).values()) == {"it is no plain file"}


def test_a_file_that_a_reader_needs_is_not_left_out_for_its_size(tmp_path: Path) -> None:
    put(tmp_path, ["config.json"])
    with (tmp_path / "weights_of_some_kind.q4").open("wb") as file:
        file.truncate(source_files.FILE_BYTES_MAX + 1)
    assert taken(tmp_path) == ["config.json"]
    assert "268,435,457 bytes" in reasons(tmp_path)["weights_of_some_kind.q4"]
    (tmp_path / "weights_of_some_kind.q4").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't go into an export"):
        scan_directory(str(tmp_path))


def test_a_directory_of_anything_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "few", [f"{n}.txt" for n in range(5)])
    monkeypatch.setattr(source_files, "TOTAL_BYTES_MAX", 9)
    with pytest.raises(ConfigError, match="of 10 bytes"):
        scan_directory(str(tmp_path / "few"))
    monkeypatch.undo()
    monkeypatch.setattr(source_files, "FILES_MAX", 4)
    with pytest.raises(ConfigError, match="5 files or more"):
        scan_directory(str(tmp_path / "few"))
    monkeypatch.setattr(source_files, "ENTRIES_MAX", 3)
    with pytest.raises(ConfigError, match="entries"):
        scan_directory(str(tmp_path / "few"))


def test_what_lies_below_more_than_one_directory_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, ["config.json", "a/x.txt", "a/b/x.txt", "a/b/c/d/x.txt"])
    assert taken(tmp_path) == ["a/x.txt", "config.json"]
    assert reasons(tmp_path) == {"a/b": "it lies below more than one directory"}


def test_names_that_no_manifest_can_hold_are_left_out(tmp_path: Path) -> None:
    put(tmp_path, ["config.json", "back\\slash.json", "new\nline.json"])
    with open(os.fsencode(tmp_path) + b"/half\xff.json", "wb"):
        pass
    assert taken(tmp_path) == ["config.json"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../b",
        "/a",
        "a//b",
        "a/",
        ".a",
        "a/.b",
        "a\\b",
        "a\0b",
        "n" * 300,
        "holdfast.json",
        "a/b/c",
        "a.report",
        "a/b.report",
    ],
)
def test_paths_that_lead_out_or_are_ours(path: str) -> None:
    assert why_no_path(path) is not None


@pytest.mark.parametrize("path", ["a", "a/b", "a..b", "ä/é.json", "rank-1.txt", "a/holdfast.json"])
def test_paths_that_are_fine(path: str) -> None:
    assert why_no_path(path) is None


def test_a_file_that_has_changed_since_is_not_read(tmp_path: Path) -> None:
    put(tmp_path, ["a.txt"], b"1234")
    path = str(tmp_path / "a.txt")
    assert read_file(path, 4) == b"1234"
    for size in (3, 5):
        with pytest.raises(StorageError, match=f"was a plain file of {size} bytes"):
            read_file(path, size)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(StorageError, match="No such file"):
        read_file(path, 4)
    (tmp_path / "a.txt").symlink_to("/etc/hostname")
    with pytest.raises(StorageError):
        read_file(path, 4)
