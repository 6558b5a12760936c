"""A comparison as sections of a page, and as table.md, table.csv and table.json in its folder."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.comparison.table import Table
from dapo.comparison.wins import read_wins
from dapo.evaluation.statistics import Estimate
from dapo.evaluation.votes import read_votes, tallies
from dapo.util.differences import shown
from dapo.util.files import write_atomic, write_json, writing
from dapo.util.pages import Block, Plot, Rows, Section, Text, as_markdown, write_report
from dapo.util.terminal import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = (
    "95% intervals: ± over seeds (their spread pooled over the recipes, Student's t), and in brackets over the rows of "
    "the last evaluation, which are the same for all (paired bootstrap). Shares differ by points. What is at equal "
    "minutes, samples or tokens is read from straight lines between the evaluations of a run."
)


def sections_of(table: Table, figure: Figure | None = None) -> list[Section]:
    """``figure``: the curves, if they can be drawn."""
    key, amount = table.comparison.budget
    heading = Text(f"{amount:g} {key} for each, seeds {', '.join(map(str, table.comparison.seeds))}.")
    blocks: list[Block] = [heading, Rows(["", *table.names], table.lines()), Text(NOTES), *map(Text, table.failures())]
    found = [Section("Comparison", blocks)]
    if wins := win_lines(table):
        found.append(Section("Win rates", [Rows(WIN_HEADER, wins)]))
    if figure is not None:
        found.append(Section("Curves", [Plot("comparison", f"held-out {table.metric}, means over seeds", figure)]))
    differ = [
        [key, *(shown(of[n], 60) if n in of else "" for n in table.names)]
        for key, of in table.comparison.differ.items()
    ]
    return [*found, Section("In what the recipes differ", [Rows(["", *table.names], differ)])]


WIN_HEADER = ("by", "first", "other", "other won", "ties", "lost", "not judged", "win rate of other", "place preferred")


def win_lines(table: Table) -> list[list[str]]:
    """What judges, rewards and people said; ties count half a win, but in the people's share, which has none."""
    rows = []
    for one in read_wins(table.comparison.root):
        counts = [str(one[name]) for name in ("wins", "ties", "losses", "failed")]
        place = one["first_place"]
        said = "" if place is None else f"first in {place:.0%}; {one['swayed']:.0%} swayed"
        rate = None if one["rate"] is None else Estimate(one["rate"], one["low"], one["high"])
        rows.append([one["by"], one["first"], one["other"], *counts, _rate(rate), said])
    for tally in tallies(read_votes(table.comparison.root)):
        counts = [str(n) for n in (tally.second, tally.ties + tally.both_bad, tally.first, 0)]
        rows.append([counted(tally.voters, "voter"), *tally.models, *counts, _rate(tally.share), ""])
    return rows


def _rate(found: Estimate | None) -> str:
    return "-" if found is None else found.text(".1%")


def write_tables(root: Path) -> Table:
    """table.md, table.csv and table.json, which replace earlier ones. Raises UserError: they cannot be written."""
    table, text = Table.read(root), io.StringIO()
    cells = table.cells()
    writer = csv.DictWriter(text, list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    told = {"recipes": table.names, "metric": table.metric, "ends": table.ends, "lines": table.lines(), "cells": cells}
    with writing(root):
        write_atomic(root / "table.md", as_markdown(_title(table), sections_of(table)))
        write_atomic(root / "table.csv", text.getvalue())
        write_json(root / "table.json", told | {"wins": read_wins(root)})
    return table


def write_pages(table: Table, output: Path | None = None) -> list[Path]:
    """report.html, and report.md with its plot, in ``output``, or in the folder of the comparison.
    Raises ImportError: there is no matplotlib; UserError: they cannot be written."""
    figure = draw(table)
    return write_report(_title(table), sections_of(table, figure), output or table.comparison.root / "report")


def _title(table: Table) -> str:
    return f"Comparison of {', '.join(table.names)}"


def draw(table: Table) -> Figure | None:
    """Quality over minutes, samples and tokens: a line for each recipe, the mean of its seeds, and their range.
    None: there is no curve. Raises ImportError: there is no matplotlib."""
    from matplotlib.figure import Figure

    axes = list(table.ends)
    if not axes:
        return None
    figure = Figure(figsize=(3.2 * len(axes), 3), layout="constrained")
    for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False).flat, axes, strict=True):
        for number, name in enumerate(table.names):
            if points := table.mean_curve(name, axis):
                xs, mean, low, high = zip(*points, strict=True)
                panel.plot(xs, mean, color=f"C{number}", label=name)
                panel.fill_between(xs, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        panel.set_xlabel(axis, fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25, linewidth=0.5)
    figure.axes[0].set_ylabel(f"held-out {table.metric}", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    return figure
