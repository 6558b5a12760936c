"""What a person sees of a run while it works: a :class:`Listener`, of which there are three.

Consumes: events from the orchestrator, on the thread that trains. Produces: a live line with a bar on a terminal, one
line per event elsewhere, or nothing. Waits for nothing and never raises because of a missing or odd number.

The loss is not shown: with normalised advantages it lies near 0 whatever happens, which alarms people for no reason.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dapo.config.plan import MINUTES, plan_line, steps_that_fit
from dapo.util.terminal import Terminal, visible, warn


class Listener:
    """Hears what a run does. The orchestrator calls; a listener shows, records or, as this one, ignores."""

    def phase(self, text: str) -> None:
        """Something new begins that takes a while, such as "loading the model"."""

    def advance(self, done: int, total: int, note: str = "") -> None:
        """The present phase has come so far. May be called often."""

    def working(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Inside of a rollout step: at ``phase``, such as "rollout", of which so much is done. May be called often."""

    def started(self, plan: dict[str, Any]) -> None:
        """Training begins; ``plan`` is what :func:`dapo.config.plan.plan_of` says."""

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        """Rollout step ``step`` (from 1) of ``total`` is done; ``metrics`` as in metrics.jsonl. Where another budget
        than ``total`` ends the run, ``metrics["budget"]`` is its key, how much is used, and how much there is."""

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        """An evaluation is done; ``name`` says when or of what, such as "before training"."""

    def warning(self, text: str) -> None:
        """Something that the user should know, and that does not stop the run."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is over; ``summary`` as in summary.json."""

    def close(self) -> None:
        """Give the terminal back. Called at the end in any case; more than once does no harm."""


def make_listener(quiet: bool = False, console: Console | None = None) -> Listener:
    """The listener that fits: live on a terminal, plain lines elsewhere, warnings only if ``quiet``."""
    console = console or Terminal()
    if quiet:
        return QuietListener()
    return LiveListener(console) if console.is_terminal and not console.is_dumb_terminal else PlainListener(console)


class QuietListener(Listener):
    """Warnings, on standard error, and nothing else."""

    def warning(self, text: str) -> None:
        warn(text)


class _Telling(Listener):
    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Terminal()
        self._pace, self._clock, self._lap = Pace(clock), clock, Lap()
        self._phase = ""

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _left(self, phase: str, done: int, total: int, now: float) -> str:
        left = self._lap.left(phase, done, total, now)
        return left and f"{left} left"

    def finished(self, summary: dict[str, Any]) -> None:
        changes = [f"{label}: {before} before, {after} after" for label, before, after in before_and_after(summary)]
        for line in [*changes, *closing_lines(summary)]:
            self._say(line)


