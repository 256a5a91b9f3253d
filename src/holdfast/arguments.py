"""What users pass, checked before anything is touched: paths, steps, metrics, deadlines, fields of configurations.

Every check raises `ConfigError` that names the argument, what was expected and what was found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

from holdfast.errors import ConfigError

LONGEST_S: Final = 1e8
"""Three years: sums of such deadlines fit into what the system's waits take."""
STEP_MAX: Final = (1 << 63) - 1
"""The files and messages that carry a step keep 64 bits for it."""


def checked_path(path: object, *, field: str) -> str:
    """``path`` made absolute; `ConfigError` for object stores and for what can't be a directory."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{field} must be the path of a directory, not {path!r}", field=field)
    if "://" in text:
        raise ConfigError(f"{text}: object stores are not in this release; give a directory", field=field)
    if "\0" in text:
        raise ConfigError(f"{field} must be the path of a directory, which has no NUL in it, not {text!r}", field=field)
    try:
        absolute = os.path.abspath(text)
    except FileNotFoundError as error:
        message = f"{field}: {text!r} is relative, and the working directory was removed; give an absolute path"
        raise ConfigError(message, field=field) from error
    try:
        absolute.encode()
    except UnicodeEncodeError as error:
        message = f"{field}: {absolute!r} is not UTF-8, and a checkpoint names its path in files that are; rename it"
        raise ConfigError(message, field=field) from error
    if os.path.lexists(absolute) and not os.path.isdir(absolute):
        raise ConfigError(f"{absolute} is a file; expected a directory, or a path that doesn't exist yet", field=field)
    return absolute


def is_path(path: object) -> bool:
    """Whether `checked_path` would take ``path``."""
    try:
        checked_path(path, field="path")
    except ConfigError:
        return False
    return True


def checked_step(step: object) -> None:
    """`ConfigError` unless ``step`` is an integer from 0 to 2**63 - 1."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step must be an integer >= 0, not {_told(step)}", field="step")
    if step > STEP_MAX:
        raise ConfigError(f"step must be at most 2**63 - 1 = {STEP_MAX}, not {_told(step)}", field="step")


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as plain floats; anything with ``float()`` will do (a 0-dim tensor, say). `ConfigError` otherwise."""
    given: object = {} if metrics is None else metrics
    if not isinstance(given, Mapping):
        raise ConfigError(f"metrics must be a mapping of names to numbers, not {given!r}", field="metrics")
    found = {}
    for name, value in given.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"metric {name!r} must be a number, not {_told(value)}", field=f"metrics.{name}"
            ) from error
    return found


def unfit(owner: str, name: str, found: object, expected: str) -> ConfigError:
    """The error for what the field ``name`` of an ``owner``, a class that users make, was given."""
    return ConfigError(f"{owner}.{name}: expected {expected}, found {_told(found)}", field=name)


def _told(value: object) -> str:
    """``repr``, but for an integer that Python refuses to write out."""
    try:
        return repr(value)
    except ValueError:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def checked_int(
    owner: str, name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """`unfit` unless ``value`` is an integer from ``low`` to ``high``, or None where it is ``optional``."""
    if value is None and optional:
        return
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        bounds = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise unfit(owner, name, value, bounds + (" or None" if optional else ""))


def checked_seconds(name: str, value: object) -> float:
    """``value`` if it can be a deadline; `ConfigError` naming ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_S:
        raise ConfigError(
            f"{name}: expected a finite number of seconds > 0, at most {LONGEST_S:g} (every wait has a deadline), "
            f"found {_told(value)}",
            field=name,
        )
    return value


def checked_wait(value: float | None) -> float | None:
    """``value`` as the timeout of one wait, None for the configured one; what is below 0 has passed already.

    No wait is longer than `LONGEST_S`. `ConfigError` for what is no number.
    """
    given: object = value
    if value is None:
        return None
    if not isinstance(given, Real) or value != value:  # noqa: PLR0124 - NaN
        raise ConfigError(f"timeout: expected a number of seconds or None, found {given!r}", field="timeout")
    return float(min(value, LONGEST_S))
