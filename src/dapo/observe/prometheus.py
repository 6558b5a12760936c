"""Metrics and resources for Prometheus: text at http://127.0.0.1:PORT/metrics, as long as the run goes on.

Consumes: the metrics of each step, as a :class:`~dapo.observe.trackers.Tracker`, and the latest look at the resources.
Produces: gauges named ``dapo_`` and the metric's name with ``_`` for all that is no letter or digit. Only this machine
can read them: the server listens on the loopback, and answers to the names of the loopback alone.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dapo.hosts import is_loopback
from dapo.observe.metrics import describe

_LOOPBACK = "127.0.0.1"
_PATIENCE = 5.0
"""Seconds that a client may be silent, or may take to read the answer."""


class PrometheusTracker:
    """Serves the newest numbers, labelled with the name of the run. Port 0 is one that is free, see ``port``; ``looks``
    gives lines as in resources.jsonl. Raises OSError if the port is taken.
    """

    def __init__(self, port: int, looks: Callable[[], Sequence[Mapping[str, Any]]], run: str) -> None:
        self._text, self._looks, self._run = "", looks, run
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE

            def setup(self) -> None:  # the timeout is of each byte; this one is of all
                super().setup()
                self._end = threading.Timer(_PATIENCE, _hang_up, [self.connection])
                self._end.daemon = True
                self._end.start()

            def finish(self) -> None:
                self._end.cancel()
                super().finish()

            def do_GET(self) -> None:
                if not is_loopback(self.headers.get("Host", "")):
                    return self.send_error(403, "use 127.0.0.1")
                if self.path.partition("?")[0] != "/metrics":
                    return self.send_error(404)
                body = tracker.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = _Server((_LOOPBACK, port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="dapo-prometheus", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        label = _labels({"run": self._run})
        text = _gauge("step", "rollout steps done", [(label, step)])
        for name, value in metrics.items():
            metric = describe(name)
            if isinstance(value, int | float) and metric is not None:
                text += _gauge(name, f"{metric.meaning} ({metric.unit})", [(label, value)])
        self._text = text  # whole at once: it is read in other threads

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Nothing: a run that is over has no present numbers."""

    def text(self) -> str:
        """What is served, in Prometheus' text format."""
        rows: dict[str, list[tuple[str, float]]] = {}
        for look in self._looks():
            labels = {"run": self._run, "host": look["host"], "role": look["role"]}
            for name, more, value in _numbers(look):
                rows.setdefault(name, []).append((_labels(labels | more), value))
        return self._text + "".join(_gauge(f"resource/{name}", "see resources.jsonl", rows[name]) for name in rows)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each of a few connections; those beyond are closed."""

    daemon_threads = True

    def server_activate(self) -> None:
        self._free = threading.BoundedSemaphore(16)
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or is sent away, is nothing to tell of; another error is a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _numbers(look: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    for name, value in look.items():
        if isinstance(value, int | float) and name != "time":
            yield name, {}, value
    for place, card in enumerate(look["gpu"]):
        for name, value in card.items():
            if value is not None:
                yield f"gpu_{name}", {"gpu": str(place)}, value


def _gauge(name: str, text: str, rows: Sequence[tuple[str, float]]) -> str:
    full = "dapo_" + re.sub(r"\W", "_", name, flags=re.ASCII)
    lines = "".join(f"{full}{labels} {float(value)!r}\n".replace("inf\n", "Inf\n") for labels, value in rows)
    return f"# HELP {full} {text}\n# TYPE {full} gauge\n{lines}".replace(" nan\n", " NaN\n")


def _labels(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{key}="{value.translate(escapes)}"' for key, value in labels.items()) + "}"