class PlainListener(_Telling):
    """One line per event, for files and pipes; in a step that takes long, one every half a minute too. A phase of
    moments is its first line alone."""

    _EVERY_S, _MOMENTS_S = 30.0, 1.0
    _said_at, _told, _begun = 0.0, 0.0, -math.inf

    def phase(self, text: str) -> None:
        self._told, self._phase, self._begun = 0.0, text, self._clock()
        self._say(text)

    def advance(self, done: int, total: int, note: str = "") -> None:
        share, now = done / total if total else 1.0, self._clock()
        left = self._left(self._phase, done, total, now)
        if share >= self._told + 0.25 and now >= self._begun + self._MOMENTS_S:
            self._told = math.floor(share * 4) / 4
            self._say(f"  {'  '.join(filter(None, (f'{done}/{total}', note, '' if left == '0:00 left' else left)))}")

    def working(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        left = self._left(phase, done, total, self._clock())
        if self._clock() >= self._said_at + self._EVERY_S:
            self._said_at = self._clock()
            self._say(f"  {phase} {'  '.join(filter(None, (f'{done}/{total}' if total else '', note, left)))}".rstrip())

    def started(self, plan: dict[str, Any]) -> None:
        self._pace.start(plan)
        self._said_at = self._pace.last
        self._say(plan_line(plan))

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        fields = step_fields(step, total, metrics, *self._pace.tick(step, total, metrics))
        self._said_at = self._pace.last
        self._say("  ".join(f"{label} {text}" for label, text in fields))

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        self._say(evaluation_line(name, metrics))

    def warning(self, text: str) -> None:
        self._say(visible(f"warning: {text}"))


class LiveListener(_Telling):
    """A terminal: finished steps scroll by as rows of a table, the line below them is alive."""

    _HEADER_EVERY = 20

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._spinner = Spinner("line" if self._console.options.ascii_only else "dots", Text(""))
        self._run = ""
        self._bar: tuple[int, int, str] | None = None
        self._rows = 0
        self._live = Live(get_renderable=self._render, console=self._console, transient=True, refresh_per_second=4)
        self._closed = False

    def _print(self, text: Text) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _render(self) -> Any:
        if self._bar is None:
            self._spinner.update(text=Text.assemble(self._phase, (f"  {self._run}" if self._run else "", "dim")))
            return self._spinner
        done, total, note = self._bar
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column()
        line.add_column(no_wrap=True, overflow="ellipsis")
        text = Text.assemble(f"{done}/{total}  ", (f"{note}  {self._run}".rstrip(), "dim"))
        line.add_row(Text(self._phase), ProgressBar(total=max(total, 1), completed=done, width=16), text)
        return Group(line)

    def _show(self, phase: str, bar: tuple[int, int, str] | None) -> None:
        self._phase, self._bar = phase, bar
        if not self._closed and not self._live.is_started:
            self._live.start()

    def phase(self, text: str) -> None:
        self._show(text, None)

    def advance(self, done: int, total: int, note: str = "") -> None:
        left = self._left(self._phase, done, total, self._clock())
        self._show(self._phase, (done, total, "  ".join(filter(None, (note, left)))))

    def working(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        self._phase = phase
        if total:
            self.advance(done, total, note)
        else:
            self._show(phase, None)

    def started(self, plan: dict[str, Any]) -> None:
        self._pace.start(plan)
        self._print(Text(plan_line(plan), style="bold"))
        steps = plan["steps"]
        self._run = "step 1" if isinstance(steps, str) else f"step 1/{steps}"
        self._show("training", None if isinstance(steps, str) else (0, int(steps), ""))

    def step(self, step: int, total: int, metrics: dict[str, Any]) -> None:
        seconds, eta = self._pace.tick(step, total, metrics)
        fields = step_fields(step, total, metrics, seconds, eta)
        if self._rows % self._HEADER_EVERY == 0:
            self._print(Text(" ".join(_column(label, label) for label, _ in fields), style="dim"))
        self._rows += 1
        self._print(Text(" ".join(_column(label, text) for label, text in fields)))
        if "budget" in metrics:
            key, used, most = metrics["budget"]
            self._run = f"step {step + 1}, {eta} left"
            self._show("training", (round(used), round(most), key))
        else:
            self._run = f"step {min(step + 1, total)}/{total}, {eta} left"
            self._show("training", (step, total, ""))

    def evaluated(self, name: str, metrics: dict[str, Any]) -> None:
        self._print(Text(evaluation_line(name, metrics), style="cyan"))

    def warning(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), visible(text)))

    def finished(self, summary: dict[str, Any]) -> None:
        self.close()
        super().finished(summary)

    def close(self) -> None:
        self._closed = True
        self._live.stop()


