"""Draws when sampling and learner were at work, from the spans.jsonl of runs, one above the other over equal seconds.

usage: python scripts/timeline.py STEP OUT.svg TITLE=RUN_FOLDER [TITLE=RUN_FOLDER ...]

STEP: drawn with the steps before and after it. The page draws the same of one run (Time & resources).
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from dapo.commands.ui.curves import lanes
from dapo.observe.run_folder import RunFolder
from dapo.observe.spans import read_spans

ROWS = {"waits for a batch": ("rollout",), "learns": ("prepare", "update", "sync"), "sampling": ("sampling",)}
"""Of learner and engine, each with the roles whose spans it shows."""
COLOURS = {"waits for a batch": "#d9d9d9", "learns": "#0072b2", "sampling": "#e69f00"}
WIDTH, LEFT, THICK = 900, 130, 18


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="12" font-family="sans-serif" {more}>{escape(words)}</text>'


def drawn(runs: dict[str, dict[str, list[list[float]]]]) -> str:
    """The SVG. ``runs``: title to spans by role, as :func:`lanes` gives them."""
    last = max(end for roles in runs.values() for spans in roles.values() for _, _, end in spans)
    found, y = [], 0.0

    def place(seconds: float) -> float:
        return LEFT + seconds / last * (WIDTH - LEFT - 10)

    for title, roles in runs.items():
        found.append(text(4, y + 16, title, 'font-weight="bold"'))
        for step, begin, _ in roles["rollout"]:
            found.append(text(place(begin), y + 16, f"step {step:.0f}", 'fill="#666"'))
        y += 22
        for name, parts in ROWS.items():
            found.append(text(LEFT - 6, y + 13, name, 'text-anchor="end"'))
            for step, begin, end in (span for role in parts for span in roles.get(role, ())):
                width, pale = max(place(end) - place(begin), 0.8), "" if step % 2 else ' opacity="0.6"'
                shape = f'x="{place(begin):.1f}" y="{y}" width="{width:.1f}" height="{THICK - 4}"'
                found.append(f'<rect {shape} fill="{COLOURS[name]}"{pale}/>')
            y += THICK
        y += 10
    found += [text(place(last * n / 4), y + 10, f"{last * n / 4:.1f} s", 'text-anchor="middle"') for n in range(4)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 18:.0f}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *found, "</svg>\n"])


if __name__ == "__main__":
    step, out, *named = sys.argv[1:]
    folders = {title: RunFolder(Path(root)) for title, _, root in (one.rpartition("=") for one in named)}
    Path(out).write_text(drawn({title: lanes(read_spans(one.spans, int(step))) for title, one in folders.items()}))
