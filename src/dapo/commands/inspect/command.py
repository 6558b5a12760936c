"""``dapo inspect``: what a run did, in the terminal. Reads its folder only, so it can look at a run that is at work;
what it may write is the index of samples, if that is behind and several steps are asked about."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dapo.commands.shared.options import AsJson, step_range
from dapo.commands.shared.output import print_json, print_lines, terminal_width
from dapo.errors import ConfigError, UserError
from dapo.util.terminal import Terminal, counted, visible

if TYPE_CHECKING:
    from dapo.observe.run_view import RunView
    from dapo.observe.sample_query import Steps
    from dapo.observe.samples import SampleFilter

_sample_option = partial(typer.Option, rich_help_panel="Options for --samples")
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a folder of several.")]
_METRICS = typer.Option(metavar="NAME,...", help="Show these metrics of every step, such as accuracy,'clip/*'.")
_STATUS = _sample_option(metavar="STATUS,...", help="Kept, or why not: kept, all_wrong, ...")


_Sort = Literal["length", "reward", "advantage", "entropy", "gap"]
_WIDE = 200  # cells in a line of a table where there is no terminal


def inspect(
    run: _Run,
    metrics: Annotated[str | None, _METRICS] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", "--step", metavar="N|A:B", help="Of these steps only.")
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show samples; by default of the last step.")] = False,
    status: Annotated[str | None, _STATUS] = None,
    correct: Annotated[Literal["true", "false"] | None, _sample_option(help="Right or wrong ones.")] = None,
    longer_than: Annotated[int | None, _sample_option(help="In tokens.")] = None,
    truncated: Annotated[bool, _sample_option("--truncated", help="Cut at the limit.")] = False,
    row: Annotated[int | None, _sample_option("--row", "--prompt", help="Of this row of the data.")] = None,
    draw: Annotated[int | None, _sample_option(help="Of this draw: one group.")] = None,
    index: Annotated[int | None, _sample_option(help="Of this place in its group.")] = None,
    contains: Annotated[str, _sample_option(metavar="TEXT", help="In prompt or response, in any case.")] = "",
    sort: Annotated[_Sort | None, _sample_option(help="Largest first; by default in the order of the file.")] = None,
    limit: Annotated[int, _sample_option(min=0, max=10**9, help="Show at most so many; 0: all.")] = 10,
    full: Annotated[bool, _sample_option("--full", help="Do not cut long texts.")] = False,
    table: Annotated[bool, _sample_option("--table", help="A line for each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run did: its state, metrics, evaluations and checkpoints, or its samples.

    Works while the run is at work, and on one that was killed. If RUN is a folder that holds runs, they are listed.
    """
    from dapo.commands.inspect.sample_report import statuses
    from dapo.observe.run_view import RunView, is_run, runs_in
    from dapo.observe.samples import SampleFilter

    right = None if correct is None else correct == "true"
    wanted = SampleFilter(statuses(status), right, longer_than, truncated, row, draw, index, contains)
    asks_for_samples = samples or wanted != SampleFilter() or sort or full or table
    if asks_for_samples and metrics is not None:
        raise ConfigError("--metrics: cannot be shown together with samples; ask for one of them at a time")
    span = step_range(steps)
    if not is_run(run) and (found := runs_in(run)):
        _runs(found, as_json)
    elif asks_for_samples:
        shown_as = "json" if as_json else "table" if table else "full" if full else "cut"
        _samples(RunView.read(run), span, wanted, "gap_max" if sort == "gap" else sort, limit, shown_as)
    elif metrics is not None:
        _metrics(RunView.read(run), metrics, span, as_json)
    else:
        _overview(RunView.read(run), span, as_json)


def _runs(folders: Iterable[Path], as_json: bool) -> None:
    from dapo.commands.inspect import run_report
    from dapo.observe.run_view import RunView

    runs, spoilt = [], {}
    for folder in folders:
        try:
            runs.append(RunView.read(folder, brief=True))
        except (UserError, OSError) as error:  # it hides no other
            spoilt[folder] = str(error)
    if as_json:
        unreadable = [{"run_dir": str(folder), "state": "unreadable", "why": why} for folder, why in spoilt.items()]
        whole = (run_report.as_json(run, None) for run in runs)
        print_json([*({name: one[name] for name in run_report.BRIEF} for one in whole), *unreadable])
    else:
        print_lines(run_report.runs_table(runs, terminal_width()))
        print_lines(f"cannot be read: {visible(why)}" for why in spoilt.values())


def _overview(run: RunView, span: Steps, as_json: bool) -> None:
    from dapo.commands.inspect import run_report

    if as_json:
        print_json(run_report.as_json(run, span))
    else:
        print_lines(run_report.report(run, span, terminal_width(), Terminal().options.ascii_only))


def _metrics(run: RunView, patterns: str, span: Steps, as_json: bool) -> None:
    from dapo.commands.inspect.run_report import chosen, in_range, metrics_table

    names = chosen(patterns, run.metrics)
    entries = [e for e in in_range(run.metrics, span) if any(name in e for name in names)]
    if as_json:
        print_json([{name: e[name] for name in ["step", *names] if name in e} for e in entries])
    else:
        print_lines(metrics_table(entries, names, terminal_width()))


def _samples(run: RunView, span: Steps, wanted: SampleFilter, order: str | None, limit: int, shown_as: str) -> None:
    from dapo.commands.inspect.sample_report import show, table
    from dapo.observe.sample_query import find

    found = find(run, span, wanted, order, limit)
    if shown_as == "json":
        print_json(found.samples)
        return
    if shown_as == "table":
        print_lines(table(found.samples, terminal_width() or _WIDE))
    else:
        whole = shown_as == "full"
        print_lines(line for sample in found.samples for line in [*show(sample, terminal_width() or 100, whole), ""])
    cut = f", {len(found.samples)} shown (--limit)" if len(found.samples) < found.matching else ""
    print_lines([f"{found.matching} of {counted(found.total, 'sample')}{cut}"])
