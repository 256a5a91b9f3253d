"""A job that saves, exports, loads, fails and syncs weights, with OpenTelemetry's SDK and an OTLP exporter.

    otlp_job.py PROTOCOL ENDPOINT ROOT

Prints the seconds that its longest call on the training thread took. It ends as programs do: nothing is shut down by
hand, and the last save is in flight.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import holdfast
from holdfast.integrations.opentelemetry import export_telemetry

SAVES = 6
"""Of which one fails, and another has NaN for the first time."""
FAILS, NAN = 3, 5


def exporters(protocol: str, endpoint: str) -> tuple[Any, Any]:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPMetricExporter(endpoint, insecure=True), OTLPSpanExporter(endpoint, insecure=True)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans

    return HttpMetrics(f"{endpoint}/v1/metrics"), HttpSpans(f"{endpoint}/v1/traces")


def main(protocol: str, endpoint: str, root: Path) -> None:
    told, spans = exporters(protocol, endpoint)
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(told, export_interval_millis=300)]))
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=200))
    trace.set_tracer_provider(tracers)
    export_telemetry()

    model = torch.nn.Linear(64, 64)
    versions = holdfast.sync.DirectoryTransport(root / "versions")
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=2))
    exports = [holdfast.HFExport(root / "hf", every=2)]
    (root / "checkpoints" / f"step-{FAILS}").mkdir(parents=True)
    (root / "checkpoints" / f"step-{FAILS}" / "mine").touch()
    longest_s = 0.0
    manager = holdfast.CheckpointManager(
        root / "checkpoints", {"model": model}, config=config, exports=exports, process_group="alone"
    )
    with holdfast.sync.Publisher(versions) as publisher, holdfast.sync.Receiver(versions) as receiver:
        for step in range(1, SAVES + 1):
            manager.before_update()
            with torch.no_grad():
                model.weight.add_(0.01)
                if step == NAN:
                    model.weight[0, 0] = float("nan")
            began = time.monotonic()
            if step == FAILS:
                with contextlib.suppress(holdfast.CheckpointExists):
                    manager.save(step).result()
            handles = manager.step(step) if step != FAILS else []
            longest_s = max(longest_s, time.monotonic() - began)
            if step < SAVES:
                for handle in handles:
                    handle.exception()
            publisher.publish(model.state_dict(), step)
            receiver.receive({name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()})
            if step == 2:
                manager.restore()
            time.sleep(0.1)
    print(longest_s, flush=True)
    globals()["kept"] = manager  # to the end of the process, which waits for the last save


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
