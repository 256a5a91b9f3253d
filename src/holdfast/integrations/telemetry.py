"""Metrics of saves, loads and weight versions, by name and unit, and log records of events. Torch-free.

    METRICS          every metric: its names, unit and labels; what Prometheus and OpenTelemetry get is here only
    measurements     the values that an event gives to metrics
    log_events       every event as a log record with fields of constant names

`holdfast.integrations.prometheus` and `holdfast.integrations.opentelemetry` hand them on.

Guarantees: labels take few values: steps, paths and attempts are none. A metric that an event doesn't know is left out.
Does not: import what it is exported by.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.events import add_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.events import Event

__all__ = ["log_events"]

Kind = Literal["counter", "gauge", "histogram"]
SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the buckets of histograms."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. name: in Prometheus, with its unit; dotted: in OpenTelemetry, which has ``unit`` apart."""

    name: str
    dotted: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    """Of each label the values that there may be: a counter that starts at 0 tells its first event as an increase."""


_KINDS: Final = ("checkpoint", "export", "version")
_OUTCOMES: Final = ("published", "failed", "skipped")
_METRICS: Final = (
    Metric(
        "holdfast_saves_total", "holdfast.saves", "counter", "1", "Saves that have ended",
        ("kind", "outcome"), (_KINDS, _OUTCOMES),
    ),
    Metric(
        "holdfast_save_bytes_total", "holdfast.save.bytes", "counter", "By", "Bytes of this rank",
        ("kind",), (_KINDS,),
    ),
    Metric("holdfast_save_stall_seconds", "holdfast.save.stall", "histogram", "s", "Time a save held up training"),
    Metric("holdfast_save_staging_seconds", "holdfast.save.staging", "histogram", "s", "Time a save copied the state"),
    Metric("holdfast_save_persist_seconds", "holdfast.save.persist", "histogram", "s", "Time until bytes were durable"),
    Metric("holdfast_save_commit_seconds", "holdfast.save.commit", "histogram", "s", "From report to publication"),
    Metric("holdfast_save_duration_seconds", "holdfast.save.duration", "histogram", "s", "From the call to the end"),
    Metric("holdfast_last_published_step", "holdfast.last_published.step", "gauge", "1", "Newest published step"),
    Metric(
        "holdfast_last_published_timestamp_seconds",
        "holdfast.last_published.time",
        "gauge",
        "s",
        "When it was published, since the epoch: its age is time() less this",
    ),
    Metric(
        "holdfast_suspicious_saves_total", "holdfast.suspicious", "counter", "1", "Suspicious saves",
        ("what",), (("stale", "replicas", "nonfinite"),),
    ),
    Metric("holdfast_deleted_checkpoints_total", "holdfast.deleted", "counter", "1", "Steps that retention deleted"),
    Metric(
        "holdfast_loads_total", "holdfast.loads", "counter", "1", "Loads that have ended",
        ("outcome",), (("finished", "fallback"),),
    ),
    Metric("holdfast_load_duration_seconds", "holdfast.load.duration", "histogram", "s", "Time a load took"),
    Metric(
        "holdfast_mirror_uploads_total", "holdfast.mirror.uploads", "counter", "1", "Uploads ended",
        ("outcome",), (("mirrored", "failed", "dropped"),),
    ),
    Metric(
        "holdfast_recoveries_total", "holdfast.recoveries", "counter", "1", "What a start settled",
        ("what",), (("rolled_forward", "removed", "restored"),),
    ),
    Metric(
        "holdfast_signals_total", "holdfast.signals", "counter", "1", "Signals to save on",
        ("signal",), (("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),),
    ),
    Metric("holdfast_sync_published_version", "holdfast.sync.published", "gauge", "1", "Newest published version"),
    Metric("holdfast_sync_version", "holdfast.sync.version", "gauge", "1", "Version that this receiver uses"),
    Metric("holdfast_sync_fetch_seconds", "holdfast.sync.fetch", "histogram", "s", "Time a version took to fetch"),
    Metric("holdfast_sync_commit_seconds", "holdfast.sync.commit", "histogram", "s", "Pause of a commit"),
)  # fmt: skip
METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _METRICS}

Value = tuple[str, float, dict[str, str]]


def measurements(event: Event) -> Iterator[Value]:
    """Yield (name of a metric, value, labels) for what ``event`` tells: an amount, a value, or one observation."""
    group, _, what = event.kind.partition(".")
    fields = event.fields
    if group in ("save", "export") and what in _OUTCOMES:
        yield from _of_save(kind_of(event), what, event)
    elif event.kind == "save.suspicious":
        yield "holdfast_suspicious_saves_total", 1.0, {"what": str(fields.get("what"))}
    elif event.kind == "checkpoint.deleted":
        yield "holdfast_deleted_checkpoints_total", 1.0, {}
    elif event.kind in ("load.finished", "load.fallback"):
        yield "holdfast_loads_total", 1.0, {"outcome": what}
        yield from _known("holdfast_load_duration_seconds", fields.get("load_s"))
    elif event.kind in ("checkpoint.mirrored", "mirror.failed", "mirror.dropped"):
        yield "holdfast_mirror_uploads_total", 1.0, {"outcome": what}
    elif group == "recovery":
        yield "holdfast_recoveries_total", 1.0, {"what": what}
    elif event.kind == "signal.received":
        yield "holdfast_signals_total", 1.0, {"signal": str(fields.get("signal"))}
    elif event.kind == "version.published":
        yield from _known("holdfast_sync_published_version", event.step)
    elif event.kind == "sync.fetched":
        yield from _known("holdfast_sync_fetch_seconds", fields.get("fetch_s"))
    elif event.kind == "sync.committed":
        yield from _known("holdfast_sync_version", event.step)
        yield from _known("holdfast_sync_commit_seconds", fields.get("commit_s"))


def kind_of(event: Event) -> str:
    """Return what a save or an export has made: one of ``checkpoint``, ``export``, ``version`` (of weights)."""
    return str(event.fields.get("kind_of", "checkpoint")) if event.kind.startswith("save.") else "export"


def _of_save(kind: str, outcome: str, event: Event) -> Iterator[Value]:
    fields = event.fields
    yield "holdfast_saves_total", 1.0, {"kind": kind, "outcome": outcome}
    if outcome != "published":
        return
    if (nbytes := fields.get("nbytes")) is not None:
        yield "holdfast_save_bytes_total", float(nbytes), {"kind": kind}
    if kind != "checkpoint":
        return
    for part in ("stall", "staging", "persist", "commit"):
        yield from _known(f"holdfast_save_{part}_seconds", fields.get(f"{part}_s"))
    if (began_s := fields.get("began_s")) is not None:
        yield "holdfast_save_duration_seconds", max(0.0, event.time_ns / 1e9 - began_s), {}
    yield from _known("holdfast_last_published_step", event.step)
    yield "holdfast_last_published_timestamp_seconds", event.time_ns / 1e9, {}


def _known(name: str, value: float | None) -> Iterator[Value]:
    if value is not None:
        yield name, float(value), {}


def log_events(logger: logging.Logger | None = None, level: int = logging.INFO) -> Callable[[], None]:
    """Log every event from now on as a record with fields of constant names; returns a function that ends it.

    The fields are ``holdfast_event``, ``holdfast_step``, ``holdfast_rank``, ``holdfast_attempt``, ``holdfast_path`` and
    ``holdfast_fields`` (a dict): formatters that write JSON see them. logger: by default ``holdfast.events``. Failures
    and what is suspicious are logged as warnings. Thread-safe.
    """
    into = logging.getLogger("holdfast.events") if logger is None else logger

    def log(event: Event) -> None:
        at = logging.WARNING if event.kind.endswith((".failed", ".suspicious", ".fallback")) else level
        if into.isEnabledFor(at):
            into.log(at, "%s step=%s rank=%s", event.kind, event.step, event.rank, extra=_extra(event))

    return add_hook(log)


def _extra(event: Event) -> dict[str, Any]:
    return {
        "holdfast_event": event.kind,
        "holdfast_step": event.step,
        "holdfast_rank": event.rank,
        "holdfast_attempt": event.attempt,
        "holdfast_path": event.path,
        "holdfast_fields": dict(event.fields),
    }
