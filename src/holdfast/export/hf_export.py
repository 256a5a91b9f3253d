"""`HFExport`: what to export, when and where to, as users write it in ``CheckpointManager(exports=[...])``.

Guarantees: whatever can be known to be wrong is a `ConfigError` when it is made, which names the field, what was
expected and what was found.
Does not: look at a file system or a model (``export.assets``, ``export.key_map`` do, before a byte is written).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.arguments import checked_int, unfit
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.limits import IOClass, check_limits
from holdfast.retention import Keep
from holdfast.root import checked_template

if TYPE_CHECKING:
    import torch

SHARD_BYTES: Final = 5 * 2**30
_OWNER: Final = "HFExport"


@dataclass(frozen=True, slots=True)
class HFExport:
    """Hugging Face weights of the state's modules, every so many steps, beside the checkpoints.

    What and where
        root: a directory that every rank sees; made if it doesn't exist. Not the manager's own root.
        every: steps between exports, >= 1; None exports only where a call asks for it.
        name_template: directory of one export below ``root``; has exactly one field, ``{step}``.
        keep: which exports are kept, as for checkpoints; None keeps all.
        latest_link: keep ``hf-latest`` in ``root``, a symbolic link to the newest export, replaced atomically.
        modules: top-level names of the state to export; None for all that are modules.
    Weights
        dtype: floating-point tensors are converted to it; None leaves each as it is. ``float8_e4m3fn`` stores matrices
            with a scale for each block of 128 x 128.
        fp32_keys: regular expressions; exported names that one of them matches anywhere are float32 whatever ``dtype``.
        key_map: None for what `save_pretrained` would write, else rules of ``holdfast.export``, a mapping of names, a
            function over a state dict, or a torchtitan ``StateDictAdapter``.
        max_shard_bytes: of one file of weights, as `save_pretrained` counts; >= 1.
    Other files
        assets: the directory of a source model, or a config, tokenizer or processor of transformers (or several), whose
            files go beside the weights; None takes the config from the module, where it has one.
        tokenizer: a tokenizer or processor to save beside ``assets``.
    Limits
        nice: scheduling priority of the process that writes; 0 to 19.
        writers: its threads; 1 to 16.
        io_limit_bytes_per_s: what one rank may write a second; >= 1 MiB, or None for no limit.
        io_class, io_level: its I/O class, ``"none"``, ``"best_effort"`` (from 0, served first, to 7) or ``"idle"``.
        host_writers: how many processes of this host may write at a time, counting those of all checkpoints, exports
            and jobs of this user that say so; 1 to 64, or None for any number.
    """

    root: str | os.PathLike[str]
    every: int | None = 1_000
    name_template: str = "hf-{step}"
    keep: Keep | None = None
    latest_link: bool = True
    dtype: torch.dtype | str | None = None
    fp32_keys: Sequence[str] = ()
    key_map: Any = None
    assets: Any = None
    tokenizer: Any = None
    max_shard_bytes: int = SHARD_BYTES
    modules: Sequence[str] | None = None
    nice: int = 15
    writers: int = 2
    io_limit_bytes_per_s: int | None = None
    io_class: IOClass = "none"
    io_level: int | None = None
    host_writers: int | None = None

    def __post_init__(self) -> None:
        given: object = self.root
        path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "://" in path or "\0" in path:
            raise unfit(_OWNER, "root", given, "the path of a directory")
        object.__setattr__(self, "root", os.path.abspath(path))
        checked_int(_OWNER, "every", self.every, low=1, optional=True)
        checked_int(_OWNER, "max_shard_bytes", self.max_shard_bytes, low=1)
        check_limits(_OWNER, self)
        if not isinstance(self.latest_link, bool):
            raise unfit(_OWNER, "latest_link", self.latest_link, "True or False")
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise unfit(_OWNER, "keep", self.keep, "a holdfast.Keep or None")
        checked_template(_OWNER, self.name_template, example="hf-{step}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype, field="HFExport.dtype"))
        object.__setattr__(self, "fp32_keys", _strings("fp32_keys", self.fp32_keys))
        if self.modules is not None:
            object.__setattr__(self, "modules", _strings("modules", self.modules))


def dtype_name(dtype: object, *, field: str) -> str | None:
    """The name of a floating-point dtype that weights can be exported in; None for None. Raises `ConfigError`."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    fits = name in {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn"} and name in ITEMSIZE
    if not fits:
        expected = "a floating-point torch.dtype (float32, bfloat16, float16, float8_e4m3fn), its name, or None"
        raise ConfigError(f"{field}: expected {expected}, found {dtype!r}", field=field.rpartition(".")[2])
    return name


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise unfit(_OWNER, name, value, "a sequence of strings")
