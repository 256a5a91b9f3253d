"""What a receiver of OTLP gets of a job, over gRPC and HTTP; and a job whose receiver hangs, or isn't there.

Needs an exporter: pip install opentelemetry-exporter-otlp.
"""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.integrations.telemetry import METRICS, SECONDS

pytest.importorskip("opentelemetry.proto", reason="no exporter here: pip install opentelemetry-exporter-otlp")
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from otlp_job import FAILS, SAVES

if TYPE_CHECKING:
    from typing_extensions import Self

JOB = Path(__file__).with_name("otlp_job.py")
KINDS = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
CUMULATIVE = 2
ERROR = 2
HANG_S = 60.0
NEVER = {"holdfast.mirror.uploads", "holdfast.recoveries", "holdfast.signals"}
"""Counters of what the job doesn't do."""


class Receiver:
    """Keeps what it is sent; ``hangs``: takes requests, and answers none."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.let_go = threading.Event()
        self.metrics: list[Any] = []
        self.traces: list[Any] = []
        self.endpoint = ""

    def take(self, into: list[Any], request: Any) -> None:
        if self.hangs:
            self.let_go.wait(HANG_S)
        into.append(request)

    def points(self) -> dict[str, Any]:
        """The last that was told of each metric."""
        return {
            metric.name: metric
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Http(Receiver):
    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                if self.path == "/v1/metrics":
                    receiver.take(receiver.metrics, metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
                else:
                    assert self.path == "/v1/traces"
                    receiver.take(receiver.traces, trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client that has given up
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


class Grpc(Receiver):
    def __enter__(self) -> Self:
        import grpc
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

        receiver = self

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                del context
                receiver.take(receiver.metrics, request)
                return metrics_service_pb2.ExportMetricsServiceResponse()

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                del context
                receiver.take(receiver.traces, request)
                return trace_service_pb2.ExportTraceServiceResponse()

        self.pool = ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), self.server)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), self.server)
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.server.stop(None).wait(10)
        self.pool.shutdown()


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{request.param}", reason="no exporter of this protocol")
    return str(request.param)


@pytest.fixture
def taking(protocol: str) -> Iterator[Receiver]:
    with Grpc() if protocol == "grpc" else Http() as receiver:
        yield receiver


@pytest.fixture(params=["hangs", "is not there"])
def bad_endpoint(protocol: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "hangs":
        with Grpc(hangs=True) if protocol == "grpc" else Http(hangs=True) as receiver:
            yield receiver.endpoint
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


def run(protocol: str, endpoint: str, root: Path, **variables: str) -> tuple[float, float]:
    """Run the job; return the longest call of its training thread, and how long its process lived on, in seconds."""
    command = [sys.executable, str(JOB), protocol, endpoint, str(root)]
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        told = job.stdout.readline()
        ended = time.monotonic()
        _, errors = job.communicate(timeout=100)
    assert job.returncode == 0, errors
    return float(told), time.monotonic() - ended


def attributes_of(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


def by_attributes(metric: Any) -> dict[tuple[str, ...], Any]:
    """Value of each point, by the values of its labels."""
    labels = next(one.labels for one in METRICS.values() if one.dotted == metric.name)
    found = {}
    for point in getattr(metric, metric.WhichOneof("data")).data_points:
        attributes = attributes_of(point)
        assert set(attributes) == set(labels)
        value = point.count if hasattr(point, "count") else getattr(point, point.WhichOneof("value"))
        found[tuple(attributes[label] for label in labels)] = value
    return found


def test_every_metric_and_span_arrives(protocol: str, taking: Receiver, tmp_path: Path) -> None:
    run(protocol, taking.endpoint, tmp_path)
    found = taking.points()
    assert set(found) == {metric.dotted for metric in METRICS.values()}
    for metric in METRICS.values():
        got = found[metric.dotted]
        assert (got.unit, got.description, got.WhichOneof("data")) == (metric.unit, metric.help, KINDS[metric.kind])
        if metric.kind == "counter":
            assert (got.sum.is_monotonic, got.sum.aggregation_temporality) == (True, CUMULATIVE)
        elif metric.kind == "histogram":
            assert all(tuple(point.explicit_bounds) == SECONDS for point in got.histogram.data_points)
            assert all(point.sum > 0.0 for point in got.histogram.data_points)
    values = {name: by_attributes(metric) for name, metric in found.items()}
    ended = {key: value for key, value in values["holdfast.saves"].items() if value}
    assert ended == {
        ("checkpoint", "published"): SAVES - 1,  # the last, in flight when the program ended, among them
        ("checkpoint", "failed"): 1,
        ("export", "published"): SAVES // 2,
        ("version", "published"): SAVES,
    }
    assert len(values["holdfast.saves"]) == 9, "what has not happened is 0"
    for part in ("stall", "staging", "persist", "commit", "duration"):
        assert values[f"holdfast.save.{part}"] == {(): SAVES - 1}
    assert values["holdfast.last_published.step"] == values["holdfast.sync.published"] == {(): SAVES}
    assert abs(values["holdfast.last_published.time"][()] - time.time()) < 120
    assert values["holdfast.loads"]["finished",] == 1
    assert values["holdfast.sync.fetch"] == values["holdfast.sync.commit"] == {(): SAVES}
    assert all(value == 0 for name in NEVER for value in values[name].values())

    spans = sorted(taking.spans(), key=lambda span: span.start_time_unix_nano)
    for span in spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 1.7e18
    told = [(span.name, attributes_of(span)) for span in spans]
    saved = [one for name, one in told if name == "holdfast.save" and one["holdfast.kind"] == "checkpoint"]
    assert [one["holdfast.step"] for one in saved] == list(range(1, SAVES + 1))
    assert {one["holdfast.outcome"] for one in saved if one["holdfast.step"] != FAILS} == {"published"}
    assert saved[0]["holdfast.path"] == str(tmp_path / "checkpoints" / "step-1")
    assert saved[0]["holdfast.nbytes"] > 64 * 64 * 4
    assert saved[0]["holdfast.persist_s"] > 0.0
    failed = [span for span in spans if span.status.code == ERROR]
    assert [attributes_of(span)["holdfast.step"] for span in failed] == [FAILS]
    assert attributes_of(failed[0])["holdfast.error_class"] == "CheckpointExists"
    assert "exists already" in failed[0].status.message
    assert sum(name == "holdfast.export" for name, _ in told) == SAVES // 2
    assert sum(one["holdfast.kind"] == "version" for _, one in told) == SAVES


def test_training_and_its_end_do_not_wait_for_a_receiver(protocol: str, bad_endpoint: str, tmp_path: Path) -> None:
    longest_s, left_s = run(protocol, bad_endpoint, tmp_path, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert longest_s < 1.0
    assert left_s < 15.0, "the SDK ends each of its exporters within the timeout that it was given"
    assert holdfast.open(tmp_path / "checkpoints").step == SAVES
