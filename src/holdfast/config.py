"""Define the settings, checked on construction: `CheckpointConfig`, and `HFExport` for exports beside checkpoints.

This is the one place where settings and their defaults are defined; lower layers take them as required arguments.

Guarantees: any error that can be known without I/O is a `ConfigError` on construction, which names the field, what was
expected and what was found: nothing starts with an invalid configuration.
Does not: look at a file system or a model (``export.assets``, ``keymap.compile`` do, before a byte is written).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, get_args

from holdfast.catalog.retention import Keep
from holdfast.catalog.root import checked_template
from holdfast.cores import CORE_MAX, is_cores
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.validation import checked_int, checked_seconds, checked_signals, is_store, located, unfit

if TYPE_CHECKING:
    import signal

    import torch

    from holdfast.cores import Cores


# Limits on writing, shared by checkpoints and exports. Enforced by ``engine``.

IOClass = Literal["none", "best_effort", "idle"]
IO_LIMIT_LEAST: Final = 1 << 20
HOST_WRITERS_MOST: Final = 64


class Limits(TypedDict):
    """Write limits by the names that users and the engine's client use."""

    writers: int
    io_limit_bytes_per_s: int | None
    nice: int
    io_class: IOClass
    io_level: int | None
    host_writers: int | None
    cores: Cores


def check_limits(owner: str, config: Any) -> None:
    """Raise `ConfigError` unless ``config``, an ``owner``, has good values for all; makes ``cores`` a tuple."""
    checked_int(owner, "writers", config.writers, low=1, high=16)
    checked_int(owner, "nice", config.nice, low=0, high=19)
    checked_int(owner, "io_limit_bytes_per_s", config.io_limit_bytes_per_s, low=IO_LIMIT_LEAST, optional=True)
    checked_int(owner, "io_level", config.io_level, low=0, high=7, optional=True)
    checked_int(owner, "host_writers", config.host_writers, low=1, high=HOST_WRITERS_MOST, optional=True)
    io_class, level = config.io_class, config.io_level
    if io_class not in get_args(IOClass):
        raise unfit(owner, "io_class", io_class, "one of " + ", ".join(map(repr, get_args(IOClass))))
    if level is not None and io_class != "best_effort":
        raise unfit(owner, "io_level", level, f"None with io_class={io_class!r}: it is of 'best_effort' alone")
    if not is_cores(config.cores):
        raise unfit(owner, "cores", config.cores, f"'auto', 'any' or numbers of cores (0 to {CORE_MAX})")
    if not isinstance(config.cores, str):
        object.__setattr__(config, "cores", tuple(sorted(set(config.cores))))


def limits_of(config: Any) -> Limits:
    """Return the limits of a configuration in the form that its engine takes."""
    return Limits(
        writers=config.writers,
        io_limit_bytes_per_s=config.io_limit_bytes_per_s,
        nice=config.nice,
        io_class=config.io_class,
        io_level=config.io_level,
        host_writers=config.host_writers,
        cores=config.cores,
    )


Mode = Literal["async", "sync"]
StagingMode = Literal["lazy", "eager"]
WhenBusy = Literal["wait", "skip"]
OnError = Literal["raise", "raise_now", "warn"]
OnCorrupt = Literal["fallback", "raise", "local"]
OnSuspicious = Literal["warn", "raise", "ignore"]

