"""Export Holdfast's metrics to Prometheus: ``pip install "holdfast[prometheus]"``.

    from holdfast.integrations.prometheus import export_metrics

    export_metrics()                          # into the registry of the process
    prometheus_client.start_http_server(9090)

Guarantees: the names, units and labels are those of `holdfast.integrations.telemetry.METRICS`. A save is never held up
by a scrape. Counters are there from the start, at 0, so the first failure shows as an increase.
Does not: serve anything, or push: `prometheus_client` does.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import prometheus_client

from holdfast.events import add_hook
from holdfast.integrations.telemetry import METRICS, SECONDS, Metric, measurements

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.events import Event


def export_metrics(registry: Any | None = None) -> Callable[[], None]:
    """Register every metric, and keep them up to date from now on; returns a function that ends it and removes them.

    registry: a `prometheus_client.CollectorRegistry`; None for the one of the process, in which metrics can be
    registered once: `ValueError` otherwise. Thread-safe.
    """
    into = prometheus_client.REGISTRY if registry is None else registry
    made = {name: _made(metric, into) for name, metric in METRICS.items()}

    def hear(event: Event) -> None:
        for name, value, labels in measurements(event):
            metric = made[name].labels(**labels) if labels else made[name]
            kind = METRICS[name].kind
            if kind == "counter":
                metric.inc(value)
            elif kind == "gauge":
                metric.set(value)
            else:
                metric.observe(value)

    remove = add_hook(hear)

    def end() -> None:
        remove()
        while made:
            into.unregister(made.popitem()[1])

    return end


def _made(metric: Metric, registry: Any) -> Any:
    if metric.kind == "histogram":
        return prometheus_client.Histogram(metric.name, metric.help, buckets=SECONDS, registry=registry)
    kind = prometheus_client.Counter if metric.kind == "counter" else prometheus_client.Gauge
    made = kind(metric.name, metric.help, metric.labels, registry=registry)
    if metric.known:
        for values in product(*metric.known):
            made.labels(*values)
    return made
