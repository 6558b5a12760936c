"""The example of a tracker for Prometheus, parsed by its own client library."""

from __future__ import annotations

import math
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dapo.util.user_code import load_named

EXAMPLE = Path(__file__).parents[2] / "examples/prometheus.py"


def test_the_newest_metrics_are_served_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("PROMETHEUS_PORT", str(port))
    tracker = load_named(f"{EXAMPLE}:Prometheus", "run.trackers")(tmp_path, "key", {})
    tracker.log(1, {"reward/mean": 0.25, "eval/pass@8": 0.5, "kl/reference": None})
    tracker.log(2, {"reward/mean": 0.5, "eval/pass@8": None})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    values = {family.name: family.samples[0].value for family in families}
    assert math.isnan(values.pop("dapo_eval_pass_8"))
    assert values == {"dapo_step": 2, "dapo_reward_mean": 0.5}
    assert families[0].samples[0].labels == {"run": tmp_path.name}
    tracker.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