_OWNER: Final = "CheckpointConfig"
_EXPORT: Final = "HFExport"
SHARD_BYTES: Final = 5 * 2**30
_CASTS: Final = {name for name in ITEMSIZE if name.startswith(("float", "bfloat"))} - {
    *("float4_e2m1fn_x2", "float8_e8m0fnu"),  # two values per byte; powers of two only
}
_EXPORTED: Final = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Configure how a `CheckpointManager` saves, keeps and loads.

    Cadence
        every: save when ``step % every == 0``; steps, >= 1, or None for never by interval.
        first_step: also save at the first step the manager sees.
        keep: which published steps stay, see `Keep`; None keeps all.
    Saving
        mode: ``"async"`` returns at once; ``"sync"`` returns when published.
        staging: ``"lazy"`` copies during the next forward and backward; ``"eager"`` before `save` returns.
        in_flight: captures that may exist at a time, each with its own file images; 1 to 4.
        when_busy: with all of them in use, ``"wait"`` for one (counted as stall) or ``"skip"`` this save.
        on_error: a failed save is raised by the next `step`, `save`, `wait` or `close` (``"raise"``), already by the
            next optimizer step or `before_update` (``"raise_now"``), or only logged and warned of (``"warn"``).
        on_suspicious: a save after steps of the optimizer that changed no parameter, whose replicas differ, or in which
            NaN or Inf has appeared is logged and noted in its manifest (``"warn"``), or fails before it is published
            (``"raise"``); ``"ignore"`` doesn't look.
        last_model_only: `save(final=True)` saves the modules only; such a checkpoint is never resumed from.
        last_dtype: `save(final=True)` converts floating-point tensors of modules, not of optimizers, to this dtype; a
            `torch.dtype`, its name, or None.
    Loading
        load_only: never write, lock or recover.
        load_step: `restore()` loads this step; None or -1 for the newest.
        load_model_only: restore the modules only.
        exclude_from_loading: top-level names that `restore` doesn't load; unknown names are a `ConfigError`
            when the manager is made.
        initial_load_path: a checkpoint, or a Hugging Face model's directory, to start from while the root has none;
            only its modules are loaded.
        initial_key_map: maps a Hugging Face directory at `initial_load_path` to the modules, see `load`; None
            for the model's own layout.
        on_corrupt: ``"fallback"`` to the next older verified step, or ``"raise"``; if there is no step to resume
            from, but something that looks like a checkpoint, a warning or an error. ``"local"``: like ``"fallback"``,
            and a mirror that can't be asked is a warning instead of an error.
    Mirror
        mirror_keep: which steps stay in the manager's mirror, see `Keep`; None keeps all. What it wouldn't keep is not
            uploaded.
        mirror_backlog: how many steps that `keep` would delete stay while they wait for their upload; >= 0. With more,
            the oldest go, with a warning: the mirror never gets them.
        mirror_timeout: seconds for one upload; > 0 and at most 1e8.
    Names
        name_template: directory of one step; has exactly one field, ``{step}``.
    Limits
        stage_timeout, persist_timeout, commit_timeout: seconds, > 0 and at most 1e8: until copies are complete and
            ranks agree; until every rank's bytes are durable; until published.
        writers: engine threads a rank that write and hash; 1 to 16.
        io_limit_bytes_per_s: write limit of one rank's engine per second; >= 1 MiB, or None for no limit.
        nice: scheduling priority of the engine; 0 to 19.
        io_class: its I/O class; with ``"none"`` the kernel derives it from ``nice``, with ``"idle"`` it writes only
            when no other process uses the disk.
        io_level: level within ``"best_effort"``, from 0 (highest priority) to 7; None for the default 4.
        host_writers: how many engines of this host may write at a time, counting all jobs of this user that set
            it; 1 to 64, or None for any number. Waiting for a slot counts towards ``persist_timeout``.
        cores: numbers of the CPU cores that the engine runs on, of those that this process may use; ``"auto"`` for
            those of the NUMA node of the current CUDA device, if there is one; ``"any"`` for all. The memory of file
            images is on the NUMA nodes of these cores.
    Preemption
        save_on_signal: signals on which `CheckpointManager.step` saves, on every rank at the same step, before the
            signal takes effect; numbers, `signal.Signals` or names, one or several.
        signal_timeout: seconds from a signal until the process ends, saved or not; > 0 and at most 1e8.
    """

    every: int | None = 500
    keep: Keep | None = field(default_factory=lambda: Keep(last=3))
    mode: Mode = "async"
    staging: StagingMode = "lazy"
    first_step: bool = False
    last_model_only: bool = False
    last_dtype: torch.dtype | str | None = None
    load_model_only: bool = False
    exclude_from_loading: tuple[str, ...] = ()
    initial_load_path: str | os.PathLike[str] | None = None
    initial_key_map: Any = None
    load_step: int | None = None
    load_only: bool = False
    name_template: str = "step-{step}"
    in_flight: int = 2
    when_busy: WhenBusy = "wait"
    on_error: OnError = "raise"
    on_corrupt: OnCorrupt = "fallback"
    on_suspicious: OnSuspicious = "warn"
    mirror_keep: Keep | None = None
    mirror_backlog: int = 8
    mirror_timeout: float = 21_600.0
    save_on_signal: tuple[Any, ...] | signal.Signals | int | str = ()
    signal_timeout: float = 600.0
    stage_timeout: float = 600.0
    persist_timeout: float = 1800.0
    commit_timeout: float = 600.0
    writers: int = 2
    io_limit_bytes_per_s: int | None = None
    nice: int = 10
    io_class: IOClass = "none"
    io_level: int | None = None
    host_writers: int | None = None
    cores: Cores = "auto"

    def __post_init__(self) -> None:
        checked_int(_OWNER, "every", self.every, low=1, optional=True)
        checked_int(_OWNER, "in_flight", self.in_flight, low=1, high=4)
        check_limits(_OWNER, self)
        checked_int(_OWNER, "load_step", self.load_step, low=-1, optional=True)
        checked_int(_OWNER, "mirror_backlog", self.mirror_backlog, low=0)
        for name in ("stage_timeout", "persist_timeout", "commit_timeout", "signal_timeout", "mirror_timeout"):
            checked_seconds(name, getattr(self, name))
        for name in ("first_step", "last_model_only", "load_model_only", "load_only"):
            if not isinstance(getattr(self, name), bool):
                raise unfit(_OWNER, name, getattr(self, name), "True or False")
        for name, kind in (
            ("mode", Mode),
            ("staging", StagingMode),
            ("when_busy", WhenBusy),
            ("on_error", OnError),
            ("on_corrupt", OnCorrupt),
            ("on_suspicious", OnSuspicious),
        ):
            if getattr(self, name) not in get_args(kind):
                raise unfit(_OWNER, name, getattr(self, name), "one of " + ", ".join(map(repr, get_args(kind))))
        for name in ("keep", "mirror_keep"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), Keep):
                raise unfit(_OWNER, name, getattr(self, name), "a holdfast.Keep or None")
        excluded = _strings(
            _OWNER, "exclude_from_loading", self.exclude_from_loading, "a collection of top-level names"
        )
        object.__setattr__(self, "exclude_from_loading", excluded)
        object.__setattr__(self, "save_on_signal", checked_signals(self.save_on_signal))
        checked_template(_OWNER, self.name_template, example="step-{step}")
        if self.initial_load_path is not None:
            expected = "the path of a directory, a URL such as s3://bucket/model, or None"
            path = _directory(_OWNER, "initial_load_path", self.initial_load_path, expected)
            object.__setattr__(self, "initial_load_path", os.path.expanduser(path))
        elif self.initial_key_map is not None:
            raise unfit(
                _OWNER,
                "initial_key_map",
                self.initial_key_map,
                "None where there is no initial_load_path to read by it",
            )
        expected = "a floating-point torch.dtype that tensors can be cast to, its name, or None"
        object.__setattr__(self, "last_dtype", _dtype_name(_OWNER, "last_dtype", self.last_dtype, _CASTS, expected))


def config_within(timeout_s: float) -> CheckpointConfig:
    """Return the session configuration for a single delivery that has ``timeout_s`` seconds in all."""
    limit_s = max(0.1, math.ceil(timeout_s * 10) / 10)  # to the tenth of a second: it is in messages
    return CheckpointConfig(
        keep=None,
        in_flight=1,
        on_suspicious="ignore",
        stage_timeout=limit_s,
        persist_timeout=limit_s,
        commit_timeout=limit_s,
    )


@dataclass(frozen=True, slots=True)
class HFExport:
    """Configure Hugging Face exports of the state's modules at regular steps, beside the checkpoints.

    What and where
        root: a directory that every rank sees, made if it doesn't exist, or a URL such as ``s3://bucket/exports``. Not
            the manager's own root.
        every: steps between exports, >= 1; None exports only when a call asks for it.
        name_template: directory of one export below ``root``; has exactly one field, ``{step}``.
        keep: which exports are kept, as for checkpoints; None keeps all.
        latest_link: keep ``hf-latest`` in ``root``, a symbolic link to the newest export, replaced atomically.
            There is none on an object store, which has no links.
        modules: top-level names of the state to export; None for all that are modules. `export_hf` takes ``[""]`` for
            the tensors of a checkpoint that have no top-level name.
    Weights
        dtype: floating-point tensors are converted to it; None leaves each as it is. ``float8_e4m3fn`` stores matrices
            with a scale for each block of 128 x 128.
        fp32_keys: regular expressions; tensors whose exported name contains a match are float32, whatever ``dtype``.
        key_map: None for what `save_pretrained` would write, else rules of ``holdfast.export``, a mapping of names, a
            function over a state dict, or a torchtitan ``StateDictAdapter``.
        max_shard_bytes: of one file of weights, as `save_pretrained` counts; >= 1. On an object store one rank holds
            and writes a whole file.
    Other files
        assets: the directory of a source model, or a config, tokenizer or processor of transformers (or several), whose
            files go beside the weights; None takes the config from the module, where it has one.
        tokenizer: a tokenizer or processor to save beside ``assets``.
    Limits
        nice: scheduling priority of the process that writes; 0 to 19.
        writers: its threads; 1 to 16.
        io_limit_bytes_per_s: write limit of one rank per second; >= 1 MiB, or None for no limit.
        io_class, io_level: its I/O class, ``"none"``, ``"best_effort"`` (0, highest priority, to 7) or ``"idle"``.
        host_writers: how many processes of this host may write at a time, counting those of all checkpoints, exports
            and jobs of this user that set it; 1 to 64, or None for any number.
        cores: CPU cores that it runs on: numbers, ``"auto"`` or ``"any"``, as in `CheckpointConfig`.
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
    cores: Cores = "auto"

    def __post_init__(self) -> None:
        expected = "the path of a directory, or a URL such as s3://bucket/exports"
        object.__setattr__(self, "root", located(_directory(_EXPORT, "root", self.root, expected)))
        checked_int(_EXPORT, "every", self.every, low=1, optional=True)
        checked_int(_EXPORT, "max_shard_bytes", self.max_shard_bytes, low=1)
        check_limits(_EXPORT, self)
        if not isinstance(self.latest_link, bool):
            raise unfit(_EXPORT, "latest_link", self.latest_link, "True or False")
        object.__setattr__(self, "latest_link", self.latest_link and not is_store(os.fspath(self.root)))
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise unfit(_EXPORT, "keep", self.keep, "a holdfast.Keep or None")
        checked_template(_EXPORT, self.name_template, example="hf-{step}")
        expected = "a floating-point torch.dtype (float32, bfloat16, float16, float8_e4m3fn), its name, or None"
        object.__setattr__(self, "dtype", _dtype_name(_EXPORT, "dtype", self.dtype, _EXPORTED, expected))
        for name in ("fp32_keys", *(() if self.modules is None else ("modules",))):
            found = _strings(_EXPORT, name, getattr(self, name), "a sequence of strings", in_order=True)
            object.__setattr__(self, name, found)
        for pattern in self.fp32_keys:
            try:
                re.compile(pattern)
            except re.error as error:
                expected = f"regular expressions, such as 'norm' for every name that has it ({error})"
                raise unfit(_EXPORT, "fp32_keys", pattern, expected) from error


def _directory(owner: str, name: str, value: object, expected: str) -> str:
    """Return ``value`` if it can be the path of a directory; what a URL stands for (`located`); else raise `unfit`."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise unfit(owner, name, value, expected)
    try:
        return located(path, field=name) if "://" in path else path
    except ConfigError as error:
        raise unfit(owner, name, value, expected) from error


def _strings(owner: str, name: str, value: object, expected: str, *, in_order: bool = False) -> tuple[str, ...]:
    if isinstance(value, Sequence if in_order else Iterable) and not isinstance(value, str):
        found = tuple(value)
        if all(isinstance(item, str) for item in found):
            return found
    raise unfit(owner, name, value, expected)


def _dtype_name(owner: str, name: str, dtype: object, known: Collection[str], expected: str) -> str | None:
    stored = None if dtype is None else str(dtype).removeprefix("torch.")
    if stored is not None and stored not in known:
        raise unfit(owner, name, dtype, expected)
    return stored
