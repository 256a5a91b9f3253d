"""Collect the files of an export beside the weights: configuration, tokenizer, processor, chat templates, custom code.

    collect_assets("path/of/source/model")                   its files that are no weights
    collect_assets([config, processor], tokenizer)           what their ``save_pretrained`` writes
    collect_assets("path", model=model, dtype="bfloat16")    and what ``model.save_pretrained`` says of it

Guarantees: everything is read, or looked at, before a byte of an export is written, and what is asked for wrongly is a
`ConfigError`; the live objects are left as they are (transformers changes the configuration of a model that it saves:
here a copy of it is changed); every path is plain, relative and stays inside the export.
Assumes: one rank calls this, in a thread that may run transformers' code. Imports neither torch nor transformers: who
passes an object of theirs has them.
Does not: write anything but to a temporary directory of its own, nor reach for the Hugging Face hub.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, StorageError
from holdfast.export.layout import ADAPTER_CONFIG_NAME, SUFFIX
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.format.safetensors import INDEX_NAME, TORCH_CODES
from holdfast.storage.files import PLAIN_FLAGS
from holdfast.validation import absolute

if TYPE_CHECKING:
    from collections.abc import Iterator


# Select the files of a model's directory that belong into an export: configurations, tokenizer files, chat templates
# and custom code, also in subdirectories. Left out, each with its reason:
#
#     weights       of any format, by name or by their first bytes; their indexes; optimizer states; archives
#     secrets       keys, tokens, ``.env``, ``.ssh``, by name, by the target of a link, or by their first bytes
#     hidden files  ``.git``, ``.cache``, ``.gitattributes``: readers of a model ignore them
#     leftovers     ``__pycache__``, temporary files of editors and downloads, checkpoints of a trainer
#     not files     dangling links, links to directories, pipes, devices; names that a manifest can't hold
#
# A link to a plain file counts as that file, as in snapshots of the Hugging Face cache. No directory is entered through
# a link, only plain files are opened, and opening never waits.

_log = logging.getLogger("holdfast")

FILE_BYTES_MAX: Final = 256 << 20
"""Maximum size of an asset: the largest tokenizers are a tenth of this; larger files hold weights or data."""
FILES_MAX: Final = 4096
ENTRIES_MAX: Final = 65_536
TOTAL_BYTES_MAX: Final = 1 << 30
COMPONENTS_MAX: Final = 2
"""Maximum number of components of a path in an export: a file, or a file in a directory."""
HEAD_BYTES: Final = 264

_NEEDED: Final = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of files that readers open: an export might not load without one, so none is skipped for its size."""
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
"""Reasons that are not logged; for all others the log says that a file was left out."""
_NO_NAME: Final = re.compile(r"[\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to take: ``path`` below the directory, with slashes; ``source`` where its bytes are, links resolved."""

    path: str
    source: str
    size: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not taken from a directory, and why."""

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
        f"{source} was a plain file of {size:,} bytes when the export was planned and has changed since; export again",
        path=source,
        errno=None,
    )


# the walk ------------------------------------------------------------------------------------------------------


def _entries(root: str, below: str, left: list[LeftOut]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relevant entries of a directory and its subdirectories; append the others to ``left``."""
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
            f"{entry.path} can't go into an export: {too_large}; the model may not load without "
            "it, so it can't be skipped: pass a directory with the real file",
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
    """Return why the target of a link is left out, judged by its own name as well."""
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
        f"{root} holds {what}: that is more than one model; pass the directory that contains "
        "config.json, without files that don't belong to the model",
        field="assets",
    )


def _refused(path: str, error: OSError) -> StorageError:
    return StorageError(
        f"{path} could not be read: {error.strerror}; it is needed for the export: check the path and its permissions",
        path=path,
        errno=error.errno,
    )


CONFIG_NAME: Final = "config.json"
GENERATION_CONFIG_NAME: Final = "generation_config.json"
HELD_BYTES_MAX: Final = 1 << 20
"""A larger file of a source directory stays where it is until it is copied."""

