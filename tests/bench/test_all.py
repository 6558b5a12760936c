"""The one command over all benchmarks: on a CPU with TRL and vLLM's stand-in, and as on a GPU with made up sides."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_rollout import STAND_IN

import cycle
import rollout
import runner
import train
from peers import named, settings, trl, vllm
from work import Rollout

together = importlib.import_module("all")


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Options for a small model with a chat template, prompts, rows and a file of settings."""
    from dapo.commands.demo.task import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    make_model(0, len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "7+8=", "answer": "15"}\n')
    at = {"out": "out", "model": "model", "prompts": "p.jsonl", "settings": "settings.json"}
    return [text for name, value in at.items() for text in (f"--{name}", str(tmp_path / value))]


def keep(tmp_path: Path, **entry: Any) -> None:
    known = {"peer": "vLLM", "card": "CPU", "work": "other", "date": "2026-11-28", "tried": {}}
    (tmp_path / "settings.json").write_text(json.dumps([known | entry]))


def cells(found: dict[str, Any], name: str) -> list[list[str]]:
    """The rows of the last table whose first cell begins so, without it."""
    return [row[1:] for row in found["rows"] if row[0].startswith(name)]


def test_on_a_cpu_a_side_that_fails_makes_its_part_void_and_the_same_command_takes_the_rest_from_the_folder(
    tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(STAND_IN)
    small = "--prompts 4 --samples 2 --updates 2 --cycles 1 --limit 5 --rounds 1"
    sizes = {"demo": small, "cycle": small, "rollout": "--samples 2 --limit 8 --repeats 1"}
    parts = {name: (*part, own + sizes[name].split()) for name, (*part, own) in together.PARTS["cpu"].items()}
    monkeypatch.setitem(together.PARTS, "cpu", parts)
    spawn = runner._spawn

    def quick(options: Any, job: dict[str, Any], files: Any) -> int | None:
        """TRL, in this process, must not find the stand-in."""
        return spawn(options, job, files) if "vllm" in job["do"] else runner.do_job(str(files["job.json"])) or 0

    monkeypatch.setattr(runner, "_spawn", quick)
    arguments = [*places, "--device", "cpu", "--peer-path", str(site)]
    keep(tmp_path, setting="seqs256")
    found = together.main(arguments)
    told = capsys.readouterr().out
    rates = cells(found, "rollout, tokens/s")
    assert [row[1] for row in rates] == ["vLLM best (seqs256)", "vLLM defaults (defaults)"]
    assert [row[3] for row in rates] == ["void: vLLM best was not measured"] * 2
    (row,) = cells(found, "demo, s")
    assert row[3] == f"{found['parts']['demo']['ratios']['ours / TRL']:.2f}x" and row[1] == "TRL (defaults)"
    assert cells(found, "cycle, processor time")[0][3].endswith("x")
    assert "no room for 256" in told and "VOID: rollout: vLLM best was not measured" in told
    written = (tmp_path / "out" / "report.md").read_text()
    assert "no room for 256" in written and "void: vLLM best was not measured" in written and "## demo" in written

    keep(tmp_path, setting="flat")
    again = together.main(arguments)
    told = capsys.readouterr().out
    assert again["void"] == [] and told.count("as measured before") == 7  # all but vLLM's new setting
    best, defaults = cells(again, "rollout, tokens/s")
    assert best[1] == "vLLM best (flat)" and best[3].endswith("x") and defaults[:3] == rates[1][:3]
    assert best[0] == rates[0][0] == f"{again['parts']['rollout']['sides'][0]['speed']:,.0f}"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rows"] == again["rows"]


def made_up(options: Any, name: str, job: dict[str, Any]) -> runner.Outcome:
    """A side on a card of 4 TB/s and 800 TFLOP/s: 50 ms for each token of a response with vLLM, 1 ms with ours."""
    records: list[dict[str, Any]] = [{"kind": "machine", "versions": {"vllm": "0.25.1"}}]
    limits = {"kind": "limits", "device": "NVIDIA H200", "bytes_per_second": 4e12, "operations_per_second": 8e14}
    if "works" in job:
        seconds = 0.05 if "setting" in job else 0.001
        for i, work in enumerate(Rollout(**of) for of in job["works"]):
            lengths = [(len(p), n) for p, n in zip(work.prompts, work.limits, strict=True) for _ in range(work.samples)]
            run = {"work": i, "lengths": lengths, "seconds": seconds * work.limits[0], "time": 0.0}
            records.append({"kind": "rollout", **run})
    elif "task" in job:
        one = {"seconds": 98.0 if "setting" in job else 9.0, "phases": {"update": 1.0}, "inside": {}, "counts": True}
        counts = {"updates": 4, "generated": 9, "trained": 9}
        records += [{"kind": "cycle", **one, **counts}] * job["task"]["cycles"]
    elif "groups" in job:
        update = {"kind": "update", "counts": True, "seconds": 2.0, "phases": {}, "micro_batches": 1, "skipped": False}
        sizes = {"kind": "work", "tokens": 900, "computed": 800, "operations": 8e14}
        records += [limits, update, sizes, {"kind": "hand_over", "counts": True, "seconds": 0.003}]
    else:
        records.append(limits)
    return runner.Outcome(name, 0.0, records, None)


def test_on_a_gpu_all_parts_run_with_the_settings_kept_and_shares_are_of_both_kinds_of_limits(
    tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runner, rollout, train, cycle):
        monkeypatch.setattr(module, "run_side", made_up)
    monkeypatch.setattr(runner, "require_gpu", lambda device: None)
    asked = [*places[:-2], "--rows", str(tmp_path / "p.jsonl"), "--peer-path", str(tmp_path)]
    found = together.main(asked)
    assert list(found["parts"]) == ["rollout", "update", "cycle"]
    assert cells(found, "copy") == [["4", "", "", "", "", "83.3%"]]  # of 4.8 TB/s
    ours, best = f"{32 / 0.001:,.0f}", f"{32 / 0.05:,.0f}"  # 2 x 16 responses beside each other
    assert [row[:4] for row in cells(found, "rollout, tokens/s")] == [
        [ours, f"vLLM {how}", best, "50.00x"] for how in ("best (async+nodetok+flat)", "defaults (defaults)")
    ]
    (update, _) = cells(found, "update, tokens/s")
    assert update[0] == "450" and update[4:] == ["50.0% of operations", f"{4e14 / 989e12:.1%} of operations"]
    assert cells(found, "update, hand-over, ms")[0][0] == "3.00"
    plain, _ = cells(found, "cycle, s")
    assert plain[:4] == ["9.00", "TRL (nockpt+micro32+mem30+async+seqs1024)", "98.00", f"{98 / 9:.2f}x"]

    points = together.main([*asked, "--parts", "7b"])
    assert list(points["parts"]) == ["rollout", "update", "cycle", "7b"] and points["void"] == []
    of_points = cells(points, "7b, ")
    assert [row[0] for row in points["rows"] if row[0].startswith("7b")][1] == "7b, 64x4k, tokens/s"
    assert of_points[0][:4] == ["256,000", "vLLM best (async+nodetok+flat)", "5,120", "50.00x"]
    assert of_points[2][4].endswith("of bytes") and of_points[2][5].endswith("of bytes")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "rollout"], "--parts rollout: needs --model and --prompts and --peer-path"),
        (["--parts", "cycle"], "--parts cycle: needs --model and --rows and --peer-path"),
        (["--parts", "7b", "--device", "cpu"], "--parts 7b: not on cpu"),
        (["--model", "gone", "--prompts", "p", "--peer-path", "s"], "--model gone: no such folder"),
    ],
)
def test_what_lacks_something_is_refused_before_anything_runs(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        together.parse(["--out", str(tmp_path), *arguments])
    assert told in capsys.readouterr().err


def test_what_is_kept_are_settings_that_there_are_and_the_fastest_of_those_tried() -> None:
    for entry in settings.read(runner.SETTINGS):
        assert named({"vLLM": vllm.PARTS, "TRL": trl.PARTS}[entry["peer"]], entry["setting"]), entry
        assert entry["tried"][entry["setting"]] == max(entry["tried"].values()) and entry["card"] != "CPU", entry


def test_the_best_setting_is_that_of_this_work_then_of_this_card_then_of_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_side", made_up)
    places = ["--out", str(tmp_path), "--settings", str(tmp_path / "settings.json")]
    options = rollout.parse(["search", *places, "--search", "async", "flat", "seqs256"])
    speeds = {"async": 2.0, "flat": 3.0, "seqs256": None}
    side = {"machine": {"versions": {"vllm": "0.25.1", "trl": "1.16.0"}}}
    settings.search(options, settings.VLLM, "work", lambda setting: {**side, "name": "", "speed": speeds[setting]})
    (entry,) = settings.read(options.settings)
    assert entry["setting"] == "flat" and entry["tried"] == speeds and entry["versions"] == {"vllm": "0.25.1"}
    assert (entry["card"], entry["peer"], entry["unit"]) == ("NVIDIA H200", "vLLM", "tokens/s")

    def best(**entry: Any) -> str | None:
        others = [{"card": "NVIDIA L4", "work": "work", "setting": "async"}, {"card": "CPU", "setting": "seqs512"}]
        known = [{"peer": "vLLM", "work": "other", "date": "2026-12-01", "tried": {}} | one for one in [*others, entry]]
        options.settings.write_text(json.dumps(known if entry["card"] else known[:2]))
        return settings.best(options, settings.VLLM, "work")

    assert best(card="NVIDIA H200", work="work", setting="flat") == "flat"
    assert best(card="NVIDIA H200", setting="full") == "full"
    assert best(card="") == "async"
    options.settings.unlink()
    assert settings.best(options, settings.VLLM, "work") is None
    options.best = "defaults"
    assert settings.best(options, settings.VLLM, "work") == "defaults"
