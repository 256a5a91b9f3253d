"""Every expression of the Grafana dashboard, asked of a Prometheus that scrapes a job while it saves, loads and syncs.

Needs `prometheus` on the path, or as ``HOLDFAST_PROMETHEUS``: apt-get install prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events

PROMETHEUS = os.environ.get("HOLDFAST_PROMETHEUS") or shutil.which("prometheus")
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"
SECONDS = float(os.environ.get("HOLDFAST_DASHBOARD_S", "8"))
CONFIG = """
global: {{scrape_interval: 500ms}}
scrape_configs: [{{job_name: training, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: apt-get install prometheus")


def train(root: Path, seconds: float) -> None:
    """Save, go on, publish weights and receive them for so long; one save fails, and NaN appears before another."""
    model = torch.nn.Linear(64, 64)
    state = {"model": model}
    versions = holdfast.sync.DirectoryTransport(root / "versions")
    config = holdfast.CheckpointConfig(keep=holdfast.Keep(last=2))
    time.sleep(1.5)  # a scrape before anything has happened
    end, step = time.monotonic() + seconds, 0
    (root / "checkpoints" / "step-3").mkdir(parents=True)
    (root / "checkpoints" / "step-3" / "mine").touch()
    with (
        holdfast.CheckpointManager(root / "checkpoints", state, config=config, process_group="alone") as manager,
        holdfast.sync.Publisher(versions) as publisher,
    ):
        receiver = holdfast.sync.Receiver(versions)
        while time.monotonic() < end or step < 8:
            step += 1
            with torch.no_grad():
                model.weight.add_(0.01)
                if step == 5:
                    model.weight[0, 0] = float("nan")
            if step == 3:
                with pytest.raises(holdfast.CheckpointExists):
                    manager.save(step).result()
            else:
                manager.save(step).result()
            if step % 4 == 0:
                manager.restore()
            publisher.publish(model.state_dict(), step)
            receiver.receive({name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()})
            time.sleep(0.2)
    events.emit("signal.received", signal="SIGTERM")
    time.sleep(1.5)


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes this process, once it does."""
    client = pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")
    from holdfast.integrations.prometheus import export_metrics

    registry = client.CollectorRegistry()
    end = export_metrics(registry)
    server, thread = client.start_http_server(0, "127.0.0.1", registry)
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(port=server.server_port))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not (result := asked(url, 'up{job="training"}', missing=[])) or result[0]["value"][1] != "1":
            assert time.monotonic() < deadline, "Prometheus scrapes nothing"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        server.shutdown()
        server.server_close()
        thread.join(10)
        end()


def asked(url: str, expr: str, missing: Any = None) -> Any:
    query = urllib.parse.urlencode({"query": expr})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as reply:
            return json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expr}: {error.read().decode()}") from None
    except OSError:
        if missing is None:
            raise
        return missing


def test_every_expression_of_the_dashboard_has_an_answer(scraped: str, tmp_path: Path) -> None:
    train(tmp_path, SECONDS)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found: dict[tuple[str, str], Any] = {}
    for panel in panels:
        for target in panel["targets"]:
            expr = (
                target["expr"].replace("$job", "training").replace("$__rate_interval", "1m").replace("$__range", "1h")
            )
            found[panel["title"], target["refId"]] = asked(scraped, expr)
    assert {place for place, rows in found.items() if not rows} == set()
    assert {place for place, rows in found.items() if all(row["value"][1] == "NaN" for row in rows)} == set()
    values = {
        title: {row["metric"].get(label): float(row["value"][1]) for row in found[title, "A"]}
        for title, label in (("Saves that failed or were skipped", "outcome"), ("Suspicious saves", "what"))
    }
    assert values["Saves that failed or were skipped"]["failed"] > 0, "the first failure is one, too"
    assert values["Suspicious saves"]["nonfinite"] > 0, "the first one is one, too"
    assert 0 <= float(found["Age of the newest checkpoint", "A"][0]["value"][1]) < 60
