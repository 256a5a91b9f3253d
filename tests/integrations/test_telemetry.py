"""The exporters on the event hook, on the real libraries, and what a dashboard may ask for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.integrations.telemetry import METRICS, log_events

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana_dashboard.json"
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def run(root: Path) -> None:
    """Save twice, load, and fail once."""
    state = {"model": torch.nn.Linear(8, 8)}
    config = holdfast.CheckpointConfig(keep=holdfast.Keep(last=1))
    with holdfast.CheckpointManager(root, state, config=config, process_group="alone") as manager:
        manager.save(1).result()
        manager.save(2).result()
        manager.restore()
        with torch.no_grad():
            state["model"].weight[0, 0] = float("nan")
        manager.save(3).result()
        (root / "step-4").mkdir()
        (root / "step-4" / "mine").touch()
        with pytest.raises(holdfast.CheckpointExists):
            manager.save(4).result()


@pytest.fixture
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def test_every_name_in_the_dashboard_is_a_metric_and_every_metric_is_in_it(dashboard: dict[str, Any]) -> None:
    exprs = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"holdfast_\w+", " ".join(exprs)))
    asked |= set(re.findall(r"holdfast_\w+", json.dumps(dashboard["templating"])))
    known = {f"{name}{suffix}": name for name, metric in METRICS.items() for suffix in SUFFIXES[metric.kind]}
    assert asked <= set(known)
    assert {known[name] for name in asked} == set(METRICS)
    for name, metric in METRICS.items():
        labels = set(re.findall(rf"by \(([\w, ]+)\) \((?:increase|rate)\({name}\b", " ".join(exprs)))
        assert {label for row in labels for label in row.split(", ")} <= set(metric.labels)


@pytest.fixture
def registry() -> Iterator[Any]:
    client = pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    from holdfast.integrations.prometheus import export_metrics

    found = client.CollectorRegistry()
    end = export_metrics(found)
    yield found
    end()
    assert list(found.collect()) == []


def test_prometheus_has_what_a_run_did(registry: Any, tmp_path: Path) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    run(tmp_path)
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    found = {sample.name: sample for family in families for sample in family.samples}
    names = {f"{name}{suffix}" for name, metric in METRICS.items() for suffix in SUFFIXES[metric.kind]}
    assert {name for name in found if not name.endswith("_created")} <= names
    get = registry.get_sample_value
    checkpoint = {"kind": "checkpoint"}
    assert get("holdfast_saves_total", {**checkpoint, "outcome": "published"}) == 3.0
    assert get("holdfast_saves_total", {**checkpoint, "outcome": "failed"}) == 1.0
    assert get("holdfast_last_published_step") == 3.0
    assert get("holdfast_last_published_timestamp_seconds") > 1.7e9
    assert get("holdfast_save_bytes_total", checkpoint) > 3 * 8 * 8 * 4
    for part in ("stall", "staging", "persist", "commit", "duration"):
        assert get(f"holdfast_save_{part}_seconds_count") == 3.0
        assert get(f"holdfast_save_{part}_seconds_sum") > 0.0
    assert get("holdfast_suspicious_saves_total", {"what": "nonfinite"}) == 1.0
    assert get("holdfast_deleted_checkpoints_total") == 2.0
    assert get("holdfast_loads_total", {"outcome": "finished"}) == 1.0
    assert get("holdfast_load_duration_seconds_sum") > 0.0


def test_every_event_of_the_table_reaches_prometheus(registry: Any) -> None:
    events.emit("mirror.failed", step=1, rank=0)
    events.emit("recovery.removed", path="/a")
    events.emit("signal.received", signal="SIGTERM")
    events.emit("version.published", step=7, rank=0)
    events.emit("sync.fetched", step=7, fetch_s=0.5)
    events.emit("sync.committed", step=7, commit_s=0.001)
    events.emit("export.published", step=7, nbytes=10)
    get = registry.get_sample_value
    assert get("holdfast_mirror_uploads_total", {"outcome": "failed"}) == 1.0
    assert get("holdfast_recoveries_total", {"what": "removed"}) == 1.0
    assert get("holdfast_signals_total", {"signal": "SIGTERM"}) == 1.0
    assert get("holdfast_sync_published_version") == 7.0
    assert get("holdfast_sync_version") == 7.0
    assert get("holdfast_sync_fetch_seconds_sum") == 0.5
    assert get("holdfast_sync_commit_seconds_sum") == 0.001
    assert get("holdfast_save_bytes_total", {"kind": "export"}) == 10.0


def test_weight_versions_in_a_directory_are_not_taken_for_checkpoints(registry: Any, tmp_path: Path) -> None:
    with holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(tmp_path)) as publisher:
        publisher.publish(torch.nn.Linear(8, 8), 7)
    get = registry.get_sample_value
    assert get("holdfast_saves_total", {"kind": "checkpoint", "outcome": "published"}) == 0.0
    assert get("holdfast_saves_total", {"kind": "version", "outcome": "published"}) == 1.0
    assert get("holdfast_save_bytes_total", {"kind": "version"}) > 8 * 8 * 4
    assert get("holdfast_save_duration_seconds_count") == 0.0
    assert get("holdfast_last_published_step") == get("holdfast_last_published_timestamp_seconds") == 0.0
    assert get("holdfast_sync_published_version") == 7.0


def test_opentelemetry_has_metrics_and_a_span_for_each_save(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from holdfast.integrations.opentelemetry import export_telemetry

    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    end = export_telemetry(meter_provider=meters, tracer_provider=tracers)
    try:
        run(tmp_path)
    finally:
        end()
    data = reader.get_metrics_data()
    found = {metric.name: metric for one in data.resource_metrics for sc in one.scope_metrics for metric in sc.metrics}
    by_dotted = {metric.dotted: metric for metric in METRICS.values()}
    assert set(found) <= set(by_dotted)
    assert {metric.unit for metric in found.values()} == {by_dotted[name].unit for name in found}
    points = {tuple(sorted(p.attributes.items())): p.value for p in found["holdfast.saves"].data.data_points}
    assert points[("kind", "checkpoint"), ("outcome", "published")] == 3
    assert points[("kind", "export"), ("outcome", "failed")] == 0, "a first failure is an increase"
    assert next(iter(found["holdfast.last_published.step"].data.data_points)).value == 3.0
    saves = [span for span in spans.get_finished_spans() if span.name == "holdfast.save"]
    assert [span.attributes["holdfast.outcome"] for span in saves] == ["published"] * 3 + ["failed"]
    assert [span.attributes["holdfast.step"] for span in saves] == [1, 2, 3, 4]
    assert all(span.end_time >= span.start_time for span in saves)
    assert saves[0].end_time - saves[0].start_time > saves[0].attributes["holdfast.persist_s"] * 1e9
    assert [span.status.is_ok for span in saves] == [True, True, True, False]
    tracers.shutdown()
    meters.shutdown()


def test_log_records_have_fields_of_constant_names(caplog: pytest.LogCaptureFixture) -> None:
    stop = log_events()
    with caplog.at_level(logging.INFO, logger="holdfast.events"):
        events.emit("save.published", step=3, rank=1, attempt="a", path="/p", nbytes=5)
        events.emit("save.failed", step=4, rank=1, error="x")
        stop()
        events.emit("save.published", step=5)
    published, failed = caplog.records
    assert (published.holdfast_event, published.holdfast_step, published.holdfast_rank) == ("save.published", 3, 1)
    assert (published.holdfast_attempt, published.holdfast_path) == ("a", "/p")
    assert published.holdfast_fields == {"nbytes": 5}
    assert (published.levelname, failed.levelname) == ("INFO", "WARNING")