class Pace:
    """Seconds of the last step and an estimate of what is left, from the pace of the last ten: of the steps, or of the
    minutes (``training.minutes``) if they are over sooner."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last = clock()
        self._recent: deque[float] = deque(maxlen=10)
        self._minutes = math.inf

    def start(self, plan: Mapping[str, Any]) -> None:
        self.last = self._clock()
        self._minutes = float(plan.get(MINUTES, math.inf))

    def tick(self, step: int, total: int, metrics: Mapping[str, Any]) -> tuple[float, str]:
        """A step is done: its seconds (``time/step`` where given) and the time left, as text."""
        now = self._clock()
        wall, self.last = now - self.last, now
        self._recent.append(wall)
        measured, used = _number(metrics, "time/step"), _number(metrics, "time/training")
        seconds = wall if measured is None else measured
        left: float = max(total - step, 0)
        if used is not None and seconds > 0 and math.isfinite(self._minutes):
            left = min(left, steps_that_fit(self._minutes, used, seconds))
        if "budget" in metrics and metrics["budget"][0] != "minutes":
            _, spent, most = metrics["budget"]
            left = min(left, max(0.0, most - spent) * step / spent) if spent else left
        return seconds, duration(left * sum(self._recent) / len(self._recent))


class Lap:
    """How long the rest of a phase takes, from the pace since it began."""

    def __init__(self) -> None:
        self._phase = ""
        self._first = (0.0, 0)

    def left(self, phase: str, done: int, total: int, now: float) -> str:
        """The time left, as text; empty as long as nothing can be told."""
        since, before = self._first
        if phase != self._phase or done < before:
            self._phase, self._first = phase, (now, done)
            return ""
        return duration((now - since) / (done - before) * (total - done)) if done > before else ""


def step_fields(step: int, total: int, metrics: Mapping[str, Any], seconds: float, eta: str) -> list[tuple[str, str]]:
    """Label and text of what matters in a step; a dash where a number is missing or not finite."""
    of, budget = f"{step}/{total}", list[tuple[str, str]]()
    if "budget" in metrics:
        key, *shares = metrics["budget"]
        of, budget = str(step), [(key, "/".join(f"{n:.1f}" if key == "minutes" else _compact(n) for n in shares))]
    if "reward/mean" not in metrics and "groups/kept" not in metrics and "loss" in metrics:  # a stage
        shown = [(label, _shown(metrics, name, form)) for label, name, form in _OF_STAGES if name in metrics]
        speed = _compact(_number(metrics, "tokens_per_second/update"))
        return [("step", f"{step}/{total}"), *shown, ("tok/s", speed), ("sec", f"{seconds:.1f}"), ("left", eta)]
    speed = next((n for n in ("tokens_per_second/total", "tokens_per_second/rollout") if n in metrics), "")
    return [
        ("step", of),
        *budget,
        ("accuracy", _shown(metrics, "accuracy", "{:.1%}")),
        ("reward", _shown(metrics, "reward/mean", "{:+.2f}")),
        ("kept", f"{_shown(metrics, 'groups/kept', '{:.0f}')}/{_shown(metrics, 'groups/drawn', '{:.0f}')}"),
        ("length", _shown(metrics, "response_length/mean", "{:.1f}")),
        ("entropy", _shown(metrics, "entropy", "{:.3f}")),
        ("clip%", "/".join(_shown(metrics, f"clip/{side}", "{:.2%}").removesuffix("%") for side in ("low", "high"))),
        ("grad", _shown(metrics, "grad_norm", "{:.3g}")),
        ("tok/s", _compact(_number(metrics, speed))),
        ("sec", f"{seconds:.1f}"),
        ("left", eta),
    ]


_OF_STAGES = (
    *(("loss", "loss", "{:.4f}"), ("accuracy", "preference/accuracy", "{:.1%}")),
    *(("margin", "preference/margin", "{:+.3f}"), ("chosen", "preference/chosen_logprob", "{:.2f}")),
    *(("grad", "grad_norm", "{:.3g}"), ("lr", "lr", "{:.2g}")),
)
"""Label, metric and form of what matters in an update of a stage, as far as it has it."""


_WIDTHS = {
    **dict.fromkeys(("grad", "sec", "left"), 5),
    **dict.fromkeys(("reward", "kept", "length", "tok/s"), 6),
    **dict.fromkeys(("step", "loss", "margin", "lr"), 7),
    **{"chosen": 8, "clip%": 9},
}
"""Of columns that are wider than their label; together they fit 80 characters."""


def _column(label: str, text: str) -> str:
    return text.rjust(_WIDTHS.get(label, len(label)))


def evaluation_line(name: str, metrics: Mapping[str, Any]) -> str:
    """One evaluation in one line: accuracy and length first, whatever else there is after them."""
    short = {key.removeprefix("eval/"): value for key, value in metrics.items()}
    low, high = (_number({key: short.pop(key, None)}, key) for key in ("accuracy_low", "accuracy_high"))
    parts = []
    for key in sorted(short, key=lambda k: {"accuracy": 0, "response_length": 1}.get(k, 2)):
        value = _number(short, key)
        if value is not None:
            parts.append(f"{key.replace('_', ' ')} {_by_kind(key, value)}")
            if key == "accuracy" and low is not None and high is not None:
                parts[-1] += f" ({_by_kind(key, low)} to {_by_kind(key, high)})"
    return f"evaluation {name}: {', '.join(parts)}"


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Every pair ``X_before``, ``X_after`` of numbers in a summary, as label and two texts."""
    rows = []
    for key in summary:
        name = key.removesuffix("_before")
        before, after = _number(summary, key), _number(summary, f"{name}_after")
        if name != key and before is not None and after is not None:
            rows.append((name.replace("_", " "), _by_kind(name, before), _by_kind(name, after)))
    return rows


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines under the table: why it stopped (``stopped``), and where everything lies (``run_dir``)."""
    told = {"stopped": summary.get("stopped"), "run folder": summary.get("run_dir")}
    return [f"{label}: {value}" for label, value in told.items() if value]


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 3:25:45."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _by_kind(name: str, value: float) -> str:
    if re.search("accuracy|truncated|no_answer|lenient|avg@|pass@|maj@", name):
        return f"{value:.1%}"
    return f"{value:.0f}" if float(value).is_integer() and "length" not in name else f"{value:.2f}"


def finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    return finite(metrics.get(name))


def _shown(metrics: Mapping[str, Any], name: str, form: str) -> str:
    value = _number(metrics, name)
    return "-" if value is None else form.format(value)


def _compact(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
