"""What a user may set, checked when it is set.

`CheckpointConfig` is the one place where knobs and their defaults live; everything below takes them as required
arguments. A value out of range is a `ConfigError` that names the field, raised on construction: nothing starts with
a configuration that can't work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from holdfast.arguments import checked_int, checked_seconds, unfit
from holdfast.dtypes import ITEMSIZE
from holdfast.limits import IOClass, check_limits
from holdfast.retention import Keep
from holdfast.root import checked_template
from holdfast.signals import checked_signals

if TYPE_CHECKING:
    import signal

    import torch

Mode = Literal["async", "sync"]
StagingMode = Literal["lazy", "eager"]
WhenBusy = Literal["wait", "skip"]
OnError = Literal["raise", "raise_now", "warn"]
OnCorrupt = Literal["fallback", "raise"]

_OWNER: Final = "CheckpointConfig"
_NO_CAST: Final = ("float4_e2m1fn_x2", "float8_e8m0fnu")
"""Two values a byte; and powers of two only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How a `CheckpointManager` saves, keeps and loads.

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
        last_model_only: `save(final=True)` keeps the modules only; such a checkpoint is never resumed from.
        last_dtype: and converts the modules' floating-point tensors to this dtype, those of optimizers never; a
            `torch.dtype`, its name, or None.
    Loading
        load_only: never write, lock or recover.
        load_step: `restore()` loads this step; None or -1 for the newest.
        load_model_only: restore the modules only.
        exclude_from_loading: top-level names of the state that `restore` leaves alone.
        initial_load_path: a checkpoint, or a Hugging Face model's directory, to start from where the root has none
            yet; its modules only are loaded.
        initial_key_map: how a Hugging Face directory at `initial_load_path` has the modules' tensors, see `load`; None
            for the model's own way.
        on_corrupt: ``"fallback"`` to the next older verified step, or ``"raise"``.
    Names
        name_template: directory of one step; has exactly one field, ``{step}``.
    Limits
        stage_timeout, persist_timeout, commit_timeout: seconds, > 0 and at most 1e8: until copies are complete and
            ranks agree; until every rank's bytes are durable; until published.
        writers: engine threads a rank that write and hash; 1 to 16.
        io_limit_bytes_per_s: what one rank's engine may write a second; >= 1 MiB, or None for no limit.
        nice: scheduling priority of the engine; 0 to 19.
        io_class: its I/O class; ``"none"`` leaves it to what the kernel derives from ``nice``, ``"idle"`` writes when
            nobody else uses the disk.
        io_level: within ``"best_effort"``, from 0, served first, to 7; None for the usual 4.
        host_writers: how many engines of this host may write at a time, counting those of all jobs of this user that
            say so; 1 to 64, or None for any number. Waiting for a turn counts for ``persist_timeout``.
    Preemption
        save_on_signal: signals on which `CheckpointManager.step` saves, on every rank at the same step, and then does
            what the signal would have done; numbers, `signal.Signals` or names, one or several.
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

    def __post_init__(self) -> None:
        checked_int(_OWNER, "every", self.every, low=1, optional=True)
        checked_int(_OWNER, "in_flight", self.in_flight, low=1, high=4)
        check_limits(_OWNER, self)
        checked_int(_OWNER, "load_step", self.load_step, low=-1, optional=True)
        for name in ("stage_timeout", "persist_timeout", "commit_timeout", "signal_timeout"):
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
        ):
            if getattr(self, name) not in get_args(kind):
                raise unfit(_OWNER, name, getattr(self, name), "one of " + ", ".join(map(repr, get_args(kind))))
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise unfit(_OWNER, "keep", self.keep, "a holdfast.Keep or None")
        object.__setattr__(self, "exclude_from_loading", _names("exclude_from_loading", self.exclude_from_loading))
        object.__setattr__(self, "save_on_signal", checked_signals(self.save_on_signal))
        checked_template(_OWNER, self.name_template, example="step-{step}")
        object.__setattr__(self, "initial_load_path", _initial_path(self.initial_load_path))
        if self.initial_key_map is not None and self.initial_load_path is None:
            raise unfit(
                _OWNER,
                "initial_key_map",
                self.initial_key_map,
                "None where there is no initial_load_path to read by it",
            )
        object.__setattr__(self, "last_dtype", _dtype_name(self.last_dtype))


def config_within(timeout_s: float) -> CheckpointConfig:
    """That of a session for a single delivery, which has ``timeout_s`` seconds for all of it."""
    limit_s = max(0.1, math.ceil(timeout_s * 10) / 10)  # to the tenth of a second: it is in messages
    return CheckpointConfig(
        keep=None, in_flight=1, stage_timeout=limit_s, persist_timeout=limit_s, commit_timeout=limit_s
    )


def _initial_path(value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "://" in path or "\0" in path:
        raise unfit(_OWNER, "initial_load_path", value, "the path of a directory, or None")
    return path


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        names = tuple(value)
        if all(isinstance(item, str) for item in names):
            return names
    raise unfit(_OWNER, name, value, "a collection of top-level names")


def _dtype_name(dtype: object) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE or not name.startswith(("float", "bfloat")) or name in _NO_CAST:
        raise unfit(
            _OWNER, "last_dtype", dtype, "a floating-point torch.dtype that tensors can be cast to, its name, or None"
        )
    return name
