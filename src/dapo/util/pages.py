"""A report as files: ``report.html``, which needs nothing beside it, and ``report.md`` with ``plots/*.png``.

What comes from the run, such as its samples, may hold markup and script; it is shown as the text it is.
"""

from __future__ import annotations

import base64
import html
import io
import re
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.errors import UserError
from dapo.util.files import write_atomic
from dapo.util.terminal import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Code:
    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table. The first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure; ``name`` is its file's, ``caption`` is its text for those who cannot see it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample. ``prompt`` and ``response`` are the model's and the data's: they may hold anything."""

    title: str
    prompt: str
    response: str


Block = Text | Code | Rows | Plot | Answer


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: Sequence[Block]


LONGEST = 4000  # characters of a prompt or response; what is longer is cut in the middle

_STYLE = """
:root { color-scheme: light dark; --line: #d8dde3; --soft: #5b6672; --back: #fff; --text: #16202a; --box: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --line: #333d47; --soft: #9aa7b4; --back: #12171c; --text: #e6ebf0; --box: #1b2229 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
h2 { margin: 2.2rem 0 .6rem; padding-bottom: .2rem; font-size: 1.15rem; border-bottom: 1px solid var(--line) }
h3 { margin: 1.2rem 0 .3rem; font-size: .9rem; overflow-wrap: anywhere }
nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .9rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; min-width: 4rem }
thead th, thead + tbody td { overflow-wrap: break-word }
th, td:first-child, figcaption { color: var(--soft); font-weight: 500 }
pre { margin: .3rem 0; padding: .6rem .8rem; overflow: auto; max-height: 24rem; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--box); border-radius: 6px; font-size: .85rem }
figure { margin: .8rem 0; overflow-x: auto }
figure img { width: 100%; min-width: 44rem; background: #fff; border-radius: 6px }
""".strip()


def write_report(title: str, sections: Sequence[Section], output: Path) -> list[Path]:
    """Write both forms into the folder ``output``; an earlier report there is replaced. Returns the HTML file and
    the Markdown file. Raises UserError: the folder cannot be made or written to."""
    files: dict[Path, str | bytes] = {
        output / name: _shown(form(title, sections))
        for name, form in (("report.html", as_html), ("report.md", as_markdown))
    }
    pages = list(files)
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    files |= {output / "plots" / f"{plot.name}.png": _image(plot.figure, "png") for plot in plots}
    new = not output.exists()
    try:
        (output / "plots").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomic(path, content)
    except OSError as error:
        if new:  # nothing but parts of this report is in it
            shutil.rmtree(output, ignore_errors=True)
        raise UserError(f"--output: cannot write to {str(output)!r}: {error.strerror or error}") from None
    return pages


def _shown(page: str) -> str:
    """Without what a reader would obey: controls, marks of direction. Tabs, spaces and joined letters can be copied."""
    return re.sub(r"[^\n\t\u200c\u200d]", lambda c: c[0] if unicodedata.category(c[0]) == "Zs" else visible(c[0]), page)


def _image(figure: Figure, kind: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """One page that loads nothing, and that may not: its policy says so to the browser."""
    links = "".join(f'<a href="#{_anchor(s.title)}">{html.escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<section id="{_anchor(s.title)}"><h2>{html.escape(s.title)}</h2>{"".join(map(_html, s.blocks))}</section>\n'
        for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1><nav>{links}</nav>\n{body}</body></html>\n"
    )


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def _html(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{html.escape(block.text)}</p>"
        case Code():
            return f"<pre>{html.escape(block.text)}</pre>"
        case Rows():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
            rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in block.rows)
            head = f"<thead><tr>{head}</tr></thead>" if any(block.header) else ""
            return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
        case Plot():
            # as an image, and not as elements of the page: then nothing in it can be but drawn
            content = base64.b64encode(_image(block.figure, "svg")).decode()
            caption = html.escape(block.caption)
            image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{content}">'
            return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
        case Answer():
            prompt, response = (html.escape(_cut(text)) for text in (block.prompt, block.response))
            return f"<article><h3>{html.escape(block.title)}</h3><pre>{prompt}</pre><pre>{response}</pre></article>"


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """For a repository or an issue; plots are named as files in ``plots/``."""
    parts = [f"# {_inline(title)}"]
    for section in sections:
        parts += [f"## {section.title}", *map(_markdown, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Text():
            return _inline(block.text, keep="`")
        case Code():
            return _fenced(block.text)
        case Rows():
            lines = [block.header, ["---"] * len(block.header), *block.rows]
            return "\n".join(f"| {' | '.join(map(_inline, line))} |" for line in lines)
        case Plot():
            return f"![{_inline(block.caption)}](plots/{block.name}.png)"
        case Answer():
            texts = (_fenced(_cut(text)) for text in (block.prompt, block.response))
            return "\n\n".join([f"**{_inline(block.title)}**", *texts])


def _fenced(text: str) -> str:
    """In a fence that is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _inline(text: str, keep: str = "") -> str:
    """Text in which no character means anything, on one line."""
    if re.fullmatch(r"-+", text):
        return text
    marks = "".join(mark for mark in "\\`*_[]<>|" if mark not in keep)
    return re.sub(f"([{re.escape(marks)}])", r"\\\1", " ".join(text.split())) or " "
