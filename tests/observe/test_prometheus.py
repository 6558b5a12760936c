"""What Prometheus reads: parsed by its own client library."""

from __future__ import annotations

import importlib.util
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dapo.config import load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError
from dapo.observe.prometheus import PrometheusTracker
from dapo.observe.trackers import check_trackers
from run_cases import Recorder, run

LOOK = {
    "time": 1.0, "host": "h", "role": "engine+trainer", "cpu": 1.5, "rss": 10, "gpu": [{"util": 0.5, "power": None}],
    "disk_read": None,
}  # fmt: skip


@pytest.fixture
def tracker() -> Iterator[PrometheusTracker]:
    tracker = PrometheusTracker(0, lambda: [LOOK], 'odd "name"\\')
    yield tracker
    tracker.close()


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_the_newest_metrics_and_resources_are_served(tracker: PrometheusTracker) -> None:
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 4, "eval/pass@8": 0.5, "loss": math.nan, "kl/reference": None})
    families = {family.name: family for family in text_string_to_metric_families(fetch(tracker.port))}
    values = {name: family.samples[0].value for name, family in families.items()}
    assert math.isnan(values.pop("dapo_loss"))
    assert values == {
        "dapo_step": 2, "dapo_reward_mean": 0.5, "dapo_eval_pass_8": 0.5,
        "dapo_resource_cpu": 1.5, "dapo_resource_rss": 10, "dapo_resource_gpu_util": 0.5,
    }  # fmt: skip
    assert families["dapo_reward_mean"].documentation.endswith("(reward)")
    assert families["dapo_step"].samples[0].labels == {"run": 'odd "name"\\'}
    labels = {"run": 'odd "name"\\', "host": "h", "role": "engine+trainer"}
    assert families["dapo_resource_gpu_util"].samples[0].labels == labels | {"gpu": "0"}


def test_only_the_loopback_and_only_that_page(tracker: PrometheusTracker) -> None:
    with pytest.raises(ConnectionRefusedError):  # as it would not be, if it listened on all addresses
        socket.create_connection(("127.0.0.2", tracker.port), timeout=20)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(tracker.port, "/")


def test_a_page_elsewhere_reads_nothing_through_a_name_of_its_own(tracker: PrometheusTracker) -> None:
    address = f"http://127.0.0.1:{tracker.port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "evil.example"}), timeout=10)
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "[::1]:1"}), timeout=10) as answer:
        assert answer.status == 200


def test_who_connects_and_says_nothing_is_not_waited_for(
    tracker: PrometheusTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_S", "_LOOK_S"):
        monkeypatch.setattr(f"dapo.util.serving.{name}", 0.05)
    with socket.create_connection(("127.0.0.1", tracker.port), timeout=20) as silent:
        assert silent.recv(1) == b""  # the server has hung up


def test_a_package_that_is_missing_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(recipe_path("cpu-demo"))
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else found(name))
    check_trackers(config)  # does not ask for it
    run = config.run.model_copy(update={"prometheus_port": 9091})
    with pytest.raises(ConfigError, match=r"run.prometheus_port: needs uvicorn, .*pip install 'dapo-rl\[prometheus\]'"):
        check_trackers(config.model_copy(update={"run": run}))


def test_it_serves_as_long_as_the_run_goes_on_and_a_taken_port_ends_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        heard = Recorder()
        assert run(tmp_path / "run", {"run.prometheus_port": port}, heard)["steps"] == 1
        assert len([text for text in heard.warnings if text.startswith("tracker prometheus failed")]) == 1
    served: list[str] = []
    listener = Recorder(on_step=lambda step: served.append(fetch(port)))
    run(tmp_path / "again", {"run.prometheus_port": port, "training.steps": 2}, listener)
    assert "dapo_resource_rss{" in served[-1]
    with pytest.raises(urllib.error.URLError):
        fetch(port)