_TOKENIZER_FILES: Final = re.compile(
    r"(added_tokens|special_tokens_map|tekken|tokenizer|tokenizer_config|vocab)\.json|(merges|vocab)\.txt"
    r"|chat_template\.(jinja|json)|(sentencepiece\.bpe|spiece|tokenizer)\.model|.*\.tiktoken"
    r"|additional_chat_templates/.*"
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of an export: its ``path`` there, with slashes, and its bytes, or the plain ``source`` that has them."""

    path: str
    size: int
    data: bytes | None = field(default=None, repr=False)
    source: str | None = None

    def read(self) -> bytes:
        """Its bytes. Raises `StorageError` if the source is not as large any more as it was, or can't be read."""
        if self.data is not None:
            return self.data
        assert self.source is not None, "an asset has bytes or a source"
        return read_file(self.source, self.size)


@dataclass(frozen=True, slots=True)
class AssetSet:
    """Files beside the weights, sorted by path, and those that were left out of the source directories."""

    files: tuple[Asset, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(asset.path for asset in self.files)

    @property
    def nbytes(self) -> int:
        return sum(asset.size for asset in self.files)

    def contents(self) -> dict[str, bytes]:
        """The bytes of each by its path. Raises `StorageError` as `Asset.read` does."""
        return {asset.path: asset.read() for asset in self.files}

    def with_config(self, updates: Mapping[str, Any]) -> AssetSet:
        """The same with members of its ``config.json`` set, such as ``quantization_config``. Raises `ConfigError`."""
        if CONFIG_NAME not in self.paths:
            raise ConfigError(f"there is no {CONFIG_NAME} among the assets to update", field="assets")
        files = tuple(_revised(asset, None, updates) if asset.path == CONFIG_NAME else asset for asset in self.files)
        return AssetSet(files, self.left_out)

    def require_apart_from(self, names: Iterable[str]) -> None:
        """Raise `ConfigError` if an asset has the path of one of ``names``, which the export writes itself."""
        both = sorted(set(self.paths).intersection(names))
        if both:
            raise ConfigError(
                f"the assets contain {', '.join(both[:8])}, but the export writes files of these names "
                "itself; leave them out of the assets",
                field="assets",
            )


def collect_assets(
    assets: object = None,
    tokenizer: object = None,
    model: object = None,
    *,
    dtype: object = None,
    adapter: bool | str = False,
) -> AssetSet:
    """All files of an export that hold no weights. Where two bring the same path, the later of this list has it:

    assets: a directory of a model, an object with ``save_pretrained`` (a configuration, a generation configuration, a
        tokenizer, a processor, PEFT's configuration of an adapter), or several of both. A directory without
        ``config.json`` is refused, but for an adapter, which needs none.
    model: of transformers' models, ``config.json``, ``generation_config.json`` and custom code as ``save_pretrained``
        writes them; an object among ``assets`` goes before them. Any other module brings nothing.
    tokenizer: an object, or a directory with its files; instead of those that the assets brought.
    dtype: torch's, or its name: what ``config.json`` says of the weights; None is what it says anyway, and for a model
        that of its parameters.
    adapter: True, or an adapter's name: ``adapter_config.json`` of the model's only, active or so named adapter, and no
        ``config.json``, as PEFT has it.

    Raises:
        ConfigError: something that can't be used, said by its name, before anything was written.
        StorageError: a directory can't be read, or there is no room for temporary files.
    """
    given = _several(assets)
    wanted = _dtype_name(dtype)
    base = _base_model(model)
    transformers_model = base if _is_instance(base, "transformers.modeling_utils", "PreTrainedModel") else None
    files: dict[str, Asset] = {}
    left: list[LeftOut] = []
    chosen: set[str] = set()
    for item in given:
        if isinstance(item, (str, os.PathLike)):
            found, without = _from_directory(item, needs_config=not adapter)
            left.extend(without)
        else:
            found = _saved(_prepared(item, wanted, transformers_model), "assets")
            chosen.update(found)
        files.update(found)
    if adapter:
        files = {path: asset for path, asset in files.items() if path not in (CONFIG_NAME, GENERATION_CONFIG_NAME)}
        if ADAPTER_CONFIG_NAME not in files:
            files.update(_saved(_adapter_config(model, adapter), "model"))
    elif transformers_model is not None:
        own = _from_model(transformers_model, wanted)
        files.update({path: asset for path, asset in own.items() if path not in chosen})
    if tokenizer is not None:
        files = _with_tokenizer(files, tokenizer, left)
    if CONFIG_NAME in files:
        files[CONFIG_NAME] = _revised(files[CONFIG_NAME], wanted, {})
    return AssetSet(tuple(files[path] for path in sorted(files)), tuple(left))


# what was given ------------------------------------------------------------------------------------------------


def _several(assets: object) -> list[object]:
    """The assets one by one; each is a path or can save itself."""
    if assets is None:
        return []
    one = isinstance(assets, (str, os.PathLike)) or _can_save(assets) or not isinstance(assets, (list, tuple))
    items = [assets] if one else [*assets]  # type: ignore[misc]
    for item in items:
        if isinstance(item, (str, os.PathLike)):
            continue
        if _is_instance(item, "torch.nn", "Module"):
            raise ConfigError(
                f"a {type(item).__name__} can't be an asset, because it would add its weights; pass it "
                "as the model, or pass its config as an asset",
                field="assets",
            )
        if not _can_save(item):
            raise ConfigError(
                f"{item!r:.200} is not an asset; pass the directory of a model, an object with save_pretrained (a "
                "transformers config, tokenizer or processor), or a list of these",
                field="assets",
            )
    return items


def _can_save(item: object) -> bool:
    return not isinstance(item, type) and callable(getattr(item, "save_pretrained", None))


def _is_instance(value: object, module: str, name: str) -> bool:
    """Return True if ``value`` is an instance of a class of ``module``, without importing the module."""
    known = getattr(sys.modules.get(module), name, None)
    return isinstance(known, type) and isinstance(value, known)


def _is_config(item: object) -> bool:
    return _is_instance(item, "transformers.configuration_utils", "PreTrainedConfig")


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_CODES:
        raise ConfigError(f"{dtype!r:.80} is not an element type that can be exported", field="dtype")
    return name


def _base_model(model: object) -> Any:
    """The model inside of what ``torch.compile``, DDP and PEFT put around it."""
    if model is None or not _is_instance(model, "torch.nn", "Module"):
        return model
    from holdfast.keymap.hf_default import unwrapped

    inner = unwrapped(model)
    for _ in range(4):  # an adapter may be around another
        if not hasattr(inner, "peft_config") or not callable(getattr(inner, "get_base_model", None)):
            break
        inner = unwrapped(inner.get_base_model())
    return inner


# from a directory ----------------------------------------------------------------------------------------------


def _from_directory(directory: str | os.PathLike[str], *, needs_config: bool) -> tuple[dict[str, Asset], list[LeftOut]]:
    path = _existing(directory, "assets")
    config = os.path.join(path, CONFIG_NAME)
    if needs_config and not os.path.isfile(config):
        dangling = ": it is a link that leads nowhere" if os.path.islink(config) and not os.path.exists(config) else ""
        raise ConfigError(
            f"{path} has no {CONFIG_NAME}{dangling}, so the export could not be loaded; pass the "
            "directory of a model (in a Hugging Face cache, the snapshots/… directory below it); "
            "pass files of a tokenizer as `tokenizer`",
            field="assets",
        )
    found, left = scan_directory(path)
    return {file.path: _held(file.path, file.source, file.size) for file in found}, left


def _existing(directory: str | os.PathLike[str], name: str) -> str:
    text = os.fsdecode(directory)
    if "://" in text:
        raise ConfigError(
            f"{text}: {name} are read from a directory; object stores are not in this release", field=name
        )
    path = absolute(text)
    if not os.path.isdir(path):
        what = "is a file" if os.path.isfile(path) else "doesn't exist"
        raise ConfigError(
            f"{path} {what}; {name} come from a directory on this machine: names on the Hugging Face hub aren't "
            "downloaded",
            field=name,
        )
    return path


def _held(path: str, source: str, size: int) -> Asset:
    if size > HELD_BYTES_MAX and path != CONFIG_NAME:
        return Asset(path, size, source=source)
    return Asset(path, size, data=read_file(source, size))


# from objects --------------------------------------------------------------------------------------------------


def _saved(item: Any, argument: str) -> dict[str, Asset]:
    """Collect the files that ``item.save_pretrained`` writes."""
    with _temporary() as directory:
        _save(item, directory, argument)
        return _all_of(directory, type(item).__name__)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="holdfast-assets-")
    except OSError as error:
        where = tempfile.gettempdir() if tempfile.tempdir else "the temporary directory"
        raise StorageError(
            f"{where} can't be written to: {error.strerror}; set TMPDIR to a directory with free space",
            path=str(where),
            errno=error.errno,
        ) from error


def _save(item: Any, directory: str, argument: str) -> None:
    try:
        item.save_pretrained(directory)
    except OSError as error:
        raise StorageError(
            f"{type(item).__name__} could not be saved to {directory}: {error}; the disk may be full",
            path=directory,
            errno=error.errno,
        ) from error
    except Exception as error:
        raise ConfigError(f"{type(item).__name__} can't be saved: {error}", field=argument) from error


def _all_of(directory: str, whose: str) -> dict[str, Asset]:
    """Every file of a temporary directory, read, since the directory goes away."""
    files: dict[str, Asset] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            source = os.path.join(parent, name)
            path = os.path.relpath(source, directory).replace(os.sep, "/")
            why = why_no_path(path)
            size = os.lstat(source).st_size
            if path.endswith((SUFFIX, INDEX_NAME)):
                why = "it holds weights, or says where they are"
            elif why is None and size > FILE_BYTES_MAX:
                why = f"it has {size:,} bytes, and files beside the weights may have {FILE_BYTES_MAX:,}"
            if why is not None:
                raise ConfigError(
                    f"{whose} has saved {path!r:.200}, which can't go into an export: {why}", field="assets"
                )
            files[path] = Asset(path, size, data=read_file(source, size))
    return files


def _prepared(item: Any, dtype: str | None, model: Any) -> Any:
    """A configuration is saved from a copy, which says what the export is."""
    if not _is_config(item):
        return item
    config = copy.deepcopy(item)
    if model is not None:
        _describe(config, model, dtype)
    elif dtype is not None:
        config.dtype = dtype
    return config


# from a model --------------------------------------------------------------------------------------------------


def _from_model(model: Any, dtype: str | None) -> dict[str, Asset]:
    """Collect the files that ``model.save_pretrained`` writes beside the weights."""
    config = copy.deepcopy(model.config)
    _describe(config, model, dtype)
    with _temporary() as directory:
        if model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            try:
                custom_object_save(model, directory, config=config)
            except Exception as error:
                raise ConfigError(
                    f"the code of {type(model).__name__} can't be saved: {error}", field="model"
                ) from error
        _save(config, directory, "model")
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            _save(copy.deepcopy(model.generation_config), directory, "model")
        return _all_of(directory, type(model).__name__)


def _describe(config: Any, model: Any, dtype: str | None) -> None:
    """Set what ``save_pretrained`` sets before it saves the configuration."""
    name = dtype or next((str(value.dtype) for value in model.parameters() if value.is_floating_point()), None)
    if name is not None:
        config.dtype = name.removeprefix("torch.")
    # FSDP2 puts a class of its own in front, named after the model's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]


def _adapter_config(model: Any, adapter: bool | str) -> Any:  # noqa: FBT001 - as in the public function
    """PEFT's configuration of one adapter, as a copy that says what PEFT's own ``save_pretrained`` would."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        raise ConfigError(
            f"an export of an adapter needs its {ADAPTER_CONFIG_NAME}: pass the model that has the "
            "adapter, or its PEFT configuration among the assets",
            field="assets",
        )
    names = [adapter] if isinstance(adapter, str) else [*configs] if len(configs) == 1 else _active(model)
    if len(names) != 1 or names[0] not in configs:
        raise ConfigError(
            f"which adapter to export? The model has {', '.join(map(repr, configs))}; wanted: {names!r:.200}. Name one "
            "of them",
            field="adapter",
        )
    config = copy.deepcopy(configs[names[0]])
    if hasattr(config, "inference_mode"):
        config.inference_mode = True
    if getattr(config, "base_model_name_or_path", "") is None:
        base = _base_model(model)
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    return config


def _active(model: Any) -> list[str]:
    active = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    return [active] if isinstance(active, str) else [*active] if isinstance(active, Iterable) else []


# the tokenizer, and the last word on the configuration ---------------------------------------------------------


def _with_tokenizer(files: dict[str, Asset], tokenizer: object, left: list[LeftOut]) -> dict[str, Asset]:
    """The files with those of this tokenizer in place of another's: a mixture of two would be neither."""
    if isinstance(tokenizer, (str, os.PathLike)):
        found, without = scan_directory(_existing(tokenizer, "tokenizer"))
        left.extend(without)
        brought = {
            file.path: _held(file.path, file.source, file.size)
            for file in found
            if file.path not in (CONFIG_NAME, GENERATION_CONFIG_NAME)
        }
    elif _can_save(tokenizer) and not _is_instance(tokenizer, "torch.nn", "Module"):
        brought = _saved(tokenizer, "tokenizer")
    else:
        raise ConfigError(
            f"{tokenizer!r:.200} is not a tokenizer; pass an object with save_pretrained, or a "
            "directory with its files",
            field="tokenizer",
        )
    others = {path: asset for path, asset in files.items() if not _TOKENIZER_FILES.fullmatch(path)}
    return others | brought


def _revised(asset: Asset, dtype: str | None, updates: Mapping[str, Any]) -> Asset:
    """``config.json`` as it is, if it says what it should, or rendered anew as transformers does."""
    try:
        document = json.loads(asset.read().decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG_NAME} among the assets isn't JSON: {error}", field="assets") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{CONFIG_NAME} among the assets is not a JSON object", field="assets")
    changes = dict(updates)
    for key in ("dtype", "torch_dtype"):  # its name of today, and before transformers 5
        if dtype is not None and key in document and document[key] != dtype:
            changes.setdefault(key, dtype)
    if all(key in document and document[key] == value for key, value in changes.items()):
        return asset
    try:
        text = json.dumps({**document, **changes}, indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{changes!r:.200} can't go into {CONFIG_NAME}: {error}", field="assets") from error
    data = text.encode()
    return Asset(asset.path, len(data), data=data)
