"""The report of a run: what it counts, what it shows, and that nothing in it is more than text."""

from __future__ import annotations

import errno
import html
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dapo.commands import app
from dapo.commands.report import figures
from dapo.commands.report.content import sections_of
from dapo.observe.costs import costs, gains, gpus_of
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_view import RunView
from dapo.records import Reward
from dapo.util.pages import Answer, Code, Section, Text, as_html, as_markdown, write_report
from stage_cases import stage_config
from stored_run import RIGHT, WRONG, group, stored_run

HOSTILE = "</pre><script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>\n````\n# heading"


def a_run(root: Path, metrics: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> RunView:
    """A run with these lines of metrics, the first one that of step 0."""
    folder = stored_run(root, {}, settings=settings)
    with MetricsLog(folder.metrics) as log:
        for step, entry in enumerate(metrics):
            log.append(step, entry)
    return RunView.read(root)


def evaluated(accuracy: float, spread: float = 0.0, **others: float) -> dict[str, float]:
    low, high = accuracy - spread, accuracy + spread
    found = {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high, "eval/rows": 10.0}
    return found | others


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# --- costs --------------------------------------------------------------------------------------------------------


def test_tokens_and_seconds_of_a_point_count_up_to_the_last_evaluation(tmp_path: Path) -> None:
    step = {"tokens/generated": 100, "tokens/wasted": 10, "time/step": 2.0}
    run = a_run(tmp_path / "r", [evaluated(0.2), step, {**step, **evaluated(0.4)}, step])
    (accuracy,) = gains(run)
    spent = costs(run, accuracy.step)
    assert accuracy.points == pytest.approx(20)  # 0.2 to 0.4
    assert accuracy.cost(spent.tokens) == pytest.approx(200 / 20)
    assert accuracy.cost(spent.seconds) == pytest.approx(4 / 20)
    assert (costs(run).tokens, costs(run).wasted, costs(run).seconds) == (300, 30, 6.0)
    assert "| held-out accuracy, percentage points | 20 | 40 | +20 | 10 |" in words_of(run)  # all of one unit


def test_without_an_evaluation_the_ends_of_the_training_are_compared(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r", [{}, {"reward/mean": -1.0}, {"reward/mean": 0.0}, {"reward/mean": 0.5}])
    (reward,) = gains(run)
    assert (reward.before, reward.after, reward.step) == (-1.0, 0.5, 3)


@pytest.mark.parametrize(("steps", "ends"), [(3, "the first and the last step"), (8, "4"), (9, "4"), (12, "5")])
def test_what_is_compared_of_a_training_never_overlaps_and_is_named(tmp_path: Path, steps: int, ends: str) -> None:
    run = a_run(tmp_path / "r", [evaluated(0.2), *({"reward/mean": float(step)} for step in range(steps))])
    (reward,) = gains(run)
    count = int(ends) if ends.isdigit() else 1
    assert (reward.before, reward.after) == ((count - 1) / 2, steps - 1 - (count - 1) / 2)
    compared = f"means of the first {ends} and the last {ends} steps" if count > 1 else ends
    assert reward.what == f"training reward, points of 1: {compared}" and f"| {reward.what} |" in words_of(run)


def test_a_point_that_was_not_gained_has_no_cost(tmp_path: Path) -> None:
    (accuracy,) = gains(a_run(tmp_path / "r", [evaluated(0.4), evaluated(0.3)]))
    assert accuracy.cost(100.0) is None


def test_what_stands_under_one_name_twice_is_told_apart(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r", [{}])
    run.folder.environment.write_text(json.dumps({"packages": {"torch": "2.13.0"}, "threads": {"torch": 2}}))
    said = words_of(RunView.read(run.folder.root))
    assert "| torch | 2.13.0 |" in said and "| threads.torch | 2 |" in said


def test_gpu_seconds_count_the_gpus_that_were_watched_on_every_host(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r", [{}, {"time/step": 10.0}])
    for torch, gpus in (("2.13.0+cpu", 0), ("2.13.0", None)):
        run.folder.environment.write_text(json.dumps({"packages": {"torch": torch}}))
        assert gpus_of(RunView.read(run.folder.root)) == gpus
    gpu = {"util": 0.5, "memory": 1, "power": 100}
    lines = [{"host": "a", "gpu": [gpu, gpu]}, {"host": "b", "gpu": [gpu]}, {"host": "a", "gpu": [gpu]}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"host": "a", "gp'  # being written
    (tmp_path / "r/resources.jsonl").write_text(text, encoding="utf-8")
    assert costs(run).gpu_seconds == 30.0


def test_what_was_gained_is_up_to_the_last_evaluation_and_not_to_the_best_one(tmp_path: Path) -> None:
    (accuracy,) = gains(a_run(tmp_path / "r", [evaluated(0.2), evaluated(0.9), evaluated(0.4)]))
    assert (accuracy.before, accuracy.after, accuracy.step) == (0.2, 0.4, 2)


def test_a_run_that_was_told_to_stay_on_the_cpu_had_no_gpu(tmp_path: Path) -> None:
    assert gpus_of(a_run(tmp_path / "r", [{}], {"runtime.device": "cpu"})) == 0


# --- samples ------------------------------------------------------------------------------------------------------


def shown(folder: Path) -> list[str]:
    """The responses under "Samples"."""
    (section,) = (one for one in sections_of(RunView.read(folder)) if one.title == "Samples")
    return [block.response for block in section.blocks if isinstance(block, Answer)]


def test_best_and_worst_of_the_last_step_are_by_reward_one_of_each_prompt(tmp_path: Path) -> None:
    failed = Reward(None, 0.0, error="timed out")
    stored_run(
        tmp_path / "r",
        {
            1: [group(0, 0, [("old right", RIGHT), ("old wrong", WRONG)])],
            2: [
                group(1, 0, [("right", RIGHT), ("wrong", WRONG), ("failed", failed)]),
                group(2, 1, [("half", Reward(None, 0.5))]),
            ],
        },
    )
    assert shown(tmp_path / "r") == ["right", "half", "wrong", "half"]
    (tmp_path / "r/samples/step-00002.jsonl").write_text("spoilt\n")
    assert shown(tmp_path / "r") == []
    assert "step-00002.jsonl:1: not a line of samples" in words_of(RunView.read(tmp_path / "r"))


def test_of_equals_the_shortest_good_one_and_the_longest_bad_one_are_shown(tmp_path: Path) -> None:
    texts = [("right, 4 tokens", RIGHT), ("right, 1", RIGHT), ("wrong, 1", WRONG), ("wrong, 4 tokens", WRONG)]
    given = group(0, 0, texts)
    sized = []
    for sample, length in zip(given.samples, (4, 1, 1, 4), strict=True):
        ids = np.full(length, 5, np.int32)
        sized.append(replace(sample, token_ids=ids, logprobs=ids.astype(np.float32), versions=ids))
    stored_run(tmp_path / "r", {1: [replace(given, samples=tuple(sized))]})
    assert shown(tmp_path / "r") == ["right, 1", "wrong, 4 tokens"]


# --- pages --------------------------------------------------------------------------------------------------------


def test_what_a_sample_holds_is_text_and_the_page_loads_nothing(tmp_path: Path) -> None:
    stored_run(tmp_path / "r", {1: [group(0, 0, [(HOSTILE, RIGHT), ("plain", WRONG)])]})
    html_page, markdown_page = write_report("r", sections_of(RunView.read(tmp_path / "r")), tmp_path / "out")
    tags = _Tags()
    tags.feed(html_page.read_text(encoding="utf-8"))
    assert HOSTILE in tags.text
    assert not {tag for tag, _ in tags.found} & {"script", "link", "iframe", "object", "base"}
    assert all(not name.startswith("on") for _, attributes in tags.found for name in attributes)
    sources = [value or "" for _, attributes in tags.found for name, value in attributes.items() if name == "src"]
    assert sources and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert ("`" * 5) + "text\n" + HOSTILE in markdown_page.read_text(encoding="utf-8")


def test_markdown_names_plots_that_are_there(tmp_path: Path) -> None:
    stored_run(tmp_path / "r", {1: [group(0, 0, [("a", RIGHT)])]})
    _, page = write_report("r", sections_of(RunView.read(tmp_path / "r")), tmp_path / "out")
    assert "](plots/learning.png)" in page.read_text(encoding="utf-8")
    assert (tmp_path / "out/plots/learning.png").read_bytes().startswith(b"\x89PNG")


def test_a_lone_surrogate_can_be_written_and_a_long_text_is_cut(tmp_path: Path) -> None:
    sections = [Section("S", [Answer("a", "\ud800", "x" * 100_000)])]
    page, _ = write_report("r", sections, tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    assert "\\ud800" in text and "96,000 characters left out" in text


def test_code_and_joined_letters_can_be_copied_and_nothing_that_is_obeyed_is_there(tmp_path: Path) -> None:
    text = "def f():\n\treturn\u3000'\u00a0'  # \U0001f469\u200d\U0001f680 \u0645\u06cc\u200c\u062e \u2009|"
    sections = [Section("s", (Code(text + "\x1b[2J\u202e\u2066\x85\u200b\u2028\r|"),))]
    for file in write_report("r", sections, tmp_path / "out"):
        page = file.read_bytes().decode()
        assert text in html.unescape(page)
        assert "\\x1b[2J\\u202e\\u2066\\x85\\u200b\\u2028\\r" in page
        assert not set("\x1b\u202e\u2066\x85\u200b\u2028\r") & set(page)


def test_marks_in_a_text_mean_nothing_in_either_form() -> None:
    sections = [Section("S", [Text("<b>a_b_c</b> *d* [e](f)")])]
    assert "&lt;b&gt;a_b_c&lt;/b&gt;" in as_html("r", sections)
    assert r"\<b\>a\_b\_c\</b\> \*d\* \[e\](f)" in as_markdown("r", sections)


def words_of(run: RunView) -> str:
    return as_markdown("r", sections_of(run)).replace("\\", "")


def test_evaluations_before_and_after_have_intervals_and_so_has_the_difference(tmp_path: Path) -> None:
    text = words_of(a_run(tmp_path / "r", [evaluated(0.2, 0.03), {}, evaluated(0.5, 0.04)]))
    assert "| before training | 20.0% (17.0% to 23.0%) |" in text
    assert "| after step 2 | 50.0% (46.0% to 54.0%) |" in text
    assert "changed by +30.0 percentage points (95% interval +25.0 to +35.0)" in text  # 3, 4, 5
    assert "no difference at all" not in text


def test_a_difference_that_may_be_none_is_called_that(tmp_path: Path) -> None:
    text = words_of(a_run(tmp_path / "r", [evaluated(0.50, 0.03), evaluated(0.52, 0.04)]))
    assert "(95% interval -3.0 to +7.0)" in text and "It may be no difference at all." in text


def test_it_says_what_differs_from_the_defaults_and_how_to_do_it_again(tmp_path: Path) -> None:
    text = words_of(a_run(tmp_path / "r", [{}], {"training.learning_rate": 0.01}))
    assert "| training.learning_rate | 0.01 | 1e-06 |" in text
    assert "| training.steps |" not in text
    assert "dapo train r.yaml" in text and f"dapo train {tmp_path}/r/config.yaml run.dir={tmp_path}/r-again" in text


def test_a_run_in_its_first_moment_has_a_report(tmp_path: Path) -> None:
    stored_run(tmp_path / "r", {})
    text = words_of(RunView.read(tmp_path / "r"))
    assert "No step is done yet." in text and "killed, it seems" in text


def test_the_alarms_of_the_run_are_told_again(tmp_path: Path) -> None:
    calm: dict[str, float] = {"grad_norm/max": 0.5}
    text = words_of(a_run(tmp_path / "r", [{}, *[calm] * 10, {"grad_norm/max": 50.0}]))
    assert "| step 11: gradient spike: a gradient norm of 50" in text


@pytest.mark.filterwarnings("error")
def test_a_plot_without_a_curve_has_no_legend_and_no_warning(tmp_path: Path) -> None:
    steps = [{}, {"groups/drawn": 3, "time/rollout": 1.0}, {"groups/drawn": 3, "time/rollout": 1.0}]
    write_report("r", sections_of(a_run(tmp_path / "r", steps)), tmp_path / "report")
    assert list((tmp_path / "report" / "plots").glob("*.png"))


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_both_and_names_them(tmp_path: Path) -> None:
    stored_run(tmp_path / "r", {1: [group(0, 0, [("a", RIGHT)])]})
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert done.exit_code == 0, done.output
    pages = [Path(line) for line in done.output.split()]
    assert [page.name for page in pages] == ["report.html", "report.md"] and all(page.is_file() for page in pages)


def disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_wrong_is_said_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1 and "is not a run folder" in done.output
    stored_run(tmp_path / "r", {})
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r"), "--output", str(tmp_path / "file")])
    assert done.exit_code == 1 and "--output: cannot write" in done.output
    monkeypatch.setattr("dapo.util.pages.write_atomic", disk_is_full)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert done.exit_code == 1 and "No space" in done.output and not (tmp_path / "r/report").exists()
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "dapo.commands.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert done.exit_code == 1 and "pip install 'dapo-rl[report]'" in done.output


def test_of_a_run_that_samples_ahead_the_rollout_is_the_wait_for_a_batch() -> None:
    assert figures.phase_name("rollout", [{"step": 1}]) == "rollout"
    ahead = [{"step": 1, "overlap/wall": 2.0}]
    assert [figures.phase_name(phase, ahead) for phase in ("rollout", "reward_wait")] == [
        "wait for a batch",
        "reward wait",
    ]


def test_what_was_sampled_ahead_has_panels_of_its_own() -> None:
    turns = {"groups/drawn": 4, "groups/share_all_right": 0.5, "groups/share_all_wrong": 0.0, "accuracy": 1.0}
    ahead = {f"staleness/groups/{age}": count for age, count in {10: 1, 9: 2, 0: 1}.items()}
    ahead |= {"overlap/seconds": 0.5, "idle/learner": 0.2}
    for draw, title, labels in (
        (figures.sampling, "by age in versions", ["0 old", "9 old", "10 old"]),
        (figures.learning, "side by side, and idle", ["overlap/seconds", "idle/learner"]),
    ):
        alone, both = draw([{"step": 1} | turns]), draw([{"step": 1} | turns, {"step": 2} | turns | ahead])
        assert alone and both and len(both.axes) == len(alone.axes) + 1
        last = both.axes[-1]
        assert title in last.get_title(loc="left")
        assert [text.get_text() for text in last.get_legend().get_texts()] == labels


def test_the_alarms_of_a_stage_are_told_too(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r", [{}, *[{"grad_norm/max": 0.5}] * 10, {"grad_norm/max": 50.0}])
    run.folder.config.write_text(json.dumps(stage_config("dpo", run.folder.root).model_dump(mode="json")))
    (found,) = [(step, said) for step, on, said in RunView.read(run.folder.root).alarms() if "gradient spike" in on]
    assert found[0] == 11 and f"step 11: {found[1][0]}" in str(sections_of(RunView.read(run.folder.root)))
