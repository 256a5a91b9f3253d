"""Check arguments of users before anything is changed: paths, steps, metrics, deadlines, configuration fields.

Every check raises `ConfigError` that names the argument, what was expected and what was found.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from holdfast.errors import ConfigError

LONGEST_S: Final = 1e8
"""Three years: sums of such deadlines fit into the system's wait calls."""
_TOLD_MAX: Final = 400
STEP_MAX: Final = (1 << 63) - 1
"""Files and messages store a step in 64 bits."""
NAME_BYTES_MAX: Final = 255
"""Maximum length of names on Linux file systems."""
STORES: Final = ("s3", "gs", "az")
"""Schemes of URLs of object stores."""
_FSSPEC_SCHEME: Final = re.compile(r"fsspec\+[a-z][a-z0-9+._-]*")
_MSC: Final = "msc"
_LOST_SLASH: Final = re.compile(r"(s3|gs|az|file|memory|msc|fsspec\+[^/]*):/(?!/)")
_URLS: Final = (
    "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///directory, memory://name, "
    "msc://profile/prefix or fsspec+PROTOCOL://... for a file system of fsspec"
)
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - a directory of the user's own below it
_NO_NAME_CHARS: Final = (("/", "a slash"), ("\\", "a backslash"), ("\0", "a NUL"))


def absolute(path: str) -> str:
    """Return ``path`` as an absolute path; ``~`` is expanded as in a shell."""
    return os.path.abspath(os.path.expanduser(path))


def located(text: str, *, field: str = "path") -> str:
    """Return the place that a path or URL names: an absolute path, or the URL of a store without a trailing slash.

    ``file:///a%20b`` is ``/a b``, as `pathlib.Path.as_uri` writes it; ``memory://a/b`` is a directory in shared memory,
    the same for all processes of a user on a host. Raises `ConfigError` for any other URL than of ``s3://``, ``gs://``,
    ``az://``, ``msc://`` and ``fsspec+PROTOCOL://``, and for one that `pathlib` has taken a slash from.
    """
    scheme, is_url, rest = text.partition("://")
    if not is_url:
        if _LOST_SLASH.match(text):
            message = (
                f"{field}: {text!r} is a URL that has lost a slash, as in a pathlib.Path; give the URL as a string"
            )
            raise ConfigError(message, field=field)
        return absolute(text)
    parts = rest.rstrip("/").split("/")
    store = scheme in STORES or is_foreign(text)
    if {".", ".."} & {*parts} or (store and (not all(parts) or {"?", "#"} & {*rest})):
        message = f"{field}: {text!r} can't be used: expected {_URLS}, without '..', '//', '?' or '#'"
        raise ConfigError(message, field=field)
    if store:
        return text.rstrip("/")
    if scheme == "file" and not parts[0]:
        return absolute(os.fsdecode(unquote_to_bytes(rest)))
    if scheme == "memory" and rest.strip("/"):
        return os.path.join(_SHARED_MEMORY, f"holdfast-{os.getuid()}", "memory", rest.strip("/"))
    raise ConfigError(f"{field}: {text!r} can't be used: expected a path of a directory, or {_URLS}", field=field)


def is_foreign(url: str) -> bool:
    """Return True for the URL of a store that fsspec or NVIDIA's Multi-Storage Client reaches."""
    scheme, is_url, _ = url.partition("://")
    return bool(is_url) and (scheme == _MSC or _FSSPEC_SCHEME.fullmatch(scheme) is not None)


def is_store(place: str) -> bool:
    """Return True if ``place``, as `located` returns it, is the URL of an object store."""
    return "://" in place


def checked_directory(path: object, *, field: str) -> str:
    """Return `checked_path`; `ConfigError` for object stores too."""
    target = checked_path(path, field=field)
    if is_store(target):
        raise ConfigError(f"{target}: object stores are not taken here; {field} must be a directory", field=field)
    return target


def checked_path(path: object, *, field: str) -> str:
    """Return `located` of ``path``; `ConfigError` for paths that can't be a directory."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{field} must be the path of a directory, not {path!r}", field=field)
    if "\0" in text or (text.startswith("file:") and "%00" in text):
        raise ConfigError(f"{field} must be the path of a directory without NUL, not {text!r}", field=field)
    try:
        target = located(text, field=field)
    except FileNotFoundError as error:
        message = f"{field}: {text!r} is relative, and the working directory was removed; give an absolute path"
        raise ConfigError(message, field=field) from error
    try:
        target.encode()
    except UnicodeEncodeError as error:
        message = f"{field}: {target!r} is not UTF-8, and a checkpoint names its path in files that are; rename it"
        raise ConfigError(message, field=field) from error
    if not is_store(target) and _is_no_directory(target):
        raise ConfigError(f"{target} is a file; expected a directory, or a path that doesn't exist yet", field=field)
    return target


def _is_no_directory(path: str) -> bool:
    """Return True for what exists and is no directory, by one look: it may be being replaced."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except OSError:
        return os.path.islink(path)


