"""Metrics and resources for Prometheus: text at http://127.0.0.1:PORT/metrics, as long as the run goes on.

Consumes: the metrics of each step, as a :class:`~dapo.observe.tracker.Tracker`, and the latest look at the resources.
Produces: gauges named ``dapo_`` and the metric's name with ``_`` for all that is no letter or digit. Only this machine
can read them: the server listens on the loopback, and answers to the names of the loopback alone.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from dapo.observe.metrics import describe
from dapo.util.gate import metrics_response
from dapo.util.serving import LOCAL, Server, is_loopback


class PrometheusTracker:
    """Serves the newest numbers, labelled with the name of the run. Port 0 is one that is free, see ``port``; ``looks``
    gives lines as in resources.jsonl. Raises OSError if the port is taken."""

    def __init__(self, port: int, looks: Callable[[], Sequence[Mapping[str, Any]]], run: str) -> None:
        self._gauges: list[GaugeMetricFamily] = []
        self._looks, self._run = looks, run
        self._registry = CollectorRegistry()
        self._registry.register(self)
        listening = socket.create_server((LOCAL, port))
        self.port = int(listening.getsockname()[1])
        self._server = Server(self._answer, interface="asgi3", lifespan="off", timeout_graceful_shutdown=1)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        gauges = [_gauge("step", "rollout steps done", [({"run": self._run}, step)])]
        for name, value in metrics.items():
            metric = describe(name)
            if isinstance(value, int | float) and metric is not None:
                gauges.append(_gauge(name, f"{metric.meaning} ({metric.unit})", [({"run": self._run}, value)]))
        self._gauges = gauges  # whole at once: it is read in another thread

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Nothing: a run that is over has no present numbers."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is served; prometheus_client asks for it."""
        yield from self._gauges
        rows: dict[str, list[tuple[dict[str, str], float]]] = {}
        for look in self._looks():
            labels = {"run": self._run, "host": look["host"], "role": look["role"]}
            for name, more, value in _numbers(look):
                rows.setdefault(name, []).append((labels | more, value))
        yield from (_gauge(f"resource/{name}", "see resources.jsonl", of_name) for name, of_name in rows.items())

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_loopback(Headers(scope=scope).get("host", "")):
            response: Response = PlainTextResponse("use 127.0.0.1", 403)
        elif scope["path"] != "/metrics":
            response = PlainTextResponse("not found", 404)
        else:
            response = metrics_response(self._registry)
        await response(scope, receive, send)


def _numbers(look: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    for name, value in look.items():
        if isinstance(value, int | float) and name != "time":
            yield name, {}, value
    for place, card in enumerate(look["gpu"]):
        for name, value in card.items():
            if value is not None:
                yield f"gpu_{name}", {"gpu": str(place)}, value


def _gauge(name: str, text: str, rows: Sequence[tuple[Mapping[str, str], float]]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily("dapo_" + re.sub(r"\W", "_", name, flags=re.ASCII), text, labels=list(rows[0][0]))
    for labels, value in rows:
        gauge.add_metric(list(labels.values()), value)
    return gauge
