"""A run of two parts with a real tracker, read back the way the service reads it.

usage: real_trackers.py wandb|mlflow|trackio FOLDER   (in an environment that has the package: make trackers)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from run_cases import PROMPTS, Recorder, run

Points = dict[str, dict[int, float]]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: a header of 7 bytes, then blocks of 32 KiB of chunks (CRC, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a head: padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last chunk
            yield Record.FromString(parts)
            parts = b""


def read_wandb(folder: Path) -> tuple[Points, dict[str, Any], str, int]:
    points: Points = {}
    config: dict[str, Any] = {}
    summary = ""
    runs = set()
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            runs |= {record.run.run_id} - {""}
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            for item in record.summary.update:
                summary += f"{item.key or '.'.join(item.nested_key)} {item.value_json}\n"
            values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            for name, text in values.items():
                if not name.startswith("_"):
                    points.setdefault(name, {})[int(record.history.step.num)] = float(json.loads(text))
    return points, config, summary, len(runs)


def read_mlflow(folder: Path) -> tuple[Points, dict[str, Any], str, int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("dapo")
    runs = client.search_runs([experiment.experiment_id])
    found = runs[0]
    assert found.info.status == "FINISHED"
    points = {
        name: {point.step: point.value for point in client.get_metric_history(found.info.run_id, name)}
        for name in found.data.metrics
    }
    return points, dict(found.data.params), json.dumps(found.data.tags), len(runs)


def read_trackio(folder: Path) -> tuple[Points, dict[str, Any], str, int]:
    from trackio.sqlite_storage import SQLiteStorage

    names = SQLiteStorage.get_runs("dapo")
    points: Points = {}
    summary = ""
    for line in SQLiteStorage.get_logs("dapo", names[0]):
        for name, value in line.items():
            if name == "summary":
                summary = str(value)
            elif name not in ("step", "timestamp"):
                points.setdefault(name, {})[line["step"]] = float(value)
    return points, SQLiteStorage.get_run_config("dapo", names[0]) or {}, summary, len(names)


def same(found: float, written: float) -> bool:
    return math.isclose(found, written, rel_tol=1e-6) or (math.isnan(found) and math.isnan(written))


def check(points: Points, lines: list[Mapping[str, Any]], rename: bool) -> None:
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                name = name.replace("@", "_at_") if rename else name
                assert same(points[name][line["step"]], value), (name, line["step"], value, points[name])


if __name__ == "__main__":
    service, root = sys.argv[1], Path(sys.argv[2])
    settings = {"run.trackers": [service], "evaluation.every": 2, "training.steps": 2}
    heard = Recorder()
    run(root, settings, heard, heldout=PROMPTS[:4])
    run(root, settings | {"training.steps": 4}, heard, heldout=PROMPTS[:4], resume=RunFolder(root))
    failed = [text for text in heard.warnings if text.startswith("tracker ")]
    assert failed == [], failed
    readers = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}
    points, config, summary, runs = readers[service](root)
    lines = list(read_metrics(RunFolder(root).metrics))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and len(lines[2]) > 60
    check(points, lines, rename=service == "mlflow")
    assert runs == 1, f"{runs} runs for the two parts of one"
    assert config["seed"] in (9, "9"), config
    assert "all steps are done" in summary and "stopped" in summary, summary
    print("all there")
