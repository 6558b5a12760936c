"""What a person sees: the right numbers on the line, whatever is missing, on a terminal and in a file."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from dapo.config import build_config
from dapo.config.plan import UNBOUNDED, missing_files, plan_of
from dapo.observe.progress import (
    Listener,
    LiveListener,
    Pace,
    PlainListener,
    QuietListener,
    before_and_after,
    duration,
    evaluation_line,
    make_listener,
    step_fields,
)
from dapo.orchestrator.budget import Budget

METRICS = {
    "accuracy": 0.453,
    "reward/mean": -0.094,
    "groups/kept": 16,
    "groups/drawn": 48,
    "response_length/mean": 24.13,
    "entropy": 0.4123,
    "clip/low": 0.001,
    "clip/high": 0.0123,
    "grad_norm": 0.5234,
    "tokens_per_second/rollout": 12345.0,
    "loss": 0.0,
}


@pytest.fixture
def ticks() -> Iterator[float]:
    """A clock that goes on by 2 s a look."""
    return iter(range(0, 3000, 2))


def plain_output(ticks: Iterator[float]) -> tuple[PlainListener, io.StringIO]:
    out = io.StringIO()
    return PlainListener(Console(file=out, width=40), clock=lambda: next(ticks)), out


def test_the_plain_line_of_a_step(ticks: Iterator[float]) -> None:
    listener, out = plain_output(ticks)
    listener.step(12, 50, METRICS)
    assert out.getvalue() == (
        "step 12/50  accuracy 45.3%  reward -0.09  kept 16/48  length 24.1  entropy 0.412  clip% 0.10/1.23  "
        "grad 0.523  tok/s 12.3k  sec 2.0  left 1:16\n"  # one line, however narrow the place
    )


def test_a_loss_of_zero_is_not_shown() -> None:
    assert "loss" not in dict(step_fields(1, 2, METRICS, 1.0, "0:01"))


@pytest.mark.parametrize("metrics", [{}, dict.fromkeys(METRICS), dict.fromkeys(METRICS, math.nan)])
def test_what_is_missing_is_a_dash(ticks: Iterator[float], metrics: dict[str, Any]) -> None:
    listener, out = plain_output(ticks)
    listener.step(1, 2, metrics)
    assert "accuracy -  reward -  kept -/-" in out.getvalue()
    assert "nan" not in out.getvalue() and "None" not in out.getvalue()


def test_the_time_left_follows_the_recent_pace(ticks: Iterator[float]) -> None:
    listener, out = plain_output(ticks)
    listener.started(plan_of(build_config({"model": {"path": "m"}})))
    for step in (1, 2, 3):
        listener.step(step, 3, {"time/step": 1.25})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("100 steps, each 512 prompts x 16 samples = 8192 samples, 16 updates of 32 groups")
    assert [line.split("  ")[-2:] for line in lines[1:]] == [
        ["sec 1.2", "left 0:04"],
        ["sec 1.2", "left 0:02"],
        ["sec 1.2", "left 0:00"],
    ]


@pytest.mark.parametrize(("used", "left"), [(500.0, "0:08"), (598.0, "0:02"), (599.5, "0:00"), (900.0, "0:00")])
def test_the_time_left_is_that_of_the_minutes_if_they_are_over_sooner(
    ticks: Iterator[float], used: float, left: str
) -> None:
    """10 minutes, 600 s; steps of 2 s of which 25 s, 2 s count: as many as fit, each of the wall's 2 s."""
    config = build_config({"model": {"path": "m"}, "training": {"steps": 5000, "minutes": 10}})
    pace = Pace(lambda: next(ticks))
    pace.start(plan_of(config))
    seconds = 25.0 if used == 500.0 else 2.0
    assert pace.tick(1, 5000, {"time/step": seconds, "time/training": used}) == (seconds, left)
    assert pace.tick(4999, 5000, {"time/step": 1e-3, "time/training": 0.0})[1] == "0:02"  # one step, however short
    assert pace.tick(4000, 5000, {"time/step": 1.0})[1] == "33:20"  # nothing is known of the minutes


