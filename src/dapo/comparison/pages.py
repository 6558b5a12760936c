"""A comparison as sections of a page, and as table.md, table.csv and table.json in its folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.comparison.table import Table
from dapo.comparison.wins import read_wins
from dapo.evaluation.votes import read_votes, tallies
from dapo.util.differences import shown
from dapo.util.files import write_atomic, write_json, writing
from dapo.util.pages import Block, Plot, Rows, Section, Text, as_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = (
    "± and the range are half of, and a whole, 95% interval: over seeds (their spread pooled over the recipes, Student's "
    "t), and over the rows of the last evaluation, the same for all (paired bootstrap). Differences are in points. What "
    "is at equal minutes, samples or tokens is read from straight lines between the evaluations of a run."
)


def sections_of(table: Table, figure: Figure | None = None) -> list[Section]:
    """``figure``: the curves, if they can be drawn."""
    declared = table.declared.tree
    budget = ", ".join(f"{amount:g} {key}" for key, amount in declared["budget"].items())
    heading = Text(f"{budget} for each, seeds {', '.join(map(str, declared['seeds']))}.")
    blocks: list[Block] = [heading, Rows(["", *table.names], table.lines()), Text(NOTES), *map(Text, table.failures())]
    found = [Section("Comparison", blocks)]
    if wins := win_lines(table):
        found.append(Section("Win rates", [Rows(WIN_HEADER, wins)]))
    if figure is not None:
        found.append(Section("Curves", [Plot("comparison", f"held-out {table.metric}, means over seeds", figure)]))
    differ = [
        [key, *(shown(of[n], 60) if n in of else "" for n in table.names)] for key, of in declared["differ"].items()
    ]
    return [*found, Section("In what the recipes differ", [Rows(["", *table.names], differ)])]


WIN_HEADER = ("by", "first", "other", "other won", "ties", "lost", "not judged", "win rate of other", "place preferred")


def win_lines(table: Table) -> list[list[str]]:
    """What judges, rewards and people said; ties count half a win, but in the people's share, which has none."""
    rows = []
    for one in read_wins(table.declared.root):
        counts = [str(one[name]) for name in ("wins", "ties", "losses", "failed")]
        place = one["first_place"]
        said = "" if place is None else f"first in {place:.0%}; {one['swayed']:.0%} swayed"
        rows.append([one["by"], one["first"], one["other"], *counts, _rate(one["rate"], one["low"], one["high"]), said])
    for tally in tallies(read_votes(table.declared.root)):
        share = tally.share
        rate = "-" if share is None else _rate(share.value, share.low, share.high)
        counts = [str(n) for n in (tally.second, tally.ties + tally.both_bad, tally.first, 0)]
        rows.append([f"{tally.voters} voters", *tally.models, *counts, rate, ""])
    return rows


def _rate(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else "")


def write_tables(table: Table) -> list[Path]:
    """The files, which replace earlier ones. Raises UserError: they cannot be written."""
    root, found = table.declared.root, table.as_json() | {"wins": read_wins(table.declared.root)}
    with writing(root):
        write_atomic(root / "table.md", as_markdown(f"Comparison of {', '.join(table.names)}", sections_of(table)))
        write_atomic(root / "table.csv", _csv(found["cells"]))
        write_json(root / "table.json", found)
    return [root / f"table.{kind}" for kind in ("md", "csv", "json")]


def _csv(cells: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def draw(table: Table) -> Figure | None:
    """Quality over minutes, samples and tokens: a line for each recipe, the mean over its seeds, each of them thin. None:
    there is no curve. Raises ImportError: there is no matplotlib."""
    import numpy as np
    from matplotlib.figure import Figure

    axes = list(table.ends)
    if not axes:
        return None
    figure = Figure(figsize=(4.2 * len(axes), 3.2), layout="constrained")
    for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False).flat, axes, strict=True):
        for number, name in enumerate(table.names):
            curves = [
                ([p.used[axis] for p in one.curve], [p.value for p in one.curve])
                for one in table.done(name)
                if one.curve
            ]
            if not curves:
                continue
            shared = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 80)
            for x, y in curves:
                panel.plot(x, y, color=f"C{number}", alpha=0.3, linewidth=0.7)
            panel.plot(shared, np.mean([np.interp(shared, *one) for one in curves], 0), color=f"C{number}", label=name)
        panel.set_xlabel(axis, fontsize=8)
        panel.grid(alpha=0.25, linewidth=0.5)
    figure.axes[0].set_ylabel(f"held-out {table.metric}", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    return figure