def name_fault(name: str) -> str | None:
    """Return why ``name`` can't be the name of a directory or file of a checkpoint; None if it can.

    Readers apply this rule to every name in a file, writers to every name that they use. A valid name is one entry of
    one directory on any system: so a backslash is refused, which some systems treat as a slash.
    """
    if name in ("", ".", ".."):
        return "it names no entry of a directory"
    for character, called in _NO_NAME_CHARS:
        if character in name:
            return f"it has {called} in it"
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a pair of surrogates
        return "it can't be encoded"
    return None if nbytes <= NAME_BYTES_MAX else f"it has {nbytes} bytes, and a name at most {NAME_BYTES_MAX}"


def is_path(path: object) -> bool:
    """Return True if `checked_path` would accept ``path``."""
    try:
        checked_path(path, field="path")
    except ConfigError:
        return False
    return True


def checked_step(step: object) -> None:
    """Raise `ConfigError` unless ``step`` is an integer from 0 to 2**63 - 1."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step must be an integer >= 0, not {_told(step)}", field="step")
    if step > STEP_MAX:
        raise ConfigError(f"step must be at most 2**63 - 1 = {STEP_MAX}, not {_told(step)}", field="step")


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain floats; accepts anything with ``float()``, such as a 0-dim tensor. Raises
    `ConfigError`.
    """
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


def checked_names(names: object, *, field: str, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return one name, or several, as a tuple; raise `ConfigError` for anything else."""
    items = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if not all(isinstance(item, str) and item for item in items) or not (items or may_be_empty):
        raise ConfigError(f"{field} must be names: strings that are not empty, not {_told(names)}", field=field)
    return items


def unfit(owner: str, name: str, found: object, expected: str) -> ConfigError:
    """Return the error for an invalid value of field ``name`` of the class ``owner``."""
    return ConfigError(f"{owner}.{name}: expected {expected}, found {_told(found)}", field=name)


def _told(value: object) -> str:
    """Return ``repr``, cut if it is long; the type if ``repr`` fails."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _TOLD_MAX else f"{text[:_TOLD_MAX]}..."


def checked_int(
    owner: str, name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    """Raise `unfit` unless ``value`` is an integer from ``low`` to ``high``, or None if ``optional``."""
    if value is None and optional:
        return
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        bounds = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise unfit(owner, name, value, bounds + (" or None" if optional else ""))


def checked_seconds(name: str, value: object) -> float:
    """Return ``value`` if it can be a deadline; raise `ConfigError` naming ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LONGEST_S:
        raise ConfigError(
            f"{name}: expected a finite number of seconds > 0, at most {LONGEST_S:g} (every wait has a deadline), "
            f"found {_told(value)}",
            field=name,
        )
    return value


def checked_wait(value: float | None) -> float | None:
    """Return ``value`` as the timeout of one wait, None for the configured one; negative values have already passed.

    No wait is longer than `LONGEST_S`. Raises `ConfigError` for a value that is not a number.
    """
    given: object = value
    if value is None:
        return None
    if not isinstance(given, Real) or value != value:  # noqa: PLR0124 - NaN
        raise ConfigError(f"timeout: expected a number of seconds or None, found {given!r}", field="timeout")
    return float(min(value, LONGEST_S))


FIELD: Final = "save_on_signal"


_REFUSED: Final = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "can't be caught"),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"), "tells of a broken process"),
    **dict.fromkeys(("SIGTRAP", "SIGSYS"), "tells of a broken process"),
    **dict.fromkeys(("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"), "ends no process"),
    **dict.fromkeys(("SIGTSTP", "SIGTTIN", "SIGTTOU"), "stops a process, it doesn't end it"),
    "SIGPIPE": "tells of a closed pipe",
}


def checked_signals(value: object) -> tuple[int, ...]:
    """Return the signals in ``value`` (one, or several: numbers, `signal.Signals` or names); `ConfigError`
    otherwise.
    """
    items = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    return tuple(dict.fromkeys(map(_checked_signal, items)))


def _checked_signal(value: object) -> int:
    found = value
    if isinstance(value, str):
        found = getattr(signal, value if value.startswith("SIG") else f"SIG{value}", None)
    if isinstance(found, bool) or not isinstance(found, int) or found not in signal.valid_signals():
        raise ConfigError(
            f"CheckpointConfig.{FIELD}: expected signals, as numbers, signal.Signals or names, found {value!r}",
            field=FIELD,
        )
    name = name_of(found)
    if name in _REFUSED:
        raise ConfigError(
            f"CheckpointConfig.{FIELD}: expected termination signals, such as SIGTERM, SIGUSR1 or "
            f"SIGINT, found {name}, which {_REFUSED[name]}",
            field=FIELD,
        )
    return found if isinstance(found, signal.Signals) else _known(found)


def _known(number: int) -> int:
    try:
        return signal.Signals(number)
    except ValueError:
        return number  # a real-time signal, which has no name


def name_of(signum: int) -> str:
    known = _known(signum)
    return known.name if isinstance(known, signal.Signals) else f"signal {signum}"