@pytest.mark.parametrize(
    ("budget", "steps", "shown", "left"),
    [
        ({"minutes": 10}, "steps for 10 minutes", ("minutes", "9.0/10.0"), "0:30"),  # 60 s are left, steps of 4 s
        ({"samples": 20_000}, "steps for 20,000 samples", ("samples", "15.0k/20.0k"), "0:10"),  # 5 steps of 15 more
        ({"tokens": 900}, "steps for 900 tokens", ("tokens", "600/900"), "0:15"),  # half of 15 steps
    ],
)
def test_a_run_that_another_budget_ends_tells_of_that_one(
    ticks: Iterator[float], budget: dict[str, Any], steps: str, shown: tuple[str, str], left: str
) -> None:
    config = build_config({"model": {"path": "m"}, "training": {"steps": UNBOUNDED, **budget}})
    used = Budget(config.training, 15, seconds=540.0, last=4.0, samples=15_000, tokens=600)
    listener, out = plain_output(ticks)
    live = LiveListener(Console(file=io.StringIO(), force_terminal=True, width=100), clock=lambda: 0.0)
    for one in (listener, live):
        one.started(plan_of(config))
        one.step(15, UNBOUNDED, METRICS | {"time/step": 4.0, "time/training": 540.0} | used.shown())
    first, line = out.getvalue().splitlines()
    assert first.startswith(f"{steps}, each 512 prompts")
    assert line.startswith(f"step 15  {' '.join(shown)}  accuracy") and line.endswith(f"left {left}")
    live.close()
    assert live._bar is not None and live._bar[2] == shown[0] and live._run.startswith("step 16, ")
    told = [out.getvalue(), live._console.file.getvalue(), str(plan_of(config))]  # type: ignore[attr-defined]
    assert not any("000000" in text for text in told)
    assert Budget(build_config({"model": {"path": "m"}}).training, 15).shown() == {}


def test_a_long_step_says_every_half_a_minute_where_it_is() -> None:
    now, out = [0.0], io.StringIO()
    listener = PlainListener(Console(file=out, width=40), clock=lambda: now[0])
    listener.started(plan_of(build_config({"model": {"path": "m"}})))
    for second in range(1, 70):
        now[0] = float(second)
        listener.working("rollout", second, 100, "groups of 200 drawn")
    now[0] = 100.0
    listener.working("sync")
    assert out.getvalue().splitlines()[1:] == [
        "  rollout 30/100  groups of 200 drawn  1:10 left",
        "  rollout 60/100  groups of 200 drawn  0:40 left",
        "  sync",
    ]


def test_the_live_line_says_the_phase_its_rate_and_the_time_left() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    listener = LiveListener(console, clock=lambda: now[0])

    def line() -> str:
        shown = io.StringIO()
        Console(file=shown, width=100).print(listener._render())
        return " ".join(shown.getvalue().split())

    listener.started(plan_of(build_config({"model": {"path": "m"}})))
    listener.working("rollout", 4, 16, "groups of 9 drawn, 50 tok/s")
    now[0] = 3.0
    listener.working("rollout", 10, 16, "groups of 20 drawn, 50 tok/s")
    assert line().startswith("rollout ") and line().endswith("10/16 groups of 20 drawn, 50 tok/s 0:03 left step 1/100")
    listener.working("prepare")
    assert line().endswith("prepare step 1/100")
    now[0] = 7.0
    listener.step(1, 100, METRICS)
    listener.working("update", 0, 8)
    now[0] = 9.0
    listener.working("update", 2, 8)
    assert line().startswith("update ") and line().endswith("2/8 0:06 left step 2/100, 11:33 left")
    listener.close()


def test_plain_phases_tell_their_quarters_only_and_the_time_left(ticks: Iterator[float]) -> None:
    """2 s each: 750 that are left take 1,500 s."""
    listener, out = plain_output(ticks)
    listener.phase("warming up [bold]")
    for done in range(1, 1001):
        listener.advance(done, 1000, f"loss {done}")
    assert out.getvalue().splitlines() == [
        "warming up [bold]",
        "  250/1000  loss 250  25:00 left",
        "  500/1000  loss 500  16:40 left",
        "  750/1000  loss 750  8:20 left",
        "  1000/1000  loss 1000",
    ]


def test_a_plain_phase_of_moments_is_one_line() -> None:
    """And one that goes on longer says where it is."""
    now, out = [5.0], io.StringIO()
    listener = PlainListener(Console(file=out, width=40), clock=lambda: now[0])
    listener.phase("evaluating")
    for done in (13, 25, 38):
        now[0] += 0.3
        listener.advance(done, 50)
    now[0] = 7.0
    listener.advance(50, 50)
    assert out.getvalue().splitlines() == ["evaluating", "  50/50"]


def test_the_end_shows_before_and_after(ticks: Iterator[float]) -> None:
    listener, out = plain_output(ticks)
    listener.finished(
        {"accuracy_before": 0.15, "accuracy_after": 0.948, "run_dir": "runs/x", "stopped": "all steps done", "seed": 1}
    )
    assert out.getvalue().splitlines() == [
        "accuracy: 15.0% before, 94.8% after",
        "stopped: all steps done",
        "run folder: runs/x",
    ]


def test_pairs_of_the_summary() -> None:
    summary = {
        "accuracy_before": 0.125,
        "accuracy_after": 0.9715,
        "response_length_before": 6,
        "response_length_after": 26.31,
        "reward_before": None,
        "reward_after": 1.0,
        "seconds_before": 3.0,
    }
    assert before_and_after(summary) == [("accuracy", "12.5%", "97.2%"), ("response length", "6.00", "26.31")]


