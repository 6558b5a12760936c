"""What a run uses of its machine: CPU, memory, GPUs, disk and network, looked at every few seconds in a thread.

Consumes: the counters of the system (psutil) and of NVIDIA's driver (nvidia-ml-py), both of the extra ``resources``.
Produces: ``resources.jsonl`` in the run folder, a line for each role and look, and the means of a step for its metrics.
Waits for nothing; a counter that cannot be read is left out. Without psutil there is nothing to look with. The roles
are those of docs/trackers.md; a run on Ray has those of each node (``orchestrator/runtime/ray/nodes.py``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo.util.files import json_line

Look = dict[str, Any]
"""One line of ``resources.jsonl``: time (s), host, role, cpu (cores), rss (bytes), gpu (list of util, a share, memory,
bytes, and power, W), and disk_read, disk_write, net_sent, net_received in bytes a second. On Ray perhaps memory_used (a
share, of a node's), version (of an engine's weights), in_flight (samples) and idle (a share, of engines)."""
_RATES = ("disk_read", "disk_write", "net_sent", "net_received")
_WORKER = "dapo.reward.worker"  # stands in the command line of a worker, see ``reward/pool.py``


def make_recorder(
    file: Path, every_s: float, looker: Callable[[], list[Look]] | None = None
) -> ResourceRecorder | None:
    """A recorder that has begun; None: not asked for (``every_s`` 0), or psutil is not installed."""
    return ResourceRecorder(file, every_s, looker) if every_s and importlib.util.find_spec("psutil") else None


class ResourceRecorder:
    """Looks every ``every_s`` seconds, in a thread, until closed; without ``start`` only :meth:`look` looks. Lines are
    added to ``file``. ``looker`` gives the lines of a look; None: the machine's."""

    def __init__(
        self, file: Path, every_s: float, looker: Callable[[], list[Look]] | None = None, start: bool = True
    ) -> None:
        self._file, self._every_s, self._looker = file, every_s, looker
        self._latest: list[Look] = []
        self._since: list[list[Look]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dapo-resources", daemon=True)
        if start:
            self._thread.start()

    def look(self) -> None:
        if self._looker is None:
            self._looker = Looker().look
        looks = self._looker()
        with self._lock:
            self._latest = looks
            self._since.append(looks)
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as lines:  # a full disk is not ours
            lines.write("".join(map(json_line, looks)))

    def step_means(self) -> dict[str, float]:
        """Metrics: means of the looks since the last call, all roles together; of the latest look if none."""
        with self._lock:
            looks, self._since = self._since or [self._latest], []
        return means([look for look in looks if look])

    def latest(self) -> list[Look]:
        with self._lock:
            return self._latest

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # what cannot be seen must not end what only looks
                self.look()
            if self._over.wait(self._every_s):
                return


def means(looks: Sequence[Sequence[Look]]) -> dict[str, float]:
    """Metrics of some looks: the roles of each added up, then the mean over looks. What was never seen is left out."""
    found: dict[str, list[float]] = {}
    for look in looks:
        for name, metric in _METRICS.items():
            values = [role[name] for role in look if role.get(name) is not None]
            found.setdefault(metric, []).extend([sum(values)] if values else [])
        for name, metric, of in _GPU_METRICS:
            values = [card[name] for role in look for card in role["gpu"] if card.get(name) is not None]
            found.setdefault(metric, []).extend([of(values)] if values else [])
    return {metric: fmean(values) for metric, values in found.items() if values}


_METRICS = {"cpu": "resources/cpu", "rss": "resources/memory"} | {name: f"resources/{name}" for name in _RATES}
_GPU_METRICS: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("util", "resources/gpu", fmean),
    ("memory", "resources/gpu_memory", sum),
    ("power", "resources/gpu_power", sum),
)


class Looker:
    """Reads the counters. Rates are since the look before, and left out in the first one."""

    def __init__(self, cards: list[Any] | None = None) -> None:
        """``cards``: handles of NVIDIA's; None: of those that this process may use."""
        import psutil

        self._psutil = psutil
        self._own = psutil.Process()
        self._host = socket.gethostname()
        self._before: dict[str, tuple[float, dict[str, float]]] = {}
        self._cards = nvidia_cards(own=True) if cards is None else cards

    def look(self) -> list[Look]:
        """The lines of the roles; those of ``reward`` and ``other`` only while there are such children."""
        now = time.time()
        own = self._counters([self._own]) | self._network()
        lines = [self._line(now, "engine+trainer", own, self._seen_cards())]
        with contextlib.suppress(self._psutil.Error):
            for role, processes in self._children().items():
                lines.append(self._line(now, role, self._counters(processes), []))
        return lines

    def _seen_cards(self) -> list[dict[str, Any]]:
        return [_card(handle) for handle in self._cards]

    def _children(self) -> dict[str, list[Any]]:
        workers: set[int] = set()
        found: dict[str, list[Any]] = {}
        for process in self._own.children(recursive=True):  # parents come before their children
            with contextlib.suppress(self._psutil.Error):  # it may have ended
                if process.ppid() in workers or _WORKER in process.cmdline():
                    workers.add(process.pid)
                found.setdefault("reward" if process.pid in workers else "other", []).append(process)
        return found

    def _line(self, now: float, role: str, counters: dict[str, float], gpu: list[dict[str, Any]]) -> Look:
        clock = time.monotonic()
        then, before = self._before.get(role, (clock, {}))
        self._before[role] = clock, counters
        rates: dict[str, float | None] = dict.fromkeys(("cpu_s", *_RATES))
        for name in rates.keys() & counters.keys() & before.keys() if clock > then else ():
            rates[name] = round(max(0.0, counters[name] - before[name]) / (clock - then), 3)  # below 0: a child ended
        line: Look = {"time": round(now, 3), "host": self._host, "role": role, "cpu": rates.pop("cpu_s")}
        return line | {"rss": int(counters["rss"]) if "rss" in counters else None, "gpu": gpu} | rates

    def _counters(self, processes: Sequence[Any]) -> dict[str, float]:
        found = {"cpu_s": 0.0, "rss": 0.0}
        for process in processes:
            with contextlib.suppress(self._psutil.Error, AttributeError), process.oneshot():  # it may have ended
                times = process.cpu_times()
                found["cpu_s"] += times.user + times.system
                found["rss"] += process.memory_info().rss
                disk = process.io_counters()  # not on every system
                found["disk_read"] = found.get("disk_read", 0.0) + disk.read_bytes
                found["disk_write"] = found.get("disk_write", 0.0) + disk.write_bytes
        return found

    def _network(self) -> dict[str, float]:
        with contextlib.suppress(Exception):
            cards = self._psutil.net_io_counters(pernic=True)
            outside = [counts for name, counts in cards.items() if not name.startswith("lo")]
            return {"net_sent": sum(c.bytes_sent for c in outside), "net_received": sum(c.bytes_recv for c in outside)}
        return {}


def nvidia_cards(own: bool = False) -> list[Any]:
    """NVIDIA's handles of all cards, or of the ``own`` ones, which this process may use; none without a driver or
    nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        if not own:
            return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        return [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{name.removeprefix('GPU-')}") for name in names]
    except Exception:  # each driver has errors of its own
        return []


def _card(handle: Any) -> dict[str, Any]:
    """Use (share of the time), memory (bytes) and power (W) of a card; None for what it does not tell."""
    import pynvml

    def read(what: Callable[[], float]) -> float | None:
        try:
            return what()
        except pynvml.NVMLError:
            return None

    return {
        "util": read(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        "memory": read(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        "power": read(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    }
