"""Which files of a model's directory belong beside the weights of an export. Torch-free; reads, never writes.

Everything that is no weight: configurations, tokenizer files, chat templates, custom code, also in subdirectories.
What is left out, each with its reason:

    weights       of any format, by name or by their first bytes; what indexes them; optimizer states; archives
    secrets       keys, tokens, ``.env``, ``.ssh``, by name, by where a link leads, or by their first bytes
    hidden files  ``.git``, ``.cache``, ``.gitattributes``: no reader of a model looks at them
    leavings      ``__pycache__``, editors' and downloaders' temporary files, checkpoints of a trainer
    no files      links that lead nowhere or to directories, pipes, devices; names and places that no manifest holds

Guarantees: a link to a plain file counts as that file, wherever it is (snapshots of the Hugging Face cache are made of
such links); no directory is entered through a link, nothing but a plain file is opened, and opening never waits; the
answer is bounded, or an error.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, StorageError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.storage.plain import PLAIN_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("holdfast")

FILE_BYTES_MAX: Final = 256 << 20
"""The largest tokenizers are a tenth of this; what is larger holds weights or data."""
FILES_MAX: Final = 4096
ENTRIES_MAX: Final = 65_536
TOTAL_BYTES_MAX: Final = 1 << 30
COMPONENTS_MAX: Final = 2
"""Of a path in an export: a file, or a directory with files in it."""
HEAD_BYTES: Final = 264

_NEEDED: Final = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""What readers of a model open: without such a file an export might not load, so none is left out for its size."""
_WEIGHTS: Final = re.compile(
    r".*\.(7z|bin|caffemodel|ckpt|dduf|dill|distcp|engine|ggml|gguf|h5|hdf5|jit|joblib|keras|llamafile|mar|mlmodel"
    r"|mlpackage|mnn|msgpack|nemo|npy|npz|om|onnx|onnx_data|ort|ot|params|pb|pdiparams|pdmodel|pdopt|pdparams|pickle|pkl"
    r"|plan|pt|pt2|pte|pth|ptl|rknn|safetensors|t7|tar|tflite|tgz|torchscript|trt|weights|wts|zip)"
    r"(\.(\d+|bak|bz2|gz|lz4|old|orig|xz|zst))?"
    r"|.*\.(ckpt|distcp|gguf|h5|msgpack|onnx|pth|safetensors|tar)[.~].*"  # with more behind: model.safetensors.part
)
_WEIGHT_NAMES: Final = re.compile(
    r"consolidated.*|checkpoint|.*\.index(\.[^.]+)?\.json|.*\.index|.*-\d{5}-of-\d{5}(\..*)?|.*\.ckpt-.*|.*\.onnx[._]data.*"
    r"|openvino_.*\.xml|events\.out\.tfevents.*"
)
_OURS: Final = re.compile(rf"{re.escape(MANIFEST_NAME)}|.*\.report", re.DOTALL)
_SECRETS: Final = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?(\..*)?|.*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|env|netrc)"
    r"|_?netrc|authorized_keys|known_hosts|htpasswd|kubeconfig|stored_tokens|(hf_|hub_|api_|access_)?token(\.txt)?"
    r"|service[_-]?account.*\.json"
    r"|(?!.*\.py$)(.*[._-])?(api[_-]?keys?|credentials?|passwd|passwords?|private[_-]?key|secrets?)([._-].*)?"
)
_SECRET_DIRECTORIES: Final = frozenset(
    (".ssh", ".gnupg", ".aws", ".kube", ".docker", ".git", ".azure", ".password-store")
)
_LEAVINGS: Final = re.compile(
    r"__pycache__|thumbs\.db|desktop\.ini|.*~|.*\.(pyc|pyo|swp|lock|tmp|temp|part|partial|incomplete)|checkpoint-\d+"
    r"|global_step\d+|wandb|mlruns|lightning_logs|node_modules|venv"
)
_MAGICS: Final = (b"GGUF", b"ggml", b"lmgg", b"fmgg", b"tjgg", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x93NUMPY")
_A_WEIGHT: Final = "it holds weights, or says where they are"
_PRIVATE: Final = "it may be a secret"
_HIDDEN: Final = "it is hidden"
_LEFT_BEHIND: Final = "it is no part of a model"
_NO_FILE: Final = "it is no plain file"
_OUR_OWN: Final = "its name is one of Holdfast's own"
_EXPECTED: Final = frozenset((_A_WEIGHT, _HIDDEN, _LEFT_BEHIND, _OUR_OWN))
"""Nobody is told, but who asks for it. Of all else the log says that it is left out."""
_NO_NAME: Final = re.compile(r"[\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to take: ``path`` below the directory, with slashes; ``source`` where its bytes are, links resolved."""

    path: str
    source: str
    size: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not taken from a directory, and why."""

    path: str
    why: str


def scan_directory(directory: str) -> tuple[list[FoundFile], list[LeftOut]]:
    """The files of ``directory`` that are no weights, sorted by path, and what was left out of them.

    Raises:
        ConfigError: more than a model's directory holds, or a file that a reader needs is larger than 256 MiB.
        StorageError: a directory or a file that would be taken can't be read.
    """
    root = os.path.realpath(directory)
    found: list[FoundFile] = []
    left: list[LeftOut] = []
    nbytes = 0
    for seen, (path, entry) in enumerate(_entries(root, "", left)):
        if seen >= ENTRIES_MAX:
            raise _too_much(root, f"more than {ENTRIES_MAX:,} entries")
        file = _judge(path, entry)
        if isinstance(file, LeftOut):
            left.append(file)
        else:
            found.append(file)
            nbytes += file.size
        if len(found) > FILES_MAX or nbytes > TOTAL_BYTES_MAX:
            what = f"{len(found):,} files or more that are no weights, of {nbytes:,} bytes"
            raise _too_much(root, f"{what} (there may be {FILES_MAX:,}, of {TOTAL_BYTES_MAX:,} bytes)")
    for item in left:
        level = logging.DEBUG if item.why in _EXPECTED else logging.WARNING
        _log.log(level, "%s is left out of the export: %s", os.path.join(root, item.path), item.why)
    return sorted(found, key=lambda file: file.path), sorted(left, key=lambda item: item.path)


def why_no_path(path: str) -> str | None:
    """Why ``path`` can't be one of a file in an export; None if it can."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "it leads out of the export"
    if any(part.startswith(".") for part in parts):
        return _HIDDEN
    try:
        fits = all(len(part.encode()) <= 255 for part in parts)
    except UnicodeEncodeError:
        fits = False
    if not fits or _NO_NAME.search(path):
        return "its name is no plain text"
    if len(parts) > COMPONENTS_MAX:
        return "it lies below more than one directory"
    if _OURS.fullmatch(path):
        return _OUR_OWN
    return None


def read_file(source: str, size: int) -> bytes:
    """A plain file that was ``size`` bytes long when it was looked at. Raises `StorageError`."""
    try:
        fd = os.open(source, PLAIN_FLAGS)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size == size:
                data = file.read(size + 1)
                if len(data) == size:
                    return data
    except OSError as error:
        raise _refused(source, error) from error
    raise StorageError(
        f"{source} is not the plain file of {size:,} bytes any more that it was when the export was planned; export "
        "again",
        path=source,
        errno=None,
    )


# the walk ------------------------------------------------------------------------------------------------------


def _entries(root: str, below: str, left: list[LeftOut]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """What is in a directory and in those below it that are worth a look; the others go to ``left``."""
    try:
        with os.scandir(os.path.join(root, below)) as entries:
            here = sorted(islice(entries, ENTRIES_MAX + 1), key=lambda entry: entry.name)
    except OSError as error:
        raise _refused(os.path.join(root, below), error) from error
    for entry in here:
        path = f"{below}/{entry.name}" if below else entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield path, entry
            continue
        why = why_no_path(f"{path}/x") or _why_not_by_name(entry.name)
        if why is not None:
            left.append(LeftOut(path, why))
        else:
            yield from _entries(root, path, left)


def _judge(path: str, entry: os.DirEntry[str]) -> FoundFile | LeftOut:
    why = why_no_path(path) or _why_not_by_name(entry.name)
    if why is not None:
        return LeftOut(path, why)
    source = entry.path
    try:
        if entry.is_symlink():
            try:
                source = os.path.realpath(source, strict=True)
            except OSError:
                return LeftOut(path, "it is a link that leads nowhere")
            why = _why_not_by_target(source)
            if why is not None:
                return LeftOut(path, why)
        status = os.lstat(source)
        if not stat.S_ISREG(status.st_mode):
            return LeftOut(path, _NO_FILE)
        why = _why_not_by_content(source, status.st_size)
    except OSError as error:
        raise _refused(entry.path, error) from error
    if why is not None:
        return LeftOut(path, why)
    if status.st_size <= FILE_BYTES_MAX:
        return FoundFile(path, source, status.st_size)
    too_large = f"it has {status.st_size:,} bytes, and files beside the weights may have {FILE_BYTES_MAX:,}"
    if entry.name.lower().endswith(_NEEDED):
        raise ConfigError(
            f"{entry.path} can't go into an export: {too_large}; what it is for may not load without it, so it is not "
            "left out: give a directory with the real one",
            field="assets",
        )
    return LeftOut(path, too_large)


def _why_not_by_name(name: str) -> str | None:
    low = name.lower()
    if _WEIGHTS.fullmatch(low) or _WEIGHT_NAMES.fullmatch(low):
        return _A_WEIGHT
    if _SECRETS.fullmatch(low):
        return _PRIVATE
    if _LEAVINGS.fullmatch(low):
        return _LEFT_BEHIND
    return None


def _why_not_by_target(target: str) -> str | None:
    """What a link leads to may be none of the model's business: judged by its own name as well."""
    parts = target.split("/")
    if parts[1] in ("proc", "sys", "dev"):
        return _NO_FILE
    if parts[-1].startswith(".") or _SECRET_DIRECTORIES.intersection(parts):
        return _PRIVATE
    if os.path.isdir(target):
        return "it is a link to a directory"
    return _why_not_by_name(parts[-1])


def _why_not_by_content(source: str, size: int) -> str | None:
    """Weights under a name that doesn't say so, and private keys, by how they begin."""
    fd = os.open(source, PLAIN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return _NO_FILE
        head = os.pread(fd, HEAD_BYTES, 0)
    finally:
        os.close(fd)
    if head.startswith(b"-----BEGIN ") and b"PRIVATE KEY" in head:
        return _PRIVATE
    pickled = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    header = int.from_bytes(head[:8], "little")
    safetensors = head[8:9] == b"{" and 2 <= header <= size - 8
    if head.startswith(_MAGICS) or pickled or safetensors or head[257:262] == b"ustar":
        return "it begins like a file of weights"
    return None


def _too_much(root: str, what: str) -> ConfigError:
    return ConfigError(
        f"{root} holds {what}: that is more than the directory of one model; give the directory that config.json is "
        "in, without what doesn't belong to the model",
        field="assets",
    )


def _refused(path: str, error: OSError) -> StorageError:
    return StorageError(
        f"{path} could not be read: {error.strerror}; it belongs into the export: check the path and its permissions",
        path=path,
        errno=error.errno,
    )