def test_evaluations_and_durations() -> None:
    line = evaluation_line("after step 20", {"eval/response_length": 25.5, "eval/rows": 1000, "eval/accuracy": 0.912})
    assert line == "evaluation after step 20: accuracy 91.2%, response length 25.50, rows 1000"
    bounds = {"eval/accuracy_low": 0.5, "eval/accuracy_high": 0.75}
    assert evaluation_line("x", {"eval/accuracy": 0.6} | bounds) == "evaluation x: accuracy 60.0% (50.0% to 75.0%)"
    assert [duration(s) for s in (0, 7.4, 59.6, 754, 12345)] == ["0:00", "0:07", "1:00", "12:34", "3:25:45"]


def drive(listener: Listener) -> None:
    listener.phase("loading [red]the model[/red]")
    listener.advance(1, 2, "half [x]")
    listener.started(plan_of(build_config({"model": {"path": "m"}})))
    listener.working("roll[out]", 1, 2, "a [note]")
    for step in range(1, 23):
        listener.step(step, 22, METRICS)
    listener.evaluated("after [x]", {"eval/accuracy": 0.5})
    listener.warning("look [out]")
    listener.finished({"accuracy_before": 0.15, "accuracy_after": 0.948, "run_dir": "runs/[x]"})
    listener.close()
    listener.close()
    listener.phase("after the end")


def test_the_live_display_fits_80_columns_and_takes_any_text() -> None:
    out = io.StringIO()
    drive(LiveListener(Console(file=out, force_terminal=True, width=80, color_system=None)))
    text = out.getvalue()
    rows = [line for line in text.split("\n") if "12.3k" in line]
    assert len(rows) == 22 and all(row.rstrip().endswith(("0:00",)) for row in rows)
    assert text.count("accuracy reward") == 2  # the header comes again after 20 rows
    assert "look [out]" in text and "runs/[x]" in text and "after [x]" in text
    assert "15.0%" in text and "94.8%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is given back


def test_quiet_says_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    drive(QuietListener())
    assert capsys.readouterr() == ("", "warning: look [out]\n")


def test_the_listener_fits_the_place() -> None:
    assert isinstance(make_listener(quiet=True), QuietListener)
    assert isinstance(make_listener(console=Console(file=io.StringIO())), PlainListener)
    assert isinstance(make_listener(console=Console(file=io.StringIO(), force_terminal=True)), LiveListener)


# --- the plan -----------------------------------------------------------------------------------------------------


def test_the_plan_multiplies_sizes() -> None:  # failure 65
    plan = plan_of(build_config({"model": {"path": "m"}, "training": {"epochs_per_rollout": 2}}))
    assert plan["samples per step"] == 8192
    assert plan["updates per step"] == 32 and plan["updates in all"] == 3200
    assert plan["samples per update"] == 512
    assert plan["prompts drawn per step, at most"] == 5120
    assert plan["tokens per sample, at most"] == 2048 + 20480
    assert plan["samples per micro-batch, at least"] == 1
    assert plan["evaluation"] == "none" and "evaluations" not in plan


def test_without_dynamic_sampling_nothing_is_drawn_twice() -> None:
    plan = plan_of(build_config({"model": {"path": "m"}, "algorithm": {"filter_groups": {"enable": False}}}))
    assert plan["prompts drawn per step, at most"] == 512


@pytest.mark.parametrize(
    ("steps", "every", "evaluations"), [(10, 0, 2), (10, 5, 3), (10, 3, 5), (10, 10, 2), (10, 11, 2), (0, 5, 1)]
)
def test_evaluations_are_counted(tmp_path: Any, steps: int, every: int, evaluations: int) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "1"}\n\n{"prompt": "2"}\n{"prompt": "3"}')
    tree = {
        "model": {"path": "m"},
        "training": {"steps": steps},
        "evaluation": {"data": str(tmp_path / "held.jsonl"), "every": every, "samples_per_prompt": 4},
    }
    plan = plan_of(build_config(tree))
    assert plan["evaluations"] == evaluations
    timed = plan_of(build_config(tree | {"training": {"steps": steps, "minutes": 1}}))
    assert timed["evaluations, at most"] == evaluations and "updates in all, at most" in timed
    assert plan["evaluation"] == "3 rows x 4 samples, temperature 0"
    tree["evaluation"]["rows"] = 2  # type: ignore[index]
    assert plan_of(build_config(tree))["evaluation"] == "2 rows x 4 samples, temperature 0"


def test_missing_files_are_named_with_their_key(tmp_path: Any) -> None:
    config = build_config({"model": {"path": "m"}, "data": {"train": ["no.jsonl", "x" * 250, str(tmp_path / "no")]}})
    assert [line.partition(":")[0] for line in missing_files(config)] == ["data.train"] * 3
