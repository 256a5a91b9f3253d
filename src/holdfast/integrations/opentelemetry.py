"""Export Holdfast's metrics and a span for each save to OpenTelemetry: ``pip install "holdfast[otel]"``.

    from holdfast.integrations.opentelemetry import export_telemetry

    export_telemetry()                        # to the providers that the process has set

A span ``holdfast.save`` or ``holdfast.export`` begins with the call and ends with the outcome. Its attributes are
``holdfast.kind``, ``holdfast.outcome``, ``holdfast.step``, ``holdfast.rank``, ``holdfast.attempt``, ``holdfast.path``,
the figures of the save, and the error.

Guarantees: names, units and attributes of metrics are those of `holdfast.integrations.telemetry.METRICS` (``dotted``).
Counters are there from the start, at 0, so the first failure shows as an increase.
Assumes only the API of OpenTelemetry: without an SDK nothing is exported, at hardly any cost.
Does not: configure providers or exporters. A span has no parent: saves end on threads of their own.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace

from holdfast._version import __version__
from holdfast.events import add_hook
from holdfast.integrations.telemetry import METRICS, SECONDS, Metric, kind_of, measurements

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.events import Event

_ENDS: Final = frozenset(f"{what}.{how}" for what in ("save", "export") for how in ("published", "failed", "skipped"))
_FIGURES: Final = ("nbytes", "stall_s", "staging_s", "persist_s", "commit_s", "error", "error_class", "failed_rank")


def export_telemetry(*, meter_provider: Any | None = None, tracer_provider: Any | None = None) -> Callable[[], None]:
    """Record metrics and spans from now on; returns a function that ends it.

    meter_provider, tracer_provider: None for those of the process. Thread-safe.
    """
    meter = metrics.get_meter("holdfast", __version__, meter_provider=meter_provider)
    tracer = trace.get_tracer("holdfast", __version__, tracer_provider=tracer_provider)
    made = {name: _made(metric, meter) for name, metric in METRICS.items()}

    def hear(event: Event) -> None:
        for name, value, labels in measurements(event):
            kind = METRICS[name].kind
            if kind == "counter":
                made[name].add(value, labels)
            elif kind == "gauge":
                made[name].set(value, labels)
            else:
                made[name].record(value, labels)
        if event.kind in _ENDS:
            _span(tracer, event)

    return add_hook(hear)


def _made(metric: Metric, meter: Any) -> Any:
    if metric.kind == "counter":
        counter = meter.create_counter(metric.dotted, unit=metric.unit, description=metric.help)
        for values in product(*metric.known):
            counter.add(0, dict(zip(metric.labels, values, strict=True)))
        return counter
    if metric.kind == "gauge":
        return meter.create_gauge(metric.dotted, unit=metric.unit, description=metric.help)
    return meter.create_histogram(
        metric.dotted, unit=metric.unit, description=metric.help, explicit_bucket_boundaries_advisory=SECONDS
    )


def _span(tracer: Any, event: Event) -> None:
    what, _, outcome = event.kind.partition(".")
    began_s = event.fields.get("began_s")
    attributes = {"step": event.step, "rank": event.rank, "attempt": event.attempt, "path": event.path}
    attributes |= {name: event.fields.get(name) for name in _FIGURES} | {"outcome": outcome, "kind": kind_of(event)}
    known = {f"holdfast.{name}": value for name, value in attributes.items() if value is not None}
    began_ns = event.time_ns if began_s is None else min(int(began_s * 1e9), event.time_ns)
    span = tracer.start_span(f"holdfast.{what}", start_time=began_ns, attributes=known)
    if outcome == "failed":
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(event.fields.get("message", ""))))
    span.end(end_time=event.time_ns)
