"""The metrics of a run for Prometheus, at http://127.0.0.1:9091/metrics as long as the run goes on.

pip install prometheus-client
dapo train recipe.yaml run.trackers=examples/prometheus.py:Prometheus
"""

import math
import os
import re

from prometheus_client import CollectorRegistry, Gauge, start_http_server


class Prometheus:
    """A tracker (docs/extending.md, An observer): gauges of the latest step, labelled with the name of the run."""

    def __init__(self, folder, key, recipe):
        self.run, self.gauges, self.registry = folder.name, {}, CollectorRegistry()
        port = int(os.environ.get("PROMETHEUS_PORT", 9091))
        self.server, self.thread = start_http_server(port, "127.0.0.1", self.registry)

    def log(self, step, metrics):
        for name, value in {"step": step, **metrics}.items():
            if isinstance(value, int | float):
                self.gauge(name).labels(self.run).set(value)
            elif name in self.gauges:  # a number that this step does not have
                self.gauge(name).labels(self.run).set(math.nan)

    def gauge(self, name):
        if name not in self.gauges:
            words = "dapo_" + re.sub(r"\W", "_", name)
            self.gauges[name] = Gauge(words, name, ["run"], registry=self.registry)
        return self.gauges[name]

    def summarise(self, summary): ...

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
