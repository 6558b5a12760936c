"""What a report says of a run, as sections. Reads the run folder only, so a run that is at work has a report, too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.commands.inspect.run_report import facts
from dapo.commands.inspect.tables import number
from dapo.commands.report import figures
from dapo.config import flat
from dapo.errors import UserError
from dapo.observe.costs import Costs, Gain, costs, gains, total
from dapo.observe.metrics import PHASES, describe
from dapo.observe.progress import duration
from dapo.observe.run_view import HACKING, OUTCOMES, RunView
from dapo.observe.sample_rows import read_line, rows_of
from dapo.util.pages import Answer, Block, Code, Plot, Rows, Section, Text
from dapo.util.terminal import counted

Entry = Mapping[str, Any]
_SHOWN = 4  # samples of each sort


def sections_of(run: RunView) -> list[Section]:
    """All sections; one that has nothing to say yet says so."""
    steps = [e for e in run.metrics if e["step"]]
    found = {
        "The run": _run(run),
        "Evaluation": _evaluation(run),
        "Curves": _curves(run),
        "Costs": _costs(run),
        "Dynamic sampling": _sampling(run, steps),
        "Time": _time(steps),
        "Alarms": _alarms(run),
        "Samples": _samples(run),
        "Configuration": _configuration(run),
        "Machine and versions": _machine(run),
        "To reproduce": _reproduce(run),
    }
    return [Section(title, blocks) for title, blocks in found.items()]


def _run(run: RunView) -> list[Block]:
    left_out = ("command", "checkpoints", "samples")
    rows = [[name, value] for name, value in facts(run) if name not in left_out]
    for name, config, section, key in (
        ("trained on", run.recipe, "data", "train"),
        ("evaluated on", run.config, "evaluation", "data"),
    ):
        named = config.get(section)
        if isinstance(named, Mapping) and named.get(key):
            several = named[key] if isinstance(named[key], list) else [named[key]]  # texts, or mappings with a path
            paths = (str(item.get("path", item)) if isinstance(item, Mapping) else str(item) for item in several)
            rows.append([name, ", ".join(paths)])
    reward = run.recipe.get("reward")
    reward = reward.get("kind") if isinstance(reward, Mapping) else reward
    return [Rows(["", ""], [*rows, ["reward", str(reward)]] if reward else rows)]


# --- what it learned ----------------------------------------------------------------------------------------------


def _evaluation(run: RunView) -> list[Block]:
    found = run.evaluations
    if not found:
        return [Text("There was no evaluation yet." if run.state == "running" else "There was no evaluation.")]
    names = ["eval/accuracy", "eval/reward", "eval/response_length", "eval/truncated", "eval/no_answer"]
    names += sorted(
        {n for e in found for n in e if n.startswith(("eval/pass@", "eval/maj@", "eval/part/", "eval/metric/"))}
    )
    names = [name for name in names if any(e.get(name) is not None for e in found)]
    ends = (found[0]["step"], run.best.get("step"), found[-1]["step"])
    shown = {entry["step"]: entry for entry in found if entry["step"] in ends}
    header = ["", *map(_column, names)]
    rows = [
        [_when(step, run), *(_with_interval(entry, name) for name in names)] for step, entry in sorted(shown.items())
    ]
    blocks: list[Block] = [Rows(header, rows)]
    if run.comparable_from:
        blocks.append(Text(f"Those before step {run.comparable_from} are of other rows or settings: see Curves."))
    blocks += [Text(text) for text in _difference([e for e in found if e["step"] >= run.comparable_from])]
    interval = "Intervals are of 95%: Wilson's where a row is right or wrong, else percentile bootstrap over the rows."
    return [*blocks, Text(f"On {found[-1]['eval/rows']:.0f} rows. {interval}")]


def _column(name: str) -> str:
    metric = describe(name)
    unit = ", tokens" if metric is not None and metric.unit == "tokens" else ""  # shares show what they are
    return name.removeprefix("eval/").replace("_", " ") + unit


def _when(step: int, run: RunView) -> str:
    best = ", the best" if step and step == run.best.get("step") else ""
    return f"after step {step}{best}" if step else "before training"


def _with_interval(entry: Entry, name: str) -> str:
    low, high = entry.get(f"{name}_low"), entry.get(f"{name}_high")
    text = number(name, entry.get(name))
    return text if low is None or high is None else f"{text} ({number(name, low)} to {number(name, high)})"


def _difference(found: Sequence[Entry]) -> Iterator[str]:
    """From the first to the last evaluation, with an interval made of theirs."""
    first, last = (found[0], found[-1]) if found else ({}, {})
    ends = [entry.get(f"eval/accuracy{end}") for entry in (first, last) for end in ("", "_low", "_high")]
    if first is last or None in ends:
        return
    was, was_low, was_high, now, now_low, now_high = (100 * float(end) for end in ends if end is not None)
    # as of independent estimates: both are of the same rows, so the true interval is narrower, if anything
    less = ((now - now_low) ** 2 + (was_high - was) ** 2) ** 0.5
    more = ((now_high - now) ** 2 + (was - was_low) ** 2) ** 0.5
    gained = now - was
    verdict = "" if gained - less > 0 or gained + more < 0 else " It may be no difference at all."
    yield (
        f"Accuracy changed by {gained:+.1f} percentage points (95% interval {gained - less:+.1f} to "
        f"{gained + more:+.1f}) from step {first['step']} to step {last['step']}.{verdict}"
    )


def _curves(run: RunView) -> list[Block]:
    steps = sorted({change.step for change in run.changes})
    plot = _plot("learning", "metrics over the steps", figures.learning(run.metrics, steps))
    rows = [[f"from step {c.step}", c.key, _text(c.old), _text(c.new), c.date] for c in run.changes]
    return [*plot, Rows(["dotted line", "setting", "was", "is", "changed on"], rows)] if rows else plot


def _plot(name: str, caption: str, figure: Any) -> list[Block]:
    return [Text("No step is done yet.")] if figure is None else [Plot(name, caption, figure)]


# --- what it cost -------------------------------------------------------------------------------------------------


def _costs(run: RunView) -> list[Block]:
    whole = costs(run)
    rows = [
        ["wall time, evaluation and writing files included", "-" if run.seconds is None else duration(run.seconds)],
        ["seconds of rollout steps", f"{whole.seconds:,.1f}"],
        ["GPU-seconds of these", _gpu_text(whole)],
        ["response tokens generated", f"{whole.tokens:,}"],
        ["of them in groups that were thrown away as surplus, stale or cancelled", f"{whole.wasted:,}"],
    ]
    blocks: list[Block] = [Rows(["", ""], rows)]
    found = gains(run)
    if not found:
        return [*blocks, Text("What a point of accuracy or reward costs shows once there are two values of it.")]
    header = ["what was gained", "from", "to", "points", "tokens a point", "seconds a point", "GPU-seconds a point"]
    return [*blocks, Rows(header, [_gain_row(gain, costs(run, gain.step)) for gain in found])]


def _gain_row(gain: Gain, spent: Costs) -> list[str]:
    def each(amount: float | None) -> str:
        cost = gain.cost(amount)
        if cost is None:
            return "not known" if gain.points > 0 else "nothing gained"
        return f"{cost:,.0f}" if cost >= 100 else f"{cost:,.3g}"

    ends = (f"{value / gain.point:.4g}" for value in (gain.before, gain.after))
    return [gain.what, *ends, f"{gain.points:+.4g}", *map(each, (spent.tokens, spent.seconds, spent.gpu_seconds))]


def _gpu_text(whole: Costs) -> str:
    if whole.gpu_seconds is None:
        return "not known: the run did not record its GPUs"
    return f"{whole.gpu_seconds:,.1f}" + (f" ({whole.gpus} GPUs)" if whole.gpus else " (it had no GPU)")


def _sampling(run: RunView, steps: Sequence[Entry]) -> list[Block]:
    drawn, kept = total(steps, "groups/drawn"), total(steps, "groups/kept")
    if not drawn:
        return [Text("No group was drawn yet.")]
    rows = [
        [status.replace("_", " "), f"{count:,.0f}", f"{count / drawn:.1%}", OUTCOMES[status]]
        for status, count in run.outcomes.items()
    ]
    generated, wasted, loss = (total(steps, f"tokens/{name}") for name in ("generated", "wasted", "loss"))
    told = f"{drawn:,.0f} groups were drawn and {kept:,.0f} trained on"
    told += f": {drawn / kept:.2f} for each one kept. " if kept else ". "
    if generated:
        needless = f"{wasted / generated:.1%} of them in draws that nobody needed"
        told += f"{generated:,.0f} tokens were generated, {needless}; the updates counted {loss:,.0f} in their loss."
    plot = _plot("sampling", "groups by what their samples were, and tokens, over the steps", figures.sampling(steps))
    return [Text(told), Rows(["status", "groups", "of those drawn", ""], rows), *plot]


def _time(steps: Sequence[Entry]) -> list[Block]:
    spent = {phase: total(steps, f"time/{phase}") for phase in PHASES}
    whole = sum(spent.values())
    if not whole:
        return [Text("No times are known yet.")]
    rows = [[figures.phase_name(phase, steps), f"{s:,.1f}", f"{s / whole:.1%}"] for phase, s in spent.items() if s]
    plot = _plot("time", "seconds of each step by phase, and tokens per second", figures.time(steps))
    return [Rows(["phase", "seconds", "share"], rows), *plot]


# --- what to know of it -------------------------------------------------------------------------------------------


def _alarms(run: RunView) -> list[Block]:
    said = [*run.warnings(), *_alarms_again(run)]
    for sign, steps in run.hacking.items():
        seen = HACKING.get(sign, "; or ".join(HACKING.values()))
        said.append(f"monitor: in {counted(len(steps), 'step')}, last in step {steps[-1]}: {seen}")
    return [Rows(["what was seen"], [[text] for text in said]) if said else Text("None.")]


def _alarms_again(run: RunView) -> list[str]:
    try:
        return [f"step {step}: {text}" for step, _, said in run.alarms() for text in said]
    except UserError as error:  # such as a recipe of an earlier version
        return [f"the alarms on the metrics cannot be told: {error}"]


def _samples(run: RunView) -> list[Block]:
    """Of the last step: of equals the shortest of the good ones and the longest of the bad ones."""
    steps = run.steps_with_samples
    if not steps:
        return [Text("No samples are stored yet." if run.saves_samples else "The recipe says run.save_samples=false.")]
    blocks: list[Block] = [
        Text(f"Of step {steps[-1]}, by reward, one of each prompt. `dapo inspect RUN --samples` shows the others.")
    ]
    try:
        scored = [row for row in rows_of(run.folder.samples, steps[-1]) if row["reward"] is not None]
        for title, sign in (("best", -1), ("worst", 1)):
            first: dict[Any, Any] = {}  # of each prompt
            for row in sorted(scored, key=lambda row: (sign * row["reward"], -sign * (row["length"] or 0))):
                first.setdefault(row["row"], row)
            lines = (read_line(run.folder.samples, row) for row in list(first.values())[:_SHOWN])
            blocks += [_answer(f"{title} {number}", line) for number, line in enumerate(lines, start=1)]
    except UserError as error:  # they are spoilt, or were removed meanwhile
        blocks.append(Text(str(error)))
    return blocks


def _answer(title: str, sample: Mapping[str, Any]) -> Answer:
    right = {True: "right", False: "wrong"}.get(sample.get("correct"), "no verdict")  # type: ignore[arg-type]
    reward = "-" if sample.get("reward") is None else f"{sample['reward']:.4g}"
    heading = [f"{title}: reward {reward}", right, f"row {sample.get('row')}"]
    answers = (f"{name} {sample.get(key)!r}" for name, key in (("found", "extracted"), ("wanted", "gold")))
    heading += [f"{sample.get('length')} tokens", *answers]
    return Answer(", ".join(heading), str(sample.get("prompt") or ""), str(sample.get("response") or ""))


# --- how to do it again -------------------------------------------------------------------------------------------


def _configuration(run: RunView) -> list[Block]:
    rows = list(_changes(run.recipe))
    said = "Keys that are not at their default; the paper's values are the defaults."
    whole = run.folder.config.read_text(encoding="utf-8", errors="replace")
    return [Text(said), Rows(["key", "here", "default"], rows), Text("The whole recipe:"), Code(whole)]


def _changes(config: Mapping[str, Any]) -> Iterator[list[str]]:
    """Key, value and default where these differ. A key that several kinds of a section have may have several."""
    from dapo.config.reference import all_values

    known = all_values()
    for name, value in flat(config, leaves=known):
        defaults = [_text(key.default) for key in known.get(name, ()) if not key.required]
        if _text(value) not in defaults:
            yield [name, _text(value), " or ".join(dict.fromkeys(defaults)) or "-"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _machine(run: RunView) -> list[Block]:
    environment = run.environment
    names = ("started", "platform", "machine", "cores", "dapo", "python")
    rows = [[name, str(environment[name])] for name in names if environment.get(name) is not None]
    for section in ("packages", "threads", "git"):
        found = environment.get(section)
        found = flat(found) if isinstance(found, Mapping) else ()
        of = "" if section == "packages" else f"{section}."  # torch is a package, and has threads
        rows += [[f"{of}{key}", _text(value)] for key, value in found if value is not None]
    again = environment.get("resumed")
    rows += [["resumed", str(each.get("started"))] for each in again or [] if isinstance(each, Mapping)]
    return [Rows(["", ""], rows) if rows else Text("The run did not record its machine.")]


def _reproduce(run: RunView) -> list[Block]:
    environment, section = run.environment, run.config.get("run")
    lines = [f"cd {shlex.quote(str(environment['folder']))}"] if environment.get("folder") else []
    git = environment.get("git")
    if isinstance(git, Mapping) and git.get("commit"):
        lines.append(f"git checkout {git['commit']}" + ("  # files differed from it" if git.get("dirty") else ""))
    if run.command:
        lines.append(run.command)
    lines.append("# or, from the recipe as it was resolved:")
    # the run folder as its recipe names it: relative to the folder that the command was started in
    place = (isinstance(section, Mapping) and section.get("dir")) or run.folder.root
    lines.append(shlex.join(["dapo", "train", f"{place}/config.yaml", f"run.dir={place}-again"]))
    blocks: list[Block] = [Code("\n".join(lines))]
    if run.reward_from_python:
        blocks.append(Text(f"The reward was the Python function {run.reward_from_python}: no command has it."))
    if environment.get("resumed"):
        blocks.append(Text("The run was resumed; the first command is shown."))
    hashes = [[key, _text(value)] for key, value in flat(run.fingerprint)]
    if hashes:
        blocks += [Text("It started from these (fingerprint.json):"), Rows(["", ""], hashes)]
    return blocks
