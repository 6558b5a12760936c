"""Outcomes as a table in the terminal, and the table of docs/conformance.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.run import Outcome, Status

STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.DIFFERS: "yellow", Status.NOT_OFFERED: "dim"}
WIDEST = 60


def show(name: str, outcomes: Sequence[Outcome], console: Console) -> None:
    """One line per case; what was observed and expected where they differ."""
    table = Table(title=name, title_justify="left")
    for head in ("case", "status", "observed", "expected"):
        table.add_column(head, overflow="fold")
    for outcome in outcomes:
        wrong = outcome.status in (Status.FAIL, Status.DIFFERS)
        expected = brief(outcome.case.expected)
        table.add_row(
            Text.assemble(outcome.case.id, ("\n" + outcome.case.what if wrong else "", "dim")),
            Text(outcome.status, style=STYLES[outcome.status]),
            Text.assemble(brief(outcome.observed), ("\n" + outcome.note if outcome.note else "", "dim")),
            expected,
        )
    console.print(table)
    console.print(totals(outcomes))


def totals(outcomes: Sequence[Outcome]) -> str:
    """Such as ``80 pass, 0 fail, 2 differ by design, 10 not offered``."""
    count = Counter(outcome.status for outcome in outcomes)
    return (
        f"{count[Status.PASS]} pass, {count[Status.FAIL]} fail, {count[Status.DIFFERS]} differ by design, "
        f"{count[Status.NOT_OFFERED]} not offered"
    )


def brief(value: Any) -> str:
    """A short text for an answer: numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        text = ", ".join(f"{name} {brief(item)}" for name, item in value.items())
    elif isinstance(value, list | tuple):
        text = (" or " if _choices(value) else ", ").join(map(brief, value))
        text = text if _choices(value) else f"[{text}]"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _choices(value: Sequence[Any]) -> bool:
    return any(isinstance(item, str | Mapping) for item in value)


def markdown(columns: Mapping[str, Sequence[Outcome]]) -> str:
    """The table of all trainers, then what differs and why, as Markdown."""
    names = list(columns)
    lines = [f"| case | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines.append(f"| **all** | {' | '.join(totals(outcomes) for outcomes in columns.values())} |")
    for row in zip(*columns.values(), strict=True):
        what = row[0].case.what.replace("|", r"\|")
        lines.append(f"| `{row[0].case.id}`: {what} | {' | '.join(o.status for o in row)} |")
    for name, outcomes in columns.items():
        notes = [o for o in outcomes if o.status in (Status.FAIL, Status.DIFFERS)]
        if notes:
            lines += ["", f"Where {name} gives another answer:", ""]
            for o in notes:
                observed, expected = brief(o.observed), brief(o.case.expected)
                why = f" {o.note}" if o.note else ""
                lines.append(f"- `{o.case.id}` ({o.status}): observed {observed}; expected {expected}.{why}")
    return "\n".join(lines) + "\n"
